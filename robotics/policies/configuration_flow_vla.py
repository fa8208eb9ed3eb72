"""Configuration of the flow-matching policy, in the form that LeRobot registers and saves."""

from __future__ import annotations

from dataclasses import dataclass

from lerobot.configs import PreTrainedConfig

from mmrl.errors import ConfigError
from robotics.policies.vla_config import VlaConfig

POLICY_TYPE = "mmrl_flow_vla"


@PreTrainedConfig.register_subclass(POLICY_TYPE)
@dataclass
class FlowVlaConfig(VlaConfig):
    """See `VlaConfig` for the fields of every vision-language-action policy."""

    num_denoising_steps: int = 4
    """Steps from noise to a chunk, K."""
    sde_noise: float = 0.5
    """Strength ``a`` of the one stochastic step of a sampled decision; see `robotics.policies.flow.sde_step`."""

    stochastic_step: str = "any"
    """Which of the steps is the stochastic one: ``any``, drawn for each decision, or ``last``, whose noise reaches the robot
    as it is, while the flow works on that of earlier steps."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.num_denoising_steps < 1:
            raise ConfigError(f"{POLICY_TYPE}: num_denoising_steps is {self.num_denoising_steps}; expected 1 or more.")
        if self.stochastic_step not in ("any", "last"):
            raise ConfigError(f"{POLICY_TYPE}: stochastic_step is {self.stochastic_step!r}; expected any or last.")
        if self.sde_noise <= 0:
            raise ConfigError(
                f"{POLICY_TYPE}: sde_noise is {self.sde_noise}; expected more than 0, or decisions have no density."
            )
