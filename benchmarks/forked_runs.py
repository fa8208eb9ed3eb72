"""Many short trainings in one process: libraries are loaded once, then each run is a forked child.

A child does what ``mmrl train CONFIG --cpu KEY=VALUE...`` does. What it prints goes to ``log.txt`` in the run's folder. When it
has trained to the end, ``cost.json`` holds its CPU seconds and what the caller measures; until then ``cost_so_far.json`` holds
the seconds of the attempts so far. A run that has ``cost.json`` is not repeated, one that was interrupted is resumed.
"""

from __future__ import annotations

import importlib
import json
import multiprocessing
import os
import resource
import signal
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import torch

from mmrl import cli
from mmrl.checkpoint import STATE, latest_checkpoint, replace_text

Measure = Callable[[Path], Mapping[str, Any]]
"""From the folder of a finished run, what is to be kept in its ``cost.json``."""


@dataclass(frozen=True, kw_only=True)
class Run:
    """One training: a config file, a folder, and values to change."""

    config: Path
    run_dir: Path
    overrides: Sequence[str] = ()

    @property
    def cost(self) -> dict[str, Any] | None:
        """What a finished run cost and what was measured; None before."""
        path = self.run_dir / "cost.json"
        return json.loads(path.read_text(encoding="utf-8")) if path.exists() else None


def train(runs: Sequence[Run], *, workers: int = 1, measure: Measure = lambda run_dir: {}) -> list[str]:
    """Finish every run, ``workers`` at a time; the names of those that failed, whose ``log.txt`` says why."""
    waiting = [run for run in runs if run.cost is None]
    if not waiting:
        return []
    _load(waiting)
    previous = signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(f"stopped by {signal.Signals(number).name}"))
    running: dict[int, tuple[BaseProcess, Run]] = {}
    failed = []
    try:
        while waiting or running:
            while waiting and len(running) < workers:
                run = waiting.pop(0)
                print(f"{'resume' if _started(run) else 'train '}  {run.run_dir.name}", flush=True)
                child = multiprocessing.get_context("fork").Process(target=_child, args=(run, measure))
                child.start()
                running[child.sentinel] = (child, run)
            for sentinel in wait(list(running)):
                child, run = running.pop(sentinel)
                child.join()
                if child.exitcode == 0 and run.cost is not None:
                    print(f"done    {run.run_dir.name}  {run.cost['cpu_s']:.1f} CPU s", flush=True)
                else:
                    print(f"failed  {run.run_dir.name}, see {run.run_dir / 'log.txt'}", flush=True)
                    failed.append(run.run_dir.name)
    finally:
        for child, _ in running.values():
            child.terminate()  # it writes a checkpoint first
        for child, _ in running.values():
            child.join()
        signal.signal(signal.SIGTERM, previous)
    return failed


def _load(runs: Sequence[Run]) -> None:
    """Import what the children will need, so that they share it; building one policy of each config finds the lazy parts."""
    torch.set_num_threads(1)  # a pool of threads would not survive the fork
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    for module in ("mmrl.console", "mmrl.trainer", "mmrl.report"):
        importlib.import_module(module)
    for run in {run.config: run for run in runs}.values():
        cli.build_adapter(cli.load_run(run.config, run.overrides)).build_policy()


def _started(run: Run) -> bool:
    return (run.run_dir / "checkpoints").exists()


def _child(run: Run, measure: Measure) -> None:
    """Train, then write ``cost.json``."""
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    started, tally = _started(run), run.run_dir / "cost_so_far.json"
    run.run_dir.mkdir(parents=True, exist_ok=True)
    with (run.run_dir / "log.txt").open("a" if started else "w", encoding="utf-8") as log:
        os.dup2(log.fileno(), sys.stdout.fileno())
        os.dup2(log.fileno(), sys.stderr.fileno())
    spent = json.loads(tally.read_text(encoding="utf-8"))["cpu_s"] if started and tally.exists() else 0.0
    command = ["train", str(run.config), "--cpu", "--resume" if started else "--overwrite", *run.overrides,
               f"name={run.run_dir.name}", f"output_dir={run.run_dir.parent}"]  # fmt: skip
    try:
        code = cli.main(command)
    finally:
        usages = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]  # 0 after a fork
        spent += sum(usage.ru_utime + usage.ru_stime for usage in usages)
        replace_text(tally, json.dumps({"cpu_s": spent}))
    if code != 0 or not _ended(run):
        sys.exit(code or 1)
    replace_text(run.run_dir / "cost.json", json.dumps({"cpu_s": spent, **measure(run.run_dir)}, indent=1))


def _ended(run: Run) -> bool:
    """Whether the run reached its last step or ran out of signal, so that no signal of the system cut it short."""
    state = json.loads((latest_checkpoint(run.run_dir / "checkpoints") / STATE).read_text(encoding="utf-8"))
    limits = state["config"]["trainer"]
    return state["train_step"] >= limits["num_steps"] or state["constant_steps"] >= limits["max_constant_steps"]
