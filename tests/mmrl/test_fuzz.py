"""`benchmarks/fuzz.py` in short, and what longer runs of it found, each as a test of its kind."""

import json
import math
import sys
import time
from pathlib import Path
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from audio.rewards import AUDIO_TERMS, answer_span, first_answer
from audio.rubrics import think_text
from audio.rubrics_rules import follows
from mmrl.calibration import stated_confidence
from mmrl.chat import ChatTask, Completion, first_block
from mmrl.config import RunConfig, apply_overrides, read_config, validate
from mmrl.data import DatasetConfig, read_tasks
from mmrl.data_check import check_dataset
from mmrl.data_convert import Conversion
from mmrl.data_files import RowError, _without_trailing_commas
from mmrl.errors import ConfigError, DataError
from mmrl.judge import parse_object
from mmrl.judge_endpoint import _read_reply
from mmrl.rewards import accuracy, same_answer
from mmrl.rubric_points import rubric_points
from mmrl.strict_yaml import read_yaml
from vision.observe_r1 import OBSERVE_TERMS, answer_text, published_format
from vision.observe_r1_answers import same_value
from vision.r1_reward import R1_TERMS

sys.path.append(str(Path(__file__).resolve().parents[2] / "benchmarks"))

from fuzzing import completions, configs, dataset_files

MINIMAL = {"modality": "vision", "name": "digits", "rewards": {"accuracy": 0.5}, "trainer": {"num_steps": 10}}


# ---- in short -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("target", "examples"), [(dataset_files, 60), (configs, 300), (completions, 300)])
def test_no_awkward_example_ends_in_a_traceback_or_in_silence(target, examples):
    getattr(target, "prepare", lambda: None)()

    @settings(max_examples=examples)
    @given(st.integers(0, 2**63))
    def attempt(number):
        target.check(target.draw(Random(number)))

    attempt()


# ---- completions --------------------------------------------------------------------------------------------------------

ENDLESS = {
    "opening tags": "<answer>" * 12_000,
    "white space behind a tag": "<answer>" + " " * 100_000,
    "thinking and observing again and again": "<think><observe>x</observe></think>" * 3000,
    "all tags": "<think></think><answer></answer><analysis></analysis><confidence>" * 1500,
    "answers without an end": "<think></think><answer></answer>x" * 3000,
}


@pytest.mark.parametrize("text", ENDLESS.values(), ids=ENDLESS)
def test_completions_that_repeat_themselves_are_scored_at_once(text):
    task = ChatTask(id="t", domain="d", messages=(), answer="B")
    completion = Completion(text=text, token_ids=(1,), stop_reason="length")
    started = time.process_time()
    for term in (accuracy, *AUDIO_TERMS.values(), *OBSERVE_TERMS.values(), *R1_TERMS.values()):
        term(task, completion)
    stated_confidence(text), think_text(text), answer_span(text), answer_text(text)
    assert time.process_time() - started < 2


def test_a_block_is_what_stands_between_the_first_pair_of_tags():
    assert first_block("a<x>b<x>c</x>d</x>", "x") == "b<x>c"
    assert first_block("</x><x>", "x") is None and first_block("<x>", "x") is None and first_block("<x></x>", "x") == ""
    assert first_answer("<answer>\n B </answer>") == "B"
    assert answer_span("<answer>A</answer><answer>B</answer>") == "A</answer><answer>B"
    assert answer_span("<answer>B</answer>C</answer>") == "B</answer>C" and answer_span("</answer><answer>") is None


def test_the_published_pattern_is_found_in_its_order():
    good = "<think>a<observe>b</observe>c</think>\n<answer>d</answer>"
    assert published_format(f"x{good}y") and published_format(f"<think></think>{good}")
    assert not published_format(good.replace(">b<", "><")) and not published_format(good.replace(">d<", "><"))
    assert not published_format(good.replace("</think>\n", "</think>x"))


def test_an_answer_beside_one_that_was_not_closed_is_not_the_only_one():
    task = ChatTask(id="t", domain="d", messages=(), answer="C")
    texts = ("<answer>C</answer>", "<answer>C</answer><answer>D", "<answer>C", "<answer>x<answer>C</answer>")
    assert [accuracy(task, Completion(text=text, token_ids=(), stop_reason="stop")) for text in texts] == [1.0, 0.0, 0.0, 0.0]


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ("12345678902", "12345678901"),
        ("9" * 400, "8" * 400),
        ("1e999", "1e400"),
        ("2e-34", "6.6e-34"),
        ("9" * 5000, "1" * 5000),
    ],
)
def test_numbers_that_floats_cannot_tell_apart_are_different_answers(given, expected):
    assert not same_answer(given, expected) and not same_value(given, expected)
    assert same_answer(expected, expected)


def test_whole_numbers_are_compared_exactly_as_arithmetic_too():
    assert not same_value("2^{20}", "1048577") and same_value("2^{20}", "1048576") and same_value("1/3", "0.33333333")


@pytest.mark.parametrize("points", [math.nan, math.inf, -math.inf, 10**400])
def test_points_that_are_no_numbers_are_refused(points):
    task = ChatTask(
        id="t", domain="d", messages=(), source="f:1", columns={"rubrics": [{"text": "x", "points": points, "pattern": "x"}]}
    )
    with pytest.raises(DataError, match=r"f:1: the points of a rubric are .*; expected a number"):
        rubric_points(task, Completion(text="x", token_ids=(), stop_reason="stop"))


def test_a_pattern_that_is_no_regular_expression_is_refused():
    task = ChatTask(id="t", domain="d", messages=(), source="f:1", columns={"rubrics": [{"text": "x", "pattern": "("}]})
    with pytest.raises(DataError, match="f:1: the pattern of a rubric is no regular expression"):
        rubric_points(task, Completion(text="x", token_ids=(), stop_reason="stop"))


@pytest.mark.parametrize("text", ["```\n" + "\n" * 100_000, "```json\n" + " \n" * 50_000, "[" * 100_000, '{"a": "\\ud800"}'])
def test_replies_of_judges_without_an_end_or_text_are_malformed(text):
    started = time.process_time()
    with pytest.raises(ValueError):
        parse_object(text)
    assert time.process_time() - started < 1


def test_replies_in_a_fence_are_read():
    assert parse_object('```json\n{"a": "```"}\n```') == parse_object('\n```\n{"a": "```"}```\n') == {"a": "```"}


def test_a_deeply_nested_answer_of_a_server_is_malformed():
    with pytest.raises(ValueError, match="nested too deeply"):
        _read_reply(b"[" * 200_000)


def test_endless_digits_are_no_number():
    assert follows("digit", "Which digit is larger?", ["9" * 5000, "3", "4"]) == "4"


# ---- configs ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a: &a [*a]", "an anchor (&) is used inside of itself"),
        ("a: &a {b: *a}", "an anchor (&) is used inside of itself"),
        ("a: 2024-01-01", "is read as date"),
        ("a: !!binary aGk=", "is read as bytes"),
        ("a: !!set {b}", "is read as set"),
        ('a: "\\ud800"', "half of a surrogate pair"),
        ("a: 1" + "0" * 400, "is too large"),
    ],
)
def test_yaml_that_no_config_can_hold_is_refused(text, message):
    with pytest.raises(ConfigError) as error:
        read_yaml(text, "run.yaml")
    assert str(error.value).startswith("run.yaml: ") and message in str(error.value)
    str(error.value).encode()


def test_aliases_that_multiply_are_refused_at_once():
    lines = ["a0: &a0 [1, 1]", *(f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 9)}]" for i in range(1, 12))]
    with pytest.raises(ConfigError, match="aliases"):
        read_yaml("\n".join(lines), "run.yaml")
    assert read_yaml("a: &a [1, 2]\nb: [*a, *a]", "run.yaml")["b"] == [[1, 2], [1, 2]]


@pytest.mark.parametrize("override", ["trainer.num_steps=true", "optimizer.betas=[0.9, off]", "rewards.accuracy=yes"])
def test_switches_are_no_numbers(override):
    with pytest.raises(
        ConfigError, match=r"run.yaml: .* is (True|False), as YAML also reads yes, no, on and off: expected a number"
    ):
        validate(apply_overrides(MINIMAL, [override]), RunConfig, "run.yaml")


def test_numbers_that_nothing_can_be_done_with_are_refused():
    from robotics.config import RoboticsRunConfig

    robot = {"modality": "robotics", "policy": {"name": "lerobot", "type": "pi05", "settings": {"a": {"b": [1, math.nan]}}}}
    with pytest.raises(ConfigError, match=r"policy.settings.a.b.1 is nan: expected a finite number"):
        validate({**MINIMAL, **robot}, RoboticsRunConfig, "run.yaml")
    with pytest.raises(ConfigError, match=r"trainer.num_steps is 9+: expected a whole number of at most 64 bits"):
        validate(apply_overrides(MINIMAL, [f"trainer.num_steps='{'9' * 30}'"]), RunConfig, "run.yaml")


def test_an_override_inside_of_a_reward_keeps_its_weight():
    tree = apply_overrides(MINIMAL, ["rewards.accuracy.timeout_s=5"])
    assert validate(tree, RunConfig, "run.yaml").rewards["accuracy"].weight == 0.5


@pytest.mark.parametrize("name", ["a\0b", "a\nb", "x" * 300])
def test_names_that_no_folder_can_have_are_refused(name):
    with pytest.raises(ConfigError, match="name is"):
        validate({**MINIMAL, "name": name}, RunConfig, "run.yaml")


def test_a_base_that_no_file_can_be_named_is_refused(tmp_path):
    (tmp_path / "run.yaml").write_text('base: "a\\0b"\n')
    with pytest.raises(ConfigError, match="cannot be read"):
        read_config(tmp_path / "run.yaml")


# ---- dataset files ------------------------------------------------------------------------------------------------------


def refused(folder, line, config=None):
    """The error of the only row."""
    (folder / "rows.jsonl").write_bytes(line if isinstance(line, bytes) else line.encode())
    tasks = read_tasks(DatasetConfig(path="rows.jsonl", **(config or {})), base_dir=folder)
    with pytest.raises(RowError) as error:
        tasks[0]
    str(error.value).encode()
    assert "rows.jsonl:1: " in str(error.value)
    return error.value


@pytest.mark.parametrize("end", ["", ",}"])
def test_a_long_text_that_was_cut_is_refused_at_once(end):
    started = time.process_time()
    assert _without_trailing_commas('{"text": "' + '\\"' * 100_000 + end) is None
    assert time.process_time() - started < 1


def test_commas_in_front_of_brackets_are_still_mended():
    assert _without_trailing_commas('{"a": ",]\\",}", "b": [1, ], }') == {"a": ',]",}', "b": [1]}


@pytest.mark.parametrize(
    ("row", "field", "reason"),
    [
        ('{"prompt": "x", "answer": "A", "answer": "B"}', "row", "not JSON"),
        ('{"prompt": "x", "extra": {"a": 1, "a": 2}}', "row", "not JSON"),
        ('{"prompt": "x", "extra": ' + "[" * 900 + "]" * 900 + "}", "row", "not JSON"),
        ('{"prompt": "x", "extra": "\\ud800"}', "extra", "text is not Unicode"),
        ('{"prompt": "x", "\\ud800": 1}', "\\ud800", "text is not Unicode"),
        ('{"prompt": "x", "answer": 1e999}', "answer", "wrong type"),
        ('{"prompt": "x", "answer": -Infinity}', "answer", "wrong type"),
        ('{"prompt": "x", "id": {"a": 1}}', "id", "wrong type"),
        ('{"prompt": "x", "id": Infinity}', "id", "wrong type"),
        ('{"prompt": "x", "domain": [1]}', "domain", "wrong type"),
        ('{"prompt": "x", "difficulty": Infinity}', "difficulty", "wrong type"),
        (json.dumps({"messages": "[{[1]: 2}]"}), "messages", "wrong type"),
        (json.dumps({"messages": "[{'role': 'user', 'content': [{1: 2, 'a': 3}]}]"}), "messages", "wrong type"),
        (json.dumps({"prompt": "x", "images": "[{'x.png'}]"}), "images", "wrong type"),
    ],
)
def test_rows_that_say_something_twice_or_nothing_sensible_are_refused(tmp_path, row, field, reason):
    error = refused(tmp_path, row)
    assert (error.field, error.reason) == (field, reason)


def test_a_missing_id_and_domain_are_those_of_other_rows_without(tmp_path):
    (tmp_path / "rows.jsonl").write_text(
        '{"prompt": "x", "id": NaN, "domain": NaN}\n{"prompt": "x", "id": "", "domain": null}\n'
    )
    tasks = read_tasks(DatasetConfig(path="rows.jsonl"), base_dir=tmp_path)
    assert [(task.id, task.domain) for task in tasks] == [("rows.jsonl:1", "default"), ("rows.jsonl:2", "default")]


@pytest.mark.parametrize("extra", [{}, {"a": {}}, 10**30, [1, "a"]])
def test_what_parquet_cannot_hold_is_said(tmp_path, extra):
    (tmp_path / "rows.jsonl").write_text(json.dumps({"prompt": "x", "extra": extra}) + "\n")
    tasks = read_tasks(DatasetConfig(path="rows.jsonl"), base_dir=tmp_path)
    with pytest.raises(DataError, match=r"jsonl"):
        list(Conversion(tasks, tmp_path / "out.parquet").run())
    assert not list(tmp_path.glob("*out*"))


def test_a_path_of_half_a_character_can_be_shown(tmp_path):
    error = refused(tmp_path, json.dumps({"prompt": "x", "images": json.dumps(["\ud83d.png"])}))
    assert error.reason == "missing file" and "\\ud83d.png" in str(error)


def test_a_parquet_file_whose_columns_have_no_names_in_utf_8_is_refused(tmp_path):
    import pyarrow
    import pyarrow.parquet

    pyarrow.parquet.write_table(pyarrow.table({"prompt_x": ["a"]}), tmp_path / "rows.parquet", store_schema=False)
    data = (tmp_path / "rows.parquet").read_bytes()
    (tmp_path / "rows.parquet").write_bytes(data.replace(b"prompt_x", b"prompt\xff\xfe"))
    with pytest.raises(DataError, match=r"rows.parquet: not a readable parquet file"):
        read_tasks(DatasetConfig(path="rows.parquet"), base_dir=tmp_path)


def test_every_mended_row_is_reported(tmp_path):
    (tmp_path / "rows.jsonl").write_text('{"prompt": "x", "answer": "1",}\n{"prompt": "x", "answer": "1", "answer": "2",}\n')
    report = check_dataset(DatasetConfig(path="rows.jsonl"), base_dir=tmp_path)
    assert {reason: list(rows.rows) for reason, rows in report.bad.items()} == {"trailing comma": [1], "not JSON": [2]}
