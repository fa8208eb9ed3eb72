"""Attention as a distribution and its divergences, against the numbers of the method's specification."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from mmrl.attention import attention_rows
from mmrl.attention_losses import generalized_jensen_shannon, jensen_shannon, row_entropy, without_self


def test_the_own_position_is_dropped_and_the_rest_renormalised():
    # Two heads; the last position is the token itself.
    heads = torch.tensor([[0.10, 0.40, 0.20, 0.10, 0.20], [0.30, 0.20, 0.10, 0.10, 0.30]])
    rows = heads.mean(dim=0)[None, None]
    p = without_self(rows, torch.tensor([4]))
    torch.testing.assert_close(p[0, 0], torch.tensor([4 / 15, 0.4, 0.2, 2 / 15, 0.0]))


def test_each_completion_token_has_its_own_column():
    rows = torch.full((2, 2, 5), 0.2)
    p = without_self(rows, torch.tensor([1, 3]))
    assert (p == 0).nonzero().tolist() == [[0, 0, 1], [0, 1, 2], [1, 0, 3], [1, 1, 4]]


def test_rows_from_queries_and_a_shared_key_head():
    query = torch.tensor([[[[1.0, 0.0]], [[0.0, 1.0]]]])  # two query heads, one position
    key = torch.tensor([[[[1.0, 0.0], [0.0, 1.0], [1.0, 1.0], [0.0, 0.0]]]])  # one key head
    rows = attention_rows(query, key, torch.ones(1, 1, 4, dtype=torch.bool), scaling=2**-0.5)
    torch.testing.assert_close(rows[0, 0], torch.tensor([0.25, 0.25, 0.334881, 0.165119]), atol=1e-6, rtol=0)
    p = without_self(rows, torch.tensor([3]))
    torch.testing.assert_close(p[0, 0, :3], torch.tensor([0.299444, 0.299444, 0.401112]), atol=1e-6, rtol=0)


def test_query_heads_of_a_group_share_the_key_head_in_order(monkeypatch):
    generator = torch.Generator().manual_seed(0)
    query, key = torch.randn(3, 4, 2, 8, generator=generator), torch.randn(3, 2, 5, 8, generator=generator)
    visible = torch.rand(3, 2, 5, generator=generator) > 0.3
    visible[:, :, 0] = True
    repeated = key.repeat_interleave(2, dim=1)
    scores = (query @ repeated.transpose(2, 3) * 0.3).masked_fill(~visible[:, None], -torch.inf)
    expected = scores.softmax(dim=-1).mean(dim=1)
    torch.testing.assert_close(attention_rows(query, key, visible, scaling=0.3), expected)
    query.requires_grad_()
    whole = torch.autograd.grad((attention_rows(query, key, visible, scaling=0.3) ** 2).sum(), query)[0]
    monkeypatch.setattr("mmrl.attention.MAX_SCORE_ELEMENTS", 40)  # one row at a time, recomputed in backward
    chunked = attention_rows(query, key, visible, scaling=0.3)
    torch.testing.assert_close(chunked, expected)
    torch.testing.assert_close(torch.autograd.grad((chunked**2).sum(), query)[0], whole)


def test_rows_are_worked_out_in_float32_under_autocast():
    query, key = torch.randn(1, 2, 3, 16), torch.randn(1, 1, 6, 16)
    visible = torch.ones(1, 3, 6, dtype=torch.bool)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        rows = attention_rows(query, key, visible, scaling=0.25)
    assert torch.equal(rows, attention_rows(query, key, visible, scaling=0.25))


def test_the_divergence_of_the_specification():
    p, q = torch.tensor([4 / 15, 0.4, 0.2, 2 / 15]), torch.full((4,), 0.25)
    assert jensen_shannon(p, q).item() == pytest.approx(0.0192777288, abs=1e-7)
    assert 1.2 * jensen_shannon(p, q).item() == pytest.approx(0.0231332746, abs=1e-7)
    assert -0.8 * jensen_shannon(p, q).item() == pytest.approx(-0.0154221831, abs=1e-7)
    # (KL(p || m) + KL(q || m)) / 2 with the two parts of the specification
    assert jensen_shannon(p, q).item() == pytest.approx((0.0195780592 + 0.0189773985) / 2, abs=1e-7)


def test_two_tokens_of_the_specification():
    p = torch.tensor([[0.7, 0.2, 0.1, 0.0], [0.1, 0.1, 0.4, 0.4]])
    q = torch.tensor([[0.5, 0.3, 0.2, 0.0], [0.25, 0.25, 0.25, 0.25]])
    each = jensen_shannon(p, q)
    assert each.tolist() == pytest.approx([0.0219011790, 0.0506718370], abs=1e-7)
    assert each.mean().item() == pytest.approx(0.0362865080, abs=1e-7)
    assert 1.5 * each.mean().item() == pytest.approx(0.0544297620, abs=1e-7)
    # OPAD: L_RL + mu L_GKD + gamma times the sum over tokens
    assert 0.37 + 1.0 * 0.21 + 0.5 * each.sum().item() == pytest.approx(0.6162865080, abs=1e-7)


def test_the_gradient_of_the_specification():
    logits = torch.tensor([0.2, 0.5, -0.3], requires_grad=True)
    divergence = jensen_shannon(logits.softmax(dim=0), torch.full((3,), 1 / 3))
    divergence.backward()
    assert divergence.item() == pytest.approx(0.0125376784, abs=1e-7)
    assert logits.grad.tolist() == pytest.approx([-0.00094820, 0.03015687, -0.02920867], abs=1e-7)


def test_a_small_shift_follows_the_second_order_form():
    q, shift = torch.tensor([0.5, 0.3, 0.2]), torch.tensor([0.01, -0.004, -0.006])
    assert jensen_shannon(q + shift, q).item() == pytest.approx(5.430786e-5, rel=2e-3)
    assert (shift.square() / q).sum().item() / 8 == pytest.approx(5.416667e-5, rel=1e-5)


@given(st.lists(st.floats(-4, 4), min_size=2, max_size=9))
def test_value_and_gradient_are_exactly_zero_at_the_old_attention(values):
    logits = torch.tensor(values, requires_grad=True)
    divergence = jensen_shannon(logits.softmax(dim=0), logits.softmax(dim=0))
    divergence.backward()
    assert divergence.item() == 0.0 and not logits.grad.any()


@given(st.lists(st.tuples(st.floats(-6, 6), st.floats(-6, 6)), min_size=2, max_size=9))
def test_the_divergence_is_symmetric_bounded_and_blind_to_padding(pairs):
    p, q = (torch.tensor(side).softmax(dim=0) for side in zip(*pairs))
    value = jensen_shannon(p, q).item()
    assert -1e-6 <= value <= math.log(2) + 1e-6
    assert jensen_shannon(q, p).item() == pytest.approx(value, abs=1e-6)
    padded = [torch.nn.functional.pad(side, (0, 3)) for side in (p, q)]
    assert jensen_shannon(*padded).item() == pytest.approx(value, abs=1e-7)


def test_the_divergence_has_the_gradient_of_its_definition():
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(5, 7, generator=generator).double().requires_grad_()
    q = torch.randn(5, 7, generator=generator).double().softmax(dim=-1)
    p = logits.softmax(dim=-1)
    middle = (p + q) / 2
    definition = ((p * (p / middle).log()).sum(dim=-1) + (q * (q / middle).log()).sum(dim=-1)) / 2
    expected = torch.autograd.grad(definition.sum(), logits, retain_graph=True)[0]
    torch.testing.assert_close(torch.autograd.grad(jensen_shannon(p, q).sum(), logits)[0], expected, atol=1e-6, rtol=1e-5)


def test_disjoint_attention_is_log_two_apart():
    assert jensen_shannon(torch.tensor([1.0, 0.0]), torch.tensor([0.0, 1.0])).item() == pytest.approx(math.log(2), abs=1e-6)


def test_entropy_of_a_uniform_row_is_the_log_of_its_length():
    assert row_entropy(torch.tensor([0.25, 0.25, 0.25, 0.25, 0.0])).item() == pytest.approx(math.log(4), abs=1e-6)


@pytest.mark.parametrize("beta", [0.0, 0.3, 1.0])
def test_the_token_divergence_is_that_of_its_definition_and_has_finite_gradients_where_tokens_are_banned(beta):
    generator = torch.Generator().manual_seed(0)
    student, teacher = torch.randn(4, 6, generator=generator), torch.randn(4, 6, generator=generator)
    s, t = student.softmax(dim=-1), teacher.softmax(dim=-1)
    m = beta * t + (1 - beta) * s
    kl = {0.0: t * (t / s).log(), 1.0: s * (s / t).log()}.get(beta, beta * t * (t / m).log() + (1 - beta) * s * (s / m).log())
    expected = kl.sum(dim=-1)
    torch.testing.assert_close(generalized_jensen_shannon(student, teacher, beta=beta), expected, atol=1e-6, rtol=1e-5)
    banned = torch.full((4, 1), -torch.inf)
    student = torch.cat([student, banned], dim=1).requires_grad_()
    value = generalized_jensen_shannon(student, torch.cat([teacher, banned], dim=1), beta=beta)
    torch.testing.assert_close(value, expected, atol=1e-6, rtol=1e-5)
    value.sum().backward()
    assert student.grad.isfinite().all() and student.grad.any() and not student.grad[:, -1].any()
