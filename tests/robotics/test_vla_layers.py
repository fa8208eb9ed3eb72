import pytest
import torch
from lerobot.utils.constants import OBS_ENV_STATE, OBS_LANGUAGE_ATTENTION_MASK, OBS_LANGUAGE_TOKENS
from torch import nn

from robotics.policies.vla_encoders import ImageTokens, InstructedStem, SlotTokens
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


WORDS = {OBS_LANGUAGE_TOKENS: torch.tensor([[1, 2, 0]]), OBS_LANGUAGE_ATTENTION_MASK: torch.tensor([[True, True, False]])}


def test_image_tokens_tell_where_their_map_finds_something():
    encoder = ImageTokens("image", (3, 16, 32), patch_size=4, num_tokens=1, num_words=2, width=2)
    encoder.stem.forward = lambda image, tokens, mask: nn.functional.avg_pool2d(image, 4)
    encoder.look = nn.Linear(3, 2)
    encoder.maps = nn.Conv2d(3, 1, 1)
    with torch.no_grad():
        for parameter in (encoder.maps.bias, encoder.look.weight, encoder.look.bias, encoder.place.bias, encoder.names):
            parameter.zero_()
        encoder.maps.weight.copy_(torch.tensor([100.0, 0.0, 0.0])[None, :, None, None])  # looks for red
        encoder.place.weight.copy_(torch.eye(2))
    image = torch.zeros(1, 3, 16, 32)
    image[:, 1] = 1.0
    image[0, 0, 4:8, 28:32] = 1.0  # second of 4 rows, last of 8 columns
    tokens, _ = encoder({"image": image, **WORDS})
    torch.testing.assert_close(tokens[0, 0], 3 * torch.tensor([-1 / 3, 1.0]), atol=1e-4, rtol=0)


def test_a_new_encoder_looks_at_what_stands_out_and_bears_an_image_of_one_colour():
    torch.manual_seed(0)
    encoder = ImageTokens("image", (3, 64, 64), patch_size=4, num_tokens=64, num_words=2, width=2)
    with torch.no_grad():
        encoder.place.weight.copy_(torch.eye(2) / 3)
        for parameter in (encoder.place.bias, encoder.names, encoder.look.weight):
            parameter.zero_()
    image = torch.full((2, 3, 64, 64), 0.8)
    image[0, :, 12:16, 40:44] = torch.tensor([0.9, 0.1, 0.1])[:, None, None]  # patch (3, 10) of 16 by 16
    tokens, _ = encoder({"image": image, **{name: value.expand(2, -1) for name, value in WORDS.items()}})
    away = (tokens[0] - torch.tensor([3, 10]) / 7.5 + 1).norm(dim=1)
    assert (away < 0.3).float().mean() > 0.8  # most maps point there, without any training
    tokens.sum().backward()
    assert all(parameter.grad.isfinite().all() for parameter in encoder.parameters() if parameter.grad is not None)


@pytest.mark.parametrize("patch_size", [2, 4, 8])
def test_the_stem_scales_and_shifts_channels_as_the_instruction_says(patch_size):
    torch.manual_seed(0)
    stem = InstructedStem(3, patch_size.bit_length() - 1, num_words=4)
    image, present = torch.rand(1, 3, 16, 32), torch.tensor([[True, True]])
    say = lambda *ids, mask=present: stem(image, torch.tensor([ids]), mask)  # noqa: E731
    assert say(1, 2).shape == (1, 32, 16 // patch_size, 32 // patch_size)
    torch.testing.assert_close(say(1, 2), say(2, 1))  # which words, not in which order
    torch.testing.assert_close(say(1, 1), say(1, 4, mask=torch.tensor([[True, False]])))  # the mean of those that are there
    assert (say(1, 2) - say(1, 3)).abs().max() > 0.01
    silent = say(1, 2, mask=torch.tensor([[False, False]]))
    x = image
    for conv in stem.halvings:
        x = conv(x).relu()
    torch.testing.assert_close(silent, x + stem.around(x).relu())  # no word, no modulation
    scale, shift, scale_around, shift_around = torch.randn(4, 32)
    with torch.no_grad():
        stem.modulation.weight.zero_()
        stem.modulation.bias.copy_(torch.cat([scale, shift, scale_around, shift_around]) / 2)  # the gain is 2
    by_channel = lambda values: values[:, None, None]  # noqa: E731
    x = x * (1 + by_channel(scale)) + by_channel(shift)
    expected = x + stem.around(x).relu() * (1 + by_channel(scale_around)) + by_channel(shift_around)
    torch.testing.assert_close(say(1, 2), expected)


def test_the_stem_can_learn_to_see_only_the_colour_that_is_named():
    """Two squares, red and blue, at the two ends of a line; the one that is named must come out, in all pairs of places."""
    torch.manual_seed(0)
    encoder = ImageTokens("image", (3, 32, 32), patch_size=4, num_tokens=4, num_words=2, width=8)
    read = nn.Linear(32, 2)
    optimizer = torch.optim.Adam([*encoder.parameters(), *read.parameters()], lr=3e-3)

    def scenes(num, generator):
        places = torch.rand(num, 8, 8, generator=generator).flatten(1).topk(2).indices  # patches of red and of blue
        image = torch.full((num, 3, 64), 0.4)
        for channel, each in zip((0, 2), places.T):
            image[torch.arange(num), :, each] = torch.eye(3)[channel]
        named = torch.randint(2, (num,), generator=generator)
        where = places.gather(1, named[:, None])[:, 0]
        seen = image.unflatten(2, (8, 8)).repeat_interleave(4, dim=2).repeat_interleave(4, dim=3)
        words = {OBS_LANGUAGE_TOKENS: named[:, None] + 1, OBS_LANGUAGE_ATTENTION_MASK: torch.ones(num, 1, dtype=torch.bool)}
        return {"image": seen, **words}, torch.stack([where // 8, where % 8], dim=1) / 3.5 - 1

    generator = torch.Generator().manual_seed(0)
    for _ in range(120):
        observation, where = scenes(64, generator)
        loss = (read(encoder(observation)[0].flatten(1)) - where).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    observation, where = scenes(256, torch.Generator().manual_seed(1))
    error = (read(encoder(observation)[0].flatten(1)) - where).norm(dim=1).median()
    assert error < 0.2, error  # two thirds of a patch; guessing gives about 1
