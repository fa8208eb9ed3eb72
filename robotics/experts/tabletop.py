"""The expert of the tabletop: skills decide where the hand goes, this turns it into chunks of joint positions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from robotics.envs.families import TaskFamily
from robotics.envs.physics import BLOCKS, SLOTS, ArmPhysics
from robotics.envs.tabletop import TabletopFamily
from robotics.envs.tabletop_conditions import Facts, stand
from robotics.envs.tabletop_layout import BUTTON_HEIGHT, BUTTON_RANGE, CABINET_X, DRAWER_RANGE
from robotics.experts.kinematics import Sag, forward, inverse
from robotics.experts.skills import AROUND_BLOCK, FINGER_PLAY, SKILLS, View, Waypoint

_SPEED = 0.07
"""Of half of each joint's range, per command: a policy whose motions are limited to 0.08 can follow."""


class TabletopExpert:
    """Follows `robotics.experts.skills`, from observations alone.

    Later commands of a chunk are decided from what the first ones will lead to: the hand follows its commands, a block that is
    held moves along, nothing else moves.
    """

    def __init__(self, physics: ArmPhysics, families: Sequence[TaskFamily], goals: Sequence[str], *, chunk_size: int) -> None:
        self.chunk_size = chunk_size
        self._limits = physics.joint_limits
        self._steps = _SPEED * 0.5 * np.ptp(physics.joint_limits, axis=1)  # [A]
        self._conditions = [
            family.conditions(goal) if isinstance(family, TabletopFamily) else () for family, goal in zip(families, goals)
        ]
        self._sag = Sag()

    def __call__(
        self, decision: int, running: NDArray[np.int64], observation: Mapping[str, NDArray[np.float32]]
    ) -> NDArray[np.float64]:
        """See `robotics.rollouts.Decide`."""
        joints = observation["agent_pos"].astype(np.float64)
        views = [view_of(*row) for row in zip(joints, observation["environment_state"].astype(np.float64))]
        sag = np.pad(self._sag(joints), ((0, 0), (0, 1)))
        chunks = np.empty((len(running), self.chunk_size, joints.shape[1]))
        for step in range(self.chunk_size):
            waypoints = [next_waypoint(view, self._conditions[row]) for view, row in zip(views, running)]
            change = self._change(joints, waypoints)
            chunks[:, step] = joints + change + sag
            grip = chunks[:, step - 1, -1] if step else joints[:, -1]  # may be ahead of a gripper that a block holds open
            chunks[:, step, -1] = grip + np.clip(chunks[:, step, -1] - grip, -self._steps[-1], self._steps[-1])
            after = joints + change
            for view, before, now in zip(views, forward(joints), zip(forward(after), after)):
                _foresee(view, now[0] - before, now[1])
            after[:, -1] = [view.opening for view in views]
            joints = after
        return np.clip(chunks, self._limits[:, 0], self._limits[:, 1])

    def _change(self, joints: NDArray[np.float64], waypoints: Sequence[Waypoint]) -> NDArray[np.float64]:
        """Motion ``[n, A]`` of one control period: the arm's joints arrive together, the gripper on its own."""
        positions, rolls = (np.array([getattr(point, name) for point in waypoints]) for name in ("position", "roll"))
        change = np.concatenate(
            [inverse(positions, rolls) - joints[:, :-1], [[point.opening] for point in waypoints] - joints[:, -1:]], axis=1
        )
        pace = np.abs(change) / self._steps
        speeds = np.array([point.speed for point in waypoints])
        change[:, :-1] *= np.minimum(1.0, speeds / np.maximum(pace[:, :-1].max(axis=1), 1e-9))[:, None]
        change[:, -1] *= np.minimum(1.0, 1.0 / np.maximum(pace[:, -1], 1e-9))
        return change


def next_waypoint(view: View, conditions: Sequence[str]) -> Waypoint:
    """The skill of the first condition that does not hold yet, or of the last."""
    pending = (condition for condition in conditions[:-1] if not _holds(view, condition))
    verb, _, thing = next(pending, conditions[-1]).partition(":")
    return SKILLS[verb](view, thing)


def view_of(joints: NDArray[np.float64], entries: NDArray[np.float64]) -> View:
    """One row of an observation: ``agent_pos`` ``[A]`` and ``environment_state`` ``[E]``, see `robotics.envs.observation`."""
    points, turns = entries[: 3 * (1 + len(SLOTS))].reshape(-1, 3), entries[3 * (1 + len(SLOTS)) :].reshape(-1, 2)
    angles = np.rad2deg(np.arctan2(turns[:, 1], turns[:, 0])) / 4.0
    return View(
        gripper=points[0],
        pan=float(joints[0]),
        roll=float(joints[4]),
        opening=float(joints[5]),
        slots=dict(zip(SLOTS, points[1:])),
        yaws=dict(zip(BLOCKS, angles.tolist())),
    )


def _foresee(view: View, moved: NDArray[np.float64], joints: NDArray[np.float64]) -> None:
    """Bring ``view`` to where the hand has ``moved`` (``[3]`` metres) and its ``joints`` are as commanded."""
    opening = float(joints[5])
    for color in BLOCKS:
        along, across, up = view.in_hand(view.slots[color])
        if abs(along) < 0.014 and abs(across) < 0.014 and abs(up) < 0.014:
            opening = max(opening, min(view.opening, AROUND_BLOCK))
        if view.holds(color):
            view.slots[color] = view.slots[color] + moved
    if view.straddles_handle():
        x, handle = view.gripper[0] + moved[0], view.slots["drawer"]
        view.slots["drawer"] = np.array([np.clip(handle[0], x - FINGER_PLAY, x + FINGER_PLAY), *handle[1:]])
    view.gripper = view.gripper + moved
    view.pan, view.roll, view.opening = float(joints[0]), float(joints[4]), opening


def _holds(view: View, condition: str) -> bool:
    """The condition, tested on what is seen."""
    facts = Facts(
        gripper=view.gripper[None],
        opening=np.array([view.opening]),
        slots={name: position[None] for name, position in view.slots.items()},
        slides={
            "drawer": (CABINET_X - view.slots["drawer"][:1]) / DRAWER_RANGE,
            "button": (BUTTON_HEIGHT - view.slots["button"][2:]) / BUTTON_RANGE,
        },
        ranges={"drawer": DRAWER_RANGE, "button": BUTTON_RANGE},
    )
    return bool(stand(facts, condition).met[0])
