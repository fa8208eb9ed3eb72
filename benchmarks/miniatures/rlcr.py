"""Calibration reward (RLCR, arXiv 2507.16806) against a reward for right answers alone.

The policy states a confidence after its answer. A short supervised warm-up teaches the form only: the confidence of a
demonstration is drawn at random.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from miniatures.miniature import SMALL, Miniature, Rows, Subject, evaluations, measured

from mmrl.calibration import brier, calibration_summary

NUM_TASKS, NUM_ATTEMPTS = 140, 4


def measure(run_dir: Path) -> dict[str, Any]:
    """Calibration of sampled answers to held-out tasks, at the end."""
    subject = Subject(run_dir)
    batch = subject.attempt(subject.policy(subject.last), subject.tasks("eval", NUM_TASKS), NUM_ATTEMPTS, stream=0)
    return calibration_summary([brier.record(task, outcome) for task, outcome in zip(batch.tasks, batch.outcomes)])


def values(run_dirs: Mapping[str, Path]) -> Rows:
    """Accuracy, Brier score and expected calibration error by arm, and before training."""
    rows = {}
    for arm, run_dir in run_dirs.items():
        first, *_, last = evaluations(run_dir).values()
        sampled = measured(run_dir)
        rows[arm] = greedy(last) | {
            "Brier, sampled": number(sampled["brier"]),
            "ECE, sampled": number(sampled["ece"]),
            "malformed": sampled["malformed"] / (sampled["n"] + sampled["malformed"]),
        }
    return rows | {"before training": greedy(first)}


def greedy(result: Mapping[str, Any]) -> dict[str, float]:
    summary = result["summaries"]["brier"]
    return {"accuracy": result["overall"]["mean"], "Brier": number(summary["brier"]), "ECE": number(summary["ece"])}


def number(value: float | None) -> float:
    """NaN where no completion was well-formed."""
    return math.nan if value is None else value


def term(name: str, weight: float) -> str:
    return f"rewards.{name}={{weight: {weight}, function: 'mmrl.calibration:{name}'}}"


RLCR = Miniature(
    claim="With the Brier term the stated confidence becomes calibrated, at the accuracy of a reward for right answers alone.",
    arms={"accuracy only": (term("brier", 0.0),), "RLCR": (term("brier", 0.5),)},
    overrides=(
        *SMALL, "algorithm=dr_grpo", "rewards.accuracy=0", term("confidence_format", 0.5), term("answer", 0.5),
        "rollout.max_new_tokens=24", "evaluation.num_tasks=350",
    ),
    values=values,
    measure=measure,
    warmup=Path("configs/vision/read_digits_confidence_warmup.yaml"),
)  # fmt: skip
