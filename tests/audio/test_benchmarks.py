"""Benchmarks: every packaging read into one form, both scoring rules against the published oracles, and one run end to end."""

import json

import numpy as np
import pandas
import pytest
import soundfile

from audio.benchmark_scores import given_answer, grade, mmsu_letter, named_option, report, string_match
from audio.benchmarks import Item, item_task, read_items, shuffled, silenced, split_options
from audio.media import AudioClip
from mmrl.chat import Completion
from mmrl.cli import main
from mmrl.errors import ConfigError, DataError
from mmrl.statistics import wilson_interval

OPTIONS = ("Man speaking", "Dog barking", "A man and a dog", "Silence")


def said(text, stop_reason="stop"):
    return Completion(text=text, token_ids=(1, 2, 3), stop_reason=stop_reason)


def item(answer="Dog barking", options=OPTIONS, name="1", **groups):
    return Item(id=name, question="What is it?", options=options, answer=answer, audio="x.wav", groups=groups, source="f:1")


def write(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


# --- rules ---


@pytest.mark.parametrize(
    ("answer", "prediction", "right"),
    [
        ("Dog barking", "Dog barking", True),
        ("Dog barking", "The dog is barking.", True),
        ("Dog barking", "dog barking, not silence", False),
        ("Man speaking", "It is a man speaking", False),  # "a" occurs only in another option
        ("Man speaking", "man speaking", True),
        ("Man speaking", "B", False),
        ("A man and a dog", "a man and a dog", True),
        ("Silence", "(D) Silence", True),
        ("Silence", "", False),
    ],
)
def test_string_match(answer, prediction, right):
    assert string_match(prediction, answer, OPTIONS) is right


@pytest.mark.parametrize(
    ("response", "letter"),
    [("B", "B"), ("B. a dog", "B"), ("The answer is A.", "A"), ("(C)", "C"), ("it is C", None), ("", None), ("None", None),
     ("D\n", "D"), ("E", None)],
)  # fmt: skip
def test_mmsus_letter(response, letter):
    assert mmsu_letter(response) == letter


@pytest.mark.parametrize(
    ("text", "given", "option"),
    [
        ("<think>a dog</think><answer>B</answer>", "B", "Dog barking"),
        ("<answer>(b)</answer>", "(b)", "Dog barking"),
        ("<answer>B. dog barking.</answer>", "B. dog barking.", "Dog barking"),
        ("<answer>B. Silence</answer>", "B. Silence", None),  # letter and text disagree
        ("<answer>dog  Barking</answer>", "dog  Barking", "Dog barking"),
        ("<answer>E</answer>", "E", None),  # there is no fifth option
        ("<answer>A or B</answer>", "A or B", None),
        ("<answer></answer>", "", None),
        ("It could be A, but I say (C)", "C", "A man and a dog"),  # without tags, the last letter that stands alone
        ("A dog barks", "A", "Man speaking"),  # and so an article is taken for a letter
        ("the bark of dogs", "the bark of dogs", None),
    ],
)
def test_the_given_answer_and_the_option_that_it_names(text, given, option):
    assert given_answer(text, OPTIONS) == given
    assert named_option(given, OPTIONS) == option


def test_both_rules_side_by_side():
    graded = grade("mmau", item(), said("<answer>B</answer>"))
    assert (graded.correct, graded.published) == (True, True)  # the letter is mapped to its text before it is matched
    graded = grade("mmau", item(), said("<answer>the dog is barking</answer>"))
    assert (graded.correct, graded.option, graded.published) == (False, None, True)
    dropped = grade("mmsu", item(), said("<answer>no idea</answer>"))
    assert (dropped.correct, dropped.published) == (False, None)
    assert grade("mmsu", item(), said("<answer>B</answer>")).published is True
    assert grade("mmsu", item(answer="Silence"), said("<answer>B</answer>")).published is False


def test_a_report_counts_malformed_rows_as_wrong_and_keeps_the_denominator():
    items = [item(name=str(n), task=("sound", "music")[n % 2]) for n in range(4)]
    texts = ["<answer>B</answer>", "<answer>A</answer>", "<answer>no idea</answer>", "<think>so the"]
    graded = [grade("mmsu", i, said(t, "length" if t.startswith("<think>so") else "stop")) for i, t in zip(items, texts)]
    result = report("mmsu", items, graded, version=None, control="none")
    assert (result["strict"]["k"], result["strict"]["n"]) == (1, 4)
    assert (result["strict"]["low"], result["strict"]["high"]) == wilson_interval(1, 4)
    assert (result["published"]["k"], result["published"]["n"]) == (1, 2)  # malformed rows leave the published denominator
    assert (result["malformed"]["k"], result["truncated"]["k"]) == (2, 1)
    assert result["groups"]["task"]["sound"]["k"] == 1 and result["groups"]["task"]["music"]["n"] == 2
    with pytest.raises(DataError, match="3 predictions for 4 items"):
        report("mmsu", items, graded[:3], version=None, control="none")


# --- readers ---


def test_every_packaging_of_avqa_is_the_same_item(tmp_path):
    options = ["a dog", "a cat", "rain", "a train"]
    lettered = "What is in the audio?\nChoices:\nA. a dog\nB. a cat\nC. rain\nD. a train"
    rows = [
        {"id": 1, "video_name": "v", "question_text": "What is in the video?", "multi_choice": options, "answer": 1,
         "question_relation": "Sound", "question_type": "Come From", "dataset_name": "AVQA", "audio_path": "a.wav"},
        {"id": 2, "question": lettered, "answer": "B. a cat", "audio": "a.wav"},
        {"id": 3, "question": lettered, "answer": "B", "answer_full": "a cat", "solution": "<answer>B</answer>",
         "audio_path": "a.wav", "duration": 10.0},
        {"sample_id": 4, "question": lettered.replace("A. ", "(A) ").replace("B. ", "(B) ").replace("C. ", "(C) ")
         .replace("D. ", "(D) "), "solution": "<answer>B</answer>", "audio_path": "a.wav"},
    ]  # fmt: skip
    items = read_items("avqa", write(tmp_path / "avqa.jsonl", rows))
    for found in items:
        assert (found.question, found.options, found.answer, found.letter) == (
            "What is in the audio?", tuple(options), "a cat", "B",
        )  # fmt: skip
        assert found.audio == tmp_path / "a.wav"
    assert items[0].groups == {"relation": "Sound", "type": "Come From"}
    assert [found.id for found in items] == ["1", "2", "3", "4"]


def test_mmau_mmar_and_mmsu_are_read_with_their_groups(tmp_path):
    mmau = {"id": "x", "audio_id": "./audios/x.wav", "question": "Q?", "choices": ["one", "two"], "answer": "two",
            "dataset": "d", "task": "music", "split": "test-mini", "category": ["Reasoning", "Melody"], "sub-category": "s",
            "difficulty": "hard"}  # fmt: skip
    path = tmp_path / "mmau.json"
    path.write_text(json.dumps([mmau]), encoding="utf-8")
    [found] = read_items("mmau", path, version="v05.15.25")
    assert found.groups == {"task": "music", "category": "Reasoning, Melody", "sub_category": "s", "difficulty": "hard"}
    assert (found.letter, found.audio) == ("B", tmp_path / "audios" / "x.wav")

    mmar = {"id": "y", "audio_path": "y.wav", "question": "Q?", "choices": ["one", "two", "three"], "answer": "three",
            "modality": "mix-sound-speech", "category": "Signal Layer", "sub-category": "s", "language": "en"}  # fmt: skip
    [found] = read_items("mmar", write(tmp_path / "mmar.jsonl", [mmar]))
    assert (found.letter, found.groups["modality"], found.groups["category"]) == ("C", "mix-sound-speech", "Signal Layer")

    rows = [{"id": str(n), "task_name": "t", "question": "Q?", "choice_a": "one", "choice_b": "two", "choice_c": "three",
             "choice_d": None, "answer_gt": "Two", "category": "Perception", "sub-category": "s",
             "audio": {"bytes": b"RIFF", "path": "a.wav"}} for n in range(2)]  # fmt: skip
    pandas.DataFrame(rows).to_parquet(tmp_path / "mmsu.parquet")
    found = read_items("mmsu", tmp_path / "mmsu.parquet")[1]
    assert (found.options, found.answer, found.groups["category"]) == (("one", "two", "three"), "two", "Perception")
    assert found.audio["bytes"] == b"RIFF"


@pytest.mark.parametrize("version", [None, "test-mini"])
def test_mmaus_version_must_be_named(tmp_path, version):
    with pytest.raises(ConfigError, match=r"original and v05\.15\.25"):
        read_items("mmau", tmp_path / "absent.json", version=version)


ROW = {"id": "1", "audio_path": "a.wav", "question": "Q?", "choices": ["one", "two"], "answer": "two"}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"answer": "three"}, "none of the options"),
        ({"choices": ["one", "One.", "two"]}, "there twice"),
        ({"choices": ["two"]}, "has 1 options"),
        ({"choices": "one, two"}, "expected a list"),
        ({"question": ""}, "has none of question"),
        ({"audio_path": None}, "has none of audio, audio_path"),
    ],
)
def test_a_bad_row_is_named(tmp_path, changes, message):
    path = write(tmp_path / "mmar.jsonl", [ROW, {**ROW, "id": "2", **changes}])
    with pytest.raises(DataError, match=f"mmar.jsonl:2: .*{message}"):
        read_items("mmar", path)


def test_an_item_that_is_there_twice_and_an_empty_file_are_refused(tmp_path):
    with pytest.raises(DataError, match="every item counts once"):
        read_items("mmar", write(tmp_path / "mmar.jsonl", [ROW, ROW]))
    with pytest.raises(DataError, match="no rows"):
        read_items("mmar", write(tmp_path / "empty.jsonl", []))
    with pytest.raises(ConfigError, match="expected one of: avqa, mmau, mmar, mmsu"):
        read_items("mmlu", tmp_path / "empty.jsonl")


@pytest.mark.parametrize("answer", [4, -1, True, "one"])
def test_an_index_that_is_none_is_refused(tmp_path, answer):
    row = {"id": 1, "question_text": "Q?", "multi_choice": ["one", "two"], "answer": answer, "audio_path": "a.wav"}
    with pytest.raises(DataError, match="expected the index"):
        read_items("avqa", write(tmp_path / "avqa.jsonl", [row]))


def test_option_lines_must_run_from_a():
    with pytest.raises(DataError, match="option lines AC"):
        split_options("Q?\nA. one\nC. two", "f:1")


# --- controls ---


def test_shuffling_keeps_the_answer_and_silence_keeps_the_length():
    items = [item(name=str(n)) for n in range(20)]
    moved = shuffled(items)
    assert all(set(a.options) == set(b.options) and a.answer == b.answer for a, b in zip(items, moved))
    assert len({found.letter for found in moved}) == 4
    quiet = silenced(items[0], AudioClip(samples=np.ones(1234, dtype=np.float32), rate=16_000))
    assert len(quiet.audio.samples) == 1234 and not quiet.audio.samples.any()


def test_the_task_shows_every_option_with_its_letter():
    task = item_task(item())
    text = task.messages[0]["content"][1]["text"]
    assert text.startswith("What is it?\nA. Man speaking\nB. Dog barking\nC. A man and a dog\nD. Silence\n")
    assert task.answer == "B" and "<answer>" in text


# --- end to end ---

CONFIG = """\
modality: audio
policy: {path: tiny-qwen2.5-omni}
tasks: {name: tones}
rollout: {max_new_tokens: 6}
rewards: {accuracy: 1.0}
evaluation: {batch_size: 4}
trainer: {num_threads: 1, num_steps: 1}
"""


@pytest.mark.parametrize("control", ["none", "silence"])
def test_a_policy_answers_a_file_from_the_command_line(tmp_path, capsys, control):
    (tmp_path / "run.yaml").write_text(CONFIG, encoding="utf-8")
    soundfile.write(tmp_path / "a.wav", np.sin(np.arange(4000) / 5), 8_000)
    rows = [{**ROW, "id": str(n), "modality": ("sound", "music")[n % 2]} for n in range(6)]
    file = write(tmp_path / "mmar.jsonl", rows)
    command = [
        "eval",
        str(tmp_path / "run.yaml"),
        "--benchmark",
        "mmar",
        "--file",
        str(file),
        "--output",
        str(tmp_path / "o.json"),
    ]
    assert main([*command, *(["--control", control] if control != "none" else [])]) == 0
    result = json.loads((tmp_path / "o.json").read_text(encoding="utf-8"))
    assert (result["num_items"], result["strict"]["n"], result["control"]) == (6, 6, control)
    assert {name: cell["n"] for name, cell in result["groups"]["modality"].items()} == {"sound": 3, "music": 3}
    assert result["truncated"]["k"] == 6  # six tokens of noise end nowhere
    assert len(result["answers"]) == 6
    out = capsys.readouterr().out
    assert "strict accuracy" in out and "this file has 6" in out


def test_the_command_line_says_what_is_missing(tmp_path, capsys):
    (tmp_path / "run.yaml").write_text(CONFIG, encoding="utf-8")
    assert main(["eval", str(tmp_path / "run.yaml"), "--benchmark", "mmar"]) == 2
    assert "needs --file" in capsys.readouterr().err
