"""Reports of checked datasets, remembered between runs: an unchanged dataset is not checked twice.

A report belongs to the rules that it was made under (the dataset's section, the policy's processor and limits, versions) and
to its files by size and time of change: those of the data, and every medium that a row names. One file per report:
``$MMRL_CACHE_DIR``, else ``$XDG_CACHE_HOME/mmrl``, else ``~/.cache/mmrl``. Deleting it is always safe.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from mmrl import __version__
from mmrl.data import DatasetConfig, DatasetTasks, read_tasks
from mmrl.data_check import CheckerSpec, check_dataset
from mmrl.data_files import RowError, data_files
from mmrl.data_problems import CheckReport

FORMAT = 1
"""Raise it when checks change what they find."""
_LIBRARIES = ("transformers", "tokenizers", "pillow", "qwen-vl-utils", "librosa", "soundfile", "decord", "av")

Notice = Callable[[str], None]


def cache_dir() -> Path:
    """Where reports are kept."""
    own = os.environ.get("MMRL_CACHE_DIR")
    if own:
        return Path(own).expanduser() / "data_checks"
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "mmrl" / "data_checks"


def cached_check(
    config: DatasetConfig,
    *,
    base_dir: Path,
    spec: CheckerSpec,
    workers: int | None = None,
    console: Any = None,
    on_notice: Notice = lambda text: None,
    fresh: bool = False,
) -> CheckReport:
    """`check_dataset`, or the report of the same check of the same files; ``fresh`` never takes a remembered one.

    Processes that start together check once: the others wait for the report of the first. A cache that cannot be read or
    written is no error: a notice says so and the check is made.
    """
    tasks = read_tasks(config, base_dir=base_dir)
    name = cache_key(config, tasks, base_dir, spec)
    path = cache_dir() / f"{name}.jsonl"

    def check(note: Callable[[Sequence[tuple[str, int, int]]], None] = lambda media: None) -> CheckReport:
        return check_dataset(config, base_dir=base_dir, spec=spec, workers=workers, console=console, on_media=note)

    with _only_one(path, on_notice) as usable:
        if not usable:
            return check()
        report = None if fresh else read_report(path, tasks, on_notice)
        if report is None:
            draft = _Draft(path)
            try:
                report = check(draft.add)
                draft.finish(report, on_notice)
            finally:
                draft.discard()
        return report


class _Draft:
    """A report on its way to disk: media as they are looked at, then the report. On a full disk it is forgotten, no more."""

    def __init__(self, path: Path) -> None:
        self.path, self.partial = path, path.with_suffix(".partial")
        self.failure: OSError | None = None
        self.file: Any = None
        self._write({"format": FORMAT})

    def add(self, media: Sequence[tuple[str, int, int]]) -> None:
        for entry in media:
            self._write(entry)

    def finish(self, report: CheckReport, on_notice: Notice) -> None:
        self._write({"report": report.tree()})
        try:
            if self.failure is not None:
                raise self.failure
            self.file.close()
            self.partial.replace(self.path)
        except OSError as error:
            reason = f"the check cannot be remembered ({error.strerror}); set MMRL_CACHE_DIR to another folder."
            on_notice(f"{self.path.parent}: {reason}")

    def discard(self) -> None:
        if self.file is not None and not self.file.closed:
            self.file.close()
        self.partial.unlink(missing_ok=True)

    def _write(self, tree: Any) -> None:
        try:
            if self.file is None and self.failure is None:
                self.file = self.partial.open("w", encoding="utf-8")
            if self.failure is None:
                self.file.write(json.dumps(tree) + "\n")
        except OSError as error:
            self.failure = error


def read_report(path: Path, tasks: DatasetTasks, on_notice: Notice) -> CheckReport | None:
    """The report at ``path`` if it is there, whole, and still true of the media that it is about."""
    try:
        with path.open(encoding="utf-8") as file:
            if json.loads(next(file)) != {"format": FORMAT}:
                return None
            for line in file:
                entry = json.loads(line)
                if isinstance(entry, dict):
                    report = CheckReport.from_tree(entry["report"])
                    report.from_cache = True
                    return report if _still_missing(tasks, report) else None
                if not _is_unchanged(*entry):
                    return None
            raise ValueError("it ends too early")
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError, OverflowError, StopIteration) as error:
        on_notice(f"{path}: a remembered check cannot be read ({type(error).__name__}: {error}); checking again.")
        return None


def cache_key(config: DatasetConfig, tasks: DatasetTasks, base_dir: Path, spec: CheckerSpec) -> str:
    """Digest of everything that a report depends on, except the media that rows name."""
    section = config.model_dump(mode="json", exclude={"check", "on_bad_rows"})
    policies = config.on_bad_rows if isinstance(config.on_bad_rows, dict) else {}
    settings = {
        "format": FORMAT,
        "dataset": section,
        "fixes": sorted(reason for reason, policy in policies.items() if policy == "fix"),
        "base_dir": str(base_dir),
        "files": data_files(tasks.rows),
        "checker": spec.settings,
        "versions": {"mmrl": __version__, **{name: _version(name) for name in _LIBRARIES}},
    }
    return hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()[:32]


@contextmanager
def _only_one(path: Path, on_notice: Notice) -> Iterator[bool]:
    """Hold the lock of a report; False where the folder cannot be used."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        lock = path.with_suffix(".lock").open("w")
    except OSError as error:
        on_notice(f"{path.parent}: checks cannot be remembered ({error.strerror}); set MMRL_CACHE_DIR to another folder.")
        yield False
        return
    with lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield True


def _is_unchanged(path: str, size: int, changed_ns: int) -> bool:
    try:
        stat = os.stat(path)
    except OSError:
        return size == -1
    return (stat.st_size, stat.st_mtime_ns) == (size, changed_ns)


def _still_missing(tasks: DatasetTasks, report: CheckReport) -> bool:
    """Whether no file that was missing has appeared since; what else is wrong with a row stands in files that are compared."""
    for index in report.bad["missing file"].indices if "missing file" in report.bad else ():
        try:
            tasks[index]
        except RowError as error:
            if error.reason == "missing file":
                continue
        return False
    return True


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None
