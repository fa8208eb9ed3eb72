"""Which groups, and which of their rollouts, an update is paid for. Two slots of a recipe, each a dictionary.

`SELECTIONS` acts on whole groups before advantages exist; `SUBSAMPLES` picks rollouts within the groups that were kept. Choices
that are random take the rollouts in the order of their seeds, which are random numbers, so they need no generator and do not
depend on the number of processes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from mmrl.advantages import constant_groups, group_means
from mmrl.algorithm_config import NEEDS_NO_GROUP, AlgorithmConfig
from mmrl.types import RolloutBatch


def selection_metric(config: AlgorithmConfig, batch: RolloutBatch) -> Tensor:
    """``[N]``: the reward term that decides, NaN where it does not apply; the total reward unless the config names one."""
    return batch.reward_terms[config.selection_metric] if config.selection_metric else batch.rewards


def correct_rollouts(config: AlgorithmConfig, batch: RolloutBatch) -> Tensor:
    """``[N]`` bool: rollouts whose metric is above ``correct_above``."""
    return selection_metric(config, batch) > config.correct_above


def informative_rows(config: AlgorithmConfig, batch: RolloutBatch) -> Tensor:
    """``[N]`` bool: rows that carry signal: those of groups whose metric varies, or all where groups are not compared."""
    if config.advantage in ("ones", "best_of_n", "progress_baseline"):
        return torch.ones(len(batch), dtype=torch.bool)
    metric = selection_metric(config, batch)
    informative = ~constant_groups(metric, batch.group_ids)
    if config.advantage in NEEDS_NO_GROUP:  # a rollout without siblings is compared with all others
        _, rows, sizes = batch.group_ids.unique(return_inverse=True, return_counts=True)
        alone = (sizes == 1)[rows] & ~metric.isnan()
        informative |= alone & ~constant_groups(metric, torch.zeros_like(batch.group_ids))
    return informative


def pass_rates(config: AlgorithmConfig, batch: RolloutBatch) -> Tensor:
    """``[N]``: each row's share of correct rollouts in its group, rollouts without a metric left out; float64."""
    metric = selection_metric(config, batch)
    return group_means(torch.where(metric.isnan(), torch.nan, (metric > config.correct_above).float()), batch.group_ids)


@dataclass(frozen=True, kw_only=True)
class Selection:
    """How groups are drawn and which are kept."""

    keep: Callable[[AlgorithmConfig, RolloutBatch], Tensor]
    """``[N]`` bool, equal within a group."""
    refill: bool = False
    """Draw new tasks for groups that are not kept."""
    open_rows: Callable[[AlgorithmConfig, RolloutBatch], Tensor] | None = None
    """``[N]`` bool: rows of groups that want another round of rollouts."""


def _everything(config: AlgorithmConfig, batch: RolloutBatch) -> Tensor:
    return torch.ones(len(batch), dtype=torch.bool)


def _solvable(config: AlgorithmConfig, batch: RolloutBatch) -> Tensor:
    rate = pass_rates(config, batch)
    return (rate > 0) & (rate <= config.max_pass_rate + 1e-9)


def _without_a_correct_one(config: AlgorithmConfig, batch: RolloutBatch) -> Tensor:
    return pass_rates(config, batch) == 0


def _short_of_a_kind(config: AlgorithmConfig, batch: RolloutBatch) -> Tensor:
    """Fewer than half of ``keep_per_group`` correct ones, or too few wrong ones."""
    correct = correct_rollouts(config, batch)
    half = config.keep_per_group // 2
    short = torch.zeros(len(batch), dtype=torch.bool)
    for rows in groups_of(batch.group_ids):
        num_correct = int(correct[rows].sum())
        short[rows] = num_correct < half or len(rows) - num_correct < config.keep_per_group - half
    return short


SELECTIONS: Mapping[str, Selection] = {
    "none": Selection(keep=_everything),
    "dynamic": Selection(keep=informative_rows, refill=True),
    "reject": Selection(keep=_everything),  # their advantage is 0, see `rejected_rows`
    "pass_rate": Selection(keep=_solvable),
    "ada_positive": Selection(keep=_everything, open_rows=_without_a_correct_one),
    "ada_balanced": Selection(keep=_everything, open_rows=_short_of_a_kind),
}


def rejected_rows(config: AlgorithmConfig, batch: RolloutBatch) -> Tensor:
    """``[N]`` bool: rows that stay in every count but have advantage 0 (Reinforce-Rej)."""
    if config.selection != "reject":
        return torch.zeros(len(batch), dtype=torch.bool)
    return ~informative_rows(config, batch)


def _one_of_each(config: AlgorithmConfig, batch: RolloutBatch, advantages: Tensor | None) -> Tensor:
    correct = correct_rollouts(config, batch)
    kept = torch.zeros(len(batch), dtype=torch.bool)
    for rows in groups_of(batch.group_ids):
        for part in (rows[correct[rows]], rows[~correct[rows]]):
            if 0 < len(part) < len(rows):
                kept[part[batch.seeds[part].argmin()]] = True
    return kept


def _down_sampled(balanced: bool) -> Callable[[AlgorithmConfig, RolloutBatch, Tensor | None], Tensor]:
    def rows_of(config: AlgorithmConfig, batch: RolloutBatch, advantages: Tensor | None) -> Tensor:
        correct = correct_rollouts(config, batch)
        kept = torch.zeros(len(batch), dtype=torch.bool)
        for rows in groups_of(batch.group_ids):
            rows = rows[batch.seeds[rows].argsort()]
            right, wrong = rows[correct[rows]], rows[~correct[rows]]
            num_right = num_positives(len(right), len(wrong), config.keep_per_group, balanced=balanced)
            kept[right[:num_right]] = True
            kept[wrong[: config.keep_per_group - num_right]] = True
        return kept

    return rows_of


def num_positives(num_correct: int, num_wrong: int, count: int, *, balanced: bool) -> int:
    """How many of ``count`` rollouts are taken from the correct ones (Reinforce-Ada, arXiv 2510.04996).

    ``balanced``: half of ``count``. Otherwise the observed share, rounded up, but at least one of each kind that exists. What
    one kind lacks is filled from the other.
    """
    if balanced:
        wanted = count // 2
    else:
        wanted = math.ceil(num_correct / max(num_correct + num_wrong, 1) * count)
        if num_correct and num_wrong:
            wanted = min(max(wanted, 1), count - 1)
    return min(max(wanted, count - num_wrong), num_correct)


def _towards_a_share(config: AlgorithmConfig, batch: RolloutBatch, advantages: Tensor | None) -> Tensor:
    """All wrong rollouts, and correct ones up to ``positive_share`` of the whole (at least one where there is one)."""
    correct = correct_rollouts(config, batch)
    most = max(1, round(config.positive_share / (1 - config.positive_share) * int((~correct).sum())))
    right = correct.nonzero()[:, 0]
    kept = ~correct
    kept[right[batch.seeds[right].argsort()][:most]] = True
    return kept if bool((~correct).any()) else torch.ones_like(correct)


def _best_share(config: AlgorithmConfig, batch: RolloutBatch, advantages: Tensor | None) -> Tensor:
    """Rollouts whose metric is in the upper ``positive_share`` of the batch, ties included, constant batches excluded."""
    metric = selection_metric(config, batch)
    known = metric[~metric.isnan()]
    if len(known) == 0 or known.min() == known.max():
        return torch.zeros(len(batch), dtype=torch.bool)
    threshold = torch.quantile(known.double(), 1 - config.positive_share, interpolation="higher")
    return metric.double() >= torch.clamp(threshold, min=known[known > known.min()].min().double())


SUBSAMPLES: Mapping[str, Callable[[AlgorithmConfig, RolloutBatch, Tensor | None], Tensor]] = {
    "none": lambda c, b, a: torch.ones(len(b), dtype=torch.bool),
    "correct": lambda c, b, a: correct_rollouts(c, b),
    "wrong": lambda c, b, a: selection_metric(c, b) <= c.correct_above,
    "pair": _one_of_each,
    "balanced": _down_sampled(balanced=True),
    "proportional": _down_sampled(balanced=False),
    "positive_share": _towards_a_share,
    "advantage_floor": lambda c, b, a: (a.abs() if a.ndim == 1 else a.abs().amax(dim=1)) >= c.min_advantage,
    "return_threshold": _best_share,
}
"""``rows(config, batch, advantages) -> [N] bool``; ``advantages`` are None with ``statistics: kept``."""


def groups_of(group_ids: Tensor) -> list[Tensor]:
    """Rows of each group, int64, in the order of ids."""
    return [(group_ids == group).nonzero()[:, 0] for group in group_ids.unique()]
