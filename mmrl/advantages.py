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
        values = rewards.double().masked_fill(~self.valid, 0.0)
        self.size = self._sum(self.valid.double())  # [groups]
        self.centered = (values - self.spread_over_rows(self.mean_of(values))).masked_fill(~self.valid, 0.0)
        low = values.masked_fill(~self.valid, torch.inf)
        high = values.masked_fill(~self.valid, -torch.inf)
        span = self._reduce(high, "amax", -torch.inf) - self._reduce(low, "amin", torch.inf)
        self.constant = self.spread_over_rows(span <= CONSTANT_TOLERANCE)

    def mean_of(self, values: Tensor) -> Tensor:
        """Mean of ``[N]`` values (0 at invalid rows) per group, ``[groups]``."""
        return self._sum(values) / self.size.clamp(min=1)

    def spread_over_rows(self, per_group: Tensor) -> Tensor:
        return per_group[self.rows]

    def finish(self, advantages: Tensor) -> Tensor:
        return advantages.masked_fill(self.constant | ~self.valid, 0.0).float()

    def _sum(self, values: Tensor) -> Tensor:
        return values.new_zeros(self.num_groups).index_add_(0, self.rows, values)

    def _reduce(self, values: Tensor, how: str, start: float) -> Tensor:
        return values.new_full((self.num_groups,), start).scatter_reduce(0, self.rows, values, how)
