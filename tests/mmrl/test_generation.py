"""Token-exact sampling and log-probabilities, on a tiny language model and against the plain path."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from transformers import Qwen2Config, Qwen2ForCausalLM

from mmrl import generation
from mmrl.generation import (
    CompletionInputs,
    SamplingParams,
    collate_prompts,
    completion_log_probs,
    sample,
    selected_log_probs,
)

VOCAB, END = 23, 1


@pytest.fixture(scope="module")
def model() -> nn.Module:
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=VOCAB, hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=128, tie_word_embeddings=False,
    )  # fmt: skip
    return Qwen2ForCausalLM(config).eval()


def prompt(*ids: int) -> dict[str, torch.Tensor]:
    return {"input_ids": torch.tensor([ids]), "attention_mask": torch.ones(1, len(ids), dtype=torch.long)}


PROMPTS = [prompt(3, 4, 5), prompt(6, 7, 8, 9, 10, 11), prompt(12)]


def draw(model, prompts=PROMPTS, group_size=4, seeds=None, **params):
    seeds = torch.arange(len(prompts) * group_size) if seeds is None else seeds
    params = SamplingParams(**({"max_new_tokens": 7, "end_ids": (END,)} | params))
    return sample(model, prompts, params, pad_id=0, group_size=group_size, seeds=seeds)


def score(model, sampled, prompts=PROMPTS, group_size=4, **options):
    index = torch.arange(len(prompts)).repeat_interleave(group_size)
    return completion_log_probs(model, prompts, index, sampled.tokens, sampled.mask, pad_id=0, **options)


def test_log_probs_recorded_while_sampling_are_those_of_a_full_forward_pass(model):
    sampled = draw(model, temperature=0.7)
    for share_prefix in (True, False):
        log_probs, _ = score(model, sampled, temperature=0.7, share_prefix=share_prefix)
        torch.testing.assert_close(log_probs.detach(), sampled.log_probs, atol=2e-6, rtol=0)


def test_shared_prefixes_equal_the_plain_path_in_value_and_gradient(model):
    sampled = draw(model)
    results = []
    for share_prefix in (True, False):
        model.zero_grad()
        log_probs, entropy = score(model, sampled, with_entropy=True, share_prefix=share_prefix)
        weights = torch.linspace(-1, 1, log_probs.numel()).view_as(log_probs)
        (weights * log_probs + 0.1 * entropy).sum().backward()
        results.append((log_probs.detach(), entropy.detach(), torch.cat([p.grad.flatten() for p in model.parameters()])))
    for shared, plain in zip(*results):
        torch.testing.assert_close(shared, plain, atol=1e-5, rtol=1e-4)


def test_the_prompt_runs_once_per_group(model):
    sampled = draw(model, group_size=8, max_new_tokens=4, end_ids=())
    seen = []
    handle = model.model.layers[0].register_forward_pre_hook(lambda module, args, kwargs: seen.append(args[0].shape[:2]),
                                                             with_kwargs=True)  # fmt: skip
    score(model, sampled, group_size=8)
    handle.remove()
    assert seen == [(3, 6), (24, 3)]  # three prompts of at most six tokens, then 24 completions without their last token


def test_a_row_does_not_depend_on_its_neighbours(model):
    together = draw(model)
    for row in range(3):
        alone = draw(model, [PROMPTS[row]], seeds=torch.arange(row * 4, row * 4 + 4))
        width = alone.tokens.shape[1]
        assert torch.equal(together.tokens[row * 4 : row * 4 + 4, :width], alone.tokens)
        assert torch.equal(together.mask[row * 4 : row * 4 + 4, :width], alone.mask)


def test_greedy_decoding_is_the_same_alone_and_in_a_batch(model):
    together = draw(model, PROMPTS * 2, group_size=1, greedy=True)
    for row, single in enumerate(PROMPTS * 2):
        alone = draw(model, [single], group_size=1, greedy=True)
        assert torch.equal(together.tokens[row][together.mask[row]], alone.tokens[0][alone.mask[0]])


def test_the_mask_ends_with_the_end_token_and_truncation_is_recorded(model):
    sampled = draw(model, group_size=40, max_new_tokens=6)
    assert sampled.truncated.any() and not sampled.truncated.all()
    for tokens, mask, truncated in zip(sampled.tokens, sampled.mask, sampled.truncated):
        kept = tokens[mask].tolist()
        assert (END in kept) != bool(truncated)
        assert END not in kept[:-1]
        assert tokens[~mask].tolist() == [0] * int((~mask).sum())
        if truncated:
            assert len(kept) == 6


def test_an_end_token_may_be_the_whole_completion(model):
    sampled = draw(model, banned_ids=tuple(i for i in range(VOCAB) if i != END))
    assert sampled.tokens.tolist() == [[END]] * 12 and sampled.mask.all() and not sampled.truncated.any()
    torch.testing.assert_close(sampled.log_probs, torch.zeros(12, 1))


def test_banned_tokens_are_never_sampled_and_have_no_probability(model):
    banned = (2, 5, 9)
    with torch.no_grad():
        model.lm_head.weight[list(banned)] += 3.0  # the policy would love to write them
    sampled = draw(model, group_size=20, banned_ids=banned)
    assert not torch.isin(sampled.tokens[sampled.mask], torch.tensor(banned)).any()
    log_probs, _ = score(model, sampled, group_size=20, banned_ids=banned)
    torch.testing.assert_close(log_probs.detach(), sampled.log_probs, atol=2e-6, rtol=0)
    with torch.no_grad():
        model.lm_head.weight[list(banned)] -= 3.0


def test_sampling_follows_the_distribution(model):
    # Frequencies of the first token over 4,000 rows against its probabilities; the standard error is at most 0.008.
    sampled = draw(model, PROMPTS[:1], group_size=4000, max_new_tokens=1, end_ids=())
    with torch.no_grad():
        probs = model(**PROMPTS[0]).logits[0, -1].softmax(dim=-1)
    frequencies = torch.bincount(sampled.tokens[:, 0], minlength=VOCAB) / 4000
    torch.testing.assert_close(frequencies, probs, atol=0.03, rtol=0)


def test_top_k_and_top_p_truncate_sampling_only(model):
    with torch.no_grad():
        probs = model(**PROMPTS[0]).logits[0, -1].softmax(dim=-1)
    best = probs.argsort(descending=True)
    top_k = draw(model, PROMPTS[:1], group_size=300, max_new_tokens=1, top_k=3)
    assert set(top_k.tokens[:, 0].tolist()) == set(best[:3].tolist())
    torch.testing.assert_close(top_k.log_probs[:, 0], probs.log()[top_k.tokens[:, 0]], atol=1e-5, rtol=0)
    # Just above the most likely token's probability, the second is needed too; just below, it stands alone.
    for slack, kept in ((1e-4, 2), (-1e-4, 1)):
        top_p = draw(model, PROMPTS[:1], group_size=300, max_new_tokens=1, top_p=float(probs.max()) + slack)
        assert set(top_p.tokens[:, 0].tolist()) == set(best[:kept].tolist())


def test_chunked_log_probs_equal_whole_ones_in_value_and_gradient(model, monkeypatch):
    hidden = torch.randn(11, 16, generator=torch.Generator().manual_seed(3))
    targets = torch.arange(11)
    results = []
    for limit in (1 << 25, 3 * VOCAB):  # all rows at once, then three rows at a time
        monkeypatch.setattr(generation, "MAX_LOGITS_ELEMENTS", limit)
        leaf = hidden.clone().requires_grad_()
        model.zero_grad()
        log_probs, entropy = selected_log_probs(model, leaf, targets, temperature=1.3, banned_ids=(20,), with_entropy=True)
        (log_probs - 0.2 * entropy).sum().backward()
        results.append((log_probs.detach(), entropy.detach(), leaf.grad, model.lm_head.weight.grad.clone()))
    for whole, chunked in zip(*results):
        torch.testing.assert_close(whole, chunked)


def test_selected_log_probs_and_entropy_match_the_definition(model):
    hidden, targets = torch.randn(5, 16), torch.tensor([0, 1, 2, 3, 4])
    log_probs, entropy = selected_log_probs(model, hidden, targets, temperature=2.0, banned_ids=(7, 8), with_entropy=True)
    logits = model.lm_head(hidden) / 2.0
    kept = torch.ones(VOCAB, dtype=torch.bool).index_fill(0, torch.tensor([7, 8]), False)
    expected = logits[:, kept].log_softmax(dim=-1)  # ids 0..4 keep their columns, since 7 and 8 come later
    torch.testing.assert_close(log_probs, expected.gather(1, targets[:, None])[:, 0])
    torch.testing.assert_close(entropy, -(expected.exp() * expected).sum(dim=-1))


def test_prompts_are_padded_on_the_left_and_media_to_a_common_shape():
    first = prompt(3, 4) | {"pixel_values": torch.ones(1, 1, 3, 2, 2)}
    second = prompt(5, 6, 7) | {"pixel_values": torch.ones(1, 2, 3, 2, 4)}
    batch = collate_prompts([first, second], 0, torch.device("cpu"))
    assert batch["input_ids"].tolist() == [[0, 3, 4], [5, 6, 7]]
    assert batch["attention_mask"].tolist() == [[0, 1, 1], [1, 1, 1]]
    assert batch["pixel_values"].shape == (2, 2, 3, 2, 4)
    assert batch["pixel_values"][0].sum() == 3 * 2 * 2  # the missing image and columns are zeros


@given(
    rows=st.lists(st.integers(0, 5), min_size=1, max_size=6),
)
def test_inputs_select_keeps_each_row_with_its_prompt(rows):
    inputs = CompletionInputs(
        prompts=tuple(PROMPTS),
        prompt_index=torch.tensor([0, 0, 1, 1, 2, 2]),
        tokens=torch.arange(12).view(6, 2),
    )
    chosen = inputs.select(torch.tensor(rows))
    for new, old in enumerate(rows):
        assert chosen.prompts[chosen.prompt_index[new]] is PROMPTS[old // 2]
        assert torch.equal(chosen.tokens[new], inputs.tokens[old])
    assert len(chosen.prompts) == len({row // 2 for row in rows})
    joined = inputs.concat([chosen])
    assert torch.equal(joined.prompt_lengths, torch.cat([inputs.prompt_lengths, chosen.prompt_lengths]))
