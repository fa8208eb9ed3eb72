"""Gradients from corrupted actors (Delightful policy gradient, arXiv 2603.14608): how far they point where the clean one does.

A policy is trained with GRPO. At the start and at each checkpoint its gradient is estimated from rollouts of corrupted actors
and compared with its policy gradient from many rollouts of its own, on the same tasks; the mean reward of these is the baseline
of all estimators, the policy's own value of a task. *clean*: rollouts of its own, as few as of the others, which is what
sampling noise leaves. *noise*: half of each group from an actor with Gaussian noise on its logits.
*stale*: all from the weights at the start.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from miniatures.miniature import SMALL, Miniature, Rows, Subject, measured
from torch import Tensor, nn

from mmrl import recipe
from mmrl.algorithm_config import AlgorithmConfig
from mmrl.losses import aggregation_weights, weighted_sum
from mmrl.types import RolloutBatch

ESTIMATORS = {
    label: AlgorithmConfig(surrogate=surrogate, aggregation="token_mean")
    for label, surrogate in {"REINFORCE": "policy_gradient", "PPO clip": "clip", "delightful": "delight"}.items()
}
NUM_TASKS, GROUP_SIZE, MANY = 40, 16, 48
NOISE = (2.0, 4.0)
"""Standard deviations of the noise on logits: some completions become nonsense, or most of them."""
GROUPS_PER_PASS = 8


def measure(run_dir: Path) -> dict[str, Any]:
    """Cosine to the clean gradient by column and estimator."""
    subject = Subject(run_dir)
    tasks, start = subject.tasks("train", NUM_TASKS), subject.policy()
    cosines: dict[str, dict[str, float]] = {}
    for checkpoint in (None, *sorted((run_dir / "checkpoints").glob("step_*"))):
        step = int(checkpoint.name.removeprefix("step_")) if checkpoint is not None else 0
        policy = subject.policy(checkpoint) if checkpoint is not None else start
        many = subject.attempt(policy, tasks, MANY, stream=0)
        baseline = many.rewards.view(NUM_TASKS, MANY).mean(dim=1)
        target = gradients(subject, policy, many, baseline)["REINFORCE"]
        own = subject.attempt(policy, tasks, GROUP_SIZE, stream=1)
        actors = {"clean": own}
        first_half = (torch.arange(len(own)) % GROUP_SIZE < GROUP_SIZE // 2).nonzero()[:, 0]
        for noise in NOISE:
            with noisy_logits(policy, noise, seed=subject.config.seed):
                other = subject.attempt(policy, tasks, GROUP_SIZE // 2, stream=2)
            actors[f"noise {noise:g}"] = RolloutBatch.concat([own.select(first_half), other])
        if policy is not start:
            actors["stale"] = subject.attempt(start, tasks, GROUP_SIZE, stream=3)
        for actor, batch in actors.items():
            cosines[f"{actor}, step {step}"] = {
                name: float(torch.cosine_similarity(gradient, target, dim=0))
                for name, gradient in gradients(subject, policy, batch, baseline).items()
            }
    return {"cosines": cosines}


@contextmanager
def noisy_logits(policy: nn.Module, noise: float, seed: int) -> Iterator[None]:
    """Within, an actor whose logits have Gaussian noise of this standard deviation; its log-probabilities have it too."""
    generator = torch.Generator().manual_seed(seed)
    hook = policy.get_output_embeddings().register_forward_hook(
        lambda module, inputs, logits: logits + noise * torch.randn(logits.shape, generator=generator)
    )
    try:
        yield
    finally:
        hook.remove()


def gradients(subject: Subject, policy: nn.Module, batch: RolloutBatch, baseline: Tensor) -> dict[str, Tensor]:
    """The gradient of each estimator's loss, flat; ``baseline`` is the value of each task."""
    parameters = [parameter for parameter in policy.parameters() if parameter.requires_grad]
    totals = {name: torch.zeros(sum(parameter.numel() for parameter in parameters)) for name in ESTIMATORS}
    counts = {"num_decisions": int(batch.num_decisions.sum()), "num_rows": len(batch), "horizon": subject.adapter.max_decisions}
    credit = batch.rewards - baseline[batch.group_ids]
    for groups in batch.group_ids.unique().split(GROUPS_PER_PASS):
        rows = torch.isin(batch.group_ids, groups).nonzero()[:, 0]
        part = batch.select(rows)
        forward = subject.adapter.forward(policy, part)
        weights = aggregation_weights(part.loss_mask, "token_mean", **counts)
        for name, config in ESTIMATORS.items():
            result = recipe.decision_losses(config, forward, part.old_log_probs, part.loss_mask, credit[rows], None)
            found = torch.autograd.grad(weighted_sum(result.losses, weights), parameters, retain_graph=True)
            totals[name] += torch.cat([gradient.flatten() for gradient in found])
    return totals


def values(run_dirs: Mapping[str, Path]) -> Rows:
    """Cosines by estimator."""
    (run_dir,) = run_dirs.values()
    cosines = measured(run_dir)["cosines"]
    return {name: {column: found[name] for column, found in cosines.items()} for name in ESTIMATORS}


DELIGHTFUL = Miniature(
    claim="With corrupted actors the policy gradient turns away from the clean one, the delightful policy gradient less so.",
    arms={"GRPO": ()},
    overrides=(
        *SMALL,
        "trainer.num_steps=40",
        "checkpoint.every=20",
        "checkpoint.keep_last=9",
        "evaluation.num_tasks=350",
    ),
    values=values,
    measure=measure,
)  # fmt: skip
