"""`mmrl.recipe`: a config's choices, worked by hand on two rows of two decisions."""

from math import exp, log

import pytest
import torch

from mmrl import recipe
from mmrl.algorithms import PRESETS
from mmrl.config import AlgorithmConfig
from mmrl.testing import BanditAdapter
from mmrl.types import Forward, RolloutBatch

NAN = float("nan")
OLD = torch.tensor([[-1.0, -2.0], [-0.5, 0.0]])
MASK = torch.tensor([[True, True], [True, False]])
# Ratios e^0.5 = 1.65 and e^-0.5 = 0.61 in the first row, e^-1 = 0.37 in the second.
NEW = torch.tensor([[-0.5, -2.5], [-1.5, 9.0]])
REFERENCE = torch.tensor([[-1.0, -2.0], [-1.5, 7.0]])


def algorithm(name="grpo", **slots):
    return AlgorithmConfig(**{**PRESETS[name].slots, **slots, "name": name})


def batch_of(rewards=(0.0, 1.0), group_ids=(0, 0), stop_reasons=None, **terms):
    """Rows with `OLD` and `MASK`; the bandit supplies what the recipe does not look at."""
    num = len(rewards)
    adapter = BanditAdapter()
    rows = adapter.rollout(adapter.build_policy(), adapter.task_source("train")[:num], group_size=1, seeds=torch.arange(num))
    return RolloutBatch(
        tasks=rows.tasks, group_ids=torch.tensor(group_ids), seeds=rows.seeds, outcomes=rows.outcomes, inputs=rows.inputs,
        old_log_probs=OLD if num == 2 else torch.zeros(num, 1), loss_mask=MASK if num == 2 else torch.ones(num, 1).bool(),
        stop_reasons=stop_reasons or ("stop",) * num, rewards=torch.tensor(rewards),
        reward_terms={name: torch.tensor(values) for name, values in terms.items()},
    )  # fmt: skip


def losses_of(config, *, new=NEW, advantages=(1.0, -1.0), reference=None, entropy=None):
    forward = Forward(log_probs=new, entropy=entropy)
    return recipe.decision_losses(config, forward, OLD, MASK, torch.tensor(advantages), reference)


def assert_near(actual, expected):
    torch.testing.assert_close(actual, torch.as_tensor(expected, dtype=torch.float32), atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize(("kl_coef", "entropy_coef"), [(0.0, 0.0), (0.1, 0.0), (0.0, 0.1)])
def test_only_what_a_coefficient_needs_is_computed(kl_coef, entropy_coef):
    config = algorithm(kl_coef=kl_coef, entropy_coef=entropy_coef)
    assert recipe.needs_reference(config) == (kl_coef > 0)
    assert recipe.forward_needs(config) == ({"entropy"} if entropy_coef > 0 else set())


def test_truncated_rollouts_lose_their_mask_only_when_asked():
    batch = batch_of(stop_reasons=("length", "timeout"))
    assert torch.equal(recipe.effective_mask(algorithm(), batch), MASK)
    assert recipe.effective_mask(algorithm(mask_truncated=True), batch).tolist() == [[False, False], [True, False]]


@pytest.mark.parametrize(
    ("slots", "expected"),
    [
        # Rewards 0 and 1: mean 1/2, sample deviation sqrt(1/2), population deviation 1/2.
        ({"advantage": "group_std", "advantage_eps": 0.0}, [-(0.5**0.5), 0.5**0.5]),
        ({"advantage": "group_std", "advantage_eps": 0.0, "advantage_ddof": 0}, [-1.0, 1.0]),
        ({"advantage": "group_std", "advantage_eps": 0.5, "advantage_ddof": 0}, [-0.5, 0.5]),
        ({"advantage": "group_center"}, [-0.5, 0.5]),
        ({"advantage": "leave_one_out"}, [-1.0, 1.0]),
        ({"advantage": "ones"}, [1.0, 1.0]),
    ],
)
def test_each_advantage_is_its_formula(slots, expected):
    assert_near(recipe.compute_advantages(algorithm(**slots), batch_of(), None), expected)


def test_a_row_without_reward_is_left_out_of_its_group():
    batch = batch_of(rewards=(0.0, 1.0, NAN), group_ids=(0, 0, 0))
    assert_near(recipe.compute_advantages(algorithm(advantage="group_center"), batch, None), [-0.5, 0.5, 0.0])


def test_a_kl_in_the_reward_is_subtracted_before_the_advantage():
    config = algorithm("rloo", kl_coef=0.1)
    # Differences old - reference: 0 and 0 in the first row; 1 in the second. Rewards become 0 and 1 - 0.1.
    assert_near(recipe.compute_advantages(config, batch_of(), REFERENCE), [-0.9, 0.9])
    assert_near(recipe.compute_advantages(algorithm("rloo", kl_coef=0.1, kl_in="loss"), batch_of(), REFERENCE), [-1.0, 1.0])


def test_informative_rows_are_those_of_groups_that_vary():
    batch = batch_of(rewards=(1.0, 1.0, 0.0, 1.0), group_ids=(3, 3, 5, 5), second=(0.0, 1.0, 2.0, 2.0))
    assert recipe.informative_rows(algorithm(), batch).tolist() == [False, False, True, True]
    assert recipe.informative_rows(algorithm(selection_metric="second"), batch).tolist() == [True, True, False, False]
    assert recipe.informative_rows(algorithm("sft"), batch).all()


def test_the_clipped_surrogate_and_the_fractions_that_are_logged():
    result = losses_of(algorithm())
    # A = 1: e^0.5 is clipped to 1.2, e^-0.5 is the smaller one. A = -1: e^-1 is clipped to 0.8.
    assert_near(result.losses[MASK], [-1.2, -exp(-0.5), 0.8])
    assert {name: int(value) for name, value in result.sums.items()} == {"ratio/clip_low": 1, "ratio/clip_high": 1}
    assert result.max_log_ratio.item() == 1.0
    unclipped = losses_of(algorithm(clip_low=0.7, clip_high=1.0))
    assert_near(unclipped.losses[MASK], [-exp(0.5), -exp(-0.5), exp(-1)])
    assert {int(value) for value in unclipped.sums.values()} == {0}


def test_a_fraction_counts_decisions_whose_gradient_the_clip_removes():
    # Ratios 1.65, 0.61 and 0.37: a good rollout stops at the upper bound only, a bad one at the lower bound only.
    good, bad = losses_of(algorithm(), advantages=(1.0, 1.0)), losses_of(algorithm(), advantages=(-1.0, -1.0))
    assert {name: int(value) for name, value in good.sums.items()} == {"ratio/clip_low": 0, "ratio/clip_high": 1}
    assert {name: int(value) for name, value in bad.sums.items()} == {"ratio/clip_low": 2, "ratio/clip_high": 0}
    assert_near(good.losses[MASK], [-1.2, -exp(-0.5), -exp(-1)])
    assert_near(bad.losses[MASK], [exp(0.5), 0.8, 0.8])


def test_clip_higher_moves_the_upper_bound_only():
    result = losses_of(algorithm("dapo"), advantages=(1.0, -1.0))
    assert_near(result.losses[MASK], [-1.28, -exp(-0.5), 0.8])


def test_the_sequence_ratio_is_the_geometric_mean():
    result = losses_of(algorithm("gspo", clip_low=0.9, clip_high=9.0))
    assert_near(result.losses[MASK], [-1.0, -1.0, exp(-1)])  # (0.5 - 0.5) / 2 = 0, and -1


def test_dual_clip_bounds_the_loss_of_a_bad_rollout():
    far = torch.tensor([[3.0, -2.0], [4.5, 0.0]])  # ratios e^4 and e^5
    assert losses_of(algorithm(), new=far).losses[1, 0].item() == pytest.approx(exp(5))
    assert losses_of(algorithm(dual_clip=3.0), new=far).losses[1, 0].item() == pytest.approx(3.0)


def test_the_plain_policy_gradient_has_no_ratio():
    result = losses_of(algorithm("sft"))
    assert_near(result.losses[MASK], [0.5, 2.5, -1.5])
    assert result.sums == {}


@pytest.mark.parametrize(
    ("estimator", "expected"),
    [
        # d = new - reference: 0.5, -0.5, 0.
        ("k1", [0.5, -0.5, 0.0]),
        ("k2", [0.125, 0.125, 0.0]),
        ("k3", [exp(-0.5) - 0.5, exp(0.5) - 1.5, 0.0]),
    ],
)
def test_a_kl_in_the_loss_is_added_per_decision_and_logged(estimator, expected):
    plain = losses_of(algorithm()).losses
    result = losses_of(algorithm(kl=estimator, kl_coef=2.0), reference=REFERENCE)
    assert_near((result.losses - plain)[MASK], [2 * value for value in expected])
    assert result.sums["kl"].item() == pytest.approx(sum(expected))
    in_reward = losses_of(algorithm(kl=estimator, kl_coef=2.0, kl_in="reward"), reference=REFERENCE)
    assert_near(in_reward.losses[MASK], plain[MASK])
    assert in_reward.sums["kl"].item() == pytest.approx(sum(expected))


def test_the_entropy_bonus_lowers_the_loss():
    entropy = torch.tensor([[log(2), log(4)], [1.0, NAN]])
    change = losses_of(algorithm(entropy_coef=0.5), entropy=entropy).losses - losses_of(algorithm()).losses
    assert_near(change[MASK], [-0.5 * log(2), -0.5 * log(4), -0.5])
    assert change.isfinite().all()


def test_masked_positions_may_hold_anything():
    junk = NEW.masked_fill(~MASK, NAN)
    result = losses_of(algorithm(kl_coef=0.1), new=junk, reference=REFERENCE.masked_fill(~MASK, NAN))
    assert result.losses.isfinite().all()
    assert all(value.isfinite() for value in result.sums.values())
    assert result.max_log_ratio.isfinite()


def test_every_preset_and_every_advantage_is_known():
    assert {AlgorithmConfig(**preset.slots, name=name).advantage for name, preset in PRESETS.items()} == (
        # the first needs tasks that measure work; the second weighs any recipe's rollouts as a best-of-n user would see them
        set(recipe.ADVANTAGES) - {"progress_baseline", "best_of_n"}
    )
