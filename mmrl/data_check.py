"""Everything that is wrong with a dataset at once: ``mmrl data check``, and what a run does before its first update.

Every row is read, every medium is opened, and the policy's own processor judges each task under the limits of the run; no
weights are loaded. Each bad row is named with its field and reason. Many rows are shared between processes
(`mmrl.data_workers`); a report is remembered (`mmrl.data_cache`), and policies act on it (`mmrl.data_vetting`).
"""

from __future__ import annotations

import hashlib
import importlib
import json
import os
import time
from array import array
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import batched
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mmrl.data import DatasetConfig, DatasetTasks, read_tasks
from mmrl.data_files import RowError
from mmrl.data_problems import CheckReport, Problem
from mmrl.data_rows import ALIASES
from mmrl.errors import DataError

if TYPE_CHECKING:
    from rich.console import Console

    from mmrl.chat import ChatTask

OpenMedia = Callable[[Any, Any], object]
"""``open_media(kind, ref)`` opens one medium as training would, or raises `DataError` (a `RowError` names its reason)."""
CheckTask = Callable[[Any], object]
"""``check_task(task)`` raises `DataError` for a task that the policy cannot take, for example a prompt over its limit."""
Checker = Callable[[Sequence[Any]], Sequence[Sequence[RowError]]]
"""``checker(tasks)`` gives for each task that could be read what is wrong with it; its ``expects_answer`` (False where absent)
says that something in the run needs answers."""

CHUNK_ROWS = 32
"""Rows that are checked between two looks at the progress, and by a worker at a time."""
TASKS_AT_ONCE = 8
"""Tasks that a checker gets together, since calling a processor costs more than a small picture does."""
QUIET_SECONDS = 2.0
"""Nothing is said about progress before this much time."""
REPORT_SECONDS = 5.0
"""Seconds between progress lines where there is no terminal."""


@dataclass(frozen=True, kw_only=True)
class CheckerSpec:
    """How a process builds its checker: cheap to hold and to send, nothing is loaded before `build`."""

    function: str
    """``package.module:name``; called with ``arguments`` it gives a `Checker`."""
    arguments: tuple[Any, ...]
    settings: str
    """Everything that the verdict depends on besides the data, as text; a remembered report is of the same settings."""

    def build(self) -> Checker:
        module, _, name = self.function.partition(":")
        return getattr(importlib.import_module(module), name)(*self.arguments)


@dataclass(kw_only=True)
class Chunk:
    """What is known of some rows once they are checked."""

    num_rows: int
    problems: list[tuple[int, Problem]] = field(default_factory=list)
    """With the index of the task."""
    ids: list[tuple[int, int]] = field(default_factory=list)
    """Index and 64-bit digest of the id, of rows whose data give one."""
    media: list[tuple[str, int, int]] = field(default_factory=list)
    """Path, size and time of change in nanoseconds of files that rows name."""


def media_checker(open_media: OpenMedia, check_task: CheckTask | None = None) -> Checker:
    """A checker that opens every medium, then lets ``check_task`` judge what could be opened."""

    def check_one(task: ChatTask) -> list[RowError]:
        errors = list(open_all(task, open_media))
        if not errors and check_task is not None:
            try:
                check_task(task)
            except DataError as error:
                return [with_reason(error, getattr(error, "field", "row"), "refused by the policy")]
        return errors

    return lambda tasks: [check_one(task) for task in tasks]


def file_spec(opener: str, limits: Any) -> CheckerSpec:
    """Checks media under ``limits`` (a rollout section) where no policy is known."""
    settings = json.dumps({"opener": opener, "limits": limits.model_dump(mode="json")}, sort_keys=True)
    return CheckerSpec(function="mmrl.data_check:build_media_checker", arguments=(opener, limits), settings=settings)


def build_media_checker(opener: str, limits: Any) -> Checker:
    module, _, name = opener.partition(":")
    return media_checker(getattr(importlib.import_module(module), name)(limits))


def scan(config: DatasetConfig, *, base_dir: Path) -> Iterator[Problem]:
    """Read every row without opening media. A dataset that cannot be opened at all raises `DataError`."""
    report = check_dataset(config, base_dir=base_dir, open_media=lambda kind, ref: None)
    yield from report.problems


def check_dataset(
    config: DatasetConfig,
    *,
    base_dir: Path,
    open_media: OpenMedia | None = None,
    check_task: CheckTask | None = None,
    checker: Checker | None = None,
    spec: CheckerSpec | None = None,
    workers: int | None = None,
    console: Console | None = None,
    on_media: Callable[[Sequence[tuple[str, int, int]]], None] = lambda media: None,
) -> CheckReport:
    """Read every row, open every medium, and let the policy's own limits judge each task; progress goes to ``console``.

    Give either functions or a ``checker`` (used in this process) or a ``spec``, which ``workers`` processes build for
    themselves (None: as many as there are cores, one for few rows). ``on_media`` is told which files were looked at.
    """
    tasks = read_tasks(config, base_dir=base_dir)
    workers = 1 if spec is None else choose_workers(len(tasks), workers)
    if workers > 1 and spec is not None:
        from mmrl.data_workers import check_in_processes

        chunks = check_in_processes(config, base_dir, spec, len(tasks), workers)
    else:
        if checker is None:
            checker = spec.build() if spec is not None else media_checker(open_media or (lambda kind, ref: None), check_task)
        chunks = (check_rows(tasks, checker, rows) for rows in split_rows(len(tasks)))
    report = CheckReport(path=config.path, num_rows=len(tasks))
    indices, digests = array("Q"), array("Q")
    found: list[tuple[int, Problem]] = []
    for chunk in with_progress(chunks, len(tasks), f"checking {config.path}", console, size=lambda chunk: chunk.num_rows):
        report.add(chunk.problems)
        indices.extend(index for index, _ in chunk.ids)
        digests.extend(digest for _, digest in chunk.ids)
        on_media(chunk.media)
    found = _duplicates(tasks, indices, digests)
    if found:
        report.add(found)
        report.problems.sort(key=lambda problem: _order(tasks, problem))
    return report


def choose_workers(num_rows: int, workers: int | None) -> int:
    """As asked for; by default one process per core that has 200 rows or more to check."""
    if workers is not None:
        return max(1, min(workers, -(-num_rows // CHUNK_ROWS)))
    return max(1, min(len(os.sched_getaffinity(0)), num_rows // 200))


def split_rows(num_rows: int) -> Iterator[range]:
    return (range(start, min(start + CHUNK_ROWS, num_rows)) for start in range(0, num_rows, CHUNK_ROWS))


def check_rows(tasks: DatasetTasks, checker: Checker, rows: range) -> Chunk:
    """Check the tasks at some indices. What a fix mends is reported too, and what it leaves is checked on."""
    strict = DatasetTasks(tasks.rows, tasks.config.model_copy(update={"on_bad_rows": "fail"}), tasks.media_root, tasks.indices)
    expects_answer = _has_answer_column(tasks) or getattr(checker, "expects_answer", False)
    chunk = Chunk(num_rows=len(rows))

    def note(index: int, error: RowError) -> None:
        problem = Problem(
            place=tasks.place(index), row=tasks.number(index), field=error.field, reason=error.reason, detail=error.detail
        )
        chunk.problems.append((index, problem))

    for group in batched(rows, TASKS_AT_ONCE):
        readable = {index: task for index in group if (task := _read(strict, tasks, index, note)) is not None}
        found = checker(list(readable.values())) if readable else ()
        for (index, task), errors in zip(readable.items(), found):
            if task.id != task.source:
                chunk.ids.append((index, int.from_bytes(hashlib.blake2b(task.id.encode(), digest_size=8).digest())))
            if expects_answer and not task.answer.strip():
                who = "the dataset has an answer column" if _has_answer_column(tasks) else "rewards of the run read it"
                note(index, RowError("answer", "empty answer", f"found {task.answer!r}, while {who}."))
            for error in errors:
                note(index, error)
            chunk.media += [entry for _, ref in _media(task) for entry in _stamps(ref)]
    chunk.problems.sort(key=lambda found: found[0])  # of a group, what could not be read came first
    chunk.media = list(dict.fromkeys(chunk.media))
    return chunk


def open_all(task: ChatTask, open_media: OpenMedia) -> Iterator[RowError]:
    """What is wrong with each medium of a task, under the name ``images[1]`` of its place."""
    counts: Counter[str] = Counter()
    for kind, ref in _media(task):
        name = f"{kind}s[{counts[kind]}]"
        counts[kind] += 1
        try:
            open_media(kind, ref)
        except DataError as error:
            yield with_reason(error, name, f"unreadable {kind}")


def with_reason(error: DataError, field: str, reason: str) -> RowError:
    """``error`` under the name ``field``; its own reason if it has one."""
    if isinstance(error, RowError):
        return RowError(field, error.reason, error.detail)
    return RowError(field, reason, str(error))


def with_progress[T](
    items: Iterable[T],
    total: int,
    label: str,
    console: Console | None = None,
    *,
    size: Callable[[T], int] = lambda item: 1,
) -> Iterator[T]:
    """Pass ``items`` on; after two seconds show a bar on a terminal, or a line now and then elsewhere (stderr)."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    console = console or Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    bar = Progress(*columns, console=console, transient=True)
    line = bar.add_task(label, total=total, start=True)
    next_report, done = time.monotonic() + QUIET_SECONDS, 0
    try:
        for item in items:
            yield item
            done += size(item)
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


def _read(strict: DatasetTasks, tasks: DatasetTasks, index: int, note: Callable[[int, RowError], None]) -> ChatTask | None:
    """The task at ``index``, None if it cannot be read; a fix that it needed is noted."""
    try:
        return strict[index]
    except RowError as error:
        note(index, error)
        if tasks.config.policy(error.reason) != "fix":
            return None
    try:
        return tasks[index]
    except RowError as error:
        note(index, error)
        return None


def _duplicates(tasks: DatasetTasks, indices: array[int], digests: array[int]) -> list[tuple[int, Problem]]:
    """Rows whose id an earlier row has. Eight bytes a row are kept; only rows of equal digest are read again."""
    import numpy as np

    if not len(digests):
        return []
    values = np.frombuffer(digests, dtype=np.uint64)
    order = np.argsort(values, kind="stable")
    same = values[order][1:] == values[order][:-1]
    suspects = np.zeros(len(order), dtype=bool)
    suspects[1:] |= same
    suspects[:-1] |= same
    found, first_with_id = [], {}
    for position in np.sort(order[suspects]).tolist():
        index = indices[position]
        task = tasks[index]
        first = first_with_id.setdefault(task.id, task.source)
        if first != task.source:
            detail = f"{task.id!r} is also the id of {first}; ids name tasks in reports (on_bad_rows: {{duplicate id: fix}})."
            row = tasks.number(index)
            problem = Problem(place=task.source, row=row, field="id", reason="duplicate id", detail=detail)
            found.append((index, problem))
    return found


def _order(tasks: DatasetTasks, problem: Problem) -> tuple[str, int]:
    return problem.place.rpartition(":")[0], problem.row


def _has_answer_column(tasks: DatasetTasks) -> bool:
    mapped = tasks.config.columns
    if "answer" in mapped:
        return bool(mapped["answer"])
    return not tasks.columns.isdisjoint(ALIASES["answer"])


def _media(task: ChatTask) -> Iterator[tuple[str, Any]]:
    from mmrl.chat import media_parts

    return media_parts(task)


def _stamps(ref: Any) -> Iterator[tuple[str, int, int]]:
    """Files that a reference names, with size and time of change."""
    if isinstance(ref, str):
        try:
            stat = os.stat(ref)
        except OSError:
            yield ref, -1, 0
        else:
            yield ref, stat.st_size, stat.st_mtime_ns
    elif isinstance(ref, dict):
        for value in ref.values():
            yield from _stamps(value)
    elif isinstance(ref, (list, tuple)):
        for value in ref:
            yield from _stamps(value)
