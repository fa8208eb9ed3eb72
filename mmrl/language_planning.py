"""The memory forecast of ``mmrl check --no-weights`` for language policies, from a model on torch's meta device."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from mmrl.config import RunConfig
from mmrl.forecast import Sizes, Tower
from mmrl.forecast import rows as memory_rows
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
    media_tokens: int = 0,
    tower: Tower | None = None,
) -> list[Row]:
    """Rows about weights, positions and memory per process (`mmrl.forecast`), with ``media_rows`` in their middle.

    ``media_tokens`` are those of the largest medium, ``tower`` what runs them (it keeps activations unless it is frozen).
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
    together = min(rows, rollout.max_rows)
    sizes = Sizes(
        weights=total,
        trained=trained,
        width=_BYTES[policy.dtype],
        layers=text.num_hidden_layers,
        hidden=text.hidden_size,
        kv_width=2 * text.num_key_value_heads * head_dim,
        vocabulary=text.vocab_size,
        prompt=rollout.max_prompt_tokens,
        media_tokens=min(media_tokens, rollout.max_prompt_tokens),
        completion=rollout.max_new_tokens,
        tasks=sampling.tasks_per_step // config.trainer.minibatches,
        group_size=sampling.group_size,
        rows_at_once=together,
        micro_batch_tokens=config.trainer.micro_batch_tokens,
        tower=None if policy.freeze_tower else tower,
    )
    return [
        ("model", f"{type(model).__name__}, {text.num_hidden_layers} layers of {text.hidden_size}"),
        ("weights", f"{total:,} ({in_tower:,} in the {tower_name})"),
        ("trained weights", f"{trained:,}"),
        ("vocabulary", f"{text.vocab_size:,}"),
        *media_rows,
        ("longest row", f"{longest:,} positions (prompt {rollout.max_prompt_tokens:,} + {rollout.max_new_tokens:,})"),
        ("rollouts per step", f"{rows:,} ({sampling.tasks_per_step} tasks x {sampling.group_size}), {together:,} at once"),
        *memory_rows(sizes),
    ]


def _lora_weights(model: nn.Module, spec: LoraConfig, left_out: Sequence[nn.Module]) -> int:
    skipped = {id(module) for tower in left_out for module in tower.modules()}
    layers = [module for name, module in model.named_modules() if isinstance(module, nn.Linear) and id(module) not in skipped
              and (spec.target_modules == "all-linear" or name.rpartition(".")[2] in spec.target_modules)]  # fmt: skip
    return sum(spec.rank * (layer.in_features + layer.out_features) for layer in layers)
