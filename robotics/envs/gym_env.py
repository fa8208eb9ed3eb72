"""The task families as gymnasium environments. This module imports neither torch nor LeRobot, so workers start fast."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import gymnasium as gym
import numpy as np
from numpy.typing import NDArray

from mmrl.errors import DataError
from robotics.assets import sim_asset
from robotics.envs.families import build_family
from robotics.envs.observation import environment_bounds, observe
from robotics.envs.perturbations import Push
from robotics.envs.physics import ArmPhysics
from robotics.envs.rendering import SceneRenderer

CAMERAS = ("scene", "wrist")
PERTURBATIONS = ("mass_scale", "friction_scale", "damping_scale", "servo_scale")
"""Multipliers over the model as it is in its file; see `robotics.envs.perturbations.scale_parameters`."""
_OPTIONS = ("goal", "instruction", "perturbation", "pushes")
_LEROBOT_OPTION = "lerobot_new_rollout"  # LeRobot's mark of a new episode
_ROW = np.array([0])


class ArmEnv(gym.Env):
    """One simulation of one family; its episodes are those of `robotics.rollouts.run_episodes`, control step by control step.

    Actions are joint positions to move to, ``[A]`` in robot units (degrees; gripper 0 to 100), held for one control period;
    they are clipped to the joint limits. Observations are ``agent_pos`` ``[A]`` in the same units, ``environment_state``
    ``[E]`` (`robotics.envs.observation`) and, with ``cameras``, ``pixels`` by camera, ``[image_size, image_size, 3]`` uint8.
    The reward of a step is the share of the work at the start that is done, in [0, 1]. The episode terminates once the goal
    has held for the family's ``hold_steps``, and is truncated at ``max_episode_steps`` or when the simulation or the action
    is not finite.

    ``info`` has ``left`` (metres of work left), ``goal_holds`` (in this state), ``success_once`` (it held after some step),
    ``is_success`` (the episode has ended, and the goal holds), ``goal`` and ``instruction``; at the end also ``stop_reason``:
    ``success``, ``timeout`` or ``diverged``.

    ``reset(seed=s)`` decides layout, goal and instruction. For one episode ``options`` may give other ones, ``goal`` and
    ``instruction``, and more: ``perturbation``, some of `PERTURBATIONS` such as ``{"friction_scale": 0.5}``, and ``pushes``,
    a sequence of `robotics.envs.perturbations.Push`.
    """

    metadata: ClassVar[dict[str, Any]] = {"render_modes": ["rgb_array"], "render_fps": 20}

    def __init__(
        self,
        family: str = "reach",
        *,
        goal: str | None = None,
        held_out_words: bool = False,
        first_seed: int = 0,
        perturbation: Mapping[str, float] | None = None,
        pushes: Sequence[Push] = (),
        max_episode_steps: int | None = None,
        cameras: Sequence[str] = (),
        image_size: int = 64,
        render_mode: str | None = None,
        camera: str = "scene",
        width: int = 224,
        height: int = 224,
    ) -> None:
        """Raises `DataError` for a family, goal, camera or perturbation that does not exist.

        ``goal`` is asked for in every episode, instead of one that the seed draws; ``held_out_words`` asks in phrasings that
        training never uses; ``reset(seed=s)`` has the layout ``first_seed + s``; ``perturbation`` and ``pushes`` are part of
        every episode. ``camera``, ``width`` and ``height`` (pixels) are those of `render`, whatever is observed.
        """
        self.family = build_family(family)
        unknown = sorted({camera, *cameras} - set(CAMERAS))
        if unknown:
            raise DataError(f"the arm's scenes have no camera {', '.join(unknown)}; expected some of: {', '.join(CAMERAS)}.")
        if goal is not None and goal not in self.family.goals:
            raise DataError(f"{family}: goal {goal!r} is not known; expected one of: {', '.join(self.family.goals)}.")
        self.physics = ArmPhysics(sim_asset(self.family.scene), control_hz=self.metadata["render_fps"])
        self.pinned_goal, self.held_out_words, self.first_seed = goal, held_out_words, first_seed
        self.perturbation, self.pushes = dict(perturbation or {}), tuple(pushes)
        self._perturbed = False
        self.cameras, self.render_mode, self.camera = tuple(cameras), render_mode, camera
        self._max_episode_steps = max_episode_steps or self.family.max_env_steps
        self._renderer, self._image_size = SceneRenderer(self.physics, width=width, height=height), image_size
        low, high = self.physics.joint_limits.astype(np.float32).T
        span = high - low
        self.action_space = gym.spaces.Box(low, high, dtype=np.float32)
        spaces: dict[str, gym.Space] = {
            "agent_pos": gym.spaces.Box(low - span, high + span, dtype=np.float32),  # joints can overshoot their limits
            "environment_state": gym.spaces.Box(-2.0, 2.0, (len(environment_bounds),), np.float32),  # the arm is 0.4 m long
        }
        if self.cameras:
            image = gym.spaces.Box(0, 255, (image_size, image_size, 3), np.uint8)
            spaces["pixels"] = gym.spaces.Dict(dict.fromkeys(self.cameras, image))
        self.observation_space = gym.spaces.Dict(spaces)
        self.task = self.family.name
        self.task_description = ""

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[dict[str, Any], dict[str, Any]]:
        super().reset(seed=seed)
        options = {name: value for name, value in (options or {}).items() if name != _LEROBOT_OPTION}
        _check_names("reset: options", options, _OPTIONS)
        layout = self.first_seed + (seed if seed is not None else int(self.np_random.integers(2**31)))
        self.goal = options.get("goal") or self.pinned_goal or self.family.draw_goal(layout)
        words = self.family.instruction(self.goal, layout, held_out=self.held_out_words)
        self.task_description = options.get("instruction") or words
        self._perturb({**self.perturbation, **options.get("perturbation", {})})
        self._pushes = (*self.pushes, *options.get("pushes", ()))
        self.family.arrange(self.physics, 0, layout, self.goal)
        self.physics.restore(self.physics.states())  # as a group of rollouts starts: from a saved state
        self._steps = self._held = 0
        self._once = False
        left, holds = self._assess()
        self._start = max(left, 1e-9)
        return self._observation(), self._info(left, holds)

    def step(self, action: NDArray[np.float32]) -> tuple[dict[str, Any], float, bool, bool, dict[str, Any]]:
        if self._pushes:
            self.physics.apply_pushes(0, self._pushes, self._steps)
        sound = bool(self.physics.advance(np.asarray(action, np.float64)[None], _ROW)[0])
        self._steps += 1
        left, holds = self._assess()
        self._held = self._held + 1 if holds else 0
        self._once = self._once or (sound and holds)
        terminated = sound and self._held >= self.family.hold_steps
        truncated = not sound or (not terminated and self._steps >= self._max_episode_steps)
        info = self._info(left, holds)
        if terminated or truncated:
            info["is_success"] = sound and holds
            info["stop_reason"] = "success" if terminated else "timeout" if sound else "diverged"
        reward = float(np.clip(1.0 - left / self._start, 0.0, 1.0))
        return self._observation(), reward, terminated, truncated, info

    def render(self) -> NDArray[np.uint8] | None:
        return self._renderer.render(self.camera) if self.render_mode == "rgb_array" else None

    def close(self) -> None:
        self._renderer.close()

    def _perturb(self, perturbation: Mapping[str, float]) -> None:
        _check_names("perturbation", perturbation, PERTURBATIONS)
        if self._perturbed:
            self.physics.parameters_reset()
        self._perturbed = any(scale != 1.0 for scale in perturbation.values())
        if self._perturbed:
            self.physics.set_parameters(_ROW, **perturbation)

    def _assess(self) -> tuple[float, bool]:
        left, success = self.family.assess(self.physics, _ROW, [self.goal])
        return float(left[0]), bool(success[0])

    def _observation(self) -> dict[str, Any]:
        observation: dict[str, Any] = {name: value[0] for name, value in observe(self.physics).items()}
        if self.cameras:
            size = self._image_size
            images = self._renderer.render_rows(_ROW, self.cameras, width=size, height=size)
            observation["pixels"] = {camera: image[0] for camera, image in images.items()}
        return observation

    def _info(self, left: float, holds: bool) -> dict[str, Any]:
        return {
            "is_success": False, "success_once": self._once, "goal_holds": holds, "left": left, "goal": self.goal,
            "instruction": self.task_description,
        }  # fmt: skip


def _check_names(what: str, given: Mapping[str, Any], known: Sequence[str]) -> None:
    unknown = sorted(given.keys() - set(known))
    if unknown:
        raise DataError(f"{what} has {', '.join(unknown)}; expected some of: {', '.join(known)}.")


class StandStill(gym.Wrapper):
    """After its end an episode stands still, at no cost, until it is reset with a seed or with options.

    Vector environments reset a finished environment at once, without arguments, and step it on until all have finished. What
    follows then repeats the last transition with a reward of 0, so nothing of another episode enters the sums.
    """

    def __init__(self, env: gym.Env) -> None:
        super().__init__(env)
        self._last: tuple | None = None

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        if self._last is not None and seed is None and options is None:
            return self._last[0], self._last[4]
        self._last = None
        return self.env.reset(seed=seed, options=options)

    def step(self, action: Any) -> tuple[Any, Any, bool, bool, dict[str, Any]]:
        if self._last is not None:
            return self._last
        observation, reward, terminated, truncated, info = self.env.step(action)
        if terminated or truncated:
            self._last = (observation, 0.0, terminated, truncated, info)
        return observation, reward, terminated, truncated, info


def make_episode_env(family: str, **settings: Any) -> gym.Env:
    """An `ArmEnv` that stands still after its episode, for vectors whose episodes are counted."""
    return StandStill(ArmEnv(family, **settings))
