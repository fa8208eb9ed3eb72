"""The command ``mmrl reward lint``: rewards held against canned answers and against every row's reference answer."""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mmrl.errors import ConfigError

if TYPE_CHECKING:
    from mmrl.config import RunConfig
    from mmrl.reward_lint import Lint

SUMMARY = "score rewards on canned answers and on every row's reference answer"
ROWS_OF_GENERATED = 200
"""Rows of a source that makes its tasks itself, where it is not said how many."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    parser.add_argument("config", type=Path, metavar="CONFIG", help="the run's YAML file")
    parser.add_argument("overrides", nargs="*", metavar="NAME|KEY=VALUE",
                        help="one reward only (by name; default: all), and values to change")  # fmt: skip
    parser.add_argument(
        "--template", metavar="TEXT", help="form of an answer, with {answer} in it (default: think and answer tags)"
    )
    parser.add_argument("--rows", type=int, metavar="N",
                        help="rows of each split (default: all of a dataset, 200 of tasks that are made)")  # fmt: skip


def split_names(given: list[str]) -> tuple[list[str], list[str]]:
    """Names of rewards, and overrides."""
    return [text for text in given if "=" not in text], [text for text in given if "=" in text]


def run(config: RunConfig, names: list[str], arguments: argparse.Namespace, build_adapter: Callable[[Any], Any]) -> int:
    """Run the command; 1 when a reward can be gamed or a reference answer does not earn it."""
    from mmrl.reward_lint import TEMPLATE, lint_rewards
    from mmrl.rewards import resolve_terms

    template = arguments.template or TEMPLATE
    if "{answer}" not in template:
        raise ConfigError(f"--template {template!r}: expected {{answer}} where the answer goes.")
    unknown = [name for name in names if name not in config.rewards]
    if unknown:
        raise ConfigError(f"reward {unknown[0]!r}: not among the run's rewards: {', '.join(config.rewards)}.")
    chosen = {name: spec for name, spec in config.rewards.items() if not names or name in names}
    adapter = build_adapter(config)
    sources = [adapter.task_source(split) for split in dict.fromkeys(("train", config.evaluation.split))]
    terms = resolve_terms(chosen, adapter.reward_terms, lambda: sources[0])
    generated = not all(hasattr(source, "rows") for source in sources)
    rows = arguments.rows or (ROWS_OF_GENERATED if generated else None)
    console = _console()
    with console.status("scoring") as status:
        found = lint_rewards(
            terms, sources, encode=_encoder(adapter), template=template, max_rows=rows,
            on_row=lambda done, total: status.update(f"scoring reference answers: {done} of {total}"),
        )  # fmt: skip
    console.print(lint_table(found, {name: term.weight for name, term in terms.items()}))
    for note in found.notes:
        console.print(f"note: {note}", markup=False, soft_wrap=True)
    for problem in found.problems:
        console.print(f"problem: {problem}", markup=False, soft_wrap=True)
    state = "nothing found" if found.ok else f"{len(found.problems)} problems"
    console.print(f"{found.num_references} reference answers scored, {state}.")
    return 0 if found.ok else 1


def lint_table(found: Lint, weights: dict[str, float]) -> Any:
    """Values of each term on each canned answer, their weighted sum, and the longest call."""
    from rich.table import Table

    table = Table(title="rewards of canned answers (means over tasks)", title_justify="left")
    table.add_column("answer")
    for name, weight in weights.items():
        table.add_column(f"{name} x {weight:g}", justify="right")
    for name in ("total", "ms"):
        table.add_column(name, justify="right")
    best = found.cells["perfect"]["total"]
    for what, cells in found.cells.items():
        values = ["\u2013" if math.isnan(value) else f"{value:.3g}" for value in (cells[name] for name in (*weights, "total"))]
        gamed = what != "perfect" and cells["total"] >= best - 1e-6
        table.add_row(what, *values, f"{1000 * found.seconds.get(what, 0.0):.1f}", style="bold red" if gamed else None)
    return table


def _encoder(adapter: Any) -> Callable[[str], tuple[int, ...]]:
    frontend = getattr(adapter, "frontend", None)
    if frontend is None:
        return lambda text: tuple(range(len(text.split())))
    return lambda text: tuple(frontend.processor.tokenizer(text, add_special_tokens=False)["input_ids"])


def _console() -> Any:
    from rich.console import Console

    console = Console(highlight=False)
    return console if console.is_terminal else Console(width=128, highlight=False)
