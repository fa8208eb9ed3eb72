"""Images and videos for audio models that also see: opening, and a video's own sound track. Sizes are left to the processor."""

from __future__ import annotations

import io
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from audio.media import AudioClip, ClipLimits, open_clip
from mmrl.data_files import RowError
from mmrl.images import check_rate, name_of, open_image, stack_frames


@dataclass(frozen=True, kw_only=True)
class Clip:
    """A video: sampled frames, and its sound if it has one."""

    frames: np.ndarray
    """``[F, height, width, 3]`` uint8."""
    fps: float
    """Frames per second of ``frames``."""
    sound: AudioClip | None = None


def open_video(ref: Any, *, fps: float, max_frames: int, rate: int, limits: ClipLimits, with_sound: bool) -> Clip:
    """A video file (path or bytes), or ``{"video": frames, "fps": 2, "audio": clip}`` with a list of images.

    Files are sampled evenly at about ``fps``; ``{"video": path, "fps": 4}`` overrides it. With ``with_sound`` the sound track
    is mixed down to ``rate``, and a video without one is refused.
    """
    own = ref if isinstance(ref, Mapping) else {"video": ref}
    source, own_fps, sound = own["video"], own.get("fps"), own.get("audio")
    check_rate(own_fps, "fps of the row")
    if isinstance(source, Sequence) and not isinstance(source, (str, bytes)):
        if own_fps is None:
            detail = f"a list of {len(source)} frames does not say its rate; give {{'video': ..., 'fps': 2}}."
            raise RowError("video", "missing fps", detail)
        if len(source) > max_frames:
            raise RowError("video", "number of frames", f"{len(source)}; expected at most {max_frames} (max_frames).")
        frames = stack_frames([open_image(frame) for frame in source])
    else:
        frames, own_fps, track = _read_file(source, fps=own_fps or fps, max_frames=max_frames, with_sound=with_sound)
        sound = track if sound is None else sound
    if not with_sound:
        return Clip(frames=frames, fps=float(own_fps))
    if sound is None:
        detail = f"{name_of(source)}: has no sound track; rollout.use_audio_in_video wants one of every video."
        raise RowError("video", "video without sound", detail)
    return Clip(frames=frames, fps=float(own_fps), sound=open_clip(sound, rate=rate, limits=limits))


def _read_file(source: Any, *, fps: float, max_frames: int, with_sound: bool) -> tuple[np.ndarray, float, Any]:
    import av

    name = name_of(source)
    try:
        with av.open(io.BytesIO(source) if isinstance(source, bytes) else os.fspath(source)) as file:
            pictures = [(frame.time, frame) for frame in file.decode(video=0)]
            rate = float(file.streams.video[0].average_rate or 0)
            if not pictures or rate <= 0:
                raise RowError("video", "no frames", f"{name}: has {len(pictures)} frames at {rate:g} a second.")
            count = min(max_frames, len(pictures), max(2, 2 * round(len(pictures) / rate * fps / 2)))
            kept = np.linspace(0, len(pictures) - 1, count).round().astype(int)
            frames = np.stack([pictures[i][1].to_ndarray(format="rgb24") for i in kept])
            sound = None
            if with_sound and file.streams.audio:
                file.seek(0)
                sound = _read_track(file)
    except (OSError, IndexError, TypeError, av.FFmpegError) as error:
        raise RowError("video", "not a readable video", f"{name}: {' '.join(str(error).split())}") from error
    return frames, count / len(pictures) * rate, sound


def _read_track(file: Any) -> tuple[np.ndarray, int] | None:
    import av

    stream = file.streams.audio[0]
    resampler = av.AudioResampler(format="fltp", layout="mono", rate=stream.rate)
    pieces = [piece.to_ndarray()[0] for frame in [*file.decode(stream), None] for piece in resampler.resample(frame)]
    return (np.concatenate(pieces), int(stream.rate)) if pieces else None
