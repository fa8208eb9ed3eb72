"""What each reward term contributes, and when to warn about it.

Advantages compare the rollouts of a group, so a term matters by how much it varies inside groups. `term_totals` measures that
per step, `RewardWatch` looks at a window of steps.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping

from mmrl.processes import Totals
from mmrl.types import RolloutBatch

NOT_APPLICABLE = "not_applicable/"
"""Prefix of metrics: share of rollouts to which a term does not apply."""
VARIANCE = "reward_variance/"
"""Prefix of metrics: mean over groups of the variance of the weighted term inside the group."""
DOMINANT_SHARE = 0.95
"""Share of the summed variance of all terms from which one term is said to dominate."""


def term_totals(batch: RolloutBatch, weights: Mapping[str, float]) -> Totals:
    """Per term: how many rows it does not apply to, and the variance (population) of the weighted term inside groups."""
    totals: dict[str, tuple[float, float]] = {}
    groups = [(batch.group_ids == group).nonzero()[:, 0] for group in batch.group_ids.unique()]
    for name, column in batch.reward_terms.items():
        totals[NOT_APPLICABLE + name] = (int(column.isnan().sum()), len(batch))
        known = [values[~values.isnan()].double() for values in (column[rows] for rows in groups)]
        variances = [
            float(values.var(correction=0)) for values in known if len(values) > 1 and bool((values != values[0]).any())
        ]
        compared = sum(len(values) > 1 for values in known)
        totals[VARIANCE + name] = (weights[name] ** 2 * sum(variances), compared)
    return totals


class RewardWatch:
    """Says over a window of train steps which term is constant, which dominates, and whether only the form is rewarded."""

    def __init__(self, weights: Mapping[str, float], *, forms: frozenset[str] = frozenset(), window: int) -> None:
        """``forms`` names terms that read the form of a completion and not its content; ``window`` 0 never warns."""
        self.names = [name for name, weight in weights.items() if weight != 0]
        self.forms = forms & set(self.names)
        self.window = window
        self._seen: deque[dict[str, float]] = deque(maxlen=max(window, 1))
        self._said: set[str] = set()

    def observe(self, metrics: Mapping[str, float]) -> list[str]:
        """New warnings after a step with these metrics. One that holds on is not repeated until it has ceased once."""
        if self.window == 0:
            return []
        self._seen.append({name: metrics.get(VARIANCE + name, 0.0) for name in self.names})
        if len(self._seen) < self.window:
            return []
        found = self._warnings()
        new = [text for key, text in found.items() if key not in self._said]
        self._said = set(found)
        return new

    def _warnings(self) -> dict[str, str]:
        sums = {name: sum(step[name] for step in self._seen) for name in self.names}
        total = sum(sums.values())
        when = f"in the last {self.window} steps"
        found = {
            f"constant/{name}": f"reward {name!r} did not vary inside any group {when}: it gives no signal."
            for name, value in sums.items()
            if value == 0 and total > 0
        }
        if total == 0:
            return {"constant": f"no reward term varied inside any group {when}: there is no signal to learn from."}
        varying = [name for name, value in sums.items() if value > 0]
        if len(self.names) > len(self.forms) and set(varying) <= self.forms:
            found["form"] = (
                f"only the form ({', '.join(varying)}) varied inside groups {when}: the content is not being rewarded."
            )
        elif len(varying) > 1:
            name = max(varying, key=lambda name: sums[name])
            share = sums[name] / total
            if share >= DOMINANT_SHARE:
                found[f"dominates/{name}"] = (
                    f"reward {name!r} makes up {share:.1%} of the variance inside groups {when}: the other terms hardly count; "
                    "change weights if that is not meant."
                )
        return found


def form_terms(terms: Mapping[str, object]) -> frozenset[str]:
    """Names of terms whose function is marked as reading the form only (``reads_form = True``), or is called so."""
    return frozenset(
        name
        for name, term in terms.items()
        if getattr(term.function, "reads_form", False) or name == "format" or name.endswith("_format")
    )
