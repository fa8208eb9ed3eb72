"""Episodes shown again: replayed bit for bit, filmed, captioned, chosen; and heat maps of sweeps."""

import dataclasses
import io
import xml.etree.ElementTree as ElementTree

import av
import numpy as np
import pytest
import torch
from PIL import Image

from mmrl.errors import DataError, MissingExtra
from mmrl.statistics import wilson_interval
from robotics import media
from robotics.episodes import replay
from robotics.experts import make_expert
from robotics.rollouts import limits_of, run_episodes
from robotics.tasks import RobotTasks
from robotics.world import ArmWorld


def run(tasks, *, expert=True, steps=None, change=None):
    """One episode per task, in one world; ``change`` may alter the world before."""
    world = ArmWorld(tasks)
    if change is not None:
        change(world)
    limits = limits_of(tasks, execution_horizon=4, max_env_steps=steps)
    if expert:
        decide = make_expert(world.physics, world.families, world.goals, chunk_size=4)
    else:
        rng = np.random.default_rng(5)

        def decide(decision, running, observation):
            noise = rng.normal(0, 5, (world.num_rows, 4, 6)).cumsum(axis=1)
            return observation["agent_pos"][:, None, :].astype(float) + noise[running]

    episodes = run_episodes(world, decide, limits)
    world.close()
    return episodes


def tasks_of(*families, num=2):
    source = RobotTasks(families, first_seed=5, num_layouts=num)
    return [source[i] for i in range(num * len(families))]


@pytest.fixture(scope="module")
def filmed():
    """A success and a failure of one family."""
    tasks = tasks_of("lift", num=2)
    return tasks, [run(tasks)[0], run(tasks, expert=False, steps=20)[1]]


# --- replay ---


@pytest.mark.parametrize("families", [("reach",), ("push", "place", "press")])
@pytest.mark.parametrize("expert", [True, False])
def test_a_replay_is_the_recorded_episode_bit_for_bit(families, expert):
    def moved(world):  # so that the layout of the seed is not the start
        for _ in range(3):
            world.advance(world.physics.joint_positions() + 4.0, np.arange(world.num_rows))

    tasks = tasks_of(*families)
    for task, episode in zip(tasks, run(tasks, expert=expert, steps=40, change=moved)):
        moments = list(replay(task, episode))
        assert [moment.step for moment in moments] == list(range(episode.num_steps + 1))
        np.testing.assert_array_equal(moments[0].state, episode.initial_state)
        np.testing.assert_array_equal(moments[-1].state, episode.final_state)
        assert not any(moment.images for moment in moments)


def test_a_diverged_episode_replays_to_its_last_sound_state():
    (task,) = tasks_of("reach", num=1)
    world = ArmWorld([task])

    def decide(decision, running, observation):
        chunk = np.repeat(observation["agent_pos"][:, None].astype(float), 4, axis=1) + 3.0
        if decision == 2:
            chunk[:, 2] = np.nan
        return chunk

    (episode,) = run_episodes(world, decide, limits_of([task], execution_horizon=4))
    assert (episode.stop_reason, episode.num_steps) == ("diverged", 10)
    np.testing.assert_array_equal(list(replay(task, episode))[-1].state, episode.final_state)


def test_a_replay_that_goes_elsewhere_is_refused(filmed):
    tasks, (episode, _) = filmed
    commands = episode.commands.copy()
    commands[3, 0] += 1e-6
    with pytest.raises(DataError, match="does not end in the recorded state"):
        list(replay(tasks[0], dataclasses.replace(episode, commands=commands)))


def test_an_episode_with_physics_of_its_own_replays_in_a_world_that_has_them():
    def slippery(world):
        world.physics.set_parameters(np.arange(world.num_rows), mass_scale=3.0, friction_scale=0.2)

    (task,) = tasks_of("lift", num=1)
    (episode,) = run([task], change=slippery)
    with pytest.raises(DataError, match="other physics"):
        list(replay(task, episode))
    world = ArmWorld([task])
    slippery(world)
    np.testing.assert_array_equal(list(replay(task, episode, world=world))[-1].state, episode.final_state)


@pytest.mark.parametrize(("num", "message"), [(0, "holds no physics state"), (7, "has 7 numbers")])
def test_an_episode_without_the_scenes_state_is_refused(filmed, num, message):
    tasks, (episode, _) = filmed
    with pytest.raises(DataError, match=message):
        list(replay(tasks[0], dataclasses.replace(episode, initial_state=np.zeros(num))))


# --- frames and videos ---


def test_frames_show_the_cameras_side_by_side_from_the_start_to_the_end(filmed):
    tasks, (_, episode) = filmed
    frames = media.episode_frames(tasks[1], episode, size=48, every=7)
    assert (frames.dtype, frames.shape) == (np.uint8, (4, 48, 96, 3))  # steps 0, 7, 14 and 20
    for frame, state in ((frames[0], episode.initial_state), (frames[-1], episode.final_state)):
        world = ArmWorld([tasks[1]])
        world.restore(state[None])
        seen = world.draw(np.array([0]), {"scene": (48, 48), "wrist": (48, 48)}, sky=True)
        world.close()
        np.testing.assert_array_equal(frame, np.concatenate([seen["scene"][0], seen["wrist"][0]], axis=1))
    assert (frames[0] != frames[-1]).any()


def decoded(data):
    with av.open(io.BytesIO(data)) as container:
        stream = container.streams.video[0]
        frames = [frame.to_ndarray(format="rgb24") for frame in container.decode(stream)]
        return stream.codec_context.name, float(stream.average_rate), np.stack(frames)


def test_a_video_holds_every_frame_in_real_time_with_instruction_and_outcome_above(filmed, tmp_path):
    tasks, (episode, _) = filmed
    path = tmp_path / "videos" / "lift.mp4"
    data = media.episode_video(tasks[0], episode, path=path)
    assert path.read_bytes() == data == media.episode_video(tasks[0], episode)  # the same bytes again
    assert len(data) < 100_000
    _, rate, frames = decoded(data)
    expected = media.episode_frames(tasks[0], episode)
    assert rate == 10.0 and len(frames) == len(expected) == 1 + -(-episode.num_steps // 2)
    band = frames.shape[1] - 192
    assert np.abs(frames[:, band:].astype(int) - expected).mean() < 5
    ground, ink = frames[0, :band].min(), frames[0, :band].max()
    assert ground < 40 and ink > 180  # light text on a ground of its own
    assert media.episode_caption(tasks[0], episode)[0] == tasks[0].instruction
    assert media.episode_caption(tasks[0], episode)[1].startswith(f"success after {episode.num_steps / 20:.1f} s, ")


def test_a_long_caption_is_broken_and_odd_sides_are_evened():
    frames = np.random.default_rng(0).integers(0, 255, (3, 33, 101, 3), dtype=np.uint8)
    plain, short, long = (
        decoded(media.write_video(None, frames, 10.0, lines))[2].shape[1:3]
        for lines in ((), ("lift it",), ("put the red block into the bowl after the drawer is closed",))
    )
    assert plain == (34, 102)
    assert plain[0] < short[0] < long[0] and short[0] % 2 == long[0] % 2 == 0


def test_text_of_a_caption_stays_inside_the_picture():
    band = media._caption(["put the red block into the bowl", "x" * 9], 120)
    inked = (band != np.array(media._BAND, np.uint8)).any(axis=2)
    assert inked.any() and not inked[:, -4:].any() and not inked[[0, -1]].any()


def test_without_h264_the_next_codec_that_browsers_play_is_used_and_without_any_the_need_is_named(monkeypatch):
    frames = np.full((5, 32, 32, 3), 90, np.uint8)
    names = []
    for kept in range(len(media.ENCODERS)):
        monkeypatch.setattr(media, "ENCODERS", media.ENCODERS[1:] if kept else media.ENCODERS)
        media.find_encoder.cache_clear()
        name, _, back = decoded(media.write_video(None, frames, 10.0))
        assert len(back) == 5 and np.abs(back.astype(int) - 90).mean() < 4
        names.append(name)
    assert names[0] == "h264" and len(set(names)) > 1
    monkeypatch.setattr(media, "ENCODERS", ())
    media.find_encoder.cache_clear()
    with pytest.raises(MissingExtra, match="no video encoder"):
        media.write_video(None, frames, 10.0)
    media.find_encoder.cache_clear()


@pytest.mark.parametrize("frames", [np.zeros((0, 8, 8, 3), np.uint8), np.zeros((2, 8, 8, 3)), np.zeros((8, 8, 3), np.uint8)])
def test_what_is_not_frames_is_refused(frames):
    with pytest.raises(DataError, match="expected uint8"):
        media.write_video(None, frames, 10.0)


# --- in a run ---


def test_a_sample_of_a_run_has_a_video_and_frames_where_no_encoder_is(make_adapter, monkeypatch):
    adapter = make_adapter("rollout.max_env_steps=8", "rollout.image_size=64")
    tasks = [adapter.task_source("train")[0]]
    batch = adapter.rollout(adapter.build_policy(), tasks, group_size=1, seeds=torch.tensor([3]))
    (video,) = adapter.describe(batch, 0).media
    assert (video.kind, video.suffix, video.caption[:7]) == ("video", ".mp4", "timeout")
    assert decoded(video.data)[2].shape[2] == 128
    monkeypatch.setattr("robotics.adapter.find_encoder", lambda: None)
    frames = adapter.describe(batch, 0).media
    assert [frame.kind for frame in frames] == ["image", "image"]
    assert Image.open(io.BytesIO(frames[0].data)).size == (64, 64)


# --- heat maps ---


def words_of(path):
    """Texts of an SVG file by their class."""
    tree = ElementTree.fromstring(path.read_text(encoding="utf-8"))
    return [(node.get("class"), node.text) for node in tree.iter("{http://www.w3.org/2000/svg}text")]


def test_a_heat_map_has_share_counts_and_interval_in_each_cell(tmp_path):
    cells = [
        {"mass": 0.5, "friction": 1.0, "k": 7, "n": 10},
        {"mass": 2.0, "friction": 0.25, "k": 0, "n": 10, "low": 0, "high": 0.3},
    ]
    sweep = {"axes": {"mass": [0.5, 2.0], "friction": [0.25, 1.0]}, "cells": cells}
    words = words_of(media.write_heat_map(sweep, tmp_path / "out" / "sweep.svg"))
    texts = [text for _, text in words]
    low, high = wilson_interval(7, 10)
    assert f"7/10 [{100 * low:.0f}, {100 * high:.0f}]" in texts and "0/10 [0, 30]" in texts
    assert [text for kind, text in words if "share" in kind] == ["70%", "0%"]  # the second axis runs upwards
    assert texts.count("not run") == 2
    assert [text for kind, text in words if "name" in kind] == ["mass", "friction"]
    assert {"0.5", "2", "0.25", "1"} <= set(texts)


def test_one_parameter_gives_a_curve_with_a_band_and_names_are_text(tmp_path):
    name = "<b>push & pull"
    cells = [{name: value, "k": k, "n": 20} for value, k in ((0, 20), (4, 10))]
    path = media.write_heat_map({"axes": {name: [0, 1, 4]}, "cells": cells}, tmp_path / "sweep.svg")
    texts = [text for _, text in words_of(path)]
    assert {name, "success", "20/20 [84, 100]", "10/20 [30, 70]", "not run"} <= set(texts)
    tree = ElementTree.fromstring(path.read_text(encoding="utf-8"))
    kinds = [node.get("class") for node in tree.iter("{http://www.w3.org/2000/svg}path")]
    assert kinds == ["band", "line"]


@pytest.mark.parametrize(
    ("sweep", "message"),
    [
        ({"axes": {}, "cells": []}, "one or two names"),
        ({"axes": {"a": [1], "b": [1], "c": [1]}, "cells": []}, "one or two names"),
        ({"axes": {"a": [1]}, "cells": [{"a": 2, "k": 1, "n": 1}]}, "not on the axes"),
        ({"axes": {"a": [1]}, "cells": [{"a": 1, "k": 3, "n": 1}]}, "k = 3 and n = 1"),
        ({"axes": {"a": [1]}, "cells": None}, "expected a list"),
    ],
)
def test_what_is_not_a_sweep_is_refused(sweep, message, tmp_path):
    with pytest.raises(DataError, match=message):
        media.write_heat_map(sweep, tmp_path / "sweep.svg")
