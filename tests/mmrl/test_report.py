"""The report of synthetic run directories, as data and, where a Chromium is installed, as a rendered page."""

import base64
import html
import io
import json
import math
import re
import shutil
import subprocess
import wave

import numpy as np
import pytest
from PIL import Image

from mmrl.errors import DataError
from mmrl.report import write_report
from mmrl.report_audio import indexed_png, mel_filters, mel_spectrogram, read_wav, sound_svg
from mmrl.report_charts import MAX_POINTS
from mmrl.report_media import MAX_TEXT
from mmrl.statistics import difference_interval, wilson_interval

CONFIG = """\
modality: vision
name: demo
seed: 7
algorithm: {name: dapo, clip_high: 0.28}
policy: {name: tiny-qwen2.5-vl}
trainer: {num_steps: 40}
"""
SCRIPT = "</script><script>document.title = 'owned'</script><!--"


def write_lines(path, rows):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def proportion(k, n):
    low, high = wilson_interval(k, n)
    return {"k": k, "n": n, "mean": k / n, "low": low, "high": high}


def write_evaluation(run, train_step, overall, **domains):
    tree = {"train_step": train_step, "split": "eval", "metric": "accuracy", "overall": overall, "domains": domains}
    (run / "eval").mkdir(exist_ok=True)
    (run / "eval" / f"step_{train_step:06d}.json").write_text(json.dumps(tree), encoding="utf-8")


def rollout(train_step, row, **changes):
    return {
        "train_step": train_step,
        "task_id": f"task-{row // 2}",
        "domain": "odd" if row // 2 % 2 else "even",
        "group": row // 2,
        "seed": 100 + row,
        "prompt": "Which digit is shown?",
        "completion": f"<answer>{row}</answer>",
        "reference": "3",
        "reward": row / 4,
        "reward_terms": {"accuracy": float(row % 2), "bonus": None},
        "advantage": 1.0 if row % 2 else -1.0,
        "stop_reason": "stop",
        "num_decisions": 12,
        "media": [],
        **changes,
    }


def png(shade):
    file = io.BytesIO()
    Image.new("L", (28, 28), shade).save(file, "PNG")
    return file.getvalue()


def wav():
    file = io.BytesIO()
    with wave.open(file, "wb") as sound:
        sound.setnchannels(1)
        sound.setsampwidth(2)
        sound.setframerate(8000)
        sound.writeframes(bytes(1600))
    return file.getvalue()


def sweep_wav(seconds=0.5, rate=8000):
    """A tone that rises from 200 to 3000 Hz, then as long a silence."""
    hertz = np.geomspace(200, 3000, round(seconds * rate))
    samples = np.concatenate([0.5 * np.sin(2 * np.pi * np.cumsum(hertz) / rate), np.zeros(len(hertz))])
    file = io.BytesIO()
    with wave.open(file, "wb") as sound:
        sound.setnchannels(1)
        sound.setsampwidth(2)
        sound.setframerate(rate)
        sound.writeframes((samples * 32767).astype("<i2").tobytes())
    return file.getvalue()


def write_samples(run, train_step, rows, media=()):
    """Rows of one step; ``media`` holds (name, kind, bytes) shown by every row."""
    (run / "samples" / "media").mkdir(parents=True, exist_ok=True)
    shown = []
    for name, kind, content in media:
        (run / "samples" / "media" / name).write_bytes(content)
        shown.append({"kind": kind, "path": f"samples/media/{name}", "caption": f"a caption of {name}"})
    write_lines(run / "samples" / f"step_{train_step:06d}.jsonl", [{**row, "media": row["media"] or shown} for row in rows])


@pytest.fixture
def empty_run(tmp_path):
    run = tmp_path / "demo"
    run.mkdir()
    (run / "config.yaml").write_text(CONFIG, encoding="utf-8")
    return run


@pytest.fixture
def run(empty_run):
    steps = range(1, 41)
    metrics = [{"train_step": t, "reward/mean": t / 40, "loss": math.sin(t), "ratio/clip_low": 0.0} for t in steps]
    write_lines(empty_run / "metrics.jsonl", [{**row, "completion/length": 20 - row["train_step"] / 4} for row in metrics])
    timing = [{"train_step": t, "rollout_s": 200.0, "update_s": 100.0, "step_s": 400.0} for t in steps]
    write_lines(empty_run / "timing.jsonl", timing)
    write_evaluation(empty_run, 0, proportion(20, 100), even=proportion(12, 50), odd=proportion(8, 50))
    write_evaluation(empty_run, 20, proportion(50, 100), even=proportion(25, 50), odd=proportion(25, 50))
    write_evaluation(empty_run, 40, proportion(90, 100), even=proportion(48, 50), odd=proportion(42, 50))
    media = [("step_000040.png", "image", png(200)), ("step_000040.wav", "audio", wav())]
    rows = [rollout(40, row) for row in range(4)]
    rows[1]["completion"] = f"I am sure. {SCRIPT}"
    rows[2]["completion"] = "unbroken" * 300
    write_samples(empty_run, 10, [rollout(10, row) for row in range(4)])
    write_samples(empty_run, 40, rows, media)
    return empty_run


def mp4(shade, seconds=1.0):
    """A video that browsers play."""
    av = pytest.importorskip("av")
    file = io.BytesIO()
    with av.open(file, "w", format="mp4") as container:
        name = next(name for name in ("libx264", "libopenh264", "libvpx-vp9") if name in av.codecs_available)
        stream = container.add_stream(name, rate=10)
        stream.width, stream.height, stream.pix_fmt = 64, 48, "yuv420p"
        for _ in range(round(10 * seconds)):
            container.mux(stream.encode(av.VideoFrame.from_ndarray(np.full((48, 64, 3), shade, np.uint8), format="rgb24")))
        container.mux(stream.encode())
    return file.getvalue()


def write_rollouts(folder, tasks, **others):
    """LeRobot's ``eval_info.json``; ``tasks`` maps a name to the successes of its episodes. The first two are filmed."""
    per_task = []
    for number, (name, successes) in enumerate(tasks.items()):
        paths = [f"videos/{name}/eval_episode_{i}.mp4" for i in range(min(2, len(successes)))]
        for i, path in enumerate(paths):
            (folder / path).parent.mkdir(parents=True, exist_ok=True)
            (folder / path).write_bytes(mp4(40 + 20 * number + 5 * i, seconds=1 + number))
        metrics = {"successes": successes, "video_paths": [f"/where/it/ran/{folder.name}/{path}" for path in paths]}
        per_task.append({"task_group": name, "task_id": 0, "metrics": metrics})
    tree = {"per_task": per_task, "per_group": {}, "overall": {}, **others}
    (folder / "eval_info.json").write_text(json.dumps(tree), encoding="utf-8")


def write_sweep(folder, **changes):
    folder.mkdir(parents=True, exist_ok=True)
    cells = [{"mass": mass, "friction": friction, "k": 3, "n": 4} for mass in (1, 2) for friction in (0.5, 1)]
    tree = {"axes": {"mass": [1, 2], "friction": [0.5, 1]}, "cells": cells, **changes}
    (folder / "sweep.json").write_text(json.dumps(tree), encoding="utf-8")


LIFT, PUSH = [True, False, True, True], [False, False]


@pytest.fixture
def measured(run):
    """A run whose policy was measured afterwards."""
    gap = {"mean": 0.4, "low": 0.1, "high": 0.6}
    test = {"n": 20, "k": 11, "k_other": 3, "b": 9, "c": 1, "difference": gap}
    per_task = {name: {"success": proportion(k, 20)} for name, k in (("lift", 8), ("push", 3))}
    nothing = {name: {"success": proportion(0, 20)} for name in per_task}
    write_rollouts(
        run / "rollouts" / "final",
        {"lift": LIFT, "push": PUSH},
        comparison={"name": "the policy before", **test, "per_task": {"lift": test, "push": {**test, "b": 0, "c": 0}}},
        intervals={"macro": {"mean": 0.375, "low": 0.1, "high": 0.6}},
        variants={"seen": {"per_task": per_task}, "empty": {"per_task": nothing, "against_seen": {"b": 11, "c": 0}}},
        protocol={"control_hz": 20, "seeds": [7, 26], "policy": {"name": "demo/000040"}},
        notices=["the camera is renamed."],
    )
    write_sweep(run / "rollouts" / "physics")
    return run


def page_of(run):
    return write_report(run).read_text(encoding="utf-8")


def data_of(run):
    """What the page's own script reads."""
    return json.loads(re.search(r'<script type="application/json" id="data">(.*?)</script>', page_of(run), re.S)[1])


def curve_of(data, key):
    return next(curve for curve in data["curves"] if curve["key"] == key)


# --- what the page says ---


def test_the_report_is_one_file_in_the_run_directory(run):
    before = set(run.iterdir())
    path = write_report(run)
    assert path == run / "report.html"
    assert set(run.iterdir()) - before == {path}


def test_the_summary_names_algorithm_policy_length_seed_and_time(run):
    assert data_of(run)["summary"] == {
        "algorithm": "dapo",
        "modality": "vision",
        "policy": "tiny-qwen2.5-vl",
        "steps": 40,
        "seed": 7,
        "seconds": 16000.0,
    }


def test_an_unfinished_run_says_how_far_it_came(run):
    lines = (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines(keepends=True)
    (run / "metrics.jsonl").write_text("".join(lines[:12]), encoding="utf-8")
    assert data_of(run)["summary"]["steps"] == "12 of 40"


def test_held_out_compares_the_first_and_the_last_evaluation_in_every_domain(run):
    held = data_of(run)["held_out"]
    assert held["steps"] == [0, 40]
    assert held["percent"] is True
    assert [row["name"] for row in held["rows"]] == ["all tasks", "even", "odd"]
    odd = held["rows"][2]
    assert (odd["before"]["k"], odd["after"]["k"], odd["after"]["n"]) == (8, 42, 50)
    assert odd["difference"]["mean"] == pytest.approx(0.68)
    ends = difference_interval((0.16, *wilson_interval(8, 50)), (0.84, *wilson_interval(42, 50)))
    assert (odd["difference"]["low"], odd["difference"]["high"]) == pytest.approx(ends)


def test_held_out_shows_means_of_a_metric_that_is_not_yes_or_no(empty_run):
    # k is then the sum of the metric, here 3.0 over 10 tasks: a share of 3 in 10 would be wrong.
    for step, mean in ((0, 0.3), (5, 0.7)):
        write_evaluation(empty_run, step, {"k": 10 * mean, "n": 10, "mean": mean, "low": mean - 0.1, "high": mean + 0.1})
    held = data_of(empty_run)["held_out"]
    assert held["percent"] is False
    assert held["rows"][0]["before"]["k"] is None
    assert held["rows"][0]["difference"]["low"] == pytest.approx(0.4 - math.hypot(0.1, 0.1))


def test_held_out_takes_domains_that_only_one_evaluation_has_and_empty_ones(empty_run):
    nothing = {"k": 0, "n": 0, "mean": None, "low": None, "high": None}
    write_evaluation(empty_run, 0, proportion(1, 2), old=proportion(1, 2), none=nothing)
    write_evaluation(empty_run, 5, proportion(2, 2), new=proportion(2, 2), none=nothing)
    rows = {row["name"]: row for row in data_of(empty_run)["held_out"]["rows"]}
    assert rows["old"]["after"] is None
    assert rows["new"]["before"] is None
    assert rows["none"]["before"] is rows["none"]["difference"] is None


def test_a_single_evaluation_is_not_compared_with_itself(empty_run):
    write_evaluation(empty_run, 0, proportion(1, 4))
    held = data_of(empty_run)["held_out"]
    assert held["steps"] == [0]
    assert held["rows"][0]["after"]["mean"] == 0.25


def test_three_evaluations_draw_a_held_out_curve_with_its_band(run):
    curve = curve_of(data_of(run), "held-out/accuracy")
    assert curve["steps"] == [0, 20, 40]
    assert curve["values"] == [0.2, 0.5, 0.9]
    assert all(low < value < high for low, value, high in zip(curve["low"], curve["values"], curve["high"]))


def test_curves_put_the_reward_first_and_keep_every_value_of_a_short_run(run):
    data = data_of(run)
    assert [curve["key"] for curve in data["curves"]] == [
        "held-out/accuracy", "held-out/accuracy/even", "held-out/accuracy/odd",
        "reward/mean", "loss", "completion/length", "ratio/clip_low",
    ]  # fmt: skip
    assert curve_of(data, "reward/mean")["values"] == [t / 40 for t in range(1, 41)]


def test_smoothing_of_a_straight_line_is_that_line(run):
    # 40 values are averaged over 3; at both ends the window is cut to 2 values.
    smooth = curve_of(data_of(run), "reward/mean")["smooth"]
    assert smooth[1:-1] == pytest.approx([t / 40 for t in range(2, 40)])
    assert (smooth[0], smooth[-1]) == pytest.approx((1.5 / 40, 39.5 / 40))


def test_timing_adds_up_to_the_whole_step(run):
    rows = {row["name"]: row for row in data_of(run)["timing"]}
    assert list(rows) == ["rollout", "update", "other", "whole step"]
    assert rows["rollout"]["mean"] == rows["rollout"]["late"] == 200.0
    assert rows["other"]["total"] == 4000.0
    assert sum(row["share"] for name, row in rows.items() if name != "whole step") == pytest.approx(1.0)


def test_samples_keep_terms_that_do_not_apply_apart_from_zero(run):
    row = data_of(run)["samples"][1]["rows"][0]
    assert row["terms"] == {"accuracy": 0, "bonus": None}
    assert (row["advantage"], row["reward"], row["seed"], row["num_decisions"]) == (-1, 0, 100, 12)


def test_every_domain_has_a_held_out_curve_on_one_scale(run):
    write_evaluation(run, 60, proportion(45, 50), even=proportion(45, 50))
    data = data_of(run)
    odd = curve_of(data, "held-out/accuracy/odd")
    assert (odd["family"], odd["name"], odd["range"]) == ("held-out accuracy", "odd", [0, 1])
    assert odd["steps"] == [0, 20, 40, 60]
    assert odd["values"] == [0.16, 0.5, 0.84, None]  # a gap where it was not measured
    assert odd["low"][0] == pytest.approx(wilson_interval(8, 50)[0], rel=1e-5)


def test_held_out_curves_of_a_metric_that_is_not_yes_or_no_have_no_fixed_scale(empty_run):
    for step in (0, 5, 10):
        write_evaluation(empty_run, step, {"k": 3.5, "n": 10, "mean": 350 + step, "low": 300, "high": 400})
    assert curve_of(data_of(empty_run), "held-out/accuracy")["range"] is None


def test_many_domains_keep_a_bounded_number_of_curves_and_the_page_says_so(empty_run):
    for step in (0, 5, 10):
        write_evaluation(empty_run, step, proportion(1, 2), **{f"d{i:03d}": proportion(1, 2) for i in range(100)})
    data = data_of(empty_run)
    assert len(data["curves"]) == 25
    assert any(note.startswith("Held-out curves of 76 of 100 domains are left out") for note in data["notes"])


# --- rollouts ---


def test_rollouts_of_a_run_are_counted_by_task_with_intervals(measured):
    final, physics = data_of(measured)["rollouts"]
    assert (final["name"], physics["name"]) == ("rollouts/final", "rollouts/physics")
    assert [(row["name"], row["k"], row["n"]) for row in final["rows"]] == [
        ("all episodes", 3, 6), ("mean of tasks", None, 0), ("lift", 3, 4), ("push", 0, 2),
    ]  # fmt: skip
    lift = final["rows"][2]
    assert (lift["low"], lift["high"]) == pytest.approx(wilson_interval(3, 4))
    assert json.loads(final["protocol"])["control_hz"] == 20
    assert final["facts"] == {"policy": "demo/000040", "seeds": "7 to 26", "control": "20 Hz"}
    assert physics["rows"] == []


def test_another_policy_on_the_same_episodes_is_compared_in_pairs(measured):
    comparison = data_of(measured)["rollouts"][0]["comparison"]
    assert comparison["name"] == "the policy before"
    assert [(row["name"], row["b"], row["c"]) for row in comparison["rows"]] == [
        ("all episodes", 9, 1), ("lift", 9, 1), ("push", 0, 0),
    ]  # fmt: skip
    whole = comparison["rows"][0]
    assert (whole["before"]["k"], whole["after"]["k"], whole["p"]) == (3, 11, pytest.approx(22 / 1024))
    assert comparison["rows"][2]["p"] == 1


def test_a_comparison_without_counts_keeps_its_test(tmp_path):
    write_rollouts(tmp_path, {"lift": LIFT}, comparison={"name": "x", "b": 1, "c": 0})
    (row,) = data_of(tmp_path)["rollouts"][0]["comparison"]["rows"]
    assert (row["before"], row["difference"], row["p"]) == (None, None, 1)


def test_other_words_in_the_instruction_stand_side_by_side(measured):
    variants = data_of(measured)["rollouts"][0]["variants"]
    assert variants["names"] == ["seen", "empty"]
    assert [[cell["k"] for cell in row["cells"]] for row in variants["rows"]] == [[8, 0], [3, 0]]
    (test,) = variants["against"]
    assert (test["name"], test["b"], test["c"], test["p"]) == ("empty", 11, 0, pytest.approx(2 / 2**11))


def test_the_first_success_and_failure_of_each_task_are_shown_wherever_they_were_made(measured):
    data = data_of(measured)
    videos = data["rollouts"][0]["videos"]
    assert [video["caption"] for video in videos] == [
        "lift, episode 0: success", "lift, episode 1: failure", "push, episode 0: failure",
    ]  # fmt: skip
    path = videos[0]["path"]
    assert path == "rollouts/final/videos/lift/eval_episode_0.mp4"
    assert data["media"][path].startswith("data:video/mp4;base64,")
    assert any(note.startswith("1 of 4 videos of rollouts/final are left out") for note in data["notes"])


def test_a_sweep_is_a_picture_and_its_cells_have_no_table_of_their_own(measured):
    write_rollouts(measured / "rollouts" / "physics" / "mass_2", {"lift": LIFT})
    data = data_of(measured)
    assert [entry["name"] for entry in data["rollouts"]] == ["rollouts/final", "rollouts/physics"]
    kind, _, content = data["media"][data["rollouts"][1]["sweep"]["path"]].partition(";base64,")
    assert kind == "data:image/svg+xml"
    assert "3/4 [30, 95]" in base64.b64decode(content).decode()


def test_a_folder_of_rollouts_alone_has_a_page(tmp_path):
    write_rollouts(tmp_path / "pick", {"lift": LIFT})
    data = data_of(tmp_path / "pick")
    (entry,) = data["rollouts"]
    assert data["kind"] == "rollouts"
    assert (entry["name"], data["summary"], data["held_out"]) == ("", {}, None)
    assert [(row["name"], row["k"]) for row in entry["rows"]] == [("lift", 3)]
    assert len(data["media"]) == 2


def test_groups_stand_in_where_a_file_has_no_single_episodes(tmp_path):
    groups = {"suite": {"n_episodes": 40, "pc_success": 62.5}}
    (tmp_path / "eval_info.json").write_text(json.dumps({"per_task": [], "per_group": groups}), encoding="utf-8")
    (row,) = data_of(tmp_path)["rollouts"][0]["rows"]
    assert (row["name"], row["k"], row["n"]) == ("suite", 25, 40)


def test_damaged_measurements_are_left_out_and_said(measured):
    (measured / "rollouts" / "final" / "eval_info.json").write_text('{"per_task"', encoding="utf-8")
    write_sweep(measured / "rollouts" / "physics", axes={})
    data = data_of(measured)
    assert all(entry["rows"] == entry["videos"] == [] and entry["sweep"] is None for entry in data["rollouts"])
    assert "rollouts/final/eval_info.json: not readable and left out." in data["notes"]
    assert any("rollouts/physics/sweep.json: sweep: axes" in note for note in data["notes"])


def test_videos_share_the_limit_on_media_and_their_number_is_bounded(measured, monkeypatch):
    size = (measured / "rollouts" / "final" / "videos" / "lift" / "eval_episode_0.mp4").stat().st_size
    monkeypatch.setattr("mmrl.report_media.MAX_MEDIA_BYTES", size + 10)
    data = data_of(measured)
    assert [path for path in data["media"] if path.endswith(".mp4")] == ["rollouts/final/videos/lift/eval_episode_0.mp4"]
    assert any("left out, since the page holds at most" in note for note in data["notes"])
    monkeypatch.setattr("mmrl.report_rollouts.MAX_VIDEOS", 2)
    data = data_of(measured)
    assert len(data["rollouts"][0]["videos"]) == 2
    assert any(note.startswith("2 of 4 videos") for note in data["notes"])


def test_a_video_outside_of_the_folder_is_never_embedded(tmp_path):
    (tmp_path / "secret.mp4").write_bytes(b"secret")
    tasks = [{"task_group": "lift", "metrics": {"successes": [True], "video_paths": [str(tmp_path / "secret.mp4")]}}]
    folder = tmp_path / "pick"
    folder.mkdir()
    (folder / "eval_info.json").write_text(json.dumps({"per_task": tasks}), encoding="utf-8")
    data = data_of(folder)
    assert data["media"] == {}
    assert any("1 media file was not found" in note for note in data["notes"])


# --- safe and self-contained ---


def test_text_of_a_run_cannot_become_markup(run):
    (run / "config.yaml").write_text(CONFIG + f"# {SCRIPT}\n", encoding="utf-8")
    write_samples(run, 41, [rollout(41, 0, prompt=SCRIPT, task_id=SCRIPT, reference=SCRIPT, reward_terms={SCRIPT: 1.0})])
    hostile = run.rename(run.parent / "<b onclick=x>&'")
    page = page_of(hostile)
    assert len(re.findall(r"<script", page)) == len(re.findall(r"</script>", page)) == 2  # the data and our own
    assert "<b onclick" not in page
    assert data_of(hostile)["samples"][-1]["rows"][0]["prompt"] == SCRIPT  # and nothing was lost


def test_the_page_asks_the_network_for_nothing(run):
    page = page_of(run)
    markup = re.sub(r"<script.*?</script>", "", page, flags=re.S)
    assert all(target.startswith("#") for target in re.findall(r"(?:src|href)\s*=\s*[\"']?([^\s\"'>]*)", markup))
    assert not re.search(r"url\(|@import|fetch\(|XMLHttpRequest|import\(", page)
    assert set(re.findall(r"https?://[^\s\"']+", page)) <= {"http://www.w3.org/2000/svg"}  # a namespace, never fetched
    assert "default-src 'none'" in page


def test_media_are_inside_the_page(run):
    media = data_of(run)["media"]
    image, sound = media["samples/media/step_000040.png"], media["samples/media/step_000040.wav"]
    assert image.startswith("data:image/png;base64,")
    assert base64.b64decode(image.partition(",")[2]) == png(200)
    assert re.match(r"data:audio/(x-|vnd\.)?wave?;base64,", sound)


def test_media_of_the_first_and_the_newest_steps_are_kept_and_the_page_says_so(empty_run):
    for step in range(10, 110, 10):
        write_samples(empty_run, step, [rollout(step, 0)], [(f"{step}.png", "image", png(step))])
    data = data_of(empty_run)
    assert set(data["media"]) == {f"samples/media/{step}.png" for step in (10, 60, 70, 80, 90, 100)}
    assert len(data["samples"]) == 10
    assert any(note.startswith("Media of 4 of 10 sample steps are left out") for note in data["notes"])


def test_media_beyond_the_size_limit_are_left_out_oldest_first(empty_run, monkeypatch):
    monkeypatch.setattr("mmrl.report_media.MAX_MEDIA_BYTES", len(png(1)) + 10)
    for step in (1, 2):
        write_samples(empty_run, step, [rollout(step, 0)], [(f"{step}.png", "image", png(step))])
    data = data_of(empty_run)
    assert set(data["media"]) == {"samples/media/2.png"}
    assert any(note.startswith("1 media file is left out") for note in data["notes"])


def test_only_files_of_the_run_directory_are_embedded(empty_run):
    (empty_run.parent / "secret.png").write_bytes(png(9))
    paths = ("../secret.png", str(empty_run.parent / "secret.png"))
    outside = [{"kind": "image", "path": path, "caption": ""} for path in paths]
    write_samples(empty_run, 1, [rollout(1, 0, media=outside)])
    data = data_of(empty_run)
    assert data["media"] == {}
    assert any("2 media files were not found in the run directory" in note for note in data["notes"])


# --- sounds and judges ---


def test_a_wav_file_brings_its_picture_and_other_sounds_do_not(empty_run):
    media = [("a.wav", "audio", sweep_wav()), ("b.wav", "audio", b"RIFFbroken"), ("c.mp3", "audio", b"ID3")]
    write_samples(empty_run, 1, [rollout(1, 0)], media)
    data = data_of(empty_run)
    names = ["a.wav", "a.wav.svg", "b.wav", "c.mp3"]
    assert set(data["media"]) == {f"samples/media/{name}" for name in names}
    kind, _, text = data["media"]["samples/media/a.wav.svg"].partition(",")
    assert kind == "data:image/svg+xml;base64"
    svg = base64.b64decode(text).decode("utf-8")
    assert "1.00 s, mel up to 4 kHz" in svg and "NaN" not in svg


def test_a_mel_spectrogram_shows_where_a_tone_is():
    samples, rate = read_wav(sweep_wav())
    mel = mel_spectrogram(samples, rate)
    first, last = mel[:, 10].argmax(), mel[:, 90].argmax()
    # Band k of 64 is centered at mel (k + 1) / 65 of 2146 mel (4 kHz): 200 Hz is 283 mel, about band 8; 2500 Hz 1704, band 51.
    assert 7 <= first <= 11 and 46 <= last <= 56
    assert mel.max() == 0.0 and (mel[:, -20:] == -70.0).all()  # silence is the floor
    assert mel_filters(16_000, 257).sum(axis=1).min() > 0


def test_a_png_of_levels_is_read_back_by_another_library():
    levels = np.arange(256).reshape(16, 16)
    image = Image.open(io.BytesIO(indexed_png(levels)))
    assert (np.asarray(image) == levels).all()
    grey = np.asarray(image.convert("L")).ravel().astype(int)
    assert (np.diff(grey) >= 0).all() and grey[-1] - grey[0] > 200  # it reads without color


@pytest.mark.parametrize("width", [1, 2, 4])
def test_wav_files_of_every_width_and_of_two_channels_are_read(width):
    file = io.BytesIO()
    with wave.open(file, "wb") as sound:
        sound.setnchannels(2)
        sound.setsampwidth(width)
        sound.setframerate(100)
        whole = {1: np.array([192, 128], "u1"), 2: np.array([16384, 0], "<i2"), 4: np.array([2**30, 0], "<i4")}[width]
        sound.writeframes(whole.tobytes())
    samples, rate = read_wav(file.getvalue())
    assert (samples.tolist(), rate) == ([0.25], 100)  # the mean of 0.5 and 0


def test_sounds_of_no_length_have_no_picture():
    assert sound_svg(b"") is None
    assert sound_svg(b"RIFF") is None
    assert read_wav(sweep_wav(seconds=0.0)) is None


JUDGING = {
    "rubrics": [
        {"id": "S1", "title": "Names the beeps", "polarity": "positive", "weight": 0.75, "bits": [1, 0]},
        {"id": "N1", "title": "Guesses", "polarity": "negative", "weight": 0.25, "bits": [0, 1]},
    ],
    "scores": [0.75, 0.25], "mode": "evolved", "reasons": [],
}  # fmt: skip


def test_what_a_judge_said_of_a_group_stands_once(empty_run):
    write_samples(empty_run, 1, [rollout(1, row, judging=JUDGING if row < 2 else None) for row in range(4)])
    rows = data_of(empty_run)["samples"][0]["rows"]
    assert ["judging" in row for row in rows] == [True, False, False, False]
    judging = rows[0]["judging"]
    assert [rubric["bits"] for rubric in judging["rubrics"]] == [[True, False], [False, True]]
    assert (judging["scores"], judging["mode"]) == ([0.75, 0.25], "evolved")


# --- long, broken and young runs ---


def test_twenty_thousand_steps_stay_a_small_page_and_keep_their_spikes(empty_run):
    noise = np.random.default_rng(0).normal(size=(20_000, 25)).round(6)
    noise[12_345, 3] = 99.0
    names = [f"family/{i}" for i in range(25)]
    rows = [{"train_step": t, **dict(zip(names, row))} for t, row in enumerate(noise.tolist(), start=1)]
    write_lines(empty_run / "metrics.jsonl", rows)
    data = data_of(empty_run)
    assert (empty_run / "report.html").stat().st_size < 1_000_000
    curve = curve_of(data, "family/3")
    assert len(curve["steps"]) == len(curve["values"]) == len(curve["smooth"]) <= MAX_POINTS
    assert (curve["steps"][0], curve["steps"][-1]) == (1, 20_000)
    assert curve["values"][curve["steps"].index(12_346)] == 99


def test_many_sample_steps_keep_the_first_and_the_newest(empty_run):
    for step in range(1, 101):
        write_samples(empty_run, step, [rollout(step, 0)])
    data = data_of(empty_run)
    steps = [entry["step"] for entry in data["samples"]]
    assert len(steps) == len(set(steps)) == 40
    assert steps[0] == 1
    assert steps[-20:] == list(range(81, 101))
    assert any(note.startswith("Samples of 60 of 100 steps are left out") for note in data["notes"])


def test_a_very_long_completion_is_cut_and_says_so(empty_run):
    write_samples(empty_run, 1, [rollout(1, 0, completion="x" * (MAX_TEXT + 5))])
    completion = data_of(empty_run)["samples"][0]["rows"][0]["completion"]
    assert completion == "x" * MAX_TEXT + "\n[5 more characters are in samples/]"


def test_values_that_are_missing_or_not_finite_are_gaps(empty_run):
    values = [1.0, math.nan, None, math.inf, "absent", 2.0]
    rows = [{"train_step": t, "loss": value, "other": 0.5} for t, value in enumerate(values, start=1)]
    del rows[4]["loss"]
    write_lines(empty_run / "metrics.jsonl", rows)
    assert curve_of(data_of(empty_run), "loss")["values"] == [1, None, None, None, None, 2]


def test_smoothing_leaves_out_gaps(empty_run):
    rows = [{"train_step": t, "loss": math.nan if t % 3 else 0.25} for t in range(200)]
    write_lines(empty_run / "metrics.jsonl", rows)
    assert set(curve_of(data_of(empty_run), "loss")["smooth"]) == {0.25}


def test_an_interrupted_last_line_is_left_out_and_said(run):
    with (run / "metrics.jsonl").open("a", encoding="utf-8") as file:
        file.write('{"train_step": 41, "reward/me')
    data = data_of(run)
    assert curve_of(data, "reward/mean")["steps"][-1] == 40
    assert any(note.startswith("metrics.jsonl: 1 line is not readable") for note in data["notes"])


def test_steps_repeated_by_a_resumed_run_count_once(empty_run):
    rows = [{"train_step": t, "loss": float(value)} for t, value in [(1, 1), (2, 2), (3, 3), (2, 20), (3, 30)]]
    write_lines(empty_run / "metrics.jsonl", rows)
    curve = curve_of(data_of(empty_run), "loss")
    assert (curve["steps"], curve["values"]) == ([1, 2, 3], [1, 20, 30])


def test_a_damaged_evaluation_is_left_out_and_said(run):
    (run / "eval" / "step_000060.json").write_text('{"train_step": 60', encoding="utf-8")
    data = data_of(run)
    assert data["held_out"]["steps"] == [0, 40]
    assert "eval/step_000060.json: not readable as an evaluation and left out." in data["notes"]


def test_a_run_without_any_step_still_has_a_page(empty_run):
    data = data_of(empty_run)
    assert data["held_out"] is None
    assert data["curves"] == data["timing"] == data["samples"] == data["notes"] == []
    assert data["config"] == CONFIG


def test_a_config_that_is_not_yaml_does_not_hide_the_curves(run):
    (run / "config.yaml").write_text("a: [", encoding="utf-8")
    data = data_of(run)
    assert data["curves"]
    assert data["summary"] == {"steps": 40, "seconds": 16000.0}
    assert any(note.startswith("config.yaml is not YAML") for note in data["notes"])


def test_a_folder_that_is_not_a_run_is_refused(tmp_path):
    with pytest.raises(DataError, match="holds none of config"):
        write_report(tmp_path)


# --- rendered ---

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome", "chrome"))), None)
rendered = pytest.mark.skipif(CHROMIUM is None, reason="no chromium or chrome on PATH to render the page")

PHONE = """<!doctype html><iframe style="width: 390px; height: 800px" srcdoc="{page}"></iframe>
<pre id="seen"></pre>
<script>
onload = () => {{
  const page = document.querySelector("iframe").contentDocument, root = page.documentElement;
  const sideways = () => root.scrollWidth - root.clientWidth;
  const seen = {{ error: root.dataset.error ?? null, ready: root.dataset.ready, title: page.title, sideways: [sideways()] }};
  const curve = page.querySelector("[data-key='reward/mean']"), box = curve.getBoundingClientRect();
  const now = () => curve.closest("figure").querySelector(".now").textContent;
  seen.newest = now();
  curve.dispatchEvent(new PointerEvent("pointermove", {{ clientX: box.left, bubbles: true }}));
  seen.pointed = now();
  seen.elsewhere = page.querySelector("[data-key='completion/length']").closest("figure").querySelector(".now").textContent;
  curve.dispatchEvent(new PointerEvent("pointerleave"));
  seen.left = now();
  const texts = (selector) => [...page.querySelectorAll(selector)].map((node) => node.textContent);
  seen.rollouts = texts(".rollouts .completion .text");
  seen.images = page.querySelectorAll("article img[src^='data:image/png']").length;
  seen.sounds = page.querySelectorAll("article audio[src^='data:audio']").length;
  seen.cut = page.querySelectorAll(".text.short").length;
  page.querySelectorAll("button.more").forEach((button) => button.click());
  seen.opened = page.querySelectorAll(".text.short").length;
  seen.sideways.push(sideways());
  const choose = (id, value) => {{
    const box = page.getElementById(id);
    box.value = value;
    box.dispatchEvent(new Event("change"));
  }};
  choose("sample-group", "1");
  seen.tasks_of_group = texts("article h3");
  choose("sample-step", "0");
  seen.rollouts_of_step_10 = texts(".rollouts .completion .text");
  seen.error_at_end = root.dataset.error ?? null;
  document.getElementById("seen").textContent = JSON.stringify(seen);
}};
</script>"""


PLAYING = """<!doctype html><iframe style="width: 390px; height: 800px" srcdoc="{page}"></iframe>
<pre id="seen"></pre>
<script>
onload = async () => {{
  const page = document.querySelector("iframe").contentDocument, root = page.documentElement;
  const videos = [...page.querySelectorAll("video")], pictures = [...page.querySelectorAll("img.sweep")];
  const loaded = (video) => video.readyState > 0 || new Promise((done) => {{ video.onloadedmetadata = video.onerror = done; }});
  await Promise.all(videos.map(loaded));
  await Promise.all(pictures.map((picture) => picture.decode()));
  const seen = {{
    error: root.dataset.error ?? null,
    ready: root.dataset.ready,
    durations: videos.map((video) => video.duration),
    quiet: videos.every((video) => video.muted && video.loop && video.controls),
    pictures: pictures.map((picture) => picture.naturalWidth),
    sections: [...page.querySelectorAll("h2")].map((node) => node.textContent),
    links: [...page.querySelectorAll("nav a")].map((node) => node.textContent),
    sideways: root.scrollWidth - root.clientWidth,
  }};
  document.getElementById("seen").textContent = JSON.stringify(seen);
}};
</script>"""


def render(path, tmp_path, *, width=1280):
    """The DOM that a headless Chromium makes of a page, which must not complain in the console."""
    command = [
        CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run",
        "--disable-background-networking", "--disable-component-update", "--disable-sync",
        f"--user-data-dir={tmp_path}/profile", f"--window-size={width},900", "--virtual-time-budget=5000", "--dump-dom",
        "--enable-logging=stderr", path.as_uri(),
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert "<html" in done.stdout, f"chromium rendered nothing: {done.stderr[-2000:]}"
    assert [line for line in done.stderr.splitlines() if "CONSOLE" in line] == []
    return done.stdout


def words_of(dom):
    """What a person reads, without the page's own scripts and styles."""
    return " ".join(html.unescape(re.sub(r"<(script|style).*?</\1>|<[^>]+>", " ", dom, flags=re.S)).split())


@rendered
def test_a_browser_draws_curves_tables_and_samples_without_an_error(run, tmp_path):
    dom = render(write_report(run), tmp_path)
    root = re.search(r"<html[^>]*>", dom)[0]
    assert "data-error" not in root
    assert 'data-ready="yes"' in root
    assert "<title>demo</title>" in dom  # the script inside a completion did not run
    for key in ("held-out/accuracy", "reward/mean", "loss", "completion/length"):
        curve = re.search(rf'<svg class="curve" data-key="{key}".*?</svg>', dom, re.S)[0]
        assert re.search(r'<path class="main" d="M[\d.]+ [\d.]+h0L', curve)
        assert "NaN" not in curve
    assert 'data-key="ratio/clip_low"' not in dom  # never moved: its value is in a table
    assert re.search(r"clip_low</th><td class=\"num\">0</td>", dom)
    words = words_of(dom)
    assert "algorithm dapo modality vision policy tiny-qwen2.5-vl steps 40 seed 7 time 4 h 26 min" in words
    assert "odd 16.0% [8.3, 28.5] 8/50 84.0% [71.5, 91.7] 42/50 +68.0 [+50.3, +78.8] points" in words
    assert "rollout 3 min 20 s 3 min 20 s 3 min 20 s 2 h 13 min 50%" in words
    assert "-1.00" not in words
    assert "\u22121.00 0 0 \u2013 12 stop" in words  # advantage, reward, accuracy, a term that does not apply, length, reason


@rendered
def test_on_a_phone_nothing_overflows_and_every_control_works(run, tmp_path):
    frame = tmp_path / "frame.html"
    frame.write_text(PHONE.format(page=html.escape(page_of(run), quote=True)), encoding="utf-8")
    dom = render(frame, tmp_path)
    seen = json.loads(html.unescape(re.search(r'<pre id="seen">(.*?)</pre>', dom, re.S)[1]))
    assert seen["error"] is seen["error_at_end"] is None
    assert (seen["ready"], seen["title"]) == ("yes", "demo")
    assert seen["sideways"] == [0, 0]
    assert (seen["newest"], seen["left"]) == ("1", "1")
    assert seen["pointed"].split() == ["step", "1", "0.025"]
    assert seen["elsewhere"].split() == ["step", "1", "19.75"]
    completions = ["<answer>0</answer>", f"I am sure. {SCRIPT}", "unbroken" * 300, "<answer>3</answer>"]
    assert sorted(seen["rollouts"]) == sorted(completions)
    assert (seen["images"], seen["sounds"]) == (2, 2)  # once per group, not per rollout
    assert (seen["cut"], seen["opened"]) == (1, 0)
    assert len(seen["tasks_of_group"]) == 1
    assert seen["tasks_of_group"][0].startswith("task-1")
    assert seen["rollouts_of_step_10"][0] == "<answer>1</answer>"  # best first


@rendered
def test_a_browser_shows_sounds_and_the_criteria_of_a_judge(empty_run, tmp_path):
    rows = [rollout(1, row, judging=JUDGING) for row in range(2)]
    write_samples(empty_run, 1, rows, [("a.wav", "audio", sweep_wav())])
    page = page_of(empty_run)
    measure = """<script>addEventListener("load", async () => {
      const picture = document.querySelector("img.sound");
      await picture.decode();
      const { width, height } = picture.getBoundingClientRect();
      document.documentElement.dataset.picture = `${picture.naturalWidth}x${picture.naturalHeight} at ${width}x${height}`;
    });</script></body>"""
    (tmp_path / "page.html").write_text(page.replace("</body>", measure), encoding="utf-8")
    dom = render(tmp_path / "page.html", tmp_path)
    assert "data-error" not in re.search(r"<html[^>]*>", dom)[0]
    assert 'data-picture="260x136 at 260x136"' in dom
    assert len(re.findall(r'<audio controls=""', dom)) == 1
    words = words_of(dom)
    # Rollouts stand best first, as in the table above: the second of the file, then the first.
    assert "criteria of the judge (evolved) weight 1 2" in words
    assert "S1 Names the beeps 0.75 \u25cb \u25cf" in words
    assert "N1 Guesses (avoided) 0.25 \u25cf \u25cb score 0.25 0.75" in words


@rendered
@pytest.mark.parametrize("steps", [0, 1])
def test_a_browser_takes_a_run_that_has_hardly_begun(empty_run, tmp_path, steps):
    if steps:
        write_lines(empty_run / "metrics.jsonl", [{"train_step": 1, "reward/mean": 0.125, "loss": math.nan}])
        write_evaluation(empty_run, 0, proportion(1, 4))
    dom = render(write_report(empty_run), tmp_path)
    root = re.search(r"<html[^>]*>", dom)[0]
    assert "data-error" not in root
    assert 'data-ready="yes"' in root
    words = words_of(dom)
    if steps:
        assert "optimization loss \u2013 no finite value" in words
        assert "reward mean 0.125 at step 1, the only one" in words
        assert "all tasks 25.0% [4.6, 69.9] 1/4" in words
    else:
        assert "no evaluation yet" in words
        assert "no finished train step yet" in words
    assert "no samples yet" in words
    assert "no timing" in words


def playing(run, tmp_path):
    """What a browser makes of a page with videos, once they are loaded."""
    frame = tmp_path / "frame.html"
    frame.write_text(PLAYING.format(page=html.escape(page_of(run), quote=True)), encoding="utf-8")
    dom = render(frame, tmp_path)
    return json.loads(html.unescape(re.search(r'<pre id="seen">(.*?)</pre>', dom, re.S)[1]))


@rendered
def test_a_browser_plays_the_videos_of_samples_and_rollouts_and_shows_heat_maps(measured, tmp_path):
    write_samples(measured, 41, [rollout(41, 0)], [("step_000041.mp4", "video", mp4(90, seconds=3))])
    seen = playing(measured, tmp_path)
    assert seen["error"] is None
    assert seen["ready"] == "yes"
    assert seen["durations"] == pytest.approx([1, 1, 2, 3], abs=0.11)
    assert seen["quiet"] is True
    assert len(seen["pictures"]) == 1
    assert seen["pictures"][0] > 200
    assert seen["sideways"] == 0  # on a phone
    assert seen["sections"] == [
        "Held-out results", "Rollouts", "Curves", "Samples", "Timing", "Config", "Left out of this page",
    ]  # fmt: skip


@rendered
def test_a_page_of_rollouts_alone_has_their_sections_only(tmp_path):
    write_rollouts(tmp_path / "pick", {"lift": LIFT})
    write_sweep(tmp_path / "pick", axes={"push (N)": [0, 1]}, cells=[{"push (N)": 0, "k": 4, "n": 4}])
    seen = playing(tmp_path / "pick", tmp_path)
    assert seen["error"] is None
    assert seen["ready"] == "yes"
    assert seen["links"] == ["Rollouts"]
    assert seen["sections"][0] == "Rollouts"
    assert len(seen["durations"]) == 2
    assert len(seen["pictures"]) == 1


@rendered
def test_rollouts_are_read_as_a_table_with_counts_and_a_paired_test(measured, tmp_path):
    words = words_of(render(write_report(measured), tmp_path))
    assert "lift 3/4 75.0% [30.1, 95.4]" in words
    assert "lift 15.0% [5.2, 36.0] 3/20 55.0% [34.2, 74.2] 11/20 +40.0 [+10.0, +60.0] points 9 1 0.021" in words
    assert "push 15.0% [5.2, 36.0] 3/20 0.0% [0.0, 16.1] 0/20" in words
    assert "empty: 11 solved only with seen words, 0 only with these, p = 0.00098 (exact McNemar test)." in words
    assert "the camera is renamed." in words
