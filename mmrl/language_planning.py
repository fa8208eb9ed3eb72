"""The memory forecast of ``mmrl check --no-weights`` for language policies, from a model on torch's meta device."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from mmrl.config import RunConfig
from mmrl.generation import MAX_LOGITS_ELEMENTS
from mmrl.language_config import LanguagePolicyConfig, LanguageRolloutConfig, LoraConfig

_BYTES = {"float32": 4, "bfloat16": 2}

Row = tuple[str, str]


def forecast(
    model: nn.Module,
    config: RunConfig,
    policy: LanguagePolicyConfig,
    rollout: LanguageRolloutConfig,
    *,
    towers: Sequence[nn.Module],
    media_rows: Sequence[Row],
    tower_name: str,
) -> list[Row]:
    """Rows about weights, positions and memory per process, with ``media_rows`` in their middle.

    Counted are weights, gradients, AdamW's two moments, the cache of a full rollout, and the activations that one micro-batch
    keeps for its backward pass (about 34 hidden vectors per layer and position without checkpointing, after arXiv 2205.05198,
    plus the logits chunk). It is an estimate: the allocator and attention kernels add to it.
    """
    total = sum(parameter.numel() for parameter in model.parameters())
    in_tower = sum(parameter.numel() for tower in towers for parameter in tower.parameters())
    trained = total - in_tower if policy.freeze_tower else total
    if policy.lora is not None:
        trained = _lora_weights(model, policy.lora, () if not policy.freeze_tower else towers)
    text, sampling = model.config.get_text_config(), config.sampling
    head_dim = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
    longest = rollout.max_prompt_tokens + rollout.max_new_tokens
    rows = sampling.tasks_per_step * sampling.group_size
    width = _BYTES[policy.dtype]
    together = min(rows, rollout.max_rows)
    cache = 2 * text.num_hidden_layers * text.num_key_value_heads * head_dim * longest * together * width
    positions = max(config.trainer.micro_batch_tokens, longest)
    activations = 34 * text.hidden_size * text.num_hidden_layers * positions * width // 2
    logits = 3 * 4 * min(MAX_LOGITS_ELEMENTS, positions * text.vocab_size)
    memory = total * width + trained * (width + 8) + max(cache, activations + logits)
    return [
        ("model", f"{type(model).__name__}, {text.num_hidden_layers} layers of {text.hidden_size}"),
        ("weights", f"{total:,} ({in_tower:,} in the {tower_name})"),
        ("trained weights", f"{trained:,}"),
        ("vocabulary", f"{text.vocab_size:,}"),
        *media_rows,
        ("longest row", f"{longest:,} positions (prompt {rollout.max_prompt_tokens:,} + {rollout.max_new_tokens:,})"),
        ("rollouts per step", f"{rows:,} ({sampling.tasks_per_step} tasks x {sampling.group_size}), {together:,} at once"),
        ("memory: weights", _gib(total * width)),
        ("memory: gradients, AdamW", _gib(trained * (width + 8))),
        ("memory: rollout cache", _gib(cache)),
        ("memory: one micro-batch", _gib(activations + logits)),
        ("memory: in all, about", _gib(memory)),
    ]


def _lora_weights(model: nn.Module, spec: LoraConfig, left_out: Sequence[nn.Module]) -> int:
    skipped = {id(module) for tower in left_out for module in tower.modules()}
    layers = [module for name, module in model.named_modules() if isinstance(module, nn.Linear) and id(module) not in skipped
              and (spec.target_modules == "all-linear" or name.rpartition(".")[2] in spec.target_modules)]  # fmt: skip
    return sum(spec.rank * (layer.in_features + layer.out_features) for layer in layers)


def _gib(count: int) -> str:
    return f"{count / 2**30:.2f} GiB"
