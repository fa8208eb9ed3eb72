"""What differs between the audio-language architectures: classes, tokens of a clip, windows, and one mended encoder.

The class that trains is the part that reads and writes text: for Omni models the thinker. It is also what `from_pretrained`
loads from a full Omni checkpoint (the talker's weights are left in the file) and what `save_pretrained` writes: a directory
with ``config.json`` of type ``..._thinker``, weights without the ``thinker.`` prefix, and the processor. The thinker's class,
``AutoProcessor`` and this project load it; to speak again, put the weights back under ``thinker.`` in the full checkpoint.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
import transformers
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

from mmrl.errors import ConfigError

Modality = Literal["audio", "image", "video"]


def halved_twice(frames: int) -> int:
    """Tokens of ``frames`` mel frames in Whisper's encoder (a convolution of stride 2) and a pool of two."""
    return max(0, ((frames - 1) // 2 + 1 - 2) // 2 + 1)


def halved_thrice(frames: int) -> int:
    """Tokens of ``frames`` mel frames in Qwen3-Omni's encoder: three convolutions of stride 2 over chunks of 100 frames."""
    rest = (frames % 100 - 1) // 2 + 1
    return ((rest - 1) // 2 + 1 - 1) // 2 + 1 + 13 * (frames // 100)


def eighths(frames: int) -> int:
    """Tokens of ``frames`` mel frames, whole windows, in Voxtral: a convolution of stride 2, then four states a token."""
    return frames // 8


@dataclass(frozen=True, kw_only=True)
class Family:
    """One architecture."""

    model_class: str
    """Name in transformers of the class that trains."""
    processor_class: str
    count_tokens: Callable[[int], int]
    """From mel frames of a clip to its placeholders."""
    features: Literal["exact", "window", "windows"]
    """``exact``: as many frames as the clip has; ``window``: always one whole window, with a mask; ``windows``: as many whole
    windows as the clip needs, without a mask."""
    projection: tuple[str, ...]
    """Modules that map the audio tower's states to the language model's."""
    sees: bool = False
    """Takes images and videos as well."""

    @property
    def modalities(self) -> tuple[Modality, ...]:
        return ("audio", "image", "video") if self.sees else ("audio",)

    def load_class(self) -> type[PreTrainedModel]:
        return getattr(transformers, self.model_class)


_QWEN25_OMNI = Family(
    model_class="Qwen2_5OmniThinkerForConditionalGeneration", processor_class="Qwen2_5OmniProcessor", count_tokens=halved_twice,
    features="exact", projection=("audio_tower.proj",), sees=True,
)  # fmt: skip
_QWEN3_OMNI = Family(
    model_class="Qwen3OmniMoeThinkerForConditionalGeneration", processor_class="Qwen3OmniMoeProcessor",
    count_tokens=halved_thrice, features="exact", projection=("audio_tower.proj1", "audio_tower.proj2"), sees=True,
)  # fmt: skip
FAMILIES: Mapping[str, Family] = {
    "qwen2_audio": Family(
        model_class="Qwen2AudioForConditionalGeneration", processor_class="Qwen2AudioProcessor", count_tokens=halved_twice,
        features="window", projection=("multi_modal_projector",),
    ),
    "qwen2_5_omni": _QWEN25_OMNI,
    "qwen2_5_omni_thinker": _QWEN25_OMNI,
    "qwen3_omni_moe": _QWEN3_OMNI,
    "qwen3_omni_moe_thinker": _QWEN3_OMNI,
    "voxtral": Family(
        model_class="VoxtralForConditionalGeneration", processor_class="VoxtralProcessor", count_tokens=eighths,
        features="windows", projection=("multi_modal_projector",),
    ),
}  # fmt: skip
"""Families by the ``model_type`` of ``config.json``."""


def find_family(model_type: str, path: str) -> Family:
    if model_type not in FAMILIES:
        raise ConfigError(
            f"policy.path is {path!r}, a model of type {model_type!r}; audio policies are: {', '.join(FAMILIES)}."
        )
    return FAMILIES[model_type]


def read_model_config(path: str, *, revision: str | None = None, local_files_only: bool = False) -> PreTrainedConfig:
    """The config of the part that trains, from a directory or hub name; of the thinker where the checkpoint holds more."""
    tree, _ = PreTrainedConfig.get_config_dict(path, revision=revision, local_files_only=local_files_only)
    return build_model_config(tree, path)


def build_model_config(tree: Mapping[str, Any], path: str) -> PreTrainedConfig:
    """The config of the part that trains from the contents of a ``config.json``."""
    family = find_family(tree.get("model_type", "none"), path)
    return family.load_class().config_class.from_dict(dict(tree.get("thinker_config", tree)))


@dataclass(frozen=True, kw_only=True)
class Loader:
    """Stands for an auto class: loads the part of a checkpoint that trains, and mends its audio tower."""

    family: Family

    def from_pretrained(self, path: str, **options: Any) -> Any:
        """As `PreTrainedModel.from_pretrained`; weights of a talker do not count as unexpected."""
        loaded = self.family.load_class().from_pretrained(path, **options)
        model, info = loaded if isinstance(loaded, tuple) else (loaded, None)
        mend_audio_tower(model)
        if info is None:
            return model
        others = ("talker.", "token2wav.", "code2wav.")
        return model, {**info, "unexpected_keys": {k for k in info["unexpected_keys"] if not k.startswith(others)}}


def load_processor(family: Family, path: str, **options: Any) -> Any:
    """The family's processor, without a warning that a thinker's directory is not a whole model."""
    logger = logging.getLogger("transformers.configuration_utils")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        return getattr(transformers, family.processor_class).from_pretrained(path, **options)
    finally:
        logger.setLevel(level)


def mend_audio_tower(model: nn.Module) -> None:
    """Keep clips apart in Qwen3-Omni's audio tower, and give it features in its own precision.

    Its layers pass window boundaries to flash attention only. With other kernels every clip of a batch would attend to all
    others, and a long clip across its windows; here they get the mask that the boundaries mean. Its convolutions see padding
    after a clip's last frames only if the batch holds a whole chunk; here it always does, since a chunk of silence is added.
    """
    tower = getattr(model, "audio_tower", None)
    if type(tower).__name__ != "Qwen3OmniMoeAudioEncoder":
        return
    tower.register_forward_pre_hook(_add_a_chunk, with_kwargs=True)
    tower.register_forward_hook(_drop_the_chunk)
    for layer in tower.layers:
        layer.register_forward_pre_hook(_mask_between_windows, with_kwargs=True)


def _add_a_chunk(tower: nn.Module, inputs: tuple[Any, ...], options: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    features, lengths = inputs[0].to(tower.proj2.weight.dtype), options["feature_lens"]
    chunk = 2 * tower.n_window
    features = torch.cat([features, features.new_zeros(features.shape[0], chunk)], dim=1)
    return (features, *inputs[1:]), {**options, "feature_lens": torch.cat([lengths, lengths.new_tensor([chunk])])}


def _drop_the_chunk(tower: nn.Module, inputs: Any, output: Any) -> Any:
    output.last_hidden_state = output.last_hidden_state[: -halved_thrice(2 * tower.n_window)]
    return output


def _mask_between_windows(layer: nn.Module, inputs: tuple[Any, ...], options: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    states, boundaries = inputs
    if "flash" in (layer.self_attn.config._attn_implementation or ""):
        return inputs, options
    window = torch.searchsorted(boundaries, torch.arange(len(states), device=states.device), right=True)
    apart = window[:, None] != window[None, :]
    mask = torch.zeros(apart.shape, dtype=states.dtype, device=states.device).masked_fill(apart, torch.finfo(states.dtype).min)
    return inputs, {**options, "attention_mask": mask[None, None]}
