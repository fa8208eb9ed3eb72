"""From rewards to credit: pure functions of tensors, no config, no logging.

Rewards are ``[N]`` with ``group_ids`` ``[N]``; groups may differ in size. NaN means "no reward": such rows are left out of the
group's statistics and get 0. Statistics are computed in float64. A group whose rewards are all equal has advantage exactly 0:
twelve float32 rewards of 0.7 do not average to 0.7, and dividing the residue by a tiny standard deviation would give 0.1.
"""

from __future__ import annotations

import torch
from torch import Tensor

CONSTANT_TOLERANCE = 1e-6
"""A group whose rewards span no more than this is constant."""


def group_std_advantages(rewards: Tensor, group_ids: Tensor, *, eps: float = 1e-6, ddof: int = 1) -> Tensor:
    """``(r - mean) / (std + eps)`` within each group (GRPO, arXiv 2402.03300); float32 ``[N]``.

    ``ddof=1`` is the sample standard deviation of all public libraries, ``ddof=0`` the population's. A group of one gets 0.
    """
    group = _GroupStatistics(rewards, group_ids)
    variance = group.mean_of(group.centered.square()) * group.size / (group.size - ddof).clamp(min=1)
    return group.finish(group.centered / (group.spread_over_rows(variance).sqrt() + eps))


def group_center_advantages(rewards: Tensor, group_ids: Tensor) -> Tensor:
    """``r - mean`` within each group (Dr. GRPO, arXiv 2503.20783); float32 ``[N]``. A group of one gets 0."""
    group = _GroupStatistics(rewards, group_ids)
    return group.finish(group.centered)


def leave_one_out_advantages(rewards: Tensor, group_ids: Tensor) -> Tensor:
    """``r_i`` minus the mean of the others (RLOO, arXiv 2402.14740): ``G / (G - 1)`` times the centered reward.

    Float32 ``[N]``. A group of one has no others and gets 0.
    """
    group = _GroupStatistics(rewards, group_ids)
    factor = group.size / (group.size - 1).clamp(min=1)
    return group.finish(group.centered * group.spread_over_rows(factor))


def batch_std_advantages(rewards: Tensor, group_ids: Tensor, *, eps: float = 1e-6, ddof: int = 1) -> Tensor:
    """``(r - group mean) / (std of all raw rewards + eps)`` (Lite-PPO, arXiv 2508.08221); float32 ``[N]``."""
    group = _GroupStatistics(rewards, group_ids)
    everything = rewards[group.valid].double()
    deviation = everything.std(correction=ddof) if len(everything) > ddof else everything.new_zeros(())
    return group.finish(group.centered / (deviation + eps))


def length_baseline_advantages(rewards: Tensor, group_ids: Tensor, lengths: Tensor) -> Tensor:
    """``r - sum(n r) / sum(n)`` within each group, ``n`` the ``lengths`` ``[N]`` in decisions (OPO); float32 ``[N]``."""
    group = _GroupStatistics(rewards, group_ids)
    weights = lengths.double().masked_fill(~group.valid, 0.0)
    shift = group.sum_of(weights * group.centered) / group.sum_of(weights).clamp(min=1)  # baseline minus plain mean
    return group.finish(group.centered - group.spread_over_rows(shift))


def progress_baseline_advantages(rewards: Tensor, group_ids: Tensor, domains: Tensor, mask: Tensor, progress: Tensor) -> Tensor:
    """``r`` minus what the state before each decision let expect; float32 ``[N, T]``, 0 where masked.

    The expectation is a linear baseline (Duan et al., arXiv 1604.06778), fitted by ridge regression to the decisions of each of
    the ``domains`` (``[N]``): on the mean reward of the rest of the group, on the share of work done so far (``progress``
    ``[N, T]``; NaN counts as 0), its square and its largest value so far, on time, and on products of these. A decision is thus
    neither praised nor blamed for what happened before it, nor for what had become certain by then. Rollouts are compared with
    all others of their domain, so a group whose rewards are all equal has credit too.
    """
    group = _GroupStatistics(rewards, group_ids)
    values = rewards.double().masked_fill(~group.valid, 0.0)
    mates = (group.spread_over_rows(group.sum_of(values)) - values) / (group.spread_over_rows(group.size) - 1).clamp(min=1)
    done = progress.double().nan_to_num(0.0)
    time = torch.linspace(0.0, 1.0, mask.shape[1], dtype=torch.float64).expand(mask.shape)
    mates, best = mates[:, None].expand(mask.shape), done.cummax(dim=1).values if mask.numel() else done
    columns = [torch.ones_like(done), mates, done, done**2, best, time, time**2, time * done, mates * done, mates * time]
    features = torch.stack(columns, dim=2)  # [N, T, F]
    used = mask & group.valid[:, None]
    result = torch.zeros(mask.shape)
    for domain in domains.unique():
        rows = used & (domains == domain)[:, None]
        x, y = features[rows], values[:, None].expand(mask.shape)[rows]
        weights = torch.linalg.solve(x.T @ x + torch.eye(x.shape[1], dtype=x.dtype), x.T @ y)
        result[rows] = (y - x @ weights).float()
    return result


def gpg_advantages(rewards: Tensor, group_ids: Tensor) -> Tensor:
    """``(N / number of nonzero rewards) (r - mean)`` (GPG, arXiv 2504.02546); float32 ``[N]``."""
    group = _GroupStatistics(rewards, group_ids)
    nonzero = (rewards[group.valid] != 0).sum().clamp(min=1)
    return group.finish(group.centered * group.valid.sum() / nonzero)


def per_term_std_advantages(terms: Tensor, weights: Tensor, group_ids: Tensor, *, eps: float = 1e-4, ddof: int = 1) -> Tensor:
    """GDPO (arXiv 2601.05242): z-score each term within its group, add them up, z-score over the batch; float32 ``[N]``.

    ``terms`` is ``[N, K]`` with NaN where a term does not apply, ``weights`` ``[K]``. A term that is constant in a group adds
    0; a row to which no term applies gets 0.
    """
    scores = [group_std_advantages(column, group_ids, eps=eps, ddof=ddof) for column in terms.unbind(dim=1)]
    total = (torch.stack(scores, dim=1).double() * weights.double()).sum(dim=1)
    scored = ~terms.isnan().all(dim=1)
    known = total[scored]
    if len(known) <= ddof or known.max() - known.min() <= CONSTANT_TOLERANCE:
        return torch.zeros(len(total))
    return ((total - known.mean()) / (known.std(correction=ddof) + eps)).masked_fill(~scored, 0.0).float()


def beta_normalized_advantages(rewards: Tensor, group_ids: Tensor, *, max_weight: float = 1e6) -> Tensor:
    """BNPO (arXiv 2506.02864): ``(r - p) / f(p; alpha, beta)`` with ``p`` the group's mean; float32 ``[N]``.

    A Beta(a, b) is fitted to the groups' means by moments (sample variance); ``alpha = 1 + a/3`` and ``beta = 1 + b/3``, at
    least 1, minimise the variance of the gradient. With fewer than two groups, or groups of one mean, both are 1: then this is
    `group_center_advantages`. Rewards are 0 or 1; others are mapped to [0, 1] by the batch's smallest and largest first.
    """
    group = _GroupStatistics(_unit_interval(rewards), group_ids)
    means = group.mean_of(group.values)[group.size > 0]
    center, spread = means.mean(), means.var(correction=1) if len(means) > 1 else means.new_zeros(())
    alpha = beta = means.new_ones(())
    if spread > 0:
        concentration = center * (1 - center) / spread - 1
        alpha = (1 + concentration * center / 3).clamp(min=1)
        beta = (1 + concentration * (1 - center) / 3).clamp(min=1)
    success = group.mean_of(group.values)
    log_norm = torch.lgamma(alpha) + torch.lgamma(beta) - torch.lgamma(alpha + beta)
    log_density = torch.xlogy(alpha - 1, success) + torch.xlogy(beta - 1, 1 - success) - log_norm
    weight = (-log_density).exp().clamp(max=max_weight)
    return group.finish(group.centered * group.spread_over_rows(weight))


def raw_advantages(rewards: Tensor) -> Tensor:
    """The reward itself (REINFORCE without a baseline), 0 where it is NaN; float32 ``[N]``."""
    return rewards.float().nan_to_num(0.0)


def sign_advantages(rewards: Tensor, correct: Tensor) -> Tensor:
    """+1 for ``correct`` (bool ``[N]``) rollouts, -1 for wrong ones, 0 where the reward is NaN; float32 ``[N]``."""
    return torch.where(correct, 1.0, -1.0).masked_fill(rewards.isnan(), 0.0)


def best_of_n_advantages(rewards: Tensor, correct: Tensor, group_ids: Tensor) -> Tensor:
    """How much likelier a rollout is as the best of its group than as one of it; float32 ``[N]``, 0 where there is no reward.

    With the share ``p`` of ``correct`` ones among ``n``: ``(1 - (1 - p)^n) / p`` for a correct rollout, ``(1 - p)^(n - 1)`` for
    a wrong one (OREAL, arXiv 2502.06781). As credit of a likelihood loss this imitates best-of-n sampling.
    """
    group = _GroupStatistics(rewards, group_ids)
    share = group.spread_over_rows(group.mean_of((correct & group.valid).double()))
    size = group.spread_over_rows(group.size)
    right = (1 - (1 - share).pow(size)) / share.clamp(min=1e-12)
    return torch.where(correct, right, (1 - share).pow((size - 1).clamp(min=0))).masked_fill(~group.valid, 0.0).float()


def generalized_advantages(
    rewards: Tensor, values: Tensor, mask: Tensor, *, discount: float = 1.0, decay: float = 0.95
) -> Tensor:
    """``sum_(u >= t) (discount decay)^(u - t) (q_u + discount V_(u+1) - V_u)`` (GAE, arXiv 1506.02438); float64 ``[N, T]``.

    ``rewards`` ``q`` and ``values`` ``V`` are ``[N, T]``, per decision; behind the last one the value is 0. ReFT
    (arXiv 2401.08967) credits with it; returns are the advantages plus ``values``. 0 where masked.
    """
    known = torch.where(mask, values.double(), 0.0)
    following = torch.nn.functional.pad(known[:, 1:], (0, 1))
    errors = torch.where(mask, rewards.double() + discount * following - known, 0.0)
    return reward_to_go(errors, mask, discount=discount * decay)


def group_means(values: Tensor, group_ids: Tensor) -> Tensor:
    """Each row's group mean of ``values`` ``[N]``, NaN left out (0 if there is nothing else); float64 ``[N]``."""
    group = _GroupStatistics(values, group_ids)
    return group.spread_over_rows(group.mean_of(group.values))


def reward_to_go(rewards: Tensor, mask: Tensor, *, discount: float = 1.0) -> Tensor:
    """``sum over u >= t of discount^(u - t) q_u`` of rewards per decision ``q`` ``[N, T]``; float64 ``[N, T]``, 0 where masked.

    A masked position between decisions (a tool's output) counts as one step of time.
    """
    ahead, columns = torch.zeros(len(rewards), dtype=torch.float64), []
    for column in torch.where(mask, rewards.double(), 0.0).flip(1).unbind(dim=1):
        ahead = column + discount * ahead
        columns.append(ahead)
    result = torch.stack(columns[::-1], dim=1) if columns else rewards.double()
    return torch.where(mask, result, 0.0)


def whiten_decisions(values: Tensor, mask: Tensor, *, ddof: int = 1, eps: float = 1e-8) -> Tensor:
    """``(x - mean) / sqrt(var + eps)`` over all decisions of the batch (REINFORCE++, arXiv 2501.03262); float32 ``[N, T]``.

    ``values`` is ``[N]`` or ``[N, T]``; long rollouts weigh more. Zeros where masked, and everywhere when fewer than two
    decisions are left or all are equal.
    """
    values = (values[:, None].expand(mask.shape) if values.ndim == 1 else values).double()
    known = values[mask]
    if len(known) < 2 or known.max() - known.min() <= CONSTANT_TOLERANCE:
        return torch.zeros(mask.shape)
    variance = known.var(correction=ddof)
    return torch.where(mask, (values - known.mean()) / (variance + eps).sqrt(), 0.0).float()


def token_score_weights(scores: Tensor) -> tuple[Tensor, Tensor]:
    """OREAL's weights of decisions in correct and in wrong rollouts, from a token reward head's ``scores`` ``[N, T]``.

    With ``s = sigmoid(cumulative mean of the scores)``: ``max(2 s - 1, 0)`` and ``max(1 - 2 s, 0)`` (arXiv 2502.06781).
    """
    count = torch.arange(1, scores.shape[1] + 1)
    belief = (scores.cumsum(dim=1) / count).sigmoid()
    return (2 * belief - 1).clamp(min=0), (1 - 2 * belief).clamp(min=0)


def constant_groups(values: Tensor, group_ids: Tensor) -> Tensor:
    """Which rows belong to a group whose ``values`` (``[N]``, NaN ignored) carry no signal; bool ``[N]``."""
    return _GroupStatistics(values, group_ids).constant


class _GroupStatistics:
    """Per-group size, mean and spread of ``[N]`` rewards; NaN rows are not counted."""

    def __init__(self, rewards: Tensor, group_ids: Tensor) -> None:
        if rewards.ndim != 1 or rewards.shape != group_ids.shape:
            raise ValueError(
                f"rewards {tuple(rewards.shape)} and group_ids {tuple(group_ids.shape)} must both be [N], one per rollout."
            )
        _, self.rows = group_ids.unique(return_inverse=True)  # [N], dense group numbers
        self.num_groups = int(self.rows.max()) + 1 if len(self.rows) else 0
        self.valid = ~rewards.isnan()
        self.values = values = rewards.double().masked_fill(~self.valid, 0.0)
        self.size = self.sum_of(self.valid.double())  # [groups]
        self.centered = (values - self.spread_over_rows(self.mean_of(values))).masked_fill(~self.valid, 0.0)
        low = values.masked_fill(~self.valid, torch.inf)
        high = values.masked_fill(~self.valid, -torch.inf)
        span = self._reduce(high, "amax", -torch.inf) - self._reduce(low, "amin", torch.inf)
        self.constant = self.spread_over_rows(span <= CONSTANT_TOLERANCE)

    def sum_of(self, values: Tensor) -> Tensor:
        """Sum of ``[N]`` values per group, ``[groups]``."""
        return values.new_zeros(self.num_groups).index_add_(0, self.rows, values)

    def mean_of(self, values: Tensor) -> Tensor:
        """Mean of ``[N]`` values (0 at invalid rows) per group, ``[groups]``."""
        return self.sum_of(values) / self.size.clamp(min=1)

    def spread_over_rows(self, per_group: Tensor) -> Tensor:
        return per_group[self.rows]

    def finish(self, advantages: Tensor) -> Tensor:
        return advantages.masked_fill(self.constant | ~self.valid, 0.0).float()

    def _reduce(self, values: Tensor, how: str, start: float) -> Tensor:
        return values.new_full((self.num_groups,), start).scatter_reduce(0, self.rows, values, how)


def _unit_interval(rewards: Tensor) -> Tensor:
    """Rewards that leave [0, 1] mapped to it by the batch's smallest and largest."""
    known = rewards[~rewards.isnan()]
    if len(known) == 0 or (known.min() >= 0 and known.max() <= 1):
        return rewards
    return (rewards - known.min()) / (known.max() - known.min()).clamp(min=CONSTANT_TOLERANCE)
