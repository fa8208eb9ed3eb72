"""LeRobot's policies behind `robotics.policies.seam.ChunkPolicy`, as they are.

`FlowChunkView` samples SmolVLA, pi0 and pi0.5 with the hybrid Flow-SDE of piRL (arXiv 2510.25889): of the K denoising steps
one, drawn uniformly, is stochastic, and the density of a decision is the Gaussian one of that step given where it started.
Noise goes into the robot's own action dimensions only; the padding that these networks carry beside them follows the
deterministic path, so nothing that is left out of the density reaches the commands. Axes: ``B`` batch, ``H`` chunk, ``A``
joints, ``M`` action dimensions with padding.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
from lerobot.policies.pretrained import PreTrainedPolicy
from torch import Tensor, nn
from torch.nn.functional import pad

from mmrl.errors import AdapterError
from robotics.policies import flow
from robotics.policies.lerobot_prefix import FLOW_POLICIES, num_denoising_steps, observation_keys, read
from robotics.policies.seam import Decision, Observation

DEFAULT_SDE_NOISE = 0.5


def chunk_view(policy: PreTrainedPolicy) -> FlowChunkView | ActOnlyView:
    """``policy`` as something that acts in chunks, and, if it is a flow policy, can be scored."""
    return FlowChunkView(policy) if isinstance(policy, FLOW_POLICIES) else ActOnlyView(policy)


class FlowChunkView:
    """A flow policy of LeRobot as a `ChunkPolicy`. Its attribute ``sde_noise``, where set, is the noise level a.

    Records hold ``x`` ``[B, H, M]`` (where the step starts), ``target`` ``[B, H, A]`` (where it ends), ``time`` ``[B]`` (1 is
    noise) and ``step`` ``[B]`` (number of the stochastic step). For demonstrations ``step`` is -1 and ``target`` a velocity.
    """

    def __init__(self, policy: PreTrainedPolicy) -> None:
        self.policy, self.config = policy, policy.config
        self.observation_keys = observation_keys(policy)
        self.num_steps = num_denoising_steps(policy)
        self.noise_level = getattr(policy, "sde_noise", DEFAULT_SDE_NOISE)
        self.chunk_size, self.num_joints = self.config.chunk_size, self.config.action_feature.shape[0]
        self.width = self.config.max_action_dim
        self.grid = flow.time_grid(self.num_steps)

    def parameters(self) -> Iterator[nn.Parameter]:
        """Those of the policy."""
        return self.policy.parameters()

    def noise_shape(self) -> tuple[int, ...]:
        """The chain's start (``H * M``), the noise of the stochastic step (``H * A``), and one number that draws the step."""
        return (self.chunk_size * (self.width + self.num_joints) + 1,)

    @torch.no_grad()
    def decide(self, observation: Observation, noise: Tensor | None) -> Decision:
        """The decision without noise starts at zero, the most likely start, and takes deterministic steps only."""
        first = observation[self.observation_keys[0]]
        num, sampled = len(first), noise is not None
        noise = torch.zeros(num, *self.noise_shape(), device=first.device) if noise is None else noise.float()
        x, step_noise, draw = self._split(noise)
        grid = self.grid.to(x.device)
        chosen = (flow.normal_to_uniform(draw) * self.num_steps).long().clamp(max=self.num_steps - 1)
        predict = read(self.policy, observation)
        start, end = torch.zeros_like(x), torch.zeros_like(step_noise)
        density = torch.zeros_like(step_noise[..., 0])
        for k in range(self.num_steps):
            time, next_time = grid[k].expand(num), grid[k + 1].expand(num)
            velocity = predict(x, time)
            following = flow.euler_step(x, velocity, time, next_time)
            mean, std = self._step(x, velocity, time, next_time)
            here = (chosen == k)[:, None, None]
            joints = self._joints(following)
            if sampled:
                joints = torch.where(here, mean + std * step_noise, joints)
            log_density = flow.gaussian_log_density(joints, mean, std).sum(dim=2)
            density = torch.where(here[..., 0], log_density, density)
            start, end = torch.where(here, x, start), torch.where(here, joints, end)
            x = torch.cat([joints, following[..., self.num_joints :]], dim=2)
        record = {"x": start, "target": end, "time": grid[chosen], "step": chosen}
        return Decision(self._joints(x), record, density)

    def score(self, observation: Observation, record: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
        """Of demonstrations: minus the mean squared error of each action's velocity, and an entropy of 0."""
        x, target, step = record["x"], record["target"], record["step"]
        grid = self.grid.to(x.device)
        velocity = read(self.policy, observation)(x, record["time"])
        index = step.clamp(min=0)
        mean, std = self._step(x, velocity, grid[index], grid[index + 1])
        density = flow.gaussian_log_density(target, mean, std).sum(dim=2)
        imitated = (step < 0)[:, None]
        density = torch.where(imitated, -(self._joints(velocity) - target).square().mean(dim=2), density)
        entropy = flow.gaussian_entropy(std).expand_as(mean).sum(dim=2)
        return density, torch.where(imitated, 0.0, entropy)

    def imitate(self, observation: Observation, chunk: Tensor, noise: Tensor) -> dict[str, Tensor]:
        """A point between the demonstrated actions and noise, and the velocity there."""
        start, _, draw = self._split(noise)
        time = flow.training_time(draw)
        x, velocity = flow.interpolate(pad(chunk, (0, self.width - self.num_joints)), start, time)
        return {"x": x, "target": self._joints(velocity), "time": time, "step": torch.full_like(draw, -1, dtype=torch.int64)}

    def _split(self, noise: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """``[B, H, M]``, ``[B, H, A]`` and ``[B]``."""
        shapes = ((self.chunk_size, self.width), (self.chunk_size, self.num_joints))
        start, step_noise, draw = noise.split([*(rows * columns for rows, columns in shapes), 1], dim=1)
        return start.unflatten(1, shapes[0]), step_noise.unflatten(1, shapes[1]), draw[:, 0]

    def _joints(self, x: Tensor) -> Tensor:
        return x[..., : self.num_joints]

    def _step(self, x: Tensor, velocity: Tensor, time: Tensor, next_time: Tensor) -> tuple[Tensor, Tensor]:
        """Mean ``[B, H, A]`` and standard deviation ``[B, 1, 1]``."""
        return flow.sde_step(
            self._joints(x), self._joints(velocity), time, next_time,
            noise_level=self.noise_level, second_time=float(self.grid[1]),
        )  # fmt: skip


class ActOnlyView:
    """Any other policy of LeRobot: it can be rolled out and measured, not trained here.

    Each decision starts afresh, so a policy that keeps past observations sees the present one in their place, and what a policy
    samples depends on nothing but the observations of the batch.
    """

    def __init__(self, policy: PreTrainedPolicy) -> None:
        self.policy, self.config = policy, policy.config
        self.observation_keys = tuple(self.config.input_features)

    def parameters(self) -> Iterator[nn.Parameter]:
        """Those of the policy."""
        return self.policy.parameters()

    def noise_shape(self) -> tuple[int, ...]:
        """One number that is not used."""
        return (1,)

    @torch.no_grad()
    def decide(self, observation: Observation, noise: Tensor | None) -> Decision:
        """The actions that ``select_action`` gives one after the other, with a density of 0."""
        self.policy.reset()
        with torch.random.fork_rng():
            torch.manual_seed(0)
            actions = [self.policy.select_action(dict(observation)) for _ in range(self.config.n_action_steps)]
        self.policy.reset()
        chunk = torch.stack(actions, dim=1)
        return Decision(chunk, {}, torch.zeros(chunk.shape[:2], device=chunk.device))

    def score(self, observation: Observation, record: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
        """Refused."""
        raise self._refusal()

    def imitate(self, observation: Observation, chunk: Tensor, noise: Tensor) -> dict[str, Tensor]:
        """Refused."""
        raise self._refusal()

    def _refusal(self) -> AdapterError:
        return AdapterError(
            f"policy of type {self.config.type!r} can act but not be trained here: it does not say how likely its actions are. "
            "Trained are: mmrl_gaussian_chunk, mmrl_flow_vla, mmrl_token_vla, smolvla, pi0, pi05."
        )
