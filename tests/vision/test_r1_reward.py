"""R1-Reward: its reward against the document's table, consistency by every judge, and a judge as the reward of another run."""

import json

import pytest

from mmrl.chat import ChatTask, Completion
from mmrl.config import validate
from mmrl.errors import ConfigError
from mmrl.judge import JudgeClient, JudgeError, JudgeRequest, Reply, Retry
from mmrl.judge_cache import JudgeCache
from mmrl.rewards import resolve_terms
from vision.adapter import build_adapter
from vision.config import VisionRunConfig
from vision.r1_reward import (
    CONSISTENCY,
    ConclusionJudge,
    R1Reward,
    conclusion_of,
    end_of_reasoning,
    r1_format,
    r1_result,
    read_consistency,
    total_reward,
    verdict_of,
)
from vision.r1_reward_pairwise import Pairwise, pairings

RIGHT = "<think>Response 2 names the digit. Response 2 is better.</think><answer>2</answer>"
TORN = "<think>Response 1 is better.</think><answer>2</answer>"


def said(text):
    return Completion(text=text, token_ids=(1,), stop_reason="stop")


def task(answer="2"):
    content = [{"type": "text", "text": "Which is better?"}]
    return ChatTask(id="t", messages=({"role": "user", "content": content},), answer=answer)


class Scripted:
    """A judge that answers from a list; an exception in it is raised."""

    identity = "scripted"

    def __init__(self, *answers):
        self.answers, self.requests = list(answers), []

    def answer(self, request):
        self.requests.append(request)
        answer = self.answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return Reply(text=answer if isinstance(answer, str) else json.dumps(answer))


def term(judge=None, **more):
    client = JudgeClient(judge=judge or ConclusionJudge(), retry=Retry(attempts=1), sleep=lambda seconds: None)
    return R1Reward(client=client, **more)


# ---- 5.4: the reward ----------------------------------------------------------------------------------------------------

TABLE = [  # format, result, rewards at consistency -1, 0, 1
    (0, 0, (0.0, 0.0, 0.0)),
    (1, 0, (0.5, 0.5, 0.5)),
    (0, 1, (0.5, 1.0, 1.5)),
    (1, 1, (1.0, 1.5, 2.0)),
]


@pytest.mark.parametrize(("form", "result", "rewards"), TABLE)
def test_the_reward_is_that_of_the_document(form, result, rewards):
    found = [total_reward(result=result, consistency=consistency, format=form) for consistency in (-1, 0, 1)]
    assert found == pytest.approx(rewards)


def test_a_coherent_wrong_verdict_earns_no_more_than_an_incoherent_one():
    coherent = said("<think>Response 1 is better.</think><answer>1</answer>")
    torn = said("<think>Response 2 is better.</think><answer>1</answer>")
    assert term()(task(), [coherent, torn]).values == [0.5, 0.5]  # added up, the first would earn 1.0


@pytest.mark.parametrize(
    ("text", "passes"),
    [
        ("<think>a</think><answer>1</answer>", True),
        ("<think>a</think>\n<answer>1</answer>", False),
        ("<think>a</think><answer>1</answer>\n", True),
        ("<think>a</think><answer>1</answer> I hope", False),
        ("Well <think>a</think><answer>1</answer>", False),
        ("<think>a</think><answer>1</answer><answer>2</answer>", False),
        ("<think>a</think>b</think><answer>1</answer>", False),
        ("<think>a\nb</think><answer>1</answer>", True),
    ],
)
def test_the_format_is_two_blocks_side_by_side(text, passes):
    assert r1_format(task(), said(text)) == passes


@pytest.mark.parametrize(
    ("text", "verdict"),
    [("<answer> 2 </answer>", 2), ("<answer>1</answer><answer>2</answer>", 1), ("<answer>3</answer>", None), ("2", None)],
)
def test_the_verdict_is_the_first_answer(text, verdict):
    assert verdict_of(text) == verdict
    assert r1_result(task("1"), said(text)) == (verdict == 1)


def test_what_cannot_be_read_is_not_right_and_a_task_without_an_answer_has_no_reward():
    assert r1_result(task(), said("")) == 0.0
    assert r1_result(task(""), said(RIGHT)) is None
    assert term()(task(""), [said(RIGHT)]).values == [None]


# ---- consistency --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "response"),
    [
        ("Response 2 is better.", 2),
        ("Overall, response 1 is clearly the better one", 1),
        ("so the second response is more accurate", 2),
        ("Response 1 is worse.", 2),
        ("7 3\nodd first is better", 1),
        ("I prefer response 2", 2),
        ("Response 1 is better. Response 2 is better.", None),
        ("Response 1 is worse, so response 2 is better", 2),
        ("Response 1 is not better", None),
        ("12 is better", None),
        ("Both are fine.", None),
        ("", None),
    ],
)
def test_the_conclusion_of_reasoning(text, response):
    assert conclusion_of(text) == response


def test_a_judge_sees_the_last_three_lines_in_front_of_the_answer():
    judge = Scripted({"consistent": 1})
    text = "<think>Response 1 is better\n\none\n two \nthree</think><answer>2</answer>"
    assert end_of_reasoning(text) == "one\ntwo\nthree"
    term(judge)(task(), [said(text)])
    (request,) = judge.requests
    assert request.payload == {"end_of_reasoning": "one\ntwo\nthree", "verdict": "response 2 is better"}


@pytest.mark.parametrize(("disagreement", "torn"), [(0.0, 1.5), (-1.0, 1.0)])
def test_a_torn_verdict_has_the_consistency_of_the_paper_or_of_the_code(disagreement, torn):
    judged = term(disagreement=disagreement)(task(), [said(RIGHT), said(TORN)])
    assert judged.values == [2.0, torn]
    assert [entry["judge"] for entry in judged.record["r1_reward"]] == ["consistent", "inconsistent"]


def test_reasoning_without_a_conclusion_does_not_agree():
    assert term()(task(), [said("<think>hm</think><answer>2</answer>")]).values == [1.5]


@pytest.mark.parametrize("answer", [JudgeError("down", kind="transient"), "no JSON", {"consistent": 2}, {"agree": 1}, "{}"])
def test_a_judge_that_fails_is_counted_and_earns_nothing(answer):
    for disagreement in (0.0, -1.0):
        reward = term(Scripted(answer), disagreement=disagreement)
        assert reward(task(), [said(RIGHT)]).values == [1.5]
        totals = reward.totals()
        assert totals["r1_reward/judge_failed"] == (1.0, 1.0) and totals["r1_reward/consistent"] == (0.0, 1.0)
        assert totals["judge/failures"][0] + totals["judge/malformed"][0] == 1.0


def test_wrong_verdicts_are_not_judged_and_shares_are_logged():
    judge = Scripted({"consistent": 1}, {"consistent": 0})
    reward = term(judge)
    reward(task(), [said(RIGHT), said("<answer>1</answer>"), said(TORN), said("")])
    assert len(judge.requests) == 2
    totals = reward.totals()
    assert totals["r1_reward/result"] == (2.0, 4.0) and totals["r1_reward/format"] == (2.0, 4.0)
    assert totals["r1_reward/consistent"] == (1.0, 2.0) and totals["r1_reward/inconsistent"] == (1.0, 2.0)
    assert reward.totals()["r1_reward/result"] == (0.0, 0.0)


def test_the_rule_answers_nothing_else_and_a_judge_may_write_its_number_as_text():
    with pytest.raises(JudgeError, match="not 'other'"):
        ConclusionJudge().answer(JudgeRequest(purpose="other", instructions="", payload={}))
    assert [read_consistency({"consistent": value}) for value in (1, 0, "1", "0")] == [True, False, True, False]
    empty = JudgeRequest(purpose=CONSISTENCY, instructions="", payload={"end_of_reasoning": "", "verdict": "response None"})
    assert ConclusionJudge().answer(empty).text == '{"consistent": 0}'  # two that say nothing do not agree


# ---- pairwise -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("count", "opponents"), [(2, 1), (3, 1), (4, 2), (5, 3), (8, 2), (4, 9)])
def test_everybody_meets_somebody_and_nobody_twice(count, opponents):
    found = pairings(count, opponents)
    met = [sum(row in pair for pair in found) for row in range(count)]
    assert len({frozenset(pair) for pair in found}) == len(found) and all(left != right for left, right in found)
    assert min(met) >= 1 and max(met) <= max(min(opponents, count - 1), 2 if opponents == 1 else 0)
    if count * opponents % 2 == 0 and opponents < count:
        assert set(met) == {opponents}


class Alphabet:
    """A judge that prefers the response that comes first in the alphabet; ``always`` is what it says instead."""

    identity = "alphabet"

    def __init__(self, always=None):
        self.always, self.seen = always, []

    def answer(self, request):
        self.seen.append(request)
        shown = [request.payload[name] for name in ("response_1", "response_2")]
        better = self.always if self.always is not None else 1 + (shown[1] < shown[0])
        return Reply(text=json.dumps({"better": better}))


def pairwise(judge, opponents=2):
    client = JudgeClient(judge=judge, retry=Retry(attempts=1), sleep=lambda seconds: None)
    return Pairwise(client=client, media=lambda task: (), opponents=opponents)


def test_rollouts_earn_the_share_of_comparisons_that_they_win():
    judge = Alphabet()
    texts = ["<answer>b</answer>", "<think>z</think><answer>a</answer>", "<answer>c</answer>"]
    assert pairwise(judge)(task(), [said(text) for text in texts]).values == [0.5, 1.0, 0.0]
    assert judge.seen[0].payload == {"question": "Which is better?", "response_1": "b", "response_2": "a"}  # answers alone
    assert len(judge.seen) == 6  # three comparisons, each in both orders


def test_a_judge_that_favours_a_place_or_fails_is_neutral_and_equal_answers_are_not_asked_about():
    for always, name in ((1, "contradictory"), (2, "contradictory"), (3, "judge_failed")):
        reward = pairwise(Alphabet(always))
        assert reward(task(), [said("a"), said("b")]).values == [0.5, 0.5]
        assert reward.totals()[f"pairwise/{name}"] == (1.0, 1.0)
    judge = Alphabet()
    reward = pairwise(judge)
    assert reward(task(), [said("<answer>a</answer>"), said("a")]).values == [0.5, 0.5] and not judge.seen
    assert reward.totals()["pairwise/equal"] == (1.0, 1.0)
    assert reward(task(), [said("a")]).values == [None]


# ---- what a config builds -----------------------------------------------------------------------------------------------


def run_config(**sections):
    tree = {
        "modality": "vision", "name": "test", "rewards": {"accuracy": 1.0}, "trainer": {"num_steps": 1},
        "policy": {"path": "tiny-qwen2.5-vl"}, "tasks": {"name": "digits"}, "rollout": {"max_new_tokens": 4},
    }  # fmt: skip
    return validate({**tree, **sections}, VisionRunConfig, "test")


def test_a_run_has_the_judge_that_its_config_names(tmp_path):
    endpoint = {"name": "endpoint", "url": "http://localhost:1/v1", "model": "m", "temperature": 0.1, "attempts": 3,
                "cache_dir": str(tmp_path)}  # fmt: skip
    config = run_config(rewards={"r1_reward": 1.0}, r1_reward={"judge": endpoint, "disagreement": "minus_one"})
    reward = build_adapter(config).reward_terms["r1_reward"]
    assert reward.client.judge.temperature == 0.1 and reward.client.retry.attempts == 3
    assert reward.disagreement == -1.0 and isinstance(reward.client.cache, JudgeCache)
    assert "r1_reward" not in build_adapter(run_config(r1_reward={"judge": endpoint})).reward_terms
    with pytest.raises(ConfigError, match="needs the section pairwise"):
        build_adapter(run_config(rewards={"pairwise": 1.0}))


def test_a_trained_judge_rewards_another_run_and_is_asked_as_it_was_trained():
    judge = {"name": "model", "path": "tiny-qwen2.5-vl", "dtype": "float32", "max_new_tokens": 4}
    config = run_config(rewards={"pairwise": 1.0, "accuracy": 0.0}, pairwise={"judge": judge, "prompt": "short"})
    adapter = build_adapter(config)
    reward = resolve_terms(config.rewards, adapter.reward_terms)["pairwise"].function
    shown = adapter.task_source("train")[0]
    asked = reward.client.judge.conversation(
        JudgeRequest(
            purpose="compare", instructions="", payload={"question": "Which digit?", "response_1": "7", "response_2": "3"},
            media=tuple(reward.media(shown)),
        )
    )  # fmt: skip
    kinds = [part["type"] for part in asked.messages[0]["content"]]
    assert kinds == ["image"] * (len(kinds) - 1) + ["text"]
    assert asked.messages[0]["content"][-1]["text"] == "Which digit?\n7 first\n3 second"
    # The judge is a random model, so it names nobody: every comparison is neutral and counted.
    judged = reward(shown, [said("<answer>7</answer>"), said("<answer>3</answer>")])
    assert judged.values == [0.5, 0.5]
    totals = reward.totals()
    assert totals["pairwise/judge_failed"] == (1.0, 1.0) and totals["judge/calls"][0] == 2.0
