"""What the configurations of the vision-language-action policies share."""

from __future__ import annotations

from dataclasses import dataclass, field

from lerobot.configs import NormalizationMode, PreTrainedConfig
from lerobot.optim import AdamWConfig
from lerobot.utils.constants import OBS_ENV_STATE, OBS_LANGUAGE_ATTENTION_MASK, OBS_LANGUAGE_TOKENS, OBS_STATE

from mmrl.errors import ConfigError


@dataclass
class VlaConfig(PreTrainedConfig):
    """Fields of ``config.json``. ``observation.state`` and ``action`` are joint positions with the same normalisation."""

    chunk_size: int = 8
    """Actions that one look at the observation decides, H."""
    n_action_steps: int = 8
    """How many of them are executed before the next look."""
    max_delta: float = 0.08
    """Furthest that one action moves a joint, as a share of half its range."""
    vocabulary: list[str] = field(default_factory=list)
    """Words with an embedding; others are ignored."""
    max_words: int = 16
    """Longer instructions are cut."""
    num_slots: int = 8
    """Objects in ``observation.environment_state``, after the gripper: three numbers each."""
    num_yaws: int = 4
    """How many of the slots, the first ones, also have two numbers of orientation at the end of the vector."""
    width: int = 128
    """Width of tokens."""
    depth: int = 3
    """Transformer layers."""
    num_heads: int = 4
    """Attention heads; they share the width."""
    mlp_ratio: int = 2
    """Hidden width of the feed-forward parts, in token widths."""
    patch_size: int = 4
    """Pixels of an image patch's edge; a power of two, and the image's edges are multiples of it."""
    image_tokens: int = 32
    """Tokens per camera."""
    normalization_mapping: dict[str, NormalizationMode] = field(
        default_factory=lambda: {
            "STATE": NormalizationMode.MIN_MAX,
            "ENV": NormalizationMode.MIN_MAX,
            "ACTION": NormalizationMode.MIN_MAX,
            "VISUAL": NormalizationMode.IDENTITY,
        }
    )
    push_to_hub: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 < self.n_action_steps <= self.chunk_size:
            raise ConfigError(
                f"{self.type}: n_action_steps is {self.n_action_steps}; expected 1 to chunk_size ({self.chunk_size})."
            )
        if self.depth < 1:
            raise ConfigError(f"{self.type}: depth is {self.depth}; expected 1 or more layers.")
        if self.width % self.num_heads:
            raise ConfigError(f"{self.type}: width {self.width} is not a multiple of num_heads ({self.num_heads}).")
        if self.patch_size < 2 or self.patch_size & (self.patch_size - 1):
            raise ConfigError(f"{self.type}: patch_size is {self.patch_size}; expected a power of two, 2 or more.")
        if self.image_tokens < 1:
            raise ConfigError(f"{self.type}: image_tokens is {self.image_tokens}; expected 1 or more.")

    @property
    def environment_size(self) -> int:
        """Entries of ``observation.environment_state``."""
        return 3 + 3 * self.num_slots + 2 * self.num_yaws

    @property
    def observation_keys(self) -> tuple[str, ...]:
        """Keys of the preprocessed batch that the policy reads."""
        environment = (OBS_ENV_STATE,) if self.env_state_feature else ()
        return (OBS_STATE, *environment, *self.image_features, OBS_LANGUAGE_TOKENS, OBS_LANGUAGE_ATTENTION_MASK)

    def validate_features(self) -> None:
        """Joint state and actions of one size; object positions, images or both, of the sizes that the fields above give."""
        inputs, outputs = self.input_features or {}, self.output_features or {}
        state, action = self.robot_state_feature, self.action_feature
        environment, images = self.env_state_feature, self.image_features
        problem = None
        if state is None or action is None or state.shape != action.shape:
            problem = "observation.state [A] and action [A] are needed"
        elif environment is None and not images:
            problem = "observation.environment_state or an image is needed"
        elif environment is not None and tuple(environment.shape) != (self.environment_size,):
            problem = f"observation.environment_state must be [3 + 3 num_slots + 2 num_yaws] = [{self.environment_size}]"
        else:
            for name, image in images.items():
                if (
                    len(image.shape) != 3
                    or image.shape[0] != 3
                    or any(n % self.patch_size or n < 2 * self.patch_size for n in image.shape[1:])
                ):
                    problem = f"{name} must be [3, height, width] with edges of two or more whole patches of {self.patch_size}"
        if problem:
            given = " | ".join(
                ", ".join(f"{name} {list(feature.shape)}" for name, feature in features.items()) or "none"
                for features in (inputs, outputs)
            )
            raise ConfigError(f"{self.type}: {problem}; inputs | outputs are: {given}.")

    def get_optimizer_preset(self) -> AdamWConfig:
        return AdamWConfig(lr=3e-4, weight_decay=0.01)

    def get_scheduler_preset(self) -> None:
        return None

    @property
    def observation_delta_indices(self) -> None:
        return None

    @property
    def action_delta_indices(self) -> list[int]:
        return list(range(self.chunk_size))

    @property
    def reward_delta_indices(self) -> None:
        return None
