"""What a train step recorded of each decision of a rollout, for ``mmrl replay`` and the report.

Nothing is computed again later: the numbers are those that the step's own passes saw. `PassLog` listens to the forward passes
of the update; `decision_record` puts one rollout's numbers side by side.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from mmrl import losses, recipe
from mmrl.adapter import Adapter
from mmrl.algorithm_config import AlgorithmConfig
from mmrl.collection import Collected
from mmrl.losses import per_decision
from mmrl.types import Forward, RolloutBatch


@dataclass(kw_only=True)
class PassLog:
    """Log-probabilities of every forward pass of an update, in order. Rollouts are known by their seeds."""

    limit: float = torch.inf
    """Log-ratio of one decision that counts as extreme (``algorithm.max_log_ratio``)."""
    passes: list[tuple[Tensor, Tensor]] = field(default_factory=list)
    num_decisions: int = 0
    num_extreme: int = 0
    """Decisions, over all passes, whose log-ratio reaches the limit or is not a number."""
    first_extreme: tuple[int, int] | None = None
    """Seed of the rollout, and decision, of the first of them."""

    def note(self, batch: RolloutBatch, log_probs: Tensor) -> None:
        """Remember ``log_probs`` ``[n, T]`` of a pass over ``batch``."""
        log_probs = log_probs.detach().float().cpu()
        self.passes.append((batch.seeds.clone(), log_probs))
        extreme = ~((log_probs - batch.old_log_probs).abs() < self.limit) & batch.loss_mask
        self.num_decisions += int(batch.loss_mask.sum())
        self.num_extreme += int(extreme.sum())
        if self.first_extreme is None and extreme.any():
            row, decision = extreme.nonzero()[0].tolist()
            self.first_extreme = int(batch.seeds[row]), decision

    def of(self, seed: int, width: int) -> list[Tensor]:
        """``[width]`` of each pass that computed the rollout with this seed; zeros where the pass was narrower."""
        rows = [log_probs[seeds == seed][:1, :width] for seeds, log_probs in self.passes]
        return [nn.functional.pad(row[0], (0, width - row.shape[1])) for row in rows if len(row)]

    def extreme_note(self, adapter: Adapter, batch: RolloutBatch) -> str:
        """One line that counts extreme decisions and names the first."""
        seed, decision = self.first_extreme
        row = int((batch.seeds == seed).nonzero()[0])
        return (
            f"{self.num_extreme} of {self.num_decisions} decisions have a log-ratio of {self.limit:g} or more, clamped there; "
            f"the first: task {batch.tasks[row].id!r}, rollout {row}, decision {decision} "
            f"({decision_labels(adapter, batch, row)[decision]!r})."
        )

    @contextmanager
    def listening(self, model: nn.Module) -> Iterator[PassLog]:
        """Within, note every pass of ``model``, which takes a batch first and returns a `mmrl.types.Forward`."""

        def hook(module: nn.Module, given: tuple[Any, ...], result: Forward) -> None:
            self.note(given[0], result.log_probs)

        handle = model.register_forward_hook(hook)
        try:
            yield self
        finally:
            handle.remove()


def decision_record(config: AlgorithmConfig, adapter: Adapter, collected: Collected, row: int, log: PassLog) -> dict[str, Any]:
    """JSON values about each decision of rollout ``row``, up to its last one.

    ``label`` (and ``id`` of tokens), ``old`` log-probability, ``sampler`` and ``reference`` where there are such, ``mask`` (1
    where the decision received loss), ``advantage``, ``mismatch`` weight where there is one, and ``passes``: for each pass of
    the update that computed this rollout, ``new`` log-probability, ``ratio``, and ``clip`` (``low`` or ``high`` where the
    clipped surrogate gave no gradient). A rollout without credit is not computed: it has no passes.
    """
    batch = collected.batch
    used = batch.loss_mask[row].nonzero()
    width = int(used[-1]) + 1 if len(used) else 0
    received = recipe.effective_mask(config, batch, collected.trained)[row : row + 1, :width]
    credit = per_decision(collected.advantages[row : row + 1], batch.loss_mask[row : row + 1])[:, :width]
    old = batch.old_log_probs[row : row + 1, :width]
    record: dict[str, Any] = {
        "label": decision_labels(adapter, batch, row)[:width],
        "old": numbers(old[0]),
        "mask": received[0].int().tolist(),
        "advantage": numbers(torch.where(received, credit, 0.0)[0]),
    }
    tokens = getattr(batch.inputs, "tokens", None)
    per_decision_values = {
        "sampler": batch.sampler_log_probs, "reference": collected.reference_log_probs, "mismatch": collected.mismatch_weights,
    }  # fmt: skip
    if tokens is not None:
        record["id"] = tokens[row, :width].tolist()
    record |= {name: numbers(values[row, :width]) for name, values in per_decision_values.items() if values is not None}
    record["passes"] = [_pass_record(config, new[None], old, received, credit) for new in log.of(int(batch.seeds[row]), width)]
    return record


def decision_labels(adapter: Adapter, batch: RolloutBatch, row: int) -> list[str]:
    """Each decision of a rollout as a person reads it: tokens, lines about chunks of commands, or bare numbers."""
    count = batch.loss_mask.shape[1]
    if hasattr(adapter, "decision_labels"):
        labels = list(adapter.decision_labels(batch, row))
    else:
        lines = adapter.describe(batch, row).completion.splitlines()
        labels = lines if len(lines) >= int(batch.num_decisions[row]) else []
    return [*labels[:count], *(str(index) for index in range(len(labels), count))]


def numbers(values: Tensor) -> list[float | str | None]:
    """Numbers for JSON: NaN is None, infinities are words, everything else is exact."""
    return [_json(value) for value in values.tolist()]


def _json(value: float) -> float | str | None:
    if value != value:
        return None
    return value if abs(value) != float("inf") else ("inf" if value > 0 else "-inf")


def _pass_record(config: AlgorithmConfig, new: Tensor, old: Tensor, mask: Tensor, credit: Tensor) -> Mapping[str, Any]:
    logs = losses.log_ratio(new, old, mask, unit=config.ratio, limit=config.max_log_ratio)
    ratio = torch.where(mask, logs.expand_as(new).exp(), torch.nan)
    clip: Sequence[str] = [""] * new.shape[1]
    if config.surrogate == "clip":
        low, high = ratio < 1 - config.clip_low, ratio > 1 + config.clip_high
        low, high = low & (credit < 0) & mask, high & (credit > 0) & mask
        clip = ["low" if a else "high" if b else "" for a, b in zip(low[0].tolist(), high[0].tolist())]
    return {"new": numbers(torch.where(mask, new, torch.nan)[0]), "ratio": numbers(ratio[0]), "clip": list(clip)}
