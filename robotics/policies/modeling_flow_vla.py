"""A flow-matching policy with a density: π0's form, sampled with πRL's hybrid Flow-SDE.

A chunk is a vector of motions (`robotics.policies.motions`) that K denoising steps turn from noise into actions. In a sampled
decision one step, drawn uniformly or the last, is stochastic and the others are not; the density is the Gaussian one of that
step, given where it started. The start of the whole chain is not part of it. Axes: ``B`` batch, ``H`` chunk, ``A`` joints.

Records hold ``x`` ``[B, H, A]`` (where the step starts), ``target`` ``[B, H, A]``, ``time`` ``[B]`` (1 is noise) and ``step``
``[B]`` (number of the stochastic step). For demonstrations ``step`` is -1 and ``target`` is a velocity instead of the end of
the step; `FlowVlaPolicy.score` is then minus the squared error of the velocity: what flow matching minimises, not a density.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from lerobot.policies.pretrained import PreTrainedPolicy
from lerobot.utils.constants import OBS_STATE
from torch import Tensor, nn

from robotics.policies import flow
from robotics.policies.chunked import ActsInChunks
from robotics.policies.configuration_flow_vla import POLICY_TYPE, FlowVlaConfig
from robotics.policies.motions import decode_motions, encode_motions
from robotics.policies.seam import Decision, Observation
from robotics.policies.vla_backbone import Prefix, VlaBackbone


class FlowVlaPolicy(ActsInChunks, PreTrainedPolicy):
    """See `robotics.policies.seam.ChunkPolicy`."""

    config_class = FlowVlaConfig
    name = POLICY_TYPE

    def __init__(self, config: FlowVlaConfig, **_: Any) -> None:  # LeRobot also passes dataset statistics
        super().__init__(config)
        config.validate_features()
        self.observation_keys = config.observation_keys
        self.num_joints = config.action_feature.shape[0]
        width = config.width
        self.backbone = VlaBackbone(config, condition_width=width)
        self.action_in = nn.Linear(self.num_joints, width)
        self.action_positions = nn.Parameter(0.1 * torch.randn(config.chunk_size, width))
        self.time_mlp = nn.Sequential(nn.Linear(width, width), nn.SiLU(), nn.Linear(width, width), nn.SiLU())
        self.velocity_out = nn.Linear(width, self.num_joints)
        self.register_buffer("grid", flow.time_grid(config.num_denoising_steps), persistent=False)
        self.reset()

    def noise_shape(self) -> tuple[int, ...]:
        """The chain's start and the noise of the stochastic step, ``H * A`` each, and one number that draws the step."""
        return (2 * self.config.chunk_size * self.num_joints + 1,)

    @torch.no_grad()
    def decide(self, observation: Observation, noise: Tensor | None) -> Decision:
        """The decision without noise starts at zero, the most likely start, and takes deterministic steps only."""
        state, num_steps = observation[OBS_STATE], self.config.num_denoising_steps
        sampled = noise is not None
        x, step_noise, draw = self._split(state.new_zeros(len(state), *self.noise_shape()) if noise is None else noise)
        chosen = (flow.normal_to_uniform(draw) * num_steps).long().clamp(max=num_steps - 1)
        if self.config.stochastic_step == "last":
            chosen = torch.full_like(chosen, num_steps - 1)
        prefix = self.backbone.read(observation)
        start, end = torch.zeros_like(x), torch.zeros_like(x)
        density = torch.zeros_like(x[..., 0])
        for k in range(num_steps):
            time, next_time = self.grid[k].expand(len(x)), self.grid[k + 1].expand(len(x))
            velocity = self._velocity(prefix, x, time)
            mean, std = self._step(x, velocity, time, next_time)
            here = (chosen == k)[:, None, None]
            following = flow.euler_step(x, velocity, time, next_time)
            if sampled:
                following = torch.where(here, mean + std * step_noise, following)
            log_density = flow.gaussian_log_density(following, mean, std).sum(dim=2)
            density = torch.where(here[..., 0], log_density, density)
            start, end = torch.where(here, x, start), torch.where(here, following, end)
            x = following
        record = {"x": start, "target": end, "time": self.grid[chosen], "step": chosen}
        return Decision(decode_motions(state, x, self.config.max_delta), record, density.float())

    def score(self, observation: Observation, record: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
        """Of demonstrations: minus the mean squared error of each action's velocity, and an entropy of 0."""
        x, target, step = record["x"], record["target"], record["step"]
        velocity = self._velocity(self.backbone.read(observation), x, record["time"])
        index = step.clamp(min=0)
        mean, std = self._step(x, velocity, self.grid[index], self.grid[index + 1])
        density = flow.gaussian_log_density(target, mean, std).sum(dim=2)
        imitated = (step < 0)[:, None]
        density = torch.where(imitated, -(velocity - target).square().mean(dim=2), density)
        entropy = flow.gaussian_entropy(std).expand_as(x).sum(dim=2)
        return density.float(), torch.where(imitated, 0.0, entropy).float()

    def imitate(self, observation: Observation, chunk: Tensor, noise: Tensor) -> dict[str, Tensor]:
        """A point between the demonstrated motions and noise, and the velocity there."""
        motions = encode_motions(observation[OBS_STATE], chunk, self.config.max_delta)
        start, _, draw = self._split(noise)
        time = flow.training_time(draw)
        x, velocity = flow.interpolate(motions, start, time)
        return {"x": x, "target": velocity, "time": time, "step": torch.full_like(draw, -1, dtype=torch.int64)}

    def _split(self, noise: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Two of ``[B, H, A]`` and one of ``[B]``."""
        size = self.config.chunk_size * self.num_joints
        start, step_noise, draw = noise.split([size, size, 1], dim=1)
        shape = (self.config.chunk_size, self.num_joints)
        return start.unflatten(1, shape), step_noise.unflatten(1, shape), draw[:, 0]

    def _velocity(self, prefix: Prefix, x: Tensor, time: Tensor) -> Tensor:
        """``[B, H, A]``, given ``x`` of that shape and ``time`` ``[B]``."""
        condition = self.time_mlp(flow.time_embedding(time, self.config.width))
        tokens = self.backbone.act(prefix, self.action_in(x) + self.action_positions, condition)
        return self.velocity_out(tokens)

    def _step(self, x: Tensor, velocity: Tensor, time: Tensor, next_time: Tensor) -> tuple[Tensor, Tensor]:
        second_time = 1.0 - 1.0 / self.config.num_denoising_steps
        return flow.sde_step(x, velocity, time, next_time, noise_level=self.config.sde_noise, second_time=second_time)
