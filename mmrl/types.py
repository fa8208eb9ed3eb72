"""The nouns of the tensor waist: `Task`, `RolloutBatch`, `Forward`, `Sample`.

Axis letters: ``P`` tasks of a step, ``G`` rollouts of a group, ``N`` rollouts of a batch (group-major), ``T`` decisions of a
rollout (completion tokens, or action chunks of an episode). Nothing here knows a modality, and this module imports nothing
of ours but the error tree.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from types import MappingProxyType
from typing import Any, Literal, Protocol, Self

import torch
from torch import Tensor

from mmrl.errors import AdapterError


@dataclass(frozen=True, kw_only=True)
class Task:
    """One thing to attempt. Adapters subclass it and add what they need; the core reads these fields only."""

    id: str
    """Unique within its source; quoted in every error about this task."""
    domain: str = "default"
    """Unit of sampling weights and of the breakdown in evaluation."""
    difficulty: float | None = None
    """Larger is harder; read by curricula."""


class Inputs(Protocol):
    """What an adapter keeps of a batch to run `forward` again. Opaque to the core but for its size."""

    @property
    def prompt_lengths(self) -> Tensor:
        """``[N]`` int64: positions in front of the first decision of each row (0 for robots); sizes micro-batches."""
        ...

    def select(self, rows: Tensor) -> Self:
        """Keep ``rows`` (int64 ``[n]``), in that order."""
        ...

    def concat(self, others: Sequence[Self]) -> Self:
        """Append the rows of ``others`` in order."""
        ...


@dataclass(frozen=True, kw_only=True)
class Media:
    """An image, a sound or a video as a file's bytes, for samples and reports."""

    kind: Literal["image", "audio", "video"]
    data: bytes
    suffix: str
    """File name extension with its dot, for example ``.png``."""
    caption: str = ""


@dataclass(frozen=True, kw_only=True)
class Sample:
    """One rollout as a person reads it."""

    prompt: str
    completion: str
    """Text of a completion, or a line per decision of an episode."""
    reference: str = ""
    """The verifiable answer or the goal, when there is one."""
    media: tuple[Media, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Forward:
    """How likely the recorded decisions are under a policy now: what `Adapter.forward` returns."""

    log_probs: Tensor
    """``[n, T]`` float32, with gradient. Values at masked positions are ignored."""
    entropy: Tensor | None = None
    """``[n, T]`` float32, nats per decision; present when ``"entropy"`` was asked for."""
    extras: Mapping[str, Tensor] = field(default_factory=dict)
    """Further per-row tensors that were asked for by name."""


@dataclass(frozen=True, kw_only=True)
class RolloutBatch:
    """What happened when a policy attempted some tasks. Frozen; shapes are checked when it is built."""

    tasks: tuple[Task, ...]
    """``N`` tasks, one per rollout (the rollouts of a group share theirs)."""
    group_ids: Tensor
    """``[N]`` int64. Rollouts with equal ids form a group; groups may differ in size."""
    seeds: Tensor
    """``[N]`` int64. All randomness of rollout ``i`` comes from ``seeds[i]``, whatever it is batched with."""
    outcomes: tuple[Any, ...]
    """``N`` records that reward terms read, for example a completion or an episode. The core does not look inside."""
    old_log_probs: Tensor
    """``[N, T]`` float32, recorded while sampling and never recomputed."""
    loss_mask: Tensor
    """``[N, T]`` bool, true on decisions of the policy (the end token included)."""
    stop_reasons: tuple[str, ...]
    """``N`` words: ``"stop"`` and ``"length"`` for text; ``"success"``, ``"timeout"`` and so on for episodes."""
    inputs: Inputs
    sampler_log_probs: Tensor | None = None
    """``[N, T]`` float32 from a separate sampling engine, or None when the policy itself sampled."""
    progress: Tensor | None = None
    """``[N, T]`` float32 share of the task's work that was done before each decision (negative when there is more to do than at
    the start), NaN where unknown; None when the modality has no such measure."""
    given_entropy: Tensor | None = None
    """``[N, T]`` float32 entropy of the policy, in nats, at decisions that were given instead of sampled (the beginning of a
    demonstration), NaN at all others; None when nothing was given."""
    rewards: Tensor | None = None
    """``[N]`` float32 total reward, NaN where no term applied; None until `mmrl.rewards.score` has run."""
    reward_terms: Mapping[str, Tensor] = field(default_factory=lambda: MappingProxyType({}))
    """Unweighted terms by name, each ``[N]`` float32 with NaN where the term does not apply."""
    judgings: tuple[Mapping[str, Any] | None, ...] | None = None
    """``N`` records of how a judge came to its scores, shared by the rollouts of a group; None where no judge was asked."""

    def __post_init__(self) -> None:
        num = len(self.tasks)
        if self.old_log_probs.ndim != 2 or self.old_log_probs.shape[0] != num:
            raise AdapterError(
                f"RolloutBatch.old_log_probs has shape {tuple(self.old_log_probs.shape)}; expected [N, T] with N = {num} tasks."
            )
        per_decision = {"loss_mask": self.loss_mask, "sampler_log_probs": self.sampler_log_probs, "progress": self.progress}
        per_decision["given_entropy"] = self.given_entropy
        for name, tensor in per_decision.items():
            if tensor is not None and tensor.shape != self.old_log_probs.shape:
                raise AdapterError(
                    f"RolloutBatch.{name} has shape {tuple(tensor.shape)}; expected that of old_log_probs, "
                    f"{tuple(self.old_log_probs.shape)}."
                )
        per_row = {"group_ids": self.group_ids, "seeds": self.seeds, "rewards": self.rewards, **self.reward_terms}
        for name, tensor in per_row.items():
            if tensor is not None and tensor.shape != (num,):
                raise AdapterError(f"RolloutBatch.{name} has shape {tuple(tensor.shape)}; expected [N] = [{num}].")
        for name, values in {"outcomes": self.outcomes, "stop_reasons": self.stop_reasons, "judgings": self.judgings}.items():
            if values is not None and len(values) != num:
                raise AdapterError(f"RolloutBatch.{name} has {len(values)} entries; expected one per rollout, {num}.")
        if self.loss_mask.dtype != torch.bool:
            raise AdapterError(f"RolloutBatch.loss_mask has dtype {self.loss_mask.dtype}; expected torch.bool.")

    def __len__(self) -> int:
        return len(self.tasks)

    @property
    def num_decisions(self) -> Tensor:
        """``[N]`` int64: decisions of each rollout that may receive loss."""
        return self.loss_mask.sum(dim=1)

    def select(self, rows: Tensor) -> RolloutBatch:
        """Keep ``rows`` (int64 ``[n]``), in that order; trailing columns that no kept row uses are cut."""
        index = rows.tolist()
        used = self.loss_mask[rows].any(dim=0).nonzero()
        width = int(used.max()) + 1 if len(used) else 0
        changes: dict[str, Any] = {"inputs": self.inputs.select(rows)}
        for item in fields(self):
            value = getattr(self, item.name)
            if item.name == "inputs":
                continue  # may be a tuple, but knows its own rows
            if isinstance(value, Tensor):
                changes[item.name] = value[rows, :width] if value.ndim == 2 else value[rows]
            elif isinstance(value, tuple):
                changes[item.name] = tuple(value[i] for i in index)
        changes["reward_terms"] = {name: term[rows] for name, term in self.reward_terms.items()}
        return replace(self, **changes)

    @staticmethod
    def concat(batches: Sequence[RolloutBatch]) -> RolloutBatch:
        """Rows of all batches in order. Group ids are kept, so they must differ between batches; ``T`` grows to the widest."""
        first, rest = batches[0], batches[1:]
        if not rest:
            return first
        width = max(batch.old_log_probs.shape[1] for batch in batches)

        def join(name: str) -> Any:
            values = [getattr(batch, name) for batch in batches]
            if any(value is None for value in values):
                return None
            if isinstance(values[0], tuple):
                return tuple(entry for value in values for entry in value)
            if values[0].ndim == 2:
                values = [torch.nn.functional.pad(value, (0, width - value.shape[1])) for value in values]
            return torch.cat(values)

        names = [item.name for item in fields(first) if item.name not in ("inputs", "reward_terms")]
        terms = {name: torch.cat([batch.reward_terms[name] for batch in batches]) for name in first.reward_terms}
        inputs = first.inputs.concat([batch.inputs for batch in rest])
        return RolloutBatch(**{name: join(name) for name in names}, inputs=inputs, reward_terms=terms)
