"""A small instructed policy: a Gaussian over chunks of joint motions, with a density that policy gradients can use.

The instruction reaches the network as words in order: a convolution lets each word see its neighbours ("red on blue" is not
"blue on red"), and several learned readers pool them. Each reader asks for one thing of the scene, by attention over the slots
of ``observation.environment_state`` with learned keys. So which word means which object is learned, not handed over. What the
readers find is also shown from the arm's own plane where ``turning_frame`` asks for it.

A decision is a chunk ``u`` ``[H, A]`` of motions in units of ``max_delta``, Gaussian with a learned standard deviation per
joint that does not depend on the observation. Joint positions are the observed position plus the running sum of the motions
(`robotics.policies.motions`). Axes: ``B`` batch, ``H`` chunk, ``A`` joints, ``K`` slots, ``Q`` readers, ``L`` words.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from lerobot.policies.pretrained import PreTrainedPolicy
from lerobot.utils.constants import OBS_ENV_STATE, OBS_LANGUAGE_ATTENTION_MASK, OBS_LANGUAGE_TOKENS, OBS_STATE
from torch import Tensor, nn

from robotics.envs.observation import SLOTS, environment_bounds
from robotics.policies.chunked import ActsInChunks
from robotics.policies.configuration_gaussian_chunk import POLICY_TYPE, GaussianChunkConfig
from robotics.policies.flow import gaussian_entropy, gaussian_log_density
from robotics.policies.motions import decode_motions, encode_motions
from robotics.policies.seam import Decision

_CENTER, _HALF_WIDTH = environment_bounds[:2].mean(axis=1), float(np.ptp(environment_bounds[0])) / 2.0
_BASE = tuple(-_CENTER / _HALF_WIDTH)  # x and y of the axis that the base turns about, normalised as observations are
_OFFSET_GAIN = 4.0  # a normalised offset of 0.1 (three centimetres) should not be a small input


def in_turning_frame(gripper: Tensor, points: Tensor, offsets: Tensor, turns: Tensor) -> Tensor:
    """``[B, 2 + 7 Q]``: the scene in a frame that turns with the base, the same wherever the arm points.

    ``gripper`` is ``[B, 3]``, ``points`` and ``offsets`` (from the gripper) ``[B, Q, 3]``, ``turns`` ``[B, Q, 2]`` cosine and
    sine of four times a yaw.
    """
    base = gripper.new_tensor(_BASE)
    radius = torch.linalg.vector_norm(gripper[:, :2] - base, dim=1, keepdim=True).clamp(min=1e-3)
    cos, sin = ((gripper[:, :2] - base) / radius)[:, None].unbind(dim=2)  # [B, 1]
    cos2, sin2 = cos**2 - sin**2, 2.0 * cos * sin
    cos4, sin4 = cos2**2 - sin2**2, 2.0 * cos2 * sin2
    x, y, z = offsets.unbind(dim=2)
    c, s = turns.unbind(dim=2)
    away = torch.linalg.vector_norm(points[..., :2] - base, dim=2)
    parts = [x * cos + y * sin, y * cos - x * sin, z, away, points[..., 2], c * cos4 + s * sin4, s * cos4 - c * sin4]
    return torch.cat([torch.stack(parts, dim=2).flatten(1), radius, gripper[:, 2:]], dim=1)


def _density(motions: Tensor, mean: Tensor, std: Tensor) -> Tensor:
    """``[B, H]`` log-density of each motion."""
    return gaussian_log_density(motions, mean, std).sum(dim=2)


class _Block(nn.Module):
    """A residual layer; learns where to move far more exactly than a plain network of the same cost."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(nn.functional.silu(self.up(self.norm(x))))


class GaussianChunkPolicy(ActsInChunks, PreTrainedPolicy):
    """See `robotics.policies.seam.ChunkPolicy`; batches come from the preprocessor: numbers in [-1, 1], words as ids."""

    config_class = GaussianChunkConfig
    name = POLICY_TYPE
    observation_keys = (OBS_STATE, OBS_ENV_STATE, OBS_LANGUAGE_TOKENS, OBS_LANGUAGE_ATTENTION_MASK)

    def __init__(self, config: GaussianChunkConfig, **_: Any) -> None:  # LeRobot also passes dataset statistics
        super().__init__(config)
        config.validate_features()
        self.num_joints = config.action_feature.shape[0]
        dim, readers = config.word_dim, config.num_readers
        self.words = nn.Embedding(len(config.vocabulary) + 1, dim, padding_idx=0)
        self.neighbours = nn.Conv1d(dim, dim, kernel_size=3, padding=1)
        self.importance = nn.Linear(dim, readers, bias=False)
        self.query = nn.Linear(dim, dim)
        self.keys = nn.Parameter(torch.randn(len(SLOTS), dim))
        width = config.width
        blocks = [_Block(width) for _ in range(config.num_blocks)]
        entries = self.num_joints + 3 + readers * (8 + dim)
        if config.turning_frame:
            entries += 2 + 7 * readers
        self.trunk = nn.Sequential(nn.Linear(entries, width), *blocks, nn.LayerNorm(width))
        self.head = nn.Linear(width, config.chunk_size * self.num_joints)
        nn.init.normal_(self.head.weight, std=0.01 / math.sqrt(width))  # starts by holding still
        nn.init.zeros_(self.head.bias)
        self.log_std = nn.Parameter(torch.full((self.num_joints,), config.initial_log_std))
        self.reset()

    def distribution(self, batch: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
        """Mean ``[B, H, A]`` and log standard deviation ``[A]`` of the motions ``u``."""
        mean = self.head(self._hidden(batch)).unflatten(1, (-1, self.num_joints))
        return mean, self.log_std.clamp(self.config.min_log_std, self.config.max_log_std)

    def _hidden(self, batch: Mapping[str, Tensor]) -> Tensor:
        """``[B, width]``: the last hidden layer."""
        meanings = self._read(batch[OBS_LANGUAGE_TOKENS], batch[OBS_LANGUAGE_ATTENTION_MASK])  # [B, Q, D]
        scene = batch[OBS_ENV_STATE]
        gripper, slots = scene[:, :3], scene[:, 3 : 3 + 3 * len(SLOTS)].unflatten(1, (-1, 3))  # [B, K, 3]
        yaws = scene[:, 3 + 3 * len(SLOTS) :].unflatten(1, (-1, 2))  # of the first slots, the blocks
        yaws = torch.cat([yaws, yaws.new_zeros(len(yaws), len(SLOTS) - yaws.shape[1], 2)], dim=1)
        scores = self.query(meanings) @ self.keys.T / math.sqrt(self.config.word_dim)
        attention = (self.config.sharpness * scores).softmax(dim=2)  # [B, Q, K]
        points, turns = attention @ slots, attention @ yaws  # [B, Q, 3], [B, Q, 2]
        offsets = _OFFSET_GAIN * (points - gripper[:, None])
        found = torch.cat([points, offsets, turns, meanings], dim=2).flatten(1)
        seen = [batch[OBS_STATE], gripper, found]
        if self.config.turning_frame:
            seen.append(in_turning_frame(gripper, points, offsets, turns))
        return self.trunk(torch.cat(seen, dim=1))

    def _read(self, tokens: Tensor, mask: Tensor) -> Tensor:
        """``[B, Q, D]``: what each reader makes of the instruction; zeros when it knows no word."""
        words = self.words(tokens)  # [B, L, D]
        words = words + torch.tanh(self.neighbours(words.transpose(1, 2))).transpose(1, 2)
        weights = self.importance(words).exp() * mask[..., None]  # [B, L, Q]
        weights = weights / weights.sum(dim=1, keepdim=True).clamp(min=1e-6)
        return weights.transpose(1, 2) @ words

    # What acting and learning ask (`robotics.policies.seam`)

    def noise_shape(self) -> tuple[int, ...]:
        return self.config.chunk_size, self.num_joints

    @torch.no_grad()
    def decide(self, observation: Mapping[str, Tensor], noise: Tensor | None) -> Decision:
        mean, log_std = self.distribution(observation)
        motions = mean if noise is None else mean + log_std.exp() * noise
        chunk = decode_motions(observation[OBS_STATE], motions, self.config.max_delta)
        return Decision(chunk=chunk, record={"motions": motions}, density=_density(motions, mean, log_std.exp()))

    def score(self, observation: Mapping[str, Tensor], record: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
        mean, log_std = self.distribution(observation)
        std = log_std.exp()
        density = _density(record["motions"], mean, std)
        return density, gaussian_entropy(std).sum().expand_as(density)

    def imitate(self, observation: Mapping[str, Tensor], chunk: Tensor, noise: Tensor) -> dict[str, Tensor]:
        return {"motions": encode_motions(observation[OBS_STATE], chunk, self.config.max_delta)}
