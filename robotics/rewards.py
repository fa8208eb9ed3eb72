"""Reward terms of episodes: each a number in [0, 1]. Weights live in the config.

A diverged episode earns nothing: what a broken simulation shows is not evidence of anything.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np

from robotics.rollouts import Episode
from robotics.tasks import RobotTask


def success(task: RobotTask, episode: Episode) -> float:
    """1 if the goal is reached at the end of the episode."""
    return float(episode.sound and episode.distances[-1] <= episode.tolerance)


def success_once(task: RobotTask, episode: Episode) -> float:
    """1 if the goal was reached at any control step, kept or not."""
    return float(episode.sound and bool((episode.distances[1:] <= episode.tolerance).any()))


def progress(task: RobotTask, episode: Episode) -> float:
    """Share of the initial distance that is covered at the end; 0 when the end is further away than the start."""
    return float(np.clip(1.0 - episode.distances[-1] / episode.distances[0], 0.0, 1.0)) if episode.sound else 0.0


def closeness(task: RobotTask, episode: Episode) -> float:
    """``exp(-distance / tolerance)`` averaged over the control steps: high when the goal is near, early and for long.

    Steps that an early success made unnecessary count as spent at the final distance.
    """
    if not episode.sound:
        return 0.0
    near = np.exp(-episode.distances[1:] / episode.tolerance)
    unused = episode.max_env_steps - len(near)
    return float((near.sum() + unused * near[-1]) / episode.max_env_steps)


def smoothness(task: RobotTask, episode: Episode) -> float:
    """``exp(-a / 2)`` where ``a`` is the mean change of commanded arm motion between control steps, degrees."""
    if not episode.sound or len(episode.commands) < 3:
        return 0.0
    change = np.abs(np.diff(episode.commands[:, :-1], n=2, axis=0)).mean()  # the last joint is the gripper
    return float(np.exp(-change / 2.0))


REWARDS: Mapping[str, Callable[[RobotTask, Episode], float]] = {
    "success": success,
    "success_once": success_once,
    "progress": progress,
    "closeness": closeness,
    "smoothness": smoothness,
}
