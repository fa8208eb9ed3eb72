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
from mmrl.control import control_tasks, paired_gap
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
    whose function has ``record(task, outcome)`` and ``summarize(records)`` adds an entry to ``summaries``. With
    ``config.control`` the same tasks are attempted again with other media (`mmrl.control`), and ``control`` tells the mean
    there and the gap. ``on_batch(done, total)`` is told of progress.
    """
    check_metric(config.metric, terms)
    rank, world_size = (accelerator.process_index, accelerator.num_processes) if accelerator else (0, 1)
    total = min(config.num_tasks, len(source))
    mine = range(rank, total, world_size)
    values: list[tuple[int, str, float]] = []
    others: dict[int, float] = {}
    controls = [None] * total
    if config.control != "none":
        controls = control_tasks(adapter, [source[index] for index in range(total)], config.control)
    failure: RewardError | None = None
    summarized = {name: term.function for name, term in terms.items() if hasattr(term.function, "summarize")}
    records: dict[str, list[Any]] = {name: [] for name in summarized}
    for start in range(0, len(mine), config.batch_size):
        tasks = [source[index] for index in mine[start : start + config.batch_size]]
        batch = adapter.rollout(policy, tasks, group_size=1, seeds=rollout_seeds(0, start, rank, len(tasks)), greedy=True)
        for name, term in summarized.items():
            records[name] += [term.record(task, outcome) for task, outcome in zip(batch.tasks, batch.outcomes)]
        indices = mine[start : start + config.batch_size]
        changed = [(index, controls[index]) for index in indices if controls[index] is not None]
        try:
            scored = score(batch, {config.metric: terms[config.metric]})
            if changed:
                seeds = rollout_seeds(0, start, rank, len(changed))
                blind = adapter.rollout(policy, [task for _, task in changed], group_size=1, seeds=seeds, greedy=True)
                blind = score(blind, {config.metric: terms[config.metric]}).reward_terms[config.metric].tolist()
                others |= dict(zip((index for index, _ in changed), blind))
        except RewardError as error:
            failure = error
            break
        values += zip(indices, (task.domain for task in tasks), scored.reward_terms[config.metric].tolist())
        on_batch(min(start + config.batch_size, len(mine)), len(mine))
    processes.raise_together(accelerator, failure)
    values = [entry for part in processes.gather(accelerator, values) for entry in part]
    others = {index: value for part in processes.gather(accelerator, others) for index, value in part.items()}
    known = [(domain, value) for _, domain, value in values if not math.isnan(value)]
    domains = sorted({domain for domain, _ in known})
    parts = processes.gather(accelerator, records)
    summaries = {name: term.summarize([entry for part in parts for entry in part[name]]) for name, term in summarized.items()}
    return {
        "split": config.split,
        "metric": config.metric,
        "overall": summarize([value for _, value in known]),
        "domains": {name: summarize([value for domain, value in known if domain == name]) for name in domains},
        **({"summaries": summaries} if summaries else {}),
        **({"control": _control(config.control, values, others)} if config.control != "none" else {}),
    }


def _control(kind: str, values: Sequence[tuple[int, str, float]], others: Mapping[int, float]) -> dict[str, Any]:
    """Means with the tasks' own media and with those of the control, and the gap, over tasks that have both."""
    pairs = [(domain, value, others[index]) for index, domain, value in values if index in others]
    pairs = [pair for pair in pairs if not (math.isnan(pair[1]) or math.isnan(pair[2]))]

    def compared(some: Sequence[tuple[str, float, float]]) -> dict[str, Any]:
        return {
            "with": summarize([value for _, value, _ in some]),
            "without": summarize([other for _, _, other in some]),
            "gap": paired_gap([(value, other) for _, value, other in some]),
        }

    domains = sorted({domain for domain, _, _ in pairs})
    return {
        "kind": kind,
        **compared(pairs),
        "domains": {name: compared([pair for pair in pairs if pair[0] == name]) for name in domains},
    }


def control_table(result: Mapping[str, Any]) -> Table:
    """Means with a task's own media and with those of the control, and the gap between them."""
    control = result["control"]
    what = {"blank": "blank media", "shuffle": "media of other tasks"}[control["kind"]]
    table = Table(title=f"held-out {result['metric']} with {what} (95% intervals, gap paired by task)", title_justify="left")
    table.add_column("kind")
    for column in ("n", "with its media", f"with {what}", "gap"):
        table.add_column(column, justify="right")
    for name, entry in [*control["domains"].items(), ("all", control)]:
        cells = [str(entry["gap"]["n"]), _cell(entry["with"]), _cell(entry["without"]), _cell(entry["gap"], signed=True)]
        table.add_row(name, *cells, style="bold" if name == "all" else None)
    return table


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


def _cell(entry: Mapping[str, Any] | None, *, signed: bool = False) -> str:
    if entry is None or entry["mean"] is None:
        return "-"
    form = "+.3f" if signed else ".3f"
    if entry["low"] is None:
        return f"{entry['mean']:{form}}"
    return f"{entry['mean']:{form}} [{entry['low']:{form}}, {entry['high']:{form}}]"


def _difference(old: Mapping[str, Any] | None, new: Mapping[str, Any]) -> str:
    if old is None or None in (old["mean"], old["low"], new["mean"], new["low"]):
        return "-"
    low, high = difference_interval(*((entry["mean"], entry["low"], entry["high"]) for entry in (old, new)))
    return f"{new['mean'] - old['mean']:+.3f} [{low:+.3f}, {high:+.3f}]"
