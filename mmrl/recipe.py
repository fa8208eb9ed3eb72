"""A recipe at work: what `mmrl.algorithm_config.AlgorithmConfig` says, done to tensors.

Each slot is one dictionary or one function of `mmrl.advantages`, `mmrl.losses`, `mmrl.selection` and `mmrl.shaping`; nothing
here knows a modality. Advantages are ``[N]``, or ``[N, T]`` where the credit of a rollout's decisions differs.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from mmrl import advantages as adv
from mmrl import losses
from mmrl.algorithm_config import AlgorithmConfig
from mmrl.errors import AdapterError
from mmrl.losses import per_decision
from mmrl.selection import correct_rollouts, informative_rows, pass_rates, rejected_rows
from mmrl.shaping import ShapingInputs, shaped_rewards
from mmrl.types import Forward, RolloutBatch

__all__ = ["informative_rows"]  # part of what a recipe answers, computed by `mmrl.selection`


@dataclass(frozen=True, kw_only=True)
class CreditInputs:
    """What an advantage may look at."""

    rewards: Tensor
    """``[N]``, shaped; NaN where a rollout has none."""
    group_ids: Tensor
    mask: Tensor
    """``[N, T]`` bool."""
    correct: Tensor
    """``[N]`` bool."""
    terms: Tensor
    """``[N, K]`` unweighted reward terms, NaN where one does not apply."""
    weights: Tensor
    """``[K]``."""
    domains: Tensor
    """``[N]`` int64, equal for tasks of one domain."""
    progress: Tensor | None = None
    """``[N, T]`` share of the work that was done before each decision, NaN where unknown."""
    kl: Tensor | None = None
    """``[N, T]`` KL per decision times its coefficient, when it belongs into the reward."""

    def net_rewards(self) -> Tensor:
        """``[N]``: rewards minus each rollout's summed KL."""
        return self.rewards if self.kl is None else self.rewards - torch.where(self.mask, self.kl, 0.0).sum(dim=1)

    def decision_rewards(self) -> Tensor:
        """``[N, T]``: minus the KL of each decision, plus the reward on the last one; NaN rewards count as 0."""
        rewards = torch.zeros(self.mask.shape, dtype=torch.float64)
        positions = torch.arange(self.mask.shape[1])
        last = torch.where(self.mask, positions, -1).amax(dim=1) if self.mask.numel() else torch.zeros(0, dtype=torch.long)
        rows = (last >= 0).nonzero()[:, 0]
        rewards[rows, last[rows]] = self.rewards[rows].double().nan_to_num(0.0)
        return rewards if self.kl is None else rewards - torch.where(self.mask, self.kl.double(), 0.0)


def _returns(config: AlgorithmConfig, x: CreditInputs) -> tuple[Tensor, Tensor]:
    """Reward-to-go ``[N, T]`` (``[N]`` where it is constant along a rollout), and which decisions have one, bool ``[N, T]``."""
    credit = adv.reward_to_go(x.decision_rewards(), x.mask, discount=config.discount)
    scored = x.mask & ~x.rewards.isnan()[:, None]
    if x.kl is None and config.discount == 1.0:
        credit = adv.raw_advantages(x.rewards)
    return credit, scored


def _token_whitened(config: AlgorithmConfig, x: CreditInputs) -> Tensor:
    credit, scored = _returns(config, x)
    return adv.whiten_decisions(credit, scored, ddof=config.advantage_ddof)


def _center_whitened(config: AlgorithmConfig, x: CreditInputs) -> Tensor:
    scored = x.mask & ~x.rewards.isnan()[:, None]
    return adv.whiten_decisions(adv.group_center_advantages(x.net_rewards(), x.group_ids), scored, ddof=config.advantage_ddof)


def _progress_baseline(config: AlgorithmConfig, x: CreditInputs) -> Tensor:
    if x.progress is None:
        raise AdapterError(
            "algorithm.advantage progress_baseline needs the share of work done, which these tasks do not measure."
        )
    return adv.progress_baseline_advantages(x.net_rewards(), x.group_ids, x.domains, x.mask, x.progress)


ADVANTAGES: Mapping[str, Callable[[AlgorithmConfig, CreditInputs], Tensor]] = {
    "group_std": lambda c, x: adv.group_std_advantages(
        x.net_rewards(), x.group_ids, eps=c.advantage_eps, ddof=c.advantage_ddof
    ),
    "group_center": lambda c, x: adv.group_center_advantages(x.net_rewards(), x.group_ids),
    "leave_one_out": lambda c, x: adv.leave_one_out_advantages(x.net_rewards(), x.group_ids),
    "batch_std": lambda c, x: adv.batch_std_advantages(
        x.net_rewards(), x.group_ids, eps=c.advantage_eps, ddof=c.advantage_ddof
    ),
    "per_term_std": lambda c, x: adv.per_term_std_advantages(
        x.terms, x.weights, x.group_ids, eps=c.advantage_eps, ddof=c.advantage_ddof
    ),
    "length_baseline": lambda c, x: adv.length_baseline_advantages(x.net_rewards(), x.group_ids, x.mask.sum(dim=1)),
    "gpg": lambda c, x: adv.gpg_advantages(x.net_rewards(), x.group_ids),
    "beta_normalized": lambda c, x: adv.beta_normalized_advantages(x.net_rewards(), x.group_ids),
    "token_whitened": _token_whitened,
    "center_whitened": _center_whitened,
    "progress_baseline": _progress_baseline,
    "raw": lambda c, x: adv.raw_advantages(x.net_rewards()),
    "positive_part": lambda c, x: adv.raw_advantages(x.net_rewards()).clamp(min=0),
    "sign": lambda c, x: adv.sign_advantages(x.rewards, x.correct),
    "best_of_n": lambda c, x: adv.best_of_n_advantages(x.rewards, x.correct, x.group_ids),
    "ones": lambda c, x: torch.ones(len(x.group_ids)),
}

BATCH_WIDE = frozenset(
    {"batch_std", "per_term_std", "gpg", "beta_normalized", "token_whitened", "center_whitened", "progress_baseline"}
)  # fmt: skip
"""Advantages whose statistics cross groups, so that all processes must look at the same batch."""


@dataclass(frozen=True, kw_only=True)
class SurrogateInputs:
    """What a surrogate may look at; all ``[n, T]``, ``advantages`` 0 where masked."""

    log_probs: Tensor
    log_ratios: Tensor
    advantages: Tensor
    mask: Tensor


SURROGATES: Mapping[str, Callable[[AlgorithmConfig, SurrogateInputs], Tensor]] = {
    "clip": lambda c, x: losses.clipped_surrogate(
        x.log_ratios, x.advantages,
        clip_low=c.clip_low, clip_high=c.clip_high, dual_clip=c.dual_clip, ratio_cap=c.ratio_cap,
    ),
    "policy_gradient": lambda c, x: losses.policy_gradient(x.log_probs, x.advantages, x.mask),
    "cispo": lambda c, x: losses.cispo(
        x.log_probs, x.log_ratios, x.advantages, x.mask,
        ratio_cap=c.ratio_cap, clip_low=c.clip_low, clip_high=c.clip_high,
    ),
    "sapo": lambda c, x: losses.sapo(x.log_ratios, x.advantages),
    "gmpo": lambda c, x: losses.gmpo(x.log_ratios, x.advantages, x.mask, clip=c.clip_high),
    "vespo": lambda c, x: losses.vespo(x.log_probs, x.log_ratios, x.advantages, x.mask),
    "topr": lambda c, x: losses.topr(x.log_probs, x.log_ratios, x.advantages, x.mask),
    "delight": lambda c, x: losses.delight(x.log_probs, x.advantages, x.mask, temperature=c.delight_temperature),
    "oreal": lambda c, x: losses.oreal(x.log_probs, x.log_ratios, x.advantages, x.mask),
}  # fmt: skip

MISMATCHES: Mapping[str, Mapping[str, object]] = {
    "token_truncate": {"unit": "token", "truncate": True},
    "token_mask": {"unit": "token", "truncate": False},
    "sequence_truncate": {"unit": "sequence", "truncate": True},
    "sequence_mask": {"unit": "sequence", "truncate": False},
    "geometric_mask": {"unit": "geometric", "truncate": False},
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


def regularized(config: AlgorithmConfig) -> bool:
    """Whether a decision has a loss even when its advantage is 0."""
    return config.entropy_coef > 0 or (config.kl_coef > 0 and config.kl_in == "loss")


def effective_mask(config: AlgorithmConfig, batch: RolloutBatch, trained: Tensor | None = None) -> Tensor:
    """``[N, T]`` bool: decisions that receive loss.

    Rollouts outside of ``trained`` (bool ``[N]``) have none, and truncated ones none with ``mask_truncated``.
    """
    mask = batch.loss_mask if trained is None else batch.loss_mask & trained[:, None]
    if not config.mask_truncated:
        return mask
    kept = torch.tensor([reason != "length" for reason in batch.stop_reasons], dtype=torch.bool)
    return mask & kept[:, None]


def shape_rewards(config: AlgorithmConfig, batch: RolloutBatch, limit: int) -> Tensor:
    """``[N]`` total rewards after ``shaping``; ``limit`` is the length of the longest possible rollout."""
    if not config.shaping:
        return batch.rewards
    inputs = ShapingInputs(
        lengths=batch.num_decisions,
        correct=correct_rollouts(config, batch),
        truncated=torch.tensor([reason in ("length", "timeout") for reason in batch.stop_reasons], dtype=torch.bool),
        group_ids=batch.group_ids,
        limit=limit,
    )
    return shaped_rewards(config.shaping, batch.rewards, inputs)


def credit_inputs(
    config: AlgorithmConfig,
    batch: RolloutBatch,
    reference_log_probs: Tensor | None = None,
    *,
    rewards: Tensor | None = None,
    weights: Mapping[str, float] | None = None,
) -> CreditInputs:
    """What `compute_advantages` looks at; ``rewards`` are the batch's unless shaped, ``weights`` those of the terms."""
    kl = None
    if config.kl_in == "reward" and reference_log_probs is not None:
        kl = config.kl_coef * losses.kl_penalty(batch.old_log_probs, reference_log_probs, batch.loss_mask, estimator=config.kl)
    names = [name for name in batch.reward_terms if (weights or {}).get(name, 0.0) != 0]
    columns = [batch.reward_terms[name] for name in names] or [batch.rewards]
    return CreditInputs(
        rewards=batch.rewards if rewards is None else rewards,
        group_ids=batch.group_ids,
        mask=batch.loss_mask,
        correct=correct_rollouts(config, batch),
        terms=torch.stack(columns, dim=1),
        weights=torch.tensor([weights[name] for name in names] or [1.0]),
        domains=torch.tensor([zlib.crc32(task.domain.encode()) for task in batch.tasks]),
        progress=batch.progress,
        kl=kl,
    )


def estimate_advantages(config: AlgorithmConfig, inputs: CreditInputs) -> Tensor:
    """``[N]`` or ``[N, T]`` float32 credit by ``config.advantage``, before weights and phases."""
    return ADVANTAGES[config.advantage](config, inputs)


def return_sum(config: AlgorithmConfig, inputs: CreditInputs) -> tuple[float, float]:
    """Sum of the returns before whitening over all decisions that have one, and how many these are."""
    credit, scored = _returns(config, inputs)
    return float(per_decision(credit, scored)[scored].double().sum()), float(scored.sum())


def outliers(config: AlgorithmConfig, advantages: Tensor, center: float = 0.0) -> Tensor:
    """Which advantages (``[N]`` or ``[N, T]``) ``advantage_limit`` sets to 0; ``center`` is what it is a distance from."""
    if config.advantage_limit is None:
        return torch.zeros_like(advantages, dtype=torch.bool)
    found = (advantages - center).abs() > config.advantage_limit
    return found | (advantages.abs() > 10) if config.advantage_limit_around == "mean" else found


def finish_advantages(
    config: AlgorithmConfig, advantages: Tensor, batch: RolloutBatch, progress: float = 1.0, *, center: float = 0.0
) -> Tensor:
    """The limit, difficulty and sign weights, rejection, the clamp, CAPO's first phase; ``progress`` is the share of the run
    so far, ``center`` that of `outliers`."""
    if config.advantage_limit is not None:
        advantages = advantages.masked_fill(outliers(config, advantages, center), 0.0)
    if config.difficulty_weight != "none":
        advantages = advantages * _by_row(difficulty_weights(config, batch), advantages)
    if config.positive_weight != 1.0 or config.negative_weight != 1.0:
        advantages = advantages * torch.where(advantages > 0, config.positive_weight, config.negative_weight)
    if config.selection == "reject":
        advantages = advantages.masked_fill(_by_row(rejected_rows(config, batch), advantages), 0.0)
    if config.advantage_clamp is not None:
        advantages = advantages.clamp(-config.advantage_clamp, config.advantage_clamp)
    return advantages.clamp(min=0) if progress < config.positive_only_until else advantages


def subtract_kl_to_go(
    config: AlgorithmConfig, advantages: Tensor, batch: RolloutBatch, reference_log_probs: Tensor | None
) -> Tensor:
    """With ``kl_in: return``, ``A_t - kl_coef sum_(u>=t) kl_u`` of each decision, float32 ``[N, T]``; else ``advantages``.

    That is the undiscounted reward-to-go of a rollout whose decisions cost their KL and whose last one earns ``A``.
    """
    if config.kl_in != "return" or reference_log_probs is None:
        return advantages
    kl = losses.kl_penalty(batch.old_log_probs, reference_log_probs, batch.loss_mask, estimator=config.kl)
    to_go = adv.reward_to_go(-config.kl_coef * kl, batch.loss_mask)
    return torch.where(batch.loss_mask, per_decision(advantages, to_go).double() + to_go, 0.0).float()


def compute_advantages(
    config: AlgorithmConfig,
    batch: RolloutBatch,
    reference_log_probs: Tensor | None,
    *,
    weights: Mapping[str, float] | None = None,
    progress: float = 1.0,
) -> Tensor:
    """``[N]`` or ``[N, T]`` float32 credit; with ``kl_in: reward`` the KL is subtracted from the rewards first."""
    inputs = credit_inputs(config, batch, reference_log_probs, weights=weights)
    total, count = return_sum(config, inputs) if config.advantage_limit_around == "mean" else (0.0, 0.0)
    advantages = estimate_advantages(config, inputs)
    advantages = finish_advantages(config, advantages, batch, progress, center=total / max(count, 1.0))
    return subtract_kl_to_go(config, advantages, batch, reference_log_probs)


def difficulty_weights(config: AlgorithmConfig, batch: RolloutBatch) -> Tensor:
    """``[N]`` float32: 1/p or 1/sqrt(p) with the group's success rate p, 0 where nothing succeeded (Reinforce-Ada), or
    ``4 difficulty_peak p (1 - p)`` (Observe-R1)."""
    rate = pass_rates(config, batch)
    if config.difficulty_weight == "parabola":
        return (4 * config.difficulty_peak * rate * (1 - rate)).float()
    power = 1.0 if config.difficulty_weight == "inverse" else 0.5
    return torch.where(rate > 0, rate.clamp(min=1e-9).pow(-power), 0.0).float()


def mismatch_weights(config: AlgorithmConfig, batch: RolloutBatch) -> Tensor | None:
    """``[N, T]`` factors of the policy loss, not normalised; None when there is nothing to correct."""
    if config.mismatch == "none" or batch.sampler_log_probs is None:
        return None
    return losses.mismatch_weights(
        batch.old_log_probs, batch.sampler_log_probs, batch.loss_mask,
        low=config.mismatch_low, high=config.mismatch_high, **MISMATCHES[config.mismatch],
    )  # fmt: skip


def decision_losses(
    config: AlgorithmConfig,
    forward: Forward,
    old_log_probs: Tensor,
    mask: Tensor,
    advantages: Tensor,
    reference_log_probs: Tensor | None,
    *,
    policy_weights: Tensor | None = None,
    sampler_log_probs: Tensor | None = None,
) -> DecisionLosses:
    """Surrogate, KL and entropy terms of one micro-batch; all tensors ``[n, T]``, ``advantages`` also ``[n]``.

    ``policy_weights`` multiply the surrogate only, not the KL and the entropy.
    """
    log_probs = forward.log_probs
    ratios = losses.log_ratio(log_probs, old_log_probs, mask, unit=config.ratio, limit=config.max_log_ratio)
    credit = torch.where(mask, per_decision(advantages, ratios), 0.0)
    inputs = SurrogateInputs(log_probs=log_probs, log_ratios=ratios, advantages=credit, mask=mask)
    total = SURROGATES[config.surrogate](config, inputs)
    if policy_weights is not None:
        total = total * torch.where(mask, policy_weights, 0.0)
    sums = {}
    if config.surrogate == "clip":
        ratio = ratios.detach().exp()
        sums["ratio/clip_low"] = ((ratio < 1 - config.clip_low) & (credit < 0) & mask).sum()
        sums["ratio/clip_high"] = ((ratio > 1 + config.clip_high) & (credit > 0) & mask).sum()
    if config.max_log_ratio < losses.MAX_LOG_RATIO:  # a narrow bound is part of the method, so who meets it is logged
        sums["ratio/bound_low"] = ((ratios.detach() <= -config.max_log_ratio) & mask).sum()
        sums["ratio/bound_high"] = ((ratios.detach() >= config.max_log_ratio) & mask).sum()
    if config.off_policy_delta is not None:
        behaviour = old_log_probs if sampler_log_probs is None else sampler_log_probs
        stale = losses.off_policy_rows(log_probs, behaviour, credit, mask, delta=config.off_policy_delta)
        total = total.masked_fill(stale, 0.0)
        sums["ratio/off_policy"] = (stale & mask).sum()
    if reference_log_probs is not None:
        kl = losses.kl_penalty(log_probs, reference_log_probs, mask, estimator=config.kl, gradient=config.kl_gradient)
        sums["kl"] = torch.where(mask, kl.detach(), 0.0).sum()
        if config.kl_in == "loss":
            if config.kl_importance:
                kl = kl * losses.log_ratio(log_probs, old_log_probs, mask).exp()
            total = total + config.kl_coef * kl
    if forward.entropy is not None:
        total = total - config.entropy_coef * torch.where(mask, forward.entropy, 0.0)
    largest = torch.where(mask, ratios.detach().abs(), 0.0)
    return DecisionLosses(losses=total, sums=sums, max_log_ratio=largest.max() if largest.numel() else torch.zeros(()))


def row_means(values: Tensor, mask: Tensor) -> Tensor:
    """``[N]``: values per rollout as they are, values per decision averaged over the rollout."""
    if values.ndim == 1:
        return values
    return torch.where(mask, values, 0.0).sum(dim=1) / mask.sum(dim=1).clamp(min=1)


def _by_row(values: Tensor, like: Tensor) -> Tensor:
    return values if like.ndim == 1 else values[:, None]
