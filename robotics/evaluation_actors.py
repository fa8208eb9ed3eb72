"""Whoever is measured: a policy directory or the scripted expert, made ready to act in the arm's worlds. No LeRobot here.

An actor decides for the rows of a world; what it does in one episode does not depend on the other rows.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from robotics.experts import make_expert
from robotics.rollouts import Decide
from robotics.tasks import RobotTask
from robotics.world import ArmWorld

EXPERT = "expert"
_EXPERT_HORIZON = 4


@dataclass(frozen=True, kw_only=True)
class ActorSpec:
    """All that is needed to make the same actor again, in any process."""

    source: str
    """A path that `robotics.checkpoints.policy_directory` understands, or ``expert``."""
    device: str = "cpu"
    execution_horizon: int | None = None
    """Commands of a chunk that are executed; the policy's own ``n_action_steps`` when absent."""
    renames: Mapping[str, str] = field(default_factory=dict)
    """The environment's names of images or states, and the policy's for the same."""
    resample: bool = False
    """Interpolate the chunks of a policy that was made for another control rate."""


@dataclass(frozen=True)
class Driver:
    """Decides for the ``N`` rows of one world, and counts."""

    decide: Decide
    out_of_range: NDArray[np.int64]
    """``[N]`` decisions that saw a state far outside the policy's training range."""


class Actor(Protocol):
    """What `robotics.evaluation` needs of whoever is measured."""

    label: str
    execution_horizon: int
    """Control steps between decisions."""
    cameras: Mapping[str, tuple[int, int]]
    """What it looks at, with height and width in pixels."""

    def describe(self) -> dict[str, Any]:
        """For the protocol."""
        ...

    def driver(self, world: ArmWorld, tasks: Sequence[RobotTask], num_decisions: int) -> Driver:
        """Ready for one episode per row of ``world``."""
        ...


def open_actor(spec: ActorSpec, *, on_notice: Callable[[str], None] = lambda text: None) -> Actor:
    """The actor of ``spec``; a policy that does not fit the arm is refused (`robotics.evaluation_checks`)."""
    if spec.source == EXPERT:
        return ExpertActor(spec)
    from robotics.evaluation_policy import PolicyActor

    return PolicyActor(spec, on_notice=on_notice)


class ExpertActor:
    """The scripted expert of every task; it knows the goal and does not read instructions."""

    label = EXPERT
    cameras: Mapping[str, tuple[int, int]] = {}

    def __init__(self, spec: ActorSpec) -> None:
        self.execution_horizon = spec.execution_horizon or _EXPERT_HORIZON

    def describe(self) -> dict[str, Any]:
        """See `Actor.describe`."""
        return {"name": EXPERT, "execution_horizon": self.execution_horizon}

    def driver(self, world: ArmWorld, tasks: Sequence[RobotTask], num_decisions: int) -> Driver:
        """See `Actor.driver`."""
        expert = make_expert(world.physics, world.families, world.goals, chunk_size=self.execution_horizon)
        return Driver(expert, np.zeros(len(tasks), np.int64))
