"""Conversations: what a language policy is asked, and what it wrote. Shared by vision and audio.

A `ChatTask` keeps messages in the form that transformers' chat templates read; media parts hold a reference (a path, the bytes
of a file, or an opened object) under the key of their type. Rollouts keep token ids and never re-tokenise: `Completion.text`
is for rewards and people only.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from mmrl.types import Task

MediaKind = Literal["image", "video", "audio"]
MEDIA_KINDS: tuple[MediaKind, ...] = ("image", "video", "audio")

Message = Mapping[str, Any]
"""``{"role": "user", "content": [{"type": "image", "image": ref}, {"type": "text", "text": "..."}]}``: always a list."""


@dataclass(frozen=True, kw_only=True)
class ChatTask(Task):
    """A conversation that the policy continues, and what its completion is graded against."""

    messages: tuple[Message, ...]
    """System and user turns, media parts where they stand in the text."""
    answer: str = ""
    """The verifiable answer; empty when rewards need none."""
    demonstration: str = ""
    """A completion to imitate in supervised warm-up; empty when there is none."""
    prefill: str | tuple[int, ...] = ""
    """Text or token ids that the answer starts with. They belong to the prompt; `Completion.text` shows them all the same."""
    demonstrated: float = 0.0
    """Share of the demonstration's tokens that a rollout begins with. They belong to the completion."""
    hint: str = ""
    """Text behind the last user turn that is shown while sampling; log-probabilities are those without it."""
    columns: Mapping[str, Any] = field(default_factory=dict)
    """The row's other columns, passed on to reward terms."""
    source: str = ""
    """``file:row`` of a dataset row, for errors."""


@dataclass(frozen=True, kw_only=True)
class MediaFacts:
    """Geometry and time of one medium, for rewards that read positions or moments."""

    kind: MediaKind
    original_size: tuple[int, int] | None = None
    """Width and height before the image was fitted to the pixel bounds; None where nothing is known of it."""
    size: tuple[int, int] | None = None
    """Width and height as the model's processor gets them."""
    times: tuple[float, ...] = ()
    """Seconds from the start of each frame that is shown."""
    seconds: float | None = None
    """Length of a sound or a video."""

    @property
    def scale(self) -> tuple[float, float] | None:
        """What coordinates in the original are multiplied by, along width and height, to be those that the policy saw."""
        if self.original_size is None or self.size is None:
            return None
        return self.size[0] / self.original_size[0], self.size[1] / self.original_size[1]


@dataclass(frozen=True, kw_only=True)
class Completion:
    """What the policy wrote: the outcome that reward terms of text modalities read."""

    text: str
    """Decoded without special tokens, from the task's prefill on."""
    token_ids: tuple[int, ...]
    """Exactly the sampled ids, the end token included, behind those that were given of a demonstration."""
    stop_reason: str
    """``"stop"`` after an end token or stop string, ``"length"`` at the limit."""
    media: tuple[MediaFacts, ...] = ()
    """What the policy was shown, in order; filled with ``rollout.media_facts``."""

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)


def media_parts(task: ChatTask) -> Iterator[tuple[MediaKind, Any]]:
    """The media of a task with their kinds, in the order in which the prompt shows them."""
    for message in task.messages:
        for part in message["content"]:
            if part["type"] in MEDIA_KINDS:
                yield part["type"], part[part["type"]]


def first_block(text: str, tag: str) -> str | None:
    """What stands between the first ``<tag>`` and the next ``</tag>``; None without them. Linear in any text."""
    _, opened, rest = text.partition(f"<{tag}>")
    inside, closed, _ = rest.partition(f"</{tag}>")
    return inside if opened and closed else None


def around_question(messages: Sequence[Message], before: str, after: str) -> tuple[Message, ...]:
    """``messages`` with text in front of the last user turn's first text, and behind all of that turn."""
    last = max(index for index, message in enumerate(messages) if message["role"] == "user")
    content = list(messages[last]["content"])
    first = next((index for index, part in enumerate(content) if part["type"] == "text"), len(content))
    if before:
        content.insert(first, {"type": "text", "text": before})
    if after:
        content.append({"type": "text", "text": after})
    return (*messages[:last], {**messages[last], "content": content}, *messages[last + 1 :])


def plain_text(task: ChatTask) -> str:
    """The conversation for people and logs, media shown as ``<image>``, ``<video>``, ``<audio>``."""
    lines = []
    for message in task.messages:
        parts = [part["text"] if part["type"] == "text" else f"<{part['type']}>" for part in message["content"]]
        lines.append(f"{message['role']}: {''.join(parts)}")
    return "\n".join(lines)
