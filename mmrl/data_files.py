"""Rows of dataset files, by index and with flat memory: jsonl, json, parquet, folders of them, and `datasets`.

A row is a plain dict of its columns; what the columns mean is decided in `mmrl.data`. Nothing here opens a picture, a sound
or a video, and nothing imports torch.
"""

from __future__ import annotations

import difflib
import itertools
import json
import re
from array import array
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Protocol

from mmrl.errors import DataError

NUM_PEEKED_ROWS = 1000
"""Rows of a jsonl file that are read to learn which columns it has."""


class RowError(DataError):
    """One row or one medium cannot be used.

    ``reason`` is the short phrase that `mmrl.data_check` groups by, one of `mmrl.data_reasons`; ``detail`` says what was found,
    expected, and to be done. ``mended`` is the row as its one exact fix makes it, where there is one.
    """

    def __init__(self, field: str, reason: str, detail: str, *, place: str = "", mended: dict[str, Any] | None = None) -> None:
        field, detail = (
            text.encode("utf-8", "backslashreplace").decode() for text in (field, detail)
        )  # so that it can be shown
        self.field, self.reason, self.detail, self.mended = field, reason, detail, mended
        super().__init__(": ".join(part for part in (place, field, reason, detail) if part))

    def at(self, place: str) -> RowError:
        """The same error with the ``file:row`` where it happened."""
        return RowError(self.field, self.reason, self.detail, place=place, mended=self.mended)

    def __reduce__(self) -> tuple[Any, ...]:
        return _row_error, (self.field, self.reason, self.detail)


def _row_error(field: str, reason: str, detail: str) -> RowError:
    return RowError(field, reason, detail)


class Rows(Protocol):
    """Rows by index. ``rows[i]`` raises `RowError` for a row that cannot be read; the others stay readable."""

    @property
    def columns(self) -> frozenset[str]:
        """Names of the columns, as far as they are known without reading every row."""
        ...

    def __len__(self) -> int: ...

    def __getitem__(self, index: int) -> dict[str, Any]: ...

    def place(self, index: int) -> tuple[str, int]:
        """File and number of a row, counted from 1 (for jsonl, the number of its line)."""
        ...


class JsonLines:
    """One JSON object per line. Only the offsets of lines are kept; blank lines and byte order marks are skipped."""

    def __init__(self, path: Path, name: str) -> None:
        self.path, self.name = path, name
        self.offsets, self.lines = array("Q"), array("Q")
        offset = 0
        with path.open("rb") as file:
            for number, line in enumerate(file, start=1):
                if line.removeprefix(b"\xef\xbb\xbf").strip():
                    self.offsets.append(offset)
                    self.lines.append(number)
                offset += len(line)

    @property
    def columns(self) -> frozenset[str]:
        names: set[str] = set()
        for index in range(min(len(self), NUM_PEEKED_ROWS)):
            try:
                names.update(self[index])
            except RowError:
                continue  # reported when the row itself is asked for
        return frozenset(names)

    def __len__(self) -> int:
        return len(self.offsets)

    def __getitem__(self, index: int) -> dict[str, Any]:
        with self.path.open("rb") as file:
            file.seek(self.offsets[index])
            line = file.readline()
        try:
            value = parse_json(line.decode("utf-8-sig"))
        except UnicodeDecodeError as error:
            raise RowError("row", "not UTF-8", f"{error.reason} at byte {error.start}; save the file as UTF-8.") from error
        except (ValueError, RecursionError) as error:
            mended = _without_trailing_commas(line.decode("utf-8-sig"))
            if mended is not None:
                detail = (
                    "a comma stands in front of a closing bracket; leave it out, or set on_bad_rows: {trailing comma: fix}."
                )
                raise RowError("row", "trailing comma", detail, mended=mended) from error
            found = f"{error.msg} at character {error.pos + 1}" if isinstance(error, json.JSONDecodeError) else str(error)
            raise RowError("row", "not JSON", f"{found}; mend or delete the line (expected one whole object).") from error
        if b"\\u" in line:
            _require_unicode(value)
        return _expect_object(value)

    def place(self, index: int) -> tuple[str, int]:
        return self.name, self.lines[index]


class JsonArray:
    """A JSON file that holds one list of objects. It is read whole: use jsonl or parquet for large data."""

    def __init__(self, path: Path, name: str) -> None:
        self.path, self.name = path, name
        try:
            self.values = parse_json(path.read_text(encoding="utf-8-sig"))
        except (ValueError, RecursionError) as error:
            raise DataError(f"{name}: not JSON ({error}); expected a list of objects.") from error

    @property
    def columns(self) -> frozenset[str]:
        return frozenset(key for value in self.values if isinstance(value, dict) for key in value)

    def __len__(self) -> int:
        return len(self.values)

    def __getitem__(self, index: int) -> dict[str, Any]:
        return dict(_expect_object(self.values[index]))

    def place(self, index: int) -> tuple[str, int]:
        return self.name, index + 1


class ParquetRows:
    """A parquet file. One row group at a time is held in memory, so neighbours are cheap and jumps cost a group."""

    def __init__(self, path: Path, name: str) -> None:
        import pyarrow.parquet

        self.path, self.name = path, name
        try:
            self.metadata = pyarrow.parquet.read_metadata(path)
            self.columns = frozenset(self.metadata.schema.to_arrow_schema().names)
        except (pyarrow.ArrowException, OSError, ValueError) as error:  # ValueError: a name that is not UTF-8
            raise DataError(f"{name}: not a readable parquet file ({_one_line(error)}).") from error
        groups = range(self.metadata.num_row_groups)
        self.ends = list(itertools.accumulate(self.metadata.row_group(group).num_rows for group in groups))
        self.held: tuple[int, Any] | None = None

    def __len__(self) -> int:
        return self.metadata.num_rows

    def __getitem__(self, index: int) -> dict[str, Any]:
        import pyarrow

        group = bisect_right(self.ends, index)
        try:
            table = self._read_group(group)
            return table.slice(index - self.ends[group] + table.num_rows, 1).to_pylist()[0]
        except (pyarrow.ArrowException, OSError, ValueError) as error:
            raise RowError("row", "unreadable parquet data", f"{_one_line(error)}; write the file again.") from error

    def place(self, index: int) -> tuple[str, int]:
        return self.name, index + 1

    def _read_group(self, group: int) -> Any:
        import pyarrow.parquet

        held = self.held
        if held is None or held[0] != group:
            with pyarrow.parquet.ParquetFile(self.path, metadata=self.metadata) as file:
                held = self.held = (group, file.read_row_group(group, use_threads=False))
        return held[1]


class ArrowRows:
    """A `datasets.Dataset`, memory-mapped. Media stay ``{bytes, path}`` structs: nothing is decoded here."""

    def __init__(self, dataset: Any, name: str) -> None:
        self.dataset, self.name = dataset.with_format("arrow"), name

    @property
    def columns(self) -> frozenset[str]:
        return frozenset(self.dataset.column_names)

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index: int) -> dict[str, Any]:
        return self.dataset[index].to_pylist()[0]

    def place(self, index: int) -> tuple[str, int]:
        return self.name, index + 1


class Shards:
    """Several files one after the other."""

    def __init__(self, files: Sequence[Rows]) -> None:
        self.files = files
        self.ends = list(itertools.accumulate(len(file) for file in files))

    @property
    def columns(self) -> frozenset[str]:
        return frozenset[str]().union(*(file.columns for file in self.files))

    def __len__(self) -> int:
        return self.ends[-1]

    def __getitem__(self, index: int) -> dict[str, Any]:
        file, inner = self._find(index)
        return file[inner]

    def place(self, index: int) -> tuple[str, int]:
        file, inner = self._find(index)
        return file.place(inner)

    def _find(self, index: int) -> tuple[Rows, int]:
        file = bisect_right(self.ends, index)
        return self.files[file], index - (self.ends[file - 1] if file else 0)


def open_rows(name: str, *, base_dir: Path, split: str | None, subset: str | None) -> tuple[Rows, Path | None]:
    """Rows of a file, a folder or a `datasets` name, and the folder that relative media paths start from, if there is one."""
    path = base_dir.joinpath(Path(name).expanduser())
    if path.is_file():
        if split is not None or subset is not None:
            raise DataError(f"{name}: this is one file, so split and subset have nothing to choose from; remove them.")
        return _open_file(path, name), path.parent
    if path.is_dir():
        return _open_folder(path, name, split), path
    if path.suffix in (*FILE_KINDS, ".csv", ".tsv") or not re.fullmatch(r"[\w.-]+(/[\w.-]+)?", name):
        siblings = [entry.name for entry in path.parent.iterdir()] if path.parent.is_dir() else []
        raise DataError(f"{name}: no such file in {base_dir}; {suggest(path.name, siblings)}")
    return _load_by_name(name, split, subset), None


def data_files(rows: Rows) -> list[tuple[str, int, int]]:
    """Path, size and time of change of the files that rows are read from; a fingerprint for what `datasets` holds."""
    if isinstance(rows, Shards):
        return [entry for file in rows.files for entry in data_files(file)]
    if isinstance(rows, ArrowRows):
        return [(str(rows.dataset._fingerprint), len(rows), 0)]
    stat = rows.path.stat()
    return [(str(rows.path.resolve()), stat.st_size, stat.st_mtime_ns)]


def suggest(name: str, known: Iterable[str]) -> str:
    """The closest known name, or all of them."""
    names = sorted(known)
    close = difflib.get_close_matches(name, names, n=1, cutoff=0.5)
    return f"did you mean {close[0]!r}?" if close else f"found: {', '.join(names) or 'nothing'}."


def _open_json(path: Path, name: str) -> Rows:
    """A ``.json`` file may hold one list, or (as many exports do) an object per line."""
    with path.open("rb") as file:
        start = file.read(4096).removeprefix(b"\xef\xbb\xbf").lstrip()
    return JsonArray(path, name) if start.startswith(b"[") else JsonLines(path, name)


FILE_KINDS = {".jsonl": JsonLines, ".ndjson": JsonLines, ".json": _open_json, ".parquet": ParquetRows}
SHARD_KINDS = (".parquet", ".jsonl")


def _open_file(path: Path, name: str) -> Rows:
    if path.suffix not in FILE_KINDS:
        raise DataError(
            f"{name}: {path.suffix or 'no suffix'} is not a dataset format that is read; expected one of "
            f"{', '.join(FILE_KINDS)}. Convert it, for example with pandas.DataFrame.to_json(lines=True, orient='records')."
        )
    try:
        return FILE_KINDS[path.suffix](path, name)
    except OSError as error:
        raise DataError(f"{name}: cannot be read ({error.strerror}).") from error


def _open_folder(path: Path, name: str, split: str | None) -> Rows:
    """What `save_to_disk` wrote, or shards such as ``data/train-00000-of-00002.parquet``."""
    if (path / "dataset_dict.json").is_file() or (path / "state.json").is_file():
        import datasets

        return _choose_split(datasets.load_from_disk(str(path)), name, split)
    shards = sorted(file for folder in (path, path / "data") for kind in SHARD_KINDS for file in folder.glob(f"*{kind}"))
    kinds = {file.suffix for file in shards}
    if len(kinds) != 1:
        found = " and ".join(sorted(kinds)) or "neither .parquet nor .jsonl"
        raise DataError(f"{name}: this folder holds {found} files; expected one kind of them, or what save_to_disk writes.")
    names = sorted({_split_of(file) for file in shards})
    wanted = _one_of(split, names, name)
    chosen = [file for file in shards if _split_of(file) == wanted]
    return Shards([_open_file(file, f"{name.rstrip('/')}/{file.relative_to(path)}") for file in chosen])


def _split_of(file: Path) -> str:
    """``train`` of ``train.jsonl``, ``train-00000-of-00002.parquet`` and ``train_3.parquet``."""
    return re.sub(r"[-_.]\d+([-_.]of[-_.]\d+)?$", "", file.stem)


def _load_by_name(name: str, split: str | None, subset: str | None) -> Rows:
    import datasets

    try:
        loaded = datasets.load_dataset(name, subset)
    except (datasets.exceptions.DatasetsError, OSError, ValueError, RuntimeError) as error:  # bad name, no network, bad files
        raise DataError(f"{name}: neither a file or folder nor a dataset that can be loaded ({_one_line(error)}).") from error
    return _choose_split(loaded, name, split)


def _choose_split(loaded: Any, name: str, split: str | None) -> Rows:
    if not isinstance(loaded, dict):  # one split, which may not know its name
        loaded = {str(loaded.split or split): loaded}
    return ArrowRows(loaded[_one_of(split, sorted(loaded), name)], name)


def _one_of(split: str | None, names: Sequence[str], source: str) -> str:
    if split is None and len(names) == 1:
        return names[0]
    if split is None:
        raise DataError(f"{source}: has several splits; set split to one of: {', '.join(names)}.")
    if split not in names:
        raise DataError(f"{source}: has no split {split!r}; {suggest(split, names)}")
    return split


MAX_DEPTH = 32
"""Lists and objects inside of one another; what is nested deeper is no row, and writing it to a table or a log may fail."""


def parse_json(text: str) -> Any:
    """The JSON value that ``text`` holds. ValueError also for a key that is given twice, and for depth beyond `MAX_DEPTH`."""
    value = json.loads(text, object_pairs_hook=_once)
    if text.count("[") + text.count("{") > MAX_DEPTH and not _is_flat(value):
        raise ValueError(f"more than {MAX_DEPTH} lists and objects stand inside of one another")
    return value


def _require_unicode(value: Any) -> None:
    """Raise `RowError` naming the column for a JSON escape that is half of a surrogate pair: no log could hold it."""
    columns = value.items() if isinstance(value, dict) else [("row", value)]
    for name, entry in columns:
        try:
            json.dumps([name, entry], ensure_ascii=False).encode()
        except UnicodeEncodeError as error:
            detail = "half of a surrogate pair; no tokenizer can encode it, and no log can hold it."
            raise RowError(name, "text is not Unicode", detail) from error


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    value = dict(pairs)
    if len(value) < len(pairs):
        seen: set[str] = set()
        twice = next(key for key, _ in pairs if key in seen or seen.add(key))
        raise ValueError(f"the key {twice!r:.60} is given twice")
    return value


def _is_flat(value: Any) -> bool:
    level = [value]
    for _ in range(MAX_DEPTH + 1):
        if not level:
            return True
        inner = (entry.values() if isinstance(entry, dict) else entry for entry in level if isinstance(entry, (dict, list)))
        level = [entry for entries in inner for entry in entries if isinstance(entry, (dict, list))]
    return not level


# possessive, and without a closing quote up to the end: a text is read once, however many quotes it holds
_STRING_OR_COMMA = re.compile(r'"(?:[^"\\]|\\.)*+"?|,(?=\s*+[\]}])', re.DOTALL)


def _without_trailing_commas(text: str) -> dict[str, Any] | None:
    """The object that a line holds once commas in front of closing brackets (outside of strings) are left out."""
    try:
        value = parse_json(_STRING_OR_COMMA.sub(lambda found: "" if found[0] == "," else found[0], text))
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None


def _expect_object(value: Any) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise RowError("row", "not an object", f"found {type(value).__name__} ({value!r:.60}); expected {{'prompt': ...}}.")
    return value


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())
