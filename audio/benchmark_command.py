"""``mmrl eval CONFIG --benchmark mmau --file FILE``: a run's policy on a published benchmark, with controls."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mmrl.errors import ConfigError

if TYPE_CHECKING:
    from audio.benchmark_scores import Graded
    from audio.benchmarks import Item
    from audio.config import AudioRunConfig


def run(config: AudioRunConfig, arguments: argparse.Namespace, build_adapter: Callable[[Any], Any], console: Any) -> int:
    """Answer every item of ``arguments.file`` greedily, print and write both scores."""
    import torch

    from audio.benchmark_scores import report
    from audio.benchmarks import item_task, read_items, shuffled, silenced
    from mmrl.checkpoint import checkpoint_directory, verify_checkpoint

    if arguments.file is None:
        raise ConfigError(f"--benchmark {arguments.benchmark} needs --file, the benchmark's json, jsonl or parquet file.")
    items = read_items(arguments.benchmark, arguments.file, version=arguments.benchmark_version)
    if config.trainer.num_threads:
        torch.set_num_threads(config.trainer.num_threads)
    if arguments.control == "silence":
        config = config.model_copy(update={"rollout": config.rollout.model_copy(update={"allow_silence": True})})
    adapter = build_adapter(config)
    if arguments.control == "silence":
        items = [silenced(item, adapter.frontend.open(item_task(item), "audio", item.audio)) for item in items]
    elif arguments.control == "shuffled-options":
        items = shuffled(items)
    policy = adapter.build_policy()
    if arguments.checkpoint is not None:
        checkpoint = checkpoint_directory(arguments.checkpoint)
        verify_checkpoint(checkpoint)
        adapter.load_policy(policy, checkpoint / "policy")
    graded = list(answer(adapter, policy, arguments.benchmark, items, batch_size=config.evaluation.batch_size))
    result = report(
        arguments.benchmark, items, graded, version=arguments.benchmark_version, control=arguments.control or "none"
    )
    for renderable in tables(result):
        console.print(renderable)
    if arguments.output is not None:
        Path(arguments.output).write_text(json.dumps(result, indent=1, ensure_ascii=False), encoding="utf-8")
        console.print(f"result  {arguments.output}", highlight=False, soft_wrap=True)
    return 0


def answer(adapter: Any, policy: Any, benchmark: str, items: Sequence[Item], *, batch_size: int) -> Iterator[Graded]:
    """Greedy completions of all items, graded, in order."""
    from audio.benchmark_scores import grade
    from audio.benchmarks import item_task
    from mmrl.sampling import rollout_seeds

    for start in range(0, len(items), batch_size):
        part = items[start : start + batch_size]
        seeds = rollout_seeds(0, start, 0, len(part))
        batch = adapter.rollout(policy, [item_task(item) for item in part], group_size=1, seeds=seeds, greedy=True)
        for item, completion in zip(part, batch.outcomes):
            yield grade(benchmark, item, completion)


def tables(result: Mapping[str, Any]) -> Iterator[Any]:
    """The result for people."""
    from rich.table import Table

    name = result["benchmark"] + (f" {result['version']}" if result["version"] else "")
    control = "" if result["control"] == "none" else f", control: {result['control']}"
    table = Table(title=f"{name}{control} (95% Wilson intervals)", title_justify="left")
    for column, justify in (("", "left"), ("k/n", "right"), ("share", "right")):
        table.add_column(column, justify=justify)
    rows = [("strict accuracy", result["strict"]), ("published rule", result["published"])]
    rows += [(name, result[name]) for name in ("malformed", "truncated")]
    for label, cell in rows:
        table.add_row(label, f"{cell['k']}/{cell['n']}", _share(cell))
    for kind, cells in result["groups"].items():
        table.add_section()
        for label, cell in cells.items():
            table.add_row(f"{kind}: {label}", f"{cell['k']}/{cell['n']}", _share(cell))
    yield table
    yield f"{result['mean_tokens']:.0f} tokens and {result['mean_think_words']:.0f} words of thinking on average"
    published = result["num_published_items"]
    if published is not None and published != result["num_items"]:
        yield f"{name} has {published} items with public answers; this file has {result['num_items']}, so do not compare."


def _share(cell: Mapping[str, Any]) -> str:
    if cell["mean"] is None:
        return "-"
    return f"{cell['mean']:.3f} [{cell['low']:.3f}, {cell['high']:.3f}]"
