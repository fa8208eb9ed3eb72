"""Questions about generated sounds, with answers that can be checked.

Beeps, tones, knocks, instrument-like sounds and spoken digits are drawn from seeds: pitch, length, pauses, level and background
noise differ from clip to clip, and digits of the evaluation split are spoken by voices that training never hears.

Question kinds are of two sorts. Hearing (``hear_*``) and choosing (``choose_*``) are demonstrated in supervised warm-up: their
demonstrations write down what is heard, in order. All other kinds are never demonstrated and are learned from reward alone. A
demonstration of ``choose_*`` picks one of the offered answers at random, so it teaches the form of an answer and nothing about
the sounds.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass

import numpy as np

from audio.media import AudioClip
from audio.scenes import DRAWS, TIMBRE_NAMES, Scene
from audio.sounds import RATE
from audio.speech import SPEAKERS
from mmrl.chat import ChatTask

NOUNS = {"beeps": "beep", "tones": "tone", "knocks": "knock", "sounds": "sound", "digits": "digit"}
"""What the events of a scene are called in questions: plural and singular."""
PAIRS = (
    "rising or falling", "slow or fast", "first or second", "yes or no", "even or odd",
    "hot or cold", "red or green", "old or new",
)  # fmt: skip
_QUALITIES = ("nice", "warm", "blue", "good", "round")
_COUNTS = tuple(map(str, range(1, 6)))
_SUMS = tuple(map(str, range(19)))


@dataclass(frozen=True, kw_only=True)
class Kind:
    """A family of questions."""

    draws: tuple[str, ...]
    """Names in `audio.scenes.DRAWS` that a clip may come from."""
    ask: Callable[[Scene, np.random.Generator], str]
    answer: Callable[[Scene, str], str] = lambda scene, question: ""
    """The right answer to the question about the scene; empty when there is none."""
    options: Callable[[Scene, str], Sequence[str]]
    """The answers that the question offers. A demonstration without a right answer picks one at random."""
    demonstrated: bool = False


def _ask(*texts: str) -> Callable[[Scene, np.random.Generator], str]:
    return lambda scene, rng: texts[rng.integers(len(texts))]


def _ask_end(scene: Scene, rng: np.random.Generator) -> str:
    return f"Which {NOUNS[scene.family]} is {('first', 'last')[rng.integers(2)]}?"


def _heard_end(scene: Scene, question: str) -> str:
    return scene.heard[0 if "first" in question else -1]


def _offer_pair(scene: Scene, rng: np.random.Generator) -> str:
    """Frames in which a choice is offered. Put together they resemble the rewarded questions; none of them is one."""
    pair, quality = PAIRS[rng.integers(len(PAIRS))], _QUALITIES[rng.integers(len(_QUALITIES))]
    plural, singular = scene.family, NOUNS[scene.family]
    return (
        f"Choose {pair} for the {plural}.",
        f"Are the {plural} {quality}, {pair}?",
        f"Which {singular} is {quality}, {pair}?",
        f"Is the {singular} {quality}, {pair}?",
    )[rng.integers(4)]


def _offered_pair(scene: Scene, question: str) -> Sequence[str]:
    return next(pair for pair in PAIRS if pair in question).split(" or ")


def _two_timbres(scene: Scene, rng: np.random.Generator) -> str:
    """Two names to choose between, those in the clip where there are two."""
    names = [*dict.fromkeys(event.name for event in scene.events)]
    while len(names) < 2:
        names = [*dict.fromkeys([*names, TIMBRE_NAMES[rng.integers(len(TIMBRE_NAMES))]])]
    return " or ".join(names[i] for i in rng.permutation(2))


def _offer_timbre(scene: Scene, rng: np.random.Generator) -> str:
    pair, quality = _two_timbres(scene, rng), _QUALITIES[rng.integers(len(_QUALITIES))]
    return (f"Choose {pair} for the sounds.", f"Which sound is {quality}, {pair}?")[rng.integers(2)]


def _offered_timbre(scene: Scene, question: str) -> Sequence[str]:
    return [word for word in question.replace(".", " ").replace("?", " ").split() if word in TIMBRE_NAMES]


def _offer_number(scene: Scene, rng: np.random.Generator) -> str:
    quality = _QUALITIES[rng.integers(len(_QUALITIES))]
    if scene.family == "beeps":
        texts = ("Choose a number from 1 to 5 for the beeps.", f"How many beeps are {quality}, from 1 to 5?")
    else:
        texts = ("Choose a number from 0 to 18.", f"Which number from 0 to 18 is {quality}?")
    return texts[rng.integers(2)]


def _said(scene: Scene) -> list[int]:
    return [int(word) for word in scene.heard]


def _fixed(*options: str) -> Callable[[Scene, str], Sequence[str]]:
    return lambda scene, question: options


def _names(scene: Scene, question: str) -> Sequence[str]:
    """The words for one event of this family."""
    return {
        "beeps": ("beep",), "tones": ("low", "middle", "high"), "knocks": ("loud", "soft"), "sounds": TIMBRE_NAMES,
        "digits": tuple(map(str, range(10))),
    }[scene.family]  # fmt: skip


def _hear(draw: str) -> Kind:
    return Kind(draws=(draw,), ask=_ask_end, answer=_heard_end, options=_names, demonstrated=True)


KINDS: Mapping[str, Kind] = {
    "hear_beeps": _hear("beeps"),
    "hear_tones": _hear("tones"),
    "hear_knocks": _hear("knocks"),
    "hear_sounds": _hear("sounds"),
    "hear_digits": _hear("digits"),
    "choose_word": Kind(
        draws=("beeps", "tones", "knocks", "sounds", "digits"), ask=_offer_pair, options=_offered_pair, demonstrated=True
    ),
    "choose_sound": Kind(draws=("sounds",), ask=_offer_timbre, options=_offered_timbre, demonstrated=True),
    "choose_number": Kind(
        draws=("beeps", "digits"), ask=_offer_number, demonstrated=True,
        options=lambda scene, question: _COUNTS if scene.family == "beeps" else _SUMS,
    ),
    "choose_digit": Kind(
        draws=("two_digits",), ask=_ask(*(f"Which digit is {q}?" for q in _QUALITIES)), demonstrated=True,
        options=lambda scene, question: scene.heard,
    ),
    "count": Kind(
        draws=("beeps",), ask=_ask("How many beeps are there, from 1 to 5?"), options=_fixed(*_COUNTS),
        answer=lambda scene, question: str(len(scene.events)),
    ),
    "tempo": Kind(
        draws=("slow_beeps", "fast_beeps"), ask=_ask("Are the beeps slow or fast?"), options=_fixed("slow", "fast"),
        answer=lambda scene, question: "slow" if "-" in scene.heard else "fast",
    ),
    "contour": Kind(
        draws=("rising_tones", "falling_tones"), ask=_ask("Are the tones rising or falling?"),
        options=_fixed("rising", "falling"),
        answer=lambda scene, question: "rising" if scene.events[-1].end_frequency > scene.events[0].frequency else "falling",
    ),
    "louder": Kind(
        draws=("unequal_knocks",), ask=_ask("Which knock is louder, first or second?"), options=_fixed("first", "second"),
        answer=lambda scene, question: "first" if scene.events[0].level > scene.events[1].level else "second",
    ),
    "order": Kind(
        draws=("different_sounds",), ask=lambda scene, rng: f"Which sound came first, {_two_timbres(scene, rng)}?",
        options=_offered_timbre, answer=lambda scene, question: scene.events[0].name,
    ),
    "same": Kind(
        draws=("equal_sounds", "different_sounds"), ask=_ask("Are the sounds the same, yes or no?"),
        options=_fixed("yes", "no"),
        answer=lambda scene, question: "yes" if scene.events[0].name == scene.events[1].name else "no",
    ),
    "parity": Kind(
        draws=("one_digit",), ask=_ask("Is the digit even or odd?"), options=_fixed("even", "odd"),
        answer=lambda scene, question: ("even", "odd")[_said(scene)[0] % 2],
    ),
    "larger": Kind(
        draws=("different_digits",), ask=_ask("Which digit is larger?"), options=lambda scene, question: scene.heard,
        answer=lambda scene, question: str(max(_said(scene))),
    ),
    "sum": Kind(
        draws=("two_digits",), ask=_ask("Which number from 0 to 18 is the sum?"), options=_fixed(*_SUMS),
        answer=lambda scene, question: str(sum(_said(scene))),
    ),
}  # fmt: skip


class ToneTasks(Sequence[ChatTask]):
    """An endless-looking, indexable source of questions about sounds: equal index, equal task.

    ``speaker`` says where spoken digits come from: ``packaged`` clips, the same everywhere, or ``espeak``, which needs
    espeak-ng.
    """

    def __init__(self, kinds: Sequence[str], *, split: str, num_tasks: int, seed: int = 0, speaker: str = "packaged") -> None:
        self.kinds, self.split, self.num_tasks, self.seed = tuple(kinds), split, num_tasks, seed
        self.speaker = SPEAKERS[speaker]

    def __len__(self) -> int:
        return self.num_tasks

    def __getitem__(self, index: int) -> ChatTask:
        if not 0 <= index < self.num_tasks:
            raise IndexError(f"tone task {index}: the {self.split} split has {self.num_tasks} tasks.")
        name = self.kinds[index % len(self.kinds)]
        kind = KINDS[name]
        rng = np.random.default_rng((self.seed, self.split == "train", index))
        draw = DRAWS[kind.draws[rng.integers(len(kind.draws))]]
        scene = draw(rng, lambda digit: self.speaker(digit, split=self.split, rng=rng))
        question = kind.ask(scene, rng)
        answer, options = kind.answer(scene, question), kind.options(scene, question)
        said = answer or options[rng.integers(len(options))]
        clip = AudioClip(samples=scene.wave, rate=RATE)
        parts = [{"type": "audio", "audio": clip}, {"type": "text", "text": question}]
        return ChatTask(
            id=f"{self.split}/{name}/{index}",
            domain=name,
            messages=({"role": "user", "content": parts},),
            answer=answer,
            demonstration=f"<think>{' '.join(scene.heard)}</think><answer>{said}</answer>" if kind.demonstrated else "",
            columns={
                "heard": " ".join(scene.heard),
                "options": list(options),
                "events": [asdict(event) for event in scene.events],
            },
        )


def tokenizer_corpus() -> list[str]:
    """Texts that the tiny model's tokenizer is trained on: every question, and the words of every answer."""
    words = {word for pair in PAIRS for word in pair.split(" or ")} | {"beep", "low", "middle", "high", "loud", "soft"}
    # Every word also stands alone and after a space, as it does in what is heard.
    return [*_questions(), *(text for word in sorted(words | {*TIMBRE_NAMES}) for text in (word, f" {word}") for _ in range(8))]


def _questions() -> list[str]:
    rng = np.random.default_rng(0)
    texts = []
    for kind in KINDS.values():
        for _ in range(150):
            scene = DRAWS[kind.draws[rng.integers(len(kind.draws))]](rng, lambda digit: np.ones(RATE // 20))
            texts.append(f"user\n{kind.ask(scene, rng)}\nassistant\n")
    return texts
