"""Demonstrations that experts give, as they are recorded."""

import json

import numpy as np
import pyarrow.parquet as pq
import pytest

from mmrl.cli import main
from robotics.demonstration_files import read_files
from robotics.demonstration_format import read_provenance
from robotics.demonstrations import open_demonstrations
from robotics.envs.families import build_family
from robotics.experts import make_expert
from robotics.recording import collect, demonstration_task, grade, write_dataset
from robotics.tasks import FamilyTasks
from robotics.world import ArmWorld

CAMERAS = {"scene": (24, 32), "wrist": (24, 32)}


def family_tasks(name="reach", *, first_seed=0, num_layouts=4096, goals=None):
    return FamilyTasks(build_family(name), first_seed=first_seed, num_layouts=num_layouts, goals=goals)


def record(count, *, at_once=256, name="reach", **how):
    return collect(family_tasks(name), count, keep_failures=False, at_once=at_once, **how)[0]


@pytest.fixture(scope="module")
def noisy():
    return record(12, noise=0.03, mistakes=0.5)


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    root = tmp_path_factory.mktemp("demos") / "reach"
    write_dataset(root, record(3, noise=0.02), cameras=CAMERAS, noise=0.02)
    return root


def test_lerobot_opens_what_was_written(written):
    from lerobot.configs import FeatureType
    from lerobot.datasets.lerobot_dataset import LeRobotDataset
    from lerobot.utils.feature_utils import dataset_to_policy_features

    dataset = LeRobotDataset("mmrl/reach", root=written, video_backend="pyav")
    first = dataset[0]
    shapes = {name: tuple(first[name].shape) for name in dataset.features if name in first}
    assert shapes["observation.state"] == shapes["action"] == (6,) and shapes["observation.environment_state"] == (35,)
    assert shapes["observation.images.scene"] == shapes["observation.images.wrist"] == (3, 24, 32)
    assert {"next.reward", "next.success", "mistake", "command"} <= shapes.keys()
    assert first["task"] == build_family("reach").instruction("red", 0)
    assert dataset.fps == 20 and dataset.num_episodes == 3
    assert dataset.features["action"]["names"][0] == "shoulder_pan.pos"
    policy = dataset_to_policy_features(dataset.features)
    assert policy["observation.images.scene"].shape == (3, 24, 32)
    assert [name for name, feature in policy.items() if feature.type == FeatureType.ACTION] == ["action"]
    assert dataset.meta.stats["action"]["max"].shape == (6,)


def test_a_chunk_of_lerobots_is_a_chunk_of_ours(written):
    from lerobot.datasets.lerobot_dataset import LeRobotDataset

    times = {"action": [step / 20 for step in range(4)]}
    dataset = LeRobotDataset("mmrl/reach", root=written, delta_timestamps=times, video_backend="pyav")
    ours = open_demonstrations(written)
    length = ours.info(ours.tasks[0]).length
    _, chunks, counts = ours.draw(ours.tasks[:1], num_frames=length, chunk_size=4, seeds=[0])
    assert (counts == 4).all()  # every frame is drawn once, in order
    for frame in (0, length // 2, length - 2, length - 1):
        np.testing.assert_array_equal(chunks[0, frame], dataset[frame]["action"].numpy())


def test_the_file_alone_replays_the_episode_bit_for_bit(written):
    files, provenance = read_files(written), read_provenance(written)
    info = provenance.episodes[1]
    world, row = ArmWorld([demonstration_task(family_tasks(), 1)]), np.array([0])
    for frame in range(files.starts[1], files.starts[1] + info.length):
        seen = world.observe(row)
        np.testing.assert_array_equal(seen["agent_pos"][0], files.columns["observation.state"][frame])
        np.testing.assert_array_equal(seen["environment_state"][0], files.columns["observation.environment_state"][frame])
        world.advance(files.columns["command"][frame : frame + 1].astype(np.float64), row)
        now = world.assess(row)
        assert files.columns["next.success"][frame] == now.success[0]
        assert files.columns["next.reward"][frame] == np.float32(now.reward[0])
    assert now.success[0]


def test_pictures_are_what_the_cameras_see_before_each_command(written):
    files = read_files(written)
    world, row = ArmWorld([demonstration_task(family_tasks(), 0)]), np.array([0])
    for frame in range(3):
        for name, image in world.draw(row, CAMERAS).items():
            np.testing.assert_array_equal(files.images(f"observation.images.{name}").read([frame])[0], image[0])
        world.advance(files.columns["command"][frame : frame + 1].astype(np.float64), row)
    world.close()


def test_videos_are_nearly_the_pictures(written, tmp_path):
    write_dataset(tmp_path / "video", record(2, noise=0.02), cameras=CAMERAS, video=True)
    pictures, videos = (open_demonstrations(root, cameras=CAMERAS) for root in (written, tmp_path / "video"))
    draws = [each.draw(each.tasks[:2], num_frames=5, chunk_size=1, seeds=[0, 1])[0] for each in (pictures, videos)]
    np.testing.assert_array_equal(draws[0]["agent_pos"], draws[1]["agent_pos"])
    differences = np.abs(draws[0]["pixels.scene"].astype(float) - draws[1]["pixels.scene"]).mean(axis=(2, 3, 4))
    assert 0.0 < differences.max() < 6.0  # of 255


def test_two_runs_write_the_same(written, tmp_path):
    write_dataset(tmp_path / "again", record(3, noise=0.02, at_once=2), cameras=CAMERAS, noise=0.02)
    data = "data/chunk-000/file-000.parquet"
    assert pq.read_table(tmp_path / "again" / data).equals(pq.read_table(written / data))
    meta = "meta/mmrl.json"
    assert (tmp_path / "again" / meta).read_text() == (written / meta).read_text()


def test_an_episode_does_not_depend_on_who_else_is_recorded(noisy):
    for one, other in zip(noisy, record(12, noise=0.03, mistakes=0.5, at_once=5, num_threads=2)):
        assert one.task == other.task
        np.testing.assert_array_equal(one.actions, other.actions)
        np.testing.assert_array_equal(one.episode.final_state, other.episode.final_state)


def test_noise_moves_the_arm_and_leaves_the_action_as_the_expert_wanted_it(noisy):
    clean = next(each for each in noisy if not each.mistaken.any())
    sent = clean.episode.commands
    assert np.abs(sent[:, :-1] - clean.actions[:, :-1]).mean() > 0.5  # degrees
    np.testing.assert_array_equal(sent[:, -1], clean.actions[:, -1])
    world = ArmWorld([clean.task])
    expert, low, high = make_expert(world.physics, world.families, world.goals, chunk_size=1), *world.physics.joint_limits.T
    for command, action in zip(sent, clean.actions):  # asked where the noise has brought the arm, the expert says the action
        wanted = expert(0, np.array([0]), world.observe(np.array([0])))[0, 0]
        np.testing.assert_array_equal(np.clip(wanted, low, high).astype(np.float32), action)
        world.advance(command[None], np.array([0]))


def test_a_mistake_is_marked_drifts_off_and_is_recovered_from(noisy):
    erring = [each for each in noisy if each.mistaken.any()]
    assert 2 <= len(erring) <= 10  # of 12, at a share of one half
    plain = {each.task.id: each for each in record(16, noise=0.03)}
    for each in erring:
        marked = np.flatnonzero(each.mistaken)
        assert (np.diff(marked) == 1).all() and 1 <= len(marked) <= 20
        start, before = marked[0], plain[each.task.id]
        np.testing.assert_array_equal(each.actions[:start], before.actions[:start])
        assert np.abs(each.actions[start] - before.actions[start]).max() > 0.1
        assert each.success and not each.mistaken[-1]
    assert np.mean([each.episode.num_steps - plain[each.task.id].episode.num_steps for each in erring]) > 1


def test_quality_is_the_fifth_among_the_familys_successes():
    plain = record(10)
    qualities = grade(plain)
    assert sorted(qualities) == [1, 1, 2, 2, 3, 3, 4, 4, 5, 5]
    by_length = [each.episode.num_steps for each in plain]
    assert by_length[qualities.index(5)] < by_length[qualities.index(1)]


def test_tasks_take_layouts_and_goals_in_turn():
    few = family_tasks(num_layouts=3, goals=("red", "blue"))
    chosen = [demonstration_task(few, i) for i in range(6)]
    assert [task.seed for task in chosen] == [0, 1, 2, 0, 1, 2]
    assert len({task.id for task in chosen}) == 6 and {task.domain for task in chosen} == {"reach"}
    with pytest.raises(ValueError, match="3 layouts of 2 goals give 6 tasks"):
        demonstration_task(few, 6)


def test_an_expert_that_fails_too_often_is_not_recorded():
    with pytest.raises(ValueError, match=r"reach: the expert succeeded in \d of 6 attempts; 2 were asked for"):
        record(2, noise=3.0)
    kept, tried = collect(family_tasks(), 2, keep_failures=True, at_once=2, noise=3.0)
    assert len(kept) == tried == 2 and grade(kept) == [1, 1]


def test_a_tabletop_family_is_recorded_and_replays(tmp_path):
    write_dataset(tmp_path / "press", record(2, name="press"), cameras={"scene": (16, 16)})
    demonstrations = open_demonstrations(tmp_path / "press", cameras={"scene": (16, 16)}, environment_state=True)
    assert {task.family for task in demonstrations.tasks} == {"press"}


def test_the_command_writes_refuses_to_overwrite_and_keeps_held_out_layouts_held_out(tmp_path, capsys):
    output = tmp_path / "demos"
    command = [
        "demos",
        "configs/robotics/reach.yaml",
        "tasks.goals={reach: [red]}",
        "--output",
        str(output),
        "--cameras",
        "none",
    ]
    assert main([*command, "--episodes-per-family", "2"]) == 0
    assert "wrote 2 episodes" in capsys.readouterr().out
    assert [episode["goal"] for episode in json.loads((output / "meta/mmrl.json").read_text())["episodes"]] == ["red", "red"]
    assert main(command) == 2
    assert "exists; choose another --output, or replace the dataset with --overwrite" in capsys.readouterr().err
    assert main([*command, "--episodes-per-family", "1", "--overwrite"]) == 0
    assert len(open_demonstrations(output).tasks) == 1
    assert main([*command, "--overwrite", "--seed-first", "1000100"]) == 2
    assert "tasks.eval holds out 1000000 to 1000499" in capsys.readouterr().err
    (output / "meta" / "info.json").unlink()
    assert main([*command, "--overwrite"]) == 2
    assert "not a LeRobotDataset" in capsys.readouterr().err
    assert main([*command[:-3], str(tmp_path / "new"), "--cameras", "front"]) == 2
    assert "--cameras names front; expected scene, wrist" in capsys.readouterr().err
