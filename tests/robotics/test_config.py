import subprocess
import sys
from pathlib import Path
from typing import get_args

import pytest

from mmrl.config import apply_overrides, read_config, validate
from mmrl.errors import ConfigError
from robotics.config import AnyPolicySection, RoboticsRunConfig

CONFIG = Path(__file__).parents[2] / "configs" / "robotics" / "reach.yaml"


def load(*overrides):
    return validate(apply_overrides(read_config(CONFIG), overrides), RoboticsRunConfig, "reach.yaml")


def test_the_reach_run_validates_and_holds_out_its_evaluation_layouts():
    config = load()
    train, held_out = config.tasks.train, config.tasks.eval
    assert not set(range(train.first, train.first + train.count)) & set(range(held_out.first, held_out.first + held_out.count))
    assert config.evaluation.metric == "success" and config.evaluation.num_tasks >= 100


def test_overlapping_seed_ranges_are_refused_with_both_ranges():
    with pytest.raises(ConfigError, match=r"tasks\.train covers seeds 0 to 4095 and tasks\.eval 4000 to 4499"):
        load("tasks.eval.first=4000")
    load("tasks.eval.first=4096")


def test_executing_more_than_a_chunk_is_refused():
    with pytest.raises(ConfigError, match=r"rollout\.execution_horizon is 5, more than policy\.chunk_size"):
        load("rollout.execution_horizon=5")


def test_noise_outside_its_bounds_is_refused():
    with pytest.raises(ConfigError, match=r"policy\.initial_std is 2\.0; expected min_std"):
        load("policy.initial_std=2.0")


def test_every_key_is_documented():
    models = [RoboticsRunConfig.model_fields[name].annotation for name in ("tasks", "rollout", "demonstrations")]
    models += get_args(get_args(AnyPolicySection)[0])
    assert len(models) > 6
    for model in models:
        assert all(field.description for field in model.model_fields.values())


@pytest.mark.parametrize("name", ["gaussian_chunk", "flow_vla", "token_vla"])
def test_a_policy_is_chosen_by_name(name):
    tree = apply_overrides(read_config(CONFIG), [])
    tree["policy"] = {"name": name, "chunk_size": 6}
    section = validate(tree, RoboticsRunConfig, "reach.yaml").policy
    assert section.name == name and section.chunk_size == 6


def test_an_unknown_policy_is_refused_with_the_known_ones():
    with pytest.raises(ConfigError, match=r"policy.*'transformer'.*gaussian_chunk.*flow_vla"):
        load("policy.name=transformer")


def test_the_config_module_imports_neither_torch_nor_mujoco():
    code = "import robotics.config, sys; print([m for m in ('torch', 'mujoco', 'lerobot') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
