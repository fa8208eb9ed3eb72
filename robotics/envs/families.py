"""What a family of robot tasks provides, and the families that exist.

A family is the task half of dm_control's physics/task split: it arranges a scene, says in words what is wanted, and reads
physics' answers as work that is left and as success. It holds no simulation and no episode, so one object serves any number of
both. A *goal* is a short name for what is wanted (a colour, for reaching).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from mmrl.errors import DataError
from robotics.envs.physics import ArmPhysics
from robotics.envs.reach import ReachFamily
from robotics.envs.tabletop import (
    CloseDrawerFamily,
    LiftFamily,
    OpenDrawerFamily,
    PlaceFamily,
    PressFamily,
    PushFamily,
    StackFamily,
    TwoStepFamily,
)


class TaskFamily(Protocol):
    """Tasks that share a scene and a measure of success."""

    name: str
    scene: str
    """Path under ``sim_assets/``."""
    goals: tuple[str, ...]
    """Everything that can be asked for in this scene."""
    tolerance: float
    """Metres: the scale of nearness in the work that is left."""
    hold_steps: int
    """An episode ends early once success has held for so many control steps."""
    max_env_steps: int
    """Time limit in control steps at 20 Hz: one and a half times what the expert takes at the median."""

    def draw_goal(self, seed: int) -> str:
        """The goal of episode ``seed`` when nobody names one."""
        ...

    def instruction(self, goal: str, seed: int, *, held_out: bool = False) -> str:
        """One of several ways to ask for ``goal``; ``held_out`` takes a phrasing that training never uses."""
        ...

    def arrange(self, physics: ArmPhysics, row: int, seed: int, goal: str) -> None:
        """Set simulation ``row`` to the layout of ``seed``; only a goal that needs the drawer open or closed changes it."""
        ...

    def assess(
        self, physics: ArmPhysics, rows: NDArray[np.int64], goals: Sequence[str]
    ) -> tuple[NDArray[np.float64], NDArray[np.bool_]]:
        """How the ``n`` rows stand with their ``n`` goals, from the physical state now.

        Returns ``left`` ``[n]``, metres of work left (never negative, falls as the task advances), and ``success`` ``[n]``.
        """
        ...


FAMILIES: Mapping[str, Callable[[], TaskFamily]] = {
    "reach": ReachFamily,
    "push": PushFamily,
    "lift": LiftFamily,
    "place": PlaceFamily,
    "stack": StackFamily,
    "open_drawer": OpenDrawerFamily,
    "close_drawer": CloseDrawerFamily,
    "press": PressFamily,
    "two_step": TwoStepFamily,
}


def build_family(name: str) -> TaskFamily:
    """The family called ``name``; a name with a colon is an environment of another project (`robotics.envs.wrapped`)."""
    if ":" in name:
        from robotics.envs.wrapped import build_wrapped_family

        return build_wrapped_family(name)
    if name not in FAMILIES:
        raise DataError(f"task family {name!r} is not known; expected one of: {', '.join(sorted(FAMILIES))}.")
    return FAMILIES[name]()
