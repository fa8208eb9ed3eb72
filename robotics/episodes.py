"""Recorded episodes shown again: the same physics from the recorded state and commands, bit for bit. No torch.

A simulation is a function of its state and its commands, so an episode is stored without a picture and drawn only when someone
looks. Episodes of other people's environments (`robotics.envs.wrapped`) keep no such state and cannot be replayed.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from mmrl.errors import DataError
from robotics.rollouts import Episode
from robotics.tasks import RobotTask
from robotics.world import ArmWorld

_NO_CAMERAS: Mapping[str, tuple[int, int]] = {}


class Moment(NamedTuple):
    """An episode at one time."""

    step: int
    """Control steps since the start."""
    state: NDArray[np.float64]
    """``mjSTATE_INTEGRATION``."""
    images: Mapping[str, NDArray[np.uint8]]
    """``[H, W, 3]`` of each camera that was asked for."""


def replay(
    task: RobotTask,
    episode: Episode,
    *,
    cameras: Mapping[str, tuple[int, int]] = _NO_CAMERAS,
    every: int = 1,
    world: ArmWorld | None = None,
) -> Iterator[Moment]:
    """The start, every ``every``-th control step and the end of ``episode``, drawn by ``cameras`` (height and width, pixels).

    ``world`` is a world of one row with the episode's own physics (friction, pushes), where these were not the nominal ones;
    it stays open. Raises `DataError` for an episode that recorded no state, and at the end of one that did not go as recorded.
    """
    if not len(episode.initial_state):
        raise DataError(f"{task.id}: this episode holds no physics state, so it cannot be replayed; only those of the arm do.")
    ours = world is None
    world = ArmWorld([task]) if world is None else world
    row = np.array([0])
    try:
        expected = world.states().shape[1]
        if len(episode.initial_state) != expected:
            raise DataError(
                f"{task.id}: the episode's state has {len(episode.initial_state)} numbers, that of its scene {expected}; it "
                "was recorded in another version of the scene."
            )
        world.restore(episode.initial_state[None])
        for step in range(episode.num_steps + 1):
            if step:
                world.advance(episode.commands[step - 1 : step], row)
            if step % every == 0 or step == episode.num_steps:
                images = {name: image[0] for name, image in world.draw(row, cameras, sky=True).items()} if cameras else {}
                yield Moment(step, world.states()[0].copy(), images)
        if not np.array_equal(world.states()[0], episode.final_state):
            raise DataError(
                f"{task.id}: the replay does not end in the recorded state, so it does not show what happened. The episode had "
                "other physics (give its `world`), or comes from another version of the scene or of MuJoCo."
            )
    finally:
        if ours:
            world.close()
