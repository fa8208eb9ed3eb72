"""R1-Reward (arXiv 2505.02835): a judge of pairs that reasons before it decides, rewarded for the verdict.

A completion is ``<think>the comparison</think><answer>1 or 2</answer>``, and its reward

    R = result * (1 + 0.5 * consistency) + 0.5 * format

``result`` is 1 when the first answer names the better response. ``consistency`` is 1 when the reasoning's conclusion agrees
with the answer. It multiplies the result, so a wrong verdict earns nothing by being coherent: added up, it would earn 1.0.

Of the public code's mistakes none is kept: what cannot be read is not right, and a judge that fails earns nothing.
"""

from __future__ import annotations

import json
import re
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from mmrl.adapter import RewardTerm
from mmrl.chat import ChatTask, Completion, first_block
from mmrl.judge import JudgeClient, JudgeError, JudgeRequest, Reply
from mmrl.rewards import Judged, judged_term

CONSISTENCY_COEF = 0.5
FORMAT_COEF = 0.5
NUM_LINES = 3
"""Lines of reasoning in front of the answer that a judge of consistency sees."""
CONSISTENCY = "consistency"
"""Purpose of the requests."""
INSTRUCTIONS = (
    "You check a referee who compared two responses. You get the end of the referee's reasoning and the verdict after it. "
    "Say whether the conclusion of the reasoning is that verdict. Reasoning without a clear conclusion does not agree with any "
    'verdict. Do not judge the responses yourself. Answer with a JSON object: {"consistent": 1} if they agree, '
    '{"consistent": 0} if not.'
)

_TAGS = ("<think>", "</think>", "<answer>", "</answer>")
_NUMBERS = {"1": 1, "one": 1, "first": 1, "2": 2, "two": 2, "second": 2}
_BETTER = r"(?:better|best|preferred|preferable|superior|stronger|right|correct|the winner|more (?:accurate|helpful|correct))"
_ADVERBS = r"(?:\s+(?:the|a|much|clearly|slightly|overall|therefore|thus|also|indeed|still|far|somewhat))*"
_CONCLUSIONS = (
    re.compile(rf"\b(1|2|one|two)\s+is{_ADVERBS}\s+({_BETTER}|worse|weaker|inferior)\b"),
    re.compile(rf"\b(first|second)(?:\s+(?:response|answer|one))?\s+is{_ADVERBS}\s+({_BETTER}|worse|weaker|inferior)\b"),
    re.compile(r"\b(?:prefer|choose|pick)\s+(?:the\s+)?(?:response\s+|answer\s+)?(1|2|one|two|first|second)()\b"),
)


def first_answer(text: str) -> str | None:
    """What stands in the first ``<answer>..</answer>``, stripped; None without one."""
    found = first_block(text, "answer")
    return None if found is None else found.strip()


def verdict_of(text: str) -> int | None:
    """The response that the first answer names, 1 or 2; None if it names neither."""
    return {"1": 1, "2": 2}.get(first_answer(text) or "")


def r1_result(task: ChatTask, completion: Completion) -> float | None:
    """1.0 if the verdict is the preferred response; None for a task without an answer."""
    return float(first_answer(completion.text) == task.answer) if task.answer else None


def r1_format(task: ChatTask, completion: Completion) -> float:
    """1.0 if the completion is a think block and directly behind it an answer block, each tag once; else 0.0.

    A line end behind the answer is let pass, one between the blocks is not: demonstrations have to match exactly.
    """
    once = all(completion.text.count(tag) == 1 for tag in _TAGS)
    return float(once and re.fullmatch(r"<think>.*</think><answer>.*</answer>\n?", completion.text, re.DOTALL) is not None)


def total_reward(*, result: float, consistency: float, format: float) -> float:
    """``result * (1 + 0.5 consistency) + 0.5 format``."""
    return result * (1 + CONSISTENCY_COEF * consistency) + FORMAT_COEF * format


def end_of_reasoning(text: str) -> str:
    """The last three lines with text in front of ``<answer>``, without tags."""
    before = text.partition("<answer>")[0].replace("<think>", "").replace("</think>", "")
    return "\n".join([line.strip() for line in before.splitlines() if line.strip()][-NUM_LINES:])


def conclusion_of(text: str) -> int | None:
    """The response that ``text`` calls better, 1 or 2; None if it names none or both. Negated sentences do not count."""
    named = set()
    for pattern in _CONCLUSIONS:
        for number, verdict in pattern.findall(text.casefold()):
            better = _NUMBERS[number]
            named.add(3 - better if verdict in ("worse", "weaker", "inferior") else better)
    return named.pop() if len(named) == 1 else None


@dataclass(frozen=True, kw_only=True)
class ConclusionJudge:
    """Implements `mmrl.judge.Judge` for consistency by a rule on words."""

    identity: str = "conclusion rules 1"

    def answer(self, request: JudgeRequest) -> Reply:
        if request.purpose != CONSISTENCY:
            raise JudgeError(f"the rule judges consistency, not {request.purpose!r}", kind="permanent")
        conclusion = conclusion_of(request.payload["end_of_reasoning"])
        agrees = conclusion is not None and conclusion == conclusion_of(request.payload["verdict"])
        return Reply(text=json.dumps({"consistent": int(agrees)}))


@judged_term
@dataclass(kw_only=True)
class R1Reward:
    """The reward term ``r1_reward``: implements `mmrl.rewards.JudgedTerm`.

    The judge is asked about right verdicts only, since nothing else depends on its answer.
    """

    client: JudgeClient
    disagreement: float = 0.0
    """Consistency of a verdict that the reasoning contradicts: 0, or -1."""
    timeout_s: float = 60.0
    clock: Callable[[], float] = time.monotonic
    _lock: threading.Lock = field(default_factory=threading.Lock, repr=False)
    _counts: Counter[str] = field(default_factory=Counter, repr=False)

    @property
    def concurrent_groups(self) -> int:
        return self.client.workers

    def begin_step(self, train_step: int) -> None:
        """Nothing depends on the step."""

    def __call__(self, task: ChatTask, completions: Sequence[Completion]) -> Judged:
        """Rewards ``[G]`` of a group, and their parts. None for a task without an answer."""
        if not task.answer:
            return Judged(values=[None] * len(completions), record={})
        deadline = self.clock() + self.timeout_s
        parts = [self._parts(task, completion, deadline) for completion in completions]
        values = [total_reward(result=p["result"], consistency=p["consistency"], format=p["format"]) for p in parts]
        return Judged(values=values, record={"r1_reward": parts})

    def totals(self) -> Mapping[str, tuple[float, float]]:
        """Shares among rollouts (``result``, ``format``) and among right verdicts, and the judge's counters."""
        with self._lock:
            counts, self._counts = self._counts, Counter()
        totals = {f"judge/{name}": (float(value), 1.0) for name, value in self.client.drain().items()}
        totals |= {f"r1_reward/{name}": (float(counts[name]), float(counts["rollouts"])) for name in ("result", "format")}
        asked = ("consistent", "inconsistent", "judge_failed")
        return totals | {f"r1_reward/{name}": (float(counts[name]), float(counts["result"])) for name in asked}

    def _parts(self, task: ChatTask, completion: Completion, deadline: float) -> dict[str, Any]:
        result, form = r1_result(task, completion) or 0.0, r1_format(task, completion)
        status = self._consistency(completion, deadline) if result else "not_asked"
        with self._lock:
            self._counts.update({"rollouts": 1, "result": int(result), "format": int(form), status: 1})
        consistency = {"consistent": 1.0, "inconsistent": self.disagreement}.get(status, 0.0)
        return {"result": result, "consistency": consistency, "format": form, "judge": status}

    def _consistency(self, completion: Completion, deadline: float) -> str:
        request = JudgeRequest(
            purpose=CONSISTENCY,
            instructions=INSTRUCTIONS,
            payload={
                "end_of_reasoning": end_of_reasoning(completion.text),
                "verdict": f"response {verdict_of(completion.text)} is better",
            },
            timeout_s=self.timeout_s,
        )
        try:
            return "consistent" if self.client.ask(request, read_consistency, deadline=deadline) else "inconsistent"
        except JudgeError:
            return "judge_failed"


def read_consistency(answer: Mapping[str, Any]) -> bool:
    """The judge's 1 or 0; ValueError for anything else."""
    value = answer.get("consistent")
    if value not in (0, 1, "0", "1"):
        raise ValueError(f"'consistent' is {value!r:.40}; expected 1 or 0")
    return int(value) == 1


R1_TERMS: Mapping[str, RewardTerm] = {"r1_result": r1_result, "r1_format": r1_format}
"""Parts of the reward that need no judge."""
