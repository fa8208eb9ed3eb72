"""`mmrl.update` on bandit rollouts whose advantages are set by hand."""

import math
from dataclasses import dataclass, field, replace
from types import SimpleNamespace

import pytest
import torch
from accelerate import Accelerator
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from mmrl import recipe
from mmrl.algorithms import PRESETS
from mmrl.checkpoint import policy_checksum
from mmrl.collection import Collected
from mmrl.config import OptimizerConfig
from mmrl.errors import NumericsError
from mmrl.losses import aggregation_weights, weighted_sum
from mmrl.selection import SUBSAMPLES
from mmrl.testing import BanditAdapter
from mmrl.types import RolloutBatch
from mmrl.update import Updater, build_optimizer, learning_rate

AGGREGATIONS = ["token_mean", "sequence_mean", "constant"]


@dataclass(kw_only=True)
class RecordingAdapter(BanditAdapter):
    """Remembers the batches that `forward` was given."""

    batches: list = field(default_factory=list)

    def forward(self, policy, batch, needs=frozenset()):
        self.batches.append(batch)
        return super().forward(policy, batch, needs)


def uneven_rollouts(policy):
    """Five groups of 2, 5, 1, 3 and 5 rollouts with one to three decisions each."""
    adapter, parts = BanditAdapter(), []
    for group, size in enumerate([2, 5, 1, 3, 5]):
        task = adapter.task_source("train")[group]
        part = adapter.rollout(policy, [task], group_size=size, seeds=torch.arange(size) + 100 * group)
        parts.append(replace(part, group_ids=part.group_ids + group))
    batch = RolloutBatch.concat(parts)
    return replace(batch, rewards=torch.zeros(len(batch)))


def collected_from(batch, advantages=None, *, reference=False):
    if advantages is None:
        advantages = torch.randn(len(batch), generator=torch.Generator().manual_seed(0))
    log_probs = (batch.old_log_probs - 0.3) * batch.loss_mask if reference else None
    return Collected(batch=batch, advantages=advantages, reference_log_probs=log_probs, totals={})


@pytest.fixture
def make(bandit_config):
    """``make(...)``: updater, adapter, policy and the gradients that reach the optimizer, in a list."""

    def build(adapter=None, policy=None, **changes):
        config = bandit_config(**{"optimizer": {"max_grad_norm": None, "learning_rate": 0.1}, **changes})
        adapter = adapter or RecordingAdapter()
        policy = policy or adapter.build_policy()
        updater, gradients = Updater(config, adapter, policy, Accelerator(cpu=True)), []
        updater.optimizer.register_step_pre_hook(
            lambda *_: gradients.append([parameter.grad.clone() for parameter in policy.parameters()])
        )
        return SimpleNamespace(updater=updater, adapter=adapter, policy=policy, gradients=gradients)

    return build


def gradient_of_everything(config, policy, collected, horizon):
    """The definition: all rows in one pass, with weights that count all rows."""
    batch, algorithm = collected.batch, config.algorithm
    mask = recipe.effective_mask(algorithm, batch)
    weights = aggregation_weights(
        mask, algorithm.aggregation, num_decisions=int(mask.sum()), num_rows=len(batch), horizon=horizon
    )
    forward = BanditAdapter().forward(policy, batch, frozenset({"entropy"} if algorithm.entropy_coef else ()))
    losses = recipe.decision_losses(
        algorithm, forward, batch.old_log_probs, mask, collected.advantages, collected.reference_log_probs
    )
    return torch.autograd.grad(weighted_sum(losses.losses, weights), policy.weight)[0]


# Gradients


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
@pytest.mark.parametrize("extra", [{}, {"kl_coef": 0.3, "entropy_coef": 0.2}])
@pytest.mark.parametrize("micro_batch_tokens", [1, 8, 13, 10_000])
def test_micro_batches_do_not_change_the_gradient(make, aggregation, extra, micro_batch_tokens):
    run = make(
        algorithm={"name": "grpo", "aggregation": aggregation, **extra}, trainer={"micro_batch_tokens": micro_batch_tokens}
    )
    batch = uneven_rollouts(run.policy)
    with torch.no_grad():
        run.policy.weight.add_(0.1)  # ratios stay 1, since a softmax does not see a shift; then move one arm
        run.policy.weight[:, 0].add_(0.15)
    collected = collected_from(batch, reference="kl_coef" in extra)
    expected = gradient_of_everything(run.updater.config, run.policy, collected, horizon=3)
    run.updater.update(collected)
    torch.testing.assert_close(run.gradients[0][0], expected, atol=1e-6, rtol=1e-5)
    passes = len(run.adapter.batches)
    assert passes == {1: 16, 8: passes, 13: passes, 10_000: 1}[micro_batch_tokens]
    assert micro_batch_tokens not in (8, 13) or 1 < passes < 16


def test_the_gradient_of_one_choice_is_the_textbook_one(make):
    # d(-A log softmax(z)_a)/dz = -A (onehot(a) - p), here with p = 1/5 everywhere, A = 2, and a mean over 1 + 2 decisions.
    run = make(algorithm="dapo")
    nn.init.zeros_(run.policy.weight)
    tasks = run.adapter.task_source("train")[:2]  # contexts 0 and 1, one and two decisions
    batch = run.adapter.demonstrate(run.policy, tasks, seeds=torch.arange(2))
    batch = replace(batch, old_log_probs=torch.full((2, 2), math.log(1 / 5)), rewards=torch.zeros(2))
    run.updater.update(collected_from(batch, torch.tensor([2.0, -1.0])))
    expected = torch.zeros(4, 5)
    expected[0] = -2.0 * (torch.eye(5)[0] - 0.2) / 3
    expected[1] = 1.0 * (torch.eye(5)[1] - 0.2) * 2 / 3
    torch.testing.assert_close(run.gradients[0][0], expected)


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
def test_rows_of_advantage_zero_are_counted_but_not_computed(make, aggregation):
    run = make(algorithm={"name": "grpo", "aggregation": aggregation})
    batch = uneven_rollouts(run.policy)
    advantages = torch.zeros(len(batch))
    advantages[3], advantages[15] = 1.0, -2.0
    collected = collected_from(batch, advantages)
    expected = gradient_of_everything(run.updater.config, run.policy, collected, horizon=3)
    run.updater.update(collected)
    assert [batch.seeds.tolist() for batch in run.adapter.batches] == [[101, 404]]
    torch.testing.assert_close(run.gradients[0][0], expected)


@pytest.mark.parametrize("extra", [{"kl_coef": 0.3}, {"entropy_coef": 0.3}])
def test_rows_of_advantage_zero_are_computed_when_another_term_needs_them(make, extra):
    run = make(algorithm={"name": "grpo", **extra})
    batch = uneven_rollouts(run.policy)
    run.updater.update(collected_from(batch, torch.zeros(len(batch)), reference="kl_coef" in extra))
    assert sum(len(batch) for batch in run.adapter.batches) == len(batch)
    assert run.gradients[0][0].abs().max() > 0


def test_a_kl_in_the_reward_does_not_make_rows_of_advantage_zero_matter(make):
    run = make(algorithm={"name": "rloo", "kl_coef": 0.3})
    batch = uneven_rollouts(run.policy)
    run.updater.update(collected_from(batch, torch.zeros(len(batch)), reference=True))
    assert run.adapter.batches == []


def test_without_signal_no_pass_is_paid_and_nothing_moves(make):
    run = make(trainer={"epochs_per_batch": 2, "minibatches": 2}, optimizer={"weight_decay": 0.5})
    before = policy_checksum(run.policy)
    batch = uneven_rollouts(run.policy)
    totals = run.updater.update(collected_from(batch, torch.zeros(len(batch))))
    assert run.adapter.batches == []
    assert policy_checksum(run.policy) == before
    assert run.updater.optimizer_step == 4  # the schedule moves on
    assert list(totals) == ["optimizer/learning_rate"]


def test_truncated_rollouts_stay_in_the_count_of_rollouts_only(make):
    run = make(algorithm={"name": "grpo", "mask_truncated": True})
    batch = uneven_rollouts(run.policy)
    reasons = tuple("length" if row % 2 else "stop" for row in range(len(batch)))
    collected = collected_from(replace(batch, stop_reasons=reasons))
    expected = gradient_of_everything(run.updater.config, run.policy, collected, horizon=3)
    run.updater.update(collected)
    torch.testing.assert_close(run.gradients[0][0], expected)
    assert sum(len(batch) for batch in run.adapter.batches) == 8


@pytest.mark.parametrize(("horizon", "used"), [(None, 3), (7, 7)])
def test_the_horizon_is_the_longest_rollout_unless_set(make, horizon, used):
    run = make(algorithm={"name": "dr_grpo", "horizon": horizon})
    collected = collected_from(uneven_rollouts(run.policy))
    expected = gradient_of_everything(run.updater.config, run.policy, collected, horizon=used)
    run.updater.update(collected)
    torch.testing.assert_close(run.gradients[0][0], expected)


# Optimizer steps


def test_every_epoch_walks_through_all_groups_and_never_splits_one(make):
    run = make(trainer={"epochs_per_batch": 3, "minibatches": 2}, sampling={"tasks_per_step": 4})
    rollouts = uneven_rollouts(run.policy)
    run.updater.update(collected_from(rollouts))
    groups = [sorted(set(batch.group_ids.tolist())) for batch in run.adapter.batches]
    assert groups == [[0, 2, 4], [1, 3]] * 3  # every second one, whatever share of the groups a process holds
    sizes = [sum(int((rollouts.group_ids == group).sum()) for group in part) for part in groups]
    assert [len(batch) for batch in run.adapter.batches] == sizes and sum(sizes) == 3 * len(rollouts)
    assert len(run.gradients) == run.updater.optimizer_step == 6


def test_fewer_groups_than_minibatches_leave_an_optimizer_step_out(make):
    run = make(trainer={"minibatches": 4}, sampling={"tasks_per_step": 4})
    batch = uneven_rollouts(run.policy)
    run.updater.update(collected_from(batch.select((batch.group_ids < 2).nonzero()[:, 0])))
    assert len(run.gradients) == 2
    assert run.updater.optimizer_step == 4


def test_the_ratio_refers_to_the_policy_that_sampled_in_every_epoch(make):
    run = make(trainer={"epochs_per_batch": 2})
    totals = run.updater.update(collected_from(uneven_rollouts(run.policy)))
    value, count = totals["ratio/max_log"]
    assert count == 2
    assert value > 0.01  # 0 in the first epoch, and what the first step did in the second


def test_gradients_are_scaled_down_to_the_limit_and_the_norm_is_logged_before(make):
    free = make()
    batch = uneven_rollouts(free.policy)
    free.updater.update(collected_from(batch))
    norm = float(free.gradients[0][0].norm())
    limited = make(optimizer={"max_grad_norm": norm / 4})
    totals = limited.updater.update(collected_from(batch))
    torch.testing.assert_close(limited.gradients[0][0], free.gradients[0][0] / 4, rtol=1e-4, atol=1e-7)
    assert totals["optimizer/gradient_norm"][0] == pytest.approx(norm)


def test_the_loss_that_is_logged_is_the_mean_over_the_step(make):
    run = make(algorithm="dapo", trainer={"micro_batch_tokens": 8})
    batch = uneven_rollouts(run.policy)
    collected = collected_from(batch)
    totals = run.updater.update(collected)
    lengths = batch.num_decisions.float()
    # All ratios are 1, so the loss of a decision is minus its advantage.
    assert totals["loss/total"] == (pytest.approx(-float((collected.advantages * lengths).sum() / lengths.sum())), 1.0)
    assert totals["ratio/clip_high"] == (0.0, float(lengths.sum()))


def test_a_loss_that_is_not_finite_changes_nothing_and_names_the_tasks(make):
    run = make(trainer={"micro_batch_tokens": 8})
    batch = uneven_rollouts(run.policy)
    advantages = torch.ones(len(batch))
    advantages[8:11] = torch.nan  # the whole of group 3
    before = policy_checksum(run.policy)
    with pytest.raises(
        NumericsError, match=r"at optimizer step 1; tasks whose loss is not finite: train/3\. This step was not"
    ):
        run.updater.update(collected_from(batch, advantages))
    assert policy_checksum(run.policy) == before
    assert run.updater.optimizer_step == 0
    assert not run.updater.optimizer.state
    run.updater.update(collected_from(batch, torch.ones(len(batch))))  # and leaves no gradient behind
    assert run.gradients[0][0].isfinite().all()


def test_a_long_list_of_tasks_is_cut(make):
    run = make()
    batch = uneven_rollouts(run.policy)
    tasks = tuple(replace(task, id=f"task{row:02}") for row, task in enumerate(batch.tasks))
    with pytest.raises(NumericsError, match=r"task00, .*, task07 and 8 more\."):
        run.updater.update(collected_from(replace(batch, tasks=tasks), torch.full((16,), torch.inf)))


def test_a_gradient_that_overflows_stops_the_run_too(make):
    class Steep(RecordingAdapter):
        def forward(self, policy, batch, needs=frozenset()):
            result = super().forward(policy, batch, needs)
            result.log_probs.register_hook(lambda gradient: gradient * torch.inf)
            return result

    run = make(adapter=Steep())
    with pytest.raises(NumericsError, match=r"with gradient norm (nan|inf) .* tasks whose loss is not finite: none\."):
        run.updater.update(collected_from(uneven_rollouts(run.policy)))


# Micro-batches


@given(
    groups=st.lists(st.lists(st.tuples(st.integers(1, 6), st.booleans()), min_size=1, max_size=5), min_size=1, max_size=5),
    prompt=st.integers(0, 5),
    budget=st.integers(1, 40),
)
def test_micro_batches_hold_each_row_once_fit_the_budget_and_keep_groups_whole(groups, prompt, budget):
    group_ids = torch.tensor([number for number, group in enumerate(groups) for _ in group])
    lengths = torch.tensor([length for group in groups for length, _ in group])
    matters = torch.tensor([matter for group in groups for _, matter in group])
    batch = SimpleNamespace(
        inputs=SimpleNamespace(prompt_lengths=torch.full_like(lengths, prompt)), num_decisions=lengths, group_ids=group_ids
    )
    stub = SimpleNamespace(config=SimpleNamespace(trainer=SimpleNamespace(micro_batch_tokens=budget)))
    parts = [part.tolist() for part in Updater.micro_batches(stub, batch, torch.arange(len(lengths)), matters)]

    def positions(rows):
        return prompt * len({int(group_ids[row]) for row in rows}) + max(int(lengths[row]) for row in rows) * len(rows)

    assert [row for part in parts for row in part] == matters.nonzero()[:, 0].tolist()
    assert all(part and (positions(part) <= budget or len(part) == 1) for part in parts)
    for number in range(len(groups)):
        members = [row for row in range(len(lengths)) if group_ids[row] == number and matters[row]]
        homes = [part for part in parts if set(part) & set(members)]
        assert len(homes) <= 1 or positions(members) > budget


# The optimizer


def test_weight_decay_shrinks_matrices_only():
    policy = nn.Sequential(nn.Linear(3, 2), nn.LayerNorm(2), nn.Linear(2, 1).requires_grad_(False))
    optimizer = build_optimizer(policy, OptimizerConfig(learning_rate=0.1, weight_decay=0.5))
    before = [parameter.detach().clone() for parameter in policy.parameters()]
    for parameter in policy.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    # Decoupled decay with a zero gradient: w (1 - lr * decay).
    factors = [0.95, 1.0, 1.0, 1.0, 1.0, 1.0]
    for parameter, old, factor in zip(policy.parameters(), before, factors, strict=True):
        torch.testing.assert_close(parameter.detach(), old * factor)
    assert sum(len(group["params"]) for group in optimizer.param_groups) == 4


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({}, [1.0] * 8),
        ({"warmup_steps": 4}, [0.25, 0.5, 0.75, 1.0, 1.0, 1.0, 1.0, 1.0]),
        ({"schedule": "linear"}, [1 - k / 8 for k in range(8)]),
        ({"schedule": "linear", "warmup_steps": 4}, [0.25, 0.5, 0.75, 1.0, 1.0, 0.75, 0.5, 0.25]),
        ({"schedule": "linear", "final_fraction": 0.5}, [1 - k / 16 for k in range(8)]),
        ({"schedule": "cosine"}, [(1 + math.cos(math.pi * k / 8)) / 2 for k in range(8)]),
        ({"schedule": "cosine", "final_fraction": 0.2}, [0.2 + 0.8 * (1 + math.cos(math.pi * k / 8)) / 2 for k in range(8)]),
        ({"schedule": "cosine", "warmup_steps": 100}, [(k + 1) / 100 for k in range(8)]),
    ],
)
def test_the_learning_rate_follows_its_schedule(settings, expected):
    config = OptimizerConfig(learning_rate=2.0, **settings)
    assert [learning_rate(config, step, 8) / 2 for step in range(8)] == pytest.approx(expected)


def test_a_step_is_taken_at_the_rate_of_the_schedule(make):
    run = make(optimizer={"learning_rate": 0.4, "warmup_steps": 4})
    before = run.policy.weight.detach().clone()
    collected = collected_from(uneven_rollouts(run.policy))
    run.updater.update(collected)
    moved = (run.policy.weight.detach() - before).abs()
    assert float(moved.max()) == pytest.approx(0.1, rel=1e-3)  # Adam's first step is as long as the rate


@pytest.mark.parametrize("schedule", ["linear", "cosine"])
def test_the_learning_rate_ends_at_the_final_fraction_and_stays_there(schedule):
    config = OptimizerConfig(learning_rate=2.0, schedule=schedule, final_fraction=0.1)
    assert [learning_rate(config, step, 8) for step in (8, 9, 12, 100)] == pytest.approx([0.2] * 4)


def test_the_schedule_counts_optimizer_steps_not_train_steps(make):
    run = make(
        optimizer={"learning_rate": 1.0, "schedule": "linear"},
        trainer={"num_steps": 2, "epochs_per_batch": 2, "minibatches": 2},
    )
    collected = collected_from(uneven_rollouts(run.policy))
    first, second = run.updater.update(collected), run.updater.update(collected)
    # Eight optimizer steps at rates 1, 7/8, 6/8, 5/8 and then 4/8, 3/8, 2/8, 1/8.
    assert first["optimizer/learning_rate"] == (pytest.approx(26 / 8), 4.0)
    assert second["optimizer/learning_rate"] == (pytest.approx(10 / 8), 4.0)


# Recipes


def stale_collected(run, name, batch):
    """Credit of ``batch`` as preset ``name`` gives it, on rollouts whose policy has moved since."""
    algorithm = run.updater.config.algorithm
    rewards = torch.randint(0, 2, (len(batch),), generator=torch.Generator().manual_seed(3)).float()
    batch = replace(batch, rewards=rewards, reward_terms={"accuracy": rewards})
    reference = (batch.old_log_probs - 0.3) * batch.loss_mask if recipe.needs_reference(algorithm) else None
    advantages = recipe.compute_advantages(algorithm, batch, reference, weights={"accuracy": 1.0})
    trained = SUBSAMPLES[algorithm.subsample](algorithm, batch, advantages)
    weights = torch.rand(batch.old_log_probs.shape, generator=torch.Generator().manual_seed(4)) + 0.5
    return Collected(
        batch=batch, advantages=advantages, reference_log_probs=reference, totals={}, trained=trained, mismatch_weights=weights
    )


@pytest.mark.parametrize("name", sorted(PRESETS))
def test_micro_batches_do_not_change_the_gradient_of_any_recipe(make, name):
    gradients = []
    for micro_batch_tokens in (1, 8, 10_000):
        run = make(algorithm=name, trainer={"micro_batch_tokens": micro_batch_tokens})
        batch = uneven_rollouts(run.policy)
        with torch.no_grad():
            run.policy.weight[:, 0].add_(0.15)
        run.updater.update(stale_collected(run, name, batch))
        gradients.append(run.gradients[0][0])
    assert gradients[0].abs().max() > 0
    for other in gradients[1:]:
        torch.testing.assert_close(other, gradients[0], atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("name", sorted(PRESETS))
def test_permuting_rollouts_does_not_change_the_gradient_of_any_recipe(make, name):
    gradients = []
    for permuted in (False, True):
        run = make(algorithm=name)
        batch = uneven_rollouts(run.policy)
        with torch.no_grad():
            run.policy.weight[:, 0].add_(0.15)
        collected = stale_collected(run, name, batch)
        if permuted:
            order = torch.randperm(len(batch), generator=torch.Generator().manual_seed(1))
            again = collected.batch.select(order)
            reference = collected.reference_log_probs[order] if collected.reference_log_probs is not None else None
            algorithm = run.updater.config.algorithm
            advantages = recipe.compute_advantages(algorithm, again, reference, weights={"accuracy": 1.0})
            trained = SUBSAMPLES[algorithm.subsample](algorithm, again, advantages)
            collected = Collected(
                batch=again, advantages=advantages, reference_log_probs=reference, totals={}, trained=trained,
                mismatch_weights=collected.mismatch_weights[order],
            )  # fmt: skip
        run.updater.update(collected)
        gradients.append(run.gradients[0][0])
    torch.testing.assert_close(gradients[1], gradients[0], atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("name", sorted(PRESETS))
def test_masked_positions_never_matter_to_any_recipe(make, name):
    results = []
    for junk in (0.0, math.nan):
        run = make(algorithm=name)
        batch = uneven_rollouts(run.policy)
        with torch.no_grad():
            run.policy.weight[:, 0].add_(0.15)
        collected = stale_collected(run, name, batch)
        hidden = ~collected.batch.loss_mask
        changed = {"mismatch_weights": collected.mismatch_weights.masked_fill(hidden, junk)}
        if collected.reference_log_probs is not None:
            changed["reference_log_probs"] = collected.reference_log_probs.masked_fill(hidden, junk)
        if collected.advantages.ndim == 2:
            changed["advantages"] = collected.advantages.masked_fill(hidden, junk)
        old = collected.batch.old_log_probs.masked_fill(hidden, junk)
        collected = replace(collected, batch=replace(collected.batch, old_log_probs=old), **changed)
        run.updater.update(collected)
        results.append(run.gradients[0][0])
    assert results[1].isfinite().all()
    torch.testing.assert_close(results[1], results[0])


def test_rollouts_that_a_subsample_leaves_out_do_not_count_in_any_mean(make):
    for aggregation in ("token_mean", "sequence_mean", "sequence_sum"):
        whole, part = (make(algorithm={"name": "grpo", "aggregation": aggregation}) for _ in range(2))
        batch = uneven_rollouts(whole.policy)
        advantages = torch.randn(len(batch), generator=torch.Generator().manual_seed(0))
        trained = torch.arange(len(batch)) % 3 > 0
        whole.updater.update(replace(collected_from(batch, advantages), trained=trained))
        rows = trained.nonzero()[:, 0]
        part.updater.update(collected_from(batch.select(rows), advantages[rows]))
        torch.testing.assert_close(whole.gradients[0][0], part.gradients[0][0])


def test_when_a_subsample_leaves_nothing_the_update_is_not_paid_for(make):
    run = make(algorithm={"name": "psr", "kl_coef": 0.1})
    batch = uneven_rollouts(run.policy)
    collected = replace(collected_from(batch, reference=True), trained=torch.zeros(len(batch), dtype=torch.bool))
    before = policy_checksum(run.policy)
    run.updater.update(collected)
    assert run.adapter.batches == [] and policy_checksum(run.policy) == before


def test_credit_per_decision_that_is_constant_is_credit_per_rollout(make):
    one, many = make(algorithm="grpo"), make(algorithm="grpo")
    batch = uneven_rollouts(one.policy)
    advantages = torch.randn(len(batch), generator=torch.Generator().manual_seed(0))
    one.updater.update(collected_from(batch, advantages))
    many.updater.update(collected_from(batch, advantages[:, None].expand(batch.loss_mask.shape)))
    torch.testing.assert_close(one.gradients[0][0], many.gradients[0][0])
