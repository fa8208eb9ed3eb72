"""Task families of the tabletop: four cubes, a bowl, a marked region, a drawer and a button, all present in every task.

One seed gives the same layout to every family and goal, but for a drawer that has to be open or closed to begin with; so the
instruction alone tells what to do. What success means is written with the conditions in `robotics.envs.tabletop_conditions`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from mmrl.errors import DataError
from robotics.envs.instructions import COLORS, CONNECTIONS, IMPERATIVES, PHRASINGS
from robotics.envs.physics import ArmPhysics
from robotics.envs.tabletop_conditions import assess_conditions, read_facts
from robotics.envs.tabletop_layout import sample_layout


class TabletopFamily:
    """What the families share; a family says which conditions a goal stands for. See `robotics.envs.families.TaskFamily`."""

    name: ClassVar[str]
    scene: ClassVar[str] = "tabletop/scene.xml"
    goals: ClassVar[tuple[str, ...]]
    tolerance: ClassVar[float] = 0.05
    hold_steps: ClassVar[int] = 4
    max_env_steps: ClassVar[int]

    def conditions(self, goal: str) -> tuple[str, ...]:
        """What is to hold for ``goal``, in the order in which it is done; ``verb`` or ``verb:object`` each."""
        self._check(goal)
        return (f"{self.name}:{goal}",) if goal != self.name else (goal,)

    def draw_goal(self, seed: int) -> str:
        return self.goals[np.random.default_rng([seed, 1]).integers(len(self.goals))]

    def instruction(self, goal: str, seed: int, *, held_out: bool = False) -> str:
        (condition,) = self.conditions(goal)
        phrasings = PHRASINGS[self.name]
        return _phrase(condition, phrasings.held_out if held_out else phrasings.seen, self._words(goal, seed))

    def arrange(self, physics: ArmPhysics, row: int, seed: int, goal: str) -> None:
        conditions = self.conditions(goal)
        forced = True if "close_drawer" in conditions else False if "open_drawer" in conditions else None
        layout = sample_layout(seed, drawer_open=forced)
        physics.place(row, joints=layout.joints, positions=layout.positions, yaws=layout.yaws, slides=layout.slides)

    def assess(
        self, physics: ArmPhysics, rows: NDArray[np.int64], goals: Sequence[str]
    ) -> tuple[NDArray[np.float64], NDArray[np.bool_]]:
        left, success = np.zeros(len(rows)), np.zeros(len(rows), bool)
        wanted = np.array(goals, dtype=object)
        for goal in dict.fromkeys(goals):
            places = np.flatnonzero(wanted == goal)
            facts = read_facts(physics, rows[places])
            left[places], success[places] = assess_conditions(facts, self.conditions(goal))
        return left, success

    def _check(self, goal: str) -> None:
        if goal not in self.goals:
            raise DataError(f"{self.name}: goal {goal!r} is not known; expected one of: {', '.join(self.goals)}.")

    def _words(self, goal: str, seed: int) -> np.random.Generator:
        """Draws the phrasing; neighbouring goals of one seed get phrasings of their own."""
        return np.random.default_rng([seed, 2, self.goals.index(goal)])


def _phrase(condition: str, templates: Sequence[str], rng: np.random.Generator) -> str:
    _, _, thing = condition.partition(":")
    return templates[rng.integers(len(templates))].format(*thing.split("-on-"))


class PushFamily(TabletopFamily):
    """Move the named block into the marked region."""

    name, goals, max_env_steps = "push", COLORS, 120


class LiftFamily(TabletopFamily):
    """Lift the named block and hold it."""

    name, goals, max_env_steps = "lift", COLORS, 60


class PlaceFamily(TabletopFamily):
    """Put the named block in the bowl."""

    name, goals, max_env_steps = "place", COLORS, 120


class StackFamily(TabletopFamily):
    """Put one named block on another."""

    name, max_env_steps = "stack", 120
    goals = tuple(f"{upper}-on-{lower}" for upper in COLORS for lower in COLORS if upper != lower)


class OpenDrawerFamily(TabletopFamily):
    """Open the drawer, which is closed."""

    name, goals, max_env_steps = "open_drawer", ("open_drawer",), 60


class CloseDrawerFamily(TabletopFamily):
    """Close the drawer, which is open."""

    name, goals, max_env_steps = "close_drawer", ("close_drawer",), 60


class PressFamily(TabletopFamily):
    """Press the button and keep it down."""

    name, goals, max_env_steps = "press", ("press",), 45


class TwoStepFamily(TabletopFamily):
    """Do one thing and then another; both hold at the end."""

    name, max_env_steps = "two_step", 165
    goals = (
        "open_drawer+press",
        *(f"place:{color}+press" for color in COLORS),
        *(f"push:{color}+close_drawer" for color in COLORS),
    )

    def conditions(self, goal: str) -> tuple[str, ...]:
        self._check(goal)
        return tuple(goal.split("+"))

    def instruction(self, goal: str, seed: int, *, held_out: bool = False) -> str:
        conditions, rng = self.conditions(goal), self._words(goal, seed)
        first, second = (_phrase(part, IMPERATIVES[part.partition(":")[0]], rng) for part in conditions)
        connections = CONNECTIONS.held_out if held_out else CONNECTIONS.seen
        return connections[rng.integers(len(connections))].format(first=first, second=second)
