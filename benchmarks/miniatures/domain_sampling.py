"""Domain-aware dynamic sampling (RuleReasoner, arXiv 2506.08672) against equal shares, with question kinds as domains."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from statistics import fmean

from miniatures.miniature import SMALL, Miniature, Rows, evaluations

NUM_WEAK = 2
"""Domains of the lowest accuracy at the start, other than those of reading."""


def values(run_dirs: Mapping[str, Path]) -> Rows:
    """Accuracy of each trained domain, of the two that were weakest at the start, and the mean over domains."""
    rows = {}
    for arm, run_dir in run_dirs.items():
        first, *_, last = (by_domain(result) for result in evaluations(run_dir).values())
        weak = sorted(first, key=first.__getitem__)[:NUM_WEAK]
        area = [fmean(by_domain(result)[domain] for domain in weak) for result in evaluations(run_dir).values()]
        rows[arm] = {
            "weak domains": fmean(last[domain] for domain in weak),
            "weak domains over time": fmean(area[1:]),
            "macro mean": fmean(last.values()),
            "lowest domain": min(last.values()),
            **last,
        }
    return rows


def by_domain(result: Mapping[str, Mapping[str, Mapping[str, float]]]) -> dict[str, float]:
    return {name: entry["mean"] for name, entry in result["domains"].items()}


DOMAIN_SAMPLING = Miniature(
    claim="Domains that are far from their target are drawn more often and catch up; the mean over domains does not suffer.",
    arms={"equal shares": (), "domain-aware": ("sampling.domains={refresh: 2}",)},
    overrides=(
        *SMALL, "tasks.kinds=[parity, above_four, larger, sum, read, read_first, read_second]", "evaluation.num_tasks=700",
        "evaluation.every=15", "tasks.num_tasks=7000",
    ),
    values=values,
)  # fmt: skip
