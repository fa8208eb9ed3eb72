"""What a waveform says about itself, and whether stated evidence agrees with it.

`measure` finds events, their pitches, levels and timbres, the contour and the tempo; it never reads how a clip was made.
`evidence_matches` finds claims about sounds in a text and compares each with the measurement. It does not judge what it cannot
understand: a text without a claim that can be measured gives None, and denied claims ("no bell") are passed over.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from audio.media import AudioClip
from audio.rewards import thinking
from audio.rubrics_ear import Heard, find_sounds, hear, peak_level, pitch, timbre
from audio.scenes import REGISTERS, TIMBRE_NAMES
from audio.speech import DIGITS

SLOW_S = 0.33
"""Seconds from onset to onset, between fast (0.13 to 0.22 s) and slow (0.40 to 0.52 s) beeps."""
CONTOUR_RATIO = 1.06
"""About a semitone: smaller steps of pitch count as level."""
LOUDER_DB = 3.0
"""Two events whose peaks differ by less are equally loud."""
PITCH_TOLERANCE = 0.04
"""Relative error at which a stated frequency still agrees."""

_NUMBERS = {word: n for n, word in enumerate((*DIGITS, "ten"))}
_NOUN = r"(?:beep|tone|knock|sound|note|event|click|beat|pulse|hit)"
_ORDINALS = {"first": 0, "second": 1, "third": 2, "last": -1}
_SEQUENCES = {"tone": tuple(REGISTERS), "knock": ("loud", "soft"), "sound": TIMBRE_NAMES, "beep": ("beep", "-")}
_DENIALS = re.compile(r"\b(?:no|not|never|without|isn't|aren't|wasn't|neither|nor)\s+(?:\w+\s+){0,2}$")


@dataclass(frozen=True)
class Measured:
    """A clip's events in order; what they are like is measured when it is asked for."""

    sounds: tuple[Heard, ...]

    @property
    def onsets(self) -> tuple[float, ...]:
        """Seconds from the beginning of the clip."""
        return tuple(sound.start for sound in self.sounds)

    @cached_property
    def pitches(self) -> tuple[tuple[float, float], ...]:
        """Hertz of the strongest partial at the beginning and at the end of each event."""
        return tuple(_end_pitches(sound.wave, sound.rate) for sound in self.sounds)

    @cached_property
    def levels(self) -> tuple[float, ...]:
        """Peak level of each event in dB below full scale."""
        return tuple(map(peak_level, self.sounds))

    @cached_property
    def timbres(self) -> tuple[str, ...]:
        """The name of each event's timbre."""
        return tuple(map(timbre, self.sounds))

    @property
    def count(self) -> int:
        return len(self.sounds)

    @property
    def contour(self) -> str | None:
        """``rising``, ``falling`` or ``level``: from the start of the first event to the end of the last; None if silent."""
        if not self.count:
            return None
        ratio = self.pitches[-1][1] / self.pitches[0][0]
        return "rising" if ratio > CONTOUR_RATIO else "falling" if ratio < 1 / CONTOUR_RATIO else "level"

    @property
    def tempo(self) -> str | None:
        """``slow`` or ``fast``, by the median time between onsets; None for fewer than two events."""
        if self.count < 2:
            return None
        return "slow" if float(np.median(np.diff(self.onsets))) > SLOW_S else "fast"

    @property
    def louder(self) -> int | None:
        """Index of the loudest event; None unless it stands out by `LOUDER_DB`."""
        if self.count < 2:
            return None
        order = np.argsort(self.levels)
        return int(order[-1]) if self.levels[order[-1]] - self.levels[order[-2]] > LOUDER_DB else None


@dataclass(frozen=True, kw_only=True)
class Claim:
    """A statement about a clip."""

    stated: str
    measured: str
    holds: bool


def measure(clip: AudioClip) -> Measured:
    """Events of a clip and what they are like."""
    return Measured(tuple(find_sounds(clip)))


def evidence_matches(text: str, clip: AudioClip) -> bool | None:
    """Whether every claim of ``text`` that can be measured agrees with ``clip``; None if there is none."""
    found = claims(text, clip)
    return all(claim.holds for claim in found) if found else None


def claims(text: str, clip: AudioClip) -> tuple[Claim, ...]:
    """Claims of a text about counts, order, pitch, loudness, contour, tempo and timbre, each compared with the clip.

    Where a text has a think block, evidence is what stands there.
    """
    plain = re.sub(r"<[^>]*>", " ", thinking(text) or text).casefold()
    measured = measure(clip)
    found = [*_counts(plain, measured), *_sequences(plain, clip, measured), *_frequencies(plain, measured)]
    return (*found, *_loudness(plain, measured), *_contours(plain, measured), *_tempos(plain, measured))


def _counts(text: str, measured: Measured) -> Iterator[Claim]:
    for match in _stated(rf"\b(\d+|{'|'.join(_NUMBERS)})\s+(?:\w+\s+)?{_NOUN}s?\b", text):
        number = _NUMBERS.get(match[1])
        number = int(match[1]) if number is None else number
        yield Claim(stated=match[0], measured=str(measured.count), holds=number == measured.count)


def _sequences(text: str, clip: AudioClip, measured: Measured) -> Iterator[Claim]:
    """Runs such as ``low high low``, ``bell then organ``, ``beep - beep``; and a timbre that is mentioned by itself."""
    for noun, words in _SEQUENCES.items():
        word = "|".join(map(re.escape, words))
        run = re.compile(rf"(?<![\w-])(?:{word})(?:(?:\s+|\s*,\s*|\s*,?\s*(?:and\s+)?then\s+(?:an?\s+)?)(?:{word}))*(?![\w-])")
        for match in run.finditer(text):
            said = re.findall(rf"(?<![\w-])(?:{word})(?![\w-])", match[0])
            alone = len(said) == 1 and text.strip(" .") != match[0]
            if (alone and noun != "sound") or _denied(text, match):
                continue  # "low" or "soft" alone may mean anything; the name of a timbre may not
            heard = measured.timbres if noun == "sound" else hear(clip, noun)
            holds = said[0] in heard if alone else tuple(said) == heard or _relative(said, noun, measured)
            yield Claim(stated=match[0], measured=" ".join(heard), holds=holds)


def _relative(said: Sequence[str], noun: str, measured: Measured) -> bool:
    """Whether ``high then low`` or ``loud then soft`` holds of two events that are compared with each other."""
    if measured.count != 2 or len(set(said)) != 2:
        return False
    if noun == "tone" and "middle" not in said:
        return (measured.contour == "rising") if said[0] == "low" else (measured.contour == "falling")
    return noun == "knock" and measured.louder == said.index("loud")


def _frequencies(text: str, measured: Measured) -> Iterator[Claim]:
    for match in _stated(r"(\d+(?:\.\d+)?)\s*(k?)hz\b", text):
        hertz = float(match[1]) * (1000 if match[2] else 1)
        known = [value for pair in measured.pitches for value in pair]
        holds = any(abs(value / hertz - 1) < PITCH_TOLERANCE for value in known) if hertz else False
        yield Claim(stated=match[0], measured=", ".join(f"{value:.0f} Hz" for value in known), holds=holds)


def _loudness(text: str, measured: Measured) -> Iterator[Claim]:
    which = rf"(first|second|third|last)(?:\s+(?:one|{_NOUN}))?"
    for match in _stated(rf"\b{which}(?:\s+(?:is|was|sounds))?(?:\s+the)?\s+(louder|loudest|softer|quieter)\b", text):
        place = _ORDINALS[match[1]] % max(1, measured.count)
        quietest = measured.levels.index(min(measured.levels)) if measured.count else None
        expected = measured.louder if match[2].startswith("loud") else quietest if measured.louder is not None else None
        yield Claim(stated=match[0], measured=f"{[round(level, 1) for level in measured.levels]} dB", holds=place == expected)


def _contours(text: str, measured: Measured) -> Iterator[Claim]:
    words = {"rising": "rising", "ascending": "rising", "goes up": "rising", "rises": "rising",
             "falling": "falling", "descending": "falling", "goes down": "falling", "falls": "falling"}  # fmt: skip
    for match in _stated(rf"\b({'|'.join(words)})\b", text):
        yield Claim(stated=match[0], measured=str(measured.contour), holds=words[match[1]] == measured.contour)


def _tempos(text: str, measured: Measured) -> Iterator[Claim]:
    pattern = r"\b(?:(?:tempo|beeps|beats|pulses)\s+(?:is|are)\s+(slow|fast)|(slow|fast)\s+(?:tempo|beeps|beats|pulses))\b"
    for match in _stated(pattern, text):
        yield Claim(stated=match[0], measured=str(measured.tempo), holds=(match[1] or match[2]) == measured.tempo)


def _stated(pattern: str, text: str) -> Iterator[re.Match[str]]:
    return (match for match in re.finditer(pattern, text) if not _denied(text, match))


def _denied(text: str, match: re.Match[str]) -> bool:
    return _DENIALS.search(text[: match.start()]) is not None


def _end_pitches(wave: np.ndarray, rate: int) -> tuple[float, float]:
    edge, length = round(0.008 * rate), round(0.04 * rate)
    if len(wave) < 2 * edge + length:
        return (pitch(wave, rate),) * 2
    return pitch(wave[edge : edge + length], rate), pitch(wave[len(wave) - edge - length : len(wave) - edge], rate)
