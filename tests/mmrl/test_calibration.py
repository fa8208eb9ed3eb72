"""`mmrl.calibration` against algorithms.md 10.1 and 12.2."""

import pytest

from mmrl.calibration import answer, brier, calibration_summary, confidence_format, paper_reward, stated_confidence
from mmrl.chat import ChatTask, Completion

TASK = ChatTask(id="t", messages=(), answer="7")


def completion(given="7", confidence="0.9"):
    text = f"<think>a</think>\n<answer>{given}</answer> <analysis>b</analysis><confidence>{confidence}</confidence>"
    return Completion(text=text, token_ids=(), stop_reason="stop")


@pytest.mark.parametrize(
    ("given", "confidence", "paper", "code"),
    [("7", "0.9", 0.99, 1.495), ("8", "0.9", -0.81, 0.595), ("8", "0.2", -0.04, 0.98), ("7", "0.5", 0.75, 1.375)],
)
def test_the_reward_of_the_paper_and_of_its_code(given, confidence, paper, code):
    rollout = completion(given, confidence)
    total = 0.5 * (confidence_format(TASK, rollout) + answer(TASK, rollout) + brier(TASK, rollout))
    assert paper_reward(given == "7", float(confidence)) == pytest.approx(paper)
    assert total == pytest.approx(code)
    assert total == pytest.approx(0.5 * paper + 1.0)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "<answer>7</answer>",
        completion(confidence="1.2").text,
        completion(confidence="-0.1").text,
        completion(confidence="nan").text,
        completion(confidence="high").text,
        completion().text + "<answer>7</answer>",
        completion().text + " and so on",
        "<answer>7</answer><think>a</think><analysis>b</analysis><confidence>0.5</confidence>",
    ],
)
def test_a_malformed_completion_earns_nothing(text):
    rollout = Completion(text=text, token_ids=(), stop_reason="stop")
    assert stated_confidence(text) is None
    assert confidence_format(TASK, rollout) == answer(TASK, rollout) == brier(TASK, rollout) == 0.0
    assert brier.record(TASK, rollout) is None


def test_bounds_are_confidences_and_tasks_without_an_answer_do_not_count():
    assert stated_confidence(completion(confidence="0").text) == 0.0
    assert stated_confidence(completion(confidence=" 1.0 ").text) == 1.0
    open_task = ChatTask(id="t", messages=())
    assert answer(open_task, completion()) is None and brier(open_task, completion()) is None


def test_brier_score_calibration_error_and_reliability():
    pairs = [(0.9, 1.0), (0.8, 0.0), (0.6, 1.0), (0.2, 0.0), (0.95, 1.0)]
    summary = calibration_summary([*pairs, None])
    assert summary["brier"] == pytest.approx(0.1705)
    assert summary["ece"] == pytest.approx(0.31)
    assert (summary["n"], summary["malformed"]) == (5, 1)
    last = summary["reliability"][9]
    assert (last["n"], last["confidence"], last["accuracy"]) == (2, pytest.approx(0.925), 1.0)
    assert summary["reliability"][0]["accuracy"] is None


def test_a_confidence_of_one_is_in_the_last_bin_and_nothing_is_nothing():
    assert calibration_summary([(1.0, 1.0)])["reliability"][9]["n"] == 1
    assert calibration_summary([(1.0, 1.0)])["ece"] == 0.0
    empty = calibration_summary([None])
    assert (empty["n"], empty["brier"], empty["ece"]) == (0, None, None)
