"""A check finds every bad row at once, by file, row, field and reason (cases M4, M5, D1, D5 and the reports of others)."""

import io
import json
import time

import pytest
from rich.console import Console

from mmrl.data import DatasetConfig, read_tasks
from mmrl.data_check import check_dataset, scan, with_progress
from mmrl.data_files import RowError
from mmrl.data_problems import render_check
from mmrl.data_show import describe_task
from mmrl.errors import DataError


def write_jsonl(folder, *rows):
    lines = [row if isinstance(row, str) else json.dumps(row) for row in rows]
    (folder / "rows.jsonl").write_text("".join(line + "\n" for line in lines), encoding="utf-8")
    return DatasetConfig(path="rows.jsonl")


def found(problems):
    return [(problem.row, problem.field, problem.reason) for problem in problems]


def accept(kind, ref):
    pass


def rendered(report):
    console = Console(file=io.StringIO(), width=160)
    console.print(render_check(report))
    return console.file.getvalue()


def test_a_scan_reports_every_bad_row_by_line_field_and_reason(tmp_path):
    (tmp_path / "a.png").write_bytes(b"pixels")
    config = write_jsonl(
        tmp_path,
        {"prompt": "fine", "answer": "1", "id": "one"},
        '{"prompt": "cut off',
        "",
        {"prompt": "<image><image>", "image": "a.png", "answer": "2"},
        {"prompt": "?", "images": ["a.png", "lost.png", "a.png"], "answer": "3"},
        {"prompt": "?", "answer": float("nan")},
        {"prompt": "?", "answer": ["1", "2"]},
        {"prompt": "?", "answer": " "},
        {"prompt": "?", "answer": None},
        {"prompt": "?", "answer": "4", "id": "one"},
        {"prompt": "?"},
    )
    assert found(scan(config, base_dir=tmp_path)) == [
        (2, "row", "not JSON"),
        (4, "image", "tags and media differ in number"),
        (5, "images[1]", "missing file"),
        (6, "answer", "NaN answer"),
        (7, "answer", "wrong type"),
        (8, "answer", "empty answer"),
        (9, "answer", "empty answer"),
        (10, "id", "duplicate id"),
        (11, "answer", "empty answer"),
    ]


def test_answers_are_not_missed_where_no_row_has_any(tmp_path):
    config = write_jsonl(tmp_path, {"prompt": "a"}, {"prompt": "b"})
    assert found(scan(config, base_dir=tmp_path)) == []


def test_a_duplicate_names_the_first_row_with_its_id(tmp_path):
    config = write_jsonl(tmp_path, {"prompt": "a", "id": 7}, {"prompt": "b", "id": 8}, {"prompt": "c", "id": 7})
    (problem,) = scan(config, base_dir=tmp_path)
    assert problem.place == "rows.jsonl:3"
    assert "'7' is also the id of rows.jsonl:1" in problem.detail


def test_a_file_without_rows_stops_the_check(tmp_path):
    with pytest.raises(DataError, match="has no rows"):
        check_dataset(write_jsonl(tmp_path), base_dir=tmp_path, open_media=accept)


def test_a_check_opens_every_medium_and_groups_by_the_reason_of_the_opener(tmp_path):
    (tmp_path / "good.png").write_bytes(b"good")
    (tmp_path / "bad.png").write_bytes(b"bad")
    opened = []

    def open_media(kind, ref):
        opened.append(kind)
        if kind == "audio":
            raise DataError("no sound")
        if "bad" in ref:
            raise RowError("image", "damaged image", f"{ref}: cut short; save the file again.")

    rows = [["good.png"], ["good.png", "bad.png"], ["bad.png", "bad.png"]]
    rows = [{"prompt": "?", "images": images} for images in rows] + [{"prompt": "?", "audio": "good.png"}]
    report = check_dataset(write_jsonl(tmp_path, *rows), base_dir=tmp_path, open_media=open_media)

    assert opened == ["image"] * 5 + ["audio"]
    assert found(report.problems) == [
        (2, "images[1]", "damaged image"),
        (3, "images[0]", "damaged image"),
        (3, "images[1]", "damaged image"),
        (4, "audios[0]", "unreadable audio"),
    ]
    assert (report.num_rows, report.num_bad_rows, report.ok) == (4, 3, False)
    assert list(report.by_reason) == ["damaged image", "unreadable audio"]


def test_a_task_that_the_policy_refuses_is_a_problem_of_its_row(tmp_path):
    def check_task(task):
        if "long" in task.messages[0]["content"][0]["text"]:
            raise RowError("prompt", "prompt too long", "400 tokens; expected at most 40.")
        if "odd" in task.messages[0]["content"][0]["text"]:
            raise DataError("cannot be encoded")

    config = write_jsonl(tmp_path, {"prompt": "short"}, {"prompt": "long"}, {"prompt": "odd"})
    report = check_dataset(config, base_dir=tmp_path, open_media=accept, check_task=check_task)
    assert found(report.problems) == [(2, "prompt", "prompt too long"), (3, "row", "refused by the policy")]


def test_an_opener_that_fails_for_another_reason_is_not_hidden(tmp_path):
    (tmp_path / "a.png").write_bytes(b"pixels")

    def broken(kind, ref):
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        check_dataset(write_jsonl(tmp_path, {"prompt": "?", "image": "a.png"}), base_dir=tmp_path, open_media=broken)


def test_the_problems_of_a_check_say_which_rows_to_leave_out(tmp_path):
    config = write_jsonl(tmp_path, {"prompt": "a"}, {"prompt": 1}, {"prompt": "c"})
    report = check_dataset(config, base_dir=tmp_path, open_media=accept)
    kept = read_tasks(config, base_dir=tmp_path).without({problem.place for problem in report.problems})
    assert [task.source for task in kept] == ["rows.jsonl:1", "rows.jsonl:3"]


def test_a_report_counts_reasons_and_quotes_the_first_rows(tmp_path):
    rows = [{"prompt": 1}] * 7 + [{"prompt": "[bold]x[/bold]", "answer": ["[red]"]}, {"prompt": "fine"}]
    report = check_dataset(write_jsonl(tmp_path, *rows), base_dir=tmp_path, open_media=accept)
    tree = json.loads(report.to_json())
    assert (tree["path"], tree["rows"], tree["bad_rows"]) == ("rows.jsonl", 9, 9)  # the last has an empty answer
    assert tree["reasons"]["wrong type"] == {"count": 7, "rows": [1, 2, 3, 4, 5, 6, 7]}
    assert tree["reasons"]["one answer in a list"] == {"count": 1, "rows": [8]}
    assert [problem["row"] for problem in tree["problems"]] == list(range(1, 10))
    assert set(tree["problems"][0]) == {"place", "row", "field", "reason", "detail"}

    text = rendered(report)
    assert "rows.jsonl: 9 of 9 rows cannot be used" in text
    assert "1, 2, 3, 4, 5, ..." in text
    assert "rows.jsonl:1: prompt: found int" in text


def test_a_clean_report_is_one_line_and_markup_in_data_is_shown_as_it_is(tmp_path):
    report = check_dataset(write_jsonl(tmp_path, {"prompt": "a"}), base_dir=tmp_path, open_media=accept)
    assert rendered(report).strip() == "rows.jsonl: 1 rows, nothing wrong."
    report = check_dataset(write_jsonl(tmp_path, {"prompt": "a", "answer": ["[red]"]}), base_dir=tmp_path, open_media=accept)
    assert "['[red]']" in rendered(report)


def test_a_task_is_shown_with_media_in_place_and_long_text_cut(tmp_path):
    (tmp_path / "a.png").write_bytes(b"pixels")
    row = {"prompt": f"see <image>\n{'x' * 50}", "image": "a.png", "answer": "4", "difficulty": 2, "level": ["hard"]}
    config = write_jsonl(tmp_path, row)
    task = read_tasks(config, base_dir=tmp_path)[0]
    assert describe_task(task, max_chars=30).split("\n") == [
        "task rows.jsonl:1 (rows.jsonl:1)",
        "domain: default",
        "difficulty: 2",
        "[user]",
        "  see ",
        f"  <image: {tmp_path / 'a.png'}>",
        "  ",
        f"  {'x' * 29}... (51 characters)",
        "answer: 4",
        "demonstration: none",
        "column level: ['hard']",
    ]


@pytest.mark.parametrize(
    ("ref", "words"),
    [
        (b"1234", "4 bytes"),
        (["/a.png", "/b.png"], "2 frames, the first /a.png"),
        ({"video": "/a.mp4", "fps": 4}, "/a.mp4, 4 fps"),
    ],
)
def test_every_form_of_a_medium_is_shown_in_words(ref, words):
    from mmrl.chat import ChatTask

    task = ChatTask(id="x", messages=({"role": "user", "content": [{"type": "video", "video": ref}]},))
    assert f"<video: {words}>" in describe_task(task)


def test_progress_is_silent_at_first_and_then_prints_plain_lines(monkeypatch):
    seconds = iter(range(100))
    monkeypatch.setattr(time, "monotonic", lambda: next(seconds))  # a second passes at every look
    console = Console(file=io.StringIO(), force_terminal=False, width=80)
    assert list(with_progress("abcdefgh", 8, "checking", console)) == list("abcdefgh")
    # looks: 0 start, so a line at 2 or later; 1, 2 (line), 3 (the next at 8 or later), 4, 5, 6, 7, 8 (line)
    assert console.file.getvalue() == "checking: 2 of 8\nchecking: 7 of 8\n"


def test_progress_draws_a_bar_on_a_terminal_only_after_a_while(monkeypatch):
    quick = Console(file=io.StringIO(), force_terminal=True, width=80)
    assert list(with_progress("ab", 2, "checking", quick)) == ["a", "b"]
    assert quick.file.getvalue().strip() == ""

    monkeypatch.setattr("mmrl.data_check.QUIET_SECONDS", 0.0)
    slow = Console(file=io.StringIO(), force_terminal=True, width=80)
    assert list(with_progress("ab", 2, "checking", slow)) == ["a", "b"]
    assert "checking" in slow.file.getvalue()
