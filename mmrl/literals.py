"""Text that spells a model's media tokens stays text: ``what is <|image_pad|>?`` holds no picture.

A processor looks for placeholders by their spelling, so such a prompt goes to a copy of it in which every spelling that a
person wrote is a token of its own; in the result that token is replaced by those of the ordinary text. Real slots are never
confused with text, whatever it says.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any

import torch

from mmrl.chat import ChatTask
from mmrl.data_files import RowError
from mmrl.generation import EncodedPrompt

INTERNAL_NAMES = ("<|placeholder|>", "<|audio_placeholder|>", "<|image_placeholder|>", "<|video_placeholder|>")
"""What transformers' processors put into texts for a moment, and would take for their own."""
_MARK = "\U000f1ffe"
"""A private character that stands around the numbers of spellings."""

Encode = Callable[[Any, Sequence[ChatTask]], list[EncodedPrompt]]
"""``encode(processor, tasks)``: one prompt per task."""


class LiteralText:
    """Encodes tasks with a processor so that ``reserved`` spellings in their texts stay text."""

    def __init__(self, processor: Any, reserved: Collection[str]) -> None:
        self.processor = processor
        # the longest first, so that no spelling is taken for a part of another
        self.spellings = sorted({*reserved, *INTERNAL_NAMES}, key=lambda text: (-len(text), text))

    def encode(self, tasks: Sequence[ChatTask], encode: Encode) -> list[EncodedPrompt]:
        """One prompt per task. Raises `RowError` where the tokenizer cannot keep a spelling apart."""
        spelled = [index for index, task in enumerate(tasks) if self._spelling(task) is not None]
        if not spelled:
            return encode(self.processor, tasks)
        plain = [index for index in range(len(tasks)) if index not in set(spelled)]
        prompts = dict(zip(plain, encode(self.processor, [tasks[index] for index in plain]) if plain else ()))
        for index in spelled:
            self._require_fast(tasks[index])
        hidden = encode(self._marked, [self._hide(tasks[index]) for index in spelled])
        prompts |= zip(spelled, (self._reveal(prompt) for prompt in hidden))
        return [prompts[index] for index in range(len(tasks))]

    def _spelling(self, task: ChatTask) -> str | None:
        texts = [part["text"] for message in task.messages for part in message["content"] if part["type"] == "text"]
        return next((spelling for spelling in self.spellings for text in texts if spelling in text), None)

    def _require_fast(self, task: ChatTask) -> None:
        if not getattr(self.processor.tokenizer, "is_fast", False):
            detail = f"the text holds {self._spelling(task)!r}, which stands for media in this model; write it differently."
            raise RowError("prompt", "media token in the text", detail, place=task.source or task.id)

    @cached_property
    def _marked(self) -> Any:
        """The processor with a token for each spelling."""
        processor = copy.copy(self.processor)
        processor.tokenizer = copy.deepcopy(self.processor.tokenizer)
        processor.tokenizer.add_tokens([self._mark(number) for number in range(len(self.spellings))], special_tokens=True)
        return processor

    @cached_property
    def _ids(self) -> dict[int, list[int]]:
        """Ids of the text of each spelling, by the id that stands for it."""
        found, tokenizer = {}, self.processor.tokenizer
        for number, spelling in enumerate(self.spellings):
            mark = self._marked.tokenizer.convert_tokens_to_ids(self._mark(number))
            # a spelling in two halves is no token, whatever the tokenizer
            halves = [spelling[: len(spelling) // 2], spelling[len(spelling) // 2 :]]
            found[mark] = [id for half in halves for id in tokenizer(half, add_special_tokens=False)["input_ids"]]
        return found

    def _mark(self, number: int) -> str:
        return f"{_MARK}{number}{_MARK}"

    def _hide(self, task: ChatTask) -> ChatTask:
        contents = [[self._hide_part(part, task) for part in message["content"]] for message in task.messages]
        messages = tuple({**message, "content": content} for message, content in zip(task.messages, contents))
        return replace(task, messages=messages)

    def _hide_part(self, part: dict[str, Any], task: ChatTask) -> dict[str, Any]:
        if part["type"] != "text":
            return part
        text = part["text"]
        if _MARK in text:
            detail = f"the text holds {_MARK!r}, which is for this program's own use; leave it out."
            raise RowError("prompt", "media token in the text", detail, place=task.source or task.id)
        for number, spelling in enumerate(self.spellings):
            text = text.replace(spelling, self._mark(number))
        return {**part, "text": text}

    def _reveal(self, prompt: EncodedPrompt) -> EncodedPrompt:
        """Replace each mark by the tokens of its spelling, in everything that has an entry per token."""
        ids = prompt["input_ids"][0].tolist()
        pieces = [self._ids.get(id, [id]) for id in ids]
        repeats = torch.tensor([len(piece) for piece in pieces])
        shape = prompt["input_ids"].shape
        wide = {
            key: value.repeat_interleave(repeats, dim=1)
            for key, value in prompt.items()
            if value.shape[:2] == shape and key != "input_ids"
        }
        return {**prompt, **wide, "input_ids": torch.tensor([[id for piece in pieces for id in piece]])}
