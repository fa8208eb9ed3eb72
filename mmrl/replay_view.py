"""One recorded rollout as text and as an HTML page: what was shown, what was decided, and what each decision was credited with.

Reads the samples of a run directory and nothing else. See `mmrl.replay` for what is recorded.
"""

from __future__ import annotations

import base64
import json
import mimetypes
from collections.abc import Mapping
from html import escape
from pathlib import Path
from typing import Any

from rich.console import Group
from rich.table import Table
from rich.text import Text

from mmrl.checkpoint import step_name
from mmrl.errors import DataError

COLUMNS = ("old", "new", "ratio", "clip", "mask", "advantage")
"""Always shown; ``id``, ``sampler``, ``reference`` and ``mismatch`` where they were recorded."""


def read_rollout(run_dir: Path, train_step: int, rollout: int) -> dict[str, Any]:
    """The sample of one rollout. Raises `DataError` naming the steps, or the number of rollouts, that there are."""
    folder = run_dir / "samples"
    path = folder / f"{step_name(train_step)}.jsonl"
    if not path.is_file():
        known = [str(int(found.stem.removeprefix("step_"))) for found in sorted(folder.glob("step_*.jsonl"))]
        listed = ", ".join(known[-12:]) if known else "none"
        raise DataError(
            f"{run_dir}: no rollouts of step {train_step} were written; steps with samples: {listed}. metrics.samples_every "
            "says which are."
        )
    rows = []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
        try:
            rows.append(json.loads(line))
        except ValueError as error:
            raise DataError(f"{path}:{number}: not JSON ({error}); the file was cut off or edited.") from error
    found = next((row for index, row in enumerate(rows) if row.get("rollout", index) == rollout), None)
    if found is None:
        raise DataError(
            f"{path}: no rollout {rollout}; it holds rollouts 0 to {len(rows) - 1}. metrics.samples_per_step says how many are "
            "written."
        )
    return {"rollout": rollout, **found}


def decision_rows(record: Mapping[str, Any], which_pass: int = -1) -> tuple[list[str], list[list[Any]]]:
    """Column names and one row per decision; ``which_pass`` of the update (from 0, -1 is the last)."""
    decisions = record.get("decisions")
    if not isinstance(decisions, Mapping):
        return [], []
    passes = decisions.get("passes") or []
    if passes and not -len(passes) <= which_pass < len(passes):
        raise DataError(f"pass {which_pass}: the update computed this rollout in {len(passes)} passes, 0 to {len(passes) - 1}.")
    seen = passes[which_pass] if passes else {}
    optional = [name for name in ("id", "sampler", "reference", "mismatch") if name in decisions]
    names = [*COLUMNS, *optional]
    columns = {name: decisions.get(name) or seen.get(name) or [] for name in names}
    labels = decisions["label"]
    rows = [
        [place, label, *(columns[name][place] if place < len(columns[name]) else None for name in names)]
        for place, label in enumerate(labels)
    ]
    return ["decision", "written", *names], rows


def facts(record: Mapping[str, Any]) -> list[tuple[str, str]]:
    """What is known of the rollout as a whole."""
    weights = record.get("weights") or {}
    terms = {
        f"reward {name}": f"{cell(value)} x {cell(weights[name])}" if name in weights else cell(value)
        for name, value in (record.get("reward_terms") or {}).items()
    }
    known = [(name, record.get(name)) for name in ("task_id", "domain", "group", "seed", "stop_reason", "num_decisions")]
    return [
        *((name.replace("_", " "), str(value)) for name, value in known if value is not None),
        ("reward", cell(record.get("reward"))),
        *terms.items(),
        ("advantage", cell(record.get("advantage"))),
    ]


def passes_note(record: Mapping[str, Any], which_pass: int = -1) -> str:
    """A sentence about the numbers of the update."""
    decisions = record.get("decisions")
    if not isinstance(decisions, Mapping):
        return "No decisions were recorded with this sample; set metrics.replay: true to have them."
    count = len(decisions.get("passes") or [])
    if count == 0:
        return "The update did not compute this rollout: it had no credit, and no other loss."
    shown = which_pass % count + 1
    return f"new, ratio and clip are those of pass {shown} of {count} over this rollout in this step's update."


def as_text(record: Mapping[str, Any], which_pass: int = -1) -> Group:
    """What a terminal shows."""
    about = Table.grid(padding=(0, 2))
    for name, value in facts(record):
        about.add_row(Text(name, style="dim"), Text(value))
    media = [
        Text(f"<{item.get('kind')}> {item.get('path')} {item.get('caption', '')}".rstrip()) for item in record.get("media", [])
    ]
    parts: list[Any] = [about, Text("prompt", style="bold"), Text(str(record.get("prompt", ""))), *media]
    if record.get("reference"):
        parts += [Text("reference", style="bold"), Text(str(record["reference"]))]
    parts += [Text("completion", style="bold"), Text(str(record.get("completion", "")))]
    names, rows = decision_rows(record, which_pass)
    if rows:
        table = Table()
        for name in names:
            table.add_column(name, justify="left" if name in ("written", "clip") else "right")
        for row in rows:
            shown = [Text(repr(value) if name == "written" else cell(value)) for name, value in zip(names, row)]
            table.add_row(*shown, style="dim" if row[names.index("mask")] == 0 else None)
        parts.append(table)
    return Group(*parts, Text(passes_note(record, which_pass)))


def as_html(record: Mapping[str, Any], run_dir: Path, which_pass: int = -1) -> str:
    """One self-contained page: media inside, one row per decision."""
    title = f"step {record.get('train_step')}, rollout {record['rollout']}"
    about = "".join(f"<dt>{escape(name)}</dt><dd>{escape(value)}</dd>" for name, value in facts(record))
    media = "".join(_medium(item, run_dir) for item in record.get("media", []))
    names, rows = decision_rows(record, which_pass)
    head = "".join(f"<th>{escape(name)}</th>" for name in names)
    body = "".join(_row(names, row) for row in rows)
    words = "".join(
        f"<h2>{name}</h2><pre>{escape(str(record.get(name, '')))}</pre>"
        for name in ("prompt", "reference", "completion")
        if record.get(name)
    )
    table = f'<div class="wide"><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>' if rows else ""
    return (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{escape(title)}</title>'
        f"<style>{_STYLE}</style></head><body><h1>{escape(title)}</h1><dl>{about}</dl>"
        f"<div class=media>{media}</div>{words}<h2>decisions</h2>"
        f"<p>{escape(passes_note(record, which_pass))}</p>{table}</body></html>\n"
    )


def cell(value: Any) -> str:
    """A number as it was recorded, to six significant digits; a dash for what is not known."""
    if value is None:
        return "\u2013"
    return f"{value:.6g}" if isinstance(value, float) else str(value)


def _row(names: list[str], row: list[Any]) -> str:
    values = dict(zip(names, row))
    kind = "out" if values["mask"] == 0 else "clip" if values["clip"] else ""
    cells = "".join(
        f"<td><code>{escape(repr(value))}</code></td>" if name == "written" else f"<td>{escape(cell(value))}</td>"
        for name, value in values.items()
    )
    return f'<tr class="{kind}">{cells}</tr>'


def _medium(item: Mapping[str, Any], run_dir: Path) -> str:
    """A figure with the medium inside; a line where its file is missing or outside of the run directory."""
    name, root = str(item.get("path", "")), run_dir.resolve()
    path = (root / name).resolve()
    caption = escape(str(item.get("caption", "")))
    if not path.is_relative_to(root) or not path.is_file():
        return f"<figure>{escape(str(item.get('kind')))} not found: {escape(name)}</figure>"
    kind = mimetypes.guess_type(name)[0] or "application/octet-stream"
    source = f"data:{kind};base64,{base64.b64encode(path.read_bytes()).decode('ascii')}"
    tag = {
        "image": f'<img src="{source}" alt="">',
        "audio": f'<audio controls src="{source}"></audio>',
        "video": f'<video controls src="{source}"></video>',
    }.get(str(item.get("kind")), "")
    return f"<figure>{tag}<figcaption>{caption}</figcaption></figure>"


_STYLE = """
:root { color-scheme: light dark; font: 15px/1.5 system-ui, sans-serif; }
body { max-width: 72rem; margin: 2rem auto; padding: 0 1rem; }
h1 { font-size: 1.3rem; } h2 { font-size: 1rem; margin-top: 1.5rem; }
dl { display: grid; grid-template-columns: max-content 1fr; gap: 0 1.5rem; } dt { opacity: .65; } dd { margin: 0; }
pre { white-space: pre-wrap; border: 1px solid #8884; border-radius: 6px; padding: .75rem; }
.wide { overflow-x: auto; } table { border-collapse: collapse; font-variant-numeric: tabular-nums; }
td, th { padding: .15rem .7rem; text-align: right; border-bottom: 1px solid #8883; } td:nth-child(2) { text-align: left; }
.out { opacity: .45; } .clip td { background: #e8a33d33; }
.media { display: flex; flex-wrap: wrap; gap: 1rem; } figure { margin: 0; }
img { min-width: 112px; max-width: 100%; image-rendering: pixelated; } video { max-width: 100%; }
"""
