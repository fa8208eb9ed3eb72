"""The first half of a train step: tasks, rollouts, rewards, selection, advantages. Knows no modality.

Groups stay whole on one process. Every process draws all tasks and seeds of the step and rolls out its own share, so the same
groups come about whatever the number of processes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace

import torch
from accelerate import Accelerator
from torch import Tensor, nn

from mmrl import prefix_rft, processes, prompting, recipe
from mmrl.adapter import Adapter
from mmrl.algorithm_config import AlgorithmConfig
from mmrl.config import RunConfig
from mmrl.errors import RewardError
from mmrl.losses import per_decision
from mmrl.probing import PolicyMeasure
from mmrl.reward_watch import term_totals
from mmrl.rewards import WeightedTerm, score
from mmrl.sampling import TaskSampler, rollout_seeds
from mmrl.selection import SELECTIONS, SUBSAMPLES, correct_rollouts, pass_rates, rejected_rows, selection_metric
from mmrl.types import RolloutBatch, Task


@dataclass(frozen=True, kw_only=True)
class Collected:
    """This process's rollouts of a step, with their credit."""

    batch: RolloutBatch
    advantages: Tensor
    """``[N]``, or ``[N, T]`` where decisions of a rollout differ."""
    reference_log_probs: Tensor | None
    """``[N, T]`` when a KL term needs them."""
    totals: processes.Totals
    trained: Tensor | None = None
    """``[N]`` bool: rollouts that count in the update; all when absent."""
    mismatch_weights: Tensor | None = None
    """``[N, T]`` factors of the policy loss; 1 when absent."""


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
    """Roll out the groups of ``train_step``, select, shape and credit them.

    A selection with ``refill`` replaces groups without signal by newly drawn ones, at most ``max_refills`` times; a process
    keeps its first ``tasks_per_step / processes`` groups and drops the surplus. Rounds draw more rollouts of open groups.
    """
    algorithm = config.algorithm
    sampler.prepare(
        PolicyMeasure(
            config=config, adapter=adapter, policy=policy, terms=terms, accelerator=accelerator, train_step=train_step
        )
    )
    batch, totals = _select_groups(config, adapter, policy, sampler, terms, accelerator, train_step)
    rewards = recipe.shape_rewards(algorithm, batch, adapter.max_decisions)
    reference = None
    if algorithm.kl_in in ("reward", "return") and reference_log_probs is not None:
        reference = reference_log_probs(batch)
    weights = {name: term.weight for name, term in terms.items()}
    inputs = recipe.credit_inputs(algorithm, batch, reference, rewards=rewards, weights=weights)
    if algorithm.statistics == "kept":
        trained = SUBSAMPLES[algorithm.subsample](algorithm, batch, None)
        inputs = _without_rewards(inputs, ~trained)
    hybrid = prefix_rft.hybrid_rollouts(batch)
    ordinary = _without_rewards(inputs, hybrid)
    progress = (train_step - 1) / config.trainer.num_steps
    advantages = _estimate(algorithm, ordinary, accelerator)
    if batch.given_entropy is not None:
        advantages = prefix_rft.credit_hybrids(config.prompting.demonstration_prefix, advantages, inputs.rewards, batch)
    center = _mean_return(algorithm, inputs, accelerator)
    filtered = recipe.outliers(algorithm, advantages, center)
    advantages = recipe.finish_advantages(algorithm, advantages, batch, progress, center=center)
    if algorithm.statistics == "all":
        trained = SUBSAMPLES[algorithm.subsample](algorithm, batch, advantages)
    advantages = recipe.subtract_kl_to_go(algorithm, advantages, batch, reference)
    if reference_log_probs is not None and reference is None:
        reference = _of_rows(batch, trained, reference_log_probs)
    mismatch, mismatch_totals = _mismatch(algorithm, batch, trained, accelerator)
    sizes = recipe.row_means(advantages.abs(), batch.loss_mask)
    totals = processes.add(totals, sampler.totals(), mismatch_totals, {"advantage/abs": (float(sizes.sum()), len(batch))})
    if algorithm.advantage_limit is not None:
        dropped = (per_decision(filtered, batch.loss_mask) & batch.loss_mask).sum()
        totals = processes.add(totals, {"advantage/filtered": (float(dropped), float(batch.loss_mask.sum()))})
    if algorithm.subsample != "none":
        totals = processes.add(totals, {"selection/trained": (int(trained.sum()), len(batch))})
    if algorithm.shaping:
        shaped = rewards - batch.rewards
        totals = processes.add(totals, {"reward/shaping": (float(shaped.nan_to_num(0.0).sum()), int((~shaped.isnan()).sum()))})
    return Collected(
        batch=batch,
        advantages=advantages,
        reference_log_probs=reference,
        totals=totals,
        trained=trained,
        mismatch_weights=mismatch,
    )


def _without_rewards(inputs: recipe.CreditInputs, rows: Tensor) -> recipe.CreditInputs:
    """``inputs`` in which ``rows`` (bool ``[N]``) have no reward, so that no statistics see them."""
    return replace(
        inputs,
        rewards=inputs.rewards.masked_fill(rows, torch.nan),
        terms=inputs.terms.masked_fill(rows[:, None], torch.nan),
    )


def _select_groups(
    config: RunConfig,
    adapter: Adapter,
    policy: nn.Module,
    sampler: TaskSampler,
    terms: Mapping[str, WeightedTerm],
    accelerator: Accelerator,
    train_step: int,
) -> tuple[RolloutBatch, processes.Totals]:
    """The groups that are kept, and what is logged of all that were drawn."""
    algorithm = config.algorithm
    selection = SELECTIONS[algorithm.selection]
    quota = config.sampling.tasks_per_step // accelerator.num_processes
    attempts = 1 + (algorithm.max_refills if selection.refill or selection.open_rows else 0)
    kept: list[RolloutBatch] = []
    totals: processes.Totals = {}
    domains: processes.Totals = {}
    outcomes: processes.Totals = {}
    tasks = None
    for attempt in range(attempts):
        if tasks is None or selection.refill:
            tasks, first, sizes = _next_tasks(config, sampler, accelerator)
            groups = torch.arange(len(tasks)) + first + (attempt * config.sampling.tasks_per_step if selection.refill else 0)
            tasks = prompting.changed_tasks(config, tasks, groups.tolist(), train_step)
        batch = _roll_out_and_score(
            config, adapter, policy, tasks, groups, sizes, terms, accelerator, train_step=train_step, attempt=attempt
        )
        if batch is not None:
            rows = selection.keep(algorithm, batch)
            signals = term_totals(batch, {name: term.weight for name, term in terms.items()})
            totals = processes.add(totals, _totals(batch), signals, _group_totals(algorithm, batch, rows))
            domains = processes.add(domains, _domain_totals(batch))
            if config.sampling.allocation is not None:
                outcomes = processes.add(outcomes, _outcome_totals(algorithm, batch))
            if rows.any():
                kept.append(batch.select(rows.nonzero()[:, 0]))
            last = batch
        if selection.open_rows is not None:
            pool = _by_group(RolloutBatch.concat(kept))
            kept, still_open = [pool], pool.group_ids[selection.open_rows(algorithm, pool)].unique()
            mine = torch.isin(groups, still_open).nonzero()[:, 0]
            tasks, groups = [tasks[index] for index in mine.tolist()], groups[mine]
            full = len(tasks) == 0
        else:
            full = sum(len(part.group_ids.unique()) for part in kept) >= quota
        if all(processes.gather(accelerator, full)):
            break
    batch = _first_groups(RolloutBatch.concat(kept) if kept else last, quota)
    everyone = processes.add(*processes.gather(accelerator, domains))
    sampler.observe({domain: value / count for domain, (value, count) in everyone.items() if count})
    if config.sampling.allocation is not None:
        sampler.observe_attempts(processes.add(*processes.gather(accelerator, outcomes)))
    if attempts > 1:  # rollouts that were paid for, as a multiple of those that were planned
        drawn = int(totals["rollout/unscored"][1])
        totals = {**totals, "selection/draws": (drawn, quota * config.sampling.group_size)}
    if selection.open_rows is not None:  # a group that was drawn in rounds is informative or not as a whole
        totals = {**totals, "groups/informative": (int(recipe.informative_rows(algorithm, batch).sum()), len(batch))}
    return batch, totals


def _next_tasks(config: RunConfig, sampler: TaskSampler, accelerator: Accelerator) -> tuple[list[Task], int, list[int]]:
    """This process's share of newly drawn tasks, the number of its first one, and the sizes of all groups of the step."""
    num_tasks = config.sampling.tasks_per_step
    share = num_tasks // accelerator.num_processes
    first = accelerator.process_index * share
    tasks = sampler.next(num_tasks)
    return tasks[first : first + share], first, sampler.group_sizes(tasks, config.sampling.group_size)


def _estimate(algorithm: AlgorithmConfig, inputs: recipe.CreditInputs, accelerator: Accelerator) -> Tensor:
    """Advantages of this process's rows; statistics that cross groups see the rows of all processes."""
    if algorithm.advantage not in recipe.BATCH_WIDE or accelerator.num_processes == 1:
        return recipe.estimate_advantages(algorithm, inputs)
    everyone = processes.gather(accelerator, inputs)
    width = max(part.mask.shape[1] for part in everyone)

    def rows_of(name: str) -> Tensor | None:
        parts = [getattr(part, name) for part in everyone]
        if parts[0] is None:
            return None
        wide = name in ("mask", "kl", "progress")
        return torch.cat([nn.functional.pad(part, (0, width - part.shape[1])) if wide else part for part in parts])

    per_row = {item.name: rows_of(item.name) for item in fields(inputs) if item.name != "weights"}
    joined = recipe.CreditInputs(**per_row, weights=inputs.weights)
    start = sum(len(part.rewards) for part in everyone[: accelerator.process_index])
    advantages = recipe.estimate_advantages(algorithm, joined)[start : start + len(inputs.rewards)]
    return advantages if advantages.ndim == 1 else advantages[:, : inputs.mask.shape[1]]


def _mean_return(algorithm: AlgorithmConfig, inputs: recipe.CreditInputs, accelerator: Accelerator) -> float:
    """Mean over all processes of the returns before whitening; 0 unless ``advantage_limit_around`` asks for it."""
    if algorithm.advantage_limit_around == "zero":
        return 0.0
    sums, counts = zip(*processes.gather(accelerator, recipe.return_sum(algorithm, inputs)))
    return sum(sums) / max(sum(counts), 1.0)


def _of_rows(batch: RolloutBatch, rows: Tensor, function: Callable[[RolloutBatch], Tensor]) -> Tensor:
    """``function`` of the chosen rows only, zeros elsewhere."""
    if rows.all():
        return function(batch)
    result = torch.zeros(batch.old_log_probs.shape)
    if rows.any():
        index = rows.nonzero()[:, 0]
        part = function(batch.select(index))
        result[index, : part.shape[1]] = part
    return result


def _mismatch(
    algorithm: AlgorithmConfig, batch: RolloutBatch, trained: Tensor, accelerator: Accelerator
) -> tuple[Tensor | None, processes.Totals]:
    weights = recipe.mismatch_weights(algorithm, batch)
    if weights is None:
        return None, {}
    mask = recipe.effective_mask(algorithm, batch, trained)
    known = weights[mask]
    totals = {"mismatch/weight": (float(known.sum()), len(known)), "mismatch/masked": (int((known == 0).sum()), len(known))}
    if algorithm.mismatch_normalize:
        total, count = processes.add(*processes.gather(accelerator, totals))["mismatch/weight"]
        weights = weights * (count / total) if total > 0 else weights
    return weights, totals


def _roll_out_and_score(
    config: RunConfig,
    adapter: Adapter,
    policy: nn.Module,
    tasks: list[Task],
    groups: Tensor,
    sizes: list[int],
    terms: Mapping[str, WeightedTerm],
    accelerator: Accelerator,
    *,
    train_step: int,
    attempt: int,
) -> RolloutBatch | None:
    """Scored rollouts of ``tasks`` as ``groups``; None where there is nothing to do. ``sizes`` are those of the whole step."""
    num_tasks, per_task = config.sampling.tasks_per_step, config.sampling.group_size
    demonstrated = config.algorithm.source == "demonstrations"
    sizes = [1] * num_tasks if demonstrated else sizes
    seeds = rollout_seeds(config.seed, train_step, attempt, sum(sizes)).split(sizes)
    mine = [seeds[place] for place in (groups % num_tasks).tolist()]
    batch, failure = None, None
    if tasks:
        if demonstrated:
            batch = adapter.demonstrate(policy, tasks, seeds=torch.cat(mine))
        else:
            rows = prompting.rollout_rows(config, tasks, groups.tolist(), train_step)
            if rows is None:
                batch = _roll_out_groups(adapter, policy, tasks, mine)
            else:  # rollouts of a group are asked in different ways
                batch = adapter.rollout(policy, rows, group_size=1, seeds=torch.cat(mine))
                batch = replace(batch, group_ids=batch.group_ids // per_task)
        batch = replace(batch, group_ids=groups[batch.group_ids])
        try:
            batch = score(batch, terms)
        except RewardError as error:
            failure = error
    processes.raise_together(accelerator, failure)
    return batch


def _roll_out_groups(adapter: Adapter, policy: nn.Module, tasks: list[Task], seeds: list[Tensor]) -> RolloutBatch:
    """As many rollouts of each task as it has seeds, group-major; groups of one size are attempted together."""
    parts = []
    for size in sorted({len(part) for part in seeds}):
        places = [place for place, part in enumerate(seeds) if len(part) == size]
        part = adapter.rollout(
            policy,
            [tasks[place] for place in places],
            group_size=size,
            seeds=torch.cat([seeds[place] for place in places]),
        )
        parts.append(replace(part, group_ids=torch.tensor(places)[part.group_ids]))
    return parts[0] if len(parts) == 1 else _by_group(RolloutBatch.concat(parts))


def _outcome_totals(algorithm: AlgorithmConfig, batch: RolloutBatch) -> dict[str, tuple[float, float]]:
    """Correct rollouts and all rollouts that have a metric, of each task."""
    totals: dict[str, tuple[float, float]] = {}
    known = ~selection_metric(algorithm, batch).isnan()
    for task, is_correct, is_known in zip(batch.tasks, correct_rollouts(algorithm, batch).tolist(), known.tolist()):
        if is_known:
            successes, count = totals.get(task.id, (0.0, 0.0))
            totals[task.id] = (successes + is_correct, count + 1)
    return totals


def _group_totals(algorithm: AlgorithmConfig, batch: RolloutBatch, rows: Tensor) -> processes.Totals:
    """What is kept of the groups that a selection drops: how many, and whether they failed or succeeded throughout."""
    num = len(batch)
    totals = {"groups/informative": (int(recipe.informative_rows(algorithm, batch).sum()), num)}
    if algorithm.selection == "none":
        return totals
    dropped, rate = ~rows | rejected_rows(algorithm, batch), pass_rates(algorithm, batch)
    return totals | {
        "selection/discarded": (int(dropped.sum()), num),
        "selection/discarded_failed": (int((dropped & (rate == 0)).sum()), num),
        "selection/discarded_solved": (int((dropped & (rate == 1)).sum()), num),
    }


def _domain_totals(batch: RolloutBatch) -> dict[str, tuple[float, float]]:
    """Sum and count of the rewards of each domain."""
    totals: dict[str, tuple[float, float]] = {}
    for task, reward in zip(batch.tasks, batch.rewards.tolist()):
        if not math.isnan(reward):
            value, count = totals.get(task.domain, (0.0, 0.0))
            totals[task.domain] = (value + reward, count + 1)
    return totals


def _by_group(batch: RolloutBatch) -> RolloutBatch:
    """Rows sorted by group, so that micro-batches find whole groups."""
    return batch.select(batch.group_ids.argsort(stable=True))


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
    sampled = batch.loss_mask & ~prefix_rft.given_decisions(batch)
    surprisals = torch.where(sampled, -batch.old_log_probs, 0.0)
    if batch.given_entropy is not None:
        hybrid = prefix_rft.hybrid_rollouts(batch)
        totals["rollout/given"] = (decisions - int(sampled.sum()), int(hybrid.sum()))
        totals["reward/hybrid"] = (
            float(batch.rewards[hybrid].nan_to_num(0.0).sum()),
            int((~batch.rewards[hybrid].isnan()).sum()),
        )
    return totals | {
        "rollout/unscored": (float(batch.rewards.isnan().sum()), num),
        "rollout/decisions": (decisions, num),
        "rollout/truncated": (sum(reason in ("length", "timeout") for reason in batch.stop_reasons), num),
        "rollout/entropy": (float(surprisals.sum()), int(sampled.sum())),  # -log pi of what was sampled: unbiased, and free
    }
