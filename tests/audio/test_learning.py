"""The shipped policy writes down what it hears, and reward alone teaches it a question that was never demonstrated."""

from pathlib import Path

import pytest

from audio.rewards import thinking
from mmrl.cli import build_adapter, load_run
from mmrl.sampling import rollout_seeds
from mmrl.trainer import Trainer

CONFIGS = Path(__file__).parents[2] / "configs" / "audio"
HEARING = "[hear_beeps,hear_tones,hear_knocks,hear_sounds,hear_digits]"


def test_the_shipped_policy_hears_clips_and_voices_that_it_has_never_heard():
    config = load_run(CONFIGS / "tones.yaml", [f"tasks.eval_kinds={HEARING}", "trainer.num_threads=1"])
    adapter = build_adapter(config)
    source = adapter.task_source("eval")
    tasks = [source[index] for index in range(60)]
    batch = adapter.rollout(adapter.build_policy(), tasks, group_size=1, seeds=rollout_seeds(0, 0, 0, 60), greedy=True)
    right = [thinking(outcome.text) == task.columns["heard"] for task, outcome in zip(tasks, batch.outcomes)]
    assert sum(right) >= 55  # the whole transcript, word for word


def test_the_shipped_policy_fits_into_four_megabytes():
    assert sum(path.stat().st_size for path in (CONFIGS.parents[1] / "audio/assets/tone_listener").iterdir()) < 4_000_000


@pytest.mark.slow
def test_reward_alone_teaches_to_count_beeps(tmp_path):
    overrides = [
        f"output_dir={tmp_path}", "tasks.kinds=[count]", "tasks.eval_kinds=[count]", "trainer.num_steps=25",
        "trainer.num_threads=1", "sampling.tasks_per_step=8", "sampling.group_size=8", "evaluation.num_tasks=80",
        "metrics.samples_every=0",
    ]  # fmt: skip
    config = load_run(CONFIGS / "tones.yaml", overrides)
    evaluations = Trainer(config, build_adapter(config), cpu=True).run()
    before, after = evaluations[0]["overall"]["mean"], evaluations[25]["overall"]["mean"]
    assert before < 0.6 and after > before + 0.15
