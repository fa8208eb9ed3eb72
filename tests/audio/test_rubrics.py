"""`audio.rubrics`: the published example, every fallback in its order, and what holds for any verdicts."""

import json
import threading
import time
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from audio.rubrics import Overthink, RubricTerm, count_words, keep_separating, think_text, weighted_scores
from audio.rubrics_config import RubricsConfig
from audio.rubrics_data import Criterion, read_static_rubrics
from audio.rubrics_questions import Evolution, is_yes, read_evolution, read_weights
from mmrl.advantages import group_std_advantages
from mmrl.chat import ChatTask, Completion
from mmrl.errors import DataError
from mmrl.judge import JudgeClient, JudgeError, Reply, Retry
from mmrl.types import Media

STATIC = tuple(Criterion(id=f"S{i}", text=f"criterion {i}", title=f"t{i}", weight=0.2) for i in range(1, 6))
CLIP = Media(kind="audio", data=b"RIFF", suffix=".wav")

# Section 5.6: verdicts of the published example; the second new criterion is negative and always Yes.
S1, S2, S4 = [0, 1, 0, 1, 1, 1, 1, 0], [1] * 8, [0, 0, 0, 1, 1, 1, 1, 0]
N1, N2 = [0, 0, 1, 1, 1, 1, 0, 0], [1] * 8
BITS = {"S1": S1, "S2": S2, "S3": S1, "S4": S4, "S5": S1, "N1": N1, "N2": N2}
NEW = [{"title": "n1", "description": "first", "polarity": "positive"},
       {"title": "n2", "description": "second", "polarity": "negative"}]  # fmt: skip
WEIGHTS = {"S4": 0.15, "N1": 0.15, "S1": 0.3, "S3": 0.3, "S5": 0.1}
SCORES = [0, 0.7, 0.15, 1, 1, 1, 0.85, 0]


def words(bits):
    return ["Yes" if bit else "No" for bit in bits]


def example(**changes):
    """The judge's first answer, with changes to its judgments (None leaves one out)."""
    judgments = {name: words(bits) for name, bits in BITS.items()} | changes
    return {"new_rubrics": NEW, "judgments": {name: given for name, given in judgments.items() if given is not None}}


TASK = ChatTask(
    id="train/0",
    messages=(
        {"role": "system", "content": [{"type": "text", "text": "Think."}]},
        {"role": "user", "content": [{"type": "audio", "audio": "a.wav"}, {"type": "text", "text": "What is it?"}]},
    ),
    answer="B",
)


def completion(text):
    return Completion(text=text, token_ids=(1, 2), stop_reason="stop")


GROUP = [completion(f"<think>attempt {i}</think><answer>{'B' if i % 2 else 'A'}</answer>") for i in range(8)]


class Oracle:
    """A judge that answers each purpose from a function or a value, and remembers the requests."""

    identity = "oracle"

    def __init__(self, **answers):
        self.answers, self.requests, self.lock = answers, [], threading.Lock()

    def answer(self, request):
        with self.lock:
            self.requests.append(request)
        answer = self.answers.get(request.purpose, JudgeError("not now", kind="permanent"))
        answer = answer(request) if callable(answer) else answer
        if isinstance(answer, Exception):
            raise answer
        return Reply(text=answer if isinstance(answer, str) else json.dumps(answer))

    def asked(self, purpose):
        return [request for request in self.requests if request.purpose == purpose]


def term(judge, *, media=(CLIP,), static=STATIC, **config):
    client = JudgeClient(judge=judge, retry=Retry(give_up_after=100), sleep=lambda seconds: None) if judge else None
    return RubricTerm(
        client=client, static=lambda task: static, media=lambda task: media, config=RubricsConfig(**config),
        correct=lambda task, outcome: float(f"<answer>{task.answer}</answer>" in outcome.text),
    )  # fmt: skip


def graded(request):
    """Static verdicts by the attempt's number: S1 is Yes from the fourth on, S2 for all, the others for none."""
    number = int(request.payload["attempt"]["reasoning"].split()[-1])
    return {"judgments": {"S1": "yes" if number >= 4 else "no", "S2": "Y", "S3": "No", "S4": "no", "S5": ""}}


STATIC_SCORES = pytest.approx([0.2] * 4 + [0.4] * 4)


def values(judged):
    return list(judged.values)


# The published example (section 5.6)


def test_the_published_example_to_six_digits():
    judge = Oracle(evolve=example(), weigh={"weights": WEIGHTS})
    rubrics = term(judge)
    judged = rubrics(TASK, GROUP)
    assert values(judged) == pytest.approx(SCORES, abs=1e-12)
    record = judged.record
    assert [row["id"] for row in record["rubrics"]] == ["S4", "N1", "S1", "S3", "S5"]
    assert [row["weight"] for row in record["rubrics"]] == pytest.approx([0.15, 0.15, 0.3, 0.3, 0.1])
    assert record["rubrics"][0] == {"id": "S4", "title": "t4", "polarity": "positive", "weight": 0.15, "bits": S4}
    assert (record["scores"], record["mode"], record["reasons"]) == (values(judged), "evolved", [])
    json.dumps(record)
    totals = rubrics.totals()
    shares = {name: totals[f"rubrics/{name}"] for name in ("evolved", "static", "neutral", "written", "kept", "kept_new")}
    assert shares == {
        "evolved": (1, 1), "static": (0, 1), "neutral": (0, 1), "written": (2, 1), "kept": (5, 1), "kept_new": (1, 1),
    }  # fmt: skip
    assert totals["judge/calls"] == (2, 1)
    assert rubrics.totals()["rubrics/evolved"] == (0, 0)


def test_deviations_of_the_published_example():
    evolution = read_evolution(example(), STATIC, group_size=8, max_new=3)
    kept = keep_separating(evolution, 5)
    assert [entry.deviation for entry in kept] == pytest.approx([0.5, 0.5, 0.484123, 0.484123, 0.484123], abs=5e-7)


@pytest.mark.parametrize(("yes", "deviation"), [(1, 0.330719), (2, 0.433013), (3, 0.484123), (4, 0.5), (7, 0.330719)])
def test_deviations_with_eight_rollouts(yes, deviation):
    verdicts = (tuple(i < yes for i in range(8)),)
    (kept,) = keep_separating(Evolution(criteria=STATIC[:1], verdicts=verdicts), 5)
    assert kept.deviation == pytest.approx(deviation, abs=5e-7)


@pytest.mark.parametrize(
    ("gamma", "delta", "neutral", "expected"),
    [
        (0.5, 0.15, False, [0.175, 1.4625, 0.175, 1.591406, 1.474219, 1.575, 1.422266, -0.05]),
        (0.3, 0.2, False, [0.2, 1.36, 0.145, 1.421875, 1.265625, 1.4, 1.284687, -0.1]),
        (0.5, 0.15, True, [0.425, 1.3625, 0.35, 1.341406, 1.224219, 1.325, 1.247266, 0.2]),
    ],
)
def test_the_total_reward_of_the_published_example(gamma, delta, neutral, expected):
    judge = None if neutral else Oracle(evolve=example(), weigh={"weights": WEIGHTS})
    rubrics = values(term(judge)(TASK, GROUP))
    right, well_formed = [0, 1, 0, 1, 1, 1, 1, 0], [1, 1, 1, 1, 1, 1, 0, 1]
    lengths = [128, 64, 256, 100, 300, 128, 90, 512]
    overthink = Overthink(count_tokens=lambda text: len(text.split()))
    thoughts = [overthink(TASK, completion(f"<think>{'w ' * length}</think>")) for length in lengths]
    assert thoughts == pytest.approx([0.5, 0.75, 0, 0.609375, -0.171875, 0.5, 0.648438, -1], abs=5e-7)
    total = [0.9 * a + 0.1 * f + gamma * r + delta * o for a, f, r, o in zip(right, well_formed, rubrics, thoughts)]
    assert total == pytest.approx(expected, abs=1e-6)
    if (gamma, neutral) == (0.5, False):
        advantages = group_std_advantages(torch.tensor(total), torch.zeros(8, dtype=torch.int64), eps=1e-4, ddof=1)
        assert advantages.tolist() == pytest.approx(
            [-1.096110, 0.660971, -1.096110, 0.836893, 0.676964, 0.814503, 0.606063, -1.403173], abs=2e-6
        )


# What the judge is asked


def test_the_judge_hears_the_clip_twice_and_sees_rollouts_once():
    judge = Oracle(evolve=example(), weigh={"weights": WEIGHTS})
    long = completion(f"<think>{'x' * 3000}</think><answer></answer>")
    term(judge)(TASK, [*GROUP[:6], completion("no tags at all"), long])
    evolve, weigh = judge.requests
    assert (evolve.media, weigh.media, evolve.timeout_s, weigh.timeout_s) == ((CLIP,), (CLIP,), 180.0, 120.0)
    attempts = evolve.payload["attempts"]
    assert attempts[0] == {"result": "WRONG (chose A)", "reasoning": "attempt 0"}
    assert attempts[1] == {"result": "CORRECT", "reasoning": "attempt 1"}
    assert attempts[6] == {"result": "WRONG (no parseable answer)", "reasoning": "no tags at all"}
    assert (attempts[7]["result"], len(attempts[7]["reasoning"])) == ("WRONG (no parseable answer)", 2000)
    assert (evolve.payload["question"], evolve.payload["right_answer"]) == ("What is it?", "B")
    assert [entry["id"] for entry in evolve.payload["criteria"]] == ["S1", "S2", "S3", "S4", "S5"]
    assert weigh.payload.keys() == {"question", "criteria"}
    assert [entry["id"] for entry in weigh.payload["criteria"]] == ["S4", "N1", "S1", "S3", "S5"]
    assert "attempt 0" not in weigh.text


def test_negative_criteria_count_when_they_do_not_hold():
    new = [{"title": "fault", "polarity": "Negative"}, {"title": "odd", "polarity": "sideways"}, {"title": "bare"}]
    judgments = {f"S{i}": words([1] * 8) for i in range(1, 6)} | {"N1": words(S1), "N2": words(S1), "N3": words(S4)}
    judge = Oracle(evolve={"new_rubrics": new, "judgments": judgments}, weigh={"weights": [1, 1, 2]})
    record = term(judge)(TASK, GROUP).record
    bits = {row["id"]: (row["polarity"], row["bits"]) for row in record["rubrics"]}
    assert bits == {"N3": ("positive", S4), "N1": ("negative", [1 - b for b in S1]), "N2": ("positive", S1)}
    assert [row["weight"] for row in record["rubrics"]] == [0.25, 0.25, 0.5]


def test_surplus_new_criteria_and_those_without_verdicts_are_left_out():
    new = [{"title": f"n{i}"} for i in range(1, 6)]
    given = example(N2=None, N3=words(S4), N4=words(S1)) | {"new_rubrics": new}
    evolution = read_evolution(given, STATIC, group_size=8, max_new=3)
    assert [criterion.id for criterion in evolution.criteria] == ["S1", "S2", "S3", "S4", "S5", "N1", "N3"]


@pytest.mark.parametrize("verdict", ["Yes", "yes.", " Y", "YES, clearly", True])
def test_yes_in_its_forms(verdict):
    assert is_yes(verdict)


@pytest.mark.parametrize("verdict", ["No", "", "not yes", None, 1, False, ["Yes"]])
def test_anything_else_is_no(verdict):
    assert not is_yes(verdict)


@pytest.mark.parametrize(
    ("weights", "expected"),
    [
        ({"S4": 3, "N1": 1, "S1": 0, "S3": -5, "S5": 0}, [0.75, 0.25, 0, 0, 0]),
        ([1, 1, 1, 1, 1], [0.2] * 5),
        (WEIGHTS | {"S9": 4}, [0.15, 0.15, 0.3, 0.3, 0.1]),
    ],
)
def test_weights_are_cut_at_zero_and_scaled(weights, expected):
    judge = Oracle(evolve=example(), weigh={"weights": weights})
    assert [row["weight"] for row in term(judge)(TASK, GROUP).record["rubrics"]] == pytest.approx(expected)


@pytest.mark.parametrize(
    "answer",
    [
        {"weights": [-1, -1, -1, -1, -1]}, {"weights": [0] * 5}, {"weights": [1, 1]}, {"weights": {"S4": 1}}, {}, "no JSON",
        {"weights": ["a"] * 5}, {"weights": [True] * 5}, {"weights": [1e308] * 5},
        {"weights": [10**400] * 5}, JudgeError("down", kind="transient"),
    ],
)  # fmt: skip
def test_without_usable_weights_they_are_equal_and_this_is_counted(answer):
    rubrics = term(Oracle(evolve=example(), weigh=answer))
    record = rubrics(TASK, GROUP).record
    assert [row["weight"] for row in record["rubrics"]] == pytest.approx([0.2] * 5)
    assert (record["mode"], record["reasons"]) == ("evolved", ["weights_failed"])
    assert rubrics.totals()["rubrics/weights_failed"] == (1, 1)


def test_equal_weights_as_an_option_cost_no_request():
    judge = Oracle(evolve=example())
    record = term(judge, uniform_weights=True)(TASK, GROUP).record
    assert [row["weight"] for row in record["rubrics"]] == pytest.approx([0.2] * 5)
    assert (len(judge.requests), record["reasons"]) == (1, [])


def test_between_regenerations_groups_are_judged_by_static_criteria_alone():
    judge = Oracle(evolve=example(), weigh=lambda request: {"weights": [1] * len(request.payload["criteria"])})
    rubrics = term(judge, regenerate_every=3)
    written = []
    for train_step in range(1, 6):
        rubrics.begin_step(train_step)
        ids = [row["id"] for row in rubrics(TASK, GROUP).record["rubrics"]]
        written.append("N1" in ids)
        assert ids[0] == "S4"
    assert written == [True, False, False, True, False]
    assert [request.payload["max_new"] for request in judge.asked("evolve")] == [3, 0, 0, 3, 0]


# Fallbacks, in the document's order


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        (example(S3=None), "malformed"), (example(S3=words(S1)[:7]), "malformed"), (example(N1=words(S1)[1:]), "malformed"),
        (example(S3="Yes"), "malformed"), ({"judgments": {}}, "malformed"), ({"new_rubrics": 3, "judgments": {}}, "malformed"),
        ("Yes, all of them.", "malformed"), (JudgeError("down", kind="transient"), "judge_failed"),
        (JudgeError("no", kind="permanent"), "judge_failed"),
        ({"new_rubrics": [], "judgments": {f"S{i}": ["Yes"] * 8 for i in range(1, 6)}}, "constant"),
    ],
)  # fmt: skip
def test_what_fails_in_evolution_falls_back_to_static_scores(answer, reason):
    judge = Oracle(evolve=answer, grade=graded)
    rubrics = term(judge)
    judged = rubrics(TASK, GROUP)
    assert values(judged) == STATIC_SCORES
    assert (judged.record["mode"], judged.record["reasons"]) == ("static", [reason])
    assert len(judge.asked("evolve")) == (4 if isinstance(answer, JudgeError) and answer.kind == "transient" else 1)
    assert (len(judge.asked("grade")), judge.asked("weigh")) == (8, [])
    totals = rubrics.totals()
    assert (totals[f"rubrics/{reason}"], totals["rubrics/static"], totals["rubrics/neutral_rollouts"]) == (
        (1, 1),
        (1, 1),
        (0, 8),
    )


@pytest.mark.parametrize(
    ("more", "group", "reason"),
    [({"media": ()}, GROUP, "no_audio"), ({}, GROUP[:5], "group_size"), ({"evolve": False}, GROUP, None)],
)
def test_without_audio_or_with_another_group_size_nothing_is_evolved(more, group, reason):
    judge = Oracle(evolve=example(), grade=graded)
    judged = term(judge, **more)(TASK, group)
    assert values(judged) == pytest.approx(([0.2] * 4 + [0.4] * 4)[: len(group)])
    assert (judge.asked("evolve"), judged.record["reasons"]) == ([], [reason] if reason else [])


def test_static_scoring_asks_once_a_rollout_with_its_own_text():
    judge = Oracle(grade=graded)
    term(judge, evolve=False)(TASK, GROUP)
    assert sorted(request.payload["attempt"]["reasoning"] for request in judge.requests) == [f"attempt {i}" for i in range(8)]
    assert {request.timeout_s for request in judge.requests} == {120.0}


@pytest.mark.parametrize("static", [None, ()])
def test_a_sample_without_rubrics_is_neutral_without_a_request(static):
    judge = Oracle(evolve=example())
    rubrics = term(judge, static=static)
    judged = rubrics(TASK, GROUP)
    assert (values(judged), judged.record["reasons"], judge.requests) == ([0.5] * 8, ["no_rubric"], [])
    assert rubrics.totals()["rubrics/neutral_rollouts"] == (8, 8)


def test_a_judge_that_is_down_leaves_every_group_neutral_and_is_counted():
    rubrics = term(Oracle())
    judged = rubrics(TASK, GROUP)
    assert (values(judged), judged.record["mode"], judged.record["rubrics"]) == ([0.5] * 8, "neutral", [])
    totals = rubrics.totals()
    assert (totals["rubrics/judge_failed"], totals["rubrics/neutral"], totals["judge/failures"]) == ((1, 1), (1, 1), (9, 1))
    assert (totals["rubrics/group_mean"], totals["rubrics/group_std"]) == ((0.5, 1), (0.0, 1))


def test_no_judge_at_all_is_neutral_too():
    rubrics = term(None)
    assert values(rubrics(TASK, GROUP)) == [0.5] * 8
    assert rubrics.totals()["rubrics/judge_failed"] == (1, 1)


def test_one_failed_rollout_makes_its_group_neutral_unless_the_published_way_is_asked_for():
    def grade(request):
        failed = request.payload["attempt"]["reasoning"] == "attempt 5"
        return JudgeError("no", kind="permanent") if failed else graded(request)

    strict, published = (
        term(Oracle(grade=grade), evolve=False, one_row_failed=way) for way in ("neutral_group", "neutral_row")
    )
    assert values(strict(TASK, GROUP)) == [0.5] * 8
    assert values(published(TASK, GROUP)) == pytest.approx([0.2] * 4 + [0.4, 0.5, 0.4, 0.4])
    assert strict.totals()["rubrics/neutral_rollouts"] == (8, 8)
    assert published.totals()["rubrics/neutral_rollouts"] == (1, 8)


def test_nothing_more_is_asked_once_a_groups_time_is_over():
    now = [0.0]

    def slow(request):
        now[0] += 100.0
        return JudgeError("slow", kind="transient")

    judge = Oracle(evolve=slow, grade=graded)
    rubrics = term(judge, group_timeout_s=150)
    rubrics.clock = rubrics.client.clock = lambda: now[0]
    assert values(rubrics(TASK, GROUP)) == [0.5] * 8
    assert [request.purpose for request in judge.requests] == ["evolve", "evolve"]


def test_a_bug_in_a_judge_stops_the_run():
    with pytest.raises(ZeroDivisionError):
        term(Oracle(evolve=lambda request: 1 / 0))(TASK, GROUP)


# Length


@pytest.mark.parametrize(
    ("text", "thought"),
    [
        ("<think>a b</think><answer>B</answer>", "a b"), ("a b <answer>B</answer>", "a b <answer>B</answer>"),
        ("<think></think><answer>B</answer>", ""), ("<think>a\nb</think>x<think>c</think>", "a\nb"), ("", ""),
        ("<think>cut off", "<think>cut off"),
    ],
)  # fmt: skip
def test_what_counts_as_thinking(text, thought):
    assert think_text(text) == thought


def test_an_empty_think_block_has_the_full_bonus_and_long_ones_a_negative_one():
    overthink = Overthink(limit=4)
    assert overthink(TASK, completion("<think></think><answer>B</answer>")) == 1.0
    assert overthink(TASK, completion("<think>one two three</think>")) == 0.0
    assert overthink(TASK, completion("one two three four five six")) == -1.0
    assert [count_words("a " * n) for n in (0, 1, 3, 4)] == [0, 1, 4, 5]


# What holds for any verdicts

verdict_rows = st.integers(2, 9).flatmap(
    lambda size: st.lists(st.lists(st.booleans(), min_size=size, max_size=size), min_size=1, max_size=8)
)


def evolution_of(rows, negative):
    criteria = [
        Criterion(id=f"S{i}" if i < 5 else f"N{i - 4}", text="t", polarity="negative" if i >= 5 and negative else "positive")
        for i in range(len(rows))
    ]
    return Evolution(criteria=tuple(criteria), verdicts=tuple(map(tuple, rows)))


@given(rows=verdict_rows, negative=st.booleans(), raw=st.lists(st.floats(-2, 5), min_size=5, max_size=5), data=st.data())
def test_weights_sum_to_one_scores_are_shares_and_follow_their_rollouts(rows, negative, raw, data):
    order = data.draw(st.permutations(range(len(rows[0]))))
    kept = keep_separating(evolution_of(rows, negative), 5)
    moved = keep_separating(evolution_of([[row[i] for i in order] for row in rows], negative), 5)
    assert [entry.criterion for entry in kept] == [entry.criterion for entry in moved]
    assert len(kept) <= 5
    assert all(0 < entry.deviation <= 0.5 for entry in kept)
    assert list(kept) == sorted(kept, key=lambda entry: -round(entry.deviation, 12))
    if not kept:
        return
    try:
        weights = read_weights({"weights": raw[: len(kept)]}, [entry.criterion for entry in kept])
    except ValueError:
        assert not any(value > 0 for value in raw[: len(kept)])
        return
    assert sum(weights) == pytest.approx(1.0)
    assert min(weights) >= 0
    scores = weighted_scores(weights, [entry.bits for entry in kept])
    assert all(0.0 <= score <= 1.0 for score in scores)
    assert weighted_scores(weights, [entry.bits for entry in moved]) == [scores[i] for i in order]


def test_totals_do_not_depend_on_the_order_in_which_groups_end():
    def weigh(request):
        return {"weights": [0.1, 0.3, 0.2, 0.25, 0.15]}

    def run(order):
        rubrics = term(Oracle(evolve=example(), weigh=weigh, grade=graded))
        for size in order:
            rubrics(TASK, GROUP[:size])
        return rubrics.totals()

    assert run([8, 3, 7, 8]) == run([3, 8, 8, 7])


# Files of static rubrics


def rubric_file(tmp_path, *rows, whole=False):
    path = tmp_path / "rubrics.jsonl"
    path.write_text(json.dumps(rows) if whole else "\n".join(json.dumps(row) for row in rows))
    return path


ENTRIES = [{"id": "S1", "category": "c", "text": "one", "weight": 0.3}, {"id": "S2", "criterion": "two", "weight": 0.3}]


@pytest.mark.parametrize("whole", [False, True])
def test_a_published_file_is_read_and_weights_are_scaled(tmp_path, whole):
    find = read_static_rubrics(rubric_file(tmp_path, {"sample_id": 7, "rubrics": ENTRIES}, whole=whole))
    for task in (replace(TASK, columns={"sample_id": 7}), replace(TASK, columns={"id": "7"}), replace(TASK, id="7")):
        found = find(task)
        assert [(c.id, c.text, c.category, c.weight) for c in found] == [("S1", "one", "c", 0.5), ("S2", "two", "", 0.5)]
    assert find(TASK) is None


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([{"rubrics": ENTRIES}], "row 1: expected an object with sample_id"),
        ([{"sample_id": 1, "rubrics": "x"}], "row 1: expected an object"),
        ([{"sample_id": 1, "rubrics": ENTRIES}, {"sample_id": "1", "rubrics": ENTRIES}], "row 2: sample_id '1' has appeared"),
        ([{"sample_id": 1, "rubrics": [{"id": "S1", "weight": 1}]}], "rubric 1 has neither text"),
        ([{"sample_id": 1, "rubrics": [{"text": "t", "weight": -1}]}], "weight -1"),
        ([{"sample_id": 1, "rubrics": [{"text": "t", "weight": "1"}]}], "weight '1'"),
        ([{"sample_id": 1, "rubrics": [{"text": "t", "weight": 0}]}], "sum to 1"),
        ([{"sample_id": 1, "rubrics": [ENTRIES[0], ENTRIES[0]]}], "different ids"),
        ([{"sample_id": 1, "rubrics": []}], "sum to 1"),
    ],
)
def test_bad_rows_are_named(tmp_path, rows, message):
    with pytest.raises(DataError, match=message):
        read_static_rubrics(rubric_file(tmp_path, *rows))


@pytest.mark.parametrize("content", [b'{"sample_id": 1', b"[1, 2", b"\xff\xfe\x00"])
def test_files_that_are_not_json_are_named(tmp_path, content):
    (tmp_path / "rubrics.jsonl").write_bytes(content)
    with pytest.raises(DataError, match=r"rubrics\.jsonl"):
        read_static_rubrics(tmp_path / "rubrics.jsonl")
    with pytest.raises(DataError, match="cannot be read"):
        read_static_rubrics(tmp_path / "absent.jsonl")


# Several groups at once


def test_groups_are_judged_together_and_keep_their_order():
    from mmrl.rewards import WeightedTerm, score
    from mmrl.testing import BanditAdapter

    adapter = BanditAdapter()
    batch = adapter.rollout(adapter.build_policy(), adapter.task_source("train")[:4], group_size=8, seeds=torch.arange(32))
    tasks = tuple(replace(TASK, id=f"t{int(group)}", answer=str(int(group))) for group in batch.group_ids)
    batch = replace(batch, tasks=tasks, outcomes=tuple(GROUP * 4))
    together = threading.Barrier(4, timeout=20)

    def evolve(request):
        together.wait()
        time.sleep(0.01 * (4 - int(request.payload["right_answer"])))  # the first group answers last
        moved = int(request.payload["right_answer"])
        return {"judgments": {f"S{i}": words(S4[moved:] + S4[:moved]) for i in range(1, 6)}}

    rubrics = term(Oracle(evolve=evolve), uniform_weights=True)
    scored = score(batch, {"rubrics": WeightedTerm(weight=0.5, function=rubrics)})
    expected = [bit for moved in range(4) for bit in S4[moved:] + S4[:moved]]
    assert scored.reward_terms["rubrics"].tolist() == expected
    assert scored.rewards.tolist() == [0.5 * bit for bit in expected]
    assert scored.judgings[8]["scores"] == expected[8:16]
    assert scored.judgings[8] is scored.judgings[15]
    kept = scored.select(torch.arange(8, 16))
    assert kept.judgings[0]["scores"] == expected[8:16]
