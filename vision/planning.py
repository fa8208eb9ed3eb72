"""What a run will need, worked out on torch's meta device: no weights are loaded and nothing is downloaded."""

from __future__ import annotations

import torch
from transformers import AutoModelForImageTextToText

from mmrl.generation import MAX_LOGITS_ELEMENTS
from vision.config import VisionRunConfig
from vision.known_models import model_config
from vision.media import fitted_size

_BYTES = {"float32": 4, "bfloat16": 2}
_EXAMPLES = ((1080, 1920), (512, 1024), (448, 448))


def plan(config: VisionRunConfig, path: str) -> list[tuple[str, str]]:
    """Rows of ``mmrl check --no-weights``: weights, visual tokens, positions and a memory forecast per process.

    The forecast counts weights, gradients, AdamW's two moments, the cache of a full rollout, and the activations that one
    micro-batch keeps for its backward pass (about 34 hidden vectors per layer and position without checkpointing, after
    arXiv 2205.05198, plus the logits chunk). It is an estimate: the allocator and attention kernels add to it.
    """
    architecture = model_config(path)
    with torch.device("meta"):
        model = AutoModelForImageTextToText.from_config(architecture, dtype=getattr(torch, config.policy.dtype))
    tower = getattr(model.base_model, "visual", None)
    total = sum(parameter.numel() for parameter in model.parameters())
    in_tower = sum(parameter.numel() for parameter in tower.parameters()) if tower is not None else 0
    trained = total - in_tower if config.policy.freeze_tower else total
    if config.policy.lora is not None:
        trained = _lora_weights(model, config)
    text = architecture.get_text_config()
    rollout, sampling = config.rollout, config.sampling
    head_dim = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
    longest = rollout.max_prompt_tokens + rollout.max_new_tokens
    rows = sampling.tasks_per_step * sampling.group_size
    width = _BYTES[config.policy.dtype]
    together = min(rows, rollout.max_rows)
    cache = 2 * text.num_hidden_layers * text.num_key_value_heads * head_dim * longest * together * width
    positions = max(config.trainer.micro_batch_tokens, longest)
    activations = 34 * text.hidden_size * text.num_hidden_layers * positions * width // 2
    logits = 3 * 4 * min(MAX_LOGITS_ELEMENTS, positions * text.vocab_size)
    memory = total * width + trained * (width + 8) + max(cache, activations + logits)
    factor = architecture.vision_config.patch_size * getattr(architecture.vision_config, "spatial_merge_size", 2)
    limits = {"min_pixels": rollout.min_pixels, "max_pixels": rollout.max_pixels}
    sizes = {size: fitted_size(*size, **limits, factor=factor) for size in _EXAMPLES}
    return [
        ("model", f"{type(model).__name__}, {text.num_hidden_layers} layers of {text.hidden_size}"),
        ("weights", f"{total:,} ({in_tower:,} in the vision tower)"),
        ("trained weights", f"{trained:,}"),
        ("vocabulary", f"{text.vocab_size:,}"),
        ("largest image", f"{rollout.max_pixels // factor**2} visual tokens of {factor}x{factor} px"),
        *((f"image {w}x{h}", f"resized to {fw}x{fh}: {fw * fh // factor**2} visual tokens")
          for (h, w), (fh, fw) in sizes.items()),
        ("longest row", f"{longest:,} positions (prompt {rollout.max_prompt_tokens:,} + {rollout.max_new_tokens:,})"),
        ("rollouts per step", f"{rows:,} ({sampling.tasks_per_step} tasks x {sampling.group_size}), {together:,} at once"),
        ("memory: weights", _gib(total * width)),
        ("memory: gradients, AdamW", _gib(trained * (width + 8))),
        ("memory: rollout cache", _gib(cache)),
        ("memory: one micro-batch", _gib(activations + logits)),
        ("memory: in all, about", _gib(memory)),
    ]  # fmt: skip


def _lora_weights(model: torch.nn.Module, config: VisionRunConfig) -> int:
    spec = config.policy.lora
    layers = [module for name, module in model.named_modules() if isinstance(module, torch.nn.Linear)
              and (spec.target_modules == "all-linear" or name.rpartition(".")[2] in spec.target_modules)]  # fmt: skip
    return sum(spec.rank * (layer.in_features + layer.out_features) for layer in layers)


def _gib(count: int) -> str:
    return f"{count / 2**30:.2f} GiB"
