"""The audio adapter on four real architectures at a small size: contract, alignment, batching, sharing, frozen towers."""

import dataclasses

import numpy as np
import pytest
import torch

from audio.media import AudioClip
from audio.tiny import TinySize, build_tiny
from mmrl.checkpoint import policy_checksum
from mmrl.config import validate
from mmrl.errors import ConfigError
from mmrl.generation import collate_prompts, completion_log_probs
from mmrl.sampling import rollout_seeds
from mmrl.testing import check_adapter

NAMES = ["tiny-qwen2-audio", "tiny-qwen2.5-omni", "tiny-qwen3-omni", "tiny-voxtral"]
SECONDS = [0.2, 30.0, 1.005]


@pytest.fixture(scope="module")
def long_dirs(tmp_path_factory):
    """Models with windows of 30 s, as the released ones have."""
    dirs = {}
    for name in ("tiny-qwen2-audio", "tiny-voxtral"):
        dirs[name] = tmp_path_factory.mktemp(name)
        build_tiny(
            name, dirs[name], ["How many beeps?"] * 20, size=TinySize(window_seconds=30, audio_hidden_size=16, audio_layers=1)
        )
    return dirs


def gap(log_probs, batch):
    return float(((log_probs.detach() - batch.old_log_probs) * batch.loss_mask).abs().max())


def without_sharing(adapter):
    return dataclasses.replace(adapter, rollout_config=adapter.rollout_config.model_copy(update={"share_prefix": False}))


@pytest.mark.parametrize("name", NAMES)
def test_the_contract_holds(name, make_adapter):
    check_adapter(make_adapter(name), num_tasks=2, group_size=3)


@pytest.mark.parametrize(
    "policy",
    [{"lora": {"rank": 4}}, {"freeze_tower": True}, {"freeze_tower": True, "train_projection": True},
     {"freeze_tower": True, "lora": {"rank": 4}}],
    ids=["lora", "frozen", "frozen_but_projection", "frozen_lora"],
)  # fmt: skip
@pytest.mark.parametrize("name", ["tiny-qwen2.5-omni"])
def test_the_contract_holds_however_much_trains(name, policy, make_adapter):
    check_adapter(make_adapter(name, policy=policy), num_tasks=2, group_size=2)


@pytest.mark.parametrize("name", NAMES)
def test_clips_from_a_fifth_of_a_second_to_thirty_give_the_same_alone_and_together(
    name, make_adapter, loud_policy, long_dirs, tone, task
):
    adapter = make_adapter(str(long_dirs.get(name, name)), rollout={"max_new_tokens": 4})
    policy = loud_policy(adapter)
    tasks = [task(tone(seconds, 200 + 70 * i), "beeps?" * i, name=str(i)) for i, seconds in enumerate(SECONDS)]
    tasks.append(task("no clip at all"))
    seeds = rollout_seeds(0, 0, 0, 2 * len(tasks))
    together = adapter.rollout(policy, tasks, group_size=2, seeds=seeds)
    with torch.no_grad():
        assert gap(adapter.forward(policy, together).log_probs, together) < 2e-5
        assert gap(without_sharing(adapter).forward(policy, together).log_probs, together) < 2e-5
    for row, single in enumerate(tasks):
        alone = adapter.rollout(policy, [single], group_size=2, seeds=seeds[2 * row : 2 * row + 2])
        kept = together.select(torch.tensor([2 * row, 2 * row + 1]))
        torch.testing.assert_close(alone.old_log_probs, kept.old_log_probs, atol=2e-5, rtol=0)


@pytest.mark.parametrize("name", NAMES)
def test_sound_changes_what_is_said_and_the_gradient_reaches_the_tower_alike_with_and_without_sharing(
    name, make_adapter, loud_policy, tone, task
):
    adapter = make_adapter(name)
    policy = loud_policy(adapter)
    tasks = [task(tone(0.5, 300), "?"), task(tone(1.3, 1200), "?")]
    batch = adapter.rollout(policy, tasks, group_size=3, seeds=rollout_seeds(0, 0, 0, 6))
    swapped = dataclasses.replace(batch.inputs, prompts=batch.inputs.prompts[::-1])
    with torch.no_grad():
        assert gap(adapter.forward(policy, dataclasses.replace(batch, inputs=swapped)).log_probs, batch) > 0.01
    gradients = []
    for chosen in (adapter, without_sharing(adapter)):
        policy.zero_grad()
        log_probs = chosen.forward(policy, batch).log_probs
        (log_probs * torch.linspace(-1, 1, log_probs.numel()).view_as(log_probs)).sum().backward()
        gradients.append({n: p.grad.clone() for n, p in policy.named_parameters() if p.grad is not None})
    assert gradients[0].keys() == gradients[1].keys()
    assert any("audio_tower" in n and float(grad.abs().max()) > 0 for n, grad in gradients[0].items())
    largest = max(float(grad.abs().max()) for grad in gradients[0].values())
    for n, grad in gradients[0].items():
        assert float((grad - gradients[1][n]).abs().max()) < 1e-4 * largest, n


def test_the_tower_runs_on_one_clip_per_group_in_rollouts_and_in_the_update(make_adapter, tone, task):
    adapter = make_adapter("tiny-qwen2.5-omni")
    policy = adapter.build_policy()
    seen = []
    policy.audio_tower.register_forward_pre_hook(
        lambda tower, args, options: seen.append(options["feature_lens"].tolist()), with_kwargs=True
    )
    tasks = [task(tone(0.5), "a"), task(tone(0.8), "b"), task(tone(0.3), "c")]
    batch = adapter.rollout(policy, tasks, group_size=8, seeds=rollout_seeds(0, 0, 0, 24))
    adapter.forward(policy, batch)
    assert seen == [[50, 80, 30]] * 2


@pytest.mark.parametrize("name", NAMES)
def test_a_frozen_tower_runs_once_per_clip_and_gives_what_a_running_one_gives(name, make_adapter, tone, task):
    frozen, running = make_adapter(name, policy={"freeze_tower": True}), make_adapter(name)
    policy = frozen.build_policy()
    calls = []
    policy.audio_tower.register_forward_hook(lambda *_: calls.append(1))
    tasks = [task(tone(0.5), "a"), task("b"), task(tone(0.3), "c", tone(1.1, 700))]
    seeds = rollout_seeds(0, 0, 0, 6)
    batch = frozen.rollout(policy, tasks, group_size=2, seeds=seeds)
    for _ in range(2):
        log_probs = frozen.forward(policy, batch).log_probs
    assert len(calls) == 1 and gap(log_probs, batch) < 1e-5
    log_probs.sum().backward()
    assert all(weights.grad is None for tower in frozen._towers(policy) for weights in tower.parameters())
    expected = running.rollout(policy, tasks, group_size=2, seeds=seeds)
    torch.testing.assert_close(expected.old_log_probs, batch.old_log_probs, atol=1e-5, rtol=0)


def test_a_projection_can_train_while_its_tower_is_frozen(make_adapter, tone, task):
    for name, projection in [("tiny-qwen2.5-omni", "audio_tower.proj."), ("tiny-qwen2-audio", "multi_modal_projector.")]:
        adapter = make_adapter(name, policy={"freeze_tower": True, "train_projection": True})
        policy = adapter.build_policy()
        batch = adapter.rollout(policy, [task(tone(0.5), "a")], group_size=2, seeds=rollout_seeds(0, 0, 0, 2))
        adapter.forward(policy, batch).log_probs.sum().backward()
        trained = [
            n for n, p in policy.named_parameters() if p.grad is not None and n.startswith(("audio_tower", "multi_modal"))
        ]
        assert trained and all(n.startswith(projection) for n in trained)


def test_adapters_of_low_rank_leave_a_frozen_tower_alone(make_adapter):
    def in_tower(policy):
        weights = make_adapter("tiny-qwen2.5-omni", policy=policy).build_policy().named_parameters()
        return [name for name, parameter in weights if parameter.requires_grad and ("audio_tower" in name or "visual" in name)]

    assert in_tower({"lora": {"rank": 4}}) and not in_tower({"lora": {"rank": 4}, "freeze_tower": True})


def test_training_the_projection_makes_sense_only_with_a_frozen_tower_and_whole_weights(make_config):
    with pytest.raises(ConfigError, match="train_projection says what still trains"):
        make_config(policy={"train_projection": True})
    with pytest.raises(ConfigError, match="drop one"):
        make_config(policy={"train_projection": True, "freeze_tower": True, "lora": {"rank": 4}})


def test_features_are_interleaved_over_a_group_and_tiling_them_would_go_unnoticed(make_adapter, loud_policy, tone, task):
    """The trap of the input formulas: with 2 clips and 3 rollouts each, tiled features give the right total of tokens."""
    adapter = make_adapter("tiny-qwen2.5-omni")
    policy = loud_policy(adapter)
    tasks = [task(tone(2.0, 300), "?"), task(tone(5.0, 1200), "?")]
    batch = adapter.rollout(policy, tasks, group_size=3, seeds=rollout_seeds(0, 0, 0, 6))
    plain = collate_prompts([batch.inputs.prompts[i] for i in batch.inputs.prompt_index.tolist()], 0, policy.device)
    assert plain["feature_attention_mask"].sum(dim=1).tolist() == [200] * 3 + [500] * 3
    inputs = collate_prompts(batch.inputs.prompts, 0, policy.device)
    tiled = {**plain, **{key: inputs[key].repeat(3, *[1] * (inputs[key].ndim - 1)) for key in inputs if "feature" in key}}
    with torch.no_grad():
        right, wrong = (policy(**tensors).logits[:, -1].log_softmax(-1) for tensors in (plain, tiled))  # neither raises
        first, _ = completion_log_probs(
            policy, batch.inputs.prompts, batch.inputs.prompt_index, batch.inputs.tokens[:, :1], batch.loss_mask[:, :1],
            pad_id=adapter.pad_id,
        )  # fmt: skip
    picked = [logits.gather(1, batch.inputs.tokens[:, :1])[:, 0] for logits in (right, wrong)]
    torch.testing.assert_close(first[:, 0], picked[0], atol=2e-5, rtol=0)
    assert int(((first[:, 0] - picked[1]).abs() > 1e-3).sum()) == 4  # of six rows


def test_media_tokens_are_never_sampled_even_when_the_policy_wants_them(make_adapter, tone, task):
    for name in ("tiny-qwen2.5-omni", "tiny-voxtral"):
        adapter = make_adapter(name)
        policy = adapter.build_policy()
        processor = adapter.frontend.processor
        ids = [processor.tokenizer.convert_tokens_to_ids(processor.audio_token)]
        ids += [i for token in ("audio_bos_token", "image_token", "vision_bos_token") if hasattr(processor, token)
                for i in [processor.tokenizer.convert_tokens_to_ids(getattr(processor, token))]]  # fmt: skip
        head = policy.get_output_embeddings()
        original = head.forward
        bias = torch.zeros(head.weight.shape[0]).index_fill(0, torch.tensor(ids), 50.0)
        head.forward = lambda hidden, original=original, bias=bias: original(hidden) + bias
        batch = adapter.rollout(policy, [task(tone(0.3), "a")], group_size=4, seeds=rollout_seeds(0, 0, 0, 4))
        assert not torch.isin(batch.inputs.tokens[batch.loss_mask], torch.tensor(ids)).any()
        assert gap(adapter.forward(policy, batch).log_probs, batch) < 1e-5


def test_a_saved_thinker_loads_with_its_class_alone(make_adapter, tmp_path):
    from transformers import AutoProcessor, Qwen2_5OmniThinkerForConditionalGeneration

    adapter = make_adapter("tiny-qwen2.5-omni")
    policy = adapter.build_policy()
    adapter.save_policy(policy, tmp_path)
    assert policy_checksum(Qwen2_5OmniThinkerForConditionalGeneration.from_pretrained(tmp_path)) == policy_checksum(policy)
    assert type(AutoProcessor.from_pretrained(tmp_path)).__name__ == "Qwen2_5OmniProcessor"
    again = make_adapter(str(tmp_path))
    assert policy_checksum(again.build_policy()) == policy_checksum(policy)


def test_samples_show_the_question_and_play_the_clip(make_adapter, tone, task):
    adapter = make_adapter()
    policy = adapter.build_policy()
    batch = adapter.rollout(policy, [task(tone(0.5), "what?")], group_size=1, seeds=rollout_seeds(0, 0, 0, 1))
    sample = adapter.describe(batch, 0)
    assert sample.prompt == "user: <audio>what?" and sample.reference == "1"
    assert [item.kind for item in sample.media] == ["audio"] and sample.media[0].data.startswith(b"RIFF")


def test_the_built_in_tasks_run_through_the_adapter(make_adapter):
    adapter = make_adapter()
    policy, source = adapter.build_policy(), adapter.task_source("train")
    batch = adapter.rollout(policy, [source[0], source[1]], group_size=2, seeds=rollout_seeds(0, 0, 0, 4))
    assert gap(adapter.forward(policy, batch).log_probs, batch) < 1e-5
    assert {"accuracy", "accuracy_letter", "rubrics", "overthink"} <= set(adapter.reward_terms)


def test_configs_are_checked_without_loading_anything(make_config):
    from audio.config import AudioRunConfig

    with pytest.raises(ConfigError, match="min_seconds"):
        make_config(rollout={"min_seconds": 5, "max_seconds": 1})
    tree = make_config().model_dump()
    with pytest.raises(ConfigError, match="train_projektion"):
        validate({**tree, "policy": {"path": "x", "train_projektion": True}}, AudioRunConfig, "test")


def test_arrays_that_are_not_float32_clips_still_align(make_adapter, task):
    adapter = make_adapter()
    policy = adapter.build_policy()
    clip = AudioClip(np.sin(np.arange(22_050) / 30), 44_100)  # float64, another rate
    batch = adapter.rollout(policy, [task(clip, "?")], group_size=2, seeds=rollout_seeds(0, 0, 0, 2))
    assert gap(adapter.forward(policy, batch).log_probs, batch) < 1e-5
