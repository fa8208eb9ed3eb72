"""AudioRubrics [2608.02831]: reasoning graded by criteria that a judge, who hears the clip, writes anew for each group.

    R = 0.9 accuracy + 0.1 format + 0.5 rubrics + 0.15 overthink

`RubricTerm` is the term ``rubrics``, in [0, 1], and `Overthink` the term ``overthink``; accuracy and format are ordinary terms.
A group starts from its sample's static criteria each time. What a failing judge leads to, in this order: scores by the static
criteria alone, one request a rollout; then 0.5 for the whole group, which its advantages do not feel. Both are counted.
"""

from __future__ import annotations

import math
import statistics
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

from audio.rubrics_config import RubricsConfig
from audio.rubrics_data import Criterion, StaticRubrics
from audio.rubrics_questions import (
    EVOLVE,
    EVOLVE_INSTRUCTIONS,
    GRADE,
    GRADE_INSTRUCTIONS,
    WEIGH,
    WEIGH_INSTRUCTIONS,
    Evolution,
    question_of,
    read_evolution,
    read_grades,
    read_weights,
    shown,
)
from mmrl.chat import ChatTask, Completion, first_block
from mmrl.judge import JudgeClient, JudgeError, JudgeRequest
from mmrl.rewards import Judged, judged_term
from mmrl.types import Media

NEUTRAL = 0.5
"""Score of rollouts that nobody could judge."""
EVOLVE_TIMEOUT_S, OTHER_TIMEOUT_S = 180.0, 120.0

FALLBACKS = ("no_rubric", "no_audio", "judge_failed", "malformed", "constant", "group_size")
"""Why a group was not scored by evolved criteria; each is logged as a share of groups."""


@dataclass(frozen=True, kw_only=True)
class Kept:
    """A criterion that separates the rollouts of a group."""

    criterion: Criterion
    bits: tuple[int, ...]
    """``[G]``: 1 is good, so the verdicts of a negative criterion are turned round."""
    deviation: float
    """Population standard deviation of ``bits``."""


def think_text(completion: str) -> str:
    """The text of the first think block; all of the completion if it has none."""
    found = first_block(completion, "think")
    return completion if found is None else found.strip()


def count_words(text: str) -> int:
    """About as many tokens as ``text`` has, where there is no tokenizer."""
    return int(len(text.split()) / 0.75)


@dataclass(frozen=True, kw_only=True)
class Overthink:
    """The reward term ``1 - t/L``, t being the tokens of `think_text`; negative beyond L."""

    limit: int = 256
    """L."""
    count_tokens: Callable[[str], int] = count_words
    """Tokens of a text without special ones, as the policy's tokenizer counts them."""

    def __call__(self, task: ChatTask, completion: Completion) -> float:
        return 1.0 - self.count_tokens(think_text(completion.text)) / self.limit


def keep_separating(evolution: Evolution, keep: int) -> tuple[Kept, ...]:
    """The ``keep`` criteria on which rollouts differ most; equal deviations stay in order, constant criteria are dropped."""
    found = []
    for criterion, verdicts in zip(evolution.criteria, evolution.verdicts):
        bits = tuple(int(verdict != (criterion.polarity == "negative")) for verdict in verdicts)
        share = sum(bits) / len(bits)
        found.append(Kept(criterion=criterion, bits=bits, deviation=math.sqrt(share * (1 - share))))
    separating = [entry for entry in found if entry.deviation > 0]
    return tuple(sorted(separating, key=lambda entry: _yes_from_half(entry.bits))[:keep])


def weighted_scores(weights: Sequence[float], bits: Sequence[Sequence[int]]) -> list[float]:
    """``sum_k w_k b[k, i]`` for each rollout i: ``weights [K]`` that sum to 1, ``bits [K][G]``; scores ``[G]`` in [0, 1]."""
    return [min(1.0, math.fsum(weight for weight, bit in zip(weights, column) if bit)) for column in zip(*bits)]


@judged_term
@dataclass(kw_only=True)
class RubricTerm:
    """The reward term ``rubrics``: implements `mmrl.rewards.JudgedTerm`."""

    client: JudgeClient | None
    """None: there is no judge, and every group is neutral."""
    static: StaticRubrics
    media: Callable[[ChatTask], Sequence[Media]]
    """The clip as a judge hears it; empty if it is missing."""
    correct: Callable[[ChatTask, Completion], Any]
    """A reward term that is 1 for a right answer."""
    group_size: int = 8
    """Groups of another size are scored by the static criteria."""
    config: RubricsConfig = field(default_factory=RubricsConfig)
    clock: Callable[[], float] = time.monotonic

    def __post_init__(self) -> None:
        self._lock = threading.Lock()
        self._train_step = 1
        self._counts: Counter[str] = Counter()
        self._deviations: list[float] = []
        self._means: list[float] = []

    @property
    def concurrent_groups(self) -> int:
        return self.client.workers if self.client is not None else 1

    def begin_step(self, train_step: int) -> None:
        """Remember which step it is; new criteria come in steps 1, 1 + n, 1 + 2n .. for ``regenerate_every: n``."""
        self._train_step = train_step

    def __call__(self, task: ChatTask, completions: Sequence[Completion]) -> Judged:
        """Scores ``[G]`` of one group, and the record of how they came about."""
        record = self._judge(task, completions)
        self._note(record)
        return Judged(values=record["scores"], record=record)

    def totals(self) -> dict[str, tuple[float, float]]:
        """Shares and means per group or rollout, and sums of the judge's counters, since the last call."""
        judge = self.client.drain() if self.client is not None else {}
        with self._lock:
            counts, self._counts = self._counts, Counter()
            deviations, self._deviations = self._deviations, []
            means, self._means = self._means, []
        groups, evolved = counts["groups"], counts["evolved"]
        totals: dict[str, tuple[float, float]] = {f"judge/{name}": (float(value), 1) for name, value in judge.items()}
        totals |= {f"rubrics/{name}": (float(counts[name]), groups) for name in ("evolved", "static", "neutral")}
        totals |= {f"rubrics/{name}": (float(counts[name]), groups) for name in FALLBACKS}
        totals |= {
            f"rubrics/{name}": (float(counts[name]), evolved) for name in ("written", "kept", "kept_new", "weights_failed")
        }
        return totals | {
            "rubrics/neutral_rollouts": (float(counts["neutral_rollouts"]), counts["rollouts"]),
            "rubrics/group_mean": (math.fsum(means), groups),  # fsum: the order in which threads end does not matter
            "rubrics/group_std": (math.fsum(deviations), groups),
        }

    def _judge(self, task: ChatTask, completions: Sequence[Completion]) -> dict[str, Any]:
        static = self.static(task)
        if not static or self.client is None:
            return _neutral(len(completions), ["no_rubric" if not static else "judge_failed"])
        deadline = self.clock() + self.config.group_timeout_s
        media = tuple(self.media(task))
        reason = self._why_not_evolve(completions, media)
        if reason is None:
            try:
                record = self._evolved(task, completions, static, media, deadline)
                if record is not None:
                    return record
                reason = "constant"
            except JudgeError as error:
                reason = "malformed" if error.kind == "malformed" else "judge_failed"
        return self._static(task, completions, static, media, deadline, [reason] if reason else [])

    def _why_not_evolve(self, completions: Sequence[Completion], media: Sequence[Media]) -> str | None:
        if not self.config.evolve:
            return ""
        if not media:
            return "no_audio"
        return "group_size" if len(completions) != self.group_size else None

    def _evolved(
        self,
        task: ChatTask,
        completions: Sequence[Completion],
        static: Sequence[Criterion],
        media: tuple[Media, ...],
        deadline: float,
    ) -> dict[str, Any] | None:
        """Both requests of a group; None if no criterion separates its rollouts."""
        writes = (self._train_step - 1) % self.config.regenerate_every == 0
        max_new = self.config.max_new if writes else 0
        attempts = [self._attempt(task, completion) for completion in completions]
        payload = {
            "question": question_of(task),
            "right_answer": task.answer,
            "max_new": max_new,
            "criteria": shown(static),
            "attempts": attempts,
        }
        request = JudgeRequest(
            purpose=EVOLVE, instructions=EVOLVE_INSTRUCTIONS, payload=payload, media=media, timeout_s=EVOLVE_TIMEOUT_S
        )
        evolution = self.client.ask(
            request,
            lambda answer: read_evolution(answer, static, group_size=len(completions), max_new=max_new),
            deadline=deadline,
        )
        kept = keep_separating(evolution, self.config.keep)
        if not kept:
            return None
        weights, failed = self._weigh(task, [entry.criterion for entry in kept], media, deadline)
        rubrics = [_row(entry.criterion, weight, entry.bits) for entry, weight in zip(kept, weights)]
        return {
            "rubrics": rubrics,
            "scores": weighted_scores(weights, [entry.bits for entry in kept]),
            "mode": "evolved",
            "reasons": ["weights_failed"] if failed else [],
            "written": len(evolution.criteria) - len(static),
        }

    def _weigh(
        self, task: ChatTask, kept: Sequence[Criterion], media: tuple[Media, ...], deadline: float
    ) -> tuple[Sequence[float], bool]:
        """Weights of the kept criteria, and whether they are equal because the judge gave none."""
        equal = [1 / len(kept)] * len(kept)
        if self.config.uniform_weights:
            return equal, False
        payload = {"question": question_of(task), "criteria": shown(kept)}
        request = JudgeRequest(
            purpose=WEIGH, instructions=WEIGH_INSTRUCTIONS, payload=payload, media=media, timeout_s=OTHER_TIMEOUT_S
        )
        try:
            return self.client.ask(request, lambda answer: read_weights(answer, kept), deadline=deadline), False
        except JudgeError:
            return equal, True

    def _static(
        self,
        task: ChatTask,
        completions: Sequence[Completion],
        static: Sequence[Criterion],
        media: tuple[Media, ...],
        deadline: float,
        reasons: list[str],
    ) -> dict[str, Any]:
        """One request per rollout over the static criteria."""

        def grade(completion: Completion) -> tuple[bool, ...] | None:
            payload = {
                "question": question_of(task),
                "right_answer": task.answer,
                "criteria": shown(static),
                "attempt": self._attempt(task, completion),
            }
            request = JudgeRequest(
                purpose=GRADE, instructions=GRADE_INSTRUCTIONS, payload=payload, media=media, timeout_s=OTHER_TIMEOUT_S
            )
            try:
                return self.client.ask(request, lambda answer: read_grades(answer, static), deadline=deadline)
            except JudgeError:
                return None

        with ThreadPoolExecutor(min(len(completions), self.client.workers)) as pool:
            graded = list(pool.map(grade, completions))
        failed = [verdicts is None for verdicts in graded]
        if all(failed) or (any(failed) and self.config.one_row_failed == "neutral_group"):
            return _neutral(len(completions), [*reasons, "judge_failed"])
        bits = [[int(bool(verdicts and verdicts[k])) for verdicts in graded] for k in range(len(static))]
        scores = weighted_scores([criterion.weight for criterion in static], bits)
        return {
            "rubrics": [_row(criterion, criterion.weight, row) for criterion, row in zip(static, bits)],
            "scores": [NEUTRAL if missing else score for missing, score in zip(failed, scores)],
            "mode": "static",
            "reasons": [*reasons, "judge_failed"] if any(failed) else reasons,
            "neutral_rollouts": [i for i, missing in enumerate(failed) if missing],
        }

    def _attempt(self, task: ChatTask, completion: Completion) -> dict[str, str]:
        """A rollout as the judge sees it."""
        reasoning = think_text(completion.text)[: self.config.max_think_chars]
        return {"result": self._result(task, completion), "reasoning": reasoning}

    def _result(self, task: ChatTask, completion: Completion) -> str:
        """What the judge is told of a rollout's answer."""
        if self.correct(task, completion) == 1:
            return "CORRECT"
        chosen = (first_block(completion.text, "answer") or "").strip()
        return f"WRONG (chose {chosen[:80]})" if chosen else "WRONG (no parseable answer)"

    def _note(self, record: Mapping[str, Any]) -> None:
        scores, mode = record["scores"], record["mode"]
        neutral = len(scores) if mode == "neutral" else len(record.get("neutral_rollouts", ()))
        with self._lock:
            self._counts.update({reason: 1 for reason in record["reasons"]})
            self._counts.update({"groups": 1, mode: 1, "rollouts": len(scores), "neutral_rollouts": neutral})
            if mode == "evolved":
                new = sum(row["id"].startswith("N") for row in record["rubrics"])
                self._counts.update(written=record["written"], kept=len(record["rubrics"]), kept_new=new)
            self._means.append(statistics.fmean(scores))
            self._deviations.append(statistics.pstdev(scores))


def _row(criterion: Criterion, weight: float, bits: Sequence[int]) -> dict[str, Any]:
    return {
        "id": criterion.id,
        "title": criterion.name,
        "polarity": criterion.polarity,
        "weight": weight,
        "bits": list(bits),
    }


def _neutral(count: int, reasons: Sequence[str]) -> dict[str, Any]:
    return {"rubrics": [], "scores": [NEUTRAL] * count, "mode": "neutral", "reasons": list(dict.fromkeys(reasons))}


def _yes_from_half(bits: Sequence[int]) -> int:
    """Orders bits by falling standard deviation, exactly: how far the number of ones is from half."""
    return abs(2 * sum(bits) - len(bits))
