"""What is asked of a dataset before a policy learns from it. Every refusal names what was found and what was expected.

The checks are of meaning: order and units of joints, control rate, cameras, and whether the world that made the dataset is the
world that is here. Whether the files are whole is checked where they are read (`robotics.demonstration_files`).
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from contextlib import closing
from typing import Any

import mujoco
import numpy as np
from lerobot.utils.constants import ACTION, OBS_ENV_STATE, OBS_IMAGES, OBS_STATE
from numpy.typing import NDArray

from mmrl.errors import DataError, MissingExtra
from robotics.assets import sim_asset
from robotics.demonstration_files import RecordedFiles
from robotics.demonstration_format import COMMAND, ENVIRONMENT_NAMES, EpisodeInfo, Provenance
from robotics.envs.families import FAMILIES, build_family
from robotics.envs.physics import JOINTS, SLOTS, ArmPhysics
from robotics.tasks import RobotTask
from robotics.world import CONTROL_HZ, ArmWorld

_log = logging.getLogger(__name__)
_POSITIONS = 3 * (1 + len(SLOTS))  # entries of the scene's state before the yaws
_REPLAYED = 20  # control steps that are replayed to see whether the world is the same
_SAME = (0.1, 1e-3)  # robot units and metres: larger differences are another world, smaller ones another processor
_LOOKS_SAME = 16.0  # of 255, mean difference of two pictures of a scene; drivers and video codecs stay far below
_RADIANS = 3.3  # an arm joint in degrees passes this in every task
_SLACK = 0.2  # share of a joint's range by which it may be beyond its limits


def check_rate(files: RecordedFiles) -> None:
    """Frames are a control period apart, and say so."""
    fps = files.info["fps"]
    if fps != CONTROL_HZ:
        raise DataError(f"{files.root} has fps {fps}; policies here act at {CONTROL_HZ:.0f} Hz, and nothing is resampled.")
    period = 1.0 / fps
    for episode, (start, length) in enumerate(zip(files.starts, files.lengths)):
        times = files.columns["timestamp"][start : start + length].astype(np.float64)
        gaps = np.diff(times)
        if length > 1 and abs(np.median(gaps) - period) > 0.02 * period:
            raise DataError(
                f"{files.root}, episode {episode}: frames are {np.median(gaps):.3f} s apart ({1 / np.median(gaps):.0f} Hz), "
                f"but fps is {fps}; the recording loop did not run at the rate that was declared."
            )
        wrong = np.flatnonzero(np.abs(gaps - period) > 0.25 * period)
        if len(wrong):
            raise DataError(
                f"{files.root}, episode {episode}: frame {wrong[0] + 1} comes {gaps[wrong[0]]:.3f} s after the frame before; "
                f"expected {period:.3f} s."
            )


def check_joints(files: RecordedFiles) -> None:
    """State and action are the arm's joints in order, finite and in its units."""
    limits = ArmPhysics(sim_asset("reach/scene.xml")).joint_limits
    for column in (OBS_STATE, ACTION):
        if column not in files.columns:
            raise DataError(f"{files.root} has no {column}; it has: {', '.join(files.columns)}.")
        names = tuple(name.removesuffix(".pos") for name in _names(files.info["features"][column]))
        if names != JOINTS:
            kind = "the arm's joints in another order" if sorted(names) == sorted(JOINTS) else "joints"
            raise DataError(
                f"{files.root}: {column} holds {kind}: {', '.join(names) or '(no names)'}; expected {', '.join(JOINTS)}."
            )
        _check_units(files, column, limits)


def _check_units(files: RecordedFiles, column: str, limits: NDArray[np.float64]) -> None:
    values = files.columns[column]
    _check_finite(files, column)
    arm, gripper = values[:, :-1], values[:, -1]
    if np.abs(arm).max() <= _RADIANS:
        raise DataError(
            f"{files.root}: the arm joints of {column} stay within {arm.min():.2f} to {arm.max():.2f}, which looks like "
            "radians; expected degrees."
        )
    if np.abs(gripper).max() <= 1.0 and np.ptp(gripper) > 0.2:
        raise DataError(
            f"{files.root}: the gripper of {column} moves between {gripper.min():.2f} and {gripper.max():.2f}; expected 0 "
            "(closed) to 100 (open)."
        )
    beyond = np.maximum(limits[:, 0] - values, values - limits[:, 1]) > _SLACK * np.ptp(limits, axis=1)
    if beyond.any():
        frame, joint = np.argwhere(beyond)[0]
        raise DataError(
            f"{_where(files, frame)}: {JOINTS[joint]} of {column} is {values[frame, joint]:.2f}, beyond the joint's "
            f"{limits[joint, 0]:.0f} to {limits[joint, 1]:.0f}; expected degrees, and 0 to 100 for the gripper."
        )


def check_surroundings(files: RecordedFiles) -> None:
    """The scene's state, which a policy of this run reads, is there and means what it means here."""
    names = _names(files.info["features"].get(OBS_ENV_STATE, {}))
    if names != ENVIRONMENT_NAMES:
        found = f"has: {', '.join(names)}" if names else "lacks it"
        raise DataError(
            f"{files.root}: the policy reads {OBS_ENV_STATE} ({len(ENVIRONMENT_NAMES)} numbers, {ENVIRONMENT_NAMES[0]} to "
            f"{ENVIRONMENT_NAMES[-1]}); the dataset {found}."
        )
    _check_finite(files, OBS_ENV_STATE)


def check_cameras(files: RecordedFiles, cameras: Mapping[str, tuple[int, int]]) -> None:
    """Every camera that the policy looks at is there, in its size, as rows of RGB pixels."""
    prefix = f"{OBS_IMAGES}."
    there = {name.removeprefix(prefix): f for name, f in files.info["features"].items() if name.startswith(prefix)}
    missing = [name for name in cameras if name not in there]
    if missing:
        raise DataError(
            f"{files.root} lacks the camera {', '.join(missing)}: the policy looks at {', '.join(cameras)}, the dataset has "
            f"{', '.join(there) or 'no cameras'}."
        )
    for name, size in cameras.items():
        shape, axes = tuple(there[name]["shape"]), _names(there[name])
        last = axes[-1:] in (("channels",), ("channel",))
        declared, channels = (shape[:2], shape[2]) if last else (shape[1:], shape[0])
        if channels != 3:
            raise DataError(
                f"{files.root}: {prefix}{name} is declared {'x'.join(map(str, shape))} with axes {', '.join(axes)}, which "
                f"gives {channels} channels; expected 3."
            )
        image = files.images(prefix + name).read([0])[0]
        if image.shape[:2] != declared:
            raise DataError(
                f"{files.root}: {prefix}{name} is declared {_size(declared)} but its pictures are {_size(image.shape[:2])} "
                "(height x width)."
            )
        if declared != tuple(size):
            raise DataError(
                f"{files.root}: {prefix}{name} is {_size(declared)}; the policy looks at {_size(size)} (height x width). Set "
                "policy.image_size, or record again with that --image-size."
            )


def check_world(files: RecordedFiles, provenance: Provenance, cameras: Mapping[str, tuple[int, int]]) -> None:
    """The first episode of each family, replayed here, goes and looks as it was recorded.

    The settled state of a layout, the arm's response, the meaning of every recorded number and the order of colours and rows
    in its pictures are checked at once.
    """
    if COMMAND not in files.columns:
        raise DataError(f"{files.root} has no {COMMAND}, so meta/mmrl.json is not its own; record again, or remove that file.")
    firsts: dict[str, EpisodeInfo] = {}
    for episode in provenance.episodes:
        firsts.setdefault(episode.family, episode)
    remedy = "record again, or set demonstrations.allow_other_world=true"
    for family, episode in firsts.items():
        if family not in FAMILIES or episode.goal not in build_family(family).goals:
            raise DataError(f"{files.root} demonstrates {family} ({episode.goal}), which is not known here; {remedy}.")
        difference = _first_difference(files, episode, cameras)
        if difference:
            raise DataError(
                f"{files.root}, episode {episode.index} ({family}), replayed here, {difference}. Made with MuJoCo "
                f"{provenance.mujoco}, this is {mujoco.__version__}; {remedy}."
            )


def _first_difference(files: RecordedFiles, episode: EpisodeInfo, cameras: Mapping[str, tuple[int, int]]) -> str:
    """What differs first when an episode is replayed; nothing when it goes as recorded."""
    task = RobotTask(
        id=f"episode {episode.index}", family=episode.family, goal=episode.goal, instruction="", seed=episode.seed
    )  # fmt: skip
    start, row = files.starts[episode.index], np.array([0])
    with closing(ArmWorld([task])) as world:
        for step in range(min(_REPLAYED, episode.length)):
            frame = start + step
            if difference := _other_numbers(files, frame, world.observe(row)):
                return f"has {difference} (control step {step})"
            if step == 0 and (difference := _other_pictures(files, frame, world, cameras)):
                return difference
            world.advance(files.columns[COMMAND][frame : frame + 1].astype(np.float64), row)
    return ""


def _other_numbers(files: RecordedFiles, frame: int, here: Mapping[str, NDArray]) -> str:
    """The first entry of the recorded state that is not as it is ``here`` (``[1, ...]`` each)."""
    pairs = [(JOINTS, here["agent_pos"], OBS_STATE, _SAME[0])]
    if OBS_ENV_STATE in files.columns:
        pairs.append((ENVIRONMENT_NAMES[:_POSITIONS], here["environment_state"], OBS_ENV_STATE, _SAME[1]))
    for names, now, column, most in pairs:
        then = files.columns[column][frame]
        for entry, name in enumerate(names):
            if abs(now[0, entry] - then[entry]) > most:
                return f"{name} at {now[0, entry]:.3f} where {then[entry]:.3f} was recorded"
    return ""


def _other_pictures(files: RecordedFiles, frame: int, world: ArmWorld, cameras: Mapping[str, tuple[int, int]]) -> str:
    """What differs between recorded pictures and those of ``world``; nothing where they agree, or nothing can be drawn."""
    try:
        drawn = world.draw(np.array([0]), cameras)
    except MissingExtra as error:
        _log.info("pictures of %s are not compared with the scene: %s", files.root, error)
        return ""
    for name, image in drawn.items():
        here = image[0].astype(np.float64)
        then = files.images(f"{OBS_IMAGES}.{name}").read([frame])[0]
        changes = {"": then, "red and blue exchanged": then[..., ::-1], "its rows upside down": then[::-1]}
        apart = {change: float(np.abs(here - picture).mean()) for change, picture in changes.items()}
        likeliest = min(apart, key=apart.__getitem__)
        if likeliest and apart[likeliest] < 0.5 * apart[""]:
            return f"looks the same to {name} only with {likeliest}"
        if apart[""] > _LOOKS_SAME:
            return f"looks different to {name} (by {apart['']:.0f} of 255 on average)"
    return ""


def constant_entries(files: RecordedFiles, frames: NDArray[np.bool_]) -> list[str]:
    """Joints that never move in the chosen frames: statistics taken from them have a range of zero."""
    constant = []
    for column in (OBS_STATE, ACTION):
        values = files.columns[column][frames]
        constant += [f"{column} {JOINTS[joint]}" for joint in np.flatnonzero(np.ptp(values, axis=0) == 0)]
    return constant


def _check_finite(files: RecordedFiles, column: str) -> None:
    wrong = np.argwhere(~np.isfinite(files.columns[column]))
    if len(wrong):
        raise DataError(f"{_where(files, wrong[0][0])}: {column} is not finite.")


def _names(feature: Mapping[str, Any]) -> tuple[str, ...]:
    """LeRobot keeps names as a list or as lists by kind of motor."""
    names = feature.get("names") or ()
    parts: Sequence[Any] = [name for group in names.values() for name in group] if isinstance(names, Mapping) else names
    return tuple(str(name) for name in parts)


def _where(files: RecordedFiles, frame: int) -> str:
    episode = int(np.searchsorted(files.starts, frame, side="right")) - 1
    return f"{files.root}, episode {episode}, frame {frame - files.starts[episode]}"


def _size(size: Sequence[int]) -> str:
    return f"{size[0]}x{size[1]}"
