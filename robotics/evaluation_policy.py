"""A LeRobot policy directory as the actor of an evaluation: opened whole, compared with the arm, deciding greedily.

Axes: ``n`` running episodes, ``H`` commands of a chunk, ``A`` joints.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from lerobot.policies.pretrained import PreTrainedPolicy
from lerobot.processor import NormalizerProcessorStep
from lerobot.utils.constants import OBS_ENV_STATE, OBS_IMAGES, OBS_STATE
from numpy.typing import NDArray
from torch import Tensor

from mmrl.checkpoint import policy_checksum
from mmrl.errors import ConfigError
from robotics.acting import PolicyDriver, Postprocess, Preprocess, Recorder, lerobot_names
from robotics.assets import sim_asset
from robotics.checkpoints import floor_statistics, open_policy, policy_directory, read_metadata
from robotics.envs.physics import ArmPhysics
from robotics.evaluation_actors import ActorSpec, Driver
from robotics.evaluation_checks import check_features, check_meaning, check_rate, training_range
from robotics.policies.building import as_chunk_policy
from robotics.policies.lerobot_views import ActOnlyView
from robotics.policies.seam import ChunkPolicy
from robotics.rollouts import Decide
from robotics.tasks import RobotTask
from robotics.world import CONTROL_HZ, ArmWorld

FAR = 3.0
"""A state entry this many times further from the middle of its training range than the range's end counts as out of range."""
_RAW_NAMES = {OBS_STATE: "agent_pos", OBS_ENV_STATE: "environment_state"}
_DETERMINISTIC = ("act",)  # of LeRobot's policies that only act: those that draw no numbers


class PolicyActor:
    """A LeRobot policy directory, deciding greedily."""

    def __init__(self, spec: ActorSpec, *, on_notice: Callable[[str], None]) -> None:
        directory = policy_directory(Path(spec.source))
        policy, self.preprocessor, self.postprocessor = open_policy(directory, device=spec.device, floor=False)
        self.config, metadata = policy.config, read_metadata(directory)
        self.label, self.device, self.checksum = _label(directory), spec.device, policy_checksum(policy)
        self.inputs = check_features(self.config, spec.renames)
        self.policy_hz = check_rate(self.config, metadata, resample=spec.resample)
        limits = ArmPhysics(sim_asset("reach/scene.xml")).joint_limits
        notices = check_meaning(self.config, metadata, self.preprocessor, self.postprocessor, limits)
        for notice in notices + floor_statistics(self.preprocessor):  # the ranges as they are must make sense
            on_notice(notice)
        self.own_horizon = self.config.n_action_steps
        self._choose_horizon(spec.execution_horizon)
        self.policy = as_chunk_policy(policy)
        shapes = {ours: self.config.input_features[name].shape for name, ours in self.inputs.items()}
        self.cameras = {
            ours.removeprefix(f"{OBS_IMAGES}."): (int(shape[1]), int(shape[2]))
            for ours, shape in shapes.items()
            if ours.startswith(OBS_IMAGES)
        }
        ranges = {
            _RAW_NAMES[ours]: training_range(self.preprocessor, NormalizerProcessorStep, name)
            for name, ours in self.inputs.items()
            if ours in _RAW_NAMES
        }
        self._ranges = {name: bounds for name, bounds in ranges.items() if bounds is not None}

    def describe(self) -> dict[str, Any]:
        """See `Actor.describe`."""
        return {
            "name": self.label,
            "type": self.config.type,
            "checksum": self.checksum,
            "decisions": "greedy",
            "chunk_size": self.chunk_size,
            "n_action_steps": self.own_horizon,
            "execution_horizon": self.execution_horizon,
            "policy_hz": self.policy_hz,
            "inputs": self.inputs,
            "cameras": {name: list(size) for name, size in self.cameras.items()},
            "device": self.device,
        }

    def driver(self, world: ArmWorld, tasks: Sequence[RobotTask], num_decisions: int) -> Driver:
        """See `Actor.driver`."""
        watcher = _Watcher(self.policy, self._preprocess, [task.instruction for task in tasks], num_decisions, self._ranges)
        seeds = torch.tensor([task.seed for task in tasks])
        if isinstance(self.policy, ActOnlyView) and self.config.type not in _DETERMINISTIC:
            decide: Decide = _RowByRow(self.policy.policy, watcher, self.postprocessor, seeds=seeds)
        else:
            decide = PolicyDriver(self.policy, watcher, self.postprocessor, seeds=seeds, greedy=True)
        return Driver(_resampling(decide, self.policy_hz) if self.policy_hz != CONTROL_HZ else decide, watcher.out_of_range)

    def _choose_horizon(self, control_steps: int | None) -> None:
        """Set how many of the policy's commands, and so how many control steps, lie between decisions."""
        steps_per_control = self.policy_hz / CONTROL_HZ
        self.chunk_size = int(getattr(self.config, "chunk_size", None) or self.own_horizon)
        if control_steps is None:
            control_steps = max(1, int(self.own_horizon / steps_per_control + 1e-9))
        needed = math.ceil(control_steps * steps_per_control - 1e-9)
        if needed > self.chunk_size:
            raise ConfigError(
                f"{control_steps} control steps between decisions take {needed} commands of a chunk, but the policy decides "
                f"{self.chunk_size} at a time; lower --execution-horizon."
            )
        self.execution_horizon, self.config.n_action_steps = control_steps, needed

    def _preprocess(self, batch: dict[str, Any]) -> dict[str, Any]:
        return self.preprocessor({**{name: batch[ours] for name, ours in self.inputs.items()}, "task": batch["task"]})


def resample_chunk(
    start: NDArray[np.float64], chunk: NDArray[np.float64], *, source_hz: float, target_hz: float
) -> NDArray[np.float64]:
    """``[n, H', A]`` positions at ``target_hz`` on the straight lines through ``chunk`` ``[n, H, A]`` at ``source_hz``.

    ``start`` ``[n, A]`` is where the joints are now; entry ``k`` of a chunk is due ``(k + 1) / hz`` seconds later. H' covers
    the time that the chunk covers, and at least one step, for which the last position is held.
    """
    path = np.concatenate([start[:, None], chunk], axis=1)
    num_steps = max(1, int(chunk.shape[1] * target_hz / source_hz + 1e-9))
    places = np.minimum(np.arange(1, num_steps + 1) * source_hz / target_hz, chunk.shape[1])
    before = np.minimum(places.astype(int), chunk.shape[1] - 1)
    share = (places - before)[:, None]
    return (1 - share) * path[:, before] + share * path[:, before + 1]


class _Watcher(Recorder):
    """Keeps nothing of what is seen but how often it lay far outside the training range."""

    def __init__(
        self, policy: ChunkPolicy, preprocess: Preprocess, instructions: Sequence[str], num_decisions: int,
        ranges: Mapping[str, NDArray[np.float64]],
    ) -> None:  # fmt: skip
        super().__init__(policy, preprocess, instructions, num_decisions)
        self.ranges = ranges
        self.out_of_range = np.zeros(len(instructions), np.int64)

    def see(self, decision: int, rows: Tensor, observation: Mapping[str, NDArray], **more: Tensor) -> dict[str, Tensor]:
        far = np.zeros(len(rows), bool)
        for name, bounds in self.ranges.items():
            middle, half = bounds.mean(axis=1), (bounds[:, 1] - bounds[:, 0]) / 2
            far |= ~(np.abs(observation[name] - middle) <= FAR * half).all(axis=1)  # a NaN is out of any range
        self.out_of_range[rows.numpy()] += far
        texts = [self.instructions[row] for row in rows.tolist()]
        batch = self.preprocess({**lerobot_names(observation), "task": texts, **more})
        return {name: batch[name].cpu() for name in self.policy.observation_keys}

    def note(self, decision: int, rows: Tensor, record: Mapping[str, Tensor]) -> None:
        pass


class _RowByRow:
    """For policies that draw numbers of their own: each row alone, from the seed of its episode and the decision."""

    def __init__(self, policy: PreTrainedPolicy, watcher: _Watcher, postprocess: Postprocess, *, seeds: Tensor) -> None:
        self.policy, self.watcher, self.postprocess, self.seeds = policy, watcher, postprocess, seeds
        self.device = next(policy.parameters()).device

    @torch.no_grad()
    def __call__(self, decision: int, running: NDArray[np.int64], observation: Mapping[str, NDArray]) -> NDArray[np.float64]:
        """See `robotics.rollouts.Decide`."""
        seen = self.watcher.see(decision, torch.from_numpy(running), observation)
        chunks = []
        for place, row in enumerate(running):
            alone = {name: value[place : place + 1].to(self.device) for name, value in seen.items()}
            self.policy.reset()
            with torch.random.fork_rng():
                torch.manual_seed(int(np.random.SeedSequence([int(self.seeds[row]), decision]).generate_state(1)[0]))
                actions = [self.policy.select_action(dict(alone)) for _ in range(self.policy.config.n_action_steps)]
            chunks.append(torch.stack(actions, dim=1))
        return self.postprocess(torch.cat(chunks).cpu()).double().numpy()


def _resampling(decide: Decide, source_hz: float) -> Decide:
    def resampled(decision: int, running: NDArray[np.int64], observation: Mapping[str, NDArray]) -> NDArray[np.float64]:
        chunk = decide(decision, running, observation)
        start = observation["agent_pos"].astype(np.float64)
        return resample_chunk(start, chunk, source_hz=source_hz, target_hz=CONTROL_HZ)

    return resampled


def _label(directory: Path) -> str:
    """The run and step, or the folder's own name: short, and without the path that leads there."""
    parts = [part for part in directory.resolve().parts if part not in ("policy", "pretrained_model", "checkpoints")]
    return "/".join(parts[-2:]) if directory.name in ("policy", "pretrained_model") else parts[-1]
