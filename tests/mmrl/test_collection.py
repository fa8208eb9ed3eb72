"""`mmrl.collection` on a bandit whose rewards are set by hand: contexts 0, 1, 2, 3 come in turn."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from mmrl import collection, recipe
from mmrl.algorithms import PRESETS
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


# ---- selection, shaping and phases of recipes ---------------------------------------------------------------------------


def by_context(values):
    """A term whose rewards of a group depend on the context: ``values[context]`` cycled over the rollouts."""

    def term(task, outcomes):
        cycle = values[task.context]
        return [cycle[i % len(cycle)] for i in range(len(outcomes))]

    return group_term(term)


MIXED = {0: [0.0], 1: [1.0, 0.0], 2: [1.0], 3: [0.0, 1.0]}


def test_what_a_selection_discards_is_counted(make_config):
    config = make_config({"name": "dapo", "max_refills": 0})
    result, _ = collected(config, terms={"accuracy": by_context(MIXED)})
    logged = means(result)
    assert task_ids(result.batch) == ["train/1", "train/3"]
    assert logged["selection/discarded"] == 0.5
    assert logged["selection/discarded_failed"] == logged["selection/discarded_solved"] == 0.25


def test_a_rejected_group_stays_in_the_batch_without_an_advantage(make_config):
    result, _ = collected(make_config("reinforce_rej"), terms={"accuracy": by_context(MIXED)})
    assert len(result.batch) == 8
    assert result.advantages.tolist() == [0, 0, 1, 0, 0, 0, 0, 1]
    assert means(result)["selection/discarded"] == 0.5


def test_rounds_draw_more_rollouts_of_open_tasks_only(make_config):
    # Only the first rollout of a round can be right: contexts 1 and 3 settle at once, 0 never does, 2 is right throughout.
    config = make_config({"name": "reinforce_ada_positive", "keep_per_group": 2, "entropy_coef": 0.0})
    result, sampler = collected(config, terms={"accuracy": by_context(MIXED)})
    assert sampler.position == 4  # no new tasks
    sizes = [(result.batch.group_ids == group).sum().item() for group in range(4)]
    assert sizes == [8, 2, 2, 2]
    assert result.batch.group_ids.tolist() == sorted(result.batch.group_ids.tolist())
    assert len(set(result.batch.seeds.tolist())) == 14
    # Two of each group are trained on; the pool's mean is the baseline.
    assert [int(result.trained[result.batch.group_ids == group].sum()) for group in range(4)] == [2, 2, 2, 2]
    assert result.advantages[8:10].tolist() == [0.5, -0.5]
    assert means(result)["selection/trained"] == 8 / 14
    assert means(result)["selection/draws"] == 14 / 8
    assert means(result)["groups/informative"] == 4 / 14


def test_balanced_rounds_end_when_both_kinds_are_there(make_config):
    config = make_config({"name": "reinforce_ada", "keep_per_group": 4, "entropy_coef": 0.0, "max_refills": 2})
    result, _ = collected(config, terms={"accuracy": by_context(MIXED)})
    # Mixed groups need two of each kind, so two rounds; constant ones use all three.
    assert [(result.batch.group_ids == group).sum().item() for group in range(4)] == [6, 4, 6, 4]


@pytest.mark.parametrize(("statistics", "expected"), [("all", 0.5), ("kept", 0.0)])
def test_advantages_are_those_of_all_rollouts_or_of_the_kept_ones(make_config, statistics, expected):
    config = make_config({"name": "dr_grpo", "subsample": "correct", "statistics": statistics})
    result, _ = collected(config, terms={"accuracy": by_context(MIXED)})
    assert result.trained.tolist() == [False, False, True, False, True, True, False, True]
    assert result.advantages[result.trained].tolist() == [expected, 0, 0, expected]


def test_shaping_changes_the_advantage_but_not_the_reward_that_is_logged(make_config):
    shaping = [{"name": "outcome", "correct": 1.0, "wrong": -3.0}]
    config = make_config({"name": "dr_grpo", "shaping": shaping})
    result, _ = collected(config, terms={"accuracy": by_context(MIXED)})
    assert result.advantages.tolist() == [0, 0, 2, -2, 0, 0, -2, 2]
    assert result.batch.rewards.tolist() == [0, 0, 1, 0, 1, 1, 0, 1]
    assert means(result)["reward/total"] == 0.5
    assert means(result)["reward/shaping"] == -1.5


def test_a_length_penalty_does_not_make_a_constant_group_informative(make_config):
    config = make_config({"name": "dapo_overlong", "max_refills": 0})
    result, _ = collected(config, terms={"accuracy": by_context({k: [1.0] for k in range(4)})})
    assert means(result)["groups/informative"] == 0.0
    assert means(result)["selection/discarded_solved"] == 1.0


@pytest.mark.parametrize(("train_step", "lowest"), [(1, 0.0), (2, -1.0)])
def test_capo_changes_phase_with_the_run(make_config, train_step, lowest):
    config = make_config({"name": "capo", "positive_only_until": 0.5, "advantage_ddof": 0}, trainer={"num_steps": 2})
    result, _ = collected(config, terms={"accuracy": by_context(MIXED)}, train_step=train_step)
    assert result.advantages.min().item() == pytest.approx(lowest, abs=1e-4)
    assert result.advantages.max().item() == pytest.approx(1.0, abs=1e-4)


def test_advantages_may_differ_within_a_rollout(make_config):
    def reference(batch):
        return batch.old_log_probs - 1

    result, _ = collected(make_config("reinforce_pp"), terms={"accuracy": by_context(MIXED)}, reference=reference)
    assert result.advantages.shape == result.batch.old_log_probs.shape
    row = int(result.batch.num_decisions.argmax())
    assert len(set(result.advantages[row].tolist())) == int(result.batch.num_decisions[row])
    assert not result.advantages[~result.batch.loss_mask].any()


def test_the_reference_is_asked_about_trained_rollouts_only(make_config):
    seen = []

    def reference(batch):
        seen.append(len(batch))
        return batch.old_log_probs - 1

    result, _ = collected(
        make_config({"name": "psr", "kl_coef": 0.1}), terms={"accuracy": by_context(MIXED)}, reference=reference
    )
    assert seen == [4]
    batch, trained = result.batch, result.trained
    gap = (result.reference_log_probs - batch.old_log_probs)[trained]
    torch.testing.assert_close(gap[batch.loss_mask[trained]], -torch.ones(int(batch.loss_mask[trained].sum())))
    assert not result.reference_log_probs[~trained].any()


def test_mismatch_weights_come_from_the_sampling_engine(make_config):
    class TwoEngines(BanditAdapter):
        def rollout(self, *args, **options):
            batch = super().rollout(*args, **options)
            return replace(batch, sampler_log_probs=batch.old_log_probs - 1.0)

    config = make_config({"name": "grpo", "mismatch": "token_truncate", "mismatch_high": 2.0, "mismatch_normalize": True})
    adapter = TwoEngines(reward_terms={"accuracy": by_context(MIXED)})
    sampler = TaskSampler(adapter.task_source("train"), order="sequential", seed=0)
    terms = resolve_terms(config.rewards, adapter.reward_terms)
    result = collect(config, adapter, adapter.build_policy(), sampler, terms, ONE, train_step=1)
    assert (result.mismatch_weights[result.batch.loss_mask] == 1.0).all()  # all truncated to 2, then divided by their mean
    assert means(result)["mismatch/weight"] == 2.0
    assert means(result)["mismatch/masked"] == 0.0


@pytest.mark.parametrize("name", sorted(PRESETS))
def test_every_recipe_collects(make_config, name):
    config = make_config({"name": name, "entropy_coef": 0.0}, group_size=4)
    reference = (lambda batch: batch.old_log_probs - 0.1) if config.algorithm.kl_coef else None
    result, _ = collected(config, terms={"accuracy": by_context(MIXED)}, reference=reference)
    assert result.advantages.isfinite().all()
    assert result.trained.any() and result.trained.shape == (len(result.batch),)


def test_processes_share_the_statistics_of_the_batch(make_config, monkeypatch):
    config = make_config({"name": "lite_ppo"})
    whole, _ = collected(config, terms={"accuracy": by_context(MIXED)})
    inputs = [
        recipe.credit_inputs(config.algorithm, whole.batch.select(rows), weights={"accuracy": 1.0})
        for rows in (torch.arange(2), torch.arange(2, 8))
    ]
    monkeypatch.setattr(collection.processes, "gather", lambda accelerator, value: inputs)
    shares = [
        collection._estimate(config.algorithm, inputs[rank], SimpleNamespace(num_processes=2, process_index=rank))
        for rank in (0, 1)
    ]
    torch.testing.assert_close(torch.cat(shares), whole.advantages)
