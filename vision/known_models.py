"""Shapes of released checkpoints, so that a run can be planned without downloading one.

Figures are those of the published ``config.json`` files; only what decides tensor shapes is kept.
"""

from __future__ import annotations

from typing import Any

from transformers import AutoConfig, PreTrainedConfig

from mmrl.errors import ConfigError

_QWEN25_VISION = {
    "depth": 32, "hidden_size": 1280, "intermediate_size": 3420, "num_heads": 16, "patch_size": 14,
    "fullatt_block_indexes": [7, 15, 23, 31], "window_size": 112, "tokens_per_second": 2,
}  # fmt: skip
_QWEN25_TOKENS = {
    "image_token_id": 151655, "video_token_id": 151656, "vision_start_token_id": 151652, "vision_end_token_id": 151653,
}  # fmt: skip


def _qwen25_vl(
    *, hidden: int, intermediate: int, layers: int, heads: int, kv_heads: int, vocab: int, tied: bool
) -> dict[str, Any]:
    return {
        "model_type": "qwen2_5_vl",
        "tie_word_embeddings": tied,
        "text_config": {
            "hidden_size": hidden, "intermediate_size": intermediate, "num_hidden_layers": layers, "num_attention_heads": heads,
            "num_key_value_heads": kv_heads, "vocab_size": vocab, "tie_word_embeddings": tied,
            "rope_parameters": {"rope_type": "default", "mrope_section": [16, 24, 24], "rope_theta": 1_000_000.0},
        },
        "vision_config": {**_QWEN25_VISION, "out_hidden_size": hidden},
        **_QWEN25_TOKENS,
    }  # fmt: skip


KNOWN_MODELS: dict[str, dict[str, Any]] = {
    "Qwen/Qwen2.5-VL-3B-Instruct": _qwen25_vl(
        hidden=2048, intermediate=11008, layers=36, heads=16, kv_heads=2, vocab=151936, tied=True
    ),
    "Qwen/Qwen2.5-VL-7B-Instruct": _qwen25_vl(
        hidden=3584, intermediate=18944, layers=28, heads=28, kv_heads=4, vocab=152064, tied=False
    ),
}


def model_config(path: str) -> PreTrainedConfig:
    """The architecture of a known checkpoint, or of a local directory."""
    if path in KNOWN_MODELS:
        shapes = dict(KNOWN_MODELS[path])
        return AutoConfig.for_model(shapes.pop("model_type"), **shapes)
    try:
        return AutoConfig.from_pretrained(path, local_files_only=True)
    except OSError as error:
        raise ConfigError(
            f"policy.path is {path!r}, which is neither on this machine nor a known checkpoint: {', '.join(KNOWN_MODELS)}."
        ) from error
