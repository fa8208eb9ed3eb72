"""Judges of audio runs: which one a config asks for, and `AcousticJudge`, which measures the clip itself.

`AcousticJudge` knows the built-in questions only. It writes down what it hears (`audio.rubrics_ear`), never looks at how a clip
was made, and compares: with what a rollout wrote down, and with the answer that follows from it (`audio.rubrics_rules`).
"""

from __future__ import annotations

import io
import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from audio.media import AudioClip
from audio.rubrics import Overthink, RubricTerm, think_text
from audio.rubrics_config import RubricsConfig
from audio.rubrics_data import read_static_rubrics
from audio.rubrics_ear import hear
from audio.rubrics_questions import EVOLVE, GRADE, WEIGH, question_of
from audio.rubrics_rules import Hearing, noun_of, rule_of, separating, tone_rubrics, words_of
from mmrl.adapter import RewardTerm
from mmrl.chat import ChatTask
from mmrl.config import RunConfig
from mmrl.errors import DataError
from mmrl.judge import Judge, JudgeClient, JudgeError, JudgeRequest, Reply, Retry
from mmrl.judge_cache import JudgeCache
from mmrl.judge_config import EndpointJudgeConfig, ModelJudgeConfig, RulesJudgeConfig
from mmrl.judge_endpoint import EndpointJudge
from mmrl.language import Frontend
from mmrl.rewards import accuracy
from mmrl.types import Media

Ear = Callable[[AudioClip, str], Sequence[str] | None]
"""From a clip and a noun of `VOCABULARY`, the words that a careful listener writes down; None where it cannot tell."""


JudgeSection = RulesJudgeConfig | ModelJudgeConfig | EndpointJudgeConfig


def rubric_terms(
    config: RunConfig,
    frontend: Frontend,
    *,
    judge: JudgeSection | None,
    rubrics: RubricsConfig,
    known: Mapping[str, RewardTerm],
    build_adapter: Callable[[RunConfig], Any],
) -> dict[str, RewardTerm]:
    """The reward terms ``rubrics``, ``overthink`` and ``evidence`` of a run, to join the ``known`` ones.

    Which answers are right is said by the run's own accuracy term. No judge is loaded unless the run weighs ``rubrics``;
    ``build_adapter`` makes the adapter of a judge that is a model.
    """
    tokenizer = frontend.processor.tokenizer
    correct = next((known[name] for name in config.rewards if name.startswith("accuracy") and name in known), accuracy)

    def count_tokens(text: str) -> int:
        return len(tokenizer(text, add_special_tokens=False)["input_ids"])

    def clips(task: ChatTask) -> list[Media]:
        try:
            return [item for item in frontend.media(task) if item.kind == "audio"]
        except DataError:  # the clip is gone: the method goes on without
            return []

    terms: dict[str, RewardTerm] = {
        "overthink": Overthink(limit=rubrics.overthink_tokens, count_tokens=count_tokens),
        "evidence": Evidence(ear=hear, correct=correct),
    }
    asked = judge if "rubrics" in config.rewards else None
    terms["rubrics"] = RubricTerm(
        client=build_client(asked, build_judge(asked, config, build_adapter)) if asked is not None else None,
        static=read_static_rubrics(rubrics.file) if rubrics.file is not None else tone_rubrics,
        media=clips,
        correct=correct,
        group_size=config.sampling.group_size,
        config=rubrics,
    )
    return terms


def build_client(section: JudgeSection, judge: Judge) -> JudgeClient:
    """A client of ``judge`` within the bounds of its config section."""
    cache = JudgeCache(section.cache_dir) if section.cache_dir is not None else None
    return JudgeClient(judge=judge, cache=cache, retry=Retry(attempts=section.attempts), workers=section.workers)


def build_judge(section: JudgeSection, config: RunConfig, build_adapter: Callable[[RunConfig], Any]) -> Judge:
    """The judge that a config section describes. Raises what loading a model raises."""
    if isinstance(section, RulesJudgeConfig):
        return AcousticJudge(ear=hear)
    if isinstance(section, EndpointJudgeConfig):
        return EndpointJudge(**section.model_dump(exclude={"name", "workers", "attempts", "cache_dir"}))
    from mmrl.judge_model import ModelJudge, default_device

    policy = type(config.policy)(path=section.path, revision=section.revision, dtype=section.dtype)
    limits = {"max_new_tokens": section.max_new_tokens, "max_prompt_tokens": section.max_prompt_tokens}
    rollout = config.rollout.model_copy(update=limits)
    adapter = build_adapter(config.model_copy(update={"policy": policy, "rollout": rollout, "judge": None}))
    return ModelJudge(adapter=adapter, policy=adapter.build_policy().to(default_device()))


@dataclass(kw_only=True)
class AcousticJudge:
    """Implements `mmrl.judge.Judge` by measurement."""

    ear: Ear
    identity: str = "acoustic rules 1"

    def answer(self, request: JudgeRequest) -> Reply:
        payload = request.payload
        if request.purpose == WEIGH:
            return _reply({"weights": {entry["id"]: rule_of(entry).importance for entry in payload["criteria"]}})
        noun, heard = self._hear(request)
        if request.purpose == GRADE:
            hearing = _hearing(payload, noun, heard, payload["attempt"])
            return _reply({"judgments": {entry["id"]: _yes(rule_of(entry).holds(hearing)) for entry in payload["criteria"]}})
        if request.purpose != EVOLVE:
            raise JudgeError(f"the acoustic judge does not answer {request.purpose!r}", kind="permanent")
        hearings = [_hearing(payload, noun, heard, attempt) for attempt in payload["attempts"]]
        judgments = {entry["id"]: [rule_of(entry).holds(h) for h in hearings] for entry in payload["criteria"]}
        new = separating(hearings, list(judgments.values()), payload["max_new"])
        judgments |= {f"N{position}": bits for position, (_, bits) in enumerate(new, start=1)}
        return _reply(
            {
                "new_rubrics": [{"title": r.title, "description": r.text, "polarity": r.polarity} for r, _ in new],
                "judgments": {name: list(map(_yes, bits)) for name, bits in judgments.items()},
            }
        )

    def _hear(self, request: JudgeRequest) -> tuple[str, tuple[str, ...]]:
        noun = noun_of(request.payload["question"])
        clips = [item for item in request.media if item.kind == "audio"]
        if noun is None or not clips:
            what = "no clip" if noun else "a question that is not built in"
            raise JudgeError(f"the acoustic judge got {what}: {request.payload['question']!r:.80}", kind="permanent")
        heard = self.ear(read_wav(clips[0].data), noun)
        if heard is None:
            raise JudgeError(f"the acoustic judge cannot tell what the {noun}s are", kind="permanent")
        return noun, tuple(heard)


@dataclass(frozen=True, kw_only=True)
class Evidence:
    """The reward term ``evidence``: of a right answer, whether what was written down is what the clip holds.

    None for wrong answers, so that its mean is a share of the right ones. Recorded with weight 0, it shows lucky guesses.
    """

    ear: Ear
    correct: Callable[[ChatTask, Any], Any]

    def __call__(self, task: ChatTask, completion: Any) -> bool | None:
        noun, clip = noun_of(question_of(task)), _clip_of(task)
        if noun is None or clip is None or self.correct(task, completion) != 1:
            return None
        heard = self.ear(clip, noun)
        return None if heard is None else words_of(think_text(completion.text)) == tuple(heard)


def read_wav(data: bytes) -> AudioClip:
    """A mono clip from a WAV file's bytes."""
    import soundfile

    samples, rate = soundfile.read(io.BytesIO(data), dtype="float32", always_2d=True)
    return AudioClip(samples.mean(axis=1), int(rate))


def _clip_of(task: ChatTask) -> AudioClip | None:
    parts = [part for message in task.messages for part in message["content"] if part["type"] == "audio"]
    return parts[0]["audio"] if len(parts) == 1 and isinstance(parts[0]["audio"], AudioClip) else None


def _hearing(payload: Mapping[str, Any], noun: str, heard: tuple[str, ...], attempt: Mapping[str, str]) -> Hearing:
    chosen = re.fullmatch(r"WRONG \(chose (.*)\)", attempt["result"], flags=re.DOTALL)
    answer = payload["right_answer"] if attempt["result"] == "CORRECT" else chosen[1] if chosen else ""
    return Hearing(noun=noun, question=payload["question"], heard=heard, said=words_of(attempt["reasoning"]), answer=answer)


def _reply(answer: Mapping[str, Any]) -> Reply:
    return Reply(text=json.dumps(answer))


def _yes(holds: bool) -> str:
    return "Yes" if holds else "No"
