import itertools

import mujoco
import numpy as np
import pytest

from mmrl.errors import DataError
from robotics.assets import sim_asset
from robotics.envs.observation import ABSENT, BLOCKS, SLOTS, environment_bounds, observe
from robotics.envs.physics import ArmPhysics
from robotics.envs.settled import settled_state, world_hash

SCENE = sim_asset("tabletop/scene.xml")
HOME = np.array([0.0, -20.0, 20.0, 30.0, 0.0, 20.0])
OPEN, CLOSE = 60.0, 5.0
LIFT = np.array([0.0, 0.0, 0.1])
UPPER, FOREARM, HAND = 0.116, 0.130, 0.132
"""Link lengths of the arm, metres; shoulder axis 0.030 forward of and 0.116 above the base."""


def joints_at(x, y, z, *, yaw=0.0, opening=CLOSE):
    """Joints that put the gripper at (x, y, z), pointing down or, out of that reach, tilted outwards; closing along ``yaw``."""
    pan, radius = np.arctan2(y, x), np.hypot(x, y)
    for share, pitch in itertools.product((1.0, 0.97, 0.94, 0.90, 0.85), np.deg2rad(np.arange(90.0, 40.0, -2.0))):
        forward = radius * share - HAND * np.cos(pitch) - 0.030
        up = z + HAND * np.sin(pitch) - 0.116
        cosine = (forward**2 + up**2 - UPPER**2 - FOREARM**2) / (2.0 * UPPER * FOREARM)
        if abs(cosine) > 1.0:
            continue
        bend = np.arccos(cosine)
        lean = np.arctan2(forward, up) - np.arctan2(FOREARM * np.sin(bend), UPPER + FOREARM * np.cos(bend))
        wrist = np.rad2deg(pitch - lean - bend) + 90.0
        if wrist <= 95.0:
            roll = (np.rad2deg(pan - yaw) + 45.0) % 90.0 - 45.0  # a cube looks the same every quarter turn
            return np.array([np.rad2deg(pan), np.rad2deg(lean), np.rad2deg(bend) - 90.0, wrist, roll, opening])
    raise AssertionError(f"({x}, {y}, {z}) is out of reach")


def move(physics, paths, steps, *, yaws=None, opening=CLOSE):
    """Every simulation along its straight path ``([3], [3])``."""
    rows = np.arange(physics.num_sims)
    yaws = np.zeros(len(rows)) if yaws is None else yaws
    for share in (np.arange(steps) + 1.0) / steps:
        share = share * share * (3.0 - 2.0 * share)
        points = [start + share * (end - start) for start, end in paths]
        commands = [joints_at(*point, yaw=yaw, opening=opening) for point, yaw in zip(points, yaws)]
        assert physics.advance(np.array(commands), rows).all()
    return np.array(commands)


def contacts(physics, row=0):
    """Names of the geoms that touch, as a set of pairs."""
    data = mujoco.MjData(physics.model)
    physics.copy_to(row, data)
    return {frozenset(physics.model.geom(int(i)).name for i in data.contact.geom[k]) for k in range(data.ncon)}


def test_the_scene_has_the_slots_joints_and_cameras_that_tasks_name():
    physics = ArmPhysics(SCENE)
    assert physics.slots == SLOTS and ArmPhysics(sim_asset("reach/scene.xml")).slots == BLOCKS
    assert {physics.model.camera(i).name for i in range(physics.model.ncam)} == {"scene", "wrist"}
    np.testing.assert_allclose(physics.model.joint("drawer").range, [0.0, 0.08])
    assert physics.model.joint("button").range[1] == 0.012
    for color in BLOCKS:
        np.testing.assert_allclose(physics.model.geom(f"block_{color}").size, 0.014)
        np.testing.assert_allclose(physics.model.body(f"block_{color}").mass, 0.03)
    with pytest.raises(DataError, match="'bowl' is not in this scene; it has: red"):
        ArmPhysics(sim_asset("reach/scene.xml")).slot_position("bowl")


def test_the_settled_state_is_that_of_mujoco_4_0():
    state = settled_state(SCENE)
    np.testing.assert_allclose(state[:6], [0.34907, 0.18092, 0.17978, 0.69890, 0.52357, 0.97671], atol=2e-5)
    for k, y in enumerate((0.12, 0.04, -0.04, -0.12)):
        start = 6 + 7 * k
        np.testing.assert_allclose(state[start : start + 7], [0.2, y, 0.01389, 1.0, 0.0, 0.0, 0.0], atol=2e-5)
    np.testing.assert_allclose(state[-2:], 0.0, atol=2e-5)
    assert world_hash(SCENE).startswith(f"{mujoco.__version__}-") and world_hash(SCENE) == world_hash(SCENE)
    assert world_hash(SCENE) != world_hash(sim_asset("reach/scene.xml"))


def test_what_a_layout_leaves_out_is_absent_and_costs_neither_contacts_nor_constraints():
    physics = ArmPhysics(SCENE)
    physics.place(0, joints=HOME, positions={})
    physics.settle(np.array([0]), 100)
    data = mujoco.MjData(physics.model)
    physics.copy_to(0, data)
    assert data.ncon == 0 and data.nefc == 0
    state = observe(physics)["environment_state"][0]
    np.testing.assert_array_equal(state[3:27].reshape(8, 3), np.tile(np.float32(ABSENT), (8, 1)))
    np.testing.assert_array_equal(state[27:], 0.0)


def test_a_block_that_falls_off_the_table_becomes_absent_and_stays_finite():
    physics = ArmPhysics(SCENE)
    physics.place(0, joints=HOME, positions={"red": np.array([0.9, 0.0, 0.05])})
    physics.settle(np.array([0]), 200)
    np.testing.assert_array_equal(physics.slot_position("red")[0], ABSENT)
    assert abs(physics.states()[0]).max() < 11.0


def test_observations_say_where_everything_is_and_within_their_bounds():
    physics = ArmPhysics(SCENE, num_sims=2)
    positions = {
        "red": np.array([0.20, 0.05, 0.014]), "bowl": np.array([0.20, -0.10, 0.0]), "zone": np.array([0.1, 0.2, 0.0]),
        "drawer": np.array([0.24, 0.15, 0.0]), "button": np.array([0.25, -0.2, 0.0]),
    }  # fmt: skip
    physics.place(1, joints=HOME, positions=positions, yaws={"red": 0.3}, slides={"drawer": 0.05})
    observation = observe(physics)
    assert observation["agent_pos"].shape == (2, 6) and observation["environment_state"].shape == (2, 35)
    state = observation["environment_state"][1]
    np.testing.assert_allclose(state[:3], physics.gripper_position()[1], atol=1e-6)
    slots = dict(zip(SLOTS, state[3:27].reshape(8, 3)))
    np.testing.assert_allclose(slots["red"], [0.20, 0.05, 0.014], atol=1e-6)
    np.testing.assert_allclose(slots["bowl"], [0.20, -0.10, 0.004], atol=1e-6)
    np.testing.assert_allclose(slots["zone"], [0.1, 0.2, 0.0], atol=1e-6)
    np.testing.assert_allclose(slots["drawer"], [0.19, 0.15, 0.030], atol=1e-6)
    np.testing.assert_allclose(slots["button"], [0.25, -0.2, 0.032], atol=1e-6)
    np.testing.assert_allclose(slots["green"], ABSENT, atol=1e-6)
    np.testing.assert_allclose(state[27:31], [np.cos(1.2), np.sin(1.2), 0.0, 0.0], atol=1e-6)
    np.testing.assert_allclose(physics.block_yaw("red")[1], 0.3)
    np.testing.assert_allclose(physics.slide("drawer")[1], 0.05)
    low, high = environment_bounds.T
    assert ((state >= low - 1e-6) & (state <= high + 1e-6)).all()
    widths = (high - low)[:27].reshape(9, 3)
    np.testing.assert_allclose(widths, widths[0, 0])


@pytest.fixture(scope="module")
def grasping():
    """Twenty cubes at random places and yaws, held between closed fingers, and how they got there."""
    physics, rng = ArmPhysics(SCENE, num_sims=20), np.random.default_rng(0)
    radii, azimuths = rng.uniform(0.13, 0.25, 20), rng.uniform(-1.0, 1.0, 20)
    yaws = rng.uniform(-np.pi, np.pi, 20)
    cubes = np.stack([radii * np.cos(azimuths), radii * np.sin(azimuths), np.full(20, 0.014)], axis=1)
    above = cubes + np.array([0.0, 0.0, 0.046])
    for row in range(20):
        start = joints_at(*above[row], yaw=yaws[row], opening=OPEN)
        physics.place(row, joints=start, positions={"red": cubes[row]}, yaws={"red": yaws[row]})
    move(physics, list(zip(above, cubes)), 15, yaws=yaws, opening=OPEN)
    around = physics.states()
    for _ in range(14):
        move(physics, list(zip(cubes, cubes)), 1, yaws=yaws)
    return physics, cubes, yaws, around, physics.states()


def test_the_open_hand_comes_down_around_a_cube_without_touching_the_table(grasping):
    physics, cubes, _, around, _ = grasping
    physics.restore(around)
    for row in range(20):
        assert all("block_red" in pair for pair in contacts(physics, row))
    np.testing.assert_allclose(physics.gripper_position(), cubes, atol=0.006)


def test_both_fingers_hold_the_cube_nearly_parallel(grasping):
    physics, *_, held = grasping
    physics.restore(held)
    for row in range(20):
        fingers = {name for pair in contacts(physics, row) if "block_red" in pair for name in pair}
        assert {"fixed_jaw", "moving_jaw"} <= fingers
    data = mujoco.MjData(physics.model)
    physics.copy_to(0, data)
    fixed, moving = (data.geom(name).xmat.reshape(3, 3)[:, 1] for name in ("fixed_jaw", "moving_jaw"))
    assert abs(fixed @ moving) > np.cos(np.deg2rad(4.0))


def test_cubes_are_lifted_held_and_shaken_without_slipping_and_dropped_when_the_fingers_open(grasping):
    physics, cubes, yaws, _, held = grasping
    physics.restore(held)
    up, rows = cubes + LIFT, np.arange(20)
    pose = move(physics, list(zip(cubes, up)), 25, yaws=yaws)
    assert (physics.slot_position("red")[:, 2] > 0.10).all()
    before = physics.slot_position("red")
    for _ in range(40):
        physics.advance(pose, rows)
    np.testing.assert_allclose(physics.slot_position("red"), before, atol=0.002)  # two seconds
    for side in (12.0, -12.0, 12.0, -12.0):
        swung = pose + np.array([side, 0.0, 0.0, 0.0, side, 0.0])
        for share in (0.33, 0.67, 1.0, 0.67, 0.33, 0.0):
            physics.advance(pose + share * (swung - pose), rows)
    for _ in range(5):
        physics.advance(pose, rows)
    assert np.linalg.norm(physics.slot_position("red") - before, axis=1).max() < 0.006
    pose[:, 5] = OPEN
    for _ in range(20):
        physics.advance(pose, rows)
    assert (physics.slot_position("red")[:, 2] < 0.03).all()


@pytest.mark.parametrize("scales", [{"mass_scale": 2.0}, {"friction_scale": 0.6}])
def test_the_grasp_survives_heavier_and_more_slippery_cubes(grasping, scales):
    physics, cubes, yaws, _, held = grasping
    rows = np.arange(20)
    if "mass_scale" in scales:
        scales = {**scales, "bodies": ["block_red"]}
    try:
        physics.set_parameters(rows, **scales)
        physics.restore(held)
        move(physics, list(zip(cubes, cubes + LIFT)), 25, yaws=yaws)
        assert (physics.slot_position("red")[:, 2] > 0.09).sum() >= 19
    finally:
        physics.parameters_reset()


@pytest.mark.parametrize("place", [(0.24, 0.0), (0.22, 0.12), (0.21, -0.14)])
def test_closed_fingers_open_and_close_the_drawer(place):
    physics = ArmPhysics(SCENE)
    handle = np.array([*place, 0.030])
    over = handle + np.array([0.0165, 0.0, 0.045])
    physics.place(0, joints=joints_at(*over), positions={"drawer": np.array([*place, 0.0])})
    behind = handle + np.array([0.0165, 0.0, 0.0])
    move(physics, [(over, behind)], 15)
    assert abs(physics.slide("drawer")[0]) < 0.002
    pulled = behind - [0.085, 0.0, 0.0]
    move(physics, [(behind, pulled)], 25)
    assert physics.slide("drawer")[0] > 0.07
    np.testing.assert_allclose(physics.slot_position("drawer")[0, 0], place[0] - physics.slide("drawer")[0])
    out, front = pulled + np.array([0.0, 0.0, 0.045]), np.array([place[0] - 0.11, place[1], 0.075])
    move(physics, [(pulled, out)], 10)
    move(physics, [(out, front)], 10)
    low = front * [1.0, 1.0, 0.4]
    move(physics, [(front, low)], 10)
    move(physics, [(low, np.array([place[0] - 0.010, place[1], 0.030]))], 25)
    assert physics.slide("drawer")[0] < 0.005


def test_the_button_goes_down_under_the_fingers_and_comes_back():
    physics = ArmPhysics(SCENE)
    over, down = np.array([0.22, -0.1, 0.08]), np.array([0.22, -0.1, 0.022])
    physics.place(0, joints=joints_at(*over), positions={"button": np.array([0.22, -0.1, 0.0])})
    move(physics, [(over, down)], 15)
    assert physics.slide("button")[0] > 0.009
    move(physics, [(down, over)], 15)
    assert abs(physics.slide("button")[0]) < 0.001


def test_a_block_dropped_into_the_bowl_stays_in_it():
    physics = ArmPhysics(SCENE)
    inside = {"bowl": np.array([0.2, -0.1, 0.0]), "blue": np.array([0.21, -0.11, 0.05])}
    physics.place(0, joints=HOME, positions=inside)
    physics.settle(np.array([0]), 20)
    assert np.linalg.norm((physics.slot_position("blue") - physics.slot_position("bowl"))[0, :2]) < 0.035
    np.testing.assert_allclose(physics.slot_position("blue")[0, 2], 0.018, atol=0.001)


@pytest.mark.parametrize("target", ["table", "cabinet", "bowl"])
def test_the_arm_does_not_pass_through_fixed_things(target):
    physics = ArmPhysics(SCENE)
    over = np.array([0.2, 0.0, 0.10])
    places = {"cabinet": {"drawer": np.array([0.12, 0.0, 0.0])}, "bowl": {"bowl": np.array([0.2, -0.049, 0.0])}}
    physics.place(0, joints=joints_at(*over), positions=places.get(target, {}))
    move(physics, [(over, over * [1.0, 1.0, 0.0])], 15)
    data = mujoco.MjData(physics.model)
    physics.copy_to(0, data)
    assert {"fixed_jaw", "moving_jaw"} & {name for pair in contacts(physics) for name in pair}
    assert data.contact.dist.min() > -0.002
    floor = {"table": 0.0, "cabinet": 0.056, "bowl": 0.024}[target]
    assert physics.gripper_position()[0, 2] > floor
