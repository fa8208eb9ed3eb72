"""The first half of a train step: tasks, rollouts, rewards, selection, advantages. Knows no modality.

Groups stay whole on one process. Every process draws all tasks and seeds of the step and rolls out its own share, so the same
groups come about whatever the number of processes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import torch
from accelerate import Accelerator
from torch import Tensor, nn

from mmrl import processes, recipe
from mmrl.adapter import Adapter
from mmrl.config import RunConfig
from mmrl.errors import RewardError
from mmrl.rewards import WeightedTerm, score
from mmrl.sampling import TaskSampler, rollout_seeds
from mmrl.types import RolloutBatch


@dataclass(frozen=True, kw_only=True)
class Collected:
    """This process's rollouts of a step, with their credit."""

    batch: RolloutBatch
    advantages: Tensor
    """``[N]``."""
    reference_log_probs: Tensor | None
    """``[N, T]`` when a KL term needs them."""
    totals: processes.Totals


def collect(
    config: RunConfig,
    adapter: Adapter,
    policy: nn.Module,
    sampler: TaskSampler,
    terms: Mapping[str, WeightedTerm],
    accelerator: Accelerator,
    *,
    train_step: int,
    reference_log_probs: Callable[[RolloutBatch], Tensor] | None = None,
) -> Collected:
    """Roll out the groups of ``train_step``.

    With ``selection: dynamic`` constant groups are replaced by newly drawn ones, at most ``max_refills`` times; a process keeps
    its first ``tasks_per_step / processes`` groups with signal and drops the surplus.
    """
    algorithm = config.algorithm
    quota = config.sampling.tasks_per_step // accelerator.num_processes
    attempts = 1 + (algorithm.max_refills if algorithm.selection == "dynamic" else 0)
    kept: list[RolloutBatch] = []
    totals: processes.Totals = {}
    for attempt in range(attempts):
        batch = _roll_out_and_score(config, adapter, policy, sampler, terms, accelerator, train_step, attempt)
        informative = recipe.informative_rows(algorithm, batch)
        totals = processes.add(totals, _totals(batch), {"groups/informative": (int(informative.sum()), len(batch))})
        rows = informative if algorithm.selection == "dynamic" else torch.ones_like(informative)
        if rows.any():
            kept.append(batch.select(rows.nonzero()[:, 0]))
        full = sum(len(part.group_ids.unique()) for part in kept) >= quota
        if all(processes.gather(accelerator, full)):
            break
    batch = _first_groups(RolloutBatch.concat(kept) if kept else batch, quota)
    reference = reference_log_probs(batch) if reference_log_probs is not None else None
    advantages = recipe.compute_advantages(algorithm, batch, reference)
    totals = processes.add(totals, {"advantage/abs": (float(advantages.abs().sum()), len(batch))})
    return Collected(batch=batch, advantages=advantages, reference_log_probs=reference, totals=totals)


def _roll_out_and_score(
    config: RunConfig,
    adapter: Adapter,
    policy: nn.Module,
    sampler: TaskSampler,
    terms: Mapping[str, WeightedTerm],
    accelerator: Accelerator,
    train_step: int,
    attempt: int,
) -> RolloutBatch:
    num_tasks, group_size = config.sampling.tasks_per_step, config.sampling.group_size
    share = num_tasks // accelerator.num_processes
    first = accelerator.process_index * share
    tasks = sampler.next(num_tasks)[first : first + share]
    if config.algorithm.source == "demonstrations":
        seeds = rollout_seeds(config.seed, train_step, attempt, num_tasks)
        batch = adapter.demonstrate(policy, tasks, seeds=seeds[first : first + share])
    else:
        seeds = rollout_seeds(config.seed, train_step, attempt, num_tasks * group_size)
        mine = seeds[first * group_size : (first + share) * group_size]
        batch = adapter.rollout(policy, tasks, group_size=group_size, seeds=mine)
    batch = replace(batch, group_ids=batch.group_ids + attempt * num_tasks + first)
    try:
        scored, failure = score(batch, terms), None
    except RewardError as error:
        scored, failure = batch, error
    processes.raise_together(accelerator, failure)
    return scored


def _first_groups(batch: RolloutBatch, count: int) -> RolloutBatch:
    groups = batch.group_ids.unique()
    if len(groups) <= count:
        return batch
    return batch.select(torch.isin(batch.group_ids, groups[:count]).nonzero()[:, 0])


def _totals(batch: RolloutBatch) -> dict[str, tuple[float, float]]:
    """What is logged of all rollouts, also of those that dynamic selection drops: else the reward would look flat."""
    num, lengths = len(batch), batch.num_decisions
    decisions = int(lengths.sum())
    columns = {"reward/total": batch.rewards} | {f"reward/{name}": term for name, term in batch.reward_terms.items()}
    totals = {name: (float(column.nan_to_num(0.0).sum()), float((~column.isnan()).sum())) for name, column in columns.items()}
    sampled = torch.where(batch.loss_mask, -batch.old_log_probs, 0.0)
    return totals | {
        "rollout/unscored": (float(batch.rewards.isnan().sum()), num),
        "rollout/decisions": (decisions, num),
        "rollout/truncated": (sum(reason in ("length", "timeout") for reason in batch.stop_reasons), num),
        "rollout/entropy": (float(sampled.sum()), decisions),  # -log pi of what was sampled: unbiased, and free
    }
