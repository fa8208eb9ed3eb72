"""Multiple-choice questions about sound: AVQA in its packagings, MMAU, MMAR and MMSU, read into one form.

A row that does not have what its benchmark promises is an error that names it. `audio.benchmark_scores` grades.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from audio.media import AudioClip
from mmrl.chat import ChatTask
from mmrl.data_files import open_rows
from mmrl.errors import ConfigError, DataError

LETTERS = "ABCDEFGHIJ"
MMAU_VERSIONS = ("original", "v05.15.25")
"""A quarter of the items were revised; scores of the two are not comparable."""
PUBLISHED_SIZES = {"mmau": 1000, "mmar": 1000, "mmsu": 5000}
"""Items with public answers: MMAU's test-mini, MMAR, MMSU."""
PROMPT = (
    "{question}\n{options}\nListen to the audio and reason inside <think> </think>, then give the letter of the right option "
    "inside <answer> </answer>."
)


@dataclass(frozen=True, kw_only=True)
class Item:
    """One question about one clip."""

    id: str
    question: str
    """Without its options."""
    options: tuple[str, ...]
    answer: str
    """The text of the right option."""
    audio: Any
    """A path, the bytes of a file, or what else `audio.media.open_clip` takes."""
    groups: Mapping[str, str]
    """What results are reported by, such as ``{"task": "music", "difficulty": "hard"}``."""
    source: str
    """``file:row``."""

    @property
    def letter(self) -> str:
        return LETTERS[self.options.index(self.answer)]


Reader = Callable[[Mapping[str, Any], str], Item]


def read_items(benchmark: str, file: Path, *, version: str | None = None) -> list[Item]:
    """All items of a benchmark's file (json, jsonl, parquet), media paths relative to it.

    ``version`` must be named for MMAU. Raises `ConfigError` for a benchmark or version that does not exist, `DataError` for a
    row that cannot be used.
    """
    if benchmark not in READERS:
        raise ConfigError(f"benchmark is {benchmark!r}; expected one of: {', '.join(READERS)}.")
    if benchmark == "mmau" and version not in MMAU_VERSIONS:
        raise ConfigError(
            f"benchmark version is {version!r}; MMAU has {' and '.join(MMAU_VERSIONS)}, whose scores are not comparable: say "
            "which one the file is with --benchmark-version."
        )
    rows, folder = open_rows(str(file), base_dir=Path.cwd(), split=None, subset=None)
    items = []
    for index in range(len(rows)):
        where = f"{file}:{index + 1}"
        row = rows[index]
        items.append(_placed(READERS[benchmark](row, where), folder))
    if not items:
        raise DataError(f"{file}: has no rows; expected the items of {benchmark}.")
    seen: dict[str, str] = {}
    for item in items:
        if item.id in seen:
            raise DataError(f"{item.source}: id {item.id!r} is also that of {seen[item.id]}; every item counts once.")
        seen[item.id] = item.source
    return items


def read_avqa(row: Mapping[str, Any], where: str) -> Item:
    """An AVQA row as published (``multi_choice`` and an index), as R1-AQA writes it, with lettered options inside the question
    (``gijs/avqa-processed``, AudioRubrics), in which case the answer is a letter, ``B. text`` or ``<answer>B</answer>``.
    """
    question = str(_first(row, where, "question_text", "question"))
    if "multi_choice" in row:
        options = tuple(str(option).strip() for option in row["multi_choice"])
        answer = _option_at(row.get("answer"), options, where)
    else:
        question, options = split_options(question, where)
        stated = str(_first(row, where, "answer", "solution"))
        tagged = re.search(r"<answer>(.*?)</answer>", stated, re.DOTALL)
        answer = _option_of((tagged[1] if tagged else stated).strip(), options, where)
    question = re.sub(r"\bvideo\b", "audio", question)  # only the sound of the video is used
    groups = {
        name: str(row[key]) for name, key in (("relation", "question_relation"), ("type", "question_type")) if row.get(key)
    }
    name = _first(row, where, "id", "sample_id", "video_name")
    return _item(name, question, options, answer, _first(row, where, "audio_path", "audio"), groups, where)


def read_mmau(row: Mapping[str, Any], where: str) -> Item:
    """An MMAU row; categories that are lists are joined."""
    groups = _groups(row, task="task", category="category", sub_category="sub-category", difficulty="difficulty")
    audio = _first(row, where, "audio", "audio_id", "audio_path")
    return _item(
        _first(row, where, "id"), _first(row, where, "question"), _options(row, where), _first(row, where, "answer"),
        audio, groups, where,
    )  # fmt: skip


def read_mmar(row: Mapping[str, Any], where: str) -> Item:
    """An MMAR row."""
    groups = _groups(row, modality="modality", category="category", sub_category="sub-category", language="language")
    audio = _first(row, where, "audio", "audio_path")
    return _item(
        _first(row, where, "id"), _first(row, where, "question"), _options(row, where), _first(row, where, "answer"),
        audio, groups, where,
    )  # fmt: skip


def read_mmsu(row: Mapping[str, Any], where: str) -> Item:
    """An MMSU row; ``choice_c`` and ``choice_d`` may be missing."""
    found = [row.get(f"choice_{letter}") for letter in "abcd"]
    options = tuple(str(option).strip() for option in found if option not in (None, ""))
    groups = _groups(row, category="category", sub_category="sub-category", task="task_name")
    audio = _first(row, where, "audio", "audio_path")
    return _item(
        _first(row, where, "id"), _first(row, where, "question"), options, _first(row, where, "answer_gt"), audio, groups, where
    )


READERS: Mapping[str, Reader] = {"avqa": read_avqa, "mmau": read_mmau, "mmar": read_mmar, "mmsu": read_mmsu}


def split_options(text: str, where: str) -> tuple[str, tuple[str, ...]]:
    """A question and its options from ``question\\nChoices:\\nA. one\\nB. two``: lettered lines ``A.``, ``A)`` or ``(A)``."""
    found = re.findall(r"^[ \t]*\(?([A-J])[.):]\)?[ \t]*(.+?)[ \t]*$", text, re.MULTILINE)
    letters = "".join(letter for letter, _ in found)
    if len(found) < 2 or letters != LETTERS[: len(found)]:
        raise DataError(
            f"{where}: the question has option lines {letters or 'none'}; expected A., B. and so on, each on its line."
        )
    question = re.split(r"^[ \t]*\(?A[.):]", text, maxsplit=1, flags=re.MULTILINE)[0]
    question = re.sub(r"\s*(choices|options)\s*:?\s*$", "", question, flags=re.IGNORECASE)
    return question.strip(), tuple(option for _, option in found)


def item_task(item: Item, *, prompt: str = PROMPT) -> ChatTask:
    """The conversation that asks an item; ``prompt`` holds ``{question}`` and ``{options}``."""
    options = "\n".join(f"{letter}. {option}" for letter, option in zip(LETTERS, item.options))
    text = prompt.format(question=item.question, options=options)
    parts = [{"type": "audio", "audio": item.audio}, {"type": "text", "text": text}]
    return ChatTask(
        id=item.id,
        messages=({"role": "user", "content": parts},),
        answer=item.letter,
        columns={"options": list(item.options), "answer_full": item.answer, **item.groups},
        source=item.source,
    )


def shuffled(items: Sequence[Item], seed: int = 0) -> list[Item]:
    """Items with their options in another order: a policy that listens does not mind."""
    rng = np.random.default_rng(seed)
    return [replace(item, options=tuple(item.options[i] for i in rng.permutation(len(item.options)))) for item in items]


def silenced(item: Item, clip: AudioClip) -> Item:
    """The item with silence as long as ``clip``: what is answered right without listening."""
    return replace(item, audio=AudioClip(samples=np.zeros_like(clip.samples), rate=clip.rate))


def normalized(text: str) -> str:
    """Case, white space and punctuation at the ends do not matter."""
    return " ".join(text.casefold().split()).strip(" .,:;!?\"'")


def _item(
    name: Any, question: Any, options: Sequence[str], answer: Any, audio: Any, groups: Mapping[str, str], where: str
) -> Item:
    if not 2 <= len(options) <= len(LETTERS):
        raise DataError(f"{where}: has {len(options)} options; expected 2 to {len(LETTERS)}.")
    plain = [normalized(option) for option in options]
    twice = next((option for option in plain if plain.count(option) > 1), None)
    if twice is not None:
        raise DataError(f"{where}: option {twice!r} is there twice; drop the row.")
    if normalized(str(answer)) not in plain:
        raise DataError(f"{where}: the answer is {answer!r}, which is none of the options {list(options)}.")
    right = options[plain.index(normalized(str(answer)))]
    return Item(
        id=str(name), question=str(question).strip(), options=tuple(options), answer=right, audio=audio, groups=groups,
        source=where,
    )  # fmt: skip


def _first(row: Mapping[str, Any], where: str, *names: str) -> Any:
    for name in names:
        if row.get(name) not in (None, ""):
            return row[name]
    raise DataError(f"{where}: has none of {', '.join(names)}; found columns {', '.join(map(str, row))}.")


def _options(row: Mapping[str, Any], where: str) -> tuple[str, ...]:
    found = _first(row, where, "choices")
    if not isinstance(found, Sequence | np.ndarray) or isinstance(found, str):
        raise DataError(f"{where}: choices is {type(found).__name__}; expected a list of texts.")
    return tuple(str(option).strip() for option in found)


def _groups(row: Mapping[str, Any], **keys: str) -> dict[str, str]:
    values = {name: row.get(key) for name, key in keys.items()}
    joined = {name: ", ".join(map(str, value)) if isinstance(value, list | tuple) else value for name, value in values.items()}
    return {name: str(value) for name, value in joined.items() if value not in (None, "")}


def _option_at(index: Any, options: Sequence[str], where: str) -> str:
    if isinstance(index, bool) or not isinstance(index, int | np.integer) or not 0 <= index < len(options):
        raise DataError(f"{where}: answer is {index!r}; expected the index of one of {len(options)} options, counted from 0.")
    return options[index]


def _option_of(stated: str, options: Sequence[str], where: str) -> str:
    """The option that a letter, or a letter with its text, stands for."""
    found = re.match(r"\(?([A-J])\)?(?:[.):]|$)", stated)
    if found and LETTERS.index(found[1]) < len(options):
        return options[LETTERS.index(found[1])]
    raise DataError(f"{where}: answer is {stated!r}; expected a letter from A to {LETTERS[len(options) - 1]}.")


def _placed(item: Item, folder: Path | None) -> Item:
    """Media paths start from the folder of the file."""
    if isinstance(item.audio, str) and folder is not None:
        return replace(item, audio=folder / item.audio.removeprefix("./"))
    return item
