"""An ear for the built-in clips: from a waveform to the words that a careful listener writes down.

It measures onsets, pauses, levels, pitches and spectra, and never sees how a clip was made. Spoken digits it cannot tell.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from audio.media import AudioClip

HOP_S = 0.005
"""Seconds between two looks at the level."""
ABOVE_FLOOR_DB = 14.0
"""A sound is this much above the quiet beginning of its clip."""
GAP_S = 0.03
"""Shorter dips of the level lie within a sound."""
SHORTEST_S = 0.02
LONG_PAUSE_S = 0.22
"""Between the short (0.07 to 0.12 s) and the long pauses (0.34 to 0.42 s) of the tasks."""
LOUD_DB = -13.0
"""Peak level between soft (-24 to -18 dB) and loud knocks (-8 to -3 dB)."""
REGISTER_EDGES = (360.0, 800.0)
"""Hertz between low and middle, and between middle and high."""


@dataclass(frozen=True, kw_only=True)
class Heard:
    """A sound in a clip."""

    start: float
    """Seconds."""
    end: float
    wave: np.ndarray
    """``[n]``: the sound alone."""
    rate: int


def hear(clip: AudioClip, noun: str) -> tuple[str, ...] | None:
    """The words of a clip for questions about ``noun`` (``beep``, ``tone``, ``knock``, ``sound``); None if it cannot tell."""
    sounds = find_sounds(clip)
    if noun == "beep":
        words = ["beep"] if sounds else []
        for before, after in pairwise(sounds):
            words += ["-", "beep"] if after.start - before.end > LONG_PAUSE_S else ["beep"]
        return tuple(words)
    if noun == "tone":
        return tuple(name for sound in sounds for name in _registers(sound))
    if noun == "knock":
        return tuple("loud" if peak_level(sound) > LOUD_DB else "soft" for sound in sounds)
    if noun == "sound":
        return tuple(map(timbre, sounds))
    return None


def find_sounds(clip: AudioClip) -> list[Heard]:
    """The stretches of a clip that stand out from its quietest part, in order."""
    hop = round(HOP_S * clip.rate)
    frames = clip.samples[: len(clip.samples) // hop * hop].reshape(-1, hop).astype(np.float64)
    level = 10 * np.log10(np.maximum((frames**2).mean(axis=1), 1e-12))  # [frames] dB
    if not len(level):
        return []
    floor = np.median(level[: round(0.05 / HOP_S)])
    active = np.flatnonzero(level > floor + ABOVE_FLOOR_DB)
    if not len(active):
        return []
    breaks = np.flatnonzero(np.diff(active) * HOP_S > GAP_S)
    firsts, lasts = active[np.r_[0, breaks + 1]], active[np.r_[breaks, len(active) - 1]]
    return [
        Heard(start=first * HOP_S, end=(last + 1) * HOP_S, wave=clip.samples[first * hop : (last + 1) * hop], rate=clip.rate)
        for first, last in zip(firsts, lasts)
        if (last + 1 - first) * HOP_S >= SHORTEST_S
    ]


def peak_level(sound: Heard) -> float:
    """Peak in dB below full scale."""
    return float(20 * np.log10(np.abs(sound.wave).max()))


def pitch(wave: np.ndarray, rate: int) -> float:
    """Hertz of the strongest partial."""
    spectrum = np.abs(np.fft.rfft(wave * np.hanning(len(wave)), n=1 << 15))
    return float(spectrum[20:].argmax() + 20) * rate / (1 << 15)


def timbre(sound: Heard) -> str:
    """``noise``, ``sine``, ``organ``, ``string`` or ``bell``."""
    power = _power(sound.wave)
    hertz = np.arange(len(power)) * sound.rate / (1 << 15)
    band = (hertz > 80) & (hertz < 7_500)
    flatness = np.exp(np.log(power[band] + 1e-12 * power.max()).mean()) / power[band].mean()
    if flatness > 0.3:
        return "noise"
    strongest = hertz[band][power[band].argmax()]
    total = power[band].sum()
    third = len(sound.wave) // 3
    if np.square(sound.wave[-third:]).mean() > 0.64 * np.square(sound.wave[:third]).mean():  # it does not die away
        return "sine" if power[band & (np.abs(hertz - strongest) < 60)].sum() > 0.95 * total else "organ"
    return "string" if _harmonicity(power, hertz, band) > 0.82 else "bell"


def _registers(sound: Heard) -> Sequence[str]:
    """Where a tone is, or where it begins and ends."""
    edge, length = round(0.008 * sound.rate), round(0.04 * sound.rate)
    ends = (sound.wave[edge : edge + length], sound.wave[-edge - length : -edge])
    names = [("low", "middle", "high")[int(np.searchsorted(REGISTER_EDGES, pitch(part, sound.rate)))] for part in ends]
    return names if names[0] != names[1] else names[:1]


def _power(wave: np.ndarray) -> np.ndarray:
    return np.abs(np.fft.rfft(wave * np.hanning(len(wave)), n=1 << 15)) ** 2


def _harmonicity(power: np.ndarray, hertz: np.ndarray, band: np.ndarray) -> float:
    """The largest share of power near multiples of one fundamental between 200 and 650 Hz."""
    kept, at = power[band], hertz[band]
    best = 0.0
    for fundamental in np.geomspace(200, 650, 240):
        ratio = at / fundamental
        near = (np.abs(ratio - np.round(ratio)) * fundamental < 14) & (ratio > 0.5)
        best = max(best, float(kept[near].sum() / kept.sum()))
    return best
