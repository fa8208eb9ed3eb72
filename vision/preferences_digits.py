"""Pairs of answers to questions about handwritten digits (`vision.digits`), one of them right.

In an easy pair the other response does not answer the question: a word where a number is asked for, or the reverse. That shows
in the text alone. In a hard pair both responses could be right, and only the image tells. A demonstration writes the digits
down, then the response that it takes for right and its place. For an easy pair that is the right one; for a hard pair it is
drawn at random, so that it teaches the form of a verdict and nothing about the answer.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from mmrl.chat import ChatTask
from vision.digits import DigitTasks
from vision.preferences import Pair

WRONG_ANSWERS: Mapping[str, Callable[[ChatTask], Sequence[str]]] = {
    **dict.fromkeys(("read", "read_first", "read_second"), lambda task: [str(n) for n in range(10) if str(n) != task.answer]),
    "parity": lambda task: [word for word in ("even", "odd") if word != task.answer],
    "above_four": lambda task: [word for word in ("yes", "no") if word != task.answer],
    "larger": lambda task: [str(digit) for digit in task.columns["digits"] if str(digit) != task.answer],
    "sum": lambda task: [str(n) for n in range(19) if 0 < abs(n - int(task.answer)) <= 3],
}
"""What the other response of a hard pair may say, by kind of question."""
WORDS = ("even", "odd", "yes", "no")
DIGITS = tuple(map(str, range(10)))


class DigitPairs(Sequence[Pair]):
    """An endless-looking, indexable source of pairs: equal index, equal pair. Hard ones are spread evenly among easy ones."""

    def __init__(
        self,
        *,
        easy_kinds: Sequence[str],
        hard_kinds: Sequence[str],
        easy_share: float,
        split: str,
        num_pairs: int,
        seed: int = 0,
    ) -> None:
        self.easy_kinds, self.hard_kinds, self.easy_share = tuple(easy_kinds), tuple(hard_kinds), easy_share
        self.split, self.num_pairs, self.seed = split, num_pairs, seed
        kinds = {*easy_kinds, *hard_kinds}
        self.questions = {kind: DigitTasks([kind], split=split, num_tasks=num_pairs, seed=seed) for kind in kinds}

    def __len__(self) -> int:
        return self.num_pairs

    def __getitem__(self, index: int) -> Pair:
        if not 0 <= index < self.num_pairs:
            raise IndexError(f"digit pair {index}: the {self.split} split has {self.num_pairs} pairs.")
        num_hard = self._num_hard(index)
        hard = self._num_hard(index + 1) > num_hard
        kind = (
            self.hard_kinds[num_hard % len(self.hard_kinds)]
            if hard
            else self.easy_kinds[(index - num_hard) % len(self.easy_kinds)]
        )
        task = self.questions[kind][index]
        rng = np.random.default_rng((self.seed, self.split == "train", index, 1))
        unfitting = DIGITS if task.answer in WORDS else WORDS
        others = WRONG_ANSWERS[kind](task) if hard else unfitting
        rejected = others[rng.integers(len(others))]
        drawn = int(rng.integers(1, 3))
        seen = " ".join(map(str, task.columns["digits"]))

        def demonstrate(label: int) -> str:
            verdict = drawn if hard else label
            said = task.answer if verdict == label else rejected
            place = ("first", "second")[verdict - 1]
            return f"<think>{seen}\n{said} {place} is better</think><answer>{verdict}</answer>"

        return Pair(
            id=f"{self.split}/{kind}/{index}",
            question=tuple(task.messages[0]["content"]),
            chosen=task.answer,
            rejected=rejected,
            domain="hard" if hard else "easy",
            demonstrate=demonstrate,
            columns={**task.columns, "kind": kind},
        )

    def _num_hard(self, count: int) -> int:
        """Hard pairs among the first ``count``."""
        return math.floor(round(count * (1 - self.easy_share), 6))
