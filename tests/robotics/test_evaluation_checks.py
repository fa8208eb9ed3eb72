"""A policy that means something else by its numbers is refused before the first episode (cases P3 to P6)."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from lerobot.configs import FeatureType, PolicyFeature
from safetensors.torch import load_file, save_file

from mmrl.config import read_config, validate
from mmrl.errors import ConfigError, DataError
from robotics.adapter import build_adapter
from robotics.assets import sim_asset
from robotics.checkpoints import METADATA
from robotics.config import RoboticsRunConfig
from robotics.envs.physics import ArmPhysics
from robotics.evaluation import Plan, run_attempts
from robotics.evaluation_actors import ActorSpec, open_actor
from robotics.evaluation_checks import check_features, gripper_self_test
from robotics.evaluation_policy import resample_chunk
from robotics.policies.configuration_gaussian_chunk import GaussianChunkConfig

CONFIG = Path(__file__).parents[2] / "configs" / "robotics" / "reach.yaml"
STATE = "policy_preprocessor_step_4_normalizer_processor.safetensors"
ACTION = "policy_postprocessor_step_0_unnormalizer_processor.safetensors"


@pytest.fixture(scope="module")
def saved(tmp_path_factory, adapter):
    directory = tmp_path_factory.mktemp("saved") / "policy"
    adapter.save_policy(adapter.build_policy(), directory)
    return directory


@pytest.fixture
def directory(saved, tmp_path):
    return shutil.copytree(saved, tmp_path / "policy")


def declare(directory, **entries):
    path = directory / METADATA
    path.write_text(json.dumps({**json.loads(path.read_text()), **entries}))


def set_range(directory, file, key, bounds):
    tensors = load_file(directory / file)
    low, high = torch.tensor(bounds, dtype=torch.float32).T.contiguous()
    tensors[f"{key}.min"], tensors[f"{key}.max"] = low, high.clone()
    save_file(tensors, directory / file)


def opened(directory, on_notice=lambda text: None, **changes):
    return open_actor(ActorSpec(source=str(directory), **changes), on_notice=on_notice)


def config(**inputs):
    kinds = {"state": FeatureType.STATE, "environment_state": FeatureType.ENV}
    features = {
        f"observation.{name.replace('__', '.')}": PolicyFeature(type=kinds.get(name, FeatureType.VISUAL), shape=shape)
        for name, shape in inputs.items()
    }
    return GaussianChunkConfig(
        device="cpu", input_features=features, output_features={"action": PolicyFeature(type=FeatureType.ACTION, shape=(6,))}
    )


def save_flow_vla(directory, **policy):
    tree = read_config(CONFIG)
    tree["policy"] = {"name": "flow_vla", **policy}
    adapter = build_adapter(validate(tree, RoboticsRunConfig, str(CONFIG)))
    adapter.save_policy(adapter.build_policy(), directory)


# P3


def test_an_unknown_camera_is_refused_with_both_lists_and_served_when_named():
    wanted = config(state=(6,), images__wrist_image=(3, 64, 64), images__image2=(3, 32, 48))
    message = (
        r"the policy reads observation\.state \[6\], observation\.images\.wrist_image \[3, 64, 64\].*the environment gives "
        r"observation\.state \[6\].*observation\.images\.scene of any size.*images\.wrist_image, .*image2 cannot be served"
    )
    with pytest.raises(ConfigError, match=message):
        check_features(wanted, {})
    with pytest.raises(ConfigError, match=r"images\.image2 cannot be served"):
        check_features(wanted, {"wrist": "wrist_image"})
    assert check_features(wanted, {"wrist": "wrist_image", "observation.images.scene": "observation.images.image2"}) == {
        "observation.state": "observation.state",
        "observation.images.wrist_image": "observation.images.wrist",
        "observation.images.image2": "observation.images.scene",
    }


def test_no_features_at_all_are_not_a_match():
    with pytest.raises(ConfigError, match=r"policy reads nothing.*policy without inputs"):
        check_features(config(), {})


def test_a_camera_that_the_policy_fills_in_itself_is_not_asked_for():
    assert set(check_features(config(state=(6,), images__empty_camera_0=(3, 8, 8)), {})) == {"observation.state"}


def test_other_shapes_and_other_commands_are_refused():
    with pytest.raises(ConfigError, match=r"environment_state differs in shape: \[12\] and \[35\]"):
        check_features(config(environment_state=(12,)), {})
    other = config(state=(6,))
    other.output_features = {"action": PolicyFeature(type=FeatureType.ACTION, shape=(7,))}
    with pytest.raises(ConfigError, match=r"commands action \[7\]; the arm takes \[6\]"):
        check_features(other, {})
    with pytest.raises(ConfigError, match="environment gives no front"):
        check_features(config(state=(6,)), {"front": "image2"})


def test_a_renamed_camera_reaches_the_policy_in_the_size_that_it_asks_for(tmp_path):
    save_flow_vla(tmp_path, cameras=["scene"], image_size=32)
    for name in ("config.json", "policy_preprocessor.json"):  # as if it had been trained on another name
        path = tmp_path / name
        path.write_text(path.read_text().replace("observation.images.scene", "observation.images.front"))
    with pytest.raises(ConfigError, match=r"observation\.images\.front cannot be served"):
        opened(tmp_path)
    actor = opened(tmp_path, renames={"scene": "front"})
    assert actor.cameras == {"scene": (32, 32)}
    _, records = run_attempts(actor, Plan(families=("reach",), num_episodes=2).attempts(), max_env_steps=8)
    own, _ = run_attempts(actor, Plan(families=("reach",), num_episodes=2).attempts(), max_env_steps=8)
    assert [record["num_steps"] for record in records] == [8, 8] and np.isfinite(own[0].commands).all()


# P4


def test_another_order_of_joints_is_refused_with_both(directory):
    names = ["gripper", "shoulder_pan", "shoulder_lift", "elbow_flex", "wrist_flex", "wrist_roll"]
    declare(directory, action_names=[f"{name}.pos" for name in names])
    with pytest.raises(ConfigError, match=r"action_names gripper\.pos, .*the arm's order is shoulder_pan"):
        opened(directory)
    declare(directory, action_names=[f"{name}.pos" for name in (*names[1:], names[0])])
    opened(directory)


def test_declared_units_are_compared(directory):
    declare(directory, units={"joints": "radians", "gripper": "0 to 1"})
    with pytest.raises(ConfigError, match=r"declares units .*radians.*the arm's are .*degrees"):
        opened(directory)


ARM = [[-80.0, 80.0]] * 5


@pytest.mark.parametrize(
    ("bounds", "message"),
    [
        ([[-1.6, 1.6]] * 5 + [[0.0, 1.7]], "looks like radians .shoulder_pan -1.6 to 1.6"),
        ([*ARM, [0.0, 1.0]], "gripper of 0 to 1; the arm's is 0 .closed. to 100"),
        ([*ARM, [-1.0, 1.0]], "gripper of -1 to 1"),
        ([[0.0, 100.0], *ARM], "does not fit the arm at gripper"),
        ([[1000.0, 3000.0]] * 6, "does not fit the arm at shoulder_pan, shoulder_lift"),
    ],
)
@pytest.mark.parametrize(("file", "key"), [(STATE, "observation.state"), (ACTION, "action")])
def test_statistics_in_other_units_are_refused_with_their_numbers(directory, file, key, bounds, message):
    set_range(directory, file, key, bounds)
    (directory / METADATA).unlink()  # nothing declared: a policy of somebody else
    with pytest.raises(ConfigError, match=f"{key} in the policy's statistics.*{message}"):
        opened(directory)


def test_statistics_of_real_data_in_degrees_pass_also_with_a_gripper_that_stays_closed(directory):
    set_range(
        directory,
        STATE,
        "observation.state",
        [[-40.0, 35.0], [-60.0, 20.0], [5.0, 60.0], [-10.0, 70.0], [-3.0, 2.0], [0.0, 0.3]],
    )
    (directory / METADATA).unlink()
    assert opened(directory).config.type == "mmrl_gaussian_chunk"


def test_the_gripper_opens_at_100_and_closes_at_0_in_every_scene():
    for scene in ("reach/scene.xml", "tabletop/scene.xml"):
        physics = ArmPhysics(sim_asset(scene))
        before = physics.states()
        found = gripper_self_test(physics)
        assert found["open_reading"] > 95 and found["closed_reading"] < 5 and found["open_gap_m"] > 0.02
        np.testing.assert_array_equal(physics.states(), before)


def test_an_inverted_gripper_fails_the_self_test(monkeypatch):
    physics = ArmPhysics(sim_asset("reach/scene.xml"))
    advance = physics.advance

    def inverted(targets, rows):
        return advance(np.concatenate([targets[:, :-1], 100.0 - targets[:, -1:]], axis=1), rows)

    monkeypatch.setattr(physics, "advance", inverted)
    with pytest.raises(DataError, match="does not open at 100"):
        gripper_self_test(physics)


# P5


def test_another_control_rate_is_refused_or_resampled_by_request(directory):
    declare(directory, control_hz=50.0)
    with pytest.raises(ConfigError, match=r"made for 50 commands per second; the environment takes 20.*--resample"):
        opened(directory)
    actor = opened(directory, resample=True)
    # 4 commands at 50 Hz last 80 ms: one control step of 50 ms, for which 3 commands are needed
    assert (actor.execution_horizon, actor.config.n_action_steps, actor.describe()["policy_hz"]) == (1, 3, 50.0)
    _, records = run_attempts(actor, Plan(families=("reach",), num_episodes=2).attempts(), max_env_steps=5)
    assert [record["num_steps"] for record in records] == [5, 5]
    declare(directory, control_hz=10.0)
    assert opened(directory, resample=True).execution_horizon == 8


def test_resampled_chunks_pass_through_the_positions_at_their_times():
    start, chunk = np.zeros((1, 1)), np.array([[[1.0], [2.0], [4.0], [8.0], [8.0]]])
    # 50 Hz entries are due at 20, 40, 60, 80, 100 ms; control steps at 50 and 100 ms
    np.testing.assert_allclose(resample_chunk(start, chunk, source_hz=50, target_hz=20)[0, :, 0], [3.0, 8.0])
    # 10 Hz: half way at 50 ms
    np.testing.assert_allclose(resample_chunk(start, chunk[:, :2], source_hz=10, target_hz=20)[0, :, 0], [0.5, 1, 1.5, 2])
    np.testing.assert_array_equal(resample_chunk(start, chunk, source_hz=20, target_hz=20), chunk)
    # a chunk shorter than a control step holds its last position
    np.testing.assert_allclose(resample_chunk(start, chunk[:, :1], source_hz=50, target_hz=20)[0, :, 0], [1.0])


def test_the_execution_horizon_is_recorded_and_cannot_exceed_the_chunk(directory):
    actor = opened(directory, execution_horizon=2)
    assert actor.describe()["execution_horizon"] == 2 and actor.describe()["n_action_steps"] == 4
    with pytest.raises(ConfigError, match=r"5 control steps between decisions take 5 commands.*decides 4 at a time"):
        opened(directory, execution_horizon=5)


# P6


def test_states_far_outside_the_training_range_are_counted_by_decision(directory):
    plan = Plan(families=("reach",), num_episodes=6)
    _, records = run_attempts(opened(directory), plan.attempts())
    assert sum(record["out_of_range"] for record in records) == 0
    set_range(directory, STATE, "observation.state", [[-1.0, 1.0]] + [[-110.0, 110.0]] * 4 + [[0.0, 100.0]])
    actor = opened(directory)
    start = {}
    for attempt in plan.attempts():
        episodes, (record,) = run_attempts(actor, [attempt])
        start[attempt.key] = record["out_of_range"]
        # the untrained policy hardly moves: a start beyond 3 degrees (three half ranges) stays beyond
        pan = episodes[0].commands[:, 0]
        assert (record["out_of_range"] > 0) == (np.abs(pan).max() > 3.0) or np.abs(np.abs(pan).max() - 3.0) < 0.5
    assert sum(start.values()) > 0 and any(count == 10 for count in start.values())  # 40 steps are 10 decisions


def test_a_constant_gripper_is_judged_by_its_own_range_and_then_given_a_floor(directory):
    set_range(directory, STATE, "observation.state", [[-30.0, 30.0]] * 5 + [[0.0, 0.0]])
    notices = []
    opened(directory, notices.append)
    assert notices == ["observation.state: entries 5 do not vary in the policy's statistics; their range is taken as 0.6."]
