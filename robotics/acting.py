"""Decision makers for `robotics.rollouts.run_episodes` that remember what was seen and decided, for `forward` to score.

Observations pass through the policy's own preprocessor and commands through its postprocessor. Axes: ``N`` episodes, ``n`` of
them running, ``T`` decisions, ``H`` motions of a chunk, ``A`` joints.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from lerobot.utils.constants import ACTION, OBS_ENV_STATE, OBS_LANGUAGE_ATTENTION_MASK, OBS_LANGUAGE_TOKENS, OBS_STATE
from numpy.typing import NDArray
from torch import Tensor

from robotics.inputs import EpisodeInputs
from robotics.policies import GaussianChunkPolicy, log_density, sum_executed
from robotics.rollouts import Decide

Preprocess = Callable[[dict[str, Any]], dict[str, Any]]
Postprocess = Callable[[Tensor], Tensor]

_BLOCK = 32
"""Rows of one network call. Matrix products of one shape treat every row alike, products of different shapes round
differently; with blocks of one shape an episode does not depend, not even in its last bit, on what it is batched with."""


class Recorder:
    """Preprocesses observations and keeps them beside the motions that followed."""

    def __init__(
        self, policy: GaussianChunkPolicy, preprocess: Preprocess, instructions: Sequence[str], num_decisions: int
    ) -> None:
        self.preprocess, self.instructions = preprocess, instructions
        num, config = len(instructions), policy.config
        self.state = torch.zeros(num, num_decisions, policy.num_joints)
        self.environment_state = torch.zeros(num, num_decisions, config.env_state_feature.shape[0])
        self.words = torch.zeros(num, config.max_words, dtype=torch.int64)
        self.motions = torch.zeros(num, num_decisions, config.chunk_size, policy.num_joints)

    def see(
        self, decision: int, rows: Tensor, observation: Mapping[str, NDArray[np.float32]], **more: Tensor
    ) -> dict[str, Tensor]:
        """The preprocessed batch of the episodes ``rows`` ``[n]``; ``more`` are further entries to preprocess."""
        batch = self.preprocess(
            {
                OBS_STATE: torch.from_numpy(observation["agent_pos"]),
                OBS_ENV_STATE: torch.from_numpy(observation["environment_state"]),
                "task": [self.instructions[row] for row in rows.tolist()],
                **more,
            }
        )
        self.state[rows, decision] = batch[OBS_STATE].cpu()
        self.environment_state[rows, decision] = batch[OBS_ENV_STATE].cpu()
        self.words[rows] = batch[OBS_LANGUAGE_TOKENS].cpu()
        names = (OBS_STATE, OBS_ENV_STATE, OBS_LANGUAGE_TOKENS, OBS_LANGUAGE_ATTENTION_MASK, *more)
        return {name: batch[name] for name in names}

    def inputs(self, executed: Tensor) -> EpisodeInputs:
        """What was seen and decided, given how many motions of each chunk were executed (``[N, T]``)."""
        return EpisodeInputs(
            state=self.state,
            environment_state=self.environment_state,
            words=self.words,
            motions=self.motions,
            executed=executed,
        )


class PolicyDriver:
    """Samples chunks of motions; episode ``i`` uses the noise of ``seeds[i]`` only, drawn up front. ``greedy`` uses none."""

    def __init__(
        self, policy: GaussianChunkPolicy, recorder: Recorder, postprocess: Postprocess, *, seeds: Tensor, greedy: bool
    ) -> None:
        self.policy, self.recorder, self.postprocess = policy, recorder, postprocess
        self.device = next(policy.parameters()).device
        shape = recorder.motions.shape[1:]
        if greedy:
            self.noise = torch.zeros_like(recorder.motions)
        else:
            draws = [np.random.default_rng(seed).standard_normal(shape, np.float32) for seed in seeds.tolist()]
            self.noise = torch.from_numpy(np.stack(draws))
        self.density = torch.zeros(recorder.motions.shape[:3])  # [N, T, H], log-density of each motion

    @torch.no_grad()
    def __call__(
        self, decision: int, running: NDArray[np.int64], observation: Mapping[str, NDArray[np.float32]]
    ) -> NDArray[np.float64]:
        """See `robotics.rollouts.Decide`."""
        rows = torch.from_numpy(running)
        batch = self.recorder.see(decision, rows, observation)
        mean, log_std = self._distribution(batch)
        motions = mean + log_std.exp() * self.noise[rows, decision]
        self.recorder.motions[rows, decision] = motions
        self.density[rows, decision] = log_density(motions, mean, log_std)
        return self.postprocess(self.policy.decode(batch[OBS_STATE].cpu(), motions)).double().numpy()

    def log_probs(self, executed: Tensor) -> Tensor:
        """``[N, T]`` log-densities of the executed part of each decision, as recorded while acting; 0 after the end."""
        return sum_executed(self.density, executed)

    def _distribution(self, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        """The policy's mean ``[n, H, A]`` and log standard deviation ``[A]`` on the CPU, in blocks of equal shape."""
        num = len(batch[OBS_STATE])
        padded = torch.arange(-(-num // _BLOCK) * _BLOCK).clamp(max=num - 1)  # the last row fills the last block
        means = []
        for rows in padded.split(_BLOCK):
            mean, log_std = self.policy.distribution({name: value[rows].to(self.device) for name, value in batch.items()})
            means.append(mean)
        return torch.cat(means)[:num].cpu(), log_std.cpu()


class ExpertDriver:
    """Follows an expert as closely as the policy's motions allow, and records those motions."""

    def __init__(self, policy: GaussianChunkPolicy, recorder: Recorder, postprocess: Postprocess, *, expert: Decide) -> None:
        self.policy, self.recorder, self.postprocess, self.expert = policy, recorder, postprocess, expert

    def __call__(
        self, decision: int, running: NDArray[np.int64], observation: Mapping[str, NDArray[np.float32]]
    ) -> NDArray[np.float64]:
        """See `robotics.rollouts.Decide`."""
        rows = torch.from_numpy(running)
        wanted = torch.from_numpy(self.expert(decision, running, observation)).float()
        batch = self.recorder.see(decision, rows, observation, **{ACTION: wanted})
        state = batch[OBS_STATE].cpu()
        motions = self.policy.encode(state, batch[ACTION].cpu())
        self.recorder.motions[rows, decision] = motions
        return self.postprocess(self.policy.decode(state, motions)).double().numpy()
