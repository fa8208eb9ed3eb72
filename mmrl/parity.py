"""Whether the log-probabilities recorded while sampling are those that the trainer's forward pass gives.

Before the first update of a step they must agree but for rounding. Where they do not, the ratio starts away from 1 and the
update follows a policy that never acted: other media, another position, a token that decoding changed, a sampling engine with
old weights.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from mmrl.processes import Totals
from mmrl.types import RolloutBatch


@dataclass(frozen=True, kw_only=True)
class Breach:
    """The first decision whose log-probabilities differ too much."""

    row: int
    """Rollout of the step (``--rollout`` of ``mmrl replay``)."""
    decision: int
    task_id: str
    recorded: float
    recomputed: float
    num_over: int
    """Decisions of the whole batch over the tolerance."""

    def message(self, tolerance: float, what: str) -> str:
        """One line for people; ``what`` is the decision as a person reads it."""
        return (
            f"log-probabilities differ on task {self.task_id!r}, rollout {self.row}, decision {self.decision} ({what}): "
            f"{self.recorded:.6g} while sampling, {self.recomputed:.6g} in the trainer's forward pass; expected a difference "
            f"of at most {tolerance:g} (trainer.parity.tolerance). {self.num_over} decisions differ that much. This step was "
            "not taken."
        )


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """Differences of one batch."""

    breach: Breach | None
    totals: Totals
    """``parity/mean``: mean absolute difference; ``parity/over``: share of decisions over the tolerance."""
    largest: float


def compare(batch: RolloutBatch, log_probs: Tensor, *, tolerance: float) -> Comparison:
    """Compare ``log_probs`` ``[N, T]`` with those recorded while sampling (by the sampling engine, where there is one).

    Equal infinities agree; any other difference with a number that is not finite is over every tolerance.
    """
    recorded = batch.old_log_probs if batch.sampler_log_probs is None else batch.sampler_log_probs
    gaps = (recorded.double() - log_probs.double()).abs().nan_to_num(nan=torch.inf)
    gaps = torch.where(batch.loss_mask & (recorded != log_probs), gaps, 0.0)
    over = gaps > tolerance
    count = int(batch.loss_mask.sum())
    finite = gaps[batch.loss_mask & gaps.isfinite()]
    breach = None
    if over.any():
        row, decision = over.nonzero()[0].tolist()
        breach = Breach(
            row=row,
            decision=decision,
            task_id=batch.tasks[row].id,
            recorded=float(recorded[row, decision]),
            recomputed=float(log_probs[row, decision]),
            num_over=int(over.sum()),
        )
    return Comparison(
        breach=breach,
        totals={"parity/mean": (float(finite.sum()), len(finite)), "parity/over": (int(over.sum()), count)},
        largest=float(gaps.max()) if gaps.numel() else 0.0,
    )
