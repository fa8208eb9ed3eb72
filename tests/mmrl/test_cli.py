"""`mmrl.cli`: help that comes at once, one-line errors, exit codes, and a run of the bandit through every command."""

import argparse
import json
import os
import resource
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from mmrl import __version__, cli
from mmrl.config import RunConfig
from mmrl.testing import BanditAdapter, share_of_right_arms

ROOT = Path(__file__).parents[2]
DIGITS = "configs/vision/read_digits.yaml"
COMMANDS = [["train"], ["eval"], ["check"], ["export"], ["show"], ["schema"], ["report"], ["list"], ["data"],
            ["data", "check"], ["data", "show"], ["replay"], ["reward"], ["reward", "lint"]]  # fmt: skip


@pytest.fixture
def bandit_file(bandit_config, monkeypatch):
    """A config file of a modality that these tests add, and the adapter that it gets."""
    config = bandit_config()
    path = config.output_dir / "bandit.yaml"
    path.write_text(yaml.safe_dump(json.loads(config.model_dump_json())))
    monkeypatch.setitem(cli.MODALITIES, "bandit", ("mmrl.config:RunConfig", "mmrl.testing:BanditAdapter"))
    monkeypatch.setattr(cli, "build_adapter", lambda config: BanditAdapter())
    return path


def run(capsys, *arguments):
    """Exit code, standard output and standard error."""
    try:
        code = cli.main([str(argument) for argument in arguments])
    except SystemExit as stop:
        code = stop.code
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def assert_refused(result, *parts):
    """Exit code 2 and one line on standard error that holds ``parts``."""
    code, out, err = result
    assert (code, out) == (2, "")
    assert err.startswith("mmrl: ")
    assert err.count("\n") == 1
    assert all(part in err for part in parts), err


# Help


@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
def test_every_command_explains_itself(capsys, command):
    code, out, err = run(capsys, *command, "--help")
    assert (code, err) == (0, "")
    assert out.startswith(f"usage: mmrl {' '.join(command)} [-h]")
    assert len(out.split("\n\n")[1].split()) >= 4  # a summary in words


def parsers(parser, name="mmrl"):
    """The parser and those of its commands, by name."""
    found = {name: parser}
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for command, child in action.choices.items():
                found |= parsers(child, f"{name} {command}")
    return found


@pytest.mark.parametrize("parser", parsers(cli.build_parser()).values(), ids=parsers(cli.build_parser()))
def test_every_option_has_a_word_of_help(parser):
    for action in parser._actions:
        assert action.help or not action.option_strings, action.dest


def test_the_list_of_commands_says_what_each_is_for(capsys):
    code, out, _ = run(capsys, "--help")
    assert code == 0
    for command in COMMANDS:
        assert len(command) > 1 or any(line.split()[:1] == command and len(line.split()) > 3 for line in out.splitlines())
    assert "configs/vision/read_digits.yaml" in out
    assert (ROOT / DIGITS).is_file()


@pytest.mark.parametrize("command", [[], *COMMANDS], ids=lambda command: " ".join(command) or "mmrl")
def test_help_takes_less_than_half_a_second_of_work(command):
    def work():
        usage = resource.getrusage(resource.RUSAGE_CHILDREN)
        return usage.ru_utime + usage.ru_stime

    before = work()
    subprocess.run([sys.executable, "-m", "mmrl.cli", *command, "--help"], cwd=ROOT, check=True, stdout=subprocess.DEVNULL)
    assert work() - before < 0.5


def test_the_version_is_printed(capsys):
    assert run(capsys, "--version")[:2] == (0, f"mmrl {__version__}\n")


# Errors (S6)


def test_an_unknown_command_lists_the_known_ones(capsys):
    code, out, err = run(capsys, "trian")
    assert (code, out) == (2, "")
    assert "'trian'" in err
    assert all(f"{command[0]}" in err for command in COMMANDS)
    assert run(capsys)[0] == 2


@pytest.mark.parametrize(
    ("overrides", "parts"),
    [
        (["optimizer.lerning_rate=1e-3"], ["optimizer.lerning_rate is not a known key", "did you mean 'learning_rate'?"]),
        (["seed=x"], ["seed is 'x'", "integer"]),
        (["trainer.num_steps=0"], ["trainer.num_steps is 0", "greater than 0"]),
        (["algorithm=grop"], ["unknown algorithm 'grop'; did you mean 'grpo'?"]),
        (
            ["policy.path=[]", "rollout.temprature=1"],
            ["policy.path is []", "rollout.temprature", "did you mean 'temperature'?"],
        ),
        (["modality=vison"], ["modality is 'vison'; expected one of: vision"]),
        (["seed"], ["override 'seed': expected section.key=value"]),
        (["algorithm=sft", "evaluation=3"], ["evaluation is 3"]),
    ],
    ids=lambda value: value[0] if isinstance(value, list) else None,
)
def test_a_wrong_config_is_one_line_with_the_closest_name(capsys, monkeypatch, overrides, parts):
    monkeypatch.chdir(ROOT)
    assert_refused(run(capsys, "show", DIGITS, *overrides), *parts)


def test_a_config_that_is_not_there_is_one_line(capsys, tmp_path):
    assert_refused(run(capsys, "train", tmp_path / "absent.yaml"), "absent.yaml: no such file")
    (tmp_path / "broken.yaml").write_text("trainer: [")
    assert_refused(run(capsys, "check", tmp_path / "broken.yaml"), "broken.yaml: not YAML")
    assert_refused(run(capsys, "report", tmp_path), "holds none of config.yaml, metrics.jsonl")
    assert_refused(run(capsys, "list", "grop"), "did you mean 'grpo'?")


def test_debug_shows_where_an_error_comes_from(capsys, tmp_path):
    with pytest.raises(cli.MMRLError):
        cli.main(["--debug", "show", str(tmp_path / "absent.yaml")])


def test_a_package_of_the_same_name_that_is_not_ours_is_refused(capsys, monkeypatch, bandit_file):
    monkeypatch.setitem(cli.MODALITIES, "bandit", ("json.decoder:JSONDecoder", ""))
    assert_refused(run(capsys, "show", bandit_file), "the package 'json' was imported from", "not part of this project")


# Commands


def test_show_prints_a_config_that_shows_the_same(capsys, bandit_file, tmp_path):
    code, out, err = run(capsys, "show", bandit_file, "algorithm=dapo", "trainer.num_steps=3")
    assert (code, err) == (0, "")
    assert yaml.safe_load(out)["algorithm"]["clip_high"] == 0.28
    again = tmp_path / "again.yaml"
    again.write_text(out)
    assert run(capsys, "show", again) == (0, out, "")


def test_schema_is_the_one_of_the_config_class(capsys):
    code, out, _ = run(capsys, "schema", "vision")
    assert code == 0
    assert set(RunConfig.model_fields) < set(json.loads(out)["properties"])


def test_list_names_every_preset_and_explains_one(capsys):
    code, out, _ = run(capsys, "list")
    assert code == 0
    assert [line.split()[0] for line in out.splitlines()][:2] == ["grpo", "dr_grpo"]
    code, out, _ = run(capsys, "list", "dapo")
    assert code == 0
    assert "arXiv 2503.14476" in out
    assert any(line.split()[:2] == ["clip_high", "0.28"] for line in out.splitlines())
    code, out, _ = run(capsys, "list", "policies")
    assert code == 0
    assert "tiny-qwen2.5-vl" in out


def test_train_prints_a_line_per_step_and_where_everything_is(capsys, bandit_file, tmp_path):
    code, out, err = run(capsys, "train", bandit_file, "trainer.num_steps=3", "--cpu")
    assert (code, err) == (0, "")
    lines = out.splitlines()
    assert lines[0].startswith(f"run {tmp_path}/bandit  algorithm grpo  trainable weights 20  seed 0")
    header = lines[1].split()
    assert header[:4] == ["step", "reward", "accuracy", "signal"]
    steps = [line.split() for line in lines if line.split()[0] in ("1", "2", "3")]
    assert [cells[0] for cells in steps] == ["1", "2", "3"]
    assert {len(cells) for cells in steps} == {len(header)}
    assert any(line.startswith("held-out accuracy at step 0: 0.250 (n 12)") for line in lines)
    assert "difference" in out
    policy, report = lines[-2].split()[-1], lines[-1].split()[-1]
    assert (Path(policy) / "model.safetensors").is_file()
    assert Path(report).read_text().startswith("<!doctype html>")


def test_an_existing_run_is_refused_resumed_or_replaced(capsys, bandit_file):
    train = ["train", bandit_file, "trainer.num_steps=3", "--cpu"]
    assert run(capsys, *train)[0] == 0
    code, _, err = run(capsys, *train)
    assert code == 2
    assert "already holds a run" in err
    code, out, _ = run(capsys, "train", bandit_file, "trainer.num_steps=4", "--cpu", "--resume")
    assert code == 0
    assert "at step 3." in out
    code, out, err = run(capsys, "train", bandit_file, "optimizer.learning_rate=1", "--cpu", "--resume")
    assert code == 2
    assert "optimizer.learning_rate: 0.1 -> 1.0" in err
    assert "Traceback" not in err
    assert run(capsys, *train, "--overwrite")[0] == 0


def test_sigterm_ends_a_run_with_exit_code_0_after_a_checkpoint(bandit_file, in_child, monkeypatch, tmp_path):
    def stopping(task, outcome):
        if task.id.startswith("train/"):
            os.kill(os.getpid(), signal.SIGTERM)
        return share_of_right_arms(task, outcome)

    monkeypatch.setattr(cli, "build_adapter", lambda config: BanditAdapter(reward_terms={"accuracy": stopping}))
    assert in_child(lambda: cli.main(["train", str(bandit_file), "--cpu"])) == 0
    assert (tmp_path / "bandit" / "checkpoints" / "step_000001" / "manifest.json").is_file()
    assert len((tmp_path / "bandit" / "metrics.jsonl").read_text().splitlines()) == 1


def test_a_failing_reward_ends_a_run_with_exit_code_2_and_one_line(capsys, bandit_file, monkeypatch):
    def fragile(task, outcome):
        return 1 / 0 if task.id.startswith("train/") else 0.0

    monkeypatch.setattr(cli, "build_adapter", lambda config: BanditAdapter(reward_terms={"accuracy": fragile}))
    code, _, err = run(capsys, "train", bandit_file, "--cpu")
    assert code == 2
    assert err.count("\n") == 1
    assert "reward 'accuracy' raised ZeroDivisionError on task 'train/" in err
    assert "Checkpoint of step 0 written." in err


def test_eval_measures_a_checkpoint_and_writes_the_result(capsys, bandit_file, tmp_path):
    assert run(capsys, "train", bandit_file, "trainer.num_steps=20", "optimizer.learning_rate=0.3", "--cpu")[0] == 0
    checkpoint = tmp_path / "bandit" / "checkpoints" / "step_000020"
    results = []
    for options in ([], ["--checkpoint", checkpoint]):
        code, out, _ = run(capsys, "eval", bandit_file, *options, "--output", tmp_path / "result.json")
        assert code == 0
        assert "held-out accuracy" in out
        results.append(json.loads((tmp_path / "result.json").read_text())["overall"]["mean"])
    code, _, _ = run(
        capsys, "eval", bandit_file, "--checkpoint", checkpoint.parent / "latest", "--output", tmp_path / "result.json"
    )
    assert code == 0 and json.loads((tmp_path / "result.json").read_text())["overall"]["mean"] == results[1]
    assert results[0] == 0.25
    assert results[1] == json.loads((tmp_path / "bandit" / "eval" / "step_000020.json").read_text())["overall"]["mean"] > 0.5
    (checkpoint / "policy" / "model.safetensors").unlink()
    assert_refused(run(capsys, "eval", bandit_file, "--checkpoint", checkpoint), "the file is missing", "step_000019")


def test_check_does_one_step_and_leaves_no_run_behind(capsys, bandit_file, tmp_path):
    code, out, _ = run(capsys, "check", bandit_file)
    assert code == 0
    assert "optimizer/gradient_norm" in out
    assert "one rollout and one update went through" in out
    assert not (tmp_path / "bandit").exists()


def test_a_closed_pipe_is_no_error():
    reader, writer = os.pipe()
    os.close(reader)
    command = [sys.executable, "-m", "mmrl.cli", "schema", "vision"]
    result = subprocess.run(command, cwd=ROOT, stdout=writer, stderr=subprocess.PIPE, text=True)
    os.close(writer)
    assert (result.returncode, result.stderr) == (0, "")


def test_overrides_may_follow_options(capsys):
    config = str(Path(__file__).parents[2] / "configs" / "vision" / "read_digits.yaml")
    assert cli.main(["eval", config, "--checkpoint", "nowhere", "trainer.num_stepz=3"]) == 2
    assert "did you mean 'num_steps'" in capsys.readouterr().err  # the override was read, and before the checkpoint
    with pytest.raises(SystemExit) as stopped:
        cli.main(["show", config, "--no-such-option"])
    assert stopped.value.code == 2
