# ruff: noqa: E501 (tables of odd texts)
"""Configs: the shipped files with keys misspelt and values of another type, range or shape, as files and as overrides.

Either a `ConfigError` that fits on a line, or a config that holds every key that was given, no NaN, and that its own YAML gives
back.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory
from typing import Any

import yaml
from pydantic import BaseModel

from audio.config import AudioRunConfig
from fuzzing.mutations import misspell, mutate_text, mutate_tree, odd_text, odd_value
from mmrl.config import RunConfig, apply_overrides, read_config, to_yaml, validate
from mmrl.errors import ConfigError
from mmrl.strict_yaml import _require_plain
from robotics.config import RoboticsRunConfig
from vision.config import VisionRunConfig

ROOT = Path(__file__).resolve().parents[2]
MODELS: dict[str, type[RunConfig]] = {"vision": VisionRunConfig, "audio": AudioRunConfig, "robotics": RoboticsRunConfig}
MAX_MESSAGE = 20_000
ODD_YAML = (
    "&a [*a]", "&a {b: *a}", "[&a [1, 1], *a]", "!!binary aGk=", "!!set {a, b}", "2024-01-01", "!!python/none x", "? [a, b]\n: c", "{a: 1, a: 2}",
    "{<<: {a: 1}, b: 2}", "<<: 3", "1:30", "010", "0x1F", "1e-3", "1_000", ".nan", ".inf", "-.inf", "yes", "~", "'", '"\\ud800"', "- a\n- b", "--- a\n--- b",
    "[" * 400, "{a: " * 150 + "1" + "}" * 150, "|\n  text", "%TAG", "\t", "@x", "!x y", "*unknown", "9" * 5000, "1" + "0" * 400, "",
    "[&a [x,x,x,x,x,x,x,x,x,x], &b [*a,*a,*a,*a,*a,*a,*a,*a,*a,*a], &c [*b,*b,*b,*b,*b,*b,*b,*b,*b,*b], &d [*c,*c,*c,*c,*c,*c,*c,*c,*c,*c],"
    " &e [*d,*d,*d,*d,*d,*d,*d,*d,*d,*d], &f [*e,*e,*e,*e,*e,*e,*e,*e,*e,*e], &g [*f,*f,*f,*f,*f,*f,*f,*f,*f,*f], [*g,*g,*g,*g,*g,*g,*g,*g]]",
)  # fmt: skip
_FOLDER = TemporaryDirectory(prefix="mmrl-fuzz-")


@dataclass(frozen=True)
class Example:
    """A file's text (None: the shipped tree is used as it was read) and overrides."""

    name: str
    text: str | None
    tree: dict[str, Any] | None
    overrides: tuple[str, ...]

    def __repr__(self) -> str:
        given = repr(self.text) if self.text is not None else repr(self.tree) if self.tree is not None else ""
        return f"{self.name} overrides={[o[:200] for o in self.overrides]!r} {given[:600]}"


@cache
def shipped() -> dict[str, tuple[str, dict[str, Any]]]:
    """Text and merged tree of each shipped config."""
    return {
        str(path.relative_to(ROOT)): (path.read_text(encoding="utf-8"), read_config(path))
        for path in sorted((ROOT / "configs").rglob("*.yaml"))
    }


@cache
def known_keys(modality: str) -> tuple[str, ...]:
    """Dotted keys of all sections."""
    return tuple(_keys(MODELS[modality], 0))


def _keys(model: type[BaseModel], depth: int) -> list[str]:
    found = []
    for name, field in model.model_fields.items():
        found.append(name)
        inner = [m for m in _models(field.annotation) if depth < 3]
        found += [f"{name}.{key}" for m in inner for key in _keys(m, depth + 1)]
    return found


def _models(annotation: Any) -> list[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    return [model for part in getattr(annotation, "__args__", ()) for model in _models(part)]


def draw(random: Random) -> Example:
    name = random.choice(sorted(shipped()))
    text, tree = shipped()[name]
    kind = random.random()
    if kind < 0.02:  # parsing YAML takes longer than everything else
        lines = [line for line in text.splitlines() if line.strip() and not line.startswith("#")]
        start = random.randrange(len(lines))
        fragment = "\n".join(lines[start : start + random.randint(1, 8)])
        for _ in range(random.randint(1, 3)):
            fragment = mutate_text(random, fragment, (*ODD_YAML, "base: ", "base: [tones.yaml]\n", "\n", ": ", "  ", "- ", "#"))
        return Example(name, fragment, None, ())
    if kind < 0.5:
        changed = tree
        for _ in range(random.choice((1, 1, 2))):
            changed = mutate_tree(random, changed, misspell(random))
        return Example(name, None, changed if isinstance(changed, dict) else {"rewards": changed}, ())
    return Example(name, None, tree, tuple(_override(random, tree["modality"]) for _ in range(random.choice((1, 1, 2)))))


def _override(random: Random, modality: str) -> str:
    key = random.choice(
        (
            *known_keys(modality),
            "rewards.accuracy",
            "rewards.accuracy.weight",
            "rewards.accuracy.timeout_s",
            "policy.settings.x",
        )
    )
    if random.random() < 0.1:
        key = mutate_text(random, key, (".", "=", "_"))
    value = odd_value(random)
    kind = random.random()
    if kind < 0.3:
        text = random.choice(ODD_YAML)
    elif kind < 0.5:
        text = odd_text(random)
    elif kind < 0.8:
        text = random.choice(
            (
                "0",
                "1",
                "2",
                "0.5",
                "-1",
                "8",
                "true",
                "false",
                "null",
                "[a, b]",
                "{name: x}",
                "[0.9, 0.99]",
                "3.0",
                "grpo",
                "dapo",
                "0.9",
            )
        )
    else:
        text = repr(value) if not isinstance(value, str) else value
    return f"{key}={text}"


def check(example: Example) -> None:
    model = MODELS[example.name.split("/")[1]]
    try:
        tree = example.tree
        if tree is not None:
            tree = _as_read(tree)
        if example.text is not None:
            path = Path(_FOLDER.name) / "run.yaml"
            path.write_text(example.text, encoding="utf-8", errors="surrogatepass")
            tree = read_config(path)
        given = apply_overrides(tree, example.overrides)
        config = validate(given, model, "run.yaml")
    except ConfigError as error:
        message = " ".join(str(error).split())
        assert 0 < len(message) < MAX_MESSAGE, f"a message of {len(message)} characters"
        message.encode()  # half of a surrogate pair cannot be printed
        return
    dumped = config.model_dump(mode="python")
    _require_given(given, dumped, "")
    _require_finite(dumped, "")
    assert not set("\0\r\n") & set(config.name), f"a folder named {config.name!r}"
    for override in example.overrides:
        _require_override(override, tree, dumped)
    if example.text is not None or any(not o[-1:].isalnum() for o in example.overrides):
        again = validate(yaml.load(to_yaml(config), Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader)), model, "again")
        assert again == config, "its own YAML gives another config"


def _as_read(tree: dict[str, Any]) -> dict[str, Any]:
    """The checks that a tree would have passed had it been a file."""
    try:
        _require_plain(tree, "run.yaml", {})
    except RecursionError as error:
        raise ConfigError("run.yaml: is nested too deeply to be a config.") from error
    return tree


def _require_given(given: Any, found: Any, where: str) -> None:
    """Every key and value of ``given`` is in ``found``."""
    if where.startswith(".rewards.") and not isinstance(given, dict) and isinstance(found, dict):
        found = found["weight"]
    if where == ".algorithm" and not isinstance(given, dict):
        found = found["name"] if given is not None else None
    if isinstance(given, dict):
        assert isinstance(found, dict), f"{where} became {found!r:.80}"
        for key, value in given.items():
            assert key in found, f"{where}.{key} is silently ignored"
            _require_given(value, found[key], f"{where}.{key}")
    elif isinstance(given, (list, tuple)):
        assert isinstance(found, (list, tuple)) and len(found) == len(given), f"{where} became {found!r:.80}"
        for index, (left, right) in enumerate(zip(given, found)):
            _require_given(left, right, f"{where}.{index}")
    elif isinstance(given, bool) and not isinstance(found, bool):
        raise AssertionError(f"{where}: {given} became {found!r}")
    elif isinstance(given, (int, float)) and isinstance(found, (int, float)):
        assert float(given) == float(found), f"{where}: {given} became {found!r}"
    elif isinstance(given, str) and isinstance(found, (bool, int, float)):
        same = float(given) == found if not isinstance(found, bool) else given.lower() in ("true", "false")
        assert same, f"{where}: {given!r} became {found!r}"
    else:
        same = Path(given) == found if isinstance(found, Path) else given == found
        assert same, f"{where}: {given!r:.40} became {found!r:.40}"


def _require_override(override: str, before: dict[str, Any], found: dict[str, Any]) -> None:
    """A weight in the file survives an override of something else in its term."""
    parts = override.partition("=")[0].split(".")
    rewards = before.get("rewards")
    if len(parts) == 3 and parts[0] == "rewards" and parts[2] != "weight" and isinstance(rewards, dict):
        weight = rewards.get(parts[1])
        if isinstance(weight, (int, float)):
            assert found["rewards"][parts[1]]["weight"] == weight, f"{override}: the weight {weight} is lost"


def _require_finite(tree: Any, where: str) -> None:
    if isinstance(tree, dict):
        for key, value in tree.items():
            _require_finite(value, f"{where}.{key}")
    elif isinstance(tree, (list, tuple)):
        for index, value in enumerate(tree):
            _require_finite(value, f"{where}.{index}")
    assert not isinstance(tree, float) or math.isfinite(tree), f"{where} is {tree}"
