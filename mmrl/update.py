"""The second half of a train step: losses, gradients, optimizer. Knows no modality and no method."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import dataclass

import torch
from accelerate import Accelerator
from torch import Tensor, nn

from mmrl import processes, recipe
from mmrl.adapter import Adapter
from mmrl.collection import Collected
from mmrl.config import OptimizerConfig, RunConfig
from mmrl.errors import NumericsError
from mmrl.losses import aggregation_weights, per_decision, sign_balance, weighted_sum
from mmrl.types import Forward, RolloutBatch


class ForwardModule(nn.Module):
    """Gives `Adapter.forward` the shape of a module, so that accelerate can wrap it and synchronise its gradients."""

    def __init__(self, adapter: Adapter, policy: nn.Module) -> None:
        super().__init__()
        self.policy = policy
        self.adapter = adapter

    def forward(self, batch: RolloutBatch, needs: frozenset[str]) -> Forward:
        return self.adapter.forward(self.policy, batch, needs)


@dataclass(frozen=True, kw_only=True)
class Pass:
    """What one forward and backward pass leaves behind, besides gradients."""

    loss: float
    """Share of the step's loss."""
    totals: processes.Totals
    max_log_ratio: float
    failed_tasks: list[str]
    """Ids of the tasks whose loss is not finite."""


class Updater:
    """Turns collected rollouts into ``epochs_per_batch * minibatches`` optimizer steps.

    The loss of an optimizer step is ``sum(weights * losses)`` with weights that count the whole step over all processes, so
    neither micro-batches nor the number of processes change the gradient. Rows whose loss has no gradient (advantage 0, no KL
    or entropy term) are counted but not computed.
    """

    def __init__(self, config: RunConfig, adapter: Adapter, policy: nn.Module, accelerator: Accelerator) -> None:
        self.config, self.accelerator = config, accelerator
        self.horizon = config.algorithm.horizon or adapter.max_decisions
        self.model = accelerator.prepare(ForwardModule(adapter, policy))
        self.optimizer = build_optimizer(policy, config.optimizer)
        self.parameters = [parameter for group in self.optimizer.param_groups for parameter in group["params"]]
        self.optimizer_step = 0
        """Optimizer steps so far; the learning rate is a function of it."""

    def update(self, collected: Collected) -> processes.Totals:
        """All optimizer steps of a batch of rollouts."""
        totals: processes.Totals = {}
        group_ids = collected.batch.group_ids
        for _ in range(self.config.trainer.epochs_per_batch):
            for part in range(self.config.trainer.minibatches):
                # Every n-th group, since a process holds a contiguous share: blocks would depend on the number of processes.
                groups = group_ids.unique()[part :: self.config.trainer.minibatches]
                rows = torch.isin(group_ids, groups).nonzero()[:, 0]
                totals = processes.add(totals, self._optimizer_step(collected, rows))
        return totals

    def _optimizer_step(self, collected: Collected, rows: Tensor) -> processes.Totals:
        config, accelerator = self.config.algorithm, self.accelerator
        mask = recipe.effective_mask(config, collected.batch, collected.trained)[rows]
        credit = per_decision(collected.advantages[rows], mask)
        num_rows = len(rows) if collected.trained is None else int(collected.trained[rows].sum())
        counts = processes.gather(accelerator, (int(mask.sum()), num_rows, int((mask & (credit > 0)).sum())))
        num_decisions, num_rows, num_positive = (sum(column) for column in zip(*counts))
        weights = aggregation_weights(
            mask, config.aggregation, num_decisions=num_decisions, num_rows=num_rows, horizon=self.horizon
        )
        policy_weights = collected.mismatch_weights[rows] if collected.mismatch_weights is not None else None
        if config.aggregation == "sign_token_mean":
            balance = sign_balance(credit, num_positive=num_positive, num_negative=num_decisions - num_positive)
            policy_weights = balance if policy_weights is None else policy_weights * balance
        matters = mask.any(dim=1)
        if not recipe.regularized(config):
            matters = (mask & (credit != 0)).any(dim=1)
        micro_batches = list(self.micro_batches(collected.batch, rows, matters))
        num_passes = max(processes.gather(accelerator, len(micro_batches)))
        rate = learning_rate(self.config.optimizer, self.optimizer_step, self._planned_steps)
        if num_passes == 0:
            self.optimizer_step += 1
            return {"optimizer/learning_rate": (rate, 1.0)}
        passes = []
        for i in range(num_passes):
            if i < len(micro_batches):
                chosen, share = rows[micro_batches[i]], weights[micro_batches[i]]
                factors = policy_weights[micro_batches[i]] if policy_weights is not None else None
            else:  # another process has more micro-batches: join with a row of weight 0, since gradients are reduced together
                chosen, share, factors = torch.zeros(1, dtype=torch.long), weights.new_zeros(1, weights.shape[1]), None
            final = i + 1 == num_passes
            with nullcontext() if final else accelerator.no_sync(self.model):
                passes.append(self._backward(collected, chosen, share, factors))
        everyone = [done for part in processes.gather(accelerator, passes) for done in part]
        loss = sum(done.loss for done in everyone)
        norm = self._apply_gradients(loss, rate, [task for done in everyone for task in done.failed_tasks])
        return processes.add(*(done.totals for done in passes)) | {
            "loss/total": (loss, 1.0),
            "optimizer/gradient_norm": (norm, 1.0),
            "optimizer/learning_rate": (rate, 1.0),
            "ratio/max_log": (max(done.max_log_ratio for done in everyone), 1.0),
        }

    def _backward(self, collected: Collected, rows: Tensor, weights: Tensor, policy_weights: Tensor | None) -> Pass:
        """One forward and backward pass over ``rows``; ``weights`` and ``policy_weights`` are ``[n, T]``."""
        config = self.config.algorithm
        part = collected.batch.select(rows)
        forward = self.model(part, recipe.forward_needs(config))
        device, width = forward.log_probs.device, part.loss_mask.shape[1]
        weights = weights[:, :width].to(device)
        credit, reference = collected.advantages[rows], collected.reference_log_probs
        result = recipe.decision_losses(
            config,
            forward,
            part.old_log_probs.to(device),
            weights != 0,
            (credit if credit.ndim == 1 else credit[:, :width]).to(device),
            reference[rows, :width].to(device) if reference is not None else None,
            policy_weights=policy_weights[:, :width].to(device) if policy_weights is not None else None,
            sampler_log_probs=part.sampler_log_probs.to(device) if part.sampler_log_probs is not None else None,
        )
        loss = weighted_sum(result.losses, weights)
        self.accelerator.backward(loss * self.accelerator.num_processes)  # gradients are averaged over processes
        count = float((weights != 0).sum())
        failed = ~torch.where(weights != 0, result.losses.detach(), 0.0).isfinite().all(dim=1)
        return Pass(
            loss=float(loss.detach()),
            totals={name: (float(value), count) for name, value in result.sums.items()},
            max_log_ratio=float(result.max_log_ratio),
            failed_tasks=[part.tasks[row].id for row in failed.nonzero()[:, 0].tolist()],
        )

    def _apply_gradients(self, loss: float, rate: float, failed_tasks: list[str]) -> float:
        limit = self.config.optimizer.max_grad_norm or math.inf
        norm = float(self.accelerator.clip_grad_norm_(self.parameters, limit))
        if not (math.isfinite(norm) and math.isfinite(loss)):
            self.optimizer.zero_grad(set_to_none=True)
            tasks = sorted(set(failed_tasks))
            more = f" and {len(tasks) - 8} more" if len(tasks) > 8 else ""
            raise NumericsError(
                f"loss {loss} with gradient norm {norm} at optimizer step {self.optimizer_step + 1}; tasks whose loss is not "
                f"finite: {', '.join(tasks[:8]) or 'none'}{more}. This step was not taken; the last checkpoint stands."
            )
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self.optimizer_step += 1
        return norm

    def micro_batches(self, batch: RolloutBatch, rows: Tensor, matters: Tensor) -> Iterator[Tensor]:
        """Positions in ``rows`` of each forward pass: whole groups where they fit into ``micro_batch_tokens``."""
        budget = self.config.trainer.micro_batch_tokens
        prompts = batch.inputs.prompt_lengths[rows]
        decisions = batch.num_decisions[rows]
        groups = batch.group_ids[rows]
        pending: list[int] = []
        for group in groups.unique().tolist():
            members = ((groups == group) & matters).nonzero()[:, 0].tolist()
            if pending and _positions(prompts, decisions, groups, [*pending, *members]) > budget:
                yield torch.tensor(pending)
                pending = []
            for member in members:
                if pending and _positions(prompts, decisions, groups, [*pending, member]) > budget:
                    yield torch.tensor(pending)
                    pending = []
                pending.append(member)
        if pending:
            yield torch.tensor(pending)

    @property
    def _planned_steps(self) -> int:
        trainer = self.config.trainer
        return trainer.num_steps * trainer.epochs_per_batch * trainer.minibatches


def build_optimizer(policy: nn.Module, config: OptimizerConfig) -> torch.optim.AdamW:
    """AdamW over the trainable parameters; weight decay on matrices only."""
    trained = [parameter for parameter in policy.parameters() if parameter.requires_grad]
    groups = [
        {"params": [p for p in trained if p.ndim >= 2], "weight_decay": config.weight_decay},
        {"params": [p for p in trained if p.ndim < 2], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=config.learning_rate, betas=config.betas, eps=config.eps)


def learning_rate(config: OptimizerConfig, optimizer_step: int, planned_steps: int) -> float:
    """Rate of the optimizer step with this 0-based number."""
    if optimizer_step < config.warmup_steps:
        return config.learning_rate * (optimizer_step + 1) / config.warmup_steps
    if config.schedule == "constant":
        return config.learning_rate
    progress = min(1.0, (optimizer_step - config.warmup_steps) / max(1, planned_steps - config.warmup_steps))
    remaining = (1 + math.cos(math.pi * progress)) / 2 if config.schedule == "cosine" else 1 - progress
    return config.learning_rate * (config.final_fraction + (1 - config.final_fraction) * remaining)


def _positions(prompts: Tensor, decisions: Tensor, groups: Tensor, members: list[int]) -> int:
    """Padded positions of one pass: each prompt once per group, completions at the longest one's width."""
    chosen = torch.tensor(members)
    num_groups = len(groups[chosen].unique())
    return int(prompts[chosen].max()) * num_groups + int(decisions[chosen].max()) * len(members)
