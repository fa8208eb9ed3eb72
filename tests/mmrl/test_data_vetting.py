"""Policies for bad rows, and reports that are remembered (cases D1, D5, D6; `mmrl.data_vetting`, `mmrl.data_cache`)."""

import ast
import json
import os
from pathlib import Path

import pytest

from mmrl import data_cache
from mmrl.chat import plain_text
from mmrl.config import validate
from mmrl.data import DatasetConfig, read_tasks
from mmrl.data_cache import cached_check
from mmrl.data_check import CheckerSpec, check_dataset
from mmrl.data_files import RowError
from mmrl.data_problems import CheckReport
from mmrl.data_reasons import EXACT_FIXES, REASONS, USABLE
from mmrl.data_vetting import apply_policies, vetted_tasks
from mmrl.errors import ConfigError, DataError

CALLS = []


def build_recorder(reason):
    """A checker that remembers which tasks it saw, and refuses those that say so."""

    def check(tasks):
        CALLS.extend(task.source for task in tasks)
        return [[RowError("prompt", reason, "it says so.")] if "bad" in plain_text(task) else [] for task in tasks]

    return check


@pytest.fixture
def spec(monkeypatch, tmp_path):
    """What builds `build_recorder`, in a process whose remembered checks are below ``tmp_path``."""
    monkeypatch.setenv("MMRL_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(CheckerSpec, "build", lambda self: build_recorder(*self.arguments))
    CALLS.clear()
    return CheckerSpec(function="tests:build_recorder", arguments=("prompt too long",), settings="limit 40")


def write(folder, *rows, **config):
    (folder / "rows.jsonl").write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))
    return validate({"path": "rows.jsonl", **config}, DatasetConfig, "test")


def prompts(tasks):
    return [plain_text(task).removeprefix("user: ") for task in tasks]


ROWS = [{"prompt": "a"}, {"prompt": "bad"}, {"prompt": "c"}, {"prompt": 4}, {"prompt": "bad too"}]


# Policies


def test_bad_rows_fail_by_default_with_reasons_counts_and_rows(tmp_path, spec):
    with pytest.raises(DataError) as caught:
        vetted_tasks(write(tmp_path, *ROWS), base_dir=tmp_path, spec=spec)
    message = str(caught.value)
    assert message.startswith("rows.jsonl: 3 of 5 rows cannot be used: prompt too long (2 rows: 2, 5), wrong type (1 row: 4).")
    assert "First: rows.jsonl:2: prompt: prompt too long: it says so." in message
    assert "on_bad_rows: {prompt too long: drop}" in message


@pytest.mark.parametrize("policy", ["drop", {"prompt too long": "drop", "wrong type": "drop"}])
def test_dropped_rows_are_counted_and_listed(tmp_path, spec, policy):
    tasks = vetted_tasks(write(tmp_path, *ROWS, on_bad_rows=policy), base_dir=tmp_path, spec=spec)
    assert prompts(tasks) == ["a", "c"]
    [notice] = tasks.notices
    assert notice == ("rows.jsonl: rows left out (on_bad_rows): prompt too long (2 rows: 2, 5), wrong type (1 row: 4)")


def test_a_policy_is_for_its_reason_alone(tmp_path, spec):
    with pytest.raises(DataError, match=r"1 of 5 rows cannot be used: wrong type \(1 row: 4\)"):
        vetted_tasks(write(tmp_path, *ROWS, on_bad_rows={"prompt too long": "drop"}), base_dir=tmp_path, spec=spec)


def test_nothing_may_be_left_out_until_nothing_is_left(tmp_path, spec):
    with pytest.raises(DataError, match="every row was left out"):
        vetted_tasks(write(tmp_path, {"prompt": "bad"}, on_bad_rows="drop"), base_dir=tmp_path, spec=spec)


def test_d1_a_trailing_comma_is_mended_where_that_is_asked_for(tmp_path, spec):
    lines = ['{"prompt": "a, ]", "answer": ["1",],}', '{"prompt": "b", "answer": "2"}', '{"prompt": "c"']
    fixes = {"trailing comma": "fix", "one answer in a list": "fix", "not JSON": "drop"}
    tasks = vetted_tasks(write(tmp_path, *lines, on_bad_rows=fixes), base_dir=tmp_path, spec=spec)
    assert [(plain_text(task), task.answer) for task in tasks] == [("user: a, ]", "1"), ("user: b", "2")]
    assert (
        tasks.notices
        == (
            "rows.jsonl: rows left out (on_bad_rows): not JSON (1 row: 3)",
            "rows.jsonl: rows mended (on_bad_rows): trailing comma (1 row: 1)",
        )
        or tasks.notices[::-1]
    )


def test_d5_duplicate_ids_get_their_place(tmp_path, spec):
    rows = [{"prompt": "a", "id": "x"}, {"prompt": "b", "id": "x"}, {"prompt": "c", "id": "y"}]
    tasks = vetted_tasks(write(tmp_path, *rows, on_bad_rows={"duplicate id": "fix"}), base_dir=tmp_path, spec=spec)
    assert [task.id for task in tasks] == ["x", "x (rows.jsonl:2)", "y"]
    kept = vetted_tasks(write(tmp_path, *rows, on_bad_rows={"duplicate id": "keep"}), base_dir=tmp_path, spec=spec)
    assert [task.id for task in kept] == ["x", "x", "y"]
    assert "kept as they are" in kept.notices[0]


def test_a_row_that_is_dropped_for_one_reason_is_not_mended_for_another(tmp_path, spec):
    rows = [{"prompt": "a", "id": "x"}, {"prompt": "bad", "id": "x"}, {"prompt": "c", "id": "x"}]
    policies = {"duplicate id": "fix", "prompt too long": "drop"}
    tasks = vetted_tasks(write(tmp_path, *rows, on_bad_rows=policies), base_dir=tmp_path, spec=spec)
    assert [task.id for task in tasks] == ["x", "x (rows.jsonl:3)"]


def test_without_a_check_rows_are_read_as_they_come(tmp_path, spec):
    tasks = vetted_tasks(write(tmp_path, *ROWS, check=False), base_dir=tmp_path, spec=spec)
    assert len(tasks) == 5 and CALLS == []


@pytest.mark.parametrize(
    ("policies", "message"),
    [
        (
            {"prompt too log": "drop"},
            "'prompt too log' is not a reason that rows are refused for; did you mean",
        ),
        ({"prompt too long": "fix"}, "'prompt too long' has no exact fix, only 'duplicate id', 'one answer in a list'"),
        ({"missing file": "keep"}, "a row with 'missing file' cannot be used; keep is for 'duplicate id', 'empty answer'"),
        ({"missing file": "ignore"}, "on_bad_rows"),
        ("fix", "on_bad_rows"),
    ],
)
def test_a_policy_that_makes_no_sense_is_refused_with_the_config(tmp_path, policies, message):
    with pytest.raises(ConfigError, match=message):
        write(tmp_path, {"prompt": "a"}, on_bad_rows=policies)


def test_policies_without_a_check_are_refused(tmp_path):
    with pytest.raises(ConfigError, match="on_bad_rows acts on what the check finds, and check is false"):
        write(tmp_path, {"prompt": "a"}, on_bad_rows="drop", check=False)


def test_every_reason_of_the_program_is_known(tmp_path):
    root = Path(data_cache.__file__).parents[1]
    used = set()
    for path in [path for package in ("mmrl", "vision", "audio") for path in (root / package).glob("*.py")]:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "RowError" and len(node.args) > 1:
                reason = node.args[1]
                if isinstance(reason, ast.Constant):
                    used.add(reason.value)
                elif isinstance(reason, ast.JoinedStr):
                    used |= {f"{reason.values[0].value}{kind}" for kind in ("image", "video", "audio")}
    assert used <= set(REASONS), used - set(REASONS)
    assert set(EXACT_FIXES) <= set(REASONS) and set(REASONS) >= USABLE


# Remembered reports


def test_a_second_check_of_the_same_files_checks_nothing(tmp_path, spec):
    config = write(tmp_path, *ROWS)
    first = cached_check(config, base_dir=tmp_path, spec=spec)
    assert len(CALLS) == 4 and not first.from_cache
    again = cached_check(config, base_dir=tmp_path, spec=spec)
    assert len(CALLS) == 4 and again.from_cache
    assert again.tree() == first.tree()
    cached_check(config, base_dir=tmp_path, spec=spec, fresh=True)
    assert len(CALLS) == 8


def test_policies_are_not_part_of_what_was_found(tmp_path, spec):
    cached_check(write(tmp_path, *ROWS), base_dir=tmp_path, spec=spec)
    seen = len(CALLS)
    stamp = os.stat(tmp_path / "rows.jsonl").st_mtime_ns
    config = write(tmp_path, *ROWS, on_bad_rows="drop")
    os.utime(tmp_path / "rows.jsonl", ns=(stamp, stamp))
    assert len(vetted_tasks(config, base_dir=tmp_path, spec=spec)) == 2
    assert len(CALLS) == seen


@pytest.mark.parametrize("change", ["rows", "columns", "limits", "medium", "medium gone"])
def test_whatever_a_report_depends_on_makes_it_old(tmp_path, spec, change):
    (tmp_path / "a.png").write_bytes(b"pixels")
    rows = [{"prompt": "a", "images": ["a.png"], "hint": "x"}]
    config = write(tmp_path, *rows)
    cached_check(config, base_dir=tmp_path, spec=spec)
    if change == "rows":
        config = write(tmp_path, *rows, {"prompt": "b"})
    elif change == "columns":
        config = config.model_copy(update={"columns": {"difficulty": None}})
    elif change == "limits":
        spec = CheckerSpec(function=spec.function, arguments=spec.arguments, settings="limit 41")
    elif change == "medium":
        (tmp_path / "a.png").write_bytes(b"others")
        os.utime(tmp_path / "a.png", ns=(1, 1))
    else:
        (tmp_path / "a.png").unlink()
    report = cached_check(config, base_dir=tmp_path, spec=spec)
    assert not report.from_cache
    assert report.ok == (change != "medium gone")


def test_a_file_that_was_missing_and_has_come_makes_a_report_old(tmp_path, spec):
    config = write(tmp_path, {"prompt": "a", "images": ["a.png"]})
    assert not cached_check(config, base_dir=tmp_path, spec=spec).ok
    assert cached_check(config, base_dir=tmp_path, spec=spec).from_cache
    (tmp_path / "a.png").write_bytes(b"pixels")
    assert cached_check(config, base_dir=tmp_path, spec=spec).ok


@pytest.mark.parametrize("damage", ["cut", "flipped", "empty", "binary", "other"])
def test_a_damaged_cache_is_ignored_with_a_notice(tmp_path, spec, damage):
    (tmp_path / "a.png").write_bytes(b"pixels")
    config = write(tmp_path, {"prompt": "a", "images": ["a.png"]})
    first = cached_check(config, base_dir=tmp_path, spec=spec)
    [path] = (tmp_path / "cache/data_checks").glob("*.jsonl")
    data = path.read_bytes()
    path.write_bytes({
        "cut": data[: len(data) // 2],
        "flipped": data.replace(b'"rows"', b'"rowz"'),
        "empty": b"",
        "binary": b"\xff\xfe\x00",
        "other": b'{"format": 1}\n[1, 2]\n',
    }[damage])  # fmt: skip
    notices = []
    report = cached_check(config, base_dir=tmp_path, spec=spec, on_notice=notices.append)
    assert report.tree() == first.tree() and not report.from_cache
    assert len(notices) == 1 and "cannot be read" in notices[0] and str(path) in notices[0]
    assert cached_check(config, base_dir=tmp_path, spec=spec).from_cache


def test_a_cache_that_cannot_be_written_is_no_error(tmp_path, spec, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("MMRL_CACHE_DIR", str(tmp_path / "file"))
    notices = []
    assert cached_check(write(tmp_path, {"prompt": "a"}), base_dir=tmp_path, spec=spec, on_notice=notices.append).ok
    assert len(notices) == 1 and "set MMRL_CACHE_DIR to another folder" in notices[0]


def test_the_cache_follows_the_desktop_standard(monkeypatch):
    monkeypatch.delenv("MMRL_CACHE_DIR", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", "/somewhere")
    assert data_cache.cache_dir() == Path("/somewhere/mmrl/data_checks")


def test_a_report_of_many_problems_keeps_all_rows_and_some_words(tmp_path):
    config = write(tmp_path, *({"prompt": number} for number in range(1500)))
    report = check_dataset(config, base_dir=tmp_path)
    assert (len(report.bad["wrong type"].rows), len(report.problems), report.num_problems) == (1500, 1000, 1500)
    assert CheckReport.from_tree(json.loads(json.dumps(report.tree()))).tree() == report.tree()
    with pytest.raises(DataError, match=r"1500 of 1500 rows"):
        apply_policies(read_tasks(config, base_dir=tmp_path), report)
