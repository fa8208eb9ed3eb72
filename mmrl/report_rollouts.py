"""Rollouts in a report: success by task, chosen videos and sweeps, read from the files that ``mmrl rollout`` leaves.

The files are ``eval_info.json``, ``sweep.json`` (`mmrl.heat_map`) and the videos that the first one names. The first has
LeRobot's layout, so that the output of its own evaluation reads the same. What ``mmrl rollout`` adds is shown if it is there.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from mmrl.errors import DataError
from mmrl.heat_map import heat_map_svg
from mmrl.report_data import MEASURED, at, estimate, finite
from mmrl.report_media import Shelf
from mmrl.statistics import mcnemar_exact

MAX_SETS = 12
"""Rollout folders in a page, the newest."""
MAX_ROWS = 200
"""Tasks in a table."""
MAX_VIDEOS = 24
"""Videos of one rollout folder in a page."""
MAX_PROTOCOL = 20_000
"""Characters kept of a protocol."""

_INFO, _SWEEP = MEASURED


def rollout_payload(run_dir: Path, shelf: Shelf, notes: list[str]) -> list[dict[str, Any]]:
    """One entry per folder that holds measurements: ``run_dir`` itself and those below ``rollouts/``.

    Videos and heat maps go onto ``shelf``. The cells of a sweep are in its map and get no entry of their own.
    """
    folders = sorted({path.parent for name in MEASURED for path in _find(run_dir, name)})
    swept = [folder for folder in folders if (folder / _SWEEP).exists()]
    folders = [folder for folder in folders if not any(parent in swept for parent in folder.parents)]
    if len(folders) > MAX_SETS:
        notes.append(f"Rollouts of {len(folders) - MAX_SETS} of {len(folders)} folders are left out.")
        newest = sorted(folders, key=lambda folder: max(path.stat().st_mtime for path in _present(folder)))[-MAX_SETS:]
        folders = [folder for folder in folders if folder in newest]
    return [_entry(folder, run_dir, shelf, notes) for folder in folders]


def _find(run_dir: Path, name: str) -> Iterator[Path]:
    if (run_dir / name).exists():
        yield run_dir / name
    yield from (run_dir / "rollouts").rglob(name)


def _present(folder: Path) -> list[Path]:
    return [folder / name for name in MEASURED if (folder / name).exists()]


def _entry(folder: Path, run_dir: Path, shelf: Shelf, notes: list[str]) -> dict[str, Any]:
    name = folder.relative_to(run_dir).as_posix()
    prefix = "" if name == "." else f"{name}/"
    info = _read(folder / _INFO, prefix, notes)
    tasks = [task for task in info.get("per_task") or [] if isinstance(task, Mapping)]
    rows = list(_rows(tasks, info))
    if len(rows) > MAX_ROWS:
        notes.append(f"{prefix}{_INFO}: {len(rows) - MAX_ROWS} of {len(rows)} rows are left out.")
    protocol = json.dumps(info["protocol"], indent=1) if info.get("protocol") else ""
    return {
        "name": "" if name == "." else name,
        "facts": _facts(info.get("protocol")),
        "rows": rows[:MAX_ROWS],
        "variants": _variants(info),
        "comparison": _comparison(info.get("comparison")),
        "notices": [str(notice) for notice in info.get("notices") or []],
        "videos": _videos(tasks, folder, run_dir, shelf, notes),
        "sweep": _sweep(folder, prefix, shelf, notes),
        "protocol": protocol[:MAX_PROTOCOL],
    }


def _read(path: Path, prefix: str, notes: list[str]) -> dict[str, Any]:
    if not path.exists():
        return {}
    try:
        tree = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        tree = None
    if isinstance(tree, dict):
        return tree
    notes.append(f"{prefix}{path.name}: not readable and left out.")
    return {}


def _facts(protocol: Any) -> dict[str, Any]:
    """What to know before reading the numbers."""
    seeds, hertz = at(protocol, "seeds"), finite(at(protocol, "control_hz"))
    facts = {
        "policy": at(protocol, "policy", "name"),
        "checksum": str(at(protocol, "policy", "checksum") or "")[:12] or None,
        "seeds": f"{seeds[0]} to {seeds[1]}" if isinstance(seeds, list) and len(seeds) == 2 else None,
        "control": f"{hertz:g} Hz" if hertz else None,
        "commands per look": at(protocol, "policy", "execution_horizon"),
    }
    return {name: value for name, value in facts.items() if isinstance(value, str | int)}


def _rows(tasks: list[Mapping[str, Any]], info: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """All tasks together (episodes pooled, and the mean of the tasks), then each."""
    counts = {_task_name(task, tasks): _count(task) for task in tasks}
    counts = {name: count for name, count in counts.items() if count is not None}
    if not counts:  # groups only
        for name, group in (info.get("per_group") or {}).items():
            n, percent = finite(at(group, "n_episodes")), finite(at(group, "pc_success"))
            if n and percent is not None:
                counts[str(name)] = (round(n * percent / 100), int(n))
    total = tuple(map(sum, zip(*counts.values())))
    if len(counts) > 1:
        yield {"name": "all episodes", **estimate({"k": total[0], "n": total[1]})}
        macro = estimate(at(info, "intervals", "macro"))
        if macro:
            yield {"name": "mean of tasks", **macro}
    for name, (k, n) in counts.items():
        yield {"name": name, **estimate({"k": k, "n": n})}


def _task_name(task: Mapping[str, Any], tasks: list[Mapping[str, Any]]) -> str:
    group = str(task.get("task_group", "task"))
    alone = sum(str(other.get("task_group", "task")) == group for other in tasks) == 1
    return group if alone else f"{group} {task.get('task_id', '')}".strip()


def _count(task: Mapping[str, Any]) -> tuple[int, int] | None:
    successes = at(task, "metrics", "successes")
    if not isinstance(successes, list) or not successes:
        return None
    return sum(bool(value) for value in successes), len(successes)


def _variants(info: Mapping[str, Any]) -> dict[str, Any] | None:
    """Success with other words in the instruction, by task; None where there was one wording only."""
    found = info.get("variants")
    if not isinstance(found, Mapping) or len(found) < 2:
        return None
    names = list(dict.fromkeys(name for variant in found.values() for name in at(variant, "per_task") or {}))
    rows = [
        {"name": name, "cells": [estimate(at(variant, "per_task", name, "success")) for variant in found.values()]}
        for name in names
    ]
    first, *others = found
    against = {name: _paired(at(found[name], f"against_{first}")) for name in others}
    return {
        "names": list(found),
        "rows": rows[:MAX_ROWS],
        "against": [{"name": name, **test} for name, test in against.items() if test],
    }


def _comparison(found: Any) -> dict[str, Any] | None:
    """The paired test against another policy on the same episodes, overall and by task."""
    whole = _paired(found)
    if whole is None:
        return None
    parts = {str(name): _paired(part) for name, part in (at(found, "per_task") or {}).items()}
    rows = [{"name": name, **test} for name, test in parts.items() if test]
    if len(rows) != 1:
        rows.insert(0, {"name": "all episodes", **whole})
    return {"name": str(found.get("name", "the other policy")), "rows": rows[:MAX_ROWS]}


def _paired(found: Any) -> dict[str, Any] | None:
    """McNemar's exact test: ``b`` episodes only the first solved, ``c`` only the second."""
    b, c = at(found, "b"), at(found, "c")
    if not (isinstance(b, int) and isinstance(c, int) and b >= 0 and c >= 0):
        return None
    n = at(found, "n")
    cells = {name: estimate({"k": at(found, key), "n": n}) for name, key in (("before", "k_other"), ("after", "k"))}
    gap = at(found, "difference") or {}
    difference = {key: finite(gap.get(key)) for key in ("mean", "low", "high")}
    return {
        **cells,
        "difference": None if None in difference.values() else difference,
        "b": b,
        "c": c,
        "p": mcnemar_exact(b, c),
    }


def _sweep(folder: Path, prefix: str, shelf: Shelf, notes: list[str]) -> dict[str, str] | None:
    """What was swept, and the name of its heat map on the shelf."""
    sweep = _read(folder / _SWEEP, prefix, notes)
    if not sweep:
        return None
    try:
        picture = heat_map_svg(sweep)
    except DataError as error:
        notes.append(f"{prefix}{_SWEEP}: {error}")
        return None
    name = f"{prefix}{_SWEEP}.svg"
    shelf.put_bytes(name, picture.encode())
    return {"path": name, "axes": " and ".join(sweep["axes"])}


def _videos(
    tasks: list[Mapping[str, Any]], folder: Path, run_dir: Path, shelf: Shelf, notes: list[str]
) -> list[dict[str, str]]:
    """The first success and the first failure of each task that were filmed."""
    chosen, total = [], 0
    for task in tasks:
        paths = [str(path) for path in at(task, "metrics", "video_paths") or []]
        successes = at(task, "metrics", "successes") or []
        total += len(paths)
        first: dict[Any, tuple[str, int]] = {}
        for position, path in enumerate(paths):
            number = re.search(r"episode_(\d+)", Path(path).name)
            index = int(number[1]) if number else position
            first.setdefault(bool(successes[index]) if index < len(successes) else None, (path, index))
        for outcome, (path, index) in first.items():
            words = {True: "success", False: "failure", None: "outcome not recorded"}[outcome]
            chosen.append((path, f"{_task_name(task, tasks)}, episode {index}: {words}"))
    videos = []
    for path, caption in chosen[:MAX_VIDEOS]:
        name = _inside(path, folder, run_dir)
        shelf.put(name)
        videos.append({"kind": "video", "path": name, "caption": caption})
    if total > len(videos):
        where = folder.relative_to(run_dir).as_posix()
        notes.append(
            f"{total - len(videos)} of {total} videos of {'the rollouts' if where == '.' else where} are left out: the page "
            f"holds the first success and the first failure of each task, at most {MAX_VIDEOS}. All are in their folder."
        )
    return videos


def _inside(path: str, folder: Path, run_dir: Path) -> str:
    """``path`` as it was written, seen from ``run_dir``: the longest end of it that is a file below ``folder``."""
    parts = Path(path).parts
    for start in range(len(parts)):
        candidate = folder.joinpath(*parts[start:])
        if candidate.is_file():
            return candidate.relative_to(run_dir).as_posix() if candidate.is_relative_to(run_dir) else candidate.as_posix()
    return path
