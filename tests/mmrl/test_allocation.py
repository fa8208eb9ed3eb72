"""`mmrl.allocation`: more rollouts for tasks that are expected to succeed rarely, at the same number per step."""

import json
from itertools import pairwise
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mmrl.allocation import AllocatingSampler, allocate_rollouts, decayed_counts, expected_success, rollout_shares
from mmrl.collection import collect
from mmrl.config import validate
from mmrl.errors import ConfigError
from mmrl.pools import build_sampler
from mmrl.rewards import group_term, resolve_terms
from mmrl.sampling_config import SamplingConfig
from mmrl.testing import BanditAdapter
from mmrl.trainer import Trainer
from mmrl.types import Task

ONE = SimpleNamespace(num_processes=1, process_index=0)


def test_the_estimate_of_the_document():
    counts = decayed_counts(decayed_counts((0.0, 0.0), 8, 1, decay=0.9), 8, 2, decay=0.9)
    assert counts == pytest.approx((15.2, 2.9))
    assert expected_success(counts, (1.0, 1.0)) == pytest.approx(0.226744, abs=1e-6)
    assert expected_success((0.0, 0.0)) == 0.5


def test_the_allocation_of_the_document():
    shares = rollout_shares([0.04, 0.25, 0.81], 48)
    assert shares == pytest.approx([29.589041, 11.835616, 6.575342], abs=1e-6)
    assert rollout_shares([0.0, 0.75], 30, eps=0.25) == pytest.approx([20, 10])
    # Two rollouts are left over; the remainders 0.836 and 0.589 are larger than 0.575.
    assert allocate_rollouts([0.04, 0.25, 0.81], 48, low=1, high=48) == [30, 12, 6]


def test_bounds_pass_what_they_take_to_the_others_in_proportion():
    # 24 to the first; the other 24 in proportion 2 : 10/9, 15.43 and 8.57.
    assert allocate_rollouts([0.04, 0.25, 0.81], 48, low=4, high=24) == [24, 15, 9]
    assert allocate_rollouts([0.04, 0.25, 0.81], 48, low=10, high=48) == [27, 11, 10]
    assert allocate_rollouts([0.04, 0.25, 0.81], 48, low=16, high=16) == [16, 16, 16]
    assert allocate_rollouts([0.5] * 4, 10, low=2, high=8) == [3, 3, 2, 2]


@given(
    expected=st.lists(st.floats(1e-3, 1.0), min_size=1, max_size=12), low=st.integers(1, 4), extra=st.integers(0, 30),
    data=st.data(),
)  # fmt: skip
def test_the_budget_is_met_within_the_bounds(expected, low, extra, data):
    high = low + extra
    budget = data.draw(st.integers(low * len(expected), high * len(expected)))
    counts = allocate_rollouts(expected, budget, low=low, high=high)
    assert sum(counts) == budget and all(low <= count <= high for count in counts)
    ranked = sorted(zip(expected, counts))
    assert all(left[1] >= right[1] - 1 for left, right in pairwise(ranked))


TASKS = [Task(id=str(index)) for index in range(4)]


def sampler_of(**section):
    config = SamplingConfig(tasks_per_step=4, group_size=8, order="sequential", allocation={"low": 2, "high": 32, **section})
    return build_sampler(config, TASKS, 0)


def test_groups_are_equal_until_successes_differ():
    sampler = sampler_of(decay=0.5)
    assert isinstance(sampler, AllocatingSampler)
    tasks = sampler.next(4)
    assert sampler.group_sizes(tasks, 8) == [8] * 4
    sampler.observe_attempts({"0": (0.0, 8.0), "1": (8.0, 8.0), "2": (8.0, 8.0)})
    # p = 1/10, 9/10, 9/10 and 1/2, so weights 3.16, 1.05, 1.05 and 1.41.
    sizes = sampler.group_sizes(sampler.next(4), 8)
    assert sum(sizes) == 32 and sizes[0] > sizes[3] > sizes[1] == sizes[2]
    assert sampler.totals()["sampling/expected_success"] == (pytest.approx(2.4), 4)
    assert sampler.totals()["sampling/largest_group"] == (float(sizes[0]), 1)
    sampler.observe_attempts({"0": (8.0, 8.0)})
    assert sampler.counts["0"] == (12.0, 8.0)


def test_an_allocation_goes_on_from_its_state():
    walked, resumed = sampler_of(), sampler_of()
    walked.next(4)
    walked.observe_attempts({"0": (1.0, 8.0), "3": (7.0, 8.0)})
    resumed.load_state(json.loads(json.dumps(walked.state())))
    assert resumed.position == 4 and resumed.counts == walked.counts
    assert resumed.group_sizes(TASKS, 8) == walked.group_sizes(TASKS, 8)
    assert resumed.next(3) == walked.next(3)


def test_collection_gives_rare_successes_more_rollouts(bandit_config):
    config = bandit_config(
        sampling={"tasks_per_step": 4, "group_size": 6, "order": "sequential", "allocation": {"low": 2, "high": 16}},
        algorithm={"name": "reinforce_ada", "selection": "none", "subsample": "none", "difficulty_weight": "inverse_sqrt"},
    )  # fmt: skip
    # One of a group of context 0 is right, all but one of context 1, all of the others.
    term = group_term(
        lambda task, outcomes: [float({0: i == 0, 1: i > 0}.get(task.context, True)) for i in range(len(outcomes))]
    )
    adapter = BanditAdapter(reward_terms={"accuracy": term})
    policy = adapter.build_policy()
    source = adapter.task_source("train")[:4]
    sampler = build_sampler(config.sampling, source, config.seed)
    terms = resolve_terms(config.rewards, adapter.reward_terms)
    first = collect(config, adapter, policy, sampler, terms, ONE, train_step=1)
    assert first.batch.group_ids.bincount().tolist() == [6] * 4
    assert sampler.counts["train/0"] == (6.0, 1.0) and sampler.counts["train/1"] == (6.0, 5.0)
    second = collect(config, adapter, policy, sampler, terms, ONE, train_step=2)
    sizes = second.batch.group_ids.bincount().tolist()
    assert sum(sizes) == 24 and sizes[0] > 6 > sizes[2] == sizes[3]
    assert [task.id for task in second.batch.tasks] == [f"train/{i}" for i, size in enumerate(sizes) for _ in range(size)]
    assert len(set(second.batch.seeds.tolist())) == 24
    # (r - p) / sqrt(p) with the group's own rate.
    rate = 1 / sizes[0]
    expected = [(1 - rate) / rate**0.5] + [-rate / rate**0.5] * (sizes[0] - 1)
    assert second.advantages[: sizes[0]].tolist() == pytest.approx(expected, abs=1e-5)


@pytest.mark.parametrize(
    ("sampling", "message"),
    [
        ({"group_size": 2, "allocation": {}}, "group_size is 2, the mean of groups between allocation.low 4"),
        ({"allocation": {"prior": [0.0, 1.0]}}, "expected a positive number of successes"),
    ],
)
def test_bounds_that_cannot_be_met_are_refused(sampling, message):
    with pytest.raises(ConfigError, match=message):
        validate(sampling, SamplingConfig, "test")


def test_demonstrations_have_no_groups_to_allocate(bandit_config):
    config = bandit_config(algorithm="sft", sampling={"allocation": {}})
    with pytest.raises(ConfigError, match=r"sampling\.allocation and algorithm\.source: demonstrations"):
        Trainer(config, BanditAdapter(), cpu=True)
