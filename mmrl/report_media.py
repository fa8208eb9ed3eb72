"""Samples of a report and the media inside the page."""

from __future__ import annotations

import base64
import mimetypes
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from mmrl.replay_view import decision_rows, passes_note
from mmrl.report_audio import sound_svg
from mmrl.report_data import Run, finite, short

MAX_SAMPLE_STEPS = 40
"""Sample steps whose text is in the page: the first, the newest, and evenly spaced ones between."""
MAX_MEDIA_STEPS = 6
"""Sample steps whose media are in the page: the first and the newest."""
MAX_MEDIA_BYTES = 32 * 2**20
"""Media bytes in the page, newest steps first."""
MAX_DECISIONS = 1_000
"""Decisions of a rollout in the page."""
MAX_TEXT = 20_000
"""Characters kept of a prompt, a completion or a reference."""


class Shelf:
    """Media that are inside the page: data URIs by path, as long as there is room. Only files of one folder are read."""

    def __init__(self, root: Path) -> None:
        self.embedded: dict[str, str] = {}
        self._root, self._room = root.resolve(), MAX_MEDIA_BYTES
        self._missing: set[str] = set()
        self._large: set[str] = set()

    def put(self, name: str) -> bool:
        """Embed the file ``name`` (relative to the folder) unless it is already; false where it is missing or too large.

        A WAV file brings its picture, as ``name.svg``.
        """
        path = (self._root / name).resolve()
        if name in self.embedded:
            return True
        if not path.is_relative_to(self._root) or not path.is_file():
            self._missing.add(name)
        elif path.stat().st_size > self._room:
            self._large.add(name)
        else:
            data = path.read_bytes()
            self.put_bytes(name, data)
            if path.suffix.lower() == ".wav" and (picture := sound_svg(data)) is not None:
                self.put_bytes(f"{name}.svg", picture.encode("utf-8"))
        return name in self.embedded

    def put_bytes(self, name: str, data: bytes) -> None:
        """Embed what is not a file, of the kind that ``name`` ends in."""
        self._room -= len(data)
        kind = mimetypes.guess_type(name)[0] or "application/octet-stream"
        self.embedded[name] = f"data:{kind};base64,{base64.b64encode(data).decode('ascii')}"

    def notes(self) -> list[str]:
        """What is left out, and why."""
        notes = []
        if self._large:
            count = "1 media file is" if len(self._large) == 1 else f"{len(self._large)} media files are"
            notes.append(f"{count} left out, since the page holds at most {MAX_MEDIA_BYTES >> 20} MiB of them.")
        if self._missing:
            count = "1 media file was" if len(self._missing) == 1 else f"{len(self._missing)} media files were"
            notes.append(f"{count} not found in the run directory, for example {min(self._missing)}.")
        return notes


def sample_steps(run: Run, shelf: Shelf) -> list[dict[str, Any]]:
    """Rollouts of the sampled steps as the page shows them; their media go onto ``shelf``, newest steps first."""
    steps = list(run.samples)
    if len(steps) > MAX_SAMPLE_STEPS:
        newest = MAX_SAMPLE_STEPS // 2
        spaced = np.linspace(0, len(steps) - newest - 1, MAX_SAMPLE_STEPS - newest).round().astype(int)
        kept = [steps[i] for i in spaced] + steps[-newest:]
        run.notes.append(f"Samples of {len(steps) - len(kept)} of {len(steps)} steps are left out; they are in samples/.")
        steps = kept
    rows = {step: _sample_rows(run.samples[step]) for step in steps}
    with_media = [step for step in steps if any(row["media"] for row in rows[step])]
    chosen = with_media if len(with_media) <= MAX_MEDIA_STEPS else [*with_media[-1:-MAX_MEDIA_STEPS:-1][::-1], with_media[0]]
    for step in sorted(chosen, reverse=True):
        for name in dict.fromkeys(item["path"] for row in rows[step] for item in row["media"]):
            shelf.put(name)
    if skipped := len(with_media) - len(chosen):
        run.notes.append(
            f"Media of {skipped} of {len(with_media)} sample steps are left out: the page holds those of the first and the "
            f"newest {MAX_MEDIA_STEPS - 1}. All are in samples/media/."
        )
    detailed = [step for step in steps if any("decisions" in row for row in rows[step])]
    for step in detailed[1 : 1 - MAX_MEDIA_STEPS]:
        rows[step] = _without_decisions(rows[step])
    if len(detailed) > MAX_MEDIA_STEPS:
        run.notes.append(
            f"Decisions of {len(detailed) - MAX_MEDIA_STEPS} of {len(detailed)} sample steps are left out; mmrl replay shows "
            "them."
        )
    return [{"step": step, "rows": rows[step]} for step in steps]


def _without_decisions(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{key: value for key, value in row.items() if key != "decisions"} for row in rows]


def _sample_rows(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Rows as the page shows them; what a judge said of a group stands once, with its first row."""
    shown, judged = [], set()
    for row in rows:
        shown.append(_sample_row(row))
        if row.get("group") not in judged and (judging := _judging(row.get("judging"))) is not None:
            judged.add(row.get("group"))
            shown[-1]["judging"] = judging
    return shown


def _judging(record: Any) -> dict[str, Any] | None:
    """Criteria of a group with weight and one bit per rollout, and the rollouts' scores; None where no judge was asked."""
    if not isinstance(record, Mapping) or not isinstance(record.get("rubrics"), list):
        return None
    rubrics = [
        {
            **{key: str(entry.get(key, ""))[:MAX_TEXT] for key in ("id", "title", "polarity")},
            "weight": short(finite(entry.get("weight"))),
            "bits": [bool(bit) for bit in entry.get("bits") or []],
        }
        for entry in record["rubrics"]
        if isinstance(entry, Mapping)
    ]
    scores = [short(finite(score)) for score in record.get("scores") or []]
    return {"rubrics": rubrics, "scores": scores, "mode": str(record.get("mode", ""))}


def _sample_row(row: Mapping[str, Any]) -> dict[str, Any]:
    def text(key: str) -> str:
        value = str(row.get(key) if row.get(key) is not None else "")
        over = len(value) - MAX_TEXT
        return value if over <= 0 else f"{value[:MAX_TEXT]}\n[{over} more characters are in samples/]"

    terms = row.get("reward_terms") if isinstance(row.get("reward_terms"), dict) else {}
    media = [item for item in row.get("media") or [] if isinstance(item, dict)]
    return {
        **{key: text(key) for key in ("task_id", "domain", "prompt", "completion", "reference", "stop_reason")},
        **{key: short(finite(row.get(key))) for key in ("group", "seed", "num_decisions", "reward", "advantage")},
        "terms": {str(name): short(finite(value)) for name, value in terms.items()},
        "media": [{key: str(item.get(key, "")) for key in ("kind", "path", "caption")} for item in media],
        **_decisions(row),
    }


def _decisions(row: Mapping[str, Any]) -> dict[str, Any]:
    """What was recorded of each decision, as the page's table takes it; nothing where nothing was."""
    try:
        names, rows = decision_rows(row)
    except (KeyError, TypeError, AttributeError):
        return {}  # written by another program, or half a line
    if not rows:
        return {}
    shown = [[short(value) if isinstance(value, float) else value for value in cells] for cells in rows[:MAX_DECISIONS]]
    over = len(rows) - len(shown)
    note = passes_note(row) + (f" {over} more decisions are in samples/." if over else "")
    return {"decisions": {"rollout": row.get("rollout"), "names": names, "rows": shown, "note": note}}
