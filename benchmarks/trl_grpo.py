"""mmrl against TRL's GRPOTrainer on the same tiny Qwen2.5-VL: equal first steps, then what a train step costs.

    python benchmarks/trl_grpo.py

Both sides train the same model directory on the same images and questions, in float32 on one thread, each in a process of its
own environment. `benchmarks/README.md` says how to make TRL's and what the numbers mean.

1. First steps: mmrl samples completions and takes one optimizer step; TRL's ``generate`` is made to return the same tokens, and
   TRL takes its own step, through its own tokenization, masks, advantages and loss. Loss and gradients are compared.
2. Cost: both sample for themselves, always to the length limit. Warm-up steps are dropped and processes alternate.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from dataclasses import asdict
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
from safetensors.numpy import load_file
from trl_grpo_workload import SIZES, TASKS_PER_STEP, WARMUP_STEPS, variant_folder

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent
TOLERANCE = 1e-5
"""Largest relative difference of losses and gradients that counts as equal."""
BAR = 0.5
"""mmrl's share of TRL's CPU seconds per step at size B, at most."""
HOW_TO_INSTALL = """{missing} is missing. TRL needs an environment of its own:
    uv venv --python {own} .venv-trl
    uv pip install --python .venv-trl/bin/python -r benchmarks/requirements-trl.txt"""
COST_ROWS = {
    "cpu_s": "CPU seconds",
    "peak_mib": "peak memory, MiB",
    "growth_mib": "  grown since loading, MiB",
    "processor_calls": "image processor calls",
    "processor_images": "  images in them",
    "tower_forwards": "vision tower passes",
    "tower_images": "  images in them",
}


class Sides:
    """Starts jobs of either side, each in a new process of its environment with one thread."""

    def __init__(self, pythons: dict[str, Path], folder: Path, size: str) -> None:
        self.pythons, self.folder, self.size = pythons, folder, size

    def run(self, side: str, job: str, number: int = 0) -> Any:
        command = [self.pythons[side], HERE / f"trl_grpo_{side}.py", job, self.folder, self.size, number]
        environment = {
            **os.environ,
            **dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"), "1"),
            "TOKENIZERS_PARALLELISM": "false",
            "CUDA_VISIBLE_DEVICES": "",
            "HF_HUB_OFFLINE": "1",
            "PYTHONPATH": str(ROOT) if side == "mmrl" else "",
        }
        done = subprocess.run([str(part) for part in command], env=environment, capture_output=True, text=True)
        if done.returncode:
            raise SystemExit(f"{side} {job} at size {self.size} failed:\n{done.stdout[-2000:]}{done.stderr[-6000:]}")
        return json.loads((self.folder / "result.json").read_text())


def compare(folder: Path, ours: dict[str, Any], theirs: dict[str, Any]) -> list[dict[str, Any]]:
    """Losses and gradients of every variant.

    The loss of an on-policy step can be zero by construction (a group's advantages sum to 0), so differences of losses are
    divided by the mean absolute advantage, the size of the terms that cancel. For gradients: the relative L2 difference of all
    parameters together, and the largest difference within a parameter over its largest entry, at its worst over parameters.
    """
    rows = []
    for name, mine in ours.items():
        left, right = (load_file(variant_folder(folder, name) / f"{side}.safetensors") for side in ("mmrl", "trl"))
        if left.keys() != right.keys():
            raise SystemExit(f"{name}: gradients of different parameters: {sorted(left.keys() ^ right.keys())}")
        worst = {key: float(np.abs(left[key] - right[key]).max() / np.abs(right[key]).max()) for key in right}
        differences = np.concatenate([(left[key].astype(np.float64) - right[key]).ravel() for key in right])
        norm = np.linalg.norm(np.concatenate([right[key].astype(np.float64).ravel() for key in right]))
        rows.append(
            {
                "variant": name,
                "mmrl_loss": mine["loss"],
                "trl_loss": theirs[name]["loss"],
                "loss_difference": abs(mine["loss"] - theirs[name]["loss"]) / mine["mean_abs_advantage"],
                "gradient_l2": float(np.linalg.norm(differences) / norm),
                "gradient_worst": max(worst.values()),
                "gradient_worst_parameter": max(worst, key=worst.get),
                "mean_length": mine["mean_length"],
                "clipped": mine["clipped"],
            }
        )
    return rows


def summarize(runs: dict[str, list[dict[str, Any]]]) -> dict[str, Any]:
    """Medians over all measured steps of a side, and the ratio of the medians of each pair of neighbouring processes."""
    result: dict[str, Any] = {}
    for side, parts in runs.items():
        steps = [seconds for part in parts for seconds in part["cpu_s"]]
        result[side] = {name: median(part[name] for part in parts) for name in COST_ROWS if name != "cpu_s"}
        result[side] |= {"cpu_s": median(steps), "cpu_s_range": [min(steps), max(steps)]}
    result["ratios"] = [median(a["cpu_s"]) / median(b["cpu_s"]) for a, b in zip(runs["mmrl"], runs["trl"])]
    result["ratio"] = median(result["ratios"])
    return result


def print_first_steps(size: str, rows: list[dict[str, Any]]) -> None:
    print(f"\nFirst steps at size {size}: relative differences")
    print(f"{'':<30}{'mmrl loss':>12}{'TRL loss':>12}{'loss':>8}{'grad L2':>9}{'worst':>8}{'length':>8}{'clipped':>9}")
    for row in rows:
        print(
            f"{row['variant']:<30}{row['mmrl_loss']:>12.3e}{row['trl_loss']:>12.3e}{row['loss_difference']:>8.0e}"
            f"{row['gradient_l2']:>9.0e}{row['gradient_worst']:>8.0e}{row['mean_length']:>8.1f}{row['clipped']:>9.1%}"
        )


def print_cost(size: str, result: dict[str, Any]) -> None:
    print(f"\nA train step at size {size}: medians")
    print(f"{'':<30}{'mmrl':>9}{'TRL':>9}{'mmrl/TRL':>10}")
    for name, label in COST_ROWS.items():
        ours, theirs = result["mmrl"][name], result["trl"][name]
        digits, share = (3, result["ratio"]) if name == "cpu_s" else (0, ours / theirs)
        print(f"{label:<30}{ours:>9.{digits}f}{theirs:>9.{digits}f}{share:>10.2f}")
    for side, label in (("mmrl", "mmrl"), ("trl", "TRL")):
        low, high = result[side]["cpu_s_range"]
        print(f"{label}'s CPU seconds lie between {low:.3f} and {high:.3f}.", end=" ")
    print(f"Ratio by pair of processes: {', '.join(f'{ratio:.2f}' for ratio in result['ratios'])}.")


def versions(python: Path) -> str:
    """What a side runs on, in one line."""
    script = (
        "import importlib.metadata, importlib.util, platform\n"
        "names = [n for n in ('trl', 'torch', 'transformers', 'accelerate') if importlib.util.find_spec(n)]\n"
        "print('Python', ', '.join([platform.python_version(), *(f'{n} {importlib.metadata.version(n)}' for n in names)]))"
    )
    return subprocess.run([python, "-c", script], capture_output=True, text=True, check=True).stdout.strip()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", nargs="+", choices=SIZES, default=list(SIZES))
    parser.add_argument("--only", choices=("first-steps", "cost"), help="leave the other part out")
    parser.add_argument("--rounds", type=int, default=3, help="processes of each side per size, alternating")
    parser.add_argument("--steps", type=int, default=5, help="measured train steps of each process")
    parser.add_argument("--trl-python", type=Path, default=ROOT / ".venv-trl/bin/python")
    parser.add_argument("--output", type=Path, default=ROOT / "runs/trl_grpo.json")
    options = parser.parse_args()
    if not options.trl_python.exists():
        raise SystemExit(HOW_TO_INSTALL.format(missing=options.trl_python, own=sys.executable))
    pythons = {"mmrl": Path(sys.executable), "trl": options.trl_python}
    report: dict[str, Any] = {"versions": {side: versions(python) for side, python in pythons.items()}}
    print("\n".join(f"{side}: {text}" for side, text in report["versions"].items()), flush=True)
    failures = []
    for size in options.sizes:
        entry = report[size] = {"workload": asdict(SIZES[size])}
        with tempfile.TemporaryDirectory(prefix="trl-grpo-") as temporary:
            folder = Path(temporary)
            sides = Sides(pythons, folder, size)
            sides.run("mmrl", "prepare", TASKS_PER_STEP * (WARMUP_STEPS + options.steps))
            if options.only != "cost":
                rows = compare(folder, sides.run("mmrl", "first-steps"), sides.run("trl", "first-steps"))
                entry["first_steps"] = rows
                print_first_steps(size, rows)
                wrong = [row["variant"] for row in rows if max(row["loss_difference"], row["gradient_l2"]) > TOLERANCE]
                failures += [f"size {size}, {name}: a relative difference exceeds {TOLERANCE}" for name in wrong]
            if options.only != "first-steps":
                runs: dict[str, list[dict[str, Any]]] = {"mmrl": [], "trl": []}
                for _ in range(options.rounds):
                    for side, parts in runs.items():
                        parts.append(sides.run(side, "cost", options.steps))
                entry["cost"] = summarize(runs)
                print_cost(size, entry["cost"])
                if size == "B" and entry["cost"]["ratio"] > BAR:
                    failures.append(f"size B: {entry['cost']['ratio']:.2f} of TRL's CPU seconds is more than {BAR}")
        sys.stdout.flush()
    options.output.parent.mkdir(parents=True, exist_ok=True)
    options.output.write_text(json.dumps(report, indent=1))
    print(f"\nwritten: {options.output}")
    if failures:
        raise SystemExit("\n".join(failures))


if __name__ == "__main__":
    main()
