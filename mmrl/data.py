"""Other people's datasets as `ChatTask`s: which column means what, where media stand in the text, what is refused.

Rows come from `mmrl.data_files` one at a time, so memory stays flat. The rules, in the order in which they apply:

* A column is found under our name or one of its `ALIASES`; ``columns:`` names another one, ``a.b`` reaches into a struct, and
  ``null`` leaves one alone. Everything else in the row is passed on to reward terms.
* Assistant turns at the end of a conversation are not part of the prompt: they become the demonstration, and the answer
  when the row has no answer column.
* In a row with a media column, ``<image>``, ``<video>`` and ``<audio>`` in user turns are slots, filled in order; the numbers
  must agree. Without any tag the media come first, before the text (images, videos, audios). In a row without a media column,
  or whose messages have media parts of their own, such tags are ordinary text.
* Relative media paths start at the data file's folder or ``media_root`` and may not leave it.

Nothing here opens a medium, and torch is only imported when a task is built.
"""

from __future__ import annotations

import os
from array import array
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, overload

from pydantic import Field, field_validator, model_validator

from mmrl.config import Section
from mmrl.data_files import RowError, Rows, open_rows, suggest
from mmrl.data_media import TAG
from mmrl.data_rows import ColumnName, row_to_task
from mmrl.errors import DataError

if TYPE_CHECKING:
    from mmrl.chat import ChatTask


class DatasetConfig(Section):
    """One dataset: where it is, and how its columns are read."""

    path: str
    """A .jsonl, .json or .parquet file, a folder of shards or from save_to_disk, or a name for `datasets.load_dataset`."""
    split: str | None = None
    """Which split of a folder or a datasets name; may be absent where there is only one."""
    subset: str | None = None
    """Configuration of a datasets name, for example ``main``."""
    columns: dict[ColumnName, str | None] = Field(default_factory=dict)
    """Our name to the dataset's column, for example ``{prompt: instruction, answer: reward_model.ground_truth}``."""
    media_root: Path | None = None
    """Folder that relative media paths start from; absent is the folder of the data file."""
    allow_outside_root: bool = False
    """Let rows name media files outside of that folder. Symbolic links inside it are always followed."""
    system: str = ""
    """System prompt for rows that bring none."""
    prompt_template: str = "{prompt}"
    """Wrapped around the last user turn, for example ``"{prompt} Answer in <answer> tags."``"""
    limit: int | None = Field(None, gt=0)
    """Read only the first so many rows."""

    @field_validator("prompt_template")
    @classmethod
    def _template_has_one_place_for_the_prompt(cls, value: str) -> str:
        if value.count("{prompt}") != 1:
            raise ValueError("expected {prompt} exactly once, where the row's text goes")
        if TAG.search(value):
            raise ValueError("media tags are read from the rows' text only; without a tag there, media come first")
        return value

    @model_validator(mode="after")
    def _prompt_is_mapped_once(self) -> DatasetConfig:
        if self.columns.get("prompt") and self.columns.get("messages"):
            raise ValueError("columns maps both prompt and messages; keep the one that holds the conversation")
        return self


class DatasetTasks(Sequence["ChatTask"]):
    """The rows of a dataset as tasks, each read when it is asked for. ``tasks[i]`` raises `RowError` for a bad row."""

    def __init__(
        self, rows: Rows, config: DatasetConfig, media_root: Path | None, indices: Sequence[int] | None = None
    ) -> None:
        self.rows, self.config, self.media_root = rows, config, media_root
        limit = len(rows) if config.limit is None else min(len(rows), config.limit)
        self.indices = range(limit) if indices is None else indices

    def __len__(self) -> int:
        return len(self.indices)

    @overload
    def __getitem__(self, index: int) -> ChatTask: ...
    @overload
    def __getitem__(self, index: slice) -> list[ChatTask]: ...
    def __getitem__(self, index: int | slice) -> ChatTask | list[ChatTask]:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        place = self.place(index)
        try:
            return row_to_task(self.rows[self.indices[index]], self.config, self.media_root, place)
        except RowError as error:
            raise error.at(place) from error.__cause__

    def place(self, index: int) -> str:
        """``file:row`` of task ``index``, the row counted from 1."""
        return "{}:{}".format(*self.rows.place(self.indices[index]))

    def without(self, places: Collection[str]) -> DatasetTasks:
        """Leave out the rows at these places, for example those of the problems that a check found."""
        left_out = frozenset(places)
        kept = array("Q", (row for index, row in enumerate(self.indices) if self.place(index) not in left_out))
        if not kept:
            raise DataError(f"{self.config.path}: every row was left out; mend the data first (see mmrl data check).")
        return DatasetTasks(self.rows, self.config, self.media_root, kept)

    def find_row(self, number: int) -> ChatTask:
        """The task at row ``number`` as errors count them: from 1, and for jsonl by line."""
        for index, row in enumerate(self.indices):
            if self.rows.place(row)[1] == number:
                return self[index]
        raise DataError(f"{self.config.path}: has no row {number}; its {len(self)} rows end at {self.place(len(self) - 1)}.")


def read_tasks(config: DatasetConfig, *, base_dir: Path) -> DatasetTasks:
    """Open a dataset; relative paths in ``config`` start at ``base_dir``. Rows are parsed when they are asked for."""
    rows, folder = open_rows(config.path, base_dir=base_dir, split=config.split, subset=config.subset)
    if len(rows) == 0:
        raise DataError(f"{config.path}: has no rows; expected one or more, each with a prompt (or messages) and an answer.")
    known = rows.columns
    for ours, theirs in config.columns.items():
        if theirs is not None and theirs not in known and theirs.split(".")[0] not in known:
            raise DataError(
                f"{config.path}: columns.{ours} names {theirs!r}, which is not among its columns; {suggest(theirs, known)}"
            )
    root = folder if config.media_root is None else base_dir / config.media_root.expanduser()
    return DatasetTasks(rows, config, None if root is None else Path(os.path.abspath(root)))
