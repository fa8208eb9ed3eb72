"""Whether a policy and the simulated arm mean the same by their numbers: asked before any episode, and refused by name.

A policy that is given another camera, radians for degrees or half the control rate does not fail loudly: it fails at the task.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import mujoco
import numpy as np
from lerobot.configs import FeatureType, PreTrainedConfig
from lerobot.processor import NormalizerProcessorStep, RelativeActionsProcessorStep, UnnormalizerProcessorStep
from lerobot.utils.constants import ACTION, OBS_ENV_STATE, OBS_IMAGES, OBS_STATE
from numpy.typing import NDArray

from mmrl.errors import ConfigError, DataError
from robotics.checkpoints import ARM_METADATA, Pipeline
from robotics.envs.observation import environment_bounds
from robotics.envs.physics import JOINTS, ArmPhysics
from robotics.world import CONTROL_HZ

OFFERED: Mapping[str, tuple[int, ...] | None] = {
    OBS_STATE: (len(JOINTS),),
    OBS_ENV_STATE: (len(environment_bounds),),
    f"{OBS_IMAGES}.scene": None,
    f"{OBS_IMAGES}.wrist": None,
}
"""What the arm's worlds give, by LeRobot's names; images in any size."""
_OUTSIDE = 0.15  # of a joint's range: how far data may lie beyond its limits
_GRIPPER_STEPS = 30


def check_features(config: PreTrainedConfig, renames: Mapping[str, str]) -> dict[str, str]:
    """The policy's input names, each with the world's name of what it is given.

    ``renames`` maps the world's names to the policy's, both in full or without ``observation.images.``. Refused, with both
    lists: an input that the world does not give or gives in another shape, a policy without any input, and other commands than
    the arm's.
    """
    given = _renamed(renames)
    wanted = {
        name: feature
        for name, feature in (config.input_features or {}).items()
        if feature.type != FeatureType.LANGUAGE and ".empty_camera" not in name  # which the policy fills in itself
    }
    lists = (
        f"the policy reads {_listed({name: feature.shape for name, feature in wanted.items()})}; the environment gives "
        f"{_listed({name: OFFERED[ours] for name, ours in given.items()})}"
    )
    missing = [name for name in wanted if name not in given]
    if missing or not wanted:
        raise ConfigError(
            f"{lists}. {', '.join(missing) if missing else 'A policy without inputs'} cannot be served; name what is meant, "
            "for example --rename scene=image2 (the environment's name = the policy's)."
        )
    for name, feature in wanted.items():
        shape = OFFERED[given[name]]
        if shape is not None and tuple(feature.shape) != shape:
            raise ConfigError(f"{lists}. {name} differs in shape: {list(feature.shape)} and {list(shape)}.")
    action = config.action_feature
    if action is None or tuple(action.shape) != (len(JOINTS),):
        found = None if action is None else list(action.shape)
        raise ConfigError(f"the policy commands {ACTION} {found}; the arm takes {[len(JOINTS)]}: {', '.join(JOINTS)}.")
    return {name: given[name] for name in wanted}


def check_meaning(
    config: PreTrainedConfig,
    metadata: Mapping[str, Any],
    preprocessor: Pipeline,
    postprocessor: Pipeline,
    joint_limits: NDArray,
) -> list[str]:
    """Refuse another order of joints or other units; notices about what could not be told.

    Declared names and units (``mmrl_metadata.json``, or ``action_feature_names`` of LeRobot's configs) are compared with the
    arm's. The ranges in the policy's own statistics must be possible for degrees and a gripper of 0 to 100.
    """
    declared = {
        "state_names": metadata.get("state_names"),
        "action_names": metadata.get("action_names") or getattr(config, "action_feature_names", None),
    }
    for key, names in declared.items():
        if names and [str(name).removesuffix(".pos") for name in names] != list(JOINTS):
            raise ConfigError(
                f"the policy declares {key} {', '.join(map(str, names))}; the arm's order is {', '.join(JOINTS)}."
            )
    units, ours = metadata.get("units"), ARM_METADATA["units"]
    if units and units != ours:
        raise ConfigError(f"the policy declares units {units}; the arm's are {ours}. Convert them in the policy's processors.")
    notices = []
    relative = any(isinstance(step, RelativeActionsProcessorStep) for step in preprocessor.steps)
    for key, pipeline, kind in (
        (OBS_STATE, preprocessor, NormalizerProcessorStep),
        (ACTION, postprocessor, UnnormalizerProcessorStep),
    ):
        bounds = None if relative and key == ACTION else training_range(pipeline, kind, key)
        if bounds is not None:
            _check_possible(key, bounds, joint_limits)
        elif not units:
            notices.append(f"{key}: the policy has no statistics of it and declares no units, so they could not be compared.")
    return notices


def check_rate(config: PreTrainedConfig, metadata: Mapping[str, Any], *, resample: bool) -> float:
    """Commands per second that the policy was made for; refused when it is not the world's, unless it is to be resampled."""
    declared = float(metadata.get("control_hz") or getattr(config, "fps", None) or CONTROL_HZ)
    if declared != CONTROL_HZ and not resample:
        raise ConfigError(
            f"the policy was made for {declared:g} commands per second; the environment takes {CONTROL_HZ:g}. Ask for "
            "--resample to have its chunks interpolated."
        )
    return declared


def training_range(pipeline: Pipeline, kind: type, key: str) -> NDArray[np.float64] | None:
    """``[E, 2]`` lowest and highest value of a feature in the policy's training data, as its processors remember them.

    Without minimum and maximum: the outer quantiles, or two standard deviations about the mean. None without statistics.
    """
    for step in pipeline.steps:
        stats = step._tensor_stats.get(key) if isinstance(step, kind) else None
        if stats:
            found = {name: value.double().cpu().numpy() for name, value in stats.items()}
            for low, high in (("min", "max"), ("q01", "q99")):
                if low in found and high in found:
                    return np.stack([found[low], found[high]], axis=-1)
            if "mean" in found and "std" in found:
                return np.stack([found["mean"] - 2 * found["std"], found["mean"] + 2 * found["std"]], axis=-1)
    return None


def gripper_self_test(physics: ArmPhysics) -> dict[str, float]:
    """Open and close the gripper of simulation 0, then put everything back; what it reads and how far the fingers are apart.

    Raises `DataError` unless 100 opens and 0 closes.
    """
    before, row, found = physics.states(), np.array([0]), {}
    data = mujoco.MjData(physics.model)
    fingers = [physics.model.geom(name).id for name in ("fixed_jaw", "moving_jaw")]
    for name, position in (("open", 100.0), ("closed", 0.0)):
        target = physics.joint_positions()[:1]
        target[0, -1] = position
        for _ in range(_GRIPPER_STEPS):
            physics.advance(target, row)
        physics.copy_to(0, data)
        found[f"{name}_reading"] = float(physics.joint_positions()[0, -1])
        found[f"{name}_gap_m"] = float(mujoco.mj_geomDistance(physics.model, data, *fingers, 1.0, None))
    physics.restore(before)
    if not (found["open_reading"] > 90 and found["closed_reading"] < 10 and found["open_gap_m"] > found["closed_gap_m"] + 0.01):
        raise DataError(f"the gripper does not open at 100 and close at 0: {found}; the arm's model was changed.")
    return {name: round(value, 4) for name, value in found.items()}


def _renamed(renames: Mapping[str, str]) -> dict[str, str]:
    """World's names by the policy's."""
    full = {}
    for ours, theirs in renames.items():
        name = ours if ours in OFFERED else f"{OBS_IMAGES}.{ours}"
        if name not in OFFERED:
            raise ConfigError(f"--rename {ours}={theirs}: the environment gives no {ours}; it gives {_listed(OFFERED)}.")
        full[name] = theirs if theirs.startswith("observation.") else f"{OBS_IMAGES}.{theirs}"
    return {full.get(name, name): name for name in OFFERED}


def _check_possible(key: str, bounds: NDArray[np.float64], limits: NDArray[np.float64]) -> None:
    low, high = bounds.T
    listed = ", ".join(f"{name} {a:.3g} to {b:.3g}" for name, a, b in zip(JOINTS, low, high))
    if np.abs(bounds[:-1]).max() <= 2 * math.pi:
        raise ConfigError(f"{key} in the policy's statistics looks like radians ({listed}); the arm's joints are in degrees.")
    if np.abs(bounds[-1]).max() <= 1.05 and high[-1] - low[-1] > 0.5:
        raise ConfigError(
            f"{key} in the policy's statistics has a gripper of {low[-1]:.3g} to {high[-1]:.3g}; the arm's is 0 (closed) to "
            "100 (open)."
        )
    slack = _OUTSIDE * (limits[:, 1] - limits[:, 0])
    beyond = (low < limits[:, 0] - slack) | (high > limits[:, 1] + slack)
    if beyond.any():
        allowed = ", ".join(f"{name} {a:.0f} to {b:.0f}" for name, (a, b) in zip(JOINTS, limits))
        names = ", ".join(name for name, bad in zip(JOINTS, beyond) if bad)
        raise ConfigError(
            f"{key} in the policy's statistics does not fit the arm at {names} ({listed}); its limits are {allowed}. Another "
            "order of joints, or other units."
        )


def _listed(shapes: Mapping[str, tuple[int, ...] | None]) -> str:
    return ", ".join(f"{name} {'of any size' if shape is None else list(shape)}" for name, shape in shapes.items()) or "nothing"
