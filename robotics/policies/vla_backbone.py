"""A small transformer in π0's form: a prefix that reads the observation once, and an action expert that looks at it.

Prefix tokens (images, words, objects, joints) see each other and never the actions, so their keys and values serve every
denoising step. Action tokens see the prefix and each other. Axes: ``B`` batch, ``P`` prefix tokens, ``H`` chunk, ``W`` width.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from mmrl.errors import DataError
from robotics.policies.vla_config import VlaConfig
from robotics.policies.vla_encoders import ImageTokens, SlotTokens, StateToken, WordTokens
from robotics.policies.vla_layers import KeysOnly, KeysValues, Layer, block_mask, norm


@dataclass(frozen=True)
class Prefix:
    """The observation as the action expert sees it."""

    layers: tuple[KeysValues, ...]
    """Keys and values per layer."""
    suffix_mask: Tensor
    """``[B, H, P + H]`` True where action tokens may attend."""


class VlaBackbone(nn.Module):
    """``condition_width`` is that of the expert's condition (a flow's time); ``None`` for an expert without one."""

    def __init__(self, config: VlaConfig, condition_width: int | None) -> None:
        super().__init__()
        self.keys = config.observation_keys
        self.chunk_size = config.chunk_size
        width, heads, ratio = config.width, config.num_heads, config.mlp_ratio
        encoders: list[nn.Module] = [
            ImageTokens(
                key, feature.shape, patch_size=config.patch_size, num_tokens=config.image_tokens,
                num_words=len(config.vocabulary), width=width,
            )
            for key, feature in config.image_features.items()
        ]  # fmt: skip
        encoders.append(WordTokens(len(config.vocabulary), config.max_words, width))
        if config.env_state_feature is not None:
            encoders.append(SlotTokens(config.num_slots, config.num_yaws, width))
        encoders.append(StateToken(config.action_feature.shape[0], width))
        self.encoders = nn.ModuleList(encoders)
        self.prefix_layers = nn.ModuleList(Layer(width, heads, ratio) for _ in range(config.depth - 1))
        self.prefix_end = KeysOnly(width, heads)
        self.expert_layers = nn.ModuleList(Layer(width, heads, ratio, condition_width) for _ in range(config.depth))
        self.expert_norm = norm(width, condition_width)

    def read(self, observation: Mapping[str, Tensor]) -> Prefix:
        """Everything that the action expert needs of a preprocessed batch."""
        missing = [key for key in self.keys if key not in observation]
        if missing:
            raise DataError(f"observation lacks {', '.join(missing)}; it has {', '.join(sorted(observation))}.")
        parts = [encoder(observation) for encoder in self.encoders]
        tokens = torch.cat([part for part, _ in parts], dim=1)
        present = torch.cat([part for _, part in parts], dim=1)
        num_prefix = tokens.shape[1]
        starts_block = torch.zeros(num_prefix + self.chunk_size, dtype=torch.int64, device=tokens.device)
        starts_block[num_prefix] = 1
        mask = block_mask(nn.functional.pad(present, (0, self.chunk_size), value=True), starts_block)
        mask = mask | torch.eye(mask.shape[1], dtype=torch.bool, device=mask.device)  # an absent token sees itself, not nothing
        prefix_mask = mask[:, :num_prefix, :num_prefix]
        layers: list[KeysValues] = []
        for layer in self.prefix_layers:
            tokens, keys_values = layer(tokens, prefix_mask)
            layers.append(keys_values)
        layers.append(self.prefix_end(tokens))
        return Prefix(layers=tuple(layers), suffix_mask=mask[:, num_prefix:])

    def act(self, prefix: Prefix, actions: Tensor, condition: Tensor | None = None) -> Tensor:
        """Action tokens ``[B, H, W]`` after they looked at the prefix and each other, given ``condition`` ``[B, C]``."""
        for layer, keys_values in zip(self.expert_layers, prefix.layers, strict=True):
            actions, _ = layer(actions, prefix.suffix_mask, other=keys_values, condition=condition)
        normalised, _ = self.expert_norm(actions, condition)
        return normalised
