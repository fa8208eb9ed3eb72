"""`mmrl.rewards`: what a term may return, what stops a run, and which answers count as right."""

import math
import sys

import numpy as np
import pytest
import torch

from mmrl.chat import ChatTask, Completion
from mmrl.config import RewardConfig
from mmrl.errors import ConfigError, RewardError
from mmrl.rewards import TEXT_TERMS, WeightedTerm, accuracy, group_term, resolve_terms, same_answer, score, think_answer_format
from mmrl.testing import BanditAdapter

NAN = float("nan")


@pytest.fixture
def batch():
    """Two groups of three rollouts, of tasks train/0 and train/1."""
    adapter = BanditAdapter()
    return adapter.rollout(adapter.build_policy(), adapter.task_source("train")[:2], group_size=3, seeds=torch.arange(6))


def scored(batch, *terms, weights=None):
    weights = weights or [1.0] * len(terms)
    return score(batch, {f"term{i}": WeightedTerm(weight=weights[i], function=term) for i, term in enumerate(terms)})


def returning(value):
    return lambda task, outcome: value


def by_row(*values):
    """A term that returns these values in turn."""
    supply = iter(values)
    return lambda task, outcome: next(supply)


# What a term may return (R2)


@pytest.mark.parametrize(
    ("value", "number"),
    [
        (1, 1.0), (0.25, 0.25), (True, 1.0), (False, 0.0), (np.bool_(True), 1.0), (np.float32(0.5), 0.5), (np.int64(-3), -3.0),
        (torch.tensor(0.5), 0.5), (torch.tensor(True), 1.0), (torch.tensor([2.0]), 2.0), (torch.tensor(1.5).bfloat16(), 1.5),
        (torch.tensor(0.5, requires_grad=True), 0.5),
    ],
)  # fmt: skip
def test_numbers_bools_and_tensors_of_one_are_numbers(batch, value, number):
    result = scored(batch, returning(value))
    assert result.rewards.tolist() == [number] * 6
    assert result.rewards.dtype == torch.float32
    assert not result.rewards.requires_grad


@pytest.mark.parametrize("value", [None, NAN, np.nan, torch.tensor(torch.nan)])
def test_none_and_nan_say_that_a_term_does_not_apply(batch, value):
    result = scored(batch, by_row(value, 1, 1, 0, 0, 0))
    assert math.isnan(result.reward_terms["term0"][0])
    assert math.isnan(result.rewards[0])
    assert result.rewards[1:].tolist() == [1, 1, 0, 0, 0]


@pytest.mark.parametrize(
    ("value", "found"),
    [
        (math.inf, "returned inf"), (-math.inf, "returned -inf"), (1e39, "returned 1e+39"), (torch.tensor(torch.inf), "inf"),
        (10**400, "returned int"), ("0.5", "returned '0.5'"), (b"1", "returned b'1'"), ([1.0], "returned list"),
        ({}, "returned dict"), (torch.zeros(2), "returned Tensor"), (np.zeros(2), "returned ndarray"),
        (torch.zeros((), device="meta"), "returned Tensor"), (1j, "returned complex"),
    ],
)  # fmt: skip
def test_anything_else_stops_the_run_naming_term_and_task(batch, value, found):
    with pytest.raises(RewardError, match=r"reward 'term0' .* for task 'train/1'.*expected a") as caught:
        scored(batch, by_row(0, 0, 0, value, 0, 0))
    assert found in str(caught.value)


def test_a_term_that_raises_stops_the_run_and_keeps_the_rollout(batch):
    def fragile(task, outcome):
        if task.id == "train/1":
            raise KeyError("answer")
        return 0.0

    with pytest.raises(RewardError, match=r"reward 'term0' raised KeyError on task 'train/1': 'answer'") as caught:
        scored(batch, fragile)
    assert caught.value.__notes__ == [f"rollout: {batch.outcomes[3]!r}"]
    assert isinstance(caught.value.__cause__, KeyError)


# Sums


def test_the_total_is_the_weighted_sum_of_the_terms_that_apply(batch):
    result = scored(batch, by_row(1, 1, None, None, 0, 0), by_row(1, None, 1, NAN, 2, 0), weights=[2.0, 0.5])
    assert result.rewards[:3].tolist() == [2.5, 2.0, 0.5]
    assert math.isnan(result.rewards[3])
    assert result.rewards[4:].tolist() == [1.0, 0.0]
    assert list(result.reward_terms) == ["term0", "term1"]
    torch.testing.assert_close(result.reward_terms["term1"], torch.tensor([1, NAN, 1, NAN, 2, 0]), equal_nan=True)
    assert batch.rewards is None


def test_a_term_of_weight_zero_is_recorded_only(batch):
    result = scored(batch, by_row(1, None, 1, 1, 1, 1), returning(7.0), weights=[1.0, 0.0])
    assert result.reward_terms["term1"].tolist() == [7.0] * 6
    assert math.isnan(result.rewards[1])
    assert result.rewards[[0, 2, 3, 4, 5]].tolist() == [1.0] * 5


def test_a_sum_that_overflows_stops_the_run(batch):
    with pytest.raises(RewardError, match=r"the weighted sum of rewards is inf for task 'train/0'; lower a weight"):
        scored(batch, returning(3e38), weights=[3e38])


# Terms of a whole group


def test_a_group_term_sees_the_rollouts_of_one_group_at_a_time(batch):
    seen = []

    @group_term
    def places(task, outcomes):
        seen.append((task.id, outcomes))
        return range(len(outcomes))

    assert scored(batch, places).rewards.tolist() == [0, 1, 2, 0, 1, 2]
    assert seen == [("train/0", list(batch.outcomes[:3])), ("train/1", list(batch.outcomes[3:]))]


def test_a_group_term_follows_its_rows_through_any_order(batch):
    order = torch.tensor([5, 0, 3, 1, 4, 2])
    first = group_term(lambda task, outcomes: [10 * task.context + i for i in range(len(outcomes))])
    assert scored(batch.select(order), first).rewards.tolist() == [10, 0, 11, 1, 12, 2]


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ([1.0], r"returned 1 values for 3 rollouts of task 'train/0'"),
        ([1.0] * 4, r"returned 4 values for 3 rollouts of task 'train/0'"),
        ([], r"returned 0 values"),
        (None, r"raised TypeError on task 'train/0'"),
        (0.5, r"raised TypeError on task 'train/0'"),
        ("abc", r"returned 'a' for task 'train/0'"),
        ([1.0, math.inf, 1.0], r"returned inf for task 'train/0'"),
        ((1 / 0 for _ in range(3)), r"raised ZeroDivisionError on task 'train/0'"),
    ],
)
def test_a_group_term_returns_one_number_per_rollout(batch, value, message):
    with pytest.raises(RewardError, match=message):
        scored(batch, group_term(returning(value)))


def test_a_group_term_may_return_a_tensor_and_leave_rows_out(batch):
    assert scored(batch, group_term(returning(torch.tensor([1.0, 2.0, 3.0])))).rewards.tolist() == [1, 2, 3, 1, 2, 3]
    rewards = scored(batch, group_term(returning([None, 1, NAN]))).rewards
    assert rewards.isnan().tolist() == [True, False, True] * 2


# Which function (R1)


@pytest.fixture
def user_module(tmp_path, monkeypatch):
    """A module in the folder that a person works in, which is not on the path."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [entry for entry in sys.path if entry])
    (tmp_path / "my_rewards_for_tests.py").write_text(
        "def good(task, outcome):\n    return 0.5\n"
        "def flexible(*things, strict=False):\n    return 0.5\n"
        "def short(task):\n    return 0.5\n"
        "def long(task, outcome, answer):\n    return 0.5\n"
        "def named(*, task, outcome):\n    return 0.5\n"
        "NUMBER = 5\n"
    )
    (tmp_path / "my_broken_rewards_for_tests.py").write_text("import json\njson.loads('{')\n")
    (tmp_path / "my_misspelt_rewards_for_tests.py").write_text("def f(:\n")
    yield "my_rewards_for_tests"
    for name in [name for name in sys.modules if name.endswith("rewards_for_tests")]:
        del sys.modules[name]


def resolve(**rewards):
    specs = {
        name: RewardConfig(**spec) if isinstance(spec, dict) else RewardConfig(weight=spec) for name, spec in rewards.items()
    }
    return resolve_terms(specs, TEXT_TERMS)


def test_terms_are_found_by_name_or_imported(user_module, batch):
    terms = resolve(
        accuracy=2.0, mine={"function": f"{user_module}:good", "weight": 0.5}, more={"function": f"{user_module}:flexible"}
    )
    assert terms["accuracy"] == WeightedTerm(weight=2.0, function=accuracy)
    assert terms["mine"].weight == 0.5
    assert score(batch, {name: terms[name] for name in ("mine", "more")}).rewards.tolist() == [0.75] * 6


def test_a_user_function_may_take_the_name_of_a_known_term(user_module):
    assert resolve(accuracy={"function": f"{user_module}:good"})["accuracy"].function.__name__ == "good"


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("{}:short", r"cannot be called as function\(task, outcome\)"),
        ("{}:long", r"cannot be called as function\(task, outcome\): missing a required argument: 'answer'"),
        ("{}:named", r"cannot be called as function\(task, outcome\)"),
        ("{}:NUMBER", r"cannot be called as function\(task, outcome\)"),
        ("{}:absent", r"cannot be imported \(AttributeError: .*'absent'\)"),
        ("{}.good", r"expected package.module:function"),
        ("no_such_module_for_tests:good", r"cannot be imported \(ModuleNotFoundError: No module named"),
        ("my_broken_rewards_for_tests:good", r"cannot be imported \(JSONDecodeError"),
        ("my_misspelt_rewards_for_tests:good", r"cannot be imported \(SyntaxError"),
        (":good", r"cannot be imported"),
        ("{}:", r"cannot be imported"),
        ("builtins:max", r"cannot be called as function\(task, outcome\)"),
    ],
)
def test_a_function_that_cannot_be_used_is_rejected_by_key(user_module, path, message):
    with pytest.raises(ConfigError, match=rf"rewards\.mine\.function.*{message}"):
        resolve(mine={"function": path.format(user_module)})


def test_an_unknown_term_is_rejected_with_the_closest_name_or_all_of_them():
    with pytest.raises(
        ConfigError, match=r"rewards\.acuracy: no such term; did you mean 'accuracy'\?.*package\.module:function"
    ):
        resolve(acuracy=1.0)
    with pytest.raises(ConfigError, match=r"rewards\.zzz: no such term; known terms: accuracy, format\."):
        resolve(zzz=1.0)


# Answers (R5)


def completion(text):
    return Completion(text=text, token_ids=(1,), stop_reason="stop")


def chat_task(answer):
    return ChatTask(id="t", messages=(), answer=answer)


@pytest.mark.parametrize("answer", ["B", "b", "(B)", "b.", " B\n", "[b]", "$B$", '"B"', "(B)."])
def test_ways_to_write_the_right_answer(answer):
    assert accuracy(chat_task("B"), completion(f"<think>x</think><answer>{answer}</answer>")) == 1.0


@pytest.mark.parametrize(
    "answer", ["", " ", ".", "()", "A or B or C", "B. because A is wrong", "A", "BB", "not B", "(A) (B)", "B, C"]
)
def test_answers_that_hedge_or_explain_are_wrong(answer):
    assert accuracy(chat_task("B"), completion(f"<answer>{answer}</answer>")) == 0.0


@pytest.mark.parametrize(
    "text",
    [
        "B", "", "<answer>B", "B</answer>", "<answer>A</answer><answer>B</answer>", "<answer>B</answer><answer>B</answer>",
        "<answer><answer>B</answer></answer>", "<ANSWER>B</ANSWER>",
    ],
)  # fmt: skip
def test_an_answer_stands_in_one_pair_of_tags(text):
    assert accuracy(chat_task("B"), completion(text)) == 0.0


def test_accuracy_does_not_apply_to_a_task_without_an_answer():
    assert accuracy(chat_task(""), completion("<answer></answer>")) is None


@pytest.mark.parametrize(
    ("given", "expected", "same"),
    [
        ("7", "7.0", True), ("07", "7", True), ("1,234.5", "1234.5", True), ("-1,000", "-1000", True), ("+3", "3", True),
        ("1e3", "1000", True), ("0.1", ".1", True), ("7.", "7", True), ("New  York", "new york", True),
        ("7", "8", False), ("1,2", "12", False), ("12", "1,2", False), ("1_2", "12", False), ("3, 4", "34", False),
        ("7 apples", "7", False), ("-7", "7", False), ("", "", False), ("nan", "7", False), ("0.7000001", "0.7", False),
    ],
)  # fmt: skip
def test_numbers_compare_by_value_and_words_by_spelling(given, expected, same):
    assert same_answer(given, expected) is same


@pytest.mark.parametrize(
    ("text", "right"),
    [
        ("<think>a</think><answer>b</answer>", True),
        (" <think>a\nb</think>\n\n<answer>b</answer>\n", True),
        ("<think></think><answer>b</answer>", True),
        ("<think>a</think><answer></answer>", False),
        ("<answer>b</answer><think>a</think>", False),
        ("<think>a</think> so <answer>b</answer>", False),
        ("<think>a</think><answer>b</answer> done", False),
        ("<think>a<think>a</think><answer>b</answer>", False),
        ("<think>a</think><answer>b</answer><answer>c</answer>", False),
        ("a b", False),
        ("", False),
    ],
)
def test_the_format_is_thinking_then_an_answer_and_nothing_else(text, right):
    assert think_answer_format(chat_task("b"), completion(text)) == float(right)
