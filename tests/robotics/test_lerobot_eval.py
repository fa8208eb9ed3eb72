"""LeRobot's own evaluation of an exported policy, against ours of the same episodes."""

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from lerobot.configs import FeatureType, PreTrainedConfig
from lerobot.envs import close_envs, env_to_policy_features, make_env, make_env_config, make_env_pre_post_processors
from lerobot.policies import make_policy, make_pre_post_processors

from mmrl.config import validate
from mmrl.errors import ConfigError, DataError
from robotics.adapter import build_adapter
from robotics.config import RoboticsRunConfig
from robotics.envs.families import build_family
from robotics.lerobot_plugin import MmrlEnvConfig
from robotics.tasks import RobotTask

FIRST, EPISODES = 1_000_000, 8


@pytest.fixture(scope="module")
def trained(make_adapter, tmp_path_factory):
    """A policy that presses the button and has learned one of reach's four goals, and its exported directory."""
    adapter = make_adapter(
        "tasks.families=[reach,press]", "tasks.goals={reach: [red]}", "rollout.max_env_steps=null", "rollout.media=false",
        "rollout.num_threads=1", "policy.chunk_size=8",
    )  # fmt: skip
    policy, source = adapter.build_policy(), adapter.task_source("train")
    batch = adapter.demonstrate(policy, [source[i] for i in range(256)], seeds=torch.arange(256))
    observations, records, _ = batch.inputs.decisions(torch.device("cpu"))
    optimizer = torch.optim.Adam(policy.parameters(), lr=2e-3)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 400)
    generator = torch.Generator().manual_seed(0)
    for _ in range(400):
        rows = torch.randint(len(records["motions"]), (256,), generator=generator)
        density, _ = policy.score(*({name: value[rows] for name, value in part.items()} for part in (observations, records)))
        optimizer.zero_grad()
        (-density.mean()).backward()
        optimizer.step()
        schedule.step()
    directory = tmp_path_factory.mktemp("export") / "policy"
    adapter.save_policy(policy, directory)
    return adapter, policy, directory


def our_episodes(adapter, policy, family, *, seeds=range(FIRST, FIRST + EPISODES), goal=None, held_out=False):
    """Episodes of our own loop with goals that the seeds draw, as LeRobot's evaluation has them."""
    known = build_family(family)
    tasks = []
    for seed in seeds:
        asked = goal or known.draw_goal(seed)
        words = known.instruction(asked, seed, held_out=held_out)
        tasks.append(RobotTask(id=f"{family}/{seed}", family=family, goal=asked, instruction=words, seed=seed))
    zeros = torch.zeros(len(tasks), dtype=torch.int64)
    return adapter.rollout(policy, tasks, group_size=1, seeds=zeros, greedy=True).outcomes


def assert_agrees(metrics, episodes):
    assert metrics["successes"] == [bool(episode.succeeded[-1]) for episode in episodes]
    np.testing.assert_allclose(metrics["sum_rewards"], [episode.step_rewards.sum() for episode in episodes], rtol=1e-4)
    np.testing.assert_allclose(metrics["max_rewards"], [episode.step_rewards.max() for episode in episodes], rtol=1e-4)


def evaluate(directory, config, *, batch_size, episodes=EPISODES, seed=0):
    """What `lerobot-eval` does between its command line and its files, without the videos."""
    from lerobot.scripts.lerobot_eval import eval_policy_all

    policy_config = PreTrainedConfig.from_pretrained(directory)
    policy_config.pretrained_path, policy_config.device = directory, "cpu"
    policy = make_policy(policy_config, env_cfg=config).eval()
    processors = make_pre_post_processors(policy_config, pretrained_path=str(directory))
    around = make_env_pre_post_processors(env_cfg=config, policy_cfg=policy_config)
    envs = make_env(config, n_envs=batch_size)
    try:
        return eval_policy_all(envs, policy, *around, *processors, episodes, start_seed=seed)
    finally:
        close_envs(envs)


def test_lerobots_evaluation_agrees_with_ours_episode_by_episode(trained):
    adapter, policy, directory = trained
    results = {}
    for batch_size in (1, 3, 8):  # with 3, LeRobot runs a ninth episode and leaves it out
        info = evaluate(directory, MmrlEnvConfig(task="reach,press"), batch_size=batch_size)
        results[batch_size] = {part["task_group"]: part["metrics"] for part in info["per_task"]}
        for family in ("reach", "press"):
            episodes = our_episodes(adapter, policy, family)
            assert_agrees(results[batch_size][family], episodes)
            count = sum(bool(episode.succeeded[-1]) for episode in episodes)
            assert info["per_group"][family]["pc_success"] == pytest.approx(100.0 * count / EPISODES)
            assert info["per_group"][family]["n_episodes"] == EPISODES
    assert len(set(results[1]["reach"]["successes"])) == 2  # a policy that is neither perfect nor hopeless


def test_each_episode_takes_the_same_control_steps_as_ours(trained):
    from lerobot.scripts.lerobot_eval import rollout

    adapter, policy, _ = trained
    config = MmrlEnvConfig(task="reach:red,press")
    vectors = make_env(config, n_envs=EPISODES)
    for family, goal in (("reach", "red"), ("press", None)):
        passive = make_env_pre_post_processors(env_cfg=config, policy_cfg=policy.config)
        seeds = list(range(EPISODES))
        played = rollout(vectors[family][0], policy, *passive, adapter.preprocessor, adapter.postprocessor, seeds)
        lengths = (~played["done"]).sum(dim=1) + 1
        episodes = our_episodes(adapter, policy, family, goal=goal)
        assert lengths.tolist() == [episode.num_steps for episode in episodes]
        for row, episode in enumerate(episodes):
            np.testing.assert_allclose(played["action"][row, : episode.num_steps], episode.commands, atol=2e-3)
    close_envs(vectors)


@pytest.mark.parametrize("kind", ["flow_vla", "token_vla"])
def test_a_policy_with_eyes_sees_and_does_the_same(kind):
    from lerobot.scripts.lerobot_eval import rollout

    tree = {
        "name": "eyes",
        "modality": "robotics",
        "trainer": {"num_steps": 1},
        "policy": {"name": kind, "chunk_size": 4, "cameras": ["scene", "wrist"], "image_size": 32},
        "tasks": {"families": ["lift"]},
        "rollout": {"max_env_steps": 6, "num_threads": 1},
        "rewards": {"success": 1.0},
        "algorithm": "grpo",
    }
    adapter = build_adapter(validate(tree, RoboticsRunConfig, "a test"))
    policy = adapter.build_policy()
    config = MmrlEnvConfig(task="lift", cameras="scene,wrist", image_size=32, max_episode_steps=6)
    vectors = make_env(config, n_envs=2)
    passive = make_env_pre_post_processors(env_cfg=config, policy_cfg=policy.config)
    played = rollout(vectors["lift"][0], policy, *passive, adapter.preprocessor, adapter.postprocessor, [0, 1])
    close_envs(vectors)
    for row, episode in enumerate(our_episodes(adapter, policy, "lift", seeds=range(FIRST, FIRST + 2))):
        np.testing.assert_allclose(played["action"][row], episode.commands, atol=2e-3)
    assert np.ptp(played["action"].numpy(), axis=1).max() > 0.1  # it does something


def test_words_perturbations_and_layouts_are_flags_that_reach_the_episodes():
    config = MmrlEnvConfig(
        task="press,press,push:red", words="unseen", friction_scale=0.25, push_newtons=2.0, first_seed=7, max_episode_steps=9
    )
    envs = make_env(config, n_envs=2)
    assert {group: sorted(tasks) for group, tasks in envs.items()} == {"press": [0, 1], "push": [0]}
    vector = envs["push"][0]
    vector.reset(seed=[3, 4], options={"lerobot_new_rollout": True})
    held_out = [build_family("push").instruction("red", seed, held_out=True) for seed in (10, 11)]
    assert list(vector.call("task_description")) == held_out and vector.call("_max_episode_steps") == (9, 9)
    inner = vector.envs[0].unwrapped
    model, nominal = inner.physics.parameters(0), inner.physics.model
    np.testing.assert_allclose(model.geom_friction, 0.25 * nominal.geom_friction)
    assert inner.pushes[0].force == (0.0, 2.0, 0.0) and (inner.pushes[0].start, inner.pushes[0].end) == (10, 15)
    close_envs(envs)


def test_features_are_those_of_the_policies_and_cameras_bring_their_own():
    assert MmrlEnvConfig.get_choice_name(MmrlEnvConfig) == "mmrl"
    config = make_env_config("mmrl", cameras="scene,wrist", image_size=32)
    features = env_to_policy_features(config)
    assert features["observation.images.wrist"].shape == (3, 32, 32)
    assert {name: feature.type for name, feature in features.items()} == {
        "action": FeatureType.ACTION,
        "observation.state": FeatureType.STATE,
        "observation.environment_state": FeatureType.ENV,
        "observation.images.scene": FeatureType.VISUAL,
        "observation.images.wrist": FeatureType.VISUAL,
    }
    vectors = make_env(config)
    observation, _ = vectors["reach"][0].reset(seed=[0])
    assert observation["pixels"]["wrist"].shape == (1, 32, 32, 3)
    close_envs(vectors)


def test_importing_the_plugin_registers_every_policy_of_ours():
    known = PreTrainedConfig.get_known_choices()
    ours = [name for name, kind in known.items() if kind.__module__.startswith("robotics.policies")]
    assert {"mmrl_gaussian_chunk", "mmrl_flow_vla", "mmrl_token_vla"} <= set(ours)


def test_processes_give_what_one_process_gives():
    vectors = [
        MmrlEnvConfig(task="press", processes=it).create_envs(2, use_async_envs=True)["press"][0] for it in (True, False)
    ]
    assert type(vectors[0]).__name__ == "AsyncVectorEnv" and type(vectors[1]).__name__ == "SyncVectorEnv"
    traces = []
    for vector in vectors:
        observation, _ = vector.reset(seed=[0, 1])
        trace = [observation["agent_pos"]]
        trace += [vector.step(observation["agent_pos"] + np.float32(2.0))[0]["environment_state"] for _ in range(5)]
        traces.append(trace)
        vector.close()
    for one, other in zip(*traces):
        np.testing.assert_array_equal(one, other)


def test_settings_that_mean_nothing_are_refused():
    with pytest.raises(ConfigError, match=r"env\.words is 'new'; expected seen or unseen"):
        MmrlEnvConfig(words="new")
    with pytest.raises(ConfigError, match=r"env\.fps is 30; the arm is commanded at 20 Hz"):
        MmrlEnvConfig(fps=30)
    with pytest.raises(DataError, match="goal 'pink'"):
        MmrlEnvConfig(task="reach:pink").create_envs(1)
    with pytest.raises(DataError, match="task family 'juggle' is not known"):
        MmrlEnvConfig(task="juggle").create_envs(1)
    with pytest.raises(ConfigError, match="names no task family"):
        MmrlEnvConfig(task=" ,").create_envs(1)


@pytest.mark.slow
def test_the_real_lerobot_eval_reports_our_numbers(trained, tmp_path):
    adapter, policy, directory = trained
    command = [
        str(Path(sys.executable).with_name("lerobot-eval")), f"--policy.path={directory}", "--policy.device=cpu",
        "--env.discover_packages_path=robotics.lerobot_plugin", "--env.type=mmrl", "--env.task=reach,press",
        f"--eval.n_episodes={EPISODES}", "--eval.batch_size=4", "--seed=0", f"--output_dir={tmp_path}",
    ]  # fmt: skip
    offline = {**os.environ, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "MUJOCO_GL": "egl"}
    done = subprocess.run(command, env=offline, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stderr[-3000:]
    info = json.loads((tmp_path / "eval_info.json").read_text())
    for part in info["per_task"]:
        assert_agrees(part["metrics"], our_episodes(adapter, policy, part["task_group"]))
    assert len(list(tmp_path.rglob("*.mp4"))) == 2 * EPISODES
