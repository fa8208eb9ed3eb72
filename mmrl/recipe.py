"""A recipe at work: what `mmrl.config.AlgorithmConfig` says, done to tensors.

Each slot is one dictionary or one function of `mmrl.advantages` and `mmrl.losses`; nothing here knows a modality.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from mmrl import advantages as adv
from mmrl import losses
from mmrl.config import AlgorithmConfig
from mmrl.types import Forward, RolloutBatch

ADVANTAGES: Mapping[str, Callable[[AlgorithmConfig, Tensor, Tensor], Tensor]] = {
    "group_std": lambda c, r, g: adv.group_std_advantages(r, g, eps=c.advantage_eps, ddof=c.advantage_ddof),
    "group_center": lambda c, r, g: adv.group_center_advantages(r, g),
    "leave_one_out": lambda c, r, g: adv.leave_one_out_advantages(r, g),
    "ones": lambda c, r, g: torch.ones(len(g)),
}


@dataclass(frozen=True, kw_only=True)
class DecisionLosses:
    """Per-decision losses ``[n, T]`` and what is logged about them (sums over the decisions of the micro-batch)."""

    losses: Tensor
    sums: Mapping[str, Tensor]
    max_log_ratio: Tensor


def needs_reference(config: AlgorithmConfig) -> bool:
    """Whether a reference policy must be kept."""
    return config.kl_coef > 0


def forward_needs(config: AlgorithmConfig) -> frozenset[str]:
    """What the update asks of `Adapter.forward` beyond log-probabilities."""
    return frozenset({"entropy"} if config.entropy_coef > 0 else ())


def effective_mask(config: AlgorithmConfig, batch: RolloutBatch) -> Tensor:
    """``[N, T]`` bool: decisions that receive loss (truncated rollouts none, with ``mask_truncated``)."""
    if not config.mask_truncated:
        return batch.loss_mask
    kept = torch.tensor([reason != "length" for reason in batch.stop_reasons])
    return batch.loss_mask & kept[:, None]


def compute_advantages(config: AlgorithmConfig, batch: RolloutBatch, reference_log_probs: Tensor | None) -> Tensor:
    """``[N]`` float32 credit of each rollout; with ``kl_in: reward`` the rollout's summed KL is subtracted first."""
    rewards = batch.rewards
    if config.kl_in == "reward" and reference_log_probs is not None:
        kl = losses.kl_penalty(batch.old_log_probs, reference_log_probs, batch.loss_mask, estimator=config.kl)
        rewards = rewards - config.kl_coef * kl.sum(dim=1)
    return ADVANTAGES[config.advantage](config, rewards, batch.group_ids)


def informative_rows(config: AlgorithmConfig, batch: RolloutBatch) -> Tensor:
    """``[N]`` bool: rows of groups whose selection metric varies, so that they carry signal."""
    if config.advantage == "ones":
        return torch.ones(len(batch), dtype=torch.bool)
    metric = batch.reward_terms[config.selection_metric] if config.selection_metric else batch.rewards
    return ~adv.constant_groups(metric, batch.group_ids)


def decision_losses(
    config: AlgorithmConfig,
    forward: Forward,
    old_log_probs: Tensor,
    mask: Tensor,
    advantages: Tensor,
    reference_log_probs: Tensor | None,
) -> DecisionLosses:
    """Surrogate, KL and entropy terms of one micro-batch; all tensors ``[n, T]`` but ``advantages`` ``[n]``."""
    ratios = losses.log_ratio(forward.log_probs, old_log_probs, mask, unit=config.ratio)
    if config.surrogate == "clip":
        total = losses.clipped_surrogate(
            ratios, advantages, clip_low=config.clip_low, clip_high=config.clip_high, dual_clip=config.dual_clip
        )
    else:
        total = losses.policy_gradient(forward.log_probs, advantages, mask)
    sums = {}
    if config.surrogate == "clip":
        spread, ratio = losses.per_decision(advantages, ratios), ratios.detach().exp()
        sums["ratio/clip_low"] = ((ratio < 1 - config.clip_low) & (spread < 0) & mask).sum()
        sums["ratio/clip_high"] = ((ratio > 1 + config.clip_high) & (spread > 0) & mask).sum()
    if reference_log_probs is not None:
        kl = losses.kl_penalty(forward.log_probs, reference_log_probs, mask, estimator=config.kl)
        sums["kl"] = torch.where(mask, kl.detach(), 0.0).sum()
        if config.kl_in == "loss":
            total = total + config.kl_coef * kl
    if forward.entropy is not None:
        total = total - config.entropy_coef * torch.where(mask, forward.entropy, 0.0)
    largest = torch.where(mask, ratios.detach().abs(), 0.0)
    return DecisionLosses(losses=total, sums=sums, max_log_ratio=largest.max() if largest.numel() else torch.zeros(()))
