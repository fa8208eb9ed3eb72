"""Success over one or two parameters as a picture: SVG text that stands alone and follows the reader's light or dark theme."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from typing import Any

from mmrl.errors import DataError
from mmrl.statistics import wilson_interval

_CELL_WIDTH, _CELL_HEIGHT = 96, 58
_STYLE = """\
svg { --text: #1d2125; --muted: #5c636b; --rule: #d3d3ce; --accent: #22609c; --over: #ffffff; }
@media (prefers-color-scheme: dark) {
  svg { --text: #e3e6e8; --muted: #a3abb3; --rule: #3a4249; --accent: #7db4ea; --over: #101417; }
}
text { fill: var(--text); font: 12px system-ui, -apple-system, "Segoe UI", Roboto, "Liberation Sans", Arial, sans-serif; }
.middle { text-anchor: middle; } .end { text-anchor: end; }
.name { font-weight: 600; } .share { font-size: 16px; font-weight: 650; } .fine { font-size: 11px; }
.muted { fill: var(--muted); } .fill { fill: var(--accent); } .over { fill: var(--over); }
.empty { fill: none; stroke: var(--rule); stroke-dasharray: 3 3; } .rule { stroke: var(--rule); }
.band { fill: var(--accent); fill-opacity: 0.18; } .line { fill: none; stroke: var(--accent); stroke-width: 2; }"""


@dataclass(frozen=True, kw_only=True)
class _Cell:
    k: int
    n: int
    low: float
    high: float

    @property
    def share(self) -> float:
        return self.k / self.n

    @property
    def interval(self) -> str:
        return f"[{100 * self.low:.0f}, {100 * self.high:.0f}]"


def heat_map_svg(sweep: Mapping[str, Any]) -> str:
    """Cells of success with their counts and 95% intervals, or for a single parameter a curve with its band.

    ``sweep`` is ``{"axes": {name: [values]}, "cells": [{name: value, ..., "k": successes, "n": episodes, "low": , "high": }]}``
    with one or two axes: the first runs to the right, the second upwards. ``low`` and ``high`` default to Wilson's interval; a
    cell that is missing is drawn empty. Values are equally spaced, whatever they are. Raises `DataError` for anything else.
    """
    axes, cells = _axes(sweep), sweep.get("cells")
    if not isinstance(cells, Sequence) or isinstance(cells, str):
        raise DataError(f"sweep: cells is {type(cells).__name__}; expected a list.")
    found: dict[tuple[Any, ...], _Cell] = {}
    for cell in cells:
        place = tuple(cell.get(name) for name in axes)
        if any(value not in axes[name] for name, value in zip(axes, place)):
            raise DataError(f"sweep: a cell lies at {dict(zip(axes, place))}, which is not on the axes.")
        found[place] = _cell(cell, dict(zip(axes, place)))
    draw = _curve if len(axes) == 1 else _map
    width, height, parts = draw(axes, found)
    size = f'width="{width}" height="{height}" viewBox="0 0 {width} {height}"'
    title = escape(f"success over {' and '.join(axes)}")
    return "\n".join([
        f'<svg xmlns="http://www.w3.org/2000/svg" {size} role="img">', f"<title>{title}</title>",
        f"<style>\n{_STYLE}\n</style>", *parts, "</svg>\n",
    ])  # fmt: skip


def _axes(sweep: Mapping[str, Any]) -> dict[str, list[Any]]:
    axes = sweep.get("axes")
    good = isinstance(axes, Mapping) and 1 <= len(axes) <= 2
    if not good or not all(isinstance(values, Sequence) and len(values) for values in axes.values()):
        found = list(axes) if isinstance(axes, Mapping) else type(axes).__name__
        raise DataError(f"sweep: axes is {found}; expected one or two names, each with its list of values.")
    return {str(name): list(values) for name, values in axes.items()}


def _cell(cell: Mapping[str, Any], place: Mapping[str, Any]) -> _Cell:
    k, n = cell.get("k"), cell.get("n")
    if not (isinstance(k, int) and isinstance(n, int) and 0 <= k <= n and n > 0):
        raise DataError(f"sweep: the cell at {dict(place)} has k = {k!r} and n = {n!r}; expected 0 <= k <= n with n > 0.")
    low, high = cell.get("low"), cell.get("high")
    if low is None or high is None:
        low, high = wilson_interval(k, n)
    return _Cell(k=k, n=n, low=float(low), high=float(high))


def _map(axes: Mapping[str, list[Any]], cells: Mapping[tuple[Any, ...], _Cell]) -> tuple[int, int, list[str]]:
    (x_name, columns), (y_name, rows) = axes.items()
    left = 34 + 7 * max(len(_say(value)) for value in rows)
    top, right = 8, left + _CELL_WIDTH * len(columns)
    bottom = top + _CELL_HEIGHT * len(rows)
    parts = list(_axis_names(x_name, y_name, left, right, top, bottom))
    for i, value in enumerate(columns):
        parts.append(_text(left + (i + 0.5) * _CELL_WIDTH, bottom + 17, _say(value), "middle muted"))
    for j, row in enumerate(reversed(rows)):
        y = top + j * _CELL_HEIGHT
        parts.append(_text(left - 7, y + _CELL_HEIGHT / 2 + 4, _say(row), "end muted"))
        for i, column in enumerate(columns):
            parts += _map_cell(left + i * _CELL_WIDTH, y, cells.get((column, row)))
    return right + 8, bottom + 42, parts


def _map_cell(x: float, y: float, cell: _Cell | None) -> Iterator[str]:
    box = f'x="{x + 1}" y="{y + 1}" width="{_CELL_WIDTH - 2}" height="{_CELL_HEIGHT - 2}" rx="3"'
    middle = x + _CELL_WIDTH / 2
    if cell is None:
        yield f'<rect class="empty" {box}/>'
        yield _text(middle, y + _CELL_HEIGHT / 2 + 4, "not run", "middle fine muted")
        return
    strength = 0.06 + 0.94 * cell.share
    over = " over" if strength > 0.6 else ""
    yield f'<rect class="fill" fill-opacity="{strength:.2f}" {box}/>'
    yield _text(middle, y + 25, f"{100 * cell.share:.0f}%", f"middle share{over}")
    yield _text(middle, y + 44, f"{cell.k}/{cell.n} {cell.interval}", f"middle fine{over}")


def _curve(axes: Mapping[str, list[Any]], cells: Mapping[tuple[Any, ...], _Cell]) -> tuple[int, int, list[str]]:
    ((name, values),) = axes.items()
    left, top, bottom = 62, 26, 206
    right = left + _CELL_WIDTH * len(values)
    parts = list(_axis_names(name, "success", left, right, top, bottom))
    for share in (0.0, 0.25, 0.5, 0.75, 1.0):
        y = bottom - share * (bottom - top)
        parts.append(f'<line class="rule" x1="{left}" x2="{right}" y1="{y:g}" y2="{y:g}"/>')
        parts.append(_text(left - 7, y + 4, f"{100 * share:.0f}%", "end muted"))
    points = []
    for i, value in enumerate(values):
        x, cell = left + (i + 0.5) * _CELL_WIDTH, cells.get((value,))
        parts.append(_text(x, bottom + 17, _say(value), "middle muted"))
        if cell is None:
            parts.append(_text(x, bottom + 32, "not run", "middle fine muted"))
            continue
        parts.append(_text(x, bottom + 32, f"{cell.k}/{cell.n} {cell.interval}", "middle fine muted"))
        points.append((x, *(bottom - part * (bottom - top) for part in (cell.share, cell.low, cell.high))))
    if points:
        edge = [f"{x:g} {high:.1f}" for x, _, _, high in points] + [f"{x:g} {low:.1f}" for x, _, low, _ in reversed(points)]
        parts.append(f'<path class="band" d="M{"L".join(edge)}Z"/>')
        parts.append(f'<path class="line" d="M{"L".join(f"{x:g} {y:.1f}" for x, y, *_ in points)}"/>')
    for x, y, low, high in points:
        parts.append(f'<line class="line" x1="{x:g}" x2="{x:g}" y1="{low:.1f}" y2="{high:.1f}"/>')
        parts.append(f'<circle class="fill" cx="{x:g}" cy="{y:.1f}" r="4"/>')
    return right + 8, bottom + 58, parts


def _axis_names(x_name: str, y_name: str, left: float, right: float, top: float, bottom: float) -> Iterator[str]:
    below = bottom + (36 if y_name != "success" else 51)
    yield _text((left + right) / 2, below, x_name, "middle name")
    middle = (top + bottom) / 2
    yield f'<text class="middle name" transform="translate(13 {middle:g}) rotate(-90)">{escape(y_name)}</text>'


def _text(x: float, y: float, text: str, kind: str) -> str:
    return f'<text class="{kind}" x="{x:g}" y="{y:g}">{escape(text)}</text>'


def _say(value: Any) -> str:
    return f"{value:g}" if isinstance(value, int | float) and not isinstance(value, bool) else str(value)
