"""What a miniature is, and how the six read the runs that they compare."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from forked_runs import Measure
from torch import nn

from mmrl.checkpoint import latest_checkpoint
from mmrl.cli import build_adapter, load_run
from mmrl.rewards import resolve_terms, score
from mmrl.sampling import rollout_seeds
from mmrl.types import RolloutBatch, Task

DIGITS = Path("configs/vision/read_digits.yaml")

SMALL = (
    "sampling.tasks_per_step=32", "sampling.group_size=8", "trainer.epochs_per_batch=2", "trainer.minibatches=2",
    "trainer.num_steps=60", "optimizer.warmup_steps=0", "optimizer.schedule=constant", "checkpoint.every=0",
    "metrics.samples_every=0",
)  # fmt: skip
"""Overrides that make a run of about half a minute out of `DIGITS`."""

Rows = Mapping[str, Mapping[str, float]]
"""Row of the table, then column, then number."""


@dataclass(frozen=True, kw_only=True)
class Miniature:
    """Trainings that differ in one mechanism, and what is compared about them."""

    claim: str
    """What the paper says will be seen, in a sentence."""
    arms: Mapping[str, Sequence[str]]
    """Overrides of each arm. The first is what the others are compared with."""
    values: Callable[[Mapping[str, Path]], Rows]
    """From the folders of one seed's runs, by arm, to rows and columns of the table."""
    overrides: Sequence[str] = SMALL
    """Overrides of all arms."""
    measure: Measure = lambda run_dir: {}
    """What is measured when a run has ended and kept in its ``cost.json``."""
    config: Path = DIGITS
    warmup: Path | None = None
    """A config that is trained once; all runs start from its policy."""


def steps(run_dir: Path) -> list[dict[str, float]]:
    """The metrics of each train step."""
    return [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]


def evaluations(run_dir: Path) -> dict[int, dict[str, Any]]:
    """Held-out results by train step, in order."""
    found = (json.loads(path.read_text(encoding="utf-8")) for path in sorted((run_dir / "eval").glob("step_*.json")))
    return {result["train_step"]: result for result in found}


def last_accuracy(run_dir: Path) -> float:
    """Held-out accuracy at the end."""
    return list(evaluations(run_dir).values())[-1]["overall"]["mean"]


def measured(run_dir: Path) -> dict[str, Any]:
    """What `Miniature.measure` kept."""
    return json.loads((run_dir / "cost.json").read_text(encoding="utf-8"))


class Subject:
    """A finished run's policies and tasks."""

    def __init__(self, run_dir: Path) -> None:
        self.run_dir = run_dir
        self.config = load_run(run_dir / "config.yaml")
        self.adapter = build_adapter(self.config)

    def policy(self, checkpoint: Path | None = None) -> nn.Module:
        """The policy of a checkpoint, or that at the start."""
        policy = self.adapter.build_policy()
        if checkpoint is not None:
            self.adapter.load_policy(policy, checkpoint / "policy")
        return policy

    @property
    def last(self) -> Path:
        return latest_checkpoint(self.run_dir / "checkpoints")

    def tasks(self, split: str, count: int) -> list[Task]:
        """The first tasks of a split."""
        source = self.adapter.task_source(split)
        return [source[index] for index in range(count)]

    def attempt(self, policy: nn.Module, tasks: Sequence[Task], group_size: int, stream: int) -> RolloutBatch:
        """Sampled and scored rollouts; each ``stream`` has random numbers of its own."""
        seeds = rollout_seeds(self.config.seed, 0, stream, len(tasks) * group_size)
        batch = self.adapter.rollout(policy, tasks, group_size=group_size, seeds=seeds)
        return score(batch, resolve_terms(self.config.rewards, self.adapter.reward_terms))
