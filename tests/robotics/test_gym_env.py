import subprocess
import sys

import gymnasium as gym
import numpy as np
import pytest

from mmrl.errors import DataError
from robotics.assets import sim_asset
from robotics.envs import ENVIRONMENTS
from robotics.envs.families import FAMILIES, build_family
from robotics.envs.gym_env import ArmEnv, StandStill
from robotics.envs.instructions import PHRASINGS, vocabulary
from robotics.envs.perturbations import Push
from robotics.envs.physics import ArmPhysics
from robotics.experts import make_expert
from robotics.rollouts import limits_of, run_episodes
from robotics.tasks import RobotTask
from robotics.world import ArmWorld


def expert_episode(env, seed, *, goal, told=None):
    """Let the expert pursue ``goal``, while the environment judges by ``told``."""
    observation, info = env.reset(seed=seed, options={"goal": told or goal})
    expert = make_expert(env.physics, [env.family], [goal], chunk_size=1)
    terminated = truncated = False
    while not (terminated or truncated):
        batched = {name: value[None] for name, value in observation.items()}
        action = expert(env._steps, np.array([0]), batched)[0, 0].astype(np.float32)
        observation, reward, terminated, truncated, info = env.step(action)
    return reward, terminated, truncated, info


def task_of(family, seed, goal=None):
    goal = goal or build_family(family).draw_goal(seed)
    words = build_family(family).instruction(goal, seed)
    return RobotTask(id=f"{family}/{seed}", family=family, goal=goal, instruction=words, seed=seed)


def test_every_family_has_an_environment_of_its_own():
    assert sorted(ENVIRONMENTS.values()) == sorted(FAMILIES)
    for name, family in ENVIRONMENTS.items():
        env = gym.make(name)
        _, info = env.reset(seed=3)
        assert env.unwrapped.task == family and info["goal"] == build_family(family).draw_goal(3)
        assert env.unwrapped._max_episode_steps == build_family(family).max_env_steps
        assert info["instruction"] == build_family(family).instruction(info["goal"], 3) == env.unwrapped.task_description


def test_the_environment_loads_without_torch_and_lerobot():
    code = "import gymnasium, robotics.envs, sys; gymnasium.make('mmrl/Lift-v0').reset(seed=0)\n"
    code += "print([m for m in ('torch', 'lerobot') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize("family", ["reach", "lift", "close_drawer"])
def test_an_episode_is_that_of_run_episodes_bit_for_bit(family):
    rng = np.random.default_rng(5)
    tasks = [task_of(family, seed) for seed in (3, 4, 5)]
    world = ArmWorld(tasks)
    expert = make_expert(world.physics, world.families, world.goals, chunk_size=4)
    noise = rng.normal(size=(len(tasks), 4, 6))

    def decide(decision, running, observation):
        return expert(decision, running, observation) + (6.0 * noise[running] if decision < 3 else 0.0)

    limits = limits_of(tasks, execution_horizon=4, max_env_steps=None)
    episodes = run_episodes(world, decide, limits)
    env = ArmEnv(family)
    for task, episode in zip(tasks, episodes):
        _, info = env.reset(seed=task.seed)
        assert info["goal"] == task.goal and info["instruction"] == task.instruction
        np.testing.assert_array_equal(env.physics.states()[0], episode.initial_state)
        left, holds, rewards = [info["left"]], [info["goal_holds"]], []
        for command in episode.commands:
            _, reward, terminated, truncated, info = env.step(command)
            left.append(info["left"])
            holds.append(info["goal_holds"])
            rewards.append(reward)
        assert terminated or truncated
        assert info["stop_reason"] == episode.stop_reason and info["is_success"] == episode.succeeded[-1]
        np.testing.assert_array_equal(left, episode.left)
        np.testing.assert_array_equal(holds, episode.succeeded)
        np.testing.assert_array_equal(rewards, episode.step_rewards)
        np.testing.assert_array_equal(env.physics.states()[0], episode.final_state)
    assert len({episode.num_steps for episode in episodes}) > 1


def test_a_seed_decides_the_episode_and_first_seed_shifts_it():
    one, info = ArmEnv("lift").reset(seed=5)
    two, other = ArmEnv("lift", first_seed=3).reset(seed=2)
    assert info == other
    for name in one:
        np.testing.assert_array_equal(one[name], two[name])


def test_the_expert_reaches_every_goal_and_earns_full_reward():
    env = ArmEnv()
    for goal in env.family.goals:
        reward, terminated, truncated, info = expert_episode(env, 11, goal=goal)
        assert terminated and not truncated and info["stop_reason"] == "success" and info["is_success"]
        assert reward > 0.7


def test_the_same_motion_fails_when_the_instruction_names_another_colour():
    env = ArmEnv()
    _, terminated, truncated, info = expert_episode(env, 11, goal="red", told="blue")
    assert truncated and not terminated and not info["is_success"] and info["stop_reason"] == "timeout"
    assert env.task_description.split().count("blue") == 1


def test_no_place_satisfies_two_instructions_and_the_start_satisfies_none(reach):
    physics = ArmPhysics(sim_asset(reach.scene), num_sims=200)
    rows = np.arange(200)
    for row in rows:
        reach.arrange(physics, row, row, "red")
    places = np.stack([physics.slot_position(goal) for goal in reach.goals])  # [K, S, 3]
    gaps = np.linalg.norm(places[:, None] - places[None], axis=-1)[~np.eye(4, dtype=bool)]
    assert gaps.min() > 2 * reach.tolerance
    for goal in reach.goals:
        left, success = reach.assess(physics, rows, [goal] * 200)
        assert left.min() > reach.tolerance and not success.any()
    assert not np.array_equal(places[:, 0], places[:, 1])


@pytest.mark.parametrize("family", ["reach", "push", "stack"])
def test_observations_and_layouts_do_not_tell_the_goal(family):
    env = ArmEnv(family, cameras=("scene",), image_size=32)
    seen = [env.reset(seed=3, options={"goal": goal})[0] for goal in env.family.goals[:4]]
    for other in seen[1:]:
        for name in ("agent_pos", "environment_state"):
            np.testing.assert_array_equal(seen[0][name], other[name])
        np.testing.assert_array_equal(seen[0]["pixels"]["scene"], other["pixels"]["scene"])
    env.close()


def test_instructions_name_their_colour_in_several_phrasings_and_some_are_held_out(reach):
    sentences = {reach.instruction("red", seed) for seed in range(60)}
    assert sentences == {template.format("red") for template in PHRASINGS["reach"].seen}
    env = ArmEnv(held_out_words=True, goal="red")
    held_out = {env.reset(seed=seed)[1]["instruction"] for seed in range(60)}
    assert held_out == {template.format("red") for template in PHRASINGS["reach"].held_out}
    assert not sentences & held_out
    words = vocabulary()
    assert {"red", "green", "blue", "yellow", "reach", "the"} <= set(words) and len(set(words)) == len(words)
    assert "" not in words


def test_what_does_not_exist_is_refused_with_what_does():
    with pytest.raises(DataError, match=r"goal 'purple' is not .*; expected one of: red, green, blue, yellow"):
        ArmEnv().reset(seed=0, options={"goal": "purple"})
    with pytest.raises(DataError, match="goal 'purple' is not known; expected one of: red, green, blue, yellow"):
        ArmEnv("lift", goal="purple")
    with pytest.raises(DataError, match="task family 'juggle' is not known; expected one of: close_drawer, lift"):
        build_family("juggle")
    with pytest.raises(DataError, match="no camera ceiling; expected some of: scene, wrist"):
        ArmEnv(cameras=("scene", "ceiling"))
    with pytest.raises(DataError, match="options has gaol; expected some of: goal, instruction, perturbation, pushes"):
        ArmEnv().reset(seed=0, options={"gaol": "red"})
    with pytest.raises(DataError, match="perturbation has gravity; expected some of: mass_scale"):
        ArmEnv().reset(seed=0, options={"perturbation": {"gravity": 2.0}})


def test_an_instruction_of_ones_own_replaces_the_words_and_nothing_else():
    env = ArmEnv()
    _, plain = env.reset(seed=4)
    _, told = env.reset(seed=4, options={"instruction": "the yellow one , please"})
    assert told.pop("instruction") == "the yellow one , please" == env.task_description
    plain.pop("instruction")
    assert told == plain


def moved(env, **options):
    observation, _ = env.reset(seed=1, options=options)
    for _ in range(8):
        observation = env.step(observation["agent_pos"] + np.array([5, 3, -3, 2, 0, 0], np.float32))[0]
    return env.physics.states()[0]


def test_a_perturbation_is_of_one_episode_unless_it_is_the_environments():
    env = ArmEnv("push")
    plain, heavy = moved(env), moved(env, perturbation={"servo_scale": 0.5})
    assert not np.array_equal(plain, heavy)
    np.testing.assert_array_equal(moved(env), plain)
    np.testing.assert_array_equal(moved(ArmEnv("push", perturbation={"servo_scale": 0.5})), heavy)
    np.testing.assert_array_equal(moved(ArmEnv("push", perturbation={"servo_scale": 1.0})), plain)


def test_a_push_acts_from_its_start_to_its_end():
    push = Push(body="hand", force=(0.0, 3.0, 0.0), start=4, end=6)
    pushed, plain = ArmEnv("push", pushes=[push]), ArmEnv("push")
    first, _ = [env.reset(seed=1)[0] for env in (pushed, plain)]
    same = []
    for _ in range(8):
        still = first["agent_pos"]
        same.append(np.array_equal(pushed.step(still)[0]["agent_pos"], plain.step(still)[0]["agent_pos"]))
    assert same[:4] == [True] * 4 and not any(same[4:])


def test_the_time_limit_truncates_and_does_not_terminate():
    env = ArmEnv(max_episode_steps=3)
    observation, _ = env.reset(seed=1)
    outcomes = [env.step(observation["agent_pos"])[2:4] for _ in range(3)]
    assert outcomes == [(False, False), (False, False), (False, True)]


def test_a_simulation_that_blows_up_ends_the_episode_as_diverged():
    env = ArmEnv()
    observation, _ = env.reset(seed=1, options={"pushes": [Push(body="hand", force=(1e30, 0.0, 0.0), start=1, end=2)]})
    assert not any(env.step(observation["agent_pos"])[2:4])
    before = env.physics.joint_positions()
    after, reward, terminated, truncated, info = env.step(observation["agent_pos"])
    assert truncated and not terminated and info["stop_reason"] == "diverged" and not info["is_success"]
    assert np.isfinite(reward) and all(np.isfinite(value).all() for value in after.values())
    np.testing.assert_array_equal(env.physics.joint_positions(), before)
    assert not any(env.step(env.reset(seed=1)[0]["agent_pos"])[2:4])  # and the next one is sound


def test_after_its_end_an_episode_stands_still_until_it_is_reset_on_purpose():
    env = StandStill(ArmEnv(max_episode_steps=2))
    observation, _ = env.reset(seed=1)
    env.step(observation["agent_pos"])
    last = env.step(observation["agent_pos"])
    again, info = env.reset()
    assert again is last[0] and info is last[4]
    moved = env.step(observation["agent_pos"] + 9)
    assert moved[0] is last[0] and moved[1] == 0.0 and moved[2:4] == (False, True)
    fresh, _ = env.reset(seed=1)
    np.testing.assert_array_equal(fresh["agent_pos"], observation["agent_pos"])
    assert not any(env.step(observation["agent_pos"])[2:4])


@pytest.mark.parametrize("size", [48, 160])
def test_policies_see_the_same_images_in_training_and_through_the_environment(size):
    env = ArmEnv("reach", cameras=("scene", "wrist"), image_size=size)
    seen, _ = env.reset(seed=3)
    world = ArmWorld([task_of("reach", 3)], cameras={"scene": (size, size), "wrist": (size, size)})
    trained_on = world.observe(np.array([0]))
    for camera, image in seen["pixels"].items():
        np.testing.assert_array_equal(image, trained_on[f"pixels.{camera}"][0])
    black = (seen["pixels"]["wrist"] == 0).all(axis=2)
    shown = world.draw(np.array([0]), {"wrist": (size, size)}, sky=True)["wrist"][0]
    assert black.any() and (shown[black] > 0).any(axis=1).all(), "the sky is for films"
    world.close()
    env.close()


def test_frames_show_the_scene_and_change_with_it():
    env = ArmEnv("place", render_mode="rgb_array", width=96, height=64, cameras=("scene", "wrist"), image_size=32)
    observation, _ = env.reset(seed=1)
    first = env.render()
    env.reset(seed=2)
    second = env.render()
    assert first.shape == (64, 96, 3) and first.dtype == np.uint8
    assert first.std() > 10 and not np.array_equal(first, second)
    for image in observation["pixels"].values():
        assert image.shape == (32, 32, 3) and image.dtype == np.uint8 and image.std() > 1
    assert not np.array_equal(observation["pixels"]["scene"], observation["pixels"]["wrist"])
    env.close()
    assert ArmEnv().render() is None
