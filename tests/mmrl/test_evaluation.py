"""`mmrl.evaluation`: counts, means and intervals of a bandit's greedy choices."""

import io

import pytest
import torch
from rich.console import Console

from mmrl.config import EvaluationConfig
from mmrl.errors import ConfigError, RewardError
from mmrl.evaluation import comparison_table, evaluate, summarize
from mmrl.rewards import WeightedTerm
from mmrl.statistics import mean_interval, wilson_interval
from mmrl.testing import BanditAdapter, share_of_right_arms

ACCURACY = {"accuracy": WeightedTerm(weight=1.0, function=share_of_right_arms)}


class Recording(BanditAdapter):
    """Remembers the calls of `rollout`."""

    def rollout(self, policy, tasks, **options):
        self.calls = [*getattr(self, "calls", []), (tasks, options)]
        return super().rollout(policy, tasks, **options)


def policy_that_knows(*contexts):
    """Chooses the right arm in ``contexts``, and arm 4, which is never right, in the others."""
    policy = BanditAdapter().build_policy()
    with torch.no_grad():
        policy.weight.zero_()
        policy.weight[:, 4] = 1.0
        for context in contexts:
            policy.weight[context, context] = 2.0
    return policy


def measured(policy, terms=ACCURACY, adapter=None, **config):
    adapter = adapter or BanditAdapter()
    settings = EvaluationConfig(**{"num_tasks": 12, **config})
    return evaluate(adapter, policy, adapter.task_source(settings.split), terms, settings)


def test_the_result_counts_overall_and_per_domain():
    result = measured(policy_that_knows(0, 2))
    assert (result["split"], result["metric"]) == ("eval", "accuracy")
    low, high = wilson_interval(6, 12)
    assert result["overall"] == {"k": 6, "n": 12, "mean": 0.5, "low": low, "high": high}
    assert {name: (entry["k"], entry["n"]) for name, entry in result["domains"].items()} == {
        "context0": (3, 3), "context1": (0, 3), "context2": (3, 3), "context3": (0, 3),
    }  # fmt: skip
    assert list(result["domains"]) == sorted(result["domains"])


@pytest.mark.parametrize("batch_size", [1, 5, 7, 12, 100])
def test_the_result_does_not_depend_on_the_batch_size(batch_size):
    policy = BanditAdapter().build_policy()
    assert measured(policy, batch_size=batch_size) == measured(policy, batch_size=3)


def test_tasks_are_attempted_once_greedily_and_only_the_first_ones():
    adapter = Recording()
    measured(policy_that_knows(), adapter=adapter, num_tasks=7, batch_size=3)
    assert [[task.id for task in tasks] for tasks, _ in adapter.calls] == [
        ["eval/0", "eval/1", "eval/2"], ["eval/3", "eval/4", "eval/5"], ["eval/6"],
    ]  # fmt: skip
    assert all(options["greedy"] and options["group_size"] == 1 for _, options in adapter.calls)
    assert measured(policy_that_knows(), num_tasks=1000)["overall"]["n"] == 24  # as many as there are


def test_progress_is_reported_by_tasks():
    adapter, seen = BanditAdapter(), []
    evaluate(
        adapter, policy_that_knows(), adapter.task_source("eval"), ACCURACY, EvaluationConfig(num_tasks=7, batch_size=3),
        on_batch=lambda done, total: seen.append((done, total)),
    )  # fmt: skip
    assert seen == [(3, 7), (6, 7), (7, 7)]


def test_tasks_to_which_the_metric_does_not_apply_are_not_counted():
    terms = {"accuracy": WeightedTerm(weight=1.0, function=lambda task, outcome: None if task.context else 1.0)}
    result = measured(policy_that_knows(), terms)
    assert (result["overall"]["n"], result["overall"]["mean"]) == (3, 1.0)
    assert list(result["domains"]) == ["context0"]
    terms = {"accuracy": WeightedTerm(weight=1.0, function=lambda task, outcome: None)}
    result = measured(policy_that_knows(), terms)
    assert result["overall"] == {"k": 0, "n": 0, "mean": None, "low": None, "high": None}
    assert result["domains"] == {}


def test_only_the_metric_is_scored_and_its_weight_does_not_matter():
    def explode(task, outcome):
        raise AssertionError("not asked for")

    terms = {
        "accuracy": WeightedTerm(weight=0.0, function=share_of_right_arms),
        "judge": WeightedTerm(weight=1.0, function=explode),
    }
    assert measured(policy_that_knows(0, 1, 2, 3), terms)["overall"]["mean"] == 1.0


def test_a_metric_that_is_no_reward_is_an_error():
    with pytest.raises(ConfigError, match=r"evaluation\.metric is 'success'; expected one of the run's rewards: accuracy\."):
        measured(policy_that_knows(), metric="success")


def test_a_metric_that_raises_is_not_swallowed():
    terms = {"accuracy": WeightedTerm(weight=1.0, function=lambda task, outcome: 1 / (task.context - 2))}
    with pytest.raises(RewardError, match="raised ZeroDivisionError on task 'eval/2'"):
        measured(policy_that_knows(), terms)


def test_the_policy_is_left_as_it_was():
    policy = policy_that_knows(1)
    before = policy.weight.detach().clone()
    torch.manual_seed(123)
    state = torch.get_rng_state()
    measured(policy)
    assert torch.equal(policy.weight, before)
    assert policy.weight.grad is None
    assert torch.equal(torch.get_rng_state(), state)


# Summaries


def test_a_metric_of_zeros_and_ones_has_a_wilson_interval():
    # 1 of 4 by hand: center (1/4 + z^2/8) / (1 + z^2/4) with z = 1.96, z^2 = 3.8415.
    entry = summarize([0.0, 1.0, 0.0, 0.0])
    assert (entry["k"], entry["n"], entry["mean"]) == (1, 4, 0.25)
    assert isinstance(entry["k"], int)
    assert (entry["low"] + entry["high"]) / 2 == pytest.approx((0.25 + 3.8415 / 8) / (1 + 3.8415 / 4), abs=1e-4)
    assert summarize([1.0] * 3)["high"] == 1.0
    assert 0 < summarize([1.0] * 3)["low"] < 1.0


def test_other_metrics_have_students_interval_and_one_value_has_none():
    # 0, 1/2, 1: deviation 1/2, so the half width is t(2) * 0.5 / sqrt(3) with t(2) = 4.3027.
    entry = summarize([0.0, 0.5, 1.0])
    assert (entry["k"], entry["n"], entry["mean"]) == (1.5, 3, 0.5)
    assert (entry["low"], entry["high"]) == pytest.approx(mean_interval([0.0, 0.5, 1.0]))
    assert entry["high"] - 0.5 == pytest.approx(4.3027 * 0.5 / 3**0.5, abs=1e-4)
    assert summarize([0.5]) == {"k": 0.5, "n": 1, "mean": 0.5, "low": None, "high": None}


# The table


def rendered(table):
    console = Console(file=io.StringIO(), width=128)
    console.print(table)
    return console.file.getvalue()


def test_the_table_compares_two_evaluations_with_intervals():
    before, after = measured(policy_that_knows()), measured(policy_that_knows(0, 1, 2, 3))
    text = rendered(comparison_table(before, after))
    assert "held-out accuracy (eval split, 95% intervals)" in text
    assert ["kind", "n", "before", "after", "difference"] in [line.replace("┃", " ").split() for line in text.splitlines()]
    row = next(line for line in text.splitlines() if "all" in line)
    assert all(part in row for part in ("12", "0.000 [0.000, 0.242]", "1.000 [0.758, 1.000]", "+1.000 ["))
    assert "before" not in rendered(comparison_table(None, after))


def test_the_table_has_a_dash_where_nothing_is_known():
    nothing = measured(policy_that_knows(), {"accuracy": WeightedTerm(weight=1.0, function=lambda task, outcome: None)})
    assert "-" in next(line for line in rendered(comparison_table(None, nothing)).splitlines() if "all" in line)
    one = measured(policy_that_knows(), {"accuracy": WeightedTerm(weight=1.0, function=lambda task, outcome: 0.5)}, num_tasks=1)
    row = next(line for line in rendered(comparison_table(nothing, one)).splitlines() if "context0" in line)
    assert "0.500" in row
    assert row.count(" - ") == 2
