"""`mmrl.rubric_points`: RuscaRL's reward, by patterns and by a judge, and that terms accept a completion without text."""

import json

import pytest

from mmrl.chat import ChatTask, Completion
from mmrl.config import RewardConfig
from mmrl.errors import DataError
from mmrl.judge import JudgeClient, JudgeError, Reply
from mmrl.prompting import FORMAT_COLUMN, template_format
from mmrl.rewards import TEXT_TERMS, resolve_terms
from mmrl.rubric_points import JudgedRubrics, points_reward, rubric_points, rubric_values
from mmrl.shaping import repetition

RUBRICS = [
    {"text": "names the sum", "points": 3, "pattern": r"\b12\b"},
    {"criterion": "explains", "points": 2, "pattern": "because"},
    {"text": "apologises", "points": -1, "pattern": "sorry"},
    {"text": "checks", "points": 5, "pattern": "check"},
]


def task_with(rubrics):
    content = [{"type": "text", "text": "5 + 7?"}]
    return ChatTask(id="t", messages=({"role": "user", "content": content},), answer="12", columns={"rubrics": rubrics})


def said(text):
    return Completion(text=text, token_ids=(), stop_reason="stop")


def test_points_met_over_points_to_be_had():
    # Met are 3, 2 and -1 of a positive total of 10.
    assert points_reward([3, 2, -1, 5], [True, True, True, False]) == pytest.approx(0.4)
    assert points_reward([3, 2, -1, 5], [False] * 4) == 0.0
    assert points_reward([3, -6], [False, True]) == -2.0
    assert points_reward([-1, -2], [True, True]) == 0.0
    with pytest.raises(ValueError, match="argument 2 is shorter"):
        points_reward([1, 2], [True])


@pytest.mark.parametrize(
    ("text", "expected"),
    [("12, because so.\nsorry", 0.4), ("112", 0.0), ("check: 12", 0.8), ("sorry", -0.1), ("", 0.0)],
)
def test_patterns_decide_what_is_met(text, expected):
    assert rubric_points(task_with(RUBRICS), said(text)) == pytest.approx(expected)


def test_rubrics_are_worth_one_point_unless_they_say_so():
    assert rubric_values(task_with(["a", {"text": "b", "points": 2}])) == [1.0, 2.0]
    assert rubric_points(task_with([]), said("12")) is None
    with pytest.raises(DataError, match="t: the points of a rubric are 'two'"):
        rubric_values(task_with([{"text": "b", "points": "two"}]))
    with pytest.raises(DataError, match="t: a rubric has no pattern"):
        rubric_points(task_with(["a"]), said("a"))


class Marker:
    """Meets a rubric when a word of its text is in the answer; fails, or answers badly, when the answer says so."""

    identity = "marker"

    def answer(self, request):
        payload = json.loads(request.text)
        if payload["answer"] == "down":
            raise JudgeError("down", kind="permanent")
        met = [any(word in payload["answer"] for word in rubric.split()) for rubric in payload["rubrics"]]
        return Reply(text=json.dumps({"met": met[1:] if payload["answer"] == "short" else met}), prompt_tokens=3)


def test_a_judge_decides_and_a_judge_that_fails_leaves_no_reward():
    term = JudgedRubrics(client=JudgeClient(judge=Marker()))
    found = term(task_with(RUBRICS), [said("sum explains apologises"), said(""), said("down"), said("short")])
    assert found.values == [pytest.approx(0.4), 0.0, None, None]
    assert found.record["met"][0] == [True, True, True, False] and found.record["points"] == [3.0, 2.0, -1.0, 5.0]
    totals = term.totals()
    assert totals["judge/calls"] == (4.0, 1) and totals["judge/malformed"] == (1.0, 1) and totals["judge/failures"] == (1.0, 1)
    assert term(task_with(None), [said("")]).values == [None]
    assert term.is_judged and term.scores_group and term.concurrent_groups == 8


def test_a_config_names_the_term_by_its_place():
    spec = {"points": RewardConfig(function="mmrl.rubric_points:rubric_points")}
    assert resolve_terms(spec, {})["points"].function is rubric_points


TERMS = {**TEXT_TERMS, "template_format": template_format, "rubric_points": rubric_points, "repetition": repetition}


@pytest.mark.parametrize("name", sorted(TERMS))
def test_a_completion_without_text_has_a_reward(name):
    task = task_with(RUBRICS)
    task = ChatTask(**{**vars(task), "columns": {**task.columns, FORMAT_COLUMN: {"tags": ["<think>"], "sections": []}}})
    assert TERMS[name](task, said("")) in (0.0, None) or name in ("repetition",)
