"""Where the house arm's gripper is and how its joints get there, for a hand that points down. Metres and degrees.

The *roll* of a hand that points down turns its fingers about the vertical: they open along the azimuth ``pan - roll + 90``.
"""

from __future__ import annotations

import mujoco
import numpy as np
from numpy.typing import NDArray

from robotics.assets import sim_asset
from robotics.envs.physics import JOINTS

_PIVOT = np.array([0.030, 0.116])  # forward and up from the base to the shoulder_lift axis
_UPPER, _FORE, _HAND = 0.116, 0.130, 0.132  # shoulder_lift to elbow_flex, to wrist_flex, to the point between the fingers


def forward(joints: NDArray[np.float64]) -> NDArray[np.float64]:
    """Position ``[n, 3]`` of the point between the fingers, given joints ``[n, A]`` in robot units."""
    pan, lift, elbow, flex = np.deg2rad(joints[:, :4].T)
    fore, hand = lift + elbow, lift + elbow + flex
    radius = _PIVOT[0] + _UPPER * np.sin(lift) + _FORE * np.cos(fore) + _HAND * np.cos(hand)
    height = _PIVOT[1] + _UPPER * np.cos(lift) - _FORE * np.sin(fore) - _HAND * np.sin(hand)
    return np.stack([radius * np.cos(pan), radius * np.sin(pan), height], axis=1)


def inverse(positions: NDArray[np.float64], rolls: NDArray[np.float64]) -> NDArray[np.float64]:
    """Arm joints ``[n, 5]``, robot units, that hold the fingers at ``positions`` ``[n, 3]`` pointing down, elbow up.

    ``rolls`` ``[n]`` are copied. A position that is too far away gives the straight arm in its direction.
    """
    across = np.hypot(positions[:, 0], positions[:, 1]) - _PIVOT[0]
    up = positions[:, 2] + _HAND - _PIVOT[1]
    distance = np.clip(np.hypot(across, up), 1e-6, 0.9999 * (_UPPER + _FORE))
    bend = (_UPPER**2 + distance**2 - _FORE**2) / (2.0 * _UPPER * distance)
    lift = np.arctan2(across, up) - np.arccos(np.clip(bend, -1.0, 1.0))
    shrink = distance / np.maximum(np.hypot(across, up), 1e-6)
    fore = np.arctan2(_UPPER * np.cos(lift) - up * shrink, across * shrink - _UPPER * np.sin(lift))
    pan = np.arctan2(positions[:, 1], positions[:, 0])
    angles = np.stack([pan, lift, fore - lift, np.pi / 2 - fore], axis=1)
    return np.concatenate([np.rad2deg(angles), rolls[:, None]], axis=1)


class Sag:
    """How far each arm joint stays behind its command because of the arm's own weight."""

    def __init__(self) -> None:
        self._model = mujoco.MjModel.from_xml_path(str(sim_asset("so_arm/so_arm.xml")))
        self._data = mujoco.MjData(self._model)
        self._stiffness = self._model.actuator_gainprm[:5, 0]

    def __call__(self, joints: NDArray[np.float64]) -> NDArray[np.float64]:
        """Degrees ``[n, 5]`` to add to a command, given joints ``[n, A]`` in robot units."""
        torques = np.empty((len(joints), 5))
        for row, angles in enumerate(np.deg2rad(joints[:, : len(JOINTS) - 1])):
            self._data.qpos[:5] = angles
            mujoco.mj_forward(self._model, self._data)
            torques[row] = self._data.qfrc_bias[:5]
        return np.rad2deg(torques / self._stiffness)
