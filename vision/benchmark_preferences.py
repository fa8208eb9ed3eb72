"""Benchmarks of judges: VL-RewardBench, Multimodal RewardBench and MM-RLHF-RewardBench, read into one form and asked both ways.

A row that does not have what its benchmark promises is an error that names it. `vision.benchmark_scores` counts.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from mmrl.data_files import RowError, open_rows
from mmrl.data_media import MediaRoot, resolve_medium
from mmrl.errors import ConfigError, DataError
from vision.preferences import Pair

PUBLISHED_SIZES = {"vl_rewardbench": 1250, "multimodal_rewardbench": 5211, "mm_rlhf_rewardbench": 170}
NUM_FRAMES = 32
"""Frames of a video that is a folder of frames, as in the published evaluation."""
MM_RLHF_KINDS = ("mcq", "long", "short", "safety", "video")
"""Sub-sets of MM-RLHF-RewardBench, named in the paths of its media."""


@dataclass(frozen=True, kw_only=True)
class Item:
    """One pair, and what results are reported by."""

    pair: Pair
    groups: Mapping[str, str]
    """For example ``{"category": "hallucination"}``."""
    unit: str
    """Items of equal unit make one row of Acc+."""


Reader = Callable[[Mapping[str, Any], str], tuple[dict[str, Any], Mapping[str, str]]]
"""From a row and its place: ``id``, ``question``, ``chosen``, ``rejected`` and ``image`` or ``video``; and its groups."""


def read_items(benchmark: str, file: Path) -> list[Item]:
    """All pairs of a benchmark's file (json, jsonl, parquet), media paths relative to it.

    Raises `ConfigError` for a benchmark that does not exist, `DataError` for a row that cannot be used.
    """
    if benchmark not in READERS:
        raise ConfigError(f"benchmark is {benchmark!r}; expected one of: {', '.join(READERS)}.")
    rows, folder = open_rows(str(file), base_dir=Path.cwd(), split=None, subset=None)
    items = [_item(READERS[benchmark], rows[index], f"{file}:{index + 1}", index, folder) for index in range(len(rows))]
    if not items:
        raise DataError(f"{file}: has no rows; expected the pairs of {benchmark}.")
    return items


def read_vl_rewardbench(row: Mapping[str, Any], where: str) -> tuple[dict[str, Any], Mapping[str, str]]:
    """A row as published (``query``, ``response`` of two, ``human_ranking`` with 0 for the better one), or as R1-Reward packs
    it (``prompt``, ``chosen``, ``rejected``).

    ``category`` is the official split; ``r1_script`` is that of R1-Reward's own script, which takes RLHF-V and RLAIF-V for
    general, so its numbers per category compare with no other paper's.
    """
    name = str(_first(row, where, "id"))
    if "response" in row:
        responses, ranking = (list(_first(row, where, key)) for key in ("response", "human_ranking"))
        if len(responses) != 2 or sorted(int(rank) for rank in ranking) != [0, 1]:
            raise DataError(f"{where}: human_ranking is {ranking!r:.40}; expected 0 and 1 for two responses, 0 the better one.")
        chosen, rejected = (responses[[int(rank) for rank in ranking].index(rank)] for rank in (0, 1))
    else:
        chosen, rejected = _first(row, where, "chosen"), _first(row, where, "rejected")
    found = {"id": name, "question": _first(row, where, "query", "prompt"), "chosen": chosen, "rejected": rejected}
    return found | {"image": _first(row, where, "image")}, {
        "category": vl_category(name),
        "r1_script": vl_category(name, published_script=True),
    }


def vl_category(name: str, *, published_script: bool = False) -> str:
    """``reasoning``, ``hallucination`` or ``general`` by a row's id."""
    text = name if published_script else name.casefold()
    if "mmmu" in text or "mathverse" in text:
        return "reasoning"
    return "hallucination" if any(part in text for part in ("hallucination", "rlhf", "rlaif")) else "general"


def read_multimodal_rewardbench(row: Mapping[str, Any], where: str) -> tuple[dict[str, Any], Mapping[str, str]]:
    """A row as published: ``ID``, ``Image``, ``Text``, ``Output1``, ``Output2``, ``Better``, ``Category``.

    Safety is split into bias and toxicity and reasoning into math and coding, by id, as the benchmark's own script does.
    """
    name, better = str(_first(row, where, "ID")), str(_first(row, where, "Better"))
    if better not in ("Output1", "Output2"):
        raise DataError(f"{where}: Better is {better!r:.40}; expected Output1 or Output2.")
    outputs = [_first(row, where, key) for key in ("Output1", "Output2")]
    chosen, rejected = outputs if better == "Output1" else outputs[::-1]
    category = str(_first(row, where, "Category"))
    parts = {"safety": ("pairs", "bias", "toxicity"), "reasoning": ("math", "math", "coding")}
    if category in parts:
        start, one, other = parts[category]
        category = f"{category}/{one if name.casefold().startswith(start) else other}"
    found = {"id": name, "question": _first(row, where, "Text"), "chosen": chosen, "rejected": rejected}
    return found | {"image": _first(row, where, "Image")}, {"category": category}


def read_mm_rlhf_rewardbench(row: Mapping[str, Any], where: str) -> tuple[dict[str, Any], Mapping[str, str]]:
    """A row as published: ``id`` (shared by the pairs of a question), ``prompt``, ``chosen``, ``rejected``, and ``image`` or
    ``video``, whose path names the sub-set.
    """
    kind = "video" if row.get("video") not in (None, "") else "image"
    medium = _first(row, where, kind)
    category = next((name for name in MM_RLHF_KINDS if name in str(_path_of(medium))), "other")
    found = {"id": str(_first(row, where, "id")), "question": _first(row, where, "prompt", "question"), kind: medium}
    return found | {key: _first(row, where, key) for key in ("chosen", "rejected")}, {"category": category}


READERS: Mapping[str, Reader] = {
    "vl_rewardbench": read_vl_rewardbench,
    "multimodal_rewardbench": read_multimodal_rewardbench,
    "mm_rlhf_rewardbench": read_mm_rlhf_rewardbench,
}


def _item(reader: Reader, row: Mapping[str, Any], where: str, index: int, folder: Path | None) -> Item:
    found, groups = reader(row, where)
    kind = "video" if "video" in found else "image"
    medium = found[kind]
    if kind == "video" and isinstance(medium, str) and folder is not None and (folder / medium).is_dir():
        medium = _frames(folder, medium, where)
    try:
        medium = resolve_medium(medium, kind, kind, MediaRoot(folder, False))
    except RowError as error:
        raise error.at(where) from error
    question = ({"type": kind, kind: medium}, {"type": "text", "text": re.sub(r"<image>\s*", "", str(found["question"]))})
    pair = Pair(
        id=f"{index + 1}/{found['id']}",
        question=question,
        chosen=str(found["chosen"]),
        rejected=str(found["rejected"]),
        source=where,
    )
    return Item(pair=pair, groups=groups, unit=found["id"])


def _frames(folder: Path, name: str, where: str) -> list[str]:
    """`NUM_FRAMES` files of the folder of frames ``folder / name``, evenly spread, as paths from ``folder``."""
    files = sorted(f"{name}/{path.name}" for path in (folder / name).iterdir() if path.is_file())
    if not files:
        raise DataError(f"{where}: the video {name!r} is an empty folder; expected its frames as files.")
    return [files[index] for index in np.linspace(0, len(files) - 1, min(NUM_FRAMES, len(files)), dtype=int)]


def _path_of(medium: Any) -> Any:
    return medium.get("path") if isinstance(medium, Mapping) else medium


def _first(row: Mapping[str, Any], where: str, *names: str) -> Any:
    for name in names:
        value = row.get(name)
        if isinstance(value, Sequence | np.ndarray) and not isinstance(value, str | bytes):
            if len(value):
                return value
        elif value not in (None, ""):
            return value
    raise DataError(f"{where}: has none of {', '.join(names)}; found columns {', '.join(map(str, row))}.")
