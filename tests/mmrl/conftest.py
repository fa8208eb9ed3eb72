"""What tests of the core share: a bandit run that takes milliseconds, and how to compare what runs leave behind."""

import copy
import os
import traceback

import pytest

from mmrl.config import RunConfig, validate

BANDIT = {
    "modality": "bandit",
    "name": "bandit",
    "rewards": {"accuracy": 1.0},
    "sampling": {"tasks_per_step": 4, "group_size": 4},
    "optimizer": {"learning_rate": 0.1},
    "trainer": {"num_steps": 6},
    "evaluation": {"num_tasks": 12},
    "checkpoint": {"every": 1},
    "metrics": {"samples_every": 2},
}


def merged(tree, changes):
    """``tree`` with nested ``changes``; rewards are replaced as a whole."""
    result = copy.deepcopy(tree)
    for key, value in changes.items():
        nested = isinstance(value, dict) and isinstance(result.get(key), dict) and key != "rewards"
        result[key] = merged(result[key], value) if nested else value
    return result


@pytest.fixture
def bandit_config(tmp_path):
    """``bandit_config(trainer={"num_steps": 3})``: a run below ``tmp_path``."""
    return lambda **changes: validate(merged(BANDIT | {"output_dir": str(tmp_path)}, changes), RunConfig, "test")


@pytest.fixture
def files_of():
    """``files_of(run_dir)``: bytes by relative path of all files that a config determines (not of seconds and failures)."""

    def read(directory):
        files = {str(path.relative_to(directory)): path for path in sorted(directory.rglob("*")) if path.is_file()}
        ignored = (".lock", "timing.jsonl", "failure/")
        return {name: path.read_bytes() for name, path in files.items() if not name.startswith(ignored)}

    return read


@pytest.fixture
def in_child():
    """``in_child(function)``: its exit status as `subprocess` counts it, from a forked process, which has torch already."""

    def run(function):
        child = os.fork()
        if child == 0:
            status = 1
            try:
                status = function() or 0
            except BaseException:
                traceback.print_exc()
            finally:
                os._exit(status)
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])

    return run
