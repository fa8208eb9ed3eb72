"""``mmrl data profile``: how hard each task is for a policy, and how long its completions are.

Every task is attempted N times. Difficulty is the share of wrong attempts, complexity the mean length of all of them in
decisions (Observe-R1, arXiv 2505.12432). The result is the dataset's own rows with two more columns, for `mmrl.ladder` and
other curricula. Measurements are appended to a log beside the output: an interrupted profile goes on where it was.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from accelerate import Accelerator
from rich.table import Table
from torch import nn

from mmrl import processes
from mmrl.adapter import Adapter
from mmrl.checkpoint import policy_checksum
from mmrl.config import RunConfig
from mmrl.data import DatasetTasks
from mmrl.errors import ConfigError, DataError, RewardError
from mmrl.ladder import NUM_LEVELS, level_of
from mmrl.rewards import WeightedTerm, score
from mmrl.sampling import rollout_seeds
from mmrl.selection import groups_of, selection_metric
from mmrl.types import Task

_BEFORE_TRAINING = 0
"""The train step whose seeds are used: training begins with step 1."""
_ROWS_AT_ONCE = 256
"""Rows of a parquet file that are written together."""


@dataclass(frozen=True, kw_only=True)
class Measurement:
    """What became of the attempts at one task."""

    index: int
    id: str
    correct: tuple[bool | None, ...]
    """One entry per attempt; None where the metric does not apply."""
    lengths: tuple[int, ...]
    """Decisions of each attempt, the end token included."""

    @property
    def difficulty(self) -> float | None:
        """``1 - correct / N``, or None when no attempt could be graded."""
        known = [flag for flag in self.correct if flag is not None]
        return 1 - sum(known) / len(known) if known else None

    @property
    def complexity(self) -> float:
        """Mean length of all attempts, right or wrong."""
        return sum(self.lengths) / len(self.lengths)


def measure(
    config: RunConfig,
    adapter: Adapter,
    policy: nn.Module,
    terms: Mapping[str, WeightedTerm],
    tasks: Sequence[tuple[int, Task]],
    samples: int,
) -> list[Measurement]:
    """Attempt ``tasks``, given with their indices. The seeds of a task depend on the run's seed and its index only."""
    import torch

    seeds = torch.stack([rollout_seeds(config.seed, _BEFORE_TRAINING, index, samples) for index, _ in tasks])
    batch = adapter.rollout(policy, [task for _, task in tasks], group_size=samples, seeds=seeds.flatten())
    metric, found = selection_metric(config.algorithm, score(batch, terms)), []
    above, lengths = config.algorithm.correct_above, batch.num_decisions
    for (index, task), rows in zip(tasks, groups_of(batch.group_ids)):
        values = metric[rows].tolist()
        flags = tuple(None if value != value else value > above for value in values)
        found.append(Measurement(index=index, id=task.id, correct=flags, lengths=tuple(lengths[rows].tolist())))
    return found


def profile(
    config: RunConfig,
    adapter: Adapter,
    policy: nn.Module,
    terms: Mapping[str, WeightedTerm],
    *,
    output: Path,
    samples: int = 8,
    split: str = "train",
    limit: int | None = None,
    drop_solved: bool = False,
    accelerator: Accelerator | None = None,
    on_progress: Callable[[int, int], None] = lambda done, total: None,
) -> list[Measurement]:
    """Profile the tasks of ``split`` and write ``output`` (.jsonl or .parquet). Processes share the tasks.

    Raises `ConfigError` when the log of an earlier, unfinished profile was written with other settings.
    """
    source = adapter.task_source(split)
    total = len(source) if limit is None else min(limit, len(source))
    main = accelerator is None or accelerator.is_main_process
    log = MeasurementLog(output, _settings(config, policy, samples, split))
    known = processes.gather(accelerator, log.read() if main else None)[0]
    rank, world_size = (accelerator.process_index, accelerator.num_processes) if accelerator else (0, 1)
    open_indices = [index for index in range(total) if index not in known]
    at_once = config.sampling.tasks_per_step
    for start in range(0, len(open_indices), at_once):
        mine = open_indices[start : start + at_once][rank::world_size]
        found, failure = [], None
        try:
            found = measure(config, adapter, policy, terms, [(i, source[i]) for i in mine], samples) if mine else []
        except RewardError as error:
            failure = error
        processes.raise_together(accelerator, failure)
        fresh = [entry for part in processes.gather(accelerator, found) for entry in part]
        known |= {entry.index: entry for entry in fresh}
        if main:
            log.append(fresh)
        on_progress(len([index for index in known if index < total]), total)
    measurements = [known[index] for index in range(total)]
    if main:
        kept = [entry for entry in measurements if not (drop_solved and entry.difficulty == 0)]
        if not kept:
            raise DataError(f"{output}: every one of {total} tasks is always solved; --drop-solved leaves none.")
        write_rows(output, lambda: (profiled_row(source, entry) for entry in kept))
        log.remove()
    return measurements


def profiled_row(source: Sequence[Task], entry: Measurement) -> dict[str, Any]:
    """The dataset's own row with ``difficulty`` and ``complexity`` (in place of columns of these names), and an ``id``.

    Tasks that a program makes have no row: theirs holds what identifies them, for `mmrl.ladder.read_rungs`.
    """
    if isinstance(source, DatasetTasks):
        row = dict(source.rows[source.indices[entry.index]])
        row.setdefault("id", entry.id)
    else:
        task = source[entry.index]
        answer = getattr(task, "answer", "")
        row = {"id": task.id, "domain": task.domain, **({"answer": answer} if answer else {})}
    return row | {"difficulty": entry.difficulty, "complexity": entry.complexity}


class MeasurementLog:
    """A file beside the output: a line of settings, then a line per measured task. A half-written last line is dropped."""

    def __init__(self, output: Path, settings: Mapping[str, Any]) -> None:
        self.path = output.with_name(output.name + ".measured")
        self.settings = dict(settings)

    def read(self) -> dict[int, Measurement]:
        """Measurements so far, by index."""
        if not self.path.exists():
            return {}
        text = self.path.read_text(encoding="utf-8")
        whole = text[: text.rfind("\n") + 1]
        if whole != text:
            self.path.write_text(whole, encoding="utf-8")
        lines = [json.loads(line) for line in whole.splitlines()]
        if not lines:
            return {}
        changed = [key for key in {**lines[0], **self.settings} if lines[0].get(key) != self.settings.get(key)]
        if changed:
            raise ConfigError(
                f"{self.path}: was begun with other settings ({', '.join(changed)}); restore them, delete the file, or choose "
                "another --output."
            )
        entries = [
            Measurement(**line | {"correct": tuple(line["correct"]), "lengths": tuple(line["lengths"])}) for line in lines[1:]
        ]
        return {entry.index: entry for entry in entries}

    def append(self, entries: Sequence[Measurement]) -> None:
        """Add measurements; on return they are with the operating system."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        empty = not self.path.exists() or self.path.stat().st_size == 0
        lines = [*([self.settings] if empty else []), *(asdict(entry) for entry in entries)]
        with self.path.open("a", encoding="utf-8") as file:
            file.write("".join(json.dumps(line) + "\n" for line in lines))

    def remove(self) -> None:
        """The output is written; the log is no longer needed."""
        self.path.unlink(missing_ok=True)


def write_rows(path: Path, rows: Callable[[], Iterator[dict[str, Any]]]) -> None:
    """Write rows as .jsonl or .parquet by the name of ``path``; the file appears when it is whole."""
    draft = path.with_name(f".{path.name}.partial")
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        if path.suffix == ".parquet":
            _write_parquet(draft, rows)
        else:
            with draft.open("w", encoding="utf-8") as file:
                for row in rows():
                    try:
                        file.write(json.dumps(row, ensure_ascii=False) + "\n")
                    except TypeError as error:
                        raise DataError(f"{path}: {row['id']!r} cannot be JSON ({error}); choose a name.parquet.") from error
        os.replace(draft, path)
    finally:
        draft.unlink(missing_ok=True)


def _write_parquet(path: Path, rows: Callable[[], Iterator[dict[str, Any]]]) -> None:
    import pyarrow
    import pyarrow.parquet

    def batches() -> Iterator[Any]:
        held: list[dict[str, Any]] = []
        for row in rows():
            held.append(row)
            if len(held) == _ROWS_AT_ONCE:
                yield held
                held = []
        if held:
            yield held

    def columns(held: Sequence[Mapping[str, Any]]) -> list[str]:
        return list(dict.fromkeys(name for row in held for name in row))

    try:
        schemas = [pyarrow.schema([(n, pyarrow.array([row.get(n) for row in held]).type) for n in columns(held)])
                   for held in batches()]  # fmt: skip
        schema = pyarrow.unify_schemas(schemas, promote_options="permissive")
        with pyarrow.parquet.ParquetWriter(path, schema) as writer:
            for held in batches():
                writer.write_table(pyarrow.Table.from_pylist(held, schema=schema))
    except pyarrow.ArrowException as error:
        raise DataError(f"{path}: these rows do not fit into one table ({' '.join(str(error).split())}).") from error


def level_table(measurements: Sequence[Measurement]) -> Table:
    """Tasks, share and mean complexity of each level, for people."""
    table = Table(title="difficulty for this policy", title_justify="left")
    for column in ("difficulty", "tasks", "share", "mean complexity"):
        table.add_column(column, justify="right")
    graded = [entry for entry in measurements if entry.difficulty is not None]
    for level in range(NUM_LEVELS):
        members = [entry for entry in graded if level_of(entry.difficulty) == level]
        mean = f"{sum(entry.complexity for entry in members) / len(members):.1f}" if members else "-"
        share = len(members) / len(measurements)
        table.add_row(f"{level / (NUM_LEVELS - 1):g}", str(len(members)), f"{share:.3f}", mean)
    if len(graded) < len(measurements):
        ungraded = len(measurements) - len(graded)
        table.add_row("ungraded", str(ungraded), f"{ungraded / len(measurements):.3f}", "-")
    return table


def _settings(config: RunConfig, policy: nn.Module, samples: int, split: str) -> dict[str, Any]:
    """What decides a measurement."""
    tree = config.model_dump(mode="json")
    metric = [config.algorithm.selection_metric, config.algorithm.correct_above]
    kept = {key: tree.get(key) for key in ("modality", "tasks", "rollout", "rewards", "seed")}
    return {**kept, "correct": metric, "policy": policy_checksum(policy), "samples": samples, "split": split}
