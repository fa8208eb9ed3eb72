"""The expert that reaches, from any arm pose."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from robotics.envs.physics import SLOTS, ArmPhysics

_DAMPING = 1e-4  # square metres; keeps steps short where the arm is stretched
_MAX_STEP = 6.0  # robot units per control step


class ReachExpert:
    """Damped least squares on the gripper's Jacobian: each chunk moves the joints straight to the goal, evenly."""

    def __init__(self, physics: ArmPhysics, goals: Sequence[str], *, chunk_size: int) -> None:
        self.physics, self.chunk_size = physics, chunk_size
        self.places = np.array([SLOTS.index(goal) for goal in goals])

    def __call__(
        self, decision: int, running: NDArray[np.int64], observation: Mapping[str, NDArray[np.float32]]
    ) -> NDArray[np.float64]:
        """See `robotics.rollouts.Decide`."""
        points = observation["environment_state"][:, : 3 * (1 + len(SLOTS))].astype(np.float64).reshape(len(running), -1, 3)
        offset = points[np.arange(len(running)), 1 + self.places[running]] - points[:, 0]  # [n, 3]
        jacobian = self.physics.gripper_jacobian(running)  # [n, 3, A]
        damped = jacobian @ jacobian.transpose(0, 2, 1) + _DAMPING * np.eye(3)
        change = np.einsum("nia,ni->na", jacobian, np.linalg.solve(damped, offset[..., None])[..., 0])
        change = self.physics.to_robot_units(change, difference=True)
        largest = np.abs(change).max(axis=1, keepdims=True)
        change *= np.minimum(1.0, _MAX_STEP * self.chunk_size / np.maximum(largest, 1e-9))
        shares = np.arange(1, self.chunk_size + 1) / self.chunk_size
        return observation["agent_pos"].astype(np.float64)[:, None] + shares[:, None] * change[:, None]
