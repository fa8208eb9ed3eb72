"""What a run will need, worked out on torch's meta device: no weights are loaded and nothing is downloaded."""

from __future__ import annotations

import torch
from transformers import PreTrainedConfig

from audio.config import AudioRunConfig
from audio.families import find_family
from audio.known_models import model_config
from mmrl.errors import ConfigError
from mmrl.forecast import Tower
from mmrl.language_planning import forecast

FRAMES_PER_SECOND = 100
"""Mel frames: 16,000 samples, a hop of 160."""
_EXAMPLES = (1.0, 10.0, 30.0)


def plan(config: AudioRunConfig, path: str) -> list[tuple[str, str]]:
    """Rows of ``mmrl check --no-weights``: weights, tokens of clips, positions and a memory forecast per process."""
    architecture = model_config(path)
    family = find_family(architecture.model_type, path)
    with torch.device("meta"):
        model = family.load_class()._from_config(architecture, dtype=getattr(torch, config.policy.dtype))
    rollout = config.rollout
    window = 2 * architecture.audio_config.max_source_positions / FRAMES_PER_SECOND
    longest = min(rollout.max_seconds, window) if family.features == "window" else rollout.max_seconds

    def tokens(seconds: float) -> int:
        if family.features == "windows":
            seconds = -(-seconds // window) * window
        return family.count_tokens(int(seconds * FRAMES_PER_SECOND))

    if tokens(longest) > rollout.max_prompt_tokens:
        raise ConfigError(
            f"rollout.max_prompt_tokens is {rollout.max_prompt_tokens}; a clip of {longest:g} s alone has {tokens(longest)} "
            "tokens; raise it, or lower rollout.max_seconds."
        )
    media_rows = [("longest clip", f"{longest:g} s: {tokens(longest):,} tokens, then {rollout.too_long}")]
    media_rows += [(f"clip of {s:g} s", f"{tokens(s):,} tokens") for s in _EXAMPLES if s < longest]
    names = ("audio_tower", "multi_modal_projector", "visual")
    return forecast(
        model,
        config,
        config.policy,
        rollout,
        towers=[getattr(model, name) for name in names if hasattr(model, name)],
        media_rows=media_rows,
        media_tokens=tokens(longest),
        tower=_tower(architecture.audio_config, longest, tokens(longest)),
        tower_name="audio tower, its projection and the vision tower" if family.sees else "audio tower and its projection",
    )


def _tower(config: PreTrainedConfig, seconds: float, tokens: int) -> Tower:
    """The encoder works on every second mel frame."""
    layers = getattr(config, "encoder_layers", None) or config.num_hidden_layers
    hidden = getattr(config, "d_model", None) or config.hidden_size
    return Tower(layers=layers, hidden=hidden, positions_per_token=-(-int(seconds * FRAMES_PER_SECOND) // (2 * tokens)))
