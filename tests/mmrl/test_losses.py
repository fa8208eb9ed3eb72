"""`mmrl.losses` against the oracles of algorithms.md 3, 6, 12.3 and 12.4, vision.md 0.3 and robotics.md 4.13.

The documents' values have six digits, so they are compared to within 1e-6. Section numbers are those of algorithms.md.
"""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from mmrl.advantages import group_center_advantages, group_std_advantages, leave_one_out_advantages
from mmrl.losses import (
    MAX_LOG_RATIO,
    aggregation_weights,
    clipped_surrogate,
    kl_penalty,
    log_ratio,
    per_decision,
    policy_gradient,
    weighted_sum,
)

NAN, INF = float("nan"), float("inf")
JUNK = [NAN, INF, -INF, 1e30]
"""What padding may hold; the oracle batch below is padded with it."""


def assert_near(actual, expected, atol=1e-6):
    expected = torch.as_tensor(expected, dtype=torch.float32)
    torch.testing.assert_close(actual.detach(), expected, atol=atol, rtol=0, equal_nan=False)


def padded(rows, width=4, filler=JUNK):
    """Rows of different lengths as ``[N, width]``, filled up with junk."""
    return torch.tensor([row + (filler * width)[: width - len(row)] for row in rows])


def token(value, requires_grad=True):
    """A batch of one decision."""
    return torch.tensor([[float(value)]], requires_grad=requires_grad)


# The oracle batch of 12.3: four rows of 3, 2, 4 and 1 decisions.
LENGTHS = [3, 2, 4, 1]
MASK = torch.tensor([[column < length for column in range(4)] for length in LENGTHS])
LOG_PROBS = padded([[-0.4, -1.3, -0.2], [-0.8, -0.9], [-0.3, -1.2, -1.4, -0.4], [-1.0]])
OLD = padded([[-0.5, -1.0, -0.2], [-1.2, -0.7], [-0.3, -2.0, -0.9, -0.4], [-1.5]])
REFERENCE = padded([[-0.6, -1.1, -0.25], [-1.0, -0.8], [-0.35, -1.8, -1.0, -0.5], [-1.6]])
ADVANTAGES = torch.tensor([1.0, -1.0, -0.5, 2.0])  # set by hand in 12.3
GROUP = torch.tensor([1.0, 0.0, 0.0, 1.0]), torch.zeros(4, dtype=torch.long)  # rewards and ids of 12.4


def whole_step(kind, mask=MASK, **options):
    """Weights of a step that is all of ``mask``."""
    return aggregation_weights(mask, kind, num_decisions=int(mask.sum()), num_rows=len(mask), **options)


def surrogate(log_probs, advantages, *, unit="token", old=OLD, mask=MASK, **clip):
    return clipped_surrogate(log_ratio(log_probs, old, mask, unit=unit), advantages, **clip)


def gradient(loss, log_probs):
    (grad,) = torch.autograd.grad(loss, log_probs)
    return grad


# ---- the clipped surrogate, one decision at a time ----------------------------------------------------------------------


# The four quadrants of section 3. The gradient with respect to the log-prob is -rho A where the ratio is free, 0 where clipped:
# for rho = 1.25, A = 1 and clip_high = 0.2 the loss is -min(1.25, 1.2) and flat.
@pytest.mark.parametrize(
    ("ratio", "advantage", "clip", "loss", "slope"),
    [
        (1.25, 1, {"clip_high": 0.2}, -1.2, 0.0),
        (1.30, 1, {"clip_high": 0.2}, -1.2, 0.0),
        (1.25, -1, {"clip_high": 0.2}, 1.25, 1.25),
        (0.79, 1, {"clip_high": 0.2}, -0.79, -0.79),
        (0.79, -1, {"clip_high": 0.2}, 0.8, 0.0),
        (5.00, -1, {"clip_high": 0.2}, 5.0, 5.0),
        (1.25, 1, {"clip_high": 0.28}, -1.25, -1.25),
        (1.30, 1, {"clip_high": 0.28}, -1.28, 0.0),
        (1.25, -1, {"clip_high": 0.28}, 1.25, 1.25),
        (0.79, 1, {"clip_high": 0.28}, -0.79, -0.79),
        (0.79, -1, {"clip_high": 0.28}, 0.8, 0.0),
        (5.00, -1, {"clip_high": 0.28}, 5.0, 5.0),
        (5.00, -1, {"clip_high": 0.2, "dual_clip": 3.0}, 3.0, 0.0),
        (5.00, -1, {"clip_high": 0.28, "dual_clip": 3.0}, 3.0, 0.0),
        # robotics.md F3.
        (1.5, 1, {"clip_high": 0.28}, -1.28, 0.0),
        (0.5, 1, {"clip_high": 0.28}, -0.5, -0.5),
        (0.5, -1, {"clip_high": 0.28}, 0.8, 0.0),
        (1.5, -1, {"clip_high": 0.28}, 1.5, 1.5),
        # robotics.md F4: the dual clip bounds only what a negative advantage costs.
        (2.0, -1, {"clip_high": 0.28, "dual_clip": 3.0}, 2.0, 2.0),
        (5.0, 1, {"clip_high": 0.28, "dual_clip": 3.0}, -1.28, 0.0),
        # vision.md 0.3.
        (1.3, 1.2, {"clip_high": 0.2}, -1.44, 0.0),
        (0.7, 1.2, {"clip_high": 0.2}, -0.84, -0.84),
        (1.0, 1.2, {"clip_high": 0.2}, -1.2, -1.2),
        (1.3, -0.8, {"clip_high": 0.2}, 1.04, 1.04),
        (0.7, -0.8, {"clip_high": 0.2}, 0.64, 0.0),
        (1.0, -0.8, {"clip_high": 0.2}, 0.8, 0.8),
        # The bound of the dual clip scales with the advantage: 3 * 0.5.
        (5.0, -0.5, {"clip_high": 0.2, "dual_clip": 3.0}, 1.5, 0.0),
    ],
)
def test_the_clip_has_the_value_and_slope_of_every_quadrant(ratio, advantage, clip, loss, slope):
    log_probs = token(math.log(ratio))
    losses = clipped_surrogate(log_probs, torch.tensor([float(advantage)]), clip_low=0.2, **clip)
    assert_near(losses, [[loss]])
    assert_near(gradient(losses.sum(), log_probs), [[slope]])


def test_the_two_clip_bounds_are_independent():
    # Clipped below at 1 - 0.4 and above at 1 + 0.1: -min(-0.5, -0.6) and -min(1.5, 1.1).
    log_ratios = torch.tensor([[0.5], [1.5]]).log()
    losses = clipped_surrogate(log_ratios, torch.tensor([-1.0, 1.0]), clip_low=0.4, clip_high=0.1)
    assert_near(losses, [[0.6], [-1.1]])


def test_on_policy_the_slope_is_minus_the_advantage():
    # At rho = 1 the free and the clipped branch are equal; together they must give the whole gradient, also for a clip of 0.
    for width in (0.0, 0.2):
        log_probs = torch.full((1, 2), -0.7, requires_grad=True)
        ratios = log_ratio(log_probs, log_probs.detach(), torch.ones(1, 2, dtype=torch.bool))
        losses = clipped_surrogate(ratios, torch.tensor([[2.0, -3.0]]), clip_low=width, clip_high=width, dual_clip=10.0)
        assert_near(gradient(losses.sum(), log_probs), [[-2.0, 3.0]])


def test_advantages_may_differ_between_the_decisions_of_a_row():
    # rho = 1 everywhere, so the losses are minus the advantages.
    advantages = torch.tensor([[1.0, -2.0], [0.0, 3.0]])
    assert_near(clipped_surrogate(torch.zeros(2, 2), advantages, clip_low=0.2, clip_high=0.2), -advantages)


def test_row_values_are_spread_over_decisions_and_decision_values_pass_through():
    like = torch.zeros(2, 3)
    assert per_decision(torch.tensor([1.0, 2.0]), like).tolist() == [[1.0] * 3, [2.0] * 3]
    values = torch.arange(6.0).reshape(2, 3)
    assert per_decision(values, like) is values


# ---- ratios -------------------------------------------------------------------------------------------------------------


def test_token_ratios_match_the_oracle_batch_and_are_one_where_masked():
    # 12.3, for example exp(-0.4 + 0.5) = 1.105171.
    ratios = log_ratio(LOG_PROBS, OLD, MASK).exp()
    expected = [[1.105171, 0.740818, 1, 1], [1.491825, 0.818731, 1, 1], [1, 2.225541, 0.606531, 1], [1.648721, 1, 1, 1]]
    assert_near(ratios, expected)


def test_sequence_ratios_match_the_oracle_batch_and_are_one_where_masked():
    # 12.3, s_i: for example row 0 is exp((0.1 - 0.3 + 0) / 3) = 0.935507.
    ratios = log_ratio(LOG_PROBS, OLD, MASK, unit="sequence").exp()
    s = [0.935507, 1.105171, 1.077884, 1.648721]
    assert_near(ratios, [[s[0]] * 3 + [1], [s[1]] * 2 + [1] * 2, [s[2]] * 4, [s[3]] + [1] * 3])


def test_the_unit_of_a_decision_sets_the_granularity_of_the_ratio():
    # robotics.md F7: two actions of two tokens. An adapter that sums log-probs makes an action or the whole chunk one decision.
    old = torch.tensor([[-0.1, -0.2], [-0.3, -0.4]])
    new = torch.tensor([[-0.05, -0.25], [-0.2, -0.4]])

    def ratios(new, old, unit="token"):
        return log_ratio(new, old, torch.ones_like(old, dtype=torch.bool), unit=unit).exp()

    assert_near(ratios(new, old), [[1.051271, 0.951229], [1.105171, 1.0]])
    assert_near(ratios(new.sum(dim=1)[None], old.sum(dim=1)[None]), [[1.0, 1.105171]])
    assert_near(ratios(new.sum().view(1, 1), old.sum().view(1, 1)), [[1.105171]])
    assert_near(ratios(new.view(1, 4), old.view(1, 4), unit="sequence"), [[1.025315] * 4])


@pytest.mark.parametrize("unit", ["token", "sequence"])
def test_log_ratios_are_clamped_on_both_sides_without_a_slope_beyond(unit):
    log_probs = torch.tensor([[100.0], [-100.0], [0.5]], requires_grad=True)
    ratios = log_ratio(log_probs, torch.zeros(3, 1), torch.ones(3, 1, dtype=torch.bool), unit=unit)
    assert ratios.tolist() == [[MAX_LOG_RATIO], [-MAX_LOG_RATIO], [0.5]]
    assert gradient(ratios.sum(), log_probs).tolist() == [[0.0], [0.0], [1.0]]


def test_the_sequence_ratio_is_clamped_after_the_mean():
    # (50 - 20) / 2 = 15; clamping first would give (20 - 20) / 2 = 0.
    ratios = log_ratio(torch.tensor([[50.0, -20.0]]), torch.zeros(1, 2), torch.ones(1, 2, dtype=torch.bool), unit="sequence")
    assert ratios.tolist() == [[15.0, 15.0]]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_ratios_and_losses_are_float32_whatever_the_dtype_of_the_policy(dtype):
    # -1 is exact in every dtype; old and reference log-probs are recorded in float32, and a difference of 2^-10 must survive.
    log_probs, old = torch.full((1, 1), -1.0, dtype=dtype), torch.full((1, 1), -1.0 - 2**-10)
    mask = torch.ones(1, 1, dtype=torch.bool)
    ratios = log_ratio(log_probs, old, mask)
    assert ratios.dtype == torch.float32 and ratios.item() == 2**-10
    assert kl_penalty(log_probs, old, mask, estimator="k1").dtype == torch.float32
    assert policy_gradient(log_probs, torch.ones(1), mask).dtype == torch.float32


@pytest.mark.parametrize(("new", "old"), [(100, 0), (-100, 0), (-INF, -1), (-1, -INF), (1e30, -1e30), (-1, INF)])
@pytest.mark.parametrize("advantage", [2.0, -2.0])
@pytest.mark.parametrize("unit", ["token", "sequence"])
def test_extreme_log_probs_give_a_finite_loss_and_gradient(new, old, advantage, unit):
    log_probs, recorded, mask = token(new), token(old, requires_grad=False), torch.ones(1, 1, dtype=torch.bool)
    ratios = log_ratio(log_probs, recorded, mask, unit=unit)
    loss = clipped_surrogate(ratios, torch.tensor([advantage]), clip_low=0.2, clip_high=0.2).sum()
    for estimator in ("k1", "k2", "k3"):
        loss = loss + kl_penalty(log_probs, recorded, mask, estimator=estimator).sum()
    assert loss.isfinite() and gradient(loss, log_probs).isfinite().all()


# ---- the KL penalty -----------------------------------------------------------------------------------------------------


# Section 6: values d, d^2/2, exp(-d) + d - 1 and gradients 1, d, 1 - exp(-d).
@pytest.mark.parametrize(
    ("estimator", "d", "value", "slope"),
    [
        ("k1", 0.3, 0.3, 1.0),  # vision.md 0.3, all three values
        ("k2", 0.3, 0.045, 0.3),
        ("k3", 0.3, 0.0408182207, 0.259182),  # 1 - 0.740818
        ("k1", -0.2, -0.2, 1.0),
        ("k2", -0.2, 0.02, -0.2),
        ("k3", -0.2, 0.021403, -0.221403),  # exp(0.2) = 1.221403
        ("k3", math.log(1.2), 0.015655, 0.166667),  # robotics.md F20: 1/1.2 + ln 1.2 - 1, slope 1 - 1/1.2
        ("k3", 0.2, 0.018731, 0.181269),  # exp(-0.2) = 0.818731
        ("k1", 0.0, 0.0, 1.0),
        ("k2", 0.0, 0.0, 0.0),
        ("k3", 0.0, 0.0, 0.0),
    ],
)
def test_every_kl_estimator_has_its_value_and_slope(estimator, d, value, slope):
    log_probs = token(d - 1.0)
    kl = kl_penalty(log_probs, token(-1.0), torch.ones(1, 1, dtype=torch.bool), estimator=estimator)
    assert_near(kl, [[value]])
    assert_near(gradient(kl.sum(), log_probs), [[slope]])


# 12.3. k2's gradient under the token mean is d / 10; k1's is 1/10 everywhere.
@pytest.mark.parametrize(
    ("estimator", "token_mean", "sequence_mean", "slope"),
    [
        ("k1", 0.110000, 0.188542, [0.1] * 10),
        ("k2", 0.051250, 0.068203, [0.02, -0.02, 0.005, 0.02, -0.01, 0.005, 0.06, -0.04, 0.01, 0.06]),
        (
            "k3", 0.046078, 0.059056,
            [0.018127, -0.022140, 0.004877, 0.018127, -0.010517, 0.004877, 0.045119, -0.049182, 0.009516, 0.045119],
        ),
    ],
)  # fmt: skip
def test_the_kl_of_the_oracle_batch_matches(estimator, token_mean, sequence_mean, slope):
    log_probs = LOG_PROBS.clone().requires_grad_()
    kl = kl_penalty(log_probs, REFERENCE, MASK, estimator=estimator)
    assert_near(weighted_sum(kl, whole_step("sequence_mean")), sequence_mean)
    loss = weighted_sum(kl, whole_step("token_mean"))
    assert_near(loss, token_mean)
    assert_near(gradient(loss, log_probs)[MASK], slope)


def test_k3_of_the_oracle_batch_matches_decision_by_decision_and_is_zero_where_masked():
    kl = kl_penalty(LOG_PROBS, REFERENCE, MASK, estimator="k3")
    expected = [
        [0.018731, 0.021403, 0.001229, 0.0],
        [0.018731, 0.005171, 0.0, 0.0],
        [0.001229, 0.148812, 0.091825, 0.004837],
        [0.148812, 0.0, 0.0, 0.0],
    ]
    assert_near(kl, expected)


def test_k3_keeps_its_digits_close_to_zero():
    # d^2/2 - d^3/6 = 4.99983e-9 at d = 1e-4; computing exp(-d) + d - 1 in float32 would give 0.
    mask = torch.ones(1, 1, dtype=torch.bool)
    value = kl_penalty(token(1e-4), token(0.0), mask, estimator="k3").item()
    assert value == pytest.approx(4.99983e-9, rel=2e-3)


# ---- surrogate times aggregation ----------------------------------------------------------------------------------------

PPO = {"clip_low": 0.2, "clip_high": 0.2}
CLIP_HIGHER = {"clip_low": 0.2, "clip_high": 0.28}
SURROGATES = {
    "PG": lambda lp, a: policy_gradient(lp, a, MASK),
    "ratio only": lambda lp, a: surrogate(lp, a, clip_low=1.0, clip_high=INF),
    "PPO": lambda lp, a: surrogate(lp, a, **PPO),
    "CLIPHIGHER": lambda lp, a: surrogate(lp, a, **CLIP_HIGHER),
    "DUALCLIP 1.3": lambda lp, a: surrogate(lp, a, **CLIP_HIGHER, dual_clip=1.3),
    "DUALCLIP 3": lambda lp, a: surrogate(lp, a, **CLIP_HIGHER, dual_clip=3.0),
    "GSPO": lambda lp, a: surrogate(lp, a, unit="sequence", clip_low=3e-4, clip_high=4e-4),
    "GSPO .2": lambda lp, a: surrogate(lp, a, unit="sequence", **PPO),
    "LOOPCLIP": lambda lp, a: surrogate(lp, a, clip_low=1 - 1 / 1.1, clip_high=0.1),
}


# 12.3. A constant horizon of 1 is the document's seq-sum.
@pytest.mark.parametrize(
    ("name", "token_mean", "sequence_mean", "horizon_1", "horizon_5"),
    [
        ("PG", 0.055000, 0.342708, 0.137500, 0.027500),
        ("ratio only", -0.141684, -0.621705, -0.354210, -0.070842),
        ("PPO", -0.042266, -0.391298, -0.105666, -0.021133),
        ("CLIPHIGHER", -0.058266, -0.431298, -0.145666, -0.029133),
        ("DUALCLIP 1.3", -0.123726, -0.484199, -0.309315, -0.061863),
        ("DUALCLIP 3", -0.058266, -0.431298, -0.145666, -0.029133),  # "dual clip c=3 equals CLIPHIGHER here"
        ("GSPO", -0.044121, -0.323048, -0.110303, -0.022061),
        ("GSPO .2", -0.084041, -0.422848, -0.210103, -0.042021),
        ("LOOPCLIP", -0.007259, -0.326163, -0.018147, -0.003629),
    ],
)
def test_every_surrogate_under_every_aggregation_matches_the_oracle_batch(
    name, token_mean, sequence_mean, horizon_1, horizon_5
):
    losses = SURROGATES[name](LOG_PROBS, ADVANTAGES)
    assert_near(weighted_sum(losses, whole_step("token_mean")), token_mean)
    assert_near(weighted_sum(losses, whole_step("sequence_mean")), sequence_mean)
    assert_near(weighted_sum(losses, whole_step("constant", horizon=1)), horizon_1)
    assert_near(weighted_sum(losses, whole_step("constant", horizon=5)), horizon_5)


# 12.3, decisions in row order. For example PPO's row 1: +1 * 1.491825 / 10 = 0.149182.
@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("PG", [-0.1, -0.1, -0.1, 0.1, 0.1, 0.05, 0.05, 0.05, 0.05, -0.2]),
        ("PPO", [-0.110517, -0.074082, -0.1, 0.149182, 0.081873, 0.05, 0.111277, 0.0, 0.05, 0.0]),
        ("DUALCLIP 1.3", [-0.110517, -0.074082, -0.1, 0.0, 0.081873, 0.05, 0.0, 0.0, 0.05, 0.0]),
        ("GSPO", [-0.093551] * 3 + [0.110517] * 2 + [0.053894] * 4 + [0.0]),
        ("LOOPCLIP", [0.0, -0.074082, -0.1, 0.149182, 0.0, 0.05, 0.111277, 0.0, 0.05, 0.0]),
    ],
)
def test_every_surrogate_has_the_gradient_of_the_oracle_batch(name, expected):
    log_probs = LOG_PROBS.clone().requires_grad_()
    loss = weighted_sum(SURROGATES[name](log_probs, ADVANTAGES), whole_step("token_mean"))
    grad = gradient(loss, log_probs)
    assert_near(grad[MASK], expected)
    assert grad[~MASK].tolist() == [0.0] * 6


@pytest.mark.parametrize(
    ("rows", "token_mean", "sequence_mean"),
    [
        ([[0.2, 0.4], [0.6] * 4], 0.5, 0.45),  # vision.md 0.3: 3.0 / 6, and (0.3 + 0.6) / 2
        ([[1.0] * 2, [2.0] * 4], 1.666667, 1.5),  # robotics.md F9: 10 / 6, and (1 + 2) / 2
    ],
)
def test_the_token_mean_weighs_decisions_and_the_sequence_mean_weighs_rollouts(rows, token_mean, sequence_mean):
    mask = padded([[True] * len(row) for row in rows], filler=[False])
    assert_near(weighted_sum(padded(rows), whole_step("token_mean", mask)), token_mean)
    assert_near(weighted_sum(padded(rows), whole_step("sequence_mean", mask)), sequence_mean)


def test_aggregation_weights_divide_by_the_counts_that_are_given():
    # Half of a step of 8 decisions in 5 rows; row 1 has no decision.
    mask = torch.tensor([[True, True, False], [False, False, False]])
    counts = {"num_decisions": 8, "num_rows": 5}
    assert_near(aggregation_weights(mask, "token_mean", **counts), [[1 / 8, 1 / 8, 0], [0, 0, 0]])
    assert_near(aggregation_weights(mask, "sequence_mean", **counts), [[1 / 10, 1 / 10, 0], [0, 0, 0]])
    assert_near(aggregation_weights(mask, "constant", horizon=4, **counts), [[1 / 20, 1 / 20, 0], [0, 0, 0]])


def test_a_constant_aggregation_without_a_horizon_is_refused():
    with pytest.raises(ValueError, match="needs a horizon"):
        whole_step("constant")


# ---- whole recipes ------------------------------------------------------------------------------------------------------


def recipe_loss(log_probs, *, advantages, aggregation, unit="token", clip=PPO, kl_coef=0.0, horizon=None, mask=MASK):
    """Scalar loss of one step over the oracle batch; ``clip`` None is the policy gradient without a ratio."""
    if clip is None:
        losses = policy_gradient(log_probs, advantages, mask)
    else:
        losses = surrogate(log_probs, advantages, unit=unit, mask=mask, **clip)
    losses = losses + kl_coef * kl_penalty(log_probs, REFERENCE, mask, estimator="k3")
    return weighted_sum(losses, whole_step(aggregation, mask, horizon=horizon))


RAFT = torch.tensor([1.0, 0.0, 0.0, 1.0])  # the positive part of the rewards
W_REINFORCE = torch.tensor([0.1, -1.0, -1.0, 0.1])
NARROW = {"clip_low": 3e-4, "clip_high": 4e-4}
STD = group_std_advantages(*GROUP)  # 0.866024 at eps 1e-6
STD_TRL = group_std_advantages(*GROUP, eps=1e-4)


# 12.4: loss, L2 norm of the gradient, gradient in row order.
@pytest.mark.parametrize(
    ("recipe", "loss", "norm", "expected"),
    [
        pytest.param(
            {"advantages": STD_TRL, "aggregation": "sequence_mean", "kl_coef": 0.04},
            0.059294, 0.263068,
            [-0.079141, -0.054193, -0.071994, 0.162373, 0.088089, 0.054239, 0.121568, -0.001230, 0.054355, 0.004512],
            id="GRPO",
        ),
        pytest.param(
            {"advantages": STD_TRL, "aggregation": "token_mean"},
            0.284882, 0.307588,
            [-0.095694, -0.064146, -0.086588, 0.129173, 0.070892, 0.086588, 0.192704, 0.0, 0.086588, 0.0],
            id="TRL default",
        ),
        pytest.param(
            {"advantages": group_center_advantages(*GROUP), "aggregation": "constant", "horizon": 5},
            0.082253, 0.088808,
            [-0.027629, -0.018520, -0.025000, 0.037296, 0.020468, 0.025000, 0.055639, 0.0, 0.025000, 0.0],
            id="Dr.GRPO",
        ),
        pytest.param(
            {"advantages": STD, "aggregation": "token_mean", "clip": {**CLIP_HIGHER, "dual_clip": 10}},
            0.278003, 0.307641,
            [-0.095710, -0.064157, -0.086602, 0.129196, 0.070904, 0.086602, 0.192737, 0.0, 0.086602, 0.0],
            id="DAPO",
        ),
        pytest.param(
            {"advantages": STD, "aggregation": "sequence_mean", "unit": "sequence", "clip": NARROW},
            0.053509, 0.236466,
            [-0.067514] * 3 + [0.119638] * 2 + [0.058342] * 4 + [0.0],
            id="GSPO",
        ),
        pytest.param(  # n_i times GSPO's row loss: the sum over a row's decisions, with LUSPO's own clip (section 3)
            {
                "advantages": STD, "aggregation": "constant", "horizon": 1, "unit": "sequence",
                "clip": {"clip_low": 2e-3, "clip_high": 2.5e-3},
            },
            0.587350, 0.674848,
            [-0.202543] * 3 + [0.239276] * 2 + [0.233368] * 4 + [0.0],
            id="LUSPO",
        ),
        pytest.param(
            {"advantages": leave_one_out_advantages(*GROUP), "aggregation": "token_mean"},
            0.219340, 0.236823,
            [-0.073678, -0.049388, -0.066667, 0.099455, 0.054582, 0.066667, 0.148369, 0.0, 0.066667, 0.0],
            id="RLOO with token-level PPO",
        ),
        pytest.param(
            {"advantages": STD_TRL, "aggregation": "sequence_mean", "clip": None, "kl_coef": 0.04},
            -0.006657, 0.309517,
            [-0.071552, -0.072894, -0.071994, 0.109141, 0.107709, 0.054239, 0.055245, 0.052888, 0.054355, -0.211957],
            id="RGRA",
        ),
        pytest.param(
            {"advantages": RAFT, "aggregation": "token_mean", "clip": None},
            0.290000, 0.200000, [-0.1] * 3 + [0.0] * 6 + [-0.1], id="RAFT",
        ),
        pytest.param(
            {"advantages": RAFT, "aggregation": "token_mean"},
            -0.404599, 0.166440, [-0.110517, -0.074082, -0.1] + [0.0] * 7, id="RAFT++",
        ),
        pytest.param(
            {"advantages": W_REINFORCE, "aggregation": "token_mean"},
            0.693150, 0.314271,
            [-0.011052, -0.007408, -0.01, 0.149182, 0.081873, 0.1, 0.222554, 0.0, 0.1, 0.0],
            id="W-REINFORCE",
        ),
    ],
)  # fmt: skip
def test_recipes_have_the_loss_and_gradient_of_the_document(recipe, loss, norm, expected):
    log_probs = LOG_PROBS.clone().requires_grad_()
    actual = recipe_loss(log_probs, **recipe)
    grad = gradient(actual, log_probs)
    assert_near(actual, loss)
    assert_near(grad[MASK].norm(), norm)
    assert_near(grad[MASK], expected)


def test_on_policy_every_decision_has_the_gradient_of_its_advantage():
    # 12.4, invariants: A = +-0.866024 over 10 decisions; rows differ in length, so the token mean of the loss is not 0:
    # (-3 + 2 + 4 - 1) * 0.866024 / 10 = 0.173205. The sequence mean is.
    log_probs = LOG_PROBS.clone().requires_grad_()
    losses = surrogate(log_probs, STD, old=LOG_PROBS, **PPO)
    loss = weighted_sum(losses, whole_step("token_mean"))
    assert_near(loss, 0.173205)
    assert_near(weighted_sum(losses, whole_step("sequence_mean")), 0.0)
    assert_near(gradient(loss, log_probs)[MASK], [-0.086602] * 3 + [0.086602] * 6 + [-0.086602])


def test_masking_a_truncated_row_matches_the_oracles():
    # 12.4, invariants: row 2 masked, group statistics unchanged; its row still counts in the sequence mean.
    mask = MASK.clone()
    mask[2] = False
    losses = surrogate(LOG_PROBS, STD, mask=mask, **PPO)
    assert_near(weighted_sum(losses, whole_step("token_mean", mask)), -0.250488)
    assert_near(weighted_sum(losses, whole_step("sequence_mean", mask)), -0.215074)
    assert_near(weighted_sum(losses, whole_step("constant", mask, horizon=5)), -0.075146)
    row_removed = aggregation_weights(mask, "sequence_mean", num_decisions=6, num_rows=3)
    assert_near(weighted_sum(losses, row_removed), -0.286765)


def test_micro_batches_need_the_counts_of_the_whole_step():
    # Section 4: {row 0} and {rows 1, 2, 3} sum to the loss of the step; averaging their own token means is another objective.
    losses = surrogate(LOG_PROBS, STD, **PPO)
    parts = [slice(0, 1), slice(1, 4)]
    whole = sum(
        weighted_sum(losses[part], aggregation_weights(MASK[part], "token_mean", num_decisions=10, num_rows=4))
        for part in parts
    )
    local = sum(weighted_sum(losses[part], whole_step("token_mean", MASK[part])) for part in parts) / 2
    assert_near(whole, 0.284931)
    assert_near(local, -0.031211)


# ---- masks, empty rows and empty steps ----------------------------------------------------------------------------------


def test_a_row_without_decisions_has_ratio_one_and_only_dilutes_the_sequence_mean():
    # Rows of 2 and 0 decisions, on-policy, A = 1: each decision loses 1. Token mean 1; sequence mean (1 + 0) / 2.
    mask = torch.tensor([[True, True], [False, False]])
    log_probs = torch.tensor([[-1.0, -2.0], [NAN, NAN]], requires_grad=True)
    for unit in ("token", "sequence"):
        ratios = log_ratio(log_probs, log_probs.detach(), mask, unit=unit)
        assert ratios[1].tolist() == [0.0, 0.0]
        losses = clipped_surrogate(ratios, torch.ones(2), clip_low=0.2, clip_high=0.2)
        loss = weighted_sum(losses, whole_step("token_mean", mask))
        assert_near(loss, -1.0)
        assert_near(weighted_sum(losses, whole_step("sequence_mean", mask)), -0.5)
        assert gradient(loss, log_probs).tolist() == [[-0.5, -0.5], [0.0, 0.0]]


@pytest.mark.parametrize("aggregation", ["token_mean", "sequence_mean", "constant"])
@pytest.mark.parametrize("clip", [PPO, {**CLIP_HIGHER, "dual_clip": 3.0}, None])
@pytest.mark.parametrize("unit", ["token", "sequence"])
def test_a_step_without_decisions_has_a_loss_of_zero_that_is_connected_to_the_policy(aggregation, clip, unit):
    mask = torch.zeros_like(MASK)
    log_probs = torch.full((4, 4), NAN, requires_grad=True)
    recipe = {"aggregation": aggregation, "clip": clip, "unit": unit, "kl_coef": 0.1, "horizon": 5}
    loss = recipe_loss(log_probs, advantages=ADVANTAGES, mask=mask, **recipe)
    assert loss.item() == 0.0 and loss.requires_grad
    assert gradient(loss, log_probs).tolist() == [[0.0] * 4] * 4


def test_a_step_without_rows_or_columns_has_a_loss_of_zero():
    for shape in [(0, 3), (3, 0)]:
        mask = torch.zeros(shape, dtype=torch.bool)
        losses = torch.zeros(shape, requires_grad=True)
        assert weighted_sum(losses, whole_step("sequence_mean", mask)).item() == 0.0


def test_per_decision_advantages_do_not_matter_where_masked():
    log_probs = torch.tensor([[-1.0, -1.0]], requires_grad=True)
    mask = torch.tensor([[True, False]])
    for losses in (
        surrogate(log_probs, torch.tensor([[3.0, NAN]]), old=torch.full((1, 2), -1.0), mask=mask, **PPO),
        policy_gradient(log_probs, torch.tensor([[3.0, NAN]]), mask),
    ):
        loss = weighted_sum(losses, whole_step("token_mean", mask))
        assert loss.isfinite()
        assert gradient(loss, log_probs).tolist() == [[-3.0, 0.0]]


def test_the_policy_gradient_is_zero_where_masked():
    # -A log pi = -(2 * -0.5) = 1.
    losses = policy_gradient(torch.tensor([[-0.5, NAN]]), torch.tensor([2.0]), torch.tensor([[True, False]]))
    assert losses.tolist() == [[1.0, 0.0]]


eighths = st.integers(-24, 0).map(lambda k: k / 8)
masks = st.lists(st.lists(st.booleans(), min_size=4, max_size=4), min_size=2, max_size=5)
RECIPES = {
    "clip": {"clip": PPO},
    "dual clip": {"clip": {"clip_low": 0.2, "clip_high": 0.28, "dual_clip": 1.3}},
    "sequence": {"clip": PPO, "unit": "sequence"},
    "policy gradient": {"clip": None},
}


@st.composite
def steps(draw):
    """A recipe and a step for it: mask, log-probs, old and reference log-probs, advantages."""
    mask = torch.tensor(draw(masks))
    num, width = mask.shape
    tensor = st.lists(st.lists(eighths, min_size=width, max_size=width), min_size=num, max_size=num).map(torch.tensor)
    advantages = torch.tensor(draw(st.lists(st.sampled_from([-2.0, -0.5, 0.0, 1.0]), min_size=num, max_size=num)))
    recipe = draw(st.sampled_from(sorted(RECIPES)).map(RECIPES.get))
    kl = draw(st.sampled_from(["k1", "k2", "k3"]))
    aggregation = draw(st.sampled_from(["token_mean", "sequence_mean", "constant"]))
    return {**recipe, "kl": kl, "aggregation": aggregation}, mask, draw(tensor), draw(tensor), draw(tensor), advantages


def loss_and_gradient(recipe, mask, log_probs, old, reference, advantages, counts=None):
    """Scalar loss and its gradient for log-probs ``[N, T]``; ``counts`` are those of ``mask`` unless given."""
    log_probs = log_probs.clone().requires_grad_()
    if recipe["clip"] is None:
        losses = policy_gradient(log_probs, advantages, mask)
    else:
        ratios = log_ratio(log_probs, old, mask, unit=recipe.get("unit", "token"))
        losses = clipped_surrogate(ratios, advantages, **recipe["clip"])
    losses = losses + 0.1 * kl_penalty(log_probs, reference, mask, estimator=recipe["kl"])
    num_decisions, num_rows = counts or (int(mask.sum()), len(mask))
    weights = aggregation_weights(mask, recipe["aggregation"], num_decisions=num_decisions, num_rows=num_rows, horizon=6)
    loss = weighted_sum(losses, weights)
    return loss.detach(), gradient(loss, log_probs)


@given(step=steps(), junk=st.sampled_from(JUNK), other=st.sampled_from(JUNK))
def test_masked_positions_never_matter_even_when_nan_or_infinite(step, junk, other):
    recipe, mask, log_probs, old, reference, advantages = step
    loss, grad = loss_and_gradient(*step)
    spoiled = [tensor.masked_fill(~mask, filler) for tensor, filler in [(log_probs, junk), (old, other), (reference, junk)]]
    spoiled_loss, spoiled_grad = loss_and_gradient(recipe, mask, *spoiled, advantages)
    assert_near(spoiled_loss, loss, atol=0)
    assert_near(spoiled_grad, grad, atol=0)
    assert not grad[~mask].any()


@given(step=steps(), data=st.data())
def test_cutting_a_step_into_micro_batches_changes_neither_loss_nor_gradient(step, data):
    recipe, mask, *tensors = step
    counts = int(mask.sum()), len(mask)
    loss, grad = loss_and_gradient(*step)
    cut = data.draw(st.integers(1, len(mask) - 1))
    # A micro-batch is also cut to the width of its longest row, so the halves need not have the same shape.
    parts, grads = [], torch.zeros_like(grad)
    for rows in (slice(0, cut), slice(cut, None)):
        used = mask[rows].any(dim=0).nonzero()
        width = int(used.max()) + 1 if len(used) else 0
        pieces = [tensor[rows, :width] if tensor.ndim == 2 else tensor[rows] for tensor in tensors]
        part, part_grad = loss_and_gradient(recipe, mask[rows, :width], *pieces, counts=counts)
        parts.append(part)
        grads[rows, :width] = part_grad
    assert_near(sum(parts), loss)
    assert_near(grads, grad)


@given(step=steps(), data=st.data())
def test_permuting_rows_permutes_the_gradient_and_keeps_the_loss(step, data):
    recipe, mask, *tensors = step
    order = torch.tensor(data.draw(st.permutations(range(len(mask)))))
    loss, grad = loss_and_gradient(*step)
    permuted_loss, permuted_grad = loss_and_gradient(recipe, mask[order], *(tensor[order] for tensor in tensors))
    assert_near(permuted_loss, loss)
    assert_near(permuted_grad, grad[order])


@given(step=steps())
def test_a_column_of_padding_changes_neither_loss_nor_gradient(step):
    recipe, mask, *tensors = step
    loss, grad = loss_and_gradient(*step)
    wider = [torch.nn.functional.pad(tensor, (0, 1), value=NAN) if tensor.ndim == 2 else tensor for tensor in tensors]
    wide_loss, wide_grad = loss_and_gradient(recipe, torch.nn.functional.pad(mask, (0, 1)), *wider)
    assert_near(wide_loss, loss)
    assert_near(wide_grad, torch.nn.functional.pad(grad, (0, 1)))


@given(d=st.floats(-30, 30, width=32))
def test_k2_and_k3_are_never_negative(d):
    mask = torch.ones(1, 1, dtype=torch.bool)
    for estimator in ("k2", "k3"):
        assert kl_penalty(token(d), token(0.0), mask, estimator=estimator).item() >= 0.0
