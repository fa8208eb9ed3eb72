import subprocess
import sys
import warnings

import gymnasium as gym
import numpy as np
import pytest
from gymnasium.utils.env_checker import check_env

import robotics.envs  # noqa: F401  (registers the environments)
from mmrl.errors import DataError
from robotics.assets import sim_asset
from robotics.envs.families import build_family
from robotics.envs.gym_env import ArmEnv
from robotics.envs.instructions import HELD_OUT_REACH_TEMPLATES, REACH_TEMPLATES, vocabulary
from robotics.envs.physics import ArmPhysics
from robotics.experts import ReachExpert


def expert_episode(env, seed, *, goal, told=None, steps=60):
    """Let the expert reach ``goal``, while the environment judges by ``told``."""
    observation, info = env.reset(seed=seed, options={"goal": told or goal})
    expert = ReachExpert(env.physics, env.family, [goal], chunk_size=1)
    for _ in range(steps):
        batched = {name: value[None] for name, value in observation.items()}
        action = expert(0, np.array([0]), batched)[0, 0].astype(np.float32)
        observation, reward, terminated, truncated, info = env.step(action)
        if terminated or truncated:
            break
    return reward, terminated, truncated, info


def test_gymnasiums_own_checker_accepts_the_environment():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it would rather see actions in [-1, 1] than in the robot's units
        check_env(gym.make("mmrl/Reach-v0").unwrapped, skip_render_check=True)


def test_the_environment_loads_without_torch_and_lerobot():
    code = "import robotics.envs.gym_env, sys; print([m for m in ('torch', 'lerobot') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_a_seed_decides_the_first_observation_and_another_seed_gives_another():
    first, second = ArmEnv(), ArmEnv()
    second.reset(seed=9)
    one, info = first.reset(seed=5)
    two, other = second.reset(seed=5)
    for name in one:
        np.testing.assert_array_equal(one[name], two[name])
    assert info == other
    assert not np.array_equal(one["environment_state"], first.reset(seed=6)[0]["environment_state"])


def test_reset_step_reset_step_is_bit_equal():
    env = ArmEnv()
    runs = []
    for _ in range(2):
        observation, _ = env.reset(seed=42)
        trace = [observation]
        for shift in (5.0, -4.0, 3.0):
            trace.append(env.step(observation["agent_pos"] + np.float32(shift))[0])
        runs.append(trace)
        env.physics.push(0, "hand", np.array([4.0, 0.0, 0.0]))  # left behind on purpose
        env.step(observation["agent_pos"])
    for before, after in zip(*runs):
        for name in before:
            np.testing.assert_array_equal(before[name], after[name])


def test_the_expert_reaches_every_goal_and_earns_full_reward():
    env = ArmEnv()
    for goal in env.family.goals:
        reward, terminated, truncated, info = expert_episode(env, 11, goal=goal)
        assert terminated and not truncated and info["stop_reason"] == "success" and info["is_success"]
        assert reward > 0.7


def test_the_same_motion_fails_when_the_instruction_names_another_colour():
    env = ArmEnv()
    _, terminated, truncated, info = expert_episode(env, 11, goal="red", told="blue", steps=60)
    assert truncated and not terminated and not info["is_success"] and info["stop_reason"] == "timeout"
    assert env.task_description.split().count("blue") == 1


def test_no_place_satisfies_two_instructions_and_the_start_satisfies_none(reach):
    physics = ArmPhysics(sim_asset(reach.scene), num_sims=200)
    for row in range(200):
        reach.arrange(physics, row, row)
    places = np.stack([physics.target_position(goal) for goal in reach.goals])  # [K, S, 3]
    gaps = np.linalg.norm(places[:, None] - places[None], axis=-1)[~np.eye(4, dtype=bool)]
    assert gaps.min() > 2 * reach.tolerance
    assert min(reach.distance(physics, [goal] * 200).min() for goal in reach.goals) > reach.tolerance
    assert not np.array_equal(places[:, 0], places[:, 1])


def test_observations_and_layouts_do_not_tell_the_goal():
    env = ArmEnv()
    seen = [env.reset(seed=3, options={"goal": goal})[0] for goal in env.family.goals]
    for other in seen[1:]:
        for name, value in seen[0].items():
            np.testing.assert_array_equal(value, other[name])


def test_instructions_name_their_colour_in_several_phrasings_and_some_are_held_out(reach):
    sentences = {reach.instruction("red", seed) for seed in range(60)}
    assert sentences == {template.format("red") for template in REACH_TEMPLATES}
    held_out = {reach.instruction("red", seed, held_out=True) for seed in range(60)}
    assert held_out == {template.format("red") for template in HELD_OUT_REACH_TEMPLATES}
    assert not sentences & held_out
    words = vocabulary()
    assert {"red", "green", "blue", "yellow", "reach", "the"} <= set(words) and len(set(words)) == len(words)
    assert not {"marble", "orb", ""} & set(words)


def test_an_unknown_goal_or_family_lists_the_known_ones():
    with pytest.raises(DataError, match="goal 'purple' is not in the scene; expected one of: red, green, blue, yellow"):
        ArmEnv().reset(seed=0, options={"goal": "purple"})
    with pytest.raises(DataError, match="task family 'juggle' is not known; expected one of: reach"):
        build_family("juggle")


def test_the_time_limit_truncates_and_does_not_terminate():
    env = ArmEnv(max_episode_steps=3)
    observation, _ = env.reset(seed=1)
    outcomes = [env.step(observation["agent_pos"])[2:4] for _ in range(3)]
    assert outcomes == [(False, False), (False, False), (False, True)]


def test_an_action_that_is_not_finite_ends_the_episode_as_diverged():
    env = ArmEnv()
    observation, _ = env.reset(seed=1)
    after, reward, terminated, truncated, info = env.step(observation["agent_pos"] * np.float32(np.nan))
    assert truncated and not terminated and info["stop_reason"] == "diverged"
    assert np.isfinite(reward) and all(np.isfinite(value).all() for value in after.values())


def test_frames_show_the_scene_and_change_with_it():
    from robotics.envs.rendering import SceneRenderer

    env = ArmEnv(render_mode="rgb_array", width=96, height=64)
    env.reset(seed=1)
    first = env.render()
    env.reset(seed=2)
    second = env.render()
    assert first.shape == (64, 96, 3) and first.dtype == np.uint8
    assert first.std() > 10 and not np.array_equal(first, second)
    wrist = SceneRenderer(env.physics, width=32, height=32).render("wrist")
    assert wrist.shape == (32, 32, 3) and wrist.std() > 1
    env.close()
    assert ArmEnv().render() is None
