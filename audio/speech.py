"""Spoken digits: a packaged set of synthetic voices, or espeak-ng with endless voices where it is installed.

The packaged set is what the built-in tasks use unless they are told otherwise, so that equal seeds give equal clips on every
machine. ``python -m audio.speech DIR`` makes it anew; see ``audio/assets/spoken_digits/README.md``.
"""

from __future__ import annotations

import io
import json
import shutil
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import numpy as np
from scipy.signal import resample_poly

from audio.sounds import RATE
from mmrl.errors import MissingExtra

DIGITS = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")
PACKAGED = Path(__file__).parent / "assets" / "spoken_digits"
PACKAGED_RATE = 8_000
ACCENTS = ("en-gb", "en-us", "en-gb-scotland", "en-029", "en-us-nyc")
TRAIN_VARIANTS = ("m1", "m3", "m4", "f1", "f4")
EVAL_VARIANTS = ("m2", "f2")
"""Voices that training never hears."""
QUIET = 0.02
"""Share of the peak below which the ends of a spoken word are cut off."""


def packaged(digit: int, *, split: str, rng: np.random.Generator) -> np.ndarray:
    """A spoken digit ``[n]`` at `RATE`, peak 1, in one of the voices of ``split``."""
    clips = _packaged_clips()[split == "train"][digit]
    return clips[rng.integers(len(clips))]


def synthesize(text: str, *, voice: str, words_per_minute: int = 190, pitch: int = 50) -> np.ndarray:
    """``text`` spoken by espeak-ng, ``[n]`` at `RATE`, peak 1, silence at both ends cut off.

    ``voice`` is an accent and a variant, such as ``en-gb+f2``; ``pitch`` runs from 0 to 99. Raises `MissingExtra` without
    espeak-ng.
    """
    program = shutil.which("espeak-ng")
    if program is None:
        raise MissingExtra("espeak-ng is not installed; install it (apt-get install espeak-ng) or use the packaged digits.")
    command = [program, "-v", voice, "-s", str(words_per_minute), "-p", str(pitch), "--stdout", text]
    sound = subprocess.run(command, capture_output=True, check=True).stdout
    import soundfile

    wave, rate = soundfile.read(io.BytesIO(sound), dtype="float64")
    return _trimmed(resample_poly(wave, RATE, rate))


def synthesized(digit: int, *, split: str, rng: np.random.Generator) -> np.ndarray:
    """A digit spoken by espeak-ng in a random accent, speed and pitch, in one of the variants of ``split``."""
    variants = TRAIN_VARIANTS if split == "train" else EVAL_VARIANTS
    voice = f"{ACCENTS[rng.integers(len(ACCENTS))]}+{variants[rng.integers(len(variants))]}"
    speed, pitch = int(rng.integers(170, 251)), int(rng.integers(25, 76))
    return synthesize(DIGITS[digit], voice=voice, words_per_minute=speed, pitch=pitch)


SPEAKERS = {"packaged": packaged, "espeak": synthesized}
"""Where spoken digits come from, by name."""


def write_packaged(directory: Path) -> None:
    """Make the packaged set with espeak-ng: every accent and variant says every digit once."""
    import soundfile

    index, waves, position = [], [], 0
    for voice, speed, pitch in _voices():
        spans = []
        for word in DIGITS:
            wave = resample_poly(synthesize(word, voice=voice, words_per_minute=speed, pitch=pitch), PACKAGED_RATE, RATE)
            spans.append([position, len(wave)])
            waves += [wave, np.zeros(PACKAGED_RATE // 50)]  # a pause, so that lossy coding does not smear one into the next
            position += len(wave) + PACKAGED_RATE // 50
        index.append({"voice": voice, "words_per_minute": speed, "pitch": pitch, "spans": spans})
    directory.mkdir(parents=True, exist_ok=True)
    soundfile.write(
        directory / "digits.ogg",
        0.9 * np.concatenate(waves),
        PACKAGED_RATE,
        format="OGG",
        subtype="VORBIS",
        compression_level=0.8,
    )
    lines = ",\n".join(json.dumps(entry) for entry in index)
    (directory / "index.json").write_text(f"[\n{lines}\n]\n", encoding="utf-8")


def _voices() -> Iterator[tuple[str, int, int]]:
    """Voices of the packaged set with words per minute and pitch."""
    rng = np.random.default_rng(0)
    for accent in ACCENTS:
        for variant in (*TRAIN_VARIANTS, *EVAL_VARIANTS):
            yield f"{accent}+{variant}", int(rng.integers(170, 251)), int(rng.integers(25, 76))


@cache
def _packaged_clips() -> tuple[dict[int, list[np.ndarray]], dict[int, list[np.ndarray]]]:
    """Clips by digit, of the evaluation voices and of the training voices."""
    import soundfile

    wave, _ = soundfile.read(PACKAGED / "digits.ogg", dtype="float64")
    parts: tuple[dict[int, list[np.ndarray]], ...] = ({}, {})
    for entry in json.loads((PACKAGED / "index.json").read_text(encoding="utf-8")):
        part = parts[entry["voice"].partition("+")[2] in TRAIN_VARIANTS]
        for digit, (start, length) in enumerate(entry["spans"]):
            clip = resample_poly(wave[start : start + length], RATE, PACKAGED_RATE)
            part.setdefault(digit, []).append(_trimmed(clip))
    return parts


def _trimmed(wave: np.ndarray) -> np.ndarray:
    loud = np.flatnonzero(np.abs(wave) > QUIET * np.abs(wave).max())
    kept = wave[loud[0] : loud[-1] + 1]
    return kept / np.abs(kept).max()


if __name__ == "__main__":
    write_packaged(Path(sys.argv[1]))
