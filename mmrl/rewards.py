"""From outcomes to rewards: resolving and scoring terms, and the terms that text modalities share.

A term is a plain function ``term(task, outcome) -> number | bool | None``; None or NaN says that it does not apply to this
rollout. A term that compares the rollouts of a group is marked with `group_term` and maps ``(task, outcomes)`` to one number
per rollout. A term that raises, or returns anything else, stops the run: an error never becomes a zero.

An adapter's term may also be an object with more to say (`judged_term`): how many groups it takes at once, which train step has
begun, what to log, and, as a `Judged`, why a group got its numbers.
"""

from __future__ import annotations

import difflib
import importlib
import math
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol

import torch

from mmrl.adapter import RewardTerm
from mmrl.chat import ChatTask, Completion, first_block
from mmrl.config import RewardConfig
from mmrl.errors import ConfigError, RewardError
from mmrl.reward_binding import bind_columns
from mmrl.reward_workers import NoAnswer, TimedTerm
from mmrl.types import RolloutBatch, Task


@dataclass(frozen=True, kw_only=True)
class WeightedTerm:
    """A reward term and its share of the total."""

    weight: float
    function: RewardTerm
    failures: Failures | None = field(default=None, compare=False)
    """Which failures are let pass; None stops at the first one."""


@dataclass(kw_only=True)
class Failures:
    """Failures of one term that are counted as "does not apply" instead of stopping the run."""

    limit: float
    """Share of the rollouts scored at once up to which they are let pass."""
    failed: int = 0
    scored: int = 0

    def note(self, errors: Sequence[RewardError | None]) -> None:
        """Count one batch; raise the first of ``errors`` when there are too many."""
        found = [error for error in errors if error is not None]
        if len(found) > self.limit * len(errors):
            raise found[0]
        self.failed += len(found)
        self.scored += len(errors)

    def take(self) -> tuple[float, float]:
        """``(failed, scored)`` since the last call."""
        counts = (self.failed, self.scored)
        self.failed = self.scored = 0
        return counts


def failure_totals(terms: Mapping[str, WeightedTerm]) -> dict[str, tuple[float, float]]:
    """Share of failures, as ``(sum, count)``, of the terms that let some pass; since the last call."""
    return {f"reward_failures/{name}": term.failures.take() for name, term in terms.items() if term.failures is not None}


def group_term(function: Callable[[Any, Sequence[Any]], Sequence[Any]]) -> Callable[[Any, Sequence[Any]], Sequence[Any]]:
    """Mark ``function(task, outcomes)`` as scoring all rollouts of a group at once."""
    function.scores_group = True
    return function


@dataclass(frozen=True, kw_only=True)
class Judged:
    """What a group term may return instead of bare numbers."""

    values: Sequence[Any]
    """One number per rollout."""
    record: Mapping[str, Any]
    """JSON values that say how they came about; written beside the group's samples as ``judging``."""


class JudgedTerm(Protocol):
    """A group term that asks a judge. Mark its class with `judged_term`."""

    concurrent_groups: int
    """Groups that may be scored at once, in threads. The order of results never depends on it."""

    def __call__(self, task: Any, outcomes: Sequence[Any]) -> Judged: ...

    def begin_step(self, train_step: int) -> None:
        """Rollouts of ``train_step`` follow."""
        ...

    def totals(self) -> Mapping[str, tuple[float, float]]:
        """Logged quantities since the last call as ``(sum, count)``."""
        ...


def judged_term[C: type](term: C) -> C:
    """Mark a class whose instances implement `JudgedTerm`."""
    term.scores_group = term.is_judged = True
    return term


def judged_terms(terms: Mapping[str, WeightedTerm]) -> list[JudgedTerm]:
    """Those of ``terms`` that ask a judge."""
    return [term.function for term in terms.values() if getattr(term.function, "is_judged", False)]


def resolve_terms(
    rewards: Mapping[str, RewardConfig],
    known: Mapping[str, RewardTerm],
    tasks: Callable[[], Sequence[Task]] | None = None,
) -> dict[str, WeightedTerm]:
    """Find the function of every configured term: the adapter's by name, or the user's own ``package.module:function``.

    ``tasks`` gives the training tasks, whose columns a function of the user's own may ask for (`mmrl.reward_binding`).
    """
    terms = {}
    for name, spec in rewards.items():
        if spec.function is not None:
            key = f"rewards.{name}.function"
            function = bind_columns(_import_function(spec.function, key), key, spec.function, tasks)
        elif name in known:
            function = known[name]
        else:
            close = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
            hint = f"did you mean {close[0]!r}?" if close else f"known terms: {', '.join(sorted(known))}."
            raise ConfigError(f"rewards.{name}: no such term; {hint} Your own: {{function: package.module:function}}.")
        if spec.timeout_s is not None:
            if getattr(function, "is_judged", False):
                raise ConfigError(
                    f"rewards.{name}.timeout_s: a judged term keeps time by itself (judge.timeout_s); leave it out."
                )
            function = TimedTerm(function, timeout_s=spec.timeout_s, key=f"rewards.{name}.timeout_s")
        failures = Failures(limit=spec.max_failure_share) if spec.max_failure_share else None
        terms[name] = WeightedTerm(weight=spec.weight, function=function, failures=failures)
    return terms


def score(batch: RolloutBatch, terms: Mapping[str, WeightedTerm]) -> RolloutBatch:
    """The batch with ``reward_terms`` and ``rewards``: each row's weighted sum of the terms that apply, NaN if none does.

    A term of weight 0 is recorded only: it does not make a reward of 0 for a row to which no other term applies.
    """
    columns, judgings = {}, None
    for name, term in terms.items():
        columns[name], records = _score_term(name, term, batch)
        judgings = judgings or records
    values = torch.stack(list(columns.values()))  # [terms, N]
    weights = torch.tensor([term.weight for term in terms.values()])[:, None]
    applies = ~values.isnan() & (weights != 0)
    total = (values.nan_to_num(0.0) * weights).sum(dim=0)
    if total.isinf().any():
        task = batch.tasks[int(total.isinf().nonzero()[0])]
        raise RewardError(
            f"the weighted sum of rewards is {float(total[total.isinf()][0])} for task {task.id!r}; lower a weight."
        )
    rewards = total.masked_fill(~applies.any(dim=0), torch.nan)
    return replace(batch, reward_terms=columns, rewards=rewards, judgings=judgings)


def accuracy(task: ChatTask, completion: Completion) -> float | None:
    """1.0 if the only ``<answer>`` of the completion equals the task's answer, else 0.0; None for a task without an answer.

    Case, surrounding white space, one pair of brackets and a final full stop do not matter; numbers compare by value.
    """
    if not task.answer:
        return None
    given = first_block(completion.text, "answer") if completion.text.count("<answer>") == 1 else None
    return float(given is not None and same_answer(given, task.answer))


def think_answer_format(task: ChatTask, completion: Completion) -> float:
    """1.0 if the completion is exactly ``<think>...</think><answer>...</answer>`` with each tag once, else 0.0."""
    text = completion.text.strip()
    once = all(text.count(tag) == 1 for tag in ("<think>", "</think>", "<answer>", "</answer>"))
    return float(once and re.fullmatch(r"<think>.*</think>\s*<answer>.+</answer>", text, flags=re.DOTALL) is not None)


def same_answer(given: str, expected: str) -> bool:
    """Whether two short answers mean the same: ``(B)``, ``b.`` and ``B``; ``7`` and ``7.0``; but not ``B. because``."""
    left, right = _plain(given), _plain(expected)
    if left == right:
        return bool(left)
    try:
        values = [_value(left), _value(right)]
    except ValueError:
        return False
    if all(isinstance(value, int) for value in values):
        return values[0] == values[1]
    try:
        left_number, right_number = map(float, values)
    except OverflowError:
        return False
    return math.isclose(left_number, right_number, rel_tol=1e-9)


think_answer_format.reads_form = True
accuracy.reads_answer = True

TEXT_TERMS: Mapping[str, RewardTerm] = {"accuracy": accuracy, "format": think_answer_format}
"""Terms that every text modality offers."""


def _plain(answer: str) -> str:
    text = " ".join(answer.split()).casefold().rstrip(".").strip()
    if len(text) >= 2 and text[0] + text[-1] in ("()", "[]", "{}", "$$", '""', "''"):
        text = text[1:-1].strip()
    return text


def _value(answer: str) -> float:
    """A number, also with thousands separators; but ``1,2`` is not 12. Whole numbers stay exact. Raises ValueError."""
    separated = re.fullmatch(r"[+-]?\d{1,3}(,\d{3})+(\.\d*)?", answer)
    plain = answer.replace(",", "") if separated else answer.replace("_", " ")  # Python alone reads 1_2 as 12
    if re.fullmatch(r"[+-]?\d+", plain):
        return int(plain)
    value = float(plain)
    if math.isinf(value) and any(character.isdigit() for character in plain):
        raise ValueError("beyond the range of numbers, where all would be equal")
    return value


def _score_term(
    name: str, term: WeightedTerm, batch: RolloutBatch
) -> tuple[torch.Tensor, tuple[Mapping[str, Any] | None, ...] | None]:
    """The term's column ``[N]`` and, of a term that gives some, each row's record."""
    function, errors = term.function, [None] * len(batch)

    def attempt(rows: Sequence[int], work: Callable[[], Any]) -> Any:
        """What ``work`` gives; None where it fails and failures of the term are let pass."""
        try:
            return work()
        except RewardError as error:
            if term.failures is None:
                raise
            for row in rows:
                errors[row] = error
            return None

    if not getattr(function, "scores_group", False):
        pairs = zip(batch.tasks, batch.outcomes)
        found = [
            attempt([row], lambda task=task, outcome=outcome: _number(name, _call(name, function, task, outcome), task))
            for row, (task, outcome) in enumerate(pairs)
        ]
        if term.failures is not None:
            term.failures.note(errors)
        return torch.tensor([math.nan if number is None else number for number in found], dtype=torch.float32), None
    groups = [(batch.group_ids == group).nonzero()[:, 0].tolist() for group in batch.group_ids.unique().tolist()]

    def score_group(rows: list[int]) -> tuple[list[float], Mapping[str, Any] | None]:
        task = batch.tasks[rows[0]]
        values, record = _call(name, lambda *given: _unpack(function(*given)), task, [batch.outcomes[row] for row in rows])
        if len(values) != len(rows):
            raise RewardError(f"reward {name!r} returned {len(values)} values for {len(rows)} rollouts of task {task.id!r}.")
        return [_number(name, value, task) for value in values], record

    def answer(rows: list[int]) -> tuple[list[float], Mapping[str, Any] | None]:
        return attempt(rows, lambda: score_group(rows)) or ([math.nan] * len(rows), None)

    at_once = min(getattr(function, "concurrent_groups", 1), len(groups))
    if at_once > 1:
        with ThreadPoolExecutor(at_once) as pool:
            answers = list(pool.map(answer, groups))
    else:
        answers = [answer(rows) for rows in groups]
    column = torch.full((len(batch),), torch.nan)
    records: list[Mapping[str, Any] | None] = [None] * len(batch)
    for rows, (values, record) in zip(groups, answers):
        column[rows] = torch.tensor(values, dtype=torch.float32)
        for row in rows:
            records[row] = record
    if term.failures is not None:
        term.failures.note(errors)
    return column, tuple(records) if any(record is not None for record in records) else None


def _unpack(answer: Any) -> tuple[list[Any], Mapping[str, Any] | None]:
    return (list(answer.values), answer.record) if isinstance(answer, Judged) else (list(answer), None)


def _call(name: str, function: RewardTerm, task: Task, outcome: Any) -> Any:
    try:
        return function(task, outcome)
    except NoAnswer as error:
        raise RewardError(f"reward {name!r} {error} on task {task.id!r} (rewards.{name}.timeout_s).") from error
    except Exception as error:
        kind = getattr(error, "kind", type(error).__name__)  # of what was raised in another process
        failure = RewardError(f"reward {name!r} raised {kind} on task {task.id!r}: {error}")
        failure.add_note(f"rollout: {outcome!r}")
        raise failure from error


def _number(name: str, value: Any, task: Task) -> float:
    if value is None:
        return math.nan
    if isinstance(value, (str, bytes)):
        raise RewardError(f"reward {name!r} returned {value!r:.40} for task {task.id!r}; expected a number, a bool or None.")
    try:
        number = float(value.detach() if isinstance(value, torch.Tensor) else value)
    except (TypeError, ValueError, RuntimeError, OverflowError) as error:
        raise RewardError(
            f"reward {name!r} returned {type(value).__name__} for task {task.id!r}; expected a number, a bool or None."
        ) from error
    if abs(number) > torch.finfo(torch.float32).max:  # and so is infinity
        raise RewardError(f"reward {name!r} returned {number} for task {task.id!r}; expected a finite number.")
    return number


def _import_function(path: str, key: str) -> RewardTerm:
    module_name, colon, attribute = path.partition(":")
    if not colon:
        raise ConfigError(f"{key} is {path!r}; expected package.module:function.")
    if str(Path.cwd()) not in sys.path:  # a console script does not look there by itself
        sys.path.append(str(Path.cwd()))
    try:
        function = getattr(importlib.import_module(module_name), attribute)
    except Exception as error:  # whatever the user's module does when it is imported
        raise ConfigError(f"{key} is {path!r}, which cannot be imported ({type(error).__name__}: {error}).") from error
    return function
