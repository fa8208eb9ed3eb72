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
_PLACE_GAIN = 3.0  # nor one of a sixth of the image
_PATCH_CHANNELS = 32
_MODULATION_GAIN = 2.0  # the mean of a sentence's words is a small number
_FLAT = 1e-6  # variance below which an attention map counts as flat


def _positions(num: int, width: int) -> nn.Parameter:
    return nn.Parameter(0.1 * torch.randn(num, width))


class InstructedStem(nn.Module):
    """Convolutions over an image's patches, with channels that the instruction scales and shifts.

    The instruction is the mean of its words' embeddings: which things matter, not how they are related. (FiLM, Perez et al.,
    arXiv 1709.07871, used as in RT-1, 2212.06817.) So the maps behind it look for the named thing from the start, instead of
    finding all things first and choosing among them later; `docs/results.md` has what that is worth.
    """

    def __init__(self, in_channels: int, num_halvings: int, num_words: int) -> None:
        super().__init__()
        wide = _PATCH_CHANNELS
        self.words = nn.Embedding(num_words + 1, wide, padding_idx=0)
        self.modulation = nn.Linear(wide, 4 * wide)
        nn.init.zeros_(self.modulation.bias)
        channels = [in_channels, *[wide // 2] * (num_halvings - 1), wide]
        kernels = [5, *[3] * (num_halvings - 1)]
        self.halvings = nn.ModuleList(
            nn.Conv2d(before, after, kernel, stride=2, padding=kernel // 2, padding_mode="replicate")
            for before, after, kernel in zip(channels, channels[1:], kernels)
        )
        self.around = nn.Conv2d(wide, wide, kernel_size=3, padding=1, padding_mode="replicate")
        self.to(memory_format=torch.channels_last)  # nearly twice as fast on CPUs

    def forward(self, image: Tensor, tokens: Tensor, mask: Tensor) -> Tensor:
        """``[B, channels, rows, columns]`` of patches, given images in [-1, 1] and the instruction's word ids."""
        present = mask.to(image.dtype)[..., None]
        meaning = (self.words(tokens) * present).sum(dim=1) / present.sum(dim=1).clamp(min=1.0)
        modulation = _MODULATION_GAIN * self.modulation(meaning)
        scale, shift, scale_around, shift_around = modulation[..., None, None].chunk(4, dim=1)
        x = image.contiguous(memory_format=torch.channels_last)
        for conv in self.halvings[:-1]:
            x = conv(x).relu()
        x = (self.halvings[-1](x).relu() * (1.0 + scale)) + shift
        return x + (self.around(x).relu() * (1.0 + scale_around) + shift_around)


class ImageTokens(nn.Module):
    """A camera's image as tokens, each what one learned attention map over its patches finds: where, and how it looks there.

    The maps are spatial softmaxes (Levine et al., arXiv 1504.00702), pooled as in TokenLearner (2106.11297). They learn where
    things are from far fewer images than a token per patch with a position embedding does, and fewer tokens cost less.
    """

    def __init__(
        self, key: str, shape: tuple[int, int, int], *, patch_size: int, num_tokens: int, num_words: int, width: int
    ) -> None:
        super().__init__()
        self.key, self.shape = key, tuple(shape)
        self.stem = InstructedStem(shape[0], patch_size.bit_length() - 1, num_words)
        self.maps = nn.Conv2d(_PATCH_CHANNELS, num_tokens, kernel_size=1)
        self.log_sharpness = nn.Parameter(torch.ones(num_tokens, 1))
        self.place, self.look = nn.Linear(2, width), nn.Linear(_PATCH_CHANNELS, width, bias=False)
        self.names = nn.Parameter(torch.randn(num_tokens, width))
        axes = [torch.linspace(-1.0, 1.0, pixels // patch_size) for pixels in shape[1:]]
        self.register_buffer("places", torch.cartesian_prod(*axes), persistent=False)  # [patches, 2], row and column

    def forward(self, observation: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
        """Tokens ``[B, N, W]`` and ``[B, N]`` True; images are ``[B, 3, height, width]`` floats in [0, 1]."""
        image = observation[self.key]
        if tuple(image.shape[1:]) != self.shape or not image.is_floating_point():
            raise DataError(
                f"{self.key}: images are {image.dtype} {list(image.shape[1:])}; expected floats in [0, 1] of shape "
                f"{list(self.shape)}, the size that the policy was built for. Render that size, or build another policy."
            )
        patches = self.stem(2.0 * image - 1.0, observation[OBS_LANGUAGE_TOKENS], observation[OBS_LANGUAGE_ATTENTION_MASK])
        scores = self.maps(patches).flatten(2)
        # In units of the image's own spread the rare patches, which hold things, stand out from the first step on.
        scores = nn.functional.layer_norm(scores, scores.shape[2:], eps=_FLAT)
        attention = (self.log_sharpness.exp() * scores).softmax(dim=2)  # [B, N, patches]
        place, look = attention @ self.places, attention @ patches.flatten(2).transpose(1, 2)
        tokens = self.place(_PLACE_GAIN * place) + self.look(look) + self.names
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
