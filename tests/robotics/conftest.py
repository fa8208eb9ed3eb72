from pathlib import Path

import pytest
import torch

from mmrl.config import apply_overrides, read_config, validate
from robotics.config import RoboticsRunConfig
from robotics.envs.families import build_family

CONFIG = Path(__file__).parents[2] / "configs" / "robotics" / "reach.yaml"


@pytest.fixture(scope="session", autouse=True)
def _one_torch_thread():
    torch.set_num_threads(1)


@pytest.fixture
def reach():
    return build_family("reach")


@pytest.fixture(scope="session")
def make_adapter():
    """Build the adapter of configs/robotics/reach.yaml with overrides."""
    from robotics.adapter import build_adapter

    def make(*overrides):
        tree = apply_overrides(read_config(CONFIG), overrides)
        return build_adapter(validate(tree, RoboticsRunConfig, str(CONFIG)))

    return make


@pytest.fixture(scope="session")
def adapter(make_adapter):
    return make_adapter()
