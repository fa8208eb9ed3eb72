"""Does a run that is killed again and again end where an undisturbed run ends? Any config, any modality.

    python benchmarks/kill_and_resume.py configs/vision/read_digits.yaml --kills 10 --seed 0 --steps 8 checkpoint.every=1

Trains twice in a temporary folder: once undisturbed, once killed with SIGKILL and resumed. The kills are spread over the run;
each falls while the program starts or resumes, at a random moment of a train step, or while a checkpoint is being written. Then
the files of both runs are compared byte by byte: the last checkpoint's policy and optimizer, metrics, evaluations, samples.
Prints a table of the kills and one of the files, and exits with 1 if a file differs.
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
COMPARED = (
    "checkpoints/{last}/policy/**/*",
    "checkpoints/{last}/optimizer.safetensors",
    "metrics.jsonl",
    "eval/*",
    "samples/**/*",
)
POLL_SECONDS = 0.001


@dataclass(frozen=True, kw_only=True)
class Kill:
    """When one attempt is ended: in this phase, once it has logged a train step later than ``after_step``."""

    phase: str
    after_step: int
    wait: float
    """Seconds to wait further, as a share of a train step (of the time to start, in that phase)."""


def main() -> int:
    arguments = parse_arguments()
    with tempfile.TemporaryDirectory(prefix="mmrl-kills-") as folder:
        whole, killed = (Run(arguments, Path(folder) / name) for name in ("whole", "killed"))
        seconds, start_seconds = whole.undisturbed()
        step_seconds = (seconds - start_seconds) / max(1, whole.num_logged)
        print(f"undisturbed: {whole.num_logged} steps in {seconds:.1f} s, {start_seconds:.1f} s of them before the first")
        print(f"{'kill':>4}  {'phase':<10} {'at second':>9}  {'steps logged':>12}  resumed from")
        for number, plan in enumerate(plan_kills(arguments.kills, whole.num_logged, random.Random(arguments.seed)), start=1):
            source = killed.latest
            moment = killed.until_killed(plan, step_seconds, start_seconds)
            if moment is None:
                print(f"{number:>4}  {'-':<10} {'':>9}  {killed.num_logged:>12}  {source} (finished before it could be killed)")
                break
            print(f"{number:>4}  {plan.phase:<10} {moment:>9.2f}  {killed.num_logged:>12}  {source}")
        killed.undisturbed()
        return compare(whole, killed)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("config", type=Path)
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE")
    parser.add_argument("--kills", type=int, default=10)
    parser.add_argument("--seed", type=int, default=0, help="of the moments at which the run is killed")
    parser.add_argument("--steps", type=int, help="short for trainer.num_steps=...")
    arguments, more = parser.parse_known_args()
    if any(text.startswith("-") for text in more):
        parser.error(f"unknown options: {' '.join(more)}")
    arguments.overrides += more
    if arguments.steps is not None:
        arguments.overrides.append(f"trainer.num_steps={arguments.steps}")
    return arguments


def plan_kills(count: int, num_steps: int, rng: random.Random) -> list[Kill]:
    """Kills in the order of train steps; about half of them while a checkpoint is written."""
    steps = sorted(rng.randrange(num_steps) for _ in range(count))
    return [
        Kill(phase=rng.choice(["checkpoint", "checkpoint", "step", "start"]), after_step=step, wait=rng.random())
        for step in steps
    ]


class Run:
    """One run directory and the processes that write to it."""

    def __init__(self, arguments: argparse.Namespace, output_dir: Path) -> None:
        self.directory = output_dir / "run"
        self.log = output_dir.with_suffix(".log")
        self.command = [
            sys.executable, "-m", "mmrl.cli", "train", str(arguments.config), *arguments.overrides,
            f"output_dir={output_dir}", "name=run",
        ]  # fmt: skip

    def undisturbed(self) -> tuple[float, float]:
        """Train to the end; seconds in all, and seconds until the first train step of this process was done."""
        began, before, first = time.monotonic(), self.num_logged, None
        process = self.start()
        while process.poll() is None:
            if first is None and self.num_logged > before:
                first = time.monotonic() - began
            time.sleep(0.02)
        if process.returncode != 0:
            sys.exit(f"the run failed with exit code {process.returncode}:\n{self.log.read_text()[-2000:]}")
        seconds = time.monotonic() - began
        return seconds, first or seconds

    def until_killed(self, plan: Kill, step_seconds: float, start_seconds: float) -> float | None:
        """Start, and kill as planned; the second at which that was, or None if the run ended first."""
        began, process = time.monotonic(), self.start()
        if plan.phase == "start":
            deadline = began + plan.wait * start_seconds
        else:
            stale, logged, advanced = self.drafts, self.num_logged, False  # what the last kill has left behind
            while process.poll() is None:
                logged, before = self.num_logged, logged
                advanced |= logged > before
                if advanced and logged > plan.after_step and (plan.phase == "step" or self.drafts - stale):
                    break
                stale &= self.drafts  # cleaned up since
                time.sleep(POLL_SECONDS)
            deadline = time.monotonic() + (plan.wait * step_seconds if plan.phase == "step" else plan.wait * 0.02)
        while process.poll() is None and time.monotonic() < deadline:
            time.sleep(POLL_SECONDS)
        if process.poll() is not None:
            if process.returncode != 0:
                sys.exit(f"the run failed with exit code {process.returncode}:\n{self.log.read_text()[-2000:]}")
            return None
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        return time.monotonic() - began

    def start(self) -> subprocess.Popen:
        resume = ["--resume"] if self.directory.exists() else []
        self.log.parent.mkdir(parents=True, exist_ok=True)
        environment = {**os.environ, "PYTHONHASHSEED": "0"}  # peft writes a set of module names in the order of their hashes
        with self.log.open("a") as log:
            return subprocess.Popen(
                [*self.command, *resume],
                cwd=ROOT,
                env=environment,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    @property
    def num_logged(self) -> int:
        path = self.directory / "metrics.jsonl"
        return path.read_bytes().count(b"\n") if path.exists() else 0

    @property
    def drafts(self) -> set[int]:
        """Checkpoints that are being written, or that a kill has left unfinished."""
        found = set()
        for path in self.directory.glob("checkpoints/.step_*.partial"):
            try:
                found.add(path.stat().st_ino)
            except FileNotFoundError:
                continue
        return found

    @property
    def latest(self) -> str:
        pointer = self.directory / "checkpoints" / "latest"
        return pointer.read_text().strip() if pointer.exists() else "nothing"

    def files(self) -> dict[str, bytes]:
        """What both runs should have in common, by relative path."""
        patterns = [pattern.format(last=self.latest) for pattern in COMPARED]
        paths = [path for pattern in patterns for path in sorted(self.directory.glob(pattern)) if path.is_file()]
        return {str(path.relative_to(self.directory)): path.read_bytes() for path in paths}


def compare(whole: Run, killed: Run) -> int:
    """Print what is equal and what is not; the exit code."""
    expected, actual = whole.files(), killed.files()
    groups: dict[str, list[str]] = {}
    for name in sorted({*expected, *actual}):
        group = name if name.startswith("checkpoints") else name.split("/")[0]
        groups.setdefault(group, []).append(name)
    different = [name for name in {*expected, *actual} if expected.get(name) != actual.get(name)]
    print(f"\n{'compared':<60} {'files':>5} {'bytes':>10}  result")
    for group, names in groups.items():
        wrong = sorted(set(names) & set(different))
        size = sum(len(expected.get(name, b"")) for name in names)
        print(f"{group:<60} {len(names):>5} {size:>10}  {'DIFFERENT: ' + ', '.join(wrong[:3]) if wrong else 'equal'}")
    print(f"\n{len(different)} of {len({*expected, *actual})} files differ")
    return 1 if different or not expected else 0


if __name__ == "__main__":
    sys.exit(main())
