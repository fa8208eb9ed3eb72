"""Calibrated answers (RLCR, arXiv 2507.16806): reward terms for a stated confidence, and how well it is calibrated.

A completion is ``<think>..</think><answer>..</answer><analysis>..</analysis><confidence>q</confidence>``, ``q`` from 0 to 1.
The paper's reward is ``1[correct] - (q - 1[correct])^2``; its code weighs three terms by one half each, which is the same up to
a factor and a constant on well-formed rows. In a config, without dividing by the standard deviation:

    algorithm: dr_grpo
    rewards:
      accuracy: 0                                                                        # what evaluation reports
      confidence_format: {weight: 0.5, function: mmrl.calibration:confidence_format}
      answer: {weight: 0.5, function: mmrl.calibration:answer}
      brier: {weight: 0.5, function: mmrl.calibration:brier}

Evaluation then also reports Brier score, expected calibration error and the bins of a reliability plot, under ``summaries``.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from typing import Any

from mmrl.chat import ChatTask, Completion, first_block
from mmrl.rewards import same_answer

TAGS = ("think", "answer", "analysis", "confidence")
NUM_BINS = 10


def stated_confidence(text: str) -> float | None:
    """The number in the only ``<confidence>`` of a well-formed completion; None if anything of the form is wrong."""
    if any(text.count(f"<{tag}>") != 1 or text.count(f"</{tag}>") != 1 for tag in TAGS):
        return None
    inside = r"\s*".join(rf"<{tag}>(?P<{tag}>.*?)</{tag}>" for tag in TAGS)
    match = re.fullmatch(inside, text.strip(), flags=re.DOTALL)
    if match is None:
        return None
    try:
        value = float(match["confidence"])
    except ValueError:
        return None
    return value if math.isfinite(value) and 0.0 <= value <= 1.0 else None


def confidence_format(task: ChatTask, completion: Completion) -> float:
    """1.0 if all four tags come once, in order, with a confidence in [0, 1]; else 0.0."""
    return float(stated_confidence(completion.text) is not None)


def answer(task: ChatTask, completion: Completion) -> float | None:
    """1.0 for a right answer in a well-formed completion, else 0.0; None for a task without an answer."""
    if not task.answer:
        return None
    return float(_confidence_and_correct(task, completion) is not None and _is_right(task, completion))


def brier(task: ChatTask, completion: Completion) -> float | None:
    """``1 - (1[correct] - q)^2``, 0.0 if the form is wrong; None for a task without an answer."""
    if not task.answer:
        return None
    stated = _confidence_and_correct(task, completion)
    return 0.0 if stated is None else 1.0 - (stated[1] - stated[0]) ** 2


def paper_reward(correct: bool, confidence: float) -> float:
    """``1[correct] - (q - 1[correct])^2``: correctness minus the Brier score."""
    return float(correct) - (confidence - float(correct)) ** 2


def calibration_summary(records: Sequence[tuple[float, float] | None]) -> dict[str, Any]:
    """Brier score, expected calibration error and reliability bins of ``(confidence, correct)`` pairs; None is malformed.

    The error is the mean over rollouts of ``|accuracy - mean confidence|`` of their bin, over ten equal bins of confidence; a
    confidence of 1 belongs to the last one. Numbers are None when there is no pair.
    """
    pairs = [record for record in records if record is not None]
    bins: list[list[tuple[float, float]]] = [[] for _ in range(NUM_BINS)]
    for confidence, correct in pairs:
        bins[min(int(confidence * NUM_BINS), NUM_BINS - 1)].append((confidence, correct))
    reliability = [
        {
            "low": i / NUM_BINS,
            "high": (i + 1) / NUM_BINS,
            "n": len(members),
            "confidence": sum(confidence for confidence, _ in members) / len(members) if members else None,
            "accuracy": sum(correct for _, correct in members) / len(members) if members else None,
        }
        for i, members in enumerate(bins)
    ]
    error = sum(entry["n"] * abs(entry["accuracy"] - entry["confidence"]) for entry in reliability if entry["n"])
    count = len(pairs)
    return {
        "n": count,
        "malformed": len(records) - count,
        "brier": sum((confidence - correct) ** 2 for confidence, correct in pairs) / count if count else None,
        "ece": error / count if count else None,
        "reliability": reliability,
    }


def _is_right(task: ChatTask, completion: Completion) -> bool:
    given = first_block(completion.text, "answer")
    return given is not None and same_answer(given, task.answer)


def _confidence_and_correct(task: ChatTask, completion: Completion) -> tuple[float, float] | None:
    confidence = stated_confidence(completion.text)
    return None if confidence is None else (confidence, float(_is_right(task, completion)))


confidence_format.reads_form = True
brier.record = _confidence_and_correct
brier.summarize = calibration_summary
