"""`mmrl.profiling`: what it measures, that it goes on after an interruption, and that the reader takes what it writes."""

import json
from types import SimpleNamespace

import pytest

from mmrl.config import validate
from mmrl.data import DatasetConfig, read_tasks
from mmrl.errors import ConfigError, DataError, RewardError
from mmrl.ladder import read_rungs
from mmrl.profiling import Measurement, level_table, measure, profile, profiled_row, write_rows
from mmrl.rewards import resolve_terms
from mmrl.testing import BanditAdapter
from mmrl.trainer import Trainer


def run_profile(config, output, adapter=None, **options):
    adapter = adapter or BanditAdapter()
    terms = resolve_terms(config.rewards, adapter.reward_terms)
    return profile(config, adapter, adapter.build_policy(), terms, output=output, **options)


def lines_of(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_difficulty_and_complexity_of_the_document():
    flags = (True, False, False, False, True, False, True, True)
    entry = Measurement(index=0, id="q", correct=flags, lengths=(210, 250, 260, 240, 190, 280, 200, 218))
    assert (entry.difficulty, entry.complexity) == (0.5, 231.0)


def test_attempts_that_cannot_be_graded_count_for_complexity_only():
    entry = Measurement(index=0, id="q", correct=(None, True, False, True), lengths=(10, 2, 2, 2))
    assert (entry.difficulty, entry.complexity) == (pytest.approx(1 / 3), 4.0)
    assert Measurement(index=0, id="q", correct=(None, None), lengths=(1, 1)).difficulty is None


def test_a_measurement_counts_correct_rollouts_and_decisions(bandit_config):
    config, adapter = bandit_config(algorithm={"correct_above": 0.6}), BanditAdapter()
    tasks = [(index, adapter.task_source("train")[index]) for index in (0, 1, 2)]
    terms = resolve_terms(config.rewards, adapter.reward_terms)
    policy = adapter.build_policy()
    found = measure(config, adapter, policy, terms, tasks, 200)
    assert [entry.index for entry in found] == [0, 1, 2] and [entry.id for entry in found] == ["train/0", "train/1", "train/2"]
    assert [set(entry.lengths) for entry in found] == [{1}, {2}, {3}]
    right = policy.weight.softmax(dim=-1).diagonal().tolist()
    # One choice must be right, two of two, and two of three.
    chances = [right[0], right[1] ** 2, right[2] ** 3 + 3 * right[2] ** 2 * (1 - right[2])]
    assert [1 - entry.difficulty for entry in found] == pytest.approx(chances, abs=0.11)


def test_a_task_is_measured_alike_whatever_it_is_batched_with(bandit_config, tmp_path):
    whole = run_profile(bandit_config(sampling={"tasks_per_step": 24}), tmp_path / "a.jsonl")
    parts = run_profile(bandit_config(sampling={"tasks_per_step": 4}), tmp_path / "b.jsonl")
    assert whole == parts
    assert whole != run_profile(bandit_config(seed=1), tmp_path / "c.jsonl")
    assert len({entry.correct for entry in whole}) > 1


def test_a_profile_goes_on_after_an_interruption(bandit_config, tmp_path):
    output, config, calls = tmp_path / "out.jsonl", bandit_config(), []

    class Counting(BanditAdapter):
        def rollout(self, policy, tasks, **options):
            calls.extend(task.id for task in tasks)
            if len(calls) > stop_after:
                raise KeyboardInterrupt
            return super().rollout(policy, tasks, **options)

    stop_after = 10
    with pytest.raises(KeyboardInterrupt):
        run_profile(config, output, Counting())
    assert calls == [f"train/{i}" for i in range(12)] and not output.exists()
    log = tmp_path / "out.jsonl.measured"
    assert len(lines_of(log)) == 1 + 8
    log.write_text(log.read_text() + '{"index": 8, "id": "tr')  # killed while writing
    calls.clear()
    stop_after = 99
    seen = []
    resumed = run_profile(config, output, Counting(), on_progress=lambda done, total: seen.append((done, total)))
    assert calls == [f"train/{i}" for i in range(8, 24)] and seen == [(12, 24), (16, 24), (20, 24), (24, 24)]
    assert resumed == run_profile(config, tmp_path / "other.jsonl") and not log.exists()
    assert output.read_bytes() == (tmp_path / "other.jsonl").read_bytes()


def test_a_profile_does_not_go_on_with_other_settings(bandit_config, tmp_path):
    output = tmp_path / "out.jsonl"

    class Failing(BanditAdapter):
        def rollout(self, policy, tasks, **options):
            if tasks[0].id != "train/0":
                raise KeyboardInterrupt
            return super().rollout(policy, tasks, **options)

    with pytest.raises(KeyboardInterrupt):
        run_profile(bandit_config(), output, Failing())
    with pytest.raises(ConfigError, match=r"begun with other settings \(seed, samples\); restore them, delete the file"):
        run_profile(bandit_config(seed=4), output, samples=3)

    class Other(BanditAdapter):
        def build_policy(self):
            policy = super().build_policy()
            policy.weight.data += 1
            return policy

    with pytest.raises(ConfigError, match=r"\(policy\)"):
        run_profile(bandit_config(), output, Other())


def test_a_reward_that_fails_ends_the_profile_and_keeps_what_was_measured(bandit_config, tmp_path):
    def broken(task, outcome):
        if task.id == "train/9":
            raise ValueError("no")
        return 1.0

    with pytest.raises(RewardError, match="train/9"):
        run_profile(bandit_config(), tmp_path / "out.jsonl", BanditAdapter(reward_terms={"accuracy": broken}))
    assert len(lines_of(tmp_path / "out.jsonl.measured")) == 1 + 8


@pytest.mark.parametrize("suffix", ["jsonl", "parquet"])
def test_the_dataset_reader_takes_what_is_written(tmp_path, suffix):
    rows = [
        {"question": "one?", "answer": 1, "meta": {"page": 3}, "difficulty": "easy"},
        {"question": "two?", "answer": 2, "meta": {"page": None}, "difficulty": None},
    ]
    (tmp_path / "pool.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    config = validate({"path": "pool.jsonl", "columns": {"prompt": "question", "difficulty": None}}, DatasetConfig, "pool")
    source = read_tasks(config, base_dir=tmp_path)
    entries = [
        Measurement(index=1, id=source[1].id, correct=(True, False), lengths=(30, 50)),
        Measurement(index=0, id=source[0].id, correct=(False, False), lengths=(7, 8)),
    ]
    output = tmp_path / f"profiled.{suffix}"
    write_rows(output, lambda: (profiled_row(source, entry) for entry in entries))
    profiled = read_tasks(
        validate({"path": output.name, "columns": {"prompt": "question"}}, DatasetConfig, "x"), base_dir=tmp_path
    )
    assert [(task.id, task.answer, task.difficulty, task.columns["complexity"]) for task in profiled] == [
        (source[1].id, "2", 0.5, 40.0), (source[0].id, "1", 1.0, 7.5),
    ]  # fmt: skip
    assert profiled[1].columns["meta"] == {"page": 3}
    assert {i: (rung.difficulty, rung.complexity) for i, rung in read_rungs(profiled).items()} == {
        0: (0.5, 40.0),
        1: (1.0, 7.5),
    }
    assert not list(tmp_path.glob(".*"))


def test_bytes_go_into_parquet_and_not_into_jsonl(tmp_path):
    rows = [{"id": "a", "image": {"bytes": b"\x89PNG", "path": None}, "difficulty": 0.5}]
    rows += [{"id": str(i), "image": {"bytes": b"x", "path": "p"}, "note": "new", "difficulty": None} for i in range(300)]
    write_rows(tmp_path / "x.parquet", lambda: iter(rows))
    import pyarrow.parquet

    read = pyarrow.parquet.read_table(tmp_path / "x.parquet").to_pylist()
    assert read[0]["image"]["bytes"] == b"\x89PNG" and read[300]["note"] == "new" and len(read) == 301
    with pytest.raises(DataError, match=r"x.jsonl: 'a' cannot be JSON .*; choose a name.parquet"):
        write_rows(tmp_path / "x.jsonl", lambda: iter(rows))
    assert not (tmp_path / "x.jsonl").exists()
    with pytest.raises(DataError, match="do not fit into one table"):
        write_rows(tmp_path / "y.parquet", lambda: iter([{"id": "a", "v": 1}, {"id": "b", "v": [1]}]))


def test_solved_tasks_can_be_left_out(bandit_config, tmp_path):
    config = bandit_config(algorithm={"correct_above": 0.3})
    output = tmp_path / "out.jsonl"
    measured = run_profile(config, output, samples=2, drop_solved=True)
    solved = {entry.id for entry in measured if entry.difficulty == 0}
    assert solved and {row["id"] for row in lines_of(output)} == {entry.id for entry in measured} - solved
    with pytest.raises(DataError, match="every one of 24 tasks is always solved"):
        run_profile(bandit_config(algorithm={"correct_above": -1}), tmp_path / "none.jsonl", drop_solved=True)


def test_a_limit_takes_the_first_tasks_and_a_longer_one_goes_on(bandit_config, tmp_path):
    output = tmp_path / "out.jsonl"
    assert len(run_profile(bandit_config(), output, limit=5)) == 5
    assert [row["id"] for row in lines_of(output)] == [f"train/{i}" for i in range(5)]


def test_processes_share_the_tasks(bandit_config, tmp_path, monkeypatch):
    config, adapter = bandit_config(), BanditAdapter()
    alone = run_profile(config, tmp_path / "alone.jsonl")
    asked = []

    class Watched(BanditAdapter):
        def rollout(self, policy, tasks, **options):
            asked.extend(task.id for task in tasks)
            return super().rollout(policy, tasks, **options)

    # A process is handed its own answers and, as if from the other one, what that measures.
    terms = resolve_terms(config.rewards, adapter.reward_terms)

    def gather(accelerator, value):
        if not isinstance(value, list):
            return [value, None]
        done = {entry.index for entry in value}
        step = range(min(done, default=0) // 4 * 4, min(done, default=0) // 4 * 4 + 4)
        tasks = [(i, adapter.task_source("train")[i]) for i in step if i not in done]
        return [value, measure(config, adapter, adapter.build_policy(), terms, tasks, 8)]

    monkeypatch.setattr("mmrl.processes.gather", gather)
    two = SimpleNamespace(num_processes=2, process_index=0, is_main_process=True)
    assert run_profile(config, tmp_path / "two.jsonl", Watched(), accelerator=two) == alone
    assert asked == [f"train/{i}" for i in range(24) if i % 2 == 0]
    assert (tmp_path / "two.jsonl").read_bytes() == (tmp_path / "alone.jsonl").read_bytes()


def test_levels_are_counted_for_people():
    entries = [
        Measurement(index=i, id=str(i), correct=flags, lengths=(10 * i,) * len(flags))
        for i, flags in enumerate([(True, True), (False, True), (False, True), (None,)])
    ]
    table = level_table(entries)
    rows = list(zip(*(column.cells for column in table.columns)))
    assert rows[0] == ("0", "1", "0.250", "0.0") and rows[4] == ("0.5", "2", "0.500", "15.0")
    assert rows[8] == ("1", "0", "0.000", "-") and rows[9] == ("ungraded", "1", "0.250", "-")


def test_a_run_climbs_its_profile_and_a_resumed_one_leaves_the_same_files(bandit_config, tmp_path, files_of):
    output = tmp_path / "profile.jsonl"
    run_profile(bandit_config(), output, samples=16)
    ladder = {"sampling": {"ladder": {"profile": str(output), "mixing": False}}}
    Trainer(bandit_config(name="whole", **ladder), BanditAdapter(), cpu=True).run()
    steps = lines_of(tmp_path / "whole" / "metrics.jsonl")
    climbed = [step["sampling/difficulty"] for step in steps]
    assert climbed == sorted(climbed) and climbed[0] < climbed[-1] and steps[0]["sampling/kept"] == 1.0
    Trainer(bandit_config(name="parts", trainer={"num_steps": 3}, **ladder), BanditAdapter(), cpu=True).run()
    Trainer(bandit_config(name="parts", **ladder), BanditAdapter(), cpu=True).run(resume=True)
    whole, parts = files_of(tmp_path / "whole"), files_of(tmp_path / "parts")
    assert whole["metrics.jsonl"] == parts["metrics.jsonl"]
    assert {name for name in whole if name.startswith("samples")} == {name for name in parts if name.startswith("samples")}
    assert all(whole[name] == parts[name] for name in whole if name.startswith("samples"))
