"""Held-out rollouts with pictures of what the policy attends to, kept among a run's samples at each evaluation.

An adapter that can draw them has ``illustrate(policy, tasks)``, which gives a batch of greedy rollouts and a `Sample` of each.
The report shows the first and the last of them: before and after training.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from torch import nn

from mmrl.adapter import Adapter
from mmrl.checkpoint import replace_text, step_name
from mmrl.errors import ConfigError
from mmrl.types import RolloutBatch, Sample, Task

DOMAIN = "held out, greedy"
"""Marks these rows among the samples."""


def illustrate(run_dir: Path, train_step: int, adapter: Adapter, policy: nn.Module, tasks: Sequence[Task]) -> None:
    """Add illustrated rollouts of ``tasks`` to the samples of ``train_step``, in place of earlier ones of that step."""
    draw = getattr(adapter, "illustrate", None)
    if draw is None:
        raise ConfigError(
            f"evaluation.num_illustrated is set, but {type(adapter).__name__} draws no attention; leave it out (0)."
        )
    batch, samples = draw(policy, tasks)
    path = run_dir / "samples" / f"{step_name(train_step)}.jsonl"
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    rows = [row for row in map(json.loads, lines) if row["domain"] != DOMAIN]
    first_group = 1 + max((row["group"] for row in rows), default=-1)
    rows += [_row(run_dir, train_step, batch, row, sample, first_group + row) for row, sample in enumerate(samples)]
    replace_text(path, "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows))


def _row(run_dir: Path, train_step: int, batch: RolloutBatch, row: int, sample: Sample, group: int) -> dict[str, object]:
    """A line of a samples file (see `mmrl.run_dir`); rollouts of an evaluation have no advantage and no reward here."""
    folder = run_dir / "samples" / "media"
    folder.mkdir(exist_ok=True)
    media = []
    for i, item in enumerate(sample.media):
        name = f"{step_name(train_step)}_held_out_{row}_{i}{item.suffix}"
        (folder / name).write_bytes(item.data)
        media.append({"kind": item.kind, "path": f"samples/media/{name}", "caption": item.caption})
    return {
        "train_step": train_step, "task_id": batch.tasks[row].id, "domain": DOMAIN, "group": group,
        "seed": int(batch.seeds[row]), "prompt": sample.prompt, "completion": sample.completion, "reference": sample.reference,
        "reward": None, "reward_terms": {}, "advantage": None, "stop_reason": batch.stop_reasons[row],
        "num_decisions": int(batch.num_decisions[row]), "media": media,
    }  # fmt: skip
