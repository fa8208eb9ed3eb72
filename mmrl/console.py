"""What a run looks like in a terminal: one line per step with fixed columns, a progress bar below, plain lines in a log."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

COLUMNS: tuple[tuple[str, str, str], ...] = (
    # heading, metric, format
    ("reward", "reward/total", "7.3f"),
    ("signal", "groups/informative", "7.2f"),
    ("length", "rollout/decisions", "7.1f"),
    ("entropy", "rollout/entropy", "8.4f"),
    ("kl", "kl", "8.4f"),
    ("loss", "loss/total", "9.4f"),
    ("grad", "optimizer/gradient_norm", "8.3f"),
    ("lr", "optimizer/learning_rate", "9.2e"),
)


class RunConsole:
    """Prints a run; its methods are the trainer's callbacks."""

    def __init__(self, console: Console, *, num_steps: int, metric: str) -> None:
        self.console, self.num_steps = console, num_steps
        measured = (metric, f"reward/{metric}", f"{max(len(metric), 7)}.3f")
        self.columns = [COLUMNS[0], measured, *COLUMNS[1:]]
        self.progress = Progress(
            TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TimeRemainingColumn(),
            console=console, transient=True, disable=not console.is_terminal,
        )  # fmt: skip
        self.bars: dict[str, Any] = {}
        self._last_note = time.monotonic()

    def __enter__(self) -> RunConsole:
        self.progress.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self.progress.__exit__(*error)

    def header(self) -> None:
        """The column headings."""
        cells = [f"{heading:>{_width(form)}}" for heading, _, form in self.columns]
        self.print(f"{'step':>6} {' '.join(cells)} {'sec':>6}")

    def on_step(self, step: int, metrics: Mapping[str, float], seconds: Mapping[str, float]) -> None:
        cells = []
        for _, name, form in self.columns:
            value = metrics.get(name)
            cells.append(f"{value:{form}}" if value is not None else f"{'-':>{_width(form)}}")
        self.print(f"{step:>6} {' '.join(cells)} {seconds['step_s']:6.2f}")
        self._advance("train", step, self.num_steps)

    def on_evaluation(self, step: int, result: Mapping[str, Any]) -> None:
        self._finish("evaluate")
        overall = result["overall"]
        if overall["mean"] is None:
            self.print(f"held-out {result['metric']} at step {step}: applies to no task")
            return
        kinds = "  ".join(f"{name} {entry['mean']:.3f}" for name, entry in result["domains"].items())
        self.print(f"held-out {result['metric']} at step {step}: {overall['mean']:.3f} (n {overall['n']})  {kinds}")
        control = result.get("control")
        if control is not None and control["gap"]["mean"] is not None:
            gap = control["gap"]
            bounds = "" if gap["low"] is None else f" [{gap['low']:+.3f}, {gap['high']:+.3f}]"
            self.print(f"with control {control['kind']}: {control['without']['mean']:.3f}  gap {gap['mean']:+.3f}{bounds}")

    def on_progress(self, what: str, done: int, total: int) -> None:
        if not self.console.is_terminal and time.monotonic() - self._last_note > 10 and done < total:
            self._last_note = time.monotonic()
            self.print(f"{what}: {done} of {total}")
        self._advance(what, done, total)

    def on_notice(self, text: str) -> None:
        self.print(text)

    def print(self, text: str) -> None:
        """One line, never wrapped or restyled."""
        self.console.print(text, markup=False, highlight=False, soft_wrap=True)

    def _advance(self, what: str, done: int, total: int) -> None:
        if what not in self.bars:
            self.bars[what] = self.progress.add_task(what, total=total)
        self.progress.update(self.bars[what], completed=done, total=total)

    def _finish(self, what: str) -> None:
        if what in self.bars:
            self.progress.remove_task(self.bars.pop(what))


def _width(form: str) -> int:
    return int(form.split(".")[0])
