"""Agreement between the processes of a run. With one process, or no accelerator, every function answers at once."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from accelerate import Accelerator
from accelerate.utils import gather_object

Totals = Mapping[str, tuple[float, float]]
"""Logged quantities as ``(sum, count)``, so that they can be averaged over processes of unequal size."""


def gather(accelerator: Accelerator | None, value: Any) -> list[Any]:
    """One entry per process, in order of rank."""
    return gather_object([value]) if accelerator is not None and accelerator.num_processes > 1 else [value]


def raise_together(accelerator: Accelerator | None, failure: Exception | None) -> None:
    """Raise the first failure of any process on every process, so that none waits for another."""
    for error in gather(accelerator, failure):
        if error is not None:
            raise error


def add(*totals: Totals) -> dict[str, tuple[float, float]]:
    """Sum of sums and counts by name."""
    joined: dict[str, tuple[float, float]] = {}
    for part in totals:
        for name, (value, count) in part.items():
            old_value, old_count = joined.get(name, (0.0, 0.0))
            joined[name] = (old_value + value, old_count + count)
    return joined


def means(accelerator: Accelerator, totals: Totals) -> dict[str, float]:
    """Averages over all processes; a quantity with count 0 is left out."""
    joined = add(*gather(accelerator, dict(totals)))
    return {name: value / count for name, (value, count) in sorted(joined.items()) if count}
