"""Grading of multiple-choice answers: a strict rule, and beside it the rule that each benchmark's own script applies.

Strict: the answer names exactly one option, by letter or by text, and it is the right one; anything else is malformed and
wrong. Published scripts drop malformed rows from the denominator or accept text that lists several options, so both numbers are
given whenever they are compared with papers.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from audio.benchmarks import LETTERS, PUBLISHED_SIZES, Item, normalized
from audio.rewards import first_answer, thinking
from mmrl.chat import Completion
from mmrl.errors import DataError
from mmrl.evaluation import summarize


@dataclass(frozen=True, kw_only=True)
class Graded:
    """An item and what became of it."""

    item: Item
    completion: Completion
    given: str
    """What stands between the answer tags; else the last option letter that stands alone; else the whole text."""
    option: str | None
    """The option it names; None is malformed."""
    correct: bool
    published: bool | None
    """By the benchmark's own script; None where that leaves the row out."""


def grade(benchmark: str, item: Item, completion: Completion) -> Graded:
    """One answer under both rules."""
    given = given_answer(completion.text, item.options)
    option = named_option(given, item.options)
    rule = PUBLISHED_RULES.get(benchmark)
    published = rule(given if option is None or benchmark == "mmsu" else option, item) if rule else option == item.answer
    return Graded(
        item=item, completion=completion, given=given, option=option, correct=option == item.answer, published=published
    )


def given_answer(text: str, options: Sequence[str]) -> str:
    """What a completion answers: text in the answer tags; else the last option letter that stands alone; else the raw text."""
    tagged = first_answer(text)
    if tagged is not None:
        return tagged
    letters = re.findall(rf"(?<![\w'])\(?([{LETTERS[: len(options)]}])\)?(?![\w'])", text)
    return letters[-1] if letters else text.strip()


def named_option(given: str, options: Sequence[str]) -> str | None:
    """The option that ``B``, ``(b)``, ``B. text`` or its own text names; None if it names none."""
    plain = [normalized(option) for option in options]
    if normalized(given) in plain:
        return options[plain.index(normalized(given))]
    found = re.fullmatch(r"\(?([A-Za-z])\)?(?:[.:)]?\s*|[.:)]\s*(.+))", given.strip(), re.DOTALL)
    if not found or found[1].upper() not in LETTERS[: len(options)]:
        return None
    option = options[LETTERS.index(found[1].upper())]
    return option if not found[2] or normalized(found[2]) == normalized(option) else None


def string_match(prediction: str, answer: str, choices: Sequence[str]) -> bool:
    """MMAU's rule: every word of the answer is in the prediction, and no word that only other choices have."""
    said, right = _words(prediction), _words(answer)
    wrong = set().union(*(_words(choice) - right for choice in choices if _words(choice) != right))
    return bool(said) and right <= said and not said & wrong


def mmsu_letter(response: str) -> str | None:
    """MMSU's rule: the first character if it is A to D, else the second to last one; None drops the row."""
    text = response.strip().replace("\n", "")
    if text[:1] and text[0] in "ABCD":
        return text[0]
    return text[-2] if len(text) > 1 and text[-2] in "ABCD" else None


def _mmsu_rule(given: str, item: Item) -> bool | None:
    letter = mmsu_letter(given)
    if letter is None:
        return None
    at = LETTERS.index(letter)
    return at < len(item.options) and item.options[at] == item.answer


def _match_rule(given: str, item: Item) -> bool:
    return string_match(given, item.answer, item.options)


PUBLISHED_RULES: Mapping[str, Callable[[str, Item], bool | None]] = {
    "mmau": _match_rule, "mmar": _match_rule, "mmsu": _mmsu_rule,
}  # fmt: skip
"""AVQA has no script of its own."""


def report(
    benchmark: str, items: Sequence[Item], graded: Sequence[Graded], *, version: str | None, control: str
) -> dict[str, Any]:
    """All numbers of a measurement: strict and published accuracy with Wilson intervals, overall and by group.

    Raises `DataError` unless every item was answered once: a missing prediction must not shrink the denominator.
    """
    if [entry.item.id for entry in graded] != [item.id for item in items]:
        raise DataError(f"{benchmark}: {len(graded)} predictions for {len(items)} items; every item needs exactly one.")
    kinds = dict.fromkeys(kind for item in items for kind in item.groups)
    groups: dict[str, dict[str, Any]] = {}
    for kind in kinds:
        names = sorted({entry.item.groups[kind] for entry in graded if kind in entry.item.groups})
        groups[kind] = {name: _accuracy([e for e in graded if e.item.groups.get(kind) == name]) for name in names}
    counted = [entry.published for entry in graded if entry.published is not None]
    thoughts = [len((thinking(entry.completion.text) or "").split()) for entry in graded]
    return {
        "benchmark": benchmark,
        "version": version,
        "control": control,
        "num_items": len(items),
        "num_published_items": PUBLISHED_SIZES.get(benchmark),
        "strict": _accuracy(graded),
        "published": summarize([float(value) for value in counted]),
        "malformed": summarize([float(entry.option is None) for entry in graded]),
        "truncated": summarize([float(entry.completion.stop_reason == "length") for entry in graded]),
        "mean_think_words": sum(thoughts) / len(thoughts),
        "mean_tokens": sum(entry.completion.num_tokens for entry in graded) / len(graded),
        "groups": groups,
        "answers": [
            {"id": e.item.id, "given": e.given, "option": e.option, "answer": e.item.answer, "correct": e.correct,
             "published": e.published} for e in graded
        ],
    }  # fmt: skip


def _accuracy(graded: Sequence[Graded]) -> dict[str, Any]:
    return summarize([float(entry.correct) for entry in graded])


def _words(text: str) -> set[str]:
    return set(re.findall(r"\b\w+\b", text.casefold()))
