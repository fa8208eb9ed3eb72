"""Closed-loop episodes of many simulations at once, for any decision maker. No torch.

A decision maker looks at the observations of the episodes that still run and commands a chunk of joint positions for each; the
chunk is executed step by step until its episode ends. What happens in one episode does not depend on the others: a simulation
that diverges, reaches its goal or runs out of time ends alone. Axes: ``N`` episodes, ``n`` of them running, ``H`` commands of a
chunk, ``A`` joints, ``L`` control steps of an episode.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from robotics.envs.families import TaskFamily
from robotics.envs.physics import ArmPhysics
from robotics.tasks import RobotTask


class Decide(Protocol):
    """Whatever drives the arm: a policy or a scripted expert."""

    def __call__(
        self, decision: int, running: NDArray[np.int64], observation: Mapping[str, NDArray[np.float32]]
    ) -> NDArray[np.float64]:
        """Joint positions to command, ``[n, H, A]`` in robot units, for the episodes ``running`` (``[n]``).

        ``observation`` holds their rows only. ``decision`` counts from 0. H may be any number of at least 1.
        """
        ...


@dataclass(frozen=True, kw_only=True)
class Episode:
    """What happened in one attempt."""

    tolerance: float
    """Metres: a distance of at most this is success."""
    max_env_steps: int
    """Control steps at which the episode would have been cut."""
    distances: NDArray[np.float64]
    """``[1 + L]`` metres to the goal, before the first and after each control step."""
    commands: NDArray[np.float64]
    """``[L, A]`` commanded joint positions, robot units."""
    executed: NDArray[np.int64]
    """``[T]`` commands executed of each decision's chunk; 0 after the end."""
    stop_reason: str
    """``success`` (held within tolerance), ``timeout``, or ``diverged`` (simulation or command not finite)."""
    initial_state: NDArray[np.float64]
    """``mjSTATE_INTEGRATION`` at the start."""
    final_state: NDArray[np.float64]
    """The same at the end; of a diverged episode, the last sound one."""

    @property
    def sound(self) -> bool:
        return self.stop_reason != "diverged"


@dataclass(kw_only=True)
class _Record:
    distances: list[float]
    executed: NDArray[np.int64]
    commands: list[NDArray[np.float64]] = field(default_factory=list)
    held: int = 0
    stop_reason: str = ""


def arrange_groups(physics: ArmPhysics, family: TaskFamily, tasks: Sequence[RobotTask], group_size: int) -> NDArray[np.float64]:
    """Arrange each task once and copy that state to the rows of its group; states ``[P * group_size, num_state]``."""
    for row, task in enumerate(tasks):
        family.arrange(physics, row, task.seed)
    states = physics.states(np.arange(len(tasks))).repeat(group_size, axis=0)
    physics.restore(states)
    return states


def run_episodes(
    physics: ArmPhysics, family: TaskFamily, goals: Sequence[str], decide: Decide, *, max_env_steps: int, execution_horizon: int
) -> list[Episode]:
    """Run every simulation of ``physics`` from its present state to the end of its episode; ``N`` episodes.

    ``execution_horizon`` commands of each chunk are executed before the next decision.
    """
    initial = physics.states()
    num_decisions = -(-max_env_steps // execution_horizon)
    records = [
        _Record(distances=[float(distance)], executed=np.zeros(num_decisions, np.int64))
        for distance in family.distance(physics, goals)
    ]
    for decision in range(num_decisions):
        running = _running(records)
        if not len(running):
            break
        observation = {name: value[running] for name, value in family.observation(physics).items()}
        chunks = decide(decision, running, observation)
        for step in range(min(execution_horizon, max_env_steps - decision * execution_horizon)):
            alive = np.array([not records[row].stop_reason for row in running])
            rows = running[alive]
            if not len(rows):
                break
            commands = chunks[alive, step]
            sound = physics.advance(commands, rows)
            distances = family.distance(physics, goals)
            for row, command, intact in zip(rows, commands, sound):
                _note(records[row], decision, command, float(distances[row]), bool(intact), family)
    final = physics.states()
    return [
        Episode(
            tolerance=family.tolerance,
            max_env_steps=max_env_steps,
            distances=np.array(record.distances),
            commands=np.array(record.commands).reshape(-1, physics.joint_limits.shape[0]),
            executed=record.executed,
            stop_reason=record.stop_reason or "timeout",
            initial_state=initial[row],
            final_state=final[row],
        )
        for row, record in enumerate(records)
    ]


def _note(
    record: _Record, decision: int, command: NDArray[np.float64], distance: float, intact: bool, family: TaskFamily
) -> None:
    if not np.isfinite(command).all():  # never executed
        record.stop_reason = "diverged"
        return
    record.executed[decision] += 1
    record.commands.append(command)
    record.distances.append(distance)
    record.held = record.held + 1 if distance <= family.tolerance else 0
    if not intact:
        record.stop_reason = "diverged"
    elif record.held >= family.hold_steps:
        record.stop_reason = "success"


def _running(records: Sequence[_Record]) -> NDArray[np.int64]:
    return np.array([row for row, record in enumerate(records) if not record.stop_reason], np.int64)
