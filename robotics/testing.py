"""The contract of the arm's environments as code.

`check_env` runs any environment that says it is an `robotics.envs.gym_env.ArmEnv` through everything that rollouts, LeRobot's
evaluation and other people's trainers rely on. Imports neither torch nor LeRobot.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import gymnasium as gym
import mujoco
import numpy as np
from gymnasium.utils.env_checker import check_env as check_gymnasium_env
from numpy.typing import NDArray

from mmrl.errors import AdapterError
from robotics.envs.perturbations import Push

_SEED = 42
_NUM_STEPS = 6
_INFO = ("is_success", "success_once", "goal_holds", "left", "goal", "instruction")
_PUSH = Push(body="hand", force=(0.0, 4.0, 0.0), start=1, end=3)


def check_env(make: Callable[[], gym.Env]) -> None:
    """Raise `AdapterError` naming the first promise that the environments of ``make`` break."""
    for check in (
        _keeps_to_gymnasium, _declares_itself, _stays_in_its_spaces, _is_deterministic, _seeds_matter, _pushes_end,
        _tells_success, _ends_in_time, _survives_nonsense, _is_the_same_in_a_vector, _closes,
    ):  # fmt: skip
        check(make)


def _keeps_to_gymnasium(make: Callable[[], gym.Env]) -> None:
    env = make()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # it would rather see actions in [-1, 1] than in the robot's units
            check_gymnasium_env(env.unwrapped, skip_render_check=True)
    except Exception as error:
        raise AdapterError(f"environment contract: gymnasium's checker accepts it; it says: {error}") from error


def _declares_itself(make: Callable[[], gym.Env]) -> None:
    env = make()
    env.reset(seed=_SEED)
    inner = env.unwrapped
    _require(env.metadata.get("render_fps", 0) > 0, "metadata has render_fps")
    _require(getattr(inner, "_max_episode_steps", 0) > 0, "_max_episode_steps is the time limit")
    _require(bool(getattr(inner, "task", "")), "task names the family")
    _require(bool(getattr(inner, "task_description", "")), "task_description is the instruction after a reset")


def _stays_in_its_spaces(make: Callable[[], gym.Env]) -> None:
    env = make()
    observation, info = env.reset(seed=_SEED)
    once = False
    for action in _actions(env, num_steps=20):
        before = {name: np.copy(value) for name, value in _leaves(observation)}
        following, reward, terminated, truncated, info = env.step(action)
        _require(_same(before, dict(_leaves(observation))), "an observation does not change after it was given")
        for name, value in _leaves(following):
            _require(bool(np.isfinite(value).all()), f"observations are finite ({name})")
        _require(env.observation_space.contains(following), "observations are inside observation_space, dtype included")
        _require(isinstance(reward, float) and 0.0 <= reward <= 1.0, f"the reward is a float in [0, 1] (found {reward!r})")
        missing = [name for name in _INFO if name not in info]
        _require(not missing, f"info has {', '.join(missing)} on every step")
        _require(info["left"] >= 0.0, "the work left is never negative")
        _require(info["success_once"] >= once, "success_once stays true")
        once = info["success_once"]
        if terminated or truncated:
            break
        observation = following


def _is_deterministic(make: Callable[[], gym.Env]) -> None:
    env = make()
    first = _trace(env, _SEED)
    _require(_same(first, _trace(env, _SEED)), "reset, steps, reset, steps with one seed is equal in every bit")
    _require(_same(first, _trace(make(), _SEED)), "another environment gives the same for the same seed")


def _seeds_matter(make: Callable[[], gym.Env]) -> None:
    env = make()
    first, second = (dict(_leaves(env.reset(seed=seed)[0])) for seed in (_SEED, _SEED + 1))
    _require(not _same(first, second), "different seeds give different first observations")
    third, fourth = (dict(_leaves(env.reset()[0])) for _ in range(2))
    _require(not _same(third, fourth), "a reset without a seed goes on to another layout")


def _pushes_end(make: Callable[[], gym.Env]) -> None:
    env = make()
    clean = _trace(env, _SEED)
    pushed = _trace(env, _SEED, options={"pushes": [_PUSH]})
    _require(not _same(clean, pushed), "a push acts on its body")
    physics = env.unwrapped.physics
    data = mujoco.MjData(physics.model)
    physics.copy_to(0, data)
    _require(not data.xfrc_applied.any(), "a push is gone after its last step")
    env.reset(seed=_SEED, options={"pushes": [_PUSH]})
    for action in _actions(env, num_steps=_PUSH.start + 1):
        env.step(action)
    _require(_same(clean, _trace(env, _SEED)), "a push that was acting is gone after a reset")


def _tells_success(make: Callable[[], gym.Env]) -> None:
    """With a family whose goal holds when we say so."""
    env = make()
    hold = env.unwrapped.family.hold_steps
    first_true = [False, True] + [False] * 8
    env.unwrapped._max_episode_steps = 5
    *_, last = _judged(env, first_true)
    _, terminated, truncated, info = last
    _require(truncated and not terminated, "a goal that was reached and left again does not terminate")
    _require(info["success_once"] and not info["is_success"], "a goal that was left is success_once and not is_success")
    env.unwrapped._max_episode_steps = 5 + 2 * hold
    steps = _judged(env, [False, False] + [True] * (hold + 3))
    _require(len(steps) == 1 + hold, "the episode terminates once the goal has held for hold_steps")
    interrupted = _judged(env, [False] + [True] * (hold - 1) + [False] + [True] * (hold + 3))
    _require(len(interrupted) == 2 * hold, "a goal that was left has to hold for hold_steps again")
    _, terminated, truncated, info = steps[-1]
    _require(terminated and not truncated, "success is termination, not truncation")
    _require(info["is_success"] and info.get("stop_reason") == "success", "is_success is true at the end of a success")
    _require(not any(step[3]["is_success"] for step in steps[:-1]), "is_success is false while the episode runs")


def _ends_in_time(make: Callable[[], gym.Env]) -> None:
    env = make()
    env.unwrapped._max_episode_steps = 3
    steps = _judged(env, [False] * 9)
    _require(len(steps) == 3, "the episode is cut at _max_episode_steps")
    _, terminated, truncated, info = steps[-1]
    _require(truncated and not terminated, "the time limit truncates and does not terminate")
    _require(info.get("stop_reason") == "timeout", "stop_reason of the time limit is timeout")


def _survives_nonsense(make: Callable[[], gym.Env]) -> None:
    env = make()
    clean = _trace(env, _SEED)
    env.reset(seed=_SEED)
    bad = env.action_space.sample() * np.float32(np.nan)
    observation, reward, terminated, truncated, info = env.step(bad)
    _require(truncated and not terminated, "an action that is not finite truncates")
    _require(info.get("stop_reason") == "diverged" and not info["is_success"], "its stop_reason is diverged")
    finite = np.isfinite(reward) and all(np.isfinite(value).all() for _, value in _leaves(observation))
    _require(bool(finite), "what follows an action that is not finite is finite")
    _require(_same(clean, _trace(env, _SEED)), "the next episode knows nothing of an action that was not finite")


def _is_the_same_in_a_vector(make: Callable[[], gym.Env]) -> None:
    vector = gym.vector.SyncVectorEnv([make] * 3, autoreset_mode=gym.vector.AutoresetMode.SAME_STEP)
    seeds = [_SEED, _SEED + 1, _SEED + 2]
    observation, _ = vector.reset(seed=seeds)
    singles = [make() for _ in seeds]
    firsts = [env.reset(seed=seed)[0] for env, seed in zip(singles, seeds)]
    actions = [_actions(env, num_steps=_NUM_STEPS) for env in singles]
    what = "three environments in a vector give what they give alone"
    _require(all(_same(_row(observation, i), dict(_leaves(first))) for i, first in enumerate(firsts)), what)
    running = [True] * len(seeds)
    for step in range(_NUM_STEPS):
        observation, rewards, *ends, _ = vector.step(np.stack([rows[step] for rows in actions]))
        for i, env in enumerate(singles):
            if not running[i]:
                continue
            alone, reward, terminated, truncated, _ = env.step(actions[i][step])
            equal = rewards[i] == reward and (bool(ends[0][i]), bool(ends[1][i])) == (terminated, truncated)
            running[i] = not (terminated or truncated)
            _require(equal and (not running[i] or _same(_row(observation, i), dict(_leaves(alone)))), what)
    vector.close()


def _closes(make: Callable[[], gym.Env]) -> None:
    env = make()
    env.reset(seed=_SEED)
    try:
        env.close()
        env.close()
    except Exception as error:
        raise AdapterError(f"environment contract: close may be called twice; it raised: {error!r}") from error


class _Judge:
    """A family whose goal holds in the control steps that are listed; index 0 is the start."""

    def __init__(self, family: Any, holds: Sequence[bool]) -> None:
        self._family, self._holds = family, iter(holds)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._family, name)

    def assess(self, physics: Any, rows: NDArray[np.int64], goals: Sequence[str]) -> tuple[NDArray, NDArray[np.bool_]]:
        left, _ = self._family.assess(physics, rows, goals)
        return left, np.full(len(rows), next(self._holds))


def _judged(env: gym.Env, holds: Sequence[bool]) -> list[tuple[float, bool, bool, dict[str, Any]]]:
    """Steps of an episode that holds still and is judged by ``holds``, to its end."""
    inner = env.unwrapped
    family = inner.family
    inner.family = _Judge(family, holds)
    try:
        observation, _ = env.reset(seed=_SEED)
        steps = []
        for _ in range(len(holds) - 1):
            steps.append(env.step(np.clip(observation["agent_pos"], env.action_space.low, env.action_space.high))[1:])
            if steps[-1][1] or steps[-1][2]:
                break
        return steps
    finally:
        inner.family = family


def _actions(env: gym.Env, num_steps: int) -> list[NDArray[np.float32]]:
    """Random actions that do not depend on the environment's own generators."""
    space = gym.spaces.Box(env.action_space.low, env.action_space.high, dtype=env.action_space.dtype, seed=_SEED)
    return [space.sample() for _ in range(num_steps)]


def _trace(env: gym.Env, seed: int, options: Mapping[str, Any] | None = None) -> dict[str, NDArray]:
    """All that can be seen of some steps, and the physics' state after each."""
    observation, info = env.reset(seed=seed, options=dict(options) if options else None)
    seen = {f"0.{name}": value for name, value in _leaves(observation)}
    seen |= {"0.left": np.array(info["left"]), "0.state": env.unwrapped.physics.states()}
    for step, action in enumerate(_actions(env, num_steps=_NUM_STEPS), start=1):
        observation, reward, terminated, truncated, info = env.step(action)
        seen |= {f"{step}.{name}": value for name, value in _leaves(observation)}
        seen[f"{step}.end"] = np.array([reward, terminated, truncated, info["left"], info["goal_holds"]])
        seen[f"{step}.state"] = env.unwrapped.physics.states()
        if terminated or truncated:
            break
    return seen


def _leaves(observation: Any, prefix: str = "") -> list[tuple[str, NDArray]]:
    if not isinstance(observation, Mapping):
        return [(prefix, np.asarray(observation))]
    return [leaf for name, value in observation.items() for leaf in _leaves(value, f"{prefix}.{name}".lstrip("."))]


def _row(observation: Any, row: int) -> dict[str, NDArray]:
    return {name: value[row] for name, value in _leaves(observation)}


def _same(one: Mapping[str, NDArray], other: Mapping[str, NDArray]) -> bool:
    return one.keys() == other.keys() and all(np.array_equal(value, other[name]) for name, value in one.items())


def _require(kept: bool, promise: str) -> None:
    if not kept:
        raise AdapterError(f"environment contract: {promise}.")
