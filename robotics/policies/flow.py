"""Flow matching and its stochastic sampler, as pure tensor functions.

Time runs from ``t = 1`` (noise) to ``t = 0`` (action), as in openpi, LeRobot, RLinf and Flow-GRPO; the papers on π0 count the
other way. The interpolant is ``x_t = t * noise + (1 - t) * action`` and the network learns the velocity ``noise - action``.
Axes: ``B`` batch; times are ``[B]`` and apply to whole rows of ``x`` ``[B, ...]``.

Sources: π0 (arXiv 2410.24164) and π0.5 (2504.16054) for training, Flow-GRPO (2505.05470) and πRL (2510.25889) for the sampler.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

_LOG_2PI = math.log(2.0 * math.pi)
_MIN_PERIOD, _MAX_PERIOD = 4e-3, 4.0


def per_row(values: Tensor, like: Tensor) -> Tensor:
    """``values`` ``[B]`` with trailing axes of size 1, to go with ``like`` ``[B, ...]``."""
    return values.reshape(-1, *[1] * (like.dim() - 1))


def time_embedding(time: Tensor, dim: int) -> Tensor:
    """Sines, then cosines of ``2 pi t / p`` with ``dim / 2`` periods p geometric from 4e-3 to 4: ``[B]`` to ``[B, dim]``."""
    share = torch.linspace(0.0, 1.0, dim // 2, dtype=torch.float64, device=time.device)
    period = _MIN_PERIOD * (_MAX_PERIOD / _MIN_PERIOD) ** share
    angle = 2.0 * math.pi * time.double()[:, None] / period
    return torch.cat([angle.sin(), angle.cos()], dim=1).float()


def normal_to_uniform(normal: Tensor) -> Tensor:
    """The standard normal CDF, which turns normal draws into uniform ones in [0, 1]; float64."""
    return torch.special.ndtr(normal.double())


def training_time(normal: Tensor) -> Tensor:
    """Times to train on, ``0.001 + 0.999 * Beta(1.5, 1)``, from standard normal numbers ``[B]``; float32."""
    return (0.001 + 0.999 * normal_to_uniform(normal).pow(2.0 / 3.0)).float()


def interpolate(action: Tensor, noise: Tensor, time: Tensor) -> tuple[Tensor, Tensor]:
    """``x_t`` between ``action`` and ``noise`` at ``time``, and the velocity there, both shaped like ``action``."""
    t = per_row(time, action)
    return t * noise + (1.0 - t) * action, noise - action


def time_grid(num_steps: int) -> Tensor:
    """``[num_steps + 1]`` times of the sampler: 1, ..., 1 / num_steps, 0."""
    return torch.cat([torch.linspace(1.0, 1.0 / num_steps, num_steps), torch.zeros(1)])


def euler_step(x: Tensor, velocity: Tensor, time: Tensor, next_time: Tensor) -> Tensor:
    """One deterministic step, shaped like ``x``."""
    return x + per_row(next_time - time, x) * velocity


def sde_step(
    x: Tensor, velocity: Tensor, time: Tensor, next_time: Tensor, *, noise_level: float, second_time: float
) -> tuple[Tensor, Tensor]:
    """Mean (like ``x``) and standard deviation (``[B, 1, ...]``) of one Flow-SDE step.

    With steps small enough it leaves the distribution of ``x`` at each time as the deterministic steps have it. The spread is
    ``noise_level * sqrt(t / (1 - t))`` per square root of time; at ``t = 1``, where that is infinite, ``second_time`` (the
    grid's second point) stands in the denominator.
    """
    delta = time - next_time
    sigma = noise_level * (time / (1.0 - torch.where(time >= 1.0, second_time, time))).sqrt()
    action = x - per_row(time, x) * velocity
    noise = x + per_row(1.0 - time, x) * velocity
    noise_weight = next_time - sigma.square() * delta / (2.0 * time)
    mean = per_row(1.0 - next_time, x) * action + per_row(noise_weight, x) * noise
    return mean, per_row(sigma * delta.sqrt(), x)


def gaussian_log_density(value: Tensor, mean: Tensor, std: Tensor) -> Tensor:
    """Log-density of each number of ``value`` (same shape) under independent Gaussians."""
    return -0.5 * ((value - mean) / std).square() - std.log() - 0.5 * _LOG_2PI


def gaussian_entropy(std: Tensor) -> Tensor:
    """Entropy in nats, per number."""
    return std.log() + 0.5 * (1.0 + _LOG_2PI)


def step_kl(mean: Tensor, reference_mean: Tensor, std: Tensor) -> Tensor:
    """KL divergence of one step from a reference's step with the same ``std``, per number.

    ``std`` is that of the step, ``sigma * sqrt(delta)``. Flow-GRPO's code leaves out the ``delta``.
    """
    return 0.5 * ((mean - reference_mean) / std).square()
