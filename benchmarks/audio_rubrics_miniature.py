"""AudioRubrics in miniature: rubric reward against outcome reward alone, several seeds, on the built-in sounds.

    .venv/bin/python benchmarks/audio_rubrics_miniature.py --seeds 5

Each arm and seed is one ``mmrl train`` of configs/audio/tones_rubrics.yaml; the arms differ in the overrides below only.
Reported: held-out accuracy before and after; of the held-out answers that are right, the share whose stated evidence is what
the clip holds (``mmrl eval`` with the metric ``evidence``); and the length of completions over time, which should neither
collapse nor grow. Medians over seeds with the lowest and highest seed; paired differences with Student's 95% interval.
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

from mmrl.checkpoint import replace_text
from mmrl.statistics import mean_interval

CONFIG = Path("configs/audio/tones_rubrics.yaml")
ARMS: Mapping[str, Sequence[str]] = {
    "outcome": ("rewards.rubrics=0", "rewards.overthink=0"),
    "outcome and length": ("rewards.rubrics=0",),
    "static rubrics": ("rubrics.evolve=false",),
    "AudioRubrics": (),
}
"""Overrides of each arm."""
MEASURES = {
    "accuracy before": "{:.3f}", "accuracy": "{:.3f}", "evidence": "{:.3f}", "tokens at start": "{:.1f}",
    "tokens halfway": "{:.1f}", "tokens at end": "{:.1f}", "neutral": "{:.3f}",
}  # fmt: skip
WINDOW = 10
"""Train steps over which lengths are averaged."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=5, help="seeds 0 .. N-1")
    parser.add_argument("--arms", nargs="+", choices=list(ARMS), default=["outcome", "AudioRubrics"])
    parser.add_argument("--runs", type=Path, default=Path("runs/audio_rubrics"), help="parent of the run directories")
    parser.add_argument("--output", type=Path, help="file for the table (default: results.md among the runs)")
    parser.add_argument("--tasks", type=int, default=720, help="held-out tasks")
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE", help="for all arms, for example trainer.num_steps=60")
    arguments = parser.parse_intermixed_args()
    found: dict[str, list[dict[str, float]]] = {arm: [] for arm in arguments.arms}
    for seed in range(arguments.seeds):
        for arm in arguments.arms:
            found[arm].append(run(arm, seed, arguments))
            print(f"{arm}, seed {seed}: {found[arm][-1]}", flush=True)
    table = render(found)
    print(table)
    output = arguments.output or arguments.runs / "results.md"
    output.parent.mkdir(parents=True, exist_ok=True)
    replace_text(output, table)


def run(arm: str, seed: int, arguments: argparse.Namespace) -> dict[str, float]:
    """Train and measure one seed of an arm. A run that is finished already is measured again, not repeated."""
    name = f"{arm.replace(' ', '_')}_{seed}"
    run_dir = arguments.runs / name
    overrides = [*ARMS[arm], *arguments.overrides, f"evaluation.num_tasks={arguments.tasks}", f"name={name}", f"seed={seed}",
                 f"output_dir={arguments.runs}"]  # fmt: skip
    resume = ["--resume"] if run_dir.exists() else []
    mmrl("train", str(CONFIG), *resume, *overrides)
    result = run_dir / "evidence.json"
    mmrl("eval", str(CONFIG), "--checkpoint", str(latest(run_dir)), "--output", str(result), *overrides,
         "evaluation.metric=evidence")  # fmt: skip
    return measures(run_dir, json.loads(result.read_text(encoding="utf-8")))


def measures(run_dir: Path, evidence: Mapping[str, Any]) -> dict[str, float]:
    """The numbers of one finished run."""
    steps = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    evaluations = sorted((run_dir / "eval").glob("step_*.json"))
    first, last = (json.loads(path.read_text(encoding="utf-8")) for path in (evaluations[0], evaluations[-1]))
    lengths = [step["rollout/decisions"] for step in steps]
    middle = max(0, len(lengths) // 2 - WINDOW // 2)
    return {
        "accuracy before": first["overall"]["mean"],
        "accuracy": last["overall"]["mean"],
        "evidence": evidence["overall"]["mean"] if evidence["overall"]["n"] else float("nan"),
        "tokens at start": statistics.fmean(lengths[:WINDOW]),
        "tokens halfway": statistics.fmean(lengths[middle : middle + WINDOW]),
        "tokens at end": statistics.fmean(lengths[-WINDOW:]),
        "neutral": statistics.fmean(step.get("rubrics/neutral_rollouts", 0.0) for step in steps),
    }


def render(found: Mapping[str, Sequence[Mapping[str, float]]]) -> str:
    """Markdown: a row per arm, then paired differences to the first arm."""
    seeds = len(next(iter(found.values())))
    lines = [f"Median of {seeds} seeds [lowest, highest].", "", f"| arm | {' | '.join(MEASURES)} |"]
    lines.append("|---" * (len(MEASURES) + 1) + "|")
    for arm, rows in found.items():
        cells = []
        for name, form in MEASURES.items():
            values = [row[name] for row in rows]
            low, mid, high = (form.format(value) for value in (min(values), statistics.median(values), max(values)))
            cells.append(f"{mid} [{low}, {high}]")
        lines.append(f"| {arm} | {' | '.join(cells)} |")
    base, *others = found
    if others and seeds > 1:
        lines += [
            "",
            f"Mean difference to {base}, paired by seed [95% interval].",
            "",
            "| arm | accuracy | evidence |",
            "|---|---|---|",
        ]
    for arm in others if seeds > 1 else ():
        cells = []
        for name in ("accuracy", "evidence"):
            gaps = [row[name] - other[name] for row, other in zip(found[arm], found[base])]
            low, high = mean_interval(gaps)
            cells.append(f"{statistics.fmean(gaps):+.3f} [{low:+.3f}, {high:+.3f}]")
        lines.append(f"| {arm} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def latest(run_dir: Path) -> Path:
    """The newest checkpoint of a run."""
    return sorted((run_dir / "checkpoints").glob("step_*"))[-1]


def mmrl(*arguments: str) -> None:
    """Run the command line; its output goes to ours, and a failure ends the benchmark."""
    subprocess.run([sys.executable, "-m", "mmrl", *arguments], check=True)


if __name__ == "__main__":
    main()
