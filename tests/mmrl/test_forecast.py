"""`mmrl.forecast`: bytes by hand, and media tokens in every budget."""

from dataclasses import replace

import pytest

from mmrl.forecast import Sizes, Tower, gib, memory, micro_batch, rows
from mmrl.generation import MAX_LOGITS_ELEMENTS

SIZES = Sizes(
    weights=1000, trained=400, width=2, layers=2, hidden=8, kv_width=4, vocabulary=100, prompt=50, media_tokens=40,
    completion=10, tasks=4, group_size=3, rows_at_once=12, micro_batch_tokens=1000,
)  # fmt: skip


def test_a_micro_batch_holds_whole_groups_or_as_many_rollouts_of_one_as_fit():
    # A group is 50 prompt positions and 3 times 10 completion positions.
    whole = micro_batch(SIZES)
    assert (whole.prompts, whole.rollouts, whole.positions, whole.decisions) == (4, 12, 320, 120)
    two = micro_batch(replace(SIZES, micro_batch_tokens=170))
    assert (two.prompts, two.rollouts, two.positions) == (2, 6, 160)
    part = micro_batch(replace(SIZES, micro_batch_tokens=75))
    assert (part.prompts, part.rollouts, part.positions) == (1, 2, 70)
    least = micro_batch(replace(SIZES, micro_batch_tokens=10))
    assert (least.prompts, least.rollouts, least.positions) == (1, 1, 60)  # a row is never cut, whatever the budget


def test_bytes_by_hand():
    found = memory(SIZES)
    assert found.weights == 2000
    assert found.optimizer == 400 * 2 * 3  # a gradient and two moments, in the weights' precision
    assert found.cache == 4 * 2 * 12 * 60 * 2
    assert found.logits == 3 * 4 * 120 * 100
    assert found.plain_logits == 4 * 100 * 3 * 60  # every position of every rollout, prompt and all
    assert found.activations == 17 * 8 * 2 * 320 * 2 + 2 * (4 * 2 * 12 * 60 * 2)
    assert found.peak == max(found.rollout, found.update) == found.update


def test_logits_are_bounded_by_the_chunk_and_a_trained_tower_keeps_activations():
    large = memory(replace(SIZES, vocabulary=10**7))
    assert large.logits == 12 * MAX_LOGITS_ELEMENTS
    tower = replace(SIZES, tower=Tower(layers=5, hidden=16, positions_per_token=4))
    assert memory(tower).activations - memory(SIZES).activations == 17 * 16 * 5 * (4 * 40 * 4) * 2


@pytest.mark.parametrize("field", ["media_tokens", "prompt", "group_size", "vocabulary", "completion"])
def test_what_makes_a_run_larger_makes_the_forecast_larger(field):
    sizes = replace(SIZES, tower=Tower(layers=1, hidden=8, positions_per_token=4))
    larger = replace(
        sizes, **{field: 2 * getattr(sizes, field), "prompt": 100 if field == "media_tokens" else sizes.prompt * 2}
    )
    assert memory(larger).peak > memory(sizes).peak


def test_the_printed_rows_name_media_tokens_rollouts_and_vocabulary():
    text = dict(rows(SIZES))
    assert text["one micro-batch"] == "320 positions: 4 prompts (160 media tokens), 12 rollouts; budget 1,000"
    assert "(40 media + 10 text + 10 new) x 3 x 100" in text["memory: logits, if plain"]
    assert gib(3 * 2**30) == "3.00 GiB" and gib(2**20) == "1.00 MiB"
