"""Rows with pictures and rows with sounds in one batch, both in one row, and videos with their sound track."""

import io
from itertools import pairwise

import av
import numpy as np
import pytest
import torch
from PIL import Image

from mmrl.errors import DataError
from mmrl.sampling import rollout_seeds

OMNI = ["tiny-qwen2.5-omni", "tiny-qwen3-omni"]


def picture(color, size=(64, 64)):
    return {"type": "image", "image": Image.new("RGB", size, color)}


def film(clip=None, fps=2.0, frames=4):
    video = {"video": [Image.new("RGB", (64, 64), (60 * i, 0, 0)) for i in range(frames)], "fps": fps}
    return {"type": "video", "video": video if clip is None else {**video, "audio": clip}}


def gap(log_probs, batch):
    return float(((log_probs.detach() - batch.old_log_probs) * batch.loss_mask).abs().max())


def check_together_and_alone(adapter, policy, tasks):
    seeds = rollout_seeds(0, 0, 0, 2 * len(tasks))
    together = adapter.rollout(policy, tasks, group_size=2, seeds=seeds)
    plain = type(adapter)(**{
        **{name: getattr(adapter, name) for name in adapter.__dataclass_fields__},
        "rollout_config": adapter.rollout_config.model_copy(update={"share_prefix": False}),
    })  # fmt: skip
    with torch.no_grad():
        assert gap(adapter.forward(policy, together).log_probs, together) < 2e-5
        assert gap(plain.forward(policy, together).log_probs, together) < 2e-5
    for row, single in enumerate(tasks):
        alone = adapter.rollout(policy, [single], group_size=2, seeds=seeds[2 * row : 2 * row + 2])
        kept = together.select(torch.tensor([2 * row, 2 * row + 1]))
        torch.testing.assert_close(alone.old_log_probs, kept.old_log_probs, atol=2e-5, rtol=0)
    return together


@pytest.mark.parametrize("name", OMNI)
def test_a_batch_of_picture_rows_sound_rows_and_rows_of_both_equals_each_row_alone(name, make_adapter, loud_policy, tone, task):
    adapter = make_adapter(name, rollout={"max_new_tokens": 4})
    policy = loud_policy(adapter)
    tasks = [
        task(tone(0.6), "How many beeps?", name="sound"),
        task(picture("red"), "Which color?", name="picture"),
        task(picture("blue", (96, 64)), "with", tone(1.1, 900), "?", name="both"),
        task("neither", name="words"),
        task(tone(0.3, 700), picture("green"), tone(0.2, 300), name="three"),
        task(film(fps=4.0), "and", tone(0.5), "?", name="film"),
    ]
    batch = check_together_and_alone(adapter, policy, tasks)
    adapter.forward(policy, batch).log_probs.sum().backward()
    for tower in (policy.audio_tower, policy.visual):
        assert any(weights.grad is not None and float(weights.grad.abs().max()) > 0 for weights in tower.parameters())


def test_a_frozen_tower_of_a_mixed_batch(make_adapter, tone, task):
    adapter = make_adapter(policy={"freeze_tower": True})
    tasks = [task(picture("red"), "with", tone(0.4), "?"), task(picture("red"), "?"), task(tone(0.7), "?")]
    check_together_and_alone(adapter, adapter.build_policy(), tasks)


@pytest.mark.parametrize("name", OMNI)
def test_the_sound_of_a_video_adds_its_tokens_between_those_of_the_frames(name, make_adapter, loud_policy, tone, task):
    silent = make_adapter(name, rollout={"max_new_tokens": 4})
    heard = make_adapter(name, rollout={"max_new_tokens": 4, "use_audio_in_video": True})
    clip = tone(2.0)
    watched, listened = (adapter.frontend.encode([task(film(clip), "?")])[0] for adapter in (silent, heard))
    config, count = heard.frontend.model_config, heard.frontend.family.count_tokens(200)
    counts = [[int((prompt["input_ids"] == token).sum()) for token in (config.audio_token_id, config.video_token_id)]
              for prompt in (watched, listened)]  # fmt: skip
    assert counts == [[0, counts[0][1]], [count, counts[0][1]]] and "use_audio_in_video" not in watched
    ids = listened["input_ids"][0].tolist()
    kinds = [token for token in ids if token in (config.audio_token_id, config.video_token_id)]
    assert kinds[0] == config.video_token_id
    if name == "tiny-qwen3-omni":  # in order of time; Qwen2.5-Omni takes turns every two seconds
        assert kinds[-1] == config.audio_token_id
        assert sum(left != right for left, right in pairwise(kinds)) > 1
    tasks = [
        task(film(clip), "?", name="film"),
        task(tone(0.5, 900), "?", name="sound"),
        task(picture("red"), "?", name="picture"),
    ]
    check_together_and_alone(heard, loud_policy(heard), tasks)


def test_a_video_without_sound_is_refused_where_sound_is_asked_for(make_adapter, task):
    adapter = make_adapter(rollout={"use_audio_in_video": True})
    with pytest.raises(DataError, match=r"rows\.jsonl:2: video: video without sound: .*use_audio_in_video wants one"):
        adapter.frontend.encode([task(film(), "?", source="rows.jsonl:2")])
    with pytest.raises(DataError, match="missing fps"):
        make_adapter().frontend.encode([task({"type": "video", "video": [Image.new("RGB", (64, 64))] * 2}, "?")])


def test_a_video_file_brings_its_own_sound(make_adapter, tone, task):
    buffer = io.BytesIO()
    with av.open(buffer, "w", format="mp4") as file:
        video, audio = file.add_stream("mpeg4", rate=10), file.add_stream("aac", rate=16_000)
        video.width = video.height = 64
        for i in range(20):
            frame = av.VideoFrame.from_ndarray(np.full((64, 64, 3), 10 * i, np.uint8), format="rgb24")
            file.mux(video.encode(frame))
        file.mux(video.encode())
        sound = av.AudioFrame.from_ndarray(tone(2.0).samples[None], format="fltp", layout="mono")
        sound.sample_rate = 16_000
        file.mux(audio.encode(sound))
        file.mux(audio.encode())
    adapter = make_adapter(rollout={"use_audio_in_video": True})
    item = adapter.frontend.open(task("?"), "video", buffer.getvalue())
    assert item.frames.shape == (4, 64, 64, 3) and item.fps == 2.0 and abs(item.sound.seconds - 2.0) < 0.15
    assert np.abs(item.sound.samples).max() > 0.3
    shown = adapter.frontend.media(task({"type": "video", "video": buffer.getvalue()}))
    assert [media.kind for media in shown] == ["image"] * 4 + ["audio"]
    with pytest.raises(DataError, match="not a readable video"):
        adapter.frontend.open(task("?"), "video", b"no film")
