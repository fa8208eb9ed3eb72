"""Pictures without content, for control measurements, and what is known of the pictures that a policy was shown."""

from __future__ import annotations

from typing import Any

from PIL import Image

from mmrl.chat import MediaFacts
from vision.media import Video

GREY = (128, 128, 128)


def blank(item: Image.Image | Video) -> Any:
    """A reference to a grey medium of the same size (and frames, and rate) as the opened ``item``."""
    if isinstance(item, Video):
        count, _, height, width = item.frames.shape
        return {"video": [Image.new("RGB", (width, height), GREY)] * count, "fps": item.fps}
    return Image.new("RGB", item.size, GREY)


def facts(item: Image.Image | Video, original: Image.Image | None) -> MediaFacts:
    """Sizes before and after fitting, and when frames were taken; ``original`` is the image before fitting."""
    if isinstance(item, Video):
        _, _, height, width = item.frames.shape
        rate = item.metadata["fps"]
        times = tuple(index / rate for index in item.metadata["frames_indices"])
        return MediaFacts(kind="video", size=(width, height), times=times, seconds=item.metadata["total_num_frames"] / rate)
    return MediaFacts(kind="image", size=item.size, original_size=original.size)
