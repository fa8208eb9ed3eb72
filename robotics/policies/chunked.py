"""What our policies share of LeRobot's interface, on top of `robotics.policies.seam.ChunkPolicy`."""

from __future__ import annotations

from collections import deque
from typing import Any

import torch
from lerobot.utils.constants import ACTION, OBS_STATE
from torch import Tensor, nn


class ActsInChunks:
    """A mixin for `lerobot.policies.pretrained.PreTrainedPolicy`: everything LeRobot asks, in terms of `ChunkPolicy`."""

    def reset(self) -> None:
        """Forget the rest of the chunk that is being executed."""
        self._queue: deque[Tensor] = deque()

    def get_optim_params(self) -> list[nn.Parameter]:
        return list(self.parameters())

    def forward(self, batch: dict[str, Tensor]) -> tuple[Tensor, dict[str, float]]:
        """Supervised loss of the recorded ``action`` ``[B, H, A]``, the mean of minus `score`; padded actions do not count."""
        state = batch[OBS_STATE]
        noise = torch.randn(len(state), *self.noise_shape(), device=state.device)
        density, _ = self.score(batch, self.imitate(batch, batch[ACTION], noise))
        padding = batch.get(f"{ACTION}_is_pad")
        counts = torch.ones_like(density) if padding is None else (~padding).to(density)
        loss = -(density * counts).sum() / counts.sum().clamp(min=1.0)
        return loss, {"imitation_loss": loss.item()}

    def predict_action_chunk(self, batch: dict[str, Tensor], **_: Any) -> Tensor:
        """The deterministic decision, as normalised joint positions ``[B, H, A]``."""
        return self.decide(batch, None).chunk

    def select_action(self, batch: dict[str, Tensor], **_: Any) -> Tensor:
        """The next normalised joint positions ``[B, A]``; looks at the observation once per ``n_action_steps`` calls."""
        if not self._queue:
            chunk = self.predict_action_chunk(batch)
            self._queue.extend(chunk[:, : self.config.n_action_steps].unbind(dim=1))
        return self._queue.popleft()
