"""Imports point one way: nouns, then tensor functions, then the core, then the modalities, then the command line."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
MODALITIES = {"vision", "audio", "robotics"}
NOUNS = {"mmrl.types", "mmrl.errors"}
LOWEST = {*NOUNS, "mmrl.adapter", "mmrl.advantages", "mmrl.losses"}
HEAVY = ("torch", "transformers", "mujoco", "lerobot")


def modules():
    """Source text of every module of ours by dotted name."""
    paths = [path for package in ("mmrl", *sorted(MODALITIES)) for path in sorted((ROOT / package).rglob("*.py"))]
    return {".".join(path.relative_to(ROOT).with_suffix("").parts): path.read_text(encoding="utf-8") for path in paths}


def imports(source, name):
    """Dotted names that ``source`` imports anywhere, inside functions too; what follows ``from x import`` counts as ``x.y``."""
    found = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            package = ".".join(name.split(".")[: -node.level]) if node.level else ""
            parent = ".".join(part for part in (package, node.module) if part)
            found |= {f"{parent}.{alias.name}" for alias in node.names}
    return found


def is_in(imported, allowed):
    """Whether a dotted name is one of ``allowed`` modules or something inside one."""
    return any(imported == module or imported.startswith(f"{module}.") for module in allowed)


def violations(name, source):
    """The imports of module ``name`` that point up or sideways."""
    own = name.split(".")[0]
    upward = (MODALITIES - {own}) | {"mmrl.cli"} if name not in ("mmrl.cli", "mmrl.__main__") else set()
    ours = {entry for entry in imports(source, name) if is_in(entry, {"mmrl", *MODALITIES})}
    return {entry for entry in ours if is_in(entry, upward) or (name in LOWEST and not is_in(entry, NOUNS))}


@pytest.mark.parametrize(("name", "source"), [pytest.param(name, source, id=name) for name, source in modules().items()])
def test_imports_point_down(name, source):
    assert violations(name, source) == set()


@pytest.mark.parametrize(
    ("name", "source", "expected"),
    [
        ("mmrl.losses", "import mmrl.config", {"mmrl.config"}),
        ("mmrl.types", "from mmrl import errors, config", {"mmrl.config"}),
        ("mmrl.adapter", "from mmrl.types import Task", set()),
        ("mmrl.advantages", "from .losses import log_ratio", {"mmrl.losses.log_ratio"}),
        ("mmrl.trainer", "def f():\n    import vision.adapter", {"vision.adapter"}),
        ("mmrl.trainer", "from mmrl.cli import main", {"mmrl.cli.main"}),
        ("mmrl.cli", "import vision, audio.adapter", set()),
        ("vision.tasks", "from robotics.envs import reach", {"robotics.envs.reach"}),
        ("vision.tasks", "from vision.adapter import x\nfrom mmrl.types import Task", set()),
        ("mmrl.trainer", "import visionary", set()),
        ("robotics.envs.reach", "from mmrl import cli", {"mmrl.cli"}),
        ("robotics.envs.__init__", "from .reach import Reach\nfrom ..tasks import REACH", set()),
    ],
)
def test_an_import_that_points_up_or_sideways_is_found(name, source, expected):
    assert violations(name, source) == expected


@pytest.mark.parametrize("name", ["mmrl", "mmrl.config", "mmrl.cli"])
def test_importing_the_command_line_and_configs_is_cheap(name):
    code = f"import sys, {name}; print([heavy for heavy in {HEAVY} if heavy in sys.modules])"
    result = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "[]"
