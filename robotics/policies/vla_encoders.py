"""Observations as tokens. An encoder reads some keys of a preprocessed batch and returns tokens and which are present.

Axes: ``B`` batch, ``N`` tokens of an encoder, ``W`` width.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from lerobot.utils.constants import OBS_ENV_STATE, OBS_LANGUAGE_ATTENTION_MASK, OBS_LANGUAGE_TOKENS, OBS_STATE
from torch import Tensor, nn

from mmrl.errors import DataError

_OFFSET_GAIN = 4.0  # a normalised offset of 0.1 (three centimetres) should not be a small input


def _positions(num: int, width: int) -> nn.Parameter:
    return nn.Parameter(0.1 * torch.randn(num, width))


class ImageTokens(nn.Module):
    """One token per patch of a camera's image, through a convolutional stem that halves the resolution until patches remain."""

    def __init__(self, key: str, shape: tuple[int, int, int], *, patch_size: int, width: int) -> None:
        super().__init__()
        self.key, self.shape = key, tuple(shape)
        num_halvings = patch_size.bit_length() - 1
        layers: list[nn.Module] = []
        channels = shape[0]
        for halving in range(num_halvings):
            wider = max(8, width >> (num_halvings - halving))
            layers += [nn.Conv2d(channels, wider, kernel_size=3, stride=2, padding=1), nn.GroupNorm(1, wider), nn.GELU("tanh")]
            channels = wider
        self.stem = nn.Sequential(*layers, nn.Conv2d(channels, width, kernel_size=1))
        self.rows = _positions(shape[1] // patch_size, width)
        self.columns = _positions(shape[2] // patch_size, width)

    def forward(self, observation: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
        """Tokens ``[B, N, W]`` and ``[B, N]`` True; images are ``[B, 3, height, width]`` floats in [0, 1]."""
        image = observation[self.key]
        if tuple(image.shape[1:]) != self.shape or not image.is_floating_point():
            raise DataError(
                f"{self.key}: images are {image.dtype} {list(image.shape[1:])}; expected floats in [0, 1] of shape "
                f"{list(self.shape)}, the size that the policy was built for. Render that size, or build another policy."
            )
        grid = self.stem(2.0 * image - 1.0).permute(0, 2, 3, 1)
        tokens = (grid + self.rows[:, None] + self.columns).flatten(1, 2)
        return tokens, tokens.new_ones(tokens.shape[:2], dtype=torch.bool)


class WordTokens(nn.Module):
    """One token per word of the instruction, in order."""

    def __init__(self, num_words: int, max_words: int, width: int) -> None:
        super().__init__()
        self.words = nn.Embedding(num_words + 1, width, padding_idx=0)
        self.positions = _positions(max_words, width)

    def forward(self, observation: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
        """Tokens ``[B, max_words, W]``, present where there is a word."""
        tokens = self.words(observation[OBS_LANGUAGE_TOKENS]) + self.positions
        return tokens, observation[OBS_LANGUAGE_ATTENTION_MASK].bool()


class SlotTokens(nn.Module):
    """One token for the gripper and one per object slot: where it is, how that differs from the gripper, how it is turned."""

    def __init__(self, num_slots: int, num_yaws: int, width: int) -> None:
        super().__init__()
        self.num_slots, self.num_yaws = num_slots, num_yaws
        self.place = nn.Linear(6, width)
        self.turn = nn.Linear(2, width, bias=False) if num_yaws else None
        self.names = nn.Parameter(torch.randn(1 + num_slots, width))

    def forward(self, observation: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
        """Tokens ``[B, 1 + num_slots, W]``, all present (a missing object has its own place)."""
        vector = observation[OBS_ENV_STATE]
        sizes = (3 + 3 * self.num_slots, 2 * self.num_yaws)
        if vector.shape[1] != sum(sizes):
            raise DataError(f"{OBS_ENV_STATE}: has {vector.shape[1]} entries; the policy was built for {sum(sizes)}.")
        points, yaws = vector.split(sizes, dim=1)
        points = points.unflatten(1, (-1, 3))
        tokens = self.place(torch.cat([points, _OFFSET_GAIN * (points - points[:, :1])], dim=2)) + self.names
        if self.turn is not None:
            turned = self.turn(yaws.unflatten(1, (-1, 2)))
            tokens = tokens + nn.functional.pad(turned, (0, 0, 1, self.num_slots - self.num_yaws))
        return tokens, tokens.new_ones(tokens.shape[:2], dtype=torch.bool)


class StateToken(nn.Module):
    """One token for the joints."""

    def __init__(self, num_joints: int, width: int) -> None:
        super().__init__()
        self.joints = nn.Linear(num_joints, width)

    def forward(self, observation: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
        """Token ``[B, 1, W]``, present."""
        token = self.joints(observation[OBS_STATE])[:, None]
        return token, token.new_ones(token.shape[:2], dtype=torch.bool)
