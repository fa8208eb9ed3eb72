"""Prefix-RFT (arXiv 2507.01679): in each group some rollouts begin with a part of the task's demonstration.

A hybrid rollout's completion is the first tokens of the demonstration, then what the policy makes of them. Both parts are
trained on: the given tokens where the policy is least sure, by how much better the rollout did than the ordinary ones, so that
a demonstration is imitated only as far as it helps. Ordinary rollouts are compared among themselves.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor, nn

from mmrl.advantages import group_means
from mmrl.chat import ChatTask
from mmrl.config import RunConfig
from mmrl.errors import DataError
from mmrl.losses import per_decision
from mmrl.prompting_config import DemonstrationPrefixConfig
from mmrl.types import RolloutBatch

_SHARES = 14  # keeps this stream of numbers apart from those of `mmrl.prompting`


def shortest_share(progress: float, *, high: float = 0.95, low_end: float = 0.05) -> float:
    """Lower bound of the given share when ``progress`` in [0, 1] of the run is over.

    ``low_end + (1 + cos(pi progress)) / 2 (high - low_end)``.
    """
    return low_end + (1 + math.cos(math.pi * progress)) / 2 * (high - low_end)


def hybrid_rows(config: RunConfig, tasks: Sequence[ChatTask], groups: Sequence[int], train_step: int) -> list[ChatTask] | None:
    """Each task once per rollout of its group, the last ones to go on from a demonstration; None when none is to.

    The given share is drawn evenly between `shortest_share` and ``high``. Raises `DataError` for a task that
    has no demonstration.
    """
    section, group_size = config.prompting.demonstration_prefix, config.sampling.group_size
    if section is None:
        return None
    low = shortest_share((train_step - 1) / max(1, config.trainer.num_steps - 1), high=section.high, low_end=section.low_end)
    rows = []
    for task, group in zip(tasks, groups):
        if not task.demonstration:
            raise DataError(
                f"{task.source or task.id}: the task has no demonstration; prompting.demonstration_prefix needs one for each."
            )
        rows += [task] * (group_size - section.rows)
        for row in range(section.rows):
            share = np.random.default_rng((config.seed, _SHARES, train_step, group, row)).uniform(low, section.high)
            rows.append(replace(task, demonstrated=float(share)))
    return rows


def hybrid_rollouts(batch: RolloutBatch) -> Tensor:
    """``[N]`` bool: rollouts that begin with something that was given."""
    return given_decisions(batch).any(dim=1)


def given_decisions(batch: RolloutBatch) -> Tensor:
    """``[N, T]`` bool: decisions that were given to the policy instead of sampled from it."""
    if batch.given_entropy is None:
        return torch.zeros_like(batch.loss_mask)
    return batch.loss_mask & ~batch.given_entropy.isnan()


def credit_hybrids(section: DemonstrationPrefixConfig, advantages: Tensor, rewards: Tensor, batch: RolloutBatch) -> Tensor:
    """``advantages`` with those of hybrid rollouts put in their place; float32 ``[N, T]``. ``rewards`` are ``[N]``, shaped."""
    return prefix_advantages(
        per_decision(advantages, batch.loss_mask),
        rewards,
        batch.group_ids,
        given_decisions(batch),
        batch.given_entropy,
        batch.loss_mask,
        trained_share=section.trained_share,
        continuation=section.continuation,
    )


def prefix_advantages(
    advantages: Tensor,
    rewards: Tensor,
    group_ids: Tensor,
    given: Tensor,
    entropy: Tensor,
    mask: Tensor,
    *,
    trained_share: float = 0.2,
    continuation: Literal["raw", "zero"] = "raw",
) -> Tensor:
    """Credit ``[N, T]`` of rollouts with a ``given`` decision (bool ``[N, T]``); the others keep their ``advantages``; float32.

    A given decision has ``(r - mean reward of the group's ordinary rollouts) / number of its hybrid ones`` if it is among the
    row's ``trained_share`` of highest ``entropy`` (rounded up), else 0. A decision behind has ``r`` itself, as a group of one
    has in the paper's code, or 0. Without a reward, or without an ordinary rollout that has one, the credit is 0.
    """
    hybrid = given.any(dim=1)
    ordinary = rewards.masked_fill(hybrid, torch.nan)
    baseline = group_means(ordinary, group_ids)
    known = group_means((~ordinary.isnan()).double(), group_ids) > 0
    num_hybrid = _group_counts(hybrid & ~rewards.isnan(), group_ids)
    credit = torch.where(known, (rewards.double() - baseline) / num_hybrid.clamp(min=1), 0.0).nan_to_num(0.0)
    behind = rewards.nan_to_num(0.0).double() if continuation == "raw" else torch.zeros_like(credit)
    result = torch.where(mask, advantages.double(), 0.0)
    for row in hybrid.nonzero()[:, 0].tolist():
        places = given[row].nonzero()[:, 0]
        trained = places[entropy[row, places].topk(math.ceil(trained_share * len(places) - 1e-9)).indices]
        result[row] = torch.where(mask[row], behind[row], 0.0)
        result[row, places] = 0.0
        result[row, trained] = credit[row]
    return result.float()


def _group_counts(flags: Tensor, group_ids: Tensor) -> Tensor:
    """``[N]`` float64: how many rows of each row's group are flagged."""
    _, rows = group_ids.unique(return_inverse=True)
    return torch.zeros(len(flags), dtype=torch.float64).index_add_(0, rows, flags.double())[rows]


@torch.no_grad()
def go_on_from_demonstrations(
    adapter: Any, policy: nn.Module, tasks: Sequence[ChatTask], group_size: int, seeds: Tensor, greedy: bool
) -> RolloutBatch:
    """Rollouts of a `mmrl.language.LanguageAdapter` whose completions begin with the ``demonstrated`` share of a demonstration.

    A completion is cut at the adapter's limit, given tokens included. Of given tokens the policy's own log-probabilities and
    entropies are recorded.
    """
    starts = [adapter.demonstration_ids(task) for task in tasks]
    opened = [adapter.opened(task) for task in tasks]
    sampled = adapter.rollout(policy, opened, group_size=group_size, seeds=seeds, greedy=greedy)
    bare = [replace(task, demonstrated=0.0) for task in tasks for _ in range(group_size)]
    starts = [start for start in starts for _ in range(group_size)]
    limit = adapter.max_decisions
    ids = [(*start, *outcome.token_ids)[:limit] for start, outcome in zip(starts, sampled.outcomes)]
    prefills = [task.prefill[: len(task.prefill) - len(start)] for task, start in zip(sampled.tasks, starts)]
    stop_reasons = tuple(
        "length" if len(start) + outcome.num_tokens > limit else reason
        for start, outcome, reason in zip(starts, sampled.outcomes, sampled.stop_reasons)
    )
    mask = torch.zeros(len(ids), max(map(len, ids)), dtype=torch.bool)
    tokens, log_probs = torch.zeros(mask.shape, dtype=torch.long), torch.zeros(mask.shape)
    given = torch.zeros_like(mask)
    for row, (row_ids, start) in enumerate(zip(ids, starts)):
        mask[row, : len(row_ids)], given[row, : len(start)] = True, True
        tokens[row, : len(row_ids)] = torch.tensor(row_ids)
        log_probs[row, len(start) : len(row_ids)] = sampled.old_log_probs[row, : len(row_ids) - len(start)]
    decode = adapter.frontend.processor.tokenizer.decode
    outcomes = tuple(
        replace(
            outcome,
            text=decode((*prefill, *row_ids), skip_special_tokens=True),
            token_ids=row_ids,
            stop_reason=reason,
        )
        for outcome, prefill, row_ids, reason in zip(sampled.outcomes, prefills, ids, stop_reasons)
    )
    batch = replace(
        sampled,
        tasks=tuple(bare),
        outcomes=outcomes,
        stop_reasons=stop_reasons,
        loss_mask=mask,
        old_log_probs=log_probs,
        inputs=adapter.completion_inputs(policy, bare, tokens),
    )
    entropy = torch.full(mask.shape, torch.nan)
    hybrid = given.any(dim=1).nonzero()[:, 0]
    if len(hybrid):
        part = batch.select(hybrid)
        width = part.loss_mask.shape[1]
        forward = adapter.forward(policy, part, frozenset({"entropy"}))
        where = given[hybrid, :width]
        log_probs[hybrid, :width] = torch.where(where, forward.log_probs.float().cpu(), log_probs[hybrid, :width])
        entropy[hybrid, :width] = torch.where(where, forward.entropy.float().cpu(), torch.nan)
    return replace(batch, old_log_probs=log_probs, given_entropy=entropy)
