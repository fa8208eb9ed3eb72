"""What the adapter keeps of a batch of episodes to say again how likely its decisions are."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from lerobot.utils.constants import OBS_IMAGES
from torch import Tensor
from torch.nn.functional import pad

from mmrl.errors import AdapterError


def pack(name: str, value: Tensor) -> Tensor:
    """An observation as it is kept: images, floats in [0, 1] made of bytes, as the bytes they were.

    Raises `AdapterError` for images that a preprocessor normalised: bytes would not hold them.
    """
    if not name.startswith(OBS_IMAGES):
        return value
    if value.numel() and not 0.0 <= float(value.min()) <= float(value.max()) <= 1.0:
        raise AdapterError(
            f"{name}: the preprocessor gives values from {float(value.min()):.3g} to {float(value.max()):.3g}; expected "
            "[0, 1]. Leave images as they are there (normalization_mapping VISUAL: IDENTITY) and normalise them in the policy."
        )
    return (value * 255.0).round().to(torch.uint8)


def unpack(name: str, value: Tensor) -> Tensor:
    """The inverse of `pack`."""
    return value.float() / 255.0 if name.startswith(OBS_IMAGES) else value


@dataclass(frozen=True, kw_only=True)
class EpisodeInputs:
    """Observations as the policy saw them (after the preprocessor) and what it decided; zeros after the end of an episode."""

    observations: Mapping[str, Tensor]
    """``[N, T, ...]`` by LeRobot's names; images as bytes (`pack`)."""
    records: Mapping[str, Tensor]
    """``[N, T, ...]``: what the policy's `score` needs of each decision."""
    executed: Tensor
    """``[N, T]`` int64: how many commands of each chunk were executed; 0 after the end."""

    @property
    def prompt_lengths(self) -> Tensor:
        """``[N]`` zeros: nothing comes before the first decision."""
        return torch.zeros(len(self.executed), dtype=torch.int64)

    def select(self, rows: Tensor) -> EpisodeInputs:
        """Keep ``rows`` (int64 ``[n]``), in that order."""
        return self._map(lambda value: value[rows])

    def concat(self, others: Sequence[EpisodeInputs]) -> EpisodeInputs:
        """Append the rows of ``others`` in order; ``T`` grows to the longest."""
        parts = [self, *others]
        longest = max(part.executed.shape[1] for part in parts)

        def join(values: Sequence[Tensor]) -> Tensor:
            return torch.cat([pad(value, (0, 0) * (value.ndim - 2) + (0, longest - value.shape[1])) for value in values])

        return EpisodeInputs(
            observations={name: join([part.observations[name] for part in parts]) for name in self.observations},
            records={name: join([part.records[name] for part in parts]) for name in self.records},
            executed=join([part.executed for part in parts]),
        )

    def decisions(self, device: torch.device) -> tuple[dict[str, Tensor], dict[str, Tensor], Tensor]:
        """Observations, records and executed counts ``[M, ...]`` of the M decisions that were taken, row by row."""
        taken = self.executed > 0
        observations = {name: unpack(name, value[taken].to(device)) for name, value in self.observations.items()}
        records = {name: value[taken].to(device) for name, value in self.records.items()}
        return observations, records, self.executed[taken].to(device)

    def _map(self, change) -> EpisodeInputs:
        return EpisodeInputs(
            observations={name: change(value) for name, value in self.observations.items()},
            records={name: change(value) for name, value in self.records.items()},
            executed=change(self.executed),
        )
