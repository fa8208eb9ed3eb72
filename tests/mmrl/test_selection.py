"""`mmrl.selection`: which groups and which rollouts, on rewards set by hand."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from mmrl.algorithms import PRESETS
from mmrl.config import AlgorithmConfig
from mmrl.selection import (
    SELECTIONS,
    SUBSAMPLES,
    correct_rollouts,
    groups_of,
    num_positives,
    pass_rates,
    rejected_rows,
)
from mmrl.testing import BanditAdapter
from mmrl.types import RolloutBatch

NAN = float("nan")
# Group 0: two of four right; group 1: all right; group 2: none right; group 3: all right but for a row without reward.
REWARDS = [1.0, 0.0, 0.0, 1.0, 1.0, 1.0, 0.0, 0.2, 1.0, NAN]
GROUPS = [0, 0, 0, 0, 1, 1, 2, 2, 3, 3]


def algorithm(name="grpo", **slots):
    return AlgorithmConfig(**{**PRESETS[name].slots, **slots, "name": name})


def batch_of(rewards, group_ids=None):
    """One decision per row; the bandit supplies what selection does not look at, seeds in an order of their own."""
    num, adapter = len(rewards), BanditAdapter()
    tasks = (adapter.task_source("train") * 2)[:num]
    seeds = (torch.arange(num) * 7919 + 13) % 1009
    drawn = adapter.rollout(adapter.build_policy(), tasks, group_size=1, seeds=seeds)
    return RolloutBatch(
        tasks=drawn.tasks, group_ids=torch.zeros(num).long() if group_ids is None else torch.tensor(group_ids), seeds=seeds,
        outcomes=drawn.outcomes, inputs=drawn.inputs, old_log_probs=torch.zeros(num, 1), loss_mask=torch.ones(num, 1).bool(),
        stop_reasons=("stop",) * num, rewards=torch.tensor(rewards),
    )  # fmt: skip


def rows(mask):
    return mask.nonzero()[:, 0].tolist()


def test_what_is_correct_and_how_many_are():
    batch = batch_of(REWARDS, group_ids=GROUPS)
    config = algorithm()
    assert rows(correct_rollouts(config, batch)) == [0, 3, 4, 5, 8]
    assert pass_rates(config, batch).tolist() == [0.5] * 4 + [1.0] * 2 + [0.0] * 2 + [1.0] * 2
    assert rows(correct_rollouts(algorithm(correct_above=0.1), batch)) == [0, 3, 4, 5, 7, 8]


@pytest.mark.parametrize(
    ("name", "slots", "kept"),
    [
        ("none", {}, list(range(10))),
        ("reject", {}, list(range(10))),
        ("dynamic", {}, [0, 1, 2, 3, 6, 7]),  # 0.0 and 0.2 differ
        ("pass_rate", {}, [0, 1, 2, 3, 4, 5, 8, 9]),
        ("pass_rate", {"max_pass_rate": 0.8}, [0, 1, 2, 3]),
        ("ada_positive", {}, list(range(10))),
    ],
)
def test_selection_keeps_whole_groups(name, slots, kept):
    batch = batch_of(REWARDS, group_ids=GROUPS)
    assert rows(SELECTIONS[name].keep(algorithm(selection=name, **slots), batch)) == kept


def test_rejected_groups_stay_but_have_no_advantage():
    batch = batch_of(REWARDS, group_ids=GROUPS)
    assert rows(rejected_rows(algorithm(selection="reject"), batch)) == [4, 5, 8, 9]
    assert not rejected_rows(algorithm(), batch).any()


@pytest.mark.parametrize(
    ("name", "keep", "open_groups"),
    [
        ("ada_positive", 4, [2]),
        ("ada_balanced", 4, [1, 2, 3]),  # group 0 has two of each
        ("ada_balanced", 2, [1, 2]),  # the row without a reward is not right
    ],
)
def test_rounds_go_on_for_groups_that_lack_a_kind(name, keep, open_groups):
    batch = batch_of(REWARDS, group_ids=GROUPS)
    still = SELECTIONS[name].open_rows(algorithm(selection=name, keep_per_group=keep), batch)
    assert batch.group_ids[still].unique().tolist() == open_groups


@pytest.mark.parametrize(
    ("correct", "wrong", "count", "balanced", "expected"),
    [
        (2, 6, 4, True, 2),
        (1, 7, 4, True, 1),
        (6, 1, 4, True, 3),  # one wrong, so three right ones
        (0, 8, 4, True, 0),
        (8, 0, 4, True, 4),
        (1, 15, 4, False, 1),  # ceil(4/16)
        (9, 7, 4, False, 3),  # ceil(2.25)
        (15, 1, 4, False, 3),  # ceil(3.75) = 4, but one wrong one exists
        (16, 0, 4, False, 4),
        (0, 16, 4, False, 0),
        (1, 1, 4, False, 1),
    ],
)
def test_how_many_correct_rollouts_are_kept(correct, wrong, count, balanced, expected):
    assert num_positives(correct, wrong, count, balanced=balanced) == expected


@given(correct=st.integers(0, 20), wrong=st.integers(0, 20), count=st.integers(2, 8), balanced=st.booleans())
def test_as_many_are_kept_as_are_wanted_and_there(correct, wrong, count, balanced):
    right = num_positives(correct, wrong, count, balanced=balanced)
    assert 0 <= right <= correct
    assert right + min(wrong, count - right) == min(count, correct + wrong)


def subsample(name, batch, advantages=None, **slots):
    return rows(SUBSAMPLES[name](algorithm(subsample=name, **slots), batch, advantages))


def test_subsamples():
    batch = batch_of(REWARDS, group_ids=GROUPS)
    assert subsample("none", batch) == list(range(10))
    assert subsample("correct", batch) == [0, 3, 4, 5, 8]
    assert subsample("wrong", batch) == [1, 2, 6, 7]  # a row without a reward is neither
    assert subsample("balanced", batch, keep_per_group=2)[:2] in ([0, 1], [0, 2], [1, 3], [2, 3])
    advantages = torch.tensor([0.02, -0.02, 0.005, 0.0, 1, 0, 0, 0, 0, 0])
    assert subsample("advantage_floor", batch, advantages) == [0, 1, 4]
    assert subsample("advantage_floor", batch, advantages[:, None].repeat(1, 1)) == [0, 1, 4]


def test_a_pair_is_one_right_and_one_wrong_rollout_of_a_mixed_group():
    kept = subsample("pair", batch_of(REWARDS, group_ids=GROUPS))
    assert len(kept) == 4  # group 3's row without a reward counts as wrong
    assert sorted(REWARDS[row] for row in kept[:2]) == [0.0, 1.0]
    # The choice depends on seeds, which are random, not on the order of rows.
    batch = batch_of([1.0, 0.0, 1.0, 0.0])
    flipped = batch.select(torch.tensor([3, 2, 1, 0]))
    assert {3 - row for row in subsample("pair", flipped)} == set(subsample("pair", batch))


@pytest.mark.parametrize(("share", "num_right"), [(0.15, 2), (0.5, 10), (0.9, 30), (0.01, 1)])
def test_wrong_rollouts_are_all_kept_and_right_ones_up_to_a_share(share, num_right):
    batch = batch_of([1.0] * 30 + [0.0] * 10)  # 0.15 / 0.85 * 10 = 1.76
    kept = subsample("positive_share", batch, positive_share=share)
    assert sum(row < 30 for row in kept) == num_right
    assert sum(row >= 30 for row in kept) == 10
    assert len(subsample("positive_share", batch_of([1.0] * 4), positive_share=share)) == 4


def test_a_threshold_on_the_return_keeps_the_best_ones():
    batch = batch_of([0.1, 0.9, 0.5, 0.9, 0.2, NAN])
    assert subsample("return_threshold", batch, positive_share=0.3) == [1, 3]
    assert subsample("return_threshold", batch, positive_share=0.01) == [1, 3]
    assert subsample("return_threshold", batch_of([0.5] * 4), positive_share=0.3) == []
    # When most rollouts tie at the bottom, none of these is a success.
    assert subsample("return_threshold", batch_of([0.0] * 9 + [1.0]), positive_share=0.5) == [9]


@given(groups=st.lists(st.integers(-3, 3), min_size=1, max_size=12))
def test_groups_partition_the_rows(groups):
    parts = groups_of(torch.tensor(groups))
    assert sorted(int(row) for part in parts for row in part) == list(range(len(groups)))
    assert all(len({groups[row] for row in part}) == 1 for part in parts)


@given(rewards=st.lists(st.sampled_from([0.0, 1.0, NAN]), min_size=8, max_size=8), name=st.sampled_from(sorted(SUBSAMPLES)))
def test_a_subsample_follows_a_permutation_of_rollouts(rewards, name):
    batch = batch_of(rewards, group_ids=[0] * 4 + [1] * 4)
    order = torch.tensor([7, 0, 5, 2, 6, 1, 3, 4])
    advantages = batch.rewards.nan_to_num(0.0)
    config = algorithm(subsample=name)
    straight = SUBSAMPLES[name](config, batch, advantages)
    assert torch.equal(SUBSAMPLES[name](config, batch.select(order), advantages[order]), straight[order])
