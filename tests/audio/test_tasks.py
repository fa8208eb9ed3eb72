"""The built-in questions about sounds: honest splits, answers that can be checked, demonstrations that do not give RL away."""

import itertools

import numpy as np
import pytest

from audio import speech
from audio.scenes import FLOOR, REGISTERS
from audio.sounds import RATE, TIMBRES, at_level, mix
from audio.tasks import KINDS, ToneTasks, tokenizer_corpus
from mmrl.chat import Completion, media_parts
from mmrl.errors import MissingExtra
from mmrl.rewards import accuracy, think_answer_format

ALL = list(KINDS)
REWARDED = [name for name in ALL if not KINDS[name].demonstrated]


def tasks(split="train", kinds=ALL, **options):
    return ToneTasks(kinds, split=split, **({"num_tasks": 5000} | options))


def said(text):
    return Completion(text=text, token_ids=(), stop_reason="stop")


def wave_of(task):
    ((kind, clip),) = media_parts(task)
    assert kind == "audio"
    return clip.samples


def question_of(task):
    return task.messages[0]["content"][-1]["text"]


def test_equal_index_gives_the_equal_task_and_another_seed_or_split_another_one():
    for index in range(len(ALL)):
        first, second = tasks()[index], tasks()[index]
        assert (first.id, first.answer, first.demonstration) == (second.id, second.answer, second.demonstration)
        assert np.array_equal(wave_of(first), wave_of(second))
        for other in (tasks(seed=1)[index], tasks(split="eval")[index]):
            assert not np.array_equal(wave_of(first), wave_of(other))


def test_clips_are_short_finite_and_within_full_scale():
    source = tasks()
    for index in range(8 * len(ALL)):
        ((_, clip),) = media_parts(source[index])
        assert clip.rate == RATE and clip.samples.dtype == np.float32 and clip.samples.ndim == 1
        assert 0.2 < clip.seconds < 2.6
        assert np.isfinite(clip.samples).all() and 0.01 < np.abs(clip.samples).max() <= 1.0


@pytest.mark.parametrize("name", ALL)
def test_answers_follow_from_the_events(name):
    source = tasks(kinds=[name])
    expected = {
        "count": lambda e: len(e),
        "contour": lambda e: "rising" if e[0]["frequency"] < e[-1]["end_frequency"] else "falling",
        "louder": lambda e: "first" if e[0]["level"] > e[1]["level"] else "second",
        "tempo": lambda e: "slow" if e[1]["start"] - e[0]["start"] > 0.35 else "fast",
        "order": lambda e: e[0]["name"],
        "same": lambda e: "yes" if e[0]["name"] == e[1]["name"] else "no",
        "parity": lambda e: "odd" if int(e[0]["name"]) % 2 else "even",
        "larger": lambda e: max(int(event["name"]) for event in e),
        "sum": lambda e: sum(int(event["name"]) for event in e),
    }
    answers = set()
    for index in range(40):
        task = source[index]
        options = task.columns["options"]
        answers.add(task.answer)
        if name in expected:
            assert task.answer == str(expected[name](task.columns["events"]))
        if name.startswith("choose"):
            assert task.answer == ""  # a choice has no right answer
        else:
            assert task.answer in options
        if name in ("contour", "louder", "tempo", "same", "parity", "order"):
            assert len(options) == 2
    assert len(answers) == 1 if name.startswith("choose") or name == "hear_beeps" else len(answers) > 1


def test_answers_of_two_options_are_even():
    for name in ("contour", "louder", "tempo", "same"):
        source = tasks(kinds=[name])
        first = KINDS[name].options(None, "")[0]
        assert 0.35 < np.mean([source[index].answer == first for index in range(150)]) < 0.65


def test_what_is_heard_lists_every_event():
    source = tasks(kinds=["hear_tones", "hear_knocks", "hear_sounds", "hear_digits", "hear_beeps"])
    for index in range(100):
        task = source[index]
        heard, events = task.columns["heard"].split(), task.columns["events"]
        assert task.demonstration.startswith(f"<think>{task.columns['heard']}</think>")
        if task.domain == "hear_beeps":
            pauses = [later["start"] - sooner["start"] - sooner["seconds"] for sooner, later in itertools.pairwise(events)]
            assert heard.count("beep") == len(events) and heard.count("-") == sum(pause > 0.2 for pause in pauses)
        elif task.domain == "hear_tones":
            hertz = [event["frequency"] for event in events]
            hertz = [hertz[0], events[0]["end_frequency"]] if len(events) == 1 and len(heard) == 2 else hertz
            assert len(heard) == len(hertz)
            assert all(REGISTERS[word][0] <= f <= REGISTERS[word][1] for word, f in zip(heard, hertz))
        elif task.domain == "hear_knocks":
            assert heard == ["loud" if event["level"] > -12 else "soft" for event in events]
        else:
            assert heard == [event["name"] for event in events]


def test_rewarded_kinds_have_no_demonstration_and_their_questions_are_never_demonstrated():
    source = tasks(kinds=[name for name in ALL if KINDS[name].demonstrated])
    demonstrated = {question_of(source[index]) for index in range(900)}
    assert len(demonstrated) > 120
    for index in range(20 * len(REWARDED)):
        task = tasks(kinds=REWARDED)[index]
        assert task.demonstration == "" and question_of(task) not in demonstrated


def test_a_demonstrated_choice_says_nothing_about_the_sounds():
    source = tasks(kinds=["choose_word"])
    agree, places = [], []
    for index in range(900):
        task = source[index]
        word = task.demonstration.split("<answer>")[1].split("</answer>")[0]
        assert word in task.columns["options"] and word in question_of(task)
        places.append(task.columns["options"].index(word))
        heard = task.columns["heard"].split()
        if word in ("even", "odd") and heard[0].isdigit():
            agree.append(word == ("even", "odd")[int(heard[0]) % 2])
        if word in ("slow", "fast") and heard[0] == "beep":
            agree.append((word == "slow") == ("-" in heard))
    assert 0.4 < np.mean(places) < 0.6
    assert len(agree) > 40 and 0.3 < sum(agree) / len(agree) < 0.7  # four standard deviations


def test_gold_answers_earn_the_reward_and_wrong_ones_do_not():
    source = tasks()
    for index in range(2 * len(ALL)):
        task = source[index]
        if not task.answer:
            assert accuracy(task, said("<think>1</think><answer>1</answer>")) is None
            continue
        gold = said(f"<think>0</think><answer>{task.answer}</answer>")
        assert accuracy(task, gold) == 1.0 and think_answer_format(task, gold) == 1.0
        for wrong in (option for option in task.columns["options"] if option != task.answer):
            assert accuracy(task, said(f"<think>0</think><answer>{wrong}</answer>")) == 0.0


def test_an_index_past_the_end_is_refused():
    with pytest.raises(IndexError, match="has 5000 tasks"):
        tasks()[5000]


def test_the_tokenizer_corpus_holds_every_question():
    text = "\n".join(tokenizer_corpus())
    source = tasks(kinds=[name for name in REWARDED if name != "order"])  # with its many pairs of names
    assert all(question_of(source[index]) in text for index in range(16))
    assert all(name in text for name in TIMBRES)


# --- sounds ---


def test_levels_are_peak_levels_and_starts_are_exact():
    rng = np.random.default_rng(0)
    wave = at_level(TIMBRES["sine"](440.0, 0.25, rng), -6.0)
    assert 20 * np.log10(np.abs(wave).max()) == pytest.approx(-6.0, abs=1e-9)
    clip = mix([(0.1, wave)], 0.5, floor=-200.0, rng=rng)
    sounding = np.flatnonzero(np.abs(clip) > 1e-6)
    assert len(clip) == RATE // 2
    assert sounding[0] / RATE == pytest.approx(0.1, abs=0.001) and sounding[-1] / RATE == pytest.approx(0.35, abs=0.001)


@pytest.mark.parametrize("name", ["sine", "string", "organ"])
def test_pitched_sounds_have_their_pitch(name):
    # The spectrum of a periodic sound of 250 Hz has its peaks at multiples of 250 Hz, the lowest there.
    wave = TIMBRES[name](250.0, 1.0, np.random.default_rng(3))
    spectrum = np.abs(np.fft.rfft(wave * np.hanning(len(wave))))
    strong = np.flatnonzero(spectrum > 0.3 * spectrum.max())
    assert strong[0] == pytest.approx(250, rel=0.02)
    assert all(abs(peak / 250 - round(peak / 250)) < 0.05 for peak in strong)


def test_background_noise_is_far_below_the_softest_sound():
    clip = mix([], 1.0, floor=FLOOR[1], rng=np.random.default_rng(0))
    assert 20 * np.log10(np.sqrt(np.mean(clip**2))) == pytest.approx(FLOOR[1], abs=0.3)


# --- speech ---


def test_evaluation_voices_are_never_heard_in_training():
    clips = speech._packaged_clips()
    assert not set(speech.TRAIN_VARIANTS) & set(speech.EVAL_VARIANTS)
    for digit in range(10):
        held_out, trained = clips[0][digit], clips[1][digit]
        assert len(held_out) == len(speech.ACCENTS) * len(speech.EVAL_VARIANTS)
        assert len(trained) == len(speech.ACCENTS) * len(speech.TRAIN_VARIANTS)
        assert all(0.15 < len(clip) / RATE < 0.75 for clip in [*held_out, *trained])
        assert not any(len(a) == len(b) and np.array_equal(a, b) for a in held_out for b in trained)


@pytest.mark.parametrize("split", ["train", "eval"])
def test_digits_are_spoken_by_the_voices_of_their_split(split):
    rng = np.random.default_rng(0)
    known = {clip.tobytes() for clip in speech._packaged_clips()[split == "train"][3]}
    assert all(speech.packaged(3, split=split, rng=rng).tobytes() in known for _ in range(20))


def test_the_packaged_set_is_small():
    assert sum(path.stat().st_size for path in speech.PACKAGED.iterdir()) < 310_000


def test_without_espeak_the_error_says_what_to_do(monkeypatch):
    monkeypatch.setattr("audio.speech.shutil.which", lambda name: None)
    with pytest.raises(MissingExtra, match="install it"):
        tasks(kinds=["hear_digits"], speaker="espeak")[0]


@pytest.mark.skipif(speech.shutil.which("espeak-ng") is None, reason="no espeak-ng on PATH")
def test_espeak_speaks_in_other_voices_than_the_packaged_ones():
    task = tasks(kinds=["hear_digits"], speaker="espeak")[0]
    assert 0.2 < len(wave_of(task)) / RATE < 2.0
    assert not np.array_equal(wave_of(task), wave_of(tasks(kinds=["hear_digits"])[0]))
