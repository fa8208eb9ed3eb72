"""Sounds as waveforms: opening, refusing what is damaged, mixing down and resampling.

Works on references as `mmrl.data` leaves them (paths, bytes, decoded arrays, `AudioClip`). This module knows no model: the
rate and the limits come from the caller. Neither librosa nor soundfile is imported before a sound is opened.
"""

from __future__ import annotations

import io
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np

from mmrl.data_files import RowError
from mmrl.data_media import MediaRoot, resolve_medium

SILENCE_PEAK = 1e-6
"""Samples whose largest magnitude is below this (-120 dB) are silence, or channels that cancel."""

TooLong = Literal["refuse", "cut"]


@dataclass(frozen=True, eq=False)
class AudioClip:
    """A mono waveform, and a medium that a task may hold as it is."""

    samples: np.ndarray
    """``[n]`` float32, nominally within -1 to 1."""
    rate: int
    """Samples per second."""
    control: bool = False
    """Silence on purpose, as a control in evaluation: taken whatever the limits say of silence."""

    @property
    def seconds(self) -> float:
        return len(self.samples) / self.rate

    def to_wav(self) -> bytes:
        """A 16-bit WAV file; samples beyond -1 to 1 are clipped."""
        import soundfile

        buffer = io.BytesIO()
        soundfile.write(buffer, np.clip(self.samples, -1.0, 1.0), self.rate, format="WAV", subtype="PCM_16")
        return buffer.getvalue()


@dataclass(frozen=True, kw_only=True)
class ClipLimits:
    """Which clips are taken."""

    min_seconds: float = 0.1
    max_seconds: float = 30.0
    too_long: TooLong = "refuse"
    """What happens beyond ``max_seconds``: the row is refused, or the first ``max_seconds`` are kept."""
    allow_silence: bool = False
    """Take clips of silence (as a control in evaluation)."""


def open_clip(ref: Any, *, rate: int | None, limits: ClipLimits) -> AudioClip:
    """A mono clip at ``rate`` (None keeps its own) from a path, the bytes of a file, a data URI, an `AudioClip`, an
    ``(array, rate)`` pair or ``{"array": ..., "sampling_rate": ...}``.

    Channels are averaged. Arrays are float in -1 to 1 or integers of full scale: ``[n]``, ``[channels, n]``, ``[n, channels]``.
    Files are read by libsndfile (WAV, FLAC, OGG, MP3 and others). Raises `RowError` for what cannot be used.
    """
    import librosa

    name = _name_of(ref)
    samples, own_rate, seconds = _decode(ref, name, limits)
    _check_samples(samples, name)
    if seconds > limits.max_seconds:
        if limits.too_long == "refuse":
            detail = (
                f"{name}: {seconds:.2f} s, the limit is {limits.max_seconds:g} s; cut the file, raise max_seconds if the model "
                "takes more, or set too_long: cut."
            )
            raise RowError("audio", "clip too long", detail)
        samples = samples[..., : int(limits.max_seconds * own_rate)]
    mono = librosa.to_mono(samples)
    on_purpose = isinstance(ref, AudioClip) and ref.control
    if not (limits.allow_silence or on_purpose) and np.abs(mono).max() < SILENCE_PEAK:
        cancels = " once its channels are averaged" if np.abs(samples).max() >= SILENCE_PEAK else ""
        detail = f"{name}: {seconds:.2f} s without any sound{cancels}; mend the file, or set allow_silence: true."
        raise RowError("audio", "silent clip", detail)
    if rate is not None and own_rate != rate:
        mono = librosa.resample(mono, orig_sr=own_rate, target_sr=rate)
    clip = AudioClip(np.ascontiguousarray(mono, dtype=np.float32), rate or own_rate)
    if clip.seconds < limits.min_seconds:
        detail = f"{name}: {clip.seconds:.3f} s; expected {limits.min_seconds:g} s or more (min_seconds)."
        raise RowError("audio", "clip too short", detail)
    return clip


def _decode(ref: Any, name: str, limits: ClipLimits) -> tuple[np.ndarray, int, float]:
    """Samples ``[n]`` or ``[channels, n]`` float32, their rate, and the seconds that the whole medium lasts."""
    if isinstance(ref, AudioClip):
        ref = (ref.samples, ref.rate)
    elif isinstance(ref, Mapping) and ref.get("array") is not None:
        ref = (ref["array"], ref.get("sampling_rate"))
    if isinstance(ref, tuple):
        samples, rate = _from_array(ref, name)
        return samples, rate, samples.shape[-1] / rate
    return _from_file(ref, name, limits)


def _from_file(ref: Any, name: str, limits: ClipLimits) -> tuple[np.ndarray, int, float]:
    import librosa
    import soundfile

    data = _read(ref, name)
    missing = _missing_wav_bytes(data)
    if missing:
        raise RowError(
            "audio", "damaged sound", f"{name}: ends {missing} bytes before the size that it declares; save it again."
        )
    try:
        with soundfile.SoundFile(io.BytesIO(data)) as file:
            seconds = file.frames / file.samplerate
            kept = min(seconds, limits.max_seconds + 1.0)  # hours of sound are not decoded to be thrown away
            samples, rate = librosa.load(file, sr=None, mono=False, duration=kept)
    except soundfile.SoundFileRuntimeError as error:
        reason = getattr(error, "error_string", str(error)).rstrip(".")
        detail = f"{name}: {reason}; the file starts with {data[:16]!r}. Expected WAV, FLAC, OGG or MP3."
        raise RowError("audio", "not a readable sound", detail) from error
    if samples.shape[-1] + rate // 100 < kept * rate:
        found = f"{samples.shape[-1] / rate:.2f} of {kept:.2f} s"
        raise RowError("audio", "damaged sound", f"{name}: only {found} could be decoded; save the file again.")
    return samples, int(rate), seconds


def _missing_wav_bytes(data: bytes) -> int:
    """Bytes that a WAV file's header promises and the file lacks; libsndfile reads such a file as a shorter one."""
    declared = int.from_bytes(data[4:8], "little")
    streamed = declared in (0, 0xFFFFFFFF)  # written to a pipe, before the size was known
    return max(0, declared + 8 - len(data)) if data[:4] == b"RIFF" and not streamed else 0


def _from_array(pair: tuple[Any, ...], name: str) -> tuple[np.ndarray, int]:
    if len(pair) != 2 or isinstance(pair[1], bool) or not isinstance(pair[1], (int, np.integer)) or pair[1] <= 0:
        raise RowError("audio", "wrong type", f"{name}: expected (samples, rate) with a whole rate above 0, in hertz.")
    samples, rate = np.asarray(pair[0]), int(pair[1])
    if samples.ndim not in (1, 2) or samples.dtype.kind not in "fiu" or samples.dtype == np.uint8:
        expected = "float or signed integers [n], [channels, n] or [n, channels]"
        raise RowError("audio", "wrong type", f"{name}: found {samples.dtype} {list(samples.shape)}; expected {expected}.")
    if samples.dtype.kind in "iu":
        samples = samples / -float(np.iinfo(samples.dtype).min)
    if samples.ndim == 2 and samples.shape[0] > samples.shape[1]:
        samples = samples.T
    return samples.astype(np.float32), rate


def _check_samples(samples: np.ndarray, name: str) -> None:
    if samples.size == 0:
        raise RowError("audio", "empty clip", f"{name}: holds 0 samples; record it again or drop the row.")
    broken = int((~np.isfinite(samples)).sum())
    if broken:
        detail = f"{name}: {broken} of {samples.size} samples are NaN or infinite; save the file again."
        raise RowError("audio", "samples that are not numbers", detail)


def _read(ref: Any, name: str) -> bytes:
    if isinstance(ref, (bytearray, memoryview)):
        ref = bytes(ref)
    if isinstance(ref, os.PathLike):
        ref = os.fspath(ref)
    if not isinstance(ref, (str, bytes)):
        detail = f"found {type(ref).__name__}; expected a path, bytes, (samples, rate) or an AudioClip."
        raise RowError("audio", "wrong type", detail)
    if isinstance(ref, str):
        ref = resolve_medium(ref, "audio", "audio", MediaRoot(Path.cwd(), allow_outside=True))
    data = ref if isinstance(ref, bytes) else Path(ref).read_bytes()
    if not data:
        raise RowError("audio", "empty file", f"{name}: holds 0 bytes; expected audio data.")
    return data


def _name_of(ref: Any) -> str:
    if isinstance(ref, (bytes, bytearray, memoryview)):
        return f"{len(ref)} bytes"
    if isinstance(ref, str):
        return ref if len(ref) <= 200 else f"{ref[:40]}..."
    if isinstance(ref, os.PathLike):
        return os.fspath(ref)
    return {tuple: "an array", dict: "an array"}.get(type(ref), type(ref).__name__)
