"""Sounds of a report: waveform and mel spectrogram of a WAV file as one SVG picture, which follows the reader's theme."""

from __future__ import annotations

import base64
import io
import struct
import wave
import zlib
from typing import Any

import numpy as np

WIDTH, WAVE_HEIGHT, MEL_HEIGHT = 260, 40, 80
"""Pixels."""
NUM_MELS = 64
NUM_FRAMES = 520
"""Columns of a spectrogram, at least 5 ms apart."""
RANGE_DB = 70.0
"""What is this far below the loudest is dark."""
_STOPS = ((0.0, (13, 8, 40)), (0.3, (84, 15, 109)), (0.55, (187, 55, 84)), (0.8, (249, 142, 9)), (1.0, (252, 255, 190)))
"""Colors from silent to loud; lightness rises all the way, so that it also reads in grey."""
_STYLE = """\
svg { --line: #22609c; --muted: #5c636b; }
@media (prefers-color-scheme: dark) { svg { --line: #7db4ea; --muted: #a3abb3; } }
text { fill: var(--muted); font: 10px system-ui, -apple-system, "Segoe UI", Roboto, "Liberation Sans", Arial, sans-serif; }
.end { text-anchor: end; } .wave { fill: var(--line); stroke: var(--line); stroke-width: 0.5; }"""


def sound_svg(data: bytes) -> str | None:
    """Waveform above mel spectrogram, time to the right; None for bytes that are no uncompressed WAV file or hold no sample."""
    sound = read_wav(data)
    if sound is None:
        return None
    samples, rate = sound
    seconds, top = len(samples) / rate, rate / 2
    height = WAVE_HEIGHT + MEL_HEIGHT + 16
    image = base64.b64encode(indexed_png(_levels(mel_spectrogram(samples, rate)))).decode("ascii")
    limit = f"{top / 1000:.3g} kHz"
    return "\n".join([
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{height}" viewBox="0 0 {WIDTH} {height}" role="img">',
        f"<title>waveform and mel spectrogram up to {limit}, {seconds:.2f} s</title>",
        f"<style>\n{_STYLE}\n</style>",
        f'<path class="wave" d="{_outline(samples)}"/>',
        f'<image x="0" y="{WAVE_HEIGHT}" width="{WIDTH}" height="{MEL_HEIGHT}" preserveAspectRatio="none" '
        f'href="data:image/png;base64,{image}"/>',
        f'<text x="0" y="{height - 4}">0 s</text>',
        f'<text class="end" x="{WIDTH}" y="{height - 4}">{seconds:.2f} s, mel up to {limit}</text>',
        "</svg>\n",
    ])  # fmt: skip


def read_wav(data: bytes) -> tuple[np.ndarray, int] | None:
    """Mono samples ``[n]`` in -1 to 1 and their rate; None for anything but PCM of 8, 16 or 32 bits."""
    try:
        with wave.open(io.BytesIO(data)) as file:
            channels, width, rate, frames = file.getnchannels(), file.getsampwidth(), file.getframerate(), file.getnframes()
            raw = file.readframes(frames)
    except (wave.Error, EOFError):
        return None
    if width not in (1, 2, 4) or len(raw) < width * channels:
        return None
    whole = np.frombuffer(raw[: len(raw) // (width * channels) * width * channels], dtype={1: "u1", 2: "<i2", 4: "<i4"}[width])
    scaled = (whole.astype(np.float64) - (128 if width == 1 else 0)) / 2 ** (8 * width - 1)
    return scaled.reshape(-1, channels).mean(axis=1), rate


def mel_spectrogram(samples: np.ndarray, rate: int) -> np.ndarray:
    """Decibels ``[NUM_MELS, frames]`` below the loudest, floored at `RANGE_DB`; windows of 25 ms, low frequencies first."""
    size = max(64, round(0.025 * rate))
    hop = max(round(0.005 * rate), -(-len(samples) // NUM_FRAMES), 1)
    padded = np.pad(samples, (size // 2, size))
    starts = np.arange(0, max(1, len(samples)), hop)
    frames = padded[starts[:, None] + np.arange(size)] * np.hanning(size)
    power = np.abs(np.fft.rfft(frames, n=max(512, 1 << (size - 1).bit_length()))) ** 2  # [frames, bins]
    mel = mel_filters(rate, power.shape[1]) @ power.T
    decibels = 10 * np.log10(np.maximum(mel, 1e-12))
    return np.maximum(decibels - decibels.max(), -RANGE_DB)


def mel_filters(rate: int, num_bins: int) -> np.ndarray:
    """Triangles ``[NUM_MELS, num_bins]`` equally wide on the mel scale, from 0 Hz to half the rate."""
    edges = np.linspace(0.0, 2595 * np.log10(1 + rate / 1400), NUM_MELS + 2)
    hertz = 700 * (10 ** (edges / 2595) - 1)
    bins = np.linspace(0, rate / 2, num_bins)
    rising = (bins - hertz[:-2, None]) / (hertz[1:-1] - hertz[:-2])[:, None]
    falling = (hertz[2:, None] - bins) / (hertz[2:] - hertz[1:-1])[:, None]
    filters = np.clip(np.minimum(rising, falling), 0.0, None)
    # Low triangles may fall between two bins: they then take the nearest.
    empty = np.flatnonzero(filters.sum(axis=1) == 0)
    filters[empty, np.abs(bins - hertz[1:-1][empty, None]).argmin(axis=1)] = 1.0
    return filters


def indexed_png(levels: np.ndarray) -> bytes:
    """``levels [rows, columns]`` (0 to 255) as a PNG in the colors of `_STOPS`."""
    rows, columns = levels.shape
    at, colors = zip(*_STOPS)
    ramp = np.linspace(0, 1, 256)
    palette = np.stack([np.interp(ramp, at, channel) for channel in zip(*colors)], axis=1).round().astype(np.uint8)
    scanlines = np.concatenate([np.zeros((rows, 1), np.uint8), levels.astype(np.uint8)], axis=1)
    parts = [
        (b"IHDR", struct.pack(">IIBBBBB", columns, rows, 8, 3, 0, 0, 0)),
        (b"PLTE", palette.tobytes()),
        (b"IDAT", zlib.compress(scanlines.tobytes(), 9)),
        (b"IEND", b""),
    ]
    chunks = [struct.pack(">I", len(d)) + n + d + struct.pack(">I", zlib.crc32(n + d)) for n, d in parts]
    return b"\x89PNG\r\n\x1a\n" + b"".join(chunks)


def _levels(decibels: np.ndarray) -> np.ndarray:
    """High frequencies on top, 0 for `RANGE_DB` below the loudest and 255 for the loudest."""
    return ((decibels[::-1] / RANGE_DB + 1) * 255).round().clip(0, 255)


def _outline(samples: np.ndarray) -> str:
    """The lowest and highest sample of each pixel column as one closed path."""
    parts = np.array_split(samples, min(WIDTH, len(samples)))
    x = np.linspace(0, WIDTH, len(parts))
    middle, scale = WAVE_HEIGHT / 2, WAVE_HEIGHT / 2 / max(1e-9, float(np.abs(samples).max()), 0.05)

    def points(values: list[Any], places: np.ndarray) -> str:
        return "L".join(f"{place:.1f} {middle - scale * value:.1f}" for place, value in zip(places, values))

    high, low = [part.max() for part in parts], [part.min() for part in parts]
    return f"M{points(high, x)}L{points(low[::-1], x[::-1])}Z"
