"""The vision adapter on real architectures at a small size: contract, alignment, media, batching, files."""

import dataclasses
from pathlib import Path

import pytest
import torch
from PIL import Image

from mmrl.chat import ChatTask
from mmrl.checkpoint import policy_checksum
from mmrl.config import validate
from mmrl.errors import CheckpointError, ConfigError, DataError
from mmrl.sampling import rollout_seeds
from mmrl.testing import check_adapter
from vision.adapter import build_adapter
from vision.config import VisionRunConfig


def run_config(**sections):
    tree = {
        "modality": "vision", "name": "test", "rewards": {"accuracy": 1.0}, "trainer": {"num_steps": 1},
        "policy": {"path": "tiny-qwen2.5-vl"}, "tasks": {"name": "digits"}, "rollout": {"max_new_tokens": 6},
    }  # fmt: skip
    merged = {key: {**tree.get(key, {}), **value} if isinstance(value, dict) else value for key, value in sections.items()}
    return validate({**tree, **merged}, VisionRunConfig, "test")


@pytest.fixture(scope="module")
def adapter():
    return build_adapter(run_config())


@pytest.fixture(scope="module")
def policy(adapter):
    return adapter.build_policy()


def picture(color, size=(56, 56)):
    return Image.new("RGB", size, color)


def task(*parts, name="t"):
    content = [{"type": "text", "text": part} if isinstance(part, str) else {"type": "image", "image": part} for part in parts]
    return ChatTask(id=name, messages=({"role": "user", "content": content},), answer="1")


@pytest.mark.parametrize("policy_section", [{}, {"lora": {"rank": 4}}, {"freeze_tower": True}], ids=["full", "lora", "frozen"])
def test_the_contract_holds(policy_section):
    check_adapter(build_adapter(run_config(policy=policy_section)))


def test_the_contract_holds_without_prefix_sharing():
    check_adapter(build_adapter(run_config(rollout={"share_prefix": False})))


def test_rows_with_one_three_two_and_no_images_equal_each_row_alone(adapter, policy):
    tasks = [
        task(picture("red"), "Which digit is it?"),
        task(picture("red"), picture("blue", (84, 56)), "and", picture("white"), "?"),
        task("no picture at all"),
        task(picture("green"), "x" * 30, picture("black", (56, 112))),
    ]
    seeds = rollout_seeds(0, 0, 0, 8)
    together = adapter.rollout(policy, tasks, group_size=2, seeds=seeds)
    gradients = []
    for shared in (True, False):
        chosen = dataclasses.replace(adapter, rollout_config=adapter.rollout_config.model_copy(update={"share_prefix": shared}))
        policy.zero_grad()
        log_probs = chosen.forward(policy, together).log_probs
        torch.testing.assert_close(log_probs.detach(), together.old_log_probs, atol=5e-6, rtol=0)
        (log_probs * torch.linspace(-1, 1, log_probs.numel()).view_as(log_probs)).sum().backward()
        gradients.append(torch.cat([p.grad.flatten() for p in policy.parameters() if p.grad is not None]))
    torch.testing.assert_close(gradients[0], gradients[1], atol=1e-5, rtol=1e-4)
    for row, single in enumerate(tasks):
        alone = adapter.rollout(policy, [single], group_size=2, seeds=seeds[2 * row : 2 * row + 2])
        kept = together.select(torch.tensor([2 * row, 2 * row + 1]))
        torch.testing.assert_close(alone.old_log_probs, kept.old_log_probs, atol=5e-6, rtol=0)


def test_a_text_only_batch_after_images_is_not_led_astray_by_remembered_positions(adapter, policy):
    words = [task("only words"), task("more words than the other one has")]
    seeds = rollout_seeds(0, 0, 0, 4)
    before = adapter.rollout(policy, words, group_size=2, seeds=seeds)
    adapter.rollout(policy, [task(picture("red"), picture("red"), "?")], group_size=2, seeds=seeds[:2])
    after = adapter.rollout(policy, words, group_size=2, seeds=seeds)
    assert torch.equal(before.old_log_probs, after.old_log_probs)
    torch.testing.assert_close(adapter.forward(policy, after).log_probs.detach(), after.old_log_probs, atol=5e-6, rtol=0)


def test_the_image_processor_and_the_tower_run_once_per_step_on_one_image_per_group(adapter, policy, monkeypatch):
    calls = []
    process = type(adapter.frontend.processor.image_processor).__call__
    monkeypatch.setattr(
        type(adapter.frontend.processor.image_processor), "__call__",
        lambda self, images, *args, **kwargs: calls.append(len(images)) or process(self, images, *args, **kwargs),
    )  # fmt: skip
    grids = []
    visual = policy.model.visual
    handle = visual.register_forward_pre_hook(lambda module, args, kwargs: grids.append(len(kwargs["grid_thw"])),
                                              with_kwargs=True)  # fmt: skip
    tasks = [task(picture("red"), "a"), task(picture("blue"), "b"), task(picture("green"), "c")]
    batch = adapter.rollout(policy, tasks, group_size=8, seeds=rollout_seeds(0, 0, 0, 24))
    adapter.forward(policy, batch)
    handle.remove()
    assert calls == [3]  # three images, not twenty-four, and not again in the update
    assert grids == [3, 3]


def test_a_frozen_tower_holds_no_graph():
    adapter = build_adapter(run_config(policy={"freeze_tower": True}))
    policy = adapter.build_policy()
    seen = []
    policy.model.visual.register_forward_hook(lambda module, args, output: seen.append(output.pooler_output.requires_grad))
    batch = adapter.rollout(policy, [task(picture("red"), "a")], group_size=2, seeds=rollout_seeds(0, 0, 0, 2))
    seen.clear()
    adapter.forward(policy, batch).log_probs.sum().backward()
    assert seen == [False]
    assert all(parameter.grad is None for parameter in policy.model.visual.parameters())


def test_media_tokens_are_never_sampled_even_when_the_policy_wants_them(adapter):
    policy = adapter.build_policy()
    ids = [adapter.frontend.processor.image_token_id, adapter.frontend.processor.video_token_id]
    head = policy.get_output_embeddings()
    original = head.forward
    bias = torch.zeros(head.weight.shape[0]).index_fill(0, torch.tensor(ids), 50.0)
    head.forward = lambda hidden: original(hidden) + bias
    batch = adapter.rollout(policy, [task(picture("red"), "a")], group_size=8, seeds=rollout_seeds(0, 0, 0, 8))
    assert not torch.isin(batch.inputs.tokens[batch.loss_mask], torch.tensor(ids)).any()
    torch.testing.assert_close(adapter.forward(policy, batch).log_probs.detach(), batch.old_log_probs, atol=1e-5, rtol=0)


def test_banned_tokens_of_the_config_join_the_media_tokens():
    adapter = build_adapter(run_config(rollout={"banned_tokens": ["<think>"]}))
    think = adapter.frontend.processor.tokenizer.convert_tokens_to_ids("<think>")
    assert think in adapter.banned_ids and adapter.frontend.processor.image_token_id in adapter.banned_ids
    with pytest.raises(ConfigError, match="'<nothing>' is not a token"):
        build_adapter(run_config(rollout={"banned_tokens": ["<nothing>"]}))
    with pytest.raises(ConfigError, match="completions could never stop"):
        build_adapter(run_config(rollout={"banned_tokens": ["<|im_end|>"]}))


def test_text_that_spells_a_media_token_stays_text(adapter, policy):
    batch = adapter.rollout(policy, [task("see <|image_pad|>")], group_size=1, seeds=rollout_seeds(0, 0, 0, 1))
    ids = batch.inputs.prompts[0]["input_ids"]
    assert not (ids == adapter.frontend.processor.image_token_id).any()
    assert "see <|image_pad|>" in adapter.frontend.processor.tokenizer.decode(ids[0])


def test_a_prompt_over_the_limit_is_refused_and_at_the_limit_accepted(adapter, policy):
    prompt = adapter.frontend.encode([task(picture("red"), "a")])[0]
    length = prompt["input_ids"].shape[1]
    exact = build_adapter(run_config(rollout={"max_prompt_tokens": length}))
    exact.rollout(policy, [task(picture("red"), "a")], group_size=1, seeds=rollout_seeds(0, 0, 0, 1))
    short = build_adapter(run_config(rollout={"max_prompt_tokens": length - 1}))
    with pytest.raises(DataError, match=f"the prompt has {length} tokens, rollout.max_prompt_tokens is {length - 1}"):
        short.rollout(policy, [task(picture("red"), "a")], group_size=1, seeds=rollout_seeds(0, 0, 0, 1))


def test_training_uses_the_sampled_ids_even_when_they_do_not_survive_decoding(adapter, policy):
    batch = adapter.rollout(policy, [task("a")], group_size=40, seeds=rollout_seeds(0, 0, 0, 40))
    tokenizer = adapter.frontend.processor.tokenizer
    changed = [tuple(tokenizer(outcome.text)["input_ids"]) != outcome.token_ids for outcome in batch.outcomes]
    assert any(changed)  # a random policy writes broken UTF-8 and split merges
    for row, outcome in enumerate(batch.outcomes):
        assert tuple(batch.inputs.tokens[row][batch.loss_mask[row]].tolist()) == outcome.token_ids


def test_videos_at_different_rates_have_different_temporal_positions(adapter, policy):
    frames = [picture((40 * i, 0, 0)) for i in range(6)]
    slow, fast = (
        ChatTask(id=f"{fps}", messages=({"role": "user", "content": [{"type": "video", "video": {"video": frames, "fps": fps}},
                                                                      {"type": "text", "text": "what moves?"}]},))
        for fps in (0.5, 4.0)
    )  # fmt: skip
    encoded = adapter.frontend.encode([slow, fast])
    assert [float(prompt["second_per_grid_ts"][0]) for prompt in encoded] == [4.0, 0.5]
    seeds = rollout_seeds(0, 0, 0, 4)
    batch = adapter.rollout(policy, [slow, fast], group_size=2, seeds=seeds)
    torch.testing.assert_close(adapter.forward(policy, batch).log_probs.detach(), batch.old_log_probs, atol=5e-6, rtol=0)
    alone = adapter.rollout(policy, [fast], group_size=2, seeds=seeds[2:])
    kept = batch.select(torch.tensor([2, 3]))
    torch.testing.assert_close(alone.old_log_probs, kept.old_log_probs, atol=5e-6, rtol=0)


def test_saved_names_that_differ_from_module_names_still_load_exactly(adapter, tmp_path):
    policy, other = adapter.build_policy(), adapter.build_policy()
    with torch.no_grad():
        for parameter in policy.parameters():
            parameter.add_(torch.randn_like(parameter))
    adapter.save_policy(policy, tmp_path)
    assert policy_checksum(other) != policy_checksum(policy)
    adapter.load_policy(other, tmp_path)
    assert policy_checksum(other) == policy_checksum(policy)


def test_a_missing_tensor_is_named(adapter, policy, tmp_path):
    from safetensors.torch import load_file, save_file

    adapter.save_policy(policy, tmp_path)
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    lost = next(name for name in tensors if "mlp.up_proj" in name)
    del tensors[lost]
    save_file(tensors, file, metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match="missing keys"):
        adapter.load_policy(adapter.build_policy(), tmp_path)


def test_a_saved_policy_loads_with_transformers_alone(adapter, policy, tmp_path):
    from transformers import AutoModelForImageTextToText, AutoProcessor

    adapter.save_policy(policy, tmp_path)
    AutoProcessor.from_pretrained(tmp_path)
    loaded = AutoModelForImageTextToText.from_pretrained(tmp_path)
    assert policy_checksum(loaded) == policy_checksum(policy)
    assert Path(tmp_path, "chat_template.jinja").exists()


def test_samples_show_the_prompt_the_answer_and_the_images(adapter, policy):
    batch = adapter.rollout(policy, [task(picture("red"), "what?")], group_size=1, seeds=rollout_seeds(0, 0, 0, 1))
    sample = adapter.describe(batch, 0)
    assert sample.prompt == "user: <image>what?" and sample.reference == "1"
    assert sample.media[0].kind == "image" and sample.media[0].data.startswith(b"\x89PNG")


def test_decoding_fewer_rows_at_once_changes_nothing(adapter, policy):
    tasks = [task(picture("red"), "a"), task("b c d"), task(picture("blue"), picture("blue"), "e")]
    seeds = rollout_seeds(0, 0, 0, 6)
    whole = adapter.rollout(policy, tasks, group_size=2, seeds=seeds)
    narrow = build_adapter(run_config(rollout={"max_rows": 1}))
    parts = narrow.rollout(policy, tasks, group_size=2, seeds=seeds)
    assert torch.equal(whole.group_ids, parts.group_ids) and torch.equal(whole.inputs.tokens, parts.inputs.tokens)
    torch.testing.assert_close(whole.old_log_probs, parts.old_log_probs, atol=5e-6, rtol=0)
    torch.testing.assert_close(narrow.forward(policy, parts).log_probs.detach(), parts.old_log_probs, atol=5e-6, rtol=0)
