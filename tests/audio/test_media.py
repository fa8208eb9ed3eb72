"""Sounds as people bring them: formats, rates, channels, and everything that has to be refused."""

import io
from pathlib import Path

import numpy as np
import pytest
import soundfile

from audio.adapter import media_opener
from audio.config import AudioRolloutConfig
from audio.media import AudioClip, ClipLimits, open_clip
from mmrl.chat import media_parts
from mmrl.data import DatasetConfig, read_tasks
from mmrl.data_check import check_dataset
from mmrl.data_files import RowError
from mmrl.errors import DataError

LIMITS = ClipLimits()
FORMATS = [
    ("WAV", "PCM_16"),
    ("WAV", "PCM_U8"),
    ("WAV", "FLOAT"),
    ("FLAC", "PCM_24"),
    ("OGG", "VORBIS"),
    ("MP3", "MPEG_LAYER_III"),
]
SOUNDS = Path("/usr/share/sounds")


def sine(seconds=1.0, rate=16_000, hertz=440.0, level=0.5):
    return (level * np.sin(2 * np.pi * hertz * np.arange(round(seconds * rate)) / rate)).astype(np.float32)


def file_of(samples, rate=16_000, format="WAV", subtype="PCM_16"):
    buffer = io.BytesIO()
    soundfile.write(buffer, samples, rate, format=format, subtype=subtype)
    return buffer.getvalue()


def strongest(clip):
    spectrum = np.abs(np.fft.rfft(clip.samples * np.hanning(len(clip.samples))))
    return np.fft.rfftfreq(len(clip.samples), 1 / clip.rate)[spectrum.argmax()]


@pytest.mark.parametrize(("format", "subtype"), FORMATS)
@pytest.mark.parametrize("rate", [8_000, 44_100])
def test_files_are_decoded_mixed_down_and_resampled(format, subtype, rate, tmp_path):
    stereo = np.stack([sine(rate=rate), np.zeros(rate, np.float32)], axis=1)
    data = file_of(stereo, rate, format, subtype)
    path = tmp_path / "clip.bin"
    path.write_bytes(data)
    for ref in (data, str(path), path):
        clip = open_clip(ref, rate=16_000, limits=LIMITS)
        assert clip.rate == 16_000 and clip.samples.dtype == np.float32 and clip.samples.ndim == 1
        assert abs(clip.seconds - 1.0) < 0.01
        assert abs(strongest(clip) - 440) < 2
        assert abs(np.abs(clip.samples[4000:12000]).max() - 0.25) < 0.03  # the mean of a loud and a silent channel


def test_arrays_of_any_layout_and_sample_format_mean_the_same():
    mono = sine(0.5)
    integers = np.round(mono * 32768).astype(np.int16)
    stereo = np.stack([mono, mono])
    refs = [
        AudioClip(mono, 16_000), (mono, 16_000), (mono.astype(np.float64), 16_000), (integers, 16_000), (stereo, 16_000),
        (stereo.T, 16_000), {"array": mono, "sampling_rate": 16_000}, {"array": mono.tolist(), "sampling_rate": 16_000},
    ]  # fmt: skip
    for ref in refs:
        np.testing.assert_allclose(open_clip(ref, rate=16_000, limits=LIMITS).samples, mono, atol=1e-4)


def test_a_rate_of_none_keeps_the_clips_own():
    assert open_clip(file_of(sine(rate=8_000), 8_000), rate=None, limits=LIMITS).rate == 8_000


def test_a_clip_survives_being_written_as_wav():
    clip = AudioClip(np.clip(sine(0.3, level=0.9), -1, 1), 16_000)
    np.testing.assert_allclose(open_clip(clip.to_wav(), rate=16_000, limits=LIMITS).samples, clip.samples, atol=1e-4)


BAD = {
    "empty file": (b"", "empty file: 0 bytes: holds 0 bytes"),
    "not a sound": (b"<html>no</html>", "not a readable sound: 15 bytes: Format not recognised; the file starts with b'<html>"),
    "no samples": (file_of(sine(0.0)), "empty clip: .* holds 0 samples"),
    "0.02 s": (file_of(sine(0.02)), r"clip too short: .* 0\.020 s; expected 0\.1 s or more"),
    "31 s": (file_of(sine(31)), r"clip too long: .* 31\.00 s, the limit is 30 s"),
    "cut wav": (file_of(sine())[:-117], "damaged sound: .* ends 117 bytes before the size that it declares"),
    "cut flac": (file_of(sine(), format="FLAC")[:-117], "not a readable sound|damaged sound"),
    "cut mp3": (file_of(sine(), format="MP3", subtype="MPEG_LAYER_III")[:-1000], r"damaged sound: .* could be decoded"),
    "cut ogg": (file_of(sine(), format="OGG", subtype="VORBIS")[:-117], "empty clip|damaged sound|not a readable sound"),
    "nan": ((np.array([0.1, np.nan] * 4000, np.float32), 16_000), "samples that are not numbers: .* 4000 of 8000 samples"),
    "inf file": (file_of(np.full(8000, np.inf, np.float32), subtype="FLOAT"), "samples that are not numbers"),
    "silence": (file_of(np.zeros(8000, np.float32)), "silent clip: .* without any sound; mend the file"),
    "channels cancel": ((np.stack([sine(), -sine()]), 16_000), "without any sound once its channels are averaged"),
    "no rate": ((sine(), 0), "a whole rate above 0"),
    "no array": (sine(), "wrong type: found ndarray; expected a path, bytes"),
    "three axes": ((np.zeros((2, 2, 2)), 16_000), r"wrong type: .* float64 \[2, 2, 2\]"),
    "missing": ("nowhere.wav", "missing file"),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD)
def test_unusable_sounds_are_refused_with_what_was_found(name):
    ref, message = BAD[name]
    with pytest.raises(RowError, match=message):
        open_clip(ref, rate=16_000, limits=LIMITS)


def test_long_clips_are_cut_only_when_asked_and_long_files_are_not_decoded_whole():
    long = sine(40, rate=8_000)
    cut = open_clip(file_of(long, 8_000), rate=16_000, limits=ClipLimits(max_seconds=2.5, too_long="cut"))
    assert cut.seconds == 2.5
    np.testing.assert_allclose(open_clip((long, 8_000), rate=8_000, limits=ClipLimits(too_long="cut")).samples, long[:240_000])


def test_silence_is_taken_when_asked_for():
    clip = open_clip((np.zeros(8000, np.float32), 16_000), rate=16_000, limits=ClipLimits(allow_silence=True))
    assert clip.seconds == 0.5 and not clip.samples.any()


def test_streamed_wav_files_without_a_size_are_read():
    data = bytearray(file_of(sine()))
    data[4:8] = b"\xff\xff\xff\xff"
    assert abs(open_clip(bytes(data), rate=16_000, limits=LIMITS).seconds - 1) < 0.01


def test_real_recordings_of_the_system_are_read():
    files = sorted(file for pattern in ("*.oga", "*.ogg", "*.wav") for file in SOUNDS.rglob(pattern))[:5]
    if not files:
        pytest.skip(f"no recordings under {SOUNDS} (Debian: sound-theme-freedesktop, alsa-utils)")
    for file in files:
        clip = open_clip(file, rate=16_000, limits=ClipLimits(min_seconds=0.01, max_seconds=60))
        assert clip.rate == 16_000 and np.isfinite(clip.samples).all() and np.abs(clip.samples).max() > 0.01


def test_a_data_check_reports_every_bad_sound_at_once(tmp_path):
    good = file_of(np.stack([sine(rate=44_100)] * 2, axis=1), 44_100)
    clips = {
        "good": good,
        "empty": b"",
        "page": b"<html>",
        "short": BAD["0.02 s"][0],
        "long": BAD["31 s"][0],
        "cut": BAD["cut wav"][0],
    }
    lines = []
    for name, data in clips.items():
        (tmp_path / f"{name}.wav").write_bytes(data)
        lines.append(f'{{"prompt": "<audio>?", "answer": "1", "audio": "{name}.wav"}}')
    (tmp_path / "rows.jsonl").write_text("\n".join(lines))
    report = check_dataset(DatasetConfig(path="rows.jsonl"), base_dir=tmp_path, open_media=media_opener(AudioRolloutConfig()))
    assert [(problem.row, problem.field, problem.reason) for problem in report.problems] == [
        (2, "audios[0]", "empty file"), (3, "audios[0]", "not a readable sound"), (4, "audios[0]", "clip too short"),
        (5, "audios[0]", "clip too long"), (6, "audios[0]", "damaged sound"),
    ]  # fmt: skip


def test_rows_with_sounds_become_prompts_and_errors_name_the_row(tmp_path, make_adapter):
    (tmp_path / "a.wav").write_bytes(file_of(sine(0.5)))
    (tmp_path / "b.wav").write_bytes(b"nothing")
    rows = '{"prompt": "how many?", "audios": ["a.wav"], "answer": "1"}\n{"prompt": "?", "audios": ["b.wav"], "answer": "1"}\n'
    (tmp_path / "rows.jsonl").write_text(rows)
    tasks = read_tasks(DatasetConfig(path="rows.jsonl"), base_dir=tmp_path)
    frontend = make_adapter().frontend
    [prompt] = frontend.encode([tasks[0]])
    assert prompt["input_features"].shape == (1, 128, 50)
    with pytest.raises(DataError, match=r"rows\.jsonl:2: audio: not a readable sound"):
        frontend.encode([tasks[1]])


def test_a_video_of_a_row_may_bring_its_sound_as_a_file(tmp_path):
    for name in ("v.mp4", "a.wav"):
        (tmp_path / name).write_bytes(b"x")
    (tmp_path / "rows.jsonl").write_text(
        '{"prompt": "?", "videos": [{"video": "v.mp4", "fps": 2, "audio": "a.wav"}], "answer": "1"}'
    )
    [(kind, ref)] = media_parts(read_tasks(DatasetConfig(path="rows.jsonl"), base_dir=tmp_path)[0])
    assert (kind, ref) == ("video", {"video": str(tmp_path / "v.mp4"), "fps": 2, "audio": str(tmp_path / "a.wav")})
