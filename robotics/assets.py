"""Where the MJCF files are. No heavy imports."""

from __future__ import annotations

from pathlib import Path

from mmrl.errors import DataError

_ROOT = Path(__file__).resolve().parent.parent / "sim_assets"


def sim_asset(relative: str) -> Path:
    """Path of a file under ``sim_assets/``, for example ``sim_asset("reach/scene.xml")``."""
    path = _ROOT / relative
    if not path.is_file():
        raise DataError(
            f"{path}: no such simulation asset. They live in the checkout beside the robotics package; install the project "
            "from its checkout (pip install -e .)."
        )
    return path
