"""Awkward rows for an audio policy, by the ids of their cases (M1, M3, M5, M8, M9, M11 to M13, T5, T6): what a check says."""

import dataclasses
import json
import unicodedata

import numpy as np
import pytest
import soundfile
import torch
from PIL import Image

from mmrl.data import DatasetConfig, read_tasks
from mmrl.data_check import check_dataset
from mmrl.language_check import LanguageChecker

OMNI, WINDOWED = "tiny-qwen2.5-omni", "tiny-qwen2-audio"


@pytest.fixture(scope="module")
def adapters(make_adapter):
    return {name: make_adapter(name) for name in (OMNI, WINDOWED)}


def limited(adapter, **limits):
    """The adapter under other limits."""
    config = adapter.rollout_config.model_copy(update=limits)
    return dataclasses.replace(adapter, rollout_config=config, frontend=dataclasses.replace(adapter.frontend, config=config))


def write(folder, *rows):
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return DatasetConfig(path="rows.jsonl")


@pytest.fixture
def check(tmp_path, make_config):
    def run(adapter, *rows):
        checker = LanguageChecker(make_config(), adapter)
        return check_dataset(write(tmp_path, *rows), base_dir=tmp_path, checker=checker).problems

    return run


def found(problems):
    return [(problem.row, problem.field, problem.reason) for problem in problems]


def beep(path, seconds, rate=16_000, channels=1, **options):
    times = np.arange(round(seconds * rate)) / rate
    wave = (0.4 * np.sin(2 * np.pi * 440 * times)).astype(np.float32)
    soundfile.write(path, np.stack([wave] * channels, axis=1) if channels > 1 else wave, rate, **options)
    return path.name


# M1, T5: a prompt that is too long because of its clips says how long they may be.


@pytest.mark.parametrize("num_clips", [1, 2])
def test_m1_a_clip_over_the_prompt_limit_is_refused_with_the_seconds_that_fit(tmp_path, check, adapters, num_clips):
    adapter = adapters[OMNI]
    name = beep(tmp_path / "a.wav", 3.0)
    row = {"prompt": "?", "audios": [name] * num_clips, "answer": "1"}
    task = read_tasks(write(tmp_path, row), base_dir=tmp_path)[0]
    whole = adapter.frontend.encode([task])[0]["input_ids"].shape[1]
    assert check(limited(adapter, max_prompt_tokens=whole), row) == []
    limit = whole - 40 * num_clips  # 25 tokens a second, so room for about 1.4 s of each
    [problem] = check(limited(adapter, max_prompt_tokens=limit), row)
    assert (problem.field, problem.reason) == ("prompt", "prompt too long")
    seconds = float(problem.detail.partition("rollout.max_seconds: ")[2].split()[0])
    assert 1.3 < seconds < 1.5
    fitting = {"max_prompt_tokens": limit, "too_long": "cut"}
    assert check(limited(adapter, **fitting, max_seconds=seconds), row) == []
    assert found(check(limited(adapter, **fitting, max_seconds=seconds + 0.1), row)) == [(1, "prompt", "prompt too long")]


# M3: text that spells media tokens stays text.


@pytest.mark.parametrize("name", [OMNI, WINDOWED])
@pytest.mark.parametrize("heard", [False, True])
def test_m3_spelled_media_tokens_stay_text(adapters, tone, task, name, heard):
    adapter = adapters[name]
    processor = adapter.frontend.processor
    spelled = f"what is {processor.audio_token}{processor.audio_bos_token} or <|audio_placeholder|>?"
    [prompt] = adapter.frontend.encode([task(*([tone(0.5)] if heard else []), spelled)])
    ids = prompt["input_ids"][0]
    media = ids == processor.tokenizer.convert_tokens_to_ids(processor.audio_token)
    [bare] = adapter.frontend.encode([task(*([tone(0.5)] if heard else []), "what is it?")])
    expected = int((bare["input_ids"] == processor.tokenizer.convert_tokens_to_ids(processor.audio_token)).sum())
    assert int(media.sum()) == expected and (expected > 0) == heard
    assert spelled in processor.tokenizer.decode(ids[~media])


# M5, M9, M11: sounds that cannot be used, and those that are converted.


def test_m5_m9_m11_sounds_are_converted_or_refused_by_row(tmp_path, check, adapters):
    beep(tmp_path / "8k.wav", 0.5, rate=8_000)
    beep(tmp_path / "stereo.wav", 0.5, rate=44_100, channels=2, subtype="FLOAT")
    beep(tmp_path / "int16.wav", 0.5, subtype="PCM_16")
    beep(tmp_path / "none.wav", 0.0)
    beep(tmp_path / "short.wav", 0.02)
    beep(tmp_path / "long.wav", 31.0, rate=8_000)
    (tmp_path / "cut.wav").write_bytes((tmp_path / "int16.wav").read_bytes()[:-117])
    (tmp_path / "page.wav").write_text("<html>not here</html>")
    (tmp_path / "empty.wav").write_bytes(b"")
    names = ["8k", "stereo", "int16", "none", "short", "long", "cut", "page", "empty", "lost"]
    problems = check(adapters[OMNI], *({"prompt": "?", "audio": f"{name}.wav", "answer": "1"} for name in names))
    assert found(problems) == [
        (4, "audios[0]", "empty clip"),
        (5, "audios[0]", "clip too short"),
        (6, "audios[0]", "clip too long"),
        (7, "audios[0]", "damaged sound"),
        (8, "audios[0]", "not a readable sound"),
        (9, "audios[0]", "empty file"),
        (10, "audio[0]", "missing file"),
    ]


def test_m11_a_models_own_window_is_its_limit_and_cutting_has_to_be_asked_for(tmp_path, check, adapters):
    row = {"prompt": "?", "audio": beep(tmp_path / "a.wav", 6.0), "answer": "1"}
    assert check(adapters[OMNI], row) == []
    [problem] = check(adapters[WINDOWED], row)  # hears up to 4 s
    assert problem.reason == "clip too long" and "6.00 s, the limit is 4 s" in problem.detail
    assert check(limited(adapters[WINDOWED], too_long="cut"), row) == []


# M12: neighbours do not matter.


def test_m12_the_tokens_of_a_clip_do_not_depend_on_its_neighbours(tmp_path, adapters):
    names = [beep(tmp_path / f"{number}.wav", seconds) for number, seconds in enumerate((0.3, 1.7, 0.9))]
    tasks = list(read_tasks(write(tmp_path, *({"prompt": "?", "audio": name} for name in names)), base_dir=tmp_path))
    for adapter in adapters.values():
        together = adapter.frontend.encode(tasks)
        for task, prompt in zip(tasks, together):
            [alone] = adapter.frontend.encode([task])
            assert torch.equal(alone["input_ids"], prompt["input_ids"])


# M8: pictures of models that also see are opened by the same rules as those of vision policies.


def test_m8_pictures_beside_sounds_are_converted_or_refused_by_row(tmp_path, check, adapters):
    Image.new("RGB", (2048, 9)).save(tmp_path / "wide.png")
    Image.new("RGBA", (56, 56), (255, 0, 0, 0)).save(tmp_path / "clear.png")
    Image.fromarray(np.full((56, 56), 40_000, np.uint16)).save(tmp_path / "grey16.png")
    (tmp_path / "empty.png").write_bytes(b"")
    names = ["wide", "clear", "grey16", "empty"]
    rows = [{"prompt": "?", "image": f"{name}.png", "answer": "1"} for name in names]
    assert found(check(adapters[OMNI], *rows)) == [
        (1, "images[0]", "aspect ratio over 200"),
        (4, "images[0]", "empty file"),
    ]
    frontend, nothing = adapters[OMNI].frontend, read_tasks(write(tmp_path, {"prompt": "?"}), base_dir=tmp_path)[0]
    assert frontend.open(nothing, "image", str(tmp_path / "clear.png")).getpixel((0, 0)) == (255, 255, 255)
    assert frontend.open(nothing, "image", str(tmp_path / "grey16.png")).getpixel((0, 0)) == (156, 156, 156)


def test_m10_frames_of_other_sizes_or_without_a_rate_are_refused(tmp_path, check, adapters):
    Image.new("RGB", (56, 56)).save(tmp_path / "a.png")
    Image.new("RGB", (84, 56)).save(tmp_path / "b.png")
    videos = [{"video": ["a.png", "b.png"], "fps": 1}, ["a.png", "a.png"], {"video": ["a.png", "a.png"], "fps": 0}]
    rows = [{"prompt": "?", "videos": [video], "answer": "1"} for video in videos]
    assert found(check(adapters[OMNI], *rows)) == [
        (1, "videos[0]", "frames differ in size"),
        (2, "videos[0]", "missing fps"),
        (3, "videos[0]", "bad fps"),
    ]


# M13: a kind of medium that the model does not take.


def test_m13_a_picture_is_refused_with_what_an_audio_model_takes(tmp_path, check, adapters):
    Image.new("RGB", (56, 56)).save(tmp_path / "a.png")
    row = {"prompt": "?", "image": "a.png", "audio": beep(tmp_path / "b.wav", 0.5), "answer": "1"}
    assert check(adapters[OMNI], row) == []
    [problem] = check(adapters[WINDOWED], row)
    assert (problem.field, problem.reason) == ("images[0]", "modality not supported")
    assert "Qwen2Audio takes audio" in problem.detail


# T6: unusual text.


def test_t6_unusual_text_is_encoded_whole_or_refused(adapters, check, task):
    texts = ["\u0645\u0631\u062d\u0628\u0627 \u202eabc\u202c", "e\u0301\u0323", "\U0001f469\u200d\U0001f680", "a\0b"]
    tokenizer = adapters[OMNI].frontend.processor.tokenizer
    for text in texts:
        assert unicodedata.normalize("NFC", text) in tokenizer.decode(
            adapters[OMNI].frontend.encode([task(text)])[0]["input_ids"][0]
        )
    rows = [*({"prompt": text, "answer": text} for text in texts), {"prompt": "x" * 100_000, "answer": "1"}]
    assert found(check(adapters[OMNI], *rows)) == [(5, "prompt", "prompt too long")]
