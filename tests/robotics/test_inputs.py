import pytest
import torch

from mmrl.errors import AdapterError
from robotics.inputs import EpisodeInputs, pack, unpack

IMAGE = "observation.images.scene"


def test_images_are_kept_as_the_bytes_they_were_and_other_entries_as_they_are():
    image = torch.arange(256).float().div(255.0).view(1, 1, 16, 16)
    assert pack(IMAGE, image).dtype == torch.uint8
    torch.testing.assert_close(unpack(IMAGE, pack(IMAGE, image)), image)
    state = torch.tensor([[-1.5, 2.0]])
    assert pack("observation.state", state) is state and unpack("observation.state", state) is state


def test_normalised_images_are_refused_since_bytes_cannot_hold_them():
    with pytest.raises(AdapterError, match=r"observation\.images\.scene: the preprocessor gives values from -1 to 1; expected"):
        pack(IMAGE, torch.tensor([-1.0, 0.0, 1.0]))


def inputs(num_rows, num_decisions):
    count = num_rows * num_decisions
    return EpisodeInputs(
        observations={"observation.state": torch.arange(2.0 * count).view(num_rows, num_decisions, 2)},
        records={"step": torch.arange(count).view(num_rows, num_decisions)},
        executed=torch.full((num_rows, num_decisions), 3),
    )


def test_rows_are_selected_and_joined_whatever_their_length():
    both = inputs(2, 3).concat([inputs(1, 5)])
    assert both.executed.shape == (3, 5) and both.executed[0].tolist() == [3, 3, 3, 0, 0]
    last = both.select(torch.tensor([2, 0]))
    assert torch.equal(last.records["step"][0], inputs(1, 5).records["step"][0])
    observations, records, executed = last.decisions(torch.device("cpu"))
    assert observations["observation.state"].shape == (8, 2) and len(records["step"]) == len(executed) == 8
