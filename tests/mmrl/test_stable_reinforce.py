"""StableReinforce's parts against the numbers of the method's document: pre-clip, both forms of the filter, returns."""

import math
from types import SimpleNamespace

import pytest
import torch

from mmrl import recipe
from mmrl.algorithm_config import AlgorithmConfig
from mmrl.algorithms import PRESETS
from mmrl.losses import clipped_surrogate, log_ratio
from mmrl.selection import informative_rows
from mmrl.types import Forward

STABLE = PRESETS["stable_reinforce"].slots
LIMIT = STABLE["max_log_ratio"]


def algorithm(**more):
    return AlgorithmConfig(name="stable_reinforce", **{**STABLE, "kl_coef": 0.0, **more})


def inputs(rewards, lengths=None, kl=None):
    rewards = torch.tensor(rewards)
    lengths = lengths or [1] * len(rewards)
    mask = torch.arange(max(lengths))[None] < torch.tensor(lengths)[:, None]
    ids = torch.arange(len(rewards))
    return recipe.CreditInputs(
        rewards=rewards, group_ids=ids, mask=mask, correct=rewards > 0.5, terms=rewards[:, None], weights=torch.ones(1),
        domains=torch.zeros_like(ids), kl=kl,
    )  # fmt: skip


def filtered(config, x):
    """Advantages of one-decision rollouts after the filter, ``[N]``."""
    advantages = recipe.estimate_advantages(config, x)
    total, count = recipe.return_sum(config, x)
    center = total / count if config.advantage_limit_around == "mean" else 0.0
    return recipe.finish_advantages(config, advantages, SimpleNamespace(), center=center)[:, 0]


# ---- 5.2 ----------------------------------------------------------------------------------------------------------------

PRE_CLIP = [  # log-difference, A, ratio, loss with the bound, loss without
    (0.05, 1, 1.051271, -1.051271, -1.051271),
    (0.5, 1, 1.648721, -1.2, -1.2),
    (-0.5, 1, 0.606531, -0.606531, -0.606531),
    (0.5, -1, 1.648721, 1.648721, 1.648721),
    (12, -1, 1000, 1000, 162754.791419),
    (12, 1, 1000, -1.2, -1.2),
    (-12, -1, 0.001, 0.8, 0.8),
    (-12, 1, 0.001, -0.001, -0.000006144),
    (800, -1, 1000, 1000, math.inf),
]


@pytest.mark.parametrize(("difference", "advantage", "ratio", "bounded", "free"), PRE_CLIP)
def test_log_ratios_are_bounded_before_the_exponential(difference, advantage, ratio, bounded, free):
    mask, zero = torch.ones(1, 1, dtype=torch.bool), torch.zeros(1, 1)
    log_probs = torch.tensor([[float(difference)]], requires_grad=True)
    log_ratios = log_ratio(log_probs, zero, mask, limit=LIMIT)
    credit = torch.tensor([float(advantage)])
    assert log_ratios.exp().item() == pytest.approx(ratio, rel=1e-5)
    loss = clipped_surrogate(log_ratios, credit, clip_low=0.2, clip_high=0.2)
    assert loss.item() == pytest.approx(bounded, rel=1e-5)
    loss.sum().backward()
    assert math.isfinite(log_probs.grad.item()) and (log_probs.grad.item() == 0 or abs(difference) < LIMIT)
    raw = clipped_surrogate(torch.tensor([[float(difference)]]), credit, clip_low=0.2, clip_high=0.2)
    assert raw.item() == pytest.approx(free, rel=1e-3)


def test_decisions_that_meet_a_narrow_bound_are_counted_and_wide_bounds_are_silent():
    forward = Forward(log_probs=torch.tensor([[8.0, -8.0, 0.1, -9.0]]))
    mask = torch.tensor([[True, True, True, False]])
    arguments = (forward, torch.zeros(1, 4), mask, torch.ones(1), None)
    sums = recipe.decision_losses(algorithm(), *arguments).sums
    assert (sums["ratio/bound_low"].item(), sums["ratio/bound_high"].item()) == (1, 1)
    assert "ratio/bound_low" not in recipe.decision_losses(algorithm(max_log_ratio=20.0), *arguments).sums


# ---- 5.3 ----------------------------------------------------------------------------------------------------------------

PAPER, CODE = {}, {"advantage_limit_around": "mean"}
TWENTY = [2.0] * 18 + [0.5, 0.0]
TWELVE = [2.0] * 8 + [0.0] * 4


@pytest.mark.parametrize(
    ("rewards", "form", "expected"),
    [
        (TWENTY, PAPER, [0.329617] * 18 + [-2.495672, 0.0]),
        (TWENTY, CODE, [0.329617] * 18 + [0.0, 0.0]),  # -2.5 lies more than 3 below 1.825, the mean before whitening
        (TWELVE, PAPER, [0.707107] * 8 + [-1.414214] * 4),
        (TWELVE, CODE, [0.707107] * 8 + [-1.414214] * 4),
        ([2.0, 1.5, 0.5, 0.0], PAPER, [1.264911, 0.632456, -0.632456, -1.264911]),
        ([1.0] * 255 + [0.0], PAPER, [0.062622] * 255 + [0.0]),
        ([1.0] * 255 + [0.0], CODE, [0.062622] * 255 + [0.0]),
    ],
)
def test_outliers_of_whitened_rewards_become_zero(rewards, form, expected):
    torch.testing.assert_close(filtered(algorithm(**form), inputs(rewards)), torch.tensor(expected), atol=2e-6, rtol=0)


def test_the_rare_failure_that_is_dropped_lies_sixteen_deviations_off():
    for ddof, score in ((0, -15.968719), (1, -15.9375)):
        advantages = recipe.estimate_advantages(algorithm(advantage_ddof=ddof), inputs([1.0] * 255 + [0.0]))
        assert advantages[-1, 0].item() == pytest.approx(score, abs=1e-3)


@pytest.mark.parametrize(("failures", "of", "dropped"), [(20, 100, False), (11, 100, False), (9, 100, True), (1, 100, True)])
def test_above_nine_tenths_of_success_every_failure_is_dropped(failures, of, dropped):
    advantages = filtered(algorithm(), inputs([0.0] * failures + [1.0] * (of - failures)))
    assert (advantages[:failures] == 0).all() == dropped
    assert (advantages[failures:] > 0).all()


def test_the_code_also_drops_whitened_values_beyond_ten():

    config = algorithm(**CODE, advantage_limit=200.0)
    x = inputs([0.0] * 400 + [1.0])  # z of the success is sqrt(400) = 20
    assert filtered(config, x)[-1].item() == 0.0
    assert filtered(algorithm(advantage_limit=200.0), x)[-1].item() == pytest.approx(20.0, abs=1e-3)


def test_the_mean_of_returns_is_over_decisions():
    total, count = recipe.return_sum(algorithm(**CODE), inputs([1.0, 4.0], lengths=[1, 3]))
    assert (total, count) == (13.0, 4.0)


def test_a_filter_around_the_mean_needs_returns():
    with pytest.raises(ValueError, match="needs advantage token_whitened"):
        AlgorithmConfig(advantage="group_std", advantage_limit=3.0, advantage_limit_around="mean")
    with pytest.raises(ValueError, match="advantage_limit None"):
        AlgorithmConfig(advantage="token_whitened", advantage_limit_around="mean")


# ---- 5.5 ----------------------------------------------------------------------------------------------------------------


def test_returns_with_the_kl_in_the_reward():
    x = inputs([2.0], lengths=[3], kl=1e-3 * torch.tensor([[0.1, -0.05, 0.2]]))
    torch.testing.assert_close(
        x.decision_rewards(), torch.tensor([[-0.0001, 0.00005, 1.9998]], dtype=torch.float64), atol=1e-9, rtol=0
    )
    credit, _ = recipe._returns(algorithm(), x)
    torch.testing.assert_close(credit, torch.tensor([[1.99975, 1.99985, 1.9998]], dtype=torch.float64), atol=1e-9, rtol=0)


# ---- groups of one ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("rewards", "advantage", "expected"),
    [
        ([1.0, 0.0, 1.0], "token_whitened", [True] * 3),
        ([1.0, 1.0, 1.0], "token_whitened", [False] * 3),
        ([1.0, 0.0, math.nan], "token_whitened", [True, True, False]),
        ([1.0, 0.0, 1.0], "group_std", [False] * 3),
    ],
)
def test_rollouts_without_siblings_carry_signal_where_all_are_compared(rewards, advantage, expected):
    batch = SimpleNamespace(rewards=torch.tensor(rewards), reward_terms={}, group_ids=torch.arange(3))
    assert informative_rows(AlgorithmConfig(advantage=advantage), batch).tolist() == expected


def test_groups_with_siblings_are_informative_as_before():
    batch = SimpleNamespace(rewards=torch.tensor([1.0, 1.0, 0.0]), reward_terms={}, group_ids=torch.tensor([0, 0, 1]))
    assert informative_rows(AlgorithmConfig(advantage="token_whitened"), batch).tolist() == [False, False, True]
