"""Worlds made of other people's environments, by id: ``gym:Hopper-v5``, ``gym:some_package:Env-v1``, ``lerobot:TYPE/TASK``.

A `robotics.tasks.RobotTask` whose family is such an id is an episode of that environment from ``reset(seed=task.seed)``.
`GymWorld` runs any number of them side by side for `robotics.rollouts.run_episodes`. Axes: ``S`` rows of the world, ``n`` rows
of one call, ``A`` numbers of an action, ``D`` numbers of an observation.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

import gymnasium as gym
import mujoco
import numpy as np
from numpy.typing import NDArray

from mmrl.errors import DataError, MissingExtra
from robotics.envs.physics import ArmPhysics, warnings_to_log
from robotics.tasks import RobotTask
from robotics.world import ArmWorld, Assessment, World

_STATE = int(mujoco.mjtState.mjSTATE_INTEGRATION)
_DIVERGED = [
    int(kind) for kind in (mujoco.mjtWarning.mjWARN_BADQPOS, mujoco.mjtWarning.mjWARN_BADQVEL, mujoco.mjtWarning.mjWARN_BADQACC)
]
_NO_LIMIT = 1000
"""Control steps of an episode whose environment names no limit."""
_ROBOT_KEYS = ("agent_pos", "environment_state", "pixels")


class GymWorld:
    """Rows that are environments of their own; see `robotics.world.World`.

    Commands are in [-1, 1] (beyond that they are clipped) and scaled to the bounds of the action space; a direction without
    bounds is taken as [-1, 1]. Observations that have LeRobot's keys (``agent_pos``, ``environment_state``, ``pixels``) keep
    them; all others are flattened to ``agent_pos`` ``[n, D]``. Success is what ``info`` says (``is_success``, else
    ``success``), and without either there is none. The limits of `gymnasium.make` are taken off: the episode loop has its own.
    """

    def __init__(self, tasks: Sequence[RobotTask], *, group_size: int = 1) -> None:
        """One row per task and member of its group, group-major; all of one environment.

        Raises `DataError` for an environment that does not exist or cannot be commanded by numbers, and `MissingExtra` where
        its package is not installed.
        """
        names = sorted({task.family for task in tasks})
        if len(names) != 1:
            raise DataError(f"one world holds one environment; the tasks need {', '.join(names) or 'none'}.")
        rows = [task for task in tasks for _ in range(group_size)]
        self.name, self.num_rows = names[0], len(rows)
        self.envs = _make_rows(self.name, self.num_rows)
        space = self.envs[0].action_space
        if not isinstance(space, gym.spaces.Box):
            raise DataError(f"{self.name}: its actions are {space}; expected a Box of numbers.")
        self._space = space
        self._low = np.where(np.isfinite(space.low), space.low, -1.0).ravel().astype(np.float64)
        self._high = np.where(np.isfinite(space.high), space.high, 1.0).ravel().astype(np.float64)
        self.command_size = self._low.size
        self._last: list[Mapping[str, NDArray]] = []
        self._success, self._ended = np.zeros(self.num_rows, bool), np.zeros(self.num_rows, bool)
        self._reward = np.zeros(self.num_rows)
        for row, task in enumerate(rows):
            observation, info = self.envs[row].reset(seed=task.seed)
            self._last.append(self._named(observation))
            self._success[row] = _success_of(info)
        self.instructions = [_task_description(env) or task.instruction for env, task in zip(self.envs, rows)]

    def observe(self, rows: NDArray[np.int64]) -> Mapping[str, NDArray]:
        """See `World.observe`; numbers are float32."""
        return {name: np.stack([self._last[row][name] for row in rows]) for name in self._last[0]}

    def advance(self, commands: NDArray[np.float64], rows: NDArray[np.int64]) -> NDArray[np.bool_]:
        """See `World.advance`; a command that is not finite is refused, and a MuJoCo simulation that diverged is put back."""
        sound = np.isfinite(commands).all(axis=1)
        for place in np.flatnonzero(sound):
            sound[place] = self._step(int(rows[place]), commands[place])
        return sound

    def assess(self, rows: NDArray[np.int64]) -> Assessment:
        """See `World.assess`; no measure of work left."""
        return Assessment(
            left=np.full(len(rows), np.nan), success=self._success[rows], reward=self._reward[rows], ended=self._ended[rows]
        )

    def states(self) -> NDArray[np.float64]:
        """``[S, num_state]``, ``mjSTATE_INTEGRATION`` of MuJoCo environments; ``[S, 0]`` of others."""
        return np.stack([_state_of(env) for env in self.envs])

    def close(self) -> None:
        """Close every environment."""
        for env in self.envs:
            env.close()

    def _step(self, row: int, command: NDArray[np.float64]) -> bool:
        """Whether the row is sound after one action; otherwise it is as it was."""
        env = self.envs[row]
        share = (np.clip(command, -1.0, 1.0) + 1.0) / 2.0
        action = (self._low + share * (self._high - self._low)).astype(self._space.dtype).reshape(self._space.shape)
        before = _state_of(env)
        data = _simulation(env)[1]
        if data is not None:
            _clear_warnings(data)
        with warnings_to_log():
            observation, reward, terminated, truncated, info = env.step(action)
        named = self._named(observation)
        finite = math.isfinite(reward) and all(np.isfinite(value).all() for value in named.values())
        if not finite or (data is not None and any(data.warning[kind].number for kind in _DIVERGED)):
            _put_back(env, before)
            return False
        self._last[row] = named
        self._reward[row], self._success[row] = reward, _success_of(info)
        self._ended[row] = terminated or truncated
        return True

    def _named(self, observation: Any) -> dict[str, NDArray]:
        space = self.envs[0].observation_space
        if not isinstance(observation, Mapping) or not any(key in observation for key in _ROBOT_KEYS):
            return {"agent_pos": np.array(gym.spaces.flatten(space, observation), np.float32)}
        named = {key: np.array(observation[key], np.float32) for key in _ROBOT_KEYS[:2] if key in observation}
        pixels = observation.get("pixels", {})
        pixels = pixels if isinstance(pixels, Mapping) else {"image": pixels}
        return named | {f"pixels.{camera}": np.array(image) for camera, image in pixels.items()}


class WrappedFamily:
    """The tasks of one environment as a `robotics.envs.families.TaskFamily`: one goal, which is the environment's own."""

    goals = ("default",)
    tolerance = math.nan
    hold_steps = 1

    def __init__(self, name: str) -> None:
        """``name`` is the environment's id, its kind included."""
        self.name = self.scene = name
        self.max_env_steps, self._words = _describe(name)

    def draw_goal(self, seed: int) -> str:
        return self.goals[0]

    def instruction(self, goal: str, seed: int, *, held_out: bool = False) -> str:
        if goal not in self.goals:
            raise DataError(f"{self.name}: goal {goal!r} is not known; expected {self.goals[0]!r}.")
        return self._words

    def arrange(self, physics: ArmPhysics, row: int, seed: int, goal: str) -> None:
        raise DataError(f"{self.name} has a simulation of its own, not the arm's; run it in a GymWorld (build_world).")

    def assess(self, physics: ArmPhysics, rows: NDArray[np.int64], goals: Sequence[str]) -> Any:
        raise DataError(f"{self.name} has a simulation of its own, not the arm's; run it in a GymWorld (build_world).")


def build_wrapped_family(name: str) -> WrappedFamily:
    """The family of an id with a colon; raises `DataError` or `MissingExtra` like `GymWorld`."""
    return WrappedFamily(name)


def build_world(
    tasks: Sequence[RobotTask],
    *,
    group_size: int = 1,
    num_threads: int = 1,
    cameras: Mapping[str, tuple[int, int]] | None = None,
) -> World:
    """The world that ``tasks`` need: a `GymWorld` for wrapped environments, an `ArmWorld` for the arm's families."""
    if any(":" in task.family for task in tasks):
        return GymWorld(tasks, group_size=group_size)
    return ArmWorld(tasks, group_size=group_size, num_threads=num_threads, cameras=cameras)


def _make_rows(name: str, num_rows: int) -> list[gym.Env]:
    kind, _, which = name.partition(":")
    if kind == "gym":
        return [_make_gym(which) for _ in range(num_rows)]
    if kind == "lerobot":
        from robotics.lerobot_plugin.their_envs import make_lerobot_rows

        return make_lerobot_rows(which, num_rows)
    raise DataError(f"{name!r} names no environment; expected gym:ID or lerobot:TYPE/TASK.")


def _make_gym(name: str) -> gym.Env:
    try:
        with warnings_to_log():
            return gym.make(name, max_episode_steps=-1, disable_env_checker=True)
    except (gym.error.DependencyNotInstalled, ImportError) as error:
        raise MissingExtra(f"gym:{name} needs a package that is not installed: {error}") from error
    except gym.error.UnregisteredEnv as error:
        raise DataError(f"gym:{name}: {error}") from error


@cache
def _describe(name: str) -> tuple[int, str]:
    """Time limit in control steps, and what the environment says that its task is."""
    kind, _, which = name.partition(":")
    (env,) = _make_rows(name, 1)
    try:
        if kind == "gym":
            return gym.spec(which).max_episode_steps or _NO_LIMIT, which
        env.reset(seed=0)
        return int(getattr(env.unwrapped, "_max_episode_steps", _NO_LIMIT)), _task_description(env) or which
    finally:
        env.close()


def _task_description(env: gym.Env) -> str:
    return str(getattr(env.unwrapped, "task_description", ""))


def _success_of(info: Mapping[str, Any]) -> bool:
    return bool(info.get("is_success", info.get("success", False)))


def _simulation(env: gym.Env) -> tuple[mujoco.MjModel | None, mujoco.MjData | None]:
    model, data = (getattr(env.unwrapped, name, None) for name in ("model", "data"))
    if isinstance(model, mujoco.MjModel) and isinstance(data, mujoco.MjData):
        return model, data
    return None, None


def _state_of(env: gym.Env) -> NDArray[np.float64]:
    model, data = _simulation(env)
    if model is None:
        return np.empty(0)
    state = np.empty(mujoco.mj_stateSize(model, _STATE))
    mujoco.mj_getState(model, data, state, _STATE)
    return state


def _put_back(env: gym.Env, state: NDArray[np.float64]) -> None:
    model, data = _simulation(env)
    if model is not None:
        mujoco.mj_setState(model, data, state, _STATE)
        mujoco.mj_forward(model, data)


def _clear_warnings(data: mujoco.MjData) -> None:
    for warning in data.warning:  # MuJoCo starts a diverged simulation anew, so only counts from zero can be read
        warning.number = 0
