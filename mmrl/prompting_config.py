"""The ``prompting`` section: what training changes about prompts. Evaluation always shows the plain ones. Imports no torch."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, field_validator, model_validator

from mmrl.section import Section


class TemplateConfig(Section):
    """One form of asking, and the form of answer that it asks for (see `mmrl.prompting.template_format`)."""

    text: str = "{prompt}"
    """The question's text, ``{prompt}``, inside of instructions."""
    prefill: str = ""
    """What the answer starts with; it belongs to the prompt and is not trained on."""
    tags: tuple[str, ...] = ()
    """Texts that an answer should hold exactly once, for example ``<think>``; those of ``prefill`` count."""
    sections: tuple[str, ...] = ()
    """Texts of which an answer should hold each at least once."""

    @field_validator("text")
    @classmethod
    def _shows_the_question_once(cls, value: str) -> str:
        if value.count("{prompt}") != 1:
            raise ValueError(f"expected {{prompt}} once, found it {value.count('{prompt}')} times.")
        return value


class InoculationConfig(Section):
    """Inoculation prompting: ask in training for what must not be learnt, so that the plain prompt does not evoke it."""

    text: str = Field(min_length=1)
    """The instruction."""
    place: Literal["system", "before", "after"] = "system"
    """At the end of the system turn (made if there is none), or before or after the question."""
    share: float = Field(1.0, gt=0, le=1)
    """Share of the groups that see it."""


class ScaffoldConfig(Section):
    """Rubric scaffolding (RuscaRL, arXiv 2508.16949): part of a task's rubrics is shown while sampling, and less with time."""

    column: str = "rubrics"
    """Column of the task that holds a list of texts, or of mappings with a ``text`` or ``criterion``."""
    heading: str = "A good answer meets these criteria:"
    """Stands above the rubrics that are shown."""
    midpoint: float = 0.2
    """Share of the run at which half of the rubrics are left."""
    steepness: float = Field(125.0, gt=0)
    """How fast they go: the larger, the more sudden."""


class DemonstrationPrefixConfig(Section):
    """Prefix-RFT (arXiv 2507.01679): some rollouts of a group go on from the beginning of the task's demonstration."""

    rows: int = Field(1, gt=0)
    """How many rollouts of each group do; the others are ordinary."""
    high: float = Field(0.95, gt=0, lt=1)
    """Largest share of the demonstration's tokens that is given; the share is drawn evenly below it."""
    low_end: float = Field(0.05, ge=0, lt=1)
    """Smallest share at the end of the run; it falls from ``high`` to here by half a cosine."""
    trained_share: float = Field(0.2, ge=0, le=1)
    """Share of the given tokens that are trained on: those where the policy's entropy is highest."""
    continuation: Literal["raw", "zero"] = "raw"
    """Credit of what the policy adds: its reward, or none."""

    @model_validator(mode="after")
    def _the_share_falls(self) -> DemonstrationPrefixConfig:
        if self.low_end > self.high:
            raise ValueError(f"low_end is {self.low_end:g}, high {self.high:g}; the share falls from high to low_end.")
        return self


class PromptingConfig(Section):
    """What training changes about prompts."""

    templates: tuple[TemplateConfig, ...] = ()
    """Prompt augmentation (arXiv 2602.03190): one of these is drawn for each group; empty leaves questions as they are."""
    inoculation: InoculationConfig | None = None
    """An instruction that only training sees."""
    scaffold: ScaffoldConfig | None = None
    """Rubrics that only sampling sees."""
    demonstration_prefix: DemonstrationPrefixConfig | None = None
    """Beginnings of demonstrations that some rollouts go on from."""

    @model_validator(mode="after")
    def _one_way_to_start_an_answer(self) -> PromptingConfig:
        others = [name for name in ("templates", "scaffold") if getattr(self, name)]
        if self.demonstration_prefix is not None and others:
            raise ValueError(
                f"demonstration_prefix and {others[0]}: demonstrations answer the plain prompt in their own form; keep one."
            )
        return self
