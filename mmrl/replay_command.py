"""The command ``mmrl replay``: one rollout of a training run as it was recorded."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

SUMMARY = "show one recorded rollout: media, decisions, log-probabilities, ratio, clip, mask, advantage, rewards"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    parser.add_argument("run_dir", type=Path, metavar="RUN", help="a run directory (runs/<name>)")
    parser.add_argument("--step", type=int, required=True, metavar="N", help="train step; one that samples were written of")
    parser.add_argument("--rollout", type=int, default=0, metavar="I", help="rollout of that step, counted from 0 (default 0)")
    parser.add_argument("--pass", dest="which_pass", type=int, default=-1, metavar="K",
                        help="pass of the update over this rollout, counted from 0 (default: the last)")  # fmt: skip
    parser.add_argument("--html", type=Path, nargs="?", const=True, metavar="FILE",
                        help="write a page instead (default file: replay/ in the run directory)")  # fmt: skip


def run(arguments: argparse.Namespace) -> int:
    """Run the command; the exit code."""
    from mmrl.checkpoint import step_name
    from mmrl.replay_view import as_html, as_text, read_rollout

    record = read_rollout(arguments.run_dir, arguments.step, arguments.rollout)
    if arguments.html is None:
        _console().print(as_text(record, arguments.which_pass))
        return 0
    target = arguments.html
    if target is True:
        target = arguments.run_dir / "replay" / f"{step_name(arguments.step)}_{arguments.rollout}.html"
    page = as_html(record, arguments.run_dir, arguments.which_pass)
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_text(page, encoding="utf-8")
    print(target)
    return 0


def _console() -> Any:
    """A terminal's own width, and enough for the table in a log file."""
    from rich.console import Console

    console = Console(highlight=False, soft_wrap=True)
    return console if console.is_terminal else Console(width=160, highlight=False)
