"""Questions about real handwritten digits, with answers that can be checked.

The images are scikit-learn's 1,797 scans (8x8 grey levels, from the UCI test set), split by source image: no scan that training
shows appears in evaluation. Training scans are shifted, turned, stretched and blurred; evaluation scans are shown as they are.

Question kinds are of two sorts. Reading and choosing are demonstrated in supervised warm-up; parity, comparison and sum are
never demonstrated and are learned from reward alone. A demonstration of ``choose`` picks one of the offered answers at random,
so it teaches the form of an answer and nothing about the digits.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache

import numpy as np
from PIL import Image

from mmrl.chat import ChatTask

NUM_EVAL_IMAGES = 400
IMAGE_SIZE = 56
"""Pixels per side: 4 visual tokens of 28 x 28."""
MARGIN = 1
"""Empty pixels around a scan, so that distortion does not cut strokes at the border."""


@dataclass(frozen=True, kw_only=True)
class Kind:
    """A family of questions."""

    num_digits: tuple[int, ...]
    """How many images a question may show."""
    ask: Callable[[np.random.Generator], str]
    answer: Callable[[Sequence[int]], str] = lambda digits: ""
    """The right answer; empty when there is none."""
    demonstrated: bool = False
    choices: Callable[[Sequence[int], str], Sequence[str]] | None = None
    """From digits and question, the answers that a demonstration picks from at random, when none of them is right."""


def _one_of(*texts: str) -> Callable[[np.random.Generator], str]:
    return lambda rng: texts[rng.integers(len(texts))]


NUMBERS = tuple(str(n) for n in range(19))
PAIRS = ("even or odd", "yes or no", "hot or cold", "red or green", "old or new")
_QUALITIES = ("nice", "warm", "blue", "good", "soft")

# Frames in which an offer is made. Put together they resemble the rewarded questions; none of them is one.
_WORD_OFFERS = (
    *(f"Choose {pair}." for pair in PAIRS),
    *(f"Is it {pair}?" for pair in PAIRS[1:]),
    *(f"Is it {quality}, {pair}?" for quality in _QUALITIES for pair in PAIRS),
)
_NUMBER_OFFERS = (
    "Choose a number from 0 to 18.", "Which number from 0 to 18?", *(f"Which number from 0 to 18 is {q}?" for q in _QUALITIES),
)  # fmt: skip
_DIGIT_OFFERS = ("Choose one digit.", "Which digit?", *(f"Which digit is {quality}?" for quality in _QUALITIES))


def _offered_pair(digits: Sequence[int], question: str) -> Sequence[str]:
    return next(pair for pair in PAIRS if pair in question).split(" or ")


KINDS: Mapping[str, Kind] = {
    "read": Kind(num_digits=(1,), ask=_one_of("Which digit is it?"), answer=lambda d: str(d[0]), demonstrated=True),
    "read_first": Kind(num_digits=(2,), ask=_one_of("Which digit is first?"), answer=lambda d: str(d[0]), demonstrated=True),
    "read_second": Kind(num_digits=(2,), ask=_one_of("Which digit is second?"), answer=lambda d: str(d[1]), demonstrated=True),
    "choose_word": Kind(num_digits=(1, 2), ask=_one_of(*_WORD_OFFERS), demonstrated=True, choices=_offered_pair),
    "choose_number": Kind(num_digits=(1, 2), ask=_one_of(*_NUMBER_OFFERS), demonstrated=True, choices=lambda d, q: NUMBERS),
    "choose_digit": Kind(num_digits=(2,), ask=_one_of(*_DIGIT_OFFERS), demonstrated=True, choices=lambda d, q: [*map(str, d)]),
    "parity": Kind(num_digits=(1,), ask=_one_of("Is it even or odd?"), answer=lambda d: ("even", "odd")[d[0] % 2]),
    "above_four": Kind(num_digits=(1,), ask=_one_of("Is it above four, yes or no?"), answer=lambda d: ("no", "yes")[d[0] > 4]),
    "larger": Kind(num_digits=(2,), ask=_one_of("Which digit is larger?"), answer=lambda d: str(max(d))),
    "sum": Kind(num_digits=(2,), ask=_one_of("Which number from 0 to 18 is the sum?"), answer=lambda d: str(sum(d))),
}


OBSERVE_TAGS = ("<observe>", "</observe>")
CONFIDENCE_TAGS = ("<analysis>", "</analysis>", "<confidence>", "</confidence>")
MAX_REPEATS = 6


def observe_demonstration(digits: str, said: str, rng: np.random.Generator) -> str:
    """``digits`` observed once and thought over one to six times: equally good completions of different length."""
    thought = " ".join([digits] * int(rng.integers(1, MAX_REPEATS + 1)))
    return f"<observe>{digits}</observe><think>{thought}</think><answer>{said}</answer>"


class DigitTasks(Sequence[ChatTask]):
    """An endless-looking, indexable source of digit questions: equal index, equal task. ``form`` is that of demonstrations."""

    def __init__(self, kinds: Sequence[str], *, split: str, num_tasks: int, seed: int = 0, form: str = "think") -> None:
        self.kinds, self.split, self.num_tasks, self.seed, self.form = tuple(kinds), split, num_tasks, seed, form
        self.images, self.labels = _split_images(split)

    def __len__(self) -> int:
        return self.num_tasks

    def __getitem__(self, index: int) -> ChatTask:
        if not 0 <= index < self.num_tasks:
            raise IndexError(f"digit task {index}: the {self.split} split has {self.num_tasks} tasks.")
        name = self.kinds[index % len(self.kinds)]
        kind = KINDS[name]
        rng = np.random.default_rng((self.seed, self.split == "train", index))
        count = int(rng.choice(kind.num_digits))
        scans = rng.choice(len(self.labels), size=count, replace=False)
        while name == "larger" and self.labels[scans[0]] == self.labels[scans[1]]:
            scans = rng.choice(len(self.labels), size=count, replace=False)
        digits = [int(self.labels[scan]) for scan in scans]
        images = [render(self.images[scan], rng if self.split == "train" else None) for scan in scans]
        question = kind.ask(rng)
        options = kind.choices(digits, question) if kind.choices else [kind.answer(digits)]
        said = options[rng.integers(len(options))]
        seen = " ".join(map(str, digits))
        shown = f"<think>{seen}</think><answer>{said}</answer>"
        if self.form == "observe":
            shown = observe_demonstration(seen, said, rng)
        if self.form == "confidence":
            shown += f"<analysis></analysis><confidence>{rng.integers(11) / 10}</confidence>"
        parts = [{"type": "image", "image": image} for image in images] + [{"type": "text", "text": question}]
        return ChatTask(
            id=f"{self.split}/{name}/{index}",
            domain=name,
            messages=({"role": "user", "content": parts},),
            answer=kind.answer(digits),
            demonstration=shown if kind.demonstrated else "",
            columns={"digits": digits},
        )


def render(scan: np.ndarray, rng: np.random.Generator | None) -> Image.Image:
    """An 8x8 scan (0..16) as an RGB image of `IMAGE_SIZE` pixels, dark on light; ``rng`` distorts it as a hand would."""
    grey = Image.fromarray((255 - np.pad(scan, MARGIN) * (255 / 16)).astype(np.uint8))
    scale = grey.width / IMAGE_SIZE
    matrix = np.eye(2) * scale
    offset = np.zeros(2)
    if rng is not None:
        angle, shear = rng.uniform(-0.25, 0.25), rng.uniform(-0.2, 0.2)
        turn = np.array([[np.cos(angle), -np.sin(angle)], [np.sin(angle), np.cos(angle)]])
        distort = turn @ np.array([[1.0, shear], [0.0, 1.0]]) @ np.diag(rng.uniform(0.85, 1.2, size=2))
        matrix = distort * scale
        center = np.full(2, IMAGE_SIZE / 2)
        offset = np.full(2, grey.width / 2) - matrix @ center + rng.uniform(-0.8, 0.8, size=2)
    coefficients = (matrix[0, 0], matrix[0, 1], offset[0], matrix[1, 0], matrix[1, 1], offset[1])
    image = grey.transform(
        (IMAGE_SIZE, IMAGE_SIZE), Image.Transform.AFFINE, coefficients, Image.Resampling.BICUBIC, fillcolor=255
    )
    if rng is not None:
        ink = (255.0 - np.asarray(image)) * rng.uniform(0.7, 1.1) + rng.normal(0.0, rng.uniform(0.0, 12.0), (IMAGE_SIZE,) * 2)
        image = Image.fromarray((255 - ink.clip(0, 255)).astype(np.uint8))
    return image.convert("RGB")


def tokenizer_corpus() -> list[str]:
    """Texts that the tiny model's tokenizer is trained on: every question, and the words of every answer."""
    rng = np.random.default_rng(0)
    questions = [f"user\n{kind.ask(rng)}\nassistant\n" for kind in KINDS.values() for _ in range(200)]
    return [*questions, *(word for pair in PAIRS for word in pair.split(" or ") for _ in range(8))]


@cache
def _scans() -> tuple[np.ndarray, np.ndarray]:
    from sklearn.datasets import load_digits

    data = load_digits()
    return data.images, data.target


def _split_images(split: str) -> tuple[np.ndarray, np.ndarray]:
    images, labels = _scans()
    order = np.random.default_rng(1797).permutation(len(labels))
    chosen = order[NUM_EVAL_IMAGES:] if split == "train" else order[:NUM_EVAL_IMAGES]
    return images[chosen], labels[chosen]
