"""Rule-based rewards of published audio recipes, by name, so that their results can be compared like with like.

`mmrl.rewards.accuracy` and ``format`` are stricter and are what our own runs use. The terms here follow the papers, hazards
included: ``accuracy_contains`` rewards a completion that lists every option, and ``format_answer`` takes two answers for one.
White space around a completion is ignored; special tokens are not part of `Completion.text`. Weights live in the config:

========================  ====================================================================================
R1-AQA [2503.11197]       accuracy_text 1, format_answer 1 (its variant with thinking: format_think 1)
Ke-Omni-R                 accuracy_text 2, format_think 1
Omni-R1 [2505.09439]      accuracy_contains 1
AudioRubrics [2608.02831] accuracy_letter 0.9, format_loose 0.1, and see `audio.rubrics`
NeMo-RL                   accuracy_alnum 0.8, format_graded 0.2
Step-Audio-R1             accuracy_text 0.8, think_present 0.2 [2511.15848]
CESAR [2510.20867]        accuracy_text 5, format_think 1, cesar_consistency 1, overthink 1, and keywords, whose
                          lists are the paper's: pass your own with ``{function: package.module:function}``
========================  ====================================================================================
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping

from mmrl.adapter import RewardTerm
from mmrl.chat import ChatTask, Completion, first_block, plain_text

_STOP_WORDS = frozenset({
    "a", "an", "and", "are", "as", "at", "be", "by", "can", "do", "does", "for", "from", "has", "have", "he", "her", "his",
    "how", "i", "in", "is", "it", "its", "of", "on", "or", "she", "so", "that", "the", "their", "then", "there", "these",
    "they", "this", "to", "was", "we", "were", "what", "when", "which", "who", "why", "will", "with", "you",
})  # fmt: skip


def first_answer(text: str) -> str | None:
    """What stands in the first ``<answer>...</answer>``, stripped; None without a closed pair of tags."""
    found = first_block(text, "answer")
    return None if found is None else found.strip()


def answer_span(text: str) -> str | None:
    """What stands between the first ``<answer>`` and the last ``</answer>`` (NeMo-RL); None without them."""
    _, opened, rest = text.partition("<answer>")
    inside, closed, _ = rest.rpartition("</answer>")
    return inside.strip() if opened and closed else None


def thinking(text: str) -> str | None:
    """What stands in the first ``<think>...</think>``, stripped; None without a closed pair of tags."""
    found = first_block(text, "think")
    return None if found is None else found.strip()


def accuracy_text(task: ChatTask, completion: Completion) -> float | None:
    """1.0 if the first answer, or a completion without tags as a whole, is the task's answer letter for letter (R1-AQA).

    R1-AQA first asks a symbolic mathematics verifier, which option texts do not need and which is left out.
    """
    if not task.answer:
        return None
    given = first_answer(completion.text)
    return float((completion.text.strip() if given is None else given) == task.answer.strip())


def accuracy_letter(task: ChatTask, completion: Completion) -> float | None:
    """1.0 if the first answer is the task's letter: ``B``, ``b``, ``(B)`` or ``B.`` (AudioRubrics); 0.0 without tags."""
    if not task.answer:
        return None
    found = re.fullmatch(r"\(?([A-Za-z])\)?\.?", first_answer(completion.text) or "")
    return float(found is not None and found[1].upper() == task.answer.strip().upper())


def accuracy_contains(task: ChatTask, completion: Completion) -> float | None:
    """1.0 if the completion contains the task's answer anywhere, whatever the case (Omni-R1)."""
    return float(task.answer.strip().casefold() in completion.text.casefold()) if task.answer else None


def accuracy_alnum(task: ChatTask, completion: Completion) -> float | None:
    """1.0 if the answer equals the task's in letters and digits alone, whatever the case (NeMo-RL); 0.0 without tags."""
    if not task.answer:
        return None
    given = answer_span(completion.text)
    return float(given is not None and _alphanumeric(given) == _alphanumeric(task.answer))


def format_answer(task: ChatTask, completion: Completion) -> float:
    """1.0 if the completion is ``<answer>...</answer>`` and nothing else (R1-AQA)."""
    return float(re.fullmatch(r"<answer>.*?</answer>", completion.text.strip(), re.DOTALL) is not None)


def format_think(task: ChatTask, completion: Completion) -> float:
    """1.0 if the completion is ``<think>...</think><answer>...</answer>`` and no more (R1-AQA with thinking, Ke-Omni-R)."""
    text = completion.text.strip()
    if not (text.startswith("<think>") and text.endswith("</answer>")):
        return 0.0
    return float(re.search(r"</think>\s*<answer>", text[len("<think>") : -len("</answer>")]) is not None)


def format_loose(task: ChatTask, completion: Completion) -> float:
    """1.0 if the completion holds a think block and ends with an answer block (AudioRubrics)."""
    before, closed, after = completion.text.strip().rpartition("</answer>")
    ends = bool(closed) and not after and "<answer>" in before
    return float(thinking(completion.text) is not None and ends)


def format_graded(task: ChatTask, completion: Completion) -> float:
    """0.25 for a pair of think tags and 0.75 for a pair of answer tags (NeMo-RL)."""
    return 0.25 * (thinking(completion.text) is not None) + 0.75 * (first_answer(completion.text) is not None)


def think_present(task: ChatTask, completion: Completion) -> float:
    """1.0 if the think block says anything (Step-Audio-R1): without it, answers alone drive the length to zero."""
    return float(bool(thinking(completion.text)))


def cesar_consistency(task: ChatTask, completion: Completion) -> float:
    """Shared concepts of thinking and answer, and of thinking and question: a number from 0 to 2 (CESAR).

    Each is ``|shared| / max(|concepts|)``; a concept is a word that is no stop word.
    """
    think, answer = thinking(completion.text) or "", first_answer(completion.text) or ""
    return concept_similarity(think, answer) + concept_similarity(think, plain_text(task))


def concept_similarity(left: str, right: str) -> float:
    """Shared words over the larger number of different words, stop words left out; 0.0 if either has none."""
    sets = [set(re.findall(r"\w+", text.casefold())) - _STOP_WORDS for text in (left, right)]
    return len(sets[0] & sets[1]) / max(map(len, sets)) if all(sets) else 0.0


def cesar_total(*, accuracy: float, format: float, consistency: float, keywords: float, think_tokens: int) -> float:
    """CESAR's reward: 5 accuracy + format + consistency + keywords + (1 - tokens / 256)."""
    return 5.0 * accuracy + format + consistency + keywords + 1.0 - think_tokens / 256


def audio_thinker_accuracy(*, correct: bool, thinks: bool, thinking_share: float, progress: float) -> float:
    """Audio-Thinker's adaptive accuracy R_a [2508.08039].

    ``thinking_share`` is the share of the batch's rollouts that think, ``progress`` is train steps done over all (0 to 1).
    """
    left = 1.0 - progress
    if thinks:
        gain = math.exp(-thinking_share * left)
        return gain if correct else gain - 1.0
    gain = math.exp(-(1.0 - thinking_share) * left)
    return 2.0 * gain if correct else -gain - 2.0 * (1.0 - gain)


def audio_thinker_total(*, accuracy: float, consistent: float, format: float, quality: float) -> float:
    """Audio-Thinker's reward: R_a (1 + R_c / 2) + R_f / 2 + R_t. A consistent wrong answer is punished harder."""
    return accuracy * (1.0 + 0.5 * consistent) + 0.5 * format + quality


for _term in (accuracy_text, accuracy_letter, accuracy_contains, accuracy_alnum):
    _term.reads_answer = True  # rows without an answer are found by the data check

AUDIO_TERMS: Mapping[str, RewardTerm] = {
    "accuracy_text": accuracy_text,
    "accuracy_letter": accuracy_letter,
    "accuracy_contains": accuracy_contains,
    "accuracy_alnum": accuracy_alnum,
    "format_answer": format_answer,
    "format_think": format_think,
    "format_loose": format_loose,
    "format_graded": format_graded,
    "think_present": think_present,
    "cesar_consistency": cesar_consistency,
}
"""Terms that audio runs offer beside `mmrl.rewards.TEXT_TERMS` and those of `audio.rubrics`."""


def _alphanumeric(text: str) -> str:
    return re.sub(r"[\W_]", "", text).casefold()
