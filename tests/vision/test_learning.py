"""The shipped policy reads digits, and reward alone teaches it a question that was never demonstrated."""

from pathlib import Path

import pytest

from mmrl.cli import build_adapter, load_run
from mmrl.evaluation import evaluate
from mmrl.rewards import resolve_terms
from mmrl.trainer import Trainer

CONFIGS = Path(__file__).parents[2] / "configs" / "vision"


def test_the_shipped_policy_reads_digits_that_it_has_never_seen():
    config = load_run(
        CONFIGS / "read_digits.yaml", ["tasks.eval_kinds=[read,read_first,read_second]", "evaluation.num_tasks=90"]
    )
    adapter = build_adapter(config)
    terms = resolve_terms(config.rewards, adapter.reward_terms)
    result = evaluate(adapter, adapter.build_policy(), adapter.task_source("eval"), terms, config.evaluation)
    assert result["overall"]["mean"] > 0.93  # 0.987 on 600 tasks when it was made


def test_reward_alone_teaches_which_digit_is_larger(tmp_path):
    overrides = [
        f"output_dir={tmp_path}", "tasks.kinds=[larger]", "tasks.eval_kinds=[larger]", "trainer.num_steps=25",
        "trainer.num_threads=1", "sampling.tasks_per_step=8", "sampling.group_size=8", "optimizer.learning_rate=4e-4",
        "evaluation.num_tasks=80", "metrics.samples_every=0",
    ]  # fmt: skip
    config = load_run(CONFIGS / "read_digits.yaml", overrides)
    evaluations = Trainer(config, build_adapter(config), cpu=True).run()
    before, after = evaluations[0]["overall"]["mean"], evaluations[25]["overall"]["mean"]
    assert before < 0.55 and after > before + 0.15


@pytest.mark.slow
def test_supervised_warm_up_learns_to_read(tmp_path):
    overrides = [
        f"output_dir={tmp_path}", "tasks.kinds=[read]", "tasks.eval_kinds=[read]", "trainer.num_steps=250",
        "evaluation.num_tasks=100", "evaluation.every=0", "metrics.samples_every=0", "optimizer.warmup_steps=30",
    ]  # fmt: skip
    config = load_run(CONFIGS / "read_digits_warmup.yaml", overrides)
    evaluations = Trainer(config, build_adapter(config), cpu=True).run()
    assert evaluations[0]["overall"]["mean"] < 0.2 and evaluations[250]["overall"]["mean"] > 0.8
