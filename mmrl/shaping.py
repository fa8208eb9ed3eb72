"""Reward shaping: what becomes of the total reward before the advantage. Pure functions of tensors, then the slot's dictionary.

``lengths`` are decisions, int ``[N]``; an empty rollout has length 0. Shaping never looks at text: terms that do are reward
terms, like `repetition`. Apply length terms to correct rollouts only, or gate them, unless short wrong answers are wanted.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from mmrl.chat import Completion
from mmrl.types import Task


def overlong_punishment(lengths: Tensor, *, limit: int, cache: float, factor: float = 1.0) -> Tensor:
    """DAPO's soft punishment (arXiv 2503.14476): 0 up to ``limit - c``, then down to ``-factor`` at ``limit``; ``[N]``.

    ``c = cache * limit`` is the length over which it grows.
    """
    window = cache * limit
    return factor * ((limit - window - lengths) / window).clamp(-1, 0).float()


def truncated_rewards(rewards: Tensor, truncated: Tensor, *, coef: float) -> Tensor:
    """Rewards of truncated rollouts (bool ``[N]``) times ``coef``, or replaced by it when it is negative; float32 ``[N]``."""
    return torch.where(truncated, rewards * coef if coef >= 0 else torch.full_like(rewards, coef), rewards)


def cosine_rewards(
    lengths: Tensor, correct: Tensor, *, limit: int, right: tuple[float, float], wrong: tuple[float, float]
) -> Tensor:
    """Half a cosine from the first value at length 0 to the second at ``limit`` (arXiv 2502.03373); float32 ``[N]``."""
    progress = (1 + torch.cos(math.pi * lengths.double().clamp(max=limit) / limit)) / 2
    start, end = (torch.where(correct, right[i], wrong[i]).double() for i in (0, 1))
    return (end + (start - end) * progress).float()


def group_length_terms(lengths: Tensor, correct: Tensor, group_ids: Tensor) -> Tensor:
    """Kimi k1.5's length term (arXiv 2501.12599); float32 ``[N]``.

    ``lam = 0.5 - (n - shortest) / (longest - shortest)`` within the group for correct rollouts, ``min(0, lam)`` for wrong ones,
    0 where all lengths are equal.
    """
    _, rows = group_ids.unique(return_inverse=True)
    values, num_groups = lengths.double(), int(rows.max()) + 1 if len(rows) else 0
    shortest, longest = (
        values.new_zeros(num_groups).scatter_reduce(0, rows, values, how, include_self=False)[rows] for how in ("amin", "amax")
    )
    span = longest - shortest
    lam = torch.where(span > 0, 0.5 - (values - shortest) / span.clamp(min=1), 0.0)
    return torch.where(correct, lam, lam.clamp(max=0)).float()


def target_length_rewards(lengths: Tensor, correct: Tensor, *, target: int, mode: str, alpha: float) -> Tensor:
    """L1 (arXiv 2503.04697); float32 ``[N]``.

    ``exact``: ``1[correct] - alpha |target - n|``; ``max``: ``1[correct] clip(alpha (target - n) + 0.5, 0, 1)``.
    """
    if mode == "exact":
        return correct.float() - alpha * (target - lengths).abs()
    return correct.float() * (alpha * (target - lengths) + 0.5).clamp(0, 1)


def concise_correct_bonus(
    lengths: Tensor, correct: Tensor, group_ids: Tensor, *, bonus: float = 0.2, floor: int = 100
) -> Tensor:
    """Observe-R1's bonus (arXiv 2505.12432): ``bonus`` for at most one rollout of each group, else 0; float32 ``[N]``.

    It goes to the shortest of the ``correct`` rollouts (the first of equals) if that is longer than ``floor``. A group that has
    none correct gets none.
    """
    result = torch.zeros(len(lengths))
    for group in group_ids[correct].unique():
        rows = ((group_ids == group) & correct).nonzero()[:, 0]
        shortest = rows[lengths[rows].argmin()]
        if lengths[shortest] > floor:
            result[shortest] = bonus
    return result


def ngram_repetition(tokens: Sequence[Any], *, size: int = 3, penalty: float = -1.0) -> float:
    """``(1 - unique / total) * penalty`` over the n-grams of ``size`` tokens (arXiv 2502.03373); 0 where there are none."""
    grams = [tuple(tokens[start : start + size]) for start in range(len(tokens) - size + 1)]
    return (1 - len(set(grams)) / len(grams)) * penalty if grams else 0.0


def repetition(task: Task, completion: Completion) -> float:
    """Reward term: `ngram_repetition` of the sampled tokens, from 0 down to -1 for a completion that repeats itself."""
    return ngram_repetition(completion.token_ids)


@dataclass(frozen=True, kw_only=True)
class ShapingInputs:
    """What a shaping may look at, one entry per rollout."""

    lengths: Tensor
    correct: Tensor
    truncated: Tensor
    group_ids: Tensor
    limit: int
    """Decisions of the longest possible rollout."""


SHAPINGS: Mapping[str, Callable[[Any, Tensor, ShapingInputs], Tensor]] = {
    "overlong": lambda c, r, x: r + overlong_punishment(x.lengths, limit=c.limit or x.limit, cache=c.cache, factor=c.factor),
    "truncated": lambda c, r, x: truncated_rewards(r, x.truncated, coef=c.coef),
    "cosine": lambda c, r, x: cosine_rewards(
        x.lengths, x.correct, limit=c.limit or x.limit, right=c.correct, wrong=c.wrong
    ).masked_fill(r.isnan(), torch.nan),
    "group_length": lambda c, r, x: r + c.factor * group_length_terms(x.lengths, x.correct, x.group_ids),
    "target_length": lambda c, r, x: target_length_rewards(
        x.lengths, x.correct, target=c.target, mode=c.mode, alpha=c.alpha
    ).masked_fill(r.isnan(), torch.nan),
    "outcome": lambda c, r, x: torch.where(x.correct, c.correct, c.wrong).masked_fill(r.isnan(), torch.nan),
    "decision_cost": lambda c, r, x: r - c.cost * x.lengths * x.correct,
    "concise_correct": lambda c, r, x: (
        r
        + concise_correct_bonus(
            x.lengths, x.correct if c.truncated else x.correct & ~x.truncated, x.group_ids, bonus=c.bonus, floor=c.floor
        )
    ),
}
"""``shape(config, rewards, inputs) -> rewards``; a reward that is NaN stays NaN."""


def shaped_rewards(shapings: Sequence[Any], rewards: Tensor, inputs: ShapingInputs) -> Tensor:
    """``rewards`` ``[N]`` after every shaping in order; float32 ``[N]``."""
    for shaping in shapings:
        rewards = SHAPINGS[shaping.name](shaping, rewards, inputs)
    return rewards.float()
