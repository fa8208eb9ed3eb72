"""`mmrl.processes`, and that a run on two processes is the run on one."""

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import textwrap
import traceback
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from safetensors.torch import load_file

from mmrl import processes
from mmrl.checkpoint import policy_checksum
from mmrl.errors import NumericsError, RewardError
from mmrl.probing import PolicyMeasure
from mmrl.rewards import group_term, resolve_terms
from mmrl.testing import BanditAdapter, share_of_right_arms
from mmrl.trainer import Callbacks, Trainer

ONE = SimpleNamespace(num_processes=1)
ROOT = Path(__file__).parents[2]


def free_port():
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        return server.getsockname()[1]


def on_processes(count, function):
    """Call ``function(rank)`` in ``count`` forked processes that form a group; fails if one of them does, or hangs."""
    port, children = free_port(), []
    for rank in range(count):
        child = os.fork()
        if child == 0:
            status = 1
            try:
                signal.alarm(60)
                AcceleratorState._reset_state(reset_partial_state=True)
                os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(count), LOCAL_WORLD_SIZE=str(count),
                                  MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))  # fmt: skip
                function(rank)
                status = 0
            except BaseException:
                traceback.print_exc()
            finally:
                os._exit(status)
        children.append(child)
    assert [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children] == [0] * count


def results(config):
    """Final weights, metrics and evaluations of a run."""
    weights = load_file(
        config.run_dir / "checkpoints" / f"step_{config.trainer.num_steps:06d}" / "policy" / "model.safetensors"
    )
    metrics = [json.loads(line) for line in (config.run_dir / "metrics.jsonl").read_text().splitlines()]
    evaluations = {path.name: json.loads(path.read_text()) for path in (config.run_dir / "eval").iterdir()}
    return weights["weight"], metrics, evaluations


def assert_two_processes_train_as_one(bandit_config, adapter, **changes):
    """Weights, every metric and every evaluation to 1e-6."""
    one, two = bandit_config(name="one", **changes), bandit_config(name="two", **changes)
    Trainer(one, adapter(), cpu=True).run()

    def train(rank):
        trainer = Trainer(two, adapter(), cpu=True)
        assert trainer.accelerator.num_processes == 2
        trainer.run()

    on_processes(2, train)
    (weights, metrics, evaluations), (weights_2, metrics_2, evaluations_2) = results(one), results(two)
    assert not torch.equal(weights, adapter().build_policy().weight)
    torch.testing.assert_close(weights_2, weights, atol=1e-6, rtol=0)
    for line, line_2 in zip(metrics, metrics_2, strict=True):
        assert line_2 == pytest.approx(line, abs=1e-6)
    for name, evaluation in evaluations.items():
        assert evaluations_2[name]["overall"] == pytest.approx(evaluation["overall"], abs=1e-6)
        assert evaluations_2[name]["domains"].keys() == evaluation["domains"].keys()


def test_means_add_sums_and_counts_and_leave_out_what_was_never_counted():
    first, second = {"a": (3.0, 2.0), "b": (0.0, 0.0)}, {"a": (1.0, 2.0), "c": (5.0, 1.0)}
    assert processes.add(first, second) == {"a": (4.0, 4.0), "b": (0.0, 0.0), "c": (5.0, 1.0)}
    assert processes.add() == {}
    assert processes.means(ONE, processes.add(first, second)) == {"a": 1.0, "c": 5.0}
    assert processes.gather(ONE, "x") == ["x"]


@pytest.mark.parametrize("num_steps", [1, 3])
@pytest.mark.parametrize("aggregation", ["token_mean", "sequence_mean", "constant"])
def test_two_processes_take_the_steps_of_one(bandit_config, num_steps, aggregation):
    assert_two_processes_train_as_one(
        bandit_config, BanditAdapter, trainer={"num_steps": num_steps},
        algorithm={"name": "grpo", "aggregation": aggregation}, evaluation={"num_tasks": 7, "batch_size": 3},
    )  # fmt: skip


def test_two_processes_agree_with_one_over_epochs_micro_batches_and_a_kl_term(bandit_config):
    # Rows of advantage 0 are computed too, because of the KL term; ranks have different numbers of micro-batches.
    assert_two_processes_train_as_one(
        bandit_config, BanditAdapter, algorithm={"name": "grpo", "kl_coef": 0.1, "entropy_coef": 0.01},
        trainer={"num_steps": 3, "epochs_per_batch": 3, "micro_batch_tokens": 7}, sampling={"group_size": 5},
    )  # fmt: skip


def test_minibatches_hold_the_same_groups_on_any_number_of_processes(bandit_config):
    assert_two_processes_train_as_one(
        bandit_config, BanditAdapter, algorithm="grpo", sampling={"tasks_per_step": 8}, optimizer={"eps": 1e-3},
        trainer={"num_steps": 3, "minibatches": 2},
    )  # fmt: skip


@pytest.mark.parametrize(
    "sampling",
    [
        {"filter": {"rollouts": 3, "num_tasks": 7, "above": 0.0, "up_to": 0.9}},
        {"pairs": {"rollouts": 5, "rare": 2}},
        {"allocation": {"low": 2, "high": 8}, "tasks_per_step": 8},
    ],
    ids=lambda sampling: next(iter(sampling)),
)
def test_two_processes_choose_the_tasks_of_one(bandit_config, sampling):
    # Three of seven tasks are looked at by the second process. The 24 tasks of groups of unequal size come again in step 4.
    assert_two_processes_train_as_one(
        bandit_config, BanditAdapter, sampling=sampling, algorithm={"name": "dr_grpo", "correct_above": 0.4},
        optimizer={"eps": 1e-3}, trainer={"num_steps": 5},
    )  # fmt: skip


def test_two_processes_find_the_failures_of_one(bandit_config):
    class Reasoning(BanditAdapter):
        def reasoning_ids(self, outcome, until):
            return (*outcome, len(until))

    config, tasks = bandit_config(), BanditAdapter().task_source("train")[:7]

    def look(accelerator):
        adapter = Reasoning()
        measure = PolicyMeasure(
            config=config, adapter=adapter, policy=adapter.build_policy(), accelerator=accelerator, train_step=3,
            terms=resolve_terms(config.rewards, adapter.reward_terms),
        )  # fmt: skip
        return [measure(tasks, 4, number, reasoning_until="end") for number in range(2)]

    expected = look(SimpleNamespace(num_processes=1, process_index=0))
    assert expected[0] != expected[1] and any(entry.wrong for entry in expected[0])

    def compare(rank):
        accelerator = Accelerator(cpu=True)
        assert accelerator.num_processes == 2
        assert look(accelerator) == expected

    on_processes(2, compare)


def only_contexts_0_and_1(task, outcome):
    return share_of_right_arms(task, outcome) if task.context < 2 else 0.5


def test_two_processes_agree_with_one_when_one_of_them_has_no_signal(bandit_config):
    # In sequential order the second process always has contexts 2 and 3, whose reward is constant.
    assert_two_processes_train_as_one(
        bandit_config, lambda: BanditAdapter(reward_terms={"accuracy": only_contexts_0_and_1}),
        sampling={"order": "sequential"}, trainer={"num_steps": 3, "micro_batch_tokens": 6},
    )  # fmt: skip


def test_dynamic_selection_goes_on_when_one_process_finds_no_group_to_keep(bandit_config):
    # With fewer groups than minibatches a process takes part in optimizer steps for which it has no rows.
    config = bandit_config(
        algorithm={"name": "dapo", "max_refills": 1}, sampling={"order": "sequential"},
        trainer={"num_steps": 3, "minibatches": 2},
    )  # fmt: skip

    def only_context_0(task, outcome):
        return share_of_right_arms(task, outcome) if task.context == 0 else 0.5

    def train(rank):
        Trainer(config, BanditAdapter(reward_terms={"accuracy": only_context_0}), cpu=True).run()

    on_processes(2, train)
    weights, metrics, _ = results(config)
    assert not torch.equal(weights, BanditAdapter().build_policy().weight)
    assert all(line["groups/informative"] <= 0.25 for line in metrics)


def test_a_process_without_rows_takes_part_in_the_optimizer_steps_of_the_others(bandit_config):
    # The first process keeps one group for two minibatches, the second one two.
    config = bandit_config(
        algorithm={"name": "dapo", "max_refills": 0}, sampling={"order": "sequential"},
        trainer={"num_steps": 2, "minibatches": 2},
    )  # fmt: skip
    places = group_term(lambda task, outcomes: range(len(outcomes)) if task.context else [0.5] * len(outcomes))

    def train(rank):
        trainer = Trainer(config, BanditAdapter(reward_terms={"accuracy": places}), cpu=True)
        trainer.run()
        assert trainer.updater.optimizer_step == 4
        (config.output_dir / f"{rank}.txt").write_text(policy_checksum(trainer.policy))

    on_processes(2, train)
    assert (config.output_dir / "0.txt").read_text() == (config.output_dir / "1.txt").read_text()
    assert [line["groups/informative"] for line in results(config)[1]] == [0.75, 0.75]


def test_an_error_on_one_process_ends_the_run_on_all(bandit_config):
    config = bandit_config(sampling={"order": "sequential"})

    def fragile(task, outcome):
        if task.context == 3:  # of the second process
            raise ZeroDivisionError("no such arm")
        return share_of_right_arms(task, outcome)

    class Spoiled(BanditAdapter):
        def forward(self, policy, batch, needs=frozenset()):
            result = super().forward(policy, batch, needs)
            result.log_probs[torch.tensor([task.context == 3 for task in batch.tasks])] *= torch.nan
            return result

    def train(rank):
        with pytest.raises(RewardError, match=r"raised ZeroDivisionError on task 'eval/3': no such arm. Checkpoint"):
            Trainer(config, BanditAdapter(reward_terms={"accuracy": fragile}), cpu=True).run()
        with pytest.raises(RewardError, match=r"raised ZeroDivisionError on task 'train/3': no such arm. Checkpoint"):
            Trainer(
                bandit_config(sampling={"order": "sequential"}, evaluation={"at_start": False}),
                BanditAdapter(reward_terms={"accuracy": fragile}), cpu=True,
            ).run(resume=True)  # fmt: skip
        with pytest.raises(NumericsError, match=r"tasks whose loss is not finite: train/3\."):
            Trainer(config, Spoiled(), cpu=True).run(resume=True)

    on_processes(2, train)
    assert (config.run_dir / "checkpoints" / "step_000000").is_dir()
    for kind in ("reward", "numerics"):
        assert "train/3" in json.loads((config.run_dir / "failure" / f"{kind}.json").read_text())["error"]


def test_a_signal_to_one_process_stops_all_and_they_resume_together(bandit_config, files_of):
    config = bandit_config(algorithm={"name": "grpo", "kl_coef": 0.1})

    def stop(rank):
        def on_step(step, metrics, seconds):
            if rank == 1 and step == 2:
                os.kill(os.getpid(), signal.SIGTERM)

        trainer = Trainer(config, BanditAdapter(), callbacks=Callbacks(on_step=on_step), cpu=True)
        trainer.run()
        assert trainer.train_step == 2

    def train(rank, **options):
        trainer = Trainer(config, BanditAdapter(), cpu=True)
        trainer.run(**options)
        assert trainer.train_step == 6

    on_processes(2, lambda rank: train(rank))
    expected = files_of(config.run_dir)
    shutil.rmtree(config.run_dir)
    on_processes(2, stop)
    on_processes(2, lambda rank: train(rank, resume=True))
    assert files_of(config.run_dir) == expected


@pytest.mark.slow
@pytest.mark.parametrize("sampling", [{}, {"filter": {"rollouts": 3, "num_tasks": 7, "up_to": 0.9}}], ids=["all", "filter"])
def test_a_run_under_torchrun_is_the_same_run(bandit_config, tmp_path, sampling):
    # Adam divides a gradient by its own size, also one that is 1e-9 because sums were rounded in another order; hence eps.
    config = bandit_config(
        name="one", optimizer={"learning_rate": 0.1, "eps": 1e-3}, sampling=sampling,
        algorithm={"name": "grpo", "correct_above": 0.4},
    )  # fmt: skip
    Trainer(config, BanditAdapter(), cpu=True).run()
    script = tmp_path / "script.py"
    script.write_text(
        textwrap.dedent(f"""
        import yaml
        from pathlib import Path
        from mmrl.config import RunConfig, validate
        from mmrl.testing import BanditAdapter
        from mmrl.trainer import Trainer
        tree = yaml.safe_load(Path({str(config.run_dir / "config.yaml")!r}).read_text()) | {{"name": "two"}}
        trainer = Trainer(validate(tree, RunConfig, "test"), BanditAdapter(), cpu=True)
        assert trainer.accelerator.num_processes == 2
        trainer.run()
    """)
    )
    # Not `accelerate launch --cpu --num_processes 2`: that starts one process.
    command = ["-m", "torch.distributed.run", "--nproc_per_node", "2", "--master_port", str(free_port()), str(script)]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    subprocess.run([sys.executable, *command], cwd=ROOT, check=True, timeout=300, env=environment)
    weights, metrics, _ = results(config)
    weights_2, metrics_2, _ = results(config.model_copy(update={"name": "two"}))
    torch.testing.assert_close(weights_2, weights, atol=1e-6, rtol=0)
    assert [sorted(line) for line in metrics_2] == [sorted(line) for line in metrics]
    for line, line_2 in zip(metrics, metrics_2):
        assert line_2 == pytest.approx(line, abs=1e-6)
