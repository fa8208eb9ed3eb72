"""The environments that LeRobot knows, as single environments that give what its policies are given.

Their packages are optional. Meta-World 3.0 fails on MuJoCo newer than 3.16, and LIBERO (hf-libero 0.1.4) asks for one before
3.9, so neither runs beside the MuJoCo of this project.
"""

from __future__ import annotations

from typing import Any

import gymnasium as gym
import mujoco
import numpy as np
from lerobot.envs import EnvConfig, preprocess_observation
from lerobot.utils.constants import OBS_ENV_STATE, OBS_IMAGE, OBS_STATE

import robotics.lerobot_plugin.env_config  # noqa: F401  (registers the type mmrl)
from mmrl.errors import DataError, MissingExtra

_NEWEST_MUJOCO = {"metaworld": (3, 16), "libero": (3, 8)}


class LeRobotRow(gym.ObservationWrapper):
    """Observations as LeRobot's processors make them: ``agent_pos``, ``environment_state`` and ``pixels`` by camera."""

    def __init__(self, env: gym.Env, preprocessor: Any) -> None:
        super().__init__(env)
        self._preprocessor = preprocessor

    def observation(self, observation: dict[str, Any]) -> dict[str, Any]:
        batch = self._preprocessor(preprocess_observation(_batched(observation)))
        named: dict[str, Any] = {}
        for name, lerobot in (("agent_pos", OBS_STATE), ("environment_state", OBS_ENV_STATE)):
            if lerobot in batch:
                named[name] = batch[lerobot][0].numpy()
        images = {name: value for name, value in batch.items() if name.startswith(OBS_IMAGE)}
        if images:
            named["pixels"] = {
                name.rpartition(".")[2]: (value[0] * 255.0).round().byte().permute(1, 2, 0).numpy()
                for name, value in images.items()
            }
        return named


def wrap_lerobot_env(config: EnvConfig, num_rows: int = 1) -> list[gym.Env]:
    """``num_rows`` environments of the one task that ``config`` describes.

    Raises `DataError` when it describes several, and `MissingExtra` where its package is not installed or cannot run on the
    MuJoCo that is.
    """
    _refuse_newer_mujoco(config.type)
    try:
        vectors = [vector for group in config.create_envs(num_rows).values() for vector in group.values()]
    except ImportError as error:
        raise MissingExtra(
            f"lerobot:{config.type} needs a package that is not installed ({error}); install it with "
            f"pip install 'lerobot[{config.type}]==0.6.1'."
        ) from error
    if len(vectors) != 1:
        raise DataError(f"lerobot:{config.type}/{config.task} is {len(vectors)} tasks; name one of them.")
    preprocessor, _ = config.get_env_processors()
    return [LeRobotRow(env, preprocessor) for env in vectors[0].envs]


def make_lerobot_rows(which: str, num_rows: int) -> list[gym.Env]:
    """The environments of ``TYPE/TASK``, with LeRobot's defaults otherwise."""
    kind, _, task = which.partition("/")
    known = EnvConfig.get_known_choices()
    if kind not in known:
        raise DataError(
            f"lerobot:{which}: LeRobot has no environment type {kind!r}; expected one of: {', '.join(sorted(known))}."
        )
    return wrap_lerobot_env(known[kind](**({"task": task} if task else {})), num_rows)


def _refuse_newer_mujoco(kind: str) -> None:
    newest = _NEWEST_MUJOCO.get(kind)
    if newest and tuple(int(part) for part in mujoco.__version__.split(".")[:2]) > newest:
        raise MissingExtra(
            f"lerobot:{kind} needs pip install 'lerobot[{kind}]==0.6.1' and MuJoCo {newest[0]}.{newest[1]} or older, but "
            f"{mujoco.__version__} is installed; evaluate on it with lerobot-eval in an environment of its own."
        )


def _batched(observation: Any) -> Any:
    if isinstance(observation, dict):
        return {name: _batched(value) for name, value in observation.items()}
    return np.asarray(observation)[None]
