"""The adapter contract as code, and a complete adapter in a hundred lines to read before writing one.

`check_adapter` runs any implementation of `mmrl.adapter.Adapter` through everything that the core relies on; the tests of each
modality call it. `BanditAdapter` is the smallest honest implementation: contexts, arms, a table of logits.
"""

from __future__ import annotations

import copy
import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from mmrl.adapter import Adapter, RewardTerm
from mmrl.checkpoint import policy_checksum
from mmrl.errors import AdapterError, CheckpointError
from mmrl.sampling import rollout_seeds
from mmrl.types import Forward, RolloutBatch, Sample, Task


def check_adapter(adapter: Adapter, *, num_tasks: int = 3, group_size: int = 4, tolerance: float = 1e-4) -> None:
    """Raise `AdapterError` naming the first broken promise of an adapter.

    Covers splits, shapes, seeds, batching, alignment, gradients, selection, the reference policy and files. ``tolerance``
    bounds differences of log-probabilities that should agree but for rounding.
    """
    policy = adapter.build_policy()
    _require(not policy.training, "build_policy returns a policy in eval mode, so that dropout does not bias the ratio")
    _require(policy_checksum(policy) == policy_checksum(adapter.build_policy()), "build_policy is deterministic for a config")
    source = adapter.task_source("train")
    _require(len(source) > 0, "the train split has tasks")
    tasks = [source[index % len(source)] for index in range(num_tasks)]
    _require([task.id for task in tasks] == [source[i % len(source)].id for i in range(num_tasks)], "equal index, equal task")
    seeds = rollout_seeds(0, 0, 0, num_tasks * group_size)

    batch = adapter.rollout(policy, tasks, group_size=group_size, seeds=seeds)
    expected = torch.arange(num_tasks).repeat_interleave(group_size)
    _require(torch.equal(batch.group_ids, expected), "rollout returns group-major rows with group ids 0 .. P-1")
    _require(torch.equal(batch.seeds, seeds), "rollout records the seeds it was given")
    _require(not batch.old_log_probs.requires_grad, "old_log_probs are recorded without gradient")
    _require(bool(batch.loss_mask.any(dim=1).all()), "every rollout has a decision")
    _require(int(batch.num_decisions.max()) <= adapter.max_decisions, "no rollout is longer than max_decisions")
    _require(bool(batch.old_log_probs[batch.loss_mask].isfinite().all()), "old_log_probs are finite where the mask is true")

    again = adapter.rollout(policy, tasks, group_size=group_size, seeds=seeds)
    _require(_same_rollouts(batch, again, tolerance), "equal seeds give equal rollouts")
    other = adapter.rollout(policy, tasks, group_size=group_size, seeds=seeds + 1)
    _require(not torch.equal(batch.old_log_probs, other.old_log_probs), "other seeds give other rollouts")
    for task, rows in zip(tasks, torch.arange(len(batch)).split(group_size)):
        alone = adapter.rollout(policy, [task], group_size=group_size, seeds=seeds[rows])
        _require(_same_rollouts(batch.select(rows), alone, tolerance), "a rollout does not depend on what it is batched with")
    greedy = [adapter.rollout(policy, tasks, group_size=1, seeds=seeds[:num_tasks] + i, greedy=True) for i in (0, 7)]
    _require(_same_rollouts(*greedy, tolerance), "greedy rollouts do not depend on seeds")

    forward = adapter.forward(policy, batch)
    _require(forward.log_probs.shape == batch.old_log_probs.shape, "forward returns log_probs of the shape of old_log_probs")
    _require(forward.log_probs.dtype == torch.float32, "forward returns float32 log_probs")
    gap = _largest_gap(forward.log_probs, batch.old_log_probs, batch.loss_mask)
    _require(gap <= tolerance, f"forward on a fresh rollout equals old_log_probs (largest difference {gap:.2e})")
    _require(forward.log_probs.requires_grad, "gradients reach the policy")
    forward.log_probs[batch.loss_mask].sum().backward()
    grads = [parameter.grad for parameter in policy.parameters() if parameter.requires_grad]
    _require(any(grad is not None and bool(grad.abs().max() > 0) for grad in grads), "gradients reach the policy")
    policy.zero_grad(set_to_none=True)

    backwards = torch.arange(len(batch)).flip(0)
    flipped = adapter.forward(policy, batch.select(backwards)).log_probs
    gap = _largest_gap(flipped, batch.old_log_probs[backwards], batch.loss_mask[backwards])
    _require(gap <= tolerance, f"forward follows select (largest difference {gap:.2e})")
    joined = RolloutBatch.concat([alone, batch])
    gap = _largest_gap(adapter.forward(policy, joined).log_probs, joined.old_log_probs, joined.loss_mask)
    _require(gap <= tolerance, f"forward follows concat (largest difference {gap:.2e})")
    _require(batch.inputs.prompt_lengths.shape == (len(batch),), "inputs.prompt_lengths is [N]")

    reference = adapter.freeze_reference(policy)
    with torch.no_grad():
        for parameter in policy.parameters():
            if parameter.requires_grad:
                parameter.add_(0.01 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1)))
    with reference() as frozen, torch.no_grad():
        gap = _largest_gap(adapter.forward(frozen, batch).log_probs, batch.old_log_probs, batch.loss_mask)
    _require(gap <= tolerance, f"the reference policy stays as it was frozen (largest difference {gap:.2e})")

    sample = adapter.describe(batch, 0)
    _require(bool(sample.prompt) and isinstance(sample.completion, str), "describe gives a prompt and a completion")
    with tempfile.TemporaryDirectory() as folder:
        adapter.save_policy(policy, Path(folder))
        restored = adapter.build_policy()
        adapter.load_policy(restored, Path(folder))
        _require(policy_checksum(restored) == policy_checksum(policy), "load_policy undoes save_policy exactly")


def _require(holds: bool, promise: str) -> None:
    if not holds:
        raise AdapterError(f"the adapter breaks its contract: {promise}.")


def _largest_gap(left: Tensor, right: Tensor, mask: Tensor) -> float:
    return float(torch.where(mask, left.detach() - right, 0.0).abs().max())


def _same_rollouts(left: RolloutBatch, right: RolloutBatch, tolerance: float) -> bool:
    if left.loss_mask.shape != right.loss_mask.shape or left.stop_reasons != right.stop_reasons:
        return False
    same_mask = torch.equal(left.loss_mask, right.loss_mask)
    return same_mask and _largest_gap(left.old_log_probs, right.old_log_probs, left.loss_mask) <= tolerance


@dataclass(frozen=True, kw_only=True)
class BanditTask(Task):
    """Choose the right arm, up to ``length`` times."""

    context: int
    length: int


@dataclass(frozen=True, kw_only=True)
class BanditInputs:
    """Contexts and the arms that were chosen."""

    contexts: Tensor
    arms: Tensor

    @property
    def prompt_lengths(self) -> Tensor:
        return torch.ones_like(self.contexts)

    def select(self, rows: Tensor) -> BanditInputs:
        return BanditInputs(contexts=self.contexts[rows], arms=self.arms[rows])

    def concat(self, others: Sequence[BanditInputs]) -> BanditInputs:
        parts = [self, *others]
        width = max(part.arms.shape[1] for part in parts)
        arms = [nn.functional.pad(part.arms, (0, width - part.arms.shape[1])) for part in parts]
        return BanditInputs(contexts=torch.cat([part.contexts for part in parts]), arms=torch.cat(arms))


@dataclass(kw_only=True)
class BanditAdapter:
    """A contextual bandit whose rollouts are one to ``max_decisions`` choices; the right arm equals the context."""

    num_contexts: int = 4
    num_arms: int = 5
    max_decisions: int = 3
    reward_terms: Mapping[str, RewardTerm] = field(default_factory=lambda: {"accuracy": share_of_right_arms})

    def build_policy(self) -> nn.Module:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            return nn.Embedding(self.num_contexts, self.num_arms).eval()

    def freeze_reference(self, policy: nn.Module) -> Callable[[], AbstractContextManager[nn.Module]]:
        frozen = copy.deepcopy(policy).requires_grad_(False)
        return lambda: nullcontext(frozen)

    def task_source(self, split: str) -> Sequence[BanditTask]:
        return [
            BanditTask(id=f"{split}/{i}", domain=f"context{i % self.num_contexts}", context=i % self.num_contexts,
                       length=1 + i % self.max_decisions)
            for i in range(24)
        ]  # fmt: skip

    def rollout(
        self, policy: nn.Module, tasks: Sequence[BanditTask], *, group_size: int, seeds: Tensor, greedy: bool = False
    ) -> RolloutBatch:
        repeated = [task for task in tasks for _ in range(group_size)]
        contexts = torch.tensor([task.context for task in repeated])
        with torch.no_grad():
            probs = policy(contexts).softmax(dim=-1)
        width = max(task.length for task in repeated)
        # Always as many draws as the longest rollout has: multinomial takes another path for one draw than for several.
        draws = [torch.multinomial(row, self.max_decisions, True, generator=torch.Generator().manual_seed(int(seed)))[:width]
                 for row, seed in zip(probs, seeds)]  # fmt: skip
        arms = probs.argmax(dim=-1, keepdim=True).expand(-1, width) if greedy else torch.stack(draws)
        return self._record(policy, repeated, arms, seeds, torch.arange(len(tasks)).repeat_interleave(group_size))

    def demonstrate(self, policy: nn.Module, tasks: Sequence[BanditTask], *, seeds: Tensor) -> RolloutBatch:
        width = max(task.length for task in tasks)
        arms = torch.tensor([[task.context] * width for task in tasks])
        return self._record(policy, tasks, arms, seeds, torch.arange(len(tasks)))

    def forward(self, policy: nn.Module, batch: RolloutBatch, needs: frozenset[str] = frozenset()) -> Forward:
        log_probs = policy(batch.inputs.contexts).log_softmax(dim=-1)  # [n, arms]
        arms = batch.inputs.arms[:, : batch.loss_mask.shape[1]]
        entropy = -(log_probs.exp() * log_probs).sum(dim=-1, keepdim=True).expand_as(arms) if "entropy" in needs else None
        return Forward(log_probs=log_probs.gather(1, arms), entropy=entropy)

    def describe(self, batch: RolloutBatch, row: int) -> Sample:
        task, outcome = batch.tasks[row], batch.outcomes[row]
        return Sample(prompt=f"context {task.context}", completion=" ".join(map(str, outcome)), reference=str(task.context))

    def save_policy(self, policy: nn.Module, directory: Path) -> None:
        save_file(policy.state_dict(), directory / "model.safetensors")

    def load_policy(self, policy: nn.Module, directory: Path) -> None:
        saved = load_file(directory / "model.safetensors")
        if saved.keys() != policy.state_dict().keys():
            raise CheckpointError(f"{directory}: tensors {sorted(saved)}; expected {sorted(policy.state_dict())}.")
        policy.load_state_dict(saved)

    def _record(
        self, policy: nn.Module, tasks: Sequence[BanditTask], arms: Tensor, seeds: Tensor, group_ids: Tensor
    ) -> RolloutBatch:
        lengths = torch.tensor([task.length for task in tasks])
        mask = torch.arange(arms.shape[1]) < lengths[:, None]
        contexts = torch.tensor([task.context for task in tasks])
        with torch.no_grad():
            log_probs = policy(contexts).log_softmax(dim=-1).gather(1, arms)
        return RolloutBatch(
            tasks=tuple(tasks),
            group_ids=group_ids,
            seeds=seeds,
            outcomes=tuple(row[keep].tolist() for row, keep in zip(arms, mask)),
            old_log_probs=torch.where(mask, log_probs, 0.0),
            loss_mask=mask,
            stop_reasons=("stop",) * len(tasks),
            inputs=BanditInputs(contexts=contexts, arms=arms),
        )


def share_of_right_arms(task: BanditTask, outcome: Sequence[int]) -> float:
    """Share of choices that equal the context."""
    return sum(arm == task.context for arm in outcome) / len(outcome)
