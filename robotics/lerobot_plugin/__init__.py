"""What LeRobot's own programs import to know this project: ``--env.discover_packages_path=robotics.lerobot_plugin``.

Importing it registers the environment type ``mmrl`` and the policy types and processor steps of `robotics.policies`, so that
``lerobot-eval --policy.path=DIR --env.type=mmrl`` runs an exported policy in the arm's scenes.
"""

import importlib
import pkgutil

import robotics.policies
from robotics.lerobot_plugin.env_config import MmrlEnvConfig

for _module in pkgutil.iter_modules(robotics.policies.__path__, "robotics.policies."):
    if "processor_" in _module.name:  # a saved pipeline is read by the names that these register
        importlib.import_module(_module.name)

__all__ = ["MmrlEnvConfig"]
