"""Closed-loop episodes of many rows at once, for any world and any decision maker. No torch.

A decision maker looks at the observations of the episodes that still run and commands a chunk for each; the chunk is executed
step by step until its episode ends. What happens in one episode does not depend on the others: a simulation that diverges,
reaches its goal or runs out of time ends alone. Axes: ``N`` episodes, ``n`` of them running, ``H`` commands of a chunk, ``A``
numbers of a command, ``L`` control steps of an episode.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from robotics.envs.families import build_family
from robotics.tasks import RobotTask
from robotics.world import World


class Decide(Protocol):
    """Whatever drives the robot: a policy or a scripted expert."""

    def __call__(self, decision: int, running: NDArray[np.int64], observation: Mapping[str, NDArray]) -> NDArray[np.float64]:
        """Commands ``[n, H, A]`` (the arm: joint positions in robot units) for the episodes ``running`` (``[n]``).

        ``observation`` holds their rows only. ``decision`` counts from 0. H may be any number of at least 1.
        """
        ...


@dataclass(frozen=True, kw_only=True)
class Episode:
    """What happened in one attempt."""

    tolerance: float
    """Metres: the scale of nearness in the family's work."""
    max_env_steps: int
    """Control steps at which the episode would have been cut."""
    left: NDArray[np.float64]
    """``[1 + L]`` metres of work left, before the first and after each control step; NaN where the world has no measure."""
    succeeded: NDArray[np.bool_]
    """``[1 + L]``: the goal held."""
    step_rewards: NDArray[np.float64]
    """``[L]`` rewards of the world itself."""
    commands: NDArray[np.float64]
    """``[L, A]`` commands as given; the arm's are joint positions in robot units."""
    executed: NDArray[np.int64]
    """``[T]`` commands executed of each decision's chunk; 0 after the end."""
    stop_reason: str
    """``success`` (held), ``timeout``, ``terminated`` (the world gave up), or ``diverged`` (not finite)."""
    initial_state: NDArray[np.float64]
    """``mjSTATE_INTEGRATION`` at the start."""
    final_state: NDArray[np.float64]
    """The same at the end; of a diverged episode, the last sound one."""

    @property
    def sound(self) -> bool:
        return self.stop_reason != "diverged"

    @property
    def num_steps(self) -> int:
        """L."""
        return len(self.commands)


@dataclass(frozen=True, kw_only=True)
class Limits:
    """When an episode ends, and when a decision is due."""

    max_env_steps: NDArray[np.int64]
    """``[N]`` control steps."""
    hold_steps: NDArray[np.int64]
    """``[N]`` control steps that success must hold."""
    tolerance: NDArray[np.float64]
    """``[N]``, recorded with the episode."""
    execution_horizon: int
    """Commands of each chunk that are executed before the next decision."""

    @property
    def num_decisions(self) -> int:
        return -(-int(self.max_env_steps.max()) // self.execution_horizon)


def limits_of(tasks: Sequence[RobotTask], *, execution_horizon: int, max_env_steps: int | None = None) -> Limits:
    """The families' own limits for one row per task; ``max_env_steps`` overrides their time limits."""
    families = {task.family: build_family(task.family) for task in tasks}
    rows = [families[task.family] for task in tasks]
    return Limits(
        max_env_steps=np.array([max_env_steps or family.max_env_steps for family in rows], np.int64),
        hold_steps=np.array([family.hold_steps for family in rows], np.int64),
        tolerance=np.array([family.tolerance for family in rows]),
        execution_horizon=execution_horizon,
    )


def run_episodes(world: World, decide: Decide, limits: Limits) -> list[Episode]:
    """Run every row of ``world`` from its present state to the end of its episode; ``N`` episodes."""
    log = _Log(world, limits)
    for decision in range(limits.num_decisions):
        running = log.running()
        if not len(running):
            break
        chunks = decide(decision, running, world.observe(running))
        for step in range(limits.execution_horizon):
            alive = log.alive[running]
            rows = running[alive]
            if not len(rows):
                break
            log.note(decision, rows, chunks[alive, step], world)
    return log.episodes(world)


class _Log:
    """Arrays over all rows, cut into episodes at the end."""

    def __init__(self, world: World, limits: Limits) -> None:
        num, longest = world.num_rows, int(limits.max_env_steps.max())
        self.limits = limits
        self.initial = world.states()
        self.left = np.full((num, longest + 1), np.nan)
        self.succeeded = np.zeros((num, longest + 1), bool)
        self.rewards = np.zeros((num, longest))
        self.commands = np.zeros((num, longest, world.command_size))
        self.executed = np.zeros((num, limits.num_decisions), np.int64)
        self.steps, self.held = np.zeros(num, np.int64), np.zeros(num, np.int64)
        self.alive = np.ones(num, bool)
        self.reasons = np.full(num, "timeout", object)
        self.left[:, 0], self.succeeded[:, 0], *_ = world.assess(np.arange(num))

    def running(self) -> NDArray[np.int64]:
        return np.flatnonzero(self.alive)

    def note(self, decision: int, rows: NDArray[np.int64], commands: NDArray[np.float64], world: World) -> None:
        """Execute one command of each row and write down what came of it."""
        sound = world.advance(commands, rows)
        finite = np.isfinite(commands).all(axis=1)
        self._stop(rows[~finite], "diverged")  # a command that is not finite is never executed
        rows, commands, sound = rows[finite], commands[finite], sound[finite]
        now = world.assess(rows)
        step = self.steps[rows]
        self.commands[rows, step] = commands
        self.rewards[rows, step] = now.reward
        self.executed[rows, decision] += 1
        self.steps[rows] += 1
        self.left[rows, step + 1], self.succeeded[rows, step + 1] = now.left, now.success
        self.held[rows] = np.where(now.success, self.held[rows] + 1, 0)
        self._stop(rows[~sound], "diverged")
        self._stop(rows[sound & (self.held[rows] >= self.limits.hold_steps[rows])], "success")
        self._stop(rows[self.alive[rows] & now.ended], "terminated")
        self.alive[rows[self.steps[rows] >= self.limits.max_env_steps[rows]]] = False

    def episodes(self, world: World) -> list[Episode]:
        final = world.states()
        return [
            Episode(
                tolerance=float(self.limits.tolerance[row]),
                max_env_steps=int(self.limits.max_env_steps[row]),
                left=self.left[row, : count + 1].copy(),
                succeeded=self.succeeded[row, : count + 1].copy(),
                step_rewards=self.rewards[row, :count].copy(),
                commands=self.commands[row, :count].copy(),
                executed=self.executed[row].copy(),
                stop_reason=str(self.reasons[row]),
                initial_state=self.initial[row].copy(),
                final_state=final[row].copy(),
            )
            for row, count in enumerate(self.steps.tolist())
        ]

    def _stop(self, rows: NDArray[np.int64], reason: str) -> None:
        self.reasons[rows] = reason
        self.alive[rows] = False
