"""The task families as gymnasium environments. This module imports neither torch nor LeRobot, so workers start fast."""

from __future__ import annotations

from typing import Any, ClassVar

import gymnasium as gym
import numpy as np
from numpy.typing import NDArray

from robotics.assets import sim_asset
from robotics.envs.families import build_family
from robotics.envs.physics import ArmPhysics
from robotics.envs.rendering import SceneRenderer


class ArmEnv(gym.Env):
    """One simulation of one family.

    Actions are joint positions to move to, ``[A]`` in robot units (degrees; gripper 0 to 100), held for one control period;
    they are clipped to the joint limits. The reward of a step is the share of the initial distance that has been covered, in
    [0, 1]. The episode terminates once the goal has been held, is truncated at ``max_episode_steps``, and is truncated with
    ``info["stop_reason"] == "diverged"`` when the simulation or the action is not finite.

    ``reset(seed=s)`` decides layout, goal and instruction; ``options={"goal": "red", "instruction": "..."}`` overrides the
    latter two and leaves the layout as it is.
    """

    metadata: ClassVar[dict[str, Any]] = {"render_modes": ["rgb_array"], "render_fps": 20}

    def __init__(
        self, family: str = "reach", *, max_episode_steps: int = 60, render_mode: str | None = None, camera: str = "scene",
        width: int = 224, height: int = 224,
    ) -> None:  # fmt: skip
        self.family = build_family(family)
        self.physics = ArmPhysics(sim_asset(self.family.scene), control_hz=self.metadata["render_fps"])
        self.render_mode, self.camera = render_mode, camera
        self._max_episode_steps = max_episode_steps
        self._renderer = SceneRenderer(self.physics, width=width, height=height)
        low, high = self.physics.joint_limits.astype(np.float32).T
        span, num_entries = high - low, len(self.family.environment_bounds)
        self.action_space = gym.spaces.Box(low, high, dtype=np.float32)
        self.observation_space = gym.spaces.Dict(
            {
                "agent_pos": gym.spaces.Box(low - span, high + span, dtype=np.float32),  # joints can overshoot their limits
                "environment_state": gym.spaces.Box(-2.0, 2.0, (num_entries,), np.float32),  # the arm is 0.4 m long
            }
        )
        self.task = self.family.name
        self.task_description = ""

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[dict[str, NDArray[np.float32]], dict[str, Any]]:
        super().reset(seed=seed)
        layout = seed if seed is not None else int(self.np_random.integers(2**31))
        options = options or {}
        self.goal = options.get("goal") or self.family.draw_goal(layout)
        self.task_description = options.get("instruction") or self.family.instruction(self.goal, layout)
        self.family.arrange(self.physics, 0, layout)
        self._steps = self._held = 0
        self._initial_distance = self._distance()
        return self._observation(), self._info(self._initial_distance)

    def step(self, action: NDArray[np.float32]) -> tuple[dict[str, NDArray[np.float32]], float, bool, bool, dict[str, Any]]:
        sound = self.physics.advance(np.asarray(action, np.float64)[None], np.array([0]))[0]
        self._steps += 1
        distance = self._distance()
        self._held = self._held + 1 if distance <= self.family.tolerance else 0
        info = self._info(distance)
        terminated = bool(sound) and self._held >= self.family.hold_steps
        truncated = not sound or (not terminated and self._steps >= self._max_episode_steps)
        if terminated or truncated:
            info["stop_reason"] = "success" if terminated else "timeout" if sound else "diverged"
        reward = float(np.clip(1.0 - distance / self._initial_distance, 0.0, 1.0))
        return self._observation(), reward, terminated, truncated, info

    def render(self) -> NDArray[np.uint8] | None:
        return self._renderer.render(self.camera) if self.render_mode == "rgb_array" else None

    def close(self) -> None:
        self._renderer.close()

    def _distance(self) -> float:
        return float(self.family.distance(self.physics, [self.goal])[0])

    def _observation(self) -> dict[str, NDArray[np.float32]]:
        return {name: value[0] for name, value in self.family.observation(self.physics).items()}

    def _info(self, distance: float) -> dict[str, Any]:
        near = distance <= self.family.tolerance
        return {"is_success": near, "distance": distance, "goal": self.goal, "instruction": self.task_description}
