"""The sections that an audio run adds to `mmrl.config.RunConfig`. Nothing here imports torch."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from audio.rubrics_config import RubricsConfig
from mmrl.config import RunConfig, Section
from mmrl.data import DatasetConfig
from mmrl.judge_config import JudgeConfig
from mmrl.language_config import LanguagePolicyConfig, LanguageRolloutConfig

BUILTIN_POLICIES = {
    "tiny-qwen2-audio": "Qwen2-Audio with under a million weights, random, hears up to 4 s, tokenizer of the built-in tasks",
    "tiny-qwen2.5-omni": "the thinker of Qwen2.5-Omni, the same way: also sees images and videos, hears up to 300 s",
    "tiny-qwen3-omni": "the thinker of Qwen3-Omni, the same way: a mixture of experts, hears clips of any length",
    "tiny-voxtral": "Voxtral, the same way: hears clips in pieces of 4 s",
    "tone-listener": "tiny-qwen2.5-omni, warmed up by configs/audio/tones_warmup.yaml: writes down the built-in sounds",
}

ToneKind = Literal[
    "hear_beeps", "hear_tones", "hear_knocks", "hear_sounds", "hear_digits",
    "choose_word", "choose_sound", "choose_number", "choose_digit",
    "count", "tempo", "contour", "louder", "order", "same", "parity", "larger", "sum",
]  # fmt: skip


class AudioPolicyConfig(LanguagePolicyConfig):
    """Which model, in which precision, and which of its weights train."""

    train_projection: bool = False
    """With ``freeze_tower``: keep training the map from the audio tower to the language model (the tower is then run again in
    every pass of the update)."""

    @model_validator(mode="after")
    def _projection_needs_a_frozen_tower(self) -> AudioPolicyConfig:
        if self.train_projection and not self.freeze_tower:
            raise ValueError("train_projection says what still trains when freeze_tower is true; without it all of it trains")
        if self.train_projection and self.lora is not None:
            raise ValueError("train_projection trains whole weights, and a run with lora trains its adapters only; drop one")
        return self


class AudioRolloutConfig(LanguageRolloutConfig):
    """Sampling, prompt limits, and which sounds (and pictures, for models that see) are taken."""

    min_seconds: float = Field(0.1, gt=0)
    """Shorter clips are refused."""
    max_seconds: float = Field(30.0, gt=0)
    """Longest clip; a model whose own limit is lower sets the limit."""
    too_long: Literal["refuse", "cut"] = "refuse"
    """What happens to longer clips: the row is refused, or the first seconds are kept (and reports say so)."""
    allow_silence: bool = False
    """Take clips without any sound, for example to measure how much a policy answers without listening."""
    use_audio_in_video: bool = False
    """Hear the sound track of every video (Omni models): its tokens are interleaved with those of the frames."""
    max_pixels: int = Field(768 * 28 * 28, ge=28 * 28)
    """Larger images and video frames are shrunk to this area (Omni models)."""
    fps: float = Field(2.0, gt=0)
    """Frames per second sampled from video files (Omni models)."""
    max_frames: int = Field(64, ge=4)
    """Upper bound on the frames of a video."""

    @model_validator(mode="after")
    def _bounds_are_ordered(self) -> AudioRolloutConfig:
        if self.min_seconds > self.max_seconds:
            raise ValueError(f"min_seconds ({self.min_seconds:g}) must not exceed max_seconds ({self.max_seconds:g})")
        return self


class ToneTasksConfig(Section):
    """Questions about generated sounds, see `audio.tasks`."""

    name: Literal["tones"]
    kinds: tuple[ToneKind, ...] = ("count", "tempo", "contour", "louder", "order", "same", "parity", "larger")
    """Question kinds of training, in equal shares; repeat one to give it more."""
    eval_kinds: tuple[ToneKind, ...] = ("count", "tempo", "contour", "louder", "order", "same", "parity", "larger")
    """Question kinds of evaluation."""
    num_tasks: int = Field(100_000, gt=0)
    """Different training tasks before they repeat."""
    speaker: Literal["packaged", "espeak"] = "packaged"
    """Where spoken digits come from: packaged clips, the same everywhere, or espeak-ng, which has to be installed."""


class DatasetTasksConfig(Section):
    """Rows of your own files."""

    name: Literal["dataset"]
    train: DatasetConfig
    """Rows to train on."""
    eval: DatasetConfig
    """Held-out rows."""


class AudioRunConfig(RunConfig):
    """A run that trains an audio-language model."""

    modality: Literal["audio"]
    policy: AudioPolicyConfig
    """Which model, in which precision, and which of its weights train."""
    tasks: Annotated[ToneTasksConfig | DatasetTasksConfig, Field(discriminator="name")]
    """Built-in questions about sounds, or a dataset."""
    rollout: AudioRolloutConfig = AudioRolloutConfig()
    """Sampling, prompt limits, and which media are taken."""
    rubrics: RubricsConfig = RubricsConfig()
    """How the reward term ``rubrics`` comes about, and the length at which ``overthink`` is 0."""
    judge: JudgeConfig | None = None
    """Who judges for ``rubrics``; without a judge that term is the same for all rollouts of a group."""
