"""Every environment keeps the contract, and each promise is one that an environment can break."""

import gymnasium as gym
import numpy as np
import pytest

from mmrl.errors import AdapterError
from robotics.envs import ENVIRONMENTS
from robotics.envs.gym_env import ArmEnv
from robotics.testing import check_env


@pytest.mark.parametrize("name", ENVIRONMENTS)
def test_every_environment_keeps_the_contract(name):
    check_env(lambda: gym.make(name))


def test_an_environment_with_cameras_keeps_the_contract():
    check_env(lambda: ArmEnv("press", cameras=("scene", "wrist"), image_size=16))


class NoFrameRate(ArmEnv):
    metadata = {**ArmEnv.metadata, "render_fps": 0}  # noqa: RUF012

    def __init__(self):
        type(self).metadata = ArmEnv.metadata
        super().__init__()
        type(self).metadata = {**ArmEnv.metadata, "render_fps": 0}


class Silent(ArmEnv):
    def reset(self, **kwargs):
        result = super().reset(**kwargs)
        self.task_description = ""
        return result


class OutOfSpace(ArmEnv):
    def _observation(self):
        observation = super()._observation()
        if self._steps > 1:  # after what gymnasium's checker sees
            observation["agent_pos"] = observation["agent_pos"] + np.float32(1000.0)
        return observation


class ReusesItsArrays(ArmEnv):
    def _observation(self):
        observation = super()._observation()
        if self._steps < 4:  # gymnasium's checker notices the first few
            self._kept = observation
        for name, value in observation.items():
            self._kept[name][:] = value
        return dict(self._kept)


class PaysInMetres(ArmEnv):
    def step(self, action):
        observation, _, *rest = super().step(action)
        return observation, -rest[-1]["left"], *rest


class Forgetful(ArmEnv):
    """The goal held once, but it only says so in that step."""

    def _info(self, left, holds):
        return {**super()._info(left, holds), "success_once": holds}


class NoWork(ArmEnv):
    def _info(self, left, holds):
        info = super()._info(left, holds)
        info.pop("left" if self._steps > 2 else "unused", None)
        return info


class KeepsThePush(ArmEnv):
    """A force that acts at the end of an episode is still there in the next."""

    def reset(self, **kwargs):
        force = self.physics._pushes[0].copy()
        result = super().reset(**kwargs)
        self.physics._pushes[0] = force
        return result


class NeverLetsGo(ArmEnv):
    def step(self, action):
        self._pushes = tuple(push for push in self._pushes if self._steps < push.end)
        return super().step(action)


class ColdStart(ArmEnv):
    """Leaves the solver's warm start of the episode before."""

    def reset(self, **kwargs):
        warm = self.physics._batch.bind("qacc_warmstart").copy()
        result = super().reset(**kwargs)
        self.physics._batch.bind("qacc_warmstart")[:] = warm
        return result


class OneLayout(ArmEnv):
    def reset(self, *, seed=None, options=None):
        _, info = super().reset(seed=seed, options=options)
        self.family.arrange(self.physics, 0, 7, "red")
        return self._observation(), info


class OneLayoutWithoutASeed(ArmEnv):
    def reset(self, *, seed=None, options=None):
        return super().reset(seed=7 if seed is None else seed, options=options)


class EndsAtOnce(ArmEnv):
    def __setattr__(self, name, value):
        if name == "_held" and value == 1:
            value = 4
        super().__setattr__(name, value)


class AddsUp(ArmEnv):
    """Counts steps in which the goal holds, in a row or not."""

    def __setattr__(self, name, value):
        if name == "_held" and value == 0 and getattr(self, "_steps", 0):
            value = self._held
        super().__setattr__(name, value)


class NeverEnds(ArmEnv):
    def step(self, action):
        observation, reward, _, _, info = super().step(action)
        return observation, reward, False, False, info


class TimeIsTermination(ArmEnv):
    def step(self, action):
        observation, reward, terminated, _, info = super().step(action)
        return observation, reward, terminated or info.get("stop_reason") == "timeout", False, info


class SucceedsEarly(ArmEnv):
    def step(self, action):
        *rest, info = super().step(action)
        return *rest, {**info, "is_success": info["goal_holds"]}


class OnceIsSuccess(ArmEnv):
    def step(self, action):
        *rest, info = super().step(action)
        return *rest, {**info, "is_success": "stop_reason" in info and info["success_once"]}


class TakesNonsense(ArmEnv):
    def step(self, action):
        return super().step(np.nan_to_num(action))


class SharesItsSimulation(ArmEnv):
    physics_of_all = None

    def __init__(self):
        super().__init__()
        SharesItsSimulation.physics_of_all = self.physics = SharesItsSimulation.physics_of_all or self.physics


class ClosesOnce(ArmEnv):
    closed = False

    def close(self):
        if self.closed:
            raise RuntimeError("already closed")
        self.closed = True
        super().close()


class Float64(ArmEnv):
    def _observation(self):
        return {name: value.astype(np.float64) for name, value in super()._observation().items()}


@pytest.mark.parametrize(
    ("broken", "promise"),
    [
        (Float64, "gymnasium's checker accepts it"),
        (NoFrameRate, "metadata has render_fps"),
        (Silent, "task_description is the instruction"),
        (OutOfSpace, "inside observation_space"),
        (ReusesItsArrays, "does not change after it was given"),
        (PaysInMetres, "the reward is a float in"),
        (NoWork, "info has left"),
        (ColdStart, "equal in every bit"),
        (KeepsThePush, "a push that was acting is gone after a reset"),
        (NeverLetsGo, "a push is gone after its last step"),
        (OneLayout, "different seeds give different"),
        (OneLayoutWithoutASeed, "without a seed goes on to another layout"),
        (Forgetful, "success_once and not is_success"),
        (OnceIsSuccess, "success_once and not is_success"),
        (SucceedsEarly, "is_success is false while the episode runs"),
        (EndsAtOnce, "does not terminate"),
        (AddsUp, "has to hold for hold_steps again"),
        (NeverEnds, "a goal that was reached and left again does not terminate"),
        (TimeIsTermination, "does not terminate"),
        (TakesNonsense, "not finite truncates"),
        (SharesItsSimulation, "three environments in a vector"),
        (ClosesOnce, "close may be called twice"),
    ],
)
def test_a_broken_promise_is_named(broken, promise):
    with pytest.raises(AdapterError, match=promise):
        check_env(broken)
