"""What the adapter keeps of a batch of episodes to say again how likely its decisions are."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields

import torch
from torch import Tensor
from torch.nn.functional import pad


@dataclass(frozen=True, kw_only=True)
class EpisodeInputs:
    """Observations as the policy saw them (after the preprocessor) and what it decided; zeros after the end of an episode."""

    state: Tensor
    """``[N, T, A]`` normalised joint positions."""
    environment_state: Tensor
    """``[N, T, E]`` normalised positions of gripper and objects."""
    words: Tensor
    """``[N, L]`` int64 word ids of the instruction, 0 where there is none."""
    motions: Tensor
    """``[N, T, H, A]`` decided motions."""
    executed: Tensor
    """``[N, T]`` int64: how many of the H were executed."""

    @property
    def prompt_lengths(self) -> Tensor:
        """``[N]`` zeros: nothing comes before the first decision."""
        return torch.zeros(len(self.state), dtype=torch.int64)

    def select(self, rows: Tensor) -> EpisodeInputs:
        """Keep ``rows`` (int64 ``[n]``), in that order."""
        return EpisodeInputs(**{item.name: getattr(self, item.name)[rows] for item in fields(self)})

    def concat(self, others: Sequence[EpisodeInputs]) -> EpisodeInputs:
        """Append the rows of ``others`` in order; ``T`` grows to the longest."""
        parts = [self, *others]
        longest = max(part.executed.shape[1] for part in parts)

        def join(name: str) -> Tensor:
            values = [getattr(part, name) for part in parts]
            if name != "words":
                after_t = values[0].ndim - 2
                values = [pad(value, (0, 0) * after_t + (0, longest - value.shape[1])) for value in values]
            return torch.cat(values)

        return EpisodeInputs(**{item.name: join(item.name) for item in fields(self)})
