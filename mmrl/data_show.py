"""One dataset row as a person reads it and as the policy gets it: ``mmrl data show``, in the terminal and as a page."""

from __future__ import annotations

import base64
import html
import io
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mmrl.chat import ChatTask, media_parts

if TYPE_CHECKING:
    from mmrl.language import LanguageAdapter
    from mmrl.types import Media

NUM_SHOWN_FRAMES = 8
"""Frames of a video on the page."""
_KINDS = ("image", "video", "audio")


@dataclass(frozen=True, kw_only=True)
class Slot:
    """Successive placeholder tokens of one kind in a prompt."""

    kind: str
    num_tokens: int

    def __str__(self) -> str:
        return f"[{self.kind}: {self.num_tokens} tokens]"


@dataclass(frozen=True, kw_only=True)
class ShownMedium:
    """A medium as the policy gets it."""

    kind: str
    given: str
    """What the row holds: a path, a number of bytes."""
    words: str
    """Size, length, rate after all conversions."""
    files: tuple[Media, ...]
    """Pictures and sounds for the page."""


@dataclass(frozen=True, kw_only=True)
class ShownRow:
    """What becomes of a task on its way into the policy."""

    media: tuple[ShownMedium, ...]
    prompt: tuple[str | Slot, ...] = ()
    """The rendered prompt, every token of it, media as slots; empty where no policy is known."""
    num_tokens: int = 0
    max_tokens: int = 0

    def lines(self) -> Iterator[str]:
        """The row in words."""
        for number, medium in enumerate(self.media, start=1):
            yield f"medium {number}: {medium.kind} {medium.given}: {medium.words}"
        if not self.prompt:
            return
        in_media = sum(part.num_tokens for part in self.prompt if isinstance(part, Slot))
        over = " (over the limit)" if self.num_tokens > self.max_tokens else ""
        yield f"tokens: {self.num_tokens} of at most {self.max_tokens}{over}, {in_media} of them media"
        yield "prompt as the policy gets it:"
        yield from ("  " + line for line in "".join(str(part) for part in self.prompt).split("\n"))


def encode_row(task: ChatTask, adapter: LanguageAdapter) -> ShownRow:
    """Render, open and encode a task as a rollout does. Raises `DataError` for what cannot be used, except a long prompt."""
    frontend = adapter.frontend
    shown = opened_media(task, lambda kind, ref: frontend.open(task, kind, ref))
    [prompt] = frontend.encode([task])
    ids = prompt["input_ids"][0].tolist()
    return ShownRow(
        media=shown.media,
        prompt=tuple(_mark_slots(ids, frontend.processor)),
        num_tokens=len(ids),
        max_tokens=adapter.rollout_config.max_prompt_tokens,
    )


def opened_media(task: ChatTask, open_media: Callable[[Any, Any], Any]) -> ShownRow:
    """The media of a task alone, opened as training would."""
    media = []
    for kind, ref in media_parts(task):
        item = open_media(kind, ref)
        medium = ShownMedium(kind=kind, given=describe_reference(ref), words=_in_words(item), files=tuple(_files(item)))
        media.append(medium)
    return ShownRow(media=tuple(media))


def describe_task(task: ChatTask, *, max_chars: int = 2000) -> str:
    """A task as a person reads it: turns with their media in place, the answer, and what reward terms receive."""
    lines = [f"task {task.id} ({task.source or 'no file'})", f"domain: {task.domain}"]
    if task.difficulty is not None:
        lines.append(f"difficulty: {task.difficulty:g}")
    for message in task.messages:
        parts = [_describe_part(part, max_chars) for part in message["content"]]
        lines += [f"[{message['role']}]", *(f"  {line}" for part in parts for line in part.split("\n"))]
    for name, text in (("answer", task.answer), ("demonstration", task.demonstration)):
        lines.append(f"{name}: {_shorten(text, max_chars) if text else 'none'}")
    lines += [f"column {name}: {_shorten(repr(value), 200)}" for name, value in task.columns.items()]
    return "\n".join(lines)


def describe_reference(ref: Any) -> str:
    """A medium as the row gives it, in a few words."""
    if isinstance(ref, bytes):
        return f"{len(ref)} bytes"
    if isinstance(ref, list):
        return f"{len(ref)} frames, the first {describe_reference(ref[0])}"
    if isinstance(ref, dict) and "video" in ref:
        return f"{describe_reference(ref['video'])}, {ref.get('fps')} fps"
    return ref if isinstance(ref, str) else type(ref).__name__


def write_page(path: Path, task: ChatTask, row: ShownRow) -> None:
    """Write one self-contained page: the conversation, the prompt with its slots, and every medium."""
    prompt = "".join(f"<mark>{part}</mark>" if isinstance(part, Slot) else html.escape(part) for part in row.prompt)
    media = "".join(_medium_html(number, medium) for number, medium in enumerate(row.media, start=1))
    over = " over" if row.num_tokens > row.max_tokens else ""
    tokens = f'<p class="tokens{over}">{row.num_tokens} tokens, at most {row.max_tokens}</p>' if row.prompt else ""
    title = html.escape(f"{task.id} ({task.source})")
    body = (
        f"<h1>{title}</h1><h2>Row</h2><pre>{html.escape(describe_task(task, max_chars=20_000))}</pre>"
        f"<h2>Media as the policy gets them</h2>{media or '<p>none</p>'}"
        + (f"<h2>Prompt as the policy gets it</h2>{tokens}<pre>{prompt}</pre>" if row.prompt else "")
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(_PAGE.replace("TITLE", title).replace("BODY", body), encoding="utf-8")


_PAGE = """<!doctype html>
<html lang="en"><meta charset="utf-8"><meta name="viewport" content="width=device-width"><title>TITLE</title>
<style>
:root { color-scheme: light dark; font: 16px/1.5 system-ui, sans-serif; }
body { max-width: 60rem; margin: 2rem auto; padding: 0 1rem; }
h1 { font-size: 1.3rem; overflow-wrap: anywhere; } h2 { font-size: 1.05rem; margin-top: 2rem; }
pre { white-space: pre-wrap; overflow-wrap: anywhere; padding: 1rem; background: color-mix(in srgb, CanvasText 6%, Canvas); }
figure { display: inline-block; margin: 0 1rem 1rem 0; vertical-align: top; max-width: 100%; }
img { max-width: 100%; image-rendering: pixelated; } figcaption { font-size: .85rem; overflow-wrap: anywhere; }
.over { color: #c22; font-weight: 600; }
</style>
<body>BODY</body></html>
"""


def _medium_html(number: int, medium: ShownMedium) -> str:
    caption = html.escape(f"medium {number}: {medium.kind} {medium.given}: {medium.words}")
    return "".join(f"<figure>{_file_html(file)}<figcaption>{caption} {html.escape(file.caption)}</figcaption></figure>"
                   for file in medium.files)  # fmt: skip


def _file_html(file: Media) -> str:
    data = base64.b64encode(file.data).decode()
    if file.kind == "audio":
        return f'<audio controls src="data:audio/wav;base64,{data}"></audio>'
    return f'<img alt="{html.escape(file.caption or file.kind)}" src="data:image/png;base64,{data}">'


def _mark_slots(ids: Sequence[int], processor: Any) -> Iterator[str | Slot]:
    """Decoded text between runs of placeholder tokens."""
    tokenizer = processor.tokenizer
    kinds = {}
    for kind in _KINDS:
        token = getattr(processor, f"{kind}_token", None)
        if token is not None:
            kinds[tokenizer.convert_tokens_to_ids(token)] = kind
    start = 0
    for end in range(1, len(ids) + 1):
        if end < len(ids) and kinds.get(ids[end]) == kinds.get(ids[start]):
            continue
        kind = kinds.get(ids[start])
        yield tokenizer.decode(ids[start:end]) if kind is None else Slot(kind=kind, num_tokens=end - start)
        start = end


def _in_words(item: Any) -> str:
    if hasattr(item, "to_wav"):
        return f"{item.seconds:.2f} s, mono, {item.rate} samples a second"
    if hasattr(item, "frames"):
        height, width = item.frames.shape[-2:] if item.frames.shape[1] == 3 else item.frames.shape[1:3]
        sound = getattr(item, "sound", None)
        return f"{len(item.frames)} frames of {width}x{height}, {item.fps:g} a second" + (
            f", with sound: {_in_words(sound)}" if sound is not None else ""
        )
    return f"{item.width}x{item.height} pixels"


def _files(item: Any) -> Iterator[Media]:
    import numpy as np
    from PIL import Image

    from mmrl.types import Media

    if hasattr(item, "to_wav"):
        yield Media(kind="audio", data=item.to_wav(), suffix=".wav")
    elif hasattr(item, "frames"):
        chosen = np.linspace(0, len(item.frames) - 1, NUM_SHOWN_FRAMES).astype(int).tolist()
        for index in dict.fromkeys(chosen):
            pixels = np.asarray(item.frames[index])
            pixels = pixels.transpose(1, 2, 0) if pixels.shape[0] == 3 else pixels
            yield _png(Image.fromarray(np.ascontiguousarray(pixels)), f"({index / item.fps:.1f} s)")
        if getattr(item, "sound", None) is not None:
            yield from _files(item.sound)
    else:
        yield _png(item, "")


def _png(image: Any, caption: str) -> Media:
    from mmrl.types import Media

    buffer = io.BytesIO()
    image.save(buffer, format="PNG")
    return Media(kind="image", data=buffer.getvalue(), suffix=".png", caption=caption)


def _describe_part(part: dict[str, Any], max_chars: int) -> str:
    if part["type"] == "text":
        return _shorten(part["text"], max_chars)
    return f"<{part['type']}: {describe_reference(part[part['type']])}>"


def _shorten(text: str, max_chars: int) -> str:
    return text if len(text) <= max_chars else f"{text[:max_chars]}... ({len(text)} characters)"
