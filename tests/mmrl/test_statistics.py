"""Oracles: methods/robotics.md 5.11 (E1 to E6), Newcombe 1998, and tables of Student's t."""

import math
import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mmrl.statistics import (
    chain_success,
    clopper_pearson_interval,
    difference_interval,
    mcnemar_exact,
    mean_interval,
    paired_difference_interval,
    pass_at_k,
    sample_size,
    suite_means,
    wilson_interval,
)


@pytest.mark.parametrize(
    ("successes", "n", "low", "high"),
    [
        (485, 500, 0.951096, 0.981737),
        (45, 50, 0.786398, 0.956524),
        (9, 10, 0.595850, 0.982124),
        (10, 10, 0.722467, 1.0),
        (0, 10, 0.0, 0.277533),
    ],
)
def test_wilson_interval_matches_the_worked_values(successes, n, low, high):
    assert wilson_interval(successes, n) == pytest.approx((low, high), abs=1e-6)


def test_wilson_interval_of_nothing_is_everything():
    assert wilson_interval(0, 0) == (0.0, 1.0)


@given(n=st.integers(1, 400), data=st.data())
def test_wilson_interval_holds_the_share_and_mirrors_failures(n, data):
    k = data.draw(st.integers(0, n))
    low, high = wilson_interval(k, n)
    assert 0 <= low <= k / n <= high <= 1
    mirrored = wilson_interval(n - k, n)
    assert (1 - mirrored[1], 1 - mirrored[0]) == pytest.approx((low, high), abs=1e-12)


def test_more_confidence_is_a_wider_interval():
    narrow, wide = wilson_interval(30, 50, confidence=0.8), wilson_interval(30, 50, confidence=0.99)
    assert wide[0] < narrow[0] < narrow[1] < wide[1]


@pytest.mark.parametrize(("successes", "n"), [(11, 10), (-1, 10)])
def test_impossible_counts_are_refused(successes, n):
    with pytest.raises(ValueError, match="successes is"):
        wilson_interval(successes, n)


@pytest.mark.parametrize("confidence", [0.0, 1.0, 95])
def test_confidence_is_a_share_not_a_percentage(confidence):
    with pytest.raises(ValueError, match="confidence is"):
        wilson_interval(1, 2, confidence=confidence)
    with pytest.raises(ValueError, match="confidence is"):
        mean_interval([1.0, 2.0], confidence=confidence)


def test_mean_interval_is_students_t():
    # 1..5: mean 3, s = sqrt(2.5), standard error sqrt(0.5) = 0.707107; t(0.975, 4) = 2.776445 (tables), half = 1.963243.
    assert mean_interval([1, 2, 3, 4, 5]) == pytest.approx((3 - 1.963243, 3 + 1.963243), abs=1e-5)


def test_mean_interval_leaves_out_entries_that_do_not_apply():
    assert mean_interval([1.0, math.nan, 2.0, 4.0]) == mean_interval([1.0, 2.0, 4.0])


@pytest.mark.parametrize("values", [[], [3.0], [math.nan, 3.0]])
def test_one_value_bounds_nothing(values):
    assert all(math.isnan(bound) for bound in mean_interval(values))


def test_bootstrap_repeats_with_its_generator_and_agrees_with_t_on_many_values():
    values = np.random.default_rng(0).normal(2.0, 3.0, size=400)
    first = mean_interval(values, generator=np.random.default_rng(7))
    assert first == mean_interval(values, generator=np.random.default_rng(7))
    # The standard error is about 0.15; percentile noise of 10k resamples is a few hundredths of it.
    assert first == pytest.approx(mean_interval(values), abs=0.02)


def test_bootstrap_never_leaves_the_range_of_the_values():
    low, high = mean_interval([0, 0, 0, 0, 1], generator=np.random.default_rng(1))
    assert 0.0 <= low < high <= 1.0


def test_difference_interval_is_newcombes_method_10():
    # Newcombe 1998, table II: 56/70 against 48/80 differ by 0.2, 95 % interval 0.0524 to 0.3339.
    before, after = (48 / 80, *wilson_interval(48, 80)), (56 / 70, *wilson_interval(56, 70))
    assert difference_interval(before, after) == pytest.approx((0.0524, 0.3339), abs=5e-5)


def test_swapping_the_two_policies_flips_the_difference():
    one, other = (0.2, 0.1, 0.35), (0.6, 0.5, 0.65)
    low, high = difference_interval(one, other)
    assert difference_interval(other, one) == pytest.approx((-high, -low))


def test_mcnemar_matches_the_worked_value():
    # 2 (1 + 11 + 55) / 2^11 = 134 / 2048
    assert mcnemar_exact(9, 2) == pytest.approx(0.065430, abs=1e-6)
    assert mcnemar_exact(2, 9) == mcnemar_exact(9, 2)


def test_mcnemar_of_equal_or_no_disagreement_is_one():
    assert mcnemar_exact(0, 0) == mcnemar_exact(5, 5) == mcnemar_exact(3, 2) == 1.0


def test_mcnemar_takes_thousands_of_pairs():
    # Twice the chance that 3000 coins agree: 2 / 2^3000, below the smallest float.
    assert mcnemar_exact(3000, 0) == 0.0
    assert mcnemar_exact(0, 100) == 2.0**-99
    with pytest.raises(ValueError, match="counts of 0 or more"):
        mcnemar_exact(-1, 2)


@pytest.mark.parametrize(
    ("successes", "n", "low", "high"), [(9, 10, 0.554984, 0.997471), (485, 500, 0.951002, 0.983114), (0, 10, 0.0, 0.308497)]
)
def test_clopper_pearson_matches_the_worked_values(successes, n, low, high):
    # 0 of 10: the upper bound solves (1 - p)^10 = 0.025, so p = 1 - 0.025^(1/10) = 0.308497
    assert clopper_pearson_interval(successes, n) == pytest.approx((low, high), abs=1e-6)


def test_clopper_pearson_of_everything_ends_at_one_and_of_nothing_is_everything():
    assert clopper_pearson_interval(10, 10) == pytest.approx((1 - 0.308497, 1.0), abs=1e-6)
    assert clopper_pearson_interval(0, 0) == (0.0, 1.0)
    with pytest.raises(ValueError, match="successes is"):
        clopper_pearson_interval(3, 2)


def test_telling_90_from_95_percent_takes_435_episodes_of_each():
    assert sample_size(0.90, 0.95) == sample_size(0.95, 0.90) == 435
    assert sample_size(0.90, 0.95, power=0.9) > 435 > sample_size(0.5, 0.6)
    with pytest.raises(ValueError, match="two different numbers"):
        sample_size(0.9, 0.9)


def test_chains_are_summed_up_as_calvin_does():
    shares, average = chain_success([5, 3, 0, 1, 5], 5)
    assert shares == pytest.approx([0.8, 0.6, 0.6, 0.4, 0.4]) and average == pytest.approx(2.8)
    with pytest.raises(ValueError, match="0 to 5"):
        chain_success([6], 5)


def test_macro_weighs_tasks_and_micro_weighs_episodes():
    groups = [[1.0] * 45 + [0.0] * 5, [1.0] * 5 + [0.0] * 5]
    means = suite_means(groups, generator=np.random.default_rng(0))
    assert means["macro"][0] == pytest.approx(0.70) and means["micro"][0] == pytest.approx(50 / 60)
    for mean, low, high in means.values():
        assert 0.0 <= low < mean < high <= 1.0
    # Tasks at 0.9 and 0.5: drawing the same task twice (each with chance 1/4) reaches below 0.5 and up to 0.9.
    assert means["macro"][1] < 0.5 and means["macro"][2] > 0.88
    assert means == suite_means(groups, generator=np.random.default_rng(0))


def test_the_suite_interval_of_one_task_is_the_bootstrap_of_its_episodes():
    values = [1.0] * 30 + [0.0] * 20
    means = suite_means([values], generator=np.random.default_rng(0))
    assert means["macro"] == means["micro"]
    assert means["macro"][1:] == pytest.approx(mean_interval(values, generator=np.random.default_rng(1)), abs=0.03)
    with pytest.raises(ValueError, match="at least one"):
        suite_means([values, []], generator=np.random.default_rng(0))


def test_paired_difference_is_newcombes_method_10_for_pairs():
    # Newcombe 1998 (paired), table III: 36, 12, 2, 0 of 50 pairs differ by 0.2, 95 % interval 0.0569 to 0.3404.
    assert paired_difference_interval(36, 12, 2, 0) == pytest.approx((0.2, 0.0569, 0.3404), abs=5e-5)
    difference, low, high = paired_difference_interval(36, 2, 12, 0)
    assert (difference, low, high) == pytest.approx((-0.2, -0.3404, -0.0569), abs=5e-5)


def test_a_correlation_smaller_than_the_continuity_correction_counts_as_none():
    # 5 * 4 - 4 * 4 = 4 is less than n / 2 = 8.5, so the pairs are taken as independent.
    share = (9 / 17, *wilson_interval(9, 17))
    assert paired_difference_interval(5, 4, 4, 4)[1:] == pytest.approx(difference_interval(share, share))


def test_pairs_that_agree_make_the_interval_narrower_than_independent_measurements():
    paired = paired_difference_interval(60, 12, 3, 25)
    one, other = (72 / 100, *wilson_interval(72, 100)), (63 / 100, *wilson_interval(63, 100))
    low, high = difference_interval(other, one)
    assert low < paired[1] < paired[0] < paired[2] < high
    with pytest.raises(ValueError, match="not all 0"):
        paired_difference_interval(0, 0, 0, 0)


def test_importing_statistics_does_not_import_torch_or_scipy():
    code = "import sys, mmrl.statistics; print([name for name in ('torch', 'scipy') if name in sys.modules])"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip() == "[]"


@pytest.mark.parametrize(
    ("successes", "n", "k", "expected"),
    [
        (1, 4, 1, 0.25),
        (1, 4, 2, 0.5),  # of the 6 pairs 3 hold the success
        (2, 4, 2, 5 / 6),
        (3, 10, 8, 1.0),  # 7 failures do not fill 8 attempts
        (0, 64, 64, 0.0),
        (5, 200, 100, 0.9703084),  # 1 - C(195, 100) / C(200, 100) = 1 - (100 99 98 97 96) / (200 199 198 197 196)
    ],
)
def test_pass_at_k_counts_the_choices_without_a_success(successes, n, k, expected):
    assert pass_at_k(successes, n, k) == pytest.approx(expected, abs=1e-7)


@given(n=st.integers(1, 60), data=st.data())
def test_pass_at_k_is_the_success_rate_at_one_and_grows_with_k(n, data):
    successes = data.draw(st.integers(0, n))
    values = [pass_at_k(successes, n, k) for k in range(1, n + 1)]
    assert values[0] == pytest.approx(successes / n)
    assert values == sorted(values)
    assert values[-1] == (1.0 if successes else 0.0)


@pytest.mark.parametrize(("successes", "n", "k"), [(5, 4, 1), (-1, 4, 1), (1, 4, 0), (1, 4, 5)])
def test_pass_at_k_refuses_more_attempts_than_there_are(successes, n, k):
    with pytest.raises(ValueError, match=f"n {n}, k {k}"):
        pass_at_k(successes, n, k)
