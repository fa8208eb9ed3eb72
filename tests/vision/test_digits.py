"""The built-in digit questions: real scans, honest splits, answers that can be checked."""

import numpy as np
import pytest

from mmrl.calibration import stated_confidence
from mmrl.chat import Completion, media_parts
from mmrl.rewards import accuracy, think_answer_format
from vision.adapter import resolve_policy
from vision.config import DigitKind
from vision.digits import KINDS, DigitTasks, render, tokenizer_corpus
from vision.digits import _split_images as split_images

ALL = list(KINDS)


def tasks(split="train", kinds=ALL, **options):
    return DigitTasks(kinds, split=split, **({"num_tasks": 500} | options))


def said(text):
    return Completion(text=text, token_ids=(), stop_reason="stop")


def test_the_config_names_exactly_the_kinds_that_exist():
    assert set(DigitKind.__args__) == set(KINDS)


def test_no_scan_of_evaluation_is_shown_in_training():
    train, _ = split_images("train")
    held_out, _ = split_images("eval")
    assert len(train) + len(held_out) == 1797
    seen = {scan.tobytes() for scan in train}
    assert not any(scan.tobytes() in seen for scan in held_out)


def test_equal_index_gives_the_equal_task_and_another_seed_another_one():
    for index in range(22):
        first, second, other = tasks()[index], tasks()[index], tasks(seed=1)[index]
        assert first.id == second.id and first.answer == second.answer and first.demonstration == second.demonstration
        pixels = [[np.asarray(image) for _, image in media_parts(task)] for task in (first, second, other)]
        assert all(np.array_equal(a, b) for a, b in zip(pixels[0], pixels[1]))
        assert not all(np.array_equal(a, b) for a, b in zip(pixels[0], pixels[2]))


@pytest.mark.parametrize("name", ALL)
def test_answers_follow_from_the_digits(name):
    source = tasks(kinds=[name])
    expected = {
        "read": lambda d: d[0], "read_first": lambda d: d[0], "read_second": lambda d: d[1],
        "parity": lambda d: "odd" if d[0] % 2 else "even", "above_four": lambda d: "yes" if d[0] >= 5 else "no",
        "larger": max, "sum": sum,
    }  # fmt: skip
    for index in range(60):
        task = source[index]
        digits = task.columns["digits"]
        assert len(list(media_parts(task))) == len(digits) and len(digits) in KINDS[name].num_digits
        if name in expected:
            assert task.answer == str(expected[name](digits))
        else:
            assert task.answer == ""  # a choice has no right answer
        if name == "larger":
            assert digits[0] != digits[1]


def test_undemonstrated_kinds_have_no_demonstration_and_their_questions_are_never_demonstrated():
    source = tasks(num_tasks=3000, kinds=[name for name in ALL if KINDS[name].demonstrated])
    demonstrated = {source[index].messages[0]["content"][-1]["text"] for index in range(3000)}
    assert len(demonstrated) > 40
    for name in ("parity", "above_four", "larger", "sum"):
        for index in range(20):
            task = tasks(kinds=[name])[index]
            assert task.demonstration == ""
            assert task.messages[0]["content"][-1]["text"] not in demonstrated


def test_a_demonstrated_choice_says_nothing_about_the_digit():
    # Where even and odd are offered, the answer agrees with the true parity about half of the time (sd below 4 points).
    source = tasks(kinds=["choose_word"], num_tasks=1500)
    agree = []
    for index in range(1500):
        task = source[index]
        word = task.demonstration.split("<answer>")[1].split("</answer>")[0]
        assert word in task.messages[0]["content"][-1]["text"]  # one of the words on offer
        if word in ("even", "odd"):
            agree.append(word == ("even", "odd")[task.columns["digits"][0] % 2])
    assert len(agree) > 150 and 0.35 < sum(agree) / len(agree) < 0.65


def test_a_demonstrated_confidence_says_nothing_about_the_answer():
    plain, stated = tasks(kinds=["read"]), tasks(kinds=["read"], form="confidence")
    confidences = [stated_confidence(task.demonstration) for task in stated]
    assert set(confidences) == {i / 10 for i in range(11)}
    assert np.bincount([round(10 * q) for q in confidences]).min() > 25  # 500 demonstrations, 11 values
    assert all(other.demonstration.startswith(task.demonstration) for task, other in zip(plain, stated))
    assert plain[3].messages == stated[3].messages


def test_a_stated_confidence_is_few_tokens_and_survives_encoding():
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(resolve_policy("digit-reader-confidence", seed=0))
    demonstration = tasks(kinds=["read"], form="confidence")[0].demonstration
    ids = tokenizer(demonstration, add_special_tokens=False)["input_ids"]
    assert len(ids) == 13  # 10 tags and digits, and "0.7" is three
    assert tokenizer.decode(ids, skip_special_tokens=True) == demonstration


def test_gold_answers_earn_the_reward_and_wrong_ones_do_not():
    for index in range(44):
        task = tasks()[index]
        if not task.answer:
            assert accuracy(task, said("<think>1</think><answer>1</answer>")) is None
            continue
        gold = said(f"<think>0</think><answer>{task.answer}</answer>")
        assert accuracy(task, gold) == 1.0 and think_answer_format(task, gold) == 1.0
        assert accuracy(task, said(f"<think>0</think><answer>not {task.answer}</answer>")) == 0.0
        assert accuracy(task, said(f"{gold.text}<answer>{task.answer}</answer>")) == 0.0


def test_evaluation_shows_scans_as_they_are_and_training_distorts_them():
    scans, _ = split_images("eval")
    plain = np.asarray(render(scans[0], None))
    assert np.array_equal(plain, np.asarray(render(scans[0], None))) and plain.shape == (56, 56, 3)
    assert not np.array_equal(plain, np.asarray(render(scans[0], np.random.default_rng(0))))


def test_an_index_past_the_end_is_refused():
    with pytest.raises(IndexError, match="has 500 tasks"):
        tasks()[500]


def test_the_tokenizer_corpus_holds_every_question():
    text = "\n".join(tokenizer_corpus())
    source = tasks()
    assert all(source[index].messages[0]["content"][-1]["text"] in text for index in range(500))
