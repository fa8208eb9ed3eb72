"""What a dataset check found: bad rows by reason, as a table, as JSON, and as the tree that is remembered."""

from __future__ import annotations

import json
from array import array
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

from mmrl.data_reasons import EXACT_FIXES, Policy

if TYPE_CHECKING:
    from rich.table import Table

    from mmrl.data import DatasetConfig

NUM_EXAMPLES = 5
"""Rows that a report quotes for each reason."""
MAX_DETAILS = 1000
"""Problems of each reason that are kept in words; of the others only the row is kept, so that memory stays bounded."""


@dataclass(frozen=True, kw_only=True)
class Problem:
    """One bad row."""

    place: str
    """``file:row``, counted from 1; for jsonl the row is the line."""
    row: int
    field: str
    """Column, with the position inside it where there are several: ``images[1]``."""
    reason: str
    """Short phrase that problems are grouped by, one of `mmrl.data_reasons`."""
    detail: str
    """What was found, what was expected, what to do."""

    def __str__(self) -> str:
        return f"{self.place}: {self.field}: {self.reason}: {self.detail}"


@dataclass
class BadRows:
    """The rows that are bad for one reason, in order."""

    indices: array[int] = field(default_factory=lambda: array("Q"))
    """Positions among the tasks, from 0; a row with two such problems once."""
    rows: array[int] = field(default_factory=lambda: array("Q"))
    """Row numbers as people count them."""


class CheckReport:
    """The outcome of a check."""

    def __init__(self, *, path: str, num_rows: int) -> None:
        self.path, self.num_rows = path, num_rows
        self.bad: dict[str, BadRows] = {}
        """Rows by reason."""
        self.problems: list[Problem] = []
        """In words, the first `MAX_DETAILS` of each reason, by row."""
        self.num_problems = 0
        self.from_cache = False
        self._kept: dict[str, int] = {}

    def add(self, found: Iterable[tuple[int, Problem]]) -> None:
        """Problems with the index of their task; the indices of successive calls do not decrease."""
        for index, problem in found:
            self.num_problems += 1
            rows = self.bad.setdefault(problem.reason, BadRows())
            if not rows.indices or rows.indices[-1] != index:
                rows.indices.append(index)
                rows.rows.append(problem.row)
            kept = self._kept.get(problem.reason, 0)
            if kept < MAX_DETAILS:
                self._kept[problem.reason] = kept + 1
                self.problems.append(problem)

    @property
    def ok(self) -> bool:
        return not self.bad

    @property
    def by_reason(self) -> dict[str, list[Problem]]:
        """Problems in words by reason, the most frequent first."""
        groups: dict[str, list[Problem]] = {}
        for problem in self.problems:
            groups.setdefault(problem.reason, []).append(problem)
        return dict(sorted(groups.items(), key=lambda item: (-len(self.bad[item[0]].rows), item[0])))

    @property
    def num_bad_rows(self) -> int:
        return len(set().union(*(rows.indices for rows in self.bad.values())))

    def summary(self, reasons: Iterable[str]) -> str:
        """``missing file (2 rows: 3, 7), not JSON (1 row: 5)``."""
        return ", ".join(f"{reason} ({_rows_in_words(self.bad[reason].rows)})" for reason in reasons)

    def tree(self) -> dict[str, Any]:
        """Everything as JSON values; `from_tree` undoes it."""
        reasons = {
            reason: {"count": len(self.bad[reason].rows), "rows": list(self.bad[reason].rows),
                     "indices": list(self.bad[reason].indices)}
            for reason in self.by_reason
        }  # fmt: skip
        problems = [asdict(problem) for problem in self.problems]
        return {"path": self.path, "rows": self.num_rows, "bad_rows": self.num_bad_rows, "num_problems": self.num_problems,
                "reasons": reasons, "problems": problems}  # fmt: skip

    @classmethod
    def from_tree(cls, tree: Mapping[str, Any]) -> CheckReport:
        report = cls(path=tree["path"], num_rows=tree["rows"])
        report.problems = [Problem(**entry) for entry in tree["problems"]]
        report.bad = {
            reason: BadRows(array("Q", entry["indices"]), array("Q", entry["rows"]))
            for reason, entry in tree["reasons"].items()
        }
        report.num_problems = tree["num_problems"]
        return report

    def to_json(self) -> str:
        """Every problem, and the rows of each reason."""
        tree = self.tree()
        for entry in tree["reasons"].values():
            del entry["indices"]
        return json.dumps(tree, ensure_ascii=False, indent=2)


def render_check(report: CheckReport, config: DatasetConfig | None = None) -> Table | str:
    """A table with a line per reason for ``rich.print``, or one sentence when nothing is wrong.

    With ``config`` a column says what becomes of these rows in a run (``on_bad_rows``).
    """
    from rich.table import Table
    from rich.text import Text

    cached = " (as checked before)" if report.from_cache else ""
    if report.ok:
        return f"{report.path}: {report.num_rows} rows, nothing wrong{cached}."
    title = f"{report.path}: {report.num_bad_rows} of {report.num_rows} rows cannot be used{cached}"
    heads = ["reason", "rows", *(["policy"] if config else []), "first rows", "first of them"]
    table = Table(*heads, title=title, title_justify="left", show_lines=True)
    for reason, group in report.by_reason.items():
        rows = report.bad[reason].rows
        more = ", ..." if len(rows) > NUM_EXAMPLES else ""
        first = group[0]
        numbers = ", ".join(str(row) for row in rows[:NUM_EXAMPLES]) + more
        policy = [policy_in_words(config, reason)] if config else []
        # Text, since brackets in people's data are not markup
        table.add_row(Text(reason), str(len(rows)), *policy, numbers, Text(f"{first.place}: {first.field}: {first.detail}"))
    return table


def policy_in_words(config: DatasetConfig, reason: str) -> str:
    """``fail`` with what else could be chosen, or the chosen policy."""
    policy: Policy = config.policy(reason)
    return "fail (or fix)" if policy == "fail" and reason in EXACT_FIXES else policy


def _rows_in_words(rows: array[int]) -> str:
    more = ", ..." if len(rows) > NUM_EXAMPLES else ""
    numbers = ", ".join(str(row) for row in rows[:NUM_EXAMPLES])
    return f"{len(rows)} {'row' if len(rows) == 1 else 'rows'}: {numbers}{more}"
