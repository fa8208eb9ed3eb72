"""Whether rewards can be gamed, and whether reference answers earn them: scoring terms on answers that nobody sampled.

A canned answer is text around a task's reference answer. One that says nothing, everything, or the same thing twice must not
earn what the perfect one earns, and the perfect answer of every row must earn full reward. What is judged is the weighted sum;
single terms are shown beside it. Terms that ask a judge are left out.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from mmrl.chat import Completion
from mmrl.errors import DataError, RewardError
from mmrl.rewards import WeightedTerm, score
from mmrl.types import RolloutBatch, Task

TEMPLATE = "<think>I look closely.</think><answer>{answer}</answer>"
"""The form of an answer, unless another one is given."""
PERFECT = "perfect"
EPSILON = 1e-6
MAX_OPTIONS = 8
MAX_CANNED_TASKS = 8
LONG_REPEATS = 20_000
SLOW_S = 1.0
"""Seconds of one call from which a term is said to be slow."""
_OPTION_COLUMNS = ("options", "choices")

Encode = Callable[[str], tuple[int, ...]]
"""Token ids of a completion."""


@dataclass(frozen=True, kw_only=True)
class Lint:
    """What was found."""

    cells: Mapping[str, Mapping[str, float]]
    """Mean value by canned answer and term (``total`` is the weighted sum); NaN where a term does not apply."""
    seconds: Mapping[str, float]
    """Longest call by canned answer."""
    problems: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    num_references: int = 0
    """Rows whose reference answer was scored."""

    @property
    def ok(self) -> bool:
        return not self.problems


def canned_answers(task: Task, others: Sequence[str], template: str = TEMPLATE) -> dict[str, str]:
    """Texts by name, the perfect one first; ``others`` are answers of other tasks, for options that the task does not list."""
    wrong = [text for text in (*_options(task), *others) if text != task.answer][: MAX_OPTIONS - 1]

    def fill(answer: str) -> str:
        return template.replace("{answer}", answer)

    answers = {PERFECT: fill(task.answer), "empty": "", "format only": fill("?")}
    if wrong:
        answers["all options"] = fill(" or ".join([*wrong, task.answer]))
        answers["two answers, right first"] = fill(task.answer) + fill(wrong[0])
        answers["two answers, right last"] = fill(wrong[0]) + fill(task.answer)
    return answers | {"very long": f"{task.answer} " * LONG_REPEATS}


def lint_rewards(
    terms: Mapping[str, WeightedTerm],
    sources: Sequence[Sequence[Task]],
    *,
    encode: Encode,
    template: str = TEMPLATE,
    max_rows: int | None = None,
    on_row: Callable[[int, int], None] = lambda done, total: None,
) -> Lint:
    """Score canned answers on a task of each domain, and the perfect answer of every row (``max_rows`` of each source).

    Raises `DataError` when no task has a reference answer.
    """
    judged = [name for name, term in terms.items() if getattr(term.function, "is_judged", False)]
    terms = {name: term for name, term in terms.items() if name not in judged}
    notes = [f"{name} asks a judge and was left out." for name in judged]
    if not terms:
        raise DataError("none of these rewards can be checked without a judge.")
    examples = _examples(sources, max_rows)
    others = list(dict.fromkeys(task.answer for task in examples))
    scorer = _Scorer(terms, encode)
    for task in examples[:MAX_CANNED_TASKS]:
        scorer.score_canned(task, canned_answers(task, others, template))
    scorer.problems += [
        f"{name!r} scores {total:g} on task {where!r}, as much as the perfect answer ({best:g}): it can be gamed"
        f"{f', as on {len(more)} more tasks' if more else ''}."
        for name, [(where, total, best), *more] in scorer.gamed.items()
    ]
    lint = Lint(cells=scorer.means(), seconds=scorer.seconds, problems=scorer.problems, notes=notes)
    slow = [f"{name} took {seconds:.1f} s on one answer ({what})." for what, (name, seconds) in scorer.slowest.items()]
    lint.notes.extend(text for text in slow)
    count = scorer.score_references(_rows(sources, max_rows, on_row), template)
    return Lint(**{**vars(lint), "num_references": count})


class _Scorer:
    def __init__(self, terms: Mapping[str, WeightedTerm], encode: Encode) -> None:
        self.terms, self.encode = terms, encode
        self.problems: list[str] = []
        self.gamed: dict[str, list[tuple[str, float, float]]] = {}
        self.values: dict[str, dict[str, list[float]]] = {}
        self.seconds: dict[str, float] = {}
        self.slowest: dict[str, tuple[str, float]] = {}

    def score_canned(self, task: Task, answers: Mapping[str, str]) -> None:
        columns = self._columns([task] * len(answers), list(answers.values()), torch.zeros(len(answers), dtype=torch.long))
        for place, name in enumerate(answers):
            for term, values in columns.items():
                self.values.setdefault(name, {}).setdefault(term, []).append(values[place])
        totals = dict(zip(answers, columns["total"]))
        best = totals.pop(PERFECT)
        if math.isnan(best):
            self.problems.append(f"no reward applies to the perfect answer of task {task.id!r}.")
        for name, total in totals.items():
            if total >= best - EPSILON:
                self.gamed.setdefault(name, []).append((task.id, total, best))
        self._time(task, answers)

    def score_references(self, tasks: Iterator[Task], template: str) -> int:
        """The number of reference answers; those that earn less than others of their domain are problems."""
        found: dict[str, list[tuple[float, str]]] = {}
        count = 0
        for task in tasks:
            if not task.answer:
                continue
            count += 1
            [total] = self._columns([task], [template.replace("{answer}", task.answer)], torch.zeros(1, dtype=torch.long))[
                "total"
            ]
            found.setdefault(task.domain, []).append((total, getattr(task, "source", "") or task.id))
        for domain, rows in found.items():
            full = max((total for total, _ in rows if not math.isnan(total)), default=math.nan)
            short = [(total, where) for total, where in rows if not total >= full - EPSILON]
            for total, where in short[:MAX_OPTIONS]:
                self.problems.append(f"{where}: the reference answer earns {total:g}, others of {domain!r} earn {full:g}.")
            if len(short) > MAX_OPTIONS:
                self.problems.append(f"{len(short) - MAX_OPTIONS} more reference answers of {domain!r} do not earn {full:g}.")
        return count

    def means(self) -> dict[str, dict[str, float]]:
        """Means over tasks of what applies."""
        return {
            name: {term: _mean([value for value in values if not math.isnan(value)]) for term, values in columns.items()}
            for name, columns in self.values.items()
        }

    def _columns(self, tasks: Sequence[Task], texts: Sequence[str], groups: torch.Tensor) -> dict[str, list[float]]:
        """Values by term, and the ``total``; a term that raises is a problem and counts as not applicable."""
        batch = _batch(tasks, [self._completion(text) for text in texts], groups)
        columns: dict[str, list[float]] = {}
        for name, term in self.terms.items():
            try:
                columns[name] = score(batch, {name: term}).reward_terms[name].tolist()
            except RewardError as error:
                self.problems.append(str(error))
                columns[name] = [math.nan] * len(batch)
        weighted = [
            (term.weight, columns[name]) for name, term in self.terms.items() if term.weight != 0 or len(self.terms) == 1
        ]
        columns["total"] = [_total([(weight or 1.0, values[row]) for weight, values in weighted]) for row in range(len(batch))]
        return columns

    def _time(self, task: Task, answers: Mapping[str, str]) -> None:
        for what, text in answers.items():
            batch = _batch([task], [self._completion(text)], torch.zeros(1, dtype=torch.long))
            for name, term in self.terms.items():
                start = time.perf_counter()
                try:
                    score(batch, {name: term})
                except RewardError:
                    continue  # is among the problems already
                seconds = time.perf_counter() - start
                self.seconds[what] = max(seconds, self.seconds.get(what, 0.0))
                if seconds > max(SLOW_S, self.slowest.get(what, ("", 0.0))[1]):
                    self.slowest[what] = (name, seconds)

    def _completion(self, text: str) -> Completion:
        return Completion(text=text, token_ids=self.encode(text), stop_reason="stop")


def _batch(tasks: Sequence[Task], outcomes: Sequence[Any], groups: torch.Tensor) -> RolloutBatch:
    num = len(tasks)
    return RolloutBatch(
        tasks=tuple(tasks),
        group_ids=groups,
        seeds=torch.arange(num),
        outcomes=tuple(outcomes),
        old_log_probs=torch.zeros(num, 1),
        loss_mask=torch.ones(num, 1, dtype=torch.bool),
        stop_reasons=("stop",) * num,
        inputs=None,  # terms look at tasks and outcomes only
    )


def _examples(sources: Sequence[Sequence[Task]], max_rows: int | None) -> list[Task]:
    """One task with an answer of each domain, then more, up to `MAX_CANNED_TASKS`."""
    seen, first, more = set(), [], []
    for task in _rows(sources, min(max_rows or 256, 256), lambda done, total: None):
        if not hasattr(task, "answer"):
            raise DataError(
                f"task {task.id!r} has no reference answer; canned answers are for tasks that are answered in words."
            )
        if task.answer:
            (more if task.domain in seen else first).append(task)
            seen.add(task.domain)
    if not first:
        raise DataError("no task has a reference answer; there is nothing to hold rewards against.")
    return [*first, *more][: max(MAX_CANNED_TASKS, MAX_OPTIONS)]


def _rows(sources: Sequence[Sequence[Task]], max_rows: int | None, on_row: Callable[[int, int], None]) -> Iterator[Task]:
    sizes = [len(source) if max_rows is None else min(len(source), max_rows) for source in sources]
    done = 0
    for source, size in zip(sources, sizes):
        for index in range(size):
            yield source[index]
            done += 1
            on_row(done, sum(sizes))


def _options(task: Task) -> list[str]:
    columns = getattr(task, "columns", {})
    for name in _OPTION_COLUMNS:
        value = columns.get(name)
        if isinstance(value, Mapping):
            return [str(key) for key in value]
        if isinstance(value, Sequence) and not isinstance(value, str):
            return [str(entry) for entry in value]
    return []


def _total(parts: Sequence[tuple[float, float]]) -> float:
    known = [weight * value for weight, value in parts if not math.isnan(value)]
    return sum(known) if known else math.nan


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else math.nan
