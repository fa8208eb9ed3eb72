"""``mmrl data convert``: any dataset that is read here, written as rows of our own layout.

A row has ``id`` and ``messages``, whose media parts hold their references (so that tags in texts stay text), and where they are
given ``answer``, ``domain``, ``difficulty`` and ``demonstration``; other columns follow as they are. System prompt and template
of the dataset's section are part of the messages. Every row is read back before it counts: it gives an equal task (but for
``source``, the place that it is read from), or the conversion stops and says what differs.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import fields, replace
from itertools import batched
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mmrl.data import DatasetConfig, DatasetTasks
from mmrl.data_rows import ALIASES, row_to_task
from mmrl.errors import DataError

if TYPE_CHECKING:
    from mmrl.chat import ChatTask

BATCH_ROWS = 256
"""Rows of a parquet row group."""
_OURS = ("id", "messages", "answer", "domain", "difficulty", "demonstration")


class Conversion:
    """Writes ``output`` (.jsonl or .parquet). With ``embed_media`` files are put into it (jsonl: as data URIs); else paths stay
    paths, relative ones where they are below its folder."""

    def __init__(self, tasks: DatasetTasks, output: Path, *, embed_media: bool = False) -> None:
        if output.suffix not in (".jsonl", ".parquet"):
            raise DataError(f"{output}: expected a name that ends in .jsonl or .parquet.")
        self.tasks, self.output, self.embed_media = tasks, output, embed_media
        self.folder = output.parent.absolute()
        self.columns: dict[str, None] = {}
        """Our names that a reader must leave alone, since other columns have them."""
        self.outside = False
        """Whether paths lead out of the folder."""

    def run(self) -> Iterator[int]:
        """Write everything, and yield the index of each task that is done. Raises `DataError` naming the row at fault."""
        self.folder.mkdir(parents=True, exist_ok=True)
        partial = self.output.with_name(f".{self.output.name}.partial")
        try:
            yield from (self._write_jsonl if self.output.suffix == ".jsonl" else self._write_parquet)(partial)
            partial.replace(self.output)
        finally:
            partial.unlink(missing_ok=True)

    @property
    def reading_config(self) -> DatasetConfig:
        """The section that reads what was written."""
        return DatasetConfig(path=str(self.output), columns=self.columns, allow_outside_root=self.outside)

    def _write_jsonl(self, path: Path) -> Iterator[int]:
        with path.open("w", encoding="utf-8") as file:
            for index, task in enumerate(self.tasks):
                task = self._embedded(task)
                row = self._row(task, self._json_reference)
                try:
                    text = json.dumps(row, ensure_ascii=False)
                    text.encode()
                except (TypeError, ValueError, RecursionError) as error:
                    raise DataError(f"{task.source}: {error}; jsonl cannot hold it, .parquet may.") from error
                self._verify(task, json.loads(text))
                file.write(text + "\n")
                yield index

    def _write_parquet(self, path: Path) -> Iterator[int]:
        import pyarrow
        import pyarrow.parquet

        schema = self._schema()
        try:
            writer = pyarrow.parquet.ParquetWriter(path, schema)
        except pyarrow.ArrowException as error:  # an empty struct
            raise DataError(f"{self.output}: parquet has no place for a column ({error}); write .jsonl.") from error
        with writer:
            for indices in batched(range(len(self.tasks)), BATCH_ROWS):
                tasks = [self._embedded(self.tasks[index]) for index in indices]
                rows = [self._row(task, _struct_reference) for task in tasks]
                try:
                    table = pyarrow.Table.from_pylist(rows, schema=schema)
                except (pyarrow.ArrowException, TypeError, ValueError, OverflowError) as error:
                    raise DataError(f"{tasks[0].source} and the next {len(tasks) - 1} rows: {error}; write .jsonl.") from error
                for task, row in zip(tasks, table.to_pylist()):
                    self._verify(task, row)
                writer.write_table(table)
                yield from indices

    def _schema(self) -> Any:
        """Our columns, and the others with types that hold all their values: found by reading every row once."""
        import pyarrow

        reference = pyarrow.struct({"bytes": pyarrow.binary(), "path": pyarrow.string()})
        video = {"bytes": pyarrow.binary(), "path": pyarrow.string(), "video": pyarrow.list_(reference),
                 "fps": pyarrow.float64(), "audio": reference}  # fmt: skip
        part = {"type": pyarrow.string(), "text": pyarrow.string(), "image": reference, "video": pyarrow.struct(video),
                "audio": reference}  # fmt: skip
        message = {"role": pyarrow.string(), "content": pyarrow.list_(pyarrow.struct(part))}
        types = {"id": pyarrow.string(), "messages": pyarrow.list_(pyarrow.struct(message)), "answer": pyarrow.string(),
                 "domain": pyarrow.string(), "difficulty": pyarrow.float64(), "demonstration": pyarrow.string()}  # fmt: skip
        given: dict[str, None] = {}
        others = pyarrow.schema([])
        for indices in batched(range(len(self.tasks)), BATCH_ROWS):
            tasks = [self.tasks[index] for index in indices]
            given |= dict.fromkeys(name for task in tasks for name in self._our_columns(task, _struct_reference))
            names = dict.fromkeys(name for task in tasks for name in task.columns)
            columns = {name: [task.columns.get(name) for task in tasks] for name in names}
            try:
                found = pyarrow.schema([(name, pyarrow.array(values).type) for name, values in columns.items()])
                others = pyarrow.unify_schemas([others, found], promote_options="permissive")
            except (pyarrow.ArrowException, TypeError, ValueError, OverflowError) as error:
                place = f"{tasks[0].source} and the next {len(tasks) - 1} rows"
                raise DataError(f"{place}: a column has values of different types ({error}); write .jsonl.") from error
        return pyarrow.schema([*((name, types[name]) for name in _OURS if name in given), *others])

    def _row(self, task: ChatTask, reference: Callable[[Any, str], Any]) -> dict[str, Any]:
        return {**self._our_columns(task, reference), **task.columns}

    def _our_columns(self, task: ChatTask, reference: Callable[[Any, str], Any]) -> dict[str, Any]:
        row: dict[str, Any] = {"id": task.id, "messages": [self._message(message, reference) for message in task.messages]}
        if task.answer or any(alias in task.columns for alias in ALIASES["answer"]):
            row["answer"] = task.answer
        if task.domain != "default":
            row["domain"] = task.domain
        if task.difficulty is not None:
            row["difficulty"] = task.difficulty
        if task.demonstration:
            row["demonstration"] = task.demonstration
        twice = [name for name in row if name in task.columns]
        if twice:
            raise DataError(
                f"{task.source}: column {twice[0]!r} is passed on to rewards as it is, and ours has the same name; rename it "
                "before converting."
            )
        for ours, aliases in ALIASES.items():
            if ours not in row and any(alias in task.columns for alias in aliases):
                self.columns[ours] = None
        return row

    def _message(self, message: Mapping[str, Any], reference: Callable[[Any, str], Any]) -> dict[str, Any]:
        return {
            **message,
            "content": _with_references(message["content"], lambda ref, kind: reference(self._shortened(ref), kind)),
        }

    def _shortened(self, ref: Any) -> Any:
        """``ref`` with paths below the folder of the output as relative ones."""
        if isinstance(ref, str):
            path = Path(ref)
            if path.is_relative_to(self.folder):
                return str(path.relative_to(self.folder))
            self.outside = True
            return ref
        if isinstance(ref, Mapping) and ref.get("array") is None:
            return {key: self._shortened(value) for key, value in ref.items()}
        return [self._shortened(frame) for frame in ref] if isinstance(ref, list) else ref

    def _embedded(self, task: ChatTask) -> ChatTask:
        if not self.embed_media:
            return task
        contents = [_with_references(message["content"], lambda ref, kind: _read(ref)) for message in task.messages]
        messages = tuple({**message, "content": content} for message, content in zip(task.messages, contents))
        return replace(task, messages=messages)

    def _json_reference(self, ref: Any, kind: str) -> Any:
        if isinstance(ref, bytes):
            return f"data:application/octet-stream;base64,{base64.b64encode(ref).decode()}"
        if isinstance(ref, Mapping) and ref.get("array") is None:
            return {key: self._json_reference(value, kind) for key, value in ref.items()}
        return [self._json_reference(frame, kind) for frame in ref] if isinstance(ref, list) else ref

    def _verify(self, task: ChatTask, row: Mapping[str, Any]) -> None:
        again = row_to_task(row, self.reading_config, self.folder, task.source)
        again = replace(again, columns={name: value for name, value in again.columns.items() if value is not None})
        given = replace(task, columns={name: value for name, value in task.columns.items() if value is not None})
        different = [item.name for item in fields(given) if not _same(getattr(given, item.name), getattr(again, item.name))]
        if different:
            read, wanted = (_short(getattr(version, different[0])) for version in (again, given))
            raise DataError(
                f"{task.source}: would read back with another {different[0]} ({read} instead of {wanted}); mend the row, or "
                "choose the other format."
            )


def reading_section(config: DatasetConfig) -> str:
    """A dataset's section as YAML, without what is at its default."""
    import yaml

    return yaml.safe_dump(config.model_dump(mode="json", exclude_defaults=True), sort_keys=False).rstrip()


def _with_references(content: Sequence[Mapping[str, Any]], change: Callable[[Any, str], Any]) -> list[dict[str, Any]]:
    """Parts of a message with ``change(reference, kind)`` in place of the references of media."""
    kinds = [part["type"] for part in content]
    return [dict(part) if kind == "text" else {**part, kind: change(part[kind], kind)} for part, kind in zip(content, kinds)]


def _struct_reference(ref: Any, kind: str) -> dict[str, Any]:
    """A reference as the structs of a parquet column."""
    if isinstance(ref, bytes):
        return {"bytes": ref}
    if isinstance(ref, str):
        return {"path": ref}
    if kind == "video" and isinstance(ref, list):
        return {"video": [_struct_reference(frame, "image") for frame in ref]}
    if kind == "video" and isinstance(ref, Mapping):
        inner = _struct_reference(ref["video"], kind)
        sound = {} if ref.get("audio") is None else {"audio": _struct_reference(ref["audio"], "audio")}
        return {**inner, "fps": ref.get("fps"), **sound}
    raise DataError(f"a {kind} given as {type(ref).__name__} has no place in parquet; write .jsonl.")


def _read(ref: Any) -> Any:
    """``ref`` with the bytes of files in place of their paths."""
    if isinstance(ref, str):
        return Path(ref).read_bytes()
    if isinstance(ref, Mapping) and ref.get("array") is None:
        return {key: _read(value) for key, value in ref.items()}
    return [_read(frame) for frame in ref] if isinstance(ref, list) else ref


def _same(left: Any, right: Any) -> bool:
    """Equality in which NaN equals itself and a list a tuple."""
    if isinstance(left, Mapping) and isinstance(right, Mapping):
        return left.keys() == right.keys() and all(_same(left[key], right[key]) for key in left)
    if isinstance(left, (list, tuple)) and isinstance(right, (list, tuple)):
        return len(left) == len(right) and all(map(_same, left, right))
    return left == right or (left != left and right != right)


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."
