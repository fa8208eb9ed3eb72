"""The reward term ``pairwise``: a judge of pairs, such as one that R1-Reward trained, rewards the rollouts of another run.

Each rollout of a group is compared with some of the others, each time in both orders. Its reward is the share of comparisons
that it wins, from 0 to 1; a comparison whose two orders contradict each other is half a win for both. So is one in which the
judge fails or says neither 1 nor 2, which is counted.
"""

from __future__ import annotations

import json
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from mmrl.chat import ChatTask, Completion, plain_text
from mmrl.judge import JudgeClient, JudgeError, JudgeRequest, Reply
from mmrl.judge_model import ModelJudge
from mmrl.rewards import Judged, judged_term
from mmrl.types import Media
from vision.preferences import judging_messages
from vision.preferences_config import JudgingPrompt
from vision.r1_reward import first_answer, verdict_of

COMPARE = "compare"
"""Purpose of the requests."""
INSTRUCTIONS = (
    "You are a neutral referee. Two responses to one question about what is shown are given; neither their order nor their "
    'length counts, and there is no draw. Answer with a JSON object: {"better": 1} if the first response is better, '
    '{"better": 2} if the second is.'
)


@dataclass(kw_only=True)
class PairJudge(ModelJudge):
    """Implements `mmrl.judge.Judge` by a model that was trained on `vision.preferences`, asked as it was in training."""

    prompt: JudgingPrompt = "full"

    @property
    def identity(self) -> str:
        return f"pair {self.prompt} {super().identity}"

    def conversation(self, request: JudgeRequest) -> ChatTask:
        media = [{"type": item.kind, item.kind: item.data} for item in request.media]
        question = [*media, {"type": "text", "text": request.payload["question"]}]
        shown = (request.payload["response_1"], request.payload["response_2"])
        return ChatTask(id=f"judge/{request.purpose}", messages=judging_messages(question, *shown, self.prompt))

    def answer(self, request: JudgeRequest) -> Reply:
        reply = super().answer(request)
        verdict = verdict_of(reply.text)
        if verdict is None:
            raise JudgeError(f"{self.adapter.policy_dir}: no verdict in {reply.text!r:.80}", kind="malformed")
        return replace(reply, text=json.dumps({"better": verdict}))


@judged_term
@dataclass(kw_only=True)
class Pairwise:
    """Implements `mmrl.rewards.JudgedTerm`."""

    client: JudgeClient
    media: Callable[[ChatTask], Sequence[Media]]
    """What the judge sees."""
    opponents: int = 2
    timeout_s: float = 120.0
    clock: Callable[[], float] = time.monotonic
    _lock: threading.Lock = field(default_factory=threading.Lock, repr=False)
    _counts: Counter[str] = field(default_factory=Counter, repr=False)

    @property
    def concurrent_groups(self) -> int:
        return self.client.workers

    def begin_step(self, train_step: int) -> None:
        """Nothing depends on the step."""

    def __call__(self, task: ChatTask, completions: Sequence[Completion]) -> Judged:
        """Shares of comparisons won ``[G]``; None in a group of one, which has nobody to be compared with."""
        if len(completions) < 2:
            return Judged(values=[None] * len(completions), record={})
        deadline, media = self.clock() + self.timeout_s, tuple(self.media(task))
        shown = [shown_response(completion) for completion in completions]
        points, games = [0.0] * len(shown), [0] * len(shown)
        record = []
        for left, right in pairings(len(shown), self.opponents):
            won = self._compare(question_text(task), shown[left], shown[right], media, deadline)
            for row, share in ((left, won), (right, 1 - won)):
                points[row] += share
                games[row] += 1
            record.append([left, right, won])
        values = [point / count for point, count in zip(points, games)]
        return Judged(values=values, record={"pairwise": record})

    def totals(self) -> Mapping[str, tuple[float, float]]:
        """Shares among comparisons, and the judge's counters."""
        with self._lock:
            counts, self._counts = self._counts, Counter()
        totals = {f"judge/{name}": (float(value), 1.0) for name, value in self.client.drain().items()}
        names = ("equal", "decided", "contradictory", "judge_failed")
        return totals | {f"pairwise/{name}": (float(counts[name]), float(counts["comparisons"])) for name in names}

    def _compare(self, question: str, left: str, right: str, media: tuple[Media, ...], deadline: float) -> float:
        """1 if ``left`` wins in both orders, 0 if it loses in both, else 0.5."""
        if left == right:
            share, status = 0.5, "equal"
        else:
            verdicts = [self._ask(question, left, right, media, deadline), self._ask(question, right, left, media, deadline)]
            if None in verdicts:
                share, status = 0.5, "judge_failed"
            else:
                share = ((verdicts[0] == 1) + (verdicts[1] == 2)) / 2
                status = "contradictory" if share == 0.5 else "decided"
        with self._lock:
            self._counts.update({"comparisons": 1, status: 1})
        return share

    def _ask(self, question: str, first: str, second: str, media: tuple[Media, ...], deadline: float) -> int | None:
        request = JudgeRequest(
            purpose=COMPARE,
            instructions=INSTRUCTIONS,
            payload={"question": question, "response_1": first, "response_2": second},
            media=media,
            timeout_s=self.timeout_s,
        )
        try:
            return self.client.ask(request, read_better, deadline=deadline)
        except JudgeError:
            return None


def pairings(count: int, opponents: int) -> list[tuple[int, int]]:
    """Who meets whom among ``count`` rollouts: neighbours on a ring first, no two twice.

    Every rollout meets ``opponents`` others, or as many as there are; where that does not come out even, a few meet one fewer
    (but at least one other) or one more.
    """
    found: dict[frozenset[int], tuple[int, int]] = {}
    met = [0] * count
    for step in range(1, count):
        for left in range(count):
            right = (left + step) % count
            least, most = sorted((met[left], met[right]))
            if frozenset((left, right)) not in found and (most < opponents or least == 0):
                found[frozenset((left, right))] = (left, right)
                met[left] += 1
                met[right] += 1
    return list(found.values())


def shown_response(completion: Completion) -> str:
    """What the judge reads of a rollout: its answer; all of it where it has no answer tags."""
    answer = first_answer(completion.text)
    return completion.text.strip() if answer is None else answer


def question_text(task: ChatTask) -> str:
    """The text of the last user turn."""
    asked = [message for message in task.messages if message["role"] == "user"]
    if not asked:
        return plain_text(task)
    return "".join(part["text"] for part in asked[-1]["content"] if part["type"] == "text")


def read_better(answer: Mapping[str, object]) -> int:
    """The judge's 1 or 2; ValueError for anything else."""
    value = answer.get("better")
    if value not in (1, 2, "1", "2"):
        raise ValueError(f"'better' is {value!r:.40}; expected 1 or 2")
    return int(str(value))
