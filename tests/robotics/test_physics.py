import ast
from pathlib import Path

import gymnasium
import mujoco
import numpy as np
import pytest
from mujoco.batch import Batch

from mmrl.errors import DataError
from robotics.assets import sim_asset
from robotics.envs.perturbations import Push, own_fields, scale_parameters
from robotics.envs.physics import ArmPhysics

SCENE = sim_asset("reach/scene.xml")
TABLETOP = sim_asset("tabletop/scene.xml")
GYM_MODELS = Path(gymnasium.__file__).parent / "envs" / "mujoco" / "assets"
FREE_BOX = """<mujoco><option timestep="0.002" gravity="0 0 0"/><worldbody><body name="box"><freejoint/>
<geom type="box" size="0.1 0.1 0.1" mass="2" pos="{offset} 0 0"/></body></worldbody></mujoco>"""


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


def tabletop(num_sims=1):
    """Simulations with a block held in the air above another, so that masses and friction matter."""
    physics = ArmPhysics(TABLETOP, num_sims=num_sims)
    joints = np.array([5.0, -20.0, 20.0, 30.0, 0.0, 20.0])
    for row in range(num_sims):
        positions = {"red": np.array([0.2, 0.1, 0.014]), "blue": np.array([0.205, 0.1, 0.06])}
        physics.place(row, joints=joints, positions=positions, yaws={"blue": 0.4})
    return physics


# Parameters of one simulation


def test_parameters_change_their_own_row_only_and_can_be_taken_back():
    nominal, changed = tabletop(3), tabletop(3)
    start = nominal.states()
    push = [Push(body="block_red", force=(0.3, 0.0, 0.0), start=0, end=20)]
    changed.set_parameters(np.array([1]), mass_scale=2.0, bodies=["block_red"])

    def end(physics):
        physics.restore(start)
        for row in range(3):
            physics.apply_pushes(row, push, 0)
        return drive(physics, [physics.joint_positions()] * 15)

    plain, own = end(nominal), end(changed)
    np.testing.assert_array_equal(own[[0, 2]], plain[[0, 2]])
    moved, expected = changed.slot_position("red"), nominal.slot_position("red")
    assert abs(moved[1, 0] - 0.2) < 0.8 * abs(expected[1, 0] - 0.2)  # heavier: the same push moves it less
    changed.parameters_reset()
    np.testing.assert_array_equal(end(changed), plain)
    assert not own_fields(changed._batch)


def test_masses_take_inertia_and_derived_constants_along():
    physics = tabletop(2)
    physics.set_parameters(np.array([1]), mass_scale=2.0, bodies=["block_red"])
    nominal, own, body = physics.model, physics.parameters(1), physics.model.body("block_red").id
    for field in ("body_mass", "body_subtreemass", "body_inertia"):
        np.testing.assert_allclose(getattr(own, field)[body], 2.0 * getattr(nominal, field)[body])
    np.testing.assert_allclose(own.body_invweight0[body], 0.5 * nominal.body_invweight0[body])
    np.testing.assert_allclose(own.body_subtreemass[0], nominal.body_subtreemass[0] + 0.03)
    assert np.array_equal(physics.parameters(0).body_invweight0, nominal.body_invweight0)
    np.testing.assert_array_equal(physics.states()[0], physics.states()[1])  # mj_setConst left the state alone


def test_each_row_can_have_a_scale_of_its_own_and_what_is_not_named_is_nominal_again():
    physics, rows = tabletop(3), np.array([0, 2])
    physics.set_parameters(rows, mass_scale=[0.5, 3.0], servo_scale=0.8)
    block, nominal = physics.model.body("block_blue").id, physics.model
    np.testing.assert_allclose([physics.parameters(row).body_mass[block] / 0.03 for row in range(3)], [0.5, 1.0, 3.0])
    own = physics.parameters(0)
    np.testing.assert_allclose(own.actuator_gainprm[:, 0], 0.8 * nominal.actuator_gainprm[:, 0])
    np.testing.assert_allclose(own.actuator_forcerange, 0.8 * nominal.actuator_forcerange)
    physics.set_parameters(rows, damping_scale=2.0)
    own = physics.parameters(2)
    np.testing.assert_array_equal(own.body_mass, nominal.body_mass)
    np.testing.assert_array_equal(own.actuator_gainprm, nominal.actuator_gainprm)
    np.testing.assert_allclose(own.dof_damping, 2.0 * nominal.dof_damping)


@pytest.mark.parametrize("scale", [0.0, -1.0, np.nan, [1.0, np.inf]])
def test_a_scale_that_is_not_a_positive_number_is_named(scale):
    with pytest.raises(DataError, match=r"friction_scale is .*expected positive numbers"):
        tabletop(2).set_parameters(np.array([0, 1]), friction_scale=scale)


def test_parked_blocks_stay_parked_whatever_their_mass():
    physics = ArmPhysics(TABLETOP, num_sims=2)
    for row in range(2):
        physics.place(row, joints=np.array([5.0, -20.0, 20.0, 30.0, 0.0, 20.0]), positions={})
    physics.set_parameters(np.array([1]), mass_scale=3.0)
    data = mujoco.MjData(physics.model)
    physics.copy_to(1, data)
    before = data.body("block_red").xpos.copy()
    physics.settle(np.arange(2), 40)
    physics.copy_to(1, data)
    np.testing.assert_allclose(data.body("block_red").xpos, before, atol=1e-3)


def test_a_mass_edit_on_hopper_reaches_the_subtree_mass():  # R14 of the literature notes
    batch = Batch(mujoco.MjModel.from_xml_path(str(GYM_MODELS / "hopper.xml")), 2, 1)
    torso = batch.model.body("torso").id
    np.testing.assert_allclose(batch.model.body_subtreemass[torso], 15.8200, atol=1e-4)
    scale_parameters(batch, np.array([1]), mass_scale=1.5, bodies=["torso"])
    np.testing.assert_allclose(batch.expanded("body_subtreemass")[:, torso], [15.8200, 17.6526], atol=1e-4)


def test_friction_is_scaled_on_both_sides_of_a_contact():  # R15: the floor alone would leave the foot's 0.4
    model = mujoco.MjModel.from_xml_path(str(GYM_MODELS / "half_cheetah.xml"))

    def contact_friction(model):
        data = mujoco.MjData(model)
        for _ in range(100):
            mujoco.mj_step(model, data)
        assert data.ncon
        return data.contact.friction[:, 0]

    floor_only = mujoco.MjModel.from_xml_path(str(GYM_MODELS / "half_cheetah.xml"))
    floor_only.geom("floor").friction[0] = 0.1
    np.testing.assert_allclose(contact_friction(floor_only), 0.4)
    batch = Batch(model, 1, 1)
    scale_parameters(batch, np.array([0]), friction_scale=0.25)
    np.testing.assert_allclose(contact_friction(batch.get_model(0)), 0.1)


# Pushes and states


def test_a_push_acts_between_its_start_and_its_end_and_clearing_ends_it():
    physics, rows = tabletop(2), np.arange(2)
    pushes = [Push(body="block_red", force=(1.0, 2.0, 3.0), start=2, end=4), Push(body="hand", force=(0, 0, 1), start=3, end=9)]
    red, hand = physics.model.body("block_red").id, physics.model.body("hand").id
    for step, (on_red, on_hand) in enumerate([(0, 0), (0, 0), (1, 0), (1, 1), (0, 1)]):
        physics.apply_pushes(0, pushes, step)
        np.testing.assert_array_equal(physics._pushes[0, red], np.array([1.0, 2.0, 3.0, 0.0, 0.0, 0.0]) * on_red)
        np.testing.assert_array_equal(physics._pushes[0, hand, 2], on_hand)
        assert not physics._pushes[1].any()
        physics.advance(physics.joint_positions(), rows)
    assert physics._pushes[0].any()  # MuJoCo keeps it
    physics.clear_pushes(np.array([0]))
    assert not physics._pushes.any()


def test_a_force_accelerates_the_centre_of_mass_in_the_world_frame():  # R11
    for quat in ([1.0, 0.0, 0.0, 0.0], [np.sqrt(0.5), 0.0, 0.0, np.sqrt(0.5)]):
        batch = Batch(mujoco.MjModel.from_xml_string(FREE_BOX.format(offset=0)), 1, 1)
        batch.bind("qpos")[0, 3:] = quat
        batch.bind("xfrc_applied")[0, 1, 0] = 4.0
        for speed in (0.004, 0.008):
            batch.step()
            np.testing.assert_allclose(batch.bind("qvel")[0], [speed, 0, 0, 0, 0, 0], atol=1e-12)


def test_a_force_at_the_frame_origin_adds_a_moment_that_one_at_the_centre_of_mass_lacks():  # R13
    model = mujoco.MjModel.from_xml_string(FREE_BOX.format(offset=0.05))
    data = mujoco.MjData(model)
    mujoco.mj_forward(model, data)
    for point, moment in ((data.xipos[1], 0.2), (data.xpos[1], 0.0)):
        generalised = np.zeros(6)
        mujoco.mj_applyFT(model, data, np.array([0.0, 4.0, 0.0]), np.zeros(3), point, 1, generalised)
        np.testing.assert_allclose(generalised, [0, 4, 0, 0, 0, moment], atol=1e-12)


def test_states_hold_pushes_and_warm_starts_unlike_the_smaller_kinds():  # E18
    model = mujoco.MjModel.from_xml_string(
        "<mujoco><worldbody><geom type='plane' size='1 1 1'/><body pos='0 0 1'><freejoint/><geom size='.1'/></body>"
        "</worldbody></mujoco>"
    )
    kinds = (mujoco.mjtState.mjSTATE_INTEGRATION, mujoco.mjtState.mjSTATE_FULLPHYSICS, mujoco.mjtState.mjSTATE_PHYSICS)
    assert [mujoco.mj_stateSize(model, int(kind)) for kind in kinds] == [38, 14, 13]
    pushed = tabletop(2)
    pushed.push(0, "block_red", np.array([0.1, 0.0, 0.0]))
    saved = drive(pushed, commands(pushed, 5))
    end = drive(pushed, commands(pushed, 10, seed=1))
    fresh = tabletop(2)
    fresh.restore(saved[[1, 0]])  # rows are exchangeable
    np.testing.assert_array_equal(drive(fresh, commands(pushed, 10, seed=1)[:, [1, 0]]), end[[1, 0]])


def test_a_diverged_tabletop_simulation_goes_back_and_its_neighbour_goes_on(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    broken, sound, rows = tabletop(2), tabletop(2), np.arange(2)
    broken.push(0, "block_red", np.array([0.0, 1e12, 0.0]))
    before = broken.states()[0]
    for command in commands(broken, 3):
        assert broken.advance(command, rows).tolist() == [False, True]
        assert sound.advance(command, rows).all()
    np.testing.assert_array_equal(broken.states()[0], before)
    np.testing.assert_array_equal(broken.states()[1], sound.states()[1])
    assert not list(tmp_path.iterdir())


def test_no_module_looks_for_a_mujoco_number_in_a_tuple_of_enums():
    # S3: recent versions say False for numpy ints, so membership silently fails.
    found = []
    for path in (Path(__file__).parents[2] / "robotics").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Compare) and isinstance(node.ops[0], ast.In | ast.NotIn):
                elements = getattr(node.comparators[0], "elts", [])
                found += [f"{path}:{node.lineno}" for element in elements if ".mjt" in ast.unparse(element)[:20]]
    assert not found
