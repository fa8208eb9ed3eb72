"""Images and videos as pixels: opening, refusing what is damaged, and fitting to a pixel budget.

Works on references as `mmrl.data` leaves them (paths, bytes, opened objects, lists of frames). Sizes and frame counts follow
`qwen_vl_utils`, which is imported when they are needed; this module knows no model.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from io import BytesIO
from typing import TYPE_CHECKING, Any

import numpy as np
from PIL import Image

from mmrl.data_files import RowError
from mmrl.errors import ConfigError
from mmrl.images import check_rate, local_reference, name_of, open_image, stack_frames

if TYPE_CHECKING:
    from torch import Tensor

    from vision.config import VisionRolloutConfig

PATCH_FACTOR = 28
"""Pixels of a side of one visual token of Qwen2.5-VL: patches of 14, merged 2 by 2 (Qwen3-VL: 32)."""


@dataclass(frozen=True, kw_only=True)
class Video:
    """Sampled frames, and when they were taken. Field names of ``metadata`` are those of transformers' ``VideoMetadata``."""

    frames: Tensor
    """``[F, 3, height, width]`` uint8; F is even, since two frames make one temporal patch."""
    fps: float
    """Frames per second of ``frames``; gives their temporal positions."""
    metadata: Mapping[str, Any]
    """``fps`` of the source, ``frames_indices`` in it, ``total_num_frames`` of it."""


def fitted_size(height: int, width: int, *, min_pixels: int, max_pixels: int, factor: int = PATCH_FACTOR) -> tuple[int, int]:
    """Height and width after `fit`: multiples of ``factor`` whose product lies within the bounds, by ``smart_resize``.

    Fitting a fitted size changes nothing, so a model's own processor with the same bounds leaves the pixels alone.
    """
    from qwen_vl_utils.vision_process import smart_resize

    if not 0 < min_pixels <= max_pixels:
        raise ConfigError(f"min_pixels is {min_pixels} and max_pixels {max_pixels}; expected 0 < min_pixels <= max_pixels.")
    try:
        fitted = smart_resize(height, width, factor=factor, min_pixels=min_pixels, max_pixels=max_pixels)
    except ValueError as error:
        raise RowError("image", "aspect ratio over 200", f"{width}x{height}: {error}; crop it.") from error
    if not min_pixels <= fitted[0] * fitted[1] <= max_pixels:  # smart_resize rounds past tight bounds, even to 0
        detail = (
            f"{width}x{height} becomes {fitted[1]}x{fitted[0]}, outside of {min_pixels} to {max_pixels} pixels; widen them."
        )
        raise RowError("image", "no size within the pixel bounds", detail)
    return fitted


def fit(image: Image.Image, *, min_pixels: int, max_pixels: int, factor: int = PATCH_FACTOR) -> Image.Image:
    """Resize to `fitted_size`. The aspect ratio changes a little: pixel coordinates scale differently along each axis."""
    height, width = fitted_size(image.height, image.width, min_pixels=min_pixels, max_pixels=max_pixels, factor=factor)
    return image.resize((width, height))


def open_video(
    ref: Any,
    *,
    sample_fps: float,
    min_pixels: int,
    max_pixels: int,
    source_fps: float | None = None,
    min_frames: int = 4,
    max_frames: int = 768,
    factor: int = PATCH_FACTOR,
) -> Video:
    """Frames of a video file (path or bytes, read by decord) or of a list of images, fitted to the pixel bounds of one frame.

    A file is sampled evenly at about ``sample_fps``, within the frame bounds, as qwen_vl_utils does. A list is taken whole, as
    frames at the rate of its own ``{"video": [...], "fps": 2}``. ``source_fps`` stands in for a rate that the list or the file
    does not give; without it that is an error, since positions in time would be made up. ``{"video": path, "fps": 4}``
    overrides ``sample_fps`` for one file.
    """
    own_fps = None
    if isinstance(ref, Mapping):
        ref, own_fps = ref["video"], ref.get("fps")
    check_rate(own_fps, "fps of the row")
    if isinstance(ref, (list, tuple)):
        frames, metadata = _frames_of_list(ref, own_fps or source_fps, max_frames)
    else:
        frames, metadata = _frames_of_file(ref, own_fps or sample_fps, source_fps, min_frames, max_frames)
    height, width = fitted_size(frames.shape[2], frames.shape[3], min_pixels=min_pixels, max_pixels=max_pixels, factor=factor)
    fps = len(frames) / metadata["total_num_frames"] * metadata["fps"]
    return Video(frames=_resize_frames(frames, height, width), fps=fps, metadata=metadata)


def open_media(
    kind: str,
    ref: Any,
    *,
    min_pixels: int,
    max_pixels: int,
    sample_fps: float,
    source_fps: float | None = None,
    min_frames: int = 4,
    max_frames: int = 768,
    factor: int = PATCH_FACTOR,
) -> Image.Image | Video:
    """Open one medium as training does: the opener of ``mmrl data check`` once its limits are bound."""
    if kind == "image":
        return fit(open_image(ref), min_pixels=min_pixels, max_pixels=max_pixels, factor=factor)
    if kind == "video":
        return open_video(
            ref,
            sample_fps=sample_fps,
            min_pixels=min_pixels,
            max_pixels=max_pixels,
            source_fps=source_fps,
            min_frames=min_frames,
            max_frames=max_frames,
            factor=factor,
        )
    raise RowError(kind, "modality not supported", f"found {kind}; a vision policy takes images and videos.")


def _missing_rate(name: str) -> RowError:
    give = "give {'video': ..., 'fps': 2} in the row, or source_fps in the config"
    return RowError("video", "missing fps", f"{name} does not say how many frames a second has; {give}.")


def _frames_of_list(frames: Sequence[Any], fps: float | None, max_frames: int) -> tuple[Tensor, dict[str, Any]]:
    """All frames, the last one twice if their number is odd."""
    import torch

    if fps is None:
        raise _missing_rate(f"a list of {len(frames)} frames")
    if not 0 < len(frames) <= max_frames:
        detail = f"a list of {len(frames)}; expected 1 to {max_frames}: leave some out, or raise max_frames."
        raise RowError("video", "number of frames", detail)
    pixels = stack_frames([open_image(frame) for frame in frames])
    if len(pixels) % 2:
        pixels = np.concatenate([pixels, pixels[-1:]])
    stacked, count = torch.from_numpy(pixels).permute(0, 3, 1, 2), len(pixels)
    return stacked, {"fps": float(fps), "frames_indices": list(range(count)), "total_num_frames": count}


def _frames_of_file(
    ref: Any, sample_fps: float, source_fps: float | None, min_frames: int, max_frames: int
) -> tuple[Tensor, dict[str, Any]]:
    import decord
    import torch
    from qwen_vl_utils.vision_process import smart_nframes

    name = name_of(ref)
    ref = local_reference(ref, "video")
    if not (len(ref) if isinstance(ref, bytes) else os.path.getsize(ref)):
        raise RowError("video", "empty file", f"{name}: holds 0 bytes; expected video data.")
    try:
        reader = decord.VideoReader(BytesIO(ref) if isinstance(ref, bytes) else ref)
        total, fps = len(reader), reader.get_avg_fps()
    except (decord.DECORDError, RuntimeError) as error:
        raise RowError("video", "not a readable video", f"{name}: decord: {' '.join(str(error).split())}") from error
    if not (math.isfinite(fps) and fps > 0):
        if source_fps is None:
            raise _missing_rate(name)
        fps = source_fps
    wanted = {"fps": sample_fps, "min_frames": min_frames, "max_frames": max_frames}
    try:
        count = smart_nframes(wanted, total_frames=total, video_fps=fps)
    except ValueError as error:
        raise RowError("video", "number of frames", f"{name}: {total} frames at {fps:g} fps: {error}") from error
    indices = torch.linspace(0, total - 1, count).round().long().tolist()
    try:
        frames = torch.from_numpy(reader.get_batch(indices).asnumpy()).permute(0, 3, 1, 2)
    except (decord.DECORDError, RuntimeError) as error:
        raise RowError("video", "damaged video", f"{name}: decord: {' '.join(str(error).split())}") from error
    return frames, {"fps": float(fps), "frames_indices": indices, "total_num_frames": total}


def _resize_frames(frames: Tensor, height: int, width: int) -> Tensor:
    from torchvision.transforms import InterpolationMode
    from torchvision.transforms.functional import resize

    return resize(frames, [height, width], interpolation=InterpolationMode.BICUBIC, antialias=True)


def opener(limits: VisionRolloutConfig) -> Callable[[str, Any], Image.Image | Video]:
    """`open_media` under the limits of a run: what training and ``mmrl data check`` open media with."""
    return partial(
        open_media,
        min_pixels=limits.min_pixels,
        max_pixels=limits.max_pixels,
        sample_fps=limits.fps,
        source_fps=limits.source_fps,
        max_frames=limits.max_frames,
    )
