"""Criteria, and the files that hold a sample's static ones."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from mmrl.chat import ChatTask
from mmrl.errors import DataError

Polarity = Literal["positive", "negative"]

CATEGORIES = (
    "auditory evidence identification and grounding",
    "cross-cue verification and distractor elimination",
    "reasoning clarity and flow",
    "reasoning focus and efficiency",
    "domain-specific audio technique",
)
"""What the static criteria S1 .. S5 are about [2608.02831]."""


@dataclass(frozen=True, kw_only=True)
class Criterion:
    """A yes-or-no question about the reasoning of one rollout."""

    id: str
    """``S1`` .. for static ones, ``N1`` .. for those written for a group."""
    text: str
    title: str = ""
    category: str = ""
    polarity: Polarity = "positive"
    """Whether "yes" is good (of static ones always)."""
    weight: float = 0.0
    """Share of a static criterion in static scoring; the shares of a sample sum to 1."""

    @property
    def name(self) -> str:
        """What people are shown."""
        return self.title or self.category or self.text[:60]


StaticRubrics = Callable[[ChatTask], Sequence[Criterion] | None]
"""The static criteria of a task, or None if it has none."""


def read_static_rubrics(path: Path) -> StaticRubrics:
    """Look-up in a file of ``{sample_id, rubrics: [{id, category, text or criterion, weight}]}``, one a line or one JSON list.

    A task's sample is named by its column ``sample_id``, else its column ``id``, else its own id. Weights are scaled to sum to
    1. Raises `DataError` naming the row.
    """
    by_sample: dict[str, tuple[Criterion, ...]] = {}
    for number, row in _rows(path):
        where = f"{path}: row {number}"
        if not isinstance(row, Mapping) or "sample_id" not in row or not isinstance(row.get("rubrics"), list):
            raise DataError(f"{where}: expected an object with sample_id and a list of rubrics.")
        sample = str(row["sample_id"])
        if sample in by_sample:
            raise DataError(f"{where}: sample_id {sample!r} has appeared before; keep one of the rows.")
        by_sample[sample] = _criteria(row["rubrics"], f"{where} (sample {sample!r})")

    def find(task: ChatTask) -> Sequence[Criterion] | None:
        columns = task.columns
        return by_sample.get(str(columns.get("sample_id", columns.get("id", task.id))))

    return find


def _rows(path: Path) -> list[tuple[int, Any]]:
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"{path}: cannot be read as rubrics ({error}).") from error
    if text.lstrip().startswith("["):
        try:
            return list(enumerate(json.loads(text), start=1))
        except ValueError as error:
            raise DataError(f"{path}: not JSON ({error}).") from error
    rows = []
    for number, line in enumerate(text.splitlines(), start=1):
        if line.strip():
            try:
                rows.append((number, json.loads(line)))
            except ValueError as error:
                raise DataError(f"{path}: row {number} is not JSON ({error}).") from error
    return rows


def _criteria(entries: Sequence[Any], where: str) -> tuple[Criterion, ...]:
    found = []
    for position, entry in enumerate(entries, start=1):
        text = (entry.get("text") or entry.get("criterion")) if isinstance(entry, Mapping) else None
        if not isinstance(text, str) or not text.strip():
            raise DataError(f"{where}: rubric {position} has neither text nor criterion.")
        weight = entry.get("weight")
        if isinstance(weight, bool) or not isinstance(weight, int | float) or not 0 <= weight < math.inf:
            raise DataError(f"{where}: rubric {position} has weight {weight!r}; expected a number of 0 or more.")
        name, category = str(entry.get("id") or f"S{position}"), str(entry.get("category") or "")
        title = str(entry.get("title") or "")
        found.append(Criterion(id=name, text=text.strip(), title=title, category=category, weight=float(weight)))
    names, total = [criterion.id for criterion in found], sum(criterion.weight for criterion in found)
    if len(set(names)) != len(names) or not total:
        raise DataError(f"{where}: expected criteria with different ids and weights that sum to 1; found {names}, {total:g}.")
    return tuple(Criterion(id=c.id, text=c.text, title=c.title, category=c.category, weight=c.weight / total) for c in found)
