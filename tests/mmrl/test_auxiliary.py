"""The seam for auxiliary terms, on a bandit whose "attention" is a softmax of its own."""

from dataclasses import dataclass, field, replace
from types import SimpleNamespace

import pytest
import torch
from accelerate import Accelerator

from mmrl.attention_losses import jensen_shannon, without_self
from mmrl.auxiliary import Recorded, fitted, last_decisions
from mmrl.collection import Collected
from mmrl.errors import ConfigError, NumericsError
from mmrl.losses import aggregation_weights
from mmrl.testing import BanditAdapter
from mmrl.trainer import Trainer
from mmrl.types import RolloutBatch
from mmrl.update import Updater

PROMPT = 1
"""Prompt positions of a bandit."""


@dataclass(kw_only=True)
class LookingBandit(BanditAdapter):
    """Its attention over the prompt, the arms chosen so far and itself is a softmax of the policy's logits."""

    calls: list = field(default_factory=list)
    extras = frozenset({"attention", "media_columns"})

    def forward(self, policy, batch, needs=frozenset()):
        self.calls.append((policy, len(batch), needs, torch.is_grad_enabled()))
        forward = super().forward(policy, batch, needs)
        width = batch.loss_mask.shape[1]
        logits = policy(batch.inputs.contexts)[:, None, : PROMPT + width]
        columns, tokens = torch.arange(PROMPT + width), torch.arange(width)
        visible = (columns <= PROMPT + tokens[:, None]) & batch.loss_mask[:, :, None]
        rows = logits.expand(-1, width, -1).masked_fill(~visible, -1e9).softmax(dim=-1) * visible
        media = torch.zeros(len(batch), PROMPT + width)
        media[:, 0] = 1
        return replace(forward, extras={"attention": rows, "media_columns": media})

    def build_teacher(self, config):
        teacher = self.build_policy().requires_grad_(False)
        teacher.weight.mul_(-1)
        return teacher


def uneven_rollouts(policy):
    """Five groups of 2, 4, 1, 3 and 2 rollouts with one to three decisions each."""
    adapter, parts = BanditAdapter(), []
    for group, size in enumerate([2, 4, 1, 3, 2]):
        task = adapter.task_source("train")[group]
        part = adapter.rollout(policy, [task], group_size=size, seeds=torch.arange(size) + 100 * group)
        parts.append(replace(part, group_ids=part.group_ids + group))
    batch = RolloutBatch.concat(parts)
    return replace(batch, rewards=torch.zeros(len(batch)))


def collected_from(batch, advantages=None):
    if advantages is None:
        advantages = torch.randn(len(batch), generator=torch.Generator().manual_seed(0))
    return Collected(batch=batch, advantages=advantages, reference_log_probs=None, totals={})


@pytest.fixture
def make(bandit_config):
    """``make(...)``: an updater, its adapter and policy, and the gradients that reach the optimizer."""

    def build(**changes):
        base = {
            "algorithm": {"name": "grpo", "aggregation": "sequence_mean"},
            "optimizer": {"max_grad_norm": None, "learning_rate": 0.1},
            "trainer": {"num_steps": 6, "epochs_per_batch": 2},
        }
        config = bandit_config(**{**base, **changes})
        adapter = LookingBandit()
        policy = adapter.build_policy()
        updater, gradients = Updater(config, adapter, policy, Accelerator(cpu=True)), []
        updater.optimizer.register_step_pre_hook(lambda *_: gradients.append(policy.weight.grad.clone()))
        return SimpleNamespace(updater=updater, adapter=adapter, policy=policy, gradients=gradients)

    return build


RAL = {"ral": {"weight": 50.0}}
TEACHER = {"path": "larger"}


def gradients_of(run, batch, advantages=None):
    run.updater.update(collected_from(batch, advantages))
    return run.gradients


def test_attention_advantage_acts_from_the_second_optimizer_step_on(make):
    plain, ral = make(), make(auxiliary=RAL)
    batch = uneven_rollouts(plain.policy)
    first, second = (gradients_of(run, batch) for run in (plain, ral))
    torch.testing.assert_close(second[0], first[0])
    assert (second[1] - first[1]).abs().max() > 1e-5


def test_at_the_policy_that_sampled_the_term_and_its_gradient_are_exactly_zero(make):
    run = make(auxiliary=RAL, optimizer={"learning_rate": 1e-30})
    batch = uneven_rollouts(run.policy)
    totals = run.updater.update(collected_from(batch))
    assert totals["ral/jsd"][0] == 0.0 and totals["loss/ral"][0] == 0.0
    plain = make(optimizer={"learning_rate": 1e-30})
    for with_term, without in zip(run.gradients, gradients_of(plain, batch)):
        assert torch.equal(with_term, without)


def test_the_gradient_is_that_of_advantage_times_divergence_in_the_same_mean(make):
    plain, ral = make(), make(auxiliary=RAL)
    batch = uneven_rollouts(plain.policy)
    advantages = torch.randn(len(batch), generator=torch.Generator().manual_seed(0))
    gradients_of(plain, batch, advantages)
    # The state in front of the second step: one AdamW step of the first gradient, which both runs share.
    policy = LookingBandit().build_policy()
    old = LookingBandit().forward(policy, batch).extras["attention"].detach()
    optimizer = torch.optim.AdamW(policy.parameters(), lr=0.1, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.0)
    policy.weight.grad = plain.gradients[0].clone()
    optimizer.step()
    policy.zero_grad()
    now = LookingBandit().forward(policy, batch).extras["attention"]
    lengths = torch.full((len(batch),), PROMPT)
    divergence = jensen_shannon(without_self(now, lengths), without_self(old, lengths))
    weights = aggregation_weights(
        batch.loss_mask, "sequence_mean", num_decisions=int(batch.loss_mask.sum()), num_rows=len(batch)
    )
    expected = torch.autograd.grad(50.0 * (weights * advantages[:, None] * divergence).sum(), policy.weight)[0]
    gradients_of(ral, batch, advantages)
    torch.testing.assert_close(ral.gradients[1] - plain.gradients[1], expected, atol=1e-6, rtol=1e-4)


TERMS = {
    "ral": RAL,
    "distillation": {"attention_distillation": {"weight": 3.0, "aggregation": "sequence_sum"}, "teacher": TEACHER},
    "both": {**RAL, "attention_distillation": {"weight": 3.0}, "teacher": TEACHER},
}


@pytest.mark.parametrize("name", TERMS)
@pytest.mark.parametrize("minibatches", [1, 2])
def test_micro_batches_do_not_change_the_gradient(make, name, minibatches):
    results = []
    for micro_batch_tokens in (1, 8, 10_000):
        run = make(
            auxiliary=TERMS[name],
            trainer={"micro_batch_tokens": micro_batch_tokens, "epochs_per_batch": 2, "minibatches": minibatches},
        )
        results.append(gradients_of(run, uneven_rollouts(run.policy)))
    for other in results[1:]:
        for left, right in zip(other, results[0]):
            torch.testing.assert_close(left, right, atol=1e-6, rtol=1e-4)


def test_old_attention_is_recorded_before_the_first_step_and_only_where_that_step_does_not_say_it_itself(make):
    run = make(auxiliary=RAL, trainer={"minibatches": 2, "epochs_per_batch": 2})
    batch = uneven_rollouts(run.policy)
    run.updater.update(collected_from(batch))
    calls = [(rows, with_gradient) for _, rows, _, with_gradient in run.adapter.calls]
    # Groups 1 and 3 (7 rows) belong to the second step; then four steps of 0, 2, 4 (5 rows) and 1, 3 in turn.
    assert calls == [(7, False), (5, True), (7, True), (5, True), (7, True)]


def test_the_teacher_is_asked_once_and_rows_of_advantage_zero_count(make):
    run = make(auxiliary=TERMS["distillation"])
    batch = uneven_rollouts(run.policy)
    before = run.updater.auxiliary.teacher.weight.clone()
    totals = run.updater.update(collected_from(batch, torch.zeros(len(batch))))
    teacher = run.updater.auxiliary.teacher
    assert [rows for policy, rows, _, _ in run.adapter.calls if policy is teacher] == [len(batch)]
    assert run.gradients[0].abs().max() > 0 and totals["attention_distillation/jsd"][0] > 0
    assert torch.equal(teacher.weight, before)


def test_a_term_may_be_averaged_in_its_own_way(make):
    terms = {**RAL, "attention_distillation": {"weight": 3.0, "aggregation": "sequence_sum"}, "teacher": TEACHER}
    mask = torch.tensor([[True, True], [True, False]])
    weights = make(auxiliary=terms).updater.auxiliary.weights(mask, "sequence_mean", num_decisions=3, num_rows=2)
    assert weights["ral"].tolist() == [[12.5, 12.5], [25.0, 0.0]]  # 50 / (2 rows x length)
    assert weights["attention_distillation"].tolist() == [[1.5, 1.5], [1.5, 0.0]]  # 3 / 2 rows


def test_distillation_pulls_attention_to_the_teachers(make):
    run = make(auxiliary=TERMS["distillation"], trainer={"epochs_per_batch": 60})
    batch = uneven_rollouts(run.policy)
    gaps = []
    for _ in range(2):
        lengths = torch.full((len(batch),), PROMPT)
        now, goal = (without_self(LookingBandit().forward(policy, batch).extras["attention"], lengths)
                     for policy in (run.policy, run.updater.auxiliary.teacher))  # fmt: skip
        gaps.append(jensen_shannon(now, goal)[batch.loss_mask].mean().item())
        run.updater.update(collected_from(batch, torch.zeros(len(batch))))
    assert gaps[1] < 0.2 * gaps[0]


def test_what_is_logged_is_a_mean_over_decisions(make):
    run = make(auxiliary=RAL)
    batch = uneven_rollouts(run.policy)
    totals = run.updater.update(collected_from(batch))
    policy = LookingBandit().build_policy()
    rows = LookingBandit().forward(policy, batch).extras["attention"]
    p = without_self(rows, torch.full((len(batch),), PROMPT))[batch.loss_mask].detach()
    again = make(auxiliary=RAL, optimizer={"learning_rate": 1e-30})
    totals = again.updater.update(collected_from(batch))
    means = {name: value / count for name, (value, count) in totals.items() if name.startswith("attention/")}
    assert means["attention/first"] == pytest.approx(p[:, 0].mean().item(), rel=1e-5)
    assert means["attention/media"] == pytest.approx(p[:, 0].mean().item(), rel=1e-5)  # the prompt's only position
    assert means["attention/entropy"] == pytest.approx(-(p * p.clamp(min=1e-8).log()).sum(dim=-1).mean().item(), rel=1e-4)


def test_without_terms_nothing_is_asked_for(make):
    run = make()
    assert run.updater.auxiliary is None
    run.updater.update(collected_from(uneven_rollouts(run.policy)))
    assert {needs for _, _, needs, _ in run.adapter.calls} == {frozenset()}


def test_a_term_that_is_not_finite_stops_the_step_and_names_its_tasks(make, monkeypatch):
    run = make(auxiliary=RAL)
    batch = uneven_rollouts(run.policy)
    monkeypatch.setattr("mmrl.auxiliary_terms.jensen_shannon", lambda p, q: p.sum(dim=-1) / 0)
    with pytest.raises(NumericsError, match="train/0"):
        run.updater.update(collected_from(batch))


def test_one_optimizer_step_per_batch_is_refused_with_the_reason(bandit_config):
    with pytest.raises(ConfigError, match=r"exactly zero gradient .* trainer.minibatches=4"):
        bandit_config(auxiliary=RAL)
    assert bandit_config(auxiliary=RAL, trainer={"minibatches": 2}).auxiliary.ral.weight == 50.0


@pytest.mark.parametrize(
    ("section", "message"),
    [
        ({"attention_distillation": {}}, "attention_distillation needs a teacher"),
        ({"teacher": TEACHER}, "has nothing to teach"),
        ({"ral": {"weight": 0}}, "greater than 0"),
        ({"rall": {}}, "did you mean 'ral'"),
        ({"token_distillation": {"beta": 2}, "teacher": TEACHER}, "less than or equal to 1"),
    ],
)
def test_sections_that_make_no_sense_are_refused(bandit_config, section, message):
    with pytest.raises(ConfigError, match=message):
        bandit_config(auxiliary=section, trainer={"minibatches": 2})


def test_demonstrations_have_no_attention_that_sampled_them(bandit_config):
    with pytest.raises(ConfigError, match="demonstrations have none"):
        bandit_config(auxiliary=RAL, algorithm="sft", trainer={"minibatches": 2})


def test_a_modality_that_does_not_give_what_a_term_needs_is_refused_before_training(bandit_config):
    config = bandit_config(auxiliary=RAL, trainer={"minibatches": 2})
    with pytest.raises(ConfigError, match=r"auxiliary.ral needs attention, media_columns .* BanditAdapter gives none"):
        Trainer(config, BanditAdapter(), cpu=True)


def test_a_run_with_terms_resumes_to_the_same_files(bandit_config, files_of):
    runs = []
    for name, stops in (("whole", [4]), ("halves", [2, 4])):
        for stop in stops:
            config = bandit_config(name=name, auxiliary=RAL, trainer={"num_steps": stop, "minibatches": 2},
                                   optimizer={"schedule": "constant"})  # fmt: skip
            Trainer(config, LookingBandit(), cpu=True).run(resume=stop != stops[0])
        runs.append((config.run_dir / "metrics.jsonl").read_bytes())
    assert runs[0] == runs[1] and b"ral/jsd" in runs[0]


def test_recorded_rows_come_back_in_the_shape_that_is_asked_for():
    recorded = Recorded()
    mask = torch.tensor([[True, False, True], [True, False, False]])
    assert last_decisions(mask).tolist() == [3, 1]
    recorded.put("old", torch.tensor([4, 2]), last_decisions(mask), {"attention": torch.arange(12.0).view(2, 3, 2)})
    found = recorded.get(torch.tensor([2, 4]), 3, torch.device("cpu"))["old", "attention"]
    assert found.tolist() == [[[6, 7], [0, 0], [0, 0]], [[0, 1], [2, 3], [4, 5]]]
    assert recorded.knows("old", torch.tensor([2])) and not recorded.knows("old", torch.tensor([2, 3]))
    assert not recorded.knows("teacher", torch.tensor([2]))
    assert fitted(found, (2, 2, 3)).tolist() == [[[6, 7, 0], [0, 0, 0]], [[0, 1, 0], [2, 3, 0]]]


def test_half_precision_storage_rounds_what_is_kept(make):
    run = make(auxiliary={**RAL, "storage": "float16"})
    gradients_of(run, uneven_rollouts(run.policy))
    assert run.updater.auxiliary.config.storage == "float16"
    recorded = Recorded(torch.float16)
    recorded.put("old", torch.tensor([0]), torch.tensor([1]), {"attention": torch.tensor([[[1 / 3]]])})
    assert recorded.get(torch.tensor([0]), 1, torch.device("cpu"))["old", "attention"].item() == pytest.approx(1 / 3, rel=5e-4)
