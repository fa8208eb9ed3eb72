"""Policies for bad rows: a checked dataset without the rows that a run must not see. Used by adapters and the command line."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from mmrl.data import DatasetConfig, DatasetTasks, read_tasks
from mmrl.data_cache import cached_check
from mmrl.data_check import CheckerSpec
from mmrl.data_problems import CheckReport
from mmrl.errors import DataError


def vetted_tasks(
    config: DatasetConfig,
    *,
    base_dir: Path,
    spec: CheckerSpec,
    on_notice: Callable[[str], None] | None = None,
    console: Any = None,
) -> DatasetTasks:
    """The rows of a dataset that a run may use, after the check that ``check: true`` asks for.

    Raises `DataError` when rows with the policy ``fail`` were found. What was dropped, fixed or kept is said in ``notices`` of
    the tasks. The check is remembered (`mmrl.data_cache`), so asking again costs little.
    """
    tasks = read_tasks(config, base_dir=base_dir)
    if not config.check:
        return tasks
    notice = on_notice or (lambda text: print(f"mmrl: {text}", file=sys.stderr))
    report = cached_check(config, base_dir=base_dir, spec=spec, console=console, on_notice=notice)
    return apply_policies(tasks, report)


def apply_policies(tasks: DatasetTasks, report: CheckReport) -> DatasetTasks:
    """Leave out, mend and keep rows as ``on_bad_rows`` says; raise `DataError` for those that must not be there."""
    config = tasks.config
    by_policy: dict[str, list[str]] = {}
    for reason in report.by_reason:
        by_policy.setdefault(config.policy(reason), []).append(reason)
    if failing := by_policy.get("fail"):
        first = next(problem for problem in report.problems if problem.reason in failing)
        count = len(set().union(*(report.bad[reason].indices for reason in failing)))
        raise DataError(
            f"{config.path}: {count} of {report.num_rows} rows cannot be used: {report.summary(failing)}. First: {first} "
            f"All of them: mmrl data check. Mend them, or set on_bad_rows: {{{failing[0]}: drop}}."
        )
    dropped = {index for reason in by_policy.get("drop", ()) for index in report.bad[reason].indices}
    mended = {index for reason in by_policy.get("fix", ()) for index in report.bad[reason].indices if reason == "duplicate id"}
    words = {"drop": "left out", "fix": "mended", "keep": "kept as they are"}
    notices = [
        f"{config.path}: rows {words[policy]} (on_bad_rows): {report.summary(reasons)}" for policy, reasons in by_policy.items()
    ]
    return tasks.mended(leave_out=dropped, rename=mended - dropped, notices=notices)
