"""The folder of a run: who may write to it, and what goes where.

Numbers that a seed determines go to ``metrics.jsonl``, so two runs of one config give equal files; seconds go to
``timing.jsonl``. See also `mmrl.checkpoint` and `mmrl.report`, which reads all of it.
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import socket
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from mmrl import checkpoint
from mmrl.adapter import Adapter
from mmrl.checkpoint import replace_text, step_name
from mmrl.config import RunConfig, to_yaml
from mmrl.errors import ConfigError
from mmrl.types import RolloutBatch

_OURS = (
    "config.yaml",
    "metrics.jsonl",
    "timing.jsonl",
    "samples",
    "checkpoints",
    "eval",
    "report.html",
    "trackers",
    "failure",
    "replay",
)


class RunDirectory:
    """Appends to one run's files. Only the main process writes."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._lock: Any = None

    @property
    def checkpoints(self) -> Path:
        return self.path / "checkpoints"

    def prepare(self, *, resume: bool, overwrite: bool) -> None:
        """Lock the folder; an existing run needs ``resume`` or ``overwrite``."""
        self.path.mkdir(parents=True, exist_ok=True)
        self._acquire()
        existing = [name for name in _OURS if (self.path / name).exists()]
        if existing and overwrite:
            for name in existing:
                target = self.path / name
                shutil.rmtree(target) if target.is_dir() else target.unlink()
        elif existing and not resume:
            raise ConfigError(
                f"{self.path} already holds a run ({', '.join(existing[:3])}); continue it with --resume, replace it with "
                "--overwrite, or choose another name=..."
            )

    def write_config(self, config: RunConfig) -> None:
        """Write ``config.yaml``, once it is known that the run goes ahead."""
        replace_text(self.path / "config.yaml", to_yaml(config))

    def release(self) -> None:
        """Let other processes use the folder."""
        if self._lock is not None:
            self._lock.close()
            self._lock = None

    def forget_after(self, train_step: int) -> None:
        """Drop what was written after ``train_step``, before a resumed run repeats it."""
        for name in ("metrics.jsonl", "timing.jsonl"):
            path = self.path / name
            if path.exists():
                lines = [line for line in path.read_text(encoding="utf-8").splitlines() if _step_of(line) <= train_step]
                replace_text(path, "".join(line + "\n" for line in lines))
        checkpoint.forget_after(self.checkpoints, train_step)
        for folder, pattern in (("samples", "step_*.jsonl"), ("eval", "step_*.json")):
            for path in (self.path / folder).glob(pattern):
                if int(path.stem.removeprefix("step_")) > train_step:
                    path.unlink()

    def log_metrics(self, train_step: int, metrics: Mapping[str, float]) -> None:
        self._append("metrics.jsonl", {"train_step": train_step, **metrics})

    def log_timing(self, train_step: int, seconds: Mapping[str, float]) -> None:
        self._append("timing.jsonl", {"train_step": train_step, **{k: round(v, 4) for k, v in seconds.items()}})

    def write_evaluation(self, train_step: int, result: Mapping[str, Any]) -> None:
        folder = self.path / "eval"
        folder.mkdir(exist_ok=True)
        text = json.dumps({"train_step": train_step, **result}, indent=1)
        replace_text(folder / f"{step_name(train_step)}.json", text)

    def read_evaluations(self) -> dict[int, dict[str, Any]]:
        """Evaluations so far by train step."""
        paths = sorted((self.path / "eval").glob("step_*.json"))
        return {int(path.stem.removeprefix("step_")): json.loads(path.read_text(encoding="utf-8")) for path in paths}

    def write_samples(
        self,
        train_step: int,
        adapter: Adapter,
        batch: RolloutBatch,
        advantages: Tensor,
        limit: int,
        *,
        details: Callable[[int], Mapping[str, Any]] = lambda row: {},
    ) -> None:
        """Write the first ``limit`` rollouts as a person reads them; ``details`` gives further JSON values of a row."""
        media_dir = self.path / "samples" / "media"
        media_dir.mkdir(parents=True, exist_ok=True)
        lines, shown = [], {}
        for row in range(min(limit, len(batch))):
            sample = adapter.describe(batch, row)
            group = int(batch.group_ids[row])
            if group not in shown:  # rollouts of a text group share their media
                shown[group] = []
            media = []
            for i, item in enumerate(sample.media):
                known = next((entry for data, entry in shown[group] if data == item.data), None)
                if known is None:
                    name = f"{step_name(train_step)}_{row}_{i}{item.suffix}"
                    (media_dir / name).write_bytes(item.data)
                    known = {"kind": item.kind, "path": f"samples/media/{name}", "caption": item.caption}
                    shown[group].append((item.data, known))
                media.append(known)
            terms = {name: _number(values[row]) for name, values in batch.reward_terms.items()}
            lines.append({
                "train_step": train_step, "task_id": batch.tasks[row].id, "domain": batch.tasks[row].domain, "group": group,
                "seed": int(batch.seeds[row]), "prompt": sample.prompt, "completion": sample.completion,
                "reference": sample.reference, "reward": _number(batch.rewards[row]), "reward_terms": terms,
                "advantage": _number(advantages[row]), "stop_reason": batch.stop_reasons[row],
                "num_decisions": int(batch.num_decisions[row]), "media": media,
            })  # fmt: skip
            if batch.judgings is not None and batch.judgings[row] is not None:
                lines[-1]["judging"] = batch.judgings[row]
            lines[-1] |= details(row)
        text = "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines)
        replace_text(self.path / "samples" / f"{step_name(train_step)}.jsonl", text)

    def write_failure(self, name: str, record: Mapping[str, Any]) -> Path:
        """Keep what is needed to understand why a run stopped."""
        folder = self.path / "failure"
        folder.mkdir(exist_ok=True)
        path = folder / f"{name}.json"
        path.write_text(json.dumps(record, indent=1, ensure_ascii=False, default=str), encoding="utf-8")
        return path

    def _append(self, name: str, record: Mapping[str, Any]) -> None:
        with (self.path / name).open("a", encoding="utf-8") as file:
            file.write(json.dumps(record) + "\n")

    def _acquire(self) -> None:
        lock = (self.path / ".lock").open("a+", encoding="utf-8")
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            lock.seek(0)
            owner = lock.read().strip() or "another process"
            lock.close()
            raise ConfigError(f"{self.path} is in use by {owner}; wait for it, or choose another name=...") from None
        lock.truncate(0)
        lock.write(f"process {os.getpid()} on {socket.gethostname()}")
        lock.flush()
        self._lock = lock


def _number(value: Tensor) -> float | None:
    number = float(value)
    return None if number != number else round(number, 6)


def _step_of(line: str) -> int:
    try:
        return int(json.loads(line)["train_step"])
    except (ValueError, KeyError):
        return 1 << 62  # a line cut off by a crash
