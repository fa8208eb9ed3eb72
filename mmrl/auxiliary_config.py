"""The ``auxiliary:`` section: terms that join the policy loss. `mmrl.auxiliary` computes them. Nothing here imports torch."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from mmrl.algorithm_config import Aggregation
from mmrl.section import Section


class AuxiliaryTermConfig(Section):
    """What every term has."""

    weight: float = Field(1.0, gt=0)
    """Factor of the term in the total loss."""
    aggregation: Aggregation | None = None
    """How the term's losses per decision are averaged; as ``algorithm.aggregation`` when absent. ``sequence_sum`` sums over the
    decisions of a rollout."""


class AttentionAdvantageConfig(AuxiliaryTermConfig):
    """Reinforced attention learning (arXiv 2602.04884): the advantage times the divergence of attention from what it was."""


class AttentionDistillationConfig(AuxiliaryTermConfig):
    """On-policy attention distillation (arXiv 2602.04884): divergence from the teacher's attention on the policy's rollouts."""


class TokenDistillationConfig(AuxiliaryTermConfig):
    """On-policy token-level distillation (GKD, arXiv 2306.13649): divergence from the teacher's token distributions."""

    beta: float = Field(0.5, ge=0, le=1)
    """0 is ``KL(teacher || policy)``, 1 is ``KL(policy || teacher)``; between them a Jensen-Shannon divergence."""


class TeacherConfig(Section):
    """A larger frozen policy of the same tokenizer, which scores what the policy wrote."""

    path: str
    """A built-in policy, a local directory, or a hub name."""
    revision: str | None = None
    """Branch, tag or commit of a hub name."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Precision of its weights."""


class AuxiliaryConfig(Section):
    """Terms that join the policy loss, each with its weight; without any, nothing is computed."""

    ral: AttentionAdvantageConfig | None = None
    """Advantage-weighted divergence of the last layer's attention from the policy that sampled."""
    attention_distillation: AttentionDistillationConfig | None = None
    """Divergence of the last layer's attention from the teacher's."""
    token_distillation: TokenDistillationConfig | None = None
    """Divergence of token distributions from the teacher's."""
    teacher: TeacherConfig | None = None
    """Whom the distillation terms follow."""
    storage: Literal["float32", "float16"] = "float32"
    """Precision in which recorded attention (and the teacher's states) wait for the update; float16 halves their memory."""

    @property
    def terms(self) -> dict[str, AuxiliaryTermConfig]:
        """The terms of this run by name."""
        named = {name: getattr(self, name) for name in type(self).model_fields}
        return {name: value for name, value in named.items() if isinstance(value, AuxiliaryTermConfig)}

    @model_validator(mode="after")
    def _teacher_and_terms_belong_together(self) -> AuxiliaryConfig:
        taught = [name for name in self.terms if name.endswith("_distillation")]
        if taught and self.teacher is None:
            raise ValueError(f"{taught[0]} needs a teacher; give teacher.path, a larger policy with the same tokenizer.")
        if self.teacher is not None and not taught:
            raise ValueError(
                f"teacher {self.teacher.path!r} has nothing to teach; add attention_distillation or token_distillation."
            )
        return self
