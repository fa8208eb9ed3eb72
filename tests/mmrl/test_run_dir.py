"""`mmrl.run_dir`: who may write to a run's folder, and what is in it."""

import json
import os
import signal
import socket
from dataclasses import replace

import pytest
import torch

from mmrl import run_dir as run_dir_module
from mmrl.config import RunConfig, read_config, validate
from mmrl.errors import ConfigError
from mmrl.run_dir import RunDirectory
from mmrl.testing import BanditAdapter
from mmrl.types import Media, Sample


@pytest.fixture
def directory(tmp_path):
    return RunDirectory(tmp_path / "run")


def lines_of(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def scored_batch(group_size=2):
    adapter = BanditAdapter()
    tasks = adapter.task_source("train")[:2]
    batch = adapter.rollout(adapter.build_policy(), tasks, group_size=group_size, seeds=torch.arange(2 * group_size))
    terms = {"accuracy": torch.tensor([1.0, 0.0, torch.nan, 1 / 3])}
    return replace(batch, rewards=torch.tensor([1.0, 0.0, torch.nan, 1 / 3]), reward_terms=terms)


# Who may write


def test_a_folder_in_use_is_refused_to_everyone_else_naming_its_owner(directory, in_child):
    directory.prepare(resume=False, overwrite=False)

    def another_process():
        for options in ({"resume": True, "overwrite": False}, {"resume": False, "overwrite": True}):
            with pytest.raises(ConfigError) as caught:
                RunDirectory(directory.path).prepare(**options)
            expected = f"{directory.path} is in use by process {os.getppid()} on {socket.gethostname()}; wait for it, or choose"
            assert str(caught.value).startswith(expected)

    assert in_child(another_process) == 0
    directory.release()
    RunDirectory(directory.path).prepare(resume=False, overwrite=False)


def test_the_lock_of_a_killed_process_is_void(directory, in_child):
    def die_with_the_lock():
        directory.prepare(resume=False, overwrite=False)
        os.kill(os.getpid(), signal.SIGKILL)

    assert in_child(die_with_the_lock) == -signal.SIGKILL
    directory.prepare(resume=False, overwrite=False)


@pytest.mark.parametrize("left_behind", ["config.yaml", "metrics.jsonl", "checkpoints", "failure"])
def test_what_a_run_has_written_needs_resume_or_overwrite(directory, left_behind):
    directory.path.mkdir()
    target = directory.path / left_behind
    target.mkdir() if "." not in left_behind else target.write_text("x")
    (directory.path / "notes.txt").write_text("mine")
    with pytest.raises(ConfigError, match=rf"already holds a run \({left_behind}\); continue it with --resume"):
        directory.prepare(resume=False, overwrite=False)
    directory.release()
    directory.prepare(resume=True, overwrite=False)
    assert target.exists()
    directory.release()
    directory.prepare(resume=False, overwrite=True)
    assert not target.exists()
    assert (directory.path / "notes.txt").read_text() == "mine"


def test_a_folder_with_other_files_is_no_run(directory):
    directory.path.mkdir()
    (directory.path / "notes.txt").write_text("mine")
    directory.prepare(resume=False, overwrite=False)  # neither refused as a run, nor emptied
    assert (directory.path / "notes.txt").read_text() == "mine"


# What is in it


def test_the_config_reads_back_to_the_same_run(directory, bandit_config):
    config = bandit_config(algorithm={"name": "dapo", "kl_coef": 0.1})
    directory.prepare(resume=False, overwrite=False)
    directory.write_config(config)
    assert validate(read_config(directory.path / "config.yaml"), RunConfig, "test") == config


def test_numbers_and_seconds_go_to_files_of_their_own(directory):
    directory.prepare(resume=False, overwrite=False)
    directory.log_metrics(1, {"reward/total": 0.1 + 0.2})
    directory.log_metrics(2, {"reward/total": 1e-9})
    directory.log_timing(1, {"step_s": 0.123456})
    assert lines_of(directory.path / "metrics.jsonl") == [
        {"train_step": 1, "reward/total": 0.1 + 0.2},
        {"train_step": 2, "reward/total": 1e-9},
    ]
    assert lines_of(directory.path / "timing.jsonl") == [{"train_step": 1, "step_s": 0.1235}]


def test_evaluations_are_read_back_in_the_order_of_steps(directory):
    directory.prepare(resume=False, overwrite=False)
    assert directory.read_evaluations() == {}
    for step in (100, 20, 0):
        directory.write_evaluation(step, {"metric": "accuracy", "overall": {"mean": step / 100}})
    assert list(directory.read_evaluations()) == [0, 20, 100]
    assert directory.read_evaluations()[20] == {"train_step": 20, "metric": "accuracy", "overall": {"mean": 0.2}}


def test_resuming_forgets_what_came_later_and_a_line_that_a_crash_cut_off(directory):
    directory.prepare(resume=False, overwrite=False)
    for step in (1, 2, 3):
        directory.log_metrics(step, {"x": step})
        directory.log_timing(step, {"step_s": step})
        directory.write_evaluation(step, {})
        directory.write_samples(step, BanditAdapter(), scored_batch(), torch.zeros(4), 4)
        (directory.checkpoints / f"step_00000{step}").mkdir(parents=True)
    with (directory.path / "metrics.jsonl").open("a") as file:
        file.write('{"train_step": 2, "x"')
    directory.forget_after(2)
    assert [line["train_step"] for line in lines_of(directory.path / "metrics.jsonl")] == [1, 2]
    assert [line["train_step"] for line in lines_of(directory.path / "timing.jsonl")] == [1, 2]
    for folder in ("eval", "samples", "checkpoints"):
        found = sorted(path.stem for path in (directory.path / folder).glob("step_*"))
        assert found == ["step_000001", "step_000002"]


def test_metrics_are_never_lost_to_a_crash_while_they_are_rewritten(directory, monkeypatch):
    directory.prepare(resume=False, overwrite=False)
    directory.log_metrics(1, {"x": 1})
    directory.log_metrics(2, {"x": 2})

    def crash(path, text):
        raise KeyboardInterrupt

    before = (directory.path / "metrics.jsonl").read_bytes()
    monkeypatch.setattr(run_dir_module, "replace_text", crash)
    with pytest.raises(KeyboardInterrupt):
        directory.forget_after(1)
    assert (directory.path / "metrics.jsonl").read_bytes() == before


def test_samples_are_what_a_person_wants_to_know_of_a_rollout(directory):
    directory.prepare(resume=False, overwrite=False)
    batch = scored_batch()
    directory.write_samples(3, BanditAdapter(), batch, torch.tensor([0.5, -0.5, 0.0, torch.nan]), 9)
    lines = lines_of(directory.path / "samples" / "step_000003.jsonl")
    assert len(lines) == 4
    assert lines[0] == {
        "train_step": 3, "task_id": "train/0", "domain": "context0", "group": 0, "seed": 0, "prompt": "context 0",
        "completion": " ".join(map(str, batch.outcomes[0])), "reference": "0", "reward": 1.0, "reward_terms": {"accuracy": 1.0},
        "advantage": 0.5, "stop_reason": "stop", "num_decisions": 1, "media": [],
    }  # fmt: skip
    assert [line["reward"] for line in lines] == [1.0, 0.0, None, 0.333333]
    assert lines[2]["reward_terms"] == {"accuracy": None}
    assert lines[3]["advantage"] is None


def test_no_more_samples_are_written_than_asked_for(directory):
    directory.prepare(resume=False, overwrite=False)
    directory.write_samples(1, BanditAdapter(), scored_batch(), torch.zeros(4), 3)
    assert len(lines_of(directory.path / "samples" / "step_000001.jsonl")) == 3


def test_media_that_rollouts_of_a_group_share_are_written_once(directory):
    class Pictured(BanditAdapter):
        def describe(self, batch, row):
            shared = Media(kind="image", data=f"group {int(batch.group_ids[row])}".encode(), suffix=".png", caption="before")
            own = Media(kind="video", data=f"row {row}".encode(), suffix=".mp4")
            return Sample(prompt="p", completion="ü", media=(shared, own))

    directory.prepare(resume=False, overwrite=False)
    directory.write_samples(5, Pictured(), scored_batch(), torch.zeros(4), 4)
    text = (directory.path / "samples" / "step_000005.jsonl").read_text(encoding="utf-8")
    assert "ü" in text
    media = [line["media"] for line in map(json.loads, text.splitlines())]
    assert media[0][0] == {"kind": "image", "path": "samples/media/step_000005_0_0.png", "caption": "before"}
    assert media[1][0] == media[0][0]
    assert media[2][0] != media[0][0]
    files = {path.name: path.read_bytes() for path in (directory.path / "samples" / "media").iterdir()}
    assert len(files) == 2 + 4
    for row, entries in enumerate(media):
        assert (directory.path / entries[0]["path"]).read_bytes() == f"group {row // 2}".encode()
        assert (directory.path / entries[1]["path"]).read_bytes() == f"row {row}".encode()


def test_a_failure_is_kept_in_words_whatever_it_holds(directory, tmp_path):
    directory.prepare(resume=False, overwrite=False)
    path = directory.write_failure("reward", {"error": "früh", "what": tmp_path})
    assert path == directory.path / "failure" / "reward.json"
    assert json.loads(path.read_text(encoding="utf-8")) == {"error": "früh", "what": str(tmp_path)}
