"""Instructions in words, and the words that occur in them. No heavy imports."""

from __future__ import annotations

import re

COLORS = ("red", "green", "blue", "yellow")

REACH_TEMPLATES = (
    "reach the {} target",
    "move the gripper to the {} ball",
    "touch the {} sphere",
    "go to the {} target",
    "bring the hand to the {} ball",
    "point at the {} sphere",
)
HELD_OUT_REACH_TEMPLATES = (
    "put your fingers on the {} marble",
    "please approach the {} one",
    "get close to the {} orb",
)
"""Phrasings that training never uses; they measure whether a policy listens to more than the sentences it knows."""


def split_words(text: str) -> list[str]:
    """Lower-case words of ``text``, punctuation dropped."""
    return re.findall(r"[a-z0-9']+", text.lower())


def vocabulary(templates: tuple[str, ...] = REACH_TEMPLATES, fillers: tuple[str, ...] = COLORS) -> tuple[str, ...]:
    """Sorted distinct words of the training phrasings."""
    words = {word for template in templates for word in split_words(template.format(" "))}
    return tuple(sorted(words | set(fillers)))
