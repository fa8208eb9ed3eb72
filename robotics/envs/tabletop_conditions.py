"""What can be asked for on the tabletop, as tests of the physical state and as metres of work left.

A *condition* is one thing that is to hold, written ``verb`` or ``verb:object``: ``push:red`` (the red block rests in the
zone), ``lift:red``, ``place:red`` (in the bowl), ``stack:red-on-blue``, ``open_drawer``, ``close_drawer`` and ``press``.
Arrays are over ``n`` simulations.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from robotics.envs.physics import JOINTS, ArmPhysics
from robotics.envs.tabletop_layout import BLOCK_HALF

ZONE_RADIUS = 0.04
BOWL_RADIUS = 0.034
"""A block whose centre is so near the bowl's centre is inside."""
BOWL_HEIGHT = BLOCK_HALF
"""Of a block's centre above the bowl's floor."""
LIFT_HEIGHT = 0.08
STACK_OFFSET = 0.012
"""Horizontal distance between the centres of stacked blocks that still counts."""
OPEN_SHARE, CLOSED_SHARE, PRESSED_SHARE = 0.8, 0.1, 0.7
"""Of the slide's range."""
GRIP_WORK = 0.02
"""Metres that opening or closing the fingers counts for, as long as it is to be done."""

_RESTING = 0.004  # metres above or below where a block rests
_STACKED = 0.005
_IN_BOWL = 0.006  # a block may lean a little
_HOLDS = 0.025  # a block is in the gripper when its centre is so near the point between the fingers ...
_HOLDING_OPENING = 32.0  # ... and the gripper (robot units) is not opened wider; around a block it is at 26
_REACHED = 0.02  # the gripper has arrived


@dataclass(frozen=True, kw_only=True)
class Facts:
    """What conditions look at, of ``n`` simulations."""

    gripper: NDArray[np.float64]
    """``[n, 3]`` metres: the point between the fingers."""
    opening: NDArray[np.float64]
    """``[n]`` robot units."""
    slots: Mapping[str, NDArray[np.float64]]
    """``[n, 3]`` metres, by name."""
    slides: Mapping[str, NDArray[np.float64]]
    """``[n]`` share of the range, by name."""
    ranges: Mapping[str, float]
    """Metres, by name of the slide."""

    def holds(self, color: str) -> NDArray[np.bool_]:
        """``[n]``: the block is between the fingers and they are closed on it."""
        near = np.linalg.norm(self.slots[color] - self.gripper, axis=1) < _HOLDS
        return near & (self.opening < _HOLDING_OPENING)


def read_facts(physics: ArmPhysics, rows: NDArray[np.int64]) -> Facts:
    """Facts of the simulations ``rows`` ``[n]`` of a tabletop scene."""
    ranges = {name: float(physics.model.joint(name).range[1]) for name in ("drawer", "button")}
    return Facts(
        gripper=physics.gripper_position()[rows],
        opening=physics.joint_positions()[rows, JOINTS.index("gripper")],
        slots={name: physics.slot_position(name)[rows] for name in physics.slots},
        slides={name: physics.slide(name)[rows] / width for name, width in ranges.items()},
        ranges=ranges,
    )


@dataclass(frozen=True, kw_only=True)
class Standing:
    """How one condition stands in ``n`` simulations."""

    met: NDArray[np.bool_]
    """``[n]``"""
    work: NDArray[np.float64]
    """``[n]`` metres that things have to move, and what the fingers' own work counts for; 0 where the condition is met."""
    start: NDArray[np.float64]
    """``[n, 3]`` where the gripper has to be for that."""
    end: NDArray[np.float64]
    """``[n, 3]`` where the gripper is when it is done."""

    def reach(self, gripper: NDArray[np.float64]) -> NDArray[np.float64]:
        """``[n]`` metres from ``gripper`` ``[n, 3]`` to where the work starts; 0 where the condition is met."""
        gap = np.linalg.norm(gripper - self.start, axis=1) - _REACHED
        return np.where(self.met, 0.0, np.maximum(gap, 0.0))


def _carried(facts: Facts, color: str, destination: NDArray[np.float64], there: NDArray[np.bool_], slack: float) -> Standing:
    """The block is let go at ``destination``; ``there`` says whether it is, ``slack`` how far from it is as good."""
    block = facts.slots[color]
    met = there & ~facts.holds(color)
    work = np.maximum(np.linalg.norm(block - destination, axis=1) - slack, 0.0) + GRIP_WORK
    return Standing(met=met, work=np.where(met, 0.0, work), start=block, end=destination)


def _push(facts: Facts, color: str) -> Standing:
    """The block's centre is in the zone, the block rests on the table and is not held."""
    block = facts.slots[color]
    destination = facts.slots["zone"] * [1.0, 1.0, 0.0] + [0.0, 0.0, BLOCK_HALF]
    inside = np.linalg.norm((block - destination)[:, :2], axis=1) <= ZONE_RADIUS
    return _carried(facts, color, destination, inside & (np.abs(block[:, 2] - BLOCK_HALF) <= _RESTING), ZONE_RADIUS)


def _place(facts: Facts, color: str) -> Standing:
    """The block rests on the bowl's floor, inside the bowl, and is not held."""
    block = facts.slots[color]
    destination = facts.slots["bowl"] + [0.0, 0.0, BOWL_HEIGHT]
    inside = np.linalg.norm((block - destination)[:, :2], axis=1) <= BOWL_RADIUS
    return _carried(facts, color, destination, inside & (np.abs(block - destination)[:, 2] <= _IN_BOWL), BOWL_RADIUS)


def _stack(facts: Facts, pair: str) -> Standing:
    """The upper block is above the lower one, an edge higher, and is not held."""
    upper, lower = pair.split("-on-")
    destination = facts.slots[lower] + [0.0, 0.0, 2.0 * BLOCK_HALF]
    gap = facts.slots[upper] - destination
    there = (np.linalg.norm(gap[:, :2], axis=1) <= STACK_OFFSET) & (np.abs(gap[:, 2]) <= _STACKED)
    return _carried(facts, upper, destination, there, STACK_OFFSET)


def _lift(facts: Facts, color: str) -> Standing:
    """The block's centre is high above the table, and it is held."""
    block = facts.slots[color]
    rise = np.maximum(LIFT_HEIGHT - block[:, 2], 0.0)
    met = (block[:, 2] > LIFT_HEIGHT) & facts.holds(color)
    end = block + rise[:, None] * [0.0, 0.0, 1.0]
    return Standing(met=met, work=np.where(met, 0.0, rise + GRIP_WORK), start=block, end=end)


def _slid(facts: Facts, name: str, met: NDArray[np.bool_], to_go: NDArray[np.float64], axis: Sequence[float]) -> Standing:
    """A slide has ``to_go`` (share of its range) left along ``axis``."""
    work = np.where(met, 0.0, np.maximum(to_go, 0.0) * facts.ranges[name])
    return Standing(met=met, work=work, start=facts.slots[name], end=facts.slots[name] + work[:, None] * axis)


def _open_drawer(facts: Facts, _: str) -> Standing:
    """The drawer is open by more than `OPEN_SHARE`."""
    opened = facts.slides["drawer"]
    return _slid(facts, "drawer", opened > OPEN_SHARE, OPEN_SHARE - opened, [-1.0, 0.0, 0.0])


def _close_drawer(facts: Facts, _: str) -> Standing:
    """The drawer is open by less than `CLOSED_SHARE`."""
    opened = facts.slides["drawer"]
    return _slid(facts, "drawer", opened < CLOSED_SHARE, opened - CLOSED_SHARE, [1.0, 0.0, 0.0])


def _press(facts: Facts, _: str) -> Standing:
    """The button is down by more than `PRESSED_SHARE`, now."""
    pressed = facts.slides["button"]
    return _slid(facts, "button", pressed > PRESSED_SHARE, PRESSED_SHARE - pressed, [0.0, 0.0, -1.0])


CONDITIONS: Mapping[str, Callable[[Facts, str], Standing]] = {
    "push": _push,
    "lift": _lift,
    "place": _place,
    "stack": _stack,
    "open_drawer": _open_drawer,
    "close_drawer": _close_drawer,
    "press": _press,
}


def stand(facts: Facts, condition: str) -> Standing:
    """How ``condition`` (``verb`` or ``verb:object``) stands."""
    verb, _, thing = condition.partition(":")
    return CONDITIONS[verb](facts, thing)


def assess_conditions(facts: Facts, conditions: Sequence[str]) -> tuple[NDArray[np.float64], NDArray[np.bool_]]:
    """Metres of work left and success, ``[n]`` each, of ``conditions`` that are to hold together, in the order they are done.

    The gripper's way counts once: to the first condition that does not hold, and from where that ends to the next.
    """
    standings = [stand(facts, condition) for condition in conditions]
    left, place = np.zeros(len(facts.gripper)), facts.gripper
    for standing in standings:
        left += standing.work + standing.reach(place)
        place = np.where(standing.met[:, None], place, standing.end)
    return left, np.all([standing.met for standing in standings], axis=0)
