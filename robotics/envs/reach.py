"""Reaching the named one of four coloured spheres.

The scene always holds all four, and observations list all four positions in a fixed order, so only the instruction tells which
one is meant: the other three are distractors, too far apart for one position to satisfy two instructions.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from mmrl.errors import DataError
from robotics.envs.instructions import COLORS, PHRASINGS
from robotics.envs.physics import JOINTS, ArmPhysics

_HOME = np.array([0.0, -20.0, 20.0, 30.0, 0.0, 20.0])  # robot units: the hand in front of the table's middle
_HOME_JITTER = np.array([10.0, 8.0, 8.0, 8.0, 8.0, 5.0])
_HOME_GRIPPER = np.array([0.235, 0.0, 0.16])  # about where the home pose holds the gripper
_AZIMUTH, _RADIUS, _HEIGHT = (-60.0, 60.0), (0.16, 0.30), (0.04, 0.22)  # degrees, metres, metres
_MIN_SEPARATION = 0.09  # three tolerances between targets
_MIN_TRAVEL = 0.10  # and from the home position, so that standing still is not success


class ReachFamily:
    """Success: the point between the fingers is within 3 cm of the sphere. See `robotics.envs.families.TaskFamily`."""

    name = "reach"
    scene = "reach/scene.xml"
    goals = COLORS
    tolerance = 0.03
    hold_steps = 4
    max_env_steps = 40

    def draw_goal(self, seed: int) -> str:
        return self.goals[np.random.default_rng([seed, 1]).integers(len(self.goals))]

    def instruction(self, goal: str, seed: int, *, held_out: bool = False) -> str:
        if goal not in self.goals:
            raise DataError(f"reach: goal {goal!r} is not in the scene; expected one of: {', '.join(self.goals)}.")
        templates = PHRASINGS["reach"].held_out if held_out else PHRASINGS["reach"].seen
        choice = np.random.default_rng([seed, 2, self.goals.index(goal)]).integers(len(templates))
        return templates[choice].format(goal)

    def arrange(self, physics: ArmPhysics, row: int, seed: int, goal: str) -> None:
        """The layout of ``seed`` is the same for every goal."""
        rng = np.random.default_rng([seed, 0])
        joints = _HOME + _HOME_JITTER * rng.uniform(-1.0, 1.0, len(JOINTS))
        taken = [_HOME_GRIPPER]
        while len(taken) <= len(self.goals):
            azimuth, radius, height = (rng.uniform(*bounds) for bounds in (_AZIMUTH, _RADIUS, _HEIGHT))
            angle = np.deg2rad(azimuth)
            point = np.array([radius * np.cos(angle), radius * np.sin(angle), height])
            gaps = [_MIN_TRAVEL] + [_MIN_SEPARATION] * (len(taken) - 1)
            if all(np.linalg.norm(point - other) >= gap for other, gap in zip(taken, gaps)):
                taken.append(point)
        physics.place(row, joints=joints, positions=dict(zip(self.goals, taken[1:])))

    def assess(
        self, physics: ArmPhysics, rows: NDArray[np.int64], goals: Sequence[str]
    ) -> tuple[NDArray[np.float64], NDArray[np.bool_]]:
        """Distance from the gripper to the sphere."""
        places = {goal: physics.slot_position(goal)[rows] for goal in set(goals)}
        wanted = np.array([places[goal][i] for i, goal in enumerate(goals)]).reshape(-1, 3)
        left = np.linalg.norm(physics.gripper_position()[rows] - wanted, axis=1)
        return left, left <= self.tolerance
