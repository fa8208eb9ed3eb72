from dataclasses import replace

import numpy as np
import pytest

from robotics.envs.families import build_family
from robotics.envs.perturbations import Push
from robotics.experts import make_expert
from robotics.rewards import success, success_once
from robotics.rollouts import Limits, limits_of, run_episodes
from robotics.tasks import FamilyTasks, RobotTask
from robotics.world import ArmWorld, Assessment


def tasks_of(name="reach", num_layouts=2, goals=("red", "blue")):
    return list(FamilyTasks(build_family(name), first_seed=7, num_layouts=num_layouts, goals=goals))


def expert_of(world, chunk_size):
    return make_expert(world.physics, world.families, world.goals, chunk_size=chunk_size)


def run(tasks, chunk_size=4, **limits):
    world = ArmWorld(tasks)
    return run_episodes(world, expert_of(world, chunk_size), limits_of(tasks, execution_horizon=chunk_size, **limits))


def stay(decision, running, observation):
    return np.repeat(observation["agent_pos"].astype(float)[:, None], 4, axis=1)


def assert_equal(episode, other):
    assert episode.stop_reason == other.stop_reason
    for name in ("left", "succeeded", "step_rewards", "commands", "executed", "initial_state", "final_state"):
        np.testing.assert_array_equal(getattr(episode, name), getattr(other, name), err_msg=name)


def test_a_group_shares_its_initial_state_and_layouts_differ():
    world = ArmWorld(tasks_of(), group_size=3)
    groups = world.states().reshape(4, 3, -1)
    np.testing.assert_array_equal(groups, np.broadcast_to(groups[:, :1], groups.shape))
    np.testing.assert_array_equal(groups[0], groups[1])  # red and blue in one layout
    assert not np.array_equal(groups[0], groups[2])
    np.testing.assert_array_equal(ArmWorld(tasks_of()).states(), groups[:, 0])


@pytest.mark.parametrize("name", ["reach", "lift"])
def test_success_in_the_middle_of_a_chunk_ends_the_episode_there(name):
    tasks = tasks_of(name)
    family = build_family(name)
    world = ArmWorld(tasks)
    initial = world.states()
    limits = limits_of(tasks, execution_horizon=5)
    episodes = run_episodes(world, expert_of(world, 5), limits)
    for row, episode in enumerate(episodes):
        steps = episode.num_steps
        assert episode.stop_reason == "success" and episode.sound
        assert episode.succeeded[-family.hold_steps :].all() and not episode.succeeded[-family.hold_steps - 1]
        assert len(episode.left) == len(episode.succeeded) == steps + 1 == len(episode.step_rewards) + 1
        assert episode.executed.sum() == steps and len(episode.executed) == limits.num_decisions
        full, last = np.flatnonzero(episode.executed == 5), np.flatnonzero(episode.executed)[-1]
        assert full.tolist() == list(range(len(full))) and last <= len(full)
        np.testing.assert_array_equal(episode.initial_state, initial[row])
        assert success(tasks[row], episode) == success_once(tasks[row], episode) == 1.0
    assert any(episode.num_steps % 5 for episode in episodes)  # some chunk was cut short


@pytest.mark.parametrize("name", ["reach", "push"])
def test_what_happens_in_a_row_does_not_depend_on_its_batch_or_on_threads(name):
    tasks = tasks_of(name)
    together = run(tasks, chunk_size=10)
    assert len({episode.num_steps for episode in together}) > 1  # some end while others go on
    for task, episode in zip(tasks, together):
        assert_equal(run([task], chunk_size=10)[0], episode)
    world = ArmWorld(tasks, group_size=2, num_threads=2)
    rows = [task for task in tasks for _ in range(2)]
    grouped = run_episodes(world, expert_of(world, 10), limits_of(rows, execution_horizon=10))
    for row, episode in enumerate(grouped):
        assert_equal(episode, together[row // 2])


def test_tasks_of_different_families_share_a_world_and_keep_their_own_limits():
    tasks = tasks_of("lift", 1, ["red"]) + tasks_of("close_drawer", 1, None) + tasks_of("press", 1, None)
    limits = limits_of(tasks, execution_horizon=4)
    assert limits.max_env_steps.tolist() == [build_family(task.family).max_env_steps for task in tasks]
    for task, episode in zip(tasks, run_episodes(ArmWorld(tasks), stay, limits)):
        assert episode.stop_reason == "timeout" and episode.num_steps == build_family(task.family).max_env_steps
        (alone,) = run_episodes(ArmWorld([task]), stay, limits_of([task], execution_horizon=4))
        decisions = len(alone.executed)  # the whole batch has as many as its longest needs
        assert not episode.executed[decisions:].any()
        assert_equal(replace(episode, executed=episode.executed[:decisions]), alone)


def test_the_time_limit_in_the_middle_of_a_chunk_cuts_it():
    tasks = tasks_of(num_layouts=1)
    episodes = run_episodes(ArmWorld(tasks), stay, limits_of(tasks, execution_horizon=4, max_env_steps=6))
    for episode in episodes:
        assert episode.stop_reason == "timeout" and episode.executed.tolist() == [4, 2] and episode.sound


def test_success_that_is_reached_and_left_again_is_not_success_at_the_end():
    tasks = tasks_of(num_layouts=1, goals=("red",))
    world = ArmWorld(tasks)
    expert = expert_of(world, 1)

    def touch_and_go(decision, running, observation):
        near = world.assess(running).success[0]
        touch_and_go.left = touch_and_go.left or near
        away = observation["agent_pos"].astype(float)[:, None] + np.array([25.0, 0, 0, 0, 0, 0])
        return away if touch_and_go.left else expert(decision, running, observation)

    touch_and_go.left = False
    (episode,) = run_episodes(world, touch_and_go, limits_of(tasks, execution_horizon=1))
    assert episode.stop_reason == "timeout" and episode.succeeded.any() and not episode.succeeded[-1]
    assert success(tasks[0], episode) == 0.0 and success_once(tasks[0], episode) == 1.0


class Script:
    """A world of two rows whose goals hold after the control steps that are listed, and that gives up when told."""

    num_rows, command_size = 2, 1

    def __init__(self, holds, ends=()):
        self.holds, self.ends, self.step = holds, ends, np.zeros(2, int)

    def observe(self, rows):
        return {"agent_pos": np.zeros((len(rows), 1), np.float32)}

    def advance(self, commands, rows):
        self.step[rows] += 1
        return np.ones(len(rows), bool)

    def assess(self, rows):
        success = np.array([self.step[row] in self.holds[row] for row in rows])
        ended = np.array([self.step[row] in self.ends for row in rows])
        return Assessment(np.full(len(rows), np.nan), success, self.step[rows].astype(float), ended)

    def states(self):
        return self.step[:, None].astype(float)


def scripted(holds, *, hold_steps=3, ends=(), max_env_steps=10):
    limits = Limits(
        max_env_steps=np.full(2, max_env_steps), hold_steps=np.full(2, hold_steps), tolerance=np.ones(2), execution_horizon=4
    )
    return run_episodes(Script(holds, ends), lambda d, running, o: np.zeros((len(running), 4, 1)), limits)


def test_success_must_hold_without_a_break():
    unbroken, broken = scripted([(2, 3, 4, 5, 6), (2, 3, 5, 6, 7, 8)])
    assert (unbroken.stop_reason, unbroken.num_steps) == ("success", 4)
    assert (broken.stop_reason, broken.num_steps) == ("success", 7)
    assert broken.step_rewards.tolist() == [1, 2, 3, 4, 5, 6, 7] and broken.executed.tolist() == [4, 3, 0]


def test_a_world_that_gives_up_ends_the_episode_unless_it_has_just_succeeded():
    gave_up, succeeded = scripted([(), (3,)], hold_steps=1, ends=(3,))
    assert (gave_up.stop_reason, gave_up.num_steps, gave_up.sound) == ("terminated", 3, True)
    assert (succeeded.stop_reason, succeeded.num_steps) == ("success", 3)


def test_success_in_the_last_step_counts_at_the_end_though_it_was_not_held():
    late, early = scripted([(10,), (9,)])
    assert late.stop_reason == early.stop_reason == "timeout"
    assert [success(None, episode) for episode in (late, early)] == [1.0, 0.0]
    assert [success_once(None, episode) for episode in (late, early)] == [1.0, 1.0]


@pytest.mark.parametrize("name", ["reach", "push"])
def test_a_command_that_is_not_finite_ends_only_its_own_episode(name):
    tasks = tasks_of(name)

    def episodes_of(poison):
        world = ArmWorld(tasks)
        expert = expert_of(world, 4)

        def decide(decision, running, observation):
            chunks = expert(decision, running, observation)
            if poison and decision == 1:
                chunks[running == 2, 1] = np.nan
            return chunks

        return run_episodes(world, decide, limits_of(tasks, execution_horizon=4))

    clean, poisoned = episodes_of(False), episodes_of(True)
    assert poisoned[2].stop_reason == "diverged" and not poisoned[2].sound
    assert poisoned[2].executed[:3].tolist() == [4, 1, 0] and not poisoned[2].executed[3:].any()
    assert len(poisoned[2].commands) == 5 and len(poisoned[2].left) == 6
    assert success(tasks[2], poisoned[2]) == success_once(tasks[2], poisoned[2]) == 0.0
    for row in (0, 1, 3):
        assert_equal(poisoned[row], clean[row])


@pytest.mark.parametrize("name", ["reach", "lift"])
def test_a_simulation_that_blows_up_ends_only_its_own_episode_and_keeps_its_last_sound_state(name):
    tasks = tasks_of(name)
    world = ArmWorld(tasks)
    world.physics.apply_pushes(1, [Push(body="hand", force=(1e30, 0.0, 0.0), start=0, end=1)], 0)
    before = world.states()[1]
    episodes = run_episodes(world, expert_of(world, 4), limits_of(tasks, execution_horizon=4))
    assert [episode.stop_reason for episode in episodes] == ["success", "diverged", "success", "success"]
    assert episodes[1].executed[:2].tolist() == [1, 0]
    np.testing.assert_array_equal(episodes[1].final_state, before)
    assert np.isfinite(episodes[1].left).all()
    clean = run(tasks)
    for row in (0, 2, 3):
        assert_equal(episodes[row], clean[row])


@pytest.mark.parametrize("name", ["reach", "push", "open_drawer"])
def test_a_restored_state_gives_the_identical_rollout_whatever_happened_before(name):
    tasks = tasks_of(name, goals=None)[:3]
    limits = limits_of(tasks, execution_horizon=4, max_env_steps=30)
    world = ArmWorld(tasks)
    start = world.states()
    first = run_episodes(world, expert_of(world, 4), limits)
    world.physics.push(0, "hand", np.array([5.0, 0.0, 0.0]))  # left behind on purpose
    world.restore(start)
    for episode, again in zip(first, run_episodes(world, expert_of(world, 4), limits)):
        assert_equal(episode, again)
    other = ArmWorld([RobotTask(id=task.id, family=task.family, goal=task.goal, instruction="", seed=99) for task in tasks])
    other.restore(start)  # in a world that was arranged otherwise
    for episode, again in zip(first, run_episodes(other, expert_of(other, 4), limits)):
        assert_equal(episode, again)


def test_a_state_from_the_middle_of_an_episode_goes_on_as_the_episode_did():
    tasks = tasks_of("lift", 1, ["red"])
    limits = limits_of(tasks, execution_horizon=4)
    world = ArmWorld(tasks)
    states = []
    expert = expert_of(world, 4)

    def decide(decision, running, observation):
        states.append(world.states())
        return expert(decision, running, observation)

    (whole,) = run_episodes(world, decide, limits)
    world.restore(states[5])
    (rest,) = run_episodes(world, lambda d, r, o: expert(d + 5, r, o), limits)
    np.testing.assert_array_equal(rest.left, whole.left[20:])
    np.testing.assert_array_equal(rest.final_state, whole.final_state)
