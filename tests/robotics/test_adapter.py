import numpy as np
import pytest
import torch

from mmrl.adapter import Adapter
from mmrl.advantages import group_std_advantages
from mmrl.errors import AdapterError, ConfigError, DataError
from mmrl.losses import aggregation_weights, clipped_surrogate, log_ratio, weighted_sum
from mmrl.sampling import rollout_seeds
from mmrl.testing import check_adapter
from mmrl.types import RolloutBatch


def first(adapter, count, split="train"):
    source = adapter.task_source(split)
    return [source[i] for i in range(count)]


def rollout(adapter, policy, *, num_tasks=3, group_size=4, seed=0, **kwargs):
    seeds = rollout_seeds(seed, 0, 0, num_tasks * group_size)
    return adapter.rollout(policy, first(adapter, num_tasks), group_size=group_size, seeds=seeds, **kwargs)


def assert_equal_rows(left, right):
    for one, two in zip(left.outcomes, right.outcomes):
        np.testing.assert_array_equal(one.left, two.left)
        np.testing.assert_array_equal(one.commands, two.commands)
        np.testing.assert_array_equal(one.final_state, two.final_state)
    assert torch.equal(left.old_log_probs, right.old_log_probs)
    assert left.stop_reasons == right.stop_reasons


def test_the_adapter_keeps_the_cores_contract(adapter):
    assert isinstance(adapter, Adapter)
    check_adapter(adapter, tolerance=1e-5)


def test_the_runs_seed_alone_decides_the_first_weights(adapter, make_adapter):
    first_weights = adapter.build_policy().state_dict()
    torch.rand(3)  # whoever else draws numbers
    again, other = adapter.build_policy().state_dict(), make_adapter("seed=1").build_policy().state_dict()
    assert all(torch.equal(first_weights[name], again[name]) for name in first_weights)
    assert not torch.equal(first_weights["trunk.0.weight"], other["trunk.0.weight"])


def test_the_reference_keeps_its_weights_while_the_policy_goes_on_learning(adapter):
    policy = adapter.build_policy()
    reference = adapter.freeze_reference(policy)
    batch = rollout(adapter, policy, num_tasks=1, group_size=2)
    with torch.no_grad():
        policy.head.bias.add_(0.3)
    assert all(parameter.requires_grad for parameter in policy.parameters())
    with reference() as frozen:
        log_probs = adapter.forward(frozen, batch).log_probs
    torch.testing.assert_close(log_probs, batch.old_log_probs, atol=1e-5, rtol=0)
    assert not log_probs.requires_grad
    assert not torch.allclose(adapter.forward(policy, batch).log_probs, batch.old_log_probs, atol=0.1)


def test_forward_on_a_fresh_rollout_equals_what_was_recorded_to_1e_5(adapter):
    policy = adapter.build_policy()
    batch = rollout(adapter, policy)
    forward = adapter.forward(policy, batch, frozenset({"entropy"}))
    torch.testing.assert_close(forward.log_probs, batch.old_log_probs, atol=1e-5, rtol=0)
    # 4 motions of 6 joints with standard deviation 1/2: 24 * (log(1/2) + log(2 pi e) / 2) = 17.419 nats.
    assert forward.entropy[0, 0].item() == pytest.approx(17.419, abs=1e-3)


def test_rollouts_are_bit_equal_in_any_batch_and_at_any_thread_count(adapter, make_adapter):
    policy = adapter.build_policy()
    with torch.no_grad():  # a network whose last bit is felt
        policy.head.weight.normal_(std=0.3, generator=torch.Generator().manual_seed(0))
    tasks, seeds = first(adapter, 35), rollout_seeds(3, 0, 0, 35)
    whole = adapter.rollout(policy, tasks, group_size=1, seeds=seeds)
    for size in (1, 3, 8):
        starts = range(0, 35, size)
        parts = [
            adapter.rollout(policy, tasks[i : i + size], group_size=1, seeds=seeds[i : i + size]) for i in starts
        ]  # fmt: skip
        assert_equal_rows(whole, RolloutBatch.concat(parts))
    one_thread = make_adapter("rollout.num_threads=1")
    assert_equal_rows(whole, one_thread.rollout(policy, tasks, group_size=1, seeds=seeds))


def test_a_group_shares_instruction_and_start_and_its_noise_differs(adapter):
    batch = rollout(adapter, adapter.build_policy(), num_tasks=2, group_size=3)
    for group in range(2):
        rows = range(3 * group, 3 * group + 3)
        assert len({batch.tasks[row].instruction for row in rows}) == 1
        states = [batch.outcomes[row].initial_state for row in rows]
        assert all(np.array_equal(states[0], state) for state in states)
        assert len({batch.outcomes[row].left[-1] for row in rows}) == 3


def test_the_environment_of_a_task_starts_as_its_rollout_does(adapter):
    from robotics.envs.gym_env import ArmEnv

    task = first(adapter, 1, "eval")[0]
    env = ArmEnv()
    env.reset(seed=task.seed, options={"goal": task.goal})
    batch = adapter.rollout(adapter.build_policy(), [task], group_size=1, seeds=torch.zeros(1, dtype=torch.int64), greedy=True)
    np.testing.assert_array_equal(env.physics.states()[0], batch.outcomes[0].initial_state)
    assert env.task_description == task.instruction


def test_held_out_tasks_have_layouts_of_their_own_and_families_that_are_drawn_twice_are_asked_once(make_adapter):
    adapter = make_adapter("tasks.families=[push, lift, push]")
    tasks = [adapter.task_source("eval")[i] for i in range(12)]
    assert [task.family for task in tasks[:4]] == ["push", "lift", "push", "lift"]
    pushes = [task for task in tasks if task.family == "push"]
    assert len({task.seed for task in pushes}) == len(pushes)
    assert [task.goal for task in pushes[:4]] == ["red", "green", "blue", "yellow"]
    assert [adapter.task_source("train")[i].family for i in range(3)] == ["push", "lift", "push"]


def test_splits_do_not_share_layouts_and_the_new_words_split_asks_differently(adapter):
    train, held_out, new_words = (adapter.task_source(split) for split in ("train", "eval", "eval_new_words"))
    assert not {task.seed for task in train} & {task.seed for task in held_out}
    assert [(a.seed, a.goal) for a in held_out] == [(b.seed, b.goal) for b in new_words]
    assert not {task.instruction for task in train} & {task.instruction for task in new_words}
    assert [task.goal for task in first(adapter, 4)] == ["red", "green", "blue", "yellow"]
    assert train[0].domain == "reach-red" and train[-1] == train[len(train) - 1]
    with pytest.raises(DataError, match="split 'test' is not known; expected one of: train, eval, eval_new_words"):
        adapter.task_source("test")


def test_goals_can_be_restricted_and_unknown_ones_are_refused(make_adapter):
    some = make_adapter("tasks.goals.reach=[blue]")
    assert {task.goal for task in first(some, 5)} == {"blue"}
    with pytest.raises(DataError, match=r"tasks.goals.reach names purple, which reach does not have"):
        make_adapter("tasks.goals.reach=[purple]").task_source("train")
    with pytest.raises(ConfigError, match=r"tasks.goals names push, not among tasks.families: reach"):
        make_adapter("tasks.goals.push=[red]")


def test_training_in_a_wrapped_world_is_refused_with_what_there_is(make_adapter):
    with pytest.raises(ConfigError, match=r"tasks.families names gym:Hopper-v5: .* not trained yet; .*GymWorld"):
        make_adapter("tasks.families=[gym:Hopper-v5]")


def test_rows_of_two_scenes_come_back_in_the_order_of_their_tasks(make_adapter):
    adapter = make_adapter("tasks.families=[reach,press,lift]", "rollout.max_env_steps=8", "rollout.num_envs=4")
    policy, tasks = adapter.build_policy(), first(adapter, 7)
    seeds = torch.arange(14)
    batch = adapter.rollout(policy, tasks, group_size=2, seeds=seeds)
    assert [task.id for task in batch.tasks] == [task.id for task in tasks for _ in range(2)]
    assert torch.equal(batch.seeds, seeds) and torch.equal(batch.group_ids, torch.arange(7).repeat_interleave(2))
    alone = adapter.rollout(policy, tasks[1:2], group_size=2, seeds=seeds[2:4])
    assert_equal_rows(batch.select(torch.tensor([2, 3])), alone)
    forward = adapter.forward(policy, batch)
    torch.testing.assert_close(forward.log_probs[batch.loss_mask], batch.old_log_probs[batch.loss_mask], atol=1e-4, rtol=0)


def test_decisions_may_be_commands_and_their_log_probabilities_add_up_to_those_of_chunks(make_adapter):
    chunks, commands = (
        make_adapter("rollout.max_env_steps=10"),
        make_adapter("rollout.max_env_steps=10", "rollout.decisions=action"),
    )
    policy = chunks.build_policy()
    by_chunk, by_command = rollout(chunks, policy), rollout(commands, policy)
    assert chunks.max_decisions == 3 and commands.max_decisions == 12
    assert by_command.num_decisions.tolist() == [episode.num_steps for episode in by_command.outcomes]
    torch.testing.assert_close(by_command.old_log_probs.sum(dim=1), by_chunk.old_log_probs.sum(dim=1))
    scored = commands.forward(policy, by_command, frozenset({"entropy"}))
    torch.testing.assert_close(scored.log_probs, by_command.old_log_probs, atol=1e-5, rtol=0)
    assert scored.entropy.shape == scored.log_probs.shape


def test_a_policy_that_outputs_nan_ends_those_episodes_without_any_decision(adapter):
    policy = adapter.build_policy()
    with torch.no_grad():
        policy.words.weight[policy.config.vocabulary.index("green") + 1] = torch.nan
    batch = rollout(adapter, policy, num_tasks=3, group_size=2)
    assert batch.stop_reasons[2:4] == ("diverged", "diverged")
    assert not batch.loss_mask[2:4].any() and batch.loss_mask[[0, 1, 4, 5]].any(dim=1).all()
    assert (batch.old_log_probs[2:4] == 0).all()
    assert adapter.reward_terms["progress"](batch.tasks[2], batch.outcomes[2]) == 0.0
    rest = batch.select(torch.tensor([0, 1, 4, 5]))
    clean = rollout(adapter, adapter.build_policy(), num_tasks=3, group_size=2).select(torch.tensor([0, 1, 4, 5]))
    assert_equal_rows(rest, clean)


def test_demonstrations_succeed_and_the_policy_can_express_them(adapter):
    policy = adapter.build_policy()
    batch = adapter.demonstrate(policy, first(adapter, 8, "eval"), seeds=torch.arange(8))
    assert set(batch.stop_reasons) == {"success"} and (batch.old_log_probs == 0).all()
    assert batch.inputs.records["motions"].abs().max() <= 1.0
    assert adapter.forward(policy, batch).log_probs[batch.loss_mask].isfinite().all()
    success = [adapter.reward_terms["success"](task, outcome) for task, outcome in zip(batch.tasks, batch.outcomes)]
    assert success == [1.0] * 8


def test_a_disturbed_demonstration_records_what_the_expert_wanted_and_how_it_came_back(make_adapter):
    quiet, noisy, both = (
        make_adapter(f"demonstrations.noise={noise}", "tasks.families=[reach,push]")
        for noise in ("{push: 0.01}", "{reach: 0.02}", "0.02")
    )
    policy = quiet.build_policy()
    tasks = [task for task in first(quiet, 12, "eval") if task.family == "reach"]
    batches = [adapter.demonstrate(policy, tasks, seeds=torch.arange(len(tasks))) for adapter in (quiet, noisy, both)]
    assert_equal_rows(batches[1], batches[2])
    low, high = quiet._world(tasks).physics.joint_limits.T
    noise_of = []
    for clean, disturbed in zip(batches[0].outcomes, batches[1].outcomes):
        off = (disturbed.commands[:4] - clean.commands[:4]) / (
            (high - low) / 2
        )  # the first chunk: the same state, the same wish
        assert (off[:, -1] == 0).all() and 0.005 < off[:, :-1].std() < 0.04
        noise_of.append(off)
    assert not np.allclose(noise_of[0], noise_of[1], atol=1e-3)  # each row has its own
    first_seen = {name: value[:, 0] for name, value in batches[1].inputs.records.items()}
    assert all(torch.equal(value, batches[0].inputs.records[name][:, 0]) for name, value in first_seen.items())
    later = batches[1].inputs.observations["observation.state"][:, 1]
    assert not torch.equal(later, batches[0].inputs.observations["observation.state"][:, 1])
    assert set(batches[1].stop_reasons) == {"success"}
    alone = noisy.demonstrate(policy, tasks[2:3], seeds=torch.tensor([2]))
    np.testing.assert_array_equal(alone.outcomes[0].commands, batches[1].outcomes[2].commands)


def test_noise_for_a_family_that_does_not_exist_or_a_recording_is_refused(make_adapter, tmp_path):
    make_adapter("demonstrations.noise={lift: 0.01}", "tasks.families=[reach]")  # narrowing a run's tasks is no mistake
    with pytest.raises(ConfigError, match=r"demonstrations.noise names reech; the families are: .*reach"):
        make_adapter("demonstrations.noise={reech: 0.01}")
    with pytest.raises(ConfigError, match=r"demonstrations.*noise is for experts that act in simulation"):
        make_adapter("demonstrations.noise=0.01", f"demonstrations.path={tmp_path}")


def test_describe_shows_instruction_decisions_goal_and_a_film(adapter):
    batch = rollout(adapter, adapter.build_policy(), num_tasks=1, group_size=2)
    sample = adapter.describe(batch, 1)
    assert sample.prompt == batch.tasks[1].instruction and sample.reference == "reach red"
    assert len(sample.completion.splitlines()) == int(batch.num_decisions[1]) + 1
    assert [(media.kind, media.suffix) for media in sample.media] == [("video", ".mp4")]
    other = adapter.describe(batch, 0)
    assert other.completion != sample.completion and other.media[0].data != sample.media[0].data


def test_the_share_of_work_done_is_that_before_each_decision(make_adapter):
    for decisions, stride in (("chunk", 4), ("action", 1)):
        adapter = make_adapter(f"rollout.decisions={decisions}", "rollout.max_env_steps=10")
        batch = rollout(adapter, adapter.build_policy(), num_tasks=1, group_size=2)
        for row, episode in enumerate(batch.outcomes):
            before = torch.tensor(1.0 - episode.left[: episode.num_steps : stride] / episode.left[0]).clamp(-1, 1).float()
            torch.testing.assert_close(batch.progress[row][batch.loss_mask[row]], before)
            assert batch.progress[row, 0] == 0


def test_wrong_requests_are_refused(adapter):
    policy = adapter.build_policy()
    batch = rollout(adapter, policy, num_tasks=1, group_size=2)
    with pytest.raises(AdapterError, match="attention asked for; the robot adapter offers only: entropy"):
        adapter.forward(policy, batch, frozenset({"attention"}))
    with pytest.raises(AdapterError, match=r"seeds has shape \(3,\); expected \[P \* group_size\] = \[4\]"):
        adapter.rollout(policy, first(adapter, 2), group_size=2, seeds=torch.arange(3))


def test_a_few_updates_towards_one_goal_bring_the_gripper_much_closer(make_adapter):
    adapter = make_adapter("tasks.goals.reach=[green]")
    policy, source = adapter.build_policy(), adapter.task_source("train")

    def mean_distance():
        batch = adapter.rollout(policy, first(adapter, 40, "eval"), group_size=1, seeds=torch.arange(40), greedy=True)
        return np.mean([episode.left[-1] for episode in batch.outcomes])

    before = mean_distance()
    optimizer = torch.optim.AdamW(policy.parameters(), lr=3e-3, weight_decay=0.0)
    for step in range(12):
        tasks = [source[16 * step + i] for i in range(16)]
        batch = adapter.rollout(policy, tasks, group_size=8, seeds=rollout_seeds(0, step, 0, 128))
        scores = [adapter.reward_terms["closeness"](t, o) + adapter.reward_terms["progress"](t, o)
                  for t, o in zip(batch.tasks, batch.outcomes)]  # fmt: skip
        advantages = group_std_advantages(torch.tensor(scores), batch.group_ids)
        for _ in range(8):
            ratios = log_ratio(adapter.forward(policy, batch).log_probs, batch.old_log_probs, batch.loss_mask)
            losses = clipped_surrogate(ratios, advantages, clip_low=0.2, clip_high=0.2)
            weights = aggregation_weights(batch.loss_mask, "sequence_mean", num_decisions=0, num_rows=128)
            optimizer.zero_grad()
            weighted_sum(losses, weights).backward()
            torch.nn.utils.clip_grad_norm_(policy.parameters(), 1.0)
            optimizer.step()
    assert mean_distance() < 0.6 * before
