"""Pairs to judge: orders, labels, rows of files, digit pairs, and the attempts that make them easy or hard."""

import json
from collections import Counter
from types import SimpleNamespace

import pytest
from PIL import Image

from mmrl.chat import Completion, media_parts, plain_text
from mmrl.cli import main
from mmrl.config import validate
from mmrl.errors import DataError
from vision.adapter import build_adapter
from vision.config import VisionRunConfig
from vision.preferences import PROMPTS, Pair, PairTasks, balanced_label, judging_task, read_pairs, read_preference
from vision.preferences_config import AttemptsConfig, JudgingPrompt, PairKind, PreferenceDatasetConfig
from vision.preferences_digits import WRONG_ANSWERS, DigitPairs
from vision.r1_reward import conclusion_of, end_of_reasoning, r1_format, r1_result, verdict_of
from vision.r1_reward_attempts import Attempt, attempt_pairs, keep_attempts, read_attempts, summary

IMAGE = {"type": "image", "image": "a.png"}


def said(text):
    return Completion(text=text, token_ids=(1,), stop_reason="stop")


def pair(index=0, **more):
    question = (IMAGE, {"type": "text", "text": "What is it?"})
    return Pair(**({"id": f"p{index}", "question": question, "chosen": "a cat", "rejected": "a dog"} | more))


def digit_pairs(split="train", easy_share=0.9, **more):
    kinds = {"easy_kinds": ("read", "parity", "above_four"), "hard_kinds": ("parity", "above_four", "larger", "sum")}
    return DigitPairs(**kinds, easy_share=easy_share, split=split, **({"num_pairs": 400} | more))


# ---- orders and labels --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("prompt", PROMPTS)
def test_the_label_moves_with_the_better_response(prompt):
    for label, shown in ((1, ("a cat", "a dog")), (2, ("a dog", "a cat"))):
        task = judging_task(pair(), label, prompt)
        text = plain_text(task)
        assert task.answer == str(label) and text.index(shown[0]) < text.index(shown[1])
        assert text.index("<image>") < text.index("What is it?") < text.index(shown[0])
        assert [part["type"] for part in task.messages[0]["content"]] == ["image", "text"]


def test_braces_in_responses_are_text_and_media_inside_of_a_question_stay_there():
    question = ({"type": "text", "text": "Compare "}, IMAGE, {"type": "text", "text": " and {first}"})
    task = judging_task(pair(question=question, chosen="{second}", rejected="{question}"), 1, "short")
    assert plain_text(task) == "user: Compare <image> and {first}\n{second} first\n{question} second"


@pytest.mark.parametrize("seed", [0, 1])
def test_of_two_neighbours_one_has_the_better_response_first(seed):
    labels = [balanced_label(index, seed) for index in range(400)]
    assert all(sorted(labels[row : row + 2]) == [1, 2] for row in range(0, 400, 2))
    assert 0.4 < sum(label == 1 for label in labels[::2]) / 200 < 0.6  # but not always the same one
    assert labels != [balanced_label(index, seed + 2) for index in range(400)]


def test_training_shows_one_order_and_evaluation_both():
    pairs = [pair(index) for index in range(6)]
    train = PairTasks(pairs, prompt="short", order="balanced", seed=3)
    held_out = PairTasks(pairs, prompt="short", order="both")
    assert Counter(task.answer for task in train) == {"1": 3, "2": 3}
    assert [task.id for task in held_out][:4] == ["p0/1", "p0/2", "p1/1", "p1/2"] and len(held_out) == 12
    with pytest.raises(IndexError, match="there are 6"):
        train[6]


# ---- rows ---------------------------------------------------------------------------------------------------------------


def dataset(tmp_path, rows, **config):
    Image.new("RGB", (28, 28)).save(tmp_path / "a.png")
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    section = validate({"path": str(tmp_path / "rows.jsonl"), **config}, PreferenceDatasetConfig, "test")
    return read_pairs(section, tmp_path)


def test_rows_name_the_better_response_by_their_columns_or_by_a_number(tmp_path):
    row = {"question": "What?", "image": "a.png", "chosen": "cat", "rejected": "dog", "id": "x", "source": "s"}
    found = dataset(tmp_path, [row])[0]
    assert (found.chosen, found.rejected, found.id, found.columns["source"]) == ("cat", "dog", "x", "s")
    assert [kind for kind, _ in media_parts(judging_task(found, 1, "full"))] == ["image"]
    rows = [{"prompt": "What?", "one": "cat", "two": "dog", "answer": answer} for answer in (1, "2", ["<answer>2</answer>"])]
    found = dataset(tmp_path, rows, responses=["one", "two"], preference="answer")
    assert [entry.chosen for entry in found] == ["cat", "dog", "dog"]
    assert [entry.rejected for entry in found] == ["dog", "cat", "cat"]


def test_finished_prompts_keep_their_order(tmp_path):
    message = json.dumps(
        [{"role": "user", "content": [{"type": "image", "image": "a.png"}, {"type": "text", "text": "1 or 2?"}]}]
    )
    rows = [{"message": message, "question": "What?", "answer": ["<answer>2</answer>"]}] * 3
    found = dataset(tmp_path, rows, responses=None, preference="answer", columns={"prompt": None})
    tasks = PairTasks(found, prompt="full", order="balanced")
    assert [task.answer for task in tasks] == ["2"] * 3 and plain_text(tasks[0]) == "user: <image>1 or 2?"


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"prompt": "What?", "chosen": "", "rejected": "dog"}, "chosen: no response: found ''"),
        ({"prompt": "What?", "rejected": "dog"}, "chosen: missing column: found columns: rejected"),
        ({"messages": [{"role": role, "content": "a"} for role in ("user", "assistant", "user")], "chosen": "x",
          "rejected": "y"}, "several turns"),
    ],
)  # fmt: skip
def test_a_row_that_is_no_pair_is_named(tmp_path, row, message):
    with pytest.raises(DataError, match=message) as error:
        dataset(tmp_path, [row])[0]
    assert "rows.jsonl:1" in str(error.value)


@pytest.mark.parametrize("value", [0, 3, "both", ["1", "2"], None, "<answer>1 or 2</answer>"])
def test_a_preference_is_one_or_two(value):
    with pytest.raises(DataError, match="expected 1 or 2"):
        read_preference(value, "answer")


# ---- digits -------------------------------------------------------------------------------------------------------------


def test_configs_name_what_exists():
    assert set(PairKind.__args__) == set(WRONG_ANSWERS) and set(JudgingPrompt.__args__) == set(PROMPTS)


@pytest.mark.parametrize("share", [0.0, 0.5, 0.9, 1.0])
def test_hard_pairs_have_their_share_and_are_spread(share):
    domains = [entry.domain for entry in digit_pairs(easy_share=share, num_pairs=40)]
    assert Counter(domains)["easy"] == round(40 * share)
    if share == 0.9:
        assert [index for index, domain in enumerate(domains) if domain == "hard"] == [9, 19, 29, 39]


def test_one_response_is_right_and_the_other_is_not():
    source = digit_pairs(easy_share=0.4)
    kinds = Counter()
    for index in range(120):
        entry = source[index]
        digits, kind = entry.columns["digits"], entry.columns["kind"]
        right = {
            "read": lambda d: d[0], "read_first": lambda d: d[0], "read_second": lambda d: d[1], "larger": max, "sum": sum,
            "parity": lambda d: "odd" if d[0] % 2 else "even", "above_four": lambda d: "yes" if d[0] > 4 else "no",
        }[kind](digits)  # fmt: skip
        assert entry.chosen == str(right) and entry.rejected != entry.chosen
        same_sort = entry.chosen.isdigit() == entry.rejected.isdigit()
        assert same_sort == (entry.domain == "hard")  # an easy one shows in the text
        if entry.domain == "hard":
            assert entry.rejected in WRONG_ANSWERS[kind](SimpleNamespace(answer=str(right), columns={"digits": digits}))
        kinds[entry.domain, kind] += 1
    assert len(kinds) == 7 and min(kinds.values()) >= 12
    again, other = digit_pairs(easy_share=0.4)[5], digit_pairs(easy_share=0.4, seed=1)[5]
    assert (again.chosen, again.rejected) == (source[5].chosen, source[5].rejected)
    assert other.columns["digits"] != again.columns["digits"] or other.rejected != again.rejected


def test_demonstrations_are_right_for_easy_pairs_and_random_for_hard_ones():
    tasks = PairTasks(digit_pairs(easy_share=0.5), prompt="short", order="balanced")
    right = Counter()
    for index in range(400):
        task = tasks[index]
        shown = said(task.demonstration)
        assert r1_format(task, shown) == 1.0
        assert conclusion_of(end_of_reasoning(shown.text)) == verdict_of(shown.text)  # what is rewarded as consistent
        right[task.domain] += r1_result(task, shown)
    assert right["easy"] == 200 and 75 < right["hard"] < 125


def test_the_order_balances_both_kinds():
    tasks = PairTasks(digit_pairs(), prompt="short", order="balanced")
    labels = Counter((task.domain, task.answer) for task in tasks)
    assert abs(labels["easy", "1"] - labels["easy", "2"]) < 30 and labels["hard", "1"] + labels["hard", "2"] == 40
    assert min(labels.values()) >= 12


# ---- attempts -----------------------------------------------------------------------------------------------------------


class Stub:
    """An adapter whose verdicts are right at the attempt that a pair's id names; 9 is never."""

    def __init__(self):
        self.asked = []

    def rollout(self, policy, tasks, *, group_size, seeds):
        self.asked.append([task.id for task in tasks])
        texts = []
        for task in tasks:
            attempt = sum(task.id in call for call in self.asked)
            verdict = task.answer if str(attempt) == task.id[1] else str(3 - int(task.answer))
            texts.append(said(f"<think>{attempt}</think><answer>{verdict}</answer>"))
        return type("Batch", (), {"outcomes": texts})


def attempts_of(needed, batch_size=2):
    pairs = [pair(id=f"p{count}{index}") for index, count in enumerate(needed)]
    tasks, stub = PairTasks(pairs, prompt="short", order="balanced", seed=1), Stub()
    found = list(attempt_pairs(stub, None, tasks, total=len(pairs), attempts=3, batch_size=batch_size, seed=0))
    asked = Counter(name for call in stub.asked for name in call)
    assert [asked[task.id] for task in tasks] == [min(count, 3) for count in needed]  # nobody is asked again
    return tasks, found


def test_attempts_stop_at_the_first_right_verdict_and_keep_it():
    tasks, found = attempts_of([1, 3, 9, 2, 1])
    assert [(entry.attempts, entry.solved) for entry in found] == [(1, True), (3, True), (3, False), (2, True), (1, True)]
    assert found[1].demonstration == f"<think>3</think><answer>{tasks[1].answer}</answer>" and found[2].demonstration == ""
    assert [entry.label for entry in found] == [int(task.answer) for task in tasks]
    assert "never right" in "\n".join(summary(found))


def test_warmup_imitates_solved_pairs_and_reinforcement_learning_gets_hard_ones(tmp_path):
    tasks, found = attempts_of([1, 3, 9, 2, 1, 9])
    solved, hard = keep_attempts(found, keep="solved"), keep_attempts(found, keep="hard")
    assert [entry.index for entry in solved] == [0, 1, 3, 4] and [entry.index for entry in hard] == [1, 2, 3, 5]
    assert [entry.index for entry in keep_attempts(found, keep="hard", min_attempts=3)] == [1, 2, 5]
    assert [entry.index for entry in keep_attempts(found, keep="hard", min_attempts=4)] == [2, 5]  # never solved: always hard
    imitated = PairTasks(tasks.pairs, prompt="short", order="balanced", seed=7, attempts=solved)
    for index, entry in enumerate(solved):  # the order in which the verdict was written, whatever the seed
        assert imitated[index].answer == str(entry.label) == str(verdict_of(imitated[index].demonstration))
    rewarded = PairTasks(tasks.pairs, prompt="short", order="balanced", seed=7, attempts=hard)
    assert Counter(task.answer for task in rewarded) == {"1": 2, "2": 2} and not any(task.demonstration for task in rewarded)
    other = PairTasks([pair(id="q")] * 6, prompt="short", order="balanced", attempts=hard)
    with pytest.raises(DataError, match="pair 1 is 'p31' in the file and 'q' here"):
        other[0]


def test_files_of_attempts_are_checked(tmp_path):
    section = AttemptsConfig(file="attempts.jsonl", keep="hard")
    with pytest.raises(DataError, match="cannot be read"):
        read_attempts(section, tmp_path)
    (tmp_path / "attempts.jsonl").write_text('{"index": 0}\n', encoding="utf-8")
    with pytest.raises(DataError, match=r"attempts\.jsonl:1: not a line of mmrl attempts"):
        read_attempts(section, tmp_path)
    line = {"index": 0, "id": "a", "label": 1, "attempts": 1, "solved": True, "demonstration": "x"}
    (tmp_path / "attempts.jsonl").write_text(json.dumps(line) + "\n", encoding="utf-8")
    with pytest.raises(DataError, match="none of 1 pairs is hard"):
        read_attempts(section, tmp_path)
    assert read_attempts(section.model_copy(update={"keep": "solved"}), tmp_path) == [Attempt(**line)]


def test_the_command_writes_what_a_config_reads(tmp_path, capsys):
    config = tmp_path / "run.yaml"
    config.write_text(
        "modality: vision\npolicy: {path: digit-reader}\ntasks: {name: digit_preferences, num_tasks: 8}\n"
        "rollout: {max_new_tokens: 4}\nrewards: {r1_result: 1.0}\ntrainer: {num_steps: 1}\n",
        encoding="utf-8",
    )
    output = tmp_path / "found" / "attempts.jsonl"
    assert main(["attempts", str(config), "--output", str(output), "--num-pairs", "4", "--attempts", "2"]) == 0
    assert "never right" in capsys.readouterr().out
    lines = [json.loads(line) for line in output.read_text(encoding="utf-8").splitlines()]
    assert [entry["index"] for entry in lines] == [0, 1, 2, 3] and all(entry["attempts"] <= 2 for entry in lines)
    tasks = {"name": "digit_preferences", "num_tasks": 8, "attempts": {"file": str(output), "keep": "hard"}}
    tree = {"modality": "vision", "name": "t", "policy": {"path": "digit-reader"}, "rewards": {"r1_result": 1.0},
            "trainer": {"num_steps": 1}, "tasks": tasks}  # fmt: skip
    source = build_adapter(validate(tree, VisionRunConfig, "test")).task_source("train")
    assert len(source) == len(keep_attempts([Attempt(**entry) for entry in lines], keep="hard")) and source[0].answer in "12"
