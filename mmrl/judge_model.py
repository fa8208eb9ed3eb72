"""A judge that is a model in this process: any language adapter's, decoded greedily."""

from __future__ import annotations

import os
import threading
from dataclasses import dataclass, field

import torch
from torch import nn

from mmrl.chat import ChatTask
from mmrl.errors import DataError
from mmrl.judge import JudgeError, JudgeRequest, Reply
from mmrl.language import LanguageAdapter


@dataclass(kw_only=True)
class ModelJudge:
    """Implements `mmrl.judge.Judge`, one request at a time; what bounds its time is the adapter's ``max_new_tokens``."""

    adapter: LanguageAdapter
    policy: nn.Module
    _lock: threading.Lock = field(default_factory=threading.Lock, repr=False)

    @property
    def identity(self) -> str:
        return f"model {self.adapter.policy_dir} {self.adapter.max_decisions}"

    def conversation(self, request: JudgeRequest) -> ChatTask:
        """How the model is asked."""
        parts = [{"type": item.kind, item.kind: item.data} for item in request.media]
        return ChatTask(
            id=f"judge/{request.purpose}",
            messages=(
                {"role": "system", "content": [{"type": "text", "text": request.instructions}]},
                {"role": "user", "content": [*parts, {"type": "text", "text": request.text}]},
            ),
        )

    def answer(self, request: JudgeRequest) -> Reply:
        task = self.conversation(request)
        try:
            with self._lock:
                seeds = torch.zeros(1, dtype=torch.int64)
                batch = self.adapter.rollout(self.policy, [task], group_size=1, seeds=seeds, greedy=True)
        except DataError as error:  # too long a prompt, or a clip that the model does not take
            raise JudgeError(f"{self.adapter.policy_dir}: {error}", kind="permanent") from error
        except torch.OutOfMemoryError as error:
            raise JudgeError(f"{self.adapter.policy_dir}: out of memory", kind="transient") from error
        completion = batch.outcomes[0]
        prompt_tokens = int(batch.inputs.prompt_lengths[0])
        return Reply(text=completion.text, prompt_tokens=prompt_tokens, completion_tokens=completion.num_tokens)


def default_device() -> torch.device:
    """This process's accelerator, or the CPU."""
    if torch.cuda.is_available():
        return torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
    return torch.device("cpu")
