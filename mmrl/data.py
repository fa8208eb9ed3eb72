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
* Bad rows are found by `mmrl.data_check` before the first update; ``on_bad_rows`` says what becomes of them.

Nothing here opens a medium, and torch is only imported when a task is built.
"""

from __future__ import annotations

import os
from array import array
from collections.abc import Collection, Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, overload

from pydantic import Field, field_validator, model_validator

from mmrl.config import Section
from mmrl.data_files import RowError, Rows, open_rows, suggest
from mmrl.data_media import TAG
from mmrl.data_reasons import Policy, check_policies
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
    check: bool = True
    """Read every row and open every medium before a run starts (remembered: the next start takes no time). Without it a bad row
    stops the run when it is drawn."""
    on_bad_rows: Literal["fail", "drop"] | dict[str, Policy] = "fail"
    """What becomes of rows that cannot be used: ``fail`` or ``drop`` for all of them, or by reason, for example
    ``{missing file: drop, duplicate id: fix}``; reasons that are not named fail."""

    @field_validator("prompt_template")
    @classmethod
    def _template_has_one_place_for_the_prompt(cls, value: str) -> str:
        if value.count("{prompt}") != 1:
            raise ValueError("expected {prompt} exactly once, where the row's text goes")
        if TAG.search(value):
            raise ValueError("media tags are read from the rows' text only; without a tag there, media come first")
        return value

    @field_validator("on_bad_rows")
    @classmethod
    def _policies_exist(cls, value: Any) -> Any:
        if isinstance(value, dict):
            check_policies(value)
        return value

    @model_validator(mode="after")
    def _dropping_needs_a_check(self) -> DatasetConfig:
        if not self.check and self.on_bad_rows != "fail":
            raise ValueError("on_bad_rows acts on what the check finds, and check is false; set check: true")
        return self

    @model_validator(mode="after")
    def _prompt_is_mapped_once(self) -> DatasetConfig:
        if self.columns.get("prompt") and self.columns.get("messages"):
            raise ValueError("columns maps both prompt and messages; keep the one that holds the conversation")
        return self

    def policy(self, reason: str) -> Policy:
        """What becomes of a row that is bad for this reason."""
        return self.on_bad_rows if isinstance(self.on_bad_rows, str) else self.on_bad_rows.get(reason, "fail")


class DatasetTasks(Sequence["ChatTask"]):
    """The rows of a dataset as tasks, each read when it is asked for. ``tasks[i]`` raises `RowError` for a bad row."""

    def __init__(
        self,
        rows: Rows,
        config: DatasetConfig,
        media_root: Path | None,
        indices: Sequence[int] | None = None,
        *,
        renamed: Collection[int] = (),
        notices: Sequence[str] = (),
    ) -> None:
        self.rows, self.config, self.media_root = rows, config, media_root
        limit = len(rows) if config.limit is None else min(len(rows), config.limit)
        self.indices = range(limit) if indices is None else indices
        self.renamed = frozenset(renamed)
        """Rows whose id is that of an earlier one, and which get their place behind it."""
        self.notices = tuple(notices)
        """What a run should say about these rows before it starts."""

    def __len__(self) -> int:
        return len(self.indices)

    @cached_property
    def columns(self) -> frozenset[str]:
        """Names of the columns, as far as they are known without reading every row."""
        return self.rows.columns

    @overload
    def __getitem__(self, index: int) -> ChatTask: ...
    @overload
    def __getitem__(self, index: slice) -> list[ChatTask]: ...
    def __getitem__(self, index: int | slice) -> ChatTask | list[ChatTask]:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        place, row = self.place(index), self.indices[index]
        try:
            task = row_to_task(self._read(row), self.config, self.media_root, place)
        except RowError as error:
            raise error.at(place) from error.__cause__
        return replace(task, id=f"{task.id} ({place})") if row in self.renamed else task

    def _read(self, row: int) -> dict[str, Any]:
        try:
            return self.rows[row]
        except RowError as error:
            if error.mended is None or self.config.policy(error.reason) != "fix":
                raise
            return error.mended

    def place(self, index: int) -> str:
        """``file:row`` of task ``index``, the row counted from 1."""
        return "{}:{}".format(*self.rows.place(self.indices[index]))

    def number(self, index: int) -> int:
        """The row of task ``index`` in its file, counted from 1; for jsonl the line."""
        return self.rows.place(self.indices[index])[1]

    def without(self, places: Collection[str]) -> DatasetTasks:
        """Leave out the rows at these places, for example those of the problems that a check found."""
        left_out = frozenset(places)
        return self.mended(leave_out=[index for index in range(len(self)) if self.place(index) in left_out])

    def mended(self, *, leave_out: Collection[int], rename: Collection[int] = (), notices: Sequence[str] = ()) -> DatasetTasks:
        """Leave out the tasks at these indices, and put their place behind the id of those at others."""
        left_out = frozenset(leave_out)
        kept = (
            array("Q", (row for index, row in enumerate(self.indices) if index not in left_out)) if left_out else self.indices
        )
        if not kept:
            raise DataError(f"{self.config.path}: every row was left out; mend the data first (see mmrl data check).")
        renamed = [self.indices[index] for index in rename]
        return DatasetTasks(self.rows, self.config, self.media_root, kept, renamed=renamed, notices=notices)

    def find_row(self, number: int) -> ChatTask:
        """The task at row ``number`` as errors count them: from 1, and for jsonl by line."""
        return self[self.find(number)]

    def find(self, number: int) -> int:
        """The index of the task at row ``number``."""
        for index in range(len(self)):
            if self.number(index) == number:
                return index
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
