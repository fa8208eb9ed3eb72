"""Where things stand on the tabletop: random layouts without overlap, within the arm's reach.

One seed gives one layout to every family, so that the instruction alone tells what to do. Nothing is asked for that already
holds: no block starts in the bowl, in the zone or on another block, and the button is up.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from robotics.envs.physics import BLOCKS

BLOCK_HALF = 0.014
"""Half the edge of a block, metres; its height when it rests on the table."""
DRAWER_RANGE = 0.08
"""Metres from closed to open."""
BUTTON_HEIGHT, BUTTON_RANGE = 0.032, 0.012
"""Metres: the top of the button that nobody presses, and how far it goes down."""
CABINET_X = 0.22
"""Where the handle of the closed drawer is, always: how far the drawer is open can be read from the handle's position."""

_HOME = np.array([0.0, -25.0, 20.0, 75.0, 0.0, 35.0])  # robot units: about 10 cm above the table, fingers down and half open
_HOME_JITTER = np.array([40.0, 6.0, 6.0, 6.0, 25.0, 15.0])
_RADIUS = (0.125, 0.225)  # metres: where a hand that points down can both touch the table and lift a block off it
_AZIMUTH = 1.65  # radians to either side
_CABINET_Y = (0.035, 0.105)  # metres, to either side
_DRAWER_SWEEP = (-0.110, -0.055, 0.140, 0.055)  # x, y low and high around the handle of the closed drawer
_SIZES = {"bowl": 0.056, "zone": 0.041, "button": 0.038} | dict.fromkeys(BLOCKS, 0.022)
"""Radius that an object occupies, metres."""
_CLEARANCE = 0.006
_FINGER_ROOM = 0.012  # more, around each block, for an opened gripper
_MAX_TRIES = 60


@dataclass(frozen=True, kw_only=True)
class Layout:
    """A start of the tabletop; the arguments of `ArmPhysics.place`."""

    joints: NDArray[np.float64]
    positions: Mapping[str, NDArray[np.float64]]
    yaws: Mapping[str, float]
    slides: Mapping[str, float]


def sample_layout(seed: int, *, drawer_open: bool | None = None) -> Layout:
    """The layout of ``seed``; ``drawer_open`` replaces the random state of the drawer and changes nothing else."""
    rng = np.random.default_rng([seed, 0])
    joints = _HOME + _HOME_JITTER * rng.uniform(-1.0, 1.0, len(_HOME))
    yaws = {color: float(angle) for color, angle in zip(BLOCKS, rng.uniform(-np.pi / 4, np.pi / 4, len(BLOCKS)))}
    random_open, share = bool(rng.integers(2)), rng.uniform()
    is_open = random_open if drawer_open is None else drawer_open
    positions = None
    while positions is None:
        positions = _positions(rng)
    distance = DRAWER_RANGE * (0.85 + 0.15 * share) if is_open else 0.0
    return Layout(joints=joints, positions=positions, yaws=yaws, slides={"drawer": float(distance)})


def _positions(rng: np.random.Generator) -> dict[str, NDArray[np.float64]] | None:
    """One attempt, the largest things first; None when some object finds no room."""
    cabinet = np.array([CABINET_X, rng.choice([-1.0, 1.0]) * rng.uniform(*_CABINET_Y), 0.0])
    placed = {"drawer": cabinet}
    for name in ("bowl", "zone", "button", *BLOCKS):
        for _ in range(_MAX_TRIES):
            radius, azimuth = rng.uniform(*_RADIUS), rng.uniform(-_AZIMUTH, _AZIMUTH)
            point = np.array([radius * np.cos(azimuth), radius * np.sin(azimuth), BLOCK_HALF if name in BLOCKS else 0.0])
            if _is_free(name, point, placed):
                placed[name] = point
                break
        else:
            return None
    return placed


def _is_free(name: str, point: NDArray[np.float64], placed: Mapping[str, NDArray[np.float64]]) -> bool:
    x_low, y_low, x_high, y_high = _DRAWER_SWEEP
    nearest = placed["drawer"][:2] + np.clip(point[:2] - placed["drawer"][:2], (x_low, y_low), (x_high, y_high))
    room = _FINGER_ROOM if name in BLOCKS else 0.0
    if np.hypot(*(point[:2] - nearest)) < _SIZES[name] + _CLEARANCE + room:
        return False
    return all(
        np.hypot(*(point[:2] - where[:2])) >= _SIZES[name] + _SIZES[other] + _CLEARANCE + room
        for other, where in placed.items()
        if other != "drawer"
    )
