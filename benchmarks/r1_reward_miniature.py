"""R1-Reward in miniature: StableReinforce against REINFORCE++ on pairs of answers of which nine in ten are easy.

    .venv/bin/python benchmarks/r1_reward_miniature.py --seeds 5

Each arm and seed is one ``mmrl train`` of configs/vision/r1_reward_digits.yaml in a forked child (forked_runs.py); the arms
differ in the overrides below only. A run that has finished is not repeated, one that was interrupted is resumed. Reported:
held-out accuracy on easy and on hard pairs, each judged in both orders; whether the run collapsed (the share of right verdicts
in training fell by more than a tenth from its first steps to its last); the share of decisions whose advantage was filtered;
the largest log-ratio of the run; and the accuracy of the majority of 1, 5 and 15 sampled verdicts. Medians over seeds with
the lowest and highest seed; paired differences with Student's 95% interval.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from forked_runs import Run, train

from mmrl.checkpoint import latest_checkpoint, replace_text
from mmrl.cli import build_adapter, load_run
from mmrl.statistics import mean_interval
from vision.benchmark_command import judge
from vision.benchmark_preferences import Item
from vision.benchmark_scores import report

CONFIG = Path("configs/vision/r1_reward_digits.yaml")
ARMS: Mapping[str, Sequence[str]] = {
    "REINFORCE++": ("algorithm.name=reinforce_pp",),
    "StableReinforce": (),
    "without the filter": ("algorithm.advantage_limit=null",),
    "filter of the code": ("algorithm.advantage_limit_around=mean",),
    "without the pre-clip": ("algorithm.max_log_ratio=20",),
}
"""Overrides of each arm; the last three change one part of StableReinforce."""
VOTES = (1, 5, 15)
FORMS = {
    "easy before": "{:.3f}", "easy": "{:.3f}", "hard before": "{:.3f}", "hard": "{:.3f}", "collapsed": "{:.0f}",
    "filtered": "{:.4f}", "largest log-ratio": "{:.2f}", **{f"voting@{count}": "{:.3f}" for count in VOTES},
    "consistent": "{:.3f}", "tokens": "{:.1f}", "CPU s": "{:.0f}",
}  # fmt: skip
"""Columns of the table."""
COMPARED = ("easy", "hard", "voting@1", "voting@15")
WINDOW = 10
"""Train steps over which shares are averaged."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=5, help="seeds 0 .. N-1")
    parser.add_argument("--arms", nargs="+", choices=list(ARMS), default=["REINFORCE++", "StableReinforce"])
    parser.add_argument("--policy", default="digit-judge", help="where all runs start from (default digit-judge)")
    parser.add_argument("--runs", type=Path, default=Path("runs/r1_reward"), help="parent of the run directories")
    parser.add_argument("--output", type=Path, help="file for the table (default: results.md among the runs)")
    parser.add_argument("--tasks", type=int, default=400, help="held-out judging tasks, two for each pair")
    parser.add_argument("--vote-pairs", type=int, default=60, help="held-out pairs that are voted on, in both orders")
    parser.add_argument("--workers", type=int, default=1, help="runs at a time")
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE", help="for all arms, for example trainer.num_steps=200")
    arguments = parser.parse_intermixed_args()
    shared = [f"policy.path={arguments.policy}", f"evaluation.num_tasks={arguments.tasks}", *arguments.overrides]
    runs = {
        (arm, seed): Run(
            config=CONFIG,
            run_dir=arguments.runs / f"{arm.replace(' ', '_')}_{seed}",
            overrides=[*ARMS[arm], *shared, f"seed={seed}"],
        )
        for seed in range(arguments.seeds)
        for arm in arguments.arms
    }
    failed = train(list(runs.values()), workers=arguments.workers, measure=partial(vote, num_pairs=arguments.vote_pairs))
    found = {
        arm: [measures(runs[arm, seed]) for seed in range(arguments.seeds) if runs[arm, seed].cost is not None]
        for arm in arguments.arms
    }
    if failed:
        print(f"failed: {', '.join(failed)}; run again to go on with them")
        return 1
    table = render(found)
    print(table)
    output = arguments.output or arguments.runs / "results.md"
    output.parent.mkdir(parents=True, exist_ok=True)
    replace_text(output, table)
    return 0


def vote(run_dir: Path, *, num_pairs: int) -> dict[str, Any]:
    """Sampled verdicts of the run's last policy on held-out pairs."""
    config = load_run(run_dir / "config.yaml")
    adapter = build_adapter(config)
    policy = adapter.build_policy()
    adapter.load_policy(policy, latest_checkpoint(run_dir / "checkpoints") / "policy")
    pairs = [adapter.task_source("eval").pairs[index] for index in range(num_pairs)]
    items = [Item(pair=pair, groups={"category": pair.domain}, unit=pair.id) for pair in pairs]
    judgments = list(
        judge(
            adapter, policy, items, prompt=config.tasks.prompt, num_votes=max(VOTES), batch_size=config.evaluation.batch_size,
            seed=config.seed,
        )
    )  # fmt: skip
    result = report("digit pairs", items, judgments, votes=VOTES)
    return {"votes": {name: cells["accuracy"]["mean"] for name, cells in result["votes"].items()}}


def measures(run: Run) -> dict[str, float]:
    """The numbers of one finished run."""
    lines = (run.run_dir / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    steps = [json.loads(line) for line in lines]
    evaluations = sorted((run.run_dir / "eval").glob("step_*.json"))
    first, last = (json.loads(path.read_text(encoding="utf-8"))["domains"] for path in (evaluations[0], evaluations[-1]))
    right = [step["reward/r1_result"] for step in steps]
    fallen = statistics.fmean(right[:WINDOW]) - statistics.fmean(right[-WINDOW:])
    return {
        **{f"{domain} before": first[domain]["mean"] for domain in ("easy", "hard")},
        **{domain: last[domain]["mean"] for domain in ("easy", "hard")},
        "collapsed": float(fallen > 0.1),
        "filtered": statistics.fmean(step.get("advantage/filtered", 0.0) for step in steps),
        "largest log-ratio": max(step.get("ratio/max_log", 0.0) for step in steps),
        **{f"voting@{count}": run.cost["votes"][str(count)] for count in VOTES},
        # of the verdicts that could be read; none could be where a policy fell apart
        "consistent": statistics.fmean(step.get("r1_reward/consistent", 0.0) for step in steps[-WINDOW:]),
        "tokens": statistics.fmean(step["rollout/decisions"] for step in steps[-WINDOW:]),
        "CPU s": run.cost["cpu_s"],
    }


def render(found: Mapping[str, Sequence[Mapping[str, float]]]) -> str:
    """Markdown: a row per arm, then paired differences to the first arm."""
    seeds = len(next(iter(found.values())))
    lines = [f"Median of {seeds} seeds [lowest, highest].", "", f"| arm | {' | '.join(FORMS)} |"]
    lines.append("|---" * (len(FORMS) + 1) + "|")
    for arm, rows in found.items():
        cells = []
        for name, form in FORMS.items():
            values = [row[name] for row in rows]
            low, mid, high = (form.format(value) for value in (min(values), statistics.median(values), max(values)))
            cells.append(f"{mid} [{low}, {high}]")
        lines.append(f"| {arm} | {' | '.join(cells)} |")
    base, *others = found
    if others and seeds > 1:
        lines += ["", f"Mean difference to {base}, paired by seed [95% interval].", "", f"| arm | {' | '.join(COMPARED)} |"]
        lines.append("|---" * (len(COMPARED) + 1) + "|")
        for arm in others:
            cells = []
            for name in COMPARED:
                gaps = [row[name] - other[name] for row, other in zip(found[arm], found[base])]
                low, high = mean_interval(gaps)
                cells.append(f"{statistics.fmean(gaps):+.3f} [{low:+.3f}, {high:+.3f}]")
            lines.append(f"| {arm} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    raise SystemExit(main())
