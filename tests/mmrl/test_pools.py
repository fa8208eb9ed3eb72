"""`mmrl.pools` and `mmrl.probing`: tasks are chosen by what the starting policy makes of them."""

import json
from types import SimpleNamespace

import pytest

from mmrl.algorithm_config import AlgorithmConfig
from mmrl.collection import collect
from mmrl.config import RunConfig, validate
from mmrl.errors import ConfigError, DataError, RewardError
from mmrl.pools import ProbedSampler, build_sampler
from mmrl.probing import Attempts, PolicyMeasure
from mmrl.rewards import group_term, resolve_terms
from mmrl.sampling import DomainSampler, TaskSampler, rollout_seeds
from mmrl.sampling_config import ProbeConfig, SamplingConfig
from mmrl.testing import BanditAdapter
from mmrl.types import Task

ONE = SimpleNamespace(num_processes=1, process_index=0)
RATES = [0.0, 0.25, 1.0, 0.5, None, 0.875, 0.125, 1.0]
TASKS = [Task(id=str(index), domain="ab"[index % 2]) for index in range(8)]


def measure_rates(rates):
    """A measure that knows the rates by the tasks' ids, and the calls it had."""
    calls = []

    def measure(tasks, rollouts, round=0, *, reasoning_until=None):
        calls.append((len(tasks), rollouts))
        return [Attempts(pass_rate=rates[int(task.id)], wrong=None) for task in tasks]

    return measure, calls


def prepared(rates=RATES, **sampling):
    sampler = build_sampler(SamplingConfig(tasks_per_step=4, order="sequential", **sampling), TASKS, 0)
    sampler.prepare(measure_rates(rates)[0])
    return sampler


def ids(tasks):
    return [task.id for task in tasks]


def test_a_sampler_without_a_rule_is_no_sampler():
    with pytest.raises(TypeError, match="abstract"):
        ProbedSampler(TASKS, SamplingConfig(), ProbeConfig(), 0)


def test_filtering_drops_tasks_that_are_never_solved():
    sampler = prepared(filter={})
    assert ids(sampler.next(8)) == ["1", "2", "3", "5", "6", "7", "1", "2"]
    assert len(sampler.source) == 6
    # 6 of 8 are kept; seven have a rate, whose sum is 3.75.
    assert sampler.totals() == {"sampling/kept": (6, 8), "sampling/pass_rate": (3.75, 7)}


def test_filtering_has_bounds_open_below_and_closed_above():
    assert ids(prepared(filter={"above": 0.125, "up_to": 0.5}).next(4)) == ["1", "3", "1", "3"]


def test_only_the_tasks_that_were_looked_at_are_drawn():
    assert ids(prepared(filter={"num_tasks": 3}).next(3)) == ["1", "2", "1"]


def test_the_policy_is_looked_at_once():
    measure, calls = measure_rates(RATES)
    sampler = build_sampler(SamplingConfig(filter={"rollouts": 5}), TASKS, 0)
    assert len(sampler.source) == 8
    sampler.prepare(measure)
    sampler.prepare(measure)
    assert calls == [(8, 5)]


def test_filtered_tasks_are_drawn_by_domain_where_the_config_says_so():
    sampler = prepared(filter={}, domains={"refresh": 1, "temperature": 0.1})
    assert isinstance(sampler.inner, DomainSampler)
    sampler.observe({"a": 1.0, "b": 0.0})
    assert ids(sampler.next(4)) == ["1", "3", "5", "7"]


def test_a_pool_without_tasks_is_refused():
    with pytest.raises(DataError, match=r"none of 8 tasks is kept by sampling.filter.*fails 8, solves 0 always and 0 some"):
        prepared([0.0] * 8, filter={})
    with pytest.raises(DataError, match="none of 8 tasks is easy"):
        prepared([0.125] * 8, pairs={})


def test_a_pair_is_a_hard_and_an_easy_task():
    # Of 8 rollouts one or two are rare: hard are 1/8 and 2/8, easy 6/8 and 7/8; 0 and 1 are neither.
    sampler = prepared(pairs={"rollouts": 8, "rare": 2})
    assert ids(sampler.next(4)) == ["1", "5", "6", "5"]
    assert sampler.position == 4
    sampler = prepared([0.0, 0.125, 0.25, 0.375, 0.625, 0.75, 0.875, 1.0], pairs={"rollouts": 8, "rare": 2})
    assert ids(sampler.source) == ["1", "2", "5", "6"]


@pytest.mark.parametrize("choice", [{}, {"filter": {}}, {"pairs": {}}, {"filter": {}, "domains": {}}])
@pytest.mark.parametrize("order", ["shuffled", "sequential"])
def test_a_sampler_goes_on_from_its_state_without_the_starting_policy(choice, order):
    config = SamplingConfig(tasks_per_step=4, order=order, **choice)
    walked, resumed = build_sampler(config, TASKS, 3), build_sampler(config, TASKS, 3)
    walked.prepare(measure_rates(RATES)[0])
    walked.next(6)
    state = json.loads(json.dumps(walked.state()))
    resumed.load_state(state)
    resumed.prepare(measure_rates([1.0] * 8)[0])
    assert resumed.position == walked.position == 6
    assert resumed.next(10) == walked.next(10)
    assert resumed.totals() == walked.totals()


def test_a_state_from_before_the_look_undoes_it():
    sampler = build_sampler(SamplingConfig(order="sequential", filter={}), TASKS, 0)
    before = sampler.state()
    sampler.prepare(measure_rates(RATES)[0])
    sampler.next(3)
    sampler.load_state(before)
    assert sampler.position == 0
    assert ids(sampler.next(2)) == ["0", "1"]


@pytest.mark.parametrize(
    ("sampling", "message"),
    [
        ({"filter": {}, "pairs": {}}, "filter and pairs each choose the tasks"),
        ({"pairs": {}, "domains": {}}, "pairs and domains"),
        ({"filter": {}, "failure_prefix": {}}, "filter and failure_prefix each choose the tasks"),
        ({"failure_prefix": {}, "domains": {}}, "failure_prefix and domains"),
        ({"failure_prefix": {"cuts": [0.5, 1.0]}}, "expected shares between 0 and 1, found 0.5, 1"),
        ({"pairs": {}, "tasks_per_step": 3}, "pairs need an even number"),
        ({"pairs": {"rollouts": 4, "rare": 2}}, "rare is 2 of 4 rollouts"),
        ({"filter": {"above": 0.5, "up_to": 0.5}}, "no pass rate lies between them"),
    ],
)
def test_choices_that_contradict_each_other_are_refused(sampling, message):
    with pytest.raises(ConfigError, match=message):
        validate(sampling, SamplingConfig, "test")


# ---- with a policy ------------------------------------------------------------------------------------------------------


def by_context(values):
    """A term whose rewards of a group depend on the context: ``values[context]`` cycled over the rollouts."""
    return group_term(lambda task, outcomes: [values[task.context][i % 2] for i in range(len(outcomes))])


MIXED = {0: [0.0, 0.0], 1: [1.0, 0.0], 2: [1.0, 1.0], 3: [0.0, 1.0]}


class ReasoningBandit(BanditAdapter):
    """All of its choices are its reasoning."""

    def reasoning_ids(self, outcome, until):
        return tuple(outcome)


def measure_bandit(config: RunConfig, term, accelerator=ONE):
    adapter = ReasoningBandit(reward_terms={"accuracy": term})
    return PolicyMeasure(
        config=config, adapter=adapter, policy=adapter.build_policy(),
        terms=resolve_terms(config.rewards, adapter.reward_terms), accelerator=accelerator, train_step=1,
    )  # fmt: skip


def test_pass_rates_and_a_wrong_rollout_come_from_the_policy_at_hand(bandit_config):
    measure = measure_bandit(bandit_config(sampling={"tasks_per_step": 2}), by_context(MIXED))
    tasks = BanditAdapter().task_source("train")[:5]
    found = measure(tasks, 4, reasoning_until="</think>")
    assert [entry.pass_rate for entry in found] == [0.0, 0.5, 1.0, 0.5, 0.0]
    assert [entry.wrong is None for entry in found] == [False, False, True, False, False]
    # Of task 1 rollouts 1 and 3 are wrong; the one of the smaller seed is given, whatever it was attempted with.
    seeds = rollout_seeds(0, 1, 1 << 20, 20).view(5, 4)
    batch = measure.adapter.rollout(measure.policy, tasks[1:2], group_size=4, seeds=seeds[1])
    assert found[1].wrong == tuple(batch.outcomes[1 if seeds[1, 1] < seeds[1, 3] else 3])
    plain = measure(tasks, 4)
    assert [entry.pass_rate for entry in plain] == [entry.pass_rate for entry in found]
    assert all(entry.wrong is None for entry in plain)


def test_rollouts_without_a_metric_have_no_pass_rate(bandit_config):
    measure = measure_bandit(bandit_config(), lambda task, outcome: None if task.context == 0 else 1.0)
    assert [entry.pass_rate for entry in measure(BanditAdapter().task_source("train")[:2], 2)] == [None, 1.0]


def test_a_reward_that_raises_while_looking_ends_the_run(bandit_config):
    def broken(task, outcome):
        raise KeyError("answer")

    with pytest.raises(RewardError, match="accuracy"):
        measure_bandit(bandit_config(), broken)(BanditAdapter().task_source("train")[:2], 2)


def test_collection_looks_before_it_draws_and_logs_what_is_kept(bandit_config):
    config = bandit_config(sampling={"tasks_per_step": 4, "order": "sequential", "filter": {"rollouts": 2, "up_to": 0.5}})
    adapter = BanditAdapter(reward_terms={"accuracy": by_context(MIXED)})
    sampler = build_sampler(config.sampling, adapter.task_source("train"), config.seed)
    terms = resolve_terms(config.rewards, adapter.reward_terms)
    result = collect(config, adapter, adapter.build_policy(), sampler, terms, ONE, train_step=1)
    assert ids(result.batch.tasks[::4]) == ["train/1", "train/3", "train/5", "train/7"]
    assert result.totals["sampling/kept"] == (12, 24)
    assert (result.advantages != 0).all()
    plain = TaskSampler(adapter.task_source("train"), order="sequential", seed=0)
    assert "sampling/kept" not in collect(config, adapter, adapter.build_policy(), plain, terms, ONE, train_step=1).totals


def test_correctness_is_that_of_the_algorithm(bandit_config):
    values = {context: [0.6, 0.6] for context in range(4)}
    config = bandit_config()
    assert AlgorithmConfig().correct_above < 0.6
    assert measure_bandit(config, by_context(values))(BanditAdapter().task_source("train")[:1], 2)[0].pass_rate == 1.0
    strict = config.model_copy(update={"algorithm": config.algorithm.model_copy(update={"correct_above": 0.7})})
    assert measure_bandit(strict, by_context(values))(BanditAdapter().task_source("train")[:1], 2)[0].pass_rate == 0.0
