"""Pictures as upright RGB images: opening, converting, and refusing what is damaged. Used by every modality that sees.

Works on references as `mmrl.data` leaves them (paths, bytes, opened objects, arrays); this module knows no model.
"""

from __future__ import annotations

import math
import os
import struct
from collections.abc import Sequence
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image, ImageOps, UnidentifiedImageError

from mmrl.data_files import RowError
from mmrl.data_media import MediaRoot, resolve_medium

MAX_ASPECT_RATIO = 200
"""Longer side over shorter side; the limit of qwen_vl_utils."""


def open_image(ref: Any) -> Image.Image:
    """An upright RGB image from a path, bytes, data URI, PIL image or uint8/uint16 array ``[h, w]``, ``[h, w, 3 or 4]``.

    Transparency is put on white, 16-bit grey is scaled by 1/257, animations give their first frame.
    """
    name = name_of(ref)
    try:
        image = _to_rgb(ImageOps.exif_transpose(_decode(ref, name)), name)
    except UnidentifiedImageError as error:
        detail = (
            f"{name}: no decoder knows these bytes, which start with {_start_of(ref)!r}; expected PNG, JPEG, WebP or similar."
        )
        raise RowError("image", "not an image", detail) from error
    except Image.DecompressionBombError as error:
        raise RowError("image", "image too large", f"{name}: {error} Save it smaller.") from error
    except RowError:
        raise
    except (OSError, SyntaxError, ValueError, TypeError, struct.error) as error:  # what Pillow raises for broken files
        raise RowError("image", "damaged image", f"{name}: {error}; save the file again.") from error
    width, height = image.size
    ratio = max(width, height) / min(width, height)
    if ratio > MAX_ASPECT_RATIO:
        detail = f"{name}: {width}x{height} is {ratio:.0f} to 1; expected at most {MAX_ASPECT_RATIO} to 1: crop it."
        raise RowError("image", "aspect ratio over 200", detail)
    return image


def stack_frames(frames: Sequence[Image.Image]) -> np.ndarray:
    """Frames of one video, ``[F, height, width, 3]`` uint8; refused when they differ in size."""
    shapes = sorted({frame.size for frame in frames})
    if len(shapes) > 1:
        found = " and ".join(f"{width}x{height}" for width, height in shapes)
        raise RowError("video", "frames differ in size", f"found {found} in one video; expected one size.")
    return np.stack([np.asarray(frame) for frame in frames])


def check_rate(fps: Any, what: str) -> None:
    """Refuse a rate that is no number above 0; None is one that was not given."""
    if fps is not None and not (isinstance(fps, (int, float)) and math.isfinite(fps) and fps > 0):
        raise RowError("video", "bad fps", f"{what} is {fps!r}; expected frames per second above 0.")


def _decode(ref: Any, name: str) -> Image.Image:
    if isinstance(ref, Image.Image):
        return ref
    if isinstance(ref, np.ndarray):
        return _from_array(ref, name)
    image = Image.open(BytesIO(read_bytes(ref, "image", name)))
    image.load()
    return image


def read_bytes(ref: Any, kind: str, name: str) -> bytes:
    """The bytes of a file or of a reference that holds them; ``name`` is for the error."""
    ref = local_reference(ref, kind)
    if not isinstance(ref, bytes):
        ref = Path(ref).read_bytes()
    if not ref:
        raise RowError(kind, "empty file", f"{name}: holds 0 bytes; expected {kind} data.")
    return ref


def local_reference(ref: Any, kind: str) -> str | bytes:
    """An absolute path that exists, or bytes."""
    if isinstance(ref, (bytearray, memoryview)):
        return bytes(ref)
    if isinstance(ref, os.PathLike):
        ref = os.fspath(ref)
    if not isinstance(ref, (str, bytes)):
        raise RowError(kind, "wrong type", f"found {type(ref).__name__}; expected a path, bytes or an opened {kind}.")
    return ref if isinstance(ref, bytes) else resolve_medium(ref, kind, kind, MediaRoot(Path.cwd(), allow_outside=True))


def _from_array(pixels: np.ndarray, name: str) -> Image.Image:
    shape_fits = pixels.ndim == 2 or (pixels.ndim == 3 and pixels.shape[2] in (3, 4))
    if not shape_fits or pixels.dtype not in (np.uint8, np.uint16) or 0 in pixels.shape:
        expected = "uint8 or uint16 [height, width] or [height, width, 3 or 4]"
        raise RowError("image", "wrong type", f"{name}: found {pixels.dtype} {list(pixels.shape)}; expected {expected}.")
    if pixels.dtype == np.uint16:
        pixels = _to_8_bit(pixels)
    return Image.fromarray(pixels)


def _to_8_bit(pixels: np.ndarray) -> np.ndarray:
    return np.rint(pixels / 257).astype(np.uint8)  # 65535 is 255 * 257: white stays white


def _to_rgb(image: Image.Image, name: str) -> Image.Image:
    if image.mode == "I" or image.mode.startswith("I;16"):  # what Pillow makes of 16-bit grey; convert() would clip it to white
        grey = np.asarray(image)
        if grey.min() < 0 or grey.max() > 65535:
            detail = f"{name}: 32-bit pixels from {grey.min()} to {grey.max()}; expected 0 to 65535: rescale them."
            raise RowError("image", "unsupported pixel format", detail)
        return Image.fromarray(_to_8_bit(grey)).convert("RGB")
    if image.mode == "F":
        raise RowError(
            "image", "unsupported pixel format", f"{name}: float pixels have no known white; save it with 8 or 16 bits."
        )
    if image.has_transparency_data:
        rgba = image.convert("RGBA")
        return Image.alpha_composite(Image.new("RGBA", rgba.size, "white"), rgba).convert("RGB")
    return image.convert("RGB")


def name_of(ref: Any) -> str:
    """A medium in words, for errors."""
    if isinstance(ref, (bytes, bytearray, memoryview)):
        return f"{len(ref)} bytes"
    if isinstance(ref, str):
        return ref if len(ref) <= 200 else f"{ref[:40]}..."
    return os.fspath(ref) if isinstance(ref, os.PathLike) else type(ref).__name__


def _start_of(ref: Any) -> bytes:
    return read_bytes(ref, "image", "")[:16]
