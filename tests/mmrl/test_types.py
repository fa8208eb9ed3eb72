"""`mmrl.types`: what a `RolloutBatch` refuses, and cutting and joining batches."""

from dataclasses import FrozenInstanceError, dataclass, fields, replace
from typing import NamedTuple

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from mmrl.errors import AdapterError, MMRLError
from mmrl.types import Forward, RolloutBatch, Sample, Task


@dataclass(frozen=True)
class Prompts:
    """The smallest `mmrl.types.Inputs`: one number per row."""

    lengths: Tensor

    @property
    def prompt_lengths(self):
        return self.lengths

    def select(self, rows):
        return Prompts(self.lengths[rows])

    def concat(self, others):
        return Prompts(torch.cat([self.lengths, *(other.lengths for other in others)]))


class TuplePrompts(NamedTuple):
    """Inputs that happen to be a tuple, of another length than the batch."""

    lengths: Tensor

    @property
    def prompt_lengths(self):
        return self.lengths

    def select(self, rows):
        return TuplePrompts(self.lengths[rows])


def make_batch(lengths=(3, 1, 2), width=4, first_id=0, **changes):
    """A batch whose rows can be told apart: row ``i`` has id, seed, reward and prompt length derived from ``i``."""
    num = len(lengths)
    row = torch.arange(num) + first_id
    column = torch.arange(width)
    batch = {
        "tasks": tuple(Task(id=f"task {i}") for i in row.tolist()),
        "group_ids": row // 2,
        "seeds": row * 10,
        "outcomes": tuple(f"outcome {i}" for i in row.tolist()),
        "old_log_probs": -(row[:, None] + column / 10 + 1).float(),
        "loss_mask": column < torch.tensor(lengths)[:, None],
        "stop_reasons": tuple("stop" if length < width else "length" for length in lengths),
        "inputs": Prompts(row + 100),
        "sampler_log_probs": -(row[:, None] + column / 10 + 2).float(),
        "rewards": row / 2,
        "reward_terms": {"accuracy": row.float(), "format": row / 4},
    }
    return RolloutBatch(**{**batch, **changes})


def assert_equal(left, right):
    """Every field of two batches is equal."""
    for item in fields(RolloutBatch):
        a, b = getattr(left, item.name), getattr(right, item.name)
        if item.name == "inputs":
            a, b = a.lengths, b.lengths
        if isinstance(a, Tensor):
            assert torch.equal(a, b) and a.dtype == b.dtype, item.name
        elif item.name == "reward_terms":
            assert a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)
        else:
            assert a == b, item.name


# ---- validation ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("old_log_probs", torch.zeros(2, 4), r"old_log_probs has shape \(2, 4\); expected \[N, T\] with N = 3"),
        ("old_log_probs", torch.zeros(3), r"old_log_probs has shape \(3,\); expected \[N, T\]"),
        ("loss_mask", torch.ones(3, 5, dtype=torch.bool), r"loss_mask has shape \(3, 5\); .* old_log_probs, \(3, 4\)"),
        ("sampler_log_probs", torch.zeros(3, 1), r"sampler_log_probs has shape \(3, 1\); .* old_log_probs, \(3, 4\)"),
        ("group_ids", torch.zeros(2, dtype=torch.long), r"group_ids has shape \(2,\); expected \[N\] = \[3\]"),
        ("seeds", torch.zeros(3, 1, dtype=torch.long), r"seeds has shape \(3, 1\); expected \[N\] = \[3\]"),
        ("rewards", torch.zeros(4), r"rewards has shape \(4,\); expected \[N\] = \[3\]"),
        ("reward_terms", {"fluency": torch.zeros(1)}, r"fluency has shape \(1,\); expected \[N\] = \[3\]"),
        ("outcomes", ("one", "two"), r"outcomes has 2 entries; expected one per rollout, 3"),
        ("stop_reasons", ("stop",) * 4, r"stop_reasons has 4 entries; expected one per rollout, 3"),
        ("tasks", (Task(id="only"),), r"old_log_probs has shape \(3, 4\); expected \[N, T\] with N = 1"),
        ("loss_mask", torch.ones(3, 4), r"loss_mask has dtype torch.float32; expected torch.bool"),
    ],
)
def test_a_tensor_of_the_wrong_shape_is_refused_by_name_with_both_shapes(name, value, message):
    with pytest.raises(AdapterError, match=message):
        make_batch(**{name: value})


def test_adapter_errors_are_ours_and_value_errors():
    with pytest.raises(MMRLError):
        make_batch(rewards=torch.zeros(4))
    with pytest.raises(ValueError):
        make_batch(rewards=torch.zeros(4))


def test_what_is_optional_may_be_left_out():
    batch = make_batch(sampler_log_probs=None, rewards=None, reward_terms={})
    assert batch.sampler_log_probs is None and batch.rewards is None and not batch.reward_terms


def test_reward_terms_are_empty_and_read_only_when_absent():
    given = {item.name: getattr(make_batch(), item.name) for item in fields(RolloutBatch) if item.name != "reward_terms"}
    batch = RolloutBatch(**given)
    assert dict(batch.reward_terms) == {}
    with pytest.raises(TypeError):
        batch.reward_terms["accuracy"] = torch.zeros(3)


@pytest.mark.parametrize(
    ("record", "name"),
    [
        (make_batch(), "rewards"),
        (Task(id="a"), "id"),
        (Forward(log_probs=torch.zeros(1, 1)), "log_probs"),
        (Sample(prompt="p", completion="c"), "prompt"),
    ],
    ids=["RolloutBatch", "Task", "Forward", "Sample"],
)
def test_records_are_frozen(record, name):
    with pytest.raises(FrozenInstanceError):
        setattr(record, name, None)


def test_length_is_rollouts_and_num_decisions_counts_the_mask():
    batch = make_batch(lengths=(3, 0, 2))
    assert len(batch) == 3
    assert batch.num_decisions.tolist() == [3, 0, 2]


# ---- select -------------------------------------------------------------------------------------------------------------


def test_select_keeps_the_rows_in_the_order_asked_for():
    # Rows 2 and 0 have 2 and 3 decisions, so the fourth column goes.
    batch = make_batch().select(torch.tensor([2, 0]))
    assert [task.id for task in batch.tasks] == ["task 2", "task 0"]
    assert batch.outcomes == ("outcome 2", "outcome 0")
    assert batch.stop_reasons == ("stop", "stop")
    assert batch.group_ids.tolist() == [1, 0]
    assert batch.seeds.tolist() == [20, 0]
    assert batch.rewards.tolist() == [1.0, 0.0]
    assert {name: term.tolist() for name, term in batch.reward_terms.items()} == {"accuracy": [2.0, 0.0], "format": [0.5, 0.0]}
    assert batch.inputs.prompt_lengths.tolist() == [102, 100]
    assert batch.loss_mask.tolist() == [[True, True, False], [True, True, True]]
    torch.testing.assert_close(batch.old_log_probs, torch.tensor([[-3.0, -3.1, -3.2], [-1.0, -1.1, -1.2]]))
    torch.testing.assert_close(batch.sampler_log_probs, torch.tensor([[-4.0, -4.1, -4.2], [-2.0, -2.1, -2.2]]))


def test_select_cuts_only_trailing_columns():
    # Column 1 is unused by all rows (a tool's tokens, say) but lies between used ones.
    mask = torch.tensor([[True, False, True, False], [True, False, False, False]])
    batch = make_batch(lengths=(3, 1), loss_mask=mask)
    assert batch.select(torch.tensor([0, 1])).loss_mask.tolist() == [[True, False, True], [True, False, False]]
    assert batch.select(torch.tensor([1])).loss_mask.tolist() == [[True]]


def test_selecting_rows_without_decisions_leaves_no_columns():
    batch = make_batch(lengths=(3, 0)).select(torch.tensor([1]))
    assert batch.old_log_probs.shape == batch.loss_mask.shape == (1, 0)
    assert len(batch) == 1


def test_selecting_no_rows_gives_an_empty_batch():
    batch = make_batch().select(torch.tensor([], dtype=torch.long))
    assert len(batch) == 0 and batch.old_log_probs.shape == (0, 0) and batch.rewards.shape == (0,)


def test_select_leaves_absent_tensors_absent_and_the_original_alone():
    original = make_batch(sampler_log_probs=None, rewards=None)
    selected = original.select(torch.tensor([1]))
    assert selected.sampler_log_probs is None and selected.rewards is None
    assert_equal(original, make_batch(sampler_log_probs=None, rewards=None))


def test_inputs_select_themselves_even_when_they_are_a_tuple():
    batch = make_batch(inputs=TuplePrompts(torch.tensor([5, 6, 7])))
    assert batch.select(torch.tensor([2, 0])).inputs.prompt_lengths.tolist() == [7, 5]


# ---- concat -------------------------------------------------------------------------------------------------------------


def test_concat_appends_rows_and_grows_to_the_widest():
    joined = RolloutBatch.concat([make_batch(lengths=(2, 1), width=2), make_batch(lengths=(3,), width=3, first_id=2)])
    assert [task.id for task in joined.tasks] == ["task 0", "task 1", "task 2"]
    assert joined.outcomes == ("outcome 0", "outcome 1", "outcome 2")
    assert joined.stop_reasons == ("length", "stop", "length")
    assert joined.group_ids.tolist() == [0, 0, 1]
    assert joined.seeds.tolist() == [0, 10, 20]
    assert joined.rewards.tolist() == [0.0, 0.5, 1.0]
    assert {name: term.tolist() for name, term in joined.reward_terms.items()} == {
        "accuracy": [0.0, 1.0, 2.0],
        "format": [0.0, 0.25, 0.5],
    }
    assert joined.inputs.prompt_lengths.tolist() == [100, 101, 102]
    # New columns are padding: no decision, log-prob 0.
    assert joined.loss_mask.dtype == torch.bool
    assert joined.loss_mask.tolist() == [[True, True, False], [True, False, False], [True, True, True]]
    torch.testing.assert_close(joined.old_log_probs, torch.tensor([[-1.0, -1.1, 0.0], [-2.0, -2.1, 0.0], [-3.0, -3.1, -3.2]]))
    torch.testing.assert_close(
        joined.sampler_log_probs, torch.tensor([[-2.0, -2.1, 0.0], [-3.0, -3.1, 0.0], [-4.0, -4.1, -4.2]])
    )


def test_concat_of_one_batch_is_that_batch():
    batch = make_batch()
    assert RolloutBatch.concat([batch]) is batch


def test_concat_drops_a_tensor_that_one_batch_lacks():
    joined = RolloutBatch.concat([make_batch(), make_batch(first_id=4, sampler_log_probs=None)])
    assert joined.sampler_log_probs is None and joined.rewards is not None


@given(lengths=st.lists(st.integers(0, 4), min_size=2, max_size=6), data=st.data())
def test_concat_undoes_a_split_by_select(lengths, data):
    # The whole is first cut to its own width, as every select does.
    whole = make_batch(lengths=lengths).select(torch.arange(len(lengths)))
    whole = replace(whole, old_log_probs=whole.old_log_probs * whole.loss_mask, sampler_log_probs=None)  # padding is 0
    cut = data.draw(st.integers(1, len(lengths) - 1))
    parts = [whole.select(torch.arange(cut)), whole.select(torch.arange(cut, len(lengths)))]
    assert_equal(RolloutBatch.concat(parts), whole)
