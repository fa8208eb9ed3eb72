"""``mmrl eval CONFIG --benchmark vl_rewardbench --file FILE``: a run's policy as a judge on a published benchmark."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mmrl.errors import ConfigError

if TYPE_CHECKING:
    from vision.benchmark_preferences import Item
    from vision.benchmark_scores import Judgment
    from vision.config import VisionRunConfig
    from vision.preferences_config import JudgingPrompt


def run(config: VisionRunConfig, arguments: argparse.Namespace, build_adapter: Callable[[Any], Any], console: Any) -> int:
    """Judge every pair of ``arguments.file`` in both orders, greedily and by votes; print and write the result."""
    import torch

    from mmrl.checkpoint import checkpoint_directory, verify_checkpoint
    from vision.benchmark_preferences import read_items
    from vision.benchmark_scores import report

    if arguments.file is None:
        raise ConfigError(f"--benchmark {arguments.benchmark} needs --file, the benchmark's json, jsonl or parquet file.")
    if arguments.control is not None:
        raise ConfigError(f"--control {arguments.control} is for audio benchmarks; both orders are always measured here.")
    votes = sorted(set(getattr(arguments, "votes", ())))
    if votes and votes[0] < 1:
        raise ConfigError(f"--votes has {votes[0]}; expected numbers of votes from 1, for example --votes 1 5 15.")
    items = read_items(arguments.benchmark, arguments.file)
    if config.trainer.num_threads:
        torch.set_num_threads(config.trainer.num_threads)
    adapter = build_adapter(config)
    policy = adapter.build_policy()
    if arguments.checkpoint is not None:
        checkpoint = checkpoint_directory(arguments.checkpoint)
        verify_checkpoint(checkpoint)
        adapter.load_policy(policy, checkpoint / "policy")
    judgments = list(
        judge(
            adapter, policy, items, prompt=getattr(config.tasks, "prompt", "full"), num_votes=max(votes, default=0),
            batch_size=config.evaluation.batch_size, seed=config.seed,
        )
    )  # fmt: skip
    result = report(arguments.benchmark, items, judgments, votes=votes)
    for renderable in tables(result):
        console.print(renderable)
    if arguments.output is not None:
        Path(arguments.output).write_text(json.dumps(result, indent=1, ensure_ascii=False), encoding="utf-8")
        console.print(f"result  {arguments.output}", highlight=False, soft_wrap=True)
    return 0


def judge(
    adapter: Any, policy: Any, items: Sequence[Item], *, prompt: JudgingPrompt, num_votes: int, batch_size: int, seed: int
) -> Iterator[Judgment]:
    """Greedy and sampled verdicts on all items in both orders; samples have the config's temperature."""
    from mmrl.sampling import rollout_seeds
    from vision.benchmark_scores import Judgment
    from vision.preferences import judging_task
    from vision.r1_reward import verdict_of

    for start in range(0, len(items), batch_size):
        part = items[start : start + batch_size]
        tasks = [judging_task(item.pair, label, prompt) for item in part for label in (1, 2)]
        seeds = rollout_seeds(seed, start, 0, len(tasks))
        texts = [done.text for done in adapter.rollout(policy, tasks, group_size=1, seeds=seeds, greedy=True).outcomes]
        votes: list[tuple[int | None, ...]] = [()] * len(tasks)
        if num_votes:
            seeds = rollout_seeds(seed, start, 1, len(tasks) * num_votes)
            batch = adapter.rollout(policy, tasks, group_size=num_votes, seeds=seeds)
            named = [verdict_of(done.text) for done in batch.outcomes]
            votes = [tuple(named[row * num_votes : (row + 1) * num_votes]) for row in range(len(tasks))]
        for row in range(0, len(tasks), 2):
            yield Judgment(texts=(texts[row], texts[row + 1]), votes=(votes[row], votes[row + 1]))


def tables(result: Mapping[str, Any]) -> Iterator[Any]:
    """The result for people."""
    from rich.table import Table

    table = Table(title=f"{result['benchmark']} (95% intervals)", title_justify="left")
    for column, justify in (("", "left"), ("k/n", "right"), ("share", "right")):
        table.add_column(column, justify=justify)
    rows = [("accuracy, mean of both orders", result["accuracy"])]
    rows += [(f"accuracy, {name}", cell) for name, cell in result["orders"].items()]
    rows += [(name, result[name]) for name in ("right in both orders", "says the first", "unreadable", "published rule")]
    for count, cells in result["votes"].items():
        rows += [(f"voting@{count}: {name}", cell) for name, cell in cells.items()]
    for label, cell in rows:
        table.add_row(label, f"{cell['k']:g}/{cell['n']}", _share(cell))
    for kind, cells in result["groups"].items():
        table.add_section()
        for label, cell in cells.items():
            table.add_row(f"{kind}: {label}", f"{cell['k']:g}/{cell['n']}", _share(cell))
    yield table
    if result["macro"] is not None:
        yield f"macro accuracy over categories {result['macro']:.4f}"
    yield f"Acc+ {result['acc_plus']:.4f} over {result['num_units']} questions (all of their pairs right, mean of both orders)"
    published = result["num_published_items"]
    if published is not None and published != result["num_items"]:
        yield f"{result['benchmark']} has {published} pairs; this file has {result['num_items']}, so do not compare."


def _share(cell: Mapping[str, Any]) -> str:
    if cell["mean"] is None:
        return "-"
    bounds = "" if cell["low"] is None else f" [{cell['low']:.3f}, {cell['high']:.3f}]"
    return f"{cell['mean']:.3f}{bounds}"
