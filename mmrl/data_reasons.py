"""Why a row cannot be used, and what a dataset's ``on_bad_rows`` may do about it. Nothing here imports torch.

Policies: ``fail`` stops before the first update and lists the rows; ``drop`` leaves them out, counted and listed; ``fix`` is
for reasons whose mending has one outcome (`EXACT_FIXES`); ``keep`` trains on the row as it is, where that is possible
(`USABLE`).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Literal

Policy = Literal["fail", "drop", "fix", "keep"]

REASONS: tuple[str, ...] = (
    # the file
    "not JSON", "trailing comma", "not UTF-8", "not an object", "unreadable parquet data",
    # columns and text
    "missing column", "wrong type", "two prompts", "empty prompt", "unknown role", "unknown part", "unknown part key",
    "no user turn", "ends in a system turn", "text is not Unicode", "NaN answer", "one answer in a list", "empty answer",
    "missing reward column", "duplicate id",
    # references to media
    "tags and media differ in number", "empty image", "empty video", "empty audio", "broken data URI", "medium is not local",
    "no media root", "path outside the media root", "missing file", "empty file", "modality not supported",
    # images
    "not an image", "image too large", "damaged image", "aspect ratio over 200", "no size within the pixel bounds",
    "unsupported pixel format", "unreadable image",
    # videos
    "not a readable video", "damaged video", "bad fps", "missing fps", "number of frames", "frames differ in size", "no frames",
    "video without sound", "unreadable video",
    # sounds
    "not a readable sound", "damaged sound", "samples that are not numbers", "empty clip", "silent clip", "clip too short",
    "clip too long", "clip without tokens", "unreadable audio",
    # preferences
    "not a preference", "no response", "several turns",
    # the whole prompt
    "prompt too long", "media token in the text", "placeholders and media differ", "refused by the policy",
)  # fmt: skip

EXACT_FIXES: Mapping[str, str] = {
    "trailing comma": "the comma in front of a closing bracket is left out",
    "one answer in a list": "its only entry is the answer",
    "duplicate id": "later rows get their place behind the id, as in 'a (rows.jsonl:7)'",
}
"""Reasons that ``fix`` is for, and what it does. Everything else would be a guess: a shrunken picture or a cut clip is another
task, and is asked for where it belongs (``rollout.max_pixels``, ``rollout.too_long``)."""

USABLE: frozenset[str] = frozenset({"empty answer", "duplicate id", "missing reward column"})
"""Reasons of rows that can be trained on all the same: ``keep`` is for them."""


def check_policies(policies: Mapping[str, Policy]) -> None:
    """Raise ValueError for an unknown reason, or a policy that its reason does not have."""
    from mmrl.data_files import suggest

    for reason, policy in policies.items():
        if reason not in REASONS:
            raise ValueError(f"{reason!r} is not a reason that rows are refused for; {suggest(reason, REASONS)}")
        if policy == "fix" and reason not in EXACT_FIXES:
            raise ValueError(f"{reason!r} has no exact fix, only {_listed(EXACT_FIXES)} have; use fail or drop")
        if policy == "keep" and reason not in USABLE:
            raise ValueError(f"a row with {reason!r} cannot be used; keep is for {_listed(USABLE)}; use fail or drop")


def _listed(names: Iterable[str]) -> str:
    return ", ".join(repr(name) for name in sorted(names))
