"""Terms beside the policy loss: the seam through which a method adds one, and their sum in an optimizer step.

A term names what it needs of `Adapter.forward` and what it needs recorded: of the policy that sampled (once per batch, before
the first optimizer step, as ``old_log_probs`` are), or of a frozen teacher. It returns losses per decision, which are averaged
with weights that count the whole step, so neither micro-batches nor processes change the gradient. `mmrl.auxiliary_terms`
holds the terms; nothing here knows one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

import torch
from torch import Tensor, nn

from mmrl import processes
from mmrl.adapter import Adapter
from mmrl.algorithm_config import Aggregation
from mmrl.auxiliary_config import AuxiliaryConfig
from mmrl.errors import ConfigError
from mmrl.losses import aggregation_weights, weighted_sum
from mmrl.types import Forward, RolloutBatch

Source = Literal["old", "teacher"]
"""Whose forward pass is recorded: the policy that sampled, or the teacher."""


@dataclass(frozen=True, kw_only=True)
class AuxiliaryInputs:
    """What a term may look at in a micro-batch of ``n`` rows."""

    batch: RolloutBatch
    forward: Forward
    """Under the policy as it is now, with gradient."""
    policy: nn.Module
    teacher: nn.Module | None
    advantages: Tensor
    """``[n, T]``, 0 where masked."""
    mask: Tensor
    """``[n, T]`` bool: decisions that count."""
    recorded: Mapping[tuple[Source, str], Tensor]
    """Extras by source and name, ``[n, T, ...]``, zeros behind what was recorded of a row."""


@dataclass(frozen=True, kw_only=True)
class TermLosses:
    """What a term gives back."""

    losses: Tensor
    """``[n, T]`` per decision, with gradient, not weighted."""
    sums: Mapping[str, Tensor]
    """Logged quantities, each summed over the decisions of the mask."""


class AuxiliaryTerm(Protocol):
    """One addition to the policy loss."""

    needs: frozenset[str]
    """Extras of `Adapter.forward` under the policy."""
    records: Mapping[Source, frozenset[str]]
    """Extras to be recorded, by source."""
    without_advantage: bool
    """Whether a decision has a loss even when its advantage is 0."""

    def losses(self, inputs: AuxiliaryInputs) -> TermLosses: ...


class Recorded:
    """Extras of rows, kept in main memory until the update needs them."""

    def __init__(self, storage: torch.dtype = torch.float32) -> None:
        self.storage = storage
        self._rows: dict[tuple[Source, str], dict[int, Tensor]] = {}

    def put(self, source: Source, rows: Tensor, num_decisions: Tensor, extras: Mapping[str, Tensor]) -> None:
        """Keep ``extras`` ``[n, T, ...]`` of ``rows`` (``[n]``, numbers in the batch), each up to its last decision."""
        for name, value in extras.items():
            kept = value.detach().to(self.storage).cpu()
            known = self._rows.setdefault((source, name), {})
            for place, (row, length) in enumerate(zip(rows.tolist(), num_decisions.tolist())):
                known[row] = kept[place, :length].clone()

    def get(self, rows: Tensor, width: int, device: torch.device) -> dict[tuple[Source, str], Tensor]:
        """What is known of ``rows``, float32 ``[n, width, ...]``."""
        found = {}
        for key, known in self._rows.items():
            parts = [known[row] for row in rows.tolist()]
            inner = [max(sizes) for sizes in zip(*(part.shape[1:] for part in parts))]
            found[key] = torch.stack([fitted(part, (width, *inner)) for part in parts]).to(device).float()
        return found

    def knows(self, source: Source, rows: Tensor) -> bool:
        """Whether something of ``source`` was recorded for all of ``rows``."""
        return any(key[0] == source and known.keys() >= set(rows.tolist()) for key, known in self._rows.items())


class Auxiliary:
    """The auxiliary terms of a run, the teacher that some of them follow, and their sum."""

    def __init__(
        self,
        terms: Mapping[str, AuxiliaryTerm],
        config: AuxiliaryConfig,
        adapter: Adapter,
        teacher: nn.Module | None = None,
    ) -> None:
        self.terms, self.config, self.adapter, self.teacher = dict(terms), config, adapter, teacher
        self.needs = frozenset().union(*(term.needs for term in self.terms.values()))
        self.without_advantage = any(term.without_advantage for term in self.terms.values())
        self.records: dict[Source, frozenset[str]] = {}
        for term in self.terms.values():
            for source, names in term.records.items():
                self.records[source] = self.records.get(source, frozenset()) | names

    def weights(self, mask: Tensor, default: Aggregation, **counts: int) -> dict[str, Tensor]:
        """Weight of each decision in each term, ``[N, T]``, the term's factor included."""
        specs = {name: self.config.terms[name] for name in self.terms}
        return {
            name: spec.weight * aggregation_weights(mask, spec.aggregation or default, **counts) for name, spec in specs.items()
        }

    @torch.no_grad()
    def record(self, policy: nn.Module, batch: RolloutBatch, first: Sequence[Tensor], later: Sequence[Tensor]) -> Recorded:
        """Record what the terms want of a batch, before its first optimizer step.

        ``first`` and ``later`` hold the rows of each forward pass of the first and of the other optimizer steps. What the
        policy itself has to say of the first step's rows is recorded by `keep` out of that step's own pass, which it equals.
        """
        recorded = Recorded(getattr(torch, self.config.storage))
        plans = {"old": (policy, later), "teacher": (self.teacher, [*first, *later])}
        for source, needs in self.records.items():
            module, passes = plans[source]
            for rows in passes:
                part = batch.select(rows)
                extras = self.adapter.forward(module, part, needs).extras
                recorded.put(source, rows, last_decisions(part.loss_mask), {name: extras[name] for name in needs})
        return recorded

    def keep(self, recorded: Recorded, rows: Tensor, part: RolloutBatch, forward: Forward) -> None:
        """Record what the policy that sampled has to say of ``rows`` if it is not known yet."""
        needs = self.records.get("old", frozenset())
        if needs and not recorded.knows("old", rows):
            recorded.put("old", rows, last_decisions(part.loss_mask), {name: forward.extras[name] for name in needs})

    def losses(self, inputs: AuxiliaryInputs, weights: Mapping[str, Tensor]) -> AuxiliaryLosses:
        """The weighted sum of all terms over a micro-batch."""
        device = inputs.mask.device
        total, finite = torch.zeros((), device=device), torch.ones(len(inputs.mask), dtype=torch.bool, device=device)
        parts: dict[str, float] = {}
        totals: processes.Totals = {}
        count = float(inputs.mask.sum())
        for name, term in self.terms.items():
            result = term.losses(inputs)
            share = weighted_sum(result.losses, weights[name])
            total = total + share
            finite &= torch.where(inputs.mask, result.losses.detach(), 0.0).isfinite().all(dim=1)
            parts[name] = float(share.detach())
            totals |= {key: (float(value), count) for key, value in result.sums.items()}
        return AuxiliaryLosses(total=total, parts=parts, totals=totals, finite=finite)


@dataclass(frozen=True, kw_only=True)
class AuxiliaryLosses:
    """What all terms together add to a micro-batch."""

    total: Tensor
    """Scalar, with gradient."""
    parts: Mapping[str, float]
    """Share of each term in the step's loss."""
    totals: processes.Totals
    finite: Tensor
    """``[n]`` bool."""


def build_auxiliary(config: AuxiliaryConfig, adapter: Adapter, device: torch.device) -> Auxiliary | None:
    """The terms that ``config`` names, checked against what the adapter can give; None without any."""
    from mmrl.auxiliary_terms import TERMS

    if not config.terms:
        return None
    terms = {name: TERMS[name](spec, adapter) for name, spec in config.terms.items()}
    known = getattr(adapter, "extras", frozenset())
    for name, term in terms.items():
        missing = frozenset(term.needs).union(*term.records.values()) - known
        if missing:
            raise ConfigError(
                f"auxiliary.{name} needs {', '.join(sorted(missing))} of the policy's forward pass; {type(adapter).__name__} "
                f"gives {', '.join(sorted(known)) or 'none'}. Leave the term out."
            )
    teacher = None
    if config.teacher is not None:
        if not hasattr(adapter, "build_teacher"):
            raise ConfigError(f"auxiliary.teacher: {type(adapter).__name__} cannot load a second policy.")
        teacher = adapter.build_teacher(config.teacher).to(device)
    return Auxiliary(terms, config, adapter, teacher)


def last_decisions(mask: Tensor) -> Tensor:
    """``[n]``: number of columns up to each row's last decision."""
    return (torch.arange(1, mask.shape[1] + 1) * mask).amax(dim=1) if mask.shape[1] else mask.sum(dim=1)


def fitted(value: Tensor, shape: Sequence[int]) -> Tensor:
    """``value`` cut or filled with zeros at the end of each axis, to ``shape``."""
    value = value[tuple(slice(0, size) for size in shape)]
    gaps = [side for want, have in zip(reversed(shape), reversed(value.shape)) for side in (0, want - have)]
    return nn.functional.pad(value, gaps)
