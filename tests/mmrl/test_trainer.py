"""`mmrl.trainer`: the same run twice, interrupted in every way, and stopped by what goes wrong."""

import json
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest
import torch
from accelerate.state import AcceleratorState
from torch import nn

from mmrl import trainer as trainer_module
from mmrl.algorithms import PRESETS
from mmrl.checkpoint import latest_checkpoint, policy_checksum, read_checkpoint
from mmrl.errors import CheckpointError, ConfigError, NumericsError, RewardError
from mmrl.testing import BanditAdapter, share_of_right_arms
from mmrl.trainer import Callbacks, Trainer

ROOT = Path(__file__).parents[2]
EVERYTHING = {
    "algorithm": {"name": "dapo", "kl_coef": 0.05, "entropy_coef": 0.01, "max_refills": 2},
    "sampling": {"tasks_per_step": 4, "group_size": 3},
    "optimizer": {"learning_rate": 0.05, "schedule": "cosine", "warmup_steps": 3, "weight_decay": 0.1},
    "trainer": {"num_steps": 6, "epochs_per_batch": 2, "minibatches": 2},
    "evaluation": {"every": 2},
}
"""Every part of a run that has state: refills, moments, schedule, reference policy, several optimizer steps per batch."""


@dataclass(kw_only=True)
class CountingAdapter(BanditAdapter):
    """Counts calls, and lets a test spoil `forward`."""

    calls: list = field(default_factory=list)
    spoil: object = None

    def build_policy(self):
        self.calls.append("build_policy")
        return super().build_policy()

    def forward(self, policy, batch, needs=frozenset()):
        self.calls.append("forward")
        result = super().forward(policy, batch, needs)
        return self.spoil(batch, result) if self.spoil else result


class Crash(Exception):
    """An end that nobody prepared for."""


def train(config, adapter=None, *, callbacks=None, **options):
    """Run; the trainer, afterwards."""
    trainer = Trainer(config, adapter or BanditAdapter(), callbacks=callbacks or Callbacks(), cpu=True)
    trainer.run(**options)
    return trainer


def at_step(number, action):
    """Callbacks that do ``action`` once, after train step ``number``."""
    return Callbacks(on_step=lambda step, metrics, seconds: action() if step == number else None)


def crash():
    raise Crash


def send(number):
    return lambda: os.kill(os.getpid(), number)


def metrics_of(config):
    return [json.loads(line) for line in (config.run_dir / "metrics.jsonl").read_text().splitlines()]


def uninterrupted(config, files_of, adapter=None):
    """Files of a run that nothing disturbs; the folder is free again afterwards."""
    train(config, adapter)
    files = files_of(config.run_dir)
    shutil.rmtree(config.run_dir)
    return files


def assert_same_files(actual, expected):
    assert sorted(actual) == sorted(expected)
    assert [name for name in expected if actual[name] != expected[name]] == []


# The same run twice


def test_the_same_seed_gives_the_same_bytes_and_another_does_not(bandit_config, files_of):
    first = uninterrupted(bandit_config(**EVERYTHING), files_of)
    assert_same_files(uninterrupted(bandit_config(**EVERYTHING), files_of), first)
    assert {"config.yaml", "metrics.jsonl", "eval/step_000000.json", "eval/step_000006.json", "samples/step_000002.jsonl",
            "checkpoints/step_000006/policy/model.safetensors", "checkpoints/latest"} <= first.keys()  # fmt: skip
    other = uninterrupted(bandit_config(**EVERYTHING, seed=1), files_of)
    for name in ("metrics.jsonl", "checkpoints/step_000006/policy/model.safetensors"):
        assert other[name] != first[name]
    samplers = [Trainer(bandit_config(seed=seed), BanditAdapter(), cpu=True).sampler for seed in (0, 1)]
    assert samplers[0].next(8) != samplers[1].next(8)


def test_the_run_that_is_resumed_below_uses_everything_that_has_state(bandit_config):
    config = bandit_config(**EVERYTHING)
    trainer = train(config)
    assert trainer.sampler.position > 4 * 6  # dynamic selection drew replacements
    assert trainer.updater.optimizer_step == 4 * 6
    metrics = metrics_of(config)
    assert metrics[-1]["kl"] > 1e-4  # the reference policy has been left behind
    assert len({line["optimizer/learning_rate"] for line in metrics}) == 6
    assert read_checkpoint(latest_checkpoint(trainer.run_dir.checkpoints)).optimizer["weight.exp_avg"].abs().max() > 0


# Interrupted


@pytest.mark.parametrize("step", [1, 2, 3, 6])
def test_a_crashed_run_resumes_to_the_same_bytes(bandit_config, files_of, step):
    config = bandit_config(**EVERYTHING, checkpoint={"every": 2})
    expected = uninterrupted(config, files_of)
    with pytest.raises(Crash):
        train(config, callbacks=at_step(step, crash))
    train(config, resume=True)
    assert_same_files(files_of(config.run_dir), expected)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
@pytest.mark.parametrize("step", [1, 4, 6])
def test_a_signal_finishes_the_step_and_the_run_resumes_to_the_same_bytes(bandit_config, files_of, number, step):
    config = bandit_config(**EVERYTHING)
    expected = uninterrupted(config, files_of)
    notices, handler = [], signal.getsignal(number)
    callbacks = replace(at_step(step, send(number)), on_notice=notices.append)
    stopped = train(config, callbacks=callbacks)
    assert stopped.train_step == step
    assert latest_checkpoint(stopped.run_dir.checkpoints).name == f"step_00000{step}"
    assert notices == [f"{number.name}: stopped after step {step}; checkpoint written."]
    assert signal.getsignal(number) == handler
    train(config, resume=True)
    actual = files_of(config.run_dir)
    if step in (4, 6):  # the evaluation was put off, so this checkpoint does not know of it
        for name in ("trainer.json", "manifest.json"):
            del actual[f"checkpoints/step_00000{step}/{name}"], expected[f"checkpoints/step_00000{step}/{name}"]
    assert_same_files(actual, expected)


def test_a_signal_during_the_first_evaluation_or_in_the_middle_of_a_step_is_heard(bandit_config, files_of):
    config = bandit_config(**EVERYTHING)
    expected = uninterrupted(config, files_of)
    stopped = train(config, callbacks=Callbacks(on_evaluation=lambda step, result: send(signal.SIGTERM)()))
    assert stopped.train_step == 0

    calls = []

    def interrupting(task, outcome):
        calls.append(task)
        if len(calls) == 10:
            send(signal.SIGTERM)()
        return share_of_right_arms(task, outcome)

    stopped = train(config, BanditAdapter(reward_terms={"accuracy": interrupting}), resume=True)
    assert stopped.train_step == 1
    train(config, resume=True)
    assert_same_files(files_of(config.run_dir), expected)


def test_a_second_interrupt_ends_the_run_at_once_but_a_launcher_that_adds_sigterm_does_not(bandit_config):
    config = bandit_config()
    stopped = train(config, callbacks=at_step(2, lambda: [send(signal.SIGINT)(), send(signal.SIGTERM)()]))
    assert stopped.train_step == 2
    with pytest.raises(KeyboardInterrupt):
        train(config, resume=True, callbacks=at_step(3, lambda: [send(signal.SIGINT)(), send(signal.SIGINT)()]))
    assert latest_checkpoint(stopped.run_dir.checkpoints).name == "step_000002"


def kill_at_file_operation(number, directory):
    """Kill this process in front of the operation with this number on files below ``directory``; a list that counts them."""
    seen = []

    def watch(event, arguments):
        if event in ("open", "os.rename", "os.remove", "os.rmdir", "os.mkdir") and str(arguments[0]).startswith(str(directory)):
            seen.append(event)
            if len(seen) == number:
                os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(watch)
    return seen


@pytest.mark.parametrize("num_kills", [12, pytest.param(None, marks=pytest.mark.slow)])
def test_a_run_killed_in_front_of_any_file_operation_resumes_to_the_same_bytes(bandit_config, files_of, in_child, num_kills):
    config = bandit_config(**EVERYTHING | {"trainer": {"num_steps": 3, "epochs_per_batch": 2, "minibatches": 2}})
    config = config.model_copy(update={"checkpoint": config.checkpoint.model_copy(update={"keep_last": 1})})
    expected = uninterrupted(config, files_of)

    def count():
        seen = kill_at_file_operation(0, config.run_dir)
        train(config)
        (config.output_dir / "count").write_text(str(len(seen)))

    assert in_child(count) == 0
    total = int((config.output_dir / "count").read_text())
    assert total > 100
    for number in random.Random(0).sample(range(1, total + 1), num_kills or total):
        shutil.rmtree(config.run_dir)

        def killed(number=number):
            kill_at_file_operation(number, config.run_dir)
            train(config)

        assert in_child(killed) == -signal.SIGKILL
        assert in_child(lambda: train(config, resume=True) and 0) == 0
        assert_same_files(files_of(config.run_dir), expected)


def test_the_reference_of_a_resumed_run_is_the_initial_policy(bandit_config):
    config = bandit_config(algorithm={"name": "grpo", "kl_coef": 0.1})
    train(config, callbacks=at_step(3, send(signal.SIGTERM)))
    resumed = Trainer(config, BanditAdapter(), cpu=True)
    initial = policy_checksum(resumed.policy)
    with resumed.reference() as frozen:
        assert policy_checksum(frozen) == initial
    resumed.run(resume=True)
    assert policy_checksum(resumed.policy) != initial
    with resumed.reference() as frozen:
        assert policy_checksum(frozen) == initial


def test_resuming_a_finished_run_changes_nothing_and_more_steps_may_follow(bandit_config, files_of):
    config = bandit_config()
    train(config)
    before = files_of(config.run_dir)
    written = (config.run_dir / "checkpoints" / "step_000006").stat()
    train(config, resume=True)
    assert_same_files(files_of(config.run_dir), before)
    assert (config.run_dir / "checkpoints" / "step_000006").stat() == written  # nor is it written a second time
    longer = bandit_config(trainer={"num_steps": 8}, evaluation={"every": 4, "num_tasks": 6})
    assert train(longer, resume=True).train_step == 8
    assert [line["train_step"] for line in metrics_of(longer)] == list(range(1, 9))


def test_resuming_prunes_what_a_crash_kept_from_being_pruned(bandit_config, files_of):
    config = bandit_config(checkpoint={"keep_last": 1})
    train(config)
    before = files_of(config.run_dir)
    checkpoints = config.run_dir / "checkpoints"
    for name in ("step_000002", ".step_000003.partial", ".step_000001.removed.partial"):
        shutil.copytree(checkpoints / "step_000006", checkpoints / name)
    train(config, resume=True)
    assert_same_files(files_of(config.run_dir), before)


def test_resuming_with_another_config_lists_the_differences_and_leaves_the_folder_alone(bandit_config, files_of):
    config = bandit_config()
    train(config)
    before = files_of(config.run_dir)
    changed = bandit_config(optimizer={"learning_rate": 0.2}, sampling={"group_size": 8}, trainer={"num_steps": 9})
    with pytest.raises(CheckpointError, match="is from another config") as caught:
        train(changed, resume=True)
    assert "optimizer.learning_rate: 0.1 -> 0.2" in str(caught.value)
    assert "sampling.group_size: 4 -> 8" in str(caught.value)
    assert "num_steps" not in str(caught.value)
    assert_same_files(files_of(config.run_dir), before)


def test_resuming_from_an_older_checkpoint_repeats_what_came_after_it(bandit_config, files_of):
    config = bandit_config(checkpoint={"every": 2, "keep_last": 3})
    expected = uninterrupted(config, files_of)
    train(config)
    checkpoints = config.run_dir / "checkpoints"
    (checkpoints / "step_000006" / "policy" / "model.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"step_000006/policy/model.safetensors: the file is missing.*step_000004"):
        train(config, resume=True)
    train(config, resume=True, resume_from=checkpoints / "step_000004")
    assert_same_files(files_of(config.run_dir), expected)


def test_a_checkpoint_of_another_run_starts_a_new_one_when_configs_agree(bandit_config):
    first = bandit_config()
    train(first)
    second = bandit_config(name="second", trainer={"num_steps": 6})
    trainer = train(second, resume=True, resume_from=latest_checkpoint(first.run_dir / "checkpoints"))
    assert trainer.train_step == 6
    assert latest_checkpoint(second.run_dir / "checkpoints").name == "step_000006"


def test_weights_of_another_model_are_refused(bandit_config):
    config = bandit_config()
    train(config)
    with pytest.raises(CheckpointError, match="step_000006/policy: not this run's policy"):
        train(config, BanditAdapter(num_arms=6), resume=True)

    class Other(BanditAdapter):
        def load_policy(self, policy, directory):
            super().load_policy(policy, directory)
            policy.weight.data[0, 0] += 1

    with pytest.raises(CheckpointError, match="step_000006/policy: the loaded policy differs from the one that was saved"):
        train(config, Other(), resume=True)


# One run, one folder


def test_a_second_run_in_the_same_folder_is_refused_naming_the_first(bandit_config):
    config = bandit_config()
    refused = []

    def start_another():
        for options in ({}, {"resume": True}, {"overwrite": True}):
            with pytest.raises(ConfigError) as caught:
                train(config, **options)
            refused.append(str(caught.value))

    train(config, callbacks=at_step(3, start_another))
    owner = f"is in use by process {os.getpid()} on {socket.gethostname()}"
    assert len(refused) == 3
    assert all(owner in text for text in refused)
    assert len(metrics_of(config)) == 6


def test_an_existing_run_is_not_overwritten_unless_asked(bandit_config, files_of):
    config = bandit_config()
    expected = uninterrupted(config, files_of)
    train(config, callbacks=at_step(2, send(signal.SIGTERM)))
    (config.run_dir / "notes.txt").write_text("mine")
    for _ in range(2):  # the refusal frees the folder again
        with pytest.raises(ConfigError, match=r"already holds a run \(.*\); continue it with --resume, replace it with"):
            train(config)
    train(config, overwrite=True)
    assert (config.run_dir / "notes.txt").read_text() == "mine"
    (config.run_dir / "notes.txt").unlink()
    assert_same_files(files_of(config.run_dir), expected)


# Rewards


def test_a_reward_that_raises_stops_the_run_after_a_checkpoint(bandit_config, files_of):
    config = bandit_config(**EVERYTHING, checkpoint={"every": 100, "keep_last": 1})
    expected = uninterrupted(config, files_of)
    calls = []

    def fragile(task, outcome):
        calls.append(task)
        if len(calls) == 100:
            raise ZeroDivisionError("no such arm")
        return share_of_right_arms(task, outcome)

    with pytest.raises(RewardError) as caught:
        train(config, BanditAdapter(reward_terms={"accuracy": fragile}))
    saved = latest_checkpoint(config.run_dir / "checkpoints")
    state = read_checkpoint(saved).state
    assert 0 < state["train_step"] < 6
    task = calls[-1]
    assert f"reward 'accuracy' raised ZeroDivisionError on task '{task.id}': no such arm" in str(caught.value)
    assert f"Checkpoint of step {state['train_step']} written" in str(caught.value)
    record = json.loads((config.run_dir / "failure" / "reward.json").read_text())
    assert record["train_step"] == state["train_step"]
    assert any(line.startswith("rollout: [") for line in record["traceback"])
    assert any("in fragile" in line for line in record["traceback"])
    train(config, resume=True)  # with the reward mended
    assert_same_files(files_of(config.run_dir), expected)


def test_a_reward_that_cannot_be_used_is_rejected_before_the_policy_is_built(bandit_config):
    adapter = CountingAdapter()
    for rewards in ({"acuracy": 1.0}, {"accuracy": 1.0, "mine": {"function": "math:nothing"}}):
        with pytest.raises(ConfigError):
            Trainer(bandit_config(rewards=rewards), adapter, cpu=True)
    with pytest.raises(ConfigError, match=r"evaluation.metric is 'acc'; expected one of the run's rewards: accuracy"):
        Trainer(bandit_config(evaluation={"metric": "acc"}), adapter, cpu=True)
    assert adapter.calls == []


def test_rollouts_to_which_no_reward_applies_are_counted_out(bandit_config):
    def only_context_0(task, outcome):
        return share_of_right_arms(task, outcome) if task.context == 0 else None

    config = bandit_config(sampling={"order": "sequential"})
    train(config, BanditAdapter(reward_terms={"accuracy": only_context_0}))
    assert {line["rollout/unscored"] for line in metrics_of(config)} == {0.75}
    evaluation = json.loads((config.run_dir / "eval" / "step_000006.json").read_text())
    assert evaluation["overall"]["n"] == 3
    assert list(evaluation["domains"]) == ["context0"]


def test_a_constant_reward_pays_for_no_update_and_stops_the_run(bandit_config):
    adapter = CountingAdapter(reward_terms={"accuracy": lambda task, outcome: 0.7})
    config = bandit_config(trainer={"num_steps": 50, "max_constant_steps": 5})
    notices = []
    trainer = train(config, adapter, callbacks=Callbacks(on_notice=notices.append))
    assert adapter.calls == ["build_policy"]
    assert trainer.train_step == 5
    assert policy_checksum(trainer.policy) == policy_checksum(BanditAdapter().build_policy())
    assert notices == [
        "no group carried signal in 5 steps (trainer.max_constant_steps): stopped after step 5; checkpoint written."
    ]
    assert metrics_of(config)[-1]["groups/informative"] == 0.0


def test_a_run_that_stops_for_want_of_signal_is_evaluated_at_its_end(bandit_config):
    constant = BanditAdapter(reward_terms={"accuracy": lambda task, outcome: 0.7})
    config = bandit_config(trainer={"num_steps": 50, "max_constant_steps": 5}, evaluation={"every": 0, "at_start": False})
    steps = []
    callbacks = Callbacks(on_evaluation=lambda step, result: steps.append(step))
    trainer = train(config, constant, callbacks=callbacks)
    assert (trainer.train_step, steps) == (5, [5])
    assert trainer.best == {"mean": pytest.approx(0.7), "checkpoint": "step_000005"}


def test_constant_steps_are_counted_in_a_row_and_across_a_resumed_run(bandit_config):
    config = bandit_config(trainer={"num_steps": 50, "max_constant_steps": 5})
    constant = BanditAdapter(reward_terms={"accuracy": lambda task, outcome: 0.7})
    train(config, callbacks=at_step(2, send(signal.SIGTERM)))
    train(config, constant, resume=True, callbacks=at_step(5, send(signal.SIGTERM)))
    assert train(config, constant, resume=True).train_step == 7


def test_one_group_with_signal_starts_the_count_of_constant_steps_anew(bandit_config):
    calls = []

    def varied_in_step_3(task, outcome):
        calls.append(task)
        return 0.1 * len(calls) if 2 * 16 < len(calls) <= 2 * 16 + 4 else 0.7

    config = bandit_config(trainer={"num_steps": 50, "max_constant_steps": 3}, evaluation={"at_start": False})
    assert train(config, BanditAdapter(reward_terms={"accuracy": varied_in_step_3})).train_step == 6


# Numbers that are not finite


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_a_loss_that_is_not_finite_stops_the_run_naming_the_tasks(bandit_config, files_of, value):
    config = bandit_config(algorithm={"name": "grpo", "entropy_coef": 0.01}, checkpoint={"every": 2})
    expected = uninterrupted(config, files_of)

    def spoil(batch, result):
        bad = torch.tensor([task.id == "train/3" for task in batch.tasks])
        return replace(result, entropy=torch.where(bad[:, None], value, result.entropy))

    adapter = CountingAdapter(spoil=spoil)
    trainer = Trainer(config, adapter, cpu=True)
    with pytest.raises(NumericsError, match=r"tasks whose loss is not finite: train/3. This step was not taken") as caught:
        trainer.run()
    failed = trainer.train_step
    assert f"Details: {config.run_dir / 'failure' / 'numerics.json'}" in str(caught.value)
    assert json.loads((config.run_dir / "failure" / "numerics.json").read_text())["train_step"] == failed
    dumped = (config.run_dir / "samples" / f"step_{failed + 1:06d}.jsonl").read_text().splitlines()
    assert len(dumped) == 16
    assert any(json.loads(line)["task_id"] == "train/3" for line in dumped)
    assert all(bool(parameter.isfinite().all()) for parameter in trainer.policy.parameters())
    assert len(metrics_of(config)) == failed
    train(config, resume=True)
    assert_same_files(files_of(config.run_dir), expected)


def test_weights_are_as_before_a_loss_that_is_not_finite(bandit_config):
    def spoil(batch, result):
        return replace(result, log_probs=result.log_probs * torch.nan)

    trainer = Trainer(bandit_config(), CountingAdapter(spoil=spoil), cpu=True)
    before = policy_checksum(trainer.policy)
    with pytest.raises(NumericsError):
        trainer.run()
    assert policy_checksum(trainer.policy) == before


@pytest.mark.parametrize("algorithm", ["grpo", "gspo"])
@pytest.mark.parametrize("value", [100.0, -100.0, -torch.inf])
def test_an_absurd_ratio_on_one_decision_is_survived(bandit_config, algorithm, value):
    def spoil(batch, result):
        first = torch.zeros_like(batch.loss_mask)
        first[0, 0] = result.log_probs.requires_grad  # the policy, not the reference
        return replace(result, log_probs=torch.where(first, value, result.log_probs))

    config = bandit_config(algorithm={"name": algorithm, "kl_coef": 0.01})
    train(config, CountingAdapter(spoil=spoil))
    assert len(metrics_of(config)) == 6
    assert all(abs(number) < 1e12 for line in metrics_of(config) for number in line.values())


# What is kept


def test_the_best_checkpoint_and_the_last_ones_are_kept(bandit_config, monkeypatch):
    means = iter([0.99, 0.1, 0.5, 0.9, 0.3, 0.9, 0.2])  # at steps 0 to 6; step 0 is no checkpoint

    def pretend(*arguments, **options):
        return {"metric": "accuracy", "split": "eval", "domains": {}, "overall": {"mean": next(means), "n": 1}}

    monkeypatch.setattr(trainer_module, "evaluate", pretend)
    trainer = train(bandit_config(evaluation={"every": 1}, checkpoint={"every": 1, "keep_last": 2}))
    kept = sorted(path.name for path in trainer.run_dir.checkpoints.glob("step_*"))
    assert kept == ["step_000003", "step_000005", "step_000006"]
    assert trainer.best == {"mean": 0.9, "checkpoint": "step_000003"}


def test_evaluations_come_before_during_and_after_a_run_as_configured(bandit_config):
    def evaluated(**evaluation):
        return list(Trainer(bandit_config(evaluation=evaluation), BanditAdapter(), cpu=True).run(overwrite=True))

    assert evaluated() == [0, 6]
    assert evaluated(at_start=False) == [6]
    assert evaluated(every=4) == [0, 4, 6]
    assert evaluated(every=3) == [0, 3, 6]


def test_without_periodic_checkpoints_there_is_one_at_the_end(bandit_config):
    trainer = train(bandit_config(checkpoint={"every": 0}))
    assert [path.name for path in trainer.run_dir.checkpoints.glob("step_*")] == ["step_000006"]


def test_a_source_with_fewer_tasks_than_a_step_needs_wraps_with_a_notice(bandit_config):
    notices = []
    config = bandit_config(sampling={"tasks_per_step": 32}, trainer={"num_steps": 1})
    train(config, callbacks=Callbacks(on_notice=notices.append))
    assert notices == ["24 tasks for 32 a step: some are attempted twice in a step."]


# Learning and precision


@pytest.mark.parametrize("name", PRESETS)
def test_every_preset_learns_the_bandit_from_chance(bandit_config, name):
    # A greedy policy that knows nothing is right on one of the four contexts or none.
    config = bandit_config(
        algorithm=name, sampling={"tasks_per_step": 8, "group_size": 8}, trainer={"num_steps": 25},
        optimizer={"learning_rate": 0.2}, evaluation={"num_tasks": 24}, checkpoint={"every": 0},
    )  # fmt: skip
    evaluations = Trainer(config, BanditAdapter(), cpu=True).run()
    assert evaluations[0]["overall"]["mean"] <= 0.3
    # Recipes that learn (almost) from wrong rollouts alone are slower: there are four wrong arms to make unlikely.
    assert evaluations[25]["overall"]["mean"] > (0.7 if name in ("nsr", "w_reinforce") else 0.9)


class LinearBandit(BanditAdapter):
    """A bandit whose policy multiplies matrices, so that autocast changes its numbers."""

    def build_policy(self):
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            policy = nn.Sequential(nn.Embedding(self.num_contexts, 32), nn.Linear(32, self.num_arms))
        return policy.eval()


@pytest.fixture
def fresh_accelerator():
    """accelerate keeps the precision of a process's first `Accelerator`; forget it before and after."""
    AcceleratorState._reset_state(reset_partial_state=True)
    yield
    AcceleratorState._reset_state(reset_partial_state=True)


def test_in_bfloat16_the_first_ratio_and_the_first_kl_are_those_of_equal_policies(bandit_config, fresh_accelerator):
    config = bandit_config(algorithm={"name": "grpo", "kl_coef": 0.1}, trainer={"precision": "bfloat16"})
    train(config, LinearBandit())
    first = metrics_of(config)[0]
    assert first["ratio/max_log"] == 0.0
    assert first["kl"] == 0.0


def test_a_tracker_takes_the_numbers(bandit_config):
    pytest.importorskip("tensorboard")
    config = bandit_config(metrics={"trackers": ["tensorboard"]})
    train(config)
    assert list((config.run_dir / "trackers").rglob("events.out.tfevents.*"))


def test_a_check_does_one_step_and_writes_nothing(bandit_config):
    config = bandit_config()
    metrics = Trainer(config, BanditAdapter(), cpu=True).check()
    assert metrics["optimizer/gradient_norm"] > 0
    assert not config.run_dir.exists()


# Real modalities


@pytest.mark.slow
@pytest.mark.parametrize(
    "arguments",
    [
        ["configs/vision/read_digits.yaml", "sampling.group_size=4", "metrics.samples_every=2"],
        ["configs/vision/read_digits.yaml", "sampling.group_size=4", "policy.lora={}", "algorithm.kl_coef=0.05"],
        ["configs/robotics/reach.yaml", "sampling.group_size=4"],
    ],
    ids=["vision", "vision-lora", "robotics"],
)
def test_a_run_killed_at_random_moments_ends_in_the_same_files(arguments):
    script = "benchmarks/kill_and_resume.py"
    command = [sys.executable, script, *arguments, "--kills", "3", "--steps", "6", "checkpoint.every=1",
               "sampling.tasks_per_step=4", "evaluation.num_tasks=8"]  # fmt: skip
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, env=os.environ | {"OMP_NUM_THREADS": "1"})
    assert result.returncode == 0, result.stdout + result.stderr
    assert " files differ" in result.stdout
