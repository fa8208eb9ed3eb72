"""Pixels of awkward images and videos (cases M5, M8, M9, M10) and the sizes of methods/vision.md 0.4."""

import base64
import io
import json
import re

import av
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from mmrl.data import DatasetConfig
from mmrl.data_check import check_dataset
from mmrl.data_files import RowError
from mmrl.errors import ConfigError
from vision.media import fit, fitted_size, open_image, open_media, open_video

LIMITS = {"min_pixels": 28 * 28, "max_pixels": 100 * 28 * 28}
VIDEO = {**LIMITS, "sample_fps": 2.0}


def encoded(image, **options):
    file = io.BytesIO()
    image.save(file, **options)
    return file.getvalue()


def noise(height, width, channels=3):
    return np.random.default_rng(0).integers(0, 256, (height, width, channels), dtype=np.uint8)


def write_video(path, *, num_frames=40, fps=8, size=(96, 64)):
    """Frame ``i`` is a flat grey of brightness ``6 * i``."""
    with av.open(str(path), "w") as container:
        stream = container.add_stream("mpeg4", rate=fps)
        (stream.width, stream.height), stream.pix_fmt = size, "yuv420p"
        for number in range(num_frames):
            pixels = np.full((size[1], size[0], 3), 6 * number, np.uint8)
            container.mux(stream.encode(av.VideoFrame.from_ndarray(pixels, format="rgb24")))
        container.mux(stream.encode())
    return str(path)


# what an image may come as


@pytest.mark.parametrize("form", ["path", "Path", "file uri", "data uri", "bytes", "PIL", "array"])
def test_every_form_of_a_reference_opens_to_the_same_pixels(tmp_path, form):
    pixels = noise(5, 7)
    image = Image.fromarray(pixels)
    data = encoded(image, format="PNG")
    path = tmp_path / "a b.png"
    path.write_bytes(data)
    ref = {
        "path": str(path),
        "Path": path,
        "file uri": "file://" + str(path).replace(" ", "%20"),
        "data uri": "data:image/png;base64," + base64.b64encode(data).decode(),
        "bytes": data,
        "PIL": image,
        "array": pixels,
    }[form]
    opened = open_image(ref)
    assert (opened.mode, opened.size) == ("RGB", (7, 5))
    np.testing.assert_array_equal(np.asarray(opened), pixels)


@pytest.mark.parametrize(
    "ref", [np.zeros((3, 4), np.float32), np.zeros((3, 4, 2), np.uint8), np.zeros((0, 4), np.uint8), 7, None, {"a": 1}]
)
def test_what_is_no_image_is_refused_by_type(ref):
    with pytest.raises(RowError, match="wrong type"):
        open_image(ref)


# M8: formats


def test_transparency_is_put_on_white():
    # red at alpha 0 is white; at alpha 255 it is red; at 51/255 = 0.2 it is 0.2 * red + 0.8 * white = (255, 204, 204)
    pixels = np.array([[[255, 0, 0, 0], [255, 0, 0, 255], [255, 0, 0, 51]]], np.uint8)
    opened = np.asarray(open_image(encoded(Image.fromarray(pixels, "RGBA"), format="PNG")))
    np.testing.assert_array_equal(opened[0], [[255, 255, 255], [255, 0, 0], [255, 204, 204]])


def test_a_palette_is_looked_up_and_its_transparent_color_is_white():
    image = Image.new("P", (2, 1))
    image.putpalette([10, 20, 30, 40, 50, 60])
    image.putdata([0, 1])
    np.testing.assert_array_equal(np.asarray(open_image(encoded(image, format="PNG")))[0], [[10, 20, 30], [40, 50, 60]])
    see_through = encoded(image, format="PNG", transparency=0)
    np.testing.assert_array_equal(np.asarray(open_image(see_through))[0], [[255, 255, 255], [40, 50, 60]])


@pytest.mark.parametrize("kind", ["PNG", "TIFF", "array", "mode I"])
def test_16_bit_grey_keeps_its_shades(kind):
    # 0, 257 and 65535 are 0, 1 and 255 times 257; 40000 / 257 = 155.6
    grey = np.array([[0, 257, 40000, 65535]], np.uint16)
    ref = {
        "PNG": lambda: encoded(Image.fromarray(grey), format="PNG"),
        "TIFF": lambda: encoded(Image.fromarray(grey), format="TIFF"),
        "array": lambda: grey,
        "mode I": lambda: Image.fromarray(grey.astype(np.int32)),
    }[kind]()
    np.testing.assert_array_equal(np.asarray(open_image(ref))[0], [[v, v, v] for v in (0, 1, 156, 255)])


@pytest.mark.parametrize("image", [Image.new("F", (2, 2), 0.5), Image.new("I", (2, 2), 70_000), Image.new("I", (2, 2), -1)])
def test_pixels_without_a_known_white_are_refused(image):
    with pytest.raises(RowError, match="unsupported pixel format"):
        open_image(image)


def test_a_cmyk_jpeg_becomes_rgb():
    # cyan, magenta and yellow at 0 and black at 0 is white; full magenta and yellow is red
    for cmyk, rgb in (((0, 0, 0, 0), (255, 255, 255)), ((0, 255, 255, 0), (255, 0, 0))):
        opened = open_image(encoded(Image.new("CMYK", (16, 16), cmyk), format="JPEG", quality=95))
        assert opened.mode == "RGB"
        np.testing.assert_allclose(np.asarray(opened)[8, 8], rgb, atol=4)


def test_the_orientation_of_a_photo_is_applied():
    # orientation 6: the camera was turned, so the stored left column is the top row of the picture
    stored = Image.fromarray(np.array([[[255] * 3] * 32 + [[0] * 3] * 32] * 16, np.uint8))  # 64 wide, left half white
    exif = Image.Exif()
    exif[0x0112] = 6
    opened = open_image(encoded(stored, format="JPEG", exif=exif, quality=95))
    assert opened.size == (16, 64)
    pixels = np.asarray(opened)
    assert pixels[8, 8].min() > 250
    assert pixels[56, 8].max() < 5


@pytest.mark.parametrize(("size", "fits"), [((2048, 9), False), ((9, 2048), False), ((2000, 10), True), ((1, 1), True)])
def test_an_aspect_ratio_over_200_is_refused(size, fits):
    data = encoded(Image.new("RGB", size), format="PNG")
    if fits:
        assert open_image(data).size == size
        return
    with pytest.raises(RowError, match=rf"aspect ratio over 200: \d+ bytes: {size[0]}x{size[1]} is 228 to 1"):
        open_image(data)


# M9: damaged files


def damaged_files():
    exif = Image.Exif()
    exif[0x0112] = 6
    photo = encoded(Image.fromarray(noise(64, 64)), format="WEBP", exif=exif)
    return {
        "exif.webp": (photo.replace(b"II*\0", b"XX*\0").replace(b"MM\0*", b"XX\0*"), "damaged image", "not a TIFF file"),
        "cut.jpg": (encoded(Image.fromarray(noise(64, 64)), format="JPEG")[:-117], "damaged image", "image file is truncated"),
        "cut.png": (encoded(Image.fromarray(noise(64, 64)), format="PNG")[:-117], "damaged image", "truncated"),
        "page.png": (b"<!DOCTYPE html><html></html>", "not an image", "no decoder knows these bytes, which start with b'<!DOC"),
        "empty.png": (b"", "empty file", "holds 0 bytes"),
    }


@pytest.mark.parametrize("name", list(damaged_files()))
def test_a_damaged_image_is_refused_with_the_reason_of_the_decoder(tmp_path, name):
    data, reason, words = damaged_files()[name]
    (tmp_path / name).write_bytes(data)
    with pytest.raises(RowError) as caught:
        open_image(str(tmp_path / name))
    assert caught.value.reason == reason
    assert words in caught.value.detail
    assert name in caught.value.detail


def test_a_path_without_a_file_is_refused(tmp_path):
    with pytest.raises(RowError, match=r"missing file: .*lost.png"):
        open_image(str(tmp_path / "lost.png"))


def test_an_image_that_would_fill_the_memory_is_refused(monkeypatch):
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 20)
    with pytest.raises(RowError, match="image too large"):
        open_image(encoded(Image.new("RGB", (10, 10)), format="PNG"))


PHOTO = Image.fromarray(noise(12, 12))
PHOTO.getexif()[0x0112] = 6
FORMATS = [encoded(PHOTO, format=name, exif=PHOTO.getexif()) for name in ("PNG", "JPEG", "WEBP", "TIFF")]
FORMATS += [encoded(PHOTO, format=name) for name in ("GIF", "BMP")]


@pytest.mark.filterwarnings("ignore::UserWarning")
@settings(max_examples=200)
@given(
    data=st.sampled_from(FORMATS), edits=st.lists(st.tuples(st.integers(0, 400), st.integers(0, 255)), min_size=1, max_size=4)
)
def test_any_damage_to_a_file_ends_in_pixels_or_a_refusal(data, edits):
    damaged = bytearray(data)
    for position, value in edits:
        damaged[position % len(damaged)] = value
    try:
        image = open_image(bytes(damaged))
    except RowError as error:
        assert error.reason
    else:
        assert image.mode == "RGB"


def test_a_check_reports_every_damaged_file_of_a_dataset(tmp_path):
    for name, (data, *_) in damaged_files().items():
        (tmp_path / name).write_bytes(data)
    (tmp_path / "wide.png").write_bytes(encoded(Image.new("RGB", (2048, 9)), format="PNG"))
    (tmp_path / "good.png").write_bytes(encoded(Image.new("RGB", (1, 1)), format="PNG"))
    names = ["good.png", *damaged_files(), "wide.png", "lost.png"]
    rows = [{"prompt": "?", "images": ["good.png", name, "good.png"]} for name in names]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))

    def opener(kind, ref):
        return open_media(kind, ref, **VIDEO)

    report = check_dataset(DatasetConfig(path="rows.jsonl"), base_dir=tmp_path, open_media=opener)
    assert [(problem.row, problem.field, problem.reason) for problem in report.problems] == [
        (2, "images[1]", "damaged image"),
        (3, "images[1]", "damaged image"),
        (4, "images[1]", "damaged image"),
        (5, "images[1]", "not an image"),
        (6, "images[1]", "empty file"),
        (7, "images[1]", "aspect ratio over 200"),
        (8, "images[1]", "missing file"),
    ]


def test_a_sound_is_refused_by_modality():
    with pytest.raises(RowError, match="audio: modality not supported"):
        open_media("audio", b"sound", **VIDEO)


# sizes


@pytest.mark.parametrize(
    ("height", "width", "max_pixels", "fitted", "tokens"),
    [  # methods/vision.md 0.4
        (512, 1024, 602_112, (504, 1036), 666),
        (1080, 1920, 1_003_520, (728, 1316), 1222),
        (1080, 1920, 501_760, (504, 924), 594),
    ],
)
def test_sizes_match_the_worked_oracles(height, width, max_pixels, fitted, tokens):
    image = fit(Image.new("RGB", (width, height)), min_pixels=3136, max_pixels=max_pixels)
    assert (image.height, image.width) == fitted
    assert fitted[0] * fitted[1] == tokens * 28 * 28


@given(height=st.integers(1, 3000), width=st.integers(1, 3000), tokens=st.integers(4, 400), factor=st.sampled_from([28, 32]))
def test_a_fitted_size_is_whole_tokens_within_the_bounds_and_fits_again_unchanged(height, width, tokens, factor):
    bounds = {"min_pixels": 4 * factor**2, "max_pixels": tokens * factor**2, "factor": factor}
    try:
        fitted = fitted_size(height, width, **bounds)
    except RowError:
        # 64 tokens at 4 to 1 are 4 x 16, and rounding down leaves 3 x 15 or more; 4 tokens are 1 x 4, rounded up 2 x 5 or less
        assert tokens < 64 or max(height, width) / min(height, width) > 4
        return
    assert fitted[0] % factor == fitted[1] % factor == 0
    assert bounds["min_pixels"] <= fitted[0] * fitted[1] <= bounds["max_pixels"]
    assert fitted_size(*fitted, **bounds) == fitted


@pytest.mark.parametrize(
    ("height", "width", "max_tokens", "becomes"),
    [(1, 2, 4, "84x56"), (42, 71, 4, "56x28"), (28 * 150, 28, 100, "0x3416")],  # sqrt(100 * 150) = 122.5 tokens high
)
def test_bounds_that_no_size_meets_are_refused(height, width, max_tokens, becomes):
    with pytest.raises(RowError, match=f"no size within the pixel bounds: {width}x{height} becomes {becomes}"):
        fitted_size(height, width, min_pixels=4 * 784, max_pixels=max_tokens * 784)


def test_pixel_bounds_in_the_wrong_order_are_a_config_error():
    with pytest.raises(ConfigError, match="min_pixels is 100 and max_pixels 50"):
        fitted_size(10, 10, min_pixels=100, max_pixels=50)


def test_fitting_gives_the_pixels_of_qwen_vl_utils():
    from qwen_vl_utils.vision_process import fetch_image

    image = Image.fromarray(noise(45, 130))
    ours = fit(image, **LIMITS)
    theirs = fetch_image({"image": image, **LIMITS})
    np.testing.assert_array_equal(np.asarray(ours), np.asarray(theirs))


# M10: video


def test_a_video_is_sampled_at_the_rate_that_was_asked_for(tmp_path):
    # 40 frames at 8 fps are 5 s. 4 fps: 20 frames. 1 fps: 5 frames, made even: 4, which is 4 / 40 * 8 = 0.8 fps.
    path = write_video(tmp_path / "a.mp4")
    slow, fast = (open_video(path, **LIMITS, sample_fps=fps) for fps in (1.0, 4.0))
    assert (len(slow.frames), slow.fps) == (4, pytest.approx(0.8))
    assert (len(fast.frames), fast.fps) == (20, pytest.approx(4.0))
    # evenly over 0..39: 0, 13, 26, 39
    assert slow.metadata == {"fps": 8.0, "frames_indices": [0, 13, 26, 39], "total_num_frames": 40}
    brightness = slow.frames.float().mean(dim=(1, 2, 3))
    torch.testing.assert_close(brightness, torch.tensor([0.0, 78.0, 156.0, 234.0]), atol=3, rtol=0)


def test_frames_are_whole_tokens_of_bytes(tmp_path):
    video = open_video(write_video(tmp_path / "a.mp4"), **VIDEO)
    # 96 x 64 pixels are 3.4 x 2.3 tokens of 28: 84 x 56
    assert (video.frames.shape, video.frames.dtype) == ((10, 3, 56, 84), torch.uint8)


def test_the_bytes_of_a_video_give_what_its_file_gives(tmp_path):
    path = write_video(tmp_path / "a.mp4")
    from_path, from_bytes = open_video(path, **VIDEO), open_video((tmp_path / "a.mp4").read_bytes(), **VIDEO)
    assert from_path.metadata == from_bytes.metadata
    assert torch.equal(from_path.frames, from_bytes.frames)


@pytest.mark.parametrize("fps", [1.0, 2.0, 4.0])
def test_sampling_gives_the_frames_of_qwen_vl_utils_with_decord(tmp_path, monkeypatch, fps):
    from qwen_vl_utils import vision_process

    monkeypatch.setattr(vision_process, "get_video_reader_backend", lambda: "decord")
    path = write_video(tmp_path / "a.mp4", num_frames=37)
    element = {"video": path, "fps": fps, **LIMITS}
    (frames, metadata), sample_fps = vision_process.fetch_video(
        element, return_video_sample_fps=True, return_video_metadata=True
    )
    ours = open_video(path, **LIMITS, sample_fps=fps)
    assert ours.fps == pytest.approx(sample_fps)
    assert ours.metadata == {key: metadata[key] for key in ours.metadata}
    assert torch.equal(ours.frames.float(), frames)


def test_a_row_may_give_the_rate_of_one_video(tmp_path):
    path = write_video(tmp_path / "a.mp4")
    assert open_video({"video": path, "fps": 4}, **VIDEO).fps == pytest.approx(4.0)


def test_frame_bounds_hold(tmp_path):
    path = write_video(tmp_path / "a.mp4")
    assert len(open_video(path, **VIDEO, max_frames=6).frames) == 6
    assert len(open_video(path, **LIMITS, sample_fps=0.1, min_frames=8).frames) == 8


def test_a_list_of_frames_needs_a_rate(tmp_path):
    frames = [Image.new("RGB", (56, 28), (shade, shade, shade)) for shade in (0, 100, 200)]
    with pytest.raises(RowError, match="missing fps: a list of 3 frames does not say"):
        open_video(frames, **VIDEO)
    own, configured = open_video({"video": frames, "fps": 4}, **VIDEO), open_video(frames, **VIDEO, source_fps=1.0)
    assert (own.fps, configured.fps) == (4.0, 1.0)
    # an odd number is made even by repeating the last frame
    assert own.frames.shape == (4, 3, 28, 56)
    assert own.frames[:, 0, 0, 0].tolist() == [0, 100, 200, 200]
    assert torch.equal(own.frames, configured.frames)


def test_a_file_without_a_rate_needs_one(tmp_path, monkeypatch):
    import decord

    path = write_video(tmp_path / "a.mp4")
    monkeypatch.setattr(decord.VideoReader, "get_avg_fps", lambda reader: float("nan"))
    with pytest.raises(RowError, match=r"missing fps: .*a.mp4 does not say"):
        open_video(path, **VIDEO)
    # 40 frames at 10 fps are 4 s, so 2 fps takes 8 of them
    video = open_video(path, **VIDEO, source_fps=10.0)
    assert (len(video.frames), video.fps) == (8, pytest.approx(2.0))


@pytest.mark.parametrize("fps", [0, -1, float("nan"), "2"])
def test_a_rate_that_is_none_is_refused(fps):
    with pytest.raises(RowError, match="bad fps"):
        open_video({"video": [Image.new("RGB", (28, 28))], "fps": fps}, **VIDEO)


def test_a_video_that_cannot_be_used_is_refused_with_a_reason(tmp_path):
    write_video(tmp_path / "whole.mp4")
    whole = (tmp_path / "whole.mp4").read_bytes()
    cases = {
        "page.mp4": (b"<html>", "not a readable video"),
        "cut.mp4": (whole[: len(whole) // 2], "not a readable video"),
        "empty.mp4": (b"", "empty file"),
    }
    for name, (data, reason) in cases.items():
        (tmp_path / name).write_bytes(data)
        with pytest.raises(RowError, match=rf"video: {reason}: .*{re.escape(name)}"):
            open_video(str(tmp_path / name), **VIDEO)
    with pytest.raises(RowError, match="video: missing file"):
        open_video(str(tmp_path / "lost.mp4"), **VIDEO)
    with pytest.raises(RowError, match=r"video: number of frames: .*one.mp4: 1 frames"):
        open_video(write_video(tmp_path / "one.mp4", num_frames=1), **VIDEO)


def test_frames_that_make_no_video_are_refused():
    small, large = Image.new("RGB", (28, 28)), Image.new("RGB", (56, 28))
    for frames, reason in (([small, large], "frames differ in size: found 28x28 and 56x28"), ([small] * 5, "number of frames")):
        with pytest.raises(RowError, match=reason):
            open_video({"video": frames, "fps": 1}, **VIDEO, max_frames=4)
