"""Awkward rows for a vision policy, by the ids of their cases (M1, M3 to M10, M13, T5, T6, D5): what a check says of them."""

import dataclasses
import io
import json
import unicodedata

import numpy as np
import pytest
import torch
from PIL import Image

from mmrl.chat import ChatTask
from mmrl.config import validate
from mmrl.data import DatasetConfig, read_tasks
from mmrl.data_check import check_dataset
from mmrl.data_files import RowError
from mmrl.language_check import LanguageChecker
from mmrl.sampling import rollout_seeds
from vision.adapter import build_adapter
from vision.config import VisionRunConfig

TREE = {
    "modality": "vision", "name": "test", "rewards": {"accuracy": 1.0}, "trainer": {"num_steps": 1},
    "policy": {"path": "tiny-qwen2.5-vl"}, "tasks": {"name": "digits"}, "rollout": {"max_new_tokens": 4},
}  # fmt: skip
IMAGE_TOKENS = 64
"""Of 224 x 224 pixels: 8 x 8 tokens of 28 x 28."""


def run_config(**sections):
    return validate({**TREE, **sections}, VisionRunConfig, "test")


@pytest.fixture(scope="module")
def adapter():
    return build_adapter(run_config())


@pytest.fixture(scope="module")
def policy(adapter):
    return adapter.build_policy()


def limited(adapter, **limits):
    """The adapter under other limits."""
    config = adapter.rollout_config.model_copy(update=limits)
    frontend = dataclasses.replace(adapter.frontend, config=config)
    return dataclasses.replace(adapter, rollout_config=config, frontend=frontend)


def write(folder, *rows):
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return DatasetConfig(path="rows.jsonl")


def check(folder, adapter, *rows, config=None):
    checker = LanguageChecker(config or run_config(), adapter)
    return check_dataset(write(folder, *rows), base_dir=folder, checker=checker).problems


def found(problems):
    return [(problem.row, problem.field, problem.reason) for problem in problems]


def save(folder, *names, size=(56, 56)):
    for name in names:
        Image.new("RGB", size, "red").save(folder / name)


def length(adapter, task):
    return adapter.frontend.encode([task])[0]["input_ids"].shape[1]


# M1: a prompt that is too long because of its media names the budget that would fit, and no span of media is ever cut.


@pytest.mark.parametrize("num_images", [1, 3])
def test_m1_an_image_over_the_prompt_limit_is_refused_with_the_budget_that_fits(tmp_path, adapter, num_images):
    save(tmp_path, "a.png", size=(224, 224))
    row = {"prompt": "<image>" * num_images + "?", "images": ["a.png"] * num_images, "answer": "1"}
    whole = length(adapter, read_tasks(write(tmp_path, row), base_dir=tmp_path)[0])
    limit = whole - num_images * (IMAGE_TOKENS - 40)  # room for 40 tokens an image
    [problem] = check(tmp_path, limited(adapter, max_prompt_tokens=limit), row)
    assert (problem.row, problem.field, problem.reason) == (1, "prompt", "prompt too long")
    assert f"the prompt has {whole} tokens, rollout.max_prompt_tokens is {limit}" in problem.detail

    budget = int(problem.detail.partition("rollout.max_pixels: ")[2].split()[0])
    assert check(tmp_path, limited(adapter, max_prompt_tokens=limit, max_pixels=budget), row) == []
    # 7 x 7 tokens are more than there is room for, so no budget of 49 tokens or more fits
    assert budget < 49 * 28 * 28
    assert len(check(tmp_path, limited(adapter, max_prompt_tokens=limit, max_pixels=49 * 28 * 28), row)) == 1


def test_m1_no_budget_is_named_where_the_text_alone_is_too_long(tmp_path, adapter):
    save(tmp_path, "a.png", size=(224, 224))
    row = {"prompt": "<image>" + "word " * 60, "image": "a.png", "answer": "1"}
    [problem] = check(tmp_path, limited(adapter, max_prompt_tokens=30), row)
    assert "shorten the text" in problem.detail and "max_pixels" not in problem.detail


# M3: text that spells any of a model's media tokens stays text, beside real media and without any.


SPELLED = "<|image_pad|> and <|vision_start|><|video_pad|><|vision_end|>, <|placeholder|> or <image>"


@pytest.mark.parametrize("num_images", [0, 1])
def test_m3_spelled_media_tokens_stay_text_and_slots_keep_their_places(tmp_path, adapter, policy, num_images):
    picture = [{"type": "image", "image": Image.new("RGB", (56, 56), "red")}] * num_images
    content = [{"type": "text", "text": f"is {SPELLED}"}, *picture, {"type": "text", "text": "<|image_pad|> this?"}]
    task = ChatTask(id="t", messages=({"role": "user", "content": content},), answer="1")
    [prompt] = adapter.frontend.encode([task])
    processor = adapter.frontend.processor
    ids = prompt["input_ids"][0]
    slots = (ids == processor.image_token_id).nonzero()[:, 0]
    assert len(slots) == 4 * num_images  # 56 x 56 pixels are 2 x 2 tokens
    assert not (ids == processor.video_token_id).any()
    vision_start = processor.tokenizer.convert_tokens_to_ids("<|vision_start|>")
    assert int((ids == vision_start).sum()) == num_images
    text = processor.tokenizer.decode(ids[[index for index in range(len(ids)) if index not in set(slots.tolist())]])
    between = "<|vision_start|><|vision_end|>" * num_images
    assert f"is {SPELLED}{between}<|image_pad|> this?" in text
    assert all(value.shape[1] == len(ids) for key, value in prompt.items() if key in ("attention_mask", "mm_token_type_ids"))

    plain = ChatTask(id="p", messages=({"role": "user", "content": [{"type": "text", "text": "plain"}]},))
    batch = adapter.rollout(policy, [plain, task], group_size=1, seeds=rollout_seeds(0, 0, 0, 2))
    torch.testing.assert_close(adapter.forward(policy, batch).log_probs.detach(), batch.old_log_probs, atol=5e-6, rtol=0)


def test_m3_a_check_takes_such_rows(tmp_path, adapter):
    save(tmp_path, "a.png")
    rows = [{"prompt": SPELLED, "answer": "1"}, {"prompt": f"<image> {SPELLED[:13]}", "image": "a.png", "answer": "1"}]
    assert check(tmp_path, adapter, *rows) == []


def test_m3_the_policys_own_processor_learns_no_token_from_it(adapter):
    size = len(adapter.frontend.processor.tokenizer)
    adapter.frontend.encode([ChatTask(id="t", messages=({"role": "user", "content": [{"type": "text", "text": SPELLED}]},))])
    assert len(adapter.frontend.processor.tokenizer) == size


# M4, M5, D5: what the reader refuses is in the report of a check beside what the processor refuses.


def test_m4_m5_d5_rows_that_cannot_be_read_are_all_in_one_report(tmp_path, adapter):
    save(tmp_path, "a.png")
    rows = [
        {"prompt": "<image><image>", "images": ["a.png"], "answer": "1"},
        {"prompt": "<image>", "images": ["a.png", "a.png"], "answer": "1"},
        {"prompt": "no tag", "images": ["a.png", "a.png"], "answer": "1"},
        {"prompt": "<image><image><image>", "images": ["a.png", "lost.png", "a.png"], "answer": "1"},
        {"prompt": "?", "answer": float("nan")},
        {"prompt": "?", "answer": ["1", "2"]},
        {"prompt": "?", "answer": ""},
        {"prompt": "?", "answer": "1", "id": "x"},
        {"prompt": "?", "answer": "1", "id": "x"},
    ]
    assert found(check(tmp_path, adapter, *rows)) == [
        (1, "images", "tags and media differ in number"),
        (2, "images", "tags and media differ in number"),
        (4, "images[1]", "missing file"),
        (5, "answer", "NaN answer"),
        (6, "answer", "wrong type"),
        (7, "answer", "empty answer"),
        (9, "id", "duplicate id"),
    ]


def test_d5_answers_are_missed_where_a_reward_reads_them(tmp_path, adapter):
    rows = [{"prompt": "a"}, {"prompt": "b"}]
    assert found(check(tmp_path, adapter, *rows)) == [(1, "answer", "empty answer"), (2, "answer", "empty answer")]
    assert check(tmp_path, adapter, *rows, config=run_config(rewards={"format": 1.0}, evaluation={"metric": "format"})) == []


def test_d5_a_column_that_a_reward_asks_for_is_missed_by_row(tmp_path, adapter, monkeypatch):
    (tmp_path / "my_rewards_of_cases.py").write_text("def level(task, outcome, *, level, hint=None):\n    return 1.0\n")
    monkeypatch.syspath_prepend(tmp_path)
    config = run_config(rewards={"accuracy": 1.0, "mine": {"function": "my_rewards_of_cases:level"}})
    rows = [{"prompt": "a", "answer": "1", "level": 3}, {"prompt": "b", "answer": "1", "lavel": 3}]
    [problem] = check(tmp_path, adapter, *rows, config=config)
    assert (problem.row, problem.field, problem.reason) == (2, "level", "missing reward column")
    assert "reward 'mine' asks for it; this row has lavel" in problem.detail


# M6, M7: rows with different numbers of media, or none, in one batch.


def test_m6_m7_batches_of_rows_with_and_without_images_have_the_loss_of_their_rows(tmp_path, adapter, policy):
    save(tmp_path, "a.png")
    save(tmp_path, "b.png", size=(84, 56))
    rows = [
        {"prompt": "one", "images": ["a.png"]},
        {"prompt": "none", "images": []},
        {"prompt": "three", "images": ["a.png", "b.png", "a.png"]},
        {"prompt": "null", "images": None},
        {"prompt": "no column"},
    ]
    tasks = list(read_tasks(write(tmp_path, *rows), base_dir=tmp_path))
    batch = adapter.rollout(policy, tasks, group_size=2, seeds=rollout_seeds(0, 0, 0, 2 * len(tasks)))

    def gradient(*row_sets):
        policy.zero_grad()
        for chosen in row_sets:
            part = batch.select(torch.tensor(chosen))
            log_probs = adapter.forward(policy, part).log_probs
            (log_probs * part.loss_mask[:, : log_probs.shape[1]]).sum().backward()
        return torch.cat([p.grad.flatten() for p in policy.parameters() if p.grad is not None])

    together = gradient(list(range(len(batch))))
    apart = gradient(*([row] for row in range(len(batch))))
    torch.testing.assert_close(together, apart, atol=2e-5, rtol=1e-4)


# M8, M9: what can be converted is, what cannot is named; through the run's own processor.


def test_m8_m9_pictures_of_every_kind_are_converted_or_refused_by_row(tmp_path, adapter):
    def put(name, image, **options):
        image.save(tmp_path / name, **options)

    grey = Image.fromarray(np.full((56, 56), 40_000, np.uint16))
    exif = Image.Exif()
    exif[0x0112] = 6
    put("wide.png", Image.new("RGB", (2048, 9)))
    put("dot.png", Image.new("RGB", (1, 1)))
    put("rgba.png", Image.new("RGBA", (56, 56), (255, 0, 0, 0)))
    put("palette.png", Image.new("P", (56, 56)))
    put("grey16.png", grey)
    put("cmyk.jpg", Image.new("CMYK", (56, 56)))
    put("turned.jpg", Image.new("RGB", (56, 28)), exif=exif)
    photo = io.BytesIO()
    Image.effect_noise((64, 64), 80).save(photo, format="JPEG")
    (tmp_path / "cut.jpg").write_bytes(photo.getvalue()[:-117])
    (tmp_path / "page.png").write_text("<html>not here</html>")
    (tmp_path / "empty.png").write_bytes(b"")
    names = [
        "wide.png", "dot.png", "rgba.png", "palette.png", "grey16.png", "cmyk.jpg", "turned.jpg", "cut.jpg", "page.png",
        "empty.png",
    ]  # fmt: skip
    problems = check(tmp_path, adapter, *({"prompt": "?", "image": name, "answer": "1"} for name in names))
    assert found(problems) == [
        (1, "images[0]", "aspect ratio over 200"),
        (8, "images[0]", "damaged image"),
        (9, "images[0]", "not an image"),
        (10, "images[0]", "empty file"),
    ]
    turned = adapter.frontend.open(ChatTask(id="t", messages=()), "image", str(tmp_path / "turned.jpg"))
    assert turned.height == 2 * turned.width


def test_m9_every_bad_medium_of_a_row_is_named(tmp_path, adapter):
    save(tmp_path, "a.png")
    for name in ("b.png", "c.png"):
        (tmp_path / name).write_bytes(b"")
    problems = check(tmp_path, adapter, {"prompt": "?", "images": ["a.png", "b.png", "c.png"], "answer": "1"})
    assert found(problems) == [(1, "images[1]", "empty file"), (1, "images[2]", "empty file")]


# M10: frames without a rate.


def test_m10_frames_without_a_rate_are_refused_unless_the_config_gives_one(tmp_path, adapter):
    save(tmp_path, "0.png", "1.png")
    frames = ["0.png", "1.png"]
    rows = [
        {"prompt": "?", "videos": [frames], "answer": "1"},
        {"prompt": "?", "videos": [{"video": frames, "fps": 1}], "answer": "1"},
    ]
    assert found(check(tmp_path, adapter, *rows)) == [(1, "videos[0]", "missing fps")]
    assert check(tmp_path, limited(adapter, source_fps=1.0), *rows) == []


# M13: a kind of medium that the model does not take.


def test_m13_a_sound_is_refused_with_what_a_vision_model_takes(tmp_path, adapter):
    save(tmp_path, "a.png")
    (tmp_path / "b.wav").write_bytes(b"RIFF")
    [problem] = check(tmp_path, adapter, {"prompt": "?", "image": "a.png", "audio": "b.wav", "answer": "1"})
    assert (problem.field, problem.reason) == ("audios[0]", "modality not supported")
    assert "takes images and videos" in problem.detail


# T5: the limit is the last length that is taken.


def test_t5_prompts_at_one_over_and_ten_times_over_the_limit(tmp_path, adapter):
    short, longer = ({"prompt": "x" * count, "answer": "1"} for count in (30, 31))
    limit, over = (length(adapter, read_tasks(write(tmp_path, row), base_dir=tmp_path)[0]) for row in (short, longer))
    assert over == limit + 1
    rows = [short, longer, {"prompt": "x" * 10 * limit, "answer": "1"}]
    problems = check(tmp_path, limited(adapter, max_prompt_tokens=limit), *rows)
    assert found(problems) == [(2, "prompt", "prompt too long"), (3, "prompt", "prompt too long")]
    with pytest.raises(RowError, match=r"^rows.jsonl:2: prompt: prompt too long"):
        limited(adapter, max_prompt_tokens=limit).encode([read_tasks(write(tmp_path, *rows), base_dir=tmp_path)[1]])


# T6: unusual text goes in or is refused by row.


def test_t6_unusual_text_is_encoded_whole_or_refused(tmp_path, adapter):
    texts = ["\u0645\u0631\u062d\u0628\u0627 \u202eabc\u202c", "e\u0301\u0323", "\U0001f469\u200d\U0001f680", "a\0b"]
    tokenizer = adapter.frontend.processor.tokenizer
    for text in texts:
        [prompt] = adapter.frontend.encode(
            [ChatTask(id="t", messages=({"role": "user", "content": [{"type": "text", "text": text}]},))]
        )
        assert unicodedata.normalize("NFC", text) in tokenizer.decode(prompt["input_ids"][0])
    rows = [*({"prompt": text, "answer": text} for text in texts), {"prompt": "x" * 1_000_000, "answer": "1"}]
    assert found(check(tmp_path, adapter, *rows)) == [(5, "prompt", "prompt too long")]
