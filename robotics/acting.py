"""Decision makers for `robotics.rollouts.run_episodes` that remember what was seen and decided, for `forward` to score.

Observations pass through the policy's own preprocessor and commands through its postprocessor. Axes: ``N`` episodes, ``n`` of
them running, ``T`` decisions, ``H`` commands of a chunk, ``A`` numbers of a command.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from lerobot.utils.constants import ACTION, OBS_ENV_STATE, OBS_IMAGES, OBS_STATE
from numpy.typing import NDArray
from torch import Tensor

from robotics.inputs import EpisodeInputs, pack, unpack
from robotics.policies.seam import ChunkPolicy, Decision
from robotics.rollouts import Decide, Episode, Limits, run_episodes
from robotics.tasks import RobotTask
from robotics.world import ArmWorld

Preprocess = Callable[[dict[str, Any]], dict[str, Any]]
Postprocess = Callable[[Tensor], Tensor]
WorldBuilder = Callable[..., ArmWorld]

_BLOCK = 32
"""Rows of one network call. Matrix products of one shape treat every row alike, products of different shapes round
differently; with blocks of one shape an episode does not depend, not even in its last bit, on what it is batched with."""
_DISTURBANCE = 17  # stream of random numbers


def lerobot_names(observation: Mapping[str, NDArray]) -> dict[str, Tensor]:
    """A world's observation under LeRobot's names; images become floats in [0, 1], ``[n, 3, H, W]``."""
    names = {"agent_pos": OBS_STATE, "environment_state": OBS_ENV_STATE}
    batch = {lerobot: torch.from_numpy(observation[name]) for name, lerobot in names.items() if name in observation}
    for name, image in observation.items():
        if name.startswith("pixels."):
            batch[f"{OBS_IMAGES}.{name.removeprefix('pixels.')}"] = torch.from_numpy(image).permute(0, 3, 1, 2).float() / 255.0
    return batch


class Recorder:
    """Preprocesses observations and keeps them beside the decisions that followed."""

    def __init__(self, policy: ChunkPolicy, preprocess: Preprocess, instructions: Sequence[str], num_decisions: int) -> None:
        self.policy, self.preprocess, self.instructions = policy, preprocess, instructions
        self.shape = (len(instructions), num_decisions)
        self.observations: dict[str, Tensor] = {}
        self.records: dict[str, Tensor] = {}

    def see(self, decision: int, rows: Tensor, observation: Mapping[str, NDArray], **more: Tensor) -> dict[str, Tensor]:
        """The preprocessed batch of the episodes ``rows`` ``[n]``; ``more`` are further entries to preprocess."""
        texts = [self.instructions[row] for row in rows.tolist()]
        batch = self.preprocess({**lerobot_names(observation), "task": texts, **more})
        seen = {name: pack(name, batch[name].cpu()) for name in self.policy.observation_keys}
        self._keep(self.observations, decision, rows, seen)
        return {name: unpack(name, value) for name, value in seen.items()} | {name: batch[name].cpu() for name in more}

    def note(self, decision: int, rows: Tensor, record: Mapping[str, Tensor]) -> None:
        """Keep the record of a decision."""
        self._keep(self.records, decision, rows, record)

    def inputs(self, executed: Tensor) -> EpisodeInputs:
        """What was seen and decided, given how many commands of each chunk were executed (``[N, T]``)."""
        return EpisodeInputs(observations=self.observations, records=self.records, executed=executed)

    def _keep(self, store: dict[str, Tensor], decision: int, rows: Tensor, values: Mapping[str, Tensor]) -> None:
        for name, value in values.items():
            if name not in store:
                store[name] = torch.zeros(*self.shape, *value.shape[1:], dtype=value.dtype)
            store[name][rows, decision] = value


class PolicyDriver:
    """Samples chunks; episode ``i`` uses the noise of ``seeds[i]`` only, drawn up front. ``greedy`` uses none."""

    def __init__(
        self, policy: ChunkPolicy, recorder: Recorder, postprocess: Postprocess, *, seeds: Tensor, greedy: bool
    ) -> None:
        self.policy, self.recorder, self.postprocess = policy, recorder, postprocess
        self.device = next(policy.parameters()).device
        num_decisions = recorder.shape[1]
        self.noise = None if greedy else normal_draws(seeds, (num_decisions, *policy.noise_shape()))
        self.density: Tensor | None = None  # [N, T, H], log-density of each command

    @torch.no_grad()
    def __call__(self, decision: int, running: NDArray[np.int64], observation: Mapping[str, NDArray]) -> NDArray[np.float64]:
        """See `robotics.rollouts.Decide`."""
        rows = torch.from_numpy(running)
        seen = self.recorder.see(decision, rows, observation)
        decided = self._decide(seen, None if self.noise is None else self.noise[rows, decision])
        self.recorder.note(decision, rows, decided.record)
        if self.density is None:
            self.density = torch.zeros(*self.recorder.shape, decided.density.shape[1])
        self.density[rows, decision] = decided.density
        return self.postprocess(decided.chunk).double().numpy()

    def _decide(self, observation: dict[str, Tensor], noise: Tensor | None) -> Decision:
        """The policy's decisions on the CPU, made in blocks of equal shape."""
        num = len(next(iter(observation.values())))
        padded = torch.arange(-(-num // _BLOCK) * _BLOCK).clamp(max=num - 1)  # the last row fills the last block
        parts = []
        for rows in padded.split(_BLOCK):
            block = {name: value[rows].to(self.device) for name, value in observation.items()}
            parts.append(self.policy.decide(block, None if noise is None else noise[rows].to(self.device)))
        join = lambda values: torch.cat(values)[:num].cpu()  # noqa: E731
        return Decision(
            chunk=join([part.chunk for part in parts]),
            record={name: join([part.record[name] for part in parts]) for name in parts[0].record},
            density=join([part.density for part in parts]),
        )


class ExpertDriver:
    """Follows an expert as closely as the policy can express, and records the demonstrated decisions.

    With ``noise`` the robot is sent something else than what is recorded; see `robotics.demonstrators`.
    """

    def __init__(
        self, policy: ChunkPolicy, recorder: Recorder, postprocess: Postprocess, *, expert: Decide, seeds: Tensor,
        noise: Tensor,
    ) -> None:  # fmt: skip
        """``noise`` ``[N]`` is a standard deviation, a share of half of each joint's range; the gripper, last, has none."""
        self.policy, self.recorder, self.postprocess, self.expert = policy, recorder, postprocess, expert
        self.noise = normal_draws(seeds, (recorder.shape[1], *policy.noise_shape()))
        self.disturbance, self.seeds = noise, seeds

    @torch.no_grad()
    def __call__(self, decision: int, running: NDArray[np.int64], observation: Mapping[str, NDArray]) -> NDArray[np.float64]:
        """See `robotics.rollouts.Decide`."""
        rows = torch.from_numpy(running)
        wanted = torch.from_numpy(self.expert(decision, running, observation)).float()
        seen = self.recorder.see(decision, rows, observation, **{ACTION: wanted})
        chunk = seen.pop(ACTION)
        self.recorder.note(decision, rows, self.policy.imitate(seen, chunk, self.noise[rows, decision]))
        return self.postprocess(self._disturbed(decision, rows, chunk)).double().numpy()

    def _disturbed(self, decision: int, rows: Tensor, chunk: Tensor) -> Tensor:
        """``chunk`` ``[n, H, A]``, normalised to [-1, 1], as the robot is sent it."""
        if not self.disturbance.any():
            return chunk
        draws = [
            np.random.default_rng([seed, _DISTURBANCE, decision]).standard_normal(chunk.shape[1:], np.float32)
            for seed in self.seeds[rows].tolist()
        ]
        noise = self.disturbance[rows, None, None] * torch.from_numpy(np.stack(draws))
        noise[..., -1] = 0.0
        return (chunk + noise).clamp(-1.0, 1.0)


def attempt(
    policy: ChunkPolicy, preprocess: Preprocess, postprocess: Postprocess, tasks: Sequence[RobotTask], *, group_size: int,
    seeds: Tensor, greedy: bool, limits: Limits, make_world: WorldBuilder,
) -> tuple[list[Episode], Tensor, EpisodeInputs]:  # fmt: skip
    """One episode of ``policy`` per task and member of its group, all in one scene.

    ``limits`` has a row per task and member. Gives the episodes, the log-densities ``[N, T, H]`` of every command as recorded
    while acting, and what `forward` needs.
    """
    rows = [task for task in tasks for _ in range(group_size)]
    recorder = Recorder(policy, preprocess, [task.instruction for task in rows], limits.num_decisions)
    driver = PolicyDriver(policy, recorder, postprocess, seeds=seeds, greedy=greedy)
    world = make_world(tasks, group_size=group_size)
    try:
        episodes = run_episodes(world, driver, limits)
    finally:
        world.close()
    return episodes, driver.density, recorder.inputs(executed_counts(episodes))


def executed_counts(episodes: Sequence[Episode]) -> Tensor:
    """``[N, T]`` commands executed of each decision."""
    return torch.stack([torch.from_numpy(episode.executed) for episode in episodes])


def normal_draws(seeds: Tensor, shape: tuple[int, ...]) -> Tensor:
    """``[N, *shape]`` float32 standard normals; row ``i`` depends on ``seeds[i]`` only."""
    draws = [np.random.default_rng(seed).standard_normal(shape, np.float32) for seed in seeds.tolist()]
    return torch.from_numpy(np.stack(draws))


def sum_executed(per_command: Tensor, executed: Tensor) -> Tensor:
    """Sum ``[..., H]`` over the first ``executed`` ``[...]`` commands of each chunk.

    Commands that were decided and never executed changed nothing, so they are not part of the decision.
    """
    return mask_executed(per_command, executed).sum(dim=-1)


def mask_executed(per_command: Tensor, executed: Tensor) -> Tensor:
    """``[..., H]`` with zeros from ``executed`` ``[...]`` on."""
    taken = torch.arange(per_command.shape[-1], device=per_command.device) < executed[..., None]
    return torch.where(taken, per_command, 0.0)
