"""``mmrl data ...``: commands that look at datasets. Light to import; what names a modality is handed in by `mmrl.cli`."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from mmrl.errors import ConfigError, DataError


@dataclass(frozen=True, kw_only=True)
class Tools:
    """What the command line knows and this module does not."""

    load_run: Callable[[Path, Sequence[str]], Any]
    """Read, override and validate a run's config."""
    load: Callable[[str], Any]
    """Import ``package.module:name``."""
    config_class: Callable[[str], Any]
    """The config model of a modality."""
    builders: Mapping[str, str]
    """``package.module:name`` of what builds a run's adapter, by modality with datasets."""
    openers: Mapping[str, str]
    """``package.module:name`` of what opens media under a rollout section's limits, by modality with datasets."""


def add_data_commands(add: Callable[..., argparse.ArgumentParser], tools: Tools) -> None:
    """Declare the commands; ``add(name, function, summary)`` gives the parser of one."""
    check = add("check", partial(check_command, tools=tools), "put every row through the processor, report each bad row")
    check.add_argument("target", metavar="FILE|CONFIG", help="a dataset file, or a run's YAML file (its processor and limits)")
    check.add_argument("--json", action="store_true", help="print the result as JSON")
    check.add_argument("--workers", type=_at_least_one, metavar="N", help="processes that share the rows (default: one a core)")
    check.add_argument("--fresh", action="store_true", help="check again, also where the same files were checked before")
    show = add("show", partial(show_command, tools=tools), "print one row as the policy sees it")
    show.add_argument("target", metavar="FILE|CONFIG", help="a dataset file, or a run's YAML file (its processor and limits)")
    show.add_argument("--row", type=int, default=1, help="row, counted from 1; for jsonl the line (default 1)")
    show.add_argument("--split", choices=["train", "eval"], default="train", help="dataset of a YAML file (default train)")
    show.add_argument("--html", type=Path, metavar="FILE", help="also write a page with the media as the policy gets them")
    convert = add("convert", partial(convert_command, tools=tools), "write a dataset in this project's own layout")
    convert.add_argument("target", metavar="FILE|CONFIG", help="a dataset file, or a run's YAML file")
    convert.add_argument("--output", type=Path, required=True, metavar="OUT", help="file to write: .jsonl or .parquet")
    convert.add_argument("--media", choices=["keep", "bytes"], default="keep",
                         help="keep references as they are, or put files into OUT (default keep)")  # fmt: skip
    convert.add_argument("--split", choices=["train", "eval"], default="train", help="dataset of a YAML file (default train)")
    for command in (check, show, convert):
        command.add_argument("overrides", nargs="*", metavar="KEY=VALUE", help="for example columns.prompt=question")
    for command in (check, show):
        command.add_argument("--modality", choices=sorted(tools.openers, reverse=True), default="vision",
                             help="for a FILE: whose limits and decoders judge the media (default vision)")  # fmt: skip


def check_command(arguments: argparse.Namespace, *, tools: Tools) -> int:
    from mmrl.data_cache import cached_check
    from mmrl.data_problems import render_check

    console = _console(stderr=arguments.json)
    spec = checker_spec(arguments, tools)
    reports = []
    for name, dataset in _datasets(arguments, tools).items():
        report = cached_check(
            dataset,
            base_dir=Path.cwd(),
            spec=spec,
            workers=arguments.workers,
            console=_console(stderr=True),
            on_notice=_notice,
            fresh=arguments.fresh,
        )
        reports.append(report)
        if not arguments.json:
            console.print(f"{name}: ", end="", highlight=False)
            console.print(render_check(report, dataset if _is_config(arguments.target) else None))
    if arguments.json:
        print(json.dumps([json.loads(report.to_json()) for report in reports], indent=1))
    return 0 if all(report.ok for report in reports) else 1


def show_command(arguments: argparse.Namespace, *, tools: Tools) -> None:
    from mmrl.data import read_tasks
    from mmrl.data_show import describe_task, encode_row, opened_media, write_page

    dataset = _one_dataset(arguments, tools)
    task = read_tasks(dataset, base_dir=Path.cwd()).find_row(arguments.row)
    if _is_config(arguments.target):
        config = tools.load_run(Path(arguments.target), arguments.overrides)
        row = encode_row(task, tools.load(tools.builders[config.modality])(config))
    else:
        limits = tools.config_class(arguments.modality).model_fields["rollout"].default
        row = opened_media(task, tools.load(tools.openers[arguments.modality])(limits))
    print(describe_task(task))
    print("\n".join(row.lines()))
    if arguments.html is not None:
        write_page(arguments.html, task, row)
        print(f"page  {arguments.html}")


def convert_command(arguments: argparse.Namespace, *, tools: Tools) -> None:
    from mmrl.data import read_tasks
    from mmrl.data_check import with_progress
    from mmrl.data_convert import Conversion, reading_section

    tasks = read_tasks(_one_dataset(arguments, tools), base_dir=Path.cwd())
    conversion = Conversion(tasks, arguments.output, embed_media=arguments.media == "bytes")
    label = f"writing {arguments.output}"
    count = sum(1 for _ in with_progress(conversion.run(), len(tasks), label, _console(stderr=True)))
    print(f"{arguments.output}: {count} rows. Read it with:")
    print(reading_section(conversion.reading_config))


def vet_run(config: Any, builder: str) -> None:
    """Check the datasets of a run before anything heavy is loaded; raises `DataError` as its ``on_bad_rows`` say."""
    from mmrl.data_vetting import vetted_tasks
    from mmrl.language_check import run_spec

    for dataset in datasets_of(config).values():
        tasks = vetted_tasks(
            dataset, base_dir=Path.cwd(), spec=run_spec(builder, config), on_notice=_notice, console=_console(stderr=True)
        )
        for text in tasks.notices:
            _notice(text)


def datasets_of(config: Any) -> dict[str, Any]:
    """The datasets of a run by split; none where its tasks are made by the program."""
    from mmrl.data import DatasetConfig

    return {name: value for name, value in getattr(config, "tasks", None) or () if isinstance(value, DatasetConfig)}


def checker_spec(arguments: argparse.Namespace, tools: Tools) -> Any:
    """What judges the rows: the run of a config file, or the media limits of a modality."""
    from mmrl.data_check import file_spec
    from mmrl.language_check import run_spec

    if not _is_config(arguments.target):
        return file_spec(
            tools.openers[arguments.modality], tools.config_class(arguments.modality).model_fields["rollout"].default
        )
    config = tools.load_run(Path(arguments.target), arguments.overrides)
    if config.modality not in tools.builders:
        raise ConfigError(f"{arguments.target}: a {config.modality} run has no dataset to look at.")
    return run_spec(tools.builders[config.modality], config)


def _is_config(target: str) -> bool:
    return target.endswith((".yaml", ".yml"))


def _datasets(arguments: argparse.Namespace, tools: Tools) -> dict[str, Any]:
    """The datasets of a config file, or one dataset file read with ``columns.prompt=...`` style overrides."""
    from mmrl.config import apply_overrides, validate
    from mmrl.data import DatasetConfig

    target = arguments.target
    if not _is_config(target):
        return {target: validate(apply_overrides({"path": target}, arguments.overrides), DatasetConfig, target)}
    found = datasets_of(tools.load_run(Path(target), arguments.overrides))
    if not found:
        raise ConfigError(f"{target}: tasks has no dataset to look at; its tasks are made by the program.")
    return found


def _one_dataset(arguments: argparse.Namespace, tools: Tools) -> Any:
    found = _datasets(arguments, tools)
    if len(found) == 1:
        return next(iter(found.values()))
    if arguments.split not in found:
        raise DataError(f"{arguments.target}: has no dataset {arguments.split!r}; it has: {', '.join(found)}.")
    return found[arguments.split]


def _at_least_one(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{number}: expected 1 or more")
    return number


def _notice(text: str) -> None:
    _console(stderr=True).print(f"notice: {text}", highlight=False, markup=False, soft_wrap=True)


def _console(*, stderr: bool = False) -> Any:
    """A terminal's own width, and enough for the tables in a log file."""
    from rich.console import Console

    console = Console(stderr=stderr)
    return console if console.is_terminal else Console(width=128, stderr=stderr)
