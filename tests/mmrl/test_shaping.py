"""`mmrl.shaping` against the oracles of algorithms.md 7 and 12.2."""

import pytest
import torch

from mmrl.algorithm_config import AlgorithmConfig
from mmrl.chat import Completion
from mmrl.shaping import (
    ShapingInputs,
    cosine_rewards,
    group_length_terms,
    ngram_repetition,
    overlong_punishment,
    repetition,
    shaped_rewards,
    target_length_rewards,
    truncated_rewards,
)
from mmrl.types import Task

NAN = float("nan")


def assert_near(actual, expected):
    torch.testing.assert_close(actual, torch.as_tensor(expected, dtype=torch.float32), atol=1e-6, rtol=0, equal_nan=True)


def test_overlong_punishment():
    lengths = torch.tensor([0, 80, 81, 90, 100, 120])
    assert_near(overlong_punishment(lengths, limit=100, cache=0.2), [0, 0, -0.05, -0.5, -1, -1])
    dapo = overlong_punishment(torch.tensor([16384, 18432, 20480]), limit=20480, cache=4096 / 20480, factor=2.0)
    assert_near(dapo, [0, -1, -2])


def test_cosine_rewards():
    lengths = torch.tensor([0, 25, 50, 100] * 2)
    correct = torch.tensor([True] * 4 + [False] * 4)
    rewards = cosine_rewards(lengths, correct, limit=100, right=(2, 1), wrong=(-10, 0))
    assert_near(rewards, [2, 1.853553, 1.5, 1, -10, -8.535534, -5, 0])
    assert_near(cosine_rewards(lengths, correct, limit=100, right=(1, 0.5), wrong=(-1, -0.5))[[2, 6]], [0.75, -0.75])
    assert_near(cosine_rewards(torch.tensor([300]), torch.tensor([True]), limit=100, right=(2, 1), wrong=(0, 0)), [1])


def test_group_length_terms():
    lengths, correct = torch.tensor([10, 20, 30, 50]), torch.tensor([True, False, True, True])
    assert_near(group_length_terms(lengths, correct, torch.zeros(4).long()), [0.5, 0, 0, -0.5])
    assert_near(group_length_terms(torch.tensor([7, 7]), torch.tensor([True, False]), torch.zeros(2).long()), [0, 0])
    # Interleaved groups do not see each other; an empty rollout is the shortest one.
    both = group_length_terms(torch.tensor([0, 10, 8, 20]), torch.ones(4).bool(), torch.tensor([4, 1, 4, 1]))
    assert_near(both, [0.5, 0.5, -0.5, -0.5])


def test_target_lengths_and_truncation():
    lengths, correct = torch.tensor([100, 300]), torch.tensor([True, False])
    assert_near(target_length_rewards(lengths, correct, target=200, mode="exact", alpha=3e-4), [0.97, -0.03])
    assert_near(target_length_rewards(lengths, correct, target=200, mode="max", alpha=3e-3), [0.8, 0.0])
    rewards, cut = torch.tensor([1.0, 1.0, NAN]), torch.tensor([True, False, True])
    assert_near(truncated_rewards(rewards, cut, coef=0.5), [0.5, 1.0, NAN])
    assert_near(truncated_rewards(rewards[:2], cut[:2], coef=-0.3), [-0.3, 1.0])


def inputs():
    return ShapingInputs(
        lengths=torch.tensor([0, 10, 5]), correct=torch.tensor([True, False, True]),
        truncated=torch.tensor([False, True, False]), group_ids=torch.zeros(3).long(), limit=10,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("shaping", "expected"),
    [
        ([], [1, 0, NAN]),
        ([{"name": "overlong"}], [1, -1, NAN]),
        ([{"name": "outcome", "wrong": -2}], [1, -2, NAN]),
        ([{"name": "cosine"}], [1, -0.5, NAN]),
        ([{"name": "group_length", "factor": 2}], [2, -1, NAN]),
        ([{"name": "target_length", "target": 5, "alpha": 0.1}], [0.5, -0.5, NAN]),
        ([{"name": "decision_cost", "cost": 0.1}], [1, 0, NAN]),
        ([{"name": "truncated", "coef": -1}, {"name": "overlong"}], [1, -2, NAN]),
    ],
)
def test_shapings_apply_in_order_and_leave_nan_alone(shaping, expected):
    config = AlgorithmConfig(shaping=shaping)
    assert_near(shaped_rewards(config.shaping, torch.tensor([1.0, 0.0, NAN]), inputs()), expected)


def test_a_price_per_decision_is_paid_by_correct_rollouts_only():
    config = AlgorithmConfig(shaping=[{"name": "decision_cost", "cost": 0.1}])
    assert_near(shaped_rewards(config.shaping, torch.tensor([1.0, 0.0, 1.0]), inputs()), [1.0, 0.0, 0.5])


@pytest.mark.parametrize(
    ("tokens", "size", "expected"),
    [([1, 2, 3, 4], 2, 0.0), ([5] * 5, 2, -0.75), ([1, 2, 3] * 3, 3, -0.571429), ([1, 2], 3, 0.0), ([], 1, 0.0)],
)
def test_repeated_ngrams_cost_their_share(tokens, size, expected):
    assert ngram_repetition(tokens, size=size) == pytest.approx(expected, abs=1e-6)
    assert ngram_repetition(tokens, size=size, penalty=-2.0) == pytest.approx(2 * expected, abs=2e-6)


def test_the_reward_term_looks_at_three_tokens_at_a_time():
    completion = Completion(text="", token_ids=(1, 2, 3) * 3, stop_reason="stop")
    assert repetition(Task(id="t"), completion) == pytest.approx(-0.571429, abs=1e-6)
