"""Questions whose answer sits in a small region of a larger image: the red digit among others.

The scans are those of `vision.digits` with the same split. A canvas of 3 x 3 cells shows digits of different colors in random
cells; the question asks for the red one. The task says where it is, so that attention on it can be measured.

A single digit and pairs are demonstrated in supervised warm-up. Crowds of five are never demonstrated: what helps there is to
look at the right place, and only the reward says which that is.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from PIL import Image

from mmrl.chat import ChatTask
from vision.digits import IMAGE_SIZE, render
from vision.digits import _split_images as split_images

NUM_CELLS = 3
"""Cells per side; each is `IMAGE_SIZE` pixels, 2 x 2 visual tokens."""
CANVAS_SIZE = NUM_CELLS * IMAGE_SIZE
COLORS: Mapping[str, tuple[int, int, int]] = {
    "red": (215, 20, 20), "green": (0, 150, 20), "blue": (20, 40, 230), "black": (0, 0, 0), "orange": (255, 150, 0),
}  # fmt: skip
ASKED = "red"
"""The color of the digit that is asked for. One color for all tasks, so that where to look depends on the image alone."""
NUM_DIGITS: Mapping[str, int] = {"alone": 1, "pair": 2, "crowd": 5}
"""Digits on the canvas by question kind."""
DEMONSTRATED = frozenset({"alone", "pair"})


class PlacedDigitTasks(Sequence[ChatTask]):
    """An indexable source of questions about a colored digit on a canvas: equal index, equal task.

    ``columns["region"]`` is the asked digit's box ``(left, top, right, bottom)`` in pixels of the image.
    """

    def __init__(self, kinds: Sequence[str], *, split: str, num_tasks: int, seed: int = 0) -> None:
        self.kinds, self.split, self.num_tasks, self.seed = tuple(kinds), split, num_tasks, seed
        self.images, self.labels = split_images(split)

    def __len__(self) -> int:
        return self.num_tasks

    def __getitem__(self, index: int) -> ChatTask:
        if not 0 <= index < self.num_tasks:
            raise IndexError(f"placed digit task {index}: the {self.split} split has {self.num_tasks} tasks.")
        kind = self.kinds[index % len(self.kinds)]
        rng = np.random.default_rng((self.seed, self.split == "train", index, 1))
        count = NUM_DIGITS[kind]
        scans = rng.choice(len(self.labels), size=count, replace=False)
        cells = rng.choice(NUM_CELLS**2, size=count, replace=False)
        colors = [ASKED, *rng.permutation([color for color in COLORS if color != ASKED])[: count - 1]]
        canvas = Image.new("RGB", (CANVAS_SIZE, CANVAS_SIZE), "white")
        boxes = [cell_box(int(cell)) for cell in cells]
        for scan, box, color in zip(scans, boxes, colors):
            digit = render(self.images[scan], rng if self.split == "train" else None)
            canvas.paste(colored(digit, COLORS[str(color)]), box[:2])
        answer = str(int(self.labels[scans[0]]))
        question = f"Which digit is {ASKED}?"
        return ChatTask(
            id=f"{self.split}/{kind}/{index}",
            domain=kind,
            messages=({"role": "user", "content": [{"type": "image", "image": canvas}, {"type": "text", "text": question}]},),
            answer=answer,
            demonstration=f"<think>{answer}</think><answer>{answer}</answer>" if kind in DEMONSTRATED else "",
            columns={"digits": [int(self.labels[scan]) for scan in scans], "region": boxes[0]},
        )


def cell_box(cell: int) -> tuple[int, int, int, int]:
    """Pixels of a cell, counted row by row."""
    top, left = (IMAGE_SIZE * place for place in divmod(cell, NUM_CELLS))
    return left, top, left + IMAGE_SIZE, top + IMAGE_SIZE


def colored(digit: Image.Image, color: tuple[int, int, int]) -> Image.Image:
    """A dark digit on light ground in another ink."""
    ink = 255.0 - np.asarray(digit.convert("L"), dtype=np.float64)[:, :, None]
    return Image.fromarray((255 - ink * (255 - np.array(color)) / 255).round().astype(np.uint8))
