"""``mmrl data ...``: commands that look at datasets. Light to import; what names a modality is handed in by `mmrl.cli`."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from mmrl.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class Tools:
    """What the command line knows and this module does not."""

    load_run: Callable[[Path, Sequence[str]], Any]
    """Read, override and validate a run's config."""
    load: Callable[[str], Any]
    """Import ``package.module:name``."""
    config_class: Callable[[str], Any]
    """The config model of a modality."""
    openers: Mapping[str, str]
    """``package.module:name`` of what opens media under a rollout section's limits, by modality."""


def add_data_commands(add: Callable[..., argparse.ArgumentParser], tools: Tools) -> None:
    """Declare the commands; ``add(name, function, summary)`` gives the parser of one."""
    check = add("check", partial(check_command, tools=tools), "read every row, open every medium, report each bad row")
    check.add_argument("target", metavar="FILE|CONFIG", help="a dataset file, or a run's YAML file")
    check.add_argument("--json", action="store_true", help="print the result as JSON")
    show = add("show", partial(show_command, tools=tools), "print one row as the policy sees it")
    show.add_argument("target", metavar="FILE|CONFIG", help="a dataset file, or a run's YAML file")
    show.add_argument("--row", type=int, default=1, help="row, counted from 1; for jsonl the line (default 1)")
    for command in (check, show):
        command.add_argument("overrides", nargs="*", metavar="KEY=VALUE", help="for example columns.prompt=question")
    check.add_argument("--modality", choices=sorted(tools.openers, reverse=True), default="vision",
                       help="whose limits and decoders judge the media (default vision)")  # fmt: skip


def check_command(arguments: argparse.Namespace, *, tools: Tools) -> int:
    from mmrl.data_check import check_dataset, render_check

    console = _console(stderr=arguments.json)
    open_media = tools.load(tools.openers[_modality(arguments, tools)])(_rollout_limits(arguments, tools))
    reports = []
    for name, dataset in _datasets(arguments, tools).items():
        report = check_dataset(dataset, base_dir=Path.cwd(), open_media=open_media, console=console)
        reports.append(report)
        if not arguments.json:
            console.print(f"{name}: ", end="")
            console.print(render_check(report))
    if arguments.json:
        print(json.dumps([json.loads(report.to_json()) for report in reports], indent=1))
    return 0 if all(report.ok for report in reports) else 1


def show_command(arguments: argparse.Namespace, *, tools: Tools) -> None:
    from mmrl.data import read_tasks
    from mmrl.data_check import describe_task

    dataset = next(iter(_datasets(arguments, tools).values()))
    print(describe_task(read_tasks(dataset, base_dir=Path.cwd()).find_row(arguments.row)))


def _is_config(target: str) -> bool:
    return target.endswith((".yaml", ".yml"))


def _modality(arguments: argparse.Namespace, tools: Tools) -> str:
    """The modality of a config file, or the one that was asked for."""
    if _is_config(arguments.target):
        return tools.load_run(Path(arguments.target), arguments.overrides).modality
    return arguments.modality


def _rollout_limits(arguments: argparse.Namespace, tools: Tools) -> Any:
    """The ``rollout`` section of a config file, or the modality's defaults."""
    if _is_config(arguments.target):
        return tools.load_run(Path(arguments.target), arguments.overrides).rollout
    return tools.config_class(arguments.modality).model_fields["rollout"].default


def _datasets(arguments: argparse.Namespace, tools: Tools) -> dict[str, Any]:
    """The datasets of a config file, or one dataset file read with ``columns.prompt=...`` style overrides."""
    from mmrl.config import apply_overrides, validate
    from mmrl.data import DatasetConfig

    target = arguments.target
    if not _is_config(target):
        return {target: validate(apply_overrides({"path": target}, arguments.overrides), DatasetConfig, target)}
    tasks = getattr(tools.load_run(Path(target), arguments.overrides), "tasks", None)
    found = {name: value for name, value in tasks or () if isinstance(value, DatasetConfig)}
    if not found:
        raise ConfigError(f"{target}: tasks has no dataset to look at; its tasks are made by the program.")
    return found


def _console(*, stderr: bool = False) -> Any:
    """A terminal's own width, and enough for the tables in a log file."""
    from rich.console import Console

    console = Console(stderr=stderr)
    return console if console.is_terminal else Console(width=128, stderr=stderr)
