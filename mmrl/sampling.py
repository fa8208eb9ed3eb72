"""Which tasks next, and the seeds of their rollouts.

Both are pure functions of the run's seed and a counter, so a resumed run needs the counters and no generator state.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from mmrl.errors import DataError
from mmrl.types import Task

_TASK_ORDER, _ROLLOUT_SEEDS = 1, 2  # keep the two streams of numbers apart


class TaskSampler:
    """Walks through a task source without replacement, in a new order each epoch.

    ``position`` counts the tasks drawn so far and is the whole state. A source with fewer tasks than are asked for wraps.
    """

    def __init__(self, source: Sequence[Task], *, order: Literal["shuffled", "sequential"], seed: int) -> None:
        if len(source) == 0:
            raise DataError("the task source has 0 tasks; check the dataset's path, split and limit.")
        self.source, self.order, self.seed = source, order, seed
        self.position = 0
        self._permutation: tuple[int, np.ndarray] | None = None

    def next(self, count: int) -> list[Task]:
        """The next ``count`` tasks."""
        indices = [self._index(self.position + i) for i in range(count)]
        self.position += count
        return [self.source[index] for index in indices]

    def _index(self, position: int) -> int:
        epoch, offset = divmod(position, len(self.source))
        if self.order == "sequential":
            return offset
        if self._permutation is None or self._permutation[0] != epoch:
            rng = np.random.default_rng((self.seed, _TASK_ORDER, epoch))
            self._permutation = (epoch, rng.permutation(len(self.source)))
        return int(self._permutation[1][offset])


def rollout_seeds(seed: int, train_step: int, attempt: int, count: int) -> Tensor:
    """Seeds of the ``count`` rollouts of a step; int64 ``[count]``. ``attempt`` counts refills of dynamic selection."""
    sequence = np.random.SeedSequence((seed, _ROLLOUT_SEEDS, train_step, attempt))
    return torch.from_numpy((sequence.generate_state(count, np.uint64) >> 1).astype(np.int64))
