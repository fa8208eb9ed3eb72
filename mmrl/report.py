"""One self-contained page about a run: held-out results, rollouts, curves, samples, timing, config.

`write_report` reads a run directory, or a folder that ``mmrl rollout`` wrote, and nothing else, so it works during a run, after
a crash, and on another machine. The page fetches nothing: style, script and media are inside it. Python prepares numbers;
``report_assets/page.js`` draws them. What cannot be read or is left out to keep the page small is said in the page's notes.
"""

from __future__ import annotations

import json
import os
import re
from html import escape
from importlib import resources
from pathlib import Path
from typing import Any

import numpy as np

from mmrl.report_charts import curves
from mmrl.report_data import Run, at, estimate, numbers, read_run
from mmrl.report_media import Shelf, sample_steps
from mmrl.report_rollouts import rollout_payload
from mmrl.statistics import difference_interval


def write_report(run_dir: Path) -> Path:
    """Write ``report.html`` into ``run_dir`` from the files there and return its path."""
    run = read_run(run_dir)
    page = render(run, run_dir)
    target = run_dir / "report.html"
    temporary = run_dir / "report.html.tmp"  # a browser that reloads during a run never sees half a page
    temporary.write_text(page, encoding="utf-8")
    os.replace(temporary, target)
    return target


def render(run: Run, run_dir: Path) -> str:
    """The page as text. ``run_dir`` is where media paths start."""
    shelf = Shelf(run_dir)
    payload = {
        "kind": "training" if run.trained else "rollouts",
        "summary": _summary(run),
        "held_out": _held_out(run.evaluations),
        "rollouts": rollout_payload(run_dir, shelf, run.notes),
        "curves": curves(run),
        "samples": sample_steps(run, shelf),
        "timing": _timing(run.timing),
        "config": run.config_text,
        "media": shelf.embedded,
        "notes": run.notes + shelf.notes(),  # last: the parts above add to them
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


def _summary(run: Run) -> dict[str, Any]:
    """Facts of the first line, by label."""
    if not run.trained:
        return {}
    steps = run.metrics[-1]["train_step"] if run.metrics else 0
    planned = at(run.config, "trainer", "num_steps")
    policy = at(run.config, "policy")
    if isinstance(policy, dict):
        keys = ("name", "model", "path", "checkpoint", "kind", "type")
        policy = next((policy[key] for key in keys if isinstance(policy.get(key), str)), None)
    facts = {
        "algorithm": at(run.config, "algorithm", "name") or at(run.config, "algorithm"),
        "modality": run.config.get("modality"),
        "policy": policy.rstrip("/").rsplit("/", 1)[-1] if isinstance(policy, str) else None,
        "steps": f"{steps} of {planned}" if isinstance(planned, int) and steps < planned else steps,
        "seed": run.config.get("seed"),
        "seconds": sum(numbers(row.get("step_s") for row in run.timing)) or None,
    }
    return {key: value for key, value in facts.items() if isinstance(value, str | int | float)}


def _held_out(evaluations: list[dict[str, Any]]) -> dict[str, Any] | None:
    """First and last evaluation side by side, with the interval of their difference."""
    if not evaluations:
        return None
    first, last = evaluations[0], evaluations[-1]
    names = sorted({**(first.get("domains") or {}), **(last.get("domains") or {})})
    pairs = [("all tasks", first["overall"], last["overall"])]
    if len(names) > 1:
        pairs += [(name, at(first, "domains", name), at(last, "domains", name)) for name in names]
    rows = []
    for name, *cells in pairs:
        before, after = (estimate(cell) for cell in cells)
        rows.append({"name": name, "before": before, "after": after, "difference": _difference(before, after)})
    shown = [cell for row in rows for cell in (row["before"], row["after"]) if cell]
    return {
        "metric": str(last.get("metric", "metric")),
        "split": str(last.get("split", "eval")),
        "steps": [first.get("train_step", 0)] * (first is not last) + [last.get("train_step", 0)],
        "percent": all(cell["k"] is not None for cell in shown),
        "rows": rows if shown else [],
    }


def _difference(before: dict[str, Any] | None, after: dict[str, Any] | None) -> dict[str, Any] | None:
    if before is None or after is None:
        return None
    ends = [(cell["mean"], cell["low"], cell["high"]) for cell in (before, after)]
    low, high = (None, None) if None in (*ends[0], *ends[1]) else difference_interval(*ends)
    return {"mean": after["mean"] - before["mean"], "low": low, "high": high}


def _timing(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Seconds per phase, longest first; the last row is the whole step, "other" is what no phase accounts for."""
    columns = {key: numbers(row.get(key) for row in rows) for key in dict.fromkeys(key for row in rows for key in row)}
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
