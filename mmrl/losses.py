"""Per-decision losses and how they are averaged: pure functions of tensors, no config, no logging.

Everything is ``[N, T]`` and float32. `aggregation_weights` is the one place that divides: its counts are those of the whole
optimizer step, so cutting the step into micro-batches or over processes cannot change the gradient. Values at masked positions
never matter, even when they are NaN or infinite.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

MAX_LOG_RATIO = 20.0
"""Log-ratios are clamped to +-20 before ``exp``; e^20 is 5e8."""

Aggregation = Literal["token_mean", "sequence_mean", "constant"]


def log_ratio(
    log_probs: Tensor, old_log_probs: Tensor, mask: Tensor, *, unit: Literal["token", "sequence"] = "token"
) -> Tensor:
    """``log pi - log pi_old`` per decision, 0 where masked, clamped to +-`MAX_LOG_RATIO`; ``[N, T]``.

    ``"sequence"`` is GSPO's geometric mean over the rollout (arXiv 2507.18071): every decision of a row has the same value, and
    the gradient of a row's loss is spread over its decisions by the mean. A row without decisions has ratio ``exp(0)``.
    """
    difference = torch.where(mask, log_probs.float() - old_log_probs.float(), 0.0)
    if unit == "sequence":
        count = mask.sum(dim=1, keepdim=True).clamp(min=1)
        difference = torch.where(mask, difference.sum(dim=1, keepdim=True) / count, 0.0)
    return difference.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)


def clipped_surrogate(
    log_ratios: Tensor, advantages: Tensor, *, clip_low: float, clip_high: float, dual_clip: float | None = None
) -> Tensor:
    """PPO's ``-min(rho A, clip(rho, 1 - clip_low, 1 + clip_high) A)``; ``[N, T]``.

    ``dual_clip`` bounds the loss of negative advantages by ``dual_clip * |A|``, so that one exploding ratio cannot dominate.
    ``advantages`` is ``[N]`` (spread over the decisions) or ``[N, T]``.
    """
    advantages = per_decision(advantages, log_ratios)
    ratio = log_ratios.exp()
    loss = -torch.minimum(ratio * advantages, ratio.clamp(1 - clip_low, 1 + clip_high) * advantages)
    if dual_clip is None:
        return loss
    return torch.where(advantages < 0, torch.minimum(loss, -dual_clip * advantages), loss)


def policy_gradient(log_probs: Tensor, advantages: Tensor, mask: Tensor) -> Tensor:
    """REINFORCE's ``-A log pi``; ``[N, T]``, 0 where masked."""
    return -per_decision(advantages, log_probs) * torch.where(mask, log_probs.float(), 0.0)


def kl_penalty(log_probs: Tensor, reference_log_probs: Tensor, mask: Tensor, *, estimator: Literal["k1", "k2", "k3"]) -> Tensor:
    """Estimate ``KL(pi || reference)`` per decision sampled from ``pi``; ``[N, T]``, 0 where masked.

    With ``d = log pi - log reference``: k1 is ``d`` (as a loss its expected gradient is zero; meant for the reward), k2 is
    ``d^2 / 2`` (its gradient is that of the reverse KL on-policy), k3 is ``exp(-d) + d - 1`` (unbiased and never negative).
    """
    difference = log_ratio(log_probs, reference_log_probs, mask)
    if estimator == "k1":
        return difference
    if estimator == "k2":
        return difference.square() / 2
    return torch.expm1(-difference) + difference


def aggregation_weights(
    mask: Tensor, kind: Aggregation, *, num_decisions: int, num_rows: int, horizon: int | None = None
) -> Tensor:
    """Weight of each decision in the step's scalar loss ``sum(weights * losses)``; ``[N, T]``, 0 where masked.

    ``num_decisions`` and ``num_rows`` count the whole optimizer step over all processes. ``token_mean`` weighs each decision
    ``1 / num_decisions`` (DAPO); ``sequence_mean`` averages within a rollout, then over rollouts (GRPO), rows without decisions
    included in ``num_rows``; ``constant`` divides by ``num_rows * horizon`` (Dr. GRPO).
    """
    if kind == "token_mean":
        return mask.float() / max(num_decisions, 1)
    if kind == "sequence_mean":
        return mask.float() / (mask.sum(dim=1, keepdim=True).clamp(min=1) * max(num_rows, 1))
    if horizon is None:
        raise ValueError("aggregation 'constant' needs a horizon: the longest possible rollout, in decisions.")
    return mask.float() / (max(num_rows, 1) * horizon)


def weighted_sum(losses: Tensor, weights: Tensor) -> Tensor:
    """``sum(weights * losses)`` over positions of positive weight; a graph-connected 0 when there is none."""
    return torch.where(weights != 0, losses, 0.0).mul(weights).sum()


def per_decision(values: Tensor, like: Tensor) -> Tensor:
    """Spread ``[N]`` values over the ``T`` decisions of ``like`` ``[N, T]``; ``[N, T]`` values pass through."""
    return values[:, None].expand_as(like) if values.ndim == 1 else values
