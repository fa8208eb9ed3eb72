"""NeuraLadder (Observe-R1, arXiv 2505.12432): tasks from easy to hard, with a window of neighbouring levels.

Difficulty ``d = 1 - correct / N`` and complexity (mean tokens of the N completions) come from `mmrl.profiling`. Tasks are
sorted by ``(d, complexity)`` and stand on nine levels, d = 0, 1/8 .. 1. The curriculum spends as many draws at a level as that
level has tasks, but takes only most of them from it: each draw comes from one of five neighbouring levels, by the published
rows of `MIXING`. Within a level tasks come by complexity.

What is not published, and decided here: draws are without replacement, and empty levels leave their probability to the others
of the window. Tasks of a level that no later window holds are spread over the draws of the last one that does, so that an epoch
is every task once and no task is drawn outside of its window.
"""

from __future__ import annotations

import hashlib
import math
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from mmrl.data_files import open_rows
from mmrl.errors import CheckpointError, DataError
from mmrl.processes import Totals
from mmrl.sampling import TaskSampler
from mmrl.types import Task

NUM_LEVELS = 9
WINDOW = 5
MIXING = (
    (0.285, 0.175, 0.187, 0.187, 0.168),
    (0.052, 0.496, 0.147, 0.155, 0.147),
    (0.024, 0.077, 0.508, 0.168, 0.225),
    (0.032, 0.069, 0.503, 0.208, 0.192),
    (0.028, 0.069, 0.582, 0.185, 0.135),
    (0.032, 0.100, 0.575, 0.147, 0.147),
    (0.053, 0.115, 0.537, 0.175, 0.122),
    (0.020, 0.057, 0.098, 0.685, 0.143),
    (0.016, 0.044, 0.073, 0.150, 0.718),
)
"""``[level of the curriculum][level of its window]``: probability of a draw, read from the authors' figure (to 0.005)."""

_LADDER = 4  # keeps this stream of numbers apart from those of `mmrl.sampling`


@dataclass(frozen=True, order=True, kw_only=True)
class Rung:
    """Where a task stands; rungs compare by difficulty, then by complexity."""

    difficulty: float
    """In [0, 1]: the share of wrong completions."""
    complexity: float = 0.0
    """Mean length of the completions in tokens."""


def level_of(difficulty: float) -> int:
    """The nearest of the nine levels, the harder of two that are equally near."""
    return math.floor(difficulty * (NUM_LEVELS - 1) + 0.5)


def window_start(level: int) -> int:
    """Lowest level of the five that are drawn from while the curriculum is at ``level``."""
    return min(max(level - WINDOW // 2, 0), NUM_LEVELS - WINDOW)


def mixing_row(level: int) -> list[float]:
    """The level's row of `MIXING`, made to sum to 1."""
    return [share / sum(MIXING[level]) for share in MIXING[level]]


def ladder_order(rungs: Sequence[Rung]) -> list[int]:
    """Indices by difficulty, then complexity; equals stay in order."""
    return sorted(range(len(rungs)), key=lambda index: rungs[index])


def mixed_order(rungs: Sequence[Rung], rng: np.random.Generator) -> list[int]:
    """Every index once, as the curriculum visits them."""
    left: list[deque[int]] = [deque() for _ in range(NUM_LEVELS)]
    for index in ladder_order(rungs):
        left[level_of(rungs[index].difficulty)].append(index)
    return [left[level].popleft() for level in _mixed_levels([len(members) for members in left], rng)]


def _mixed_levels(counts: Sequence[int], rng: np.random.Generator) -> list[int]:
    """The level of each draw, when ``counts`` tasks stand on each."""
    left, levels = list(counts), []
    for slot, count in enumerate(counts):
        start = window_start(slot)
        drawn = []
        for chance in rng.random(count):
            shares = [share if left[start + i] else 0.0 for i, share in enumerate(MIXING[slot])]
            if not any(shares):
                break
            place = int(np.searchsorted(np.cumsum(shares), chance * sum(shares), side="right"))
            drawn.append(start + min(place, WINDOW - 1))
            left[drawn[-1]] -= 1
        next_start = window_start(slot + 1) if slot + 1 < NUM_LEVELS else NUM_LEVELS
        levels += _spread(drawn, [level for level in range(start, next_start) for _ in range(left[level])])
        left[start:next_start] = [0] * (next_start - start)
    return levels


def _spread(some: Sequence[int], others: Sequence[int]) -> list[int]:
    """Both sequences in their own order, ``others`` at even distances."""
    placed = [((i + 0.5) / len(part), entry) for part in (some, others) for i, entry in enumerate(part)]
    return [entry for _, entry in sorted(placed, key=lambda pair: pair[0])]


class LadderSampler(TaskSampler):
    """Draws tasks along the ladder: a pure function of the seed and of how many were drawn, a new mixture each epoch."""

    def __init__(
        self,
        source: Sequence[Task],
        *,
        seed: int,
        profile: Path | None = None,
        mixing: bool = True,
        drop_solved_below: float | None = None,
    ) -> None:
        super().__init__(source, order="sequential", seed=seed)
        self.mixing = mixing
        rungs = read_rungs(source, profile)
        kept = {i: rung for i, rung in rungs.items() if not _too_easy(rung, drop_solved_below)}
        if not kept:
            raise DataError(
                f"sampling.ladder: none of {len(source)} tasks is left; {len(source) - len(rungs)} cannot be graded and "
                f"{len(rungs)} are always solved within drop_solved_below tokens."
            )
        self.indices, self.rungs = list(kept), list(kept.values())
        self._epoch: tuple[int, list[int]] | None = None
        self._difficulty = (0.0, 0)

    def state(self) -> dict[str, Any]:
        return {"position": self.position, "ladder": self._checksum()}

    def load_state(self, state: Mapping[str, Any]) -> None:
        if state.get("ladder") != self._checksum():
            raise CheckpointError(
                "sampling.ladder: the checkpoint was written with other difficulties or complexities than these tasks have "
                "now; restore the profile that the run began with, or start a new run."
            )
        self.position = state["position"]

    def next(self, count: int) -> list[Task]:
        places = [self._place(self.position + i) for i in range(count)]
        self.position += count
        total, number = self._difficulty
        self._difficulty = (total + sum(self.rungs[place].difficulty for place in places), number + count)
        return [self.source[self.indices[place]] for place in places]

    def totals(self) -> Totals:
        """Mean difficulty of the tasks drawn since the last call, and the share of the source that the ladder holds."""
        drawn, self._difficulty = self._difficulty, (0.0, 0)
        return {"sampling/difficulty": drawn, "sampling/kept": (len(self.indices), len(self.source))}

    def _place(self, position: int) -> int:
        epoch, offset = divmod(position, len(self.rungs))
        if self._epoch is None or self._epoch[0] != epoch:
            rng = np.random.default_rng((self.seed, _LADDER, epoch))
            self._epoch = (epoch, mixed_order(self.rungs, rng) if self.mixing else ladder_order(self.rungs))
        return self._epoch[1][offset]

    def _checksum(self) -> str:
        text = "\n".join(f"{i} {rung.difficulty!r} {rung.complexity!r}" for i, rung in zip(self.indices, self.rungs))
        return hashlib.sha256(text.encode()).hexdigest()[:16]


def read_rungs(source: Sequence[Task], profile: Path | None = None) -> dict[int, Rung]:
    """Rung by index of the tasks that could be graded, from a profile file by task id, else from the tasks themselves.

    Tasks carry ``difficulty`` and, among their columns, ``complexity`` (0 where absent). Raises `DataError` for a task that was
    never profiled.
    """
    rows = None if profile is None else _read_profile(profile)
    rungs: dict[int, Rung] = {}
    for index in range(len(source)):
        task = source[index]
        if rows is None:
            row = {"difficulty": task.difficulty, "complexity": getattr(task, "columns", {}).get("complexity")}
        elif task.id in rows:
            row = rows[task.id]
        else:
            raise DataError(f"{profile}: has no row with id {task.id!r}; profile all tasks of this config (mmrl data profile).")
        answers = [value for value in (row.get("answer"), getattr(task, "answer", None)) if isinstance(value, str)]
        if len(set(answers)) == 2:
            raise DataError(
                f"{profile}: {task.id!r} is answered {answers[0]!r} there and {answers[1]!r} here; profile the tasks of this "
                "config and seed (mmrl data profile)."
            )
        if row.get("difficulty") is not None:
            rungs[index] = _rung(row, task.id)
    if not rungs:
        raise DataError(
            f"sampling.ladder: none of {len(source)} tasks has a difficulty; measure it with mmrl data profile and read its "
            "output as the dataset, or name it in sampling.ladder.profile."
        )
    return rungs


def _read_profile(profile: Path) -> dict[str, Mapping[str, Any]]:
    rows, _ = open_rows(str(profile), base_dir=Path.cwd(), split=None, subset=None)
    missing = {"id", "difficulty"} - rows.columns
    if missing:
        raise DataError(f"{profile}: has no column {sorted(missing)[0]!r}; expected the output of mmrl data profile.")
    return {str(row["id"]): row for row in (rows[index] for index in range(len(rows)))}


def _rung(row: Mapping[str, Any], task_id: str) -> Rung:
    difficulty, complexity = (0.0 if row.get(key) is None else row[key] for key in ("difficulty", "complexity"))
    numbers = all(isinstance(value, (int, float)) and math.isfinite(value) for value in (difficulty, complexity))
    if not numbers or not 0 <= difficulty <= 1 or complexity < 0:
        raise DataError(
            f"sampling.ladder: task {task_id!r} has difficulty {difficulty!r} and complexity {complexity!r}; expected a share "
            "of wrong completions in [0, 1] and a number of tokens, as mmrl data profile writes them."
        )
    return Rung(difficulty=float(difficulty), complexity=float(complexity))


def _too_easy(rung: Rung, limit: float | None) -> bool:
    return limit is not None and rung.difficulty == 0 and rung.complexity < limit
