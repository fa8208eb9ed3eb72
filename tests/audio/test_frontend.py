"""From sounds to tensors: token counts against the encoders, features against the processors, padding and neighbours."""

import numpy as np
import pytest
import torch
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st

from audio.families import FAMILIES, eighths, halved_thrice, halved_twice
from audio.media import AudioClip
from mmrl.errors import DataError

SECONDS = {0.5: 50, 1.0: 100, 1.005: 101, 3.333: 334, 7.3: 730, 10: 1000, 30: 3000}
HALVED_TWICE = {50: 12, 100: 25, 101: 25, 334: 83, 730: 182, 1000: 250, 3000: 750}
HALVED_THRICE = {50: 7, 100: 13, 101: 14, 334: 44, 730: 95, 1000: 130, 3000: 390}
EXACT = ["tiny-qwen2.5-omni", "tiny-qwen3-omni"]


def tokens(adapter, prompt):
    return int((prompt["input_ids"] == adapter.frontend.model_config.audio_token_id).sum())


def test_the_published_table_of_token_counts():
    assert {frames: halved_twice(frames) for frames in HALVED_TWICE} == HALVED_TWICE
    assert {frames: halved_thrice(frames) for frames in HALVED_THRICE} == HALVED_THRICE
    assert [halved_twice(frames) for frames in (1, 2, 3)] == [0, 0, 1]
    assert [halved_thrice(frames) for frames in (1, 2, 100, 200)] == [1, 1, 13, 26]  # floor division of -1, too
    assert eighths(3000) == 375


@pytest.mark.parametrize("name", ["tiny-qwen2.5-omni", "tiny-qwen3-omni"])
def test_counts_are_what_the_encoders_give_at_every_length(name, make_adapter):
    adapter = make_adapter(name)
    tower = adapter.build_policy().audio_tower
    for frames in [*range(3, 20), 99, 100, 101, 199, 200, 201, 334, 730, 1001]:
        features, length = torch.zeros(128, frames), torch.tensor([frames])
        with torch.no_grad():
            states = tower(features, feature_lens=length, aftercnn_lens=(length - 1) // 2 + 1).last_hidden_state
        assert len(states) == adapter.frontend.family.count_tokens(frames), frames


def test_counts_are_what_qwen2_audio_and_voxtral_encoders_give(make_adapter):
    tower = make_adapter("tiny-qwen2-audio").build_policy().audio_tower
    frames = torch.arange(1, 3001)
    expected = tower._get_feat_extract_output_lengths(frames)[1].clamp(min=0).tolist()
    assert [halved_twice(count) for count in frames.tolist()] == expected
    voxtral = make_adapter("tiny-voxtral").build_policy()
    with torch.no_grad():
        embeds = voxtral.get_audio_features(torch.zeros(3, 128, 400), return_dict=True).pooler_output
    assert len(embeds) == eighths(3 * 400)


@pytest.mark.parametrize("name", ["tiny-qwen2-audio", *EXACT])
def test_prompts_are_those_of_the_models_own_processor(name, make_adapter, tone, task):
    adapter = make_adapter(name)
    processor, clip = adapter.frontend.processor, tone(1.005)
    [prompt] = adapter.frontend.encode([task(clip, "How many beeps?")])
    padded = np.pad(clip.samples, (0, -len(clip.samples) % 160))
    # A longer neighbour: Qwen3-Omni's processor mirrors the end of a batch's longest clip into the frames at its end.
    texts = [adapter.frontend._text(task(clip, "How many beeps?")), adapter.frontend._text(task(clip, "and"))]
    expected = processor(
        text=texts,
        audio=[padded, tone(4).samples],
        sampling_rate=16_000,
        return_tensors="pt",
        padding=True,
        padding_side="right",
    )
    length = prompt["input_ids"].shape[1]
    frames = int(prompt["feature_attention_mask"].sum())
    assert frames == int(expected["feature_attention_mask"][0].sum()) == -(-len(clip.samples) // 160)
    assert torch.equal(prompt["input_ids"][0], expected["input_ids"][0][:length])
    torch.testing.assert_close(
        prompt["input_features"][0, :, :frames], expected["input_features"][0, :, :frames], atol=1e-5, rtol=0
    )


def test_only_models_whose_encoder_wants_a_whole_window_get_one(make_adapter, tone, task):
    shapes = {}
    for name in ("tiny-qwen2-audio", "tiny-qwen2.5-omni", "tiny-qwen3-omni", "tiny-voxtral"):
        [prompt] = make_adapter(name).frontend.encode([task(tone(1.003), "?")])
        shapes[name] = tuple(prompt["input_features"].shape)
    assert shapes == {
        "tiny-qwen2-audio": (1, 128, 400), "tiny-qwen2.5-omni": (1, 128, 101), "tiny-qwen3-omni": (1, 128, 101),
        "tiny-voxtral": (1, 128, 400),
    }  # fmt: skip


def test_voxtral_hears_long_clips_in_windows(make_adapter, tone, task):
    adapter = make_adapter("tiny-voxtral")
    [prompt] = adapter.frontend.encode([task(tone(9.5), "?")])
    assert prompt["input_features"].shape == (3, 128, 400) and tokens(adapter, prompt) == 150


@pytest.fixture(scope="module")
def exact_frontends(make_adapter):
    return [make_adapter(name).frontend for name in EXACT]


@settings(max_examples=15, deadline=None)
@given(lengths=st.lists(st.integers(1_600, 20_000), min_size=2, max_size=3))
def test_a_clip_never_depends_on_its_neighbours(lengths, exact_frontends, task):
    noise = np.random.default_rng(0).uniform(-0.5, 0.5, 20_000).astype(np.float32)
    tasks = [task(AudioClip(noise[:length], 16_000), "?") for length in lengths]
    for frontend in exact_frontends:
        together, alone = frontend.encode(tasks), [frontend.encode([one])[0] for one in tasks]
        for left, right in zip(together, alone):
            assert all(torch.equal(left[key], right[key]) for key in left)


def test_two_clips_in_one_prompt_keep_their_own_lengths(make_adapter, tone, task):
    for name in EXACT:
        adapter = make_adapter(name)
        [prompt] = adapter.frontend.encode([task(tone(0.5), "and", tone(1.2, 900), "?")])
        count = adapter.frontend.family.count_tokens
        assert prompt["feature_attention_mask"].sum(dim=1).tolist() == [50, 120]
        assert tokens(adapter, prompt) == count(50) + count(120)


def test_text_that_spells_a_placeholder_stays_text(make_adapter, task):
    for name, token in [("tiny-qwen2-audio", "<|AUDIO|>"), ("tiny-qwen3-omni", "<|audio_pad|>"), ("tiny-voxtral", "[AUDIO]")]:
        tokenizer = make_adapter(name).frontend.processor.tokenizer
        [prompt] = make_adapter(name).frontend.encode([task(f"see {token}")])
        assert not (prompt["input_ids"] == tokenizer.convert_tokens_to_ids(token)).any()
        assert f"see {token}" in tokenizer.decode(prompt["input_ids"][0])


def test_a_kind_that_the_model_does_not_take_is_refused_with_those_it_takes(make_adapter, task):
    for name in ("tiny-qwen2-audio", "tiny-voxtral"):
        with pytest.raises(DataError, match=r"rows\.jsonl:3: image: modality not supported: holds image; .* takes audio\."):
            make_adapter(name).frontend.encode([task({"type": "image", "image": b""}, "?", source="rows.jsonl:3")])


def test_a_template_that_writes_too_many_placeholders_is_noticed_before_training(make_adapter, tone, task):
    adapter = make_adapter("tiny-qwen2-audio")
    processor = adapter.frontend.processor
    processor.chat_template = processor.chat_template.replace("<|AUDIO|>", "")
    with pytest.raises(DataError, match=r"the prompt has 0 <\|AUDIO\|> tokens, its media give 25"):
        adapter.frontend.encode([task(tone(1.0), "?")])


def test_a_clip_without_any_token_is_refused_by_row(make_adapter, tone, task):
    adapter = make_adapter("tiny-qwen2-audio", rollout={"min_seconds": 0.001})
    with pytest.raises(
        DataError, match=r"rows\.jsonl:7: audio: clip without tokens: a clip of 0\.020 s gives the model no token"
    ):
        adapter.frontend.encode([task(tone(0.02), "?", source="rows.jsonl:7")])


def test_the_models_own_window_limits_clips_whatever_the_config_says(make_adapter, tone, task):
    adapter = make_adapter("tiny-qwen2-audio", rollout={"max_seconds": 30})
    with pytest.raises(DataError, match=r"t: audio: clip too long: AudioClip: 4\.50 s, the limit is 4 s"):
        adapter.frontend.encode([task(tone(4.5), "?")])
    cutting = make_adapter("tiny-qwen2-audio", rollout={"max_seconds": 30, "too_long": "cut"})
    [prompt] = cutting.frontend.encode([task(tone(4.5), "?")])
    assert int(prompt["feature_attention_mask"].sum()) == 400
    [shown] = cutting.frontend.media(task(tone(4.5), "?"))
    assert shown.caption == "the first 4.0 s (longer clips are cut there)"


def test_reports_get_the_clip_as_a_wav_file(make_adapter, tone, task):
    [shown] = make_adapter().frontend.media(task(tone(0.5), "?"))
    assert (shown.kind, shown.suffix, shown.caption) == ("audio", ".wav", "0.5 s") and shown.data[:4] == b"RIFF"


def test_every_family_names_classes_that_exist():
    for family in FAMILIES.values():
        assert hasattr(transformers, family.processor_class) and hasattr(transformers, family.model_class)
