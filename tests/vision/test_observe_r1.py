"""Observe-R1's terms, configs and built-in policy against vision.md 1.3, 1.5 and 1.8."""

import json
from pathlib import Path

import numpy as np
import pytest

from mmrl.chat import ChatTask, Completion
from mmrl.cli import load_run, main
from mmrl.errors import ConfigError
from vision.adapter import resolve_policy, task_sources
from vision.digits import KINDS, DigitTasks, observe_demonstration
from vision.observe_r1 import (
    OBSERVE_TERMS,
    answer_text,
    observe_accuracy,
    option_matches,
    published_format,
    read_blocks,
)
from vision.observe_r1_answers import plain_answer, same_value, value_of
from vision.tiny import add_tags

CONFIGS = Path(__file__).parents[2] / "configs" / "vision"

GOOD = "<observe>a cat</observe><think>so</think><answer>B</answer>"
NESTED = "<think>I look. <observe>a cat</observe> So</think><answer>B</answer>"


def said(text, tokens=3):
    return Completion(text=text, token_ids=tuple(range(tokens)), stop_reason="stop")


def task(answer):
    return ChatTask(id="q", messages=(), answer=answer)


@pytest.mark.parametrize(
    ("text", "published", "strict", "nested"),
    [
        (GOOD, True, True, True),
        (GOOD.replace("><", ">\n \n<"), True, True, True),
        ("\n" + GOOD + " ", True, True, True),
        (f"First. {GOOD} Last.", True, False, False),
        ("<think>so</think><observe>a cat</observe><answer>B</answer>", False, False, False),
        (NESTED, True, False, True),
        ("<observe>a</observe><observe>b</observe><think>so</think><answer>B</answer>", False, False, False),
        (NESTED + "<answer>C</answer>", True, False, False),
        (GOOD + "<answer>C</answer>", False, False, False),
        ("<observe>a cat</observe> and <think>so</think><answer>B</answer>", False, False, False),
        ("<observe></observe><think>so</think><answer>B</answer>", False, False, False),
        ("<observe> \n</observe><think>so</think><answer>B</answer>", True, False, False),
        ("<observe>a</observe><think> </think><answer>B</answer>", True, False, False),
        ("<think><observe>a</observe></think><answer>B</answer>", True, False, False),  # nothing was thought
        ("<observe>a</observe><think>so</think><answer> </answer>", True, False, False),
        ("<think>so</think><answer>B</answer>", False, False, False),
        ("<observe>a</observe><think>so</think><answer>B", False, False, False),
        (GOOD.replace("a cat", "a\ncat"), True, True, True),
        ("", False, False, False),
    ],
)
def test_formats(text, published, strict, nested):
    assert (published_format(text), read_blocks(text) is not None, read_blocks(text, nested=True) is not None) == (
        published, strict, nested,
    )  # fmt: skip
    for name, expected in [("", strict), ("_nested", nested), ("_published", published)]:
        assert OBSERVE_TERMS[f"observe_format{name}"](task("B"), said(text)) == float(expected)


def test_blocks_are_read_by_name():
    assert read_blocks(GOOD) == {"observe": "a cat", "think": "so", "answer": "B"}
    assert read_blocks(NESTED, nested=True) == {"observe": "a cat", "think": "I look.  So", "answer": "B"}


@pytest.mark.parametrize(
    ("gold", "answer", "accepted"),
    [
        ("A", "A", True), ("A", "option A", True), ("A", "A. cat", False), ("A", "The answer is A", False),
        ("B", "(B)", True), ("C", "B or C", False), ("a", "A", True), ("G", "G", False), ("AB", "AB", False), ("A", "", False),
    ],
)  # fmt: skip
def test_the_fallback_for_multiple_choice(gold, answer, accepted):
    assert option_matches(answer, gold) is accepted


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        (GOOD, "B"),
        ("<answer>1</answer><answer>2</answer>", "1"),
        ("<answer>1\n</answer> then <answer>2</answer>", "2"),
        ("<answer>1\n2</answer>", "1\n2"),  # a line break inside the only span: what follows the tag
        ("so <answer> 7", "7"),
        ("it is 7", "it is 7"),
    ],
)
def test_which_answer_is_graded(text, answer):
    assert answer_text(text) == answer


@pytest.mark.parametrize(
    ("gold", "answer", "accuracy"),
    [
        ("$3$", "3", 1.0), ("$3$", "$3.0$", 1.0), ("3", "x = 3", 1.0), (r"$\frac{1}{2}$", "0.5", 1.0), ("B", "option B", 1.0),
        ("$B$", "(B)", 1.0), ("B", "A", 0.0), ("12", "13", 0.0), ("3", "3 cats", 0.0), ("even", "even", 1.0),
        ("cat", "dog", 0.0), (r"\unreadable{", "anything", 0.0), (r"\unreadable{", "", 0.0), ("", "x", None),
    ],
)  # fmt: skip
def test_accuracy(gold, answer, accuracy):
    assert observe_accuracy(task(gold), said(f"<observe>o</observe><think>t</think><answer>{answer}</answer>")) == accuracy


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1,234", 1234), (r"\dfrac{3}{4}", 0.75), (r"\frac12", 0.5), (r"-\frac{1}{\sqrt{4}}", -0.5), (r"2\sqrt{3}", 12**0.5),
        (r"\sqrt[3]{27}", 3), (r"3\pi", 3 * np.pi), (r"\boxed{\text{42}}", 42), ("45^\\circ", 45), ("25\\%", 25),
        ("2^{10}", 1024), (r"\left(1+2\right)\cdot 3", 9), (r"\( 7 \)", 7), (r"\frac{\pi}{2}", np.pi / 2), ("2(3)", 6),
        ("1/0", None), ("cat", None), ("", None), ("9^9^9^9", None), ("1" * 201, None), ("__import__('os')", None),
        ("(" * 150 + ")" * 50, None), ("(-8)^{0.5}", None), ("1e5", None), (r"\frac{1}{", None), ("3 4", None),
    ],
)  # fmt: skip
def test_arithmetic_is_read_and_nothing_else(text, value):
    assert value_of(text) == (None if value is None else pytest.approx(value))


def test_values_compare_to_a_millionth_and_texts_without_their_wrapping():
    assert same_value("0.3333333", r"\frac13") and not same_value("0.3333", r"\frac13")
    assert same_value(r"\boxed{(B)}", "b") and same_value(r"$\text{yes}$", "Yes.") and not same_value("no", "yes")
    assert plain_answer("$x = 3$.") == "3" and not same_value("", "")


def test_tokens_are_recorded_for_right_and_wrong_completions():
    assert OBSERVE_TERMS["completion_tokens"](task("1"), said("no", tokens=17)) == 17


# ---- configs ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", ["3b", "7b"])
def test_the_published_settings(size, capsys):
    path = CONFIGS / f"observe_r1_qwen25vl_{size}.yaml"
    config = load_run(path)
    algorithm = config.algorithm
    assert config.policy.path == f"Qwen/Qwen2.5-VL-{size.upper()}-Instruct"
    assert (config.sampling.tasks_per_step, config.sampling.group_size, config.sampling.ladder.mixing) == (128, 8, True)
    assert 128 * 8 // config.trainer.minibatches == 64 and config.trainer.epochs_per_batch == 1
    assert 20_000 - 128 < config.trainer.num_steps * 128 <= 20_000
    assert (algorithm.difficulty_weight, algorithm.difficulty_peak, algorithm.advantage_clamp) == ("parabola", 1.8, 10.0)
    assert (algorithm.advantage, algorithm.advantage_ddof, algorithm.advantage_eps) == ("group_std", 1, 1e-9)
    assert (algorithm.kl, algorithm.kl_in, algorithm.kl_coef) == ("k1", "return", 0.01)
    assert (algorithm.clip_low, algorithm.clip_high, algorithm.aggregation) == (0.2, 0.2, "token_mean")
    (shaping,) = algorithm.shaping
    assert (shaping.name, shaping.bonus, shaping.floor) == ("concise_correct", 0.2, 100)
    assert {name: term.weight for name, term in config.rewards.items()} == {"observe_accuracy": 1.0, "observe_format": 0.5}
    optimizer = config.optimizer
    assert (optimizer.learning_rate, optimizer.betas, optimizer.schedule) == (1e-6, (0.9, 0.95), "cosine")
    assert (optimizer.final_fraction, optimizer.max_grad_norm) == (0.1, 1.0)
    assert optimizer.warmup_steps == round(0.03 * config.trainer.num_steps * config.trainer.minibatches)
    assert (config.rollout.max_prompt_tokens, config.rollout.max_new_tokens, config.rollout.temperature) == (9216, 8192, 1.0)
    assert config.checkpoint.every == 20 and config.trainer.precision == "bfloat16"
    assert all(f"<{tag}>" in config.tasks.train.system for tag in ("observe", "think", "answer"))
    assert config.tasks.train.system == config.tasks.eval.system
    assert main(["check", "--no-weights", str(path)]) == 0
    assert "largest image                1280 visual tokens" in capsys.readouterr().out


def test_the_miniature_differs_from_the_published_method_only_where_it_says_so():
    small, full = (load_run(CONFIGS / name) for name in ("observe_r1_digits.yaml", "observe_r1_qwen25vl_3b.yaml"))
    floors = [config.algorithm.shaping[0].floor for config in (small, full)]
    assert floors == [12, 100]
    assert {name for name, value in small.algorithm if value != getattr(full.algorithm, name)} == {"shaping"}
    assert small.tasks.num_tasks == small.trainer.num_steps * small.sampling.tasks_per_step


# ---- the policy of the miniature ----------------------------------------------------------------------------------------


def test_demonstrations_observe_once_and_think_more_or_less():
    kinds = [name for name, kind in KINDS.items() if kind.demonstrated]
    plain = DigitTasks(kinds, split="train", num_tasks=300)
    observing = DigitTasks(kinds, split="train", num_tasks=300, form="observe")
    repeats = set()
    for index in range(300):
        before, now = plain[index], observing[index]
        assert (before.id, before.answer, before.columns) == (now.id, now.answer, now.columns)
        blocks = read_blocks(now.demonstration)
        assert blocks["observe"] == " ".join(map(str, now.columns["digits"]))
        times, rest = divmod(len(blocks["think"].split()), len(now.columns["digits"]))
        assert rest == 0 and blocks["think"] == " ".join([blocks["observe"]] * times)
        repeats.add(times)
        assert f"<answer>{blocks['answer']}</answer>" in before.demonstration
    assert repeats == {1, 2, 3, 4, 5, 6}
    assert observe_demonstration("4", "even", np.random.default_rng(0)).endswith("</think><answer>even</answer>")


def test_the_config_chooses_the_form_of_demonstrations():
    config = load_run(CONFIGS / "observe_r1_digits_warmup.yaml")
    assert read_blocks(task_sources(config)["train"]()[0].demonstration) is not None
    config = load_run(CONFIGS / "read_digits_warmup.yaml")
    assert read_blocks(task_sources(config)["train"]()[0].demonstration) is None


def test_the_observing_reader_has_two_more_tokens_and_the_same_weights(tmp_path):
    from safetensors.torch import load_file
    from transformers import AutoTokenizer

    directory = Path(resolve_policy("digit-reader-observe", seed=0))
    tokenizer = AutoTokenizer.from_pretrained(directory)
    shipped = Path(resolve_policy("digit-reader", seed=0))
    assert tokenizer.tokenize("<observe>3</observe><think>") == ["<observe>", "3", "</observe>", "<think>"]
    assert len(tokenizer) == len(AutoTokenizer.from_pretrained(shipped)) + 2
    before, after = (load_file(folder / "model.safetensors") for folder in (shipped, directory))
    assert before.keys() == after.keys() and all((before[name] == after[name].to(before[name].dtype)).all() for name in before)
    with pytest.raises(ConfigError, match="rows of embeddings, too few for"):
        add_tags(shipped, tmp_path, [f"<{i}>" for i in range(200)])


# ---- mmrl data profile --------------------------------------------------------------------------------------------------

READ = str(CONFIGS / "read_digits.yaml")
SHORT = ["--samples", "3", "--limit", "2", "rollout.max_new_tokens=12", "tasks.kinds=[read, sum]"]


def test_the_command_profiles_built_in_tasks_for_the_ladder(tmp_path, capsys):
    output = tmp_path / "profile.jsonl"
    assert main(["data", "profile", READ, "--cpu", "--output", str(output), *SHORT]) == 0
    printed = capsys.readouterr().out
    assert "difficulty for this policy" in printed and f"profile {output}" in printed
    rows = [json.loads(line) for line in output.read_text(encoding="utf-8").splitlines()]
    source = task_sources(load_run(Path(READ), ["tasks.kinds=[read, sum]"]))["train"]()
    assert [(row["id"], row["domain"], row["answer"]) for row in rows] == [
        (source[i].id, name, source[i].answer) for i, name in enumerate(["read", "sum"])
    ]
    assert all(round(3 * row["difficulty"], 6) in (0, 1, 2, 3) and 1 <= row["complexity"] <= 12 for row in rows)
    assert main(["data", "profile", READ, "--cpu", "--output", str(output), *SHORT]) == 2
    assert "exists already; choose another --output, or --overwrite" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--output", "profile.csv"], "expected a name that ends in .jsonl or .parquet"),
        (["--output", "profile.jsonl", "--samples", "0"], "--samples is 0; expected 1 or more"),
        (["--output", "profile.jsonl", "--limit", "-1"], "--limit is -1; expected 1 or more"),
    ],
)
def test_the_command_says_what_it_expects(options, message, capsys):
    assert main(["data", "profile", READ, *options]) == 2
    assert message in capsys.readouterr().err
