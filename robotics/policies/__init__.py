"""Robot policies in LeRobot's form. Importing this package registers their types and processor steps with LeRobot."""

from robotics.policies.configuration_gaussian_chunk import GaussianChunkConfig
from robotics.policies.modeling_gaussian_chunk import GaussianChunkPolicy

__all__ = ["GaussianChunkConfig", "GaussianChunkPolicy"]
