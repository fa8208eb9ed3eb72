"""pi0 and pi0.5 at any size, in the form that LeRobot registers and saves.

LeRobot's own types know the two Gemma sizes of the released models. These types are the same policies with the sizes in their
configuration; a directory of theirs is loaded by LeRobot wherever this package is imported.
"""

from __future__ import annotations

from dataclasses import dataclass

from lerobot.configs import PreTrainedConfig
from lerobot.policies.pi0.configuration_pi0 import PI0Config
from lerobot.policies.pi05.configuration_pi05 import PI05Config


@dataclass
class _Sizes:
    """Fields of ``config.json`` besides LeRobot's."""

    width: int = 64
    """Of the language model and of the action expert."""
    depth: int = 2
    """Layers of both."""
    mlp_dim: int = 128
    """Hidden width of their feed-forward parts."""
    head_dim: int = 8
    """Of the eight attention heads, a number that LeRobot's code fixes."""
    vision_width: int = 48
    """Of the image encoder."""
    vision_depth: int = 2
    """Its layers."""
    vision_heads: int = 4
    """Its attention heads."""
    vision_mlp_dim: int = 96
    """Hidden width of its feed-forward parts."""
    patch_size: int = 16
    """Pixels of an image token's edge."""
    vocab_size: int = 1024
    """Tokens of the language model."""
    tokenizer: str = ""
    """Folder of the tokenizer."""


@PreTrainedConfig.register_subclass("mmrl_small_pi0")
@dataclass
class SmallPI0Config(PI0Config, _Sizes):
    """pi0."""


@PreTrainedConfig.register_subclass("mmrl_small_pi05")
@dataclass
class SmallPI05Config(PI05Config, _Sizes):
    """pi0.5."""
