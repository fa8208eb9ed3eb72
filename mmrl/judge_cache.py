"""Answers of judges on disk, one file each, named by the content hash of the question."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any


class JudgeCache:
    """A folder of JSON objects. Threads and processes may share it: a file appears whole or not at all."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory

    def read(self, key: str) -> dict[str, Any] | None:
        """What is kept under ``key``; None if nothing is, or if it cannot be read (it is then asked for again)."""
        try:
            found = json.loads(self._path(key).read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return None
        return found if isinstance(found, dict) else None

    def write(self, key: str, answer: Mapping[str, Any]) -> None:
        """Keep ``answer``. Raises OSError when the folder cannot be written to."""
        path = self._path(key)
        path.parent.mkdir(parents=True, exist_ok=True)
        descriptor, name = tempfile.mkstemp(dir=path.parent, prefix=".", suffix=".part")
        try:
            with os.fdopen(descriptor, "w", encoding="utf-8") as file:
                json.dump(answer, file, ensure_ascii=False)
            os.replace(name, path)
        except BaseException:
            Path(name).unlink(missing_ok=True)
            raise

    def _path(self, key: str) -> Path:
        return self.directory / key[:2] / f"{key}.json"
