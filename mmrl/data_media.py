"""Where media stand in a conversation, and what their references point at. The rules are stated in `mmrl.data`.

Nothing here opens a medium: a reference ends as an absolute path of a file that exists, as bytes, or as an opened object.
"""

from __future__ import annotations

import ast
import base64
import binascii
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from numbers import Number
from pathlib import Path
from typing import Any
from urllib.parse import unquote

from mmrl.data_files import RowError, parse_json

KINDS = ("image", "video", "audio")
TAG = re.compile("<(image|video|audio)>")

Part = dict[str, Any]
"""``{"type": "text", "text": ...}``, ``{"type": "image", "image": ref}``, or ``{"type": "image"}`` for a slot to be filled."""


@dataclass(frozen=True)
class MediaColumn:
    """The media of one kind that a row brings, and the column they came from."""

    name: str
    values: Sequence[Any]


@dataclass(frozen=True)
class MediaRoot:
    """The folder where relative media paths start (None for data that has no folder)."""

    folder: Path | None
    allow_outside: bool = False


def text_part(text: str) -> Part:
    return {"type": "text", "text": text}


def wrong_type(value: Any, field: str, expected: str) -> RowError:
    return RowError(field, "wrong type", f"found {type(value).__name__} ({value!r:.60}); expected {expected}.")


def unpack(text: str, field: str) -> Any:
    """A list that was stored as a string: JSON, or what Python's ``str`` made of it."""
    try:
        return parse_json(text)
    except (ValueError, RecursionError) as as_json:
        try:
            return _require_plain(ast.literal_eval(text))
        except (ValueError, TypeError, SyntaxError, RecursionError, MemoryError):
            detail = f"{text[:60]!r} does not parse as a list ({as_json}); for plain text set columns: {{prompt: {field}}}."
            raise RowError(field, "wrong type", detail) from as_json


def _require_plain(value: Any) -> Any:
    """``value`` if it is made of what JSON has, and bytes; ValueError for sets, complex numbers and keys that are no texts."""
    if isinstance(value, dict):
        if not all(isinstance(key, str) for key in value):
            raise ValueError(f"found a key that is no text among {list(value)!r:.60}")
        value.update({key: _require_plain(entry) for key, entry in value.items()})
    elif isinstance(value, (list, tuple)):
        return [_require_plain(entry) for entry in value]
    elif value is not None and not isinstance(value, (str, bytes, int, float)):
        raise ValueError(f"found {type(value).__name__}")
    return value


def media_column(name: str, value: Any) -> MediaColumn:
    """One medium, a list of media, a list stored as a string, or null for none."""
    if isinstance(value, str) and value.startswith("[") and value.endswith("]"):
        value = unpack(value, name)
    if value is None:
        return MediaColumn(name, ())
    return MediaColumn(name, value if isinstance(value, (list, tuple)) else (value,))


def place_media(
    messages: Sequence[Mapping[str, Any]], media: Mapping[str, MediaColumn], root: MediaRoot
) -> list[dict[str, Any]]:
    """Put the ``media`` of a row (by kind) into its messages; every reference is resolved."""
    return _fill(_place_slots(messages, media), media, root)


def _place_slots(messages: Sequence[Mapping[str, Any]], media: Mapping[str, MediaColumn]) -> list[dict[str, Any]]:
    """Turn tags into slots, or put slots in front of the first user turn. Rows without a media column stay as they are."""
    placed = [dict(message) for message in messages]
    if not media or any(part["type"] != "text" for message in messages for part in message["content"]):
        return placed
    user_turns = [message for message in placed if message["role"] == "user"]
    for message in user_turns:
        message["content"] = _split_tags(message["content"])
    if all(part["type"] == "text" for message in user_turns for part in message["content"]):
        slots = [{"type": kind} for kind in KINDS if kind in media for _ in media[kind].values]
        user_turns[0]["content"] = slots + user_turns[0]["content"]
    return placed


def _split_tags(content: Sequence[Part]) -> list[Part]:
    parts: list[Part] = []
    for part in content:
        for index, piece in enumerate(TAG.split(part["text"])):  # text, kind, text, kind, ..., text
            if index % 2:
                parts.append({"type": piece})
            elif piece:
                parts.append(text_part(piece))
    return parts


def _fill(messages: Sequence[Mapping[str, Any]], media: Mapping[str, MediaColumn], root: MediaRoot) -> list[dict[str, Any]]:
    """Give every slot its medium, in order, and resolve every reference."""
    _check_counts(messages, media)
    unused = {kind: iter(enumerate(column.values)) for kind, column in media.items()}

    def fill(part: Part, field: str) -> Part:
        kind = part["type"]
        if kind == "text":
            return part
        if kind in part:
            return {"type": kind, kind: resolve_medium(part[kind], kind, field, root)}
        index, value = next(unused[kind])
        return {"type": kind, kind: resolve_medium(value, kind, f"{media[kind].name}[{index}]", root)}

    return [
        {**message, "content": [fill(part, f"messages[{turn}].content[{at}]") for at, part in enumerate(message["content"])]}
        for turn, message in enumerate(messages)
    ]


def _check_counts(messages: Sequence[Mapping[str, Any]], media: Mapping[str, MediaColumn]) -> None:
    parts = [part for message in messages for part in message["content"]]
    for kind in KINDS:
        slots = sum(part["type"] == kind and kind not in part for part in parts)
        name, given = (media[kind].name, len(media[kind].values)) if kind in media else (f"{kind}s", 0)
        own = sum(kind in part for part in parts)
        if slots == given:
            continue
        rule = "every medium needs its tag, or none of them (then media come first)."
        if own:
            rule = f"the messages already hold {own} of their own; set columns: {{{kind}s: null}} to use only those."
        detail = f"{slots} {kind} {'tag' if slots == 1 else 'tags'} in the text, {given} in column {name!r}; {rule}"
        raise RowError(name, "tags and media differ in number", detail)


def resolve_medium(value: Any, kind: str, field: str, root: MediaRoot) -> Any:
    """What an opener understands: an absolute path, bytes, an opened object, frames, ``{"video":, "fps":, "audio":}``."""
    if value is None or (isinstance(value, (str, bytes)) and not value):
        raise RowError(field, f"empty {kind}", f"found {value!r}; expected a path, bytes or a data URI.")
    if isinstance(value, Number):
        raise wrong_type(value, field, "a path, bytes or a data URI")
    if isinstance(value, (list, tuple)):
        if kind != "video" or not value:
            raise wrong_type(value, field, f"one {kind}")
        return [resolve_medium(frame, "image", f"{field}[{index}]", root) for index, frame in enumerate(value)]
    if isinstance(value, Mapping):
        return _resolve_struct(value, kind, field, root)
    if not isinstance(value, str):
        return value
    return _decode_uri(value, field) if value.startswith("data:") else _resolve_path(value, field, root)


def _resolve_struct(value: Mapping[str, Any], kind: str, field: str, root: MediaRoot) -> Any:
    """``{bytes, path}`` of parquet and datasets, ``{url}`` of chat APIs, ``{video, fps, audio}``; decoded arrays stay as is."""
    if value.get("array") is not None:
        return value
    keys = ("bytes", "path", "url", kind)
    inner = [value[key] for key in keys if value.get(key) is not None]
    if not inner and not any(key in value for key in keys):
        raise RowError(field, "wrong type", f"found a struct of {sorted(value)}; expected one of {', '.join(keys)}.")
    resolved = resolve_medium(inner[0] if inner else None, kind, field, root)
    extra = {} if value.get("fps") is None else {"fps": value["fps"]}
    if kind == "video" and value.get("audio") is not None:
        extra["audio"] = resolve_medium(value["audio"], "audio", f"{field}.audio", root)
    return {kind: resolved, **extra} if extra else resolved


def _decode_uri(uri: str, field: str) -> bytes:
    head, comma, payload = uri.partition(",")
    try:
        if not comma or not head.endswith(";base64"):
            raise binascii.Error("expected data:<type>;base64,<data>")
        return base64.b64decode("".join(payload.split()), validate=True)
    except ValueError as error:
        raise RowError(field, "broken data URI", f"{head[:40]!r}...: {error}.") from error


def _resolve_path(text: str, field: str, root: MediaRoot) -> str:
    if text.startswith(("http://", "https://", "s3://", "gs://", "hf://")):
        raise RowError(field, "medium is not local", f"{text[:80]!r}; download it, and name the file.")
    path = Path(unquote(text.removeprefix("file://")) if text.startswith("file://") else text)
    if root.folder is None and not path.is_absolute():
        raise RowError(field, "no media root", f"{text!r} is relative and this dataset has no folder; set media_root.")
    path = Path(os.path.normpath(path if root.folder is None else root.folder / path))
    if not root.allow_outside and (root.folder is None or not path.is_relative_to(root.folder)):
        where = "set" if root.folder is None else f"it is not under {root.folder}; set"
        detail = f"{text!r}: {where} media_root to a folder that holds all media, or allow_outside_root: true."
        raise RowError(field, "path outside the media root", detail)
    if not os.path.isfile(path):
        raise RowError(field, "missing file", f"{text!r}: there is no file {path}; mend the path or set media_root.")
    return str(path)
