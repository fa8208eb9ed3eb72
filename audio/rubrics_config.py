"""The ``rubrics`` section of an audio run. Nothing here imports torch."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import Field

from mmrl.config import Section


class RubricsConfig(Section):
    """How AudioRubrics turns a judge's verdicts into the reward term ``rubrics``, and the length of ``overthink``."""

    file: Path | None = None
    """Static rubrics, ``{sample_id, rubrics: [{id, category, text, weight}]}`` a line; absent: the built-in tasks' own."""
    evolve: bool = True
    """Write new criteria per group; off scores each rollout by the static ones."""
    regenerate_every: int = Field(1, gt=0)
    """Train steps from one that writes new criteria to the next; between them groups are judged by the static ones alone."""
    keep: int = Field(5, gt=0)
    """Criteria kept of a group, those on which its rollouts differ most."""
    max_new: int = Field(3, ge=0)
    """New criteria of a group at most."""
    uniform_weights: bool = False
    """Weigh the kept criteria equally instead of asking the judge."""
    one_row_failed: Literal["neutral_group", "neutral_row"] = "neutral_group"
    """If static scoring fails for a rollout: 0.5 for its whole group, which cancels, or (as published) for it alone."""
    max_think_chars: int = Field(2000, gt=0)
    """The judge sees so much of the reasoning."""
    overthink_tokens: int = Field(256, gt=0)
    """Reasoning of this length has ``overthink`` 0."""
    group_timeout_s: float = Field(900.0, gt=0)
    """Nothing more is asked about a group after this time."""
