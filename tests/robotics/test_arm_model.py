import math

import mujoco
import numpy as np
import pytest

from mmrl.errors import DataError
from robotics.assets import sim_asset
from robotics.envs.physics import JOINTS, ArmPhysics

# The motors of LeRobot's SO-101 follower, in its order (lerobot/robots/so_follower/so_follower.py).
LEROBOT_ORDER = ("shoulder_pan", "shoulder_lift", "elbow_flex", "wrist_flex", "wrist_roll", "gripper")


@pytest.fixture(scope="module", params=["so_arm/so_arm.xml", "reach/scene.xml", "tabletop/scene.xml"])
def model(request):
    return mujoco.MjModel.from_xml_path(str(sim_asset(request.param)))


def test_joints_and_actuators_have_lerobots_names_and_order(model):
    assert tuple(model.joint(i).name for i in range(6)) == LEROBOT_ORDER == JOINTS
    assert tuple(model.actuator(i).name for i in range(model.nu)) == LEROBOT_ORDER
    assert [int(model.actuator(i).trnid[0]) for i in range(model.nu)] == list(range(6))


def test_commands_can_reach_every_joint_position_and_no_other(model):
    np.testing.assert_allclose(model.actuator_ctrlrange, model.jnt_range[:6], atol=1e-12)
    assert model.jnt_limited[:6].all() and model.actuator_ctrllimited.all()


def test_the_gripper_is_where_the_link_lengths_put_it():
    # Zero pose: base 0.062 + shoulder 0.054 + upper arm 0.116 up; 0.030 + forearm 0.130 + hand 0.060 + 0.072 forward.
    physics = ArmPhysics(sim_asset("reach/scene.xml"))
    np.testing.assert_allclose(physics.gripper_position()[0], [0.292, 0.0, 0.232], atol=1e-12)
    # Upper arm leaning forward by 90 degrees: it adds to the reach, and forearm and hand hang down.
    physics.place(0, joints=np.array([0.0, 90.0, 0.0, 0.0, 0.0, 0.0]), positions={})
    np.testing.assert_allclose(physics.gripper_position()[0], [0.030 + 0.116, 0.0, 0.116 - 0.262], atol=1e-12)
    # Turned left by 90 degrees, forward becomes y.
    physics.place(0, joints=np.array([90.0, 0.0, 0.0, 0.0, 0.0, 0.0]), positions={})
    np.testing.assert_allclose(physics.gripper_position()[0], [0.0, 0.292, 0.232], atol=1e-12)


def test_joints_are_in_degrees_and_the_gripper_runs_from_0_closed_to_100_open():
    physics = ArmPhysics(sim_asset("reach/scene.xml"))
    np.testing.assert_allclose(physics.joint_limits[-1], [0.0, 100.0], atol=1e-9)
    np.testing.assert_allclose(physics.joint_limits[0], [-110.0, 110.0])
    tips = []
    for opening in (0.0, 50.0, 100.0):
        physics.place(0, joints=np.array([0.0, 0.0, 0.0, 0.0, 0.0, opening]), positions={})
        data = mujoco.MjData(physics.model)
        physics.copy_to(0, data)
        tips.append(np.linalg.norm(data.geom("moving_jaw").xpos - data.geom("fixed_jaw").xpos))
    assert tips[0] < tips[1] < tips[2]


def test_the_fingers_are_parallel_where_they_hold_a_cube_and_meet_when_closed():
    physics = ArmPhysics(sim_asset("reach/scene.xml"))
    data = mujoco.MjData(physics.model)

    def fingers(opening):
        physics.place(0, joints=np.array([0.0, 0.0, 0.0, 0.0, 0.0, opening]), positions={})
        physics.copy_to(0, data)
        return [(data.geom(name).xpos, data.geom(name).xmat.reshape(3, 3)) for name in ("fixed_jaw", "moving_jaw")]

    (fixed, fixed_axes), (moving, moving_axes) = fingers(26.0)
    np.testing.assert_allclose(moving_axes[:, 0], fixed_axes[:, 0], atol=0.01)
    np.testing.assert_allclose(moving[1] - fixed[1] - 0.008, 0.028, atol=2e-4)  # between the inner faces
    np.testing.assert_allclose(0.5 * (moving + fixed)[1], data.site("gripper_site").xpos[1], atol=2e-4)
    (fixed, fixed_axes), (moving, moving_axes) = fingers(0.0)
    tip = moving + moving_axes @ [0.030, -0.004, 0.0]
    assert abs(tip[1] - (fixed[1] + 0.004)) < 5e-4


def test_robot_units_and_radians_undo_each_other():
    physics = ArmPhysics(sim_asset("reach/scene.xml"))
    positions = np.array([10.0, -20.0, 30.0, -40.0, 50.0, 60.0])
    radians = physics.to_radians(positions)
    np.testing.assert_allclose(radians[:2], [math.radians(10), math.radians(-20)])
    np.testing.assert_allclose(physics.to_robot_units(radians), positions)


def test_the_arm_holds_a_commanded_pose_within_two_degrees():
    physics = ArmPhysics(sim_asset("reach/scene.xml"))
    target = np.array([[40.0, 30.0, -20.0, 25.0, 60.0, 80.0]])
    for _ in range(40):
        assert physics.advance(target, np.array([0])).all()
    np.testing.assert_allclose(physics.joint_positions(), target, atol=2.0)


def test_a_missing_asset_is_named_with_what_to_do():
    with pytest.raises(DataError, match=r"nowhere\.xml: no such simulation asset.*pip install -e"):
        sim_asset("nowhere.xml")
