"""Clips of the built-in audio tasks: what happens in them, drawn at random, and what a listener would write down.

Scenes differ enough that a careful listener is never in doubt: registers lie at least half an octave apart, a loud knock is at
least 10 dB above a soft one, and a long pause is at least three times a short one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
from scipy.signal import resample_poly

from audio.sounds import RATE, TIMBRES, Event, at_level, glide, knock, mix, sine

REGISTERS: Mapping[str, tuple[float, float]] = {"low": (200, 300), "middle": (450, 650), "high": (1000, 1500)}
"""Hertz."""
TIMBRE_NAMES = tuple(TIMBRES)
LOUD, SOFT = (-8.0, -3.0), (-24.0, -18.0)
"""Peak levels of knocks in dB."""
SHORT_PAUSE, LONG_PAUSE = (0.07, 0.12), (0.34, 0.42)
"""Seconds of silence between beeps; a long pause is written down as ``-``."""
FLOOR = (-62.0, -50.0)
"""RMS level of the background noise in dB."""

Speak = Callable[[int], np.ndarray]
"""From a digit, its spoken waveform at `RATE` with peak 1."""


@dataclass(frozen=True, kw_only=True)
class Scene:
    """A clip and the truth about it."""

    family: str
    """``beeps``, ``tones``, ``knocks``, ``sounds`` or ``digits``."""
    wave: np.ndarray
    """``[n]`` float32 at `RATE`."""
    events: tuple[Event, ...]
    heard: tuple[str, ...]
    """What a listener writes down, one word for each event, and ``-`` for a long pause between beeps."""


Draw = Callable[[np.random.Generator, Speak], Scene]


def beeps(rng: np.random.Generator, speak: Speak, *, pauses: str = "any") -> Scene:
    """One to five beeps of one pitch, with short and long pauses; for a tempo three or four with equal pauses."""
    count = int(rng.integers(1, 6) if pauses == "any" else rng.integers(3, 5))
    long = rng.random(count - 1) < {"any": 0.3, "long": 1.1, "short": -0.1}[pauses]
    frequency, level, seconds = rng.uniform(500, 1400), rng.uniform(-14, -4), rng.uniform(0.06, 0.1)
    steady = {flag: rng.uniform(*(LONG_PAUSE if flag else SHORT_PAUSE)) for flag in (False, True)}
    silences = [steady[flag] if pauses != "any" else rng.uniform(*(LONG_PAUSE if flag else SHORT_PAUSE)) for flag in long]
    events = [("beep", at_level(sine(frequency, seconds, rng), level), level, frequency, frequency) for _ in range(count)]
    heard = ["beep"]
    for flag in long:
        heard += ["-", "beep"] if flag else ["beep"]
    return _scene("beeps", events, silences, heard, rng)


def tones(rng: np.random.Generator, speak: Speak, *, contour: str = "any") -> Scene:
    """One to three tones, or one that glides from a register to another; with a contour, they only rise or only fall."""
    names = list(REGISTERS)
    gliding = rng.random() < 0.3
    if contour == "any" and not gliding:
        chosen = [names[i] for i in rng.integers(3, size=rng.integers(1, 4))]
    else:
        count = 2 if gliding else rng.integers(2, 4)
        chosen = [names[i] for i in sorted(rng.choice(3, size=count, replace=False))]
        down = rng.random() < 0.5 if contour == "any" else contour == "falling"
        chosen = chosen[::-1] if down else chosen
    hertz = [rng.uniform(*REGISTERS[name]) for name in chosen]
    level = rng.uniform(-14, -4)
    if gliding:
        wave = at_level(glide(hertz[0], hertz[1], rng.uniform(0.4, 0.6), rng), level)
        events = [("tone", wave, level, hertz[0], hertz[1])]
    else:
        events = [("tone", at_level(sine(f, rng.uniform(0.12, 0.2), rng), level), level, f, f) for f in hertz]
    return _scene("tones", events, [rng.uniform(0.05, 0.12) for _ in events[1:]], chosen, rng)


def knocks(rng: np.random.Generator, speak: Speak, *, unequal: bool = False) -> Scene:
    """One or two knocks, each loud or soft; or two, one of them loud."""
    words = ["loud", "soft"]
    chosen = [words[i] for i in (rng.permutation(2) if unequal else rng.integers(2, size=rng.integers(1, 3)))]
    levels = [rng.uniform(*(LOUD if word == "loud" else SOFT)) for word in chosen]
    waves = [at_level(knock(rng.uniform(0.1, 0.18), rng), level) for level in levels]
    events = [("knock", wave, level, None, None) for wave, level in zip(waves, levels)]
    return _scene("knocks", events, [rng.uniform(0.15, 0.35) for _ in events[1:]], chosen, rng)


def sounds(rng: np.random.Generator, speak: Speak, *, relation: str = "any") -> Scene:
    """One or two instrument-like sounds; or two that are equal, or two that differ, in timbre (pitch always varies)."""
    if relation == "any":
        chosen = rng.integers(len(TIMBRE_NAMES), size=rng.integers(1, 3))
    elif relation == "equal":
        chosen = np.repeat(rng.integers(len(TIMBRE_NAMES)), 2)
    else:
        chosen = rng.choice(len(TIMBRE_NAMES), size=2, replace=False)
    events = []
    for name in (TIMBRE_NAMES[i] for i in chosen):
        hertz, level = rng.uniform(220, 620), rng.uniform(-12, -4)
        wave = at_level(TIMBRES[name](hertz, rng.uniform(0.28, 0.42), rng), level)
        pitch = None if name == "noise" else hertz
        events.append((name, wave, level, pitch, pitch))
    return _scene("sounds", events, [rng.uniform(0.08, 0.2) for _ in events[1:]], [event[0] for event in events], rng)


def digits(rng: np.random.Generator, speak: Speak, *, count: int | None = None, different: bool = False) -> Scene:
    """One or two spoken digits."""
    count = count or int(rng.integers(1, 3))
    said = [int(digit) for digit in (rng.choice(10, size=count, replace=False) if different else rng.integers(10, size=count))]
    events = []
    for digit in said:
        level, stretch = rng.uniform(-12, -3), int(rng.integers(92, 109))
        events.append((str(digit), at_level(resample_poly(speak(digit), stretch, 100), level), level, None, None))
    return _scene("digits", events, [rng.uniform(0.08, 0.2) for _ in events[1:]], list(map(str, said)), rng)


DRAWS: Mapping[str, Draw] = {
    "beeps": beeps,
    "slow_beeps": partial(beeps, pauses="long"),
    "fast_beeps": partial(beeps, pauses="short"),
    "tones": tones,
    "rising_tones": partial(tones, contour="rising"),
    "falling_tones": partial(tones, contour="falling"),
    "knocks": knocks,
    "unequal_knocks": partial(knocks, unequal=True),
    "sounds": sounds,
    "equal_sounds": partial(sounds, relation="equal"),
    "different_sounds": partial(sounds, relation="different"),
    "digits": digits,
    "one_digit": partial(digits, count=1),
    "two_digits": partial(digits, count=2),
    "different_digits": partial(digits, count=2, different=True),
}


def _scene(
    family: str,
    events: Sequence[tuple[str, np.ndarray, float, float | None, float | None]],
    silences: Sequence[float],
    heard: Sequence[str],
    rng: np.random.Generator,
) -> Scene:
    """Events (name, wave, level, first and last hertz) one after another, with silences between them."""
    time, placed, truth = rng.uniform(0.06, 0.2), [], []
    for (name, wave, level, frequency, end_frequency), silence in zip(events, [*silences, 0.0]):
        seconds = len(wave) / RATE
        placed.append((time, wave))
        truth.append(
            Event(name=name, start=time, seconds=seconds, level=level, frequency=frequency, end_frequency=end_frequency)
        )
        time += seconds + silence
    whole = mix(placed, time + rng.uniform(0.06, 0.15), floor=rng.uniform(*FLOOR), rng=rng)
    return Scene(family=family, wave=whole, events=tuple(truth), heard=tuple(heard))
