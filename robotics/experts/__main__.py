"""Measure the experts: ``python -m robotics.experts --episodes 200``.

Prints, for every family, in how many episodes the expert succeeds within the family's time limit, with a 95% Wilson interval,
how many control steps a success takes (5%, 50% and 95% quantiles), and the largest motion of a joint between two commands of a
chunk (before the first, from where it is), as a share of half its range. Episode ``i`` has layout ``first + i``; goals take
turns.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from mmrl.statistics import wilson_interval
from robotics.envs.families import FAMILIES, build_family
from robotics.experts import make_expert
from robotics.rollouts import limits_of, run_episodes
from robotics.tasks import RobotTask
from robotics.world import ArmWorld


def tasks_of(name: str, *, first: int, count: int) -> list[RobotTask]:
    """``count`` tasks of a family: one layout each from ``first`` on, the goals in turn."""
    family = build_family(name)
    goals = [family.goals[seed % len(family.goals)] for seed in range(first, first + count)]
    return [
        RobotTask(
            id=f"{name}/{seed}/{goal}",
            domain=name,
            family=name,
            goal=goal,
            instruction=family.instruction(goal, seed),
            seed=seed,
        )
        for seed, goal in enumerate(goals, start=first)
    ]


def measure(name: str, *, first: int, episodes: int, chunk_size: int) -> str:
    """One line of the table."""
    tasks = tasks_of(name, first=first, count=episodes)
    world = ArmWorld(tasks)
    expert = make_expert(world.physics, world.families, world.goals, chunk_size=chunk_size)
    limits = limits_of(tasks, execution_horizon=chunk_size)
    half, largest = 0.5 * np.ptp(world.physics.joint_limits, axis=1), [0.0]

    def decide(
        decision: int, running: NDArray[np.int64], observation: Mapping[str, NDArray[np.float32]]
    ) -> NDArray[np.float64]:
        chunks = expert(decision, running, observation)
        motions = np.diff(chunks, axis=1, prepend=observation["agent_pos"][:, None])
        largest.append(float((np.abs(motions) / half).max()))
        return chunks

    done = run_episodes(world, decide, limits)
    world.close()
    lengths = [episode.num_steps for episode in done if episode.stop_reason == "success"]
    low, high = wilson_interval(len(lengths), episodes)
    quantiles = "/".join(f"{value:.0f}" for value in np.percentile(lengths, [5, 50, 95])) if lengths else "-"
    limit = int(limits.max_env_steps[0])
    return f"{name:13} {len(lengths) / episodes:7.1%} [{low:6.1%}, {high:6.1%}]  {quantiles:>11} {limit:6} {max(largest):14.3f}"


def main() -> None:
    """See the module."""
    parser = argparse.ArgumentParser(prog="python -m robotics.experts", description="Measure the scripted experts.")
    parser.add_argument("families", nargs="*", default=list(FAMILIES), help="families to measure (default: all)")
    parser.add_argument("--episodes", type=int, default=200, help="per family")
    parser.add_argument("--first", type=int, default=0, help="layout of the first episode")
    parser.add_argument("--chunk-size", type=int, default=4, help="commands of a decision")
    args = parser.parse_args()
    print(f"{'family':13} {'success':>7} {'95% interval':>16}  {'steps 5/50/95':>11} {'limit':>6} {'largest motion':>14}")
    for name in args.families:
        print(measure(name, first=args.first, episodes=args.episodes, chunk_size=args.chunk_size), flush=True)


if __name__ == "__main__":
    main()
