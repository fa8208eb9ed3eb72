"""What a person sees of episodes: captioned videos, and maps of success over what was changed in the scene. No torch.

Nothing is drawn while episodes run: `robotics.episodes.replay` shows the chosen ones again. Videos are small H.264 files that
every browser plays; without an H.264 encoder another codec that browsers play is used.
"""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mmrl.errors import DataError, MissingExtra
from mmrl.heat_map import heat_map_svg
from robotics.episodes import replay
from robotics.rollouts import Episode
from robotics.tasks import RobotTask
from robotics.world import CONTROL_HZ, ArmWorld

CAMERAS = ("scene", "wrist")
SUFFIX = ".mp4"
"""The container of every video; it holds each of the codecs below."""
_BAND, _INK = (18, 22, 26), (240, 243, 245)  # the caption brings its own ground, so it reads on any page
_FONT_SIZE, _MARGIN = 13, 6


@dataclass(frozen=True, kw_only=True)
class Encoder:
    """A video encoder and its settings for small pictures."""

    name: str
    """FFmpeg's."""
    codec: str
    """As browsers call it."""
    options: Mapping[str, str]


ENCODERS = (
    Encoder(name="libx264", codec="H.264", options={"preset": "veryfast", "crf": "26"}),
    Encoder(name="libopenh264", codec="H.264", options={"b": "400000"}),
    Encoder(name="libvpx-vp9", codec="VP9", options={"deadline": "realtime", "cpu-used": "8", "crf": "36", "b": "0"}),
    Encoder(name="libaom-av1", codec="AV1", options={"usage": "realtime", "cpu-used": "8", "crf": "38", "b": "0"}),
)
"""Best first: H.264 plays everywhere."""


@cache
def find_encoder() -> Encoder | None:
    """The first of `ENCODERS` that PyAV has here; None without PyAV or without any of them."""
    try:
        import av
    except ImportError:
        return None
    return next((encoder for encoder in ENCODERS if encoder.name in av.codecs_available and _encodes(encoder.name)), None)


def episode_frames(
    task: RobotTask,
    episode: Episode,
    *,
    cameras: Sequence[str] = CAMERAS,
    size: int = 192,
    every: int = 2,
    world: ArmWorld | None = None,
) -> NDArray[np.uint8]:
    """``[F, size, len(cameras) * size, 3]``: the cameras side by side at every ``every``-th control step and the last.

    ``world`` as in `robotics.episodes.replay`.
    """
    views = {name: (size, size) for name in cameras}
    moments = replay(task, episode, cameras=views, every=every, world=world)
    return np.stack([np.concatenate([moment.images[name] for name in cameras], axis=1) for moment in moments])


def episode_caption(task: RobotTask, episode: Episode) -> tuple[str, ...]:
    """What was asked for and what came of it, a line each."""
    seconds = episode.num_steps / CONTROL_HZ
    left = "" if np.isnan(episode.left[-1]) else f", {100 * episode.left[-1]:.1f} cm left"
    return task.instruction, f"{episode.stop_reason} after {seconds:.1f} s{left}"


def episode_video(
    task: RobotTask,
    episode: Episode,
    *,
    cameras: Sequence[str] = CAMERAS,
    size: int = 192,
    every: int = 2,
    world: ArmWorld | None = None,
    path: Path | None = None,
) -> bytes:
    """A captioned video of ``episode`` in real time; see `episode_frames` and `write_video`."""
    frames = episode_frames(task, episode, cameras=cameras, size=size, every=every, world=world)
    return write_video(path, frames, CONTROL_HZ / every, episode_caption(task, episode))


def write_video(path: Path | None, frames: NDArray[np.uint8], fps: float, caption_lines: Sequence[str] = ()) -> bytes:
    """Encode ``frames`` ``[F, H, W, 3]`` with the caption above the picture; the file's bytes, written to ``path`` if given.

    An odd height or width gains one row or column, since these codecs store colour at half resolution. The bytes depend on
    the frames and the encoder only.
    """
    if frames.ndim != 4 or frames.shape[-1] != 3 or frames.dtype != np.uint8 or not len(frames):
        raise DataError(f"frames are {frames.dtype} {list(frames.shape)}; expected uint8 [F, H, W, 3] with at least one frame.")
    encoder = find_encoder()
    if encoder is None:
        raise MissingExtra(
            f"no video encoder found; PyAV with one of {', '.join(each.name for each in ENCODERS)} is needed. Install it "
            "(pip install av), or switch videos off (rollout.media=false)."
        )
    import av

    frames = _framed(frames, caption_lines)
    file = io.BytesIO()
    with av.open(file, "w", format=SUFFIX[1:]) as container:
        stream = container.add_stream(encoder.name, rate=Fraction(fps).limit_denominator(1000), options=dict(encoder.options))
        stream.height, stream.width = frames.shape[1:3]
        stream.pix_fmt = "yuv420p"
        stream.codec_context.thread_count = 1
        for frame in frames:
            container.mux(stream.encode(av.VideoFrame.from_ndarray(frame, format="rgb24")))
        container.mux(stream.encode())
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(file.getvalue())
    return file.getvalue()


def write_heat_map(sweep: Mapping[str, Any], path: Path) -> Path:
    """Draw success over one or two swept parameters as an SVG file; see `mmrl.heat_map.heat_map_svg`."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(heat_map_svg(sweep), encoding="utf-8")
    return path


def _encodes(name: str) -> bool:
    import av

    try:
        return av.Codec(name, "w").is_encoder
    except av.codec.codec.UnknownCodecError:  # listed for decoding only
        return False


def _framed(frames: NDArray[np.uint8], caption_lines: Sequence[str]) -> NDArray[np.uint8]:
    """``frames`` with even sides and the caption's band on top: a player's controls cover the bottom."""
    _, height, width, _ = frames.shape
    band = _caption(caption_lines, width + width % 2)
    framed = np.empty((len(frames), height + len(band) + (height + len(band)) % 2, width + width % 2, 3), np.uint8)
    framed[:] = _BAND
    framed[:, : len(band)] = band
    framed[:, len(band) : len(band) + height, :width] = frames
    return framed


def _caption(lines: Sequence[str], width: int) -> NDArray[np.uint8]:
    """``[h, width, 3]``: the lines, broken between words where they are too long."""
    from PIL import Image, ImageDraw, ImageFont

    font = ImageFont.load_default(_FONT_SIZE)
    broken: list[str] = []
    for line in lines:
        broken.append("")
        for word in line.split():
            longer = f"{broken[-1]} {word}".strip()
            if broken[-1] and font.getlength(longer) > width - 2 * _MARGIN:
                broken.append(word)
            else:
                broken[-1] = longer
    if not broken:
        return np.empty((0, width, 3), np.uint8)
    spacing = _FONT_SIZE + 4
    band = Image.new("RGB", (width, spacing * len(broken) + 2 * _MARGIN - 4), _BAND)
    draw = ImageDraw.Draw(band)
    for i, text in enumerate(broken):
        draw.text((_MARGIN, _MARGIN - 2 + i * spacing), text, font=font, fill=_INK)
    return np.asarray(band)
