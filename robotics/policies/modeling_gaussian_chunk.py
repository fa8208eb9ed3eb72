"""A small instructed policy: a Gaussian over chunks of joint motions, with a density that policy gradients can use.

The instruction reaches the network as words. Their embeddings are averaged, weighted by a learned importance, into a query that
attends over the objects of the scene; each object's key is a learned embedding of its place in
``observation.environment_state``. So which word means which object is learned from reward, not handed over. Word order is not
seen: "the red one, not the blue one" is beyond it.

A decision is a chunk ``u`` ``[H, A]`` of motions in units of ``max_delta``, Gaussian with a learned standard deviation per
joint that does not depend on the observation. `decode` turns it into joint positions: the observed position plus the running
sum of the motions. The density is that of ``u``. Axes: ``B`` batch, ``H`` chunk, ``A`` joints, ``K`` objects, ``L`` words.
"""

from __future__ import annotations

import math
from collections import deque
from itertools import pairwise
from typing import Any

import torch
from lerobot.policies.pretrained import PreTrainedPolicy
from lerobot.utils.constants import ACTION, OBS_ENV_STATE, OBS_LANGUAGE_ATTENTION_MASK, OBS_LANGUAGE_TOKENS, OBS_STATE
from torch import Tensor, nn

from robotics.policies.configuration_gaussian_chunk import POLICY_TYPE, GaussianChunkConfig

_LOG_2PI = math.log(2.0 * math.pi)
_OFFSET_GAIN = 4.0  # a normalised offset of 0.1 (three centimetres) should not be a small input


def log_density(motions: Tensor, mean: Tensor, log_std: Tensor) -> Tensor:
    """Log-density of each motion, ``[..., H]``, given motions and mean ``[..., H, A]`` and log standard deviation ``[A]``."""
    return (-0.5 * ((motions - mean) / log_std.exp()).square() - log_std - 0.5 * _LOG_2PI).sum(dim=-1)


def entropy(log_std: Tensor) -> Tensor:
    """Entropy of one motion in nats, scalar, given ``[A]``."""
    return (log_std + 0.5 * (1.0 + _LOG_2PI)).sum()


def sum_executed(per_motion: Tensor, executed: Tensor) -> Tensor:
    """Sum ``[..., H]`` over the first ``executed`` ``[...]`` motions of each chunk.

    Motions that were decided and never executed changed nothing, so they are not part of the decision.
    """
    taken = torch.arange(per_motion.shape[-1], device=per_motion.device) < executed[..., None]
    return torch.where(taken, per_motion, 0.0).sum(dim=-1)


class GaussianChunkPolicy(PreTrainedPolicy):
    """Batches are dicts with LeRobot's names, after the preprocessor: states normalised to [-1, 1], words as ids."""

    config_class = GaussianChunkConfig
    name = POLICY_TYPE

    def __init__(self, config: GaussianChunkConfig, **_: Any) -> None:  # LeRobot also passes dataset statistics
        super().__init__(config)
        config.validate_features()
        self.num_joints = config.action_feature.shape[0]
        num_objects = config.env_state_feature.shape[0] // 3 - 1
        self.words = nn.Embedding(len(config.vocabulary) + 1, config.word_dim, padding_idx=0)
        self.importance = nn.Linear(config.word_dim, 1, bias=False)
        self.query = nn.Linear(config.word_dim, config.word_dim)
        self.keys = nn.Parameter(torch.randn(num_objects, config.word_dim))
        widths = [self.num_joints + 9 + config.word_dim, *config.hidden_sizes]
        layers: list[nn.Module] = []
        for width, next_width in pairwise(widths):
            layers += [nn.Linear(width, next_width), nn.Tanh()]
        self.trunk = nn.Sequential(*layers)
        self.head = nn.Linear(widths[-1], config.chunk_size * self.num_joints)
        nn.init.normal_(self.head.weight, std=0.01 / math.sqrt(widths[-1]))  # starts by holding still
        nn.init.zeros_(self.head.bias)
        self.log_std = nn.Parameter(torch.full((self.num_joints,), config.initial_log_std))
        self.reset()

    # What the adapter asks

    def distribution(self, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        """Mean ``[B, H, A]`` and log standard deviation ``[A]`` of the motions ``u``."""
        words, mask = self.words(batch[OBS_LANGUAGE_TOKENS]), batch[OBS_LANGUAGE_ATTENTION_MASK]  # [B, L, D], [B, L]
        weights = self.importance(words).squeeze(2).exp() * mask
        weights = weights / weights.sum(dim=1, keepdim=True).clamp(min=1e-6)  # no known word: all zero
        meaning = (weights[..., None] * words).sum(dim=1)  # [B, D]
        points = batch[OBS_ENV_STATE].unflatten(1, (-1, 3))  # [B, 1 + K, 3]
        gripper, objects = points[:, 0], points[:, 1:]
        attention = (self.query(meaning) @ self.keys.T).softmax(dim=1)  # [B, K]
        goal = (attention[..., None] * objects).sum(dim=1)  # [B, 3]
        features = [batch[OBS_STATE], gripper, goal, _OFFSET_GAIN * (goal - gripper), meaning]
        mean = self.head(self.trunk(torch.cat(features, dim=1))).unflatten(1, (-1, self.num_joints))
        return mean, self.log_std.clamp(self.config.min_log_std, self.config.max_log_std)

    def decode(self, state: Tensor, motions: Tensor) -> Tensor:
        """Normalised joint positions ``[B, H, A]``: ``state`` ``[B, A]`` plus the running sum of motions clipped to [-1, 1]."""
        path = state[:, None] + self.config.max_delta * motions.clamp(-1.0, 1.0).cumsum(dim=1)
        return path.clamp(-1.0, 1.0)

    def encode(self, state: Tensor, positions: Tensor) -> Tensor:
        """Motions ``[B, H, A]`` that `decode` turns into normalised ``positions`` (when none is faster than ``max_delta``)."""
        before = torch.cat([state[:, None], positions[:, :-1]], dim=1)
        return ((positions - before) / self.config.max_delta).clamp(-1.0, 1.0)

    # What LeRobot asks

    def reset(self) -> None:
        self._queue: deque[Tensor] = deque()

    def get_optim_params(self) -> list[nn.Parameter]:
        return list(self.parameters())

    def forward(self, batch: dict[str, Tensor]) -> tuple[Tensor, dict[str, float]]:
        """Behaviour cloning: mean negative log-density per motion and joint of the recorded ``action`` ``[B, H, A]``."""
        motions = self.encode(batch[OBS_STATE], batch[ACTION])
        loss = -log_density(motions, *self.distribution(batch)).mean() / self.num_joints
        return loss, {"negative_log_density": loss.item()}

    @torch.no_grad()
    def predict_action_chunk(self, batch: dict[str, Tensor], **_: Any) -> Tensor:
        """The most likely chunk, as normalised joint positions ``[B, H, A]``."""
        mean, _ = self.distribution(batch)
        return self.decode(batch[OBS_STATE], mean)

    @torch.no_grad()
    def select_action(self, batch: dict[str, Tensor], **_: Any) -> Tensor:
        """The next normalised joint positions ``[B, A]``; looks at the observation once per ``n_action_steps`` calls."""
        if not self._queue:
            chunk = self.predict_action_chunk(batch)
            self._queue.extend(chunk[:, : self.config.n_action_steps].unbind(dim=1))
        return self._queue.popleft()
