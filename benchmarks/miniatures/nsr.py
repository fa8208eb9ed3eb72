"""Learning from correct or from wrong rollouts alone (arXiv 2506.01347): what becomes of pass@k."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from statistics import fmean
from typing import Any

from miniatures.miniature import SMALL, Miniature, Rows, Subject, last_accuracy, measured, steps

from mmrl.statistics import pass_at_k

NUM_TASKS, NUM_ATTEMPTS = 140, 64
KS = (1, 2, 4, 8, 16, 32, 64)


def measure(run_dir: Path) -> dict[str, Any]:
    """pass@k of the policy at the start and at the end, on held-out tasks."""
    subject = Subject(run_dir)
    return {
        "start": curve(subject, subject.policy()),
        "end": curve(subject, subject.policy(subject.last)),
    }


def curve(subject: Subject, policy: Any) -> dict[str, float]:
    batch = subject.attempt(policy, subject.tasks("eval", NUM_TASKS), NUM_ATTEMPTS, stream=0)
    successes = batch.reward_terms["accuracy"].view(NUM_TASKS, NUM_ATTEMPTS).sum(dim=1).long().tolist()
    return {f"pass@{k}": fmean(pass_at_k(count, NUM_ATTEMPTS, k) for count in successes) for k in KS}


def values(run_dirs: Mapping[str, Path]) -> Rows:
    """pass@k by arm and before training; greedy accuracy and the entropy of the last steps."""
    rows = {
        arm: {
            **measured(run_dir)["end"],
            "greedy": last_accuracy(run_dir),
            "entropy": fmean(step["rollout/entropy"] for step in steps(run_dir)[-5:]),
        }
        for arm, run_dir in run_dirs.items()
    }
    return rows | {"before training": measured(next(iter(run_dirs.values())))["start"]}


NSR = Miniature(
    claim="At large k pass@k falls when only correct rollouts are reinforced and does not when only wrong ones are.",
    arms={"PSR": ("algorithm=psr",), "NSR": ("algorithm=nsr",), "W-REINFORCE": ("algorithm=w_reinforce",)},
    overrides=(
        *SMALL, "optimizer.learning_rate=1.0e-4", "tasks.eval_kinds=[parity, above_four, larger, sum]",
        "evaluation.num_tasks=400",
    ),
    values=values,
    measure=measure,
)  # fmt: skip
