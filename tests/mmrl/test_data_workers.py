"""Checks by several processes find what one finds, in order, and end with the check (`mmrl.data_workers`)."""

import json
import multiprocessing
import os

import pytest
from PIL import Image

from mmrl import data_workers
from mmrl.data import DatasetConfig
from mmrl.data_check import CheckerSpec, check_dataset, choose_workers, file_spec
from mmrl.errors import DataError
from vision.config import VisionRolloutConfig

CHECKERS = """
import os, signal
from mmrl.data_files import RowError
from mmrl.errors import ConfigError

def build(kind):
    if kind == "misconfigured":
        raise ConfigError("policy.path is 'x': no such model.")
    def check(task):
        number = int(task.source.rpartition(":")[2])
        if number == 50 and kind == "crashes":
            os.kill(os.getpid(), signal.SIGKILL)
        if number == 50 and kind == "raises":
            raise ZeroDivisionError("a fault of ours")
        return [RowError("prompt", "prompt too long", "it is.")] if number % 10 == 0 else []
    return lambda tasks: [check(task) for task in tasks]
"""


@pytest.fixture
def forked(monkeypatch, tmp_path):
    """Conductors that start at once, and the module of their checkers."""
    monkeypatch.setattr(data_workers, "START_METHOD", "fork")
    (tmp_path / "checkers_of_workers.py").write_text(CHECKERS)
    monkeypatch.syspath_prepend(tmp_path)
    return lambda kind: CheckerSpec(function="checkers_of_workers:build", arguments=(kind,), settings=kind)


def write(folder, count, **row):
    lines = (json.dumps({"prompt": f"question {number}", **row}) for number in range(count))
    (folder / "rows.jsonl").write_text("\n".join(lines))
    return DatasetConfig(path="rows.jsonl")


def test_processes_find_what_one_process_finds(tmp_path):
    Image.new("RGB", (4, 4)).save(tmp_path / "a.png")
    rows = [{"prompt": "?", "images": ["a.png"], "id": str(number % 60)} for number in range(70)]
    rows[40]["images"], rows[41]["prompt"] = ["lost.png"], 7
    (tmp_path / "b.png").write_bytes(b"<html>")
    rows[65]["images"] = ["a.png", "b.png"]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    spec, media = file_spec("vision.media:opener", VisionRolloutConfig()), []
    config = DatasetConfig(path="rows.jsonl")
    together = check_dataset(config, base_dir=tmp_path, spec=spec, workers=2, on_media=media.extend)
    assert multiprocessing.active_children() == []
    alone = check_dataset(config, base_dir=tmp_path, spec=spec, workers=1)
    assert together.tree() == alone.tree()
    assert [problem.row for problem in together.problems] == [41, 42, *range(61, 66), 66, 66, 67, 68, 69, 70]
    assert {os.path.basename(path) for path, *_ in media} == {"a.png", "b.png"}


def test_results_come_in_order_however_many_processes(tmp_path, forked):
    config = write(tmp_path, 300)
    for workers in (2, 3):
        report = check_dataset(config, base_dir=tmp_path, spec=forked("fine"), workers=workers)
        assert list(report.bad["prompt too long"].rows) == list(range(10, 301, 10))


@pytest.mark.parametrize(
    ("kind", "error", "message"),
    [
        ("crashes", DataError, r"rows.jsonl: a worker ended by itself while tasks \d+ to \d+ were checked"),
        ("raises", ZeroDivisionError, "a fault of ours"),
        ("misconfigured", Exception, "policy.path is 'x': no such model"),
    ],
)
def test_what_ends_a_worker_ends_the_check(tmp_path, forked, kind, error, message):
    with pytest.raises(error, match=message):
        check_dataset(write(tmp_path, 200), base_dir=tmp_path, spec=forked(kind), workers=2)
    assert multiprocessing.active_children() == []


def test_a_caller_that_stops_listening_ends_the_workers(tmp_path, forked):
    config = write(tmp_path, 2000)
    chunks = data_workers.check_in_processes(config, tmp_path, forked("fine"), 2000, 2)
    next(chunks)
    assert len(multiprocessing.active_children()) == 1
    chunks.close()
    assert multiprocessing.active_children() == []


def test_few_rows_are_checked_here_and_more_by_a_process_a_core(monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: range(8))
    assert [choose_workers(rows, None) for rows in (1, 399, 400, 1000, 10_000)] == [1, 1, 2, 5, 8]
    assert [choose_workers(rows, 4) for rows in (1, 64, 1000)] == [1, 2, 4]
