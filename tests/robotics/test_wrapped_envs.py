"""Other people's environments as worlds, against plain loops over the same environments."""

import gymnasium as gym
import mujoco
import numpy as np
import pytest

from mmrl.errors import DataError, MissingExtra
from robotics.envs.families import build_family
from robotics.envs.gym_env import ArmEnv
from robotics.envs.physics import warnings_to_log
from robotics.envs.wrapped import GymWorld, build_world
from robotics.experts import make_expert
from robotics.rewards import closeness, env_return, success
from robotics.rollouts import limits_of, run_episodes
from robotics.tasks import FamilyTasks, RobotTask
from robotics.world import ArmWorld


@pytest.fixture(autouse=True)
def _in_a_folder_of_its_own(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    yield
    assert not list(tmp_path.iterdir())  # MuJoCo writes MUJOCO_LOG.TXT into the working directory when nobody listens


def tasks_of(name, seeds):
    return [RobotTask(id=f"{name}/{seed}", family=name, goal="default", instruction="", seed=seed) for seed in seeds]


def controller(size):
    """A fixed controller: each action depends on the observation that its chunk was decided on."""
    weights = np.random.default_rng(0).normal(size=(64, size))

    def act(observation, step):
        return np.tanh(observation @ weights[: len(observation)] + 0.3 * step)

    return act


def decide_with(world, chunk_size):
    act = controller(world.command_size)

    def decide(decision, running, observation):
        return np.stack([[act(row.astype(float), h) for h in range(chunk_size)] for row in observation["agent_pos"]])

    return decide


def play(tasks, *, chunk_size=4, max_env_steps=200, group_size=1):
    world = build_world(tasks, group_size=group_size)
    rows = [task for task in tasks for _ in range(group_size)]
    limits = limits_of(rows, execution_horizon=chunk_size, max_env_steps=max_env_steps)
    try:
        return run_episodes(world, decide_with(world, chunk_size), limits)
    finally:
        world.close()


def plain_loop(name, seed, *, chunk_size=4, max_env_steps=200):
    """Return and length of an episode in gymnasium's own loop, up to and including the first terminal step."""
    with warnings_to_log():
        env = gym.make(name)
    observation, _ = env.reset(seed=seed)
    low, high = env.action_space.low.astype(float), env.action_space.high.astype(float)
    act = controller(len(low))
    rewards = []
    for step in range(max_env_steps):
        if step % chunk_size == 0:
            decided_on = observation.astype(np.float32).astype(float)
        command = act(decided_on, step % chunk_size)
        action = (low + (command + 1) / 2 * (high - low)).astype(np.float32)
        observation, reward, terminated, truncated, _ = env.step(action)
        rewards.append(reward)
        if terminated or truncated:
            break
    return rewards, terminated


@pytest.mark.parametrize("name", ["Hopper-v5", "Walker2d-v5", "HalfCheetah-v5", "InvertedPendulum-v5", "Pendulum-v1"])
def test_an_episode_is_that_of_a_plain_gymnasium_loop(name):
    seeds, limit = range(4), 60
    episodes = play(tasks_of(f"gym:{name}", seeds), max_env_steps=limit)
    for seed, episode in zip(seeds, episodes):
        rewards, terminated = plain_loop(name, seed, max_env_steps=limit)
        np.testing.assert_array_equal(episode.step_rewards, rewards)
        assert episode.stop_reason == ("terminated" if terminated else "timeout")
        assert env_return(None, episode) == sum(rewards) or np.isclose(env_return(None, episode), sum(rewards), rtol=1e-15)
        assert np.isnan(episode.left).all() and closeness(None, episode) is None and success(None, episode) == 0.0


def test_termination_is_counted_once_and_ends_its_own_row_alone():
    tasks = tasks_of("gym:Hopper-v5", range(6))
    together = play(tasks)
    assert all(episode.stop_reason == "terminated" for episode in together)
    assert len({episode.num_steps for episode in together}) > 1
    for task, episode in zip(tasks, together):
        assert episode.executed.sum() == episode.num_steps == len(episode.step_rewards)
        (alone,) = play([task])
        np.testing.assert_array_equal(alone.step_rewards, episode.step_rewards)
        np.testing.assert_array_equal(alone.final_state, episode.final_state)


def test_two_runs_are_equal_and_a_group_starts_from_one_state():
    tasks = tasks_of("gym:Hopper-v5", (3, 4))
    one, two = play(tasks, group_size=2), play(tasks, group_size=2)
    for first, second in zip(one, two):
        np.testing.assert_array_equal(first.commands, second.commands)
        np.testing.assert_array_equal(first.final_state, second.final_state)
    np.testing.assert_array_equal(one[0].initial_state, one[1].initial_state)
    assert not np.array_equal(one[0].initial_state, one[2].initial_state)
    assert one[0].initial_state.shape == (mujoco.mj_stateSize(*model_and("Hopper-v5")),)


def model_and(name):
    return gym.make(name).unwrapped.model, mujoco.mjtState.mjSTATE_INTEGRATION


def test_commands_reach_from_one_bound_of_the_actions_to_the_other():
    world = GymWorld(tasks_of("gym:InvertedPendulum-v5", (0, 0, 0, 0)))
    rows = np.arange(4)
    assert world.advance(np.array([[-1.0], [0.0], [1.0], [5.0]]), rows).all()
    assert [float(env.unwrapped.data.ctrl[0]) for env in world.envs] == [-3.0, 0.0, 3.0, 3.0]
    world.close()


def test_a_command_that_is_not_finite_is_refused_and_ends_only_its_row():
    tasks = tasks_of("gym:HalfCheetah-v5", (0, 1, 2))
    clean = play(tasks, max_env_steps=12)
    world = GymWorld(tasks)
    usual = decide_with(world, 4)

    def decide(decision, running, observation):
        chunks = usual(decision, running, observation)
        if decision == 1:
            chunks[running == 1, 2] = np.nan
        return chunks

    episodes = run_episodes(world, decide, limits_of(tasks, execution_horizon=4, max_env_steps=12))
    assert [episode.stop_reason for episode in episodes] == ["timeout", "diverged", "timeout"]
    assert episodes[1].num_steps == 6 and np.isfinite(episodes[1].final_state).all()
    for row in (0, 2):
        np.testing.assert_array_equal(episodes[row].final_state, clean[row].final_state)


def test_a_simulation_that_diverges_is_put_back_and_never_taken_for_a_new_episode():
    world = GymWorld(tasks_of("gym:HalfCheetah-v5", (0, 1)))
    both = np.arange(2)
    for _ in range(3):
        assert world.advance(np.full((2, 6), 0.5), both).all()
    world.envs[1].unwrapped.data.xfrc_applied[1, 0] = 1e30
    before, seen = world.states(), world.observe(both)["agent_pos"]
    assert world.advance(np.full((2, 6), 0.5), both).tolist() == [True, False]
    np.testing.assert_array_equal(world.states()[1], before[1])
    np.testing.assert_array_equal(world.observe(both)["agent_pos"][1], seen[1])
    assert not np.array_equal(world.states()[0], before[0])
    world.envs[1].unwrapped.data.xfrc_applied[:] = 0.0
    assert world.advance(np.full((2, 6), 0.5), both).all()  # it can go on once the cause is gone
    world.close()


class Cloud(gym.Env):
    """No bounds, a dict of oddly shaped numbers, success in its own words, and an end of its own."""

    action_space = gym.spaces.Box(-np.inf, np.inf, (2, 1), np.float64)
    observation_space = gym.spaces.Dict(
        {"b": gym.spaces.Box(-9, 9, (2, 2), np.float64), "a": gym.spaces.Discrete(3)}  # flattened in the order of the keys
    )

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.place = self.np_random.normal(size=(2, 1))
        return self._seen(), {}

    def step(self, action):
        assert action.shape == (2, 1) and action.dtype == np.float64
        self.place = self.place + action
        return self._seen(), float(self.place[0, 0]), False, bool(self.place[0, 0] > 3), {"success": self.place[1, 0] > 2}

    def _seen(self):
        return {"a": 1, "b": np.tile(self.place, 2)}


@pytest.fixture
def cloud():
    gym.register("mmrl-test/Cloud-v0", entry_point=Cloud, max_episode_steps=7)
    yield "gym:mmrl-test/Cloud-v0"
    del gym.registry["mmrl-test/Cloud-v0"]


def test_a_command_that_is_not_finite_never_reaches_the_environment(cloud):
    world = GymWorld(tasks_of(cloud, (0, 1)))
    before = world.observe(np.arange(2))["agent_pos"]
    assert world.advance(np.array([[np.nan, 0.0], [0.5, np.inf]]), np.arange(2)).tolist() == [False, False]
    assert world.advance(np.zeros((2, 2)), np.arange(2)).all()
    np.testing.assert_array_equal(world.observe(np.arange(2))["agent_pos"], before)


def test_any_registered_environment_will_do(cloud):
    tasks = tasks_of(cloud, (0, 1))
    world = GymWorld(tasks)
    assert world.command_size == 2 and world.states().shape == (2, 0)
    seen = world.observe(np.array([1]))["agent_pos"]
    assert seen.shape == (1, 7) and seen.dtype == np.float32 and seen[0, :3].tolist() == [0, 1, 0]

    def right_and_up(decision, running, observation):
        return np.array([[[1.0, 0.0]], [[0.0, 1.0]]])[running]

    limits = limits_of(tasks, execution_horizon=1)
    assert limits.max_env_steps.tolist() == [7, 7]
    episodes = run_episodes(world, right_and_up, limits)
    assert [episode.stop_reason for episode in episodes] == ["terminated", "success"]  # its own cut, its own success
    assert success(None, episodes[1]) == 1.0


def test_an_environment_is_a_family_with_one_goal_and_tasks():
    family = build_family("gym:Hopper-v5")
    assert family.name == "gym:Hopper-v5" and family.max_env_steps == 1000
    (task,) = FamilyTasks(family, first_seed=5, num_layouts=1)
    assert (task.family, task.seed, task.goal, task.instruction) == ("gym:Hopper-v5", 5, "default", "Hopper-v5")
    with pytest.raises(DataError, match="a simulation of its own"):
        family.assess(None, np.array([0]), ["default"])


def test_lerobots_environments_come_through_lerobots_own_configs():
    """The arm itself, by way of LeRobot's config and processors, gives the episodes of `ArmWorld`."""
    wrapped = tasks_of("lerobot:mmrl/press", (4, 5))
    world = build_world(wrapped)
    seeds = [1_000_000 + task.seed for task in wrapped]
    family = build_family("press")
    assert world.instructions == [family.instruction("press", seed) for seed in seeds]
    arm = ArmWorld([RobotTask(id=str(seed), family="press", goal="press", instruction="", seed=seed) for seed in seeds])
    rows = np.arange(2)
    for name, value in arm.observe(rows).items():
        np.testing.assert_array_equal(world.observe(rows)[name], value)
    expert = make_expert(arm.physics, arm.families, arm.goals, chunk_size=4)
    direct = run_episodes(arm, expert, limits_of(tasks_of("press", (4, 5)), execution_horizon=4))
    low, high = (bound.astype(float) for bound in (world.envs[0].action_space.low, world.envs[0].action_space.high))
    fresh = ArmWorld([RobotTask(id=str(seed), family="press", goal="press", instruction="", seed=seed) for seed in seeds])
    again = make_expert(fresh.physics, fresh.families, fresh.goals, chunk_size=4)
    episodes = run_episodes(
        world, lambda *asked: 2 * (again(*asked) - low) / (high - low) - 1, limits_of(wrapped, execution_horizon=4)
    )
    for one, other in zip(direct, episodes):
        assert one.stop_reason == other.stop_reason == "success" and one.num_steps == other.num_steps
        np.testing.assert_allclose(one.step_rewards, other.step_rewards, atol=1e-5)
    world.close()


def test_images_of_wrapped_environments_stay_bytes():
    from robotics.lerobot_plugin import MmrlEnvConfig
    from robotics.lerobot_plugin.their_envs import wrap_lerobot_env

    (env,) = wrap_lerobot_env(MmrlEnvConfig(task="press", cameras="wrist", image_size=16))
    observation, _ = env.reset(seed=0)
    direct, _ = ArmEnv("press", cameras=("wrist",), image_size=16).reset(seed=1_000_000)
    np.testing.assert_array_equal(observation["pixels"]["wrist"], direct["pixels"]["wrist"])
    env.close()


@pytest.mark.parametrize(
    ("name", "error", "message"),
    [
        ("gym:Hoppr-v5", DataError, "Did you mean: `Hopper`"),
        ("gym:CartPole-v1", DataError, "its actions are Discrete"),
        ("gym:no_such_package:Fetch-v1", MissingExtra, "No module named 'no_such_package'"),
        ("lerobot:metaworld/push-v3", MissingExtra, r"lerobot\[metaworld\]==0\.6\.1' and MuJoCo 3\.16 or older, but 4"),
        ("lerobot:libero/libero_10", MissingExtra, r"lerobot\[libero\]==0\.6\.1' and MuJoCo 3\.8 or older, but 4"),
        ("lerobot:pusht/PushT-v0", MissingExtra, r"pip install 'lerobot\[pusht\]==0\.6\.1'"),
        ("lerobot:juggling", DataError, "no environment type 'juggling'; expected one of: .*metaworld"),
        ("lerobot:mmrl/press,reach", DataError, "is 2 tasks; name one of them"),
        ("isaac:Lift", DataError, "expected gym:ID or lerobot:TYPE/TASK"),
    ],
)
def test_what_cannot_be_run_is_refused_with_the_reason(name, error, message):
    with pytest.raises(error, match=message):
        GymWorld(tasks_of(name, (0,)))


def test_a_world_holds_one_environment():
    with pytest.raises(DataError, match=r"one environment; the tasks need gym:Hopper-v5, gym:Walker2d-v5"):
        GymWorld([*tasks_of("gym:Hopper-v5", (0,)), *tasks_of("gym:Walker2d-v5", (0,))])
