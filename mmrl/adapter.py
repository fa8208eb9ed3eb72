"""The `Adapter` protocol: everything the core asks of a modality.

An adapter answers: which tasks, what happened (`rollout`), and how likely it is now (`forward`). It never sees rewards'
weights, advantages or optimizers. The policy is always an argument, never hidden state.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from torch import Tensor, nn

from mmrl.types import Forward, RolloutBatch, Sample, Task

RewardTerm = Callable[[Any, Any], Any]
"""``term(task, outcome) -> float | bool | None``; None or NaN means that the term does not apply to this row."""


@runtime_checkable
class Adapter(Protocol):
    """What a modality implements. `mmrl.testing.check_adapter` runs an implementation through this contract."""

    reward_terms: Mapping[str, RewardTerm]
    """Named terms that a config's ``rewards:`` section may weight."""
    max_decisions: int
    """Decisions of the longest possible rollout; the default horizon of constant-length aggregation."""

    def build_policy(self) -> nn.Module:
        """A new policy in eval mode (no dropout: the ratio must be 1 before the first update), deterministic for a config."""
        ...

    def freeze_reference(self, policy: nn.Module) -> Callable[[], AbstractContextManager[nn.Module]]:
        """Remember ``policy`` as it is now; ``with reference() as frozen`` gives a module that `forward` accepts."""
        ...

    def task_source(self, split: str) -> Sequence[Task]:
        """Tasks of ``"train"`` or a held-out split. Indexing is deterministic: equal index, equal task."""
        ...

    def rollout(
        self, policy: nn.Module, tasks: Sequence[Task], *, group_size: int, seeds: Tensor, greedy: bool = False
    ) -> RolloutBatch:
        """Attempt each task ``group_size`` times, without gradient.

        ``seeds`` is int64 ``[P * group_size]``, group-major: rollout ``i`` depends on its task, the policy and ``seeds[i]``
        only, not on its neighbours. ``greedy`` takes the most likely decision instead. Group ids are ``0 .. P-1``.
        """
        ...

    def demonstrate(self, policy: nn.Module, tasks: Sequence[Task], *, seeds: Tensor) -> RolloutBatch:
        """One rollout per task that follows its demonstration (for supervised warm-up); ``old_log_probs`` are zeros.

        ``seeds`` is int64 ``[P]``: where a demonstration has a random part (noise of a flow objective, a choice of frames), it
        comes from there.
        """
        ...

    def forward(self, policy: nn.Module, batch: RolloutBatch, needs: frozenset[str] = frozenset()) -> Forward:
        """Log-probabilities ``[n, T]`` of the recorded decisions under ``policy``, with gradient, and what ``needs`` names."""
        ...

    def describe(self, batch: RolloutBatch, row: int) -> Sample:
        """Rollout ``row`` as a person reads it."""
        ...

    def save_policy(self, policy: nn.Module, directory: Path) -> None:
        """Write a directory that the modality's own library loads (Hugging Face or LeRobot)."""
        ...

    def load_policy(self, policy: nn.Module, directory: Path) -> None:
        """Load the weights of ``directory`` into ``policy`` strictly: a missing or extra tensor is an error."""
        ...
