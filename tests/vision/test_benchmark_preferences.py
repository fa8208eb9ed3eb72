"""Judges' benchmarks: every packaging read into one form, counts against the document's numbers, and one run end to end."""

import json
import math

import numpy as np
import pytest
from PIL import Image

from mmrl.chat import media_parts
from mmrl.cli import main
from mmrl.errors import ConfigError, DataError
from vision.benchmark_preferences import READERS, Item, read_items, vl_category
from vision.benchmark_scores import Judgment, acc_plus, majority, published_verdict, report
from vision.preferences import Pair, judging_task


def item(index, unit="u", **groups):
    pair = Pair(id=str(index), question=({"type": "text", "text": "?"},), chosen="a", rejected="b")
    return Item(pair=pair, groups=groups, unit=unit)


def judged(first, second, votes=((), ())):
    """A judgment from the two greedy verdicts; None is unreadable."""
    texts = tuple("no idea" if verdict is None else f"<answer>{verdict}</answer>" for verdict in (first, second))
    return Judgment(texts=texts, votes=votes)


# ---- counting -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("votes", "verdict"),
    [
        ((1, 2, 1), 1), ((2, 2, 1, 2, 1), 2), ((1, None, None), 1), ((1, 2), None), ((None, None), None), ((), None),
        ((2, None, 1, 2), 2),
    ],
)  # fmt: skip
def test_the_majority_decides_and_a_draw_is_no_verdict(votes, verdict):
    assert majority(votes) == verdict


@pytest.mark.parametrize(("count", "expected"), [(1, 0.72), (5, 0.862352), (15, 0.966170)])
def test_independent_votes_have_the_accuracy_of_the_document(count, expected):
    chances = [
        math.comb(count, right) * 0.72**right * 0.28 ** (count - right)
        for right in range(count + 1)
        if majority((1,) * right + (2,) * (count - right)) == 1
    ]
    assert sum(chances) == pytest.approx(expected, abs=1e-6)


def test_any_of_five_independent_votes():
    assert sum(0.28**wrong * 0.72 for wrong in range(5)) == pytest.approx(0.998279, abs=1e-6)
    result = report("x", [item(0), item(1)], [judged(1, 2, ((2, 1), (1, 1))), judged(1, 2, ((2, 2), (2, 1)))], votes=(1, 2))
    assert result["votes"]["2"]["any right"]["k"] == 2  # of four asked questions
    assert result["votes"]["1"]["accuracy"]["k"] == 0.5 and result["votes"]["2"]["no verdict"]["k"] == 2


@pytest.mark.parametrize(
    ("text", "verdict"),
    [("<answer>1</answer>", 1), ("I choose 2", 2), ("not 2 but 1.", 1), ("neither", None), ("1 <answer>both</answer>", None)],
)
def test_the_published_rule_takes_the_last_digit(text, verdict):
    assert published_verdict(text) == verdict


def test_acc_plus_is_the_share_of_questions_whose_pairs_are_all_right():
    units, correct = ["g1", "g1", "g2", "g2", "g3"], [True, True, True, False, True]
    assert sum(correct) / 5 == pytest.approx(0.80) and acc_plus(units, correct) == pytest.approx(0.666667, abs=1e-6)


def test_a_judge_that_favours_the_first_response_is_seen_through():
    # Right on nine of ten pairs as chosen-first and on five of ten as chosen-second: 0.7.
    judgments = [judged(1 if index < 9 else 2, 2 if index < 5 else 1) for index in range(10)]
    result = report("vl_rewardbench", [item(index) for index in range(10)], judgments)
    assert result["accuracy"]["mean"] == pytest.approx(0.7)
    assert [cell["mean"] for cell in result["orders"].values()] == pytest.approx([0.9, 0.5])
    assert result["says the first"]["mean"] == pytest.approx(0.7) and result["right in both orders"]["k"] == 5
    assert result["published rule"]["mean"] == pytest.approx(0.9)


def test_unreadable_verdicts_are_wrong_and_stay_in_the_denominator():
    result = report("x", [item(0), item(1)], [judged(None, 2), judged(1, None)])
    assert result["accuracy"]["mean"] == 0.5 and result["unreadable"]["k"] == 2 and result["says the first"]["n"] == 2
    with pytest.raises(DataError, match="1 judgments for 2 pairs"):
        report("x", [item(0), item(1)], [judged(1, 2)])


def test_micro_and_macro_accuracy_of_the_document():
    counts = {"general": (309, 484), "hallucination": (384, 448), "reasoning": (206, 318)}
    items, judgments = [], []
    for category, (right, total) in counts.items():
        items += [item(len(items) + index, category=category) for index in range(total)]
        judgments += [judged(1, 2) if index < right else judged(2, 1) for index in range(total)]
    result = report("vl_rewardbench", items, judgments)
    assert result["accuracy"]["mean"] == pytest.approx(0.7192, abs=5e-5) and result["macro"] == pytest.approx(0.7145, abs=5e-5)
    assert result["groups"]["category"]["hallucination"]["mean"] == pytest.approx(0.8571, abs=5e-5)
    assert result["num_published_items"] == 1250


# ---- readers ------------------------------------------------------------------------------------------------------------


def write(tmp_path, rows, name="rows.jsonl"):
    for folder in ("mcq", "."):
        (tmp_path / folder).mkdir(exist_ok=True)
        Image.new("RGB", (28, 28)).save(tmp_path / folder / "a.png")
    (tmp_path / name).write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return tmp_path / name


VL = {"id": "RLAIF-V-1", "query": "What?", "response": ["dog", "cat"], "human_ranking": [1, 0], "image": "a.png"}
MMRB = {"ID": "nocaps_1", "Image": "a.png", "Text": "What?", "Output1": "dog", "Output2": "cat", "Better": "Output2",
        "Category": "open_generation/correctness_task"}  # fmt: skip
MM_RLHF = {"id": "g", "image": "mcq/a.png", "prompt": "What?", "chosen": "cat", "rejected": "dog"}


@pytest.mark.parametrize(
    ("benchmark", "row", "category"),
    [
        ("vl_rewardbench", VL, "hallucination"),
        ("vl_rewardbench", {"id": "x", "prompt": "What?", "chosen": "cat", "rejected": "dog", "image": "a.png"}, "general"),
        ("multimodal_rewardbench", MMRB, "open_generation/correctness_task"),
        ("multimodal_rewardbench", {**MMRB, "Category": "safety", "ID": "Pairs_3"}, "safety/bias"),
        ("multimodal_rewardbench", {**MMRB, "Category": "safety", "ID": "hateful_3"}, "safety/toxicity"),
        ("multimodal_rewardbench", {**MMRB, "Category": "reasoning", "ID": "MathVista_3"}, "reasoning/math"),
        ("multimodal_rewardbench", {**MMRB, "Category": "reasoning", "ID": "emma_3"}, "reasoning/coding"),
        ("mm_rlhf_rewardbench", MM_RLHF, "mcq"),
    ],
)
def test_every_packaging_is_the_same_pair(tmp_path, benchmark, row, category):
    (found,) = read_items(benchmark, write(tmp_path, [row]))
    assert (found.pair.chosen, found.pair.rejected, found.groups["category"]) == ("cat", "dog", category)
    task = judging_task(found.pair, 2, "full")
    ((kind, ref),) = media_parts(task)
    assert kind == "image" and str(ref).endswith("a.png") and task.answer == "2"


@pytest.mark.parametrize(
    ("name", "official", "script"),
    [
        ("mmmu_1", "reasoning", "reasoning"), ("mathverse_1", "reasoning", "reasoning"),
        ("hallucination_pair-1", "hallucination", "hallucination"), ("RLHF-V-1", "hallucination", "general"),
        ("RLAIF-V-1", "hallucination", "general"), ("wildvision_1", "general", "general"), ("VLF-1", "general", "general"),
    ],
)  # fmt: skip
def test_the_official_split_and_that_of_the_published_script(name, official, script):
    assert (vl_category(name), vl_category(name, published_script=True)) == (official, script)


def test_questions_with_several_pairs_share_a_unit_and_videos_may_be_folders_of_frames(tmp_path):
    frames = tmp_path / "video" / "v"
    frames.mkdir(parents=True)
    for index in range(40):
        Image.fromarray(np.full((28, 28, 3), index, np.uint8)).save(frames / f"{index:03}.png")
    row = {**MM_RLHF, "video": "video/v"}
    del row["image"]
    items = read_items("mm_rlhf_rewardbench", write(tmp_path, [MM_RLHF, {**MM_RLHF, "rejected": "cow"}, {**row, "id": "h"}]))
    assert [entry.unit for entry in items] == ["g", "g", "h"] and len({entry.pair.id for entry in items}) == 3
    ((kind, shown),) = media_parts(judging_task(items[2].pair, 1, "full"))
    assert kind == "video" and len(shown) == 32 and shown[0].endswith("000.png") and shown[-1].endswith("039.png")
    assert items[2].groups["category"] == "video"


@pytest.mark.parametrize(
    ("benchmark", "row", "message"),
    [
        ("vl_rewardbench", {**VL, "human_ranking": [1, 1]}, "expected 0 and 1"),
        ("vl_rewardbench", {key: value for key, value in VL.items() if key != "query"}, "none of query, prompt"),
        ("multimodal_rewardbench", {**MMRB, "Better": "A"}, "expected Output1 or Output2"),
        ("mm_rlhf_rewardbench", {**MM_RLHF, "chosen": ""}, "none of chosen"),
        ("mm_rlhf_rewardbench", {**MM_RLHF, "image": "../a.png"}, "image"),
    ],
)
def test_a_row_that_cannot_be_used_is_named(tmp_path, benchmark, row, message):
    with pytest.raises(DataError, match=message) as error:
        read_items(benchmark, write(tmp_path, [row]))
    assert "rows.jsonl:1" in str(error.value)


def test_other_benchmarks_are_refused(tmp_path):
    with pytest.raises(ConfigError, match="expected one of: vl_rewardbench"):
        read_items("mmau", tmp_path / "x.json")
    assert list(READERS) == ["vl_rewardbench", "multimodal_rewardbench", "mm_rlhf_rewardbench"]


# ---- the command --------------------------------------------------------------------------------------------------------

CONFIG = """
modality: vision
policy: {path: digit-reader}
tasks: {name: digit_preferences}
rollout: {max_new_tokens: 4}
rewards: {r1_result: 1.0}
trainer: {num_steps: 1}
"""


def test_the_command_judges_both_orders_and_votes(tmp_path, capsys):
    (tmp_path / "run.yaml").write_text(CONFIG, encoding="utf-8")
    file, output = write(tmp_path, [VL, {**VL, "id": "mmmu_1"}]), tmp_path / "result.json"
    arguments = ["eval", str(tmp_path / "run.yaml"), "--benchmark", "vl_rewardbench", "--file", str(file)]
    assert main([*arguments, "--output", str(output), "--votes", "1", "3"]) == 0
    shown = capsys.readouterr().out
    assert "accuracy, chosen second" in shown and "voting@3: accuracy" in shown and "do not compare" in shown
    result = json.loads(output.read_text(encoding="utf-8"))
    assert result["num_items"] == 2 and set(result["votes"]) == {"1", "3"}
    assert [len(votes) for votes in result["answers"][0]["votes"]] == [3, 3]
    assert result["unreadable"]["n"] == 4 and set(result["groups"]["category"]) == {"hallucination", "reasoning"}


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ([], "needs --file"),
        (["--file", "x", "--control", "silence"], "for audio"),
        (["--file", "x", "--votes", "0"], "--votes has 0"),
    ],
)
def test_the_command_says_what_is_missing(tmp_path, capsys, more, message):
    (tmp_path / "run.yaml").write_text(CONFIG, encoding="utf-8")
    assert main(["eval", str(tmp_path / "run.yaml"), "--benchmark", "vl_rewardbench", *more]) == 2
    assert message in capsys.readouterr().err
