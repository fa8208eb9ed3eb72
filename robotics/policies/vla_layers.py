"""Transformer parts: block-wise attention masks, (adaptive) RMS norms and layers that may look at another stream's keys.

Axes: ``B`` batch, ``N`` tokens of this stream, ``P`` tokens of the other stream, ``W`` width.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

KeysValues = tuple[Tensor, Tensor]
"""Keys and values of some tokens, ``[B, heads, P, W / heads]`` each."""


def block_mask(present: Tensor, starts_block: Tensor) -> Tensor:
    """``[B, N, N]`` True where token i (row) may attend to token j: j is in i's block or an earlier one, and both are present.

    ``present`` ``[B, N]``; ``starts_block`` ``[N]`` is 1 on the first token of a new block and 0 elsewhere (openpi's rule).
    """
    block = starts_block.cumsum(dim=0)
    visible = block[None, :] <= block[:, None]
    return visible & present[:, None, :] & present[:, :, None]


def rms_normalise(x: Tensor) -> Tensor:
    """``x / sqrt(mean(x^2) + 1e-6)`` over the last axis."""
    return x * (x.square().mean(dim=-1, keepdim=True) + 1e-6).rsqrt()


class RmsNorm(nn.Module):
    """RMS norm with a learned weight."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor, condition: None = None) -> tuple[Tensor, float]:
        """The normalised tokens, and 1 for the gate of the branch that follows."""
        return rms_normalise(x) * self.weight, 1.0


class AdaptiveRmsNorm(nn.Module):
    """π0.5's norm: scale, shift and the gate of the residual branch that follows are linear in a condition."""

    def __init__(self, width: int, condition_width: int) -> None:
        super().__init__()
        self.modulation = nn.Linear(condition_width, 3 * width)
        nn.init.zeros_(self.modulation.weight)
        nn.init.zeros_(self.modulation.bias)

    def forward(self, x: Tensor, condition: Tensor) -> tuple[Tensor, Tensor]:
        """The modulated tokens ``[B, N, W]`` and the gate ``[B, 1, W]``, given ``condition`` ``[B, C]``."""
        scale, shift, gate = self.modulation(condition)[:, None].chunk(3, dim=-1)
        return rms_normalise(x) * (1.0 + scale) + shift, gate


def norm(width: int, condition_width: int | None) -> RmsNorm | AdaptiveRmsNorm:
    """A norm that listens to a condition of that width, or to none."""
    return RmsNorm(width) if condition_width is None else AdaptiveRmsNorm(width, condition_width)


class Attention(nn.Module):
    """Multi-head attention of a stream over the keys of another stream and its own."""

    def __init__(self, width: int, num_heads: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.out = nn.Linear(width, width, bias=False)

    def forward(self, x: Tensor, mask: Tensor, other: KeysValues | None = None) -> tuple[Tensor, KeysValues]:
        """Attended tokens ``[B, N, W]``, and this stream's own keys and values; ``mask`` is ``[B, N, P + N]``."""
        query, key, value = (part.unflatten(-1, (self.num_heads, -1)).transpose(1, 2) for part in self.qkv(x).chunk(3, dim=-1))
        own = (key, value)
        if other is not None:
            key, value = torch.cat([other[0], key], dim=2), torch.cat([other[1], value], dim=2)
        attended = functional.scaled_dot_product_attention(query, key, value, attn_mask=mask[:, None])
        return self.out(attended.transpose(1, 2).flatten(2)), own


class Layer(nn.Module):
    """A pre-norm transformer layer."""

    def __init__(self, width: int, num_heads: int, mlp_ratio: int, condition_width: int | None = None) -> None:
        super().__init__()
        self.attention_norm = norm(width, condition_width)
        self.attention = Attention(width, num_heads)
        self.mlp_norm = norm(width, condition_width)
        self.mlp = nn.Sequential(nn.Linear(width, mlp_ratio * width), nn.GELU("tanh"), nn.Linear(mlp_ratio * width, width))

    def forward(
        self, x: Tensor, mask: Tensor, *, other: KeysValues | None = None, condition: Tensor | None = None
    ) -> tuple[Tensor, KeysValues]:
        """See `Attention.forward`."""
        normalised, gate = self.attention_norm(x, condition)
        attended, own = self.attention(normalised, mask, other)
        x = x + gate * attended
        normalised, gate = self.mlp_norm(x, condition)
        return x + gate * self.mlp(normalised), own


class KeysOnly(nn.Module):
    """The end of a stream that others still look at: its last keys and values, with nothing computed from them here."""

    def __init__(self, width: int, num_heads: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.norm = RmsNorm(width)
        self.kv = nn.Linear(width, 2 * width, bias=False)

    def forward(self, x: Tensor) -> KeysValues:
        """Keys and values of ``x`` ``[B, P, W]``."""
        normalised, _ = self.norm(x)
        key, value = (part.unflatten(-1, (self.num_heads, -1)).transpose(1, 2) for part in self.kv(normalised).chunk(2, dim=-1))
        return key, value
