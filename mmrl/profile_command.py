"""``mmrl data profile``: how hard a config's tasks are for a policy. Light to import; `mmrl.profiling` does the work."""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mmrl.errors import ConfigError

if TYPE_CHECKING:
    from mmrl.config import RunConfig

SUMMARY = "attempt every task several times; write its difficulty and complexity"
REPORT_SECONDS = 10.0
"""Seconds between two lines about progress."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    parser.add_argument("--output", type=Path, required=True, help="file to write: name.jsonl or name.parquet")
    parser.add_argument("--samples", type=int, default=8, metavar="N", help="attempts at each task (default 8)")
    parser.add_argument("--checkpoint", type=Path, help="a checkpoint of the run; absent takes the config's own policy")
    parser.add_argument("--policy", metavar="POLICY", help="instead of the config's policy.path")
    parser.add_argument("--split", default="train", help="which tasks (default train)")
    parser.add_argument("--limit", type=int, metavar="N", help="only the first so many tasks")
    parser.add_argument("--drop-solved", action="store_true", help="leave out tasks that every attempt solves")
    parser.add_argument("--overwrite", action="store_true", help="replace the output of an earlier profile")
    parser.add_argument("--cpu", action="store_true", help="do not use an accelerator")


def run(config: RunConfig, arguments: argparse.Namespace, build_adapter: Callable[[Any], Any]) -> int:
    """Profile the tasks of ``config``; a profile that was interrupted goes on."""
    output: Path = arguments.output
    if output.suffix not in (".jsonl", ".parquet"):
        raise ConfigError(f"--output is {str(output)!r}; expected a name that ends in .jsonl or .parquet.")
    for option in ("samples", "limit"):
        if getattr(arguments, option) is not None and getattr(arguments, option) < 1:
            raise ConfigError(f"--{option} is {getattr(arguments, option)}; expected 1 or more.")
    if output.exists() and not arguments.overwrite:
        raise ConfigError(f"{output}: exists already; choose another --output, or --overwrite to replace it.")
    import torch
    from accelerate import Accelerator
    from rich.console import Console

    from mmrl.checkpoint import checkpoint_directory, verify_checkpoint
    from mmrl.profiling import level_table, profile
    from mmrl.rewards import resolve_terms

    if config.trainer.num_threads:
        torch.set_num_threads(config.trainer.num_threads)
    precision = "bf16" if config.trainer.precision == "bfloat16" else "no"
    accelerator = Accelerator(mixed_precision=precision, cpu=arguments.cpu)
    adapter = build_adapter(config)
    policy = adapter.build_policy().to(accelerator.device)
    if arguments.checkpoint is not None:
        checkpoint = checkpoint_directory(arguments.checkpoint)
        verify_checkpoint(checkpoint)
        adapter.load_policy(policy, checkpoint / "policy")
    with accelerator.autocast():
        measurements = profile(
            config,
            adapter,
            policy,
            resolve_terms(config.rewards, adapter.reward_terms),
            output=output,
            samples=arguments.samples,
            split=arguments.split,
            limit=arguments.limit,
            drop_solved=arguments.drop_solved,
            accelerator=accelerator,
            on_progress=_Progress(quiet=not accelerator.is_main_process),
        )
    if accelerator.is_main_process:
        console = Console(width=128)
        console.print(level_table(measurements))
        never = [entry.id for entry in measurements if entry.difficulty == 1]
        if never:
            shown = ", ".join(never[:5]) + (" .." if len(never) > 5 else "")
            print(f"never solved, so check their answers: {len(never)} ({shown})")
        print(f"profile {output}")
    return 0


class _Progress:
    """A line every few seconds with the time that is left."""

    def __init__(self, *, quiet: bool) -> None:
        self.quiet = quiet
        self.began = self.last = time.monotonic()
        self.first: int | None = None

    def __call__(self, done: int, total: int) -> None:
        now = time.monotonic()
        if self.first is None:
            self.first = done
            return
        if self.quiet or (now - self.last < REPORT_SECONDS and done < total):
            return
        self.last = now
        left = (total - done) * (now - self.began) / max(1, done - self.first)
        print(f"profile: {done} of {total} tasks, about {left:.0f} s left", flush=True)
