"""Configuration of the Gaussian chunk policy, in the form that LeRobot registers and saves."""

from __future__ import annotations

from dataclasses import dataclass, field

from lerobot.configs import NormalizationMode, PreTrainedConfig
from lerobot.optim import AdamWConfig

from mmrl.errors import ConfigError
from robotics.envs.observation import environment_bounds

POLICY_TYPE = "mmrl_gaussian_chunk"


@PreTrainedConfig.register_subclass(POLICY_TYPE)
@dataclass
class GaussianChunkConfig(PreTrainedConfig):
    """Fields of ``config.json``. ``observation.state`` and ``action`` are joint positions with the same normalisation."""

    chunk_size: int = 4
    """Actions that one look at the observation decides, H."""
    n_action_steps: int = 4
    """How many of them are executed before the next look."""
    max_delta: float = 0.08
    """Furthest that one action moves a joint, as a share of half its range."""
    width: int = 128
    """Width of the trunk."""
    num_blocks: int = 2
    """Residual layers of the trunk."""
    word_dim: int = 16
    """Width of word and object embeddings."""
    num_readers: int = 2
    """Things of the scene that the instruction may name at once, Q."""
    sharpness: float = 1.0
    """Factor of the readers' attention scores. Near 1 every object is seen at first, which learning from rewards alone needs;
    at 10 a reader soon sees one object and none of the others, which cloning needs to be exact."""
    turning_frame: bool = False
    """Show the scene also in a frame that turns with the base: what is learned at one angle serves at all of them."""
    vocabulary: list[str] = field(default_factory=list)
    """Words with an embedding; others are ignored."""
    max_words: int = 16
    """Longer instructions are cut."""
    initial_log_std: float = -0.7
    """Starting value of the exploration noise, natural log, in units of ``max_delta``."""
    min_log_std: float = -3.0
    """The learned noise is not allowed below this."""
    max_log_std: float = 0.0
    """Nor above this."""
    normalization_mapping: dict[str, NormalizationMode] = field(
        default_factory=lambda: {
            "STATE": NormalizationMode.MIN_MAX,
            "ENV": NormalizationMode.MIN_MAX,
            "ACTION": NormalizationMode.MIN_MAX,
        }
    )
    push_to_hub: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 < self.n_action_steps <= self.chunk_size:
            raise ConfigError(
                f"{POLICY_TYPE}: n_action_steps is {self.n_action_steps}; expected 1 to chunk_size ({self.chunk_size})."
            )
        if not self.min_log_std <= self.initial_log_std <= self.max_log_std:
            raise ConfigError(
                f"{POLICY_TYPE}: initial_log_std {self.initial_log_std} is outside [min_log_std, max_log_std] = "
                f"[{self.min_log_std}, {self.max_log_std}]."
            )

    def validate_features(self) -> None:
        """Joint state, the scene's `robotics.envs.observation.observe`, and joint actions of the state's size."""
        state, environment, action = self.robot_state_feature, self.env_state_feature, self.action_feature
        expected = (len(environment_bounds),)
        if (
            state is None
            or environment is None
            or action is None
            or state.shape != action.shape
            or environment.shape != expected
        ):
            raise ConfigError(
                f"{POLICY_TYPE}: inputs are {self.input_features}, outputs {self.output_features}; expected observation.state "
                f"[A], observation.environment_state {list(expected)} and action [A]."
            )

    def get_optimizer_preset(self) -> AdamWConfig:
        return AdamWConfig(lr=1e-3, weight_decay=0.0)

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
