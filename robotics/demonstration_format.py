"""How demonstrations are laid down in a LeRobotDataset: columns, names, units, and what is known of each episode. No torch.

Numbers of a joint array are in the robot's units (`robotics.envs.physics`). What LeRobot's own files have no place for is in
``meta/mmrl.json``; LeRobot's tools leave it alone, and a dataset without it is read as what LeRobot's files say.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from lerobot.utils.constants import ACTION, OBS_ENV_STATE, OBS_IMAGES, OBS_STATE, REWARD, SUCCESS

from mmrl.errors import DataError
from robotics.envs.physics import BLOCKS, JOINTS, SLOTS

COMMAND = "command"
"""What the robot was sent; differs from `ACTION` where noise was added on the way. Not an action to learn, hence the name."""
MISTAKE = "mistake"
"""Frames in which the demonstrator erred on purpose."""
JOINT_NAMES = tuple(f"{name}.pos" for name in JOINTS)
"""As LeRobot's SO-101 follower names them."""
ENVIRONMENT_NAMES = (
    *(f"{point}.{axis}" for point in ("hand", *SLOTS) for axis in "xyz"),
    *(f"{color}.{part}_4_yaw" for color in BLOCKS for part in ("cos", "sin")),
)
UNITS = {"arm joints": "degrees", "gripper": "0 closed to 100 open", "positions": "metres"}
CONTROL_MODE = "joint_position"
SCHEMA = 1
"""Of ``meta/mmrl.json``."""
META_FILE = Path("meta/mmrl.json")


@dataclass(frozen=True, kw_only=True)
class EpisodeInfo:
    """What is known of one episode besides its frames."""

    index: int
    """``episode_index`` in the dataset."""
    family: str
    goal: str
    seed: int
    """Of the layout."""
    instruction: str
    length: int
    """Control steps."""
    success: bool
    """The goal held when the episode ended."""
    quality: int | None = None
    """1 (among the slowest and roughest fifth of its family) to 5; of a failure 1; None where nobody graded."""
    mistake: bool = False
    """The demonstrator erred for a while and recovered."""
    control_mode: str = CONTROL_MODE


@dataclass(frozen=True, kw_only=True)
class Provenance:
    """Where a dataset comes from: ``meta/mmrl.json``."""

    mujoco: str
    """Version of MuJoCo."""
    control_hz: float
    joints: tuple[str, ...]
    units: Mapping[str, str]
    noise: float
    """Standard deviation of the noise between `ACTION` and `COMMAND`, as a share of half of each arm joint's range."""
    mistakes: float
    """Share of episodes with a mistake that was asked for."""
    episodes: tuple[EpisodeInfo, ...]


def features(cameras: Mapping[str, tuple[int, int]], *, video: bool = False) -> dict[str, dict[str, Any]]:
    """LeRobot's description of the columns; ``cameras`` gives height and width."""
    joints = {"dtype": "float32", "shape": (len(JOINT_NAMES),), "names": list(JOINT_NAMES)}
    surroundings = {"dtype": "float32", "shape": (len(ENVIRONMENT_NAMES),), "names": list(ENVIRONMENT_NAMES)}
    images = {
        f"{OBS_IMAGES}.{name}": {
            "dtype": "video" if video else "image",
            "shape": (*size, 3),
            "names": ["height", "width", "channels"],
        }
        for name, size in cameras.items()
    }
    return {
        OBS_STATE: dict(joints),
        OBS_ENV_STATE: surroundings,
        **images,
        ACTION: dict(joints),
        COMMAND: dict(joints),
        REWARD: {"dtype": "float32", "shape": (1,), "names": None},
        SUCCESS: {"dtype": "bool", "shape": (1,), "names": None},
        MISTAKE: {"dtype": "bool", "shape": (1,), "names": None},
    }


def write_provenance(root: Path, provenance: Provenance) -> None:
    """Write ``meta/mmrl.json``."""
    content = {"schema": SCHEMA, **asdict(provenance)}
    (root / META_FILE).write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


def read_provenance(root: Path) -> Provenance | None:
    """``meta/mmrl.json`` of a dataset; None when it has none."""
    path = root / META_FILE
    if not path.is_file():
        return None
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        if content.pop("schema") != SCHEMA:
            raise DataError(f"{path} is of another schema than {SCHEMA}; write the demonstrations again with mmrl demos.")
        episodes = tuple(EpisodeInfo(**episode) for episode in content.pop("episodes"))
        return Provenance(**{**content, "joints": tuple(content["joints"])}, episodes=episodes)
    except (json.JSONDecodeError, KeyError, TypeError) as error:
        raise DataError(f"{path} cannot be read: {error}; write the demonstrations again with mmrl demos.") from error
