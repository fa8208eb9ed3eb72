"""`mmrl.advantages` against the oracles of algorithms.md 12.1 (groups P0, P1, P2, C), vision.md 0.3 and robotics.md 4.13.

The documents' values have six digits, so they are compared to within 1e-6. Section numbers are those of algorithms.md.
"""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from mmrl.advantages import (
    CONSTANT_TOLERANCE,
    constant_groups,
    group_center_advantages,
    group_std_advantages,
    leave_one_out_advantages,
    progress_baseline_advantages,
)

P0 = [1.0, 0.0, 0.0, 1.0]
P1 = [1.0, 1.0, 1.0, 1.0]
P2 = [0.0, 0.0, 0.0, 1.0]
C = [0.9, 0.1, 0.5, 0.3]
NAN = float("nan")

ESTIMATORS = {
    "group_std": group_std_advantages,
    "group_center": group_center_advantages,
    "leave_one_out": leave_one_out_advantages,
}
every_estimator = pytest.mark.parametrize("estimator", ESTIMATORS.values(), ids=ESTIMATORS.keys())


def one_group(rewards):
    """Rewards of a single group and its ids."""
    return torch.tensor(rewards), torch.zeros(len(rewards), dtype=torch.long)


def assert_near(actual, expected, atol=1e-6):
    torch.testing.assert_close(actual, torch.as_tensor(expected, dtype=torch.float32), atol=atol, rtol=0, equal_nan=False)


# 12.1. For example P0: mean 1/2, squared deviations sum to 1, so the sample std is sqrt(1/3) = 0.577350 and the population's is
# 1/2; 0.5 / (0.577350 + 1e-4) = 0.865875 and 0.5 / (0.5 + 1e-8) = 1.000000.
@pytest.mark.parametrize(
    ("ddof", "eps", "rewards", "expected"),
    [
        (1, 1e-4, P0, [0.865875, -0.865875, -0.865875, 0.865875]),
        (1, 1e-4, P1, [0.0, 0.0, 0.0, 0.0]),
        (1, 1e-4, P2, [-0.499900, -0.499900, -0.499900, 1.499700]),
        (1, 1e-4, C, [1.317079, -1.024395, 0.146342, -0.439026]),
        (1, 1e-6, P0, [0.866024, -0.866024, -0.866024, 0.866024]),
        (1, 1e-6, P1, [0.0, 0.0, 0.0, 0.0]),
        (1, 1e-6, P2, [-0.499999, -0.499999, -0.499999, 1.499997]),
        (1, 1e-6, C, [1.317461, -1.024692, 0.146385, -0.439154]),
        (0, 1e-8, P0, [1.0, -1.0, -1.0, 1.0]),
        (0, 1e-8, P1, [0.0, 0.0, 0.0, 0.0]),
        (0, 1e-8, P2, [-0.577350, -0.577350, -0.577350, 1.732051]),
        (0, 1e-8, C, [1.521278, -1.183216, 0.169031, -0.507093]),
        # vision.md 0.3: ddof 0 and ddof 1 are not interchangeable in a group of four.
        (0, 1e-4, [1.0, 0.0, 0.0, 0.0], [1.731651, -0.577217, -0.577217, -0.577217]),
        (1, 1e-4, [1.0, 0.0, 0.0, 0.0], [1.4997, -0.4999, -0.4999, -0.4999]),
        # robotics.md F1: mean 1/4, squared deviations 2 * 9/16 + 6 / 16 = 1.5, sample std sqrt(1.5 / 7) = 0.462910.
        (1, 1e-6, [1.0] * 2 + [0.0] * 6, [1.620182] * 2 + [-0.540061] * 6),
        (0, 1e-8, [1.0] * 2 + [0.0] * 6, [1.732051] * 2 + [-0.577350] * 6),
        # 12.1, sum then normalize: rewards 1, 0, 0, 1 plus half of 1, 1, 0, 1, and 0, 0, 0, 1 plus half of 1, 0, 1, 1.
        (1, 1e-4, [1.5, 0.5, 0.0, 1.5], [0.833222, -0.499933, -1.166511, 0.833222]),
        (1, 1e-4, [0.5, 0.0, 0.5, 1.5], [-0.198648, -0.993241, -0.198648, 1.390538]),
        # 2.2 and 12.1: with two reward values the z-score does not see how bad the bad one is, but for eps.
        (1, 1e-6, [1.0, 1.0, 1.0, -1.0], [0.5, 0.5, 0.5, -1.499999]),
        (1, 1e-6, [1.0, 1.0, 1.0, -2.0], [0.5, 0.5, 0.5, -1.499999]),
        (1, 1e-6, [1.0, 1.0, 1.0, -0.5], [0.5, 0.5, 0.5, -1.499998]),
    ],
)
def test_group_std_matches_the_oracles(ddof, eps, rewards, expected):
    assert_near(group_std_advantages(*one_group(rewards), ddof=ddof, eps=eps), expected)


def test_group_std_defaults_to_the_sample_deviation_and_eps_1e_6():
    # 12.1, row "GRPO ddof1 eps 1e-6".
    assert_near(group_std_advantages(*one_group(P0)), [0.866024, -0.866024, -0.866024, 0.866024])


@pytest.mark.parametrize(
    ("rewards", "expected"),
    [
        (P0, [0.5, -0.5, -0.5, 0.5]),
        (P1, [0.0, 0.0, 0.0, 0.0]),
        (P2, [-0.25, -0.25, -0.25, 0.75]),
        (C, [0.45, -0.35, 0.05, -0.15]),
        # Weighted GRPO, 12.1: unlike the z-score, centering does see the size of the penalty.
        ([1.0, 1.0, 1.0, -1.0], [0.5, 0.5, 0.5, -1.5]),
        ([1.0, 1.0, 1.0, -2.0], [0.75, 0.75, 0.75, -2.25]),
        # Reinforce-Ada, 12.1: a pool of 16 with 2 positives has mean 0.125.
        ([1.0] * 2 + [0.0] * 14, [0.875] * 2 + [-0.125] * 14),
    ],
)
def test_group_center_matches_the_oracles(rewards, expected):
    assert_near(group_center_advantages(*one_group(rewards)), expected)


@pytest.mark.parametrize(
    ("rewards", "expected"),
    [
        (P0, [0.666667, -0.666667, -0.666667, 0.666667]),  # also robotics.md F8: 1 - 1/3 and 0 - 2/3
        (P1, [0.0, 0.0, 0.0, 0.0]),
        (P2, [-0.333333, -0.333333, -0.333333, 1.0]),
        (C, [0.6, -0.466667, 0.066667, -0.2]),
        # LOOP, 12.1.
        ([1.0, 0.0, 0.0, 1.0, 0.5, 0.0], [0.7, -0.5, -0.5, 0.7, 0.1, -0.5]),
        # OREAL, 12.1: 1 - 3/15 = 0.8 and 0 - 4/15; wrong rewards of -1 instead of 0 double both.
        ([1.0] * 4 + [0.0] * 12, [0.8] * 4 + [-0.266667] * 12),
        ([1.0] * 4 + [-1.0] * 12, [1.6] * 4 + [-0.533333] * 12),
    ],
)
def test_leave_one_out_matches_the_oracles(rewards, expected):
    assert_near(leave_one_out_advantages(*one_group(rewards)), expected)


@every_estimator
@pytest.mark.parametrize(
    "rewards",
    [
        torch.full((12,), 0.7),  # their float32 mean is not 0.7
        torch.full((8,), 0.1),  # section 11: the plain float32 formula gives -0.83 at eps 1e-9
        torch.full((12,), 0.7, dtype=torch.float64),
        torch.nextafter(torch.full((4,), 0.7), torch.tensor([0.7, 0.7, 1.0, 1.0])),  # equal but for the last bit
    ],
    ids=["twelve_0.7", "eight_0.1", "float64", "last_bit"],
)
def test_a_group_of_equal_rewards_has_advantage_exactly_zero(estimator, rewards):
    tiny = {"eps": 1e-12} if estimator is group_std_advantages else {}
    advantages = estimator(rewards, torch.zeros(len(rewards), dtype=torch.long), **tiny)
    assert advantages.tolist() == [0.0] * len(rewards)


def test_a_spread_above_the_tolerance_is_a_signal():
    # 0 and twice the tolerance: centered +-1e-6, population std 1e-6, z-score +-1.
    rewards, ids = one_group([0.0, 2 * CONSTANT_TOLERANCE])
    assert_near(group_std_advantages(rewards, ids, ddof=0, eps=0.0), [-1.0, 1.0])
    assert not constant_groups(rewards, ids).any()


def test_rewards_far_from_zero_keep_their_differences():
    # Mean 2^24 - 2. Their sum, 50331642, is no float32; rounding it moves the mean by 2/3.
    rewards, ids = one_group([2.0**24, 2.0**24 - 2, 2.0**24 - 4])
    assert group_center_advantages(rewards, ids).tolist() == [2.0, 0.0, -2.0]


@every_estimator
def test_a_group_of_one_has_advantage_zero(estimator):
    # Ids 0 and 1 with one rollout each: nothing to compare with, whatever the reward.
    assert estimator(torch.tensor([5.0, -3.0]), torch.tensor([0, 1])).tolist() == [0.0, 0.0]


# One batch with everything in it: ids interleaved, negative and not dense, sizes 4, 2 and 1.
INTERLEAVED_IDS = torch.tensor([7, -2, 7, 40, 7, -2, 7])
INTERLEAVED_REWARDS = torch.tensor([1.0, 3.0, 0.0, 9.0, 0.0, 1.0, 1.0])


@pytest.mark.parametrize(
    ("estimator", "expected"),
    [
        # Group 7 is P0; group -2 is [3, 1]: mean 2, sample std sqrt(2), 1 / (1.414214 + 1e-6) = 0.707106; group 40 is alone.
        (group_std_advantages, [0.866024, 0.707106, -0.866024, 0.0, -0.866024, -0.707106, 0.866024]),
        (group_center_advantages, [0.5, 1.0, -0.5, 0.0, -0.5, -1.0, 0.5]),
        # 4/3 of the centered value in the group of four, twice in the group of two.
        (leave_one_out_advantages, [0.666667, 2.0, -0.666667, 0.0, -0.666667, -2.0, 0.666667]),
    ],
)
def test_groups_may_be_interleaved_and_differ_in_size(estimator, expected):
    assert_near(estimator(INTERLEAVED_REWARDS, INTERLEAVED_IDS), expected)


@pytest.mark.parametrize(
    ("estimator", "p0"),
    [(group_std_advantages, 0.866024), (group_center_advantages, 0.5), (leave_one_out_advantages, 0.666667)],
)
def test_a_nan_reward_is_left_out_of_the_statistics_and_gets_zero(estimator, p0):
    # P0 with two NaN rows in between still has four members, so the values are those of P0.
    rewards, ids = one_group([1.0, NAN, 0.0, 0.0, NAN, 1.0])
    assert_near(estimator(rewards, ids), [p0, 0.0, -p0, -p0, 0.0, p0])


@every_estimator
def test_a_group_with_one_reward_or_none_besides_nan_has_advantage_zero(estimator):
    rewards = torch.tensor([NAN, 4.0, NAN, NAN])
    assert estimator(rewards, torch.tensor([0, 0, 1, 1])).tolist() == [0.0] * 4


def test_constant_groups_marks_whole_groups_and_ignores_nan():
    # Group 0 varies (also where its NaN is), 1 and 2 are constant besides their NaN, 3 is alone, 4 is all NaN.
    values = torch.tensor([1.0, 0.0, NAN, 2.0, 2.0, NAN, -2.0, -2.0, NAN, 3.0, NAN])
    ids = torch.tensor([0, 0, 0, 1, 1, 1, 2, 2, 2, 3, 4])
    assert constant_groups(values, ids).tolist() == [False] * 3 + [True] * 8


@every_estimator
def test_advantages_are_float32_and_do_not_write_to_the_rewards(estimator):
    rewards = torch.tensor([1.0, NAN, 0.0], dtype=torch.float64)
    before = rewards.clone()
    assert estimator(rewards, torch.zeros(3, dtype=torch.long)).dtype == torch.float32
    torch.testing.assert_close(rewards, before, equal_nan=True)


@every_estimator
def test_an_empty_batch_has_no_advantages(estimator):
    assert estimator(torch.zeros(0), torch.zeros(0, dtype=torch.long)).shape == (0,)


@every_estimator
@pytest.mark.parametrize(("rewards", "ids"), [((2, 2), (2, 2)), ((4,), (3,))])
def test_rewards_that_are_not_one_per_rollout_are_refused_with_both_shapes(estimator, rewards, ids):
    with pytest.raises(ValueError, match=r"rewards \(.*\) and group_ids \(.*\) must both be \[N\]") as error:
        estimator(torch.zeros(rewards), torch.zeros(ids, dtype=torch.long))
    assert str(rewards) in str(error.value) and str(ids) in str(error.value)


quarters = st.integers(-8, 8).map(lambda k: k / 4)  # exact in float32, so adding 3 loses nothing


@st.composite
def batches(draw):
    """``(rewards, group_ids)`` of up to four groups of one to five rollouts, in any order."""
    groups = draw(st.lists(st.lists(quarters, min_size=1, max_size=5), min_size=1, max_size=4))
    labels = draw(st.lists(st.integers(-50, 50), min_size=len(groups), max_size=len(groups), unique=True))
    rows = [(reward, label) for group, label in zip(groups, labels) for reward in group]
    rows = draw(st.permutations(rows))
    return torch.tensor([reward for reward, _ in rows]), torch.tensor([label for _, label in rows])


every_estimator_drawn = st.sampled_from(sorted(ESTIMATORS)).map(ESTIMATORS.get)


@given(batch=batches(), estimator=every_estimator_drawn)
def test_advantages_sum_to_zero_in_every_group(batch, estimator):
    rewards, ids = batch
    advantages = estimator(rewards, ids)
    for label in ids.unique():
        assert advantages[ids == label].sum().item() == pytest.approx(0.0, abs=2e-6)


@given(batch=batches(), estimator=every_estimator_drawn, shift=quarters)
def test_adding_a_constant_to_a_group_changes_nothing(batch, estimator, shift):
    rewards, ids = batch
    shifted = torch.where(ids == ids[0], rewards + shift, rewards)
    assert_near(estimator(shifted, ids), estimator(rewards, ids))


@given(batch=batches(), scale=st.sampled_from([0.5, 3.0, 64.0]))
def test_scaling_rewards_scales_centered_and_leave_one_out_advantages(batch, scale):
    rewards, ids = batch
    for estimator in (group_center_advantages, leave_one_out_advantages):
        torch.testing.assert_close(estimator(rewards * scale, ids), estimator(rewards, ids) * scale, atol=1e-6, rtol=1e-6)


@given(batch=batches(), scale=st.sampled_from([0.5, 3.0, 64.0]), ddof=st.sampled_from([0, 1]))
def test_scaling_rewards_leaves_group_std_advantages_alone_but_for_eps(batch, scale, ddof):
    rewards, ids = batch
    exact = group_std_advantages(rewards, ids, ddof=ddof, eps=0.0)
    assert_near(group_std_advantages(rewards * scale, ids, ddof=ddof, eps=0.0), exact)
    # (k r) / (k s + k eps) = r / (s + eps)
    scaled = group_std_advantages(rewards * scale, ids, ddof=ddof, eps=1e-2 * scale)
    assert_near(scaled, group_std_advantages(rewards, ids, ddof=ddof, eps=1e-2))


@given(batch=batches(), estimator=every_estimator_drawn, data=st.data())
def test_permuting_rollouts_permutes_advantages(batch, estimator, data):
    rewards, ids = batch
    order = torch.tensor(data.draw(st.permutations(range(len(rewards)))))
    assert_near(estimator(rewards[order], ids[order]), estimator(rewards, ids)[order])


@given(batch=batches())
def test_leave_one_out_is_the_centered_reward_times_g_over_g_minus_1(batch):
    rewards, ids = batch
    size = (ids[:, None] == ids).sum(dim=1)
    factor = torch.where(size > 1, size / (size - 1).clamp(min=1), 0.0)
    assert_near(leave_one_out_advantages(rewards, ids), group_center_advantages(rewards, ids) * factor)


@given(batch=batches(), estimator=every_estimator_drawn)
def test_other_groups_never_matter(batch, estimator):
    rewards, ids = batch
    together = estimator(rewards, ids)
    for label in ids.unique():
        group = ids == label
        assert_near(together[group], estimator(rewards[group], ids[group]))


@given(batch=batches(), estimator=every_estimator_drawn, data=st.data())
def test_nan_rows_can_be_removed_without_changing_the_rest(batch, estimator, data):
    rewards, ids = batch
    missing = torch.tensor(data.draw(st.lists(st.booleans(), min_size=len(rewards), max_size=len(rewards))))
    advantages = estimator(rewards.masked_fill(missing, NAN), ids)
    assert_near(advantages[~missing], estimator(rewards[~missing], ids[~missing]))
    assert not advantages[missing].any()


def _episodes(num_groups=30, size=4, width=12, seed=0):
    """Episodes whose reward depends on what was done by the end, with lengths of their own."""
    generator = torch.Generator().manual_seed(seed)
    num = num_groups * size
    lengths = torch.randint(4, width + 1, (num,), generator=generator)
    mask = torch.arange(width) < lengths[:, None]
    progress = torch.rand(num, width, generator=generator)  # rises and falls
    return mask, progress, torch.arange(num_groups).repeat_interleave(size), generator


def test_a_progress_baseline_leaves_nothing_of_rewards_that_the_state_foretold():
    mask, _, group_ids, generator = _episodes()
    rewards = torch.rand(len(mask), generator=generator)
    progress = rewards[:, None].expand(mask.shape)
    domains = torch.zeros(len(mask), dtype=torch.int64)
    credit = progress_baseline_advantages(rewards, group_ids, domains, mask, progress)
    assert credit.abs().max() < 0.05  # the ridge leaves a trace
    assert group_center_advantages(rewards, group_ids).abs().max() > 0.3


def test_a_progress_baseline_is_the_residual_of_a_ridge_regression():
    mask, progress, group_ids, generator = _episodes(num_groups=6)
    rewards = torch.rand(len(mask), generator=generator)
    credit = progress_baseline_advantages(rewards, group_ids, torch.zeros(len(mask), dtype=torch.int64), mask, progress)
    rows, targets = [], []
    for i in range(len(mask)):
        mates = float(rewards[(group_ids == group_ids[i])].sum() - rewards[i]) / 3
        for t in range(int(mask[i].sum())):
            done, best, time = float(progress[i, t]), float(progress[i, : t + 1].max()), t / 11
            rows.append([1, mates, done, done**2, best, time, time**2, time * done, mates * done, mates * time])
            targets.append(float(rewards[i]))
    x, y = np.array(rows), np.array(targets)
    expected = y - x @ np.linalg.solve(x.T @ x + np.eye(10), x.T @ y)
    np.testing.assert_allclose(credit[mask].numpy(), expected, atol=1e-5)
    assert (credit[~mask] == 0).all()


def test_a_progress_baseline_fits_domains_apart_and_ignores_masked_numbers():
    mask, progress, group_ids, generator = _episodes(num_groups=8)
    rewards = torch.rand(len(mask), generator=generator)
    domains = (group_ids >= 4).long()
    credit = progress_baseline_advantages(rewards, group_ids, domains, mask, progress)
    half = domains == 0
    alone = progress_baseline_advantages(rewards[half], group_ids[half], domains[half], mask[half], progress[half])
    torch.testing.assert_close(credit[half], alone)
    spoiled = progress.masked_fill(~mask, torch.nan)
    torch.testing.assert_close(progress_baseline_advantages(rewards, group_ids, domains, mask, spoiled), credit)


def test_a_progress_baseline_gives_rows_without_a_reward_nothing_and_constant_groups_something():
    mask, progress, group_ids, generator = _episodes(num_groups=4)
    rewards = torch.rand(len(mask), generator=generator)
    rewards[:4], rewards[5] = 1.0, torch.nan
    credit = progress_baseline_advantages(rewards, group_ids, torch.zeros_like(group_ids), mask, progress)
    assert (credit[5] == 0).all()
    assert credit[0].abs().sum() > 0 and credit[6].abs().sum() > 0
