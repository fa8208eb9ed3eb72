"""Pairwise judging as a task: a question about media, two responses, and which of them is better (R1-Reward, 2505.02835).

A `Pair` knows the better response, `PairTasks` decides which of the two is shown first and asks. Training shows each pair in
one order; of every two neighbours one has the better response first, so the labels 1 and 2 are balanced whatever pairs are kept
by difficulty. Evaluation shows each pair in both orders, as a judge that favours the first response would look good in one.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from mmrl.chat import ChatTask
from mmrl.data_files import RowError
from mmrl.data_rows import ABSENT, lookup
from mmrl.errors import DataError
from vision.preferences_config import JudgingPrompt, PreferenceDatasetConfig

if TYPE_CHECKING:
    from mmrl.data import DatasetTasks
    from vision.r1_reward_attempts import Attempt

PROMPTS: Mapping[JudgingPrompt, str] = {
    "full": (
        "Two multimodal models answered the question below about what is shown. Judge their responses as a neutral referee: "
        "neither their order nor their length counts.\n"
        "1. Between <think> and </think>, compare the two responses with each other and with what is shown, point by point. "
        "End with one sentence that says which response is better. There is no draw.\n"
        "2. Between <answer> and </answer>, give the number of the better response only: 1 or 2.\n\n"
        "Question:\n{question}\n\nResponse 1:\n{first}\n\nResponse 2:\n{second}\n\n"
        "Write nothing but: <think>the comparison</think><answer>1 or 2</answer>"
    ),
    "short": "{question}\n{first} first\n{second} second",
}
"""How a judge is asked; ``short`` is for models that were trained to judge and nothing else."""

_PLACES = re.compile(r"(\{question\}|\{first\}|\{second\})")


@dataclass(frozen=True, kw_only=True)
class Pair:
    """Two responses to a question."""

    id: str
    question: tuple[Mapping[str, Any], ...]
    """Media and text parts in the order in which they were asked."""
    chosen: str
    """The better response."""
    rejected: str
    domain: str = "default"
    system: tuple[Mapping[str, Any], ...] = ()
    """System turns in front of the question."""
    demonstrate: Callable[[int], str] = lambda label: ""
    """From the place of the better response, 1 or 2, a completion to imitate."""
    columns: Mapping[str, Any] = field(default_factory=dict)
    source: str = ""


@dataclass(frozen=True, kw_only=True)
class Prepared:
    """A row that holds the finished judging prompt."""

    id: str
    task: ChatTask
    """Its answer is the label."""


def judging_messages(
    question: Sequence[Mapping[str, Any]], first: str, second: str, prompt: JudgingPrompt
) -> tuple[Mapping[str, Any], ...]:
    """The user turn that asks which of two responses is better. Media in front of the question's text stay in front."""
    lead = next((index for index, part in enumerate(question) if part["type"] == "text"), len(question))
    content: list[Mapping[str, Any]] = list(question[:lead])
    for piece in _PLACES.split(PROMPTS[prompt]):
        if piece == "{question}":
            content += question[lead:]
        elif piece:
            content.append({"type": "text", "text": {"{first}": first, "{second}": second}.get(piece, piece)})
    return ({"role": "user", "content": _joined(content)},)


def judging_task(pair: Pair | Prepared, label: int, prompt: JudgingPrompt) -> ChatTask:
    """The conversation that asks for a verdict on ``pair`` with the better response at place ``label`` (1 or 2)."""
    if isinstance(pair, Prepared):
        return pair.task
    shown = (pair.chosen, pair.rejected) if label == 1 else (pair.rejected, pair.chosen)
    return ChatTask(
        id=f"{pair.id}/{label}",
        domain=pair.domain,
        messages=(*pair.system, *judging_messages(pair.question, *shown, prompt)),
        answer=str(label),
        demonstration=pair.demonstrate(label),
        columns={**pair.columns, "label": label},
        source=pair.source,
    )


def balanced_label(index: int, seed: int) -> int:
    """Where the better response of pair ``index`` is shown: 1 or 2, one of each among pairs ``2k`` and ``2k + 1``."""
    return 1 + int((np.random.default_rng((seed, index // 2)).integers(2) + index) % 2)


class PairTasks(Sequence[ChatTask]):
    """Pairs as judging tasks.

    ``order`` is ``"balanced"`` (one task per pair) or ``"both"`` (two). With ``attempts``, which belong to these pairs, only
    their pairs are used: with a demonstration in the order in which that was written, without one in a balanced order.
    """

    def __init__(
        self,
        pairs: Sequence[Pair | Prepared],
        *,
        prompt: JudgingPrompt,
        order: Literal["balanced", "both"],
        seed: int = 0,
        attempts: Sequence[Attempt] | None = None,
    ) -> None:
        self.pairs, self.prompt, self.order, self.seed, self.attempts = pairs, prompt, order, seed, attempts

    def __len__(self) -> int:
        if self.attempts is not None:
            return len(self.attempts)
        return len(self.pairs) * (2 if self.order == "both" else 1)

    def __getitem__(self, index: int) -> ChatTask:
        if not 0 <= index < len(self):
            raise IndexError(f"judging task {index}: there are {len(self)}.")
        if self.attempts is not None:
            return self._attempted(index)
        if self.order == "both":
            return judging_task(self.pairs[index // 2], 1 + index % 2, self.prompt)
        return judging_task(self.pairs[index], balanced_label(index, self.seed), self.prompt)

    def _attempted(self, index: int) -> ChatTask:
        attempt = self.attempts[index]
        if attempt.index >= len(self.pairs) or self.pairs[attempt.index].id != attempt.id:
            found = self.pairs[attempt.index].id if attempt.index < len(self.pairs) else f"only {len(self.pairs)} pairs"
            raise DataError(
                f"attempts: pair {attempt.index} is {attempt.id!r} in the file and {found!r} here; it was written for other "
                "data, another seed or other limits: run mmrl attempts again."
            )
        pair = self.pairs[attempt.index]
        if attempt.demonstration:
            return replace(judging_task(pair, attempt.label, self.prompt), demonstration=attempt.demonstration)
        return judging_task(pair, balanced_label(index, self.seed), self.prompt)


class RowPairs(Sequence[Pair | Prepared]):
    """The rows of a dataset as pairs, each read when it is asked for."""

    def __init__(self, tasks: DatasetTasks, config: PreferenceDatasetConfig) -> None:
        self.tasks, self.config = tasks, config

    def __len__(self) -> int:
        return len(self.tasks)

    def __getitem__(self, index: int) -> Pair | Prepared:
        task = self.tasks[index]
        try:
            return self._pair(task)
        except RowError as error:
            raise error.at(task.source) from error

    def _pair(self, task: ChatTask) -> Pair | Prepared:
        label = 1
        if self.config.preference is not None:
            label = read_preference(_column(task, self.config.preference), self.config.preference)
        if self.config.responses is None:
            return Prepared(id=task.id, task=replace(task, answer=str(label), demonstration=""))
        responses = []
        for name in self.config.responses:
            text = _column(task, name)
            if not isinstance(text, str) or not text.strip():
                raise RowError(name, "no response", f"found {text!r:.80}; expected the text of a response.")
            responses.append(text)
        *system, asked = task.messages
        if any(message["role"] != "system" for message in system):
            roles = [message["role"] for message in task.messages]
            raise RowError(
                "prompt", "several turns", f"found the roles {roles}; expected one question: write the turns into it."
            )
        return Pair(
            id=task.id,
            question=tuple(asked["content"]),
            chosen=responses[label - 1],
            rejected=responses[2 - label],
            domain=task.domain,
            system=tuple(system),
            columns=task.columns,
            source=task.source,
        )


def read_preference(value: Any, column: str) -> int:
    """1 or 2 from a number, ``"2"``, ``"<answer>2</answer>"``, or a list of one of these. Raises `RowError`."""
    if isinstance(value, Sequence | np.ndarray) and not isinstance(value, str) and len(value) == 1:
        value = value[0]
    text = str(value).strip()
    tagged = re.fullmatch(r"<answer>(.*?)</answer>", text, re.DOTALL)
    text = tagged[1].strip() if tagged else text
    if text not in ("1", "2", "1.0", "2.0"):
        raise RowError(column, "not a preference", f"found {value!r:.80}; expected 1 or 2, the number of the better response.")
    return int(text[0])


def read_pairs(config: PreferenceDatasetConfig, base_dir: Any) -> RowPairs:
    """The pairs of a dataset; relative paths start at ``base_dir``. Raises what `mmrl.data.read_tasks` raises."""
    from mmrl.data import read_tasks

    # Neither column means here what it means elsewhere; both stay among the row's columns.
    columns = {"answer": None, "demonstration": None, **config.columns}
    return RowPairs(read_tasks(config.model_copy(update={"columns": columns}), base_dir=base_dir), config)


def _column(task: ChatTask, name: str) -> Any:
    value = lookup(task.columns, name)
    if value is ABSENT:
        raise RowError(name, "missing column", f"found columns: {', '.join(task.columns) or 'none'}.")
    return value


def _joined(content: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Neighbouring texts as one part."""
    parts: list[Mapping[str, Any]] = []
    for part in content:
        if part["type"] == "text" and parts and parts[-1]["type"] == "text":
            parts[-1] = {"type": "text", "text": parts[-1]["text"] + part["text"]}
        else:
            parts.append(part)
    return parts
