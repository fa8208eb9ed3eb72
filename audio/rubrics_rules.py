"""Criteria that can be decided without a model: rules for the built-in questions, which compare words for what is heard.

`audio.judges` measures the clip; here is what follows from that.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from audio.rubrics_data import CATEGORIES, Criterion, Polarity
from audio.rubrics_questions import question_of
from mmrl.chat import ChatTask
from mmrl.judge import JudgeError
from mmrl.rewards import same_answer

VOCABULARY: Mapping[str, frozenset[str]] = {
    "beep": frozenset({"beep", "-"}),
    "tone": frozenset({"low", "middle", "high"}),
    "knock": frozenset({"loud", "soft"}),
    "digit": frozenset("0123456789"),
    "sound": frozenset({"sine", "string", "organ", "bell", "noise"}),
}
"""Words for what is heard, by the noun that a question uses."""

MAX_DIGITS = 18
"""Longer rows of digits are no numbers."""
_REGISTERS = ("low", "middle", "high")


@dataclass(frozen=True, kw_only=True)
class Hearing:
    """What a judge knows of one attempt."""

    noun: str
    question: str
    heard: tuple[str, ...]
    """Measured."""
    said: tuple[str, ...]
    """Words of the attempt's reasoning."""
    answer: str
    """Empty if it has none."""

    @property
    def events_heard(self) -> list[str]:
        return [word for word in self.heard if word != "-"]

    @property
    def events_said(self) -> list[str]:
        return [word for word in self.said if word != "-"]


@dataclass(frozen=True, kw_only=True)
class Rule:
    """A criterion that can be decided by comparing words."""

    title: str
    text: str
    holds: Callable[[Hearing], bool]
    category: str = ""
    polarity: Polarity = "positive"
    importance: float = 1.0
    """Relative weight where the judge weighs criteria."""


def follows(noun: str, question: str, words: Sequence[str]) -> str | None:
    """The answer to a built-in question that follows from what was written down; None if none follows."""
    events = [word for word in words if word != "-"]
    if not events:
        return None
    end = re.match(r"Which \w+ is (first|last)\?", question)
    if end:
        return events[0 if end[1] == "first" else -1]
    numbers = [int(word) for word in events if word.isdigit() and len(word) <= MAX_DIGITS]
    for pattern, answer in (
        ("How many beeps are there", lambda: str(len(events))),
        ("Are the beeps slow or fast", lambda: "slow" if "-" in words else "fast"),
        ("Are the tones rising or falling", lambda: _contour(events)),
        ("Which knock is louder", lambda: _louder(events)),
        ("Which sound came first", lambda: events[0]),
        ("Are the sounds the same", lambda: ("no", "yes")[len(set(events)) == 1] if len(events) > 1 else None),
        ("Is the digit even or odd", lambda: ("even", "odd")[numbers[0] % 2] if len(numbers) == 1 else None),
        ("Which digit is larger", lambda: str(max(numbers)) if len(numbers) == 2 else None),
        ("Which number from 0 to 18 is the sum", lambda: str(sum(numbers)) if len(numbers) == 2 else None),
    ):
        if question.startswith(pattern):
            return answer()
    return None


def _contour(events: Sequence[str]) -> str | None:
    ranks = [_REGISTERS.index(word) for word in events if word in _REGISTERS]
    if len(ranks) < 2 or ranks[0] == ranks[-1]:
        return None
    return "rising" if ranks[-1] > ranks[0] else "falling"


def _louder(events: Sequence[str]) -> str | None:
    pair = tuple(events)
    return {("loud", "soft"): "first", ("soft", "loud"): "second"}.get(pair)


def _answer_follows(hearing: Hearing) -> bool:
    expected = follows(hearing.noun, hearing.question, hearing.said)
    return expected is not None and same_answer(hearing.answer, expected)


_TECHNIQUES: Mapping[str, tuple[str, Callable[[Hearing], bool]]] = {
    "beep": ("Long pauses are marked where they are.", lambda h: _pauses(h.said) == _pauses(h.heard)),
    "tone": ("The registers of the first and the last tone are right.", lambda h: _ends(h.said) == _ends(h.heard)),
    "knock": ("The loudest knock is named as such, in its place.", lambda h: _first_loud(h.said) == _first_loud(h.heard)),
    "digit": ("There are as many digits as were spoken.", lambda h: len(h.events_said) == len(h.events_heard)),
    "sound": ("The timbre of the first sound is right.", lambda h: h.events_said[:1] == h.events_heard[:1]),
}


def _pauses(words: Sequence[str]) -> list[int]:
    """After how many beeps each long pause comes."""
    return [sum(word != "-" for word in words[:i]) for i, word in enumerate(words) if word == "-"]


def _ends(words: Sequence[str]) -> tuple[str, str] | None:
    return (words[0], words[-1]) if words else None


def _first_loud(words: Sequence[str]) -> int | None:
    return words.index("loud") if "loud" in words else None


def _technique(hearing: Hearing) -> bool:
    return bool(hearing.said) and _TECHNIQUES[hearing.noun][1](hearing)


STATIC_RULES: tuple[Rule, ...] = (
    Rule(title="all that is heard", category=CATEGORIES[0], importance=0.3, holds=lambda h: h.said == h.heard,
         text="Everything that the clip holds is written down as it sounds, in order."),
    Rule(title="answer follows", category=CATEGORIES[1], importance=0.3, holds=_answer_follows,
         text="The answer is the one that follows from what is written down."),
    Rule(title="known words", category=CATEGORIES[2], importance=0.15,
         holds=lambda h: bool(h.said) and set(h.said) <= VOCABULARY[h.noun],
         text="The reasoning is a list of the words that stand for such sounds."),
    Rule(title="no more than needed", category=CATEGORIES[3], importance=0.1, holds=lambda h: 0 < len(h.said) <= len(h.heard),
         text="There are no more words than things to hear, and at least one."),
    Rule(title="technique", category=CATEGORIES[4], importance=0.15, holds=_technique, text=""),
)  # fmt: skip
"""S1 .. S5 of the built-in tasks; the text of the last one depends on what is heard."""

POOL: tuple[Rule, ...] = (
    Rule(title="right number", importance=0.2, holds=lambda h: len(h.events_said) == len(h.events_heard),
         text="There are as many events as in the clip."),
    Rule(title="first event right", importance=0.2, holds=lambda h: h.events_said[:1] == h.events_heard[:1],
         text="The first event is what the clip begins with."),
    Rule(title="last event right", importance=0.2, holds=lambda h: h.events_said[-1:] == h.events_heard[-1:],
         text="The last event is what the clip ends with."),
    Rule(title="half in place", importance=0.1,
         holds=lambda h: 2 * sum(a == b for a, b in zip(h.said, h.heard)) >= len(h.heard),
         text="At least half of what is written down is right and in its place."),
    Rule(title="invents events", polarity="negative", importance=0.2,
         holds=lambda h: len(h.events_said) > len(h.events_heard), text="There are events that the clip does not hold."),
    Rule(title="misses events", polarity="negative", importance=0.2,
         holds=lambda h: len(h.events_said) < len(h.events_heard), text="Events of the clip are missing."),
    Rule(title="says nothing", polarity="negative", importance=0.3, holds=lambda h: not h.said,
         text="Nothing is written down."),
)  # fmt: skip
"""Criteria that the judge may add, those that separate a group's rollouts."""

_RULES = {rule.title: rule for rule in (*STATIC_RULES, *POOL)}


def tone_rubrics(task: ChatTask) -> Sequence[Criterion] | None:
    """The static criteria of a built-in task, S1 .. S5; None for other tasks."""
    noun = noun_of(question_of(task))
    if noun is None or "heard" not in task.columns:
        return None
    return tuple(
        Criterion(
            id=f"S{position}", title=rule.title, text=rule.text or _TECHNIQUES[noun][0], category=rule.category,
            weight=rule.importance,
        )
        for position, rule in enumerate(STATIC_RULES, start=1)
    )  # fmt: skip


def noun_of(question: str) -> str | None:
    """Which of `VOCABULARY` a built-in question is about."""
    words = re.findall(r"[a-z]+", question.lower())
    found = [noun for noun in VOCABULARY if noun in words or f"{noun}s" in words]
    if not found and "from 0 to 18" in question:
        return "digit"
    return found[0] if found else None


def words_of(reasoning: str) -> tuple[str, ...]:
    """The words of a reasoning text, punctuation and case aside; ``-`` is a word."""
    return tuple(re.findall(r"[a-z0-9]+|-", reasoning.lower()))


def rule_of(entry: Mapping[str, str]) -> Rule:
    """The rule behind a criterion as a judge is shown it. Raises `JudgeError` where there is none."""
    try:
        return _RULES[entry["title"]]
    except KeyError:
        named = entry.get("title") or entry.get("text", "")
        raise JudgeError(f"the acoustic judge has no rule for {named!r:.80}", kind="permanent") from None


def separating(hearings: Sequence[Hearing], known: Sequence[Sequence[bool]], count: int) -> list[tuple[Rule, list[bool]]]:
    """The ``count`` rules of `POOL` on which attempts differ most, none of which says what is known (or its opposite)."""
    found: list[tuple[Rule, list[bool]]] = []
    candidates = [(rule, [rule.holds(hearing) for hearing in hearings]) for rule in POOL]
    candidates.sort(key=lambda entry: abs(2 * sum(entry[1]) - len(entry[1])))
    for rule, bits in candidates:
        said = [list(row) for row in known] + [row for _, row in found]
        repeats = bits in said or [not bit for bit in bits] in said
        if len(found) < count and any(bits) and not all(bits) and not repeats:
            found.append((rule, bits))
    return found
