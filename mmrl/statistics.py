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
