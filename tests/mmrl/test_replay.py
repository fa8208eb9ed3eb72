"""`mmrl.parity`, `mmrl.replay` and ``mmrl replay``: what a step recorded is what is shown, and a mismatch stops the run."""

import json
import math
from dataclasses import dataclass, replace

import pytest
import torch

from mmrl import cli
from mmrl.errors import DataError, NumericsError, ParityError
from mmrl.parity import compare
from mmrl.replay import PassLog, decision_labels
from mmrl.replay_view import as_html, decision_rows, facts, passes_note, read_rollout
from mmrl.report import render
from mmrl.report_data import read_run
from mmrl.testing import BanditAdapter
from mmrl.trainer import Trainer
from mmrl.types import Media

REPLAY = {"metrics": {"replay": True, "samples_every": 1, "samples_per_step": 16}}
PICTURE = bytes.fromhex(
    "89504e470d0a1a0a0000000d49484452000000010000000108000000003a7e9b550000000a49444154789c6360000000020001"
    "48afa4710000000049454e44ae426082"
)


@dataclass(kw_only=True)
class Shifted(BanditAdapter):
    """Whose forward pass differs from what was sampled, on one decision of one task."""

    shift: float = 0.0

    def forward(self, policy, batch, needs=frozenset()):
        result = super().forward(policy, batch, needs)
        there = torch.zeros_like(batch.loss_mask)
        for row, task in enumerate(batch.tasks):
            there[row, 1:2] = task.id == "train/2"
        return replace(result, log_probs=torch.where(there, result.log_probs + self.shift, result.log_probs))


def rollouts(num_tasks=4, group_size=4):
    adapter = BanditAdapter()
    seeds = torch.arange(num_tasks * group_size)
    batch = adapter.rollout(
        adapter.build_policy(), adapter.task_source("train")[:num_tasks], group_size=group_size, seeds=seeds
    )
    return adapter, batch


def train(config, adapter=None):
    trainer = Trainer(config, adapter or BanditAdapter(), cpu=True)
    trainer.run()
    return trainer


def samples(config, step):
    path = config.run_dir / "samples" / f"step_{step:06d}.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()]


# Parity


def test_equal_log_probabilities_agree_and_masked_positions_do_not_matter():
    _, batch = rollouts()
    changed = torch.where(batch.loss_mask, batch.old_log_probs, 99.0)
    found = compare(batch, changed, tolerance=1e-9)
    assert found.breach is None
    assert found.largest == 0.0
    assert found.totals == {"parity/mean": (0.0, int(batch.loss_mask.sum())), "parity/over": (0, int(batch.loss_mask.sum()))}


@pytest.mark.parametrize("value", [0.06, -0.06, math.nan, math.inf, -math.inf])
def test_the_first_decision_that_differs_is_named(value):
    _, batch = rollouts()
    changed = batch.old_log_probs.clone()
    row = next(row for row in range(8, 16) if batch.loss_mask[row, 1])
    changed[row, 1] += value
    changed[-1, 0] += value
    found = compare(batch, changed, tolerance=0.05)
    assert (found.breach.row, found.breach.decision, found.breach.num_over) == (row, 1, 2)
    assert found.breach.task_id == batch.tasks[row].id
    assert compare(batch, batch.old_log_probs + 0.04, tolerance=0.05).breach is None


def test_a_sampling_engine_is_compared_where_there_is_one():
    _, batch = rollouts()
    batch = replace(batch, sampler_log_probs=batch.old_log_probs - 1.0)
    assert compare(batch, batch.old_log_probs, tolerance=0.5).breach is not None
    assert compare(batch, batch.old_log_probs - 1.0, tolerance=0.5).breach is None


def test_a_breach_names_the_decision_writes_the_step_and_stops_before_the_update(bandit_config, capsys):
    config = bandit_config(trainer={"parity": {"every": 3}}, sampling={"order": "sequential"})
    adapter = Shifted(shift=0.2)
    trainer = Trainer(config, adapter, cpu=True)
    before = trainer.policy.weight.detach().clone()
    with pytest.raises(ParityError, match=r"task 'train/2', rollout 8, decision 1") as caught:
        trainer.run()
    assert torch.equal(trainer.policy.weight, before)
    assert "This step was not taken" in str(caught.value) and "--step 1" in str(caught.value)
    assert json.loads((config.run_dir / "failure" / "parity.json").read_text())["train_step"] == 0
    record = read_rollout(config.run_dir, 1, 8)
    decision = record["decisions"]
    assert decision["passes"][0]["new"][1] - decision["old"][1] == pytest.approx(0.2, abs=1e-6)
    assert cli.main(["replay", str(config.run_dir), "--step", "1", "--rollout", "8"]) == 0
    assert "train/2" in capsys.readouterr().out


def test_parity_is_checked_on_a_share_of_the_steps_and_changes_nothing(bandit_config, files_of):
    plain = train(bandit_config(name="plain"))
    config = bandit_config(name="guarded", trainer={"parity": {"every": 2}})
    guarded = train(config)
    assert torch.equal(plain.policy.weight, guarded.policy.weight)
    lines = [json.loads(line) for line in (config.run_dir / "metrics.jsonl").read_text().splitlines()]
    assert [line["train_step"] for line in lines if "parity/over" in line] == [1, 2, 4, 6]
    assert all(line["parity/mean"] < 1e-6 for line in lines if "parity/mean" in line)


# What is recorded


def test_a_record_holds_the_numbers_of_the_step_exactly(bandit_config):
    config = bandit_config(**REPLAY, trainer={"num_steps": 2, "epochs_per_batch": 3})
    trainer = Trainer(config, BanditAdapter(), cpu=True)
    collected = []
    original = trainer._collect
    trainer._collect = lambda: collected.append(original()) or collected[-1]
    trainer.run()
    for row, sample in enumerate(samples(config, 2)):
        batch, decisions = collected[1].batch, sample["decisions"]
        count = int(batch.num_decisions[row])
        assert sample["rollout"] == row
        assert decisions["old"] == batch.old_log_probs[row, :count].tolist()  # float32 survives JSON
        assert decisions["mask"] == [1] * count
        assert decisions["advantage"] == [float(collected[1].advantages[row])] * count
        assert len(decisions["passes"]) == (3 if collected[1].advantages[row] else 0)
        for seen in decisions["passes"]:
            for new, old, ratio in zip(seen["new"], decisions["old"], seen["ratio"]):
                assert ratio == pytest.approx(math.exp(new - old), rel=1e-5)
    first = [seen for sample in samples(config, 2) for seen in sample["decisions"]["passes"][:1]]
    assert {round(value, 5) for seen in first for value in seen["ratio"]} == {1.0}
    last = [seen for sample in samples(config, 2) for seen in sample["decisions"]["passes"][2:]]
    assert any(abs(value - 1) > 0.01 for seen in last for value in seen["ratio"])


def test_clipped_decisions_are_marked_as_the_surrogate_clips_them(bandit_config):
    changes = {"epochs_per_batch": 4, "num_steps": 1}
    config = bandit_config(**REPLAY, trainer=changes, optimizer={"learning_rate": 0.5}, algorithm={"name": "grpo"})
    train(config)
    low, high = config.algorithm.clip_low, config.algorithm.clip_high
    seen = set()
    for sample in samples(config, 1):
        for entry in sample["decisions"]["passes"]:
            for ratio, clip, credit in zip(entry["ratio"], entry["clip"], sample["decisions"]["advantage"]):
                expected = "high" if credit > 0 and ratio > 1 + high else "low" if credit < 0 and ratio < 1 - low else ""
                assert clip == expected
                seen.add(clip)
    assert seen == {"", "low", "high"}


def test_without_the_setting_samples_are_as_they_were(bandit_config):
    config = bandit_config(metrics={"samples_every": 1})
    train(config)
    sample = samples(config, 1)[0]
    assert "decisions" not in sample and "rollout" not in sample
    assert decision_rows(sample) == ([], [])
    assert "metrics.replay: true" in passes_note(sample)


def test_a_numerics_failure_leaves_its_decisions(bandit_config):
    class Broken(BanditAdapter):
        def forward(self, policy, batch, needs=frozenset()):
            result = super().forward(policy, batch, needs)
            return replace(result, log_probs=result.log_probs * torch.nan)

    config = bandit_config()
    with pytest.raises(NumericsError):
        train(config, Broken())
    passes = [seen for sample in samples(config, 1) for seen in sample["decisions"]["passes"]]
    assert passes and passes[0]["new"][0] is None


def test_labels_are_lines_where_there_are_enough_and_numbers_otherwise():
    adapter, batch = rollouts()
    assert decision_labels(adapter, batch, 8) == ["0", "1", "2"]  # one line for three choices

    class Robot(BanditAdapter):
        def describe(self, batch, row):
            lines = [f"{place}: joints to [{arm}]" for place, arm in enumerate(batch.outcomes[row])]
            return replace(super().describe(batch, row), completion="\n".join([*lines, "end: success"]))

    labels = decision_labels(Robot(), batch, 8)
    assert labels[0] == f"0: joints to [{batch.outcomes[8][0]}]"
    assert len(labels) == 3


def test_passes_are_found_by_seed_whatever_the_order():
    _, batch = rollouts()
    log = PassLog(limit=20.0)
    order = torch.tensor([3, 0])
    log.note(batch.select(order), batch.select(order).old_log_probs)
    width = batch.old_log_probs.shape[1]
    assert len(log.of(int(batch.seeds[1]), width)) == 0
    [found] = log.of(int(batch.seeds[3]), width)
    assert torch.equal(found[batch.loss_mask[3]], batch.old_log_probs[3][batch.loss_mask[3]])
    assert log.num_extreme == 0


# What is shown


@pytest.fixture
def finished(bandit_config):
    class Pictured(BanditAdapter):
        def describe(self, batch, row):
            picture = Media(kind="image", data=PICTURE, suffix=".png", caption="<arm>")
            return replace(super().describe(batch, row), media=(picture,), prompt="<script>alert(1)</script>")

    config = bandit_config(**REPLAY)
    train(config, Pictured())
    return config


def test_the_command_shows_every_decision_or_writes_a_page(finished, capsys, tmp_path):
    row = next(row for row, sample in enumerate(samples(finished, 3)) if sample["decisions"]["passes"])
    sample = samples(finished, 3)[row]
    assert cli.main(["replay", str(finished.run_dir), "--step", "3", "--rollout", str(row)]) == 0
    out = capsys.readouterr().out
    for name in ("old", "new", "ratio", "clip", "mask", "advantage", "reward accuracy", "seed", sample["task_id"]):
        assert name in out
    assert f"{sample['decisions']['old'][0]:.6g}" in out
    assert cli.main(["replay", str(finished.run_dir), "--step", "3", "--rollout", str(row), "--html"]) == 0
    page = (finished.run_dir / "replay" / f"step_000003_{row}.html").read_text()
    assert capsys.readouterr().out.strip().endswith(f"step_000003_{row}.html")
    assert "<script>" not in page and "&lt;script&gt;" in page and "&lt;arm&gt;" in page
    assert "data:image/png;base64," in page and "http" not in page
    assert page.count("<tr") == 1 + len(sample["decisions"]["label"])
    assert cli.main(["replay", str(finished.run_dir), "--step", "3", "--html", str(tmp_path / "a" / "b.html")]) == 0
    assert (tmp_path / "a" / "b.html").is_file()


@pytest.mark.parametrize(
    ("arguments", "parts"),
    [
        (["--step", "99"], ["no rollouts of step 99", "steps with samples: 1, 2, 3, 4, 5, 6"]),
        (["--step", "2", "--rollout", "77"], ["no rollout 77", "holds rollouts 0 to 15"]),
    ],
)
def test_what_is_not_there_is_named_with_what_is(finished, capsys, arguments, parts):
    assert cli.main(["replay", str(finished.run_dir), *arguments]) == 2
    err = capsys.readouterr().err
    assert err.count("\n") == 1
    assert [part for part in parts if part not in err] == []


def test_a_pass_that_was_not_made_is_refused(finished):
    record = next(sample for sample in samples(finished, 3) if sample["decisions"]["passes"])
    with pytest.raises(DataError, match="in 1 passes, 0 to 0"):
        decision_rows(record, 1)


def test_media_outside_of_the_run_are_not_read(finished, tmp_path):
    (tmp_path / "secret.png").write_bytes(PICTURE)
    record = {**samples(finished, 3)[0], "media": [{"kind": "image", "path": "../secret.png"}]}
    page = as_html({"rollout": 0, **record}, finished.run_dir)
    assert "not found: ../secret.png" in page and "base64" not in page


def test_facts_name_each_term_with_its_weight(finished):
    listed = dict(facts({"rollout": 0, **samples(finished, 3)[0]}))
    assert listed["reward accuracy"].endswith(" x 1")
    assert {"seed", "task id", "advantage", "reward"} <= listed.keys()


def test_the_report_holds_the_decisions_of_its_samples(finished):
    page = render(read_run(finished.run_dir), finished.run_dir)
    assert '"written"' in page and '"ratio"' in page and "decisionTable" in page
    (finished.run_dir / "samples" / "step_000002.jsonl").write_text('{"train_step": 2, "decisions": {"passes": 5}}\n')
    render(read_run(finished.run_dir), finished.run_dir)  # what another program wrote is left out
