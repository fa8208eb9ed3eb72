"""Tiny vision-language models of the real architectures, made locally: random weights, own tokenizer, ordinary directories.

They exist so that every path of the real code runs, and visibly learns, without a download. `build_tiny_qwen25_vl` gives
Qwen2.5-VL (patches of 14 px, 2x2 merger, multimodal rotary positions, grouped attention) with about a million weights.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import (
    Qwen2_5_VLConfig,
    Qwen2_5_VLForConditionalGeneration,
    Qwen2_5_VLProcessor,
    Qwen2Tokenizer,
    Qwen2VLImageProcessor,
    Qwen2VLVideoProcessor,
)

from mmrl.byte_bpe import train_tokenizer
from mmrl.errors import ConfigError

SPECIAL_TOKENS = (
    "<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>",
)  # fmt: skip

CHAT_TEMPLATE = (
    "{%- for message in messages -%}<|im_start|>{{ message.role + '\n' }}"
    "{%- if message.content is string -%}{{ message.content }}{%- else -%}"
    "{%- for part in message.content -%}"
    "{%- if part.type == 'image' -%}<|vision_start|><|image_pad|><|vision_end|>"
    "{%- elif part.type == 'video' -%}<|vision_start|><|video_pad|><|vision_end|>"
    "{%- else -%}{{ part.text }}{%- endif -%}"
    "{%- endfor -%}{%- endif -%}<|im_end|>\n{% endfor -%}"
    "{%- if add_generation_prompt -%}<|im_start|>assistant\n{% endif -%}"
)


@dataclass(frozen=True, kw_only=True)
class TinySize:
    """Sizes of a tiny Qwen2.5-VL; the defaults give about a million weights."""

    vocab_size: int = 512
    hidden_size: int = 128
    intermediate_size: int = 320
    num_layers: int = 3
    num_heads: int = 4
    num_key_value_heads: int = 2
    vision_hidden_size: int = 80
    vision_intermediate_size: int = 192
    vision_depth: int = 3
    vision_num_heads: int = 4
    max_pixels: int = 224 * 224


def build_tiny_qwen25_vl(directory: Path, corpus: Iterable[str], *, size: TinySize = TinySize(), seed: int = 0) -> None:
    """Write a randomly initialised Qwen2.5-VL with its processor to ``directory``.

    ``corpus`` is what the byte-level tokenizer is trained on; any other text still encodes, byte by byte.
    """
    processor = build_qwen25_vl_processor(corpus, vocab_size=size.vocab_size, max_pixels=size.max_pixels)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = Qwen2_5_VLForConditionalGeneration(qwen25_vl_config(processor.tokenizer, size))
    model.generation_config.eos_token_id = processor.tokenizer.convert_tokens_to_ids("<|im_end|>")
    model.generation_config.pad_token_id = processor.tokenizer.pad_token_id
    model.save_pretrained(directory)
    processor.save_pretrained(directory)


def add_tags(source: Path, directory: Path, tags: Sequence[str]) -> None:
    """Write ``source`` to ``directory`` with ``tags`` as further whole tokens; the weights are those of ``source``.

    Raises `ConfigError` when the model has no unused rows of embeddings left for them.
    """
    processor = Qwen2_5_VLProcessor.from_pretrained(source)
    model = Qwen2_5_VLForConditionalGeneration.from_pretrained(source)
    processor.tokenizer.add_tokens(list(tags))
    rows = model.get_input_embeddings().num_embeddings
    if len(processor.tokenizer) > rows:
        raise ConfigError(f"{source}: has {rows} rows of embeddings, too few for {len(processor.tokenizer)} tokens.")
    model.save_pretrained(directory)
    processor.save_pretrained(directory)


def qwen25_vl_config(tokenizer: Qwen2Tokenizer, size: TinySize) -> Qwen2_5_VLConfig:
    """The architecture at a small size, with the token ids of ``tokenizer``."""
    head = size.hidden_size // size.num_heads
    token_id = tokenizer.convert_tokens_to_ids
    return Qwen2_5_VLConfig(
        text_config={
            "vocab_size": size.vocab_size,
            "hidden_size": size.hidden_size,
            "intermediate_size": size.intermediate_size,
            "num_hidden_layers": size.num_layers,
            "num_attention_heads": size.num_heads,
            "num_key_value_heads": size.num_key_value_heads,
            "max_position_embeddings": 4096,
            "tie_word_embeddings": True,
            # Half of each head's dimensions carry the rotation; time, height and width share them as in the released models.
            "rope_parameters": {
                "rope_type": "default", "mrope_section": [head // 8, 3 * head // 16, 3 * head // 16], "rope_theta": 10_000.0,
            },
            "bos_token_id": token_id("<|endoftext|>"),
            "eos_token_id": token_id("<|im_end|>"),
            "pad_token_id": token_id("<|endoftext|>"),
        },
        vision_config={
            "depth": size.vision_depth,
            "hidden_size": size.vision_hidden_size,
            "intermediate_size": size.vision_intermediate_size,
            "num_heads": size.vision_num_heads,
            "out_hidden_size": size.hidden_size,
            "fullatt_block_indexes": [size.vision_depth - 1],
            "window_size": 112,
        },
        image_token_id=token_id("<|image_pad|>"),
        video_token_id=token_id("<|video_pad|>"),
        vision_start_token_id=token_id("<|vision_start|>"),
        vision_end_token_id=token_id("<|vision_end|>"),
        tie_word_embeddings=True,
    )  # fmt: skip


def build_qwen25_vl_processor(corpus: Iterable[str], *, vocab_size: int, max_pixels: int) -> Qwen2_5_VLProcessor:
    """Tokenizer, image and video processors and chat template of Qwen2.5-VL, the tokenizer trained on ``corpus``."""
    tokenizer = train_tokenizer(corpus, vocab_size=vocab_size, special_tokens=SPECIAL_TOKENS)
    pixels = {"shortest_edge": 28 * 28, "longest_edge": max_pixels}
    return Qwen2_5_VLProcessor(
        image_processor=Qwen2VLImageProcessor(size=pixels),
        tokenizer=tokenizer,
        video_processor=Qwen2VLVideoProcessor(size=pixels),
        chat_template=CHAT_TEMPLATE,
    )
