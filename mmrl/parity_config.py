"""The ``trainer.parity:`` section. Nothing here imports torch."""

from __future__ import annotations

from pydantic import Field

from mmrl.section import Section


class ParityConfig(Section):
    """Compare the log-probabilities recorded while sampling with the trainer's own before the first update of a step."""

    every: int = Field(0, ge=0)
    """On the first and every so many train steps; 0 is off. Costs one forward pass without gradient."""
    tolerance: float = Field(0.05, gt=0)
    """Largest difference of one decision's log-probability that is taken for rounding (float32 gives about 1e-5)."""
