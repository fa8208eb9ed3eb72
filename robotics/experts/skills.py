"""What the tabletop expert does next, decided from what is seen now.

A skill looks at one `View` and names a `Waypoint`. Nothing is remembered from step to step: whether the block is in hand,
whether the hand is above it, whether it has to rise first, are all read off positions. So a policy that sees the same numbers
can do the same, a lost grasp is tried again, and an expert can take over in any state.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from robotics.envs.tabletop_conditions import BOWL_HEIGHT
from robotics.envs.tabletop_layout import BLOCK_HALF, CABINET_X, DRAWER_RANGE

AROUND_BLOCK = 26.0
"""Opening (robot units) at which the fingers touch a block on both sides."""
OPEN = 37.0
"""Opening to approach a block with, and to leave it."""
FINGER_PLAY = 0.010
"""Metres that the hand moves until a finger takes the drawer's handle along."""
_FIXED_FINGER, _MOVING_FINGER = -0.023, 0.031  # metres from a block along the fingers' opening, when the hand comes down
_SQUEEZING = 25.1  # at most so wide when the fingers press on a block; they end up at about 24

_TRAVEL = 0.085  # metres: the gripper passes above everything
_CARRY = 0.085  # height of a carried block: its lower side passes above everything, too
_LIFTED = 0.105
_CARRY_SPEED = 0.75
_HANDLE_HEIGHT = 0.034  # of the gripper around the handle: its tips stay above the stays
_UP = np.array([0.0, 0.0, 1.0])


@dataclass(kw_only=True)
class View:
    """What is seen of one simulation."""

    gripper: NDArray[np.float64]
    """``[3]`` metres."""
    pan: float
    """Degrees."""
    roll: float
    """Degrees."""
    opening: float
    """Robot units, 0 to 100."""
    slots: dict[str, NDArray[np.float64]]
    """``[3]`` metres, by name."""
    yaws: Mapping[str, float]
    """Degrees in [-45, 45], by colour."""

    def in_hand(self, point: NDArray[np.float64]) -> tuple[float, float, float]:
        """Metres from the gripper to ``point`` along the fingers' opening, across it, and up."""
        gap, azimuth = point - self.gripper, math.radians(self.pan - self.roll)
        opening = -math.sin(azimuth) * gap[0] + math.cos(azimuth) * gap[1]
        return float(opening), float(math.cos(azimuth) * gap[0] + math.sin(azimuth) * gap[1]), float(gap[2])

    def holds(self, color: str) -> bool:
        """The fingers are closed on the block."""
        along, across, up = self.in_hand(self.slots[color])
        return abs(along) < 0.009 and abs(across) < 0.018 and abs(up) < 0.022 and self.opening < _SQUEEZING

    def straddles_handle(self) -> bool:
        """The drawer's handle is between the fingers."""
        gap = self.gripper - self.slots["drawer"]
        return abs(gap[0]) < 0.014 and abs(gap[1]) < 0.013 and self.gripper[2] < _HANDLE_HEIGHT + 0.008


@dataclass(frozen=True, kw_only=True)
class Waypoint:
    """Where the hand, pointing down, is to go next."""

    position: NDArray[np.float64]
    """``[3]`` metres."""
    roll: float
    """Degrees."""
    opening: float
    """Robot units."""
    speed: float = 1.0
    """Share of the full speed."""


def lift(view: View, color: str) -> Waypoint:
    """Grasp the block, then raise it."""
    if not view.holds(color):
        return grasp(view, color)
    rise = _LIFTED - view.slots[color][2]
    return Waypoint(position=view.gripper + rise * _UP, roll=view.roll, opening=0.0, speed=0.7)


def push(view: View, color: str) -> Waypoint:
    """Bring the block to the middle of the zone."""
    return bring(view, color, view.slots["zone"] * [1.0, 1.0, 0.0] + BLOCK_HALF * _UP)


def place(view: View, color: str) -> Waypoint:
    """Bring the block to the middle of the bowl."""
    return bring(view, color, view.slots["bowl"] + BOWL_HEIGHT * _UP)


def stack(view: View, pair: str) -> Waypoint:
    """Bring the upper block onto the lower one."""
    upper, lower = pair.split("-on-")
    return bring(view, upper, view.slots[lower] + 2.0 * BLOCK_HALF * _UP)


def bring(view: View, color: str, destination: NDArray[np.float64]) -> Waypoint:
    """Grasp the block, carry it above ``destination``, lower it, let go, and rise."""
    block = view.slots[color]
    gap = destination - block
    away = float(np.hypot(gap[0], gap[1]))
    if away < 0.009 and abs(gap[2]) < 0.0045:
        near = max(map(abs, view.in_hand(block))) < 0.03
        if near and view.opening < AROUND_BLOCK + 7.5:
            return Waypoint(position=view.gripper, roll=view.roll, opening=OPEN)
        return Waypoint(position=view.gripper + max(_TRAVEL - view.gripper[2], 0.0) * _UP, roll=view.roll, opening=OPEN)
    if not view.holds(color):
        return grasp(view, color)
    height = min(destination[2] + max(0.0, 3.0 * (away - 0.004)), max(_CARRY, destination[2] + 0.03))
    share = float(np.clip((block[2] - 0.05) / 0.02, 0.0, 1.0)) if away > 0.03 else 1.0
    move = np.array([share * gap[0], share * gap[1], height - block[2]])
    roll = view.roll if away < 0.03 or block[2] < 0.03 else 0.0
    return Waypoint(position=view.gripper + move, roll=roll, opening=0.0, speed=0.35 if away < 0.015 else _CARRY_SPEED)


def grasp(view: View, color: str) -> Waypoint:
    """Go above the block, align with its sides, go down around it, close the fingers."""
    block = view.slots[color]
    pan = math.degrees(math.atan2(block[1], block[0]))
    roll = _roll_for(view, color, pan)
    along, across, up = view.in_hand(block)
    turned = abs(view.roll - view.pan - (roll - pan))
    if -0.008 < along < 0.014 and abs(across) < 0.008 and abs(up) < 0.009 and turned < 14.0:
        return Waypoint(position=view.gripper + up * _UP, roll=view.roll, opening=0.0, speed=0.3)
    if max(abs(along), abs(across)) < 0.02 and abs(up) < 0.03 and view.opening < OPEN - 4.0:
        return Waypoint(position=view.gripper, roll=view.roll, opening=OPEN)  # not well between the fingers: let go of it
    azimuth = math.radians(pan - roll)
    offset = 0.005 * np.array([-math.sin(azimuth), math.cos(azimuth), 0.0])  # room for the fixed finger
    return approach(view, block - offset, roll, OPEN, hover=min(block[2] + 0.042, 0.12))


def open_drawer(view: View, _: str) -> Waypoint:
    """Take the handle between the fingers and pull."""
    return _move_drawer(view, CABINET_X - DRAWER_RANGE - 0.006)


def close_drawer(view: View, _: str) -> Waypoint:
    """Take the handle between the fingers and push."""
    return _move_drawer(view, CABINET_X + 0.016)


def _move_drawer(view: View, x: float) -> Waypoint:
    """The hand's own ``x`` decides: it drags the handle along."""
    handle = view.slots["drawer"]
    pan = math.degrees(math.atan2(handle[1], handle[0]))
    roll = pan - 90.0 if pan > 0 else pan + 90.0
    target = np.array([handle[0], handle[1], _HANDLE_HEIGHT])
    if view.straddles_handle():
        x = view.gripper[0] + float(np.clip(x - view.gripper[0], -0.025, 0.025))  # a short way in joints is straight
        pan = math.degrees(math.atan2(handle[1], x))
        roll = pan - 90.0 if view.roll < 0 else pan + 90.0
        return Waypoint(position=np.array([x, handle[1], target[2]]), roll=roll, opening=AROUND_BLOCK, speed=0.4)
    return approach(view, target, roll, AROUND_BLOCK, hover=0.068)


def press(view: View, _: str) -> Waypoint:
    """Close the fingers above the button and push it down."""
    button = view.slots["button"]
    pan = math.degrees(math.atan2(button[1], button[0]))
    roll = float(np.clip(view.roll, -60.0, 60.0))
    azimuth = math.radians(pan - roll)
    tips = -0.012 * np.array([-math.sin(azimuth), math.cos(azimuth), 0.0])  # closed fingers meet beside the middle
    return approach(view, np.array([button[0], button[1], 0.022]) - tips, roll, 4.0, hover=0.058, tolerance=0.008)


SKILLS: Mapping[str, Callable[[View, str], Waypoint]] = {
    "push": push,
    "lift": lift,
    "place": place,
    "stack": stack,
    "open_drawer": open_drawer,
    "close_drawer": close_drawer,
    "press": press,
}
"""By the verb of a condition (`robotics.envs.tabletop_conditions`)."""


def approach(
    view: View, target: NDArray[np.float64], roll: float, opening: float, *, hover: float, tolerance: float = 0.005
) -> Waypoint:
    """Travel high, hover above ``target`` at height ``hover`` until hand and fingers are right, then go down to it."""
    gap = target - view.gripper
    away, height = float(np.hypot(gap[0], gap[1])), float(view.gripper[2])
    descending = height < hover - 0.01
    slack = 1.8 if descending else 1.0
    ready = away < tolerance * slack and abs(view.roll - roll) < 6.0 * slack and abs(view.opening - opening) < 3.0 * slack
    if ready:
        return Waypoint(position=target, roll=roll, opening=opening, speed=0.5)
    if away < 0.03 and not descending:
        return Waypoint(position=np.array([target[0], target[1], hover]), roll=roll, opening=opening)
    share = float(np.clip((height - hover + 0.01) / 0.02, 0.0, 1.0))  # first up, then across
    position = np.array([view.gripper[0] + share * gap[0], view.gripper[1] + share * gap[1], max(_TRAVEL, hover)])
    return Waypoint(
        position=position, roll=view.roll + share * (roll - view.roll), opening=view.opening + share * (opening - view.opening)
    )


def _roll_for(view: View, color: str, pan: float) -> float:
    """Of the rolls that look alike to a cube, one at which both fingers find room, near 0 (see `bring`).

    Between two that are about as good, the one nearer to the present roll.
    """
    first = (pan - view.yaws[color] + 45.0) % 90.0 - 45.0

    def cost(roll: float) -> float:
        azimuth = math.radians(pan - roll)
        opening = np.array([-math.sin(azimuth), math.cos(azimuth), 0.0])
        hits = sum(_is_taken(view, color, view.slots[color] + offset * opening) for offset in (_FIXED_FINGER, _MOVING_FINGER))
        return abs(roll) + 0.5 * abs(roll - view.roll) + 300.0 * hits

    return min((first - 90.0, first, first + 90.0), key=cost)


def _is_taken(view: View, color: str, point: NDArray[np.float64]) -> bool:
    """A finger that comes down at ``point``, beside the block, would land on something."""
    gaps = {name: float(np.hypot(*(point - where)[:2])) for name, where in view.slots.items()}
    handle = view.slots["drawer"]
    return (
        any(gaps[other] < 0.024 and abs(view.slots[other][2] - point[2]) < 0.03 for other in view.yaws if other != color)
        or 0.036 < gaps["bowl"] < 0.062
        or gaps["button"] < 0.042
        or (handle[0] - 0.012 < point[0] and abs(point[1] - handle[1]) < 0.06)
    )
