"""Config sections of preference pairs and of what R1-Reward makes of them. Nothing here imports torch."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, model_validator

from mmrl.config import Section
from mmrl.data import DatasetConfig
from mmrl.judge_config import EndpointJudgeConfig, JudgeConfig, ModelJudgeConfig, RulesJudgeConfig

JudgingPrompt = Literal["full", "short"]
"""Names of `vision.preferences.PROMPTS`."""
PairKind = Literal["read", "read_first", "read_second", "parity", "above_four", "larger", "sum"]
"""Digit questions that have a right answer."""


class AttemptsConfig(Section):
    """Which pairs of a source are used, by what ``mmrl attempts`` wrote about them."""

    file: Path
    """What ``mmrl attempts`` wrote for this source."""
    keep: Literal["solved", "hard"]
    """``solved``: pairs with a right verdict, which is what supervised warm-up imitates. ``hard``: pairs for reinforcement
    learning, which took ``min_attempts`` or more, or were never solved."""
    min_attempts: int = Field(2, ge=1)
    """Attempts from which on a pair is hard."""


class PreferenceDatasetConfig(DatasetConfig):
    """Rows with a question about media, two responses to it, and which one people prefer."""

    responses: tuple[str, str] | None = ("chosen", "rejected")
    """Columns of the two responses (``a.b`` reaches into a struct); null: the prompt is already the whole judging prompt, whose
    order is then left as it is (R1-Reward's own files, with ``columns: {prompt: null}`` and ``preference: answer``)."""
    preference: str | None = None
    """Column that says which response is better: 1 or 2, also as ``<answer>2</answer>`` or in a list of one; absent: the first
    of ``responses`` always is."""

    @model_validator(mode="after")
    def _preference_is_known(self) -> PreferenceDatasetConfig:
        if self.responses is None and self.preference is None:
            raise ValueError("responses is null, so preference must name the column that says which response is better")
        return self


class PreferenceTasksConfig(Section):
    """Judging pairs of responses from your own files."""

    name: Literal["preferences"]
    train: PreferenceDatasetConfig
    """Pairs to train on, each shown in one order; the better response is first in half of them."""
    eval: PreferenceDatasetConfig
    """Held-out pairs, each shown in both orders."""
    prompt: JudgingPrompt = "full"
    """How a judge is asked."""
    attempts: AttemptsConfig | None = None
    """Use only some of the training pairs; absent uses all."""


class DigitPreferenceTasksConfig(Section):
    """Judging pairs of answers to the built-in questions about digits, of which one is right."""

    name: Literal["digit_preferences"]
    easy_kinds: tuple[PairKind, ...] = ("read", "read_first", "read_second")
    """Questions of easy pairs, in equal shares: one response does not answer the question. Warm-up demonstrates the verdict."""
    hard_kinds: tuple[PairKind, ...] = ("parity", "above_four")
    """Questions of hard pairs: both might be right. Warm-up demonstrates a random verdict, so only reward teaches these."""
    easy_share: float = Field(0.9, ge=0, le=1)
    """Share of easy pairs in training."""
    eval_easy_share: float = Field(0.5, ge=0, le=1)
    """Share of easy pairs in evaluation."""
    num_tasks: int = Field(100_000, gt=0)
    """Different training pairs before they repeat."""
    prompt: JudgingPrompt = "short"
    """How a judge is asked."""
    attempts: AttemptsConfig | None = None
    """Use only some of the training pairs; absent uses all."""


PreferenceTasks = PreferenceTasksConfig | DigitPreferenceTasksConfig
"""Sections of tasks that ask which of two responses is better."""


class R1RewardConfig(Section):
    """The reward term ``r1_reward``."""

    judge: JudgeConfig = RulesJudgeConfig(name="rules")
    """Who says whether reasoning and verdict agree."""
    disagreement: Literal["zero", "minus_one"] = "zero"
    """Consistency of a verdict that its reasoning contradicts: 0 (the paper) or -1 (its code). An agreeing one has 1, and where
    the judge fails it is 0."""
    timeout_s: float = Field(60.0, gt=0)
    """Seconds for the judging of one group."""


class PairwiseConfig(Section):
    """The reward term ``pairwise``: a judge of pairs compares the rollouts of a group."""

    judge: Annotated[ModelJudgeConfig | EndpointJudgeConfig, Field(discriminator="name")]
    """``name: model`` with the policy directory of a trained judge, or a served one."""
    prompt: JudgingPrompt = "full"
    """How the judge was trained to be asked."""
    opponents: int = Field(2, gt=0)
    """Rollouts of the group that each one is compared with, each time in both orders."""
    timeout_s: float = Field(120.0, gt=0)
    """Seconds for the comparisons of one group."""
