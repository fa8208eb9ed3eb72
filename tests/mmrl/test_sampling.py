"""`mmrl.sampling`: tasks and seeds are functions of a seed and a counter."""

import json

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from mmrl.errors import DataError
from mmrl.sampling import (
    DomainSampler,
    TaskSampler,
    allocate,
    domain_weights,
    rollout_seeds,
)
from mmrl.types import Task


def sampler(num_tasks=10, order="shuffled", seed=0):
    return TaskSampler(range(num_tasks), order=order, seed=seed)


@given(num_tasks=st.integers(1, 12), counts=st.lists(st.integers(0, 15), max_size=6), seed=st.integers(0, 3))
def test_every_epoch_draws_every_task_once(num_tasks, counts, seed):
    tasks = sampler(num_tasks, seed=seed)
    drawn = [task for count in counts for task in tasks.next(count)]
    assert tasks.position == len(drawn) == sum(counts)
    for start in range(0, len(drawn), num_tasks):
        epoch = drawn[start : start + num_tasks]
        assert len(set(epoch)) == len(epoch)
        assert len(epoch) < num_tasks or set(epoch) == set(range(num_tasks))


@given(position=st.integers(0, 60), order=st.sampled_from(["shuffled", "sequential"]))
def test_the_position_is_the_whole_state(position, order):
    walked, jumped = sampler(order=order), sampler(order=order)
    walked.next(position)
    jumped.position = position
    assert walked.next(25) == jumped.next(25)


def test_the_order_is_new_each_epoch_and_for_each_seed():
    tasks = sampler(20)
    first, second = tasks.next(20), tasks.next(20)
    assert first != second
    assert first != sampler(20, seed=1).next(20)
    assert first == sampler(20).next(20)
    assert first != list(range(20))


def test_a_sequential_order_is_that_of_the_source_and_wraps():
    assert sampler(3, order="sequential").next(7) == [0, 1, 2, 0, 1, 2, 0]


def test_a_source_without_tasks_is_refused():
    with pytest.raises(DataError, match="the task source has 0 tasks; check the dataset's path, split and limit"):
        sampler(0)


def test_seeds_depend_on_the_run_the_step_and_the_attempt_only():
    seeds = rollout_seeds(3, 5, 0, 8)
    assert torch.equal(seeds, rollout_seeds(3, 5, 0, 8))
    assert torch.equal(seeds[:3], rollout_seeds(3, 5, 0, 3))
    for other in (rollout_seeds(4, 5, 0, 8), rollout_seeds(3, 6, 0, 8), rollout_seeds(3, 5, 1, 8)):
        assert not set(seeds.tolist()) & set(other.tolist())


def test_seeds_are_different_and_fit_every_generator():
    seeds = rollout_seeds(0, 1, 0, 10_000)
    assert seeds.dtype == torch.int64
    assert seeds.shape == (10_000,)
    assert len(seeds.unique()) == 10_000
    assert int(seeds.min()) >= 0
    torch.Generator().manual_seed(int(seeds.max()))
    assert rollout_seeds(0, 1, 0, 0).shape == (0,)


# ---- domain-aware sampling: algorithms.md 10.6 and 12.2 -----------------------------------------------------------------

REWARDS = {"a": 0.9, "b": 0.5, "c": 0.2}


@pytest.mark.parametrize(
    ("temperature", "weights", "counts"),
    [
        (0.3, [0.066199, 0.251138, 0.682663], [4, 16, 44]),
        (0.8, [0.198114, 0.326635, 0.475251], [12, 20, 32]),
    ],
)
def test_domains_far_from_their_target_get_more_tasks(temperature, weights, counts):
    found = domain_weights(REWARDS, temperature=temperature)
    assert list(found.values()) == pytest.approx(weights, abs=1e-6)
    assert list(allocate(found, 64).values()) == counts


def test_domains_without_a_reward_have_a_uniform_weight():
    assert domain_weights({"a": None, "b": None}) == {"a": 0.5, "b": 0.5}
    found = domain_weights({"a": None, "b": 0.0, "c": 0.0, "d": 2.0})
    assert found["a"] == 0.25 and found["b"] == found["c"] > found["d"]
    assert sum(found.values()) == pytest.approx(1.0)


@given(weights=st.lists(st.floats(0, 1), min_size=1, max_size=6).filter(lambda w: sum(w) > 0), count=st.integers(0, 100))
def test_all_places_are_given_away(weights, count):
    shares = allocate({str(i): w / sum(weights) for i, w in enumerate(weights)}, count)
    assert sum(shares.values()) == count and min(shares.values()) >= 0


def domain_sampler(**options):
    source = [Task(id=f"{domain}{i}", domain=domain) for domain in "abc" for i in range(5)]
    return DomainSampler(source, order="shuffled", seed=3, **{"refresh": 1, **options})


def test_weights_follow_the_smoothed_reward_at_every_refresh():
    sampler = domain_sampler(refresh=2, smoothing=0.5)
    assert [task.domain for task in sampler.next(6)] == ["a", "a", "b", "b", "c", "c"]
    sampler.observe({"a": 1.0, "b": 0.2})
    assert list(sampler.weights.values()) == pytest.approx([1 / 3] * 3)
    sampler.observe({"a": 0.8, "b": 0.8, "c": 0.2})
    assert sampler.averages == pytest.approx({"a": 0.9, "b": 0.5, "c": 0.2})
    assert list(sampler.weights.values()) == pytest.approx([0.066199, 0.251138, 0.682663], abs=1e-6)


def test_a_domain_is_walked_through_without_replacement_and_wraps():
    sampler = domain_sampler()
    drawn = [task.id for task in sampler.next(3 * 15)]
    for domain in "abc":
        members = [name for name in drawn if name[0] == domain]
        assert all(sorted(members[i : i + 5]) == [f"{domain}{k}" for k in range(5)] for i in (0, 5, 10))


def test_a_domain_sampler_goes_on_from_its_state():
    first, second = domain_sampler(), domain_sampler()
    first.next(7)
    first.observe(REWARDS)
    second.load_state(json.loads(json.dumps(first.state())))
    assert [task.id for task in first.next(20)] == [task.id for task in second.next(20)]
    first.observe({"a": 0.0})
    second.observe({"a": 0.0})
    assert first.state() == second.state()
