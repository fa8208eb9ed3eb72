import pytest
import torch

from robotics.policies.vla_layers import AdaptiveRmsNorm, Attention, block_mask


def rows(mask):
    return ["".join(str(int(x)) for x in row) for row in mask]


@pytest.mark.parametrize(
    ("present", "starts", "expected"),
    [
        ([1, 1, 1, 1], [0, 0, 1, 0], ["1100", "1100", "1111", "1111"]),
        ([1, 0, 1, 1, 1], [0, 0, 1, 1, 0], ["10000", "00000", "10100", "10111", "10111"]),
    ],
)
def test_blocks_see_themselves_and_earlier_blocks(present, starts, expected):
    mask = block_mask(torch.tensor([present]).bool(), torch.tensor(starts))
    assert rows(mask[0]) == expected


def test_adaptive_norm():
    norm = AdaptiveRmsNorm(2, 3)
    x = torch.tensor([[[3.0, 4.0]]])
    y, gate = norm(x, torch.randn(1, 3))
    torch.testing.assert_close(y, x / 12.5**0.5)
    assert gate.tolist() == [[[0.0, 0.0]]]  # its branch starts closed
    with torch.no_grad():
        norm.modulation.bias.copy_(torch.tensor([0.1, 0.1, 0.05, 0.05, 0.7, 0.7]))
    y, gate = norm(x, torch.randn(1, 3))
    assert y.flatten().tolist() == pytest.approx([0.983381, 1.294508], abs=1e-6)
    assert gate.flatten().tolist() == pytest.approx([0.7, 0.7])


def test_cached_keys_give_what_one_pass_over_both_streams_gives():
    torch.manual_seed(0)
    attention = Attention(16, 2)
    prefix, suffix = torch.randn(3, 5, 16), torch.randn(3, 4, 16)
    present = torch.ones(3, 9, dtype=torch.bool)
    present[1, 2] = present[2, 4] = False
    starts = torch.tensor([0, 0, 0, 0, 0, 1, 0, 0, 0])
    mask = block_mask(present, starts) | torch.eye(9, dtype=torch.bool)
    whole, _ = attention(torch.cat([prefix, suffix], dim=1), mask)
    first, cached = attention(prefix, mask[:, :5, :5])
    second, _ = attention(suffix, mask[:, 5:], cached)
    torch.testing.assert_close(torch.cat([first, second], dim=1), whole)
