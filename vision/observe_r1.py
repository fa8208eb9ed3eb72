"""Observe-R1 (arXiv 2505.12432): look, think, answer.

A completion is ``<observe>..</observe><think>..</think><answer>..</answer>``, and its reward

    r = accuracy + 0.5 format + 0.2 for the shortest correct completion of its group

The terms of one completion are here. The bonus is the shaping ``concise_correct``, the weight of a group by its success rate is
``algorithm.difficulty_weight: parabola``, the order of tasks is ``sampling.ladder``: none of these knows vision.

Of the public code's mistakes none is kept in the default terms: an answer that cannot be read never counts as right, and a
group without a correct completion has no bonus. `published_format` is the public pattern with what it lets through.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from mmrl.adapter import RewardTerm
from mmrl.chat import ChatTask, Completion, first_block
from vision.observe_r1_answers import same_value

BLOCKS = ("observe", "think", "answer")
_TAGS = tuple(f"<{slash}{name}>" for name in BLOCKS for slash in ("", "/"))
_OPTION = re.compile(r"[a-f]")
_IN_ORDER = re.compile(
    r"\s*<observe>(?P<observe>.*)</observe>\s*<think>(?P<think>.*)</think>\s*<answer>(?P<answer>.*)</answer>\s*", re.DOTALL
)
_NESTED = re.compile(
    r"\s*<think>(?P<before>.*)<observe>(?P<observe>.*)</observe>(?P<after>.*)</think>\s*<answer>(?P<answer>.*)</answer>\s*",
    re.DOTALL,
)
_PUBLISHED_IN_ORDER = re.compile(r"<observe>.+?</observe>\s*<think>.+?</think>\s*<answer>.+?</answer>", re.DOTALL)
_PUBLISHED_NESTED = tuple(
    re.compile(step, re.DOTALL) for step in ("<think>", "<observe>.", "</observe>", r"</think>\s*<answer>.", "</answer>")
)
"""Steps of ``<think>.*?<observe>.+?</observe>.*?</think>\\s*<answer>.+?</answer>``, which alone would try all combinations."""


def read_blocks(text: str, *, nested: bool = False) -> dict[str, str] | None:
    """Contents of the three blocks by name, or None if ``text`` breaks the contract.

    Each tag stands exactly once, the blocks in this order and none of them empty, with nothing but white space between and
    around them. With ``nested`` the observe block may also stand inside of the think block.
    """
    if any(text.count(tag) != 1 for tag in _TAGS):
        return None
    found = _IN_ORDER.fullmatch(text)
    if found is not None:
        blocks = found.groupdict()
    else:
        found = _NESTED.fullmatch(text) if nested else None
        if found is None:
            return None
        blocks = {"observe": found["observe"], "think": found["before"] + found["after"], "answer": found["answer"]}
    return blocks if all(blocks[name].strip() for name in BLOCKS) else None


def published_format(text: str) -> bool:
    """Whether the public code's pattern accepts ``text``.

    It searches, so text before and after does not matter, and it asks for single tags only where the blocks stand side by side:
    an observe block inside of the think block passes with any number of answers.
    """
    once = all(text.count(f"<{name}>") == 1 for name in BLOCKS)
    return bool(once and _PUBLISHED_IN_ORDER.search(text)) or _follow_each_other(text, _PUBLISHED_NESTED)


def answer_text(text: str) -> str:
    """The answer that is graded: the first ``<answer>`` span within one line, else what follows the last ``<answer>``.

    Without such a tag that is the whole completion.
    """
    within_lines = (first_block(line, "answer") for line in text.split("\n"))
    found = next((inside for inside in within_lines if inside is not None), None)
    return (text.rpartition("<answer>")[2].removesuffix("</answer>") if found is None else found).strip()


def option_matches(answer: str, gold: str) -> bool:
    """The fallback for multiple choice: ``gold`` is one letter a to f, and the only one of them that occurs in ``answer``.

    Any occurrence counts, also within a word: "The answer is A" holds an e and fails.
    """
    letter = gold.strip().lower()
    return _OPTION.fullmatch(letter) is not None and set(_OPTION.findall(answer.lower())) == {letter}


def observe_accuracy(task: ChatTask, completion: Completion) -> float | None:
    """1.0 if the answer has the value of the task's, or names its option, else 0.0; None for a task without an answer."""
    if not task.answer:
        return None
    answer = answer_text(completion.text)
    return float(same_value(answer, task.answer) or option_matches(answer, task.answer.strip("$() .")))


def completion_tokens(task: ChatTask, completion: Completion) -> int:
    """Tokens that were written, tags and end token included. Weigh it 0: it is recorded and evaluated, not rewarded."""
    return completion.num_tokens


def _follow_each_other(text: str, steps: Sequence[re.Pattern[str]]) -> bool:
    """Whether the steps are found one behind the other; the earliest place of each leaves the most to the next."""
    end = 0
    for step in steps:
        found = step.search(text, end)
        if found is None:
            return False
        end = found.end()
    return True


OBSERVE_TERMS: Mapping[str, RewardTerm] = {
    "observe_accuracy": observe_accuracy,
    "observe_format": lambda task, completion: float(read_blocks(completion.text) is not None),
    "observe_format_nested": lambda task, completion: float(read_blocks(completion.text, nested=True) is not None),
    "observe_format_published": lambda task, completion: float(published_format(completion.text)),
    "completion_tokens": completion_tokens,
}
"""Terms of the ``rewards`` section."""
