"""Train every recipe from its preset and write one table per config.

    .venv/bin/python benchmarks/recipe_table.py configs/vision/read_digits.yaml configs/robotics/reach.yaml --seeds 0 1 2

Each cell is one ``mmrl train CONFIG algorithm=NAME seed=S`` below ``--runs``, in a child process (see forked_runs.py). A run
that has finished is not repeated, one that was interrupted is resumed, so the command may be stopped and started again. Steps
and tasks per step are the config's, so every recipe plans the same number of rollouts; *draws* is the multiple of it that was
paid for. Reward, entropy and length are means of the last tenth of the steps. *KL to start* is the mean of ``log pi - log pi at
the start`` over decisions that the last policy samples on held-out tasks. *CPU s* is training and evaluation, without imports.
Every pair after ``--set`` is passed on to every run.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from forked_runs import Run, train

from mmrl.algorithms import PRESETS
from mmrl.checkpoint import latest_checkpoint
from mmrl.cli import build_adapter, load_run
from mmrl.sampling import rollout_seeds

COLUMNS = {
    "held-out": (3, True), "before": (3, False), "reward": (2, True), "entropy": (2, False), "KL to start": (2, True),
    "length": (1, False), "draws": (1, False), "CPU s": (0, False),
}  # fmt: skip
"""Decimals of each column, and whether it shows the lowest and highest seed."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("configs", nargs="+", type=Path, metavar="CONFIG")
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--recipes", nargs="+", default=[name for name in PRESETS if name != "sft"])
    parser.add_argument("--runs", type=Path, default=Path("runs/recipes"))
    parser.add_argument("--set", nargs="*", default=[], metavar="KEY=VALUE", help="passed on to every run")
    parser.add_argument("--workers", type=int, default=1, help="runs at a time")
    parser.add_argument("--only-table", action="store_true", help="write the tables from finished runs, start none")
    arguments = parser.parse_args()
    unknown = set(arguments.recipes) - set(PRESETS)
    if unknown:
        parser.error(f"unknown recipes {', '.join(sorted(unknown))}; known: {', '.join(PRESETS)}")
    failed = []
    for config in arguments.configs:
        if not arguments.only_table:
            runs = [
                Run(
                    config=config,
                    run_dir=arguments.runs / f"{config.stem}-{name}-{seed}",
                    overrides=[f"algorithm={name}", f"seed={seed}", *arguments.set],
                )
                for name in arguments.recipes
                for seed in arguments.seeds
            ]
            failed += train(runs, workers=arguments.workers, measure=lambda run_dir: {"kl_to_start": kl_to_start(run_dir)})
        table = markdown(config.stem, arguments.recipes, arguments.seeds, arguments.runs)
        path = arguments.runs / f"{config.stem}.md"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(table, encoding="utf-8")
        print(f"{table}\ntable  {path}")
    if failed:
        print(f"failed: {', '.join(failed)}; see log.txt in their folders", file=sys.stderr)
    return 1 if failed else 0


def kl_to_start(run_dir: Path, num_tasks: int = 64) -> float:
    """Mean of ``log pi - log pi at the start`` over what the run's last policy samples on held-out tasks."""
    config = load_run(run_dir / "config.yaml")
    adapter = build_adapter(config)
    start, trained = adapter.build_policy(), adapter.build_policy()
    adapter.load_policy(trained, latest_checkpoint(run_dir / "checkpoints") / "policy")
    source = adapter.task_source(config.evaluation.split)
    tasks = [source[index] for index in range(min(num_tasks, len(source)))]
    with torch.no_grad():
        batch = adapter.rollout(trained, tasks, group_size=1, seeds=rollout_seeds(config.seed, 0, 0, len(tasks)))
        before = adapter.forward(start, batch).log_probs
    return float((batch.old_log_probs - before)[batch.loss_mask].mean())


def summary(run_dir: Path) -> dict[str, Any] | None:
    """The numbers of a finished run; None while there are none."""
    if not (run_dir / "cost.json").exists():
        return None
    cost = json.loads((run_dir / "cost.json").read_text(encoding="utf-8"))
    lines = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    tail = lines[-max(1, len(lines) // 10) :]
    evaluations = [json.loads(path.read_text(encoding="utf-8")) for path in sorted((run_dir / "eval").glob("step_*.json"))]
    return {
        "held-out": evaluations[-1]["overall"]["mean"],
        "before": evaluations[0]["overall"]["mean"] if len(evaluations) > 1 else None,
        "reward": mean_of(tail, "reward/total"),
        "entropy": mean_of(tail, "rollout/entropy"),
        "KL to start": cost["kl_to_start"],
        "length": mean_of(tail, "rollout/decisions"),
        "draws": mean_of(lines, "selection/draws") or 1.0,
        "CPU s": cost["cpu_s"],
    }


def mean_of(lines: Sequence[dict[str, float]], key: str) -> float | None:
    values = [line[key] for line in lines if key in line]
    return statistics.fmean(values) if values else None


def markdown(task: str, recipes: Sequence[str], seeds: Sequence[int], runs: Path) -> str:
    """One row per recipe: medians over seeds, with the lowest and highest where seeds differ most."""
    rows = [f"## {task}", "", f"| recipe | seeds | {' | '.join(COLUMNS)} |", f"|---|---:|{'---:|' * len(COLUMNS)}"]
    for name in recipes:
        found = [entry for seed in seeds if (entry := summary(runs / f"{task}-{name}-{seed}")) is not None]
        cells = [cell(column, [entry[column] for entry in found if entry[column] is not None]) for column in COLUMNS]
        rows.append(f"| `{name}` | {len(found)} | {' | '.join(cells)} |")
    return "\n".join(rows) + "\n"


def cell(column: str, values: Sequence[float]) -> str:
    if not values:
        return ""
    digits, with_range = COLUMNS[column]
    spread = f" [{min(values):.{digits}f}, {max(values):.{digits}f}]" if with_range and len(values) > 1 else ""
    return f"{statistics.median(values):.{digits}f}{spread}"


if __name__ == "__main__":
    sys.exit(main())
