from pathlib import Path

import mujoco
import numpy as np
import pytest

from robotics.assets import sim_asset
from robotics.envs.physics import ArmPhysics

SCENE = sim_asset("reach/scene.xml")


def commands(physics, steps, seed=0):
    """A different wandering command for every row, ``[steps, S, A]``."""
    low, high = physics.joint_limits.T
    shares = np.random.default_rng(seed).uniform(0.3, 0.7, (steps, physics.num_sims, len(low)))
    return low + shares * (high - low)


def drive(physics, sequence, rows=None):
    rows = np.arange(physics.num_sims) if rows is None else rows
    for command in sequence:
        physics.advance(command, rows)
    return physics.states()


def test_a_simulation_does_not_depend_on_threads_or_on_its_row():
    one, two = ArmPhysics(SCENE, num_sims=5, num_threads=1), ArmPhysics(SCENE, num_sims=5, num_threads=2)
    sequence = commands(one, 15)
    states = drive(one, sequence)
    np.testing.assert_array_equal(drive(two, sequence), states)
    alone = ArmPhysics(SCENE)
    np.testing.assert_array_equal(drive(alone, sequence[:, 3:4])[0], states[3])


def test_restored_states_continue_bit_for_bit():
    physics = ArmPhysics(SCENE, num_sims=2)
    sequence = commands(physics, 12)
    saved = drive(physics, sequence[:5])
    end = drive(physics, sequence[5:])
    physics.reset()
    physics.restore(saved)
    np.testing.assert_array_equal(drive(physics, sequence[5:]), end)


def test_placing_and_resetting_clear_pushes_commands_and_warm_starts():
    joints, targets = np.array([5.0, -20.0, 20.0, 30.0, 0.0, 20.0]), {"red": np.array([0.2, 0.1, 0.1])}
    used, fresh = ArmPhysics(SCENE), ArmPhysics(SCENE)
    defaults = fresh.states()
    used.push(0, "hand", np.array([3.0, 0.0, 0.0]))
    drive(used, commands(used, 5))
    used.place(0, joints=joints, positions=targets)
    fresh.place(0, joints=joints, positions=targets)
    np.testing.assert_array_equal(used.states(), fresh.states())
    used.push(0, "hand", np.array([3.0, 0.0, 0.0]))
    drive(used, commands(used, 5))
    used.reset()
    np.testing.assert_array_equal(used.states(), defaults)


def test_a_placed_arm_is_commanded_to_stay_where_it_is():
    physics, joints = ArmPhysics(SCENE), np.array([5.0, -20.0, 20.0, 30.0, 0.0, 20.0])
    physics.place(0, joints=joints, positions={})
    data = mujoco.MjData(physics.model)
    physics.copy_to(0, data)
    np.testing.assert_array_equal(data.ctrl, data.qpos)
    np.testing.assert_allclose(physics.joint_positions()[0], joints)


def test_a_push_moves_the_arm_and_lasts_until_it_is_replaced():
    pushed, free = ArmPhysics(SCENE), ArmPhysics(SCENE)
    hold = pushed.joint_positions()[None, 0]
    pushed.push(0, "hand", np.array([0.0, 5.0, 0.0]))
    drive(pushed, [hold] * 10)
    drive(free, [hold] * 10)
    moved = pushed.gripper_position()[0, 1] - free.gripper_position()[0, 1]
    assert moved > 0.005
    pushed.push(0, "hand", np.zeros(3))
    drive(pushed, [hold] * 20)
    assert abs(pushed.gripper_position()[0, 1]) < moved / 10


def test_a_diverged_simulation_is_reported_every_time_and_leaves_the_others_alone(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    broken, sound = ArmPhysics(SCENE, num_sims=3), ArmPhysics(SCENE, num_sims=3)
    sequence, rows = commands(broken, 4), np.arange(3)
    broken.push(1, "hand", np.array([1e30, 0.0, 0.0]))
    before = broken.states()[1]
    for command in sequence:
        assert broken.advance(command, rows).tolist() == [True, False, True]
        np.testing.assert_array_equal(broken.states()[1], before)
        assert sound.advance(command, rows).all()
    np.testing.assert_array_equal(broken.states()[[0, 2]], sound.states()[[0, 2]])
    broken.push(1, "hand", np.zeros(3))
    assert broken.advance(sequence[-1], rows).all()  # and it is not held against it afterwards
    assert not (Path(tmp_path) / "MUJOCO_LOG.TXT").exists()


@pytest.mark.parametrize("poison", [np.nan, np.inf, -np.inf])
def test_a_command_that_is_not_finite_is_refused_and_not_executed(poison):
    physics = ArmPhysics(SCENE, num_sims=2)
    before, command = physics.states(), physics.joint_positions()
    command[1, 2] = poison
    assert physics.advance(command, np.arange(2)).tolist() == [True, False]
    after = physics.states()
    np.testing.assert_array_equal(after[1], before[1])
    assert not np.array_equal(after[0], before[0])


def test_commands_beyond_a_limit_are_clipped_to_it():
    beyond, at = ArmPhysics(SCENE), ArmPhysics(SCENE)
    limit = at.joint_limits[None, :, 1]
    np.testing.assert_array_equal(drive(beyond, [limit * 3.0] * 3), drive(at, [limit] * 3))


def test_the_gripper_jacobian_is_the_slope_of_the_gripper_position():
    physics = ArmPhysics(SCENE)
    joints, step = np.array([10.0, -20.0, 30.0, 20.0, 5.0, 30.0]), 1e-4
    physics.place(0, joints=joints, positions={})
    jacobian, start = physics.gripper_jacobian(np.array([0]))[0], physics.gripper_position()[0]
    for i in range(len(joints)):
        radians = physics.to_radians(joints)
        radians[i] += step
        physics.place(0, joints=physics.to_robot_units(radians), positions={})
        np.testing.assert_allclose((physics.gripper_position()[0] - start) / step, jacobian[:, i], atol=1e-4)
