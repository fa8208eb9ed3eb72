"""Checkpoints: tiny directories, thinkers inside full Omni checkpoints, released shapes, and the shipped configs."""

import json
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from audio.adapter import check_without_weights
from audio.config import BUILTIN_POLICIES, ToneKind
from audio.families import FAMILIES, build_model_config
from audio.known_models import KNOWN_MODELS, model_config
from audio.tasks import KINDS
from audio.tiny import BUILDERS
from mmrl.checkpoint import policy_checksum
from mmrl.cli import load_run
from mmrl.errors import CheckpointError, ConfigError

CONFIGS = Path(__file__).parents[2] / "configs" / "audio"
NAMES = list(BUILDERS)


@pytest.mark.parametrize("name", NAMES)
def test_tiny_models_are_small_ordinary_directories(name, tiny_dirs, make_adapter):
    adapter = make_adapter(name)
    policy = adapter.build_policy()
    assert sum(weights.numel() for weights in policy.parameters()) < 1_200_000
    assert type(policy).__name__ == adapter.frontend.family.model_class
    assert type(transformers.AutoProcessor.from_pretrained(tiny_dirs[name])) is type(adapter.frontend.processor)
    tokenizer = adapter.frontend.processor.tokenizer
    for text in ("<think>a b</think><answer>3</answer>", "unseen \u00e9\u4e2d text"):
        assert tokenizer.decode(tokenizer(text)["input_ids"], skip_special_tokens=True) == text


def test_the_thinker_is_read_from_a_full_checkpoint_and_the_talker_left_there(tiny_dirs, make_adapter, tmp_path):
    small = tiny_dirs["tiny-qwen2.5-omni"]
    for file in small.iterdir():
        if file.name not in ("config.json", "model.safetensors"):
            (tmp_path / file.name).write_bytes(file.read_bytes())
    thinker = json.loads((small / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "qwen2_5_omni", "thinker_config": thinker}))
    weights = {f"thinker.{name}": tensor for name, tensor in load_file(small / "model.safetensors").items()}
    others = {"talker.model.norm.weight": torch.ones(3), "token2wav.code2wav.x": torch.ones(3)}
    save_file({**weights, **others}, tmp_path / "model.safetensors", metadata={"format": "pt"})
    policy = make_adapter(str(tmp_path)).build_policy()
    assert policy_checksum(policy) == policy_checksum(make_adapter("tiny-qwen2.5-omni").build_policy())
    save_file(dict(list(weights.items())[1:]), tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match="1 missing keys"):
        make_adapter(str(tmp_path)).build_policy()


def test_a_model_that_does_not_hear_is_refused_with_those_that_do(tmp_path, make_adapter):
    (tmp_path / "config.json").write_text('{"model_type": "qwen2"}')
    with pytest.raises(ConfigError, match="a model of type 'qwen2'; audio policies are: qwen2_audio, "):
        make_adapter(str(tmp_path))


def test_released_shapes_have_the_sizes_that_are_published():
    tokens = {name: build_model_config(tree, name).audio_token_id for name, tree in KNOWN_MODELS.items()}
    assert set(tokens.values()) == {151646, 151675, 24}
    with torch.device("meta"):
        config = model_config("Qwen/Qwen2-Audio-7B-Instruct")
        model = transformers.Qwen2AudioForConditionalGeneration._from_config(config)
    assert round(sum(weights.numel() for weights in model.parameters()) / 1e9, 1) == 8.4
    with pytest.raises(ConfigError, match="neither on this machine nor a known checkpoint"):
        model_config("/nowhere/at/all")


@pytest.mark.parametrize("name", ["r1_aqa_qwen2_audio_7b", "audiorubrics_qwen25_omni_7b", "avqa_qwen25_omni_3b"])
def test_shipped_configs_of_released_models_are_planned_without_weights(name):
    config = load_run(CONFIGS / f"{name}.yaml")
    rows = dict(check_without_weights(config))
    assert rows["longest clip"].endswith(f"tokens, then {config.rollout.too_long}")
    assert rows["clip of 10 s"] == "250 tokens" and "GiB" in rows["memory: in all, about"]
    short = config.model_copy(update={"rollout": config.rollout.model_copy(update={"max_prompt_tokens": 40})})
    with pytest.raises(ConfigError, match=r"rollout\.max_prompt_tokens is 40; a clip of"):
        check_without_weights(short)


def test_shipped_configs_reward_only_terms_that_exist(make_adapter):
    known = make_adapter().reward_terms
    for file in CONFIGS.glob("*.yaml"):
        assert set(load_run(file).rewards) <= set(known), file.name


def test_the_config_offers_every_kind_of_question():
    assert set(ToneKind.__args__) == set(KINDS)
    assert set(BUILDERS) < set(BUILTIN_POLICIES) and {"voxtral", "qwen3_omni_moe"} < set(FAMILIES)
