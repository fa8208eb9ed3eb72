"""``mmrl data check``, ``show``, ``convert``, and what ``mmrl train`` does with bad rows (cases M1, M4, D6)."""

import json

import pytest
from PIL import Image

from mmrl import cli

CONFIG = """\
modality: vision
output_dir: {folder}/runs
policy: {{path: tiny-qwen2.5-vl}}
rewards: {{accuracy: 1.0}}
sampling: {{tasks_per_step: 2, group_size: 2}}
trainer: {{num_steps: 1}}
rollout: {{max_prompt_tokens: 120, max_new_tokens: 3}}
tasks:
  name: dataset
  train: {{path: {folder}/train.jsonl}}
  eval: {{path: {folder}/eval.jsonl}}
"""


@pytest.fixture
def config(tmp_path, monkeypatch):
    """A run on rows that are fine; ``rows(...)`` writes others to train on."""
    monkeypatch.setenv("MMRL_CACHE_DIR", str(tmp_path / "cache"))
    Image.new("RGB", (56, 56), "red").save(tmp_path / "a.png")
    (tmp_path / "run.yaml").write_text(CONFIG.format(folder=tmp_path))
    write(tmp_path / "eval.jsonl", {"prompt": "<image>?", "images": ["a.png"], "answer": "1"})
    write(tmp_path / "train.jsonl", {"prompt": "<image>?", "images": ["a.png"], "answer": "1"})
    return tmp_path / "run.yaml"


def write(path, *rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


GOOD = {"prompt": "<image>?", "images": ["a.png"], "answer": "1"}
BAD = [
    GOOD,
    {"prompt": "<image><image>?", "images": ["a.png"], "answer": "1"},
    {"prompt": "?", "images": ["lost.png"], "answer": "1"},
    {"prompt": "x" * 500, "answer": "1"},
]


def run(capsys, *arguments):
    """Exit code, standard output and standard error on one line each."""
    code = cli.main([str(argument) for argument in arguments])
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def test_check_exits_with_1_and_the_rows_of_each_reason_and_answers_from_its_cache_next_time(capsys, config, tmp_path):
    write(tmp_path / "train.jsonl", *BAD)
    code, out, _ = run(capsys, "data", "check", config, "--json")
    assert code == 1
    train, held_out = json.loads(out)
    assert {reason: entry["rows"] for reason, entry in train["reasons"].items()} == {
        "tags and media differ in number": [2], "missing file": [3], "prompt too long": [4],
    }  # fmt: skip
    assert (train["rows"], train["bad_rows"], held_out["bad_rows"]) == (4, 3, 0)

    code, out, _ = run(capsys, "data", "check", config)
    assert code == 1
    assert "3 of 4 rows cannot be used (as checked before)" in out and "nothing wrong (as checked before)" in out
    assert "fail" in out
    code, out, _ = run(capsys, "data", "check", config, "--fresh")
    assert code == 1 and "as checked before" not in out


def test_check_of_a_file_needs_no_config(capsys, config, tmp_path):
    write(tmp_path / "train.jsonl", *BAD)
    code, out, _ = run(capsys, "data", "check", tmp_path / "train.jsonl", "--json", "limit=3")
    assert code == 1
    [report] = json.loads(out)
    assert [problem["row"] for problem in report["problems"]] == [2, 3]
    code, out, _ = run(capsys, "data", "check", tmp_path / "eval.jsonl", "--workers", "1")
    assert code == 0 and "1 rows, nothing wrong." in out


def test_train_stops_before_anything_is_loaded_and_names_the_rows(capsys, config, tmp_path, monkeypatch):
    write(tmp_path / "train.jsonl", *BAD)
    monkeypatch.setattr(cli, "build_adapter", lambda config: pytest.fail("the policy was loaded"))
    code, _, err = run(capsys, "train", config)
    assert code == 2
    assert "3 of 4 rows cannot be used" in err and "missing file (1 row: 3)" in err
    assert not (tmp_path / "runs").exists()


def test_d6_dropped_rows_are_named_and_a_run_on_the_one_row_that_is_left_wraps_with_a_notice(capsys, config, tmp_path):
    write(tmp_path / "train.jsonl", *BAD)
    code, out, err = run(capsys, "train", config, "tasks.train.on_bad_rows=drop", "--cpu")
    assert code == 0, err
    said = " ".join(err.split())
    assert "rows left out (on_bad_rows): missing file (1 row: 3)" in said
    assert "1 tasks for 2 a step: some are attempted twice in a step" in " ".join((out + err).split())


def test_d6_a_file_without_rows_is_one_clear_line(capsys, config, tmp_path):
    (tmp_path / "train.jsonl").write_text("\n")
    for command in (["data", "check"], ["train"]):
        code, _, err = run(capsys, *command, config)
        assert code == 2 and err.count("\n") == 1 and "train.jsonl: has no rows" in err


def test_m4_show_says_where_media_without_a_tag_go(capsys, config, tmp_path):
    write(tmp_path / "train.jsonl", {"prompt": "which?", "images": ["a.png", "a.png"], "answer": "1"})
    code, out, _ = run(capsys, "data", "show", config, "--row", "1", "--html", tmp_path / "page.html")
    assert code == 0
    slot = "<|vision_start|>[image: 4 tokens]<|vision_end|>"
    assert f"{slot}{slot}which?" in out
    assert "56x56 pixels" in out and "of at most 120, 8 of them media" in out
    page = (tmp_path / "page.html").read_text()
    assert page.count("data:image/png;base64,") == 2 and page.count("<mark>[image: 4 tokens]</mark>") == 2
    code, out, _ = run(capsys, "data", "show", tmp_path / "train.jsonl")
    assert code == 0 and "56x56 pixels" in out and "tokens" not in out


def test_show_of_a_held_out_row_that_is_too_long_says_so_instead_of_failing(capsys, config, tmp_path):
    write(tmp_path / "eval.jsonl", BAD[3])
    code, out, _ = run(capsys, "data", "show", config, "--split", "eval")
    assert code == 0 and "of at most 120 (over the limit)" in out


def test_convert_writes_what_a_check_accepts(capsys, config, tmp_path):
    write(tmp_path / "other.jsonl", {"problem": "<image>?", "images": ["a.png"], "solution": "1"})
    for name in ("ours.parquet", "ours.jsonl"):
        code, out, _ = run(capsys, "data", "convert", tmp_path / "other.jsonl", "--output", tmp_path / name, "--media", "bytes")
        assert code == 0 and f"{name}: 1 rows. Read it with:\npath: " in out
        code, out, err = run(capsys, "data", "check", tmp_path / name)
        assert code == 0, out + err
