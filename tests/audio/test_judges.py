"""`audio.judges`: the ear hears what was drawn, and verdicts follow from the waveform, not from how a clip was made."""

import json
from dataclasses import replace

import numpy as np
import pytest

from audio.config import AudioRunConfig
from audio.judges import AcousticJudge, Evidence, build_client, build_judge, rubric_terms
from audio.media import AudioClip
from audio.rubrics import RubricTerm
from audio.rubrics_ear import hear
from audio.rubrics_rules import POOL, STATIC_RULES, VOCABULARY, follows, noun_of, tone_rubrics, words_of
from audio.sounds import RATE
from audio.tasks import KINDS, ToneTasks
from mmrl.chat import Completion, media_parts
from mmrl.config import validate
from mmrl.errors import DataError
from mmrl.judge import JudgeClient, JudgeError, JudgeRequest
from mmrl.judge_endpoint import EndpointJudge
from mmrl.rewards import accuracy
from mmrl.types import Media

MEASURED = ("count", "tempo", "contour", "louder", "order", "same", "hear_beeps", "hear_tones", "hear_knocks", "hear_sounds")


def task_of(kind, index=0, split="train"):
    return ToneTasks([kind], split=split, num_tasks=1000)[index]


def first_task(kind, holds):
    """The first task of a kind whose heard words fulfil a condition."""
    return next(task for task in (task_of(kind, index) for index in range(100)) if holds(task.columns["heard"]))


def question_of(task):
    return task.messages[0]["content"][-1]["text"]


def clip_of(task):
    ((_, clip),) = media_parts(task)
    return clip


def said(evidence, answer):
    return Completion(text=f"<think>{evidence}</think><answer>{answer}</answer>", token_ids=(1,), stop_reason="stop")


def wav(task):
    return (Media(kind="audio", data=clip_of(task).to_wav(), suffix=".wav"),)


def term(**more):
    client = JudgeClient(judge=AcousticJudge(ear=hear))
    fields = {"client": client, "static": tone_rubrics, "media": wav, "correct": accuracy, "group_size": 4}
    return RubricTerm(**(fields | more))


# The ear


@pytest.mark.parametrize("kind", MEASURED)
@pytest.mark.parametrize("split", ["train", "eval"])
def test_the_ear_writes_down_what_was_drawn(kind, split):
    source = ToneTasks([kind], split=split, num_tasks=1000)
    for index in range(12):
        task = source[index]
        assert " ".join(hear(clip_of(task), noun_of(question_of(task)))) == task.columns["heard"], task.id


@pytest.mark.parametrize("clip", [np.zeros(8000), np.zeros(10), np.zeros(0), np.full(8000, 0.3)])
@pytest.mark.parametrize("noun", VOCABULARY)
def test_the_ear_bears_silence_and_emptiness(clip, noun):
    assert hear(AudioClip(clip.astype(np.float32), RATE), noun) == (None if noun == "digit" else ())


def test_sixteen_bits_are_enough():
    task = task_of("order", 3)
    (item,) = wav(task)
    assert " ".join(hear(AudioClip(_decoded(item), RATE), "sound")) == task.columns["heard"]


def _decoded(item):
    from audio.judges import read_wav

    return read_wav(item.data).samples


# Rules


@pytest.mark.parametrize("kind", [name for name in KINDS if not name.startswith("choose")])
def test_the_answer_follows_from_what_is_heard(kind):
    for index in range(20):
        task = task_of(kind, index)
        question = question_of(task)
        assert follows(noun_of(question), question, words_of(task.columns["heard"])) == task.answer, task.id


@pytest.mark.parametrize("kind", ["choose_word", "choose_sound", "choose_number", "choose_digit"])
def test_no_answer_follows_where_none_is_right(kind):
    for index in range(20):
        question = question_of(task_of(kind, index))
        assert follows(noun_of(question), question, words_of("beep beep")) is None


@pytest.mark.parametrize("words", ["", "low", "low low", "banana", "- -", "7 8 9"])
def test_nothing_follows_from_too_little(words):
    for question in ("Are the tones rising or falling?", "Which knock is louder, first or second?"):
        assert follows("tone", question, words_of(words)) is None


def test_words_know_no_case_and_no_punctuation():
    assert words_of("Beep, beep - BEEP!") == ("beep", "beep", "-", "beep")


def test_titles_are_different_and_weights_sum_to_one():
    titles = [rule.title for rule in (*STATIC_RULES, *POOL)]
    assert len(set(titles)) == len(titles)
    for kind in MEASURED:
        criteria = tone_rubrics(task_of(kind))
        assert [criterion.id for criterion in criteria] == ["S1", "S2", "S3", "S4", "S5"]
        assert sum(criterion.weight for criterion in criteria) == pytest.approx(1.0)
        assert all(criterion.text for criterion in criteria)
    assert tone_rubrics(replace(task_of("count"), columns={})) is None


# The judge


def test_grounded_reasoning_outscores_a_lucky_guess_and_a_wrong_answer_may_outscore_both():
    task = first_task("count", lambda heard: heard.count("beep") == 3 and "-" in heard)
    heard = task.columns["heard"]
    texts = [
        (heard, 3),
        ("beep", 3),
        (heard, 4),
        ("", 4),
        ("beep beep beep", 3),
        ("beep " * 5, 5),
        ("low", 3),
        ("beep beep", 2),
    ]
    record = term(group_size=8)(task, [said(evidence, answer) for evidence, answer in texts]).record
    grounded, lucky, unlucky, silent, *_ = record["scores"]
    assert record["mode"] == "evolved"
    assert grounded == 1.0
    assert grounded > unlucky > lucky > silent


def test_verdicts_follow_the_waveform_and_not_the_record_of_the_clip():
    task = task_of("order")
    other = first_task("order", lambda heard: heard.split()[0] not in task.columns["heard"])
    group = [said(task.columns["heard"], "x"), said(other.columns["heard"], "x"), said("", "x"), said("noise", "x")]
    lying = replace(task, columns=other.columns)
    assert term()(task, group).values == term()(lying, group).values
    swapped = term(media=lambda given: wav(other))(task, group).record
    first = {row["title"]: row["bits"] for row in swapped["rubrics"]}["all that is heard"]
    assert first == [0, 1, 0, 0]


@pytest.mark.parametrize("kind", MEASURED[:6])
def test_a_group_of_every_measured_kind_is_judged(kind):
    task = task_of(kind, 2)
    judged = term()(task, [said(task.columns["heard"], task.answer), said("", ""), said("x y z", "?"), said("beep low", "1")])
    assert judged.record["mode"] == "evolved"
    assert judged.values[0] == pytest.approx(1.0)
    assert len(judged.record["rubrics"]) <= 5
    json.dumps(judged.record)


def test_alike_rollouts_are_scored_by_static_criteria():
    task = task_of("tempo", 1)
    judged = term()(task, [said(task.columns["heard"], task.answer)] * 4)
    assert (list(judged.values), judged.record["mode"], judged.record["reasons"]) == ([1.0] * 4, "static", ["constant"])
    judged = term()(task, [said("", "")] * 4)
    assert (max(judged.values), judged.record["mode"]) == (0.0, "static")


def test_digits_cannot_be_told_and_stay_neutral_without_harm_to_other_groups():
    rubrics = term()
    for _ in range(2):
        judged = rubrics(task_of("parity"), [said("3", "odd"), said("4", "even"), said("", ""), said("5", "odd")])
        assert list(judged.values) == [0.5] * 4
    task = task_of("count")
    assert rubrics(task, [said(task.columns["heard"], task.answer), *[said("", "")] * 3]).record["mode"] == "evolved"
    assert rubrics.totals()["judge/skipped"] == (0, 1)


def test_new_criteria_separate_and_repeat_nothing():
    task = first_task("count", lambda heard: heard == "beep - beep beep")
    texts = ["", "beep", "beep - beep", "beep beep beep", "low", "beep - beep beep", "beep beep - beep", "beep " * 5]
    criteria = [{"id": c.id, "title": c.title, "text": c.text} for c in tone_rubrics(task)]
    attempts = [{"result": "CORRECT", "reasoning": text} for text in texts]
    payload = {"question": question_of(task), "right_answer": task.answer, "criteria": criteria, "attempts": attempts}

    def ask(**changes):
        request = JudgeRequest(purpose="evolve", instructions="", payload=payload | changes, media=wav(task))
        return json.loads(AcousticJudge(ear=hear).answer(request).text)

    answer = ask(max_new=3)
    names = [f"N{i}" for i in range(1, len(answer["new_rubrics"]) + 1)]
    assert 1 <= len(names) <= 3
    assert list(answer["judgments"]) == ["S1", "S2", "S3", "S4", "S5", *names]
    rows = [tuple(row) for row in answer["judgments"].values()]
    for name in names:
        bits = answer["judgments"][name]
        opposite = tuple("No" if bit == "Yes" else "Yes" for bit in bits)
        assert len(set(bits)) == 2
        assert rows.count(tuple(bits)) == 1
        assert opposite not in rows
    assert ask(max_new=0)["new_rubrics"] == []


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"media": ()}, "got no clip"),
        ({"payload": {"question": "What is the weather?"}}, "a question that is not built in"),
        ({"purpose": "praise"}, "does not answer 'praise'"),
        ({"criteria": [{"id": "S1", "title": "", "text": "Is it polite?"}]}, "no rule for 'Is it polite"),
    ],
)
def test_what_the_acoustic_judge_does_not_know_is_a_failure(changes, message):
    task = task_of("count")
    payload = {"question": question_of(task), "right_answer": "1", "attempt": {"result": "CORRECT", "reasoning": "beep"},
               "criteria": changes.pop("criteria", [])}  # fmt: skip
    fields = {"purpose": "grade", "instructions": "", "payload": payload, "media": wav(task)}
    with pytest.raises(JudgeError, match=message):
        AcousticJudge(ear=hear).answer(JudgeRequest(**(fields | changes)))


def test_evidence_is_asked_of_right_answers_only():
    evidence = Evidence(ear=hear, correct=accuracy)
    task = task_of("count", 5)
    assert evidence(task, said(task.columns["heard"], task.answer)) is True
    assert evidence(task, said("beep -", task.answer)) is False
    assert evidence(task, said(task.columns["heard"], "nine")) is None
    assert evidence(task_of("parity"), said("3", task_of("parity").answer)) is None


# Configs


class Tokenizer:
    def __call__(self, text, *, add_special_tokens):
        assert not add_special_tokens
        return {"input_ids": list(text)}


class Frontend:
    """What `rubric_terms` uses of a frontend."""

    processor = type("Processor", (), {"tokenizer": Tokenizer()})

    def media(self, task):
        if not list(media_parts(task)):
            raise DataError("gone")
        return (*wav(task), Media(kind="image", data=b"", suffix=".png"))


def run_config(**changes):
    tree = {"modality": "audio", "name": "run", "policy": {"path": "tiny-qwen2-audio"}, "tasks": {"name": "tones"},
            "rewards": {"accuracy": 0.9, "rubrics": 0.5}, "trainer": {"num_steps": 1},
            "sampling": {"group_size": 4}}  # fmt: skip
    return validate(tree | changes, AudioRunConfig, "test")


def terms_of(config, **more):
    options = {"judge": config.judge, "rubrics": config.rubrics, "known": {"accuracy": accuracy}, "build_adapter": None}
    return rubric_terms(config, Frontend(), **(options | more))


def test_a_config_makes_the_terms():
    config = run_config(judge={"name": "rules", "workers": 3}, rubrics={"overthink_tokens": 8, "keep": 2})
    terms = terms_of(config)
    assert (terms["rubrics"].concurrent_groups, terms["rubrics"].group_size) == (3, 4)
    task = task_of("count", 5)
    judged = terms["rubrics"](task, [said(task.columns["heard"], task.answer), *[said("", "")] * 3])
    assert (judged.record["mode"], len(judged.record["rubrics"])) == ("evolved", 2)
    assert terms["overthink"](task, said("beep", "1")) == 0.5
    assert terms["evidence"](task, said(task.columns["heard"], task.answer)) is True
    gone = replace(task, messages=({"role": "user", "content": [{"type": "text", "text": question_of(task)}]},))
    assert terms["rubrics"](gone, [said("", "")] * 4).record["reasons"] == ["no_audio", "judge_failed"]


def test_no_judge_is_made_for_a_run_that_does_not_weigh_rubrics():
    judge = {"name": "model", "path": "nowhere"}
    assert terms_of(run_config(judge=judge, rewards={"accuracy": 1.0}))["rubrics"].client is None
    assert terms_of(run_config())["rubrics"].client is None


def test_every_kind_of_judge_can_be_built(tmp_path):
    config = run_config(judge={"name": "endpoint", "url": "https://host/v1", "model": "m", "key_variable": "KEY", "attempts": 2,
                               "cache_dir": str(tmp_path)})  # fmt: skip
    judge = build_judge(config.judge, config, None)
    assert judge == EndpointJudge(url="https://host/v1", model="m", key_variable="KEY")
    client = build_client(config.judge, judge)
    assert (client.retry.attempts, client.workers, client.cache.directory) == (2, 8, tmp_path)

    class Adapter:
        policy_dir, max_decisions = "model", 7

        def build_policy(self):
            return type("Policy", (), {"to": lambda self, device: "policy"})()

    seen = []
    config = run_config(judge={"name": "model", "path": "other", "max_new_tokens": 7})
    judge = build_judge(config.judge, config, lambda given: seen.append(given) or Adapter())
    assert (seen[0].policy.path, seen[0].policy.dtype, seen[0].rollout.max_new_tokens, seen[0].judge) == (
        "other",
        "bfloat16",
        7,
        None,
    )
    assert judge.identity == "model model 7"
