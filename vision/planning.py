"""What a run will need, worked out on torch's meta device: no weights are loaded and nothing is downloaded."""

from __future__ import annotations

import torch
from transformers import AutoModelForImageTextToText, PreTrainedConfig

from mmrl.forecast import Tower
from mmrl.language_planning import forecast
from vision.config import VisionRunConfig
from vision.known_models import model_config
from vision.media import fitted_size

_EXAMPLES = ((1080, 1920), (512, 1024), (448, 448))


def plan(config: VisionRunConfig, path: str) -> list[tuple[str, str]]:
    """Rows of ``mmrl check --no-weights``: weights, visual tokens, positions and a memory forecast per process."""
    architecture = model_config(path)
    with torch.device("meta"):
        model = AutoModelForImageTextToText.from_config(architecture, dtype=getattr(torch, config.policy.dtype))
    tower = getattr(model.base_model, "visual", None)
    rollout = config.rollout
    factor = architecture.vision_config.patch_size * getattr(architecture.vision_config, "spatial_merge_size", 2)
    limits = {"min_pixels": rollout.min_pixels, "max_pixels": rollout.max_pixels}
    sizes = {size: fitted_size(*size, **limits, factor=factor) for size in _EXAMPLES}
    media_rows = [
        ("largest image", f"{rollout.max_pixels // factor**2} visual tokens of {factor}x{factor} px"),
        *((f"image {w}x{h}", f"resized to {fw}x{fh}: {fw * fh // factor**2} visual tokens")
          for (h, w), (fh, fw) in sizes.items()),
    ]  # fmt: skip
    return forecast(
        model,
        config,
        config.policy,
        rollout,
        towers=[] if tower is None else [tower],
        media_rows=media_rows,
        tower_name="vision tower",
        media_tokens=rollout.max_pixels // factor**2,
        tower=_tower(architecture.vision_config),
    )


def _tower(config: PreTrainedConfig) -> Tower:
    layers = getattr(config, "depth", None) or config.num_hidden_layers
    return Tower(layers=layers, hidden=config.hidden_size, positions_per_token=getattr(config, "spatial_merge_size", 2) ** 2)
