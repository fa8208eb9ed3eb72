"""The recipes by name against the oracles of algorithms.md: advantages of 12.1, the token-level batch of 12.3, recipes of 12.4.

The documents' values have six digits, so they are compared to within 1e-6. Presets are given the constants of the document
where these differ from their own (a coefficient of the KL term, an eps, a horizon). Section numbers are those of algorithms.md.
"""

import math
from dataclasses import replace

import pytest
import torch
from accelerate import Accelerator
from torch import nn

from mmrl import losses, recipe
from mmrl.advantages import generalized_advantages, token_score_weights, whiten_decisions
from mmrl.algorithms import PRESETS
from mmrl.collection import Collected
from mmrl.config import AlgorithmConfig
from mmrl.selection import SUBSAMPLES
from mmrl.testing import BanditAdapter
from mmrl.types import Forward, RolloutBatch
from mmrl.update import Updater

NAN = float("nan")
LENGTHS = [3, 2, 4, 1]
MASK = torch.tensor([[column < length for column in range(4)] for length in LENGTHS])


def padded(rows, filler=NAN):
    return torch.tensor([row + [filler] * (4 - len(row)) for row in rows])


LOG_PROBS = padded([[-0.4, -1.3, -0.2], [-0.8, -0.9], [-0.3, -1.2, -1.4, -0.4], [-1.0]])
OLD = padded([[-0.5, -1.0, -0.2], [-1.2, -0.7], [-0.3, -2.0, -0.9, -0.4], [-1.5]])
REFERENCE = padded([[-0.6, -1.1, -0.25], [-1.0, -0.8], [-0.35, -1.8, -1.0, -0.5], [-1.6]])
SAMPLER = padded([[-0.55, -0.9, -0.2], [-1.25, -0.6], [-0.3, -2.9, -0.8, -0.45], [-1.45]])
HAND_SET = torch.tensor([1.0, -1.0, -0.5, 2.0])

P0, P1, P2 = [1.0, 0.0, 0.0, 1.0], [1.0, 1.0, 1.0, 1.0], [0.0, 0.0, 0.0, 1.0]


def algorithm(name="grpo", **slots):
    return AlgorithmConfig(**{**PRESETS[name].slots, **slots, "name": name})


def batch_of(rewards, *, lengths=None, group_ids=None, mask=None, old=None, sampler=None, stop_reasons=None, **terms):
    """Rows of any rewards; the bandit supplies what a recipe does not look at."""
    num = len(rewards)
    adapter = BanditAdapter()
    tasks = (adapter.task_source("train") * 2)[:num]
    rows = adapter.rollout(adapter.build_policy(), tasks, group_size=1, seeds=torch.arange(num))
    if mask is None:
        lengths = lengths or [1] * num
        mask = torch.arange(max(lengths)) < torch.tensor(lengths)[:, None]
    return RolloutBatch(
        tasks=rows.tasks, group_ids=torch.zeros(num).long() if group_ids is None else torch.tensor(group_ids), seeds=rows.seeds,
        outcomes=rows.outcomes, inputs=rows.inputs, loss_mask=mask,
        old_log_probs=torch.zeros(mask.shape) if old is None else old,
        stop_reasons=stop_reasons or ("stop",) * num, rewards=torch.tensor(rewards), sampler_log_probs=sampler,
        reward_terms={name: torch.tensor(values) for name, values in terms.items()},
    )  # fmt: skip


ORACLE = batch_of(P0, mask=MASK, old=OLD, sampler=SAMPLER)


def assert_near(actual, expected, atol=1e-6):
    expected = torch.as_tensor(expected, dtype=torch.float32)
    torch.testing.assert_close(actual.detach().float(), expected, atol=atol, rtol=0, equal_nan=False)


def credit(config, batch, **options):
    return recipe.compute_advantages(config, batch, None, **options)


# ---- 12.1: advantages ---------------------------------------------------------------------------------------------------

THREE = {"rewards": [*P0, *P1, *P2], "group_ids": [0] * 4 + [1] * 4 + [2] * 4}


@pytest.mark.parametrize(
    ("slots", "expected"),
    [
        # The sample deviation of all twelve raw rewards is 0.514929.
        ({"advantage": "batch_std", "advantage_eps": 1e-4}, [0.970820, 0, -0.485410, 1.456230]),
        # Seven of twelve rewards are not zero: 12/7.
        ({"advantage": "gpg"}, [0.857143, 0, -0.428571, 1.285714]),
        # p = 1/2, 1, 1/4; alpha = 1.129630, beta = 1.092593; weights 0.938332, capped, 0.988721.
        ({"advantage": "beta_normalized"}, [0.469166, 0, -0.247180, 0.741541]),
    ],
)
def test_advantages_with_batch_statistics(slots, expected):
    first, second, low, high = expected
    assert_near(
        credit(algorithm(**slots), batch_of(**THREE)),
        [first, -first, -first, first, *[second] * 4, low, low, low, high],
    )


def test_bnpo_of_the_second_batch():
    rewards = [1.0, 0, 0, 0, 1, 1, 0, 0, 1, 1, 1, 0, 0, 1, 0, 1]
    batch = batch_of(rewards, group_ids=[i // 4 for i in range(16)])
    advantages = credit(algorithm("bnpo"), batch)
    assert_near(advantages[:8], [0.667379, -0.222460, -0.222460, -0.222460, 0.350079, 0.350079, -0.350079, -0.350079])
    assert_near(advantages[8:12], [0.222460, 0.222460, 0.222460, -0.667379])


@pytest.mark.parametrize(
    "rewards", [[1.0, 0.0, 0.0, 1.0], [1.0, 0.0, 1.0, 0.0] * 2], ids=["one group", "groups of equal success"]
)
def test_bnpo_without_a_spread_of_success_is_centering(rewards):
    # Section 2.1: with one group, or v = 0, alpha = beta = 1.
    batch = batch_of(rewards, group_ids=[i // 4 for i in range(len(rewards))])
    assert_near(credit(algorithm("bnpo"), batch), credit(algorithm("dr_grpo"), batch))


def test_the_length_weighted_baseline():
    assert_near(credit(algorithm("opo"), batch_of(P0, lengths=LENGTHS)), [0.6, -0.4, -0.4, 0.6])


TOKENS_22 = {"rewards": [*P0, *P2], "lengths": [3, 2, 4, 1, 2, 2, 3, 5], "group_ids": [0] * 4 + [1] * 4}


def test_reinforce_pp_whitens_over_decisions():
    batch = batch_of(**TOKENS_22)
    advantages = credit(algorithm("reinforce_pp", kl_coef=0.0), batch)
    expected = torch.where(batch.rewards > 0, 1.174218, -0.812920)
    assert_near(advantages[batch.loss_mask], expected[:, None].expand(advantages.shape)[batch.loss_mask])
    assert advantages[~batch.loss_mask].tolist() == [0.0] * int((~batch.loss_mask).sum())


def test_reinforce_pp_baseline_whitens_centered_rewards():
    batch = batch_of(**TOKENS_22)
    advantages = credit(algorithm("reinforce_pp_baseline"), batch)
    assert_near(advantages[:, 0], [0.872120, -1.046544, -1.046544, 0.872120, -0.566878, -0.566878, -0.566878, 1.351787])


@pytest.mark.parametrize(("discount", "expected"), [(1.0, [0.975, 0.985, 0.995]), (0.9, [0.786950, 0.885500, 0.995000])])
def test_reward_to_go_with_a_kl_in_the_reward(discount, expected):
    old = torch.tensor([[-0.5, -1.0, -0.2]])
    batch = batch_of([1.0], lengths=[3], old=old)
    config = algorithm("reinforce_pp", kl_coef=0.1, discount=discount)
    inputs = recipe.credit_inputs(config, batch, torch.tensor([[-0.6, -1.1, -0.25]]))
    assert_near(inputs.decision_rewards(), [[-0.01, -0.01, 0.995]])
    assert_near(recipe.adv.reward_to_go(inputs.decision_rewards(), inputs.mask, discount=discount), [expected])


def test_gdpo_normalises_every_term_and_then_the_sum():
    one, two = [*P0, *P2], [1.0, 1, 0, 1, 1, 0, 1, 1]
    batch = batch_of([a + b / 2 for a, b in zip(one, two)], group_ids=[0] * 4 + [1] * 4, one=one, two=two)
    weights = {"one": 1.0, "two": 0.5}
    assert_near(
        credit(algorithm("gdpo"), batch, weights=weights),
        [0.923019, -0.509498, -1.336539, 0.923019, -0.206760, -1.033802, -0.206760, 1.447323],
    )
    assert_near(
        credit(algorithm(advantage_eps=1e-4), batch, weights=weights),
        [0.833222, -0.499933, -1.166511, 0.833222, -0.198648, -0.993241, -0.198648, 1.390538],
    )


def test_weighted_grpo_weighs_after_normalisation_and_a_mapped_reward_only_when_centered():
    batch = batch_of([1.0, 1.0, 1.0, 0.0])
    assert_near(credit(algorithm("weighted_grpo"), batch), [0.499999, 0.499999, 0.499999, -2 * 1.499997], atol=2e-6)
    for wrong, expected in ((-1.0, [0.5, 0.5, 0.5, -1.5]), (-2.0, [0.75, 0.75, 0.75, -2.25])):
        config = algorithm("dr_grpo", shaping=({"name": "outcome", "wrong": wrong},))
        rewards = recipe.shape_rewards(config, batch, limit=1)
        assert rewards.tolist() == [1.0, 1.0, 1.0, wrong]
        assert_near(credit(config, replace(batch, rewards=rewards)), expected)


@pytest.mark.parametrize(("wrong", "last"), [(-1.0, -1.499999), (-2.0, -1.499999), (-0.5, -1.499998)])
def test_a_z_score_undoes_the_weight_of_a_wrong_rollout(wrong, last):
    config = algorithm(shaping=({"name": "outcome", "wrong": wrong},))
    batch = batch_of([1.0, 1.0, 1.0, 0.0])
    shaped = replace(batch, rewards=recipe.shape_rewards(config, batch, limit=1))
    assert_near(credit(config, shaped), [0.5, 0.5, 0.5, last], atol=2e-6)


@pytest.mark.parametrize(("correct", "total", "baseline", "share"), [(4, 8, 0.2, 0.4), (3, 10, -0.5, 0.5625)])
def test_a_baseline_sets_the_effective_share_of_correct_rollouts_of_topr(correct, total, baseline, share):
    # p~ = p (1 - c) / (1 + c (1 - 2 p)): the part of correct rollouts in the whole push, with rewards +1 and -1 less c.
    shaping = ({"name": "outcome", "correct": 1 - baseline, "wrong": -1 - baseline},)
    config = algorithm("topr", advantage="raw", shaping=shaping)
    batch = batch_of([1.0] * correct + [0.0] * (total - correct))
    push = credit(config, replace(batch, rewards=recipe.shape_rewards(config, batch, limit=1))).abs()
    assert_near(push[:correct].sum() / push.sum(), share)


def test_best_of_n_favours_what_the_best_of_the_group_would_be():
    batch = batch_of([1.0] * 4 + [0.0] * 12 + [NAN])
    config = algorithm(advantage="best_of_n", surrogate="policy_gradient")
    assert_near(credit(config, batch), [3.959910] * 4 + [0.013363] * 12 + [0.0])
    # Of a group that always fails or always succeeds the best is like any other.
    assert credit(config, batch_of([0.0, 0.0])).tolist() == credit(config, batch_of([1.0, 1.0])).tolist() == [1.0, 1.0]


def test_the_generalized_advantages_of_reft():
    mask = torch.tensor([[True, True, True, False]])
    kl = torch.tensor([[0.1, -0.2, 0.3, NAN]])
    rewards = -0.05 * kl + torch.tensor([[0.0, 0.0, 1.0, 0.0]])
    values = torch.tensor([[0.2, 0.4, 0.7, NAN]])
    assert_near(rewards[mask], [-0.005, 0.01, 0.985])
    advantages = generalized_advantages(rewards, values, mask)
    assert_near(advantages, [[0.746712, 0.580750, 0.285000, 0.0]])
    assert_near((advantages + values)[mask], [0.946712, 0.980750, 0.985000])
    # The document whitens without an epsilon; 1e-8 is in the seventh digit of this small variance.
    assert_near(whiten_decisions(advantages, mask, ddof=0, eps=0.0)[mask], [1.095651, 0.226553, -1.322204])
    assert_near(whiten_decisions(advantages, mask, ddof=1, eps=0.0)[mask], [0.894595, 0.184980, -1.079575])


@pytest.mark.parametrize(
    ("weight", "right", "wrong"),
    [("none", 0.875, -0.125), ("inverse", 7.0, -1.0), ("inverse_sqrt", 2.474874, -0.353553)],
)
def test_reinforce_ada_centers_by_the_pool_and_may_weigh_by_difficulty(weight, right, wrong):
    batch = batch_of([1.0] * 2 + [0.0] * 14)
    config = algorithm("reinforce_ada", difficulty_weight=weight)
    assert_near(credit(config, batch), [right] * 2 + [wrong] * 14)


def test_a_pool_without_a_success_has_no_difficulty_weight():
    config = algorithm("reinforce_ada", difficulty_weight="inverse")
    assert credit(config, batch_of([0.0, 0.1, 0.2])).tolist() == [0.0] * 3


def test_stable_reinforce_drops_outliers_beyond_three_deviations():
    rewards = [0.2] * 9 + [5.0] + [0.1] * 9 + [0.3]
    advantages = credit(algorithm("stable_reinforce"), batch_of(rewards, group_ids=list(range(20))))[:, 0]
    assert_near(advantages, [-0.189236] * 9 + [0.0] + [-0.283854] * 9 + [-0.094618])


def test_signs_and_weights_of_topr_and_psr():
    batch = batch_of([1.0, 0.0, NAN])
    assert credit(algorithm("topr"), batch).tolist() == [1.0, -1.0, 0.0]
    assert_near(credit(algorithm("w_reinforce"), batch), [0.1, -1.0, 0.0])
    assert credit(algorithm("raft"), batch_of([1.0, -1.0, NAN])).tolist() == [1.0, 0.0, 0.0]


def test_oreal_has_leave_one_out_advantages_of_all_rollouts_and_weights_from_token_scores():
    assert_near(credit(algorithm("oreal", negative_weight=1.0), batch_of([1.0] * 4 + [0.0] * 12))[[0, 4]], [0.8, -0.266667])
    positive, negative = token_score_weights(torch.tensor([[0.5, -1.0, 2.0, 1.0]]))
    assert_near(positive, [[0.244919, 0.0, 0.244919, 0.302710]])
    assert_near(negative, [[0.0, 0.124353, 0.0, 0.0]])


def test_capo_ignores_negative_advantages_in_its_first_phase():
    batch = batch_of(P2)
    assert_near(credit(algorithm("capo"), batch, progress=0.2), [0.0, 0.0, 0.0, 1.499997])
    assert_near(credit(algorithm("capo"), batch, progress=0.25), [-0.499999] * 3 + [1.499997])


def test_rollouts_of_advantage_zero_stay_in_the_first_phase_of_capo():
    batch = batch_of(P1)
    config = algorithm("capo")
    advantages = credit(config, batch, progress=0.1)
    assert not advantages.any()
    assert SUBSAMPLES[config.subsample](config, batch, advantages).all()
    assert recipe.effective_mask(config, batch).all()


# ---- section 11: edge cases of advantages -------------------------------------------------------------------------------

NEEDS_PROGRESS = {"progress_baseline"}
"""Tested in test_advantages.py, with tasks that measure work; it compares rollouts with all of their domain."""
NOT_CENTERED = {"raw", "positive_part", "sign", "best_of_n", "ones"}


@pytest.mark.parametrize("name", sorted(set(recipe.ADVANTAGES) - NOT_CENTERED - NEEDS_PROGRESS))
@pytest.mark.parametrize("value", [0.1, 0.7])
def test_equal_rewards_have_advantage_exactly_zero(name, value):
    batch = batch_of([value] * 8, lengths=[1, 2, 3, 1, 2, 3, 1, 2], group_ids=[0] * 4 + [1] * 4, term=[value] * 8)
    advantages = credit(algorithm(advantage=name, advantage_eps=1e-9), batch, weights={"term": 1.0})
    assert not advantages.any()


@pytest.mark.parametrize("name", sorted(set(recipe.ADVANTAGES) - NEEDS_PROGRESS))
def test_a_nan_reward_changes_no_other_advantage_and_gets_zero(name):
    rewards, lengths, ids = [1.0, 0.0, 0.5, 1.0, 0.0], [1, 2, 3, 1, 2], [0, 0, 0, 1, 1]
    config = algorithm(advantage=name)
    clean = credit(config, batch_of(rewards, lengths=lengths, group_ids=ids, t=rewards), weights={"t": 1.0})
    more = [*rewards, NAN]
    batch = batch_of(more, lengths=[*lengths, 3], group_ids=[*ids, 1], t=more)
    mixed = credit(config, batch, weights={"t": 1.0})
    assert_near(mixed[:5], clean)
    assert name == "ones" or not mixed[5].any()


def test_one_decision_in_the_batch_has_no_variance_to_whiten_by():
    for name in ("reinforce_pp", "reinforce_pp_baseline", "stable_reinforce"):
        assert credit(algorithm(name), batch_of([1.0])).tolist() == [[0.0]]


def test_a_term_that_is_constant_adds_nothing():
    batch = batch_of(P0, group_ids=[0] * 4, varies=P0, constant=[3.0] * 4)
    for name in ("dr_grpo", "gdpo"):
        weights = {"varies": 1.0, "constant": 2.0}
        alone = credit(algorithm(name), batch_of(P0, varies=P0), weights={"varies": 1.0})
        assert_near(credit(algorithm(name), replace(batch, rewards=batch.rewards + 6.0), weights=weights), alone)


# ---- 12.3: surrogates ---------------------------------------------------------------------------------------------------


def step(config, advantages, *, log_probs=LOG_PROBS, mask=MASK, batch=ORACLE, horizon=5, reference=None, policy_weights=None):
    """Scalar loss of one step over the oracle batch, as `mmrl.update` puts it together, and its gradient in row order."""
    log_probs = log_probs.clone().requires_grad_()
    result = recipe.decision_losses(
        config, Forward(log_probs=log_probs), batch.old_log_probs, mask, advantages, reference,
        policy_weights=policy_weights, sampler_log_probs=batch.sampler_log_probs,
    )  # fmt: skip
    weights = losses.aggregation_weights(
        mask, config.aggregation, num_decisions=int(mask.sum()), num_rows=int(mask.any(dim=1).sum()), horizon=horizon
    )
    loss = losses.weighted_sum(result.losses, weights)
    (gradient,) = torch.autograd.grad(loss, log_probs)
    assert not gradient[~mask].any()
    return loss, gradient[MASK]


AGGREGATIONS = ["token_mean", "sequence_mean", "sequence_sum", "constant"]


@pytest.mark.parametrize(
    ("slots", "expected"),
    [
        ({"surrogate": "policy_gradient"}, [0.055000, 0.342708, 0.137500, 0.027500]),
        ({}, [-0.042266, -0.391298, -0.105666, -0.021133]),
        ({"clip_high": 0.28}, [-0.058266, -0.431298, -0.145666, -0.029133]),
        ({"clip_high": 0.28, "dual_clip": 1.3}, [-0.123726, -0.484199, -0.309315, -0.061863]),
        ({"ratio_cap": 1.5}, [-0.078543, -0.413971, -0.196358, -0.039272]),
        ({"ratio": "sequence", "clip_low": 3e-4, "clip_high": 4e-4}, [-0.044121, -0.323048, -0.110303, -0.022061]),
        ({"ratio": "sequence_token", "clip_low": 3e-4, "clip_high": 4e-4}, [-0.044121, -0.323048, -0.110303, -0.022061]),
        ({"ratio": "sequence"}, [-0.084041, -0.422848, -0.210103, -0.042021]),
        ({"surrogate": "cispo", "ratio_cap": 5.0}, [0.086236, 0.584963, 0.215590, 0.043118]),
        ({"surrogate": "cispo", "clip_high": 0.28}, [0.080321, 0.455190, 0.200803, 0.040161]),
        ({"surrogate": "sapo"}, [-0.283539, -1.027241, -0.708847, -0.141769]),
        ({"surrogate": "gmpo", "clip_high": 0.4}, [-0.136949, -0.565350, -0.342372, -0.068474]),
        ({"surrogate": "topr"}, [0.098857, 0.380315, 0.247143, 0.049429]),
        ({"surrogate": "delight"}, [0.202016, 0.453362, 0.505041, 0.101008]),
        ({"surrogate": "delight", "delight_temperature": 2.0}, [0.125779, 0.335355, 0.314448, 0.062890]),
        ({"clip_low": 1 - 1 / 1.1, "clip_high": 0.1}, [-0.007259, -0.326163, -0.018147, -0.003629]),
    ],
)
def test_every_surrogate_under_every_aggregation(slots, expected):
    values = [step(algorithm(aggregation=kind, **slots), HAND_SET)[0] for kind in AGGREGATIONS]
    assert_near(torch.stack(values), expected)


@pytest.mark.parametrize(
    ("slots", "expected"),
    [
        (
            {"surrogate": "cispo", "ratio_cap": 5.0},
            [-0.110517, -0.074082, -0.1, 0.149182, 0.081873, 0.05, 0.111277, 0.030327, 0.05, -0.329744],
        ),
        (
            {"surrogate": "cispo", "clip_high": 0.28},
            [-0.110517, -0.08, -0.1, 0.128, 0.081873, 0.05, 0.064, 0.04, 0.05, -0.256],
        ),
        (
            {"surrogate": "sapo"},
            [-0.110212, -0.072852, -0.1, 0.139662, 0.081136, 0.05, 0.075475, 0.029068, 0.05, -0.297348],
        ),
        ({"surrogate": "gmpo", "clip_high": 0.4}, [-0.093551] * 3 + [0.110517] * 2 + [0.055259, 0.055259, 0, 0.055259, 0]),
        ({"surrogate": "topr"}, [-0.1] * 3 + [0.1, 0.081873, 0.05, 0.05, 0.030327, 0.05, -0.2]),
        (
            {"surrogate": "delight"},
            [-0.059869, -0.078583, -0.054983, 0.031003, 0.028905, 0.023129, 0.017717, 0.016591, 0.022508, -0.176159],
        ),
        (
            {"ratio": "sequence_token", "clip_low": 3e-4, "clip_high": 4e-4},
            [-0.093551] * 3 + [0.110517] * 2 + [0.053894] * 4 + [0.0],
        ),
        # DELTA has the gradient of the dual clip with the same bound.
        (
            {"clip_high": 0.28, "ratio_cap": 1.3},
            [-0.110517, -0.074082, -0.1, 0.0, 0.081873, 0.05, 0.0, 0.0, 0.05, 0.0],
        ),
    ],
)
def test_every_surrogate_has_its_gradient(slots, expected):
    assert_near(step(algorithm(aggregation="token_mean", **slots), HAND_SET)[1], expected)


def test_an_unlimited_cispo_has_the_gradient_of_the_free_ratio():
    free = algorithm(clip_low=0.999999, clip_high=1e9, aggregation="token_mean")
    capped = algorithm("cispo", ratio_cap=1e9)
    assert_near(step(capped, HAND_SET)[1], step(free, HAND_SET)[1], atol=1e-5)


@pytest.mark.parametrize(
    ("advantage", "surprisal", "gate"),
    [(1.0, 0.1, 0.524979), (1.0, 3.0, 0.952574), (-1.0, 0.1, 0.475021), (-1.0, 3.0, 0.047426), (1.0, 12.0, 0.999955)],
)
def test_the_delight_gate(advantage, surprisal, gate):
    log_probs = torch.tensor([[-surprisal]], requires_grad=True)
    losses.delight(log_probs, torch.tensor([advantage]), torch.ones(1, 1).bool()).sum().backward()
    assert_near(log_probs.grad, [[-gate * advantage]])


def test_delight_and_sapo_of_advantage_zero():
    # Section 11: the gate is one half, SAPO uses the negative temperature; both losses are 0.
    assert losses.sapo(torch.zeros(1, 1), torch.zeros(1)).item() == 0.0
    value = losses.sapo(torch.tensor([[0.5]]), torch.tensor([1e-9])) / 1e-9
    below = losses.sapo(torch.tensor([[0.5]]), torch.tensor([-1e-9])) / -1e-9
    assert value.item() != pytest.approx(below.item(), rel=1e-3)
    assert losses.delight(torch.tensor([[-1.0]]), torch.zeros(1), torch.ones(1, 1).bool()).item() == 0.0


@pytest.mark.parametrize(("total", "weight"), [(-0.5, 0.606531), (0.3, 1.0)])
def test_topr_tapers_wrong_rollouts_by_the_ratio_of_the_whole_rollout(total, weight):
    log_probs = torch.tensor([[total - 1.0, -1.0]], requires_grad=True)
    mask = torch.ones(1, 2).bool()
    ratios = losses.log_ratio(log_probs, torch.full((1, 2), -1.0), mask, unit="sequence_product")
    losses.topr(log_probs, ratios, torch.tensor([-1.0]), mask).sum().backward()
    assert_near(log_probs.grad, [[weight, weight]])


def test_vespo_fades_on_both_sides_of_one():
    # phi(1) = 1; phi(e^0.5) = exp(2 * 0.5 + 3 (1 - 1.648721)) = 0.388244 for A > 0.
    mask = torch.ones(1, 1).bool()
    for shift, weight in ((0.0, 1.0), (0.5, math.exp(1 + 3 * (1 - math.exp(0.5))))):
        log_probs = torch.tensor([[-1.0 + shift]], requires_grad=True)
        ratios = losses.log_ratio(log_probs, torch.tensor([[-1.0]]), mask, unit="sequence_product")
        losses.vespo(log_probs, ratios, torch.tensor([1.0]), mask).sum().backward()
        assert_near(log_probs.grad, [[-weight]])


# ---- sections 5 and 6: mismatch and KL ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("slots", "token_mean", "sequence_mean"),
    [
        ({"mismatch": "none"}, -0.042266, -0.391298),
        ({"mismatch": "token_truncate"}, 0.080714, -0.292290),
        ({"mismatch": "token_mask", "mismatch_low": 0.5}, -0.141840, -0.431386),
        ({"mismatch": "sequence_truncate"}, 0.223327, -0.207507),
        ({"mismatch": "sequence_mask", "mismatch_high": 3.0}, 0.308672, -0.154166),
        ({"mismatch": "sequence_mask"}, -0.279227, -0.521603),
    ],
)
def test_mismatch_weights_multiply_the_policy_term(slots, token_mean, sequence_mean):
    for kind, expected in (("token_mean", token_mean), ("sequence_mean", sequence_mean)):
        config = algorithm(aggregation=kind, **slots)
        assert_near(step(config, HAND_SET, policy_weights=recipe.mismatch_weights(config, ORACLE))[0], expected)


def test_mismatch_weights_of_the_oracle_batch():
    weights = recipe.mismatch_weights(algorithm(mismatch="token_truncate", mismatch_high=9.0), ORACLE)
    expected = [1.051271, 0.904837, 1, 1.051271, 0.904837, 1, 2.459603, 0.904837, 1.051271, 0.951229]
    assert_near(weights[MASK], expected)
    assert weights[~MASK].tolist() == [1.0] * 6
    product = recipe.mismatch_weights(algorithm(mismatch="sequence_truncate", mismatch_high=9.0), ORACLE)
    assert_near(product[:, 0], [0.951229, 0.951229, 2.339647, 0.951229])
    # Geometric means 0.983471, 0.975310, 1.236766, 0.951229: a bound of 1.2 drops row 2, and 0.96 row 3.
    config = algorithm(mismatch="geometric_mask", mismatch_low=0.96, mismatch_high=1.2)
    kept = recipe.mismatch_weights(config, ORACLE)
    assert_near(kept[MASK], [1.051271, 0.904837, 1, 1.051271, 0.904837, 0, 0, 0, 0, 0])


def test_mismatch_weights_can_be_normalised_by_their_mean():
    config = algorithm(aggregation="token_mean", mismatch="token_truncate")
    weights = recipe.mismatch_weights(config, ORACLE)
    mean = weights[MASK].mean()
    assert_near(mean, 1.081955)
    assert_near(step(config, HAND_SET, policy_weights=weights / mean)[0], 0.074600)


def test_without_a_sampling_engine_there_is_nothing_to_correct():
    assert recipe.mismatch_weights(algorithm(mismatch="token_mask"), batch_of(P0)) is None


def test_rollouts_that_fell_behind_are_masked_only_beyond_delta():
    # mean(old - lp) = [0.067, -0.1, -0.075, -0.5] and with the sampler [0.083, -0.075, -0.2875, -0.45].
    plain = step(algorithm(), HAND_SET)[0]
    assert_near(step(algorithm(off_policy_delta=0.5), HAND_SET)[0], plain)
    bad = -HAND_SET.abs()
    masked = losses.off_policy_rows(LOG_PROBS, OLD, bad, MASK, delta=0.05)
    assert masked.any(dim=1).tolist() == [True, False, False, False]
    assert losses.off_policy_rows(LOG_PROBS, SAMPLER, HAND_SET, MASK, delta=0.05).any().item() is False


def kl_losses(**slots):
    """Loss of the KL term alone, with coefficient 1."""
    config = algorithm(kl_coef=1.0, **slots)
    with_kl, without = (step(config, torch.zeros(4), reference=part) for part in (REFERENCE, None))
    return with_kl[0] - without[0], with_kl[1] - without[1]


def test_kl_estimators_of_the_oracle_batch():
    assert_near(kl_losses(kl="abs", aggregation="token_mean")[0], 0.250000)
    assert_near(kl_losses(kl="abs")[0], 0.296875)
    assert_near(kl_losses(kl="k3", kl_importance=True, aggregation="token_mean")[0], 0.070826)
    straight, k2 = (kl_losses(**slots) for slots in ({"kl": "k3", "kl_gradient": "k2"}, {"kl": "k2"}))
    assert_near(straight[0], 0.059056)
    assert_near(straight[1], k2[1])


def test_the_straight_through_gradient_of_one_decision():
    log_probs = torch.tensor([[0.2]], requires_grad=True)
    value = losses.kl_penalty(log_probs, torch.zeros(1, 1), torch.ones(1, 1).bool(), estimator="k3", gradient="k2")
    value.sum().backward()
    assert_near(value, [[0.018731]])
    assert_near(log_probs.grad, [[0.2]])


# ---- 12.4: recipes by name, through the updater -------------------------------------------------------------------------


class OracleAdapter(BanditAdapter):
    """A policy whose parameters are the log-probabilities of the oracle batch."""

    max_decisions = 5

    def forward(self, policy, batch, needs=frozenset()):
        return Forward(log_probs=policy.weight[batch.group_ids * 0 + batch.seeds][:, : batch.loss_mask.shape[1]])


class LogProbs(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(LOG_PROBS.nan_to_num(0.0))


def run_recipe(bandit_config, name, *, micro_batch_tokens=1000, progress=1.0, **slots):
    """Loss and gradient (decisions in row order) of one step of preset ``name``, everything chosen by its slots."""
    changes = {"algorithm": {"name": name, **slots}, "optimizer": {"max_grad_norm": None}}
    config = bandit_config(**changes, trainer={"micro_batch_tokens": micro_batch_tokens})
    algorithm = config.algorithm
    policy, gradients = LogProbs(), []
    updater = Updater(config, OracleAdapter(max_decisions=5), policy, Accelerator(cpu=True))
    updater.optimizer.register_step_pre_hook(lambda *_: gradients.append(policy.weight.grad.clone()))
    batch = replace(ORACLE, seeds=torch.arange(4), inputs=ORACLE.inputs)
    reference = REFERENCE if recipe.needs_reference(algorithm) else None
    advantages = recipe.compute_advantages(algorithm, batch, reference, weights={}, progress=progress)
    collected = Collected(
        batch=batch, advantages=advantages, reference_log_probs=reference, totals={},
        trained=SUBSAMPLES[algorithm.subsample](algorithm, batch, advantages),
        mismatch_weights=recipe.mismatch_weights(algorithm, batch),
    )  # fmt: skip
    totals = updater.update(collected)
    return torch.tensor(totals["loss/total"][0]), gradients[0][MASK]


Z4 = {"advantage_eps": 1e-4}
EVERYTHING = {"subsample": "none"}
RECIPES = [
    ("grpo", {**Z4, "kl_coef": 0.04}, 0.059294,
     [-0.079141, -0.054193, -0.071994, 0.162373, 0.088089, 0.054239, 0.121568, -0.001230, 0.054355, 0.004512]),
    ("grpo", {**Z4, "aggregation": "token_mean"}, 0.284882,
     [-0.095694, -0.064146, -0.086588, 0.129173, 0.070892, 0.086588, 0.192704, 0, 0.086588, 0]),
    ("dr_grpo", {}, 0.082253,
     [-0.027629, -0.018520, -0.025000, 0.037296, 0.020468, 0.025000, 0.055639, 0, 0.025000, 0]),
    ("dapo", {"dual_clip": 10.0}, 0.278003,
     [-0.095710, -0.064157, -0.086602, 0.129196, 0.070904, 0.086602, 0.192737, 0, 0.086602, 0]),
    ("gspo", {}, 0.053509, [-0.067514] * 3 + [0.119638] * 2 + [0.058342] * 4 + [0]),
    ("luspo", {}, 0.587350, [-0.202543] * 3 + [0.239276] * 2 + [0.233368] * 4 + [0]),
    ("cispo", {}, -0.250823,
     [-0.095710, -0.064157, -0.086602, 0.129196, 0.070904, 0.086602, 0.192737, 0.052527, 0.086602, -0.142783]),
    ("sapo", Z4, -0.095926,
     [-0.079525, -0.052567, -0.072156, 0.151163, 0.087817, 0.054117, 0.081690, 0.031462, 0.054117, -0.321833]),
    ("rloo_sequence", {}, 0.090852, [-0.134067] * 3 + [0.200005] * 2 + [0.224414] * 4 + [0]),
    ("rloo", {}, 0.219340, [-0.073678, -0.049388, -0.066667, 0.099455, 0.054582, 0.066667, 0.148369, 0, 0.066667, 0]),
    ("reinforce_pp", {"kl_coef": 0.0}, 0.098150,
     [-0.128409, -0.086075, -0.116189, 0.115556, 0.063419, 0.077460, 0.172390, 0, 0.077460, 0]),
    ("reinforce_pp_baseline", {}, 0.098201,
     [-0.128389, -0.086095, -0.116185, 0.115576, 0.063409, 0.077465, 0.172450, -0.000040, 0.077470, 0.000060]),
    ("rgra", Z4, -0.006657,
     [-0.071552, -0.072894, -0.071994, 0.109141, 0.107709, 0.054239, 0.055245, 0.052888, 0.054355, -0.211957]),
    ("raft", {"kl_coef": 0.0}, 0.290000, [-0.1] * 3 + [0] * 6 + [-0.1]),
    ("raft_pp", {"kl_coef": 0.0}, -0.404599, [-0.110517, -0.074082, -0.1] + [0] * 7),
    ("reinforce_rej", {"kl_coef": 0.0}, -0.404599, [-0.110517, -0.074082, -0.1] + [0] * 7),
    ("psr", {}, -1.011497, [-0.276293, -0.185205, -0.25] + [0] * 7),
    ("nsr", {}, 1.222683, [0, 0, 0, 0.248637, 0.136455, 0.166667, 0.370923, 0, 0.166667, 0]),
    ("w_reinforce", {}, 0.693150, [-0.011052, -0.007408, -0.01, 0.149182, 0.081873, 0.1, 0.222554, 0, 0.1, 0]),
    ("topr", EVERYTHING, -0.010417, [-0.083333] * 3 + [0.125] * 2 + [0.0625] * 4 + [-0.25]),
    ("topr", {**EVERYTHING, "ratio": "token"}, 0.044405,
     [-0.083333] * 3 + [0.125, 0.102341, 0.0625, 0.0625, 0.037908, 0.0625, -0.25]),
    ("delight", {}, 0.047446,
     [-0.050727, -0.065391, -0.047042, 0.028874, 0.027232, 0.037708, 0.022629, 0.019855, 0.035875, -0.060961]),
    ("stable_reinforce", {"kl_coef": 0.0}, -0.165612,
     [-0.112796, -0.075609, -0.102062, 0.152259, 0.083561, 0.051031, 0.113572, 0, 0.051031, 0]),
    ("loop", {}, 0.072863, [0, -0.041157, -0.055556, 0.124319, 0, 0.041667, 0.092731, 0, 0.041667, 0]),
]  # fmt: skip


@pytest.mark.parametrize(("name", "slots", "loss", "expected"), RECIPES, ids=[f"{r[0]}-{i}" for i, r in enumerate(RECIPES)])
def test_a_preset_has_the_loss_and_gradient_of_the_document(bandit_config, name, slots, loss, expected):
    actual, gradient = run_recipe(bandit_config, name, **slots)
    assert_near(actual, loss, atol=2e-6)
    assert_near(gradient, expected, atol=2e-6)


def test_bnpo_has_the_loss_of_the_document_up_to_its_weight(bandit_config):
    # 12.4 takes the weight 0.938332 of the batch of three groups; a group alone has weight 1.
    loss, gradient = run_recipe(bandit_config, "bnpo")
    assert_near(loss * 0.938332, 0.376518, atol=2e-6)
    expected = [-0.129627, -0.086892, -0.117291, 0.174978, 0.096030, 0.117291, 0.261037, 0, 0.117291, 0]
    assert_near(gradient * 0.938332, expected, atol=2e-6)


def test_the_first_phase_of_capo(bandit_config):
    loss, gradient = run_recipe(bandit_config, "capo", advantage_eps=1e-4, kl_coef=0.04, progress=0.1)
    assert_near(loss, -0.462756)
    assert_near(
        gradient,
        [-0.079141, -0.054193, -0.071994, 0.000906, -0.000526, 0.000122, 0.001128, -0.001230, 0.000238, 0.004512],
    )


@pytest.mark.parametrize("micro_batch_tokens", [1, 1000])
def test_the_two_token_means_of_oreal(bandit_config, micro_batch_tokens):
    # Rows 0 and 1 with advantages 0.8 and -0.266667; N+ = 3, N- = 2, five decisions for the KL.
    config = bandit_config(algorithm="oreal", trainer={"micro_batch_tokens": micro_batch_tokens})
    policy, gradients = LogProbs(), []
    updater = Updater(config, OracleAdapter(max_decisions=5), policy, Accelerator(cpu=True))
    updater.optimizer.register_step_pre_hook(lambda *_: gradients.append(policy.weight.grad.clone()))
    collected = Collected(
        batch=replace(ORACLE, seeds=torch.arange(4)), totals={}, reference_log_probs=REFERENCE,
        advantages=torch.tensor([0.8, -0.5 * 0.266667, 0.0, 0.0]), trained=torch.tensor([True, True, False, False]),
    )  # fmt: skip
    totals = updater.update(collected)
    assert totals["loss/total"][0] == pytest.approx(0.660834, abs=2e-6)
    expected = torch.tensor([-0.266304, -0.267109, -0.266569, 0.099818, 0.054372, 0, 0, 0, 0, 0])
    norm = float(totals["optimizer/gradient_norm"][0])
    assert norm == pytest.approx(0.475651, abs=2e-6)
    assert_near(gradients[0][MASK], expected, atol=2e-6)
