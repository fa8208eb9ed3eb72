"""Attention rows of the last decoder layer for completion tokens, whatever kernel the forward pass uses.

`record_attention` keeps the queries and keys that the last layer hands to its attention kernel (rotated, normalised, adapters
included), so nothing is projected twice and no kernel has to return weights; `Recording.rows` works out the softmax for the
completion's queries alone. Method: arXiv 2602.04884.

The row of completion token ``t`` is that of the query at its own position: what the token looks at once it is written.

Shapes: ``n`` rollouts, ``T`` completion tokens, ``S`` columns, ``H`` query heads, ``K`` key heads, ``d`` head size.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from mmrl.errors import AdapterError

MAX_SCORE_ELEMENTS = 1 << 25
"""Scores are reduced in chunks of at most this many elements (128 MiB in float32); larger ones are recomputed in backward."""


@dataclass(kw_only=True)
class Recording:
    """Queries and keys of the last layer's newest forward pass."""

    query: Tensor | None = None
    """``[n, H, q, d]``; the completion's positions are the last ones."""
    key: Tensor | None = None
    """``[n, K, s, d]``: prompt (left-padded) and completion."""
    scaling: float = 1.0

    def rows(self, prompt_lengths: Tensor, mask: Tensor) -> Tensor:
        """Attention of completion tokens, averaged over heads; float32 ``[n, T, S]``, with gradient.

        ``prompt_lengths`` ``[n]`` and ``mask`` ``[n, T]`` describe the rows. Columns are a row's own tokens from its first:
        prompt, then completion, without padding in front, so a row does not depend on what it is batched with; ``S`` is the
        longest prompt and ``T``. Columns behind a token, and rows of masked tokens, are 0.
        """
        if self.query is None or self.key is None:
            raise AdapterError("no attention was recorded: the last decoder layer did not run through transformers' kernels.")
        device, width = self.query.device, mask.shape[1]
        mask, padding = mask.to(device), self.key.shape[2] - width - prompt_lengths.to(device)
        columns = torch.arange(self.key.shape[2], device=device)
        own = columns[-width:] if width else columns[:0]
        visible = (columns >= padding[:, None])[:, None] & (columns <= own[:, None])  # [n, T, s]
        visible = visible & mask[:, :, None]
        rows = attention_rows(self.query[:, :, self.query.shape[2] - width :], self.key, visible, scaling=self.scaling)
        return _without_padding(rows, padding)


def attention_rows(query: Tensor, key: Tensor, visible: Tensor, *, scaling: float) -> Tensor:
    """Mean over heads of ``softmax(scaling q k^T)`` over ``visible`` ``[n, T, s]`` columns; float32 ``[n, T, s]``.

    ``query`` is ``[n, H, T, d]``, ``key`` ``[n, K, s, d]`` with ``H`` a multiple of ``K``. Rows that see nothing are 0.
    """
    at_once = max(1, MAX_SCORE_ELEMENTS // max(1, query.shape[1] * query.shape[2] * key.shape[2]))
    parts = list(zip(query.split(at_once), key.split(at_once), visible.split(at_once)))
    if len(parts) == 1:
        return _rows(*parts[0], scaling)
    return torch.cat([checkpoint(_rows, *part, scaling, use_reentrant=False) for part in parts])


@contextmanager
def record_attention(model: nn.Module) -> Iterator[Recording]:
    """Within, forward passes of ``model`` leave the last decoder layer's queries and keys in the recording.

    Raises `AdapterError` for a model whose last layer attends in a way that queries and keys alone do not determine.
    """
    layer, recording = last_attention(model), Recording()
    kind = layer.config._attn_implementation
    own = ALL_ATTENTION_FUNCTIONS._local_mapping.get(kind)

    def attend(module: nn.Module, query: Tensor, key: Tensor, *rest: Any, **options: Any) -> tuple[Tensor, Any]:
        if module is layer:
            window, cap = options.get("sliding_window"), options.get("softcap")
            if cap is not None or (window is not None and key.shape[2] > window):
                raise AdapterError(
                    f"the last layer of {type(model).__name__} attends with softcap {cap} and sliding window {window}; "
                    "attention rows need plain full attention."
                )
            recording.query, recording.key = query, key
            recording.scaling = options.get("scaling") or query.shape[-1] ** -0.5
        return kernel(module)(module, query, key, *rest, **options)

    def kernel(module: nn.Module) -> Callable[..., tuple[Tensor, Any]]:
        if own is not None:
            return own
        if kind in ALL_ATTENTION_FUNCTIONS._global_mapping:
            return ALL_ATTENTION_FUNCTIONS._global_mapping[kind]
        return sys.modules[type(module).__module__].eager_attention_forward  # where transformers keeps each model's own

    ALL_ATTENTION_FUNCTIONS[kind] = attend
    try:
        yield recording
    finally:
        if own is None:
            del ALL_ATTENTION_FUNCTIONS[kind]
        else:
            ALL_ATTENTION_FUNCTIONS[kind] = own


def last_attention(model: nn.Module) -> nn.Module:
    """The attention module of the last decoder layer of a transformers model."""
    layers = getattr(model.get_decoder(), "layers", None)
    attention = getattr(layers[-1], "self_attn", None) if layers is not None and len(layers) else None
    if attention is None or not hasattr(attention, "config"):
        raise AdapterError(f"{type(model).__name__} has no decoder layer with self_attn; attention rows cannot be had.")
    return attention


def _rows(query: Tensor, key: Tensor, visible: Tensor, scaling: float) -> Tensor:
    num, heads, width, size = query.shape
    with torch.autocast(query.device.type, enabled=False):  # a softmax in bfloat16 has noise of 1e-3
        grouped = query.float().reshape(num, key.shape[1], -1, size)  # heads of a group are neighbours
        scores = (grouped * scaling) @ key.float().transpose(2, 3)
        scores = scores.view(num, heads, width, -1)
        # The smallest number, not minus infinity: a row that sees nothing would be NaN.
        weights = scores.masked_fill(~visible[:, None], torch.finfo(torch.float32).min).softmax(dim=-1)
        return weights.mean(dim=1).masked_fill(~visible, 0.0)


def _without_padding(rows: Tensor, padding: Tensor) -> Tensor:
    """Move each row's columns to the left by its padding; columns that all rows only pad are cut."""
    least, most = int(padding.min()), int(padding.max())
    rows = rows[:, :, least:]
    if least == most:
        return rows
    columns = torch.arange(rows.shape[2], device=rows.device) + (padding - least)[:, None]
    inside = columns < rows.shape[2]
    index = columns.clamp(max=rows.shape[2] - 1)[:, None].expand_as(rows)
    return rows.gather(2, index).masked_fill(~inside[:, None], 0.0)
