"""Planning a run on a real checkpoint without its weights."""

from pathlib import Path

import pytest

from mmrl.cli import load_run, main
from mmrl.errors import ConfigError
from vision.adapter import check_without_weights
from vision.known_models import model_config

CONFIG = Path(__file__).parents[2] / "configs" / "vision" / "geometry3k_qwen25vl_3b.yaml"


def test_the_released_3b_checkpoint_has_its_published_size():
    rows = dict(check_without_weights(load_run(CONFIG)))
    assert rows["weights"].startswith("3,754,622,976")  # the size on the model's page: 3.75 billion
    assert rows["trained weights"] == "3,085,938,688"  # less the frozen tower's 668,684,288
    assert rows["largest image"].startswith("768 visual tokens")
    assert "666 visual tokens" in rows["image 1024x512"]  # methods/vision.md 0.4


def test_low_rank_adapters_train_a_small_share():
    rows = dict(check_without_weights(load_run(CONFIG, ["policy.lora={}"])))
    # rank 16 on q, k, v, o, gate, up and down of 36 layers: 16 * 36 * (2*4096 + 2*(2048+256) + 3*(2048+11008)) = 29,933,568;
    # the config freezes the tower, so its gate, up and down (16 * 32 * 3 * (1280 + 3420) = 7,219,200) get none
    assert rows["trained weights"] == "29,933,568"


def test_an_unknown_checkpoint_is_refused_with_the_known_ones():
    with pytest.raises(ConfigError, match=r"policy.path is 'nobody/nothing'.*Qwen/Qwen2.5-VL-3B-Instruct"):
        model_config("nobody/nothing")


def test_the_command_prints_the_forecast(capsys):
    assert main(["check", "--no-weights", str(CONFIG)]) == 0
    assert "memory: in all, about" in capsys.readouterr().out
