"""The auxiliary terms: reinforced attention learning, and distillation of attention and of tokens from a teacher."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from mmrl.adapter import Adapter
from mmrl.attention_losses import generalized_jensen_shannon, jensen_shannon, row_entropy, without_self
from mmrl.auxiliary import AuxiliaryInputs, AuxiliaryTerm, Source, TermLosses, fitted
from mmrl.generation import MAX_LOGITS_ELEMENTS

_ATTENTION = frozenset({"attention"})


@dataclass(frozen=True, kw_only=True)
class AttentionAdvantage:
    """``A JSD(p || p_old)`` of the attention ``p`` over earlier tokens (RAL, arXiv 2602.04884); ``p_old`` is detached.

    A positive advantage keeps the pattern that was rewarded, a negative one leaves it. Value and gradient are 0 where the
    policy is the one that sampled, so the first optimizer step of a batch adds nothing.
    """

    needs: frozenset[str] = _ATTENTION | {"media_columns"}
    records: Mapping[Source, frozenset[str]] = field(default_factory=lambda: {"old": _ATTENTION})
    without_advantage: bool = False

    def losses(self, inputs: AuxiliaryInputs) -> TermLosses:
        now, old = _attention(inputs), _attention(inputs, "old")
        divergence = jensen_shannon(now, old)
        seen = now.detach()
        media = inputs.forward.extras["media_columns"].to(seen.device)
        sums = {
            "ral/jsd": divergence.detach(),
            "attention/media": (seen * media[:, None]).sum(dim=-1),
            "attention/first": seen[:, :, 0],
            "attention/entropy": row_entropy(seen),
        }
        return TermLosses(losses=inputs.advantages * divergence, sums=_over_decisions(sums, inputs.mask))


@dataclass(frozen=True, kw_only=True)
class AttentionDistillation:
    """``JSD(p || p_teacher)`` of the attention on the policy's own rollouts (OPAD, arXiv 2602.04884); no advantage.

    Layers and heads of the two may differ in number: compared are last-layer rows averaged over heads.
    """

    needs: frozenset[str] = _ATTENTION
    records: Mapping[Source, frozenset[str]] = field(default_factory=lambda: {"teacher": _ATTENTION})
    without_advantage: bool = True

    def losses(self, inputs: AuxiliaryInputs) -> TermLosses:
        divergence = jensen_shannon(_attention(inputs), _attention(inputs, "teacher"))
        sums = {"attention_distillation/jsd": divergence.detach()}
        return TermLosses(losses=divergence, sums=_over_decisions(sums, inputs.mask))


@dataclass(frozen=True, kw_only=True)
class TokenDistillation:
    """Divergence of token distributions from the teacher's on the policy's own rollouts (GKD, arXiv 2306.13649).

    Over the whole vocabulary, at the sampling temperature. The teacher's last hidden states are recorded and its logits made
    again chunk by chunk, so memory grows neither with the vocabulary nor with the batch.
    """

    adapter: Any
    """Gives ``token_logits(policy, hidden [M, D])``, ``[M, V]``."""
    beta: float = 0.5
    needs: frozenset[str] = frozenset({"hidden"})
    records: Mapping[Source, frozenset[str]] = field(default_factory=lambda: {"teacher": frozenset({"hidden"})})
    without_advantage: bool = True

    def losses(self, inputs: AuxiliaryInputs) -> TermLosses:
        def reduce(student: Tensor, teacher: Tensor) -> Tensor:
            with torch.no_grad():
                expected = self.adapter.token_logits(inputs.teacher, teacher)
            logits = self.adapter.token_logits(inputs.policy, student)
            shared = min(logits.shape[-1], expected.shape[-1])  # embeddings of equal tokenizers are padded to different sizes
            return generalized_jensen_shannon(logits[:, :shared], expected[:, :shared], beta=self.beta)

        mask = inputs.mask
        student, teacher = inputs.forward.extras["hidden"][mask], inputs.recorded["teacher", "hidden"][mask]
        rows = max(1, MAX_LOGITS_ELEMENTS // self.adapter.token_logits(inputs.policy, student[:1]).shape[-1])
        if len(student) <= rows:
            values = reduce(student, teacher)
        else:
            chunks = zip(student.split(rows), teacher.split(rows))
            values = torch.cat([checkpoint(reduce, *chunk, use_reentrant=False) for chunk in chunks])
        divergence = values.new_zeros(mask.shape).masked_scatter(mask, values)
        return TermLosses(losses=divergence, sums=_over_decisions({"token_distillation/divergence": divergence.detach()}, mask))


TERMS: Mapping[str, Callable[[Any, Adapter], AuxiliaryTerm]] = {
    "ral": lambda config, adapter: AttentionAdvantage(),
    "attention_distillation": lambda config, adapter: AttentionDistillation(),
    "token_distillation": lambda config, adapter: TokenDistillation(adapter=adapter, beta=config.beta),
}
"""Keys of the ``auxiliary:`` section that are terms."""


def _attention(inputs: AuxiliaryInputs, source: Source | None = None) -> Tensor:
    """Attention over earlier tokens, ``[n, T, S]``: of the policy now, or as it was recorded."""
    rows = inputs.forward.extras["attention"]
    if source is not None:
        rows = fitted(inputs.recorded[source, "attention"], rows.shape)
    return without_self(rows, inputs.batch.inputs.prompt_lengths)


def _over_decisions(values: Mapping[str, Tensor], mask: Tensor) -> dict[str, Tensor]:
    return {name: torch.where(mask, value, 0.0).sum() for name, value in values.items()}
