"""What ``mmrl list`` prints about algorithms, and the table of ``docs/algorithms.md``. Light: nothing here imports torch."""

from __future__ import annotations

from collections.abc import Iterator

from mmrl.algorithm_config import AlgorithmConfig
from mmrl.algorithms import PRESETS, SYMBOLS, Preset

EXTRA_COST = {
    "selection=dynamic": "up to max_refills further batches of rollouts",
    "selection=ada_positive": "up to max_refills further rounds of rollouts",
    "selection=ada_balanced": "up to max_refills further rounds of rollouts",
    "kl": "a forward pass of the reference policy",
    "entropy": "entropy in the update's forward pass",
}
"""What a slot costs besides arithmetic on ``[N, T]`` tensors."""


def algorithm_lines() -> Iterator[str]:
    """One line per recipe: name, what it is, paper, slots."""
    for name, preset in PRESETS.items():
        paper = f"  [{preset.paper}]" if preset.paper else ""
        yield f"{name:<22} {preset.summary}{paper}  {slots_text(preset)}"


def explain(name: str) -> Iterator[str]:
    """Everything about one recipe: equation, cost, and each parameter with its value here, its default and its meaning."""
    preset = PRESETS[name]
    yield f"{name}: {preset.summary}"
    yield f"paper: {preset.paper or '-'}"
    yield f"loss:  {preset.equation}"
    yield f"       {SYMBOLS}"
    yield f"cost:  {'; '.join(extra_costs(preset)) or 'nothing beyond plain GRPO'}"
    yield ""
    resolved, defaults = AlgorithmConfig(**preset.slots), AlgorithmConfig()
    for key, field in AlgorithmConfig.model_fields.items():
        if key != "name":
            value, default = getattr(resolved, key), getattr(defaults, key)
            note = f" (default {_short(default)})" if value != default else ""
            yield f"  {key:<20} {_short(value):<18} {' '.join(field.description.split())}{note}"


def extra_costs(preset: Preset) -> list[str]:
    """What a recipe needs beyond plain GRPO's rollouts and forward passes."""
    config = AlgorithmConfig(**preset.slots)
    used = [f"selection={config.selection}"]
    used += ["kl"] if config.kl_coef > 0 else []
    used += ["entropy"] if config.entropy_coef > 0 else []
    return [EXTRA_COST[key] for key in used if key in EXTRA_COST]


def slots_text(preset: Preset) -> str:
    """The slots of a preset as ``key=value`` pairs."""
    return " ".join(f"{key}={_short(value)}" for key, value in preset.slots.items())


def markdown_table() -> str:
    """The table of ``docs/algorithms.md``, one row per recipe."""
    rows = ["| name | what it is | paper | loss | slots | extra cost |", "|---|---|---|---|---|---|"]
    for name, preset in PRESETS.items():
        cells = [
            f"`{name}`", preset.summary, preset.paper or "-", f"`{preset.equation}`", f"`{slots_text(preset)}`",
            "; ".join(extra_costs(preset)) or "-",
        ]  # fmt: skip
        rows.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    return "\n".join(rows) + "\n"


def _short(value: object) -> str:
    """A value as a config file would have it, floats to six digits."""
    if isinstance(value, float):
        return f"{value:g}"
    if isinstance(value, tuple):
        return "[" + ", ".join(str(part["name"] if isinstance(part, dict) else part.name) for part in value) + "]"
    return "none" if value is None else str(value).lower() if isinstance(value, bool) else str(value)
