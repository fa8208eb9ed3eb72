"""One self-contained page about a run: held-out results, curves, samples, timing, config.

`write_report` reads a run directory and nothing else, so it works during a run, after a crash, and on another machine. The
page fetches nothing: style, script and media are inside it. Python prepares numbers; ``report_assets/page.js`` draws them.
What cannot be read or is left out to keep the page small is said in the page's notes.
"""

from __future__ import annotations

import base64
import json
import math
import mimetypes
import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from html import escape
from importlib import resources
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from mmrl.errors import DataError
from mmrl.statistics import difference_interval, wilson_interval

MAX_POINTS = 600
"""Points per curve; longer runs keep the lowest and highest value of each stretch."""
MAX_SAMPLE_STEPS = 40
"""Sample steps whose text is in the page: the first, the newest, and evenly spaced ones between."""
MAX_MEDIA_STEPS = 6
"""Sample steps whose media are in the page: the first and the newest."""
MAX_MEDIA_BYTES = 32 * 2**20
"""Media bytes in the page, newest steps first."""
MAX_TEXT = 20_000
"""Characters kept of a prompt, a completion or a reference."""


@dataclass(kw_only=True)
class Run:
    """What a run directory holds, parsed."""

    name: str
    config: Mapping[str, Any]
    config_text: str
    metrics: list[dict[str, Any]]
    timing: list[dict[str, Any]]
    evaluations: list[dict[str, Any]]
    samples: dict[int, list[dict[str, Any]]]
    notes: list[str] = field(default_factory=list)


def write_report(run_dir: Path) -> Path:
    """Write ``report.html`` into ``run_dir`` from the files there and return its path."""
    run = read_run(run_dir)
    page = render(run, run_dir)
    target = run_dir / "report.html"
    temporary = run_dir / "report.html.tmp"  # a browser that reloads during a run never sees half a page
    temporary.write_text(page, encoding="utf-8")
    os.replace(temporary, target)
    return target


def read_run(run_dir: Path) -> Run:
    """Read everything but media. Missing parts are empty; unreadable lines and files become notes."""
    config_path, metrics_path = run_dir / "config.yaml", run_dir / "metrics.jsonl"
    if not config_path.exists() and not metrics_path.exists():
        raise DataError(f"{run_dir}: holds neither config.yaml nor metrics.jsonl; expected a run directory (runs/<name>).")
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
        config=config if isinstance(config, dict) else {},
        config_text=text,
        metrics=_newest_per_step(_read_lines(metrics_path, notes)),
        timing=_newest_per_step(_read_lines(run_dir / "timing.jsonl", notes)),
        evaluations=sorted((e for e in evaluations if "overall" in e), key=lambda e: e.get("train_step", 0)),
        samples=dict(sorted(samples.items())),
        notes=notes,
    )


def render(run: Run, run_dir: Path) -> str:
    """The page as text. ``run_dir`` is where media paths start."""
    payload = {
        "summary": _summary(run),
        "held_out": _held_out(run.evaluations),
        "curves": _curves(run),
        "samples": _sample_payload(run, run_dir),
        "timing": _timing(run.timing),
        "config": run.config_text,
        "notes": run.notes,  # last: the parts above add to them
    }
    parts = {"TITLE": escape(run.name), "DATA": _embed(payload), "STYLE": _asset("page.css"), "SCRIPT": _asset("page.js")}
    # One pass over the template, so that nothing inside a part is ever taken for a slot.
    return re.sub(r"<!--([A-Z_]+)-->", lambda match: parts[match[1]], _asset("page.html"))


def _asset(name: str) -> str:
    return (resources.files("mmrl") / "report_assets" / name).read_text(encoding="utf-8")


def _embed(payload: Any) -> str:
    """JSON that may stand inside ``<script>``: no text in it can close the element or open a comment."""
    text = json.dumps(payload, allow_nan=False, separators=(",", ":"))
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


# --- reading ---------------------------------------------------------------------------------------------------------------


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


# --- summary and tables ----------------------------------------------------------------------------------------------------


def _summary(run: Run) -> dict[str, Any]:
    """Facts of the first line, by label."""
    steps = run.metrics[-1]["train_step"] if run.metrics else 0
    planned = _at(run.config, "trainer", "num_steps")
    policy = _at(run.config, "policy")
    if isinstance(policy, dict):
        keys = ("name", "model", "path", "checkpoint", "kind", "type")
        policy = next((policy[key] for key in keys if isinstance(policy.get(key), str)), None)
    facts = {
        "algorithm": _at(run.config, "algorithm", "name") or _at(run.config, "algorithm"),
        "modality": run.config.get("modality"),
        "policy": policy.rstrip("/").rsplit("/", 1)[-1] if isinstance(policy, str) else None,
        "steps": f"{steps} of {planned}" if isinstance(planned, int) and steps < planned else steps,
        "seed": run.config.get("seed"),
        "seconds": sum(_numbers(row.get("step_s") for row in run.timing)) or None,
    }
    return {key: value for key, value in facts.items() if isinstance(value, str | int | float)}


def _at(tree: Any, *keys: str) -> Any:
    for key in keys:
        tree = tree.get(key) if isinstance(tree, Mapping) else None
    return tree


def _held_out(evaluations: list[dict[str, Any]]) -> dict[str, Any] | None:
    """First and last evaluation side by side, with the interval of their difference."""
    if not evaluations:
        return None
    first, last = evaluations[0], evaluations[-1]
    names = sorted({**(first.get("domains") or {}), **(last.get("domains") or {})})
    pairs = [("all tasks", first["overall"], last["overall"])]
    if len(names) > 1:
        pairs += [(name, _at(first, "domains", name), _at(last, "domains", name)) for name in names]
    rows = []
    for name, *cells in pairs:
        before, after = (_estimate(cell) for cell in cells)
        rows.append({"name": name, "before": before, "after": after, "difference": _difference(before, after)})
    shown = [cell for row in rows for cell in (row["before"], row["after"]) if cell]
    return {
        "metric": str(last.get("metric", "metric")),
        "split": str(last.get("split", "eval")),
        "steps": [first.get("train_step", 0)] * (first is not last) + [last.get("train_step", 0)],
        "percent": all(cell["k"] is not None for cell in shown),
        "rows": rows if shown else [],
    }


def _estimate(cell: Any) -> dict[str, Any] | None:
    """Mean, interval and counts of one cell; ``k`` is None unless the mean is the share ``k`` of ``n`` tasks."""
    if not isinstance(cell, dict):
        return None
    mean, low, high = (_finite(cell.get(key)) for key in ("mean", "low", "high"))
    k, n = cell.get("k"), int(_finite(cell.get("n"), 0))
    counted = isinstance(k, int) and 0 <= k <= n and n > 0  # a metric that is not yes or no has its sum here, a float
    if counted and mean is None:
        mean = k / n
    if counted and (low is None or high is None):
        low, high = wilson_interval(k, n)
    return None if mean is None else {"mean": mean, "low": low, "high": high, "k": k if counted else None, "n": n}


def _difference(before: dict[str, Any] | None, after: dict[str, Any] | None) -> dict[str, Any] | None:
    if before is None or after is None:
        return None
    ends = [(cell["mean"], cell["low"], cell["high"]) for cell in (before, after)]
    low, high = (None, None) if None in (*ends[0], *ends[1]) else difference_interval(*ends)
    return {"mean": after["mean"] - before["mean"], "low": low, "high": high}


def _timing(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Seconds per phase, longest first; the last row is the whole step, "other" is what no phase accounts for."""
    columns = {key: _numbers(row.get(key) for row in rows) for key in dict.fromkeys(key for row in rows for key in row)}
    columns = {key.removesuffix("_s"): values for key, values in columns.items() if key.endswith("_s") and values}
    whole = columns.pop("step", [])
    total = sum(whole) or sum(map(sum, columns.values()))
    table = [_phase(name.replace("_", " "), values, total) for name, values in columns.items()]
    table.sort(key=lambda row: -row["total"])
    rest = total - sum(row["total"] for row in table)
    if rest > 0.005 * total:
        table.append({"name": "other", "total": rest, "share": rest / total})
    return table + ([_phase("whole step", whole, total)] if whole else [])


def _phase(name: str, values: list[float], total: float) -> dict[str, Any]:
    spent = sum(values)
    middle, late = (float(np.percentile(values, rank)) for rank in (50, 95))
    share = spent / total if total else 0.0
    return {"name": name, "mean": spent / len(values), "median": middle, "late": late, "total": spent, "share": share}


# --- curves ----------------------------------------------------------------------------------------------------------------


def _curves(run: Run) -> list[dict[str, Any]]:
    curves = []
    if len(run.evaluations) > 2:  # two are in the table
        cells = [(e.get("train_step", 0), _estimate(e["overall"])) for e in run.evaluations]
        cells = [(step, cell) for step, cell in cells if cell]
        band = {name: [_short(cell[key]) for _, cell in cells] for name, key in _BAND.items()}
        metric = run.evaluations[-1].get("metric", "metric")
        curves.append({"key": f"held-out/{metric}", "steps": [step for step, _ in cells], **band, "smooth": None})
    keys = sorted({key for row in run.metrics for key in row if key != "train_step"}, key=_curve_order)
    steps = np.array([row["train_step"] for row in run.metrics])
    for key in keys:
        values = np.array([_finite(row.get(key), math.nan) for row in run.metrics])
        if not np.isfinite(values).any() and not any(isinstance(row.get(key), float | int) for row in run.metrics):
            continue  # text, not a metric
        kept, smooth = _thin(values), _smooth(values)
        curves.append(
            {
                "key": key,
                "steps": steps[kept].tolist(),
                "values": [_short(value) for value in values[kept]],
                "smooth": None if smooth is None else [_short(value) for value in smooth[kept]],
            }
        )
    return curves


_BAND = {"values": "mean", "low": "low", "high": "high"}


def _curve_order(key: str) -> tuple[Any, ...]:
    prefix, _, name = key.rpartition("/")
    return (prefix.split("/")[0] != "reward", prefix != "", prefix, name not in ("total", "mean"), name)


def _thin(values: np.ndarray) -> np.ndarray:
    """Indices of at most `MAX_POINTS` values: both ends, and the lowest and highest of each stretch, so spikes survive."""
    if len(values) <= MAX_POINTS:
        return np.arange(len(values))
    kept = {0, len(values) - 1}
    for stretch in np.array_split(np.arange(len(values)), MAX_POINTS // 2 - 1):
        finite = stretch[~np.isnan(values[stretch])]
        kept.update((finite[values[finite].argmin()], finite[values[finite].argmax()]) if len(finite) else stretch[:1])
    return np.array(sorted(kept))


def _smooth(values: np.ndarray) -> np.ndarray | None:
    """Centered mean over about a twentieth of the run, NaN left out; None where that is less than three steps."""
    half = len(values) // 40
    if half < 1:
        return None
    present = ~np.isnan(values)
    sums, counts = (np.concatenate([[0.0], np.cumsum(array)]) for array in (np.where(present, values, 0.0), present))
    index = np.arange(len(values))
    low, high = np.maximum(index - half, 0), np.minimum(index + half + 1, len(values))
    with np.errstate(invalid="ignore", divide="ignore"):
        return (sums[high] - sums[low]) / (counts[high] - counts[low])


# --- samples ---------------------------------------------------------------------------------------------------------------


def _sample_payload(run: Run, run_dir: Path) -> dict[str, Any]:
    steps = list(run.samples)
    if len(steps) > MAX_SAMPLE_STEPS:
        newest = MAX_SAMPLE_STEPS // 2
        spaced = np.linspace(0, len(steps) - newest - 1, MAX_SAMPLE_STEPS - newest).round().astype(int)
        kept = [steps[i] for i in spaced] + steps[-newest:]
        run.notes.append(f"Samples of {len(steps) - len(kept)} of {len(steps)} steps are left out; they are in samples/.")
        steps = kept
    rows = {step: [_sample_row(row) for row in run.samples[step]] for step in steps}
    return {"steps": [{"step": step, "rows": rows[step]} for step in steps], "media": _media(rows, run, run_dir)}


def _sample_row(row: Mapping[str, Any]) -> dict[str, Any]:
    def text(key: str) -> str:
        value = str(row.get(key) if row.get(key) is not None else "")
        over = len(value) - MAX_TEXT
        return value if over <= 0 else f"{value[:MAX_TEXT]}\n[{over} more characters are in samples/]"

    terms = row.get("reward_terms") if isinstance(row.get("reward_terms"), dict) else {}
    media = [item for item in row.get("media") or [] if isinstance(item, dict)]
    return {
        **{key: text(key) for key in ("task_id", "domain", "prompt", "completion", "reference", "stop_reason")},
        **{key: _short(_finite(row.get(key))) for key in ("group", "seed", "num_decisions", "reward", "advantage")},
        "terms": {str(name): _short(_finite(value)) for name, value in terms.items()},
        "media": [{key: str(item.get(key, "")) for key in ("kind", "path", "caption")} for item in media],
    }


def _media(rows: Mapping[int, list[dict[str, Any]]], run: Run, run_dir: Path) -> dict[str, str]:
    """Data URIs by path, newest steps first until a cap is met. Only files inside the run directory are read."""
    with_media = [step for step in rows if any(row["media"] for row in rows[step])]
    chosen = with_media if len(with_media) <= MAX_MEDIA_STEPS else [*with_media[-1:-MAX_MEDIA_STEPS:-1][::-1], with_media[0]]
    embedded: dict[str, str] = {}
    room, missing, large = MAX_MEDIA_BYTES, set(), set()
    root = run_dir.resolve()
    for step in sorted(chosen, reverse=True):
        for name in dict.fromkeys(item["path"] for row in rows[step] for item in row["media"]):
            path = (root / name).resolve()
            if name in embedded:
                continue
            if not path.is_relative_to(root) or not path.is_file():
                missing.add(name)
            elif path.stat().st_size > room:
                large.add(name)
            else:
                data = path.read_bytes()
                room -= len(data)
                kind = mimetypes.guess_type(path.name)[0] or "application/octet-stream"
                embedded[name] = f"data:{kind};base64,{base64.b64encode(data).decode('ascii')}"
    if skipped := len(with_media) - len(chosen):
        run.notes.append(
            f"Media of {skipped} of {len(with_media)} sample steps are left out: the page holds those of the first and the "
            f"newest {MAX_MEDIA_STEPS - 1}. All are in samples/media/."
        )
    if large:
        count = "1 media file is" if len(large) == 1 else f"{len(large)} media files are"
        run.notes.append(f"{count} left out, since the page holds at most {MAX_MEDIA_BYTES >> 20} MiB of them.")
    if missing:
        count = "1 media file was" if len(missing) == 1 else f"{len(missing)} media files were"
        run.notes.append(f"{count} not found in the run directory, for example {min(missing)}.")
    return embedded


# --- numbers ---------------------------------------------------------------------------------------------------------------


def _finite(value: Any, default: Any = None) -> Any:
    """``value`` as a float if it is a finite number, else ``default``."""
    return float(value) if isinstance(value, int | float) and math.isfinite(value) else default


def _numbers(values: Iterable[Any]) -> list[float]:
    return [number for number in map(_finite, values) if number is not None]


def _short(value: float | None) -> float | int | None:
    """Six significant digits, None for NaN; whole numbers without a point. Keeps the page small."""
    if value is None or not math.isfinite(value):
        return None
    if value == int(value) and abs(value) < 2**53:
        return int(value)
    return float(f"{value:.6g}")
