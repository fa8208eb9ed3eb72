"""How fast and in how much memory is a dataset checked, and does a second check cost anything?

    python benchmarks/data_check.py --rows 5000 10000 20000 --workers 2

Generates rows with an image each (JPEG, 200 to 500 pixels a side) in a temporary folder, then runs ``mmrl data check`` of a
vision config on the first so many of them: every row through the policy's processor. While it runs, the memory of its process
and of all processes below it is read from /proc: resident (pages shared between processes count once for each) and proportional
(they count once). Then the same command again, which must answer from its cache. Prints a row per size and writes ``--output``
as JSON. Rows per second are those of the whole command, which also checks 64 held-out rows; the last line leaves out what
starting costs, by the difference of two sizes.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
from PIL import Image

ROOT = Path(__file__).resolve().parents[1]
POLL_SECONDS = 0.5
CONFIG = """\
modality: vision
policy: {{path: {policy}}}
rewards: {{accuracy: 1.0}}
trainer: {{num_steps: 1}}
rollout: {{max_pixels: 100352}}
tasks:
  name: dataset
  train: {{path: {folder}/rows.jsonl}}
  eval: {{path: {folder}/rows.jsonl, limit: 64}}
"""


@dataclass(kw_only=True)
class Measured:
    """One check."""

    rows: int
    seconds: float
    peak_command_mib: float
    """Resident, of the command's own process."""
    peak_workers_mib: float
    """Resident, of all processes below it together."""
    peak_proportional_mib: float
    """Of all of them, shared pages counted once."""
    again_seconds: float = 0.0

    @property
    def rows_per_second(self) -> float:
        return self.rows / self.seconds


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, nargs="+", default=[5000, 10_000, 20_000], help="sizes to check")
    parser.add_argument("--workers", type=int, default=2, help="processes that share the rows")
    parser.add_argument("--policy", default="digit-reader", help="policy whose processor judges the rows")
    parser.add_argument("--output", type=Path, help="also write the numbers as JSON")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="mmrl-data-check-") as name:
        folder = Path(name)
        print(f"generating {max(arguments.rows)} rows", flush=True)
        generate(folder, max(arguments.rows))
        (folder / "run.yaml").write_text(CONFIG.format(policy=arguments.policy, folder=folder))
        measured = []
        print("   rows  seconds  rows/s  command MiB  workers MiB  shared once  again s")
        for rows in sorted(arguments.rows):
            result = measure(folder, rows, arguments.workers, "--fresh")
            again = measure(folder, rows, arguments.workers)
            result.again_seconds = again.seconds
            measured.append(result)
            print(
                f"{rows:>7} {result.seconds:>8.1f} {result.rows_per_second:>7.1f} {result.peak_command_mib:>12.0f} "
                f"{result.peak_workers_mib:>12.0f} {result.peak_proportional_mib:>12.0f} {result.again_seconds:>8.2f}",
                flush=True,
            )
    if len(measured) > 1:
        first, last = measured[0], measured[-1]
        rate = (last.rows - first.rows) / (last.seconds - first.seconds)
        print(f"without the cost of starting: {rate:.1f} rows per second with {arguments.workers} workers")
    if arguments.output is not None:
        arguments.output.write_text(json.dumps([asdict(result) for result in measured], indent=1), encoding="utf-8")
    return 0


def generate(folder: Path, count: int) -> None:
    """Rows with smooth noise: about 10 KB a picture, as of a small photo."""
    random = np.random.default_rng(0)
    (folder / "images").mkdir()
    with (folder / "rows.jsonl").open("w", encoding="utf-8") as file:
        for number in range(count):
            width, height = (int(side) for side in random.integers(200, 500, 2))
            small = random.integers(0, 256, (height // 16, width // 16, 3), dtype=np.uint8)
            Image.fromarray(small).resize((width, height)).save(folder / f"images/{number}.jpg", quality=85)
            row = {"prompt": "<image>How many spots?", "images": [f"images/{number}.jpg"], "answer": str(number % 10)}
            file.write(json.dumps(row) + "\n")


def measure(folder: Path, rows: int, workers: int, *options: str) -> Measured:
    """Run one check in a process of its own and watch its memory; raises if it finds a bad row or no cache."""
    environment = {**os.environ, "MMRL_CACHE_DIR": str(folder / "cache"), "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, "-m", "mmrl", "data", "check", str(folder / "run.yaml"), f"tasks.train.limit={rows}",
               "--workers", str(workers), *options]  # fmt: skip
    start = time.perf_counter()
    process = subprocess.Popen(command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    own = below = proportional = 0.0
    while process.poll() is None:
        children = descendants(process.pid)
        command_now, *below_now = [memory(pid) for pid in (process.pid, *children)]
        own = max(own, command_now[0])
        below = max(below, sum(resident for resident, _ in below_now))
        proportional = max(proportional, sum(shared for _, shared in (command_now, *below_now)))
        time.sleep(POLL_SECONDS)
    seconds = time.perf_counter() - start
    output = process.stdout.read()
    if process.returncode != 0 or output.count("nothing wrong") != 2:
        raise SystemExit(f"{' '.join(command)} ended with {process.returncode}:\n{output}")
    if not options and output.count("as checked before") != 2:
        raise SystemExit(f"{' '.join(command)} did not use its cache:\n{output}")
    return Measured(
        rows=rows, seconds=seconds, peak_command_mib=own, peak_workers_mib=below, peak_proportional_mib=proportional
    )


def descendants(pid: int) -> list[int]:
    """Processes below ``pid``."""
    try:
        children = [int(text) for text in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except OSError:
        return []
    return [found for child in children for found in (child, *descendants(child))]


def memory(pid: int) -> tuple[float, float]:
    """Mebibytes that a process has, resident and proportional; 0 once it is gone."""
    try:
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    except OSError:
        return 0.0, 0.0
    found = {line.split(":")[0]: int(line.split()[1]) / 1024 for line in lines if line.startswith(("Rss:", "Pss:"))}
    return found.get("Rss", 0.0), found.get("Pss", 0.0)


if __name__ == "__main__":
    sys.exit(main())
