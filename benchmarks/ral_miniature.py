"""Reinforced attention learning in miniature: GRPO with and without the attention term, several seeds, on placed digits.

    mmrl train configs/vision/ral_digits_warmup.yaml
    mmrl export configs/vision/ral_digits_warmup.yaml --to runs/placed_digit_reader
    .venv/bin/python benchmarks/ral_miniature.py --seeds 5

Each arm and seed is one ``mmrl train`` of configs/vision/ral_digits.yaml; the arms differ in the overrides below only. Shown:
held-out accuracy before and after; the attention of held-out completions on the image and on the region that holds the answer;
and what the term costs: CPU seconds of updates on the same rollouts with it and without, as a share of a whole train step.
Medians over seeds with the lowest and highest seed; paired differences with Student's 95% interval.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from mmrl.checkpoint import replace_text
from mmrl.statistics import mean_interval

CONFIG = Path("configs/vision/ral_digits.yaml")
ARMS: Mapping[str, Sequence[str]] = {
    "grpo": ("auxiliary.ral=null",),
    "grpo+ral": (),
    "grpo+ral x5": ("auxiliary.ral.weight=5",),
}
"""Overrides of each arm."""
MEASURES = {
    "accuracy before": "{:.3f}", "accuracy": "{:.3f}", "region before": "{:.4f}", "region": "{:.4f}", "image": "{:.4f}",
    "region of image": "{:.3f}",
}  # fmt: skip
COMPARED = ("accuracy", "region", "region of image")
BAR = 0.15
"""Largest acceptable cost of the term, as a share of a step."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=5, help="seeds 0 .. N-1")
    parser.add_argument("--arms", nargs="+", choices=list(ARMS), default=["grpo", "grpo+ral"])
    parser.add_argument("--runs", type=Path, default=Path("runs/ral"), help="parent of the run directories")
    parser.add_argument("--output", type=Path, help="file for the table (default: results.md among the runs)")
    parser.add_argument("--tasks", type=int, default=300, help="held-out tasks")
    parser.add_argument("--cost-steps", type=int, default=8, help="batches to time; 0 leaves the cost out")
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE", help="for all arms, for example trainer.num_steps=30")
    arguments = parser.parse_intermixed_args()
    found: dict[str, list[dict[str, float]]] = {arm: [] for arm in arguments.arms}
    for seed in range(arguments.seeds):
        for arm in arguments.arms:
            found[arm].append(run(arm, seed, arguments))
            print(f"{arm}, seed {seed}: {found[arm][-1]}", flush=True)
    table = render(found)
    if arguments.cost_steps:
        table += cost_line(step_costs(arguments.cost_steps, arguments.overrides))
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
    subprocess.run([sys.executable, "-m", "mmrl", "train", str(CONFIG), *resume, *overrides], check=True)
    looks = run_dir / "attention.json"
    if not looks.exists():
        replace_text(looks, json.dumps(attention(run_dir, overrides, arguments.tasks), indent=1))
    return measures(run_dir, json.loads(looks.read_text(encoding="utf-8")))


def attention(run_dir: Path, overrides: Sequence[str], num_tasks: int) -> dict[str, dict[str, float]]:
    """Mean attention on image and region over held-out tasks, before training and after."""
    import torch

    from mmrl.cli import build_adapter, load_run
    from vision.attention_maps import region_masses

    config = load_run(CONFIG, overrides)
    torch.set_num_threads(config.trainer.num_threads or torch.get_num_threads())
    adapter = build_adapter(config)
    policy = adapter.build_policy()
    source = adapter.task_source("eval")
    tasks = [source[index] for index in range(num_tasks)]
    result = {}
    for when in ("before", "after"):
        if when == "after":
            adapter.load_policy(policy, latest(run_dir) / "policy")
        found = region_masses(adapter, policy, tasks)
        result[when] = {name: statistics.fmean(getattr(entry, name) for entry in found) for name in ("image", "region")}
    return result


def measures(run_dir: Path, looks: Mapping[str, Mapping[str, float]]) -> dict[str, float]:
    """The numbers of one finished run."""
    evaluations = sorted((run_dir / "eval").glob("step_*.json"))
    first, last = (json.loads(path.read_text(encoding="utf-8")) for path in (evaluations[0], evaluations[-1]))
    return {
        "accuracy before": first["overall"]["mean"],
        "accuracy": last["overall"]["mean"],
        "region before": looks["before"]["region"],
        "region": looks["after"]["region"],
        "image": looks["after"]["image"],
        "region of image": looks["after"]["region"] / looks["after"]["image"],
    }


def step_costs(pairs: int, overrides: Sequence[str]) -> list[float]:
    """Share of a train step that the term takes, in CPU seconds, one number per batch of rollouts; a first batch warms up.

    Each batch is rolled out once and then updated on with the term and without it. All rollouts get an advantage, as those of
    groups without one cost nothing in either arm.
    """
    import torch

    from mmrl.cli import build_adapter, load_run
    from mmrl.trainer import Trainer

    trainers: dict[str, Any] = {}
    for arm in ("grpo", "grpo+ral"):
        config = load_run(CONFIG, [*ARMS[arm], *overrides])
        trainers[arm] = Trainer(config, build_adapter(config), cpu=True)
    torch.set_num_threads(1)
    shares = []
    for pair in range(pairs + 1):
        start = time.process_time()
        collected = trainers["grpo+ral"]._collect()
        collecting = time.process_time() - start
        signs = torch.arange(len(collected.batch)) % 2 * 2.0 - 1
        collected = replace(collected, advantages=signs)
        seconds = {}
        for arm in ("grpo", "grpo+ral") if pair % 2 else ("grpo+ral", "grpo"):
            start = time.process_time()
            trainers[arm].updater.update(collected)
            seconds[arm] = time.process_time() - start
        if pair:
            shares.append((seconds["grpo+ral"] - seconds["grpo"]) / (collecting + seconds["grpo+ral"]))
    return shares


def cost_line(shares: Sequence[float]) -> str:
    """One sentence about the cost."""
    low, high = mean_interval(shares)
    verdict = "met" if high < BAR else "not shown"
    return (
        f"\nThe term takes {statistics.fmean(shares):.1%} [{low:.1%}, {high:.1%}] of the CPU seconds of a step "
        f"({len(shares)} batches); the bar of {BAR:.0%} is {verdict}.\n"
    )


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
        lines += ["", f"Mean difference to {base}, paired by seed [95% interval].", "", f"| arm | {' | '.join(COMPARED)} |"]
        lines.append("|---" * (len(COMPARED) + 1) + "|")
    for arm in others if seeds > 1 else ():
        cells = []
        for name in COMPARED:
            gaps = [row[name] - other[name] for row, other in zip(found[arm], found[base])]
            low, high = mean_interval(gaps)
            cells.append(f"{statistics.fmean(gaps):+.3f} [{low:+.3f}, {high:+.3f}]")
        lines.append(f"| {arm} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def latest(run_dir: Path) -> Path:
    """The newest checkpoint of a run."""
    return sorted((run_dir / "checkpoints").glob("step_*"))[-1]


if __name__ == "__main__":
    main()
