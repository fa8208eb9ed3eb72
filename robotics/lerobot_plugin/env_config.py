"""The arm's task families as an environment type of LeRobot's."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import gymnasium as gym
from lerobot.configs import FeatureType, PolicyFeature
from lerobot.envs import EnvConfig
from lerobot.utils.constants import ACTION, OBS_ENV_STATE, OBS_IMAGES, OBS_STATE

from mmrl.errors import ConfigError
from robotics.envs.families import build_family
from robotics.envs.gym_env import PERTURBATIONS, ArmEnv, make_episode_env
from robotics.envs.observation import environment_bounds
from robotics.envs.perturbations import Push
from robotics.envs.physics import JOINTS


@EnvConfig.register_subclass("mmrl")
@dataclass
class MmrlEnvConfig(EnvConfig):
    """``--env.type=mmrl``. Every field is a flag; LeRobot seeds the environments of a task with ``--seed``, ``--seed`` + 1, ...

    An episode is the one that our own evaluation runs for the same layout seed: the same goal, words, limits and success.
    """

    task: str = "reach"
    """Families, separated by commas; each is a group of LeRobot's results. ``reach:red`` always asks for that goal."""
    fps: int = ArmEnv.metadata["render_fps"]
    """Control steps per second; the scenes are made for this one."""
    first_seed: int = 1_000_000
    """The layout of LeRobot's seed 0, the first of the ``eval`` split by default; ``--seed=0`` evaluates from there on."""
    words: str = "seen"
    """``seen``: phrasings that training uses. ``unseen``: phrasings that it does not."""
    max_episode_steps: int | None = None
    """Control steps after which an episode is cut; the family's own limit when absent."""
    cameras: str = ""
    """Images that are observed, separated by commas: ``scene``, ``wrist``."""
    image_size: int = 64
    """Height and width of observed images, pixels."""
    video_size: int = 128
    """Height and width of the videos that LeRobot records, pixels."""
    mass_scale: float = 1.0
    """Multiplier of all masses."""
    friction_scale: float = 1.0
    """Multiplier of all friction coefficients."""
    damping_scale: float = 1.0
    """Multiplier of the damping of all joints."""
    servo_scale: float = 1.0
    """Multiplier of the servos' gains and force limits."""
    push_newtons: float = 0.0
    """Sideways force on the hand; 0 for none."""
    push_start: int = 10
    """Control step at which the push begins."""
    push_steps: int = 5
    """Control steps that it lasts."""
    processes: bool = False
    """With ``--eval.use_async_envs=true``, step environments in processes of their own. Results do not depend on it, and it is
    slower for simulations as cheap as these."""

    def __post_init__(self) -> None:
        if self.fps != ArmEnv.metadata["render_fps"]:
            raise ConfigError(f"env.fps is {self.fps}; the arm is commanded at {ArmEnv.metadata['render_fps']} Hz.")
        if self.words not in ("seen", "unseen"):
            raise ConfigError(f"env.words is {self.words!r}; expected seen or unseen.")
        state, scene = FeatureType.STATE, FeatureType.ENV
        self.features = {
            ACTION: PolicyFeature(type=FeatureType.ACTION, shape=(len(JOINTS),)),
            "agent_pos": PolicyFeature(type=state, shape=(len(JOINTS),)),
            "environment_state": PolicyFeature(type=scene, shape=(len(environment_bounds),)),
        }
        self.features_map = {ACTION: ACTION, "agent_pos": OBS_STATE, "environment_state": OBS_ENV_STATE}
        for camera in _names(self.cameras):
            self.features[f"pixels/{camera}"] = PolicyFeature(type=FeatureType.VISUAL, shape=(self.image_size,) * 2 + (3,))
            self.features_map[f"pixels/{camera}"] = f"{OBS_IMAGES}.{camera}"

    @property
    def gym_kwargs(self) -> dict:
        """Keywords of `ArmEnv` that all tasks share."""
        push = Push(
            body="hand",
            force=(0.0, self.push_newtons, 0.0),
            start=self.push_start,
            end=self.push_start + self.push_steps,
        )
        return {
            "first_seed": self.first_seed,
            "held_out_words": self.words == "unseen",
            "perturbation": {name: getattr(self, name) for name in PERTURBATIONS},
            "pushes": (push,) if self.push_newtons else (),
            "max_episode_steps": self.max_episode_steps,
            "cameras": _names(self.cameras),
            "image_size": self.image_size,
            "render_mode": "rgb_array",
            "width": self.video_size,
            "height": self.video_size,
        }

    def create_envs(self, n_envs: int, use_async_envs: bool = False) -> dict[str, dict[int, gym.vector.VectorEnv]]:
        """``{family: {task_id: VectorEnv}}``: a group per family, a task for each time that it is named."""
        tasks = [name.partition(":")[::2] for name in _names(self.task)]
        if not tasks:
            raise ConfigError("env.task names no task family.")
        for family, goal in tasks:
            if goal:
                build_family(family).instruction(goal, 0)  # raises for a goal that the family does not have
        vectors: dict[str, dict[int, gym.vector.VectorEnv]] = {}
        for family, goal in tasks:
            make = partial(make_episode_env, family, goal=goal or None, **self.gym_kwargs)
            group = vectors.setdefault(family, {})
            group[len(group)] = self._vector([make] * n_envs, in_processes=self.processes and use_async_envs and n_envs > 1)
        return vectors

    def _vector(self, makers: list, *, in_processes: bool) -> gym.vector.VectorEnv:
        mode = gym.vector.AutoresetMode.SAME_STEP
        if in_processes:
            return gym.vector.AsyncVectorEnv(makers, autoreset_mode=mode, context="forkserver")
        return gym.vector.SyncVectorEnv(makers, autoreset_mode=mode)


def _names(listed: str) -> tuple[str, ...]:
    return tuple(name.strip() for name in listed.split(",") if name.strip())
