"""`mmrl.testing`: the contract suite passes an honest adapter and names the promise that a broken one breaks."""

from contextlib import nullcontext
from dataclasses import replace

import pytest
import torch
from torch import nn

from mmrl.adapter import Adapter
from mmrl.errors import AdapterError, CheckpointError
from mmrl.testing import BanditAdapter, BanditInputs, check_adapter, share_of_right_arms
from mmrl.types import Sample


def test_the_bandit_fulfils_the_contract():
    assert isinstance(BanditAdapter(), Adapter)
    check_adapter(BanditAdapter())
    check_adapter(BanditAdapter(num_contexts=1, num_arms=2, max_decisions=1), num_tasks=1, group_size=8)
    check_adapter(BanditAdapter(), num_tasks=30, group_size=2)  # more than the source has


def on_rollout(change):
    """An adapter whose rollouts are changed by ``change(batch, policy)``."""

    class Changed(BanditAdapter):
        def rollout(self, policy, tasks, **options):
            return change(super().rollout(policy, tasks, **options), policy)

    return Changed


def on_forward(change):
    """An adapter whose ``forward`` is changed by ``change(result, batch)``."""

    class Changed(BanditAdapter):
        def forward(self, policy, batch, needs=frozenset()):
            return change(super().forward(policy, batch, needs), batch)

    return Changed


class Training(BanditAdapter):
    def build_policy(self):
        return super().build_policy().train()


class NewEachTime(BanditAdapter):
    def build_policy(self):
        return nn.Embedding(self.num_contexts, self.num_arms).eval()


class NoTasks(BanditAdapter):
    def task_source(self, split):
        return []


class Shuffling(BanditAdapter):
    def task_source(self, split):
        class Source(list):
            def __getitem__(self, index):
                self.append(self.pop(0))
                return super().__getitem__(index)

        return Source(super().task_source(split))


class Unseeded(BanditAdapter):
    def rollout(self, policy, tasks, *, group_size, seeds, greedy=False):
        batch = super().rollout(policy, tasks, group_size=group_size, seeds=torch.randint(1 << 40, seeds.shape), greedy=greedy)
        return replace(batch, seeds=seeds)


class OneSeed(BanditAdapter):
    def rollout(self, policy, tasks, *, group_size, seeds, greedy=False):
        batch = super().rollout(policy, tasks, group_size=group_size, seeds=seeds * 0, greedy=greedy)
        return replace(batch, seeds=seeds)


class SharedGenerator(BanditAdapter):
    """Seeds by place in the batch."""

    def rollout(self, policy, tasks, *, group_size, seeds, greedy=False):
        places = seeds[0] + torch.arange(len(seeds))
        batch = super().rollout(policy, tasks, group_size=group_size, seeds=places, greedy=greedy)
        return replace(batch, seeds=seeds)


class NeverGreedy(BanditAdapter):
    def rollout(self, policy, tasks, *, group_size, seeds, greedy=False):
        return super().rollout(policy, tasks, group_size=group_size, seeds=seeds)


class TooLong(BanditAdapter):
    def rollout(self, policy, tasks, **options):
        self.max_decisions = 3
        batch = super().rollout(policy, tasks, **options)
        self.max_decisions = 2
        return batch


class Forgetful(BanditInputs):
    def select(self, rows):
        return Forgetful(contexts=self.contexts[: len(rows)], arms=self.arms[: len(rows)])


class Disorderly(BanditInputs):
    def concat(self, others):
        joined = super().concat(others)
        return BanditInputs(contexts=joined.contexts.flip(0), arms=joined.arms.flip(0))


class OneLength(BanditInputs):
    @property
    def prompt_lengths(self):
        return torch.ones(1)

    def select(self, rows):
        return OneLength(**vars(super().select(rows)))


def with_inputs(kind):
    return on_rollout(lambda batch, policy: replace(batch, inputs=kind(**vars(batch.inputs))))


class SamePolicyAsReference(BanditAdapter):
    def freeze_reference(self, policy):
        return lambda: nullcontext(policy)


class Mute(BanditAdapter):
    def describe(self, batch, row):
        return Sample(prompt="", completion="x")


class ForgetsToLoad(BanditAdapter):
    def load_policy(self, policy, directory):
        pass


def tempered(result, batch):
    """Rollouts were sampled at another temperature than they are scored at."""
    return replace(result, log_probs=result.log_probs * 1.01)


@pytest.mark.parametrize(
    ("adapter", "promise"),
    [
        (Training, "eval mode"),
        (NewEachTime, "build_policy is deterministic for a config"),
        (NoTasks, "the train split has tasks"),
        (Shuffling, "equal index, equal task"),
        (on_rollout(lambda batch, policy: replace(batch, group_ids=batch.group_ids.flip(0))), "group-major rows"),
        (on_rollout(lambda batch, policy: replace(batch, seeds=batch.seeds + 1)), "rollout records the seeds"),
        (
            on_rollout(lambda batch, policy: replace(batch, old_log_probs=batch.old_log_probs + 0 * policy.weight.sum())),
            "old_log_probs are recorded without gradient",
        ),
        (on_rollout(lambda batch, policy: replace(batch, loss_mask=batch.loss_mask & False)), "every rollout has a decision"),
        (TooLong, "no rollout is longer than max_decisions"),
        (
            on_rollout(lambda batch, policy: replace(batch, old_log_probs=batch.old_log_probs - torch.inf)),
            "old_log_probs are finite",
        ),
        (Unseeded, "equal seeds give equal rollouts"),
        (OneSeed, "other seeds give other rollouts"),
        (SharedGenerator, "a rollout does not depend on what it is batched with"),
        (NeverGreedy, "greedy rollouts do not depend on seeds"),
        (on_forward(lambda result, batch: replace(result, log_probs=result.log_probs[:, :1])), "of the shape of old_log_probs"),
        (on_forward(lambda result, batch: replace(result, log_probs=result.log_probs.double())), "float32 log_probs"),
        (on_forward(tempered), "forward on a fresh rollout equals old_log_probs"),
        (on_forward(lambda result, batch: replace(result, log_probs=result.log_probs.detach())), "gradients reach the policy"),
        (
            on_forward(lambda result, batch: replace(result, log_probs=result.log_probs.detach() + 0 * result.log_probs)),
            "gradients reach the policy",
        ),
        (with_inputs(Forgetful), "a rollout does not depend|forward follows select"),
        (with_inputs(Disorderly), "forward follows concat"),
        (with_inputs(OneLength), r"inputs.prompt_lengths is \[N\]"),
        (SamePolicyAsReference, "the reference policy stays as it was frozen"),
        (Mute, "describe gives a prompt"),
        (ForgetsToLoad, "load_policy undoes save_policy exactly"),
    ],
)
def test_a_broken_adapter_is_told_which_promise_it_breaks(adapter, promise):
    with pytest.raises(AdapterError, match=rf"the adapter breaks its contract: .*({promise})"):
        check_adapter(adapter())


def test_checking_an_adapter_leaves_no_global_trace():
    state = torch.get_rng_state()
    check_adapter(BanditAdapter())
    assert torch.equal(torch.get_rng_state(), state)


def test_the_bandit_rewards_the_arm_that_equals_the_context():
    task = BanditAdapter().task_source("train")[2]
    assert share_of_right_arms(task, [2, 2, 0]) == pytest.approx(2 / 3)
    adapter = BanditAdapter()
    batch = adapter.demonstrate(adapter.build_policy(), adapter.task_source("train")[:4], seeds=torch.arange(4))
    assert [share_of_right_arms(task, outcome) for task, outcome in zip(batch.tasks, batch.outcomes)] == [1.0] * 4


def test_the_bandit_refuses_other_tensors(tmp_path):
    adapter = BanditAdapter()
    adapter.save_policy(nn.Linear(2, 2), tmp_path)
    with pytest.raises(CheckpointError, match=r"tensors \['bias', 'weight'\]; expected \['weight'\]"):
        adapter.load_policy(adapter.build_policy(), tmp_path)
