"""Reinforce-Ada "Est" (arXiv 2510.04996): rare successes get more rollouts, at the same number of rollouts per step.

Attempts and successes of each task are counted with a decay; a task that is expected to succeed with probability p gets
rollouts in proportion to ``1 / sqrt(p)``, within bounds. Meant to go with ``algorithm.difficulty_weight: inverse_sqrt``.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from mmrl.probing import Measure
from mmrl.processes import Totals
from mmrl.sampling import TaskSampler
from mmrl.sampling_config import AllocationConfig
from mmrl.types import Task


def decayed_counts(old: tuple[float, float], attempts: float, successes: float, *, decay: float = 0.9) -> tuple[float, float]:
    """Attempts and successes so far, older ones counting less: ``decay * old + new``."""
    return decay * old[0] + attempts, decay * old[1] + successes


def expected_success(counts: tuple[float, float], prior: tuple[float, float] = (1.0, 1.0)) -> float:
    """``(K + a) / (N + a + b)`` for ``K`` successes of ``N`` attempts and a Beta(a, b) ``prior``."""
    return (counts[1] + prior[0]) / (counts[0] + sum(prior))


def rollout_shares(expected: Sequence[float], budget: float, *, eps: float = 0.0) -> list[float]:
    """``budget`` divided in proportion to ``1 / sqrt(p + eps)``."""
    weights = [1 / math.sqrt(p + eps) for p in expected]
    return [budget * weight / sum(weights) for weight in weights]


def allocate_rollouts(expected: Sequence[float], budget: int, *, low: int, high: int) -> list[int]:
    """`rollout_shares` within ``[low, high]`` as whole numbers that add up to ``budget``, ties to the first.

    ``low * n <= budget <= high * n`` for ``n`` tasks. What bounds take or give is shared by the others in proportion.
    """
    weights = rollout_shares(expected, 1.0)

    def bounded(scale: float) -> list[float]:
        return [min(max(scale * weight, low), high) for weight in weights]

    small, large = 0.0, high / min(weights)
    for _ in range(100):
        middle = (small + large) / 2
        small, large = (middle, large) if sum(bounded(middle)) < budget else (small, middle)
    shares = bounded(large)
    counts = [int(share + 1e-6) for share in shares]
    order = sorted(range(len(counts)), key=lambda i: (counts[i] - shares[i], i))
    open_places = [i for i in order if counts[i] < high]
    for i in open_places[: budget - sum(counts)]:
        counts[i] += 1
    return counts


class AllocatingSampler(TaskSampler):
    """Tasks of another sampler, with groups as large as their chance of success asks for."""

    def __init__(self, inner: TaskSampler, config: AllocationConfig) -> None:
        self.inner, self.config = inner, config
        self.counts: dict[str, tuple[float, float]] = {}
        """Decayed attempts and successes by task id."""
        self._expected: list[float] = []
        self._sizes: list[int] = []

    @property
    def source(self) -> Sequence[Task]:
        """The tasks that are drawn."""
        return self.inner.source

    @property
    def position(self) -> int:
        """Tasks drawn so far."""
        return self.inner.position

    def state(self) -> dict[str, Any]:
        counts = {name: list(pair) for name, pair in self.counts.items()}
        return {"position": self.position, "inner": self.inner.state(), "counts": counts}

    def load_state(self, state: Mapping[str, Any]) -> None:
        self.inner.load_state(state["inner"])
        self.counts = {name: (attempts, successes) for name, (attempts, successes) in state["counts"].items()}

    def prepare(self, measure: Measure) -> None:
        self.inner.prepare(measure)

    def observe(self, domain_rewards: Mapping[str, float]) -> None:
        self.inner.observe(domain_rewards)

    def observe_attempts(self, attempts: Mapping[str, tuple[float, float]]) -> None:
        for name, (successes, count) in attempts.items():
            self.counts[name] = decayed_counts(self.counts.get(name, (0.0, 0.0)), count, successes, decay=self.config.decay)

    def next(self, count: int) -> list[Task]:
        return self.inner.next(count)

    def group_sizes(self, tasks: Sequence[Task], group_size: int) -> list[int]:
        self._expected = [expected_success(self.counts.get(task.id, (0.0, 0.0)), self.config.prior) for task in tasks]
        self._sizes = allocate_rollouts(self._expected, len(tasks) * group_size, low=self.config.low, high=self.config.high)
        return self._sizes

    def totals(self) -> Totals:
        num = len(self._sizes)
        return {
            **self.inner.totals(),
            "sampling/expected_success": (sum(self._expected), num),
            "sampling/largest_group": (float(max(self._sizes, default=0)), 1),
        }
