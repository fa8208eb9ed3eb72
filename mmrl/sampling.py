"""Which tasks next, and the seeds of their rollouts.

Both are pure functions of the run's seed and a counter, so a resumed run needs the counters and no generator state.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import torch
from torch import Tensor

from mmrl.errors import DataError
from mmrl.types import Task

if TYPE_CHECKING:
    from mmrl.probing import Measure
    from mmrl.processes import Totals

_TASK_ORDER, _ROLLOUT_SEEDS, _DOMAIN_ORDER = 1, 2, 3  # keep the streams of numbers apart


class TaskSampler:
    """Walks through a task source without replacement, in a new order each epoch.

    ``position`` counts the tasks drawn so far and is the whole state. A source with fewer tasks than are asked for wraps.
    """

    def __init__(self, source: Sequence[Task], *, order: Literal["shuffled", "sequential"], seed: int) -> None:
        if len(source) == 0:
            raise DataError("the task source has 0 tasks; check the dataset's path, split and limit.")
        self.source, self.order, self.seed = source, order, seed
        self.position = 0
        self._permutation: tuple[int, np.ndarray] | None = None

    def state(self) -> dict[str, Any]:
        """What `load_state` needs, as JSON."""
        return {"position": self.position}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Go on as the sampler did whose `state` this is."""
        self.position = state["position"]

    def observe(self, domain_rewards: Mapping[str, float]) -> None:
        """Hear the mean reward of each domain in a step."""

    def observe_attempts(self, attempts: Mapping[str, tuple[float, float]]) -> None:
        """Hear the correct rollouts and all rollouts of each task of a step, by task id."""

    def group_sizes(self, tasks: Sequence[Task], group_size: int) -> list[int]:
        """Rollouts of each of the ``tasks`` of a step, ``group_size`` on average."""
        return [group_size] * len(tasks)

    def prepare(self, measure: Measure) -> None:
        """Look at the policy before a step, where that decides what is drawn."""

    def totals(self) -> Totals:
        """What to log of the choice of tasks."""
        return {}

    def next(self, count: int) -> list[Task]:
        """The next ``count`` tasks."""
        indices = [self._index(self.position + i) for i in range(count)]
        self.position += count
        return [self.source[index] for index in indices]

    def _index(self, position: int) -> int:
        epoch, offset = divmod(position, len(self.source))
        if self.order == "sequential":
            return offset
        if self._permutation is None or self._permutation[0] != epoch:
            rng = np.random.default_rng((self.seed, _TASK_ORDER, epoch))
            self._permutation = (epoch, rng.permutation(len(self.source)))
        return int(self._permutation[1][offset])


class DomainSampler(TaskSampler):
    """Draws more tasks of domains whose reward is far from a target (RuleReasoner, arXiv 2506.08672).

    Within a domain tasks come without replacement; a domain with fewer tasks than its share wraps. Domains that have not been
    seen yet have the weight of a uniform distribution.
    """

    def __init__(
        self,
        source: Sequence[Task],
        *,
        order: Literal["shuffled", "sequential"],
        seed: int,
        target: float = 1.0,
        temperature: float = 0.3,
        smoothing: float = 0.5,
        refresh: int = 8,
    ) -> None:
        super().__init__(source, order=order, seed=seed)
        self.target, self.temperature, self.smoothing, self.refresh = target, temperature, smoothing, refresh
        members: dict[str, list[int]] = {}
        for index in range(len(source)):
            members.setdefault(source[index].domain, []).append(index)
        self.members = dict(sorted(members.items()))
        self.drawn = dict.fromkeys(self.members, 0)
        self.averages: dict[str, float] = {}
        self.num_observed = 0
        self.weights = domain_weights(dict.fromkeys(self.members), target=target, temperature=temperature)

    def state(self) -> dict[str, Any]:
        return {
            "position": self.position,
            "drawn": dict(self.drawn),
            "averages": dict(self.averages),
            "num_observed": self.num_observed,
            "weights": dict(self.weights),
        }

    def load_state(self, state: Mapping[str, Any]) -> None:
        self.position, self.num_observed = state["position"], state["num_observed"]
        self.drawn, self.averages, self.weights = (dict(state[key]) for key in ("drawn", "averages", "weights"))

    def observe(self, domain_rewards: Mapping[str, float]) -> None:
        for domain, reward in domain_rewards.items():
            old = self.averages.get(domain, reward)
            self.averages[domain] = self.smoothing * reward + (1 - self.smoothing) * old
        self.num_observed += 1
        if self.num_observed % self.refresh == 0:
            rewards = {domain: self.averages.get(domain) for domain in self.members}
            self.weights = domain_weights(rewards, target=self.target, temperature=self.temperature)

    def next(self, count: int) -> list[Task]:
        """The next ``count`` tasks, domains in turn by their names."""
        tasks = []
        for number, (domain, share) in enumerate(allocate(self.weights, count).items()):
            for _ in range(share):
                tasks.append(self.source[self._member(number, domain, self.drawn[domain])])
                self.drawn[domain] += 1
        self.position += count
        return tasks

    def _member(self, number: int, domain: str, position: int) -> int:
        indices = self.members[domain]
        epoch, offset = divmod(position, len(indices))
        if self.order == "sequential":
            return indices[offset]
        return indices[int(np.random.default_rng((self.seed, _DOMAIN_ORDER, number, epoch)).permutation(len(indices))[offset])]


def domain_weights(rewards: Mapping[str, float | None], *, target: float = 1.0, temperature: float = 0.3) -> dict[str, float]:
    """``softmax(max(0, target - reward) / temperature)`` by domain; a domain without a reward gets one over their number."""
    known = {domain: max(0.0, target - reward) / temperature for domain, reward in rewards.items() if reward is not None}
    left = 1.0 - (len(rewards) - len(known)) / len(rewards)
    largest = max(known.values(), default=0.0)
    total = sum(math.exp(value - largest) for value in known.values())
    uniform = 1.0 / len(rewards)
    return {d: left * math.exp(known[d] - largest) / total if d in known else uniform for d in rewards}


def allocate(weights: Mapping[str, float], count: int) -> dict[str, int]:
    """``floor(count * weight)`` of each, what remains to the largest weight."""
    shares = {name: int(count * weight + 1e-9) for name, weight in weights.items()}
    shares[max(weights, key=lambda name: weights[name])] += count - sum(shares.values())
    return shares


def rollout_seeds(seed: int, train_step: int, attempt: int, count: int) -> Tensor:
    """Seeds of the ``count`` rollouts of a step; int64 ``[count]``. ``attempt`` counts refills of dynamic selection."""
    sequence = np.random.SeedSequence((seed, _ROLLOUT_SEEDS, train_step, attempt))
    return torch.from_numpy((sequence.generate_state(count, np.uint64) >> 1).astype(np.int64))
