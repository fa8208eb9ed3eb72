"""Cases by their ids (M2, T1 to T4) on a real model, and what else needs one: controls, facts, forecast, replay."""

import dataclasses
import json

import pytest
import torch
from PIL import Image
from torch.profiler import ProfilerActivity, profile

from mmrl.chat import ChatTask, MediaFacts
from mmrl.config import validate
from mmrl.control import with_media
from mmrl.errors import ConfigError
from mmrl.replay_view import as_html, decision_rows, read_rollout
from mmrl.sampling import rollout_seeds
from mmrl.trainer import Trainer
from vision.adapter import build_adapter, check_without_weights
from vision.config import VisionRunConfig


def run_config(tmp_path="runs", **sections):
    tree = {
        "modality": "vision", "name": "cases", "output_dir": str(tmp_path), "rewards": {"accuracy": 1.0},
        "trainer": {"num_steps": 1}, "policy": {"path": "tiny-qwen2.5-vl"}, "tasks": {"name": "digits"},
        "rollout": {"max_new_tokens": 6}, "sampling": {"tasks_per_step": 2, "group_size": 4},
    }  # fmt: skip
    merged = {key: {**tree.get(key, {}), **value} if isinstance(value, dict) else value for key, value in sections.items()}
    return validate({**tree, **merged}, VisionRunConfig, "test")


@pytest.fixture(scope="module")
def adapter():
    return build_adapter(run_config())


@pytest.fixture(scope="module")
def policy(adapter):
    return adapter.build_policy()


def changed(adapter, **rollout):
    """The same adapter under other rollout settings."""
    return dataclasses.replace(adapter, rollout_config=adapter.rollout_config.model_copy(update=rollout))


def picture(color, size=(56, 56)):
    return Image.new("RGB", size, color)


def task(*parts, name="t"):
    content = [{"type": "text", "text": part} if isinstance(part, str) else {"type": "image", "image": part} for part in parts]
    return ChatTask(id=name, messages=({"role": "user", "content": content},), answer="1")


def wishing(policy, ids):
    """The policy with a head that would love to write ``ids``, as a context."""
    head = policy.get_output_embeddings()
    bias = torch.zeros(head.weight.shape[0]).index_fill(0, torch.tensor(sorted(ids)), 50.0)
    return head.register_forward_hook(lambda module, given, logits: logits + bias)


# M2: media ids and the user's own suppressed tokens have probability 0, in sampling and in log-probabilities alike.


def test_m2_media_tokens_and_the_users_own_are_banned_together(adapter, policy):
    processor = adapter.frontend.processor
    tokenizer = processor.tokenizer
    letter = tokenizer("e", add_special_tokens=False)["input_ids"][0]
    chosen = changed(adapter, banned_tokens=("<think>", 7, "e"))
    media = {processor.image_token_id, processor.video_token_id}
    banned = media | {tokenizer.convert_tokens_to_ids("<think>"), 7, letter}
    assert banned <= set(chosen.banned_ids) and set(adapter.banned_ids) < set(chosen.banned_ids)
    handle = wishing(policy, banned)
    try:
        batch = chosen.rollout(policy, [task(picture("red"), "a")], group_size=8, seeds=rollout_seeds(0, 0, 0, 8))
        again = chosen.forward(policy, batch).log_probs.detach()
    finally:
        handle.remove()
    assert not torch.isin(batch.inputs.tokens[batch.loss_mask], torch.tensor(sorted(banned))).any()
    torch.testing.assert_close(again, batch.old_log_probs, atol=1e-5, rtol=0)
    assert batch.old_log_probs.isfinite().all()


@pytest.mark.parametrize(
    ("token", "message"),
    [
        (10**6, "1000000 is not an id of"),
        (-1, "-1 is not an id of"),
        ("two words", r"'two words' is not a token of .*it takes"),
    ],
)
def test_m2_a_token_that_is_not_one_is_refused(adapter, token, message):
    with pytest.raises(ConfigError, match=message):
        changed(adapter, banned_tokens=(token,))


# T1: the ids that were sampled are the ids that are trained on, whatever text they make.


def test_t1_ids_that_do_not_survive_decoding_are_trained_as_sampled(adapter, policy):
    tokenizer = adapter.frontend.processor.tokenizer
    batch = adapter.rollout(policy, [task("a")], group_size=40, seeds=rollout_seeds(0, 0, 0, 40))
    split = [
        row for row, outcome in enumerate(batch.outcomes)
        if tuple(tokenizer(outcome.text, add_special_tokens=False)["input_ids"]) != outcome.token_ids
    ]  # fmt: skip
    assert split
    for row in split:
        assert tuple(batch.inputs.tokens[row][batch.loss_mask[row]].tolist()) == batch.outcomes[row].token_ids
    torch.testing.assert_close(adapter.forward(policy, batch).log_probs.detach(), batch.old_log_probs, atol=1e-5, rtol=0)


# T2: how a tokenizer pads does not matter, since prompts are padded here.


def test_t2_right_padding_in_the_tokenizer_changes_nothing(adapter, policy):
    tokenizer = adapter.frontend.processor.tokenizer
    tasks = [task("short"), task(picture("red"), "a much longer question than the other one has")]
    seeds = rollout_seeds(0, 0, 0, 4)
    side = tokenizer.padding_side
    try:
        found = []
        for tokenizer.padding_side in ("left", "right"):
            found.append(adapter.rollout(policy, tasks, group_size=2, seeds=seeds))
            alone = [
                adapter.rollout(policy, [one], group_size=2, seeds=seeds[2 * i : 2 * i + 2]) for i, one in enumerate(tasks)
            ]
            for i, single in enumerate(alone):
                kept = found[-1].select(torch.tensor([2 * i, 2 * i + 1]))
                torch.testing.assert_close(single.old_log_probs, kept.old_log_probs, atol=5e-6, rtol=0)
    finally:
        tokenizer.padding_side = side
    assert torch.equal(found[0].old_log_probs, found[1].old_log_probs)


# T3: a row does not depend on what it is batched with.


def test_t3_greedy_decoding_is_the_same_alone_and_in_a_batch_of_eight(adapter, policy):
    tasks = [task("x" * (1 + 3 * place), *([picture("red")] if place % 2 else []), name=str(place)) for place in range(8)]
    seeds = rollout_seeds(0, 0, 0, 8)
    together = adapter.rollout(policy, tasks, group_size=1, seeds=seeds, greedy=True)
    for row, one in enumerate(tasks):
        alone = adapter.rollout(policy, [one], group_size=1, seeds=seeds[:1], greedy=True)
        assert alone.outcomes[0].token_ids == together.outcomes[row].token_ids


# T4: a completion ends where it should, with the right mask and reason, however it ends.


def test_t4_a_stop_string_over_two_tokens_ends_the_completion_with_the_token_that_completes_it(adapter, policy):
    tokenizer = adapter.frontend.processor.tokenizer
    seeds = rollout_seeds(0, 0, 0, 12)
    free = adapter.rollout(policy, [task("a")], group_size=12, seeds=seeds)
    written = [[tokenizer.decode([index]) for index in outcome.token_ids] for outcome in free.outcomes]
    row, place = next(
        (row, place)
        for row, pieces in enumerate(written)
        for place in range(1, len(pieces) - 2)
        if all(piece.isascii() and piece.isprintable() and piece for piece in pieces[place : place + 2])
    )
    ids, pieces = free.outcomes[row].token_ids, written[row][place : place + 2]
    stop = pieces[0][-1] + pieces[1][0]  # the end of one token and the beginning of the next
    chosen = changed(adapter, stop_strings=(stop,))
    batch = chosen.rollout(policy, [task("a")], group_size=12, seeds=seeds)
    first = next(place for place in range(1, 7) if stop in tokenizer.decode(ids[:place]))
    assert batch.outcomes[row].token_ids == ids[:first]  # up to and with the token that completes it
    assert batch.stop_reasons[row] == "stop"
    assert int(batch.num_decisions[row]) == first
    for one, reason in zip(batch.outcomes, batch.stop_reasons):
        ended = stop in one.text or one.token_ids[-1] in adapter.end_ids
        assert (reason == "stop") == ended
    torch.testing.assert_close(chosen.forward(policy, batch).log_probs.detach(), batch.old_log_probs, atol=1e-5, rtol=0)


def test_t4_no_end_token_is_length_and_an_end_token_first_is_an_empty_completion(adapter, policy):
    batch = adapter.rollout(policy, [task("a")], group_size=20, seeds=rollout_seeds(0, 0, 0, 20))
    full = [row for row, reason in enumerate(batch.stop_reasons) if reason == "length"]
    assert full and all(int(batch.num_decisions[row]) == 6 for row in full)
    handle = wishing(policy, {adapter.end_ids[0]})
    try:
        empty = adapter.rollout(policy, [task("a")], group_size=3, seeds=rollout_seeds(0, 0, 0, 3))
        forward = adapter.forward(policy, empty).log_probs.detach()
    finally:
        handle.remove()
    assert [outcome.text for outcome in empty.outcomes] == ["", "", ""]
    assert empty.stop_reasons == ("stop",) * 3
    assert empty.num_decisions.tolist() == [1, 1, 1]  # the end token is a decision
    torch.testing.assert_close(forward, empty.old_log_probs, atol=1e-5, rtol=0)


# Controls and facts


def test_blank_media_have_the_size_of_the_real_ones_and_cost_as_many_tokens(adapter):
    real = task(picture("red", (84, 56)), picture("blue"), "?")
    frames = [picture((40 * i, 0, 0)) for i in range(4)]
    video = {"type": "video", "video": {"video": frames, "fps": 2.0}}
    filmed = ChatTask(id="v", messages=({"role": "user", "content": [video, {"type": "text", "text": "?"}]},))
    for one in (real, filmed):
        blank = with_media(one, adapter.blank_media(one))
        before, after = adapter.frontend.encode([one])[0], adapter.frontend.encode([blank])[0]
        assert torch.equal(before["input_ids"], after["input_ids"])
        pixels = "pixel_values" if one is real else "pixel_values_videos"
        assert not torch.equal(before[pixels], after[pixels])
        per_channel = after[pixels].view(len(after[pixels]), 3, -1)
        torch.testing.assert_close(per_channel, per_channel[:1, :, :1].expand_as(per_channel))


def test_rewards_are_told_sizes_scale_and_frame_times(adapter, policy):
    chosen = changed(adapter, media_facts=True)
    frames = [picture((40 * i, 0, 0)) for i in range(4)]
    content = [{"type": "video", "video": {"video": frames, "fps": 2.0}}, {"type": "text", "text": "?"}]
    tasks = [task(picture("red", (100, 60)), "?"), ChatTask(id="v", messages=({"role": "user", "content": content},))]
    batch = chosen.rollout(policy, tasks, group_size=2, seeds=rollout_seeds(0, 0, 0, 4))
    [image] = batch.outcomes[0].media
    assert (image.kind, image.original_size, image.size) == ("image", (100, 60), (112, 56))  # multiples of 28
    assert image.scale == (112 / 100, 56 / 60)
    [video] = batch.outcomes[2].media
    assert video.times == (0.0, 0.5, 1.0, 1.5) and video.seconds == 2.0
    assert batch.outcomes[1].media == (image,)
    assert isinstance(image, MediaFacts)
    assert adapter.rollout(policy, tasks[:1], group_size=1, seeds=rollout_seeds(0, 0, 0, 1)).outcomes[0].media == ()


# Forecast and replay


def varied(task, outcome):
    return float(sum(outcome.token_ids) % 3)


def test_media_tokens_count_in_the_budget_and_the_forecast_is_within_a_factor_of_two_of_the_measured_peak(tmp_path):
    config = run_config(
        tmp_path, tasks={"name": "digits", "kinds": ["sum"]}, sampling={"tasks_per_step": 4, "group_size": 8},
        rollout={"max_new_tokens": 32, "max_prompt_tokens": 33, "min_pixels": 784, "max_pixels": 8 * 784},
    )  # fmt: skip
    adapter = build_adapter(config)
    adapter.reward_terms = {"accuracy": varied}
    adapter.end_ids = ()  # completions of full length, as the forecast has them
    trainer = Trainer(config, adapter, cpu=True)
    trainer.check()  # moments exist from the first update on
    collected = trainer._collect()
    lengths = collected.batch.inputs.prompt_lengths
    images = (collected.batch.inputs.prompts[0]["input_ids"] == adapter.frontend.processor.image_token_id).sum()
    assert lengths.tolist() == [33] * 32 and int(images) == 8
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as measured:
        trainer.updater.update(collected)
    now = peak = 0
    for event in measured.profiler.kineto_results.events():
        if event.name() == "[memory]":
            now += event.nbytes()
            peak = max(peak, now)
    held = 3 * sum(parameter.numel() * 4 for parameter in trainer.policy.parameters())  # weights and moments, there before
    rows = dict(check_without_weights(config))
    number, unit = rows["memory: in all, about"].split()
    forecast = float(number) * {"MiB": 2**20, "GiB": 2**30}[unit]
    assert 0.5 < forecast / (peak + held) < 2.0
    assert "(32 media tokens)" in rows["one micro-batch"]


def test_a_step_of_a_real_model_is_replayed_with_its_tokens_and_media(tmp_path):
    config = run_config(
        tmp_path, metrics={"replay": True, "samples_every": 1}, trainer={"num_steps": 1, "parity": {"every": 1}},
        evaluation={"at_start": False, "num_tasks": 2},
    )  # fmt: skip
    adapter = build_adapter(config)
    adapter.reward_terms = {"accuracy": varied}
    Trainer(config, adapter, cpu=True).run()
    metrics = json.loads((config.run_dir / "metrics.jsonl").read_text().splitlines()[0])
    assert metrics["parity/over"] == 0.0 and metrics["parity/mean"] < 1e-4
    record = read_rollout(config.run_dir, 1, 3)
    names, rows = decision_rows(record)
    assert "id" in names and len(rows) == record["num_decisions"]
    assert all(isinstance(row[1], str) for row in rows)
    assert "data:image/png;base64," in as_html(record, config.run_dir)
