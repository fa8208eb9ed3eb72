import numpy as np

from robotics.assets import sim_asset
from robotics.envs.physics import ArmPhysics
from robotics.experts import ReachExpert
from robotics.rollouts import arrange_groups, run_episodes
from robotics.tasks import RobotTasks


def start(reach, num_layouts=2, group_size=1, goals=("red", "blue")):
    tasks = RobotTasks(reach, goals=goals, first_seed=7, num_layouts=num_layouts)
    tasks = [tasks[i] for i in range(len(tasks))]
    physics = ArmPhysics(sim_asset(reach.scene), num_sims=len(tasks) * group_size)
    states = arrange_groups(physics, reach, tasks, group_size)
    return physics, [task.goal for task in tasks for _ in range(group_size)], states


def test_a_group_shares_its_initial_state_and_layouts_differ(reach):
    physics, _, states = start(reach, num_layouts=2, group_size=3)
    groups = states.reshape(4, 3, -1)
    np.testing.assert_array_equal(groups, np.broadcast_to(groups[:, :1], groups.shape))
    np.testing.assert_array_equal(groups[0], groups[1])  # red and blue in one layout
    assert not np.array_equal(groups[0], groups[2])
    np.testing.assert_array_equal(physics.states(), states)


def test_the_expert_succeeds_and_its_episode_ends_in_the_middle_of_a_chunk(reach):
    physics, goals, states = start(reach)
    expert = ReachExpert(physics, reach, goals, chunk_size=5)
    episodes = run_episodes(physics, reach, goals, expert, max_env_steps=50, execution_horizon=5)
    for row, episode in enumerate(episodes):
        steps = len(episode.commands)
        assert episode.stop_reason == "success" and (episode.distances[-reach.hold_steps :] <= reach.tolerance).all()
        assert len(episode.distances) == steps + 1 and episode.executed.sum() == steps
        assert len(episode.executed) == 10
        np.testing.assert_array_equal(episode.initial_state, states[row])
    assert any(len(episode.commands) % 5 for episode in episodes)  # some chunk was cut short
    early = episodes[0]
    full, last = np.nonzero(early.executed == 5)[0], np.nonzero(early.executed)[0][-1]
    assert full.tolist() == list(range(len(full))) and last <= len(full)


def test_episodes_that_end_at_different_times_in_a_chunk_do_not_mix_up_their_commands(reach):
    together, goals, states = start(reach)
    chunk = {"max_env_steps": 50, "execution_horizon": 10}
    episodes = run_episodes(together, reach, goals, ReachExpert(together, reach, goals, chunk_size=10), **chunk)
    assert len({len(episode.commands) for episode in episodes}) > 1
    for row, goal in enumerate(goals):
        alone = ArmPhysics(sim_asset(reach.scene))
        alone.restore(states[row : row + 1])
        (episode,) = run_episodes(alone, reach, [goal], ReachExpert(alone, reach, [goal], chunk_size=10), **chunk)
        np.testing.assert_array_equal(episode.commands, episodes[row].commands)
        np.testing.assert_array_equal(episode.distances, episodes[row].distances)


def test_the_time_limit_cuts_the_last_chunk(reach):
    physics, goals, _ = start(reach, num_layouts=1)

    def stay(decision, running, observation):
        return np.repeat(observation["agent_pos"].astype(float)[:, None], 4, axis=1)

    for episode in run_episodes(physics, reach, goals, stay, max_env_steps=6, execution_horizon=4):
        assert episode.stop_reason == "timeout" and episode.executed.tolist() == [4, 2]


def test_a_command_that_is_not_finite_ends_only_its_own_episode(reach):
    def run(poison):
        physics, goals, _ = start(reach)
        expert = ReachExpert(physics, reach, goals, chunk_size=4)

        def decide(decision, running, observation):
            chunks = expert(decision, running, observation)
            if poison and decision == 1:
                chunks[running == 2, 1] = np.nan
            return chunks

        return run_episodes(physics, reach, goals, decide, max_env_steps=40, execution_horizon=4)

    clean, poisoned = run(False), run(True)
    assert poisoned[2].stop_reason == "diverged" and not poisoned[2].sound
    assert poisoned[2].executed.tolist() == [4, 1] + [0] * 8
    assert len(poisoned[2].commands) == 5 and len(poisoned[2].distances) == 6
    for row in (0, 1, 3):
        np.testing.assert_array_equal(poisoned[row].distances, clean[row].distances)
        np.testing.assert_array_equal(poisoned[row].final_state, clean[row].final_state)


def test_a_simulation_that_blows_up_ends_only_its_own_episode_and_keeps_its_last_sound_state(reach):
    physics, goals, _ = start(reach)
    physics.push(1, "hand", np.array([1e30, 0.0, 0.0]))
    before = physics.states()[1]
    expert = ReachExpert(physics, reach, goals, chunk_size=4)
    episodes = run_episodes(physics, reach, goals, expert, max_env_steps=40, execution_horizon=4)
    assert [episode.stop_reason for episode in episodes] == ["success", "diverged", "success", "success"]
    assert episodes[1].executed.tolist() == [1] + [0] * 9
    np.testing.assert_array_equal(episodes[1].final_state, before)
    assert np.isfinite(episodes[1].distances).all()
