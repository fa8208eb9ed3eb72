# ruff: noqa: E501 (tables of odd texts)
"""Dataset files: rows of every layout with awkward values, and lines, tables and media with awkward bytes.

Every row is a task or a reported problem; a task has what its row says; what was converted reads back equal. Only `DataError`
may be raised, and its message can be printed.
"""

from __future__ import annotations

import base64
import io
import json
import math
from collections import Counter
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
from PIL import Image

from fuzzing.mutations import misspell, mutate_bytes, mutate_text, mutate_tree
from mmrl.chat import MEDIA_KINDS, ChatTask, media_parts
from mmrl.data import DatasetConfig, DatasetTasks, read_tasks
from mmrl.data_check import check_dataset
from mmrl.data_convert import Conversion, _same
from mmrl.data_files import RowError
from mmrl.data_reasons import REASONS
from mmrl.data_rows import ROLES
from mmrl.data_vetting import apply_policies
from mmrl.errors import DataError

MAX_MESSAGE = 20_000
COUNTS: Counter[str] = Counter()
"""What was tried so far."""
_FOLDER = TemporaryDirectory(prefix="mmrl-fuzz-")
BASES: tuple[dict[str, Any], ...] = (
    {"prompt": "What is 3 + 4?", "answer": "7"},
    {"id": "a", "prompt": "<image>Which digit?", "images": ["x.png"], "answer": 7, "difficulty": 0.5, "domain": "digits"},
    {"problem": "<image> and <image>: same?", "images": ["x.png", "x.png"], "solution": "no", "rubrics": [{"text": "short", "points": 1}]},
    {"messages": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi <b>"}, {"role": "assistant", "content": "Ho"}]},
    {"messages": [{"role": "user", "content": [{"type": "image", "image": "x.png"}, {"type": "text", "text": "Which?"}]}], "answer": "B"},
    {"conversations": [{"from": "human", "value": "<audio>\nWhat is heard?"}, {"from": "gpt", "value": "a bell"}], "audio": "x.wav", "id": 3},
    {"messages": json.dumps([{"role": "user", "content": "<image>stored as text"}]), "images": '["x.png"]', "answer": "yes"},
    {"messages": "[{'role': 'user', 'content': 'as Python text'}]", "answer": "no", "extra": {"a": [1, 2.5, None]}},
    {"question": "<video>What happens?", "videos": [{"video": ["x.png", "x.png"], "fps": 2}], "answer": "it falls", "options": ["a", "b"]},
    {"prompt": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x.png"}}, {"type": "text", "text": "?"}]}]},
)  # fmt: skip
CONFIGS: tuple[dict[str, Any], ...] = (
    {}, {}, {}, {"on_bad_rows": "drop"}, {"on_bad_rows": {"trailing comma": "fix", "one answer in a list": "fix", "duplicate id": "fix"}},
    {"columns": {"answer": "extra.a"}}, {"system": "Think.", "prompt_template": "{prompt} Answer in a word."}, {"columns": {"images": None}},
    {"limit": 2}, {"columns": {"id": None, "difficulty": None}},
)  # fmt: skip


@dataclass(frozen=True)
class Example:
    """A file and the section that reads it."""

    name: str
    data: bytes
    config: dict[str, Any]
    convert: str | None
    """Suffix of what it is converted to."""

    def __repr__(self) -> str:
        return f"{self.name} {self.config} convert={self.convert} {self.data[:1500]!r}"


@cache
def media() -> dict[str, bytes]:
    """Small good files."""
    import soundfile

    pixels = (np.arange(24 * 20 * 3).reshape(24, 20, 3) % 256).astype(np.uint8)
    found = {}
    for name, kind in (("png", "PNG"), ("jpg", "JPEG"), ("gif", "GIF"), ("bmp", "BMP"), ("tiff", "TIFF"), ("webp", "WEBP")):
        buffer = io.BytesIO()
        Image.fromarray(pixels).save(buffer, kind)
        found[name] = buffer.getvalue()
    for name in ("WAV", "FLAC", "OGG"):
        buffer = io.BytesIO()
        soundfile.write(buffer, 0.5 * np.sin(np.arange(2000) / 5), 16000, format=name)
        found[name.lower()] = buffer.getvalue()
    return found


@cache
def _openers() -> Any:
    from audio.media import ClipLimits, open_clip
    from vision.media import open_media

    vision = partial(open_media, min_pixels=784, max_pixels=50176, sample_fps=2.0)

    def opener(kind: str, ref: Any) -> object:
        return open_clip(ref, rate=None, limits=ClipLimits()) if kind == "audio" else vision(kind, ref)

    opener("audio", media()["wav"])
    opener("video", {"video": [media()["png"]] * 2, "fps": 2})
    return opener


@cache
def _quiet() -> Any:
    from rich.console import Console

    return Console(file=io.StringIO())


def prepare() -> None:
    """Import what is imported on first use, so that it does not count as a hang."""
    _openers()
    import pyarrow

    pyarrow.array([{"a": 1}])  # imports pandas


def draw(random: Random) -> Example:
    rows = [_row(random) for _ in range(random.randint(1, 8))]
    config = random.choice(CONFIGS)
    convert = random.choice((None, ".jsonl", ".jsonl")) if random.random() < 0.95 else ".parquet"
    kind = random.random()
    if kind < 0.03:
        return Example("rows.parquet", _parquet(random, rows), config, convert)
    if kind < 0.08:
        text = json.dumps(rows, ensure_ascii=False)
        data = (mutate_text(random, text) if random.random() < 0.5 else text).encode("utf-8", "surrogatepass")
        return Example("rows.json", mutate_bytes(random, data) if random.random() < 0.3 else data, config, convert)
    lines = [_line(random, row) for row in rows]
    end = random.choice((b"\n", b"\n", b"\n", b"\r\n", b"\n\n", b"\n \t\n", b"\r"))
    data = random.choice((b"", b"", b"", b"\xef\xbb\xbf")) + end.join(lines) + random.choice((b"", end))
    return Example("rows.jsonl", data, config, convert)


def _row(random: Random) -> Any:
    row: Any = dict(random.choice(BASES))
    if random.random() < 0.15:
        name = random.choice(sorted(media()))
        data = mutate_bytes(random, media()[name]) if random.random() < 0.8 else media()[name]
        kind = "audios" if name in ("wav", "flac", "ogg") else "images"
        row = {"prompt": "Listen or look.", kind: [f"data:x/{name};base64,{base64.b64encode(data).decode()}"], "answer": "yes"}
    for _ in range(random.choice((0, 0, 1, 1, 2))):
        row = mutate_tree(random, row, misspell(random))
    if random.random() < 0.1 and isinstance(row, dict) and isinstance(row.get("messages"), list):
        row = {**row, "messages": random.choice((repr, json.dumps))(row["messages"])}
        row["messages"] = mutate_text(
            random, row["messages"], ("{1: 2, 'a': 3}", "[[", "{[1]: 2}", "b'x'", "{1, 2}", "...", "None", "{{}}")
        )
    return row


def _line(random: Random, row: Any) -> bytes:
    try:
        text = json.dumps(row, ensure_ascii=random.random() < 0.5)
    except (RecursionError, ValueError):
        text = "[" * 3000
    kind = random.random()
    if kind < 0.1:
        text = mutate_text(
            random,
            text,
            (
                '"answer": "C", ',
                ",",
                ",}",
                "NaN",
                "Infinity",
                "1e999",
                '"\\ud800"',
                "9" * 5000,
                "[" * 2000,
                '"id": "a", ',
                "\u2028",
            ),
        )
    elif kind < 0.12:
        text = text[:-1] + ', "deep": ' + "[" * 900 + "]" * 900 + "}"
    elif kind < 0.14:
        text = text[:-1] + ",}"
    elif kind < 0.145:
        text = text[:-1] + ', "text": "' + '\\"' * 20_000 + random.choice(('"}', ""))
    data = text.encode("utf-8", "surrogatepass")
    return mutate_bytes(random, data) if random.random() < 0.07 else data


def _parquet(random: Random, rows: list[Any]) -> bytes:
    import pyarrow
    import pyarrow.parquet

    flat = [
        {key: str(value).encode("utf-8", "replace").decode() for key, value in row.items()}
        for row in rows
        if isinstance(row, dict) and row
    ]
    flat = [{key.encode("utf-8", "replace").decode(): value for key, value in row.items()} for row in flat] or [{"prompt": "x"}]
    if random.random() < 0.5:
        flat = [
            {"prompt": "x", "image": {"bytes": media()["png"], "path": None}, "answer": random.choice(("1", None))}
            for _ in range(3)
        ]
    buffer = io.BytesIO()
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(flat), buffer, row_group_size=2)
    return mutate_bytes(random, buffer.getvalue()) if random.random() < 0.6 else buffer.getvalue()


def check(example: Example) -> None:
    folder = Path(_FOLDER.name)
    for name in ("x.png", "x.wav"):
        if not (folder / name).exists():
            (folder / name).write_bytes(media()[name[2:]])
    (folder / example.name).write_bytes(example.data)
    config = DatasetConfig(path=example.name, **example.config)
    try:
        tasks = read_tasks(config, base_dir=folder)
        report = check_dataset(config, base_dir=folder, open_media=_openers(), console=_quiet())
    except DataError as error:
        _require_printable(error)
        COUNTS["refused files"] += 1
        return
    _require_every_row(example, tasks)
    bad = {index for rows in report.bad.values() for index in rows.indices}
    for problem in report.problems:
        assert problem.reason in REASONS, f"{problem.reason!r} is not among the reasons"
        assert problem.place.startswith(f"{example.name}:") and problem.field, f"no place: {problem}"
        _require_printable(problem)
    ids: dict[str, int] = {}
    for index in range(len(tasks)):
        COUNTS["rows"] += 1
        try:
            task = tasks[index]
        except RowError as error:
            assert index in bad, f"row {index} is refused without a report: {error}"
            _require_printable(error)
            COUNTS["refused rows"] += 1
            continue
        if index not in bad:
            _require_whole(task)
            assert ids.setdefault(task.id, index) == index, f"the id {task.id!r} is given twice"
            if example.name == "rows.jsonl":
                _require_row(example.data.split(b"\n")[tasks.number(index) - 1], task, config)
            COUNTS["good rows"] += 1
    if bad and len(bad) < len(tasks):
        try:
            left = apply_policies(read_tasks(config.model_copy(update={"on_bad_rows": "drop"}), base_dir=folder), report)
        except DataError as error:
            raise AssertionError(f"rows cannot be dropped: {error}") from error
        assert len(left) == len(tasks) - len(bad)
        tasks = left
    elif bad:
        return
    if example.convert:
        _convert(tasks, folder / f"converted{example.convert}")


def _require_every_row(example: Example, tasks: DatasetTasks) -> None:
    """No row vanishes."""
    if example.name == "rows.jsonl":
        lines = [line for line in example.data.split(b"\n") if line.removeprefix(b"\xef\xbb\xbf").strip()]
        expected = len(lines) if tasks.config.limit is None else min(tasks.config.limit, len(lines))
        assert len(tasks) == expected, f"{len(tasks)} tasks of {expected} lines"


def _require_whole(task: ChatTask) -> None:
    """What every task has, whatever its row was."""
    assert task.id and task.source and isinstance(task.answer, str) and isinstance(task.domain, str)
    assert task.difficulty is None or math.isfinite(task.difficulty), f"difficulty {task.difficulty}"
    assert any(message["role"] == "user" for message in task.messages)
    for text in (task.id, task.answer, task.domain, task.demonstration):
        text.encode()
    for message in task.messages:
        assert message["role"] in ROLES.values() and message["content"] is not None
        for part in message["content"]:
            assert part["type"] in ("text", *MEDIA_KINDS) and part[part["type"]] is not None
            if part["type"] == "text":
                part["text"].encode()


def _require_row(line: bytes, task: ChatTask, config: DatasetConfig) -> None:
    """The task has the answer and the media of its row, as far as they are plain to see."""
    pairs: list[str] = []
    try:
        row = json.loads(
            line.decode("utf-8-sig"), object_pairs_hook=lambda found: (pairs.append(_twice(found)), dict(found))[1]
        )
    except ValueError:
        return  # a row that was mended
    assert not any(pairs), f"the key {next(filter(None, pairs))!r} is given twice"
    json.dumps(row, ensure_ascii=False).encode()  # columns are logged
    if "answer" in row and "answer" not in config.columns and isinstance(row["answer"], (str, int)):
        assert task.answer == str(row["answer"])
    assert task.answer.strip().lower().lstrip("+-") not in ("nan", "inf", "infinity") or isinstance(
        row.get("answer", row.get("solution")), str
    )
    if isinstance(row.get("id"), (list, dict, float)) and "id" not in config.columns:
        assert not isinstance(row["id"], (list, dict)) and not math.isinf(row["id"]), f"id {row['id']!r} became {task.id!r}"
    given = row.get("images")
    if (
        isinstance(given, list)
        and not config.columns
        and not any(isinstance(given, str) and "image" in given for given in [row.get("messages")])
    ):
        own = json.dumps(row.get("messages", row.get("prompt")), default=str).count('"image')
        found = sum(kind == "image" for kind, _ in media_parts(task))
        assert found >= len(given) or own, f"{len(given)} images became {found}"


def _twice(pairs: list[tuple[str, Any]]) -> str:
    return next((key for key, count in Counter(key for key, _ in pairs).items() if count > 1), "")


def _require_printable(message: Any) -> None:
    text = " ".join(str(message).split())
    assert 0 < len(text) < MAX_MESSAGE, f"a message of {len(text)} characters"
    text.encode()


def _convert(tasks: DatasetTasks, output: Path) -> None:
    conversion = Conversion(tasks, output)
    try:
        done = list(conversion.run())
    except DataError as error:
        _require_printable(error)
        COUNTS["refused conversions"] += 1
        return
    assert done == list(range(len(tasks)))
    again = read_tasks(conversion.reading_config, base_dir=output.parent)
    assert len(again) == len(tasks), f"{len(again)} of {len(tasks)} rows were converted"
    for left, right in zip(tasks, again, strict=True):
        assert (left.id, left.answer, left.domain, left.demonstration) == (
            right.id,
            right.answer,
            right.domain,
            right.demonstration,
        )
        assert _same(left.messages, right.messages), f"{left.messages!r:.300} became {right.messages!r:.300}"
    COUNTS["conversions"] += 1


STATS = COUNTS
