"""Sounds and pictures without content, for control measurements, and what is known of the media that a policy was given."""

from __future__ import annotations

from typing import Any

import numpy as np
from PIL import Image

from audio.media import AudioClip
from audio.pictures import Clip
from mmrl.chat import MediaFacts

GREY = (128, 128, 128)


def blank(item: AudioClip | Clip | Image.Image) -> Any:
    """A reference to silence as long as the opened ``item``, or to a grey picture or video of its size."""
    if isinstance(item, AudioClip):
        return AudioClip(np.zeros_like(item.samples), item.rate, control=True)
    if isinstance(item, Clip):
        count, height, width, _ = item.frames.shape
        frames = [Image.new("RGB", (width, height), GREY)] * count
        sound = {} if item.sound is None else {"audio": blank(item.sound)}
        return {"video": frames, "fps": item.fps, **sound}
    return Image.new("RGB", item.size, GREY)


def facts(item: AudioClip | Clip | Image.Image) -> MediaFacts:
    """Seconds of a sound, size of a picture (the model's own processor shrinks it), times of a video's frames."""
    if isinstance(item, AudioClip):
        return MediaFacts(kind="audio", seconds=item.seconds)
    if isinstance(item, Clip):
        count, height, width, _ = item.frames.shape
        seconds = count / item.fps if item.sound is None else item.sound.seconds
        return MediaFacts(
            kind="video", original_size=(width, height), times=tuple(i / item.fps for i in range(count)), seconds=seconds
        )
    return MediaFacts(kind="image", original_size=item.size)
