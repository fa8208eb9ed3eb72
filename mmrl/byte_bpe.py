"""Tokenizers of tiny models: byte-level BPE with Qwen2's pre-tokenisation, trained on the spot."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from typing import Any

from tokenizers import Tokenizer, decoders, models, trainers
from tokenizers.pre_tokenizers import ByteLevel
from transformers import Qwen2Tokenizer

TAGS = ("<think>", "</think>", "<answer>", "</answer>")
"""Whole tokens, as in recent reasoning models, but ordinary text: they survive decoding."""


def train_tokenizer(corpus: Iterable[str], *, vocab_size: int, special_tokens: Sequence[str], **options: Any) -> Qwen2Tokenizer:
    """A Qwen2 tokenizer of ``vocab_size`` tokens, `TAGS` and ``special_tokens`` (the end of text first) included.

    It is trained on ``corpus``; any other text still encodes, byte by byte. ``options`` go to `Qwen2Tokenizer`.
    """
    added = (*special_tokens, *TAGS)
    trained = Tokenizer(models.BPE())
    trained.pre_tokenizer = Qwen2Tokenizer().backend_tokenizer.pre_tokenizer
    trained.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size - len(added), initial_alphabet=ByteLevel.alphabet(), show_progress=False, min_frequency=1
    )
    trained.train_from_iterator(corpus, trainer)
    bpe = json.loads(trained.to_str())["model"]  # the library exposes merges only in its serialised form
    tokenizer = Qwen2Tokenizer(
        vocab=bpe["vocab"],
        merges=[tuple(pair) for pair in bpe["merges"]],
        **{"extra_special_tokens": list(special_tokens[1:]), **options},
    )
    tokenizer.add_tokens(list(TAGS))
    return tokenizer
