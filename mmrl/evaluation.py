"""Held-out measurement: the adapter's own rollouts with greedy decisions, scored by the run's reward terms."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from accelerate import Accelerator
from rich.table import Table
from torch import nn

from mmrl import processes
from mmrl.adapter import Adapter
from mmrl.config import EvaluationConfig
from mmrl.errors import ConfigError, RewardError
from mmrl.rewards import WeightedTerm, score
from mmrl.sampling import rollout_seeds
from mmrl.statistics import difference_interval, mean_interval, wilson_interval
from mmrl.types import Task


def evaluate(
    adapter: Adapter,
    policy: nn.Module,
    source: Sequence[Task],
    terms: Mapping[str, WeightedTerm],
    config: EvaluationConfig,
    *,
    accelerator: Accelerator | None = None,
    on_batch: Callable[[int, int], None] = lambda done, total: None,
) -> dict[str, Any]:
    """Attempt the first ``num_tasks`` tasks once each; the metric's mean, interval and count, overall and per domain.

    Processes share the tasks; the result is the same on each. Tasks to which the metric does not apply are not counted. A term
    whose function has ``record(task, outcome)`` and ``summarize(records)`` adds an entry to ``summaries``.
    ``on_batch(done, total)`` is told of progress.
    """
    check_metric(config.metric, terms)
    rank, world_size = (accelerator.process_index, accelerator.num_processes) if accelerator else (0, 1)
    total = min(config.num_tasks, len(source))
    mine = range(rank, total, world_size)
    values: list[tuple[str, float]] = []
    failure: RewardError | None = None
    summarized = {name: term.function for name, term in terms.items() if hasattr(term.function, "summarize")}
    records: dict[str, list[Any]] = {name: [] for name in summarized}
    for start in range(0, len(mine), config.batch_size):
        tasks = [source[index] for index in mine[start : start + config.batch_size]]
        batch = adapter.rollout(policy, tasks, group_size=1, seeds=rollout_seeds(0, start, rank, len(tasks)), greedy=True)
        for name, term in summarized.items():
            records[name] += [term.record(task, outcome) for task, outcome in zip(batch.tasks, batch.outcomes)]
        try:
            scored = score(batch, {config.metric: terms[config.metric]})
        except RewardError as error:
            failure = error
            break
        values += zip((task.domain for task in tasks), scored.reward_terms[config.metric].tolist())
        on_batch(min(start + config.batch_size, len(mine)), len(mine))
    processes.raise_together(accelerator, failure)
    values = [entry for part in processes.gather(accelerator, values) for entry in part]
    known = [(domain, value) for domain, value in values if not math.isnan(value)]
    domains = sorted({domain for domain, _ in known})
    parts = processes.gather(accelerator, records)
    summaries = {name: term.summarize([entry for part in parts for entry in part[name]]) for name, term in summarized.items()}
    return {
        "split": config.split,
        "metric": config.metric,
        "overall": summarize([value for _, value in known]),
        "domains": {name: summarize([value for domain, value in known if domain == name]) for name in domains},
        **({"summaries": summaries} if summaries else {}),
    }


def check_metric(metric: str, terms: Mapping[str, WeightedTerm]) -> None:
    """Raise `ConfigError` unless ``metric`` is one of the run's reward terms."""
    if metric not in terms:
        raise ConfigError(f"evaluation.metric is {metric!r}; expected one of the run's rewards: {', '.join(terms)}.")


def summarize(values: Sequence[float]) -> dict[str, float | int | None]:
    """Count, mean and 95% interval; Wilson's when every value is 0 or 1, Student's otherwise. ``k`` is the sum."""
    count = len(values)
    if count == 0:
        return {"k": 0, "n": 0, "mean": None, "low": None, "high": None}
    total = sum(values)
    binary = all(value in (0.0, 1.0) for value in values)
    low, high = wilson_interval(int(total), count) if binary else mean_interval(values)
    bounds = [None if math.isnan(bound) else bound for bound in (low, high)]
    return {"k": int(total) if binary else total, "n": count, "mean": total / count, "low": bounds[0], "high": bounds[1]}


def comparison_table(before: Mapping[str, Any] | None, after: Mapping[str, Any]) -> Table:
    """Held-out means per domain with intervals, before and after when both are known."""
    table = Table(title=f"held-out {after['metric']} ({after['split']} split, 95% intervals)", title_justify="left")
    table.add_column("kind")
    for column in ("n", "before", "after", "difference") if before else ("n", after["metric"]):
        table.add_column(column, justify="right")
    rows = [*after["domains"].items(), ("all", after["overall"])]
    for name, entry in rows:
        cells = [name, str(entry["n"])]
        if before:
            old = before["overall"] if name == "all" else before["domains"].get(name)
            cells += [_cell(old), _cell(entry), _difference(old, entry)]
        else:
            cells.append(_cell(entry))
        table.add_row(*cells, style="bold" if name == "all" else None)
    return table


def _cell(entry: Mapping[str, Any] | None) -> str:
    if entry is None or entry["mean"] is None:
        return "-"
    if entry["low"] is None:
        return f"{entry['mean']:.3f}"
    return f"{entry['mean']:.3f} [{entry['low']:.3f}, {entry['high']:.3f}]"


def _difference(old: Mapping[str, Any] | None, new: Mapping[str, Any]) -> str:
    if old is None or None in (old["mean"], old["low"], new["mean"], new["low"]):
        return "-"
    low, high = difference_interval(*((entry["mean"], entry["low"], entry["high"]) for entry in (old, new)))
    return f"{new['mean'] - old['mean']:+.3f} [{low:+.3f}, {high:+.3f}]"
