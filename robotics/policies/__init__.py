"""Robot policies in LeRobot's form. Importing this package registers their types and processor steps with LeRobot."""

from robotics.policies.configuration_flow_vla import FlowVlaConfig
from robotics.policies.configuration_gaussian_chunk import GaussianChunkConfig
from robotics.policies.configuration_token_vla import TokenVlaConfig
from robotics.policies.lerobot_configuration_small import SmallPI0Config, SmallPI05Config
from robotics.policies.modeling_gaussian_chunk import GaussianChunkPolicy

__all__ = ["FlowVlaConfig", "GaussianChunkConfig", "GaussianChunkPolicy", "SmallPI0Config", "SmallPI05Config", "TokenVlaConfig"]
