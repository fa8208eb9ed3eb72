"""Synthesised sounds: pure tones, glides, plucked strings, organ pipes, bells and noise, over background noise.

Everything is a numpy waveform, float32, mono, at `RATE` samples per second. Levels are peak levels in dB below full scale.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from scipy.signal import lfilter

RATE = 16_000
FADE_S = 0.008
"""Seconds of fade at both ends of a sound, so that it starts and stops without a click."""


@dataclass(frozen=True, kw_only=True)
class Event:
    """One sound of a clip, as it was made: the ground truth that answers follow from."""

    name: str
    """``beep``, ``tone``, ``knock``, a timbre, or the spoken digit."""
    start: float
    """Seconds from the beginning of the clip."""
    seconds: float
    level: float
    """Peak level in dB below full scale, 0 or less."""
    frequency: float | None = None
    """Hertz at the beginning; None for noise and speech."""
    end_frequency: float | None = None
    """Hertz at the end; differs from ``frequency`` in a glide."""


def sine(frequency: float, seconds: float, rng: np.random.Generator) -> np.ndarray:
    """A pure tone."""
    return np.sin(2 * np.pi * frequency * _times(seconds) + rng.uniform(0, 2 * np.pi))


def glide(frequency: float, end_frequency: float, seconds: float, rng: np.random.Generator) -> np.ndarray:
    """A pure tone whose pitch moves evenly in octaves: rests for an eighth at both ends, so that ends are heard."""
    share = np.clip((_times(seconds) / seconds - 0.125) / 0.75, 0.0, 1.0)
    hertz = frequency * (end_frequency / frequency) ** share
    return np.sin(2 * np.pi * np.cumsum(hertz) / RATE + rng.uniform(0, 2 * np.pi))


def string(frequency: float, seconds: float, rng: np.random.Generator) -> np.ndarray:
    """A plucked string (Karplus and Strong 1983): a burst of noise in a loop that averages neighbours."""
    period = max(2, round(RATE / frequency - 0.5))
    excitation = np.zeros(len(_times(seconds)))
    burst = lfilter([0.5, 0.5], [1.0], rng.uniform(-1, 1, size=period))
    excitation[:period] = (burst - burst.mean())[: len(excitation)]
    loop = np.zeros(period + 2)
    loop[0], loop[period], loop[period + 1] = 1.0, -0.499, -0.499
    return lfilter([1.0], loop, excitation)


def organ(frequency: float, seconds: float, rng: np.random.Generator) -> np.ndarray:
    """Steady harmonics, as of several organ pipes."""
    strengths = {1: 1.0, 2: 0.8, 3: 0.5, 4: 0.6, 6: 0.35, 8: 0.3}
    return _partials({n * frequency: (strength, 0.0) for n, strength in strengths.items()}, seconds, rng)


def bell(frequency: float, seconds: float, rng: np.random.Generator) -> np.ndarray:
    """Partials that are no multiples of each other (Risset 1969), the high ones dying away sooner."""
    ratios = {0.56: 0.7, 0.92: 0.6, 1.19: 1.0, 1.71: 0.8, 2.0: 0.8, 2.74: 0.7, 3.76: 0.5, 4.07: 0.4}
    return _partials({r * frequency: (strength, 3.0 + 3.0 * r) for r, strength in ratios.items()}, seconds, rng)


def noise(frequency: float, seconds: float, rng: np.random.Generator) -> np.ndarray:
    """White noise; ``frequency`` does not matter."""
    return rng.uniform(-1, 1, size=len(_times(seconds)))


def knock(seconds: float, rng: np.random.Generator) -> np.ndarray:
    """A dull blow: low noise that dies away."""
    dull = lfilter([1.0], [1.0, -0.9], rng.normal(size=len(_times(seconds))))
    return dull * np.exp(-3.0 * _times(seconds) / seconds)


TIMBRES: Mapping[str, Callable[[float, float, np.random.Generator], np.ndarray]] = {
    "sine": sine, "string": string, "organ": organ, "bell": bell, "noise": noise,
}  # fmt: skip


def at_level(wave: np.ndarray, level: float) -> np.ndarray:
    """``wave`` faded at both ends, its peak at ``level`` dB."""
    faded = wave * _fade(len(wave))
    return faded * (10 ** (level / 20) / np.abs(faded).max())


def mix(waves: Sequence[tuple[float, np.ndarray]], seconds: float, *, floor: float, rng: np.random.Generator) -> np.ndarray:
    """A clip ``[n]`` of ``seconds`` with each wave at its start time, over white noise of RMS level ``floor`` dB."""
    clip = rng.normal(scale=10 ** (floor / 20), size=round(seconds * RATE))
    for start, wave in waves:
        first = round(start * RATE)
        clip[first : first + len(wave)] += wave[: len(clip) - first]
    return np.clip(clip, -1.0, 1.0).astype(np.float32)


def _times(seconds: float) -> np.ndarray:
    return np.arange(round(seconds * RATE)) / RATE


def _partials(partials: Mapping[float, tuple[float, float]], seconds: float, rng: np.random.Generator) -> np.ndarray:
    """A sum of sines: hertz to (strength, decay per second). Partials beyond 7.5 kHz are left out."""
    times = _times(seconds)
    wave = np.zeros(len(times))
    for hertz, (strength, decay) in partials.items():
        if hertz < 7_500:
            wave += strength * np.exp(-decay * times) * np.sin(2 * np.pi * hertz * times + rng.uniform(0, 2 * np.pi))
    return wave


def _fade(length: int) -> np.ndarray:
    ramp = min(round(FADE_S * RATE), length // 2)
    fade = np.ones(length)
    fade[:ramp] = np.linspace(0.0, 1.0, ramp, endpoint=False)
    fade[length - ramp :] = np.linspace(1.0, 0.0, ramp)
    return fade
