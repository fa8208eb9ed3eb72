import pytest
import torch

from robotics.policies.modeling_token_vla import action_log_prob, token_log_probs
from robotics.policies.motions import decode_motions, encode_motions, from_bins, sample_bins, to_bins


def test_motions_add_up_from_the_state_within_limits():
    state = torch.tensor([[0.1, 0.95]])
    motions = torch.tensor([[[1.0, 1.0], [-0.5, 1.0], [3.0, -1.0]]])  # 3 is cut to 1
    positions = decode_motions(state, motions, 0.1)
    torch.testing.assert_close(positions, torch.tensor([[[0.2, 1.0], [0.15, 1.0], [0.25, 1.0]]]))


def test_encoding_undoes_decoding():
    generator = torch.Generator().manual_seed(0)
    state = torch.rand(5, 6, generator=generator) - 0.5
    motions = 2 * torch.rand(5, 8, 6, generator=generator) - 1
    torch.testing.assert_close(encode_motions(state, decode_motions(state, motions, 0.04), 0.04), motions, atol=1e-5, rtol=0)


def test_a_demonstration_that_is_too_fast_is_caught_up_with():
    positions = torch.full((1, 4, 1), 0.25)  # one jump, then still
    motions = encode_motions(torch.zeros(1, 1), positions, 0.1)
    torch.testing.assert_close(motions[0, :, 0], torch.tensor([1.0, 1.0, 0.5, 0.0]))


def test_bins_are_those_of_openvla():
    digit = to_bins(torch.tensor([0.1]), 255).item() + 1  # OpenVLA counts its 256 edges from 1
    assert (digit, 32_000 - digit) == (141, 31_859)
    assert from_bins(torch.tensor([140]), 255).item() == pytest.approx(0.101961, abs=1e-6)
    assert from_bins(torch.tensor([0, 127, 254]), 255).tolist() == pytest.approx([-0.996078, 0.0, 0.996078], abs=1e-6)
    assert to_bins(torch.tensor([-2.0, -1.0, 0.0, 1.0, 2.0]), 255).tolist() == [0, 0, 127, 254, 254]


@pytest.mark.parametrize("num_bins", [2, 7, 255])
def test_bin_centres_are_in_their_bins(num_bins):
    bins = torch.arange(num_bins)
    assert torch.equal(to_bins(from_bins(bins, num_bins), num_bins), bins)
    values = torch.linspace(-1, 1, 999)
    assert (from_bins(to_bins(values, num_bins), num_bins) - values).abs().max() <= 1 / num_bins + 1e-6


def test_sampling_inverts_the_cdf():
    log_probs = torch.tensor([0.0, 0.5, 0.0, 0.5, 0.0]).log().expand(5, -1)
    uniform = torch.tensor([0.0, 0.4999, 0.5001, 0.9999, 1.0])
    assert sample_bins(log_probs, uniform).tolist()[:4] == [1, 1, 3, 3]  # bins of probability zero are never drawn
    probs = torch.tensor([0.6, 0.1, 0.3])
    drawn = sample_bins(probs.log().expand(10_000, -1), (torch.arange(10_000) + 0.5) / 10_000)
    torch.testing.assert_close(drawn.bincount() / 10_000, probs, atol=2e-4, rtol=0)


def test_sampling_at_the_ends_of_the_cdf_gives_a_bin():
    log_probs = torch.randn(4, 255, generator=torch.Generator().manual_seed(0)).log_softmax(dim=1)
    assert sample_bins(log_probs, torch.tensor([0.0, 1.0, 0.0, 1.0])).tolist() == [0, 254, 0, 254]


def test_temperature_divides_logits():
    logits = torch.tensor([[2.0, 1.0, 0.0]]).expand(2, -1)
    log_probs = token_log_probs(logits, torch.tensor([1.0, 1.6]))
    expected = torch.tensor([[0.665241, 0.244728, 0.090031], [0.548918, 0.293815, 0.157268]])
    torch.testing.assert_close(log_probs.exp(), expected, atol=1e-6, rtol=0)
    assert log_probs[1].tolist() == pytest.approx([-0.599806, -1.224806, -1.849806], abs=1e-6)


def test_an_actions_log_probability_is_the_sum_over_its_joints():
    # Two actions of two joints with two bins each; bin 0 was taken.
    old, new = torch.tensor([[-0.1, -0.2], [-0.3, -0.4]]), torch.tensor([[-0.05, -0.25], [-0.2, -0.4]])
    tokens = torch.zeros(1, 2, 2, dtype=torch.int64)
    both = [action_log_prob(torch.stack([p, (1 - p.exp()).log()], dim=-1)[None], tokens)[0] for p in (old, new)]
    ratios = (both[1] - both[0]).exp()
    assert ratios.tolist() == pytest.approx([1.0, 1.105171], abs=1e-6)
    assert ratios.prod().item() == pytest.approx(1.105171, abs=1e-6)  # of the whole chunk
