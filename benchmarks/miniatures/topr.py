"""Rollouts that are many updates old (arXiv 2503.14286): TOPR's taper against REINFORCE without importance correction."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from statistics import fmean

from miniatures.miniature import SMALL, Miniature, Rows, evaluations, measured, steps
from recipe_table import kl_to_start


def values(run_dirs: Mapping[str, Path]) -> Rows:
    """Reward over time, the lowest held-out accuracy after the best one, and the distance to the starting policy."""
    rows = {}
    for arm, run_dir in run_dirs.items():
        accuracies = [result["overall"]["mean"] for result in evaluations(run_dir).values()]
        rewards = [step["reward/total"] for step in steps(run_dir)]
        best = max(accuracies)
        rows[arm] = {
            "reward, first fifth": fmean(rewards[: max(1, len(rewards) // 5)]),
            "reward, last fifth": fmean(rewards[-max(1, len(rewards) // 5) :]),
            "best accuracy": best,
            "lowest after the best": min(accuracies[accuracies.index(best) :]),
            "last accuracy": accuracies[-1],
            "KL to start": measured(run_dir)["kl_to_start"],
        }
    return rows


TOPR = Miniature(
    claim="On rollouts that are up to 15 updates old TOPR stays stable where REINFORCE with negative rewards collapses.",
    arms={
        "REINFORCE": ("algorithm=reinforce", "algorithm.advantage=sign"),
        "TOPR": ("algorithm=topr", "algorithm.subsample=none"),
        "TOPR, 15% correct": ("algorithm=topr",),
    },
    overrides=(
        *SMALL, "sampling.tasks_per_step=16", "trainer.num_steps=14", "trainer.epochs_per_batch=16", "trainer.minibatches=1",
        "optimizer.learning_rate=1.0e-4", "evaluation.num_tasks=210", "evaluation.every=2",
    ),
    values=values,
    measure=lambda run_dir: {"kl_to_start": kl_to_start(run_dir)},
)  # fmt: skip
