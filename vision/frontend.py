"""From conversations with images and videos to the tensors of a vision-language model."""

from __future__ import annotations

import io
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from PIL import Image
from torch import Tensor
from transformers import AutoModelForImageTextToText

from mmrl.chat import ChatTask, media_parts
from mmrl.errors import DataError
from mmrl.generation import EncodedPrompt
from mmrl.types import Media
from vision.config import VisionRolloutConfig
from vision.media import Video, opener

NUM_SHOWN_FRAMES = 4
"""Frames of a video that a report shows."""


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

    def open(self, task: ChatTask, kind: str, ref: Any) -> Image.Image | Video:
        """A medium as the model will see it; errors name the task."""
        try:
            return opener(self.config)(kind, ref, factor=self.patch_factor or 1)
        except DataError as error:
            raise DataError(f"{task.source or task.id}: {error}") from error

    @property
    def patch_factor(self) -> int | None:
        """Pixels of a visual token's side, for models that take images of any size; None for others."""
        image_processor = self.processor.image_processor
        merge = getattr(image_processor, "merge_size", None)
        return None if merge is None else merge * image_processor.patch_size

    def _text(self, task: ChatTask) -> str:
        reserved = {token for name in ("image_token", "video_token") if (token := getattr(self.processor, name, None))}
        for message in task.messages:
            for part in message["content"]:
                found = next((token for token in reserved if part["type"] == "text" and token in part["text"]), None)
                if found:
                    raise DataError(
                        f"{task.source or task.id}: the text holds {found!r}, which stands for media in this model; write it "
                        "differently, for example with a space inside."
                    )
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


def _as_tensor(value: Any) -> Tensor:
    return value if isinstance(value, Tensor) else torch.as_tensor(value)


def _frame(pixels: Tensor) -> Image.Image:
    return Image.fromarray(pixels.permute(1, 2, 0).contiguous().numpy())


def _png(image: Image.Image, caption: str = "") -> Media:
    buffer = io.BytesIO()
    image.save(buffer, format="PNG")
    return Media(kind="image", data=buffer.getvalue(), suffix=".png", caption=caption)
