"""Measurements of waveforms against the truth about generated clips, and statements against measurements."""

import numpy as np
import pytest

from audio.measures import claims, evidence_matches, measure
from audio.media import AudioClip
from audio.scenes import DRAWS
from audio.sounds import RATE, at_level, mix, sine
from audio.tasks import ToneTasks
from mmrl.chat import media_parts


def clip_of(*waves, pause=0.15, floor=-60.0):
    """Waves one after another."""
    time, placed = 0.1, []
    for wave in waves:
        placed.append((time, wave))
        time += len(wave) / RATE + pause
    return AudioClip(samples=mix(placed, time, floor=floor, rng=np.random.default_rng(0)), rate=RATE)


def tone(hertz, level=-6.0, seconds=0.15):
    return at_level(sine(hertz, seconds, np.random.default_rng(1)), level)


@pytest.fixture(scope="module")
def generated():
    """Clips of every family that can be measured, with their tasks. (Of 500 such clips one was measured wrong.)"""
    kinds = ["hear_beeps", "hear_tones", "hear_knocks", "hear_sounds", "count", "tempo", "contour", "louder", "order", "same"]
    source = ToneTasks(kinds, split="train", num_tasks=1000, seed=77)
    return [(source[index], next(media_parts(source[index]))[1]) for index in range(80)]


def test_measurements_agree_with_how_clips_were_made(generated):
    right = {"count": [], "onsets": [], "levels": [], "pitches": [], "contour": [], "tempo": [], "louder": []}
    for task, clip in generated:
        events, found = task.columns["events"], measure(clip)
        right["count"].append(found.count == len(events))
        if found.count == len(events):
            right["onsets"].append(max(abs(t - e["start"]) for t, e in zip(found.onsets, events)) < 0.015)
            right["levels"].append(max(abs(level - e["level"]) for level, e in zip(found.levels, events)) < 1.0)
        if events[0]["name"] in ("beep", "tone"):
            truth = [(e["frequency"], e["end_frequency"]) for e in events]
            right["pitches"].append(np.allclose(found.pitches, truth, rtol=0.01))
        if task.domain == "contour":
            right["contour"].append(found.contour == task.answer)
        if task.domain == "tempo":
            right["tempo"].append(found.tempo == task.answer)
        if task.domain == "louder":
            right["louder"].append(found.louder is not None and ("first", "second")[found.louder] == task.answer)
    assert {name: sum(map(bool, values)) >= len(values) - 1 for name, values in right.items()} == dict.fromkeys(right, True)


def test_true_transcripts_hold_and_false_ones_do_not(generated):
    holds, refuted = [], []  # of claims
    for task, clip in generated:
        words = task.columns["heard"].split()
        holds.append(evidence_matches(f"<think>{' '.join(words)}</think><answer>x</answer>", clip) is True)
        more = [*words, "beep"] if words[0] == "beep" else words[::-1] if words[::-1] != words else [*words, words[0]]
        refuted.append(evidence_matches(f"<think>{' '.join(more)}</think>", clip) is False)
    assert sum(holds) >= 79 and sum(refuted) >= 79


TWO = clip_of(tone(440), tone(880, level=-16.0))


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("There are two tones.", True),
        ("I hear 2 short beeps", True),
        ("three tones", False),
        ("The first one is at 440 Hz", True),
        ("one at 0.88 kHz", True),
        ("It has 500 Hz.", False),
        ("The first is louder.", True),
        ("the second tone is louder", False),
        ("the second one is the softer", True),
        ("softer is the second", None),  # not a form that is understood
        ("The pitch is rising", True),
        ("the melody goes down", False),
        ("middle high", True),
        ("low then high", True),  # compared with each other
        ("high, then low", False),
        ("loud then soft", True),
        ("a bell", False),
        ("no bell, but two tones", True),  # what is denied is passed over
        ("it is not rising", None),
        ("the tempo is slow", False),
        ("fast beeps", True),
        ("two tones, the second tone is louder", False),  # one wrong claim is enough
        ("It sounds like a dog.", None),
        ("", None),
    ],
)
def test_statements_about_two_tones(text, expected):
    assert evidence_matches(text, TWO) is expected


def test_claims_say_what_was_measured():
    (claim,) = claims("there are five beeps", TWO)
    assert (claim.stated, claim.measured, claim.holds) == ("five beeps", "2", False)


def test_tempo_and_loudness_need_two_events():
    one = measure(clip_of(tone(440)))
    assert (one.count, one.tempo, one.louder, one.contour) == (1, None, None, "level")
    equal = measure(clip_of(tone(440), tone(440)))
    assert equal.louder is None and equal.tempo == "fast"


def test_silence_holds_no_event():
    silent = AudioClip(samples=np.zeros(RATE, dtype=np.float32), rate=RATE)
    found = measure(silent)
    assert (found.count, found.contour, found.tempo) == (0, None, None)
    assert evidence_matches("one beep", silent) is False


def test_levels_and_onsets_do_not_depend_on_the_rate():
    scene = DRAWS["tones"](np.random.default_rng(5), lambda digit: np.ones(1))
    slow = AudioClip(samples=scene.wave[::2].copy(), rate=RATE // 2)
    fast = measure(AudioClip(samples=scene.wave, rate=RATE))
    assert measure(slow).onsets == pytest.approx(fast.onsets, abs=0.011)
