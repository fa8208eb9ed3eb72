"""Failure-prefix conditioning (arXiv 2601.20829): tasks that the policy nearly always solves still teach something when their
answer has to be continued from a failed attempt.

Before the first step, and again every ``refresh`` steps, the policy attempts the tasks. Of each nearly solved one a wrong
rollout is cut at several places, the success from each cut is measured, and the cut whose success is closest to the target
becomes the task's prefill: part of the prompt, so it gets no loss. Tasks without a failure, or whose failure is too short to be
cut, are not drawn. A refresh that finds nothing keeps the prefixes that are there.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from mmrl.chat import ChatTask
from mmrl.errors import DataError
from mmrl.probing import Measure
from mmrl.processes import Totals
from mmrl.sampling import TaskSampler
from mmrl.sampling_config import FailurePrefixConfig, SamplingConfig


def choose_cut(success: Mapping[float, float], target: float = 0.5) -> float:
    """The key of ``success`` (cut to success rate) whose rate is closest to ``target``; of two, the longer prefix."""
    return min(success, key=lambda cut: (round(abs(success[cut] - target), 9), -cut))


def cut_tokens(reasoning: Sequence[int], cut: float) -> tuple[int, ...]:
    """The first ``floor(cut * n)`` of ``n`` tokens."""
    return tuple(reasoning[: int(cut * len(reasoning) + 1e-9)])


@dataclass(frozen=True, kw_only=True)
class FailurePrefix:
    """How a task's answer starts."""

    ids: tuple[int, ...]
    cut: float
    """Share of the failed attempt's reasoning that it is."""
    success: float
    """How often the policy succeeded from there when it was chosen."""


class PrefixedTasks(Sequence[ChatTask]):
    """Some tasks of a source, each with the token ids that its answer starts with."""

    def __init__(self, source: Sequence[ChatTask], prefixes: Mapping[int, tuple[int, ...]]) -> None:
        self.source, self.prefixes = source, tuple(prefixes.items())

    def __len__(self) -> int:
        return len(self.prefixes)

    def __getitem__(self, position: int) -> ChatTask:
        index, ids = self.prefixes[position]
        task = self.source[index]
        if task.prefill:
            raise DataError(
                f"{task.source or task.id}: its answer starts with {task.prefill!r:.40} already; no room for another."
            )
        return replace(task, prefill=ids)


class FailurePrefixSampler(TaskSampler):
    """Draws nearly solved tasks with a failed start; the source as it is until the policy has been looked at."""

    def __init__(self, source: Sequence[ChatTask], config: SamplingConfig, probe: FailurePrefixConfig, seed: int) -> None:
        self.whole, self.order, self.probe, self.seed = source, config.order, probe, seed
        self.prefixes: dict[int, FailurePrefix] = {}
        """By index of the task."""
        self.pass_rates: list[float | None] = []
        self.looked_at: int | None = None
        """Train step of the last look."""
        self.inner = TaskSampler(source, order=config.order, seed=seed)

    @property
    def source(self) -> Sequence[ChatTask]:
        """The tasks that are drawn."""
        return self.inner.source

    @property
    def position(self) -> int:
        """Tasks drawn so far."""
        return self.inner.position

    def state(self) -> dict[str, Any]:
        entries = {str(index): [list(prefix.ids), prefix.cut, prefix.success] for index, prefix in self.prefixes.items()}
        return {
            "position": self.position, "prefixes": entries, "pass_rates": list(self.pass_rates), "looked_at": self.looked_at,
        }  # fmt: skip

    def load_state(self, state: Mapping[str, Any]) -> None:
        self.prefixes = {
            int(index): FailurePrefix(ids=tuple(ids), cut=cut, success=success)
            for index, (ids, cut, success) in state["prefixes"].items()
        }
        self.pass_rates, self.looked_at = list(state["pass_rates"]), state["looked_at"]
        self._draw_from(self.prefixes, state["position"])

    def prepare(self, measure: Measure) -> None:
        due = self.probe.refresh and self.looked_at is not None and measure.train_step - self.looked_at >= self.probe.refresh
        if self.looked_at is not None and not due:
            return
        self.looked_at = measure.train_step
        found = self._look(measure)
        if not found and not self.prefixes:
            rates = [rate for rate in self.pass_rates if rate is not None]
            always, rarely = sum(rate == 1 for rate in rates), sum(rate <= self.probe.above for rate in rates)
            raise DataError(
                f"none of {len(self.pass_rates)} tasks is nearly solved in the sense of sampling.failure_prefix: the policy "
                f"solves {always} always, {rarely} too rarely, and fails at the others with no reasoning; look at more tasks, "
                "with more rollouts, or lower failure_prefix.above."
            )
        self.prefixes = found or self.prefixes
        self._draw_from(self.prefixes, self.position)

    def next(self, count: int) -> list[ChatTask]:
        return self.inner.next(count)

    def totals(self) -> Totals:
        known = [rate for rate in self.pass_rates if rate is not None]
        prefixes = self.prefixes.values()
        return {
            "sampling/kept": (len(self.prefixes), len(self.pass_rates)),
            "sampling/pass_rate": (sum(known), len(known)),
            "sampling/prefix_pass_rate": (sum(prefix.success for prefix in prefixes), len(prefixes)),
            "sampling/prefix_tokens": (sum(len(prefix.ids) for prefix in prefixes), len(prefixes)),
        }

    def _look(self, measure: Measure) -> dict[int, FailurePrefix]:
        """Failed attempts of the policy at hand, cut where it recovers from them about as often as is wanted."""
        count = min(len(self.whole), self.probe.num_tasks or len(self.whole))
        bare = PrefixedTasks(self.whole, {index: () for index in range(count)})
        attempts = measure(bare, self.probe.rollouts, reasoning_until=self.probe.until)
        self.pass_rates = [entry.pass_rate for entry in attempts]
        failed = {
            index: entry.wrong
            for index, entry in enumerate(attempts)
            if entry.wrong and entry.pass_rate is not None and entry.pass_rate > self.probe.above
        }
        success: dict[int, dict[float, float]] = {index: {} for index in failed}
        for number, cut in enumerate(sorted(self.probe.cuts)):
            prefixes = {index: ids for index in failed if (ids := cut_tokens(failed[index], cut))}
            if not prefixes:
                continue
            found = measure(PrefixedTasks(self.whole, prefixes), self.probe.rollouts, 1 + number)
            for index, entry in zip(prefixes, found, strict=True):
                if entry.pass_rate is not None:
                    success[index][cut] = entry.pass_rate
        chosen = {index: choose_cut(rates, self.probe.target) for index, rates in success.items() if rates}
        return {
            index: FailurePrefix(ids=cut_tokens(failed[index], cut), cut=cut, success=success[index][cut])
            for index, cut in chosen.items()
        }

    def _draw_from(self, prefixes: Mapping[int, FailurePrefix], position: int) -> None:
        pool = PrefixedTasks(self.whole, {index: prefix.ids for index, prefix in prefixes.items()}) if prefixes else self.whole
        self.inner = TaskSampler(pool, order=self.order, seed=self.seed)
        self.inner.position = position
