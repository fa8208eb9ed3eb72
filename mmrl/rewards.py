"""From outcomes to rewards: resolving and scoring terms, and the terms that text modalities share.

A term is a plain function ``term(task, outcome) -> number | bool | None``; None or NaN says that it does not apply to this
rollout. A term that compares the rollouts of a group is marked with `group_term` and maps ``(task, outcomes)`` to one number
per rollout. A term that raises, or returns anything else, stops the run: an error never becomes a zero.
"""

from __future__ import annotations

import difflib
import importlib
import inspect
import math
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from mmrl.adapter import RewardTerm
from mmrl.chat import ChatTask, Completion
from mmrl.config import RewardConfig
from mmrl.errors import ConfigError, RewardError
from mmrl.types import RolloutBatch, Task


@dataclass(frozen=True, kw_only=True)
class WeightedTerm:
    """A reward term and its share of the total."""

    weight: float
    function: RewardTerm


def group_term(function: Callable[[Any, Sequence[Any]], Sequence[Any]]) -> Callable[[Any, Sequence[Any]], Sequence[Any]]:
    """Mark ``function(task, outcomes)`` as scoring all rollouts of a group at once."""
    function.scores_group = True
    return function


def resolve_terms(rewards: Mapping[str, RewardConfig], known: Mapping[str, RewardTerm]) -> dict[str, WeightedTerm]:
    """Find the function of every configured term: the adapter's by name, or the user's own ``package.module:function``."""
    terms = {}
    for name, spec in rewards.items():
        if spec.function is not None:
            function = _import_function(spec.function, f"rewards.{name}.function")
        elif name in known:
            function = known[name]
        else:
            close = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
            hint = f"did you mean {close[0]!r}?" if close else f"known terms: {', '.join(sorted(known))}."
            raise ConfigError(f"rewards.{name}: no such term; {hint} Your own: {{function: package.module:function}}.")
        terms[name] = WeightedTerm(weight=spec.weight, function=function)
    return terms


def score(batch: RolloutBatch, terms: Mapping[str, WeightedTerm]) -> RolloutBatch:
    """The batch with ``reward_terms`` and ``rewards``: each row's weighted sum of the terms that apply, NaN if none does.

    A term of weight 0 is recorded only: it does not make a reward of 0 for a row to which no other term applies.
    """
    columns = {name: _score_term(name, term.function, batch) for name, term in terms.items()}
    values = torch.stack(list(columns.values()))  # [terms, N]
    weights = torch.tensor([term.weight for term in terms.values()])[:, None]
    applies = ~values.isnan() & (weights != 0)
    total = (values.nan_to_num(0.0) * weights).sum(dim=0)
    if total.isinf().any():
        task = batch.tasks[int(total.isinf().nonzero()[0])]
        raise RewardError(
            f"the weighted sum of rewards is {float(total[total.isinf()][0])} for task {task.id!r}; lower a weight."
        )
    return replace(batch, reward_terms=columns, rewards=total.masked_fill(~applies.any(dim=0), torch.nan))


def accuracy(task: ChatTask, completion: Completion) -> float | None:
    """1.0 if the only ``<answer>`` of the completion equals the task's answer, else 0.0; None for a task without an answer.

    Case, surrounding white space, one pair of brackets and a final full stop do not matter; numbers compare by value.
    """
    if not task.answer:
        return None
    answers = re.findall(r"<answer>(.*?)</answer>", completion.text, flags=re.DOTALL)
    return float(len(answers) == 1 and same_answer(answers[0], task.answer))


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
        return math.isclose(_value(left), _value(right), rel_tol=1e-9, abs_tol=1e-12)
    except ValueError:
        return False


TEXT_TERMS: Mapping[str, RewardTerm] = {"accuracy": accuracy, "format": think_answer_format}
"""Terms that every text modality offers."""


def _plain(answer: str) -> str:
    text = " ".join(answer.split()).casefold().rstrip(".").strip()
    if len(text) >= 2 and text[0] + text[-1] in ("()", "[]", "{}", "$$", '""', "''"):
        text = text[1:-1].strip()
    return text


def _value(answer: str) -> float:
    """A number, also with thousands separators; but ``1,2`` is not 12."""
    separated = re.fullmatch(r"[+-]?\d{1,3}(,\d{3})+(\.\d*)?", answer)
    return float(answer.replace(",", "") if separated else answer.replace("_", " "))  # Python alone reads 1_2 as 12


def _score_term(name: str, function: RewardTerm, batch: RolloutBatch) -> torch.Tensor:
    if not getattr(function, "scores_group", False):
        values = [_call(name, function, task, outcome) for task, outcome in zip(batch.tasks, batch.outcomes)]
        return torch.tensor([_number(name, value, task) for value, task in zip(values, batch.tasks)], dtype=torch.float32)
    column = torch.full((len(batch),), torch.nan)
    for group in batch.group_ids.unique().tolist():
        rows = (batch.group_ids == group).nonzero()[:, 0].tolist()
        task = batch.tasks[rows[0]]
        values = _call(name, lambda *given: list(function(*given)), task, [batch.outcomes[row] for row in rows])
        if len(values) != len(rows):
            raise RewardError(f"reward {name!r} returned {len(values)} values for {len(rows)} rollouts of task {task.id!r}.")
        column[rows] = torch.tensor([_number(name, value, task) for value in values], dtype=torch.float32)
    return column


def _call(name: str, function: RewardTerm, task: Task, outcome: Any) -> Any:
    try:
        return function(task, outcome)
    except Exception as error:
        failure = RewardError(f"reward {name!r} raised {type(error).__name__} on task {task.id!r}: {error}")
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
    try:
        inspect.signature(function).bind("task", "outcome")
    except (TypeError, ValueError) as error:  # ValueError: a builtin without a signature
        raise ConfigError(f"{key}: {path} cannot be called as function(task, outcome): {error}.") from error
    return function
