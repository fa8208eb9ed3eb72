"""Six mechanisms in miniature: does what their papers claim show, in direction, on the built-in digits?

    .venv/bin/python benchmarks/mechanisms.py nsr topr --seeds 5 --workers 2

Each arm and seed is one ``mmrl train`` with the overrides that miniatures/NAME.py lists, in a child process (forked_runs.py): a
run that has finished is not repeated, one that was interrupted is resumed. The table is written to ``RUNS/NAME.md``: medians
over seeds with the lowest and highest seed, and differences paired by seed with Student's 95% interval.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path

from forked_runs import Run, train
from miniatures.delightful import DELIGHTFUL
from miniatures.domain_sampling import DOMAIN_SAMPLING, DOMAIN_SAMPLING_HARD
from miniatures.dynamic_sampling import DYNAMIC_SAMPLING
from miniatures.miniature import Miniature, Rows
from miniatures.nsr import NSR
from miniatures.rlcr import RLCR
from miniatures.topr import TOPR

from mmrl.checkpoint import latest_checkpoint, replace_text
from mmrl.statistics import mean_interval

MINIATURES = {
    "dynamic_sampling": DYNAMIC_SAMPLING,
    "nsr": NSR,
    "topr": TOPR,
    "delightful": DELIGHTFUL,
    "rlcr": RLCR,
    "domain_sampling": DOMAIN_SAMPLING,
    "domain_sampling_hard": DOMAIN_SAMPLING_HARD,
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="+", choices=MINIATURES, metavar="NAME", help=", ".join(MINIATURES))
    parser.add_argument("--seeds", type=int, default=5, help="seeds 0 .. N-1")
    parser.add_argument("--runs", type=Path, default=Path("runs/mechanisms"), help="parent of the folders of all runs")
    parser.add_argument("--workers", type=int, default=1, help="runs at a time")
    parser.add_argument("--set", nargs="*", default=[], metavar="KEY=VALUE", help="passed on to every run")
    parser.add_argument("--set-warmup", nargs="*", default=[], metavar="KEY=VALUE", help="passed on to the supervised warm-up")
    arguments = parser.parse_args()
    failed = []
    for name in arguments.names:
        failed += show(name, arguments)
    return 1 if failed else 0


def show(name: str, arguments: argparse.Namespace) -> list[str]:
    """Train what is missing of a miniature and write its table; the names of runs that failed."""
    miniature, folder, start = MINIATURES[name], arguments.runs / name, []
    if miniature.warmup is not None:
        warmup = Run(config=miniature.warmup, run_dir=folder / "warmup", overrides=arguments.set_warmup)
        if failed := train([warmup]):
            return failed
        start = [f"policy.path={latest_checkpoint(warmup.run_dir / 'checkpoints') / 'policy'}"]
    runs = {
        (seed, arm): Run(
            config=miniature.config,
            run_dir=folder / f"{arm.replace(' ', '_').replace(',', '').replace('%', '')}_{seed}",
            overrides=[*miniature.overrides, *overrides, *start, f"seed={seed}", *arguments.set],
        )
        for seed in range(arguments.seeds)
        for arm, overrides in miniature.arms.items()
    }
    failed = train(list(runs.values()), workers=arguments.workers, measure=miniature.measure)
    found = []
    for seed in range(arguments.seeds):
        of_seed = {arm: runs[seed, arm] for arm in miniature.arms}
        if all(run.cost is not None for run in of_seed.values()):
            found.append(miniature.values({arm: run.run_dir for arm, run in of_seed.items()}))
    if found:
        seconds = [run.cost["cpu_s"] for run in runs.values() if run.cost is not None]
        table = render(name, miniature, found, statistics.median(seconds))
        replace_text(folder.with_suffix(".md"), table)
        print(f"{table}\ntable  {folder.with_suffix('.md')}")
    return failed


def render(name: str, miniature: Miniature, found: Sequence[Rows], seconds: float) -> str:
    """Markdown: a row per arm, then paired differences to the first one."""
    lines = [
        f"## {name}",
        "",
        miniature.claim,
        "",
        f"Median of {len(found)} seeds [lowest, highest]; {seconds:.0f} CPU s a run.",
    ]
    base, *others = found[0]
    columns = list(found[0][base])
    head = ["", f"| | {' | '.join(columns)} |", "|---" * (len(columns) + 1) + "|"]
    lines += head + [row(arm, [summary(values) for values in by_column(found, arm, columns)]) for arm in found[0]]
    if len(found) > 1 and others:
        lines += ["", f"Mean difference to {base}, paired by seed [95% interval].", *head]
        for arm in others:
            pairs = zip(by_column(found, arm, columns), by_column(found, base, columns))
            lines.append(row(arm, [difference(values, basis) for values, basis in pairs]))
    return "\n".join(lines) + "\n"


def by_column(found: Sequence[Rows], arm: str, columns: Sequence[str]) -> list[list[float]]:
    """The values of each column over seeds; none where the arm has no such column."""
    return [[rows[arm][column] for rows in found if column in rows[arm]] for column in columns]


def summary(values: Sequence[float]) -> str:
    if not values:
        return ""
    return f"{statistics.median(values):.3f} [{min(values):.3f}, {max(values):.3f}]"


def difference(values: Sequence[float], basis: Sequence[float]) -> str:
    if not values:
        return ""
    gaps = [value - other for value, other in zip(values, basis, strict=True)]
    low, high = mean_interval(gaps)
    return f"{statistics.fmean(gaps):+.3f} [{low:+.3f}, {high:+.3f}]"


def row(label: str, cells: Sequence[str]) -> str:
    return f"| {label} | {' | '.join(cells)} |"


if __name__ == "__main__":
    sys.exit(main())
