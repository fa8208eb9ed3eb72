# ruff: noqa: E501 (tables of odd texts)
"""Changes that turn a good text, value or file into an awkward one. All randomness comes from the given `random.Random`."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from random import Random
from typing import Any

ODD_TEXTS = (
    "", " ", "\n", "\t", "\r\n", "\x00", "\u2028", "\u00a0", "\ufeff", "\U0001f600", "e\u0301", "\u0130", "\u00df", "\u0663", "\u00b2",
    "\u202e", "\ud800", "NaN", "null", "None", "true", "1e999", "-0", "1_000", "010", "1:30", "<image>", "<audio>", "</answer>", "\\", "\"", "'",
    "[", "]", "{", "}", "[]", "{}", "%s", "{prompt}", "~", "~nobody/x", "../x", "/etc/passwd", "file:///x", "data:,", "http://x/y.png",
    "\\ud83d", "<|image_pad|>", "$\\frac{1}{0}$", "9" * 400,
)  # fmt: skip
ODD_VALUES: tuple[Any, ...] = (
    None, True, False, 0, 1, -1, 2**31, 2**63, -(2**63) - 1, 10**30, 10**400, 0.5, -0.5, 1e-300, 1e308, math.nan, math.inf, -math.inf,
    [], {}, [[]], [None], {"": None}, {"a": {"b": [1, 2]}}, [1, "a", None],
)  # fmt: skip


def odd_text(random: Random) -> str:
    """One of `ODD_TEXTS`, or a few random characters."""
    if random.random() < 0.7:
        return random.choice(ODD_TEXTS)
    return "".join(
        chr(random.choice((random.randrange(32, 127), random.randrange(1, 0x2FFF)))) for _ in range(random.randrange(1, 12))
    )


def odd_value(random: Random) -> Any:
    """A JSON value where another type, range or shape is expected."""
    if random.random() < 0.35:
        return odd_text(random)
    if random.random() < 0.03:
        return nested(random.choice((20, 150, 3000)))
    return random.choice(ODD_VALUES)


def nested(depth: int) -> list[Any]:
    """``[[[...]]]``."""
    value: list[Any] = []
    for _ in range(depth):
        value = [value]
    return value


def mutate_text(random: Random, text: str, pieces: Sequence[str] = ()) -> str:
    """Cut, repeat, swap or insert something; ``pieces`` are texts that matter to who reads the result."""
    start = random.randint(0, len(text))
    end = random.choice((start, min(len(text), start + random.randint(0, 12)), random.randint(start, len(text))))
    changes: tuple[Callable[[], str], ...] = (
        lambda: text[:start] + text[end:],
        lambda: text[:start],
        lambda: text[:end] + text[start:],
        lambda: text[:start] + odd_text(random) + text[end:],
        lambda: text[:start] + random.choice(pieces or ODD_TEXTS) + text[start:],
        lambda: text[:start] + random.choice(pieces or ODD_TEXTS) + text[end:],
        lambda: text[:start] + text[start:end].swapcase() + text[end:],
        lambda: text + text[start:end],
    )
    return random.choice(changes)()


def mutate_bytes(random: Random, data: bytes) -> bytes:
    """Flip, cut, repeat or overwrite a few bytes."""
    changed = bytearray(data)
    for _ in range(random.randint(1, 4)):
        at = random.randrange(len(changed) + 1)
        kind = random.randrange(5)
        if kind == 0 and at < len(changed):
            changed[at] ^= 1 << random.randrange(8)
        elif kind == 1 and at < len(changed):
            changed[at] = random.choice((0, 0xFF, 0x22, 0x5C, 0x0A, 0x0D, 0xED, 0xC3, 0x80))
        elif kind == 2:
            del changed[at:]
        elif kind == 3:
            del changed[at : at + random.randint(1, 8)]
        else:
            changed[at:at] = bytes(
                random.choice((b"\xef\xbb\xbf", b"\r\n", b"\x00", b"\xff\xff\xff\xff", changed[at : at + 8]))
            )
    return bytes(changed)


def mutate_tree(random: Random, tree: Any, rename: Callable[[str], str]) -> Any:
    """``tree`` (JSON values) with one value replaced, removed, renamed, wrapped or repeated somewhere; the original stays."""
    if isinstance(tree, dict) and tree and random.random() < 0.8:
        key = random.choice(list(tree))
        kind = random.random()
        if kind < 0.12:
            return {name: value for name, value in tree.items() if name != key}
        if kind < 0.24:
            return {rename(key) if name == key else name: value for name, value in tree.items()}
        if kind < 0.3:
            return {**tree, odd_text(random): odd_value(random)}
        return {**tree, key: mutate_tree(random, tree[key], rename)}
    if isinstance(tree, list) and tree and random.random() < 0.8:
        at = random.randrange(len(tree))
        kind = random.random()
        if kind < 0.15:
            return [*tree[:at], *tree[at + 1 :]]
        if kind < 0.3:
            return [*tree[: at + 1], *tree[at:]]
        return [*tree[:at], mutate_tree(random, tree[at], rename), *tree[at + 1 :]]
    kind = random.random()
    if isinstance(tree, str) and kind < 0.4:
        return mutate_text(random, tree)
    if kind < 0.5:
        return [tree]
    if kind < 0.55:
        return {"value": tree}
    return odd_value(random)


def misspell(random: Random) -> Callable[[str], str]:
    """A renaming of keys."""
    return lambda key: mutate_text(random, key) if random.random() < 0.8 else odd_text(random)
