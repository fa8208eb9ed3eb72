"""Shapes of released checkpoints, so that a run can be planned without downloading one.

Figures are those of the published ``config.json`` files; only what decides shapes is kept, of Omni models for the thinker.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from transformers import PreTrainedConfig

from audio.families import build_model_config, read_model_config
from mmrl.errors import ConfigError

_WHISPER_LARGE = {
    "d_model": 1280, "encoder_layers": 32, "encoder_attention_heads": 20, "encoder_ffn_dim": 5120, "num_mel_bins": 128,
    "max_source_positions": 1500,
}  # fmt: skip


def _qwen25_omni(*, hidden: int, intermediate: int, layers: int, heads: int, kv_heads: int, vocab: int) -> dict[str, Any]:
    return {
        "model_type": "qwen2_5_omni_thinker",
        "audio_config": {**_WHISPER_LARGE, "output_dim": hidden, "n_window": 100},
        "vision_config": {
            "depth": 32, "hidden_size": 1280, "intermediate_size": 3420, "num_heads": 16, "patch_size": 14, "window_size": 112,
            "fullatt_block_indexes": [7, 15, 23, 31], "out_hidden_size": hidden,
        },
        "text_config": {
            "hidden_size": hidden, "intermediate_size": intermediate, "num_hidden_layers": layers, "num_attention_heads": heads,
            "num_key_value_heads": kv_heads, "vocab_size": vocab, "tie_word_embeddings": False,
            "rope_parameters": {"rope_type": "default", "mrope_section": [16, 24, 24], "rope_theta": 1_000_000.0},
        },
        "audio_token_index": 151646, "image_token_index": 151655, "video_token_index": 151656,
        "audio_start_token_id": 151647, "audio_end_token_id": 151648, "tie_word_embeddings": False,
    }  # fmt: skip


def _voxtral(*, hidden: int, intermediate: int, layers: int) -> dict[str, Any]:
    return {
        "model_type": "voxtral", "audio_token_id": 24,
        "text_config": {
            "model_type": "llama", "hidden_size": hidden, "intermediate_size": intermediate, "num_hidden_layers": layers,
            "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 131072,
        },
    }  # fmt: skip


KNOWN_MODELS: Mapping[str, Mapping[str, Any]] = {
    "Qwen/Qwen2-Audio-7B-Instruct": {
        "model_type": "qwen2_audio", "audio_token_index": 151646, "tie_word_embeddings": False,
        "audio_config": {**_WHISPER_LARGE, "model_type": "qwen2_audio_encoder"},
        "text_config": {
            "model_type": "qwen2", "hidden_size": 4096, "intermediate_size": 11008, "num_hidden_layers": 32,
            "num_attention_heads": 32, "num_key_value_heads": 32, "vocab_size": 156032, "tie_word_embeddings": False,
        },
    },
    "Qwen/Qwen2.5-Omni-3B": _qwen25_omni(hidden=2048, intermediate=11008, layers=36, heads=16, kv_heads=2, vocab=151936),
    "Qwen/Qwen2.5-Omni-7B": _qwen25_omni(hidden=3584, intermediate=18944, layers=28, heads=28, kv_heads=4, vocab=152064),
    "Qwen/Qwen3-Omni-30B-A3B-Instruct": {
        "model_type": "qwen3_omni_moe_thinker",
        "audio_config": {
            **_WHISPER_LARGE, "output_dim": 2048, "n_window": 50, "n_window_infer": 800, "downsample_hidden_size": 480,
        },
        "vision_config": {
            "depth": 27, "hidden_size": 1152, "intermediate_size": 4304, "num_heads": 16, "out_hidden_size": 2048,
            "deepstack_visual_indexes": [8, 16, 24],
        },
        "text_config": {
            "hidden_size": 2048, "num_hidden_layers": 48, "num_attention_heads": 32, "num_key_value_heads": 4, "head_dim": 128,
            "vocab_size": 152064, "num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 768,
            "rope_parameters": {"rope_type": "default", "mrope_section": [24, 20, 20], "mrope_interleaved": True,
                                "rope_theta": 1_000_000.0},
        },
        "audio_token_id": 151675, "audio_start_token_id": 151669, "audio_end_token_id": 151670, "image_token_id": 151655,
        "video_token_id": 151656, "position_id_per_seconds": 13,
    },
    "mistralai/Voxtral-Mini-3B-2507": _voxtral(hidden=3072, intermediate=8192, layers=30),
    "mistralai/Voxtral-Small-24B-2507": _voxtral(hidden=5120, intermediate=32768, layers=40),
}  # fmt: skip


def model_config(path: str) -> PreTrainedConfig:
    """The architecture of a known checkpoint (no network is used), or of a local directory."""
    if path in KNOWN_MODELS:
        return build_model_config(KNOWN_MODELS[path], path)
    try:
        return read_model_config(path, local_files_only=True)
    except OSError as error:
        raise ConfigError(
            f"policy.path is {path!r}, which is neither on this machine nor a known checkpoint: {', '.join(KNOWN_MODELS)}."
        ) from error
