"""Experts that are watched: their decisions are noted down, and noise and mistakes are added on the way. No torch.

*Noise* follows DART (Laskey et al. 2017): the robot is sent the expert's command plus a little noise, while the action that is
written down is the one the expert wanted. States off the expert's path are visited, each with the action that leads back, which
is what cloning a policy needs to recover from its own small errors. The gripper is left alone, so nothing is dropped.

A *mistake* is the demonstrator's own: for a quarter of a second to a second the commands drift off, smoothly, and come back,
and the expert recovers. Such frames are marked; actions are what was done, so they are not for imitation without the mark.

Axes: ``N`` episodes, ``L`` control steps, ``A`` joints, the gripper last.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from robotics.envs.observation import environment_bounds
from robotics.experts import make_expert
from robotics.rollouts import Limits
from robotics.tasks import RobotTask
from robotics.world import ArmWorld

_NOISE, _MISTAKE, _ERRS = 11, 12, 13  # streams of random numbers
_DURATION = (0.15, 0.35)  # of a mistake, as a share of the episode without it
_LEAST, _MOST = 5, 20  # and in control steps
_START = (0.1, 0.4)  # when it starts, as a share of the episode without it
_DRIFT = (0.05, 0.10)  # most that one command is off, as a share of half of a joint's range; the expert starts from there again


class Demonstrator:
    """Decides one command at a time for every row of an `ArmWorld`. See `robotics.rollouts.Decide`."""

    def __init__(
        self, world: ArmWorld, tasks: Sequence[RobotTask], limits: Limits, *, noise: float, lengths: Mapping[str, int]
    ) -> None:
        """``noise`` is a standard deviation as a share of half of each arm joint's range.

        Tasks (by id) in ``lengths`` get a mistake; it says how many control steps they take without. ``limits`` are those of
        the tasks; an episode with a mistake gets as much time again, to start over.
        """
        physics = world.physics
        self.expert = make_expert(physics, world.families, world.goals, chunk_size=1)
        self.low, self.high = physics.joint_limits.T
        half = (self.high - self.low) / 2
        longest = int(limits.max_env_steps.max()) * (2 if lengths else 1)
        shape = (len(tasks), longest, world.command_size)
        self.noise, self.drift, self.mistaken = np.zeros(shape), np.zeros(shape), np.zeros(shape[:2], bool)
        extra = np.zeros(len(tasks), np.int64)
        for row, task in enumerate(tasks):
            if noise > 0:
                self.noise[row, :, :-1] = noise * half[:-1] * _rng(task, _NOISE).standard_normal((longest, len(half) - 1))
            if task.id in lengths:
                rng = _rng(task, _MISTAKE)
                start = round(lengths[task.id] * rng.uniform(*_START))
                duration = round(np.clip(lengths[task.id] * rng.uniform(*_DURATION), _LEAST, _MOST))
                steps = slice(start, start + duration)
                self.drift[row, steps] = _swing(duration)[:, None] * half * _direction(rng, len(half))
                self.mistaken[row, steps] = True
                extra[row] = limits.max_env_steps[row]
        self.limits = replace(limits, max_env_steps=limits.max_env_steps + extra)
        self.actions, self.agent_pos = np.zeros(shape, np.float32), np.zeros(shape, np.float32)
        self.environment_state = np.zeros((*shape[:2], len(environment_bounds)), np.float32)

    def __call__(self, decision: int, running: NDArray[np.int64], observation: Mapping[str, NDArray]) -> NDArray[np.float64]:
        """Commands ``[n, 1, A]``. They are float32 numbers, as they are written down, so that the file replays the episode."""
        wanted = self.expert(decision, running, observation)[:, 0] + self.drift[running, decision]
        self.actions[running, decision] = actions = np.clip(wanted, self.low, self.high).astype(np.float32)
        self.agent_pos[running, decision] = observation["agent_pos"]
        self.environment_state[running, decision] = observation["environment_state"]
        commands = np.clip(actions + self.noise[running, decision], self.low, self.high).astype(np.float32)
        return commands[:, None].astype(np.float64)


def errs(task: RobotTask, share: float) -> bool:
    """Whether a task is among the ``share`` of tasks that are demonstrated with a mistake."""
    return _rng(task, _ERRS).random() < share


def _rng(task: RobotTask, stream: int) -> np.random.Generator:
    return np.random.default_rng([task.seed, stream, *task.goal.encode()])


def _swing(duration: int) -> NDArray[np.float64]:
    """``[duration]`` from nothing to 1 and back."""
    return np.sin(np.pi * (np.arange(duration) + 1) / (duration + 1))


def _direction(rng: np.random.Generator, num_joints: int) -> NDArray[np.float64]:
    """``[A]`` how far each joint drifts; in every other mistake the grip goes wrong as well."""
    arm = rng.uniform(-1.0, 1.0, num_joints - 1)
    grip = rng.choice([-4.0, 4.0]) if rng.random() < 0.5 else 0.0
    return rng.uniform(*_DRIFT) * np.append(arm / np.abs(arm).max(), grip)
