"""Datasets as they are read: what a policy is given, and what is refused."""

import json
import shutil
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from mmrl.errors import DataError
from robotics.demonstration_files import read_files
from robotics.demonstrations import open_demonstrations
from robotics.envs.families import build_family
from robotics.envs.physics import JOINTS
from robotics.recording import collect, write_dataset
from robotics.tasks import FamilyTasks

CAMERAS = {"scene": (24, 32), "wrist": (24, 32)}
DATA, INFO, MMRL = Path("data/chunk-000/file-000.parquet"), Path("meta/info.json"), Path("meta/mmrl.json")
STATE, ACTION = "observation.state", "action"


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    root = tmp_path_factory.mktemp("demos") / "reach"
    tasks = FamilyTasks(build_family("reach"), first_seed=0, num_layouts=100)
    demonstrations, _ = collect(tasks, 6, keep_failures=False, at_once=6, mistakes=0.5)
    write_dataset(root, demonstrations, cameras=CAMERAS, mistakes=0.5)
    return root


@pytest.fixture(scope="module")
def demonstrations(written):
    return open_demonstrations(written, cameras=CAMERAS, environment_state=True)


@pytest.fixture
def copy(written, tmp_path):
    return Path(shutil.copytree(written, tmp_path / "copy"))


def change_json(path, change):
    content = json.loads(path.read_text())
    change(content)
    path.write_text(json.dumps(content))


def change_column(root, name, change):
    """Rewrite a column ``[M, ...]`` of numbers."""
    table = pq.read_table(root / DATA)
    values = change(read_files(root).columns[name].copy())
    flat = pa.array(values.reshape(-1))
    array = flat if values.ndim == 1 else pa.FixedSizeListArray.from_arrays(flat, values.shape[1])
    place = table.column_names.index(name)
    pq.write_table(table.set_column(place, table.schema.field(name), array.cast(table.schema.field(name).type)), root / DATA)


def change_pictures(root, name, change):
    import io

    from PIL import Image

    table, field = pq.read_table(root / DATA), f"observation.images.{name}"
    changed = []
    for row in table[field].to_pylist():
        png = io.BytesIO()
        Image.fromarray(change(np.asarray(Image.open(io.BytesIO(row["bytes"]))))).save(png, "PNG")
        changed.append({"bytes": png.getvalue(), "path": row["path"]})
    place = table.column_names.index(field)
    pq.write_table(
        table.set_column(place, table.schema.field(field), pa.array(changed, table.schema.field(field).type)), root / DATA
    )


def refusal(root, **how):
    with pytest.raises(DataError) as caught:
        open_demonstrations(root, **{"environment_state": True, **how})
    message = str(caught.value)
    assert "\n" not in message and str(root) in message
    return message


# What a policy is given


def test_a_task_is_an_episode_with_all_that_is_known_of_it(demonstrations):
    first = demonstrations.tasks[0]
    assert (first.id, first.domain, first.goal, first.seed) == ("reach/episode-0", "reach", "red", 0)
    assert first.instruction == build_family("reach").instruction("red", 0)
    infos = [demonstrations.info(task) for task in demonstrations.tasks]
    assert [info.index for info in infos] == list(range(6)) and all(info.success for info in infos)
    assert {info.quality for info in infos} <= {1, 2, 3, 4, 5} and 0 < sum(info.mistake for info in infos) < 6


def test_draws_have_the_worlds_names_and_shapes(demonstrations, sound):
    observations, chunks, counts = demonstrations.draw(sound[:2], num_frames=3, chunk_size=4, seeds=torch.arange(2))
    shapes = {name: (value.shape, value.dtype) for name, value in observations.items()}
    assert shapes == {
        "agent_pos": ((2, 3, 6), np.float32),
        "environment_state": ((2, 3, 35), np.float32),
        "pixels.scene": ((2, 3, 24, 32, 3), np.uint8),
        "pixels.wrist": ((2, 3, 24, 32, 3), np.uint8),
    }
    assert chunks.shape == (2, 3, 4, 6) and counts.dtype == np.int64 and (counts == 4).all()


@pytest.fixture(scope="module")
def sound(demonstrations):
    """Tasks whose episodes hold no mistake."""
    return [task for task in demonstrations.tasks if not demonstrations.info(task).mistake]


def test_a_drawn_frame_is_one_moment_and_the_commands_that_followed(demonstrations, written):
    files = read_files(written)
    task = demonstrations.tasks[2]
    observations, chunks, _ = demonstrations.draw([task], num_frames=3, chunk_size=6, seeds=[5])
    its = slice(files.starts[2], files.starts[2] + files.lengths[2])
    for place in range(3):
        (step,) = np.flatnonzero((files.columns[STATE][its] == observations["agent_pos"][0, place]).all(axis=1))
        steps = np.minimum(np.arange(step, step + 6), files.lengths[2] - 1)  # after the end the last command again
        np.testing.assert_array_equal(chunks[0, place], files.columns[ACTION][its][steps])
        image = files.images("observation.images.wrist").read([its.start + step])[0]
        np.testing.assert_array_equal(observations["pixels.wrist"][0, place], image)


def test_frames_are_drawn_without_replacement_by_each_rows_seed_and_short_episodes_are_padded(demonstrations, sound):
    task, other = sound[:2]
    draw = lambda tasks, seeds, n: demonstrations.draw(tasks, num_frames=n, chunk_size=1, seeds=seeds)  # noqa: E731
    states = draw([task, other], [7, 8], 3)[0]["agent_pos"]
    assert len(np.unique(states[0], axis=0)) == 3
    np.testing.assert_array_equal(draw([other], [8], 3)[0]["agent_pos"][0], states[1])
    assert len({draw([other], [seed], 3)[0]["agent_pos"].tobytes() for seed in range(9)}) > 5
    observations, _, counts = draw([task], [0], 100)
    drawn = int((counts > 0).sum())
    assert drawn == demonstrations.info(task).length
    assert (counts[0, :drawn] == 1).all() and (counts[0, drawn:] == 0).all()
    assert not observations["pixels.scene"][0, drawn:].any()


def test_what_a_mistake_was_is_not_imitated(demonstrations):
    erring = next(task for task in demonstrations.tasks if demonstrations.info(task).mistake)
    its = demonstrations._frames(demonstrations.info(erring).index)
    wrong = demonstrations.columns[ACTION][its][demonstrations.mistaken[its]]
    _, chunks, counts = demonstrations.draw([erring], num_frames=200, chunk_size=4, seeds=[0])
    drawn = chunks[counts > 0].reshape(-1, 6)
    assert not (drawn[:, None] == wrong).all(axis=-1).any()


def test_the_cache_forgets_the_oldest_and_gives_the_same(written):
    from robotics.demonstration_files import CachedImages

    files = read_files(written)
    name = "observation.images.scene"
    cached = CachedImages(files.images(name), size=(24, 32), capacity=4 * 24 * 32 * 3)
    for frames in ([5, 0, 5], [1, 2, 3, 4], [0, 40]):
        np.testing.assert_array_equal(cached.read(np.array(frames)), np.stack(files.images(name).read(frames)))
    assert list(cached.kept) == [3, 4, 0, 40]


def test_a_family_gives_no_more_episodes_than_asked_for(written, demonstrations):
    few = open_demonstrations(written, at_most={"reach": 2})
    assert [task.id for task in few.tasks] == [task.id for task in demonstrations.tasks[:2]]
    with pytest.raises(DataError, match=r"demonstrations.episodes names push; .* has usable episodes of: reach"):
        open_demonstrations(written, at_most={"push": 2})


def test_the_recorded_episode_can_be_scored(demonstrations):
    from robotics.rewards import REWARDS

    task = demonstrations.tasks[0]
    episode, length = demonstrations.episode(task), demonstrations.info(task).length
    assert episode.left.shape == (1 + length,) and np.isnan(episode.left).all() and episode.num_steps == length
    assert episode.succeeded[-1] and not episode.succeeded[0] and episode.stop_reason == "success"
    assert len(episode.initial_state) == len(episode.executed) == 0
    terms = {name: term(task, episode) for name, term in REWARDS.items()}
    assert terms["success"] == 1.0 and terms["progress"] is None and 0.0 < terms["smoothness"] <= 1.0


def test_supervised_training_from_the_dataset_lowers_the_loss(written, make_adapter, tmp_path):
    from mmrl.trainer import Trainer

    adapter = make_adapter(
        "algorithm=sft", f"demonstrations.path={written}", "demonstrations.frames_per_episode=8", "trainer.num_steps=5",
        "sampling.tasks_per_step=8", f"output_dir={tmp_path}", "evaluation.every=0", "evaluation.num_tasks=2",
    )  # fmt: skip
    assert [task.id for task in adapter.task_source("train")] == [f"reach/episode-{i}" for i in range(6)]
    assert adapter.task_source("eval")[0].seed == 1_000_000
    Trainer(adapter.config, adapter).run()
    lines = [json.loads(line) for line in next(tmp_path.rglob("metrics.jsonl")).read_text().splitlines()]
    losses = [line["loss/total"] for line in lines if "loss/total" in line]
    assert len(losses) == 5 and losses[-1] < losses[0] - 0.1


# Datasets that others recorded


def record_elsewhere(root, *, steps=24, success=True, finalize=True, gripper=20.0):
    """With LeRobot's API alone, as a person with its tools would."""
    from lerobot.datasets.lerobot_dataset import LeRobotDataset

    joints = {"dtype": "float32", "shape": (6,), "names": [f"{name}.pos" for name in JOINTS]}
    features = {STATE: joints, ACTION: joints}
    if success is not None:
        features["next.success"] = {"dtype": "bool", "shape": (1,), "names": None}
    dataset = LeRobotDataset.create("someone/arm", 20, features, root=root, use_videos=False, video_backend="pyav")
    for step in range(steps):
        values = np.array([step / 10, -20, 20, 30, 5, gripper], np.float32)
        frame = {STATE: values, ACTION: values + np.float32(0.1), "task": "wave"}
        if success is not None:
            frame["next.success"] = np.array([success and step == steps - 1])
        dataset.add_frame(frame)
    dataset.save_episode()
    if finalize:
        dataset.finalize()
    return dataset


def test_a_26_s_episode_of_another_recorder_is_read(tmp_path, caplog):
    record_elsewhere(tmp_path / "arm", steps=530)
    demonstrations = open_demonstrations(tmp_path / "arm")
    (task,) = demonstrations.tasks
    assert (task.domain, task.instruction, demonstrations.info(task).length) == ("recorded", "wave", 530)
    observations, chunks, _ = demonstrations.draw([task], num_frames=4, chunk_size=2, seeds=[0])
    np.testing.assert_allclose(chunks[0, :, 0], observations["agent_pos"][0] + 0.1, atol=1e-5)
    assert demonstrations.episode(task).succeeded[-1]
    # The gripper and four joints are still: a dataset's own statistics would divide by zero, and a person is told.
    assert f"{STATE} gripper" in demonstrations.constant and f"{STATE} shoulder_pan" not in demonstrations.constant
    assert "action gripper never moves" in caplog.text


def test_success_has_to_be_known_or_not_asked_for(tmp_path):
    record_elsewhere(tmp_path / "unknown", success=None)
    record_elsewhere(tmp_path / "failed", success=False)
    assert "has no next.success" in refusal(tmp_path / "unknown", environment_state=False)
    assert "none of 1 episodes succeeded" in refusal(tmp_path / "failed", environment_state=False)
    for name in ("unknown", "failed"):
        (task,) = (demonstrations := open_demonstrations(tmp_path / name, successes_only=False)).tasks
        assert not demonstrations.episode(task).succeeded.any()


def test_a_policy_that_reads_the_scene_is_not_given_a_dataset_without_it(tmp_path, make_adapter):
    record_elsewhere(tmp_path / "arm")
    assert "the policy reads observation.environment_state (35 numbers" in refusal(tmp_path / "arm")
    with pytest.raises(DataError, match="the dataset lacks it"):
        make_adapter("algorithm=sft", f"demonstrations.path={tmp_path / 'arm'}")


# Refusals


def test_a_recording_that_was_never_finalised(tmp_path):
    dataset = record_elsewhere(tmp_path / "arm", finalize=False)
    shutil.copytree(tmp_path / "arm", tmp_path / "crashed")  # as the disk looks when the recorder dies
    dataset.finalize()
    assert "finalize() was not called" in refusal(tmp_path / "crashed", environment_state=False)
    (tmp_path / "crashed/meta/episodes").rmdir() if (tmp_path / "crashed/meta/episodes").exists() else None
    shutil.copytree(tmp_path / "arm/meta/episodes", tmp_path / "crashed/meta/episodes")
    assert "has no parquet footer: the recording was never finalised" in refusal(tmp_path / "crashed", environment_state=False)


def test_files_that_do_not_fit_each_other(copy):
    table = pq.read_table(copy / DATA)
    pq.write_table(table.slice(0, len(table) - 3), copy / DATA)
    assert "the recording did not finish, or files are missing" in refusal(copy)
    (copy / INFO).unlink()
    assert "is not a LeRobotDataset: it has no meta/info.json" in refusal(copy)


def test_an_older_format(copy):
    change_json(copy / INFO, lambda info: info.update(codebase_version="v2.1"))
    assert "is a LeRobotDataset v2.1; expected v3.0" in refusal(copy)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda names: names[::-1], "the arm's joints in another order: gripper, wrist_roll"),
        (
            lambda names: ["x", "y", "z", "roll", "pitch", "yaw"],
            "holds joints: x, y, z, roll, pitch, yaw; expected shoulder_pan",
        ),
        (lambda names: None, r"holds joints: (no names)"),
        (lambda names: {"motors": names[1:] + names[:1]}, "in another order: shoulder_lift"),
    ],
)
@pytest.mark.parametrize("column", [STATE, ACTION])
def test_joints_of_another_order_or_name(copy, column, change, message):
    def edit(info):
        info["features"][column]["names"] = change(info["features"][column]["names"])

    change_json(copy / INFO, edit)
    assert f"{column} holds" in refusal(copy) and message in refusal(copy)


@pytest.mark.parametrize("column", [STATE, ACTION])
def test_joints_of_another_unit(copy, column):
    whole = read_files(copy).columns[column]
    change_column(copy, column, lambda values: np.deg2rad(values).astype(np.float32))
    assert f"the arm joints of {column} stay within" in refusal(copy) and "looks like radians" in refusal(copy)
    swing = np.linspace(-1, 1, len(whole), dtype=np.float32)
    change_column(copy, column, lambda values: np.column_stack([whole[:, :-1], swing]))
    assert "the gripper of " + column + " moves between -1.00 and 1.00; expected 0 (closed) to 100 (open)" in refusal(copy)
    change_column(copy, column, lambda values: 10 * whole)
    assert f", episode 0, frame 0: shoulder_lift of {column} is" in refusal(copy) and "expected degrees" in refusal(copy)
    change_column(copy, column, lambda values: np.where(np.arange(len(whole))[:, None] == 3, np.float32(np.nan), whole))
    assert f", episode 0, frame 3: {column} is not finite" in refusal(copy)


def test_a_gripper_that_is_inverted_is_seen_by_replay(copy):
    change_column(copy, STATE, lambda values: np.column_stack([values[:, :-1], 100 - values[:, -1]]).astype(np.float32))
    assert "episode 0 (reach), replayed here, has gripper at" in refusal(copy)


def test_another_rate(copy):
    change_json(copy / INFO, lambda info: info.update(fps=30))
    assert "has fps 30; policies here act at 20 Hz" in refusal(copy)


def test_a_loop_that_ran_at_another_rate_than_declared_by_episode(copy):
    files = read_files(copy)
    second = slice(files.starts[1], files.starts[1] + files.lengths[1])

    def faster(times):
        times[second] *= 20 / 50
        return times

    change_column(copy, "timestamp", faster)
    assert "episode 1: frames are 0.020 s apart (50 Hz), but fps is 20" in refusal(copy)


def test_a_loop_that_stopped_for_a_while(copy):
    def late(times):
        times[4 : read_files(copy).lengths[0]] += 0.2
        return times

    change_column(copy, "timestamp", late)
    assert "episode 0: frame 4 comes 0.250 s after the frame before; expected 0.050 s" in refusal(copy)


def test_cameras_and_their_sizes(copy):
    message = refusal(copy, cameras={"scene": (24, 32), "front": (24, 32)})
    assert "lacks the camera front: the policy looks at scene, front, the dataset has scene, wrist" in message
    assert "observation.images.wrist is 24x32; the policy looks at 64x64" in refusal(copy, cameras={"wrist": (64, 64)})


def test_pictures_declared_in_another_order_than_they_are(copy):
    feature = "observation.images.scene"
    change_json(copy / INFO, lambda info: info["features"][feature].update(shape=[3, 24, 32]))
    assert f"{feature} is declared 3x24x32 with axes height, width, channels, which gives 32 channels" in refusal(
        copy, cameras=CAMERAS
    )
    change_json(copy / INFO, lambda info: info["features"][feature].update(names=["channels", "height", "width"]))
    assert open_demonstrations(copy, cameras=CAMERAS).tasks  # consistent, and LeRobot knows both
    change_json(copy / INFO, lambda info: info["features"][feature].update(shape=[3, 32, 24]))
    assert f"{feature} is declared 32x24 but its pictures are 24x32" in refusal(copy, cameras=CAMERAS)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda picture: picture[..., ::-1], "looks the same to scene only with red and blue exchanged"),
        (lambda picture: picture[::-1], "looks the same to scene only with its rows upside down"),
        (lambda picture: 255 - picture, "looks different to scene (by"),
    ],
)
def test_pictures_of_another_colour_order_or_another_look(copy, change, message):
    change_pictures(copy, "scene", change)
    assert message in refusal(copy, cameras=CAMERAS)
    assert open_demonstrations(copy, cameras=CAMERAS, allow_other_world=True).tasks


def test_another_world_is_named_and_refused_unless_allowed(copy, make_adapter):
    def heavier(states):  # an arm that sags from the third frame on
        frames = np.arange(len(states))
        states[(frames >= 2) & (frames < read_files(copy).lengths[0]), 2] += 2.0
        return states

    change_column(copy, STATE, heavier)
    change_json(copy / MMRL, lambda content: content.update(mujoco="3.8.1"))
    message = refusal(copy)
    assert "episode 0 (reach), replayed here, has elbow_flex at" in message and "(control step 2)" in message
    assert "Made with MuJoCo 3.8.1, this is 4.0.0" in message and "demonstrations.allow_other_world=true" in message
    run = ["algorithm=sft", f"demonstrations.path={copy}"]
    with pytest.raises(DataError, match="replayed here"):
        make_adapter(*run)
    assert make_adapter(*run, "demonstrations.allow_other_world=true").task_source("train")


def test_metadata_of_another_recording_and_families_that_are_not_known(copy):
    change_json(copy / MMRL, lambda content: content["episodes"][0].update(family="juggle"))
    assert "demonstrates juggle (red), which is not known here" in refusal(copy)
    change_json(copy / MMRL, lambda content: content["episodes"].pop())
    assert "meta/mmrl.json is of another recording" in refusal(copy)
    change_json(copy / MMRL, lambda content: content.update(schema=0))
    assert "is of another schema than 1" in refusal(copy)
    (copy / MMRL).write_text("{")
    assert "cannot be read" in refusal(copy)
