"""`mmrl.ladder` against the oracles of vision.md 1.2, and the promise that the order holds from the file to the update."""

import json
from collections import Counter
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mmrl.chat import ChatTask
from mmrl.collection import _next_tasks as next_tasks
from mmrl.config import RunConfig, validate
from mmrl.errors import CheckpointError, ConfigError, DataError
from mmrl.ladder import (
    MIXING,
    NUM_LEVELS,
    LadderSampler,
    Rung,
    ladder_order,
    level_of,
    mixed_order,
    mixing_row,
    read_rungs,
    window_start,
)
from mmrl.pools import FilteredSampler, build_sampler
from mmrl.sampling_config import SamplingConfig
from mmrl.types import Task

PUBLISHED = (300, 720, 1000, 1500, 2700, 3000, 3000, 3980, 3820)
"""Tasks of each level of the published set."""


def rungs_of(counts):
    return [Rung(difficulty=level / 8, complexity=float(place)) for level, count in enumerate(counts) for place in range(count)]


def tasks_of(pairs):
    return [
        ChatTask(id=f"q{i}", difficulty=d, messages=(), columns={} if c is None else {"complexity": c})
        for i, (d, c) in enumerate(pairs, start=1)
    ]


GRADED = tasks_of([(i % 9 / 8, 100 - i) for i in range(40)])


def ids(tasks):
    return [task.id for task in tasks]


def test_tasks_stand_by_difficulty_and_then_by_complexity():
    rungs = [Rung(difficulty=d, complexity=c) for d, c in [(0.5, 231), (0.25, 180), (0.5, 190), (0, 100), (1, 50)]]
    assert ladder_order(rungs) == [3, 1, 2, 0, 4]


def test_equals_stay_in_order():
    assert ladder_order([Rung(difficulty=0.5, complexity=7.0)] * 4) == [0, 1, 2, 3]


@pytest.mark.parametrize(("slot", "expected"), [(3, [0.125, 0.25, 0.375, 0.5, 0.625]), (7, [0.5, 0.625, 0.75, 0.875, 1])])
def test_windows(slot, expected):
    start = window_start(slot)
    assert [level / 8 for level in range(start, start + 5)] == expected


def test_all_windows_start_where_the_figure_has_them():
    assert [window_start(level) for level in range(NUM_LEVELS)] == [0, 0, 0, 1, 2, 3, 4, 4, 4]
    assert all(len(row) == 5 for row in MIXING) and len(MIXING) == NUM_LEVELS
    assert all(abs(sum(row) - 1) < 0.0041 and sum(mixing_row(i)) == pytest.approx(1) for i, row in enumerate(MIXING))


def test_expected_draws_of_the_middle_slot():
    draws = [2700 * share for share in mixing_row(4)]
    assert draws == pytest.approx([75.7, 186.5, 1573.0, 500.0, 364.9], abs=0.05)


def test_levels_are_the_nearest_ones():
    assert [level_of(i / 8) for i in range(9)] == list(range(9))
    assert [level_of(d) for d in (0.06, 0.0625, 1 / 3, 0.95)] == [0, 1, 3, 8]


@settings(max_examples=60, deadline=None)
@given(counts=st.lists(st.integers(0, 12), min_size=9, max_size=9).filter(any), seed=st.integers(0, 99))
def test_a_mixture_is_every_task_once_and_by_complexity_within_a_level(counts, seed):
    rungs = rungs_of(counts)
    order = mixed_order(rungs, np.random.default_rng(seed))
    assert sorted(order) == list(range(len(rungs)))
    for level in range(NUM_LEVELS):
        members = [rungs[index].complexity for index in order if rungs[index].difficulty == level / 8]
        assert members == sorted(members)


def test_the_published_set_is_mixed_by_the_published_rows():
    rungs = rungs_of(PUBLISHED)
    order = [level_of(rungs[index].difficulty) for index in mixed_order(rungs, np.random.default_rng(0))]
    # The slots of level 0 and .125 come first, and no level of their window runs dry.
    for start, count, row in [(0, 300, mixing_row(0)), (300, 720, mixing_row(1))]:
        found = Counter(order[start : start + count])
        for level, share in enumerate(row):
            assert found[level] == pytest.approx(count * share, abs=4 * (count * share) ** 0.5)
    # From slot .375 on nothing of level 0 is drawn: it was emptied before the window left it.
    left = order[300 + 720 + 1000 + 300 :]  # more than the slots of the first three levels and the emptied level
    assert 0 not in left and max(order[:2000]) == 4
    means = [np.mean(order[i : i + 2000]) for i in range(0, 20000, 2000)]
    assert means == sorted(means)


@settings(max_examples=60, deadline=None)
@given(counts=st.lists(st.integers(0, 30), min_size=9, max_size=9), seed=st.integers(0, 99))
def test_no_task_is_drawn_outside_of_the_window(counts, seed):
    rungs = rungs_of(counts)
    slot = 0
    for index in mixed_order(rungs, np.random.default_rng(seed)):
        level = level_of(rungs[index].difficulty)
        slots = [i for i in range(NUM_LEVELS) if window_start(i) <= level < window_start(i) + 5]
        slot = max(slot, slots[0])  # the curriculum never goes back
        assert slot <= slots[-1]


def test_a_ladder_without_mixing_is_the_sorted_list():
    sampler = build_sampler(SamplingConfig(ladder={"mixing": False}), GRADED, 0)
    expected = sorted(GRADED, key=lambda task: (task.difficulty, task.columns["complexity"]))
    assert ids(sampler.next(40)) == ids(expected)
    assert ids(sampler.next(3)) == ids(expected[:3])  # a new epoch


def test_each_epoch_mixes_anew_and_each_seed_in_its_own_way():
    first, second = (build_sampler(SamplingConfig(ladder={}), GRADED, seed) for seed in (0, 1))
    epochs = [ids(first.next(40)), ids(first.next(40)), ids(second.next(40))]
    assert all(set(epoch) == set(ids(GRADED)) for epoch in epochs)
    assert epochs[0] != epochs[1] != epochs[2] != epochs[0]
    assert epochs[0] == ids(build_sampler(SamplingConfig(ladder={}), GRADED, 0).next(40))


@given(position=st.integers(0, 90), mixing=st.booleans())
@settings(max_examples=20, deadline=None)
def test_a_resumed_ladder_goes_on_where_it_was(position, mixing):
    walked, resumed = (build_sampler(SamplingConfig(ladder={"mixing": mixing}), GRADED, 5) for _ in range(2))
    walked.next(position)
    resumed.load_state(json.loads(json.dumps(walked.state())))
    assert ids(walked.next(30)) == ids(resumed.next(30))


def test_a_ladder_does_not_go_on_with_other_difficulties():
    state = build_sampler(SamplingConfig(ladder={}), GRADED, 0).state()
    other = tasks_of([(i % 9 / 8, 101 - i) for i in range(40)])
    with pytest.raises(CheckpointError, match=r"other difficulties or complexities.*restore the profile"):
        build_sampler(SamplingConfig(ladder={}), other, 0).load_state(state)


@pytest.mark.parametrize("num_processes", [1, 2, 4])
def test_processes_share_the_steps_of_one_ladder(num_processes):
    tree = {"modality": "x", "name": "x", "rewards": {"a": 1}, "trainer": {"num_steps": 1}}
    config = validate(tree | {"sampling": {"tasks_per_step": 8, "ladder": {}}}, RunConfig, "test")
    samplers = [build_sampler(config.sampling, GRADED, 7) for _ in range(num_processes)]
    ranks = [SimpleNamespace(num_processes=num_processes, process_index=rank) for rank in range(num_processes)]
    steps = [
        [task for sampler, rank in zip(samplers, ranks) for task in next_tasks(config, sampler, rank)[0]] for _ in range(5)
    ]
    assert ids(task for step in steps for task in step) == ids(build_sampler(config.sampling, GRADED, 7).next(40))


def test_the_difficulty_of_what_was_drawn_is_logged():
    sampler = build_sampler(SamplingConfig(ladder={"mixing": False}), GRADED, 0)
    sampler.next(5)
    sampler.next(5)
    assert sampler.totals() == {"sampling/difficulty": (5 * 0.125, 10), "sampling/kept": (40, 40)}
    assert sampler.totals()["sampling/difficulty"] == (0.0, 0)


def test_tasks_that_nothing_could_grade_and_easy_short_ones_are_left_out():
    source = tasks_of([(0.0, 50), (None, 70), (0.0, 90), (0.5, 10), (1.0, None)])
    assert set(read_rungs(source)) == {0, 2, 3, 4}
    assert read_rungs(source)[4] == Rung(difficulty=1.0, complexity=0.0)
    sampler = LadderSampler(source, seed=0, mixing=False, drop_solved_below=60)
    assert ids(sampler.next(3)) == ["q3", "q4", "q5"]
    assert sampler.totals()["sampling/kept"] == (3, 5)


def test_a_profile_file_is_matched_by_id(tmp_path):
    path = tmp_path / "profile.jsonl"
    rows = [{"id": f"t{i}", "answer": str(i), "difficulty": 1 - i / 4, "complexity": 9.0} for i in range(5)]
    path.write_text("".join(json.dumps(row) + "\n" for row in reversed(rows)))
    source = [ChatTask(id=f"t{i}", answer=str(i), messages=()) for i in range(5)]
    sampler = build_sampler(SamplingConfig(ladder={"profile": str(path), "mixing": False}), source, 0)
    assert ids(sampler.next(5)) == ["t4", "t3", "t2", "t1", "t0"]
    assert read_rungs([Task(id="t1")], path) == {0: Rung(difficulty=0.75, complexity=9.0)}
    with pytest.raises(DataError, match="has no row with id 't9'; profile all tasks of this config"):
        read_rungs([Task(id="t9")], path)
    with pytest.raises(DataError, match="'t1' is answered '1' there and '8' here; profile the tasks of this config and seed"):
        read_rungs([ChatTask(id="t1", answer="8", messages=())], path)
    path.write_text('{"id": "t1", "hardness": 1}\n')
    with pytest.raises(DataError, match="has no column 'difficulty'; expected the output of mmrl data profile"):
        read_rungs([Task(id="t1")], path)


@pytest.mark.parametrize(("difficulty", "complexity"), [(1.5, 10), (-0.1, 10), (0.5, -1), (float("inf"), 1), (0.5, "long")])
def test_numbers_that_no_profile_writes_are_refused(difficulty, complexity):
    with pytest.raises(DataError, match=r"task 'q1' has difficulty .* expected a share of wrong completions in \[0, 1\]"):
        read_rungs(tasks_of([(difficulty, complexity)]))


def test_a_source_without_difficulties_is_refused():
    with pytest.raises(DataError, match="none of 2 tasks has a difficulty; measure it with mmrl data profile"):
        build_sampler(SamplingConfig(ladder={}), tasks_of([(None, 1), (None, 2)]), 0)
    with pytest.raises(DataError, match="none of 2 tasks is left; 1 cannot be graded and 1 are always solved"):
        build_sampler(SamplingConfig(ladder={"drop_solved_below": 9}), tasks_of([(None, 1), (0, 2)]), 0)


def test_a_filter_leaves_a_ladder_of_what_it_keeps():
    sampler = build_sampler(SamplingConfig(filter={"rollouts": 2}, ladder={"mixing": False}), GRADED, 0)
    assert isinstance(sampler, FilteredSampler)
    sampler.prepare(lambda tasks, rollouts, round=0: [SimpleNamespace(pass_rate=1 - task.difficulty) for task in tasks])
    assert [task.difficulty for task in sampler.next(36)] == sorted(t.difficulty for t in GRADED if t.difficulty < 1)


@pytest.mark.parametrize("other", [{"domains": {}}, {"pairs": {}}])
def test_a_ladder_stands_alone(other):
    with pytest.raises(ConfigError, match=r"ladder and .* each say which tasks come next; keep one of them"):
        validate({"ladder": {}, **other}, SamplingConfig, "test")
