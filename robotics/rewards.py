"""Reward terms of episodes: each a number in [0, 1], but for `env_return`. Weights live in the config.

A diverged episode earns nothing: what a broken simulation shows is not evidence of anything. Terms that need a measure of work
left do not apply (None) where the world has none.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np

from robotics.rollouts import Episode
from robotics.tasks import RobotTask


def success(task: RobotTask, episode: Episode) -> float:
    """1 if the goal holds at the end of the episode."""
    return float(episode.sound and episode.succeeded[-1])


def success_once(task: RobotTask, episode: Episode) -> float:
    """1 if the goal held after any control step, kept or not."""
    return float(episode.sound and bool(episode.succeeded[1:].any()))


def progress(task: RobotTask, episode: Episode) -> float | None:
    """Share of the work at the start that is done at the end; 0 when there is more left than at the start."""
    if not episode.sound:
        return 0.0
    if np.isnan(episode.left[0]):
        return None
    return float(np.clip(1.0 - episode.left[-1] / episode.left[0], 0.0, 1.0))


def best_progress(task: RobotTask, episode: Episode) -> float | None:
    """Largest share of the work that was done at any time: pays for a grasp that was lost again."""
    if not episode.sound:
        return 0.0
    if np.isnan(episode.left[0]):
        return None
    return float(np.clip(1.0 - episode.left.min() / episode.left[0], 0.0, 1.0))


def closeness(task: RobotTask, episode: Episode) -> float | None:
    """``exp(-left / tolerance)`` averaged over the control steps: high when the goal is near, early and for long.

    Steps that an early success made unnecessary count as spent at the final distance.
    """
    if not episode.sound:
        return 0.0
    if np.isnan(episode.left[0]):
        return None
    near = np.exp(-episode.left[1:] / episode.tolerance)
    unused = episode.max_env_steps - len(near)
    return float((near.sum() + unused * near[-1]) / episode.max_env_steps)


def speed(task: RobotTask, episode: Episode) -> float:
    """Share of the time limit that success left unused; 0 without success."""
    return success(task, episode) * (1.0 - episode.num_steps / episode.max_env_steps)


def smoothness(task: RobotTask, episode: Episode) -> float:
    """``exp(-a / 2)`` where ``a`` is the mean change of commanded arm motion between control steps, degrees."""
    if not episode.sound or len(episode.commands) < 3:
        return 0.0
    change = np.abs(np.diff(episode.commands[:, :-1], n=2, axis=0)).mean()  # the last joint is the gripper
    return float(np.exp(-change / 2.0))


def env_return(task: RobotTask, episode: Episode) -> float:
    """Sum of the world's own rewards, up to and including the last control step; not bounded."""
    return float(episode.step_rewards.sum()) if episode.sound else 0.0


REWARDS: Mapping[str, Callable[[RobotTask, Episode], float | None]] = {
    "success": success,
    "success_once": success_once,
    "progress": progress,
    "best_progress": best_progress,
    "closeness": closeness,
    "speed": speed,
    "smoothness": smoothness,
    "env_return": env_return,
}
