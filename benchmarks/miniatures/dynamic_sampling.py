"""DAPO with and without dynamic sampling (arXiv 2503.14476): groups without signal are replaced by newly drawn ones."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import accumulate
from pathlib import Path

import numpy as np
from miniatures.miniature import SMALL, Miniature, Rows, evaluations, last_accuracy, steps


def values(run_dirs: Mapping[str, Path]) -> Rows:
    """Rollouts of an update that carry no signal, what was drawn, and accuracy at equal optimizer steps and equal draws."""
    budget = min(sum(draws(run_dir)) for run_dir in run_dirs.values())
    return {
        arm: {
            "no signal in update": float(np.mean([without_signal(step) for step in steps(run_dir)])),
            "rollouts with signal": float(np.mean([signal(step) for step in steps(run_dir)])),
            "draws": float(np.mean(draws(run_dir))),
            "accuracy, equal steps": last_accuracy(run_dir),
            "accuracy, equal draws": accuracy_after(run_dir, budget),
        }
        for arm, run_dir in run_dirs.items()
    }


def draws(run_dir: Path) -> list[float]:
    """Rollouts that each step paid for, as a multiple of the planned number."""
    return [step.get("selection/draws", 1.0) for step in steps(run_dir)]


def without_signal(step: Mapping[str, float]) -> float:
    """Share of the update's rollouts whose group is constant; a selection leaves one in only when it found no other."""
    if "selection/discarded" in step:
        return float(step["groups/informative"] == 0)
    return 1.0 - step["groups/informative"]


def signal(step: Mapping[str, float]) -> float:
    """Rollouts of the update that carry signal, as a share of the planned number."""
    return min(1.0, step["groups/informative"] * step.get("selection/draws", 1.0))


def accuracy_after(run_dir: Path, budget: float) -> float:
    """Held-out accuracy when so many steps' worth of rollouts were drawn, between two evaluations on a straight line."""
    spent = [0.0, *accumulate(draws(run_dir))]
    found = evaluations(run_dir)
    return float(np.interp(budget, [spent[step] for step in found], [result["overall"]["mean"] for result in found.values()]))


DYNAMIC_SAMPLING = Miniature(
    claim="Dynamic sampling wastes no part of an update on groups without signal, for a price in rollouts.",
    arms={
        "without": ("algorithm.selection=none",),
        "dynamic sampling": ("algorithm.selection=dynamic",),
    },
    overrides=(*SMALL, "algorithm=dapo", "algorithm.shaping=[]", "evaluation.num_tasks=350", "evaluation.every=10"),
    values=values,
)
