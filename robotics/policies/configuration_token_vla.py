"""Configuration of the action-token policy, in the form that LeRobot registers and saves."""

from __future__ import annotations

from dataclasses import dataclass

from lerobot.configs import PreTrainedConfig

from mmrl.errors import ConfigError
from robotics.policies.vla_config import VlaConfig

POLICY_TYPE = "mmrl_token_vla"


@PreTrainedConfig.register_subclass(POLICY_TYPE)
@dataclass
class TokenVlaConfig(VlaConfig):
    """See `VlaConfig` for the fields of every vision-language-action policy."""

    num_bins: int = 255
    """Bins of a joint's motion, one action token each. An odd number has a bin for holding still."""
    temperature: float = 1.0
    """Logits of sampled decisions are divided by it, in sampling and in their density; demonstrations are learned at 1."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.num_bins < 2:
            raise ConfigError(f"{POLICY_TYPE}: num_bins is {self.num_bins}; expected 2 or more.")
        if self.temperature <= 0:
            raise ConfigError(
                f"{POLICY_TYPE}: temperature is {self.temperature}; expected more than 0 (greedy decisions ignore it)."
            )
