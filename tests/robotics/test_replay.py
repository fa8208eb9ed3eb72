"""A recorded robot rollout is replayed by its decisions: one line and one number of each kind per chunk of commands."""

import json
from pathlib import Path

from mmrl.config import apply_overrides, read_config, validate
from mmrl.replay_view import as_html, decision_rows, read_rollout
from mmrl.trainer import Trainer
from robotics.adapter import build_adapter
from robotics.config import RoboticsRunConfig

CONFIG = Path(__file__).parents[2] / "configs" / "robotics" / "reach.yaml"


def test_a_robots_decisions_are_replayed(tmp_path):
    overrides = [
        f"output_dir={tmp_path}", "name=robot", "trainer.num_steps=1", "sampling.tasks_per_step=2", "sampling.group_size=2",
        "metrics.replay=true", "metrics.samples_every=1", "metrics.samples_per_step=4", "evaluation.at_start=false",
        "evaluation.num_tasks=2", "trainer.parity.every=1", "trainer.minibatches=1",
        "rollout.media=false", "rollout.max_env_steps=20",
    ]  # fmt: skip
    config = validate(apply_overrides(read_config(CONFIG), overrides), RoboticsRunConfig, "test")
    Trainer(config, build_adapter(config), cpu=True).run()
    [line] = (config.run_dir / "metrics.jsonl").read_text().splitlines()
    assert json.loads(line)["parity/over"] == 0.0
    record = read_rollout(config.run_dir, 1, 2)
    names, rows = decision_rows(record)
    assert len(rows) == record["num_decisions"] > 0
    assert "id" not in names  # decisions of a robot are no tokens
    assert all(str(row[1]).startswith(f"{place}: joints to [") for place, row in enumerate(rows))
    assert all(isinstance(row[names.index("old")], float) for row in rows)
    assert "joints to" in as_html(record, config.run_dir)
