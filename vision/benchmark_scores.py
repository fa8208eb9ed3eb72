"""Verdicts counted: accuracy in both orders, votes, categories, Acc+. Pure functions.

Published scripts show the better response first, always, which flatters a judge that favours the first one. Here each pair is
judged in both orders and counts with the mean of the two; both orders are also given on their own. A verdict that cannot be
read is wrong. Beside this strict rule stands the published one: better response first, and without an answer tag the last 1 or
2 of the text.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from mmrl.errors import DataError
from mmrl.evaluation import summarize
from vision.benchmark_preferences import PUBLISHED_SIZES, Item
from vision.r1_reward import first_answer, verdict_of

ORDERS = ("chosen first", "chosen second")


@dataclass(frozen=True, kw_only=True)
class Judgment:
    """What a judge said about one pair; lists of two are by `ORDERS`."""

    texts: tuple[str, str]
    """Greedy completions."""
    votes: tuple[tuple[int | None, ...], tuple[int | None, ...]] = ((), ())
    """Sampled verdicts."""

    def correct(self, order: int) -> bool:
        """Whether the greedy verdict names the better response, which is at place ``order + 1``."""
        return verdict_of(self.texts[order]) == order + 1


def majority(votes: Sequence[int | None]) -> int | None:
    """The verdict of most votes (voting@K). Votes that cannot be read are dropped; None for a draw or without any left."""
    counts = Counter(vote for vote in votes if vote is not None)
    if counts[1] == counts[2]:
        return None
    return 1 if counts[1] > counts[2] else 2


def published_verdict(text: str) -> int | None:
    """The published rule: the first answer, or without one the last 1 or 2 of the text."""
    answer = first_answer(text)
    if answer is None:
        digits = re.findall(r"[12]", text)
        return int(digits[-1]) if digits else None
    return {"1": 1, "2": 2}.get(answer)


def acc_plus(units: Sequence[str], correct: Sequence[bool]) -> float:
    """Share of units whose pairs are all right."""
    wrong = {unit for unit, right in zip(units, correct) if not right}
    return 1 - len(wrong) / len(set(units))


def report(
    benchmark: str, items: Sequence[Item], judgments: Sequence[Judgment], *, votes: Sequence[int] = ()
) -> dict[str, Any]:
    """All numbers of a measurement with 95% intervals. Raises `DataError` unless every item was judged."""
    if len(items) != len(judgments):
        raise DataError(f"{benchmark}: {len(judgments)} judgments for {len(items)} pairs; every pair needs one.")
    correct = [[judgment.correct(order) for judgment in judgments] for order in (0, 1)]
    scores = [sum(pair) / 2 for pair in zip(*correct)]
    verdicts = [verdict_of(text) for judgment in judgments for text in judgment.texts]
    units = [item.unit for item in items]
    categories = {
        kind: {
            name: summarize([score for item, score in zip(items, scores) if item.groups.get(kind) == name])
            for name in sorted({item.groups[kind] for item in items if kind in item.groups})
        }
        for kind in dict.fromkeys(kind for item in items for kind in item.groups)
    }
    return {
        "benchmark": benchmark,
        "num_items": len(items),
        "num_published_items": PUBLISHED_SIZES.get(benchmark),
        "accuracy": summarize(scores),
        "macro": _mean([cell["mean"] for cell in categories.get("category", {}).values()]),
        "orders": {name: summarize([float(right) for right in correct[order]]) for order, name in enumerate(ORDERS)},
        "right in both orders": summarize([float(score == 1) for score in scores]),
        "says the first": summarize([float(verdict == 1) for verdict in verdicts if verdict is not None]),
        "unreadable": summarize([float(verdict is None) for verdict in verdicts]),
        "published rule": summarize([float(published_verdict(judgment.texts[0]) == 1) for judgment in judgments]),
        "acc_plus": _mean([acc_plus(units, correct[order]) for order in (0, 1)]),
        "num_units": len(set(units)),
        "votes": {str(count): _voting(judgments, count) for count in votes},
        "groups": categories,
        "answers": [
            {"id": item.pair.id, "correct": [judgment.correct(order) for order in (0, 1)], "votes": judgment.votes}
            for item, judgment in zip(items, judgments)
        ],
    }


def _voting(judgments: Sequence[Judgment], count: int) -> dict[str, Any]:
    """Voting with the first ``count`` votes of each order, and whether any of them is right."""
    named = [(order, judgment.votes[order][:count]) for judgment in judgments for order in (0, 1)]
    right = [float(majority(some) == order + 1) for order, some in named]
    return {
        "accuracy": summarize([sum(right[row : row + 2]) / 2 for row in range(0, len(right), 2)]),
        "no verdict": summarize([float(majority(some) is None) for _, some in named]),
        "any right": summarize([float(order + 1 in some) for order, some in named]),
    }


def _mean(values: Sequence[Mapping[str, Any] | float]) -> float | None:
    return sum(values) / len(values) if values else None
