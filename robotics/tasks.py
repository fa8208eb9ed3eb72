"""Tasks of robots: a family, a layout seed, a goal and the words that ask for it. No torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from mmrl.errors import DataError
from mmrl.types import Task
from robotics.envs.families import TaskFamily, build_family


@dataclass(frozen=True, kw_only=True)
class RobotTask(Task):
    """Do what ``instruction`` says in the layout of ``seed``: ``env.reset(seed=seed, options={"goal": goal})``."""

    family: str
    goal: str
    instruction: str
    seed: int
    """Decides the layout; the same for every goal."""


class FamilyTasks(Sequence[RobotTask]):
    """``num_layouts`` layouts from ``first_seed`` on, each asked for every goal in turn: task ``i`` has layout ``i // K``.

    Neighbouring tasks thus share a layout and differ in the instruction alone. With ``spread`` they do not: task ``i`` has
    layout ``i`` until all have been used, and goals take turns, so that few tasks see many layouts.
    """

    def __init__(
        self, family: TaskFamily, *, first_seed: int, num_layouts: int, goals: Sequence[str] | None = None,
        held_out_words: bool = False, by_goal: bool = False, spread: bool = False,
    ) -> None:  # fmt: skip
        """``by_goal`` makes each goal a domain of its own, instead of the whole family."""
        self.family, self.goals = family, tuple(goals or family.goals)
        unknown = [goal for goal in self.goals if goal not in family.goals]
        if unknown:
            raise DataError(
                f"tasks.goals.{family.name} names {', '.join(unknown)}, which {family.name} does not have; expected some of: "
                f"{', '.join(family.goals)}."
            )
        self.first_seed, self.num_layouts, self.held_out_words = first_seed, num_layouts, held_out_words
        self.by_goal, self.spread = by_goal, spread

    def __len__(self) -> int:
        return self.num_layouts * len(self.goals)

    def __getitem__(self, index: int) -> RobotTask:  # type: ignore[override]
        if not -len(self) <= index < len(self):
            raise IndexError(f"task {index} of {len(self)}")
        if self.spread:
            turn, layout = divmod(index % len(self), self.num_layouts)
            which = (layout + turn) % len(self.goals)
        else:
            layout, which = divmod(index % len(self), len(self.goals))
        seed, goal = self.first_seed + layout, self.goals[which]
        return RobotTask(
            id=f"{self.family.name}/{seed}/{goal}",
            domain=f"{self.family.name}-{goal}" if self.by_goal else self.family.name,
            family=self.family.name,
            goal=goal,
            instruction=self.family.instruction(goal, seed, held_out=self.held_out_words),
            seed=seed,
        )


class RobotTasks(Sequence[RobotTask]):
    """Tasks of several families in turn: task ``i`` is the ``i // F``-th of family ``i % F``, so any prefix is balanced."""

    def __init__(
        self, families: Sequence[str], *, first_seed: int, num_layouts: int, goals: Mapping[str, Sequence[str]] | None = None,
        held_out_words: bool = False, spread: bool = False,
    ) -> None:  # fmt: skip
        """``goals`` narrows what is asked for, by family. Domains are families, or the goals of a single family."""
        self.parts = [
            FamilyTasks(
                build_family(name),
                first_seed=first_seed,
                num_layouts=num_layouts,
                goals=(goals or {}).get(name),
                held_out_words=held_out_words,
                by_goal=len(families) == 1,
                spread=spread,
            )
            for name in families
        ]

    def __len__(self) -> int:
        return len(self.parts) * min(len(part) for part in self.parts)

    def __getitem__(self, index: int) -> RobotTask:  # type: ignore[override]
        if not -len(self) <= index < len(self):
            raise IndexError(f"task {index} of {len(self)}")
        place, which = divmod(index % len(self), len(self.parts))
        return self.parts[which][place]
