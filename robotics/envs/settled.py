"""A fingerprint of a scene's physics, to tell demonstrations and initial states that another MuJoCo or another scene made."""

from __future__ import annotations

import hashlib
from pathlib import Path

import mujoco
import numpy as np
from numpy.typing import NDArray

from robotics.envs.physics import ArmPhysics

_DECIMALS = 5  # 10 micrometres: far more than processors differ by, less than a change of contact or solver
_POSE = np.array([20.0, 10.0, 10.0, 40.0, 30.0, 60.0])  # robot units
_CONTROL_STEPS = 40


def settled_state(scene: Path) -> NDArray[np.float64]:
    """``qpos`` of ``scene`` after two seconds in which the arm moves to a fixed pose and everything else comes to rest."""
    physics = ArmPhysics(scene)
    for _ in range(_CONTROL_STEPS):
        physics.advance(_POSE[None], np.array([0]))
    data = mujoco.MjData(physics.model)
    physics.copy_poses_to(0, data)
    return data.qpos.copy()


def world_hash(scene: Path) -> str:
    """``<MuJoCo version>-<12 hexadecimal digits>`` of the settled state of ``scene``.

    Store it with states and demonstrations and compare it before replaying them: the digits differ where physics differs, and
    the version says why.
    """
    rounded = np.round(settled_state(scene), _DECIMALS) + 0.0  # no negative zero
    return f"{mujoco.__version__}-{hashlib.sha256(rounded.tobytes()).hexdigest()[:12]}"
