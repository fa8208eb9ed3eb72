"""Per-decision losses and how they are averaged: pure functions of tensors, no config, no logging.

Everything is ``[N, T]`` and float32. `aggregation_weights` is the one place that divides: its counts are those of the whole
optimizer step, so cutting the step into micro-batches or over processes cannot change the gradient. Values at masked positions
never matter, even when they are NaN or infinite.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Literal

import torch
from torch import Tensor

MAX_LOG_RATIO = 20.0
"""Log-ratios are clamped to +-20 before ``exp``; e^20 is 5e8."""

Aggregation = Literal["token_mean", "sequence_mean", "sequence_sum", "constant", "sign_token_mean"]
RatioUnit = Literal["token", "sequence", "sequence_token", "sequence_product"]
KLEstimator = Literal["k1", "k2", "k3", "abs"]


def log_ratio(
    log_probs: Tensor, old_log_probs: Tensor, mask: Tensor, *, unit: RatioUnit = "token", limit: float = MAX_LOG_RATIO
) -> Tensor:
    """``log pi - log pi_old`` per decision, 0 where masked, clamped to plus and minus ``limit``; ``[N, T]``.

    ``"sequence"`` is GSPO's geometric mean over the rollout (arXiv 2507.18071): every decision of a row has the same value, and
    the gradient of a row's loss is spread over its decisions by the mean. ``"sequence_token"`` has the same value, but each
    decision's gradient is its own: for advantages per decision. ``"sequence_product"`` is the ratio of the whole rollout, not
    normalised. A row without decisions has ratio ``exp(0)``.
    """
    difference = torch.where(mask, log_probs.float() - old_log_probs.float(), 0.0)
    if unit != "token":
        total = difference.sum(dim=1, keepdim=True)
        if unit == "sequence_product":
            difference = torch.where(mask, total, 0.0)
        else:
            mean = total / mask.sum(dim=1, keepdim=True).clamp(min=1)
            if unit == "sequence_token":
                mean = mean.detach() + difference - difference.detach()
            difference = torch.where(mask, mean, 0.0)
    return difference.clamp(-limit, limit)


def clipped_surrogate(
    log_ratios: Tensor,
    advantages: Tensor,
    *,
    clip_low: float,
    clip_high: float,
    dual_clip: float | None = None,
    ratio_cap: float | None = None,
) -> Tensor:
    """PPO's ``-min(rho A, clip(rho, 1 - clip_low, 1 + clip_high) A)``; ``[N, T]``.

    ``dual_clip`` bounds the loss of negative advantages by ``dual_clip * |A|``, so that one exploding ratio cannot dominate;
    ``ratio_cap`` bounds the free branch's ratio instead (INTELLECT-2, arXiv 2505.07291), to the same gradient.
    ``advantages`` is ``[N]`` (spread over the decisions) or ``[N, T]``.
    """
    advantages = per_decision(advantages, log_ratios)
    ratio = log_ratios.exp()
    free = ratio if ratio_cap is None else ratio.clamp(max=ratio_cap)
    loss = -torch.minimum(free * advantages, ratio.clamp(1 - clip_low, 1 + clip_high) * advantages)
    if dual_clip is None:
        return loss
    return torch.where(advantages < 0, torch.minimum(loss, -dual_clip * advantages), loss)


def policy_gradient(log_probs: Tensor, advantages: Tensor, mask: Tensor) -> Tensor:
    """REINFORCE's ``-A log pi``; ``[N, T]``, 0 where masked."""
    return -per_decision(advantages, log_probs) * torch.where(mask, log_probs.float(), 0.0)


def cispo(
    log_probs: Tensor,
    log_ratios: Tensor,
    advantages: Tensor,
    mask: Tensor,
    *,
    ratio_cap: float | None,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
) -> Tensor:
    """``-sg[w] A log pi`` with ``w = min(rho, ratio_cap)`` (MiniMax-M1, arXiv 2506.13585); ``[N, T]``.

    Without ``ratio_cap`` the weight is ``clip(rho, 1 - clip_low, 1 + clip_high)``. Every decision keeps a gradient.
    """
    ratio = log_ratios.detach().exp()
    weight = ratio.clamp(max=ratio_cap) if ratio_cap is not None else ratio.clamp(1 - clip_low, 1 + clip_high)
    return weight * policy_gradient(log_probs, advantages, mask)


def sapo(log_ratios: Tensor, advantages: Tensor, *, positive_tau: float = 1.0, negative_tau: float = 1.05) -> Tensor:
    """``-(4 / tau) sigmoid(tau (rho - 1)) A``: a soft gate in place of the clip (SAPO, arXiv 2511.20347); ``[N, T]``.

    Advantages of 0 and below use ``negative_tau``.
    """
    advantages = per_decision(advantages, log_ratios)
    tau = torch.where(advantages > 0, positive_tau, negative_tau)
    return -4 / tau * torch.sigmoid(tau * (log_ratios.exp() - 1)) * advantages


def gmpo(log_ratios: Tensor, advantages: Tensor, mask: Tensor, *, clip: float = 0.4) -> Tensor:
    """``-A exp(mean of clipped log-ratios)`` of the rollout (GMPO, arXiv 2507.20673); ``[N, T]``, equal within a row.

    Log-ratios ``d`` enter as ``sgn(A) min(sgn(A) d, clip(sgn(A) d, -clip, clip))``; ``advantages`` is ``[N]``.
    """
    advantages = per_decision(advantages, log_ratios)
    sign = torch.where(advantages < 0, -1.0, 1.0)
    clipped = sign * torch.minimum(sign * log_ratios, (sign * log_ratios).clamp(-clip, clip))
    count = mask.sum(dim=1, keepdim=True).clamp(min=1)
    mean = torch.where(mask, clipped, 0.0).sum(dim=1, keepdim=True) / count
    return torch.where(mask, -advantages * mean.exp(), 0.0)


def vespo(log_probs: Tensor, log_ratios: Tensor, advantages: Tensor, mask: Tensor) -> Tensor:
    """``-sg[W^k exp(lam (1 - W))] A log pi`` with the rollout's ratio ``W`` (VESPO, arXiv 2602.10693); ``[N, T]``.

    ``log_ratios`` is that of unit ``sequence_product``; ``k, lam`` are 2, 3 for ``A >= 0`` and 3, 2 below.
    """
    advantages = per_decision(advantages, log_ratios)
    log_weight = log_ratios.detach().clamp(math.log(1e-8), MAX_LOG_RATIO)
    weight = log_weight.exp()
    power = torch.where(advantages >= 0, 2.0, 3.0)
    decay = torch.where(advantages >= 0, 3.0, 2.0)
    return (power * log_weight + decay * (1 - weight)).exp() * policy_gradient(log_probs, advantages, mask)


def topr(log_probs: Tensor, log_ratios: Tensor, advantages: Tensor, mask: Tensor) -> Tensor:
    """Tapered off-policy REINFORCE (arXiv 2503.14286): ``-A log pi``, for ``A <= 0`` times ``sg[min(rho, 1)]``; ``[N, T]``.

    The ratio to the behaviour policy is the whole rollout's (unit ``sequence_product``) in the paper, each token's in ROLL.
    """
    advantages = per_decision(advantages, log_ratios)
    taper = log_ratios.detach().exp().clamp(max=1)
    return torch.where(advantages > 0, 1.0, taper) * policy_gradient(log_probs, advantages, mask)


def delight(log_probs: Tensor, advantages: Tensor, mask: Tensor, *, temperature: float = 1.0) -> Tensor:
    """Delightful policy gradient (arXiv 2603.14608): ``-sg[sigmoid(A l / temperature) A] log pi``; ``[N, T]``.

    The surprisal ``l = clip(-log pi, -10, 10)`` is that of the policy being trained; no ratio is used.
    """
    surprisal = -torch.where(mask, log_probs.detach().float(), 0.0).clamp(-10, 10)
    gate = torch.sigmoid(per_decision(advantages, log_probs) * surprisal / temperature)
    return gate * policy_gradient(log_probs, advantages, mask)


def oreal(log_probs: Tensor, log_ratios: Tensor, advantages: Tensor, mask: Tensor) -> Tensor:
    """OREAL (arXiv 2502.06781): ``-A log pi`` for ``A > 0``, ``-A rho`` otherwise; ``[N, T]``."""
    advantages = per_decision(advantages, log_ratios)
    return torch.where(advantages > 0, policy_gradient(log_probs, advantages, mask), -advantages * log_ratios.exp())


def kl_penalty(
    log_probs: Tensor,
    reference_log_probs: Tensor,
    mask: Tensor,
    *,
    estimator: KLEstimator,
    gradient: Literal["own", "k2"] = "own",
) -> Tensor:
    """Estimate ``KL(pi || reference)`` per decision sampled from ``pi``; ``[N, T]``, 0 where masked.

    With ``d = log pi - log reference``: k1 is ``d`` (as a loss its expected gradient is zero; meant for the reward), k2 is
    ``d^2 / 2`` (its gradient is that of the reverse KL on-policy), k3 is ``exp(-d) + d - 1`` (unbiased and never negative), abs
    is ``|d|``. ``gradient="k2"`` keeps the value and takes the gradient of k2 (straight-through).
    """
    difference = log_ratio(log_probs, reference_log_probs, mask)
    value = KL_ESTIMATORS[estimator](difference)
    if gradient == "own":
        return value
    k2 = KL_ESTIMATORS["k2"](difference)
    return value.detach() + k2 - k2.detach()


KL_ESTIMATORS: Mapping[str, Callable[[Tensor], Tensor]] = {
    "k1": lambda d: d,
    "k2": lambda d: d.square() / 2,
    "k3": lambda d: torch.expm1(-d) + d,
    "abs": lambda d: d.abs(),
}


def mismatch_weights(
    old_log_probs: Tensor,
    sampler_log_probs: Tensor,
    mask: Tensor,
    *,
    unit: Literal["token", "sequence", "geometric"],
    truncate: bool,
    low: float = 0.0,
    high: float = 2.0,
) -> Tensor:
    """Weights of the policy loss for a sampling engine that disagrees with the trainer; ``[N, T]``, 1 where masked.

    With ``w = exp(old - sampler)`` per decision, its product or its geometric mean over the rollout: ``truncate`` gives
    ``min(w, high)``; otherwise decisions (rollouts) outside of ``[low, high]`` get 0. The geometric mean only decides which
    rollouts stay: their decisions are weighted by ``min(w, high)``.
    """
    weight = log_ratio(old_log_probs, sampler_log_probs, mask).detach().exp()
    if unit == "geometric":
        mean = log_ratio(old_log_probs, sampler_log_probs, mask, unit="sequence").detach().exp()
        return torch.where(mask, torch.where((mean >= low) & (mean <= high), weight.clamp(max=high), 0.0), 1.0)
    if unit == "sequence":
        weight = log_ratio(old_log_probs, sampler_log_probs, mask, unit="sequence_product").detach().exp()
    if truncate:
        return torch.where(mask, weight.clamp(max=high), 1.0)
    return torch.where(mask, torch.where((weight >= low) & (weight <= high), weight, 0.0), 1.0)


def off_policy_rows(
    log_probs: Tensor, behaviour_log_probs: Tensor, advantages: Tensor, mask: Tensor, *, delta: float
) -> Tensor:
    """DeepSeek-V3.2's off-policy sequence mask (arXiv 2512.02556): decisions that get no policy loss; bool ``[N, T]``.

    They are those of negative advantage in rollouts whose mean ``log behaviour - log pi`` exceeds ``delta``.
    """
    drift = -log_ratio(log_probs.detach(), behaviour_log_probs, mask, unit="sequence")
    return (drift > delta) & (per_decision(advantages, log_probs) < 0)


def aggregation_weights(
    mask: Tensor, kind: Aggregation, *, num_decisions: int, num_rows: int, horizon: int | None = None
) -> Tensor:
    """Weight of each decision in the step's scalar loss ``sum(weights * losses)``; ``[N, T]``, 0 where masked.

    ``num_decisions`` and ``num_rows`` count the whole optimizer step over all processes. ``token_mean`` weighs each decision
    ``1 / num_decisions`` (DAPO); ``sequence_mean`` averages within a rollout, then over rollouts (GRPO), rows without decisions
    included in ``num_rows``; ``sequence_sum`` is the mean over rollouts of their sums; ``constant`` divides by
    ``num_rows * horizon`` (Dr. GRPO); ``sign_token_mean`` is ``token_mean``, to be used with `sign_balance`.
    """
    if kind in ("token_mean", "sign_token_mean"):
        return mask.float() / max(num_decisions, 1)
    if kind == "sequence_mean":
        return mask.float() / (mask.sum(dim=1, keepdim=True).clamp(min=1) * max(num_rows, 1))
    if kind == "sequence_sum":
        return mask.float() / max(num_rows, 1)
    if horizon is None:
        raise ValueError("aggregation 'constant' needs a horizon: the longest possible rollout, in decisions.")
    return mask.float() / (max(num_rows, 1) * horizon)


def sign_balance(advantages: Tensor, *, num_positive: int, num_negative: int) -> Tensor:
    """Factors that turn a mean over all decisions into a mean over those with ``A > 0`` plus one over the others.

    They have the shape of ``advantages``. The counts are of decisions, over the whole optimizer step.
    """
    total = num_positive + num_negative
    return torch.where(advantages > 0, total / max(num_positive, 1), total / max(num_negative, 1))


def weighted_sum(losses: Tensor, weights: Tensor) -> Tensor:
    """``sum(weights * losses)`` over positions of positive weight; a graph-connected 0 when there is none."""
    return torch.where(weights != 0, losses, 0.0).mul(weights).sum()


def per_decision(values: Tensor, like: Tensor) -> Tensor:
    """Spread ``[N]`` values over the ``T`` decisions of ``like`` ``[N, T]``; ``[N, T]`` values pass through."""
    return values[:, None].expand_as(like) if values.ndim == 1 else values
