"""Everything that is wrong with a dataset at once: ``mmrl data check`` and ``mmrl data show``.

Every row is read, every medium is opened, and each bad row is named with its field and reason. Training itself stops at the
first bad row; this is how to find all of them before it starts.
"""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mmrl.data import DatasetConfig, DatasetTasks, read_tasks
from mmrl.data_files import RowError
from mmrl.data_rows import ALIASES
from mmrl.errors import DataError

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

    from mmrl.chat import ChatTask

OpenMedia = Callable[[Any, Any], object]
"""``open_media(kind, ref)`` opens one medium as training would, or raises `DataError` (a `RowError` names its reason)."""
CheckTask = Callable[[Any], object]
"""``check_task(task)`` raises `DataError` for a task that the policy cannot take, for example a prompt over its limit."""

NUM_EXAMPLES = 5
"""Rows that a report quotes for each reason."""
QUIET_SECONDS = 2.0
"""Nothing is said about progress before this much time."""
REPORT_SECONDS = 5.0
"""Seconds between progress lines where there is no terminal."""


@dataclass(frozen=True, kw_only=True)
class Problem:
    """One bad row."""

    place: str
    """``file:row``, counted from 1; for jsonl the row is the line."""
    row: int
    field: str
    """Column, with the position inside it where there are several: ``images[1]``."""
    reason: str
    """Short phrase that problems are grouped by."""
    detail: str
    """What was found, what was expected, what to do."""


@dataclass(frozen=True, kw_only=True)
class CheckReport:
    """The outcome of `check_dataset`."""

    path: str
    num_rows: int
    problems: tuple[Problem, ...]

    @property
    def ok(self) -> bool:
        return not self.problems

    @property
    def by_reason(self) -> dict[str, list[Problem]]:
        """Problems by reason, the most frequent first."""
        groups: dict[str, list[Problem]] = {}
        for problem in self.problems:
            groups.setdefault(problem.reason, []).append(problem)
        return dict(sorted(groups.items(), key=lambda item: (-len(item[1]), item[0])))

    @property
    def num_bad_rows(self) -> int:
        return len({problem.place for problem in self.problems})

    def to_json(self) -> str:
        """Every problem, and the number of rows for each reason."""
        reasons = {
            reason: {"count": len(group), "first_rows": [problem.row for problem in group[:NUM_EXAMPLES]]}
            for reason, group in self.by_reason.items()
        }
        problems = [asdict(problem) for problem in self.problems]
        tree = {
            "path": self.path,
            "rows": self.num_rows,
            "bad_rows": self.num_bad_rows,
            "reasons": reasons,
            "problems": problems,
        }
        return json.dumps(tree, ensure_ascii=False, indent=2)


def scan(config: DatasetConfig, *, base_dir: Path) -> Iterator[Problem]:
    """Read every row without opening media. A dataset that cannot be opened at all raises `DataError`."""
    for _, problems in _read_all(read_tasks(config, base_dir=base_dir)):
        yield from problems


def check_dataset(
    config: DatasetConfig,
    *,
    base_dir: Path,
    open_media: OpenMedia,
    check_task: CheckTask | None = None,
    console: Console | None = None,
) -> CheckReport:
    """Read every row, open every medium, and let the policy's own limits judge each task; progress goes to ``console``."""
    tasks = read_tasks(config, base_dir=base_dir)
    found: list[Problem] = []
    for index, (task, problems) in with_progress(enumerate(_read_all(tasks)), len(tasks), f"checking {config.path}", console):
        found += problems
        if task is None:
            continue
        errors = list(_open_all(task, open_media))
        if not errors and check_task is not None:
            try:
                check_task(task)
            except DataError as error:
                errors = [_with_reason(error, getattr(error, "field", "row"), "refused by the policy")]
        found += [_problem(tasks, index, error) for error in errors]
    return CheckReport(path=config.path, num_rows=len(tasks), problems=tuple(found))


def render_check(report: CheckReport) -> Table | str:
    """A table with a line per reason for ``rich.print``, or one sentence when nothing is wrong."""
    from rich.table import Table
    from rich.text import Text

    if report.ok:
        return f"{report.path}: {report.num_rows} rows, nothing wrong."
    title = f"{report.path}: {report.num_bad_rows} of {report.num_rows} rows cannot be used"
    table = Table("reason", "rows", "first rows", "first of them", title=title, title_justify="left", show_lines=True)
    for reason, group in report.by_reason.items():
        rows = list(dict.fromkeys(problem.row for problem in group))
        more = ", ..." if len(rows) > NUM_EXAMPLES else ""
        first = group[0]
        numbers = ", ".join(str(row) for row in rows[:NUM_EXAMPLES]) + more
        # Text, since brackets in people's data are not markup
        table.add_row(Text(reason), str(len(rows)), numbers, Text(f"{first.place}: {first.field}: {first.detail}"))
    return table


def describe_task(task: ChatTask, *, max_chars: int = 2000) -> str:
    """A task as a person reads it: turns with their media in place, the answer, and what reward terms receive."""
    lines = [f"task {task.id} ({task.source or 'no file'})", f"domain: {task.domain}"]
    if task.difficulty is not None:
        lines.append(f"difficulty: {task.difficulty:g}")
    for message in task.messages:
        parts = [_describe_part(part, max_chars) for part in message["content"]]
        lines += [f"[{message['role']}]", *(f"  {line}" for part in parts for line in part.split("\n"))]
    for name, text in (("answer", task.answer), ("demonstration", task.demonstration)):
        lines.append(f"{name}: {_shorten(text, max_chars) if text else 'none'}")
    lines += [f"column {name}: {_shorten(repr(value), 200)}" for name, value in task.columns.items()]
    return "\n".join(lines)


def with_progress[T](items: Iterable[T], total: int, label: str, console: Console | None = None) -> Iterator[T]:
    """Pass ``items`` on; after two seconds show a bar on a terminal, or a line now and then elsewhere (stderr)."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    console = console or Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    bar = Progress(*columns, console=console, transient=True)
    line = bar.add_task(label, total=total, start=True)
    next_report = time.monotonic() + QUIET_SECONDS
    try:
        for done, item in enumerate(items, start=1):
            yield item
            bar.update(line, completed=done)
            if time.monotonic() < next_report:
                continue
            if console.is_terminal:
                bar.start()
            else:
                console.print(f"{label}: {done} of {total}", highlight=False)
            next_report = time.monotonic() + REPORT_SECONDS
    finally:
        if bar.live.is_started:
            bar.stop()


def _read_all(tasks: DatasetTasks) -> Iterator[tuple[ChatTask | None, list[Problem]]]:
    """Each row as a task (None if it cannot be read), with what is wrong with it before any medium is opened."""
    expects_answer = _has_answer_column(tasks)
    first_with_id: dict[str, str] = {}
    for index in range(len(tasks)):
        try:
            task = tasks[index]
        except RowError as error:
            yield None, [_problem(tasks, index, error)]
            continue
        errors = []
        first = first_with_id.setdefault(task.id, task.source)
        if first != task.source:
            errors.append(RowError("id", "duplicate id", f"{task.id!r} is also the id of {first}; ids name tasks in reports."))
        if expects_answer and not task.answer.strip():
            errors.append(RowError("answer", "empty answer", f"found {task.answer!r}, while the dataset has an answer column."))
        yield task, [_problem(tasks, index, error) for error in errors]


def _has_answer_column(tasks: DatasetTasks) -> bool:
    mapped = tasks.config.columns
    return bool(mapped["answer"]) if "answer" in mapped else not tasks.rows.columns.isdisjoint(ALIASES["answer"])


def _open_all(task: ChatTask, open_media: OpenMedia) -> Iterator[RowError]:
    from mmrl.chat import media_parts

    counts: Counter[str] = Counter()
    for kind, ref in media_parts(task):
        field = f"{kind}s[{counts[kind]}]"
        counts[kind] += 1
        try:
            open_media(kind, ref)
        except DataError as error:
            yield _with_reason(error, field, f"unreadable {kind}")


def _with_reason(error: DataError, field: str, reason: str) -> RowError:
    if isinstance(error, RowError):
        return RowError(field, error.reason, error.detail)
    return RowError(field, reason, str(error))


def _problem(tasks: DatasetTasks, index: int, error: RowError) -> Problem:
    place = tasks.place(index)
    return Problem(place=place, row=int(place.rpartition(":")[2]), field=error.field, reason=error.reason, detail=error.detail)


def _describe_part(part: dict[str, Any], max_chars: int) -> str:
    if part["type"] == "text":
        return _shorten(part["text"], max_chars)
    return f"<{part['type']}: {_describe_reference(part[part['type']])}>"


def _describe_reference(ref: Any) -> str:
    if isinstance(ref, bytes):
        return f"{len(ref)} bytes"
    if isinstance(ref, list):
        return f"{len(ref)} frames, the first {_describe_reference(ref[0])}"
    if isinstance(ref, dict) and "video" in ref:
        return f"{_describe_reference(ref['video'])}, {ref.get('fps')} fps"
    return ref if isinstance(ref, str) else type(ref).__name__


def _shorten(text: str, max_chars: int) -> str:
    return text if len(text) <= max_chars else f"{text[:max_chars]}... ({len(text)} characters)"
