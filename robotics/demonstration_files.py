"""LeRobot's files of a dataset, read once into arrays. No torch but for videos.

``LeRobotDataset.__getitem__`` builds one frame at a time from column objects and takes a hundred times as long as an array; the
files themselves are plain parquet. Axes: ``M`` frames of the dataset, ``E`` episodes.
"""

from __future__ import annotations

import io
import json
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray
from PIL import Image

from mmrl.errors import DataError

_VERSION = "v3.0"


@dataclass(frozen=True, kw_only=True)
class RecordedFiles:
    """A dataset's columns and episodes."""

    root: Path
    info: Mapping[str, Any]
    """``meta/info.json``."""
    columns: Mapping[str, NDArray]
    """``[M]`` or ``[M, size]`` by name, every column that holds numbers."""
    starts: NDArray[np.int64]
    """``[E]`` first frame of each episode."""
    lengths: NDArray[np.int64]
    """``[E]``."""
    instructions: tuple[str, ...]
    """``[E]``."""
    episodes: tuple[Mapping[str, Any], ...]
    """``[E]`` rows of ``meta/episodes``, statistics left out."""
    tables: tuple[tuple[int, Path], ...]
    """First frame and path of each data file."""

    def images(self, column: str) -> Images:
        """The images of a column."""
        if self.info["features"][column]["dtype"] == "video":
            return _Videos(self, column)
        return _Pictures(self, column)


class Images(Protocol):
    """Images of one camera."""

    def read(self, frames: Sequence[int]) -> list[NDArray[np.uint8]]:
        """``[H, W, 3]`` of each frame (numbered through the dataset); neighbours are cheaper than strangers."""
        ...


def read_files(root: Path) -> RecordedFiles:
    """Read all but the images. Raises `DataError` when files are missing, unfinished or do not fit each other."""
    path = root / "meta" / "info.json"
    if not path.is_file():
        raise DataError(f"{root} is not a LeRobotDataset: it has no meta/info.json.")
    info = json.loads(path.read_text(encoding="utf-8"))
    if info.get("codebase_version") != _VERSION:
        raise DataError(
            f"{root} is a LeRobotDataset {info.get('codebase_version')}; expected {_VERSION}. LeRobot's "
            "convert_dataset_v21_to_v30 converts older ones."
        )
    data, episode_files = sorted(root.glob("data/*/*.parquet")), sorted(root.glob("meta/episodes/*/*.parquet"))
    for name, found in (("data", data), ("meta/episodes", episode_files)):
        if not found:
            raise DataError(f"{root} has no files in {name}; the recording did not finish (finalize() was not called).")
    tables = [_open(file).read(columns=_numbers(info)) for file in data]
    first = np.cumsum([0, *(len(table) for table in tables)])
    columns = {name: _array(pa.concat_tables(tables)[name]) for name in tables[0].column_names}
    episodes = [
        row for file in episode_files for row in _without_statistics(_open(file)).to_pylist()
    ]  # fmt: skip
    index = columns["episode_index"]
    starts = np.flatnonzero(np.diff(index, prepend=-1) != 0)
    lengths = np.diff(np.append(starts, len(index)))
    declared = [int(row["length"]) for row in episodes]
    if (
        info["total_frames"] != len(index)
        or declared != lengths.tolist()
        or index[starts].tolist() != list(range(len(episodes)))
    ):
        raise DataError(
            f"{root}: meta/info.json counts {info['total_frames']} frames, meta/episodes {len(episodes)} episodes of "
            f"{sum(declared)} frames, and the data files hold {len(starts)} episodes of {len(index)} frames; the recording did "
            "not finish, or files are missing."
        )
    texts = _instructions(root)
    return RecordedFiles(
        root=root,
        info=info,
        columns=columns,
        starts=starts,
        lengths=lengths,
        instructions=tuple(texts[int(number)] for number in columns["task_index"][starts]),
        episodes=tuple(episodes),
        tables=tuple(zip(first.tolist(), data)),
    )


def _open(path: Path) -> pq.ParquetFile:
    try:
        return pq.ParquetFile(path)
    except pa.ArrowInvalid as error:
        raise DataError(
            f"{path} has no parquet footer: the recording was never finalised (LeRobotDataset.finalize()), so its data are "
            "lost unless the recorder still runs."
        ) from error


def _numbers(info: Mapping[str, Any]) -> list[str]:
    """Columns that are read at once."""
    return [
        name for name, feature in info["features"].items() if feature["dtype"] not in ("image", "video", "string", "language")
    ]


def _without_statistics(file: pq.ParquetFile) -> pa.Table:
    return file.read(columns=[name for name in file.schema_arrow.names if not name.startswith("stats/")])


def _array(column: pa.ChunkedArray) -> NDArray:
    whole = column.combine_chunks()
    if not pa.types.is_nested(whole.type):
        return whole.to_numpy(zero_copy_only=False)
    return np.asarray(whole.flatten()).reshape(len(whole), -1)


def _instructions(root: Path) -> dict[int, str]:
    path = root / "meta" / "tasks.parquet"
    if not path.is_file():
        raise DataError(f"{root} has no meta/tasks.parquet, so it is not known what each episode was told to do.")
    table = _open(path).read()
    (text,) = (name for name in table.column_names if name != "task_index")
    return dict(zip(table["task_index"].to_pylist(), table[text].to_pylist()))


class _Pictures:
    """Encoded pictures in the data files. The last row group is kept: an episode's frames lie together."""

    def __init__(self, files: RecordedFiles, column: str) -> None:
        self.files, self.column = files, column
        self.groups: list[tuple[int, Path, int]] = []  # first frame, file, row group
        for start, path in files.tables:
            metadata = _open(path).metadata
            for group in range(metadata.num_row_groups):
                self.groups.append((start, path, group))
                start += metadata.row_group(group).num_rows
        self.firsts = np.array([first for first, _, _ in self.groups])
        self.held, self.encoded = -1, []

    def read(self, frames: Sequence[int]) -> list[NDArray[np.uint8]]:
        """See `Images`."""
        return [np.asarray(Image.open(io.BytesIO(self._bytes(frame))).convert("RGB")) for frame in frames]

    def _bytes(self, frame: int) -> bytes:
        place = int(np.searchsorted(self.firsts, frame, side="right")) - 1
        first, path, group = self.groups[place]
        if place != self.held:
            table = pq.ParquetFile(path).read_row_group(group, columns=[self.column])
            self.held, self.encoded = place, table[self.column].combine_chunks().field("bytes")
        return self.encoded[frame - first].as_py()


class _Videos:
    """Frames of video files."""

    def __init__(self, files: RecordedFiles, column: str) -> None:
        self.files, self.column = files, column

    def read(self, frames: Sequence[int]) -> list[NDArray[np.uint8]]:
        """See `Images`."""
        from lerobot.datasets.video_utils import decode_video_frames

        files, images = self.files, {}
        places = np.searchsorted(files.starts, frames, side="right") - 1
        for episode in np.unique(places):
            row = files.episodes[episode]
            numbers = [f"videos/{self.column}/{part}" for part in ("chunk_index", "file_index", "from_timestamp")]
            chunk, file, start = (row[number] for number in numbers)
            path = files.root / files.info["video_path"].format(video_key=self.column, chunk_index=chunk, file_index=file)
            its = [frame for frame, place in zip(frames, places) if place == episode]
            times = [float(start + (frame - files.starts[episode]) / files.info["fps"]) for frame in its]
            decoded = decode_video_frames(path, times, 0.5 / files.info["fps"], "pyav", return_uint8=True)
            images |= dict(zip(its, decoded.permute(0, 2, 3, 1).numpy()))
        return [images[frame] for frame in frames]


class CachedImages:
    """Decoded images of one camera, the last used kept as bytes."""

    def __init__(self, images: Images, *, size: tuple[int, int], capacity: int) -> None:
        """``capacity`` is in bytes."""
        self.images, self.size = images, size
        self.most = max(1, capacity // (3 * size[0] * size[1]))
        self.kept: OrderedDict[int, NDArray[np.uint8]] = OrderedDict()

    def read(self, frames: NDArray[np.int64]) -> NDArray[np.uint8]:
        """``[n, H, W, 3]``."""
        known = {frame: self.kept[frame] for frame in frames.tolist() if frame in self.kept}
        missing = sorted(set(frames.tolist()) - known.keys())
        known |= dict(zip(missing, self.images.read(missing))) if missing else {}
        for frame in frames.tolist():
            self.kept[frame] = known[frame]
            self.kept.move_to_end(frame)
        while len(self.kept) > self.most:
            self.kept.popitem(last=False)
        return np.stack([known[frame] for frame in frames.tolist()]) if len(frames) else np.empty((0, *self.size, 3), np.uint8)
