"""Resumable snapshots of a run: written whole or not at all, verified when read.

A checkpoint is ``checkpoints/step_000100/`` with ``policy/`` (a directory that the modality's own library loads),
``optimizer.safetensors``, ``trainer.json`` (counters, the resolved config, a checksum of the policy in memory) and
``manifest.json`` (SHA-256 of every file). It is written under a temporary name, synced to disk and renamed; then ``latest`` is
replaced. Deleting starts with a rename too, so a folder called ``step_...`` is whole at any moment. Only safetensors and JSON
are read back.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from mmrl.errors import CheckpointError

POLICY, OPTIMIZER, STATE, MANIFEST, LATEST = "policy", "optimizer.safetensors", "trainer.json", "manifest.json", "latest"


@dataclass(frozen=True, kw_only=True)
class Snapshot:
    """A checkpoint that has been read and verified."""

    directory: Path
    state: Mapping[str, Any]
    optimizer: Mapping[str, Tensor]

    @property
    def policy_dir(self) -> Path:
        return self.directory / POLICY


def step_name(train_step: int) -> str:
    """``step_000100``: folder and file names that sort."""
    return f"step_{train_step:06d}"


def write_checkpoint(
    root: Path,
    train_step: int,
    *,
    save_policy: Callable[[Path], None],
    state: Mapping[str, Any],
    optimizer: Mapping[str, Tensor],
) -> Path:
    """Write ``root/step_...`` atomically and point ``latest`` at it. On an error the previous checkpoint is untouched."""
    final = root / step_name(train_step)
    draft = root / f".{final.name}.partial"
    try:
        root.mkdir(parents=True, exist_ok=True)
        _remove_drafts(root)
        (draft / POLICY).mkdir(parents=True)
        save_policy(draft / POLICY)
        save_file({name: tensor.contiguous() for name, tensor in optimizer.items()}, draft / OPTIMIZER)
        _write_json(draft / STATE, state)
        files = sorted(path for path in draft.rglob("*") if path.is_file())
        _write_json(draft / MANIFEST, {str(path.relative_to(draft)): file_checksum(path) for path in files})
        for path in (*files, draft / MANIFEST):
            _sync(path)
        for folder in sorted({path.parent for path in files} | {draft}):
            _sync(folder)
        _remove(final)
        draft.rename(final)
        _sync(root)
        replace_text(root / LATEST, final.name + "\n")
    except (OSError, SafetensorError) as error:
        _remove_drafts(root)
        raise CheckpointError(
            f"{final}: cannot be written ({error}); the previous checkpoint is intact. Free some space and run with --resume."
        ) from error
    return final


def latest_checkpoint(root: Path) -> Path | None:
    """The checkpoint that ``latest`` names, or the newest one; None if there is none. It has not been verified."""
    pointer = root / LATEST
    if pointer.is_file():
        name = pointer.read_text(encoding="utf-8").strip()
        if name and (root / name).is_dir():
            return root / name
    return max((path for path in root.glob("step_*") if path.is_dir()), default=None)


def checkpoint_directory(path: Path) -> Path:
    """``path``, or the checkpoint that it points to when it is a folder's ``latest``."""
    if path.name != LATEST or path.is_dir():
        return path
    found = latest_checkpoint(path.parent)
    if found is None:
        raise CheckpointError(f"{path}: there is no checkpoint beside it; train first, or name a checkpoint's folder.")
    return found


def read_checkpoint(directory: Path) -> Snapshot:
    """Verify every file against the manifest and read the trainer's part; ``directory`` may be a ``latest`` pointer."""
    directory = checkpoint_directory(directory)
    verify_checkpoint(directory)
    try:
        state = json.loads((directory / STATE).read_text(encoding="utf-8"))
        optimizer = load_file(directory / OPTIMIZER)
    except (OSError, ValueError, SafetensorError) as error:
        raise CheckpointError(f"{directory}: cannot be read ({error}).{_alternatives(directory)}") from error
    return Snapshot(directory=directory, state=state, optimizer=optimizer)


def verify_checkpoint(directory: Path) -> None:
    """Raise `CheckpointError` naming the first missing or changed file."""
    manifest_path = directory / MANIFEST
    if not manifest_path.is_file():
        raise CheckpointError(f"{directory}: has no {MANIFEST}, so it is not a whole checkpoint.{_alternatives(directory)}")
    try:
        checksums = dict(json.loads(manifest_path.read_text(encoding="utf-8")))
    except (OSError, TypeError, ValueError) as error:
        raise CheckpointError(f"{manifest_path}: cannot be read ({error}).{_alternatives(directory)}") from error
    for name, expected in checksums.items():
        path = directory / name
        if not path.is_file():
            raise CheckpointError(f"{path}: the file is missing.{_alternatives(directory)}")
        if file_checksum(path) != expected:
            raise CheckpointError(f"{path}: the file has changed since it was written.{_alternatives(directory)}")


def prune_checkpoints(root: Path, *, keep_last: int, keep: frozenset[str]) -> None:
    """Delete all but the newest ``keep_last`` checkpoints and those named in ``keep``, and what crashes have left behind."""
    _remove_drafts(root)
    found = sorted(path for path in root.glob("step_*") if path.is_dir())
    for path in found[:-keep_last]:
        if path.name not in keep:
            _remove(path)


def forget_after(root: Path, train_step: int) -> None:
    """Delete the checkpoints of later steps: the run is about to write its own."""
    for path in sorted(root.glob("step_*")):
        if path.name > step_name(train_step):
            _remove(path)


def policy_checksum(policy: nn.Module) -> str:
    """SHA-256 over names and bytes of every tensor of a module's state, in the order of names."""
    digest = hashlib.sha256()
    for name, tensor in sorted(policy.state_dict().items()):
        digest.update(name.encode())
        digest.update(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def replace_text(path: Path, text: str) -> None:
    """Write a text file so that a reader, also after a crash, finds the old one or the new one."""
    draft = path.with_name(f".{path.name}.partial")
    draft.write_text(text, encoding="utf-8")
    _sync(draft)
    draft.replace(path)
    _sync(path.parent)


def file_checksum(path: Path) -> str:
    """SHA-256 of a file's bytes."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def optimizer_tensors(optimizer: torch.optim.Optimizer, names: Mapping[Tensor, str]) -> dict[str, Tensor]:
    """The optimizer's moments and step counts as ``<parameter>.<entry>`` tensors."""
    return {
        f"{names[parameter]}.{entry}": value
        for parameter, entries in optimizer.state.items()
        for entry, value in entries.items()
        if isinstance(value, Tensor)
    }


def load_optimizer_tensors(
    optimizer: torch.optim.Optimizer, names: Mapping[Tensor, str], saved: Mapping[str, Tensor], source: Path
) -> None:
    """Undo `optimizer_tensors`; a tensor without a parameter is an error."""
    parameters = {name: parameter for parameter, name in names.items()}
    for key, value in saved.items():
        name, _, entry = key.rpartition(".")
        if name not in parameters:
            raise CheckpointError(f"{source}: optimizer state for {name!r}, which this policy does not train.")
        parameter = parameters[name]
        value = value if entry == "step" else value.to(parameter.device)
        optimizer.state[parameter][entry] = value


def _alternatives(directory: Path) -> str:
    others = sorted(path.name for path in directory.parent.glob("step_*") if path != directory and (path / MANIFEST).is_file())
    return f" Older checkpoints beside it: {', '.join(others)} (use --checkpoint)." if others else ""


def _write_json(path: Path, tree: Any) -> None:
    path.write_text(json.dumps(tree, indent=1), encoding="utf-8")


def _remove(directory: Path) -> None:
    if directory.exists():
        draft = directory.with_name(f".{directory.name}.removed.partial")
        shutil.rmtree(draft, ignore_errors=True)
        directory.rename(draft)
        shutil.rmtree(draft)


def _remove_drafts(root: Path) -> None:
    """What a crash or an error has left behind."""
    for path in root.glob(".*.partial"):
        shutil.rmtree(path, ignore_errors=True) if path.is_dir() else path.unlink(missing_ok=True)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
