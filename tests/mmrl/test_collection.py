"""`mmrl.collection` on a bandit whose rewards are set by hand: contexts 0, 1, 2, 3 come in turn."""

from types import SimpleNamespace

import pytest
import torch

from mmrl.collection import collect
from mmrl.errors import RewardError
from mmrl.rewards import group_term, resolve_terms
from mmrl.sampling import TaskSampler, rollout_seeds
from mmrl.testing import BanditAdapter, share_of_right_arms

ONE = SimpleNamespace(num_processes=1, process_index=0)


def varied_for(*contexts):
    """A term that is 0, 1, 2, ... within the groups of these contexts, and 5 within the others."""
    return group_term(lambda task, outcomes: range(len(outcomes)) if task.context in contexts else [5.0] * len(outcomes))


def collected(config, *, terms=None, train_step=1, reference=None):
    """What was collected, and the sampler."""
    adapter = BanditAdapter(reward_terms=terms or {"accuracy": share_of_right_arms})
    sampler = TaskSampler(adapter.task_source("train"), order=config.sampling.order, seed=config.seed)
    result = collect(
        config, adapter, adapter.build_policy(), sampler, resolve_terms(config.rewards, adapter.reward_terms), ONE,
        train_step=train_step, reference_log_probs=reference,
    )  # fmt: skip
    return result, sampler


def means(result):
    return {name: value / count for name, (value, count) in result.totals.items() if count}


@pytest.fixture
def make_config(bandit_config):
    def make(algorithm="dr_grpo", group_size=2, **changes):
        sampling = {"order": "sequential", "tasks_per_step": 4, "group_size": group_size}
        return bandit_config(algorithm=algorithm, sampling=sampling, **changes)

    return make


def task_ids(batch, group_size=2):
    return [task.id for task in batch.tasks[::group_size]]


def test_every_group_is_kept_and_credited_without_selection(make_config):
    result, sampler = collected(make_config(), terms={"accuracy": varied_for(1, 2)})
    assert task_ids(result.batch) == ["train/0", "train/1", "train/2", "train/3"]
    assert result.batch.group_ids.tolist() == [0, 0, 1, 1, 2, 2, 3, 3]
    # Within a varied group rewards are 0 and 1 around a mean of 1/2.
    assert result.advantages.tolist() == [0, 0, -0.5, 0.5, -0.5, 0.5, 0, 0]
    assert result.reference_log_probs is None
    assert sampler.position == 4
    assert means(result)["groups/informative"] == 0.5


def test_dynamic_selection_replaces_constant_groups_by_newly_drawn_ones(make_config):
    result, sampler = collected(make_config("dapo"), terms={"accuracy": varied_for(1)})
    assert task_ids(result.batch) == ["train/1", "train/5", "train/9", "train/13"]
    assert result.batch.group_ids.tolist() == [1, 1, 5, 5, 9, 9, 13, 13]
    assert (result.advantages != 0).all()
    assert sampler.position == 16


def test_dynamic_selection_drops_the_surplus_and_stops_drawing_when_full(make_config):
    result, sampler = collected(make_config("dapo"), terms={"accuracy": varied_for(1, 2, 3)})
    assert task_ids(result.batch) == ["train/1", "train/2", "train/3", "train/5"]
    assert sampler.position == 8


def test_dynamic_selection_gives_up_after_max_refills(make_config):
    config = make_config({"name": "dapo", "max_refills": 1})
    result, sampler = collected(config, terms={"accuracy": varied_for(1)})
    assert task_ids(result.batch) == ["train/1", "train/5"]
    assert sampler.position == 8
    result, _ = collected(config, terms={"accuracy": varied_for()})
    assert task_ids(result.batch) == ["train/4", "train/5", "train/6", "train/7"]
    assert not result.advantages.any()
    assert means(result)["groups/informative"] == 0.0


def test_a_reward_term_may_decide_what_is_kept(make_config):
    config = make_config(
        {"name": "dapo", "selection_metric": "second", "max_refills": 0}, rewards={"accuracy": 1.0, "second": 0.0}
    )
    result, _ = collected(config, terms={"accuracy": varied_for(1, 2), "second": varied_for(2, 3)})
    assert task_ids(result.batch) == ["train/2", "train/3"]


def test_a_replacement_is_sampled_with_seeds_of_its_own(make_config):
    result, _ = collected(make_config("dapo"), terms={"accuracy": varied_for(1)}, train_step=7)
    for attempt in range(4):
        rows = slice(2 * attempt, 2 * attempt + 2)
        assert result.batch.seeds[rows].tolist() == rollout_seeds(0, 7, attempt, 8)[2:4].tolist()
    assert len(set(result.batch.seeds.tolist())) == 8


def test_the_reward_that_is_logged_is_that_of_all_rollouts_not_of_the_kept_ones(make_config):
    number = group_term(
        lambda task, outcomes: [int(task.id.split("/")[1]) + (task.context == 1) * i for i in range(len(outcomes))]
    )
    result, _ = collected(make_config("dapo"), terms={"accuracy": number})
    # Sixteen groups whose rewards are their numbers 0 to 15; in every fourth one the second rollout has 1 more.
    assert means(result)["reward/total"] == means(result)["reward/accuracy"] == 7.5 + 4 * 0.5 / 16
    assert means(result)["groups/informative"] == 0.25
    assert means(result)["rollout/decisions"] == (6 * 1 + 5 * 2 + 5 * 3) / 16


def test_what_is_logged_counts_only_rows_to_which_a_term_applies(make_config):
    def rare(task, outcome):
        return float(task.context) if task.context >= 2 else None

    result, _ = collected(make_config(rewards={"rare": 2.0}, evaluation={"metric": "rare"}), terms={"rare": rare})
    logged = means(result)
    assert logged["reward/rare"] == 2.5
    assert logged["reward/total"] == 5.0
    assert logged["rollout/unscored"] == 0.5
    # Bandits of tasks 0, 1, 2, 3 make 1, 2, 3, 1 choices.
    assert logged["rollout/decisions"] == 7 / 4
    assert logged["rollout/truncated"] == 0.0
    assert logged["advantage/abs"] == 0.0
    batch = result.batch
    assert logged["rollout/entropy"] == pytest.approx(-float(batch.old_log_probs[batch.loss_mask].mean()))


def test_the_reference_sees_the_kept_rollouts_only(make_config):
    seen = []

    def reference(batch):
        seen.append(batch)
        return batch.old_log_probs - 1

    result, _ = collected(make_config({"name": "dapo", "kl_coef": 0.1}), terms={"accuracy": varied_for(1)}, reference=reference)
    assert [task_ids(batch) for batch in seen] == [["train/1", "train/5", "train/9", "train/13"]]
    assert result.reference_log_probs.shape == result.batch.old_log_probs.shape


def test_demonstrations_take_the_place_of_rollouts_with_an_advantage_of_one(make_config):
    result, _ = collected(make_config("sft"))
    assert task_ids(result.batch, group_size=1) == ["train/0", "train/1", "train/2", "train/3"]
    assert result.advantages.tolist() == [1, 1, 1, 1]
    assert result.batch.rewards.tolist() == [1, 1, 1, 1]  # the bandit's demonstrations are right


def test_a_reward_that_raises_is_not_swallowed(make_config):
    def fragile(task, outcome):
        raise KeyError("answer")

    with pytest.raises(RewardError, match=r"reward 'accuracy' raised KeyError on task 'train/0': 'answer'"):
        collected(make_config(), terms={"accuracy": fragile})


def test_rollouts_have_no_gradient_and_leave_the_policy_alone(make_config):
    result, _ = collected(make_config())
    assert not result.batch.old_log_probs.requires_grad
    assert not result.advantages.requires_grad
    assert torch.isfinite(result.batch.rewards).all()
