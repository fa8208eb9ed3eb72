"""`mmrl.prefix_rft`: rollouts that begin with a part of a demonstration, and the credit of both of their parts."""

import math
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from mmrl.collection import collect
from mmrl.config import validate
from mmrl.errors import ConfigError, DataError
from mmrl.prefix_rft import given_decisions, hybrid_rows, prefix_advantages, shortest_share
from mmrl.prompting_config import PromptingConfig
from mmrl.rewards import group_term, resolve_terms
from mmrl.sampling import TaskSampler, rollout_seeds
from mmrl.testing import BanditAdapter
from mmrl.trainer import Trainer
from mmrl.types import RolloutBatch

ONE = SimpleNamespace(num_processes=1, process_index=0)
NAN = float("nan")


def test_the_schedule_of_the_document():
    shares = [shortest_share(step / 100, high=0.95, low_end=0.05) for step in (0, 25, 50, 75, 100)]
    assert shares == pytest.approx([0.95, 0.818198, 0.5, 0.181802, 0.05], abs=1e-6)


@given(st.floats(0, 1), st.floats(0, 1))
def test_the_schedule_falls_between_its_ends(early, late):
    early, late = sorted((early, late))
    assert 0.05 - 1e-9 <= shortest_share(late) <= shortest_share(early) + 1e-12 <= 0.95 + 1e-9


# One group: rows 0 to 2 ordinary with rewards 1, 0, 0 and mean 1/3; row 3 hybrid with reward 1, five given of seven decisions.
MASK = torch.tensor([[True] * 7, [True] * 2 + [False] * 5, [True] * 4 + [False] * 3, [True] * 7])
GIVEN = torch.tensor([[False] * 7] * 3 + [[True] * 5 + [False] * 2])
ENTROPY = torch.tensor([[NAN] * 7] * 3 + [[0.1, 0.9, 0.3, 0.8, 0.2, NAN, NAN]])
REWARDS = torch.tensor([1.0, 0.0, 0.0, 1.0])
ORDINARY = torch.tensor([0.5, -0.25, -0.25, 0.0])[:, None].expand(4, 7)


def credit(rewards=REWARDS, groups=(0, 0, 0, 0), given=GIVEN, entropy=ENTROPY, mask=MASK, advantages=ORDINARY, **options):
    return prefix_advantages(advantages, rewards, torch.tensor(groups), given, entropy, mask, **options)


def test_given_tokens_where_the_policy_is_unsure_gain_what_the_hybrid_rollout_gains():
    result = credit(trained_share=0.4)
    # Two of five: the ones of entropy 0.9 and 0.8. 1 - 1/3 = 2/3; the continuation has its own reward.
    torch.testing.assert_close(result[3], torch.tensor([0, 2 / 3, 0, 2 / 3, 0, 1, 1]))
    torch.testing.assert_close(result[:3], torch.where(MASK[:3], ORDINARY[:3], 0.0))
    assert result.dtype == torch.float32


@pytest.mark.parametrize(("share", "trained"), [(0.0, []), (0.2, [1]), (0.21, [1, 3]), (1.0, [0, 1, 2, 3, 4])])
def test_the_share_of_given_tokens_that_is_trained_is_rounded_up(share, trained):
    assert credit(trained_share=share)[3, :5].nonzero()[:, 0].tolist() == trained


def test_a_continuation_may_have_no_credit():
    assert credit(continuation="zero")[3, 5:].tolist() == [0.0, 0.0]


def test_hybrid_rollouts_of_a_group_share_the_credit_and_do_not_see_each_other():
    # Rows 2 and 3 are hybrid; ordinary ones have 1 and 0. (0 - 1/2) / 2 and (1 - 1/2) / 2.
    given_ = torch.tensor([[False] * 7] * 2 + [[True] * 3 + [False] * 4, [True] * 5 + [False] * 2])
    entropy = torch.where(given_, torch.arange(7.0), NAN)
    result = credit(given=given_, entropy=entropy, trained_share=0.2)
    torch.testing.assert_close(result[2, :4], torch.tensor([0, 0, -0.25, 0]))
    torch.testing.assert_close(result[3], torch.tensor([0, 0, 0, 0, 0.25, 1, 1]))


def test_rollouts_without_a_reward_have_no_credit_and_no_say():
    assert not credit(torch.tensor([1.0, 0.0, 0.0, NAN]))[3].any()
    # The mean of the ordinary ones that have a reward is 1/2.
    assert credit(torch.tensor([1.0, 0.0, NAN, 1.0]), trained_share=0.2)[3, 1] == 0.5
    # With nothing to compare with given tokens are not judged.
    alone = credit(torch.tensor([NAN, NAN, NAN, 1.0]))[3]
    assert alone.tolist() == [0.0] * 5 + [1.0] * 2


def test_groups_are_credited_apart_in_any_order():
    two = [torch.cat([part, part]) for part in (REWARDS, GIVEN, ENTROPY, MASK, ORDINARY)]
    order = torch.tensor([7, 0, 5, 2, 6, 1, 3, 4])
    rewards = torch.cat([REWARDS, 1 - REWARDS])
    names = ("given", "entropy", "mask", "advantages")
    straight = credit(rewards, [0] * 4 + [9] * 4, **dict(zip(names, two[1:])))
    mixed = credit(rewards[order], (torch.tensor([0] * 4 + [9] * 4)[order]).tolist(),
                   **dict(zip(names, (part[order] for part in two[1:]))))  # fmt: skip
    assert torch.equal(mixed, straight[order])
    # The second group: ordinary ones have 0, 1, 1, the hybrid one 0.
    torch.testing.assert_close(straight[7], torch.tensor([0, -2 / 3, 0, 0, 0, 0, 0]))


# ---- in a run -------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def adapter():
    from vision.adapter import build_adapter
    from vision.config import VisionRunConfig

    tree = {
        "modality": "vision", "name": "test", "rewards": {"accuracy": 1.0}, "trainer": {"num_steps": 1},
        "policy": {"path": "tiny-qwen2.5-vl"}, "tasks": {"name": "digits"}, "rollout": {"max_new_tokens": 12},
    }  # fmt: skip
    return build_adapter(validate(tree, VisionRunConfig, "test"))


@pytest.fixture(scope="module")
def policy(adapter):
    return adapter.build_policy()


@pytest.fixture(scope="module")
def tasks(adapter):
    source = adapter.task_source("train")
    return [replace(source[index], demonstration="<think>3 5 2</think><answer>5</answer>") for index in range(3)]


def demonstrated_ids(adapter, task):
    return tuple(adapter.frontend.processor.tokenizer(task.demonstration, add_special_tokens=False)["input_ids"])


def test_the_last_rollouts_of_a_group_go_on_from_a_share_that_falls(bandit_config, tasks):
    config = bandit_config(
        prompting={"demonstration_prefix": {"rows": 2}}, sampling={"group_size": 4}, trainer={"num_steps": 101}
    )
    first, last = (hybrid_rows(config, tasks, [5, 6, 7], step) for step in (1, 101))
    for rows in (first, last):
        assert [row.demonstrated > 0 for row in rows] == [False, False, True, True] * 3
        assert [row.id for row in rows[::4]] == [task.id for task in tasks]
    assert {row.demonstrated for row in first} == {0.0, 0.95}
    drawn = [row.demonstrated for row in last if row.demonstrated]
    assert len(set(drawn)) == 6 and all(0.05 <= share <= 0.95 for share in drawn)
    assert hybrid_rows(config, tasks[1:], [6, 7], 101) == last[4:]
    assert hybrid_rows(bandit_config(seed=1, prompting={"demonstration_prefix": {}}), tasks, [5, 6, 7], 3) is not None
    assert hybrid_rows(bandit_config(), tasks, [5, 6, 7], 1) is None
    with pytest.raises(DataError, match=r"the task has no demonstration; prompting\.demonstration_prefix needs one"):
        hybrid_rows(config, [replace(tasks[0], demonstration="")], [0], 1)


def test_a_hybrid_rollout_is_given_tokens_and_then_what_the_policy_makes_of_them(adapter, policy, tasks):
    task = tasks[0]
    ids = demonstrated_ids(adapter, task)
    share = 5.5 / len(ids)
    batch = adapter.rollout(policy, [task, replace(task, demonstrated=share)], group_size=1, seeds=rollout_seeds(0, 1, 0, 2))
    assert batch.tasks == (task, task)
    # Both rows answer the same prompt, and the given five tokens belong to the completion.
    assert len(batch.inputs.prompts) == 1
    assert batch.outcomes[1].token_ids[:5] == ids[:5]
    assert batch.inputs.tokens[1, :5].tolist() == list(ids[:5])
    assert int(batch.loss_mask[1].sum()) == batch.outcomes[1].num_tokens <= 12
    assert batch.given_entropy[1].isnan().tolist() == [False] * 5 + [True] * (batch.loss_mask.shape[1] - 5)
    assert batch.given_entropy[0].isnan().all()
    forward = adapter.forward(policy, batch, frozenset({"entropy"}))
    gap = (forward.log_probs - batch.old_log_probs)[batch.loss_mask].abs().max()
    assert gap < 1e-4
    torch.testing.assert_close(batch.given_entropy[1, :5], forward.entropy[1, :5].detach(), atol=1e-4, rtol=0)
    # What follows is what the policy says to a prompt that ends in the given tokens.
    prefilled = adapter.rollout(policy, [replace(task, prefill=ids[:5])], group_size=1, seeds=rollout_seeds(0, 1, 0, 2)[1:])
    assert batch.outcomes[1].token_ids[5:] == prefilled.outcomes[0].token_ids[:7]
    assert batch.outcomes[1].text == prefilled.outcomes[0].text or len(prefilled.outcomes[0].token_ids) > 7
    # Rows that are narrower than others keep what was given.
    joined = RolloutBatch.concat([batch.select(torch.tensor([1])), batch])
    assert given_decisions(joined).sum(dim=1).tolist() == [5, 0, 5]


def test_a_completion_has_room_for_one_token_of_its_own(adapter, policy, tasks):
    long = replace(tasks[0], demonstration="1 2 3 4 5 6 7 8 9 " * 6, demonstrated=0.9)
    batch = adapter.rollout(policy, [long], group_size=2, seeds=rollout_seeds(0, 1, 0, 2))
    assert batch.loss_mask.shape == (2, 12)
    assert (~batch.given_entropy.isnan()).sum(dim=1).tolist() == [11, 11]
    assert all(reason == "length" for outcome, reason in zip(batch.outcomes, batch.stop_reasons)
               if outcome.token_ids[-1] not in adapter.end_ids)  # fmt: skip


def run(adapter, policy, tasks, bandit_config, term, **section):
    config = bandit_config(
        sampling={"tasks_per_step": 2, "group_size": 4, "order": "sequential"}, algorithm={"name": "dr_grpo"},
        prompting={"demonstration_prefix": section},
    )  # fmt: skip
    sampler = TaskSampler(tasks, order="sequential", seed=0)
    terms = resolve_terms({"accuracy": config.rewards["accuracy"]}, {"accuracy": term})
    return collect(config, adapter, policy, sampler, terms, ONE, train_step=1)


def test_collection_compares_ordinary_rollouts_among_themselves(adapter, policy, tasks, bandit_config):
    term = group_term(lambda task, outcomes: [1.0, 0.0, 0.0, 1.0])
    result = run(adapter, policy, tasks, bandit_config, term, trained_share=0.5)
    batch, advantages = result.batch, result.advantages
    given_ = ~batch.given_entropy.isnan()
    assert given_.any(dim=1).tolist() == [False, False, False, True] * 2
    num = int(given_[3].sum())
    assert num == math.floor(0.95 * len(demonstrated_ids(adapter, tasks[0]))) or num == 11
    for start in (0, 4):
        expected = torch.tensor([2 / 3, -1 / 3, -1 / 3])[:, None]
        torch.testing.assert_close(
            advantages[start : start + 3], torch.where(batch.loss_mask[start : start + 3], expected, 0.0)
        )
        hybrid = advantages[start + 3]
        assert int((hybrid[given_[start + 3]] > 0.6).sum()) == math.ceil(num / 2)
        assert hybrid[batch.loss_mask[start + 3] & ~given_[start + 3]].unique().tolist() == [1.0]
    assert result.totals["rollout/given"] == (2 * num, 2)
    assert result.totals["reward/hybrid"] == (2.0, 2)
    sampled = batch.loss_mask & ~given_
    assert result.totals["rollout/entropy"][1] == int(sampled.sum())
    assert result.totals["rollout/entropy"][0] == pytest.approx(float(-batch.old_log_probs[sampled].sum()), rel=1e-5)


def test_a_run_trains_on_hybrid_rollouts(adapter, tasks, bandit_config, tmp_path):
    from vision.config import VisionRunConfig

    tree = {
        "modality": "vision", "name": "hybrid", "rewards": {"accuracy": 1.0}, "trainer": {"num_steps": 2},
        "policy": {"path": "tiny-qwen2.5-vl"}, "tasks": {"name": "digits"}, "rollout": {"max_new_tokens": 12},
        "output_dir": str(tmp_path), "sampling": {"tasks_per_step": 2, "group_size": 2}, "evaluation": {"num_tasks": 2},
        "prompting": {"demonstration_prefix": {}}, "algorithm": {"name": "dapo", "selection": "none", "dual_clip": 3},
    }  # fmt: skip
    trainer = Trainer(validate(tree, VisionRunConfig, "test"), adapter, cpu=True)
    trainer.sampler = TaskSampler(tasks, order="sequential", seed=0)
    before = [parameter.detach().clone() for parameter in trainer.policy.parameters()]
    adapter.reward_terms = {"accuracy": group_term(lambda task, outcomes: [0.0] * (len(outcomes) - 1) + [1.0])}
    trainer.terms = resolve_terms(trainer.config.rewards, adapter.reward_terms)
    metrics = trainer.check()
    assert metrics["rollout/given"] > 0 and metrics["reward/hybrid"] == 1.0
    assert any(not torch.equal(old, new) for old, new in zip(before, trainer.policy.parameters()))


@pytest.mark.parametrize(
    ("section", "message"),
    [
        ({"demonstration_prefix": {}, "scaffold": {}}, "demonstration_prefix and scaffold"),
        ({"demonstration_prefix": {}, "templates": [{"text": "{prompt}!"}]}, "demonstration_prefix and templates"),
        ({"demonstration_prefix": {"low_end": 0.9, "high": 0.5}}, "low_end is 0.9, high 0.5"),
    ],
)
def test_sections_that_contradict_each_other_are_refused(section, message):
    with pytest.raises(ConfigError, match=message):
        validate(section, PromptingConfig, "test")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"prompting": {"demonstration_prefix": {"rows": 4}}}, "rows is 4, sampling.group_size 4; at least one rollout"),
        ({"algorithm": "sft"}, "needs rollouts; algorithm.source is 'demonstrations'"),
        ({"sampling": {"failure_prefix": {}}}, "both say how an answer starts"),
    ],
)
def test_a_run_in_which_nothing_would_be_hybrid_or_ordinary_is_refused(bandit_config, adapter, changes, message):
    config = bandit_config(**{"prompting": {"demonstration_prefix": {}}, **changes})
    with pytest.raises(ConfigError, match=message):
        Trainer(config, adapter, cpu=True)
    with pytest.raises(ConfigError, match="are no conversations"):
        Trainer(bandit_config(prompting={"demonstration_prefix": {}}), BanditAdapter(), cpu=True)
