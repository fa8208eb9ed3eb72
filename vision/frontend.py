"""From conversations with images and videos to the tensors of a vision-language model."""

from __future__ import annotations

import io
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from PIL import Image
from transformers import AutoModelForImageTextToText

from mmrl.chat import ChatTask, media_parts
from mmrl.generation import EncodedPrompt
from mmrl.types import Media
from vision.config import VisionRolloutConfig


@dataclass(kw_only=True)
class VisionFrontend:
    """Implements `mmrl.language.Frontend` for image-text-to-text models."""

    processor: Any
    config: VisionRolloutConfig
    model_class = AutoModelForImageTextToText
    tower_names = ("visual", "vision_tower", "vision_model")

    def encode(self, tasks: Sequence[ChatTask]) -> list[EncodedPrompt]:
        texts = [
            self.processor.apply_chat_template(list(task.messages), tokenize=False, add_generation_prompt=True)
            for task in tasks
        ]
        images = [[ref for kind, ref in media_parts(task) if kind == "image"] for task in tasks]
        return self._encode_together(texts, images)

    def media(self, task: ChatTask) -> tuple[Media, ...]:
        return tuple(_png(ref) for kind, ref in media_parts(task) if kind == "image")

    def _encode_together(self, texts: list[str], images: list[list[Image.Image]]) -> list[EncodedPrompt]:
        """One call of the image processor for all prompts, then cut per prompt (models with a flat list of patches)."""
        flat = [image for row in images for image in row]
        encoded = self.processor(text=texts, images=flat or None)
        prompts = []
        grids = torch.as_tensor(encoded["image_grid_thw"]) if flat else torch.zeros(0, 3, dtype=torch.long)
        patches = grids.prod(dim=1)
        pixel_rows = torch.as_tensor(encoded["pixel_values"]).split(patches.tolist()) if flat else []
        first = 0
        for row, ids in enumerate(encoded["input_ids"]):
            prompt = {"input_ids": torch.tensor([ids]), "attention_mask": torch.ones(1, len(ids), dtype=torch.long)}
            if "mm_token_type_ids" in encoded:
                prompt["mm_token_type_ids"] = torch.tensor([encoded["mm_token_type_ids"][row]])
            last = first + len(images[row])
            if images[row]:
                prompt["pixel_values"] = torch.cat(pixel_rows[first:last])
                prompt["image_grid_thw"] = grids[first:last]
            first = last
            prompts.append(prompt)
        return prompts


def _png(image: Image.Image) -> Media:
    buffer = io.BytesIO()
    image.save(buffer, format="PNG")
    return Media(kind="image", data=buffer.getvalue(), suffix=".png")


