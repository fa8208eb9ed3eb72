"""The parts of Observe-R1 that any recipe may use, against the oracles of vision.md 1.4 to 1.7."""

from types import SimpleNamespace

import pytest
import torch

from mmrl import recipe
from mmrl.algorithm_config import AlgorithmConfig
from mmrl.collection import collect
from mmrl.pools import build_sampler
from mmrl.rewards import resolve_terms
from mmrl.shaping import concise_correct_bonus
from mmrl.testing import BanditAdapter
from mmrl.types import RolloutBatch, Task

NAN = float("nan")
ACCURACY = [1.0, 1.0, 0.0, 1.0, 0.0, 0.0, 0.0, 0.0]
FORMAT = [0.5, 0.5, 0.5, 0.0, 0.5, 0.0, 0.5, 0.5]
LENGTHS = [180, 120, 90, 150, 300, 60, 200, 210]
ONE_GROUP = {
    "selection_metric": "accuracy",
    "shaping": [{"name": "concise_correct"}],
    "advantage_eps": 1e-9,
    "difficulty_weight": "parabola",
    "advantage_clamp": 10.0,
    "kl": "k1",
    "kl_in": "return",
    "kl_coef": 0.01,
}


def batch_of(accuracy, formats, lengths, *, stop_reasons=None, log_probs=None):
    """One group of rollouts whose reward is accuracy plus format."""
    num = len(accuracy)
    mask = torch.arange(max(lengths))[None, :] < torch.tensor(lengths)[:, None]
    accuracy, formats = torch.tensor(accuracy), torch.tensor(formats)
    return RolloutBatch(
        tasks=(Task(id="q"),) * num,
        group_ids=torch.zeros(num, dtype=torch.long),
        seeds=torch.arange(num),
        outcomes=("",) * num,
        old_log_probs=torch.zeros(mask.shape) if log_probs is None else log_probs,
        loss_mask=mask,
        stop_reasons=stop_reasons or ("stop",) * num,
        inputs=SimpleNamespace(),
        rewards=accuracy + formats,
        reward_terms={"accuracy": accuracy, "format": formats},
    )


def advantages_of(config, batch):
    rewards = recipe.shape_rewards(config, batch, 8192)
    inputs = recipe.credit_inputs(config, batch, rewards=rewards)
    return rewards, recipe.finish_advantages(config, recipe.estimate_advantages(config, inputs), batch)


def test_the_worked_group():
    batch = batch_of(ACCURACY, FORMAT, LENGTHS)
    rewards, weighted = advantages_of(AlgorithmConfig(**ONE_GROUP), batch)
    assert rewards.tolist() == pytest.approx([1.5, 1.7, 0.5, 1.0, 0.5, 0.0, 0.5, 0.5])
    assert float(rewards.mean()) == pytest.approx(0.775)
    assert float(rewards.std()) == pytest.approx(0.577556, abs=1e-6)
    _, plain = advantages_of(AlgorithmConfig(**ONE_GROUP | {"difficulty_weight": "none"}), batch)
    expected = [1.255289, 1.601575, -0.476144, 0.389572, -0.476144, -1.341860, -0.476144, -0.476144]
    assert plain.tolist() == pytest.approx(expected, abs=1e-6)
    assert recipe.difficulty_weights(AlgorithmConfig(**ONE_GROUP), batch).tolist() == pytest.approx([1.6875] * 8)
    expected = [2.118299, 2.702658, -0.803493, 0.657403, -0.803493, -2.264389, -0.803493, -0.803493]
    assert weighted.tolist() == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize(
    ("accuracy", "lengths", "weighting", "rewards", "advantages"),
    [
        ([1, 1, 0, 0], [95, 140, 300, 300], "none", [1.5, 1.5, 0.5, 0.5], None),
        ([0, 0, 0, 0], [150, 140, 180, 300], "none", [0.5] * 4, [0.0] * 4),  # the public code gives the first one a bonus
        ([0, 0, 0, 0], [150, 140, 180, 300], "parabola", [0.5] * 4, [0.0] * 4),
        ([1, 1, 1, 1], [150, 140, 180, 300], "none", [1.5, 1.7, 1.5, 1.5], [-0.5, 1.5, -0.5, -0.5]),
        ([1, 1, 1, 1], [150, 140, 180, 300], "parabola", [1.5, 1.7, 1.5, 1.5], [0.0] * 4),
    ],
)
def test_edge_cases_of_a_group_of_four(accuracy, lengths, weighting, rewards, advantages):
    batch = batch_of([float(a) for a in accuracy], [0.5] * 4, lengths)
    shaped, credit = advantages_of(AlgorithmConfig(**ONE_GROUP | {"difficulty_weight": weighting}), batch)
    assert shaped.tolist() == pytest.approx(rewards)
    if advantages is not None:
        assert credit.tolist() == pytest.approx(advantages, abs=1e-5)


def test_weights_by_the_number_of_correct_rollouts_of_eight():
    config = AlgorithmConfig(**ONE_GROUP)
    expected = [0, 0.7875, 1.35, 1.6875, 1.8, 1.6875, 1.35, 0.7875, 0]
    found = [recipe.difficulty_weights(config, batch_of([1.0] * k + [0.0] * (8 - k), [0.5] * 8, [9] * 8)) for k in range(9)]
    assert [float(weights[0]) for weights in found] == pytest.approx(expected)
    assert all(len(weights.unique()) == 1 for weights in found)
    halved = AlgorithmConfig(**ONE_GROUP | {"difficulty_peak": 0.9})
    assert float(recipe.difficulty_weights(halved, batch_of([1.0, 0.0], [0.5] * 2, [9] * 2))[0]) == pytest.approx(0.9)


def test_correctness_is_not_read_off_the_reward():
    # A reward term that lifts wrong answers above one would make truncation of the total count them as correct.
    batch = batch_of([1.0, 0.0, 0.0, 0.0], [0.5, 1.5, 1.5, 1.5], [150, 120, 120, 120])
    config = AlgorithmConfig(**ONE_GROUP)
    rewards, _ = advantages_of(config, batch)
    assert rewards.tolist() == pytest.approx([1.7, 1.5, 1.5, 1.5])
    assert float(recipe.difficulty_weights(config, batch)[0]) == pytest.approx(4 * 1.8 * 0.25 * 0.75)


def test_each_group_has_its_own_bonus_and_the_first_of_equals_gets_it():
    lengths = torch.tensor([120, 120, 100, 101, 500, 400])
    correct = torch.tensor([True, True, True, True, False, True])
    groups = torch.tensor([4, 4, 1, 2, 2, 9])
    found = concise_correct_bonus(lengths, correct, groups, bonus=0.3)
    assert found.tolist() == pytest.approx([0.3, 0, 0, 0.3, 0, 0.3])  # a length of exactly the floor has none
    assert concise_correct_bonus(lengths, correct, groups, floor=400).tolist() == [0.0] * 6


@pytest.mark.parametrize(("may", "winner"), [(False, 0), (True, 1)])
def test_a_rollout_that_was_cut_off_competes_only_where_the_config_says_so(may, winner):
    batch = batch_of([1.0, 1.0], [0.0, 0.0], [150, 120], stop_reasons=("stop", "length"))
    config = AlgorithmConfig(**ONE_GROUP | {"shaping": [{"name": "concise_correct", "truncated": may}]})
    assert int(recipe.shape_rewards(config, batch, 120).argmax()) == winner


def test_a_rollout_without_a_reward_stays_without_one():
    batch = batch_of([NAN, 1.0], [0.5, 0.5], [150, 120])
    assert recipe.shape_rewards(AlgorithmConfig(**ONE_GROUP), batch, 8192).isnan().tolist() == [True, False]


def test_the_kl_to_come_is_taken_from_the_finished_advantage():
    # vision.md 1.6: sequence value 2.118299, k1 = [.1, -.05, .2], coefficient .01.
    kl = torch.tensor([[0.1, -0.05, 0.2, 0.7]])
    batch = batch_of([1.0], [0.5], [3], log_probs=torch.zeros(1, 3))
    config = AlgorithmConfig(**ONE_GROUP)
    found = recipe.subtract_kl_to_go(config, torch.tensor([2.118299]), batch, -kl[:, :3])
    assert found.tolist()[0] == pytest.approx([2.115799, 2.116799, 2.116299], abs=1e-6)
    # A weight of 0 leaves the KL alone, and another place of the KL leaves the advantage alone.
    assert recipe.subtract_kl_to_go(config, torch.zeros(1), batch, -kl[:, :3]).tolist()[0] == pytest.approx(
        [-0.0025, -0.0015, -0.002], abs=1e-7
    )
    other = AlgorithmConfig(**ONE_GROUP | {"kl_in": "loss"})
    assert recipe.subtract_kl_to_go(other, torch.ones(1), batch, -kl[:, :3]).tolist() == [1.0]
    assert recipe.subtract_kl_to_go(config, torch.ones(1), batch, None).tolist() == [1.0]


def test_the_kl_is_masked_and_no_statistic_sees_it():
    batch = batch_of([1.0, 0.0], [0.0, 0.0], [1, 2], log_probs=torch.tensor([[0.0, 9.0], [0.0, 0.0]]))
    reference = torch.tensor([[-5.0, 0.0], [0.0, 0.0]])
    config = AlgorithmConfig(**ONE_GROUP | {"shaping": [], "difficulty_weight": "none"})
    found = recipe.compute_advantages(config, batch, reference)
    half = 0.5**0.5
    assert found.flatten().tolist() == pytest.approx([half - 0.05, 0.0, -half, -half], abs=1e-6)


def test_advantages_are_bounded_after_the_weights():
    batch = batch_of(ACCURACY, FORMAT, LENGTHS)
    _, credit = advantages_of(AlgorithmConfig(**ONE_GROUP | {"advantage_clamp": 2.2}), batch)
    assert credit.max() == pytest.approx(2.2) and credit.min() == pytest.approx(-2.2)
    assert float(credit[0]) == pytest.approx(2.118299, abs=1e-6)


def test_a_gate_of_weight_zero_still_pulls_towards_the_reference():
    config = AlgorithmConfig(**ONE_GROUP)
    batch = batch_of([1.0, 1.0], [0.5, 0.5], [2, 2], log_probs=torch.full((2, 2), -1.0))
    found = recipe.compute_advantages(config, batch, torch.full((2, 2), -2.0))
    assert found.tolist() == [pytest.approx([-0.02, -0.01])] * 2


def test_a_collected_step_has_the_kl_in_its_advantages(bandit_config):
    algorithm = {"kl": "k1", "kl_in": "return", "kl_coef": 0.1, "difficulty_weight": "parabola"}
    adapter = BanditAdapter(reward_terms={"accuracy": lambda task, outcome: 1.0})  # all right: every weight is 0
    config = bandit_config(algorithm=algorithm)
    asked = []

    def reference(batch):
        asked.append(len(batch))
        return batch.old_log_probs - torch.tensor([0.5, 0.25, 0.125])[: batch.loss_mask.shape[1]]

    result = collect(
        config,
        adapter,
        adapter.build_policy(),
        build_sampler(config.sampling, adapter.task_source("train"), 0),
        resolve_terms(config.rewards, adapter.reward_terms),
        SimpleNamespace(num_processes=1, process_index=0),
        train_step=1,
        reference_log_probs=reference,
    )
    expected = {1: [-0.05, 0, 0], 2: [-0.075, -0.025, 0], 3: [-0.0875, -0.0375, -0.0125]}
    for length, row in zip(result.batch.num_decisions.tolist(), result.advantages.tolist()):
        assert row == pytest.approx(expected[length][: len(row)], abs=1e-6)
    assert asked == [16]  # the reference policy is run once
