"""How sure a measured number is: intervals of proportions, means and differences, and the paired test of two policies.

Plain Python and numpy, no torch: evaluation, reports and benchmarks share these. Every interval is a ``(low, high)`` pair.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import NormalDist

import numpy as np


def wilson_interval(successes: int, n: int, confidence: float = 0.95) -> tuple[float, float]:
    """Wilson's score interval of a proportion: ``(p + z^2/2n -+ z sqrt(p(1-p)/n + z^2/4n^2)) / (1 + z^2/n)``.

    Stays inside [0, 1] and has width at 0 of n and n of n, where the textbook interval claims certainty. ``n`` of 0 knows
    nothing: (0, 1).
    """
    if not 0 <= successes <= n:
        raise ValueError(f"successes is {successes} of n = {n}; expected 0 <= successes <= n.")
    z = _normal_quantile(confidence)
    if n == 0:
        return 0.0, 1.0
    share = successes / n
    scale = 1 + z * z / n
    center = (share + z * z / (2 * n)) / scale
    half = z * math.sqrt(share * (1 - share) / n + z * z / (4 * n * n)) / scale
    # At the ends the exact bound is 0 or 1; the subtraction above leaves a residue of about 1e-17.
    low = 0.0 if successes == 0 else center - half
    high = 1.0 if successes == n else center + half
    return low, high


def clopper_pearson_interval(successes: int, n: int, confidence: float = 0.95) -> tuple[float, float]:
    """Exact binomial interval of a proportion; covers at least ``confidence`` for any true share, so it is wider than Wilson's.

    ``[B(alpha/2; k, n-k+1), B(1-alpha/2; k+1, n-k)]``, quantiles of the beta distribution.
    """
    if not 0 <= successes <= n:
        raise ValueError(f"successes is {successes} of n = {n}; expected 0 <= successes <= n.")
    _check_confidence(confidence)
    from scipy.special import betaincinv

    tail = (1 - confidence) / 2
    low = 0.0 if successes == 0 else float(betaincinv(successes, n - successes + 1, tail))
    high = 1.0 if successes == n else float(betaincinv(successes + 1, n - successes, 1 - tail))
    return low, high


def sample_size(share: float, other: float, *, significance: float = 0.05, power: float = 0.8) -> int:
    """Trials of each of two independent arms, so that a two-sided test tells ``share`` from ``other``.

    ``n = (z_a sqrt(2 m (1-m)) + z_b sqrt(p(1-p) + q(1-q)))^2 / (p - q)^2`` with ``m`` the mean of ``p`` and ``q``, rounded up.
    """
    if share == other or not (0 <= share <= 1 and 0 <= other <= 1):
        raise ValueError(f"shares are {share} and {other}; expected two different numbers in [0, 1].")
    z_a, z_b = _normal_quantile(1 - significance), NormalDist().inv_cdf(power)
    middle = (share + other) / 2
    spread = share * (1 - share) + other * (1 - other)
    root = z_a * math.sqrt(2 * middle * (1 - middle)) + z_b * math.sqrt(spread)
    return math.ceil(root**2 / (share - other) ** 2)


def suite_means(
    groups: Sequence[Sequence[float]],
    confidence: float = 0.95,
    *,
    generator: np.random.Generator,
    num_resamples: int = 4000,
) -> dict[str, tuple[float, float, float]]:
    """``macro`` (mean of the groups' means) and ``micro`` (mean of all values), each ``(mean, low, high)``.

    ``groups`` holds the values of each task's episodes. Percentile bootstrap in two stages: tasks are drawn with replacement,
    then episodes of each, so the interval speaks of other tasks and other episodes of the same kind. One task says nothing of
    others; its interval covers episodes only.
    """
    _check_confidence(confidence)
    arrays = [np.asarray(group, dtype=np.float64) for group in groups]
    if not arrays or any(not len(array) for array in arrays):
        raise ValueError("suite_means: expected at least one task, each with at least one value.")
    sizes = np.array([len(array) for array in arrays])
    means = np.array([array.mean() for array in arrays])
    drawn = generator.integers(len(arrays), size=(num_resamples, len(arrays)))
    macro, sums, counts = (np.zeros(num_resamples) for _ in range(3))
    for column in drawn.T:
        for place, array in enumerate(arrays):
            rows = np.flatnonzero(column == place)
            totals = array[generator.integers(len(array), size=(len(rows), len(array)))].sum(axis=1)
            macro[rows] += totals / len(array) / len(arrays)
            sums[rows] += totals
            counts[rows] += len(array)
    tails = [(1 - confidence) / 2, (1 + confidence) / 2]
    micro_mean = float((means * sizes).sum() / sizes.sum())
    return {
        "macro": (float(means.mean()), *(float(bound) for bound in np.quantile(macro, tails))),
        "micro": (micro_mean, *(float(bound) for bound in np.quantile(sums / counts, tails))),
    }


def chain_success(solved: Sequence[int], length: int) -> tuple[list[float], float]:
    """CALVIN's summary of chains of ``length`` instructions, of which each chain solved the first ``solved``.

    Returns the share of chains with at least 1, 2, ... ``length`` solved, and the average number solved (their sum).
    """
    if not solved or any(not 0 <= count <= length for count in solved):
        raise ValueError(f"solved is {list(solved)}; expected at least one count, each 0 to {length}.")
    shares = [sum(count >= k for count in solved) / len(solved) for k in range(1, length + 1)]
    return shares, sum(shares)


def pass_at_k(successes: int, n: int, k: int) -> float:
    """Chance that one of ``k`` attempts at a task succeeds, from ``n >= k`` attempts: ``1 - C(n - successes, k) / C(n, k)``.

    Unbiased; Chen et al. 2021 (arXiv 2107.03374); the mean over tasks is pass@k.
    """
    if not (0 <= successes <= n and 1 <= k <= n):
        raise ValueError(f"successes is {successes}, n {n}, k {k}; expected 0 <= successes <= n and 1 <= k <= n.")
    return 1.0 - math.comb(n - successes, k) / math.comb(n, k)


def mean_interval(
    values: Sequence[float] | np.ndarray,
    confidence: float = 0.95,
    *,
    generator: np.random.Generator | None = None,
    num_resamples: int = 10_000,
) -> tuple[float, float]:
    """Interval of the mean of ``values``, for metrics that are not yes or no; NaN entries (does not apply) are left out.

    Without ``generator``: Student's t, ``mean -+ t sqrt(s^2/n)`` with the sample variance. With one: percentile bootstrap
    over ``num_resamples`` resamples, for skewed or bounded metrics. Fewer than two values bound nothing: (nan, nan).
    """
    _check_confidence(confidence)
    array = np.asarray(values, dtype=np.float64).ravel()
    array = array[~np.isnan(array)]
    n = len(array)
    if n < 2:
        return math.nan, math.nan
    tail = (1 - confidence) / 2
    if generator is None:
        from scipy.special import stdtrit  # quantile of Student's t; scipy.stats takes half a second to import

        half = float(stdtrit(n - 1, 1 - tail)) * float(array.std(ddof=1)) / math.sqrt(n)
        return float(array.mean()) - half, float(array.mean()) + half
    means = np.empty(num_resamples)
    block = max(1, 4_000_000 // n)  # rows of indices held at once
    for start in range(0, num_resamples, block):
        stop = min(start + block, num_resamples)
        means[start:stop] = array[generator.integers(n, size=(stop - start, n))].mean(axis=1)
    low, high = np.quantile(means, [tail, 1 - tail])
    return float(low), float(high)


def difference_interval(before: tuple[float, float, float], after: tuple[float, float, float]) -> tuple[float, float]:
    """Interval of ``after - before`` from two ``(mean, low, high)``: Newcombe's square-and-add (1998, method 10).

    With Wilson intervals inside it is Newcombe's interval of two proportions. It takes the two measurements as independent;
    on the same tasks they usually agree more than that, and the interval is then wider than it needs to be.
    """
    (mean_0, low_0, high_0), (mean_1, low_1, high_1) = before, after
    difference = mean_1 - mean_0
    return difference - math.hypot(mean_1 - low_1, high_0 - mean_0), difference + math.hypot(high_1 - mean_1, mean_0 - low_0)


def paired_difference_interval(
    both: int, only_first: int, only_second: int, neither: int, confidence: float = 0.95
) -> tuple[float, float, float]:
    """``(difference, low, high)`` of the first's share minus the second's, measured on the same tasks.

    Newcombe's hybrid score interval for paired proportions (1998, method 10): square-and-add of the two Wilson intervals with
    the continuity-corrected correlation of the pairs.
    """
    counts = (both, only_first, only_second, neither)
    n = sum(counts)
    if n == 0 or min(counts) < 0:
        raise ValueError(f"paired counts are {counts}; expected counts of 0 or more, not all 0.")
    shares = (both + only_first) / n, (both + only_second) / n
    (low_1, high_1), (low_2, high_2) = (wilson_interval(round(share * n), n, confidence) for share in shares)
    margins = math.prod((both + only_first, only_second + neither, both + only_second, only_first + neither))
    product = both * neither - only_first * only_second
    if product > 0:
        product = max(product - n / 2, 0)
    phi = product / math.sqrt(margins) if margins else 0.0

    def side(one: float, other: float) -> float:
        return math.sqrt(max(one * one - 2 * phi * one * other + other * other, 0.0))

    difference = (only_first - only_second) / n
    low = difference - side(shares[0] - low_1, high_2 - shares[1])
    return difference, low, difference + side(high_1 - shares[0], shares[1] - low_2)


def mcnemar_exact(b: int, c: int) -> float:
    """Two-sided p-value of the exact McNemar test of two policies on the same tasks.

    ``b`` tasks only the first solved, ``c`` only the second; tasks on which they agree do not matter. Under no difference
    each of the ``b + c`` falls either way with probability 1/2: ``p = min(1, 2 P(Binomial(b + c, 1/2) <= min(b, c)))``.
    """
    if b < 0 or c < 0:
        raise ValueError(f"discordant counts are b = {b} and c = {c}; expected counts of 0 or more.")
    n = b + c
    tail = sum(math.comb(n, k) for k in range(min(b, c) + 1))
    return min(1.0, 2 * tail / 2**n)  # integers until the one division, so no rounding and no underflow


def _normal_quantile(confidence: float) -> float:
    """``z`` with ``confidence`` of the standard normal between ``-z`` and ``z``."""
    _check_confidence(confidence)
    return NormalDist().inv_cdf((1 + confidence) / 2)


def _check_confidence(confidence: float) -> None:
    if not 0 < confidence < 1:
        raise ValueError(f"confidence is {confidence}; expected between 0 and 1, for example 0.95.")
