import itertools
import math

import pytest
import torch
from scipy import stats

from robotics.policies import flow


def row(*values):
    return torch.tensor([values], dtype=torch.float64).T


def test_interpolation_and_velocity():
    x, velocity = flow.interpolate(row(0.5), row(-1.0), torch.tensor([0.3], dtype=torch.float64))
    assert (x.item(), velocity.item()) == pytest.approx((0.05, -1.5))
    x, grid = row(-1.0), flow.time_grid(10).double()  # with the exact velocity, Euler steps end at the action
    for time, next_time in itertools.pairwise(grid):
        x = flow.euler_step(x, velocity, time[None], next_time[None])
    assert x.item() == pytest.approx(0.5)


def test_training_times_follow_the_shifted_beta_prior():
    uniform = (torch.arange(20_000, dtype=torch.float64) + 0.5) / 20_000
    times = flow.training_time(torch.special.ndtri(uniform))
    assert times.mean().item() == pytest.approx(0.6004, abs=1e-4)
    expected = 0.001 + 0.999 * stats.beta(1.5, 1.0).ppf(uniform.numpy())
    torch.testing.assert_close(times.double(), torch.from_numpy(expected), atol=1e-6, rtol=0)
    extreme = flow.training_time(torch.tensor([-40.0, 40.0]))
    assert extreme.tolist() == pytest.approx([0.001, 1.0])


def test_time_embedding():
    embedding = flow.time_embedding(torch.tensor([0.5, 0.25]), 4)
    expected = torch.tensor([[0.0, 0.707107, 1.0, 0.707107], [0.0, 0.382683, -1.0, 0.923880]])
    torch.testing.assert_close(embedding, expected, atol=1e-5, rtol=0)


def test_the_grid_runs_from_noise_to_action():
    assert flow.time_grid(4).tolist() == [1.0, 0.75, 0.5, 0.25, 0.0]
    assert flow.time_grid(1).tolist() == [1.0, 0.0]


def test_one_stochastic_step():
    x, velocity, time, after = row(0.4), row(-0.6), torch.tensor([0.5]).double(), torch.tensor([0.25]).double()
    mean, std = flow.sde_step(x, velocity, time, after, noise_level=0.5, second_time=0.75)
    assert (mean.item(), std.item()) == pytest.approx((0.54375, 0.25))
    assert flow.gaussian_log_density(row(0.6), mean, std).item() == pytest.approx(0.442043, abs=1e-6)
    assert flow.euler_step(x, velocity, time, after).item() == pytest.approx(0.55)
    still, _ = flow.sde_step(x, velocity, time, after, noise_level=1e-9, second_time=0.75)
    assert still.item() == pytest.approx(0.55)  # without noise it is the deterministic step


def test_the_first_step_uses_the_second_time():
    x = row(0.4)
    _, std = flow.sde_step(x, x, torch.tensor([1.0]).double(), torch.tensor([0.75]).double(), noise_level=0.5, second_time=0.75)
    assert std.item() == pytest.approx(0.5)  # sigma 1 over a quarter of time


def test_the_step_equals_flow_grpos_form():
    generator = torch.Generator().manual_seed(0)
    x, velocity = torch.randn(3, 4, 2, generator=generator).double(), torch.randn(3, 4, 2, generator=generator).double()
    time, after, a = torch.tensor([0.9, 0.5, 0.1]).double(), torch.tensor([0.6, 0.45, 0.0]).double(), 0.7
    mean, std = flow.sde_step(x, velocity, time, after, noise_level=a, second_time=0.5)
    for i in range(3):
        t, step = time[i].item(), (after - time)[i].item()
        variance = a * a * t / (1 - t)
        expected = x[i] * (1 + variance * step / (2 * t)) + velocity[i] * (1 + variance * (1 - t) / (2 * t)) * step
        torch.testing.assert_close(mean[i], expected)
        assert std[i].item() == pytest.approx(math.sqrt(-variance * step))


def test_gaussian_density_and_entropy():
    generator = torch.Generator().manual_seed(0)
    value, mean, std = (torch.rand(5, 3, generator=generator) + 0.1 for _ in range(3))
    normal = torch.distributions.Normal(mean, std)
    torch.testing.assert_close(flow.gaussian_log_density(value, mean, std), normal.log_prob(value))
    torch.testing.assert_close(flow.gaussian_entropy(std), normal.entropy())


def test_the_kl_of_a_step_is_exact():
    kl = flow.step_kl(row(0.02375), row(0.0), row(0.5 * math.sqrt(0.25)))
    assert kl.item() == pytest.approx(0.004513, abs=1e-6)  # Flow-GRPO's code would say 0.001128
    normals = [torch.distributions.Normal(row(mean), row(0.25)) for mean in (0.02375, 0.0)]
    torch.testing.assert_close(kl, torch.distributions.kl_divergence(*normals))


@pytest.mark.parametrize(("num_steps", "ode_std", "sde_std"), [(4, 0.341, 0.413), (10, 0.430, 0.463), (100, 0.492, 0.498)])
def test_stochastic_steps_keep_the_marginal_distribution(num_steps, ode_std, sde_std):
    """Data N(1, 0.5^2) with its exact velocity: the spread goes to 0.5 with the number of steps, with noise and without.

    A drift of the wrong sign gives 1.54, none gives 0.82. The standard error of a spread of 2e5 samples is 0.0008.
    """
    generator = torch.Generator().manual_seed(num_steps)
    num, m, s = 200_000, 1.0, 0.5
    grid = flow.time_grid(num_steps)
    ode = sde = torch.randn(num, 1, generator=generator)

    def velocity(x, t):
        return -m + (t - (1 - t) * s * s) / (t * t + (1 - t) ** 2 * s * s) * (x - (1 - t) * m)

    for time, after in itertools.pairwise(grid):
        ode = flow.euler_step(ode, velocity(ode, time.item()), time[None], after[None])
        mean, std = flow.sde_step(
            sde, velocity(sde, time.item()), time[None], after[None], noise_level=0.5, second_time=grid[1].item()
        )
        sde = mean + std * torch.randn(num, 1, generator=generator)
    assert (ode.std().item(), sde.std().item()) == pytest.approx((ode_std, sde_std), abs=0.004)
    assert (ode.mean().item(), sde.mean().item()) == pytest.approx((1.0, 1.0), abs=0.006)
