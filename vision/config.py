"""The sections that a vision run adds to `mmrl.config.RunConfig`. Nothing here imports torch."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from mmrl.config import RunConfig, Section
from mmrl.data import DatasetConfig
from mmrl.language_config import LanguagePolicyConfig, LanguageRolloutConfig
from vision.preferences_config import PairwiseConfig, PreferenceTasks, R1RewardConfig

BUILTIN_POLICIES = {
    "tiny-qwen2.5-vl": "Qwen2.5-VL with about a million weights, random, tokenizer made for the built-in tasks",
    "digit-reader": "the same, warmed up by configs/vision/read_digits_warmup.yaml: reads digits, knows the form of answers",
    "digit-judge": "digit-reader, warmed up by configs/vision/r1_reward_digits_warmup.yaml: judges easy pairs of answers",
    "digit-reader-observe": "digit-reader with <observe> and </observe> as further tokens, where the next one starts from",
    "digit-reader-confidence": "digit-reader with <analysis> and <confidence> tags as further tokens, to state a confidence",
    "digit-observer": "warmed up by configs/vision/observe_r1_digits_warmup.yaml: observes, thinks too long, answers",
}

DigitKind = Literal[
    "read", "read_first", "read_second", "choose_word", "choose_number", "choose_digit",
    "parity", "above_four", "larger", "sum",
]  # fmt: skip


PlacedKind = Literal["alone", "pair", "crowd"]


class VisionRolloutConfig(LanguageRolloutConfig):
    """Sampling, prompt limits and the size of images."""

    min_pixels: int = Field(28 * 28, gt=0)
    """Smaller images are enlarged to this area."""
    max_pixels: int = Field(768 * 28 * 28, gt=0)
    """Larger images are shrunk to this area; 28 x 28 pixels are one visual token of Qwen2.5-VL."""
    fps: float = Field(2.0, gt=0)
    """Frames per second sampled from video files."""
    source_fps: float | None = Field(None, gt=0)
    """Rate of videos that do not say theirs (lists of frames); without it such a row is refused."""
    max_frames: int = Field(64, ge=4)
    """Upper bound on the frames of a video."""

    @model_validator(mode="after")
    def _bounds_are_ordered(self) -> VisionRolloutConfig:
        if self.min_pixels > self.max_pixels:
            raise ValueError(f"min_pixels ({self.min_pixels}) must not exceed max_pixels ({self.max_pixels})")
        return self


class DigitTasksConfig(Section):
    """Questions about scikit-learn's handwritten digits, split by source image."""

    name: Literal["digits"]
    kinds: tuple[DigitKind, ...] = ("parity", "above_four", "larger", "sum")
    """Question kinds of training, in equal shares; repeat one to give it more."""
    eval_kinds: tuple[DigitKind, ...] = ("parity", "above_four", "larger", "sum", "read", "read_first", "read_second")
    """Question kinds of evaluation."""
    num_tasks: int = Field(100_000, gt=0)
    """Different training tasks before they repeat."""
    demonstrations: Literal["think", "observe", "confidence"] = "think"
    """What warm-up imitates: ``<think>digits</think><answer>..``, or ``<observe>digits</observe><think>..`` in which the digits
    are thought over between one and six times (`vision.digits.observe_demonstration`), or the first with a confidence behind
    it, drawn at random, in the form that `mmrl.calibration` reads."""


class PlacedDigitTasksConfig(Section):
    """Questions about a colored digit in a random place of a larger image, among others (`vision.placed_digits`)."""

    name: Literal["placed_digits"]
    kinds: tuple[PlacedKind, ...] = ("crowd",)
    """Question kinds of training, in equal shares: a digit ``alone``, a ``pair``, a ``crowd`` of five."""
    eval_kinds: tuple[PlacedKind, ...] = ("crowd",)
    """Question kinds of evaluation."""
    num_tasks: int = Field(100_000, gt=0)
    """Different training tasks before they repeat."""


class DatasetTasksConfig(Section):
    """Rows of your own files."""

    name: Literal["dataset"]
    train: DatasetConfig
    """Rows to train on."""
    eval: DatasetConfig
    """Held-out rows."""


class VisionRunConfig(RunConfig):
    """A run that trains a vision-language model."""

    modality: Literal["vision"]
    policy: LanguagePolicyConfig
    """Which model, in which precision, and which of its weights train."""
    tasks: Annotated[
        DigitTasksConfig | PlacedDigitTasksConfig | DatasetTasksConfig | PreferenceTasks, Field(discriminator="name")
    ]
    """Built-in digit questions, a dataset, or pairs of responses to judge (built-in ones, or a dataset)."""
    rollout: VisionRolloutConfig = VisionRolloutConfig()
    """Sampling, prompt limits and the size of images."""
    r1_reward: R1RewardConfig = R1RewardConfig()
    """Who says whether the reasoning of a verdict agrees with it, for the reward term ``r1_reward``."""
    pairwise: PairwiseConfig | None = None
    """The judge that compares rollouts, for the reward term ``pairwise``."""
