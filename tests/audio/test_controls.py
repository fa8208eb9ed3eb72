"""Silence as a control, what rewards are told of sounds, and a replay with a player."""

import dataclasses

import pytest
import torch
from PIL import Image

from audio.media import AudioClip
from mmrl.control import with_media
from mmrl.errors import DataError
from mmrl.replay_view import as_html, decision_rows, read_rollout
from mmrl.sampling import rollout_seeds
from mmrl.trainer import Trainer


def test_a_blank_clip_is_silence_of_the_same_length_and_passes_where_silence_is_refused(make_adapter, tone, task):
    adapter = make_adapter()
    real = task(tone(1.3), "how many?")
    blank = with_media(real, adapter.blank_media(real))
    before, after = adapter.frontend.encode([real])[0], adapter.frontend.encode([blank])[0]
    assert torch.equal(before["input_ids"], after["input_ids"])
    assert before["input_features"].shape == after["input_features"].shape
    assert after["input_features"].std() == 0 < before["input_features"].std()
    accident = task(AudioClip(tone(1.3).samples * 0, 16_000), "how many?")
    with pytest.raises(DataError, match="without any sound"):  # a row's own silence is still refused
        adapter.frontend.encode([accident])


def test_rewards_are_told_seconds_and_pictures_sizes(make_adapter, tone, task):
    adapter = make_adapter(rollout={"media_facts": True})
    asked = task(tone(1.5), {"type": "image", "image": Image.new("RGB", (64, 48))}, "?")
    batch = adapter.rollout(adapter.build_policy(), [asked], group_size=2, seeds=rollout_seeds(0, 0, 0, 2))
    sound, image = batch.outcomes[1].media
    assert (sound.kind, sound.seconds) == ("audio", 1.5)
    assert (image.kind, image.original_size, image.scale) == ("image", (64, 48), None)


def test_a_step_with_sounds_is_replayed_with_tokens_and_players(make_config, tmp_path):
    from audio.adapter import build_adapter

    config = make_config(
        output_dir=str(tmp_path), sampling={"tasks_per_step": 2, "group_size": 2}, rewards={"accuracy": 1.0},
        metrics={"replay": True, "samples_every": 1}, evaluation={"at_start": False, "num_tasks": 2, "control": "blank"},
    )  # fmt: skip
    adapter = dataclasses.replace(build_adapter(config), reward_terms={"accuracy": lambda t, o: float(sum(o.token_ids) % 2)})
    evaluations = Trainer(config, adapter, cpu=True).run()
    assert evaluations[1]["control"]["gap"]["n"] == 2
    record = read_rollout(config.run_dir, 1, 1)
    names, rows = decision_rows(record)
    assert len(rows) == record["num_decisions"] and "id" in names
    assert "<audio controls" in as_html(record, config.run_dir)
