"""Named presets: one choice for each slot of `mmrl.config.AlgorithmConfig`. Data only; `mmrl.recipe` computes them.

A preset states every slot in which it differs from the section's defaults, so reading one line tells the algorithm.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, kw_only=True)
class Preset:
    """A recipe with a name."""

    summary: str
    paper: str
    slots: Mapping[str, Any]


PRESETS: Mapping[str, Preset] = {
    "grpo": Preset(
        summary="Group z-score, clipped ratio, mean of rollout means, k3 penalty when kl_coef > 0",
        paper="arXiv 2402.03300",
        slots={"advantage": "group_std", "aggregation": "sequence_mean", "clip_low": 0.2, "clip_high": 0.2, "kl": "k3"},
    ),
    "dr_grpo": Preset(
        summary="GRPO without its two biases: no division by the standard deviation or by the rollout's length",
        paper="arXiv 2503.20783",
        slots={"advantage": "group_center", "aggregation": "constant"},
    ),
    "dapo": Preset(
        summary="Clip-higher, token-level mean, groups without signal replaced",
        paper="arXiv 2503.14476",
        slots={"advantage": "group_std", "aggregation": "token_mean", "clip_high": 0.28, "selection": "dynamic"},
    ),
    "rloo": Preset(
        summary="Leave-one-out baseline with token-level clipping; KL in the reward when kl_coef > 0",
        paper="arXiv 2402.14740",
        slots={"advantage": "leave_one_out", "aggregation": "token_mean", "kl": "k1", "kl_in": "reward"},
    ),
    "gspo": Preset(
        summary="Length-normalised sequence ratio with a narrow clip",
        paper="arXiv 2507.18071",
        slots={
            "advantage": "group_std", "ratio": "sequence", "clip_low": 3e-4, "clip_high": 4e-4, "aggregation": "sequence_mean",
        },
    ),
    "sft": Preset(
        summary="Likelihood of demonstrations: supervised warm-up and behaviour cloning",
        paper="",
        slots={
            "source": "demonstrations", "advantage": "ones", "surrogate": "policy_gradient", "aggregation": "token_mean",
        },
    ),
}  # fmt: skip
