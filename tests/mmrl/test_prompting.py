"""`mmrl.prompting`: what training changes about prompts, and that sampling, update and evaluation each see what they should."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from mmrl import advantages
from mmrl.chat import ChatTask, Completion, around_question, plain_text
from mmrl.collection import collect
from mmrl.config import validate
from mmrl.errors import ConfigError, DataError
from mmrl.prompting import changed_tasks, rubric_texts, scaffold_share, scaffolded_rows, template_format
from mmrl.prompting_config import PromptingConfig
from mmrl.rewards import resolve_terms
from mmrl.sampling import TaskSampler, rollout_seeds
from mmrl.testing import BanditAdapter
from mmrl.trainer import Trainer

ONE = SimpleNamespace(num_processes=1, process_index=0)
QUESTION = ({"role": "user", "content": [{"type": "image", "image": "x"}, {"type": "text", "text": "How many?"}]},)
TASK = ChatTask(id="t", messages=QUESTION, answer="3")
TEMPLATES = [
    {"text": "{prompt} Think.", "prefill": "<think>", "tags": ["<think>", "</think>", "<answer>", "</answer>"]},
    {"text": "Reflect. {prompt}", "sections": ["Plan:", "Check:", "Answer:"]},
    {"text": "{prompt} Box it."},
]


def texts(tasks):
    return [plain_text(task) for task in tasks]


@pytest.fixture
def changed(bandit_config):
    def change(tasks, groups, step=1, seed=0, **prompting):
        return changed_tasks(bandit_config(prompting=prompting, seed=seed), tasks, groups, step)

    return change


def test_prompts_stay_as_they_are_unless_asked(changed):
    assert changed([TASK], [0])[0] is TASK


def test_a_template_surrounds_the_question_and_brings_its_rule(changed):
    assert texts(changed([TASK], [0], templates=TEMPLATES[:1])) == ["user: <image>How many? Think."]
    assert texts(changed([TASK], [0], templates=TEMPLATES[1:2])) == ["user: <image>Reflect. How many?"]
    task = changed([replace(TASK, columns={"rest": 1})], [0], templates=TEMPLATES[:1])[0]
    assert task.prefill == "<think>"
    assert task.columns["rest"] == 1
    assert plain_text(TASK) == "user: <image>How many?"


def test_templates_are_drawn_evenly_and_by_seed_step_and_group(changed):
    tasks, groups = [TASK] * 300, list(range(300))
    drawn = texts(changed(tasks, groups, templates=TEMPLATES))
    counts = [drawn.count(text) for text in sorted(set(drawn))]
    assert len(counts) == 3 and min(counts) > 70
    assert drawn == texts(changed(tasks, groups, templates=TEMPLATES))
    assert drawn != texts(changed(tasks, groups, step=2, templates=TEMPLATES))
    assert drawn != texts(changed(tasks, groups, seed=1, templates=TEMPLATES))
    # A group is asked alike whatever it is drawn with, so processes agree.
    assert drawn[150:] == texts(changed(tasks[150:], groups[150:], templates=TEMPLATES))


@pytest.mark.parametrize(
    ("place", "expected"),
    [
        ("system", "system: Cheat.\nuser: <image>How many?"),
        ("before", "user: <image>Cheat.\nHow many?"),
        ("after", "user: <image>How many?\nCheat."),
    ],
)
def test_inoculation_has_its_place(changed, place, expected):
    assert texts(changed([TASK], [0], inoculation={"text": "Cheat.", "place": place})) == [expected]


def test_inoculation_follows_a_system_turn_that_is_there(changed):
    system = {"role": "system", "content": [{"type": "text", "text": "Be kind."}]}
    task = replace(TASK, messages=(system, *QUESTION))
    assert texts(changed([task], [0], inoculation={"text": "Cheat."})) == ["system: Be kind.\nCheat.\nuser: <image>How many?"]


def test_a_share_of_the_groups_is_inoculated(changed):
    asked = texts(changed([TASK] * 400, list(range(400)), inoculation={"text": "Cheat.", "share": 0.25}))
    assert 70 < sum("Cheat." in text for text in asked) < 130


def test_a_question_in_the_middle_of_a_conversation_is_left_alone():
    messages = (*QUESTION, {"role": "assistant", "content": [{"type": "text", "text": "3"}]}, *QUESTION)
    assert around_question(messages, "a", "b")[:2] == messages[:2]


@pytest.mark.parametrize(
    ("template", "text", "expected"),
    [
        # A quarter per tag that occurs exactly once: all, one doubled, one missing, none.
        (0, "<think>a</think><answer>3</answer>", 1.0),
        (0, "<think>a</think><answer>3</answer></answer>", 0.75),
        (0, "<think>a<answer>3</answer>", 0.75),
        (0, "3", 0.0),
        # A third per section that occurs.
        (1, "Plan: count. Answer: 3", 2 / 3),
        # Free form: constant.
        (2, "3", 1.0),
    ],
)
def test_each_template_has_its_own_format(changed, template, text, expected):
    task = changed([TASK], [0], templates=[TEMPLATES[template]])[0]
    assert template_format(task, Completion(text=text, token_ids=(), stop_reason="stop")) == pytest.approx(expected)


def test_format_does_not_apply_without_a_template():
    assert template_format(TASK, Completion(text="", token_ids=(), stop_reason="stop")) is None


def test_a_constant_format_reward_does_not_change_centered_advantages():
    rewards, groups = torch.tensor([1.0, 0.0, 0.0, 1.0]), torch.zeros(4, dtype=torch.long)
    plain, shifted = (advantages.group_center_advantages(r, groups) for r in (rewards, rewards + 1.0))
    assert torch.equal(plain, shifted)


# ---- rubric scaffolds -----------------------------------------------------------------------------------------------------


def test_the_share_of_rubrics_within_a_group_and_over_the_run():
    # progress far below the midpoint: the step factor is 1.
    within = [scaffold_share(row, 8, -9.0) for row in range(8)]
    assert within == pytest.approx([1, 0.857143, 0.714286, 0.571429, 0.428571, 0.285714, 0.142857, 0], abs=1e-6)
    step = [scaffold_share(0, 8, x, midpoint=0.2, steepness=125) for x in (0, 0.19, 0.2, 0.21)]
    assert step == pytest.approx([1.0, 0.777300, 0.5, 0.222700], abs=1e-6)
    step = [scaffold_share(0, 1, x, midpoint=0.3, steepness=10) for x in (0, 0.2, 0.5)]
    assert step == pytest.approx([0.952574, 0.731059, 0.119203], abs=1e-6)
    assert scaffold_share(2, 8, 0.19) == pytest.approx(0.555214, abs=1e-6)
    assert round(10 * scaffold_share(2, 8, 0.19)) == 6
    assert scaffold_share(0, 8, 1e6) == 0.0


@given(st.integers(1, 16), st.floats(0, 1), st.floats(0, 1), st.floats(1, 1000))
def test_shares_fall_with_the_row_and_with_time(size, early, late, steepness):
    early, late = sorted((early, late))
    shares = [scaffold_share(row, size, early, steepness=steepness) for row in range(size)]
    assert all(0 <= share <= 1 for share in shares) and shares == sorted(shares, reverse=True)
    assert scaffold_share(0, size, late, steepness=steepness) <= shares[0]


RUBRICS = ["a", {"text": "b", "points": 2}, {"criterion": "c"}, "d"]


def scaffolded(bandit_config, train_step, num_steps=11, rubrics=RUBRICS, **scaffold):
    config = bandit_config(
        prompting={"scaffold": scaffold}, trainer={"num_steps": num_steps}, sampling={"group_size": 3, "tasks_per_step": 2}
    )
    task = replace(TASK, columns={"rubrics": rubrics})
    return scaffolded_rows(config, [task, task], [0, 1], train_step)


def test_rollouts_of_a_group_see_fewer_and_fewer_rubrics_then_none(bandit_config):
    rows = scaffolded(bandit_config, 1)
    shown = [row.hint.count("\n- ") for row in rows]
    assert shown == [4, 2, 0, 4, 2, 0]
    assert rows[0].hint == "\nA good answer meets these criteria:\n- a\n- b\n- c\n- d"
    assert rows[2].hint == ""
    assert scaffolded(bandit_config, 1) == rows
    assert scaffolded(bandit_config, 11) is None
    assert scaffolded(bandit_config, 3)[0].hint.count("\n- ") == 2  # the midpoint: half of them


def test_without_a_scaffold_rows_are_as_ever(bandit_config):
    assert scaffolded_rows(bandit_config(), [TASK], [0], 1) is None


@pytest.mark.parametrize("rubrics", [None, [], "one text", [1], [{"points": 1}]])
def test_a_task_without_rubrics_is_named(rubrics):
    with pytest.raises(DataError, match=r"t: prompting\.scaffold needs rubrics in column 'rubrics'"):
        rubric_texts(replace(TASK, columns={"rubrics": rubrics}), "rubrics")


# ---- in a run -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("prompting", [{"templates": TEMPLATES}, {"inoculation": {"text": "x"}}, {"scaffold": {}}])
def test_a_policy_without_conversations_refuses(bandit_config, prompting):
    name = next(iter(prompting))
    with pytest.raises(ConfigError, match=rf"prompting.{name}: .*modality 'bandit' are no conversations \(BanditTask\)"):
        Trainer(bandit_config(prompting=prompting), BanditAdapter(), cpu=True)


def test_a_template_shows_the_question_once():
    with pytest.raises(ConfigError, match=r"expected \{prompt\} once, found it 0 times"):
        validate({"templates": [{"text": "no question"}]}, PromptingConfig, "test")


@pytest.fixture(scope="module")
def adapter():
    from vision.adapter import build_adapter
    from vision.config import VisionRunConfig

    tree = {
        "modality": "vision", "name": "test", "rewards": {"accuracy": 1.0}, "trainer": {"num_steps": 1},
        "policy": {"path": "tiny-qwen2.5-vl"}, "tasks": {"name": "digits"}, "rollout": {"max_new_tokens": 6},
    }  # fmt: skip
    return build_adapter(validate(tree, VisionRunConfig, "test"))


@pytest.fixture(scope="module")
def policy(adapter):
    return adapter.build_policy()


def rolled_out(adapter, policy, tasks, group_size=2):
    return adapter.rollout(policy, tasks, group_size=group_size, seeds=rollout_seeds(0, 1, 0, len(tasks) * group_size))


def test_a_prefill_belongs_to_the_prompt_and_is_read_with_the_answer(adapter, policy):
    tasks = [adapter.task_source("train")[index] for index in range(2)]
    ids = tuple(adapter.frontend.processor.tokenizer.encode("answer", add_special_tokens=False))
    plain = rolled_out(adapter, policy, tasks)
    batch = rolled_out(adapter, policy, [tasks[0], replace(tasks[1], prefill="answer")])
    added = batch.inputs.prompt_lengths - plain.inputs.prompt_lengths
    assert added.tolist() == [0, 0, len(ids), len(ids)]
    prompt = batch.inputs.prompts[1]
    assert prompt["input_ids"][0, -len(ids) :].tolist() == list(ids)
    assert prompt["attention_mask"].shape == prompt["input_ids"].shape
    for row in (2, 3):
        assert batch.outcomes[row].text.startswith("answer")
        assert batch.outcomes[row].num_tokens == int(batch.loss_mask[row].sum())
    assert not batch.outcomes[0].text.startswith("answer")
    gap = (adapter.forward(policy, batch).log_probs - batch.old_log_probs)[batch.loss_mask].abs().max()
    assert gap < 1e-4
    by_ids = rolled_out(adapter, policy, [tasks[0], replace(tasks[1], prefill=ids)])
    assert torch.equal(by_ids.inputs.tokens, batch.inputs.tokens)


def test_a_hint_is_seen_in_sampling_and_not_in_the_update(adapter, policy):
    task = adapter.task_source("train")[0]
    rows = [replace(task, hint="\nThe sum is even."), task]
    batch = rolled_out(adapter, policy, rows, group_size=1)
    bare = rolled_out(adapter, policy, [task, task], group_size=1)
    assert batch.tasks == (task, task)
    assert len(batch.inputs.prompts) == 1 and batch.inputs.prompt_index.tolist() == [0, 0]
    assert torch.equal(batch.inputs.prompts[0]["input_ids"], bare.inputs.prompts[0]["input_ids"])
    # What is recorded is the log-probability of the completion as an answer to the bare prompt.
    gap = (adapter.forward(policy, batch).log_probs - batch.old_log_probs)[batch.loss_mask].abs().max()
    assert gap < 1e-5
    assert torch.allclose(batch.old_log_probs[1], bare.old_log_probs[1], atol=1e-4)
    shown = adapter._rollout_together(policy, [replace(task, hint="\nThe sum is even.")], 1, rollout_seeds(0, 1, 0, 1), True)
    assert shown.inputs.prompt_lengths.tolist() == bare.inputs.prompt_lengths[:1].tolist()


def test_collection_scaffolds_rollouts_and_trains_on_bare_prompts_of_whole_groups(adapter, policy, bandit_config):
    config = bandit_config(
        sampling={"tasks_per_step": 2, "group_size": 3, "order": "sequential"},
        prompting={"scaffold": {}, "inoculation": {"text": "Cheat.", "place": "after"}},
    )
    source = [replace(adapter.task_source("train")[index], columns={"rubrics": ["short", "right"]}) for index in range(2)]
    sampler = TaskSampler(source, order="sequential", seed=0)
    terms = resolve_terms(config.rewards, adapter.reward_terms)
    batch = collect(config, adapter, policy, sampler, terms, ONE, train_step=1).batch
    assert batch.group_ids.tolist() == [0, 0, 0, 1, 1, 1]
    assert [task.id for task in batch.tasks[::3]] == [task.id for task in source]
    assert not any(task.hint for task in batch.tasks)
    assert len(batch.inputs.prompts) == 2
    assert all(plain_text(task).endswith("Cheat.") for task in batch.tasks)
    assert not any("Cheat." in plain_text(task) for task in sampler.source)
