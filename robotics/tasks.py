"""Tasks of robots: a layout seed, a goal and the words that ask for it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from mmrl.types import Task
from robotics.envs.families import TaskFamily


@dataclass(frozen=True, kw_only=True)
class RobotTask(Task):
    """Do what ``instruction`` says in the layout of ``seed``: ``env.reset(seed=seed, options={"goal": goal})``."""

    family: str
    goal: str
    instruction: str
    seed: int
    """Decides the layout; the same for every goal."""


class RobotTasks(Sequence[RobotTask]):
    """``num_layouts`` layouts from ``first_seed`` on, each asked for every goal in turn: task ``i`` has layout ``i // K``.

    Neighbouring tasks thus share a layout and differ in the instruction alone.
    """

    def __init__(
        self, family: TaskFamily, *, goals: Sequence[str], first_seed: int, num_layouts: int, held_out_words: bool = False
    ) -> None:
        self.family, self.goals = family, tuple(goals)
        self.first_seed, self.num_layouts, self.held_out_words = first_seed, num_layouts, held_out_words

    def __len__(self) -> int:
        return self.num_layouts * len(self.goals)

    def __getitem__(self, index: int) -> RobotTask:  # type: ignore[override]
        if not -len(self) <= index < len(self):
            raise IndexError(f"task {index} of {len(self)}")
        layout, which = divmod(index % len(self), len(self.goals))
        seed, goal = self.first_seed + layout, self.goals[which]
        return RobotTask(
            id=f"{self.family.name}/{seed}/{goal}",
            domain=f"{self.family.name}-{goal}",
            family=self.family.name,
            goal=goal,
            instruction=self.family.instruction(goal, seed, held_out=self.held_out_words),
            seed=seed,
        )
