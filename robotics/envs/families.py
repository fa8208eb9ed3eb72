"""What a family of robot tasks provides, and the families that exist.

A family is the task half of dm_control's physics/task split: it arranges a scene, says in words what is wanted, and reads
physics' answers as observations and as the distance that is left. It holds no simulation and no episode, so one object serves
any number of both. A *goal* is a short name for what is wanted (a colour, for reaching).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from mmrl.errors import DataError
from robotics.envs.physics import ArmPhysics
from robotics.envs.reach import ReachFamily


class TaskFamily(Protocol):
    """Tasks that share a scene, observations and a measure of success."""

    name: str
    scene: str
    """Path under ``sim_assets/``."""
    goals: tuple[str, ...]
    """Everything that can be asked for in this scene."""
    tolerance: float
    """Metres: a distance of at most this is success."""
    hold_steps: int
    """An episode ends early once the distance has been within the tolerance for so many control steps."""
    environment_bounds: NDArray[np.float64]
    """``[E, 2]`` low and high of each entry of ``environment_state``, for normalisation."""

    def draw_goal(self, seed: int) -> str:
        """The goal of episode ``seed`` when nobody names one."""
        ...

    def instruction(self, goal: str, seed: int, *, held_out: bool = False) -> str:
        """One of several ways to ask for ``goal``; ``held_out`` takes a phrasing that training never uses."""
        ...

    def arrange(self, physics: ArmPhysics, row: int, seed: int) -> None:
        """Set simulation ``row`` to the layout of ``seed``. The layout does not depend on the goal."""
        ...

    def observation(self, physics: ArmPhysics) -> Mapping[str, NDArray[np.float32]]:
        """``agent_pos`` ``[S, A]`` in robot units and ``environment_state`` ``[S, E]``; neither tells the goal."""
        ...

    def distance(self, physics: ArmPhysics, goals: Sequence[str]) -> NDArray[np.float64]:
        """``[S]`` metres left to each simulation's goal."""
        ...


FAMILIES: Mapping[str, Callable[[], TaskFamily]] = {"reach": ReachFamily}


def build_family(name: str) -> TaskFamily:
    """The family called ``name``."""
    if name not in FAMILIES:
        raise DataError(f"task family {name!r} is not known; expected one of: {', '.join(sorted(FAMILIES))}.")
    return FAMILIES[name]()
