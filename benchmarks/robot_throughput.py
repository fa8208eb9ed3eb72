"""How fast the robot world is: our rollout against bare MuJoCo, gymnasium's vector environments and Stable-Baselines3.

Every comparison steps the same scene with the same commands in one process run; quote the ratios. Stable-Baselines3 is left out
when it is not installed (`pip install stable-baselines3`).
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import gymnasium as gym
import mujoco
import numpy as np
import torch
from mujoco import rollout as mujoco_rollout

import robotics.envs  # noqa: F401  registers mmrl/*
from robotics.acting import PolicyDriver, Recorder
from robotics.config import GaussianChunkSection
from robotics.envs.families import build_family
from robotics.policies.building import build_processors, new_policy, policy_config
from robotics.rollouts import limits_of, run_episodes
from robotics.tasks import FamilyTasks
from robotics.world import ArmWorld

HORIZON = 8


def seconds(function: Callable[[], object]) -> tuple[float, float]:
    """Wall and CPU seconds of a call."""
    wall, cpu = time.perf_counter(), time.process_time()
    function()
    return time.perf_counter() - wall, time.process_time() - cpu


def our_rollout(tasks, num_threads: int, cameras=None):
    """The episodes of a state policy that explores, and wall seconds without the arrangement of layouts."""
    section = GaussianChunkSection(chunk_size=HORIZON, width=256, num_blocks=3, initial_std=0.3)
    world = ArmWorld(tasks, num_threads=num_threads, cameras=cameras)
    policy = new_policy(policy_config(section, num_joints=world.command_size, execution_horizon=HORIZON), seed=0)
    pre, post = build_processors(policy.config, world.physics.joint_limits)
    limits = limits_of(tasks, execution_horizon=HORIZON)
    recorder = Recorder(policy, pre, [task.instruction for task in tasks], limits.num_decisions)
    driver = PolicyDriver(policy, recorder, post, seeds=torch.arange(len(tasks)), greedy=False)
    episodes = []
    wall, cpu = seconds(lambda: episodes.extend(run_episodes(world, driver, limits)))
    return world, episodes, wall, cpu


def bare_steps(world: ArmWorld, episodes, num_threads: int) -> tuple[float, float]:
    """Wall and CPU seconds of MuJoCo's own loop over the same states and controls, in threads of its own."""
    physics, substeps = world.physics, world.physics.num_substeps
    controls = []
    for episode in episodes:
        joints = np.clip(episode.commands, *physics.joint_limits.T)
        controls.append(physics.to_radians(joints).repeat(substeps, axis=0))
    longest = max(len(control) for control in controls)
    order = [physics.model.actuator(name).id for name in ("shoulder_pan", "shoulder_lift", "elbow_flex", "wrist_flex",
                                                            "wrist_roll", "gripper")]  # fmt: skip
    whole = np.zeros((len(controls), longest, physics.model.nu))
    for row, control in enumerate(controls):
        whole[row, : len(control), order] = control.T
        whole[row, len(control) :, order] = control[-1][:, None]
    states = np.stack([episode.initial_state for episode in episodes])
    full = mujoco.mj_stateSize(physics.model, mujoco.mjtState.mjSTATE_FULLPHYSICS)
    model_states = np.zeros((len(states), full))
    data = mujoco.MjData(physics.model)
    for row, state in enumerate(states):
        mujoco.mj_setState(physics.model, data, state, mujoco.mjtState.mjSTATE_INTEGRATION)
        mujoco.mj_getState(physics.model, data, model_states[row], mujoco.mjtState.mjSTATE_FULLPHYSICS)
    # Mocap poses and held forces are not part of that state: every thread's data carries those of the first layout.
    threads = [mujoco.MjData(physics.model) for _ in range(num_threads)]
    for one in threads:
        mujoco.mj_setState(physics.model, one, states[0], mujoco.mjtState.mjSTATE_INTEGRATION)
    with mujoco_rollout.Rollout(nthread=num_threads) as runner:
        return seconds(lambda: runner.rollout(physics.model, threads, model_states, whole))


def against_mujoco(family: str, num_rows: int, num_threads: int) -> dict[str, float]:
    tasks = [FamilyTasks(build_family(family), first_seed=0, num_layouts=num_rows)[i] for i in range(num_rows)]
    world, episodes, wall, cpu = our_rollout(tasks, num_threads)
    steps = sum(episode.num_steps for episode in episodes)
    longest = max(episode.num_steps for episode in episodes)
    bare_wall, bare_cpu = bare_steps(world, episodes, num_threads)
    ours, bare = steps / wall, longest * num_rows / bare_wall
    return {
        "env_steps_per_s": ours, "bare_env_steps_per_s": bare, "share_wall": ours / bare,
        "share_cpu": (steps / cpu) / (longest * num_rows / bare_cpu), "episodes_per_s": num_rows / wall,
    }  # fmt: skip


def vector_environment(kind: str, env_id: str, num_envs: int, num_steps: int) -> dict[str, float]:
    make = {"sync": gym.vector.SyncVectorEnv, "async": gym.vector.AsyncVectorEnv}[kind]
    envs = make([lambda: gym.make(env_id, disable_env_checker=True)] * num_envs)
    envs.reset(seed=list(range(num_envs)))
    envs.action_space.seed(0)
    actions = [envs.action_space.sample() for _ in range(num_steps)]
    wall, _ = seconds(lambda: [envs.step(action) for action in actions])
    envs.close()
    return {"env_steps_per_s": num_envs * num_steps / wall}


def frames(family: str, num_rows: int, size: int) -> dict[str, float]:
    tasks = [FamilyTasks(build_family(family), first_seed=0, num_layouts=num_rows)[i] for i in range(num_rows)]
    world = ArmWorld(tasks, cameras={"scene": (size, size), "wrist": (size, size)})
    rows = np.arange(num_rows)
    world.observe(rows)  # opens the context
    wall, cpu = seconds(lambda: world.observe(rows))
    world.close()
    return {"frames_per_s": 2 * num_rows / wall, "frames_per_cpu_s": 2 * num_rows / cpu}


def stable_baselines(env_id: str, num_envs: int, num_steps: int) -> dict[str, float]:
    """Collection only: PPO's rollout buffer filled by a policy of two layers of 64."""
    from stable_baselines3 import PPO
    from stable_baselines3.common.env_util import make_vec_env

    def flat():
        return gym.wrappers.RescaleAction(gym.wrappers.FlattenObservation(gym.make(env_id)), -1.0, 1.0)

    envs = make_vec_env(flat, n_envs=num_envs, seed=0)
    model = PPO("MlpPolicy", envs, n_steps=num_steps, device="cpu", verbose=0)
    _, callback = model._setup_learn(num_envs * num_steps)
    wall, _ = seconds(
        lambda: model.collect_rollouts(envs, callback, model.rollout_buffer, n_rollout_steps=num_steps)
    )  # fmt: skip
    envs.close()
    limit = build_family("push").max_env_steps
    return {"env_steps_per_s": num_envs * num_steps / wall, "episodes_per_s": num_envs * num_steps / wall / limit}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--family", default="push")
    parser.add_argument("--rows", type=int, default=256)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    env_id = {"push": "mmrl/Push-v0", "reach": "mmrl/Reach-v0", "lift": "mmrl/Lift-v0"}[arguments.family]
    cases: dict[str, Callable[[], dict[str, float]]] = {
        "our rollout / bare mj_step": lambda: against_mujoco(arguments.family, arguments.rows, arguments.threads),
        "gymnasium SyncVectorEnv, 8": lambda: vector_environment("sync", env_id, 8, 150),
        "gymnasium AsyncVectorEnv, 8": lambda: vector_environment("async", env_id, 8, 150),
        "both cameras, 64 px": lambda: frames(arguments.family, 64, 64),
        "both cameras, 128 px": lambda: frames(arguments.family, 64, 128),
    }
    if importlib.util.find_spec("stable_baselines3"):
        cases["Stable-Baselines3 PPO, 8"] = lambda: stable_baselines(env_id, 8, 128)
    results = {}
    for name, case in cases.items():
        runs = [case() for _ in range(arguments.repeats)]
        results[name] = {key: statistics.median(run[key] for run in runs) for key in runs[0]}
        print(f"{name:<30}" + "  ".join(f"{key} {value:,.3f}" for key, value in results[name].items()), flush=True)
    if arguments.output is not None:
        arguments.output.write_text(json.dumps(results, indent=1), encoding="utf-8")


if __name__ == "__main__":
    main()
