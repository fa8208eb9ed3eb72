"""Curves of a report: every metric over train steps, and held-out success of every domain with its interval."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from mmrl.report_data import Run, at, estimate, finite, short

MAX_POINTS = 600
"""Points per curve; longer runs keep the lowest and highest value of each stretch."""
MAX_DOMAINS = 24
"""Domains with a held-out curve of their own."""
_BAND = {"values": "mean", "low": "low", "high": "high"}


def curves(run: Run) -> list[dict[str, Any]]:
    """Curves as the page draws them: held-out success first, then metrics by family."""
    curves = held_out_curves(run)
    keys = sorted({key for row in run.metrics for key in row if key != "train_step"}, key=_curve_order)
    steps = np.array([row["train_step"] for row in run.metrics])
    for key in keys:
        values = np.array([finite(row.get(key), math.nan) for row in run.metrics])
        if not np.isfinite(values).any() and not any(isinstance(row.get(key), float | int) for row in run.metrics):
            continue  # text, not a metric
        kept, smooth = _thin(values), _smooth(values)
        curves.append(
            {
                "key": key,
                "steps": steps[kept].tolist(),
                "values": [short(value) for value in values[kept]],
                "smooth": None if smooth is None else [short(value) for value in smooth[kept]],
            }
        )
    return curves


def held_out_curves(run: Run) -> list[dict[str, Any]]:
    """One curve for all tasks and one per domain, each with its band; success shares one scale, so that domains compare.

    None for fewer than three evaluations: two are in the table.
    """
    if len(run.evaluations) <= 2:
        return []
    steps = [evaluation.get("train_step", 0) for evaluation in run.evaluations]
    domains = sorted({name for evaluation in run.evaluations for name in evaluation.get("domains") or {}})
    if len(domains) > MAX_DOMAINS:
        run.notes.append(f"Held-out curves of {len(domains) - MAX_DOMAINS} of {len(domains)} domains are left out.")
    metric = run.evaluations[-1].get("metric", "metric")
    names = [None, *domains[:MAX_DOMAINS]] if len(domains) > 1 else [None]
    curves = []
    for name in names:
        where = ("overall",) if name is None else ("domains", name)
        cells = [estimate(at(evaluation, *where)) for evaluation in run.evaluations]
        known = [cell for cell in cells if cell]
        if not known:
            continue
        band = {to: [cell and short(cell[key]) for cell in cells] for to, key in _BAND.items()}
        curves.append(
            {
                "key": f"held-out/{metric}" + (f"/{name}" if name else ""),
                "family": f"held-out {metric}",
                "name": name or "all tasks",
                "range": [0, 1] if all(cell["k"] is not None for cell in known) else None,
                "steps": steps,
                **band,
                "smooth": None,
            }
        )
    return curves


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
