"""Where pairs come from: the two sections of preference tasks as sources for a run."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path

from vision.preferences import PairTasks, read_pairs
from vision.preferences_config import PreferenceTasks, PreferenceTasksConfig
from vision.preferences_digits import DigitPairs
from vision.r1_reward_attempts import read_attempts

NUM_EVAL_PAIRS = 50_000
"""Digit pairs of evaluation, each asked in both orders."""


def preference_sources(tasks: PreferenceTasks, *, seed: int, base_dir: Path) -> Mapping[str, Callable[[], PairTasks]]:
    """A source per split, made when asked for; relative paths start at ``base_dir``."""
    return {
        "train": partial(_train, tasks, seed, base_dir),
        "eval": partial(_eval, tasks, base_dir),
    }


def _train(tasks: PreferenceTasks, seed: int, base_dir: Path) -> PairTasks:
    if isinstance(tasks, PreferenceTasksConfig):
        pairs = read_pairs(tasks.train, base_dir)
    else:
        pairs = DigitPairs(
            easy_kinds=tasks.easy_kinds,
            hard_kinds=tasks.hard_kinds,
            easy_share=tasks.easy_share,
            split="train",
            num_pairs=tasks.num_tasks,
            seed=seed,
        )
    attempts = read_attempts(tasks.attempts, base_dir) if tasks.attempts is not None else None
    return PairTasks(pairs, prompt=tasks.prompt, order="balanced", seed=seed, attempts=attempts)


def _eval(tasks: PreferenceTasks, base_dir: Path) -> PairTasks:
    if isinstance(tasks, PreferenceTasksConfig):
        return PairTasks(read_pairs(tasks.eval, base_dir), prompt=tasks.prompt, order="both")
    pairs = DigitPairs(
        easy_kinds=tasks.easy_kinds,
        hard_kinds=tasks.hard_kinds,
        easy_share=tasks.eval_easy_share,
        split="eval",
        num_pairs=NUM_EVAL_PAIRS,
    )
    return PairTasks(pairs, prompt=tasks.prompt, order="both")
