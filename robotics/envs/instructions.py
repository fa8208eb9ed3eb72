"""Instructions in words, and the words that occur in them. No heavy imports.

Each family has phrasings that training uses and phrasings that it never uses; the latter change the verb and the structure of
the sentence but keep the words for objects, so that they can be understood from them. A phrasing is a template whose fields are
filled with colours.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import NamedTuple

COLORS = ("red", "green", "blue", "yellow")


class Phrasings(NamedTuple):
    """Templates of one kind of request."""

    seen: tuple[str, ...]
    held_out: tuple[str, ...]
    """Phrasings that training never uses; they measure whether a policy listens to more than the sentences it knows."""


PHRASINGS: Mapping[str, Phrasings] = {
    "reach": Phrasings(
        seen=(
            "reach the {0} target",
            "move the gripper to the {0} ball",
            "touch the {0} sphere",
            "go to the {0} target",
            "bring the hand to the {0} ball",
            "point at the {0} sphere",
        ),
        held_out=(
            "put your fingers on the {0} marble",
            "please approach the {0} one",
            "get close to the {0} orb",
        ),
    ),
    "push": Phrasings(
        seen=(
            "push the {0} block to the marked region",
            "slide the {0} cube into the purple circle",
            "move the {0} block onto the marked region",
            "get the {0} cube into the circle",
            "shift the {0} block to the purple disc",
            "bring the {0} cube to the disc on the table",
        ),
        held_out=(
            "the {0} cube belongs in the purple circle",
            "please shove the {0} block over to the marked region",
            "i want the {0} block on the disc",
        ),
    ),
    "lift": Phrasings(
        seen=(
            "lift the {0} block",
            "pick up the {0} cube",
            "raise the {0} block off the table",
            "grasp the {0} cube and lift it",
            "take the {0} block up",
            "hold the {0} cube up in the air",
        ),
        held_out=(
            "elevate the {0} cube",
            "please grab the {0} block and raise it high",
            "the {0} block should hover above the table",
        ),
    ),
    "place": Phrasings(
        seen=(
            "place the {0} block in the bowl",
            "put the {0} cube into the bowl",
            "drop the {0} block in the dish",
            "pick the {0} cube and put it in the bowl",
            "set the {0} block into the dish",
            "move the {0} cube inside the bowl",
        ),
        held_out=(
            "the {0} cube goes in the bowl",
            "please deposit the {0} block inside the dish",
            "fill the bowl with the {0} cube",
        ),
    ),
    "stack": Phrasings(
        seen=(
            "stack the {0} block on the {1} block",
            "put the {0} cube on top of the {1} cube",
            "place the {0} block on the {1} one",
            "set the {0} cube on the {1} cube",
            "build a tower with the {0} block on the {1} block",
            "move the {0} block on top of the {1} block",
        ),
        held_out=(
            "pile the {0} cube onto the {1} cube",
            "please balance the {0} block upon the {1} one",
            "the {0} block should sit on the {1} block",
        ),
    ),
    "open_drawer": Phrasings(
        seen=(
            "open the drawer",
            "pull the drawer open",
            "pull the handle of the drawer",
            "open the cabinet drawer",
            "slide the drawer out",
            "get the drawer open",
        ),
        held_out=(
            "the drawer should be open",
            "please draw the drawer out of the cabinet",
            "give the drawer handle a pull",
        ),
    ),
    "close_drawer": Phrasings(
        seen=(
            "close the drawer",
            "push the drawer shut",
            "shut the cabinet drawer",
            "push the drawer into the cabinet",
            "slide the drawer in",
            "get the drawer closed",
        ),
        held_out=(
            "the drawer should be closed",
            "please return the drawer into the cabinet",
            "make sure the drawer is shut",
        ),
    ),
    "press": Phrasings(
        seen=(
            "press the button",
            "push the button down",
            "hold the orange button down",
            "press down on the button",
            "push the orange button",
            "keep the button pressed",
        ),
        held_out=(
            "the button should be down",
            "please squeeze the orange button",
            "give the button a press and keep it",
        ),
    ),
}
"""By kind of request. ``{0}`` is the block that is moved, ``{1}`` the block below it."""

CONNECTIONS = Phrasings(
    seen=(
        "{first} and {second}",
        "{first} then {second}",
        "first {first} and then {second}",
        "{first} and after that {second}",
        "{first} , then {second}",
        "first {first} , then {second}",
    ),
    held_out=(
        "{second} after you {first}",
        "once you {first} , {second}",
        "before you {second} , {first}",
    ),
)
"""Ways to ask for two things, the first of which is done first; only `IMPERATIVES` are joined by them."""

IMPERATIVES: Mapping[str, tuple[str, ...]] = {kind: phrasings.seen[:3] for kind, phrasings in PHRASINGS.items()}
"""Phrasings that are short enough to be part of a longer sentence."""


def split_words(text: str) -> list[str]:
    """Lower-case words of ``text``, punctuation dropped."""
    return re.findall(r"[a-z0-9']+", text.lower())


def vocabulary() -> tuple[str, ...]:
    """Sorted distinct words of the training phrasings of all families; the same for every run."""
    sentences = [template for phrasings in PHRASINGS.values() for template in phrasings.seen]
    sentences += [template.format(first="", second="") for template in CONNECTIONS.seen]
    words = {word for sentence in sentences for word in split_words(re.sub(r"{\d}", " ", sentence))}
    return tuple(sorted(words | set(COLORS)))
