"""The cost of each recipe over plain GRPO, as a share of a train step, in one process.

    .venv/bin/python benchmarks/recipe_overhead.py configs/vision/read_digits.yaml --pairs 5 sampling.tasks_per_step=8

A step of GRPO is run and timed on real rollouts. Then, on these rollouts, everything that a recipe decides (selection, shaping,
advantages, losses and their gradient with respect to log-probabilities) is computed for GRPO and for the recipe in turn, pair
by pair, in CPU seconds of this process. The table has the median difference, its quartiles, and its share of the step. What a
recipe needs beyond that (rollouts, passes of a reference policy, entropy) is named in the last column.
"""

from __future__ import annotations

import argparse
import statistics
import time
from dataclasses import replace
from pathlib import Path

import torch

from mmrl import recipe
from mmrl.algorithm_config import AlgorithmConfig
from mmrl.algorithms import PRESETS
from mmrl.cli import build_adapter, load_run
from mmrl.collection import Collected
from mmrl.listing import extra_costs
from mmrl.losses import aggregation_weights, weighted_sum
from mmrl.selection import SELECTIONS, SUBSAMPLES
from mmrl.trainer import Trainer
from mmrl.types import Forward

ROUNDS = 20
"""Repetitions of the arithmetic in one measurement, since one takes about a millisecond."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("config", type=Path)
    parser.add_argument("overrides", nargs="*")
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--recipes", nargs="*", default=[name for name in PRESETS if name not in ("grpo", "sft")])
    arguments = parser.parse_intermixed_args()
    config = load_run(arguments.config, ["algorithm=grpo", *arguments.overrides])
    torch.set_num_threads(1)
    trainer = Trainer(config, build_adapter(config), cpu=True)
    step_seconds, collected = typical_step(trainer)
    print(f"GRPO: {step_seconds:.3f} CPU seconds a step, {len(collected.batch)} rollouts, "
          f"{int(collected.batch.num_decisions.sum())} decisions\n")  # fmt: skip
    print("| recipe | arithmetic over GRPO, ms | quartiles | share of a step | further cost |\n|---|---:|---:|---:|---|")
    for name in arguments.recipes:
        pairs = []
        for _ in range(arguments.pairs):
            base, other = (arithmetic_seconds(PRESETS[key].slots, collected, trainer) for key in ("grpo", name))
            pairs.append(other - base)
        low, middle, high = statistics.quantiles(pairs, n=4) if len(pairs) > 1 else pairs * 3
        extra = "; ".join(extra_costs(PRESETS[name])) or "-"
        print(f"| {name} | {1e3 * middle:.2f} | {1e3 * low:.2f} to {1e3 * high:.2f} | {middle / step_seconds:+.2%} | {extra} |")


def typical_step(trainer: Trainer) -> tuple[float, Collected]:
    """CPU seconds of the second of two steps of GRPO, and its rollouts."""
    for _ in range(2):
        start = time.process_time()
        collected = trainer._collect()
        trainer.updater.update(collected)
        seconds = time.process_time() - start
    return seconds, collected


def arithmetic_seconds(slots: dict, collected: Collected, trainer: Trainer) -> float:
    """CPU seconds of selection, shaping, advantages, losses and their gradient for one batch, without rollouts and passes."""
    config, batch = AlgorithmConfig(**slots), collected.batch
    reference = batch.old_log_probs - 0.01 if recipe.needs_reference(config) else None
    log_probs = (batch.old_log_probs + 0.01 * batch.loss_mask).requires_grad_()
    entropy = torch.ones_like(log_probs) if config.entropy_coef > 0 else None
    weights = {name: term.weight for name, term in trainer.terms.items()}
    start = time.process_time()
    for _ in range(ROUNDS):
        SELECTIONS[config.selection].keep(config, batch)
        rewards = recipe.shape_rewards(config, batch, trainer.adapter.max_decisions)
        advantages = recipe.compute_advantages(config, replace(batch, rewards=rewards), reference, weights=weights)
        trained = SUBSAMPLES[config.subsample](config, batch, advantages)
        mask = recipe.effective_mask(config, batch, trained)
        counts = {"num_decisions": int(mask.sum()), "num_rows": int(trained.sum()), "horizon": trainer.updater.horizon}
        aggregation = aggregation_weights(mask, config.aggregation, **counts)
        forward = Forward(log_probs=log_probs, entropy=entropy)
        result = recipe.decision_losses(config, forward, batch.old_log_probs, mask, advantages, reference)
        weighted_sum(result.losses, aggregation).backward()
    return (time.process_time() - start) / ROUNDS


if __name__ == "__main__":
    main()
