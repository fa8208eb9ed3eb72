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


ARMS = {"equal shares": (), "domain-aware": ("sampling.domains={refresh: 2}",)}
COMMON = (*SMALL, "evaluation.num_tasks=700", "evaluation.every=15", "tasks.num_tasks=7000")  # the sampler looks at each task

DOMAIN_SAMPLING = Miniature(
    claim="Domains that are far from their target are drawn more often and catch up; the mean over domains does not suffer.",
    arms=ARMS,
    overrides=(
        *COMMON, "tasks.kinds=[parity, above_four, larger, read, read_first, read_second]",
        "tasks.eval_kinds=[parity, above_four, larger, read, read_first, read_second]",
    ),
    values=values,
)  # fmt: skip

DOMAIN_SAMPLING_HARD = Miniature(
    claim="The limit of the idea: a domain that is hardly learned at all (sums) takes most of the draws and the others lose.",
    arms=ARMS,
    overrides=(*COMMON, "tasks.kinds=[parity, above_four, larger, sum, read, read_first, read_second]"),
    values=values,
)
