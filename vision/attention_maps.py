"""Where a policy looks while it writes: attention of completion tokens over the image, as pictures and as a number.

Rows are those of the last decoder layer (`mmrl.attention`), the token itself left out, so their mass over all earlier tokens is
1. Maps exist for models that cut an image into a grid of tokens (Qwen-VL); of others, only the mass on the image is known.
"""

from __future__ import annotations

import io
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from PIL import Image
from torch import Tensor, nn

from mmrl.attention_losses import without_self
from mmrl.chat import ChatTask, media_parts
from mmrl.generation import EncodedPrompt
from mmrl.language import LanguageAdapter
from mmrl.sampling import rollout_seeds
from mmrl.types import Media, RolloutBatch, Sample

NUM_SHOWN_TOKENS = 3
"""Completion tokens of a rollout whose attention is drawn: those that look at the image most."""
SHOWN_SIZE = 224
"""Smallest longer side of a drawn image, in pixels."""
HEAT = (255, 40, 0)
OPACITY = 0.8
"""Of the most attended token of a map."""

NEEDS = frozenset({"attention", "media_columns"})


@dataclass(frozen=True, kw_only=True)
class Look:
    """What a rollout's completion attends to."""

    shares: Tensor
    """``[T, M]``: share of each image token, by completion token."""
    grids: tuple[tuple[int, int], ...]
    """Rows and columns of image tokens of each image; empty where the model has no grid."""

    def maps(self, token: int) -> list[np.ndarray]:
        """Shares of one completion token over each image, ``[rows, columns]``."""
        parts = self.shares[token].split([rows * columns for rows, columns in self.grids]) if self.grids else ()
        return [part.reshape(grid).numpy() for part, grid in zip(parts, self.grids)]


@torch.no_grad()
def looks(adapter: LanguageAdapter, policy: nn.Module, batch: RolloutBatch) -> list[Look]:
    """One per rollout."""
    extras = adapter.forward(policy, batch, NEEDS).extras
    shares = without_self(extras["attention"], batch.inputs.prompt_lengths).float().cpu()
    media = extras["media_columns"].bool()
    counts, factor = batch.num_decisions.tolist(), getattr(adapter.frontend.processor.image_processor, "merge_size", None)
    found = []
    for row, count in enumerate(counts):
        grids = image_grids(batch.inputs.prompts[int(batch.inputs.prompt_index[row])], factor)
        picked = shares[row, :count][:, media[row]]
        fits = sum(rows * columns for rows, columns in grids) == picked.shape[1]
        found.append(Look(shares=picked, grids=grids if fits else ()))
    return found


def image_grids(prompt: EncodedPrompt, merge_size: int | None) -> tuple[tuple[int, int], ...]:
    """Rows and columns of tokens of each image of a prompt; empty for models without a grid."""
    if merge_size is None or "image_grid_thw" not in prompt:
        return ()
    return tuple((int(h) // merge_size, int(w) // merge_size) for _, h, w in prompt["image_grid_thw"].tolist())


def region_shares(look: Look, box: Sequence[int], size: tuple[int, int]) -> Tensor:
    """``[T]``: attention on tokens of the first image whose center lies in ``box`` (left, top, right, bottom pixels).

    ``size`` is the image's width and height in the pixels of ``box``.
    """
    rows, columns = look.grids[0]
    x = (torch.arange(columns) + 0.5) * size[0] / columns
    y = (torch.arange(rows) + 0.5) * size[1] / rows
    inside = ((y >= box[1]) & (y < box[3]))[:, None] & ((x >= box[0]) & (x < box[2]))
    return look.shares[:, : rows * columns][:, inside.flatten()].sum(dim=1)


@dataclass(frozen=True, kw_only=True)
class RegionMass:
    """Attention of one greedy rollout, averaged over its completion tokens."""

    task_id: str
    image: float
    """On image tokens, of all earlier tokens."""
    region: float
    """On the tokens of the task's region, of all earlier tokens."""


def region_masses(
    adapter: LanguageAdapter, policy: nn.Module, tasks: Sequence[ChatTask], *, batch_size: int = 64
) -> list[RegionMass]:
    """Of tasks with ``columns["region"]`` (a box in their first image), attempted once with greedy decisions."""
    found = []
    for start in range(0, len(tasks), batch_size):
        part = tasks[start : start + batch_size]
        batch = adapter.rollout(policy, part, group_size=1, seeds=rollout_seeds(0, start, 0, len(part)), greedy=True)
        for task, look in zip(part, looks(adapter, policy, batch)):
            size = next(item for _, item in media_parts(task)).size
            region = region_shares(look, task.columns["region"], size)
            found.append(RegionMass(task_id=task.id, image=float(look.shares.sum(dim=1).mean()), region=float(region.mean())))
    return found


def illustrate(adapter: LanguageAdapter, policy: nn.Module, tasks: Sequence[ChatTask]) -> tuple[RolloutBatch, list[Sample]]:
    """Greedy rollouts of ``tasks``, and each as a person reads it, with pictures of what some of its tokens attend to."""
    batch = adapter.rollout(policy, tasks, group_size=1, seeds=rollout_seeds(0, 0, 0, len(tasks)), greedy=True)
    samples = []
    for row, look in enumerate(looks(adapter, policy, batch)):
        sample = adapter.describe(batch, row)
        images = [Image.open(io.BytesIO(item.data)).convert("RGB") for item in sample.media if item.kind == "image"]
        pictures = _pictures(adapter, batch, row, look, images) if len(images) == len(look.grids) else ()
        samples.append(Sample(prompt=sample.prompt, completion=sample.completion, reference=sample.reference,
                              media=(*sample.media, *pictures)))  # fmt: skip
    return batch, samples


def overlay(image: Image.Image, shares: np.ndarray) -> Image.Image:
    """``image`` with ``shares`` ``[rows, columns]`` laid over it; full color where the most is."""
    scale = max(1.0, SHOWN_SIZE / max(image.size))
    size = (round(image.width * scale), round(image.height * scale))
    base = np.asarray(image.convert("RGB").resize(size, Image.Resampling.BICUBIC), dtype=np.float64)
    strength = Image.fromarray((255 * shares / max(float(shares.max()), 1e-12)).round().astype(np.uint8))
    alpha = np.asarray(strength.resize(size, Image.Resampling.NEAREST), dtype=np.float64)[:, :, None] / 255 * OPACITY
    return Image.fromarray((base * (1 - alpha) + np.array(HEAT) * alpha).round().astype(np.uint8))


def _pictures(
    adapter: LanguageAdapter, batch: RolloutBatch, row: int, look: Look, images: Sequence[Image.Image]
) -> tuple[Media, ...]:
    """The images under the attention of the tokens that look at them most, in the order in which these were written."""
    tokenizer, ids = adapter.frontend.processor.tokenizer, batch.outcomes[row].token_ids
    mass = look.shares.sum(dim=1)
    chosen = sorted(mass.topk(min(NUM_SHOWN_TOKENS, len(mass))).indices.tolist())
    found = []
    for token in chosen:
        caption = f"at {tokenizer.decode([ids[token]])!r} (token {token + 1}): {float(mass[token]):.0%} on images"
        found += [_png(overlay(image, shares), caption) for image, shares in zip(images, look.maps(token))]
    return tuple(found)


def _png(image: Image.Image, caption: str) -> Media:
    buffer = io.BytesIO()
    image.save(buffer, format="PNG")
    return Media(kind="image", data=buffer.getvalue(), suffix=".png", caption=caption)
