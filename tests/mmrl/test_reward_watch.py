"""`mmrl.reward_watch` and `mmrl.reward_lint`: which terms give signal, and which can be gamed."""

import math
import types

import pytest
import torch
import yaml

from mmrl import cli
from mmrl.chat import ChatTask
from mmrl.config import RewardConfig
from mmrl.errors import ConfigError, DataError
from mmrl.reward_lint import PERFECT, canned_answers, lint_rewards
from mmrl.reward_watch import RewardWatch, form_terms, term_totals
from mmrl.reward_workers import TimedTerm
from mmrl.rewards import TEXT_TERMS, WeightedTerm, accuracy, judged_term, resolve_terms, score, think_answer_format
from mmrl.testing import BanditAdapter

NAN = math.nan


def term(function, weight=1.0):
    return WeightedTerm(weight=weight, function=function)


def by_row(*values):
    supply = iter(values)
    return lambda task, outcome: next(supply)


# Signal


def test_variances_are_those_inside_groups_of_the_weighted_term():
    adapter = BanditAdapter()
    batch = adapter.rollout(adapter.build_policy(), adapter.task_source("train")[:2], group_size=3, seeds=torch.arange(6))
    terms = {
        "a": term(by_row(0, 1, 2, 5, 5, 5), 3.0),
        "b": term(by_row(1, None, 3, NAN, NAN, 4)),
        "c": term(by_row(*[0.7] * 6)),
    }
    totals = term_totals(score(batch, terms), {name: entry.weight for name, entry in terms.items()})
    # Population variance of 0, 1, 2 is 2/3, times 3^2; the second group is constant.
    assert totals["reward_variance/a"] == (pytest.approx(6.0), 2)
    assert totals["reward_variance/b"] == (pytest.approx(1.0), 1)  # 1 and 3; a single known value compares with nothing
    assert totals["reward_variance/c"] == (0.0, 2)
    assert totals["not_applicable/b"] == (3, 6)
    assert totals["not_applicable/a"] == (0, 6)


def watched(steps, window=3, forms=frozenset({"form"}), weights=None):
    watch = RewardWatch(weights or {"good": 1.0, "form": 0.5, "noted": 0.0}, forms=forms, window=window)
    return [watch.observe({f"reward_variance/{name}": value for name, value in step.items()}) for step in steps]


def test_a_constant_term_is_named_once_and_again_after_it_has_moved():
    still, moving = {"good": 0.0, "form": 0.1}, {"good": 0.05, "form": 0.1}
    said = watched([{"good": 0.0, "form": 0.1}] * 5, forms=frozenset())
    assert [len(texts) for texts in said] == [0, 0, 1, 0, 0]
    assert said[2] == ["reward 'good' did not vary inside any group in the last 3 steps: it gives no signal."]
    said = watched([still] * 3 + [moving] + [still] * 3, forms=frozenset())
    assert [len(texts) for texts in said] == [0, 0, 1, 0, 0, 0, 1]


def test_nothing_but_the_form_is_said():
    said = watched([{"good": 0.0, "form": 0.1}] * 3)[-1]
    assert any("only the form (form) varied inside groups" in text for text in said)
    assert watched([{"good": 0.1, "form": 0.1}] * 3)[-1] == []
    alone = watched([{"form": 0.1}] * 3, weights={"form": 1.0})[-1]
    assert alone == []  # a run that rewards nothing else means to


def test_a_term_that_dominates_is_named_with_its_share():
    [text] = watched([{"good": 0.97, "form": 0.03}] * 3)[-1]
    assert text.startswith("reward 'good' makes up 97.0% of the variance")
    assert watched([{"good": 0.94, "form": 0.06}] * 3)[-1] == []
    assert watched([{"good": 1.0, "noted": 9.0}] * 3, weights={"good": 1.0, "noted": 0.0})[-1] == []


def test_no_signal_at_all_is_one_sentence_and_a_window_of_0_says_nothing():
    assert len(watched([{"good": 0.0, "form": 0.0}] * 3)[-1]) == 1
    assert watched([{"good": 0.0, "form": 0.0}] * 30, window=0) == [[]] * 30


def test_forms_are_known_by_their_mark_or_name():
    found = form_terms({"a": term(think_answer_format), "my_format": term(accuracy), "b": term(accuracy)})
    assert found == {"a", "my_format"}


def test_a_run_says_when_only_the_form_varies(bandit_config):
    from mmrl.trainer import Callbacks, Trainer

    adapter = BanditAdapter(
        reward_terms={"accuracy": lambda task, outcome: 0.0, "format": lambda task, outcome: float(outcome[0])}
    )
    notices = []
    config = bandit_config(rewards={"accuracy": 1.0, "format": 0.1}, metrics={"reward_window": 2}, trainer={"num_steps": 4})
    Trainer(config, adapter, callbacks=Callbacks(on_notice=notices.append), cpu=True).run()
    assert sum("only the form (format) varied" in text for text in notices) == 1
    assert notices[0].startswith("step 2: ")


# Which terms can have a time limit


def test_a_term_that_cannot_be_sent_or_asks_a_judge_has_no_time_limit():
    with pytest.raises(ConfigError, match=r"rewards\.x\.timeout_s: this term cannot run in a process of its own"):
        TimedTerm(lambda task, outcome: 0.0, timeout_s=1.0, key="rewards.x.timeout_s")

    @judged_term
    class Judge:
        concurrent_groups = 1

    with pytest.raises(ConfigError, match="a judged term keeps time by itself"):
        resolve_terms({"judge": RewardConfig(timeout_s=1.0)}, {"judge": Judge()})


# Lint


def task(answer, name="t", domain="default", **columns):
    return ChatTask(id=name, domain=domain, messages=(), answer=answer, columns=columns)


def lint(terms, *tasks, **options):
    return lint_rewards(terms, [list(tasks)], encode=lambda text: (1,), **options)


def test_canned_answers_offer_the_tasks_own_options_or_other_tasks_answers():
    own = canned_answers(task("B", options=["A", "B", "C"]), ["X"])
    assert "A or C or X or B" in own["all options"]
    assert own[PERFECT] == "<think>I look closely.</think><answer>B</answer>"
    assert own["two answers, right first"].startswith(own[PERFECT])
    others = canned_answers(task("7"), ["7", "8"], "Answer: {answer}.")
    assert others["all options"] == "Answer: 8 or 7."
    assert "all options" not in canned_answers(task("7"), ["7"])


def test_text_terms_pass_the_lint_and_the_form_alone_does_not():
    tasks = [task("even", "a"), task("odd", "b")]
    good = lint({name: term(function, 1.0 if name == "accuracy" else 0.1) for name, function in TEXT_TERMS.items()}, *tasks)
    assert good.ok and good.num_references == 2
    assert good.cells[PERFECT] == {"accuracy": 1.0, "format": 1.0, "total": pytest.approx(1.1)}
    assert good.cells["format only"]["total"] == pytest.approx(0.1)
    form = lint({"format": term(think_answer_format)}, *tasks)
    assert any("'format only' scores 1" in problem for problem in form.problems)


def test_reference_answers_that_do_not_earn_what_others_earn_are_listed():
    def exact(task, outcome):
        return float(f"<answer>{task.answer}</answer>" in outcome.text and task.id != "c")

    found = lint({"exact": term(exact)}, task("1", "a"), task("2", "b"), task("3", "c"))
    assert [problem for problem in found.problems if problem.startswith("c: the reference answer earns 0")]
    assert found.num_references == 3


def test_a_term_that_fails_on_a_canned_answer_is_a_problem_and_a_judge_is_left_out():
    def fragile(task, outcome):
        return float(outcome.text.split("<answer>")[1][0] == task.answer[0])

    found = lint({"fragile": term(fragile)}, task("1", "a"), task("2", "b"))
    assert any("raised IndexError on task 'a'" in problem for problem in found.problems)
    judge = types.SimpleNamespace(is_judged=True)
    assert lint({"judge": term(judge), "accuracy": term(accuracy)}, task("1", "a"), task("2", "b")).notes == [
        "judge asks a judge and was left out."
    ]
    with pytest.raises(DataError, match="without a judge"):
        lint({"judge": term(judge)}, task("1"))


def test_tasks_without_answers_cannot_be_linted():
    with pytest.raises(DataError, match="no reference answer; canned answers are for tasks that are answered in words"):
        lint({"accuracy": term(accuracy)}, BanditAdapter().task_source("train")[0])
    with pytest.raises(DataError, match="nothing to hold rewards against"):
        lint({"accuracy": term(accuracy)}, task(""))


class Answered(BanditAdapter):
    """A bandit whose tasks are questions in words."""

    def task_source(self, split):
        return [task(str(number), f"{split}/{number}") for number in range(4)]


@pytest.fixture
def lint_file(bandit_config, monkeypatch):
    config = bandit_config(rewards={"accuracy": 1.0, "format": 0.1}, evaluation={"metric": "accuracy"})
    path = config.output_dir / "run.yaml"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(yaml.safe_dump(config.model_dump(mode="json")))
    monkeypatch.setitem(cli.MODALITIES, "bandit", ("mmrl.config:RunConfig", "mmrl.testing:BanditAdapter"))
    monkeypatch.setattr(cli, "build_adapter", lambda config: Answered(reward_terms=TEXT_TERMS))
    return path


def test_the_lint_command_prints_a_table_and_exits_with_1_on_a_problem(lint_file, capsys):
    assert cli.main(["reward", "lint", str(lint_file)]) == 0
    out = capsys.readouterr().out
    assert all(what in out for what in ("perfect", "empty", "all options", "format only", "very long", "accuracy x 1", "total"))
    assert "8 reference answers scored, nothing found." in out
    assert cli.main(["reward", "lint", str(lint_file), "format", "seed=3"]) == 1
    out = capsys.readouterr().out
    assert "problem: 'format only' scores 0.1" in out and "accuracy" not in out


@pytest.mark.parametrize(
    ("arguments", "part"),
    [
        (["acuracy"], "reward 'acuracy': not among the run's rewards: accuracy, format."),
        (["--template", "no place"], "expected {answer} where the answer goes"),
        (["trainer.num_stepz=3"], "did you mean 'num_steps'"),
    ],
)
def test_a_wrong_lint_is_one_line(lint_file, capsys, arguments, part):
    assert cli.main(["reward", "lint", str(lint_file), *arguments]) == 2
    err = capsys.readouterr().err
    assert part in err and err.count("\n") == 1
