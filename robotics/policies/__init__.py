"""Robot policies in LeRobot's form. Importing this package registers their types and processor steps with LeRobot."""

from robotics.policies.building import build_processors, policy_config
from robotics.policies.configuration_gaussian_chunk import GaussianChunkConfig
from robotics.policies.modeling_gaussian_chunk import GaussianChunkPolicy, entropy, log_density, sum_executed

__all__ = [
    "GaussianChunkConfig",
    "GaussianChunkPolicy",
    "build_processors",
    "entropy",
    "log_density",
    "policy_config",
    "sum_executed",
]
