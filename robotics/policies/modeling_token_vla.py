"""A policy that decides action tokens: OpenVLA-OFT's parallel decoding, with SimpleVLA-RL's density.

Each joint's motion (`robotics.policies.motions`) is one of ``num_bins`` tokens. All tokens of a chunk come from one pass, so
they are independent given the observation, and the log-probability of an action is the sum over its joints.
Axes: ``B`` batch, ``H`` chunk, ``A`` joints.

Records hold ``tokens`` ``[B, H, A]`` (bin indices) and ``temperature`` ``[B]``, that of the draw; 1 for demonstrations.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from lerobot.policies.pretrained import PreTrainedPolicy
from lerobot.utils.constants import OBS_STATE
from torch import Tensor, nn

from robotics.policies.chunked import ActsInChunks
from robotics.policies.configuration_token_vla import POLICY_TYPE, TokenVlaConfig
from robotics.policies.flow import normal_to_uniform, per_row
from robotics.policies.motions import decode_motions, encode_motions, from_bins, sample_bins, to_bins
from robotics.policies.seam import Decision, Observation
from robotics.policies.vla_backbone import VlaBackbone


def token_log_probs(logits: Tensor, temperature: Tensor) -> Tensor:
    """Log-probabilities ``[B, ..., num_bins]`` of logits of that shape, each row divided by its ``temperature`` ``[B]``."""
    return (logits / per_row(temperature, logits)).log_softmax(dim=-1)


def action_log_prob(log_probs: Tensor, tokens: Tensor) -> Tensor:
    """Log-probability ``[B, H]`` of each action: the sum over its joints' tokens ``[B, H, A]``."""
    return log_probs.gather(-1, tokens[..., None]).squeeze(-1).sum(dim=-1)


class TokenVlaPolicy(ActsInChunks, PreTrainedPolicy):
    """See `robotics.policies.seam.ChunkPolicy`."""

    config_class = TokenVlaConfig
    name = POLICY_TYPE

    def __init__(self, config: TokenVlaConfig, **_: Any) -> None:  # LeRobot also passes dataset statistics
        super().__init__(config)
        config.validate_features()
        self.observation_keys = config.observation_keys
        self.num_joints = config.action_feature.shape[0]
        self.backbone = VlaBackbone(config, condition_width=None)
        self.queries = nn.Parameter(torch.randn(config.chunk_size, config.width))
        self.head = nn.Linear(config.width, self.num_joints * config.num_bins)
        self.reset()

    def noise_shape(self) -> tuple[int, ...]:
        """One number per token."""
        return (self.config.chunk_size, self.num_joints)

    @torch.no_grad()
    def decide(self, observation: Observation, noise: Tensor | None) -> Decision:
        """The decision without noise takes the most likely tokens."""
        state = observation[OBS_STATE]
        temperature = state.new_full((len(state),), self.config.temperature)
        log_probs = token_log_probs(self._logits(observation), temperature)
        tokens = log_probs.argmax(dim=-1) if noise is None else sample_bins(log_probs, normal_to_uniform(noise))
        chunk = decode_motions(state, from_bins(tokens, self.config.num_bins), self.config.max_delta)
        return Decision(chunk, {"tokens": tokens, "temperature": temperature}, action_log_prob(log_probs, tokens))

    def score(self, observation: Observation, record: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
        """Log-probabilities and entropies at the record's temperature."""
        log_probs = token_log_probs(self._logits(observation), record["temperature"])
        entropy = -(log_probs.exp() * log_probs).sum(dim=(2, 3))
        return action_log_prob(log_probs, record["tokens"]), entropy

    def imitate(self, observation: Observation, chunk: Tensor, noise: Tensor) -> dict[str, Tensor]:
        """The tokens of the demonstrated motions; uses no noise."""
        state = observation[OBS_STATE]
        motions = encode_motions(state, chunk, self.config.max_delta)
        return {"tokens": to_bins(motions, self.config.num_bins), "temperature": state.new_ones(len(state))}

    def _logits(self, observation: Observation) -> Tensor:
        """``[B, H, A, num_bins]``, float32."""
        queries = self.queries.expand(len(observation[OBS_STATE]), -1, -1)
        tokens = self.backbone.act(self.backbone.read(observation), queries)
        return self.head(tokens).unflatten(2, (self.num_joints, -1)).float()
