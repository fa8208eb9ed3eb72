"""Samplers that look at what the policy makes of the tasks before they draw, and the choice among all samplers.

Before a step `ProbedSampler.prepare` is handed a way to attempt tasks. What it found is part of the sampler's state, so a
resumed run draws from the same pool although the starting policy is gone.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any

from mmrl.allocation import AllocatingSampler
from mmrl.errors import DataError
from mmrl.failure_prefix import FailurePrefixSampler
from mmrl.ladder import LadderSampler
from mmrl.probing import Measure
from mmrl.processes import Totals
from mmrl.sampling import DomainSampler, TaskSampler
from mmrl.sampling_config import FilterConfig, PairsConfig, ProbeConfig, SamplingConfig
from mmrl.types import Task


class Subset(Sequence[Task]):
    """Some tasks of a source, by their indices."""

    def __init__(self, source: Sequence[Task], indices: Sequence[int]) -> None:
        self.source, self.indices = source, indices

    def __len__(self) -> int:
        return len(self.indices)

    def __getitem__(self, index: int) -> Task:
        return self.source[self.indices[index]]


class ProbedSampler(TaskSampler, ABC):
    """Draws from the pool that pass rates of the policy leave of the source; from the whole source until there are some."""

    def __init__(self, source: Sequence[Task], config: SamplingConfig, probe: ProbeConfig, seed: int) -> None:
        self.whole, self.config, self.probe, self.seed = source, config, probe, seed
        self.pass_rates: list[float | None] | None = None
        self.inner = _plain_sampler(config, source, seed)

    @property
    def source(self) -> Sequence[Task]:
        """The tasks that are drawn."""
        return self.inner.source

    @property
    def position(self) -> int:
        """Tasks drawn so far."""
        return self.inner.position

    def state(self) -> dict[str, Any]:
        return {"position": self.position, "inner": self.inner.state(), "pass_rates": self.pass_rates}

    def load_state(self, state: Mapping[str, Any]) -> None:
        self.pass_rates = state["pass_rates"]
        known = self.pass_rates is not None
        self.inner = self.build(self.pass_rates) if known else _plain_sampler(self.config, self.whole, self.seed)
        self.inner.load_state(state["inner"])

    def prepare(self, measure: Measure) -> None:
        if self.pass_rates is not None:
            return
        tasks = Subset(self.whole, range(min(len(self.whole), self.probe.num_tasks or len(self.whole))))
        self.pass_rates = [entry.pass_rate for entry in measure(tasks, self.probe.rollouts)]
        self.inner = self.build(self.pass_rates)

    def observe(self, domain_rewards: Mapping[str, float]) -> None:
        self.inner.observe(domain_rewards)

    def next(self, count: int) -> list[Task]:
        return self.inner.next(count)

    def totals(self) -> Totals:
        known = [rate for rate in self.pass_rates or () if rate is not None]
        return {
            "sampling/kept": (len(self.source), len(self.pass_rates or ())),
            "sampling/pass_rate": (sum(known), len(known)),
        }

    @abstractmethod
    def build(self, pass_rates: Sequence[float | None]) -> TaskSampler:
        """The sampler of the pool that ``pass_rates`` leave. Raises `DataError` when it is empty."""

    def _among(self, pass_rates: Sequence[float | None], low: float, high: float, what: str) -> Subset:
        """Tasks with ``low < pass rate <= high``."""
        kept = [i for i, rate in enumerate(pass_rates) if rate is not None and low < rate <= high + 1e-9]
        if not kept:
            known = [rate for rate in pass_rates if rate is not None]
            raise DataError(
                f"none of {len(pass_rates)} tasks is {what}: the starting policy fails {sum(r == 0 for r in known)}, solves "
                f"{sum(r == 1 for r in known)} always and {sum(0 < r < 1 for r in known)} sometimes; look at more tasks, "
                "with more rollouts, or choose other bounds."
            )
        return Subset(self.whole, kept)


class FilteredSampler(ProbedSampler):
    """Draws tasks whose pass rate lies within bounds (RIF-RFT, arXiv 2507.05386), in any order that an unfiltered run has."""

    probe: FilterConfig

    def build(self, pass_rates: Sequence[float | None]) -> TaskSampler:
        bounds = self.probe.above, self.probe.up_to
        kept = self._among(pass_rates, *bounds, f"kept by sampling.filter (pass rate in ({bounds[0]:g}, {bounds[1]:g}])")
        return _plain_sampler(self.config, kept, self.seed)


class PairedSampler(ProbedSampler):
    """Draws a hard and an easy task in turn (Weighted GRPO, arXiv 2602.03452).

    With R rollouts and c of them rare, hard is a pass rate in [1/R, c/R] and easy one in [1 - c/R, 1 - 1/R].
    """

    probe: PairsConfig

    def build(self, pass_rates: Sequence[float | None]) -> TaskSampler:
        rare, one = self.probe.rare / self.probe.rollouts, 1 / self.probe.rollouts
        hard = self._among(pass_rates, 0.0, rare, "hard in the sense of sampling.pairs")
        easy = self._among(pass_rates, 1 - rare - one / 2, 1 - one / 2, "easy in the sense of sampling.pairs")
        return _Alternating(*(TaskSampler(pool, order=self.config.order, seed=self.seed) for pool in (hard, easy)))


class _Alternating(TaskSampler):
    """Tasks of two samplers in turn; ``count`` is even."""

    def __init__(self, first: TaskSampler, second: TaskSampler) -> None:
        self.first, self.second = first, second
        self.source = [*first.source, *second.source]

    @property
    def position(self) -> int:
        return self.first.position + self.second.position

    def load_state(self, state: Mapping[str, Any]) -> None:
        self.first.position = self.second.position = state["position"] // 2

    def next(self, count: int) -> list[Task]:
        pairs = zip(self.first.next(count // 2), self.second.next(count // 2), strict=True)
        return [task for pair in pairs for task in pair]


def build_sampler(config: SamplingConfig, source: Sequence[Task], seed: int) -> TaskSampler:
    """The sampler that a config asks for."""
    chosen = _choosing_sampler(config, source, seed)
    return chosen if config.allocation is None else AllocatingSampler(chosen, config.allocation)


def _choosing_sampler(config: SamplingConfig, source: Sequence[Task], seed: int) -> TaskSampler:
    if config.filter is not None:
        return FilteredSampler(source, config, config.filter, seed)
    if config.pairs is not None:
        return PairedSampler(source, config, config.pairs, seed)
    if config.failure_prefix is not None:
        return FailurePrefixSampler(source, config, config.failure_prefix, seed)
    return _plain_sampler(config, source, seed)


def _plain_sampler(config: SamplingConfig, source: Sequence[Task], seed: int) -> TaskSampler:
    if config.ladder is not None:
        return LadderSampler(source, seed=seed, **config.ladder.model_dump())
    if config.domains is None:
        return TaskSampler(source, order=config.order, seed=seed)
    return DomainSampler(source, order=config.order, seed=seed, **config.domains.model_dump())
