"""`mmrl.sampling`: tasks and seeds are functions of a seed and a counter."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from mmrl.errors import DataError
from mmrl.sampling import TaskSampler, rollout_seeds


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
