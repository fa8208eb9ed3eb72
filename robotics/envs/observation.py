"""What a policy is told about a scene, the same entries for every scene and task. It never tells the goal.

``environment_state`` is where the gripper is (3), where the eight slots are (3 each, in the order of `SLOTS`), and how the
four blocks are turned (8): cos(4 yaw) and sin(4 yaw), the same for the four yaws at which a cube looks the same. A slot that
the scene lacks or the layout does not use is at `ABSENT`, its yaw entries 0. ``S`` counts simulations, ``E`` = 35 entries.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from robotics.envs.physics import ABSENT, BLOCKS, SLOTS, ArmPhysics

__all__ = ["ABSENT", "BLOCKS", "SLOTS", "environment_bounds", "observe"]

_POINTS = 1 + len(SLOTS)

environment_bounds: NDArray[np.float64] = np.concatenate(
    [np.tile([[-0.1, 0.5], [-0.3, 0.3], [-0.15, 0.45]], (_POINTS, 1)), np.tile([[-1.0, 1.0]], (2 * len(BLOCKS), 1))]
)
"""``[E, 2]`` low and high of each entry, for normalisation. Every coordinate of a point has the same half-width, so differences
of normalised points keep their direction."""
environment_bounds.flags.writeable = False


def observe(physics: ArmPhysics) -> Mapping[str, NDArray[np.float32]]:
    """``agent_pos`` ``[S, A]`` in robot units and ``environment_state`` ``[S, E]`` of every simulation."""
    entries = np.zeros((physics.num_sims, len(environment_bounds)))
    entries[:, :3] = physics.gripper_position()
    entries[:, 3 : 3 * _POINTS] = np.tile(ABSENT, len(SLOTS))
    for name in physics.slots:
        column = 3 + 3 * SLOTS.index(name)
        entries[:, column : column + 3] = position = physics.slot_position(name)
        if name in BLOCKS:
            present = (position != ABSENT).any(axis=1)
            angle = 4.0 * physics.block_yaw(name)
            column = 3 * _POINTS + 2 * BLOCKS.index(name)
            entries[:, column : column + 2] = np.stack([np.cos(angle), np.sin(angle)], axis=1) * present[:, None]
    return {"agent_pos": physics.joint_positions().astype(np.float32), "environment_state": entries.astype(np.float32)}
