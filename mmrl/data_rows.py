"""One row of a dataset as a `ChatTask`: pure functions from a dict of columns. The rules are stated in `mmrl.data`.

Every function raises `RowError` with the column at fault; the caller adds the file and the row.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Mapping, Sequence
from decimal import Decimal
from numbers import Number
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from mmrl.data_files import RowError
from mmrl.data_media import KINDS, MediaRoot, Part, media_column, place_media, text_part, unpack, wrong_type

if TYPE_CHECKING:
    from mmrl.chat import ChatTask
    from mmrl.data import DatasetConfig

ColumnName = Literal[
    "prompt", "messages", "images", "videos", "audios", "answer", "id", "domain", "difficulty", "demonstration"
]
ALIASES: dict[ColumnName, tuple[str, ...]] = {
    "prompt": ("prompt", "problem", "question"),
    "messages": ("messages", "message", "conversations"),
    "images": ("images", "image"),
    "videos": ("videos", "video"),
    "audios": ("audios", "audio"),
    "answer": ("answer", "solution"),
    "id": ("id",),
    "domain": ("domain",),
    "difficulty": ("difficulty",),
    "demonstration": ("demonstration",),
}
"""Columns that are recognised without a ``columns:`` entry: the first that a row has."""

KIND_COLUMNS: dict[str, ColumnName] = {"image": "images", "video": "videos", "audio": "audios"}
ROLES = {"system": "system", "user": "user", "human": "user", "assistant": "assistant", "gpt": "assistant", "tool": "tool"}
ABSENT = object()


def row_to_task(row: Mapping[str, Any], config: DatasetConfig, media_root: Path | None, place: str) -> ChatTask:
    """Read the row at ``place`` (``file:row``); ``media_root`` is where relative media paths start."""
    from mmrl.chat import ChatTask

    found = find_columns(row, config.columns)
    conversation = _conversation_column(row, found, config.columns)
    used = {found[name] for name in found if name not in ("prompt", "messages")} | {found[conversation]}

    def value(name: ColumnName) -> Any:
        return lookup(row, found[name]) if name in found else None

    messages, completion = _split_completion(_read_messages(value(conversation), found[conversation], conversation))
    media = {kind: media_column(found[name], value(name)) for kind, name in KIND_COLUMNS.items() if name in found}
    messages = place_media(messages, media, MediaRoot(media_root, config.allow_outside_root))
    asked = max(index for index, message in enumerate(messages) if message["role"] == "user")
    messages[asked]["content"] = _wrap(messages[asked]["content"], config.prompt_template)
    if config.system and messages[0]["role"] != "system":
        messages.insert(0, {"role": "system", "content": [text_part(config.system)]})
    return ChatTask(
        id=_read_name(value("id"), found["id"]) or place if "id" in found else place,
        domain=_read_name(value("domain"), found["domain"]) or "default" if "domain" in found else "default",
        difficulty=None if value("difficulty") is None else _read_difficulty(value("difficulty"), found["difficulty"]),
        messages=tuple(messages),
        answer=_read_answer(_only_answer(value("answer"), config), found["answer"]) if "answer" in found else completion,
        demonstration=completion if value("demonstration") is None else _text(value("demonstration"), found["demonstration"]),
        columns={name: entry for name, entry in row.items() if name not in used},
        source=place,
    )


def lookup(row: Mapping[str, Any], column: str) -> Any:
    """The value of a column, or of a dotted path into structs, or ABSENT."""
    if column in row:
        return row[column]
    value: Any = row
    for key in column.split("."):
        if not isinstance(value, Mapping) or key not in value:
            return ABSENT
        value = value[key]
    return value


def find_columns(row: Mapping[str, Any], columns: Mapping[ColumnName, str | None]) -> dict[ColumnName, str]:
    """Which column of this row holds what. A column that ``columns`` names for one thing is no alias of another."""
    named = set(columns.values())
    found: dict[ColumnName, str] = {}
    for ours, aliases in ALIASES.items():
        if ours in columns:
            theirs = columns[ours]
            if theirs is not None and lookup(row, theirs) is not ABSENT:
                found[ours] = theirs
            elif theirs is not None and ours in ("prompt", "messages", "answer"):
                raise _missing_column(row, ours, [theirs])
        else:
            match = [alias for alias in aliases if alias in row and alias not in named]
            if match:
                found[ours] = match[0]
    return found


def _missing_column(row: Mapping[str, Any], ours: str, expected: Sequence[str]) -> RowError:
    close = [(theirs, name) for theirs in row for name in difflib.get_close_matches(theirs, expected, n=1, cutoff=0.6)]
    hint = f" Perhaps {close[0][0]!r} is meant: set columns: {{{ours}: {close[0][0]}}}." if close else ""
    columns = ", ".join(row) or "nothing"
    return RowError(ours, "missing column", f"expected {' or '.join(expected)}; found columns: {columns}.{hint}")


def _conversation_column(
    row: Mapping[str, Any], found: Mapping[ColumnName, str], columns: Mapping[ColumnName, str | None]
) -> ColumnName:
    names: tuple[ColumnName, ...] = ("prompt", "messages")
    filled = [name for name in names if name in found and lookup(row, found[name]) is not None]
    named = [name for name in filled if name in columns]
    if len(named) == 1 or len(filled) == 1:
        return (named or filled)[0]
    if filled:
        both = " and ".join(repr(found[name]) for name in filled)
        raise RowError("prompt", "two prompts", f"columns {both} both hold one; choose with columns: {{{filled[1]}: null}}.")
    empty = [found[name] for name in names if name in found]
    if empty:
        raise RowError("prompt", "empty prompt", f"column {empty[0]!r} is null; expected text or a list of messages.")
    raise _missing_column(row, "prompt", [*ALIASES["prompt"], *ALIASES["messages"]])


def _text(value: Any, field: str) -> str:
    if not isinstance(value, str):
        raise wrong_type(value, field, "text")
    try:
        value.encode()
    except UnicodeEncodeError as error:
        detail = f"half of a surrogate pair at character {error.start}; no tokenizer can encode it."
        raise RowError(field, "text is not Unicode", detail) from error
    return value


def _read_messages(value: Any, field: str, meaning: ColumnName) -> list[dict[str, Any]]:
    if isinstance(value, str) and meaning == "prompt":
        return [{"role": "user", "content": [text_part(_text(value, field))]}]
    if isinstance(value, str):
        value = unpack(value, field)
    if not isinstance(value, (list, tuple)) or not value:
        raise wrong_type(value, field, "text or a list of messages" if meaning == "prompt" else "a list of messages")
    return [_read_message(entry, f"{field}[{index}]") for index, entry in enumerate(value)]


def _read_message(value: Any, field: str) -> dict[str, Any]:
    if not isinstance(value, Mapping):
        raise wrong_type(value, field, "{'role': 'user', 'content': ...}")
    role = value.get("role") or value.get("from")
    if not isinstance(role, str) or role not in ROLES:
        raise RowError(field, "unknown role", f"found {role!r} among {sorted(value)}; expected one of {', '.join(ROLES)}.")
    content = value.get("content") if value.get("content") is not None else value.get("value")
    if isinstance(content, str):
        parts = [text_part(_text(content, field))]
    elif isinstance(content, Sequence):
        parts = [_read_part(part, f"{field}.content[{index}]") for index, part in enumerate(content)]
    else:
        raise wrong_type(content, f"{field}.content", "text or a list of parts")
    others = {key: entry for key, entry in value.items() if key not in ("role", "from", "content", "value")}
    return {**{key: entry for key, entry in others.items() if entry is not None}, "role": ROLES[role], "content": parts}


def _read_part(value: Any, field: str) -> Part:
    if isinstance(value, str):
        return text_part(_text(value, field))
    if not isinstance(value, Mapping):
        raise wrong_type(value, field, "text or {'type': ...}")
    kind = value.get("type") or next((key for key in ("text", *KIND_COLUMNS) if value.get(key) is not None), None)
    if kind == "text":
        return text_part(_text(value.get("text"), field))
    kind = str(kind).removesuffix("_url")
    if kind not in KINDS:
        raise RowError(field, "unknown part", f"found {kind!r} among {sorted(value)}; expected text, image, video or audio.")
    names = (kind, f"{kind}_url", "url", "path")
    others = [key for key in value if key not in ("type", "text", "fps", *names) and value[key] is not None]
    if others:
        detail = f"found {', '.join(others)}; expected {kind} (and fps); limits go in the config."
        raise RowError(field, "unknown part key", detail)
    given = [value[key] for key in names if value.get(key) is not None]
    if not given:
        return {"type": kind}
    return {"type": kind, kind: given[0] if value.get("fps") is None else {kind: given[0], "fps": value["fps"]}}


def _split_completion(messages: list[dict[str, Any]]) -> tuple[list[dict[str, Any]], str]:
    """The turns that the policy continues, and the text of the assistant turns after them."""
    end = len(messages)
    while end and messages[end - 1]["role"] == "assistant":
        end -= 1
    if not any(message["role"] == "user" for message in messages[:end]):
        raise RowError("messages", "no user turn", f"found the roles {[message['role'] for message in messages]}.")
    if messages[end - 1]["role"] == "system":
        raise RowError("messages", "ends in a system turn", "expected a user turn for the policy to answer.")
    parts = [part for message in messages[end:] for part in message["content"]]
    return messages[:end], "".join(part["text"] for part in parts if part["type"] == "text")


def _wrap(content: Sequence[Part], template: str) -> list[Part]:
    """Put the template's text in front of the first text part and behind the last part."""
    before, after = template.split("{prompt}")
    parts = [dict(part) for part in content]
    if all(part["type"] != "text" for part in parts) or (after and parts[-1]["type"] != "text"):
        parts.append(text_part(""))
    first = next(part for part in parts if part["type"] == "text")
    first["text"] = before + first["text"]
    if after:
        parts[-1]["text"] += after
    parts = [part for part in parts if part["type"] != "text" or part["text"]]
    if not any(part["type"] != "text" or part["text"].strip() for part in parts):
        raise RowError("prompt", "empty prompt", "the last turn has no text and no media; expected a question.")
    return parts


def _only_answer(value: Any, config: DatasetConfig) -> Any:
    unpacked = isinstance(value, (list, tuple)) and len(value) == 1 and config.policy("one answer in a list") == "fix"
    return value[0] if unpacked else value


def _read_answer(value: Any, field: str) -> str:
    if value is None:
        return ""
    if isinstance(value, (float, Decimal)) and math.isnan(value):
        detail = "found NaN, which some tools write for a missing value; fill it in or drop the row."
        raise RowError(field, "NaN answer", detail)
    if isinstance(value, (float, Decimal)) and math.isinf(value):
        raise wrong_type(value, field, "text, or a number within the range of floats (in quotes, if it is exact as it stands)")
    if isinstance(value, (list, tuple)) and len(value) == 1 and isinstance(value[0], (str, Number)):
        detail = (
            f"found {value!r:.60}; expected the answer itself: unpack it, or set on_bad_rows: {{one answer in a list: fix}}."
        )
        raise RowError(field, "one answer in a list", detail)
    if not isinstance(value, (str, Number)):
        expected = "text or a number; name another column as answer (reward terms still receive this one as it is)"
        raise wrong_type(value, field, expected)
    return _text(str(value), field)


def _read_name(value: Any, field: str) -> str:
    """Text, or a number as text; empty where there is none."""
    if value is None or (isinstance(value, (float, Decimal)) and math.isnan(value)):
        return ""
    infinite = isinstance(value, (float, Decimal)) and math.isinf(value)
    if infinite or isinstance(value, bool) or not isinstance(value, (str, Number)):
        raise wrong_type(value, field, "text or a number")
    return _text(str(value), field)


def _read_difficulty(value: Any, field: str) -> float | None:
    try:
        number = float(value)
    except (TypeError, ValueError, OverflowError) as error:
        expected = "a number; set columns: {difficulty: null} if this column means something else"
        raise wrong_type(value, field, expected) from error
    if math.isinf(number):
        raise wrong_type(value, field, "a finite number")
    return None if math.isnan(number) else number
