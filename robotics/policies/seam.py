"""What the acting loop and the learner ask of every policy: decide a chunk, score a decision, imitate a demonstration.

Axes: ``B`` batch, ``H`` actions of a chunk, ``A`` joints. Observations are batches that the policy's own LeRobot preprocessor
made; each row is decided and scored by itself, whatever else is in the batch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from torch import Tensor

Observation = Mapping[str, Tensor]
"""A preprocessed batch: at least the policy's ``observation_keys``, each ``[B, ...]``."""


@dataclass(frozen=True)
class Decision:
    """One chunk per row and what is needed to score it later."""

    chunk: Tensor
    """``[B, H, A]`` normalised joint positions to command, in [-1, 1]: what the postprocessor takes."""
    record: dict[str, Tensor]
    """``[B, ...]`` each: all that `ChunkPolicy.score` needs besides the observation."""
    density: Tensor
    """``[B, H]`` float32, log-density (or log-probability) of each action of the chunk."""


@runtime_checkable
class ChunkPolicy(Protocol):
    """A LeRobot policy (an ``nn.Module``) that can also say how likely its decisions were."""

    observation_keys: tuple[str, ...]
    """Keys of the preprocessed batch that it reads."""

    def noise_shape(self) -> tuple[int, ...]:
        """Shape of the standard normal numbers that one decision consumes."""
        ...

    def decide(self, observation: Observation, noise: Tensor | None) -> Decision:
        """A decision per row from ``noise`` ``[B, *noise_shape()]``; ``None`` asks for the deterministic one. No gradient."""
        ...

    def score(self, observation: Observation, record: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
        """Density and entropy, ``[B, H]`` each and with gradient, of recorded decisions under the policy as it is now.

        Right after `decide` the density is that of the decision. For records of `imitate` it is the objective that
        supervised training maximises.
        """
        ...

    def imitate(self, observation: Observation, chunk: Tensor, noise: Tensor) -> dict[str, Tensor]:
        """A record that makes `score` the supervised objective of a demonstrated ``chunk`` ``[B, H, A]``.

        ``chunk`` holds normalised joint positions; ``noise`` is standard normal, ``[B, *noise_shape()]``. Records of `decide`
        and of `imitate` have the same keys and shapes, so a buffer may hold both.
        """
        ...
