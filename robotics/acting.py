"""A policy as a decision maker for `robotics.rollouts.run_episodes`, which remembers what it saw and decided."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from lerobot.utils.constants import OBS_ENV_STATE, OBS_LANGUAGE_ATTENTION_MASK, OBS_LANGUAGE_TOKENS, OBS_STATE
from numpy.typing import NDArray
from torch import Tensor

from robotics.inputs import EpisodeInputs
from robotics.policies import GaussianChunkPolicy, log_density, sum_executed

_BLOCK = 32
"""Rows of one network call. Matrix products of one shape treat every row alike, products of different shapes round
differently; with blocks of one shape an episode does not depend, not even in its last bit, on what it is batched with."""


class PolicyDriver:
    """Samples chunks of motions; rollout ``i`` uses the noise of ``seeds[i]`` only, drawn up front. ``greedy`` uses none."""

    def __init__(
        self, policy: GaussianChunkPolicy, preprocess: Callable[[dict[str, Any]], dict[str, Any]],
        postprocess: Callable[[Tensor], Tensor], *, instructions: Sequence[str], seeds: Tensor, num_decisions: int, greedy: bool,
    ) -> None:  # fmt: skip
        self.policy, self.preprocess, self.postprocess = policy, preprocess, postprocess
        self.instructions = instructions
        self.device = next(policy.parameters()).device
        num, horizon, joints = len(instructions), policy.config.chunk_size, policy.num_joints
        shape = (num_decisions, horizon, joints)
        if greedy:
            self.noise = torch.zeros(num, *shape)
        else:
            draws = [np.random.default_rng(seed).standard_normal(shape, np.float32) for seed in seeds.tolist()]
            self.noise = torch.from_numpy(np.stack(draws))
        self.state = torch.zeros(num, num_decisions, joints)
        self.environment_state = torch.zeros(num, num_decisions, policy.config.env_state_feature.shape[0])
        self.words = torch.zeros(num, policy.config.max_words, dtype=torch.int64)
        self.motions = torch.zeros(num, *shape)
        self.density = torch.zeros(num, num_decisions, horizon)  # log-density of each motion

    @torch.no_grad()
    def __call__(
        self, decision: int, running: NDArray[np.int64], observation: Mapping[str, NDArray[np.float32]]
    ) -> NDArray[np.float64]:
        """See `robotics.rollouts.Decide`."""
        batch = self.preprocess(
            {
                OBS_STATE: torch.from_numpy(observation["agent_pos"]),
                OBS_ENV_STATE: torch.from_numpy(observation["environment_state"]),
                "task": [self.instructions[row] for row in running],
            }
        )
        seen = {name: batch[name] for name in (OBS_STATE, OBS_ENV_STATE, OBS_LANGUAGE_TOKENS, OBS_LANGUAGE_ATTENTION_MASK)}
        rows = torch.from_numpy(running)
        mean, log_std = self._distribution(seen)
        motions = mean + log_std.exp() * self.noise[rows, decision]
        self.state[rows, decision] = seen[OBS_STATE].cpu()
        self.environment_state[rows, decision] = seen[OBS_ENV_STATE].cpu()
        self.words[rows] = seen[OBS_LANGUAGE_TOKENS].cpu()
        self.motions[rows, decision] = motions
        self.density[rows, decision] = log_density(motions, mean, log_std)
        positions = self.policy.decode(self.state[rows, decision], motions)
        return self.postprocess(positions).double().numpy()

    def inputs(self, executed: Tensor) -> EpisodeInputs:
        """What was seen and decided, given how many motions of each chunk were executed (``[N, T]``)."""
        return EpisodeInputs(
            state=self.state, environment_state=self.environment_state, words=self.words, motions=self.motions, executed=executed
        )

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
