"""Worlds that episodes run in: many rows of simulation, each with a task of its own. No torch.

A world answers for rows and moves rows; it knows no policy, no chunk and no time limit. `ArmWorld` is the house arm in one
scene; `robotics.envs.wrapped` has worlds made of other people's gymnasium environments. Axes: ``S`` rows of the world, ``n``
rows of one call, ``A`` numbers of a command.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from mmrl.errors import DataError
from robotics.assets import sim_asset
from robotics.envs.families import TaskFamily, build_family
from robotics.envs.observation import observe
from robotics.envs.physics import ArmPhysics
from robotics.envs.rendering import SceneRenderer
from robotics.tasks import RobotTask

CONTROL_HZ = 20.0
"""Commands per second, in every scene: one policy serves all tasks."""


class Assessment(NamedTuple):
    """How rows stand now; arrays over ``n`` rows."""

    left: NDArray[np.float64]
    """Metres of work left; NaN where a world has no such measure."""
    success: NDArray[np.bool_]
    """The goal holds in this state."""
    reward: NDArray[np.float64]
    """The environment's own reward of the last step; for the arm, the share of the work at the start that is done."""
    ended: NDArray[np.bool_]
    """The world itself ended the episode without success (a robot fell over)."""


class World(Protocol):
    """Rows of simulation with a task each, arranged and ready to move."""

    num_rows: int
    command_size: int
    """A."""

    def observe(self, rows: NDArray[np.int64]) -> Mapping[str, NDArray]:
        """``agent_pos`` ``[n, A]``, ``environment_state`` ``[n, E]`` and ``pixels.<camera>`` ``[n, H, W, 3]`` uint8."""
        ...

    def advance(self, commands: NDArray[np.float64], rows: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Follow ``commands`` ``[n, A]`` for one control period; false where the simulation or the command broke.

        A broken row stays in its last sound state.
        """
        ...

    def assess(self, rows: NDArray[np.int64]) -> Assessment:
        """How ``rows`` stand now."""
        ...

    def states(self) -> NDArray[np.float64]:
        """``[S, num_state]``: all that the future of each row depends on."""
        ...


class ArmWorld:
    """The house arm in one scene; every row has a family, a goal and a layout of its own."""

    def __init__(
        self,
        tasks: Sequence[RobotTask],
        *,
        group_size: int = 1,
        num_threads: int = 1,
        cameras: Mapping[str, tuple[int, int]] | None = None,
    ) -> None:
        """One row per task and member of its group, group-major; a group starts from one saved physics state.

        ``cameras`` names what `observe` draws, with height and width in pixels.
        """
        families = {task.family: build_family(task.family) for task in tasks}
        scenes = {family.scene for family in families.values()}
        if len(scenes) != 1:
            raise DataError(f"one world holds one scene; the tasks need {', '.join(sorted(scenes))}.")
        self.num_rows = len(tasks) * group_size
        self.cameras = dict(cameras or {})
        self.physics = ArmPhysics(
            sim_asset(scenes.pop()), num_sims=self.num_rows, num_threads=min(num_threads, self.num_rows), control_hz=CONTROL_HZ
        )
        self.command_size = len(self.physics.joint_limits)
        self.families = [families[task.family] for task in tasks for _ in range(group_size)]
        self.goals = [task.goal for task in tasks for _ in range(group_size)]
        for row, task in enumerate(tasks):
            families[task.family].arrange(self.physics, row, task.seed, task.goal)
        self.restore(self.physics.states(np.arange(len(tasks))).repeat(group_size, axis=0))
        self._renderers: dict[tuple[int, int], SceneRenderer] = {}

    def restore(self, states: NDArray[np.float64]) -> None:
        """Start from ``states`` ``[S, num_state]`` instead; the work at the start is measured there."""
        self.physics.restore(states)
        self.start = np.ones(self.num_rows)
        self.start = np.maximum(self.assess(np.arange(self.num_rows)).left, 1e-9)

    def observe(self, rows: NDArray[np.int64]) -> Mapping[str, NDArray]:
        """See `World.observe`."""
        observation = {name: value[rows] for name, value in observe(self.physics).items()}
        return observation | {f"pixels.{name}": image for name, image in self.draw(rows, self.cameras).items()}

    def draw(
        self, rows: NDArray[np.int64], cameras: Mapping[str, tuple[int, int]], *, sky: bool = False
    ) -> dict[str, NDArray[np.uint8]]:
        """``[n, H, W, 3]`` of each camera, given its height and width; with a ``sky`` for people."""
        images: dict[str, NDArray[np.uint8]] = {}
        for size in sorted(set(cameras.values())):
            if size not in self._renderers:
                self._renderers[size] = SceneRenderer(self.physics, height=size[0], width=size[1])
            names = tuple(name for name, its in cameras.items() if its == size)
            images |= self._renderers[size].render_rows(rows, names, sky=sky)
        return images

    def advance(self, commands: NDArray[np.float64], rows: NDArray[np.int64]) -> NDArray[np.bool_]:
        """See `World.advance`; commands are joint positions in robot units, clipped to the joint limits."""
        return self.physics.advance(commands, rows)

    def assess(self, rows: NDArray[np.int64]) -> Assessment:
        """See `World.assess`."""
        left, success = np.empty(len(rows)), np.empty(len(rows), bool)
        by_family: dict[str, tuple[TaskFamily, list[int]]] = {}
        for place, row in enumerate(rows):
            family = self.families[row]
            by_family.setdefault(family.name, (family, []))[1].append(place)
        for family, places in by_family.values():
            chosen = rows[places]
            left[places], success[places] = family.assess(self.physics, chosen, [self.goals[row] for row in chosen])
        return Assessment(
            left=left,
            success=success,
            reward=np.clip(1.0 - left / self.start[rows], 0.0, 1.0),
            ended=np.zeros(len(rows), bool),
        )

    def states(self) -> NDArray[np.float64]:
        """See `World.states`; ``mjSTATE_INTEGRATION``."""
        return self.physics.states()

    def close(self) -> None:
        """Free what was opened to draw."""
        for renderer in self._renderers.values():
            renderer.close()
        self._renderers.clear()
