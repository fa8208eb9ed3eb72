"""The experts do what is asked, in motions that a policy can copy, from what a policy sees."""

import numpy as np
import pytest

from mmrl.errors import DataError
from robotics.assets import sim_asset
from robotics.envs.families import FAMILIES, build_family
from robotics.envs.observation import observe
from robotics.envs.physics import ArmPhysics
from robotics.experts import make_expert
from robotics.experts.__main__ import measure, tasks_of
from robotics.experts.kinematics import Sag, forward, inverse
from robotics.experts.skills import View, grasp
from robotics.rollouts import limits_of, run_episodes
from robotics.world import ArmWorld

NUM_SEEDS = 20
CHUNK = 4
TABLETOP = [name for name in FAMILIES if name != "reach"]


def drive(tasks, *, chunk_size=CHUNK, disturb=None, max_env_steps=None):
    """Episodes of the expert, and the largest motion that it commanded, as a share of half of the joint's range."""
    world = ArmWorld(tasks)
    expert = make_expert(world.physics, world.families, world.goals, chunk_size=chunk_size)
    half, motions = 0.5 * np.ptp(world.physics.joint_limits, axis=1), [0.0]

    def decide(decision, running, observation):
        chunks = expert(decision, running, observation)
        motion = np.abs(np.diff(chunks, axis=1, prepend=observation["agent_pos"][:, None])) / half
        motions.append(float(motion.max()))
        return chunks if disturb is None else disturb(decision, chunks)

    episodes = run_episodes(world, decide, limits_of(tasks, execution_horizon=chunk_size, max_env_steps=max_env_steps))
    world.close()
    return episodes, max(motions)


@pytest.fixture(scope="module")
def tabletop():
    """Episodes of every family on the tabletop, in one batch: by family, and the largest motion."""
    tasks = [task for name in TABLETOP for task in tasks_of(name, first=0, count=NUM_SEEDS)]
    episodes, largest = drive(tasks)
    return {name: episodes[i * NUM_SEEDS : (i + 1) * NUM_SEEDS] for i, name in enumerate(TABLETOP)}, largest


@pytest.mark.parametrize("name", TABLETOP)
def test_the_expert_succeeds_within_the_time_limit(tabletop, name):
    episodes = tabletop[0][name]
    assert sum(episode.stop_reason == "success" for episode in episodes) >= 19
    median = np.median([episode.num_steps for episode in episodes])
    assert 1.2 * median <= build_family(name).max_env_steps <= 2.2 * median


@pytest.mark.parametrize("name", TABLETOP)
def test_work_never_is_negative_and_ends_at_nothing(tabletop, name):
    for episode in tabletop[0][name]:
        progress = 1.0 - episode.left / episode.left[0]
        assert (episode.left >= 0.0).all() and (progress <= 1.0).all()
        if episode.stop_reason == "success":
            assert episode.left[-1] == 0.0


def test_the_reach_expert_succeeds():
    episodes, largest = drive(tasks_of("reach", first=0, count=NUM_SEEDS))
    assert all(episode.stop_reason == "success" for episode in episodes)
    assert largest <= 0.08


def test_no_command_moves_a_joint_by_more_than_a_policy_may(tabletop):
    assert 0.05 < tabletop[1] <= 0.08


def test_an_episode_does_not_depend_on_its_neighbours(tabletop):
    for name in ("stack", "two_step"):
        (alone,), _ = drive(tasks_of(name, first=3, count=1))
        np.testing.assert_array_equal(alone.commands, tabletop[0][name][3].commands)
        np.testing.assert_array_equal(alone.final_state, tabletop[0][name][3].final_state)


@pytest.mark.parametrize("chunk_size", [1, 9])
def test_chunks_may_be_short_or_long(chunk_size):
    tasks = [task for name in ("place", "open_drawer") for task in tasks_of(name, first=40, count=5)]
    episodes, largest = drive(tasks, chunk_size=chunk_size)
    assert sum(episode.stop_reason == "success" for episode in episodes) >= 9 and largest <= 0.08


def test_a_block_that_was_dropped_is_picked_up_again():
    tasks = tasks_of("place", first=0, count=12)

    def let_go(decision, chunks):
        if decision in (9, 10):  # the block is on its way
            chunks[:, :, -1] = 60.0
        return chunks

    undisturbed, _ = drive(tasks)
    episodes, _ = drive(tasks, disturb=let_go, max_env_steps=240)
    assert sum(episode.stop_reason == "success" for episode in episodes) >= 11
    assert np.mean([episode.num_steps for episode in episodes]) > np.mean([episode.num_steps for episode in undisturbed]) + 8


def test_the_expert_decides_from_observations_alone_and_remembers_nothing():
    world = ArmWorld(tasks_of("stack", first=0, count=3))
    elsewhere = ArmPhysics(sim_asset("tabletop/scene.xml"), num_sims=3)
    rows = np.arange(3)
    used = make_expert(world.physics, world.families, world.goals, chunk_size=2)
    for decision in range(12):
        chunks = used(decision, rows, world.observe(rows))
        fresh = make_expert(elsewhere, world.families, world.goals, chunk_size=2)
        np.testing.assert_array_equal(fresh(0, rows, world.observe(rows)), chunks)
        for command in chunks.transpose(1, 0, 2):
            world.advance(command, rows)


def test_rows_that_run_are_matched_with_their_own_goals():
    world = ArmWorld(tasks_of("push", first=0, count=4))
    expert = make_expert(world.physics, world.families, world.goals, chunk_size=1)
    everything = expert(0, np.arange(4), world.observe(np.arange(4)))
    some = np.array([1, 3])
    np.testing.assert_array_equal(expert(0, some, world.observe(some)), everything[some])


def test_rows_of_two_scenes_are_refused():
    families = [build_family("reach"), build_family("push")]
    with pytest.raises(
        DataError, match=r"an expert acts in one scene; the families need reach/scene\.xml, tabletop/scene\.xml"
    ):
        make_expert(ArmPhysics(sim_asset("reach/scene.xml"), num_sims=2), families, ["red", "red"], chunk_size=1)


def test_the_kinematics_are_those_of_the_model():
    physics = ArmPhysics(sim_asset("reach/scene.xml"), num_sims=30)
    rng = np.random.default_rng(0)
    joints = physics.joint_limits[:, 0] + rng.uniform(0.2, 0.8, (30, 6)) * np.ptp(physics.joint_limits, axis=1)
    for row in range(30):
        physics.place(row, joints=joints[row], positions={})
    np.testing.assert_allclose(forward(joints), physics.gripper_position(), atol=1e-9)


def test_inverse_kinematics_reach_every_place_that_layouts_use_with_the_hand_pointing_down():
    radius, azimuth, height = (grid.ravel() for grid in np.meshgrid([0.12, 0.18, 0.23], [-1.6, 0.0, 1.6], [0.014, 0.05, 0.085]))
    points = np.stack([radius * np.cos(azimuth), radius * np.sin(azimuth), height], axis=1)
    joints = inverse(points, np.full(len(points), 12.0))
    np.testing.assert_allclose(forward(joints), points, atol=1e-9)
    np.testing.assert_allclose(joints[:, 1:4].sum(axis=1), 90.0)
    limits = ArmPhysics(sim_asset("reach/scene.xml")).joint_limits[:5]
    assert (joints >= limits[:, 0]).all() and (joints <= limits[:, 1]).all() and (joints[:, 4] == 12.0).all()
    stretched = inverse(np.array([[0.5, 0.0, 0.1]]), np.zeros(1))
    assert (
        np.isfinite(stretched).all() and abs(stretched[0, 2] + 90.0) < 2.0
    )  # straight: the forearm is at 0 when it points forward


def test_a_command_with_the_sag_added_holds_the_pose():
    physics, rows = ArmPhysics(sim_asset("reach/scene.xml")), np.array([0])
    wanted = np.append(inverse(np.array([[0.2, 0.05, 0.03]]), np.zeros(1)), [[30.0]], axis=1)
    raised = wanted + np.append(Sag()(wanted), [[0.0]], axis=1)
    errors = []
    for command in (wanted, raised):
        physics.place(0, joints=wanted[0], positions={})
        for _ in range(20):
            physics.advance(command, rows)
        errors.append(np.linalg.norm(physics.gripper_position()[0] - [0.2, 0.05, 0.03]))
    assert errors[1] < 3e-4 < errors[0]


@pytest.mark.parametrize(("bowl", "roll"), [([0.17, 0.0, 0.004], 90.0), ([0.05, -0.17, 0.004], 0.0)])
def test_a_cube_is_taken_by_the_sides_where_the_fingers_find_room(bowl, roll):
    block = np.array([0.17, 0.072, 0.014])
    pan = float(np.degrees(np.arctan2(block[1], block[0])))
    far = np.array([-0.1, -0.3, 0.0])
    slots = dict.fromkeys(("green", "blue", "yellow", "zone", "button"), far) | {"drawer": np.array([0.22, -0.2, 0.03])}
    view = View(
        gripper=np.array([0.17, 0.072, 0.064]),
        pan=pan,
        roll=0.0,
        opening=37.0,
        slots={"red": block, "bowl": np.array(bowl), **slots},
        yaws={"red": pan, "green": 0.0, "blue": 0.0, "yellow": 0.0},
    )
    np.testing.assert_allclose(abs(grasp(view, "red").roll), roll, atol=1e-9)


def test_measuring_prints_success_with_its_interval():
    line = measure("press", first=0, episodes=4, chunk_size=CHUNK)
    assert line.startswith("press") and "100.0% [ 51.0%, 100.0%]" in line


def test_observations_do_not_change_while_the_expert_looks_ahead():
    world = ArmWorld(tasks_of("place", first=0, count=2))
    observation = observe(world.physics)
    copy = {name: value.copy() for name, value in observation.items()}
    make_expert(world.physics, world.families, world.goals, chunk_size=6)(0, np.arange(2), observation)
    for name, value in copy.items():
        np.testing.assert_array_equal(observation[name], value)
