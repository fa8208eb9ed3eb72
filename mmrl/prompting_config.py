"""The ``prompting`` section: what training changes about prompts. Evaluation always shows the plain ones. Imports no torch."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, field_validator

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


class PromptingConfig(Section):
    """What training changes about prompts."""

    templates: tuple[TemplateConfig, ...] = ()
    """Prompt augmentation (arXiv 2602.03190): one of these is drawn for each group; empty leaves questions as they are."""
    inoculation: InoculationConfig | None = None
    """An instruction that only training sees."""
    scaffold: ScaffoldConfig | None = None
    """Rubrics that only sampling sees."""
