"""``mmrl rollout``: what its files hold, what it refuses to write over, and numbers worked by hand (methods 5.11)."""

import json
import shutil

import numpy as np
import pytest
import torch

from mmrl import cli
from mmrl.checkpoint import write_checkpoint
from mmrl.errors import DataError
from mmrl.heat_map import heat_map_svg
from mmrl.statistics import wilson_interval
from robotics.evaluation import EPISODES, Plan
from robotics.evaluation_actors import ActorSpec
from robotics.evaluation_session import default_directory
from robotics.evaluation_summary import compare, eval_info, summarize, sweep_of


def run(capsys, *arguments):
    code = cli.main(["rollout", *map(str, arguments)])
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def read(path):
    return json.loads(path.read_text())


def record(task, episode, success, **changes):
    return {
        "key": f"{task}/{episode}/seen", "task": task, "goal": "red", "episode": episode, "seed": episode, "variant": "seen",
        "instruction": "go", "perturbation": {}, "success": success, "success_once": True, "progress": 0.5, "sum_reward": 2.0,
        "max_reward": 1.0, "num_steps": 4, "stop_reason": "timeout", "out_of_range": 0, "clipped": 0,
        "initial_state": f"s{episode}",
        **changes,
    }  # fmt: skip


def records(**shares):
    """``reach=(45, 50)``: 45 of 50 episodes succeed."""
    return [record(task, i, i < k) for task, (k, n) in shares.items() for i in range(n)]


@pytest.fixture(scope="module")
def policy_run(tmp_path_factory, adapter):
    """A run directory with a checkpoint of an untrained policy."""
    root = tmp_path_factory.mktemp("runs") / "reach"
    policy = adapter.build_policy()
    with torch.no_grad():
        policy.head.weight.normal_(std=0.3, generator=torch.Generator().manual_seed(1))
    save = lambda directory: adapter.save_policy(policy, directory)  # noqa: E731
    write_checkpoint(root / "checkpoints", 3, save_policy=save, state={}, optimizer={})
    return root


def test_macro_and_micro_means_and_their_intervals():
    summary = summarize(records(reach=(45, 50), lift=(5, 10)), ("reach", "lift"))
    assert summary["macro"]["mean"] == pytest.approx(0.70) and summary["micro"]["mean"] == pytest.approx(0.8333, abs=1e-4)
    reach = summary["per_task"]["reach"]["success"]
    assert (reach["k"], reach["n"], reach["low"], reach["high"]) == (45, 50, *wilson_interval(45, 50))
    assert summary["per_task"]["lift"]["success_once"]["mean"] == 1.0
    assert summary["macro"]["low"] < 0.70 < summary["macro"]["high"]


def test_a_suite_without_a_failure_is_not_certain():
    summary = summarize(records(reach=(10, 10)), ("reach",))
    assert summary["macro"]["low"] == summary["micro"]["low"] == pytest.approx(0.722467, abs=1e-6)
    assert summary["micro"]["high"] == 1.0


def test_two_policies_are_compared_episode_by_episode():
    one = [record("reach", i, i < 9 or i >= 11) for i in range(30)]
    other = [record("reach", i, i >= 9) for i in range(30)]
    found = compare(one, other, ("reach",), name="other")
    assert (found["b"], found["c"], found["k"], found["k_other"], found["n"]) == (9, 2, 28, 21, 30)
    assert found["p"] == pytest.approx(0.065430, abs=1e-6)
    assert found["difference"]["mean"] == pytest.approx(7 / 30) and found["per_task"]["reach"]["b"] == 9
    with pytest.raises(DataError, match="another initial state with other"):
        compare(one, [*other[:-1], {**other[-1], "initial_state": "else"}], ("reach",), name="other")
    with pytest.raises(DataError, match="reach/29/seen: not measured with other"):
        compare(one, other[:-1], ("reach",), name="other")


def test_the_result_has_lerobots_layout_and_the_first_variant_counts():
    plan = Plan(families=("reach", "lift"), num_episodes=2, variants=("seen", "wrong"), sweep={"mass": (0.5, 2.0)})
    rows = records(reach=(1, 2), lift=(2, 2))
    rows += [{**row, "variant": "wrong", "success": False} for row in rows]
    rows += [{**row, "perturbation": {"mass": mass}, "success": mass < 1} for row in rows[:4] for mass in (0.5, 2.0)]
    rows[0] |= {"max_reward": None, "stop_reason": "diverged", "out_of_range": 3}
    info = eval_info(rows, plan, {"control_hz": 20}, seconds=6.0, videos={"reach": ["videos/reach/episode_0.mp4"]})
    assert [task["task_group"] for task in info["per_task"]] == ["reach", "lift"]
    assert info["per_task"][0]["metrics"]["successes"] == [True, False]
    assert info["per_task"][0]["metrics"]["max_rewards"] == [None, 1.0]
    assert info["per_group"]["reach"]["pc_success"] == 50.0 and info["per_group"]["reach"]["avg_max_reward"] == 1.0
    overall = info["overall"]
    assert (overall["pc_success"], overall["n_episodes"], overall["eval_s"]) == (75.0, 4, 6.0)
    assert overall["video_paths"] == info["per_task"][0]["metrics"]["video_paths"] == ["videos/reach/episode_0.mp4"]
    assert info["counts"]["stop_reasons"] == {"diverged": 1, "timeout": 15} and info["counts"]["out_of_range_decisions"] == 3
    against = info["variants"]["wrong"]["against_seen"]
    assert (against["b"], against["c"], against["n"]) == (3, 0, 4)
    sweep = sweep_of(rows, plan)
    assert [(cell["mass"], cell["k"], cell["n"]) for cell in sweep["cells"]] == [(0.5, 4, 4), (2.0, 0, 4)]
    assert sweep["cells"][0]["tasks"]["lift"]["k"] == 2 and heat_map_svg(sweep).startswith("<svg")
    json.dumps(info, allow_nan=False)


def test_the_command_measures_a_run_against_the_expert(capsys, policy_run):
    options = ("--tasks", "reach", "--episodes", 4, "--instructions", "seen,empty", "--versus", "expert", "--device", "cpu")
    code, out, err = run(capsys, policy_run, *options, "--sweep", "servo=0.5:1:2", "mass=1,2")
    assert code == 0, err
    directory = policy_run / "rollouts" / "step_000003-reach"
    assert f"result  {directory / 'eval_info.json'}" in out and "only first (b)" in out and "reach/step_000003" in out
    info = read(directory / "eval_info.json")
    protocol = info["protocol"]
    assert protocol["policy"]["name"] == "reach/step_000003" and protocol["seeds"] == [1_000_000, 1_000_003]
    assert protocol["tasks"] == {"reach": {"scene": "reach/scene.xml", "max_env_steps": 40, "hold_steps": 4}}
    assert protocol["scenes"]["reach/scene.xml"]["gripper_self_test"]["open_reading"] > 95
    assert protocol["instructions"] == ["seen", "empty"] and set(protocol["versions"]) >= {"mmrl", "mujoco", "lerobot"}
    assert protocol == read(directory / "protocol.json") and str(policy_run) not in json.dumps(protocol)
    assert info["comparison"]["name"] == "expert" and info["comparison"]["k_other"] == 4
    assert len((directory / EPISODES).read_text().splitlines()) == 4 * (2 + 4)
    assert len(read(directory / "sweep.json")["cells"]) == 4 and (directory / "sweep.svg").is_file()

    code, _, err = run(capsys, policy_run, *options)
    assert code == 2 and "holds an evaluation; --resume goes on with it, --overwrite replaces it" in err
    code, _, err = run(capsys, policy_run, *options, "--resume", "--seed", 7)
    assert code == 2 and "begun under another protocol" in err and "seeds: [1000000, 1000003] -> [7, 10]" in err

    content = (directory / EPISODES).read_bytes()
    (directory / EPISODES).write_bytes(content[:-30])
    shutil.rmtree(directory / "versus")
    code, _, err = run(capsys, policy_run, *options, "--sweep", "servo=0.5:1:2", "mass=1,2", "--resume")
    assert code == 0, err
    assert (directory / EPISODES).read_bytes() == content
    again = read(directory / "eval_info.json")
    for tree in (info, again):
        tree["overall"].update(eval_s=0, eval_ep_s=0)
    assert again == info
    assert run(capsys, policy_run, *options, "--overwrite")[0] == 0
    assert not (directory / "sweep.json").exists()


def test_an_earlier_evaluation_can_be_compared_with_when_it_was_the_same(capsys, policy_run, tmp_path):
    options = ("--episodes", 3, "--device", "cpu")
    assert run(capsys, "expert", *options, "--output", tmp_path / "expert")[0] == 0
    before = (tmp_path / "expert" / EPISODES).read_bytes()
    code, _, err = run(capsys, policy_run, *options, "--output", tmp_path / "one", "--versus", tmp_path / "expert")
    assert code == 0, err
    assert read(tmp_path / "one" / "eval_info.json")["comparison"]["k_other"] == 3
    assert (tmp_path / "expert" / EPISODES).read_bytes() == before
    longer = ("--max-env-steps", 50, "--output", tmp_path / "two", "--versus", tmp_path / "expert")
    code, _, err = run(capsys, policy_run, *options, *longer)
    assert code == 2 and "measured under another protocol (tasks:" in err


def test_videos_show_the_first_episodes_of_each_outcome(capsys, tmp_path):
    code, out, err = run(capsys, "expert", "--episodes", 3, "--videos", "--output", tmp_path, "--max-env-steps", 9)
    assert code == 0, err
    info = read(tmp_path / "eval_info.json")
    (task,) = info["per_task"]
    assert task["metrics"]["video_paths"] == [f"videos/reach/episode_{i}.mp4" for i in range(3)]
    assert all((tmp_path / path).stat().st_size > 500 for path in task["metrics"]["video_paths"])
    assert info["overall"]["video_paths"] == task["metrics"]["video_paths"] and "videos " in out


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--tasks", "reach,flift"), "tasks: flift not known; expected some of: reach, push, lift"),
        (("--instructions", "spoken"), "instructions: spoken not known; expected some of: seen, unseen, empty, wrong"),
        (("--sweep", "mass=heavy"), "--sweep mass=heavy: expected NAME=LO:HI:COUNT"),
        (("--sweep", "mass=0:1:3"), "positive multipliers"),
        (("--rename", "scene"), "--rename scene: expected the environment's name"),
        (("--workers", "0"), "expected numbers of at least 1"),
    ],
)
def test_options_that_mean_nothing_are_refused_in_a_line(capsys, tmp_path, options, message):
    code, _, err = run(capsys, "expert", "--output", tmp_path / "out", *options)
    assert code == 2 and message in err and err.count("\n") == 1
    assert not (tmp_path / "out").exists()


def test_where_results_go_when_nobody_says(policy_run, tmp_path):
    plan = Plan(families=("reach", "lift"))
    for source in (policy_run, policy_run / "checkpoints" / "latest", policy_run / "checkpoints" / "step_000003" / "policy"):
        assert default_directory(ActorSpec(source=str(source)), plan) == policy_run / "rollouts" / "step_000003-reach-lift"
    exported = shutil.copytree(policy_run / "checkpoints" / "step_000003" / "policy", tmp_path / "mine")
    assert default_directory(ActorSpec(source=str(exported)), plan).as_posix() == "runs/rollouts/mine-reach-lift"
    assert default_directory(ActorSpec(source="expert"), plan).as_posix() == "runs/rollouts/expert-reach-lift"


def test_sweeps_are_read_from_ranges_and_lists():
    from robotics.commands.rollout import _axis

    assert _axis("mass=0.5:1.5:5") == ("mass", (0.5, 0.75, 1.0, 1.25, 1.5))
    assert _axis("friction=0.2,1") == ("friction", (0.2, 1.0))
    assert np.isclose(_axis("servo=0.1:0.3:3")[1], (0.1, 0.2, 0.3)).all()
