"""Cases of rewards, signal and runs by their ids: R1 to R6, S1 to S6. What each kind covers is said at its test."""

import json
import os
import shutil
import signal
import sys
import time
from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch

from mmrl import checkpoint as checkpoint_module
from mmrl import cli
from mmrl.chat import ChatTask, Completion
from mmrl.checkpoint import latest_checkpoint
from mmrl.errors import CheckpointError, ConfigError, RewardError
from mmrl.reward_lint import lint_rewards
from mmrl.rewards import WeightedTerm, accuracy
from mmrl.testing import BanditAdapter, share_of_right_arms
from mmrl.trainer import Callbacks, Trainer

USER_MODULE = """
import time

def wants_a_column(task, outcome, contxt):
    return 0.0

def has_its_columns(task, outcome, context, *, length, tone="flat"):
    return 10 * context + length

def too_few(task):
    return 0.0

def never_returns_on_train_1(task, outcome):
    while task.id == "train/1":
        time.sleep(0.1)
    return 0.5

def raises_on_train_1(task, outcome):
    if task.id == "train/1":
        raise KeyError("column")
    return float(sum(outcome) % 3)

def leaves_on_train_1(task, outcome):
    import os
    if task.id == "train/1":
        os._exit(7)
    return 0.5
"""


@pytest.fixture(scope="module")
def user_rewards(tmp_path_factory):
    """Name of a module with reward functions, importable here and in other processes."""
    folder = tmp_path_factory.mktemp("rewards")
    (folder / "rewards_of_cases.py").write_text(USER_MODULE)
    sys.path.insert(0, str(folder))
    yield "rewards_of_cases"
    sys.path.remove(str(folder))
    sys.modules.pop("rewards_of_cases", None)


@dataclass(kw_only=True)
class Watched(BanditAdapter):
    """Counts policies that were built, and lets a test act when something happens."""

    built: int = 0
    on_rollout: object = None
    on_forward: object = None
    on_save: object = None

    def build_policy(self):
        self.built += 1
        return super().build_policy()

    def rollout(self, policy, tasks, *, greedy=False, **options):
        if self.on_rollout and not greedy:
            self.on_rollout()
        return super().rollout(policy, tasks, greedy=greedy, **options)

    def forward(self, policy, batch, needs=frozenset()):
        result = super().forward(policy, batch, needs)
        return self.on_forward(batch, result) if self.on_forward else result

    def save_policy(self, policy, directory):
        super().save_policy(policy, directory)
        if self.on_save:
            self.on_save()


def train(config, adapter=None, *, notices=None, **options):
    callbacks = Callbacks(on_notice=notices.append) if notices is not None else Callbacks()
    trainer = Trainer(config, adapter or BanditAdapter(), callbacks=callbacks, cpu=True)
    trainer.run(**options)
    return trainer


def metrics_of(config):
    return [json.loads(line) for line in (config.run_dir / "metrics.jsonl").read_text().splitlines()]


# R1: every reward function whose parameters cannot be filled is refused before weights are loaded.


@pytest.mark.parametrize(
    ("function", "parts"),
    [
        ("wants_a_column", ["asks for contxt", "did you mean 'context'", "available besides task and outcome: id, domain"]),
        ("too_few", ["cannot be called as function(task, outcome)"]),
        ("absent", ["cannot be imported"]),
    ],
)
def test_r1_a_reward_that_cannot_be_called_is_refused_before_the_policy_is_built(bandit_config, user_rewards, function, parts):
    adapter = Watched()
    rewards = {"accuracy": 1.0, "mine": {"function": f"{user_rewards}:{function}"}}
    with pytest.raises(ConfigError, match=r"rewards\.mine\.function") as caught:
        Trainer(bandit_config(rewards=rewards), adapter, cpu=True)
    assert [part for part in parts if part not in str(caught.value)] == []
    assert adapter.built == 0


def test_r1_a_reward_gets_the_columns_that_it_names(bandit_config, user_rewards):
    rewards = {"accuracy": 0.0, "mine": {"function": f"{user_rewards}:has_its_columns"}}
    config = bandit_config(rewards=rewards, trainer={"num_steps": 1}, sampling={"order": "sequential"})
    train(config)  # tasks 0 to 3: context is the number, length one more but for the last
    assert metrics_of(config)[0]["reward/mine"] == (1 + 12 + 23 + 31) / 4


# R2: whatever a reward returns is a number, "does not apply", or the end of the run; never a silent zero.


@pytest.mark.parametrize("value", [None, float("nan"), np.nan, torch.tensor(torch.nan)])
def test_r2_none_and_nan_do_not_apply_and_are_counted_by_term(bandit_config, value):
    adapter = BanditAdapter(
        reward_terms={"accuracy": share_of_right_arms, "other": lambda task, outcome: value if task.context else 1.0}
    )
    config = bandit_config(rewards={"accuracy": 1.0, "other": 0.5}, sampling={"order": "sequential"})
    train(config, adapter)
    assert {line["not_applicable/other"] for line in metrics_of(config)} == {0.75}
    assert {line["not_applicable/accuracy"] for line in metrics_of(config)} == {0.0}


@pytest.mark.parametrize(
    "value", [np.bool_(True), True, torch.tensor(True), torch.tensor(0.5, requires_grad=True), np.int64(3)]
)
def test_r2_bools_and_tensors_are_numbers(bandit_config, value):
    config = bandit_config(trainer={"num_steps": 1})
    train(config, BanditAdapter(reward_terms={"accuracy": lambda task, outcome: value}))
    assert metrics_of(config)[0]["reward/accuracy"] == torch.as_tensor(value).item()


@pytest.mark.parametrize("value", [float("inf"), "0.5", [1.0, 2.0], torch.zeros(2), torch.zeros((), device="meta")])
def test_r2_anything_else_stops_with_the_task(bandit_config, value):
    adapter = BanditAdapter(reward_terms={"accuracy": lambda task, outcome: value if task.id == "train/1" else 0.0})
    config = bandit_config(sampling={"order": "sequential"})
    with pytest.raises(RewardError, match=r"returned .* for task 'train/1'.*Checkpoint of step 0 written"):
        train(config, adapter)


# R3: a reward that fails, hangs or takes its process along ends the run after a checkpoint, naming the task.


@pytest.mark.parametrize(
    ("function", "message"),
    [
        ("never_returns_on_train_1", r"reward 'mine' gave no answer within 1 s on task 'train/1' \(rewards\.mine\.timeout_s\)"),
        ("raises_on_train_1", r"reward 'mine' raised KeyError on task 'train/1': 'column'"),
        ("leaves_on_train_1", r"reward 'mine' ended its process on task 'train/1'"),
    ],
)
def test_r3_a_reward_in_its_own_process_cannot_hang_or_end_the_run(bandit_config, user_rewards, function, message):
    rewards = {"accuracy": 1.0, "mine": {"function": f"{user_rewards}:{function}", "timeout_s": 1}}
    config = bandit_config(rewards=rewards, sampling={"order": "sequential"}, evaluation={"at_start": False})
    start = time.monotonic()
    with pytest.raises(RewardError, match=message):
        train(config)
    assert time.monotonic() - start < 120  # it would be forever
    assert latest_checkpoint(config.run_dir / "checkpoints").name == "step_000000"
    record = json.loads((config.run_dir / "failure" / "reward.json").read_text())
    assert "train/1" in record["error"]
    if function.startswith("raises"):
        assert any("in raises_on_train_1" in line for line in record["traceback"])  # from the other process


def test_r3_failures_up_to_a_share_are_counted_instead(bandit_config, user_rewards):
    rewards = {"accuracy": 1.0, "mine": {"function": f"{user_rewards}:raises_on_train_1", "max_failure_share": 0.25}}
    config = bandit_config(rewards=rewards, sampling={"order": "sequential"})
    trainer = train(config)
    shares = [line["reward_failures/mine"] for line in metrics_of(config)]
    assert shares[0] == 0.25  # 4 of 16 rollouts are of train/1
    assert shares[1] == 0.0
    assert metrics_of(config)[0]["not_applicable/mine"] == 0.25
    assert trainer.train_step == 6
    smaller = {"accuracy": 1.0, "mine": {"function": f"{user_rewards}:raises_on_train_1", "max_failure_share": 0.2}}
    with pytest.raises(RewardError, match="raised KeyError on task 'train/1'"):
        train(bandit_config(name="stricter", rewards=smaller, sampling={"order": "sequential"}))


# R4: rewards without signal cost no update, say why, and end the run.


def test_r4_a_constant_reward_pays_for_no_backward_and_stops_the_run_saying_why(bandit_config):
    adapter, notices = Watched(reward_terms={"accuracy": lambda task, outcome: 0.7}), []
    adapter.on_forward = lambda batch, result: pytest.fail("a backward pass was paid for")
    config = bandit_config(trainer={"num_steps": 50, "max_constant_steps": 6}, metrics={"reward_window": 4})
    assert train(config, adapter, notices=notices).train_step == 6
    assert notices[0] == (
        "step 4: no reward term varied inside any group in the last 4 steps: there is no signal to learn from."
    )
    assert "no group carried signal in 6 steps (trainer.max_constant_steps)" in notices[-1]
    assert metrics_of(config)[-1]["reward_variance/accuracy"] == 0.0


# R5: an answer that hedges, repeats or says nothing does not score like the right one.


def task_with(answer, **columns):
    return ChatTask(id=f"t/{answer}", messages=(), answer=answer, columns=columns)


@pytest.mark.parametrize("text", ["", "A or B or C", "B. because A is wrong", "A</answer><answer>B", "B</answer><answer>B"])
def test_r5_only_right_answers_score(text):
    def said(text):
        return Completion(text=f"<answer>{text}</answer>", token_ids=(1,), stop_reason="stop")

    assert accuracy(task_with("B"), said(text)) == 0.0
    assert accuracy(task_with("B"), said("(B)")) == accuracy(task_with("B"), said("b.")) == 1.0


def test_r5_the_lint_finds_what_a_loose_reward_lets_pass():
    def contains(task, outcome):
        return float(task.answer in outcome.text)

    source = [task_with(letter, options=["A", "B", "C"]) for letter in "ABC"]
    found = {
        name: lint_rewards({name: WeightedTerm(weight=1.0, function=function)}, [source], encode=lambda text: (1,))
        for name, function in (("accuracy", accuracy), ("contains", contains))
    }
    assert found["accuracy"].ok
    gamed = {problem.split("'")[1] for problem in found["contains"].problems}
    assert gamed == {"all options", "two answers, right first", "two answers, right last", "very long"}


# R6: no ratio, however absurd, makes a loss that is not finite; the decision is counted and named.


@pytest.mark.parametrize("value", [100.0, -torch.inf])
def test_r6_an_absurd_log_ratio_is_survived_counted_and_named(bandit_config, value):
    def spoil(batch, result):
        first = torch.zeros_like(batch.loss_mask)
        first[0, 0] = True
        changed = batch.old_log_probs + value if value > 0 else torch.full_like(batch.old_log_probs, value)
        return replace(result, log_probs=torch.where(first, changed, result.log_probs))

    notices, config = [], bandit_config(trainer={"num_steps": 2})
    train(config, Watched(on_forward=spoil), notices=notices)
    assert all(np.isfinite(number) for line in metrics_of(config) for number in line.values())
    assert metrics_of(config)[0]["ratio/extreme"] > 0
    assert "1 of " in notices[0] and "log-ratio of 20 or more" in notices[0]
    assert "first: task 'train/" in notices[0] and "decision 0" in notices[0]


def test_r6_demonstrations_have_no_ratio_to_be_absurd(bandit_config):
    def far_from_recorded(batch, result):
        return replace(result, log_probs=result.log_probs + 100.0)

    notices, config = [], bandit_config(algorithm="sft", sampling={"group_size": 1}, trainer={"num_steps": 2})
    train(config, Watched(on_forward=far_from_recorded), notices=notices)
    assert notices == []
    assert all(line["ratio/extreme"] == 0.0 for line in metrics_of(config))


# S1: a run killed in any phase goes on from the last whole checkpoint to the same bytes.


@pytest.mark.parametrize("phase", ["rollout", "reward", "update", "checkpoint"])
def test_s1_a_run_killed_in_any_phase_ends_in_the_same_files(bandit_config, files_of, in_child, phase):
    config = bandit_config(algorithm={"name": "grpo", "kl_coef": 0.05}, trainer={"num_steps": 4}, evaluation={"every": 2})
    train(config)
    expected = files_of(config.run_dir)
    shutil.rmtree(config.run_dir)

    def killed():
        calls = []

        def kill_the_third_time():
            calls.append(phase)
            if len(calls) == {"reward": 40}.get(phase, 3):
                os.kill(os.getpid(), signal.SIGKILL)

        def spoilt(batch, result):
            kill_the_third_time()
            return result

        def judged(task, outcome):
            kill_the_third_time()
            return share_of_right_arms(task, outcome)

        hooks = {
            "rollout": {"on_rollout": kill_the_third_time},
            "reward": {"reward_terms": {"accuracy": judged}},
            "update": {"on_forward": spoilt},
            "checkpoint": {"on_save": kill_the_third_time},
        }
        train(config, Watched(**hooks[phase]))

    assert in_child(killed) == -signal.SIGKILL
    train(config, resume=True)
    actual = files_of(config.run_dir)
    assert sorted(actual) == sorted(expected)
    assert [name for name in expected if actual[name] != expected[name]] == []


# S2: a checkpoint that is not whole, or not of this run, is named and refused, and an older one is offered.


@pytest.mark.parametrize("damage", ["a flipped byte", "a missing file", "another model"])
def test_s2_a_damaged_checkpoint_is_named_and_the_previous_one_offered(bandit_config, damage):
    config = bandit_config(checkpoint={"every": 2, "keep_last": 3})
    train(config)
    folder = config.run_dir / "checkpoints" / "step_000006"
    weights = folder / "policy" / "model.safetensors"
    if damage == "another model":
        with pytest.raises(CheckpointError, match="step_000006/policy: not this run's policy"):
            train(config, BanditAdapter(num_arms=6), resume=True)
        return
    if damage == "a flipped byte":
        data = bytearray(weights.read_bytes())
        data[-1] ^= 1
        weights.write_bytes(data)
    else:
        weights.unlink()
    with pytest.raises(CheckpointError, match=r"step_000006.*model\.safetensors.*step_000004"):
        train(config, resume=True)


# S3: only keys that may change change, the others are listed.


def test_s3_a_resumed_run_lists_what_differs_and_takes_what_may_change(bandit_config):
    train(bandit_config(trainer={"num_steps": 2}))
    with pytest.raises(CheckpointError, match=r"optimizer\.learning_rate: 0\.1 -> 0\.2"):
        train(bandit_config(trainer={"num_steps": 4}, optimizer={"learning_rate": 0.2}), resume=True)
    longer = bandit_config(
        trainer={"num_steps": 4, "parity": {"every": 1}}, metrics={"replay": True, "reward_window": 5}, evaluation={"every": 1}
    )
    assert train(longer, resume=True).train_step == 4


# S4: a full disk leaves the previous checkpoint whole.


def test_s4_a_full_disk_while_a_checkpoint_is_written_leaves_the_previous_one(bandit_config, monkeypatch):
    def full(*arguments, **options):
        raise OSError(28, "No space left on device")

    config, written = bandit_config(), checkpoint_module.write_checkpoint
    calls = []

    def write(*arguments, **options):
        calls.append(1)
        if len(calls) == 3:
            options["save_policy"] = full
        return written(*arguments, **options)

    monkeypatch.setattr(checkpoint_module, "write_checkpoint", write)
    with pytest.raises(CheckpointError, match="No space left on device"):
        train(config)
    assert latest_checkpoint(config.run_dir / "checkpoints").name == "step_000002"
    monkeypatch.undo()
    assert train(config, resume=True).train_step == 6


# S5: one folder, one run.


def test_s5_a_second_run_in_a_folder_is_refused_naming_the_first(bandit_config):
    config, refused = bandit_config(), []

    def start_another(step, metrics, seconds):
        with pytest.raises(ConfigError) as caught:
            train(config, resume=True)
        refused.append(str(caught.value))

    Trainer(config, BanditAdapter(), callbacks=Callbacks(on_step=start_another), cpu=True).run()
    assert all(f"in use by process {os.getpid()} on " in text for text in refused)
    assert len(refused) == 6


# S6: a config that is wrong in any way is one line with the closest match, and exit code 2.


@pytest.mark.parametrize(
    ("override", "parts"),
    [
        ("optimizer.lerning_rate=1", ["lerning_rate", "did you mean 'learning_rate'"]),
        ("trainer.parity.evry=1", ["trainer.parity.evry", "did you mean 'every'"]),
        ("metrics.replay=perhaps", ["metrics.replay is 'perhaps'", "boolean"]),
        ("evaluation.control=blnk", ["evaluation.control is 'blnk'", "'blank'"]),
        ("trainer.parity.tolerance=0", ["trainer.parity.tolerance is 0", "greater than 0"]),
        ("algorithm=grop", ["did you mean 'grpo'"]),
    ],
)
def test_s6_a_wrong_config_is_one_line(capsys, override, parts):
    config = os.path.join(os.path.dirname(__file__), "..", "..", "configs", "vision", "read_digits.yaml")
    assert cli.main(["show", config, override]) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.count("\n") == 1
    assert [part for part in parts if part not in err] == []
