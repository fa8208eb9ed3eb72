"""Rollouts that are looked at and not trained on: what the policy of this moment makes of some tasks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from accelerate import Accelerator
from torch import nn

from mmrl import processes
from mmrl.adapter import Adapter
from mmrl.config import RunConfig
from mmrl.errors import RewardError
from mmrl.rewards import WeightedTerm, score
from mmrl.sampling import rollout_seeds
from mmrl.selection import groups_of, pass_rates, selection_metric
from mmrl.types import Task

_APART = 1 << 20
"""Added to the number of a round, so that its seeds are not those of a refill of the same step."""


@dataclass(frozen=True, kw_only=True)
class Attempts:
    """What became of the rollouts of one task."""

    pass_rate: float | None
    """Share of correct rollouts; None when the metric applies to none of them."""
    wrong: tuple[int, ...] | None = None
    """Token ids of the reasoning of a wrong rollout, chosen by its seed; None when there is none or it was not asked for."""


class Measure(Protocol):
    """Attempts tasks with the policy of this moment."""

    train_step: int
    """The step that is about to be taken."""

    def __call__(
        self, tasks: Sequence[Task], rollouts: int, round: int = 0, *, reasoning_until: str | None = None
    ) -> list[Attempts]:
        """One entry per task, the same on every process. Different rounds of a step have different seeds.

        With ``reasoning_until`` (language policies) entries hold the reasoning of a wrong rollout up to that text.
        """
        ...


@dataclass(frozen=True, kw_only=True)
class PolicyMeasure:
    """`Measure` by the run's own adapter, rewards and notion of correctness. Processes share the tasks."""

    config: RunConfig
    adapter: Adapter
    policy: nn.Module
    terms: Mapping[str, WeightedTerm]
    accelerator: Accelerator
    train_step: int

    def __call__(
        self, tasks: Sequence[Task], rollouts: int, round: int = 0, *, reasoning_until: str | None = None
    ) -> list[Attempts]:
        seeds = rollout_seeds(self.config.seed, self.train_step, _APART + round, len(tasks) * rollouts).view(-1, rollouts)
        rank, world_size = self.accelerator.process_index, self.accelerator.num_processes
        mine = range(rank, len(tasks), world_size)
        at_once = max(1, self.config.sampling.tasks_per_step // world_size)
        found: dict[int, Attempts] = {}
        failure: RewardError | None = None
        for start in range(0, len(mine), at_once):
            indices = list(mine[start : start + at_once])
            batch = self.adapter.rollout(
                self.policy, [tasks[i] for i in indices], group_size=rollouts, seeds=seeds[indices].flatten()
            )
            try:
                batch = score(batch, self.terms)
            except RewardError as error:
                failure = error
                break
            rates, metric = pass_rates(self.config.algorithm, batch), selection_metric(self.config.algorithm, batch)
            for index, rows in zip(indices, groups_of(batch.group_ids)):
                wrong, reasoning = rows[metric[rows] <= self.config.algorithm.correct_above], None
                if reasoning_until is not None and len(wrong):
                    outcome = batch.outcomes[int(wrong[batch.seeds[wrong].argmin()])]
                    reasoning = self.adapter.reasoning_ids(outcome, reasoning_until)
                rate = None if bool(metric[rows].isnan().all()) else float(rates[rows[0]])
                found[index] = Attempts(pass_rate=rate, wrong=reasoning)
        processes.raise_together(self.accelerator, failure)
        everyone = {index: entry for part in processes.gather(self.accelerator, found) for index, entry in part.items()}
        return [everyone[index] for index in range(len(tasks))]
