"""`mmrl.control` and the control of an evaluation: other media, the same questions, and the paired gap."""

from dataclasses import dataclass

import pytest
import torch

from mmrl.chat import ChatTask, MediaFacts, media_parts
from mmrl.config import EvaluationConfig
from mmrl.control import paired_gap, shuffled_media, with_media
from mmrl.errors import ConfigError
from mmrl.evaluation import comparison_table, control_table, evaluate
from mmrl.reward_binding import available_columns, bind_columns
from mmrl.rewards import WeightedTerm
from mmrl.statistics import mean_interval, paired_difference_interval
from mmrl.testing import BanditAdapter, BanditTask


def task(name, *refs, answer="", kind="image", **columns):
    content = [{"type": kind, kind: ref} for ref in refs] + [{"type": "text", "text": "what?"}]
    return ChatTask(id=name, messages=({"role": "user", "content": content},), answer=answer or name, columns=columns)


def refs(task):
    return [ref for _, ref in media_parts(task)]


def test_shuffling_gives_media_of_another_task_with_another_answer():
    tasks = [task("a", 1, answer="x"), task("b", 2, answer="x"), task("c", 3, answer="y"), task("d", 4, 5), task("e", 6, 7)]
    changed = shuffled_media(tasks)
    assert [refs(one) for one in changed] == [[3], [3], [1], [6, 7], [4, 5]]
    assert [one.id for one in changed] == ["a", "b", "c", "d", "e"]
    assert [one.answer for one in changed] == [one.answer for one in tasks]
    assert refs(tasks[0]) == [1]  # the tasks themselves are as they were


def test_a_task_without_media_or_without_a_partner_is_left_out():
    tasks = [task("a", 1), task("b"), task("c", 2, kind="audio"), task("d", 3, 4), task("a", 5)]
    assert shuffled_media(tasks) == [None] * 5  # the two "a" are the same task


def test_media_are_replaced_in_order_and_the_text_stays():
    changed = with_media(task("a", 1, 2), ["x", "y"])
    assert refs(changed) == ["x", "y"]
    assert changed.messages[0]["content"][-1]["text"] == "what?"


def test_gaps_have_paired_intervals():
    pairs = [(1.0, 0.0)] * 6 + [(1.0, 1.0)] * 3 + [(0.0, 1.0)]
    found = paired_gap(pairs)
    assert (found["mean"], found["low"], found["high"]) == paired_difference_interval(3, 6, 1, 0)
    values = [(0.5, 0.25), (0.75, 0.75), (1.0, 0.0)]
    found = paired_gap(values)
    assert found["mean"] == pytest.approx(1.25 / 3)
    assert (found["low"], found["high"]) == pytest.approx(mean_interval([0.25, 0.0, 1.0]))
    assert paired_gap([]) == {"n": 0, "mean": None, "low": None, "high": None}
    assert paired_gap([(0.5, 0.0)])["low"] is None


@dataclass(frozen=True, kw_only=True)
class ShownTask(ChatTask, BanditTask):
    """A bandit's task whose context is its picture."""


@dataclass(kw_only=True)
class Seeing(BanditAdapter):
    """Reads the context off the picture; a blank one is context 3."""

    def task_source(self, split):
        tasks = super().task_source(split)
        content = [[{"type": "image", "image": one.context}, {"type": "text", "text": "?"}] for one in tasks]
        return [
            ShownTask(
                id=one.id, domain=one.domain, context=one.context, length=1, answer=str(one.context),
                messages=({"role": "user", "content": parts},),
            )
            for one, parts in zip(tasks, content)
        ]  # fmt: skip

    def blank_media(self, task):
        return [3]

    def rollout(self, policy, tasks, **options):
        seen = [BanditTask(id=one.id, context=refs(one)[0], length=1) for one in tasks]
        batch = super().rollout(policy, seen, **options)
        return type(batch)(**{**vars(batch), "tasks": tuple(one for one in tasks)})


def knowing():
    policy = BanditAdapter().build_policy()
    with torch.no_grad():
        policy.weight.zero_()
        policy.weight[:, :4] = 5.0 * torch.eye(4)
    return policy


def right(task, outcome):
    return float(outcome[0] == task.context)


def measured(control, **config):
    adapter = Seeing()
    settings = EvaluationConfig(num_tasks=12, batch_size=5, control=control, **config)
    terms = {"accuracy": WeightedTerm(weight=1.0, function=right)}
    return evaluate(adapter, knowing(), adapter.task_source("eval"), terms, settings)


def test_an_evaluation_reports_what_is_right_without_the_media_and_the_gap():
    plain, blank, shuffle = (measured(control) for control in ("none", "blank", "shuffle"))
    assert "control" not in plain
    assert {key: value for key, value in blank.items() if key != "control"} == plain
    control = blank["control"]
    assert (control["kind"], control["with"]["mean"], control["without"]["mean"]) == ("blank", 1.0, 0.25)
    assert (control["gap"]["n"], control["gap"]["mean"]) == (12, 0.75)
    assert control["gap"]["low"] > 0.3
    assert control["domains"]["context3"]["gap"]["mean"] == 0.0
    assert control["domains"]["context0"]["gap"]["mean"] == 1.0
    assert shuffle["control"]["without"]["mean"] == 0.0  # always the picture of another context
    assert shuffle["control"]["gap"]["mean"] == 1.0


def test_the_gap_has_a_table():
    import io

    from rich.console import Console

    console = Console(file=io.StringIO(), width=128)
    result = measured("blank")
    console.print(comparison_table(None, result), control_table(result))
    text = console.file.getvalue()
    assert "with blank media (95% intervals, gap paired by task)" in text
    assert "+0.750 [" in next(line for line in text.splitlines() if " all " in line and "+" in line)


def test_tasks_that_are_no_conversations_have_no_control():
    adapter = BanditAdapter()
    terms = {"accuracy": WeightedTerm(weight=1.0, function=right)}
    with pytest.raises(ConfigError, match=r"evaluation\.control is 'shuffle', but task 'eval/0' is no conversation"):
        evaluate(adapter, knowing(), adapter.task_source("eval"), terms, EvaluationConfig(control="shuffle"))


# What rewards are told of media


def test_a_reward_may_ask_for_media_and_columns_by_name():
    def inside(task, outcome, media, box, unit="px"):
        return media[0].scale, box, unit

    source = [task("a", 1, box=[1, 2]), task("b", 2, unit="mm")]
    assert {"answer", "box", "unit", "media", "domain"} <= set(available_columns(source))
    bound = bind_columns(inside, "rewards.x.function", "m:inside", lambda: source)
    shown = type("Outcome", (), {"media": (MediaFacts(kind="image", original_size=(100, 50), size=(50, 50)),)})()
    assert bound(source[0], shown) == ((0.5, 1.0), [1, 2], None)
    assert bound(source[1], shown) == ((0.5, 1.0), None, "mm")
    assert MediaFacts(kind="audio", seconds=2.0).scale is None
