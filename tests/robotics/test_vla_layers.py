import pytest
import torch
from lerobot.utils.constants import OBS_ENV_STATE
from torch import nn

from robotics.policies.vla_encoders import ImageTokens, SlotTokens
from robotics.policies.vla_layers import AdaptiveRmsNorm, Attention, Layer, block_mask


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


def test_a_conditioned_layer_starts_as_the_identity():
    layer, x = Layer(16, 2, 2, condition_width=3), torch.randn(2, 4, 16)
    y, _ = layer(x, torch.ones(2, 4, 4, dtype=torch.bool), condition=torch.randn(2, 3))
    assert torch.equal(y, x)


def test_slot_tokens_see_places_offsets_from_the_gripper_and_turns():
    encoder = SlotTokens(num_slots=3, num_yaws=2, width=8)
    with torch.no_grad():
        encoder.names.zero_()
        encoder.place.weight.copy_(torch.eye(8)[:, :6])
        encoder.place.bias.zero_()
        encoder.turn.weight.copy_(torch.eye(8)[:, 6:])
    gripper, objects = torch.tensor([0.1, 0.2, 0.3]), torch.arange(9.0) / 10
    yaws = torch.tensor([1.0, 0.0, 0.0, -1.0])
    tokens, present = encoder({OBS_ENV_STATE: torch.cat([gripper, objects, yaws])[None]})
    offset = 4 * (objects[3:6] - gripper)
    torch.testing.assert_close(tokens[0, 0], torch.cat([gripper, torch.zeros(5)]))
    torch.testing.assert_close(tokens[0, 2], torch.cat([objects[3:6], offset, yaws[2:]]))
    assert tokens[0, 3, 6:].tolist() == [0.0, 0.0]  # the third slot has no yaw
    assert present.all()


def test_image_tokens_tell_where_their_map_finds_something():
    encoder = ImageTokens("image", (3, 16, 32), patch_size=4, num_tokens=1, width=2)
    encoder.stem, encoder.look = nn.AvgPool2d(4), nn.Linear(3, 2)
    encoder.maps = nn.Conv2d(3, 1, 1)
    with torch.no_grad():
        for parameter in (encoder.maps.bias, encoder.look.weight, encoder.look.bias, encoder.place.bias, encoder.names):
            parameter.zero_()
        encoder.maps.weight.copy_(torch.tensor([100.0, 0.0, 0.0])[None, :, None, None])  # looks for red
        encoder.place.weight.copy_(torch.eye(2))
    image = torch.zeros(1, 3, 16, 32)
    image[:, 1] = 1.0
    image[0, 0, 4:8, 28:32] = 1.0  # second of 4 rows, last of 8 columns
    tokens, _ = encoder({"image": image})
    torch.testing.assert_close(tokens[0, 0], 3 * torch.tensor([-1 / 3, 1.0]), atol=1e-4, rtol=0)


def test_a_new_encoder_looks_at_what_stands_out_and_bears_an_image_of_one_colour():
    torch.manual_seed(0)
    encoder = ImageTokens("image", (3, 64, 64), patch_size=4, num_tokens=64, width=2)
    with torch.no_grad():
        encoder.place.weight.copy_(torch.eye(2) / 3)
        for parameter in (encoder.place.bias, encoder.names, encoder.look.weight):
            parameter.zero_()
    image = torch.full((2, 3, 64, 64), 0.4)
    image[0, :, 12:16, 40:44] = torch.tensor([0.9, 0.1, 0.1])[:, None, None]  # patch (3, 10) of 16 by 16
    tokens, _ = encoder({"image": image})
    away = (tokens[0] - torch.tensor([3, 10]) / 7.5 + 1).norm(dim=1)
    assert (away < 0.3).float().mean() > 0.3  # a third of the maps point there, without any training
    tokens.sum().backward()
    assert all(parameter.grad.isfinite().all() for parameter in encoder.parameters() if parameter.grad is not None)
