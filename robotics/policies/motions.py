"""Chunks of joint positions as motions, and motions as bins.

A motion is how far one action moves a joint, in units of ``max_delta``: 1 is the furthest. Positions are normalised to [-1, 1]
by the joint limits, and motions add up from the observed position. Axes: ``B`` batch, ``H`` chunk, ``A`` joints.
"""

from __future__ import annotations

import torch
from torch import Tensor


def decode_motions(state: Tensor, motions: Tensor, max_delta: float) -> Tensor:
    """Positions ``[B, H, A]``: ``state`` ``[B, A]`` plus the running sum of motions, each cut to [-1, 1]."""
    path = state[:, None] + max_delta * motions.clamp(-1.0, 1.0).cumsum(dim=1)
    return path.clamp(-1.0, 1.0)


def encode_motions(state: Tensor, positions: Tensor, max_delta: float) -> Tensor:
    """Motions ``[B, H, A]`` in [-1, 1] that follow ``positions`` as closely as ``max_delta`` allows.

    What one motion cannot cover is left to the next, so a demonstration that is too fast is followed late, not shortened.
    """
    reached, motions = state, []
    for position in positions.unbind(dim=1):
        motion = ((position - reached) / max_delta).clamp(-1.0, 1.0)
        reached = reached + max_delta * motion
        motions.append(motion)
    return torch.stack(motions, dim=1)


def to_bins(motions: Tensor, num_bins: int) -> Tensor:
    """Index of the bin, 0 to ``num_bins - 1``, that holds each motion; bins of equal width fill [-1, 1]. Keeps the shape."""
    edges = torch.linspace(-1.0, 1.0, num_bins + 1, dtype=torch.float64, device=motions.device)
    return (torch.bucketize(motions.double(), edges, right=True) - 1).clamp(0, num_bins - 1)


def from_bins(bins: Tensor, num_bins: int) -> Tensor:
    """The motion at each bin's centre, float32, shaped like ``bins``."""
    return ((2 * bins + 1).float() / num_bins) - 1.0


def sample_bins(log_probs: Tensor, uniform: Tensor) -> Tensor:
    """One bin per distribution ``[..., num_bins]``, by inverting its CDF at ``uniform`` ``[...]`` in [0, 1]."""
    cumulative = log_probs.double().exp().cumsum(dim=-1)
    bins = torch.searchsorted(cumulative, uniform.double()[..., None], right=True).squeeze(-1)
    return bins.clamp(max=log_probs.shape[-1] - 1)
