"""From conversations with images and videos to the tensors of a vision-language model."""

from __future__ import annotations

import io
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from PIL import Image
from torch import Tensor
from transformers import AutoModelForImageTextToText

from mmrl.chat import ChatTask, MediaFacts, media_parts
from mmrl.data_files import RowError
from mmrl.generation import EncodedPrompt
from mmrl.images import open_image
from mmrl.literals import LiteralText
from mmrl.types import Media
from vision.config import VisionRolloutConfig
from vision.controls import blank, facts
from vision.media import Video, fitted_size, opener

NUM_SHOWN_FRAMES = 4
"""Frames of a video that a report shows."""
_RESERVED = ("image_token", "video_token", "vision_bos_token", "vision_eos_token", "fake_image_token", "global_image_token")
_BOUNDARIES = ("<|vision_start|>", "<|vision_end|>")
"""What stands around media in prompts of Qwen models, under names that some of their processors lack."""


@dataclass(kw_only=True)
class VisionFrontend:
    """Implements `mmrl.language.Frontend` for image-text-to-text models.

    Models that cut images into patches of any size (Qwen-VL) get images fitted to the config's bounds by
    `qwen_vl_utils`, all of a step in one call of the image processor. Other models (SmolVLM) resize and tile by themselves.
    """

    processor: Any
    config: VisionRolloutConfig
    model_class = AutoModelForImageTextToText
    tower_names = ("visual", "vision_tower", "vision_model")

    def encode(self, tasks: Sequence[ChatTask]) -> list[EncodedPrompt]:
        return self._literal_text.encode(tasks, lambda processor, some: replace(self, processor=processor)._encode(some))

    def _encode(self, tasks: Sequence[ChatTask]) -> list[EncodedPrompt]:
        texts = [self._text(task) for task in tasks]
        media = [[self.open(task, kind, ref) for kind, ref in media_parts(task)] for task in tasks]
        has_video = any(isinstance(item, Video) for items in media for item in items)
        if self.patch_factor is not None and not has_video:
            return self._encode_together(texts, media)
        return [self._encode_alone(text, items) for text, items in zip(texts, media)]

    def media(self, task: ChatTask) -> tuple[Media, ...]:
        shown = []
        for kind, ref in media_parts(task):
            item = self.open(task, kind, ref)
            if isinstance(item, Video):
                times = torch.linspace(0, len(item.frames) - 1, NUM_SHOWN_FRAMES).long().tolist()
                shown += [_png(_frame(item.frames[t]), f"{t / item.fps:.1f} s") for t in dict.fromkeys(times)]
            else:
                shown.append(_png(item))
        return tuple(shown)

    def blank(self, task: ChatTask, kind: str, ref: Any) -> Any:
        """A reference to a medium like this one, without content."""
        return blank(self.open(task, kind, ref))

    def facts(self, task: ChatTask) -> tuple[MediaFacts, ...]:
        """What is known of the task's media as the model gets them."""
        opened = [(kind, ref, self.open(task, kind, ref)) for kind, ref in media_parts(task)]
        return tuple(facts(item, open_image(ref) if kind == "image" else None) for kind, ref, item in opened)

    def open(self, task: ChatTask, kind: str, ref: Any) -> Image.Image | Video:
        """A medium as the model will see it; errors name the task."""
        try:
            return opener(self.config)(kind, ref, factor=self.patch_factor or 1)
        except RowError as error:
            raise error.at(task.source or task.id) from error

    @property
    def patch_factor(self) -> int | None:
        """Pixels of a visual token's side, for models that take images of any size; None for others."""
        image_processor = self.processor.image_processor
        merge = getattr(image_processor, "merge_size", None)
        return None if merge is None else merge * image_processor.patch_size

    @cached_property
    def _literal_text(self) -> LiteralText:
        reserved = {token for name in _RESERVED if (token := getattr(self.processor, name, None))}
        return LiteralText(self.processor, {*reserved, *_BOUNDARIES})

    def advise(self, task: ChatTask, prompt: EncodedPrompt, excess: int) -> str:
        """The largest ``max_pixels`` with which the prompt would be ``excess`` tokens shorter."""
        ids = [getattr(self.processor, name, None) for name in ("image_token_id", "video_token_id")]
        room = sum(int((prompt["input_ids"] == id).sum()) for id in ids if id is not None) - excess
        factor = self.patch_factor
        media = [(kind, ref) for kind, ref in media_parts(task)]
        if factor is None or not media:
            return ""
        if room < len(media):
            return f"its media would have to fit in {max(room, 0)} tokens: shorten the text, "
        sizes = [self._raw_size(task, kind, ref) for kind, ref in media]
        for tokens in range(min(room, self.config.max_pixels // factor**2), 0, -1):
            needed = _num_tokens(sizes, tokens * factor**2, self.config.min_pixels, factor)
            if needed is not None and needed <= room:
                lower = "" if tokens * factor**2 >= self.config.min_pixels else f" (and min_pixels: {factor**2})"
                return f"rollout.max_pixels: {tokens * factor**2}{lower} would fit; set it, "
        return ""

    def _raw_size(self, task: ChatTask, kind: str, ref: Any) -> tuple[int, int, int]:
        """Temporal patches, height and width before a medium is fitted to a pixel budget."""
        if kind == "image":
            image = open_image(ref)
            return 1, image.height, image.width
        frames = self.open(task, kind, ref).frames
        return len(frames) // 2, frames.shape[2], frames.shape[3]

    def _text(self, task: ChatTask) -> str:
        return self.processor.apply_chat_template(list(task.messages), tokenize=False, add_generation_prompt=True)

    def _encode_together(self, texts: list[str], images: list[list[Image.Image]]) -> list[EncodedPrompt]:
        """One call of the processor for all prompts, then cut per prompt."""
        flat = [image for row in images for image in row]
        encoded = self.processor(text=texts, images=flat or None, **({"do_resize": False} if flat else {}))
        grids = torch.as_tensor(encoded["image_grid_thw"]) if flat else torch.zeros(0, 3, dtype=torch.long)
        patches = torch.as_tensor(encoded["pixel_values"]).split(grids.prod(dim=1).tolist()) if flat else ()
        prompts, first = [], 0
        for row, ids in enumerate(encoded["input_ids"]):
            prompt = {"input_ids": torch.tensor([ids]), "attention_mask": torch.ones(1, len(ids), dtype=torch.long)}
            if "mm_token_type_ids" in encoded:
                prompt["mm_token_type_ids"] = torch.tensor([encoded["mm_token_type_ids"][row]])
            last = first + len(images[row])
            if images[row]:
                prompt["pixel_values"] = torch.cat(patches[first:last])
                prompt["image_grid_thw"] = grids[first:last]
            first = last
            prompts.append(prompt)
        return prompts

    def _encode_alone(self, text: str, media: list[Image.Image | Video]) -> EncodedPrompt:
        images = [item for item in media if not isinstance(item, Video)]
        videos = [item for item in media if isinstance(item, Video)]
        options: dict[str, Any] = {}
        if images:
            options["images"] = images
        if videos:
            options |= {
                "videos": [video.frames for video in videos],
                "videos_kwargs": {
                    "video_metadata": [dict(video.metadata) for video in videos], "do_sample_frames": False, "do_resize": False,
                },
            }  # fmt: skip
        if self.patch_factor is not None and images:
            options["images_kwargs"] = {"do_resize": False}
        encoded = self.processor(text=[text], return_tensors="pt", **options)
        return {key: _as_tensor(value) for key, value in encoded.items()}


def _num_tokens(sizes: Sequence[tuple[int, int, int]], max_pixels: int, min_pixels: int, factor: int) -> int | None:
    """Visual tokens of media of these sizes under a pixel budget; None where one of them has no size within it."""
    total = 0
    for patches, height, width in sizes:
        try:
            fitted = fitted_size(height, width, min_pixels=min(min_pixels, max_pixels), max_pixels=max_pixels, factor=factor)
        except RowError:
            return None
        total += patches * fitted[0] * fitted[1] // factor**2
    return total


def _as_tensor(value: Any) -> Tensor:
    return value if isinstance(value, Tensor) else torch.as_tensor(value)


def _frame(pixels: Tensor) -> Image.Image:
    return Image.fromarray(pixels.permute(1, 2, 0).contiguous().numpy())


def _png(image: Image.Image, caption: str = "") -> Media:
    buffer = io.BytesIO()
    image.save(buffer, format="PNG")
    return Media(kind="image", data=buffer.getvalue(), suffix=".png", caption=caption)
