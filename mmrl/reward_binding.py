"""What a reward function may ask for by name, checked before any model is loaded.

A function of your own is called as ``function(task, outcome)``. Further parameters are filled by name: fields of the task
(``answer``, ``id``, ``domain``, ``difficulty``), every other column of a dataset row, and ``media``, what the policy was shown
(`mmrl.chat.MediaFacts`, with ``rollout.media_facts``). A column that this row lacks is None; a name that no row has is an
error.
"""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from typing import Any

from mmrl.adapter import RewardTerm
from mmrl.errors import ConfigError
from mmrl.types import Task

_NOT_OFFERED = frozenset({"messages", "demonstration", "prefill", "hint", "columns", "source"})
_ROWS_LOOKED_AT = 8

MEDIA = "media"
"""The name of what was shown to the policy, a tuple of `mmrl.chat.MediaFacts`."""


@dataclass(frozen=True, kw_only=True)
class BoundTerm:
    """A term that also gets columns by name."""

    function: RewardTerm
    columns: tuple[str, ...]
    scores_group: bool = False

    def __call__(self, task: Task, outcome: Any) -> Any:
        first = outcome[0] if self.scores_group else outcome
        return self.function(task, outcome, **{name: column_value(task, first, name) for name in self.columns})


def bind_columns(function: RewardTerm, key: str, path: str, tasks: Callable[[], Sequence[Task]] | None) -> RewardTerm:
    """``function`` itself, or a `BoundTerm` where it has further parameters.

    ``tasks`` gives the training tasks; they are only looked at when the function asks for more than task and outcome. Raises
    `ConfigError` naming ``key`` (the config key) and what is available.
    """
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError) as error:  # ValueError: a builtin without a signature
        raise ConfigError(f"{key}: {path} cannot be called as function(task, outcome): {error}.") from error
    extra = _further_parameters(signature)
    if not extra or tasks is None:
        _require_two(signature, key, path)
        return function
    offered = available_columns(tasks())
    wanted = tuple(name for name, required in extra.items() if name in offered or required)
    try:
        signature.bind("task", "outcome", **dict.fromkeys(wanted))
    except TypeError as error:
        raise ConfigError(f"{key}: {path} cannot be called as function(task, outcome, ...): {error}.") from error
    missing = [name for name in wanted if name not in offered]
    if missing:
        close = difflib.get_close_matches(missing[0], offered, n=1, cutoff=0.6)
        hint = f" (did you mean {close[0]!r}?)" if close else ""
        raise ConfigError(
            f"{key}: {path} asks for {', '.join(missing)}, which the tasks do not have{hint}; available besides task and "
            f"outcome: {', '.join(offered)}."
        )
    return BoundTerm(function=function, columns=wanted, scores_group=getattr(function, "scores_group", False))


def available_columns(source: Sequence[Task]) -> list[str]:
    """Names that a reward may ask for: those of the first rows of ``source``."""
    names: dict[str, None] = {}
    for index in range(min(len(source), _ROWS_LOOKED_AT)):
        task = source[index]
        names |= dict.fromkeys(item.name for item in fields(task) if item.name not in _NOT_OFFERED)
        names |= dict.fromkeys(getattr(task, "columns", {}))
        if hasattr(task, "messages"):
            names[MEDIA] = None
    return [name for name in names if name.isidentifier()]


def column_value(task: Task, outcome: Any, name: str) -> Any:
    """What a reward gets for ``name``; a column of the dataset before a field of the task, None where this row has none."""
    if name == MEDIA and hasattr(outcome, MEDIA):
        return outcome.media
    columns = getattr(task, "columns", {})
    return columns[name] if name in columns else getattr(task, name, None)


def _further_parameters(signature: inspect.Signature) -> dict[str, bool]:
    """Parameters beyond the first two that can be given by name, and whether each is required."""
    named = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    positional = [p for p in signature.parameters.values() if p.kind in named[:1] or p.kind is p.POSITIONAL_ONLY]
    first_two = {p.name for p in positional[:2]}
    return {p.name: p.default is p.empty for p in signature.parameters.values() if p.kind in named and p.name not in first_two}


def _require_two(signature: inspect.Signature, key: str, path: str) -> None:
    try:
        signature.bind("task", "outcome")
    except TypeError as error:
        raise ConfigError(f"{key}: {path} cannot be called as function(task, outcome): {error}.") from error
