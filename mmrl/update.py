"""The second half of a train step: losses, gradients, optimizer. Knows no modality and no method."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from contextlib import nullcontext
from dataclasses import dataclass

import torch
from accelerate import Accelerator
from torch import Tensor, nn

from mmrl import processes, recipe
from mmrl.adapter import Adapter
from mmrl.auxiliary import AuxiliaryInputs, Recorded, build_auxiliary
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
    parts: Mapping[str, float]
    """Share of each auxiliary term in the step's loss."""


@dataclass(frozen=True, kw_only=True)
class StepPlan:
    """One optimizer step of a batch: its rows, their weights, and the forward passes."""

    rows: Tensor
    """``[n]`` int64 of the batch."""
    weights: Tensor
    """``[n, T]`` of the loss per decision."""
    policy_weights: Tensor | None
    """``[n, T]`` factors of the policy loss; 1 when absent."""
    auxiliary_weights: Mapping[str, Tensor]
    """``[n, T]`` of the losses of each auxiliary term."""
    micro_batches: list[Tensor]
    """Positions in ``rows`` of each forward pass."""
    num_passes: int
    """Forward passes of the process that has most."""

    @property
    def passes(self) -> list[Tensor]:
        """Rows of the batch of each forward pass."""
        return [self.rows[members] for members in self.micro_batches]


class Updater:
    """Turns collected rollouts into ``epochs_per_batch * minibatches`` optimizer steps.

    The loss of an optimizer step is ``sum(weights * losses)`` with weights that count the whole step over all processes, so
    neither micro-batches nor the number of processes change the gradient. Rows whose loss has no gradient (advantage 0, no KL
    or entropy term) are counted but not computed.
    """

    def __init__(self, config: RunConfig, adapter: Adapter, policy: nn.Module, accelerator: Accelerator) -> None:
        self.config, self.accelerator = config, accelerator
        self.horizon = config.algorithm.horizon or adapter.max_decisions
        self.policy = policy
        self.auxiliary = build_auxiliary(config.auxiliary, adapter, accelerator.device)
        self.model = accelerator.prepare(ForwardModule(adapter, policy))
        self.optimizer = build_optimizer(policy, config.optimizer)
        self.parameters = [parameter for group in self.optimizer.param_groups for parameter in group["params"]]
        self.optimizer_step = 0
        """Optimizer steps so far; the learning rate is a function of it."""

    def update(self, collected: Collected) -> processes.Totals:
        """All optimizer steps of a batch of rollouts."""
        totals: processes.Totals = {}
        group_ids = collected.batch.group_ids
        plans = []
        for part in range(self.config.trainer.minibatches):
            # Every n-th group, since a process holds a contiguous share: blocks would depend on the number of processes.
            groups = group_ids.unique()[part :: self.config.trainer.minibatches]
            plans.append(self._plan(collected, torch.isin(group_ids, groups).nonzero()[:, 0]))
        recorded = None
        if self.auxiliary is not None:
            first, later = plans[0].passes, [rows for plan in plans[1:] for rows in plan.passes]
            with self.accelerator.autocast():  # as in the update, or the policy would differ from itself
                recorded = self.auxiliary.record(self.policy, collected.batch, first, later)
        for _ in range(self.config.trainer.epochs_per_batch):
            for plan in plans:
                totals = processes.add(totals, self._optimizer_step(collected, plan, recorded))
        return totals

    def _plan(self, collected: Collected, rows: Tensor) -> StepPlan:
        """Weights that count ``rows`` over all processes, and which of them each forward pass holds."""
        config, accelerator = self.config.algorithm, self.accelerator
        mask = recipe.effective_mask(config, collected.batch, collected.trained)[rows]
        credit = per_decision(collected.advantages[rows], mask)
        num_rows = len(rows) if collected.trained is None else int(collected.trained[rows].sum())
        counts = processes.gather(accelerator, (int(mask.sum()), num_rows, int((mask & (credit > 0)).sum())))
        num_decisions, num_rows, num_positive = (sum(column) for column in zip(*counts))
        counted = {"num_decisions": num_decisions, "num_rows": num_rows, "horizon": self.horizon}
        weights = aggregation_weights(mask, config.aggregation, **counted)
        policy_weights = collected.mismatch_weights[rows] if collected.mismatch_weights is not None else None
        if config.aggregation == "sign_token_mean":
            balance = sign_balance(credit, num_positive=num_positive, num_negative=num_decisions - num_positive)
            policy_weights = balance if policy_weights is None else policy_weights * balance
        matters = mask.any(dim=1)
        if not (recipe.regularized(config) or (self.auxiliary is not None and self.auxiliary.without_advantage)):
            matters = (mask & (credit != 0)).any(dim=1)
        micro_batches = list(self.micro_batches(collected.batch, rows, matters))
        return StepPlan(
            rows=rows,
            weights=weights,
            policy_weights=policy_weights,
            auxiliary_weights=self.auxiliary.weights(mask, config.aggregation, **counted) if self.auxiliary is not None else {},
            micro_batches=micro_batches,
            num_passes=max(processes.gather(accelerator, len(micro_batches))),
        )

    def _optimizer_step(self, collected: Collected, plan: StepPlan, recorded: Recorded | None) -> processes.Totals:
        rate = learning_rate(self.config.optimizer, self.optimizer_step, self._planned_steps)
        if plan.num_passes == 0:
            self.optimizer_step += 1
            return {"optimizer/learning_rate": (rate, 1.0)}
        passes = []
        for i in range(plan.num_passes):
            final = i + 1 == plan.num_passes
            with nullcontext() if final else self.accelerator.no_sync(self.model):
                passes.append(self._backward(collected, plan, i, recorded))
        everyone = [done for part in processes.gather(self.accelerator, passes) for done in part]
        loss = sum(done.loss for done in everyone)
        norm = self._apply_gradients(loss, rate, [task for done in everyone for task in done.failed_tasks])
        names = dict.fromkeys(name for done in everyone for name in done.parts)
        return processes.add(*(done.totals for done in passes)) | {
            "loss/total": (loss, 1.0),
            **{f"loss/{name}": (sum(done.parts.get(name, 0.0) for done in everyone), 1.0) for name in names},
            "optimizer/gradient_norm": (norm, 1.0),
            "optimizer/learning_rate": (rate, 1.0),
            "ratio/max_log": (max(done.max_log_ratio for done in everyone), 1.0),
        }

    def _backward(self, collected: Collected, plan: StepPlan, index: int, recorded: Recorded | None) -> Pass:
        """The forward and backward pass of this number."""
        config = self.config.algorithm
        own = index < len(plan.micro_batches)
        if own:
            members = plan.micro_batches[index]
            rows, weights = plan.rows[members], plan.weights[members]
            policy_weights = plan.policy_weights[members] if plan.policy_weights is not None else None
        else:  # another process has more micro-batches: join with a row of weight 0, since gradients are reduced together
            rows, policy_weights = torch.zeros(1, dtype=torch.long), None
            weights = plan.weights.new_zeros(1, plan.weights.shape[1])
        part = collected.batch.select(rows)
        needs = recipe.forward_needs(config) | (self.auxiliary.needs if recorded is not None else frozenset())
        forward = self.model(part, needs)
        device, width = forward.log_probs.device, part.loss_mask.shape[1]
        weights = weights[:, :width].to(device)
        credit, reference = collected.advantages[rows], collected.reference_log_probs
        credit = (credit if credit.ndim == 1 else credit[:, :width]).to(device)
        result = recipe.decision_losses(
            config,
            forward,
            part.old_log_probs.to(device),
            weights != 0,
            credit,
            reference[rows, :width].to(device) if reference is not None else None,
            policy_weights=policy_weights[:, :width].to(device) if policy_weights is not None else None,
            sampler_log_probs=part.sampler_log_probs.to(device) if part.sampler_log_probs is not None else None,
        )
        loss = weighted_sum(result.losses, weights)
        count = float((weights != 0).sum())
        finite = torch.where(weights != 0, result.losses.detach(), 0.0).isfinite().all(dim=1)
        totals, parts = {name: (float(value), count) for name, value in result.sums.items()}, {}
        if own and recorded is not None:
            self.auxiliary.keep(recorded, rows, part, forward)
            inputs = AuxiliaryInputs(
                batch=part,
                forward=forward,
                policy=self.policy,
                teacher=self.auxiliary.teacher,
                advantages=torch.where(weights != 0, per_decision(credit, weights), 0.0),
                mask=weights != 0,
                recorded=recorded.get(rows, width, device),
            )
            shares = {name: value[members][:, :width].to(device) for name, value in plan.auxiliary_weights.items()}
            added = self.auxiliary.losses(inputs, shares)
            loss, finite = loss + added.total, finite & added.finite
            totals, parts = processes.add(totals, added.totals), added.parts
        self.accelerator.backward(loss * self.accelerator.num_processes)  # gradients are averaged over processes
        return Pass(
            loss=float(loss.detach()),
            totals=totals,
            max_log_ratio=float(result.max_log_ratio),
            failed_tasks=[part.tasks[row].id for row in (~finite).nonzero()[:, 0].tolist()],
            parts=parts,
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
