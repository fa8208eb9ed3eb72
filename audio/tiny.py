"""Tiny audio-language models of the real architectures, made locally: random weights, own tokenizer, ordinary directories.

They exist so that every path of the real code runs, and visibly learns, without a download. Each builder writes a directory
that `AutoProcessor` and the model's class load; feature extractors are Whisper's with 128 mel bins, as in the released models.
Qwen2-Audio and Voxtral always encode a whole window (30 s in the released models), so theirs lasts `TinySize.window_seconds`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import (
    PreTrainedModel,
    ProcessorMixin,
    Qwen2_5OmniProcessor,
    Qwen2_5OmniThinkerConfig,
    Qwen2_5OmniThinkerForConditionalGeneration,
    Qwen2AudioConfig,
    Qwen2AudioForConditionalGeneration,
    Qwen2AudioProcessor,
    Qwen2Tokenizer,
    Qwen2VLImageProcessor,
    Qwen2VLVideoProcessor,
    Qwen3OmniMoeProcessor,
    Qwen3OmniMoeThinkerForConditionalGeneration,
    VoxtralConfig,
    VoxtralForConditionalGeneration,
    VoxtralProcessor,
    WhisperFeatureExtractor,
)
from transformers.models.qwen3_omni_moe.configuration_qwen3_omni_moe import Qwen3OmniMoeThinkerConfig

from mmrl.byte_bpe import train_tokenizer

QWEN25_TOKENS = {
    "audio_token": "<|AUDIO|>", "audio_bos_token": "<|audio_bos|>", "audio_eos_token": "<|audio_eos|>",
    "image_token": "<|IMAGE|>", "video_token": "<|VIDEO|>", "vision_bos_token": "<|vision_bos|>",
    "vision_eos_token": "<|vision_eos|>",
}  # fmt: skip
QWEN3_TOKENS = {
    "audio_token": "<|audio_pad|>", "audio_bos_token": "<|audio_start|>", "audio_eos_token": "<|audio_end|>",
    "image_token": "<|image_pad|>", "video_token": "<|video_pad|>", "vision_bos_token": "<|vision_start|>",
    "vision_eos_token": "<|vision_end|>",
}  # fmt: skip
VOXTRAL_TOKENS = {"audio_token": "[AUDIO]", "begin_audio_token": "[BEGIN_AUDIO]"}
VOXTRAL_AUDIO_ID = 24
"""The processor's constant."""

_CHAT_TEMPLATE = (
    "{%- set clips = namespace(count=0) -%}"
    "{%- for message in messages -%}<|im_start|>{{ message.role + '\n' }}"
    "{%- for part in message.content -%}"
    "{%- if part.type == 'audio' -%}{%- set clips.count = clips.count + 1 -%}AUDIO_TEXT"
    "{%- elif part.type == 'image' -%}VISION_BOS_IMAGE_EOS"
    "{%- elif part.type == 'video' -%}VISION_BOS_VIDEO_EOS"
    "{%- else -%}{{ part.text }}{%- endif -%}"
    "{%- endfor -%}<|im_end|>\n{% endfor -%}"
    "{%- if add_generation_prompt -%}<|im_start|>assistant\n{% endif -%}"
)


@dataclass(frozen=True, kw_only=True)
class TinySize:
    """Sizes of a tiny model; the defaults give under a million weights."""

    vocab_size: int = 512
    hidden_size: int = 128
    intermediate_size: int = 320
    num_layers: int = 3
    num_heads: int = 4
    num_key_value_heads: int = 2
    audio_hidden_size: int = 96
    audio_layers: int = 2
    audio_heads: int = 4
    window_seconds: int = 4
    """What Qwen2-Audio's and Voxtral's tower encodes at once."""
    vision_hidden_size: int = 32
    max_pixels: int = 112 * 112


Builder = Callable[[Iterable[str], TinySize], tuple[Callable[[], PreTrainedModel], ProcessorMixin]]


def build_tiny(name: str, directory: Path, corpus: Iterable[str], *, size: TinySize = TinySize(), seed: int = 0) -> None:
    """Write the randomly initialised model ``name`` (a key of `BUILDERS`) with its processor to ``directory``.

    ``corpus`` is what the byte-level tokenizer is trained on; any other text still encodes, byte by byte.
    """
    make_model, processor = BUILDERS[name](corpus, size)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = make_model()
    model.generation_config.eos_token_id = processor.tokenizer.convert_tokens_to_ids("<|im_end|>")
    model.generation_config.pad_token_id = processor.tokenizer.pad_token_id
    model.save_pretrained(directory)
    processor.save_pretrained(directory)


def _qwen2_audio(corpus: Iterable[str], size: TinySize) -> tuple[Callable[[], PreTrainedModel], ProcessorMixin]:
    tokens = {name: token for name, token in QWEN25_TOKENS.items() if name.startswith("audio")}
    clip = "{{ 'Audio ' ~ clips.count ~ ': <|audio_bos|><|AUDIO|><|audio_eos|>\n' }}"
    tokenizer = _tokenizer(corpus, size, tokens)
    processor = Qwen2AudioProcessor(
        feature_extractor=_extractor(size.window_seconds), tokenizer=tokenizer, chat_template=_chat_template(clip, tokens)
    )
    config = Qwen2AudioConfig(
        audio_config=_whisper(size) | {"max_source_positions": 50 * size.window_seconds},
        text_config={"model_type": "qwen2"} | _decoder(size, tokenizer),
        audio_token_index=tokenizer.convert_tokens_to_ids(tokens["audio_token"]),
        tie_word_embeddings=False,
    )
    return lambda: Qwen2AudioForConditionalGeneration(config), processor


def _qwen25_omni(corpus: Iterable[str], size: TinySize) -> tuple[Callable[[], PreTrainedModel], ProcessorMixin]:
    tokenizer = _tokenizer(corpus, size, QWEN25_TOKENS)
    clip = "<|audio_bos|><|AUDIO|><|audio_eos|>"
    processor = Qwen2_5OmniProcessor(
        image_processor=Qwen2VLImageProcessor(size=_pixels(size, 28)),
        video_processor=Qwen2VLVideoProcessor(size=_pixels(size, 28)),
        feature_extractor=_extractor(300),
        tokenizer=tokenizer,
        chat_template=_chat_template(clip, QWEN25_TOKENS),
    )
    head = size.hidden_size // size.num_heads
    token_id = tokenizer.convert_tokens_to_ids
    config = Qwen2_5OmniThinkerConfig(
        audio_config=_whisper(size) | {"output_dim": size.hidden_size},
        vision_config={
            "depth": 2, "num_heads": 2, "hidden_size": size.vision_hidden_size, "intermediate_size": 64,
            "out_hidden_size": size.hidden_size, "fullatt_block_indexes": [1],
        },
        text_config=_decoder(size, tokenizer) | {
            "tie_word_embeddings": False,
            "rope_parameters": {
                "rope_type": "default", "mrope_section": [head // 8, 3 * head // 16, 3 * head // 16], "rope_theta": 10_000.0,
            },
        },
        audio_token_index=token_id("<|AUDIO|>"),
        image_token_index=token_id("<|IMAGE|>"),
        video_token_index=token_id("<|VIDEO|>"),
        audio_start_token_id=token_id("<|audio_bos|>"),
        audio_end_token_id=token_id("<|audio_eos|>"),
        vision_start_token_id=token_id("<|vision_bos|>"),
        vision_end_token_id=token_id("<|vision_eos|>"),
        tie_word_embeddings=False,
    )  # fmt: skip
    return lambda: Qwen2_5OmniThinkerForConditionalGeneration(config), processor


def _qwen3_omni(corpus: Iterable[str], size: TinySize) -> tuple[Callable[[], PreTrainedModel], ProcessorMixin]:
    tokenizer = _tokenizer(corpus, size, QWEN3_TOKENS)
    processor = Qwen3OmniMoeProcessor(
        image_processor=Qwen2VLImageProcessor(patch_size=16, size=_pixels(size, 32)),
        video_processor=Qwen2VLVideoProcessor(patch_size=16, size=_pixels(size, 32)),
        feature_extractor=_extractor(300),
        tokenizer=tokenizer,
        chat_template=_chat_template("<|audio_start|><|audio_pad|><|audio_end|>", QWEN3_TOKENS),
    )
    head = size.hidden_size // size.num_heads
    token_id = tokenizer.convert_tokens_to_ids
    config = Qwen3OmniMoeThinkerConfig(
        audio_config=_whisper(size) | {
            "output_dim": size.hidden_size, "n_window": 50, "n_window_infer": 800, "downsample_hidden_size": 32,
        },
        vision_config={
            "depth": 2, "num_heads": 2, "hidden_size": size.vision_hidden_size, "intermediate_size": 64,
            "out_hidden_size": size.hidden_size, "num_position_embeddings": 16, "deepstack_visual_indexes": [0],
        },
        text_config=_decoder(size, tokenizer) | {
            "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": size.intermediate_size // 4,
            "rope_parameters": {
                "rope_type": "default", "mrope_section": [head // 8, 3 * head // 16, 3 * head // 16], "mrope_interleaved": True,
                "rope_theta": 10_000.0,
            },
        },
        audio_token_id=token_id("<|audio_pad|>"),
        image_token_id=token_id("<|image_pad|>"),
        video_token_id=token_id("<|video_pad|>"),
        audio_start_token_id=token_id("<|audio_start|>"),
        audio_end_token_id=token_id("<|audio_end|>"),
        vision_start_token_id=token_id("<|vision_start|>"),
        vision_end_token_id=token_id("<|vision_end|>"),
        position_id_per_seconds=13,
    )  # fmt: skip
    return lambda: Qwen3OmniMoeThinkerForConditionalGeneration(config), processor


def _voxtral(corpus: Iterable[str], size: TinySize) -> tuple[Callable[[], PreTrainedModel], ProcessorMixin]:
    base = _tokenizer(corpus, size, VOXTRAL_TOKENS)
    tokenizer = _with_token_at(base, VOXTRAL_TOKENS["audio_token"], VOXTRAL_AUDIO_ID)
    tokenizer.chat_template = _chat_template("[BEGIN_AUDIO][AUDIO]", VOXTRAL_TOKENS)
    processor = VoxtralProcessor(feature_extractor=_extractor(size.window_seconds), tokenizer=tokenizer)
    width = size.audio_hidden_size
    config = VoxtralConfig(
        audio_config={
            "hidden_size": width, "intermediate_size": 4 * width, "num_hidden_layers": size.audio_layers,
            "num_attention_heads": size.audio_heads, "max_source_positions": 50 * size.window_seconds,
        },
        text_config={"model_type": "llama", "head_dim": size.hidden_size // size.num_heads} | _decoder(size, tokenizer),
        audio_token_id=VOXTRAL_AUDIO_ID,
        tie_word_embeddings=False,
    )  # fmt: skip
    return lambda: VoxtralForConditionalGeneration(config), processor


BUILDERS: Mapping[str, Builder] = {
    "tiny-qwen2-audio": _qwen2_audio,
    "tiny-qwen2.5-omni": _qwen25_omni,
    "tiny-qwen3-omni": _qwen3_omni,
    "tiny-voxtral": _voxtral,
}


def _tokenizer(corpus: Iterable[str], size: TinySize, tokens: Mapping[str, str]) -> Qwen2Tokenizer:
    special = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", *tokens.values())
    return train_tokenizer([*corpus, *["Audio 1: "] * 8], vocab_size=size.vocab_size, special_tokens=special, **tokens)


def _with_token_at(base: Qwen2Tokenizer, token: str, index: int) -> Qwen2Tokenizer:
    """The same tokenizer with ``token`` and the token that was at ``index`` in each other's place."""
    vocab = dict(base.get_vocab())
    moved = next(name for name, at in vocab.items() if at == index)
    vocab[moved], vocab[token] = vocab[token], index
    special = [name for name in base.all_special_tokens if name != "<|endoftext|>"]
    tokenizer = Qwen2Tokenizer(vocab=vocab, merges=base._merges, extra_special_tokens=special)
    tokenizer.add_tokens([name for name in base.get_added_vocab() if name not in tokenizer.get_added_vocab()])
    return tokenizer


def _chat_template(clip: str, tokens: Mapping[str, str]) -> str:
    template = _CHAT_TEMPLATE.replace("AUDIO_TEXT", clip)
    for kind in ("image", "video"):
        parts = [tokens.get(name, "") for name in ("vision_bos_token", f"{kind}_token", "vision_eos_token")]
        template = template.replace(f"VISION_BOS_{kind.upper()}_EOS", "".join(parts))
    return template


def _extractor(seconds: int) -> WhisperFeatureExtractor:
    return WhisperFeatureExtractor(feature_size=128, chunk_length=seconds, return_attention_mask=True)


def _pixels(size: TinySize, factor: int) -> dict[str, int]:
    return {"shortest_edge": factor * factor, "longest_edge": size.max_pixels}


def _whisper(size: TinySize) -> dict[str, Any]:
    return {
        "d_model": size.audio_hidden_size, "encoder_layers": size.audio_layers, "encoder_attention_heads": size.audio_heads,
        "encoder_ffn_dim": 3 * size.audio_hidden_size,
    }  # fmt: skip


def _decoder(size: TinySize, tokenizer: Qwen2Tokenizer) -> dict[str, Any]:
    token_id = tokenizer.convert_tokens_to_ids
    return {
        "vocab_size": size.vocab_size, "hidden_size": size.hidden_size, "intermediate_size": size.intermediate_size,
        "num_hidden_layers": size.num_layers, "num_attention_heads": size.num_heads,
        "num_key_value_heads": size.num_key_value_heads, "max_position_embeddings": 4096,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0},
        "bos_token_id": token_id("<|endoftext|>"), "eos_token_id": token_id("<|im_end|>"),
        "pad_token_id": token_id("<|endoftext|>"),
    }  # fmt: skip
