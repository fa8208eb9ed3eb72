"""Observe-R1 in miniature: the ladder, the bonus and the weight of a group, each left out in turn, on the built-in digits.

    .venv/bin/python benchmarks/observe_r1_miniature.py --seeds 5

For each seed ``mmrl data profile`` measures how hard the tasks are for the policy that training starts from; each arm is one
``mmrl train`` of configs/vision/observe_r1_digits.yaml on the same tasks, each drawn once. Arms differ in the overrides below
only. The published floor of the bonus, 100 tokens, is 12 here, since completions have 10 to 35.

Reported: held-out accuracy of greedy completions before, halfway and at the end; accuracy and length of sampled completions at
the end (``mmrl data profile`` of the held-out split); and the mean difficulty of the first and last train steps. Medians over
seeds with the lowest and highest seed; differences paired by seed with Student's 95% interval. What has finished is not
repeated, a run that was interrupted is resumed.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from forked_runs import Run, train

from mmrl import cli
from mmrl.checkpoint import latest_checkpoint, replace_text
from mmrl.statistics import mean_interval

CONFIG = Path("configs/vision/observe_r1_digits.yaml")
FULL = "Observe-R1"
ARMS: Mapping[str, Sequence[str]] = {
    FULL: (),
    "shuffled": ("sampling.ladder=null",),
    "no bonus": ("algorithm.shaping=[]",),
    "no weight": ("algorithm.difficulty_weight=none",),
}
"""Overrides of each arm."""
MEASURES = {
    "accuracy before": "{:.3f}", "accuracy halfway": "{:.3f}", "accuracy": "{:.3f}", "sampled accuracy": "{:.3f}",
    "sampled tokens": "{:.1f}", "first difficulty": "{:.2f}", "last difficulty": "{:.2f}",
}  # fmt: skip
COMPARED = ("accuracy halfway", "accuracy", "sampled accuracy", "sampled tokens")
HELD_OUT_TASKS, HELD_OUT_SAMPLES = 240, 8
WINDOW = 5
"""Train steps over which difficulties are averaged."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=5, help="seeds 0 .. N-1")
    parser.add_argument("--arms", nargs="+", choices=list(ARMS), default=list(ARMS))
    parser.add_argument("--runs", type=Path, default=Path("runs/observe_r1"), help="parent of the folders of all runs")
    parser.add_argument("--workers", type=int, default=1, help="runs at a time")
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE", help="for all arms, for example policy.path=DIR")
    arguments = parser.parse_intermixed_args()
    profiles = {seed: profile(seed, arguments.runs, arguments.overrides) for seed in range(arguments.seeds)}
    runs = {
        (seed, arm): Run(
            config=CONFIG,
            run_dir=arguments.runs / f"{arm.replace(' ', '_')}_{seed}",
            overrides=[f"sampling.ladder.profile={profiles[seed]}", *ARMS[arm], *arguments.overrides, f"seed={seed}"],
        )
        for seed in range(arguments.seeds)
        for arm in arguments.arms
    }
    failed = train(list(runs.values()), workers=arguments.workers, measure=measure)
    done = [seed for seed in range(arguments.seeds) if all(runs[seed, arm].cost is not None for arm in arguments.arms)]
    if done:
        found = {arm: [runs[seed, arm].cost for seed in done] for arm in arguments.arms}
        table = render(found)
        print(table)
        replace_text(arguments.runs / "results.md", table)
    return 1 if failed else 0


def profile(seed: int, runs: Path, overrides: Sequence[str]) -> Path:
    """Difficulties of a seed's tasks for the policy that all of its arms start from."""
    output = runs / f"profile_{seed}.jsonl"
    if not output.exists():
        command = ["data", "profile", str(CONFIG), "--cpu", "--output", str(output), *overrides, f"seed={seed}"]
        subprocess.run([sys.executable, "-m", "mmrl", *command, "sampling.ladder=null"], check=True)
    return output


def measure(run_dir: Path) -> dict[str, float]:
    """The numbers of one finished run."""
    sampled = run_dir / "held_out.jsonl"
    newest = latest_checkpoint(run_dir / "checkpoints")
    command = ["data", "profile", str(run_dir / "config.yaml"), "--cpu", "--overwrite", "--checkpoint", str(newest)]
    command += ["--split", "eval", "--limit", str(HELD_OUT_TASKS), "--samples", str(HELD_OUT_SAMPLES), "--output", str(sampled)]
    if cli.main([*command, "sampling.ladder=null"]) != 0:
        raise SystemExit(f"{run_dir}: the held-out completions could not be measured; see log.txt.")
    evaluations = [read_json(path)["overall"]["mean"] for path in sorted((run_dir / "eval").glob("step_*.json"))]
    steps, tasks = read_lines(run_dir / "metrics.jsonl"), read_lines(sampled)
    climbed = [step.get("sampling/difficulty", float("nan")) for step in steps]
    return {
        "accuracy before": evaluations[0],
        "accuracy halfway": evaluations[len(evaluations) // 2],
        "accuracy": evaluations[-1],
        "sampled accuracy": 1 - statistics.fmean(task["difficulty"] for task in tasks),
        "sampled tokens": statistics.fmean(task["complexity"] for task in tasks),
        "first difficulty": statistics.fmean(climbed[:WINDOW]),
        "last difficulty": statistics.fmean(climbed[-WINDOW:]),
    }


def render(found: Mapping[str, Sequence[Mapping[str, float]]]) -> str:
    """Markdown: a row per arm, then differences of the whole method to what lacks a part."""
    seeds = len(next(iter(found.values())))
    lines = [f"Median of {seeds} seeds [lowest, highest].", "", f"| arm | {' | '.join(MEASURES)} | CPU s |"]
    lines.append("|---" * (len(MEASURES) + 2) + "|")
    for arm, rows in found.items():
        cells = [spread([row[name] for row in rows], form) for name, form in MEASURES.items()]
        lines.append(f"| {arm} | {' | '.join(cells)} | {statistics.median(row['cpu_s'] for row in rows):.0f} |")
    others = [arm for arm in found if arm != FULL]
    if FULL in found and others and seeds > 1:
        lines += ["", f"{FULL} minus the arm, paired by seed [95% interval].", "", f"| arm | {' | '.join(COMPARED)} |"]
        lines.append("|---" * (len(COMPARED) + 1) + "|")
        for arm in others:
            cells = [difference([full[name] - row[name] for full, row in zip(found[FULL], found[arm])]) for name in COMPARED]
            lines.append(f"| {arm} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def spread(values: Sequence[float], form: str) -> str:
    """``median [lowest, highest]``, or a dash where nothing was measured."""
    if any(value != value for value in values):
        return "-"
    low, mid, high = (form.format(value) for value in (min(values), statistics.median(values), max(values)))
    return f"{mid} [{low}, {high}]"


def difference(gaps: Sequence[float]) -> str:
    """Mean of paired differences with Student's 95% interval."""
    low, high = mean_interval(gaps)
    return f"{statistics.fmean(gaps):+.3f} [{low:+.3f}, {high:+.3f}]"


def read_json(path: Path) -> Any:
    """One JSON file."""
    return json.loads(path.read_text(encoding="utf-8"))


def read_lines(path: Path) -> list[dict[str, Any]]:
    """A file of JSON lines."""
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


if __name__ == "__main__":
    sys.exit(main())
