"""`mmrl.failure_prefix`: nearly solved tasks are continued from a failed attempt, cut where it is mended half the time."""

import json
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from mmrl.chat import ChatTask, Completion
from mmrl.collection import collect
from mmrl.config import validate
from mmrl.errors import ConfigError, DataError
from mmrl.failure_prefix import FailurePrefixSampler, PrefixedTasks, choose_cut, cut_tokens
from mmrl.pools import build_sampler
from mmrl.probing import Attempts
from mmrl.rewards import group_term, resolve_terms
from mmrl.sampling_config import SamplingConfig
from mmrl.testing import BanditAdapter
from mmrl.trainer import Trainer

ONE = SimpleNamespace(num_processes=1, process_index=0)


def question(index, **fields):
    content = [{"type": "text", "text": f"question {index}"}]
    return ChatTask(id=str(index), messages=({"role": "user", "content": content},), answer="1", **fields)


TASKS = [question(index) for index in range(5)]


@pytest.mark.parametrize(
    ("target", "cut"),
    [
        (0.5, 0.5),
        (0.25, 0.7),
        (0.75, 0.3),
    ],
)
def test_the_cut_of_the_document(target, cut):
    assert choose_cut({0.1: 0.95, 0.3: 0.8, 0.5: 0.55, 0.7: 0.3, 0.9: 0.05}, target) == cut


def test_of_two_equally_good_cuts_the_longer_one_is_taken():
    assert choose_cut({0.1: 1.0, 0.9: 0.0, 0.3: 1.0}) == 0.9
    assert choose_cut({0.7: 0.4, 0.5: 0.6}) == 0.7  # 0.5 - 0.4 and 0.6 - 0.5 differ in the last digit


@given(length=st.integers(0, 40), cut=st.sampled_from([0.1, 0.3, 0.5, 0.7, 0.9]))
def test_a_cut_is_a_share_of_the_tokens_rounded_down(length, cut):
    tokens = tuple(range(length))
    assert cut_tokens(tokens, cut) == tokens[: round(10 * cut) * length // 10]


class Measured:
    """Pass rates and failures by task, success by the length of a prefix; ``calls`` are what was asked."""

    def __init__(self, rates, wrong, success, train_step=1):
        self.rates, self.wrong, self.success, self.train_step = rates, wrong, success, train_step
        self.calls = []

    def __call__(self, tasks, rollouts, round=0, *, reasoning_until=None):
        self.calls.append(([(task.id, task.prefill) for task in tasks], rollouts, round, reasoning_until))
        if reasoning_until is not None:
            return [Attempts(pass_rate=self.rates[int(t.id)], wrong=self.wrong[int(t.id)]) for t in tasks]
        return [Attempts(pass_rate=self.success[len(task.prefill)]) for task in tasks]


# Task 0 is never wrong, 1 is hard, 2 fails on ten tokens, 3 on two, 4 has no rate.
RATES = [1.0, 0.5, 0.875, 0.875, None]
WRONG = [None, (7,) * 10, tuple(range(10)), (5, 6), (1, 2)]
SUCCESS = {1: 0.9, 3: 0.8, 5: 0.55, 7: 0.3, 9: 0.05}


def sampler_of(**changes):
    section = {"rollouts": 8, **changes}
    return build_sampler(SamplingConfig(tasks_per_step=2, order="sequential", failure_prefix=section), TASKS, 0)


def test_nearly_solved_tasks_start_with_the_failure_that_is_recovered_from_half_the_time():
    sampler, measure = sampler_of(), Measured(RATES, WRONG, SUCCESS)
    assert isinstance(sampler, FailurePrefixSampler) and len(sampler.source) == 5
    sampler.prepare(measure)
    # Of task 2 the cut at one half. Task 3 has two tokens: cuts at 0.5, 0.7 and 0.9 are its first one, 0.9 the "longest".
    assert [(task.id, task.prefill) for task in sampler.next(4)] == [("2", (0, 1, 2, 3, 4)), ("3", (5,))] * 2
    assert sampler.prefixes[2].cut == 0.5 and sampler.prefixes[3].cut == 0.9
    assert sampler.position == 4
    assert TASKS[2].prefill == ""
    totals = sampler.totals()
    assert totals["sampling/kept"] == (2, 5)
    assert totals["sampling/pass_rate"] == (3.25, 4)
    assert totals["sampling/prefix_pass_rate"] == (pytest.approx(0.55 + 0.9), 2)
    assert totals["sampling/prefix_tokens"] == (6, 2)


def test_plain_tasks_are_attempted_first_and_then_each_cut_of_the_failed_ones():
    sampler, measure = sampler_of(cuts=[0.3, 0.5], num_tasks=3, rollouts=6, until="<answer>"), Measured(RATES, WRONG, SUCCESS)
    sampler.prepare(measure)
    assert measure.calls == [
        ([("0", ()), ("1", ()), ("2", ())], 6, 0, "<answer>"),
        ([("2", (0, 1, 2))], 6, 1, None),
        ([("2", (0, 1, 2, 3, 4))], 6, 2, None),
    ]
    sampler.prepare(measure)
    assert len(measure.calls) == 3


def test_prefixes_are_refreshed_with_the_policy_of_that_moment():
    sampler = sampler_of(refresh=10)
    sampler.prepare(Measured(RATES, WRONG, SUCCESS, train_step=1))
    sampler.next(4)
    early = Measured(RATES, WRONG, SUCCESS, train_step=10)
    sampler.prepare(early)
    assert early.calls == []
    # Ten steps later task 2 is always solved and task 1 nearly so.
    sampler.prepare(Measured([1.0, 0.9, 1.0, 0.9, 0.0], [None, (9,) * 10, None, (8, 8), (1,)], SUCCESS, train_step=11))
    assert {index: prefix.ids for index, prefix in sampler.prefixes.items()} == {1: (9,) * 5, 3: (8,)}
    assert sampler.position == 4
    assert [task.id for task in sampler.next(2)] == ["1", "3"]
    # A policy that never fails leaves the prefixes as they are.
    sampler.prepare(Measured([1.0] * 5, [None] * 5, SUCCESS, train_step=21))
    assert sorted(sampler.prefixes) == [1, 3] and sampler.looked_at == 21


@pytest.mark.parametrize(
    ("rates", "wrong"),
    [([1.0] * 5, [None] * 5), ([0.5] * 5, [(1, 2, 3)] * 5), ([0.9] * 5, [()] * 5), ([None] * 5, [(1, 2, 3)] * 5)],
    ids=["no failure", "not nearly solved", "no reasoning", "no metric"],
)
def test_without_a_failed_start_there_is_nothing_to_train_on(rates, wrong):
    with pytest.raises(DataError, match=r"none of 5 tasks is nearly solved in the sense of sampling.failure_prefix"):
        sampler_of().prepare(Measured(rates, wrong, SUCCESS))


def test_a_sampler_goes_on_from_its_state_without_a_look():
    walked, resumed = sampler_of(refresh=5), sampler_of(refresh=5)
    before = json.loads(json.dumps(walked.state()))
    walked.prepare(Measured(RATES, WRONG, SUCCESS))
    walked.next(3)
    resumed.load_state(json.loads(json.dumps(walked.state())))
    again = Measured(RATES, WRONG, SUCCESS, train_step=5)
    resumed.prepare(again)
    assert again.calls == []
    assert resumed.next(4) == walked.next(4)
    assert resumed.totals() == walked.totals()
    walked.load_state(before)
    assert walked.looked_at is None and [task.prefill for task in walked.next(2)] == ["", ""]


def test_a_task_whose_answer_starts_with_something_else_is_named():
    with pytest.raises(DataError, match="7: its answer starts with '<think>' already"):
        PrefixedTasks([question(7, prefill="<think>")], {0: (1,)})[0]


def test_other_policies_and_templates_are_refused(bandit_config, adapter):
    sampling = {"failure_prefix": {}}
    with pytest.raises(ConfigError, match=r"sampling\.failure_prefix: .* are no conversations"):
        Trainer(bandit_config(sampling=sampling), BanditAdapter(), cpu=True)
    both = bandit_config(sampling=sampling, prompting={"templates": [{"text": "{prompt} Think."}]})
    with pytest.raises(ConfigError, match=r"prompting\.templates and sampling\.failure_prefix"):
        Trainer(both, adapter, cpu=True)


# ---- with a policy ------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def adapter():
    from vision.adapter import build_adapter
    from vision.config import VisionRunConfig

    tree = {
        "modality": "vision", "name": "test", "rewards": {"accuracy": 1.0}, "trainer": {"num_steps": 1},
        "policy": {"path": "tiny-qwen2.5-vl"}, "tasks": {"name": "digits"}, "rollout": {"max_new_tokens": 8},
    }  # fmt: skip
    return build_adapter(validate(tree, VisionRunConfig, "test"))


def test_reasoning_ends_in_front_of_the_token_that_holds_its_end(adapter):
    tokenizer = adapter.frontend.processor.tokenizer

    def reasoning(text, until="</think>", end=()):
        ids = (*tokenizer.encode(text, add_special_tokens=False), *end)
        kept = adapter.reasoning_ids(Completion(text=text, token_ids=ids, stop_reason="stop"), until)
        assert kept == ids[: len(kept)]
        return tokenizer.decode(kept)

    assert reasoning("<think>3 5 2</think><answer>5</answer>") == "<think>3 5 2"
    assert reasoning("<think>3 5 2</think><answer>5</answer>", until="<answer>") == "<think>3 5 2</think>"
    assert reasoning("3 5 2", end=adapter.end_ids[:1]) == "3 5 2"
    assert reasoning("</think>3") == ""


def test_rollouts_go_on_from_a_failed_start_that_gets_no_loss(adapter, bandit_config):
    config = bandit_config(
        sampling={
            "tasks_per_step": 2, "group_size": 4, "order": "sequential",
            "failure_prefix": {"rollouts": 4, "num_tasks": 3, "until": "never", "cuts": [0.5], "above": 0.5},
        },
    )  # fmt: skip
    # Three of four rollouts are right, whatever they say.
    adapter.reward_terms = {"accuracy": group_term(lambda task, outcomes: [1.0, 0.0, 1.0, 1.0])}
    sampler = build_sampler(config.sampling, adapter.task_source("train"), config.seed)
    policy = adapter.build_policy()
    terms = resolve_terms(config.rewards, adapter.reward_terms)
    result = collect(config, adapter, policy, sampler, terms, ONE, train_step=1)
    batch = result.batch
    assert len(sampler.source) == 3 and result.totals["sampling/kept"] == (3, 3)
    for row, task in enumerate(batch.tasks):
        prefix = sampler.prefixes[row // 4].ids
        assert len(prefix) == 4 and task.prefill == prefix
        prompt = batch.inputs.prompts[int(batch.inputs.prompt_index[row])]
        assert tuple(prompt["input_ids"][0, -4:].tolist()) == prefix
        assert int(batch.loss_mask[row].sum()) == batch.outcomes[row].num_tokens
    gap = (adapter.forward(policy, batch).log_probs - batch.old_log_probs)[batch.loss_mask].abs().max()
    assert gap < 1e-4
    assert adapter.task_source("eval")[0].prefill == ""
    assert torch.equal(batch.group_ids, torch.arange(2).repeat_interleave(4))
