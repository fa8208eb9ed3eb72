"""What a report reads: the files of a run directory, parsed, and numbers as its page takes them.

Whatever a crash or another program left unreadable becomes a note instead of an error.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from mmrl.errors import DataError
from mmrl.statistics import wilson_interval

MEASURED = ("eval_info.json", "sweep.json")
"""What rollouts leave behind: success by task, and success over what was changed in the scene."""


@dataclass(kw_only=True)
class Run:
    """What a run directory holds, parsed; media and rollouts are read apart."""

    name: str
    trained: bool
    """It was trained here; otherwise the folder holds rollouts of a policy from elsewhere."""
    config: Mapping[str, Any]
    config_text: str
    metrics: list[dict[str, Any]]
    timing: list[dict[str, Any]]
    evaluations: list[dict[str, Any]]
    samples: dict[int, list[dict[str, Any]]]
    notes: list[str] = field(default_factory=list)


def read_run(run_dir: Path) -> Run:
    """Read everything but media and rollouts. Missing parts are empty; unreadable lines and files become notes."""
    config_path, metrics_path = run_dir / "config.yaml", run_dir / "metrics.jsonl"
    measured = any((run_dir / name).exists() for name in MEASURED)
    if not (measured or config_path.exists() or metrics_path.exists()):
        raise DataError(
            f"{run_dir}: holds none of config.yaml, metrics.jsonl, {', '.join(MEASURED)}; expected a run directory "
            "(runs/<name>) or a folder that `mmrl rollout` wrote."
        )
    notes: list[str] = []
    text, config = "", None
    if config_path.exists():
        text = config_path.read_text(encoding="utf-8", errors="replace")
        try:
            config = yaml.safe_load(text)
        except yaml.YAMLError:
            notes.append("config.yaml is not YAML; the summary leaves its values out.")
    evaluations = [_read_json(path, notes) for path in sorted((run_dir / "eval").glob("step_*.json"))]
    samples: dict[int, list[dict[str, Any]]] = {}
    for path in sorted((run_dir / "samples").glob("step_*.jsonl")):
        step = int(re.sub(r"\D", "", path.stem) or 0)
        if rows := _read_lines(path, notes):
            samples[step] = rows
    return Run(
        name=run_dir.resolve().name,
        trained=not measured or metrics_path.exists() or bool(evaluations or samples),
        config=config if isinstance(config, dict) else {},
        config_text=text,
        metrics=_newest_per_step(_read_lines(metrics_path, notes)),
        timing=_newest_per_step(_read_lines(run_dir / "timing.jsonl", notes)),
        evaluations=sorted((e for e in evaluations if "overall" in e), key=lambda e: e.get("train_step", 0)),
        samples=dict(sorted(samples.items())),
        notes=notes,
    )


def _read_lines(path: Path, notes: list[str]) -> list[dict[str, Any]]:
    if not path.exists():
        return []
    rows, bad = [], 0
    with path.open(encoding="utf-8", errors="replace") as lines:
        for line in lines:
            try:
                row = json.loads(line)
            except ValueError:
                bad += bool(line.strip())
                continue
            if isinstance(row, dict):
                rows.append(row)
            else:
                bad += 1
    if bad:
        what = "1 line is" if bad == 1 else f"{bad} lines are"
        notes.append(f"{path.name}: {what} not readable (an interrupted write leaves one) and left out.")
    return rows


def _read_json(path: Path, notes: list[str]) -> dict[str, Any]:
    try:
        tree = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        tree = None
    if isinstance(tree, dict) and isinstance(tree.get("overall"), dict):
        return tree
    notes.append(f"eval/{path.name}: not readable as an evaluation and left out.")
    return {}


def _newest_per_step(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """A resumed run repeats the steps after its checkpoint; the later line counts."""
    by_step = {row["train_step"]: row for row in rows if isinstance(row.get("train_step"), int)}
    return [by_step[step] for step in sorted(by_step)]


def at(tree: Any, *keys: str) -> Any:
    """What lies at ``keys`` in nested mappings; None where there is no such place."""
    for key in keys:
        tree = tree.get(key) if isinstance(tree, Mapping) else None
    return tree


def estimate(cell: Any) -> dict[str, Any] | None:
    """Mean, interval and counts of one cell; ``k`` is None unless the mean is the share ``k`` of ``n`` tasks."""
    if not isinstance(cell, dict):
        return None
    mean, low, high = (finite(cell.get(key)) for key in ("mean", "low", "high"))
    k, n = cell.get("k"), int(finite(cell.get("n"), 0))
    counted = isinstance(k, int) and 0 <= k <= n and n > 0  # a metric that is not yes or no has its sum here, a float
    if counted and mean is None:
        mean = k / n
    if counted and (low is None or high is None):
        low, high = wilson_interval(k, n)
    return None if mean is None else {"mean": mean, "low": low, "high": high, "k": k if counted else None, "n": n}


def finite(value: Any, default: Any = None) -> Any:
    """``value`` as a float if it is a finite number, else ``default``."""
    return float(value) if isinstance(value, int | float) and math.isfinite(value) else default


def numbers(values: Iterable[Any]) -> list[float]:
    """Those of ``values`` that are finite numbers."""
    return [number for number in map(finite, values) if number is not None]


def short(value: float | None) -> float | int | None:
    """Six significant digits, None for NaN; whole numbers without a point. Keeps the page small."""
    if value is None or not math.isfinite(value):
        return None
    if value == int(value) and abs(value) < 2**53:
        return int(value)
    return float(f"{value:.6g}")
