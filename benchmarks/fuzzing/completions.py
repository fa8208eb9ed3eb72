# ruff: noqa: E501 (tables of odd texts)
"""Completions and judges' replies: every shipped reward term of texts, and everything that parses what a model wrote.

A term gives a finite number in its range or None, within `SECONDS` of CPU also for 100,000 characters; full marks for accuracy
need an answer that an independent reading finds right.
"""

from __future__ import annotations

import contextlib
import json
import math
import re
import time
from dataclasses import dataclass
from fractions import Fraction
from random import Random
from typing import Any

from audio.benchmark_scores import PUBLISHED_RULES, grade
from audio.benchmarks import LETTERS, Item, split_options
from audio.rewards import AUDIO_TERMS
from audio.rubrics import Overthink, RubricTerm
from audio.rubrics_config import RubricsConfig
from audio.rubrics_questions import read_evolution, read_grades, read_weights
from audio.rubrics_rules import follows, noun_of, tone_rubrics, words_of
from fuzzing.mutations import misspell, mutate_text, mutate_tree, nested, odd_text
from mmrl.calibration import answer, brier, calibration_summary, confidence_format
from mmrl.chat import ChatTask, Completion
from mmrl.errors import DataError
from mmrl.judge import Judge, JudgeClient, JudgeRequest, Reply, Retry, parse_object
from mmrl.judge_endpoint import _read_reply
from mmrl.prompting import template_format
from mmrl.rewards import TEXT_TERMS
from mmrl.rubric_points import JudgedRubrics, rubric_points
from mmrl.types import Media
from vision.benchmark_scores import published_verdict
from vision.observe_r1 import OBSERVE_TERMS
from vision.observe_r1_answers import value_of
from vision.r1_reward import R1_TERMS, ConclusionJudge, R1Reward, read_consistency, verdict_of
from vision.r1_reward_pairwise import read_better, shown_response

SECONDS = 0.5
LONG = 100_000
TAGS = tuple(f"<{slash}{name}>" for name in ("answer", "think", "observe", "analysis", "confidence") for slash in ("", "/"))
ANSWERS = (
    "A", "B", "C", "D", "7", "12", "3.5", "-4", "1/2", "1000", "1,000", "0", "6.6e-34", "12345678901", "2", "1", "bell", "a red dog", "yes",
    "\\frac{1}{2}", "$\\sqrt{3}$", "50\\%", "\\pi", "x = 3", "2^{10}", "\u00e9t\u00e9", "stra\u00dfe", "(a) one", "0.1", "1e400", "9" * 400,
)  # fmt: skip
QUESTIONS = (
    "How many beeps are there?", "Which knock is louder?", "Which digit is larger?", "Which sound is first?", "What is this?",
    "Are the tones rising or falling?", "Which number from 0 to 18 is the sum of both digits?",
)  # fmt: skip
FORMS = (
    "{answer}", "<answer>{answer}</answer>", "<think>{words}</think><answer>{answer}</answer>",
    "<think>{words}</think>\n<answer> {answer} </answer>", "<observe>{words}</observe><think>{words}</think><answer>{answer}</answer>",
    "<think>{words}<observe>{words}</observe>{words}</think><answer>{answer}</answer>",
    "<think>{words}</think><answer>{answer}</answer><analysis>{words}</analysis><confidence>0.7</confidence>",
    "The answer is ({answer}).", "<answer>{answer}</answer><answer>{other}</answer>", "<answer>{answer} or {other}</answer>",
    "<think>Response {answer} is better</think><answer>{answer}</answer>",
)  # fmt: skip
WORDS = ("beep - beep", "loud soft", "3 8", "low high middle", "I look closely.", "", "first is better", "7", "B")
RANGES = {
    "cesar_consistency": (0.0, 2.0),
    "completion_tokens": (0.0, math.inf),
    "overthink": (-math.inf, 1.0),
    "rubric_points": (-2.0, 1.0),
}
"""Of terms that do not lie within 0 to 1."""
RUBRICS = [
    {"text": "says 7", "points": 2, "pattern": "7"},
    {"text": "rambles", "points": -1.5, "pattern": "(?i)because"},
    {"text": "x", "pattern": "B"},
]
TERMS = {
    **TEXT_TERMS, **AUDIO_TERMS, **OBSERVE_TERMS, **R1_TERMS, "confidence_format": confidence_format, "calibrated answer": answer,
    "brier": brier, "rubric_points": rubric_points, "template_format": template_format, "overthink": Overthink(),
}  # fmt: skip
STRICT = ("accuracy", "calibrated answer", "accuracy_letter", "observe_accuracy", "r1_result", "accuracy_text")
"""Terms whose 1.0 says that the answer is right; not accuracy_alnum, whose published rule takes 35 for 3.5."""


@dataclass(frozen=True)
class Example:
    """One completion of a task, and a judge's reply about it."""

    task: ChatTask
    text: str
    reply: str
    options: tuple[str, ...]
    benchmark: str
    judged: bool
    """Whether the judged terms are asked, too; they take ten times as long as the others."""

    def __repr__(self) -> str:
        text = self.text if len(self.text) < 400 else f"{self.text[:200]}...{len(self.text)}"
        return f"answer={self.task.answer!r} text={text!r} reply={self.reply[:200]!r} options={self.options!r}"


def prepare() -> None:
    """Import what is imported on first use, so that it does not count as time of a term."""
    for number in range(40):
        check(draw(Random(number)))


def draw(random: Random) -> Example:
    gold, other = random.sample(ANSWERS, 2)
    words = random.choice(WORDS)
    text = random.choice(FORMS)
    for name, value in (("answer", gold if random.random() < 0.7 else other), ("other", other), ("words", words)):
        text = text.replace(f"{{{name}}}", value)
    for _ in range(random.choice((0, 0, 1, 1, 2, 3, 6))):
        text = mutate_text(random, text, (*TAGS, gold, other, *LETTERS[:4], *WORDS))
    if random.random() < 0.01:
        text = _long(random, text)
    text = text.encode("utf-8", "replace").decode()  # a tokenizer decodes to no half of a surrogate pair
    options = tuple(dict.fromkeys((gold, other, *random.sample(ANSWERS[:4], 2))))
    rubrics = mutate_tree(random, RUBRICS, misspell(random)) if random.random() < 0.1 else RUBRICS
    question = random.choice(QUESTIONS) + random.choice(
        ("", "\nChoices:\nA. one\nB. two", mutate_text(random, "\nA) x\nB) y\nC) z"))
    )
    question = question.encode("utf-8", "replace").decode()
    columns = {
        "rubrics": rubrics, "heard": words.split(), "answer_format": random.choice((None, {"tags": TAGS[:4], "sections": ()})),
    }  # fmt: skip
    message = {"role": "user", "content": [{"type": "text", "text": question}]}
    task = ChatTask(
        id="t", domain="d", messages=(message,), answer=gold if random.random() < 0.95 else "", columns=columns, source="f:1"
    )
    judged = random.random() < 0.1
    return Example(
        task=task,
        text=text,
        reply=_reply(random) if judged else "",
        options=options,
        benchmark=random.choice(("avqa", *PUBLISHED_RULES)),
        judged=judged,
    )


def _long(random: Random, text: str) -> str:
    """About `LONG` characters, made of one short piece again and again: what a policy writes that repeats itself."""
    tags = "".join(random.choice(TAGS) for _ in range(random.randint(1, 5)))
    piece = random.choice(
        (
            tags,
            tags,
            random.choice(TAGS),
            " ",
            "\n",
            "\\frac{1}{",
            "(",
            "9",
            "\\boxed{",
            "1 is the ",
            text or "x",
            odd_text(random) or "x",
        )
    )
    middle = piece * (LONG // len(piece))
    return random.choice(
        (middle, text + middle, middle + text, random.choice(TAGS) + middle, f"<think>{middle}</think><answer>{text}")
    )


def _reply(random: Random) -> str:
    tree: Any = random.choice((
        {"new_rubrics": [{"title": "t", "description": "d", "polarity": "negative"}],
         "judgments": {**{f"S{i}": ["Yes", "No"] for i in range(1, 6)}, "N1": ["No", "Yes"]}},
        {"judgments": {f"S{i}": "Yes" for i in range(1, 6)}}, {"weights": [0.5, 1, 0, 2, 1]}, {"weights": {f"S{i}": i for i in range(1, 6)}},
        {"consistent": 1}, {"better": 2}, {"met": [True, False, True]},
        {"choices": [{"message": {"content": "{}"}}], "usage": {"prompt_tokens": 3}}, nested(5000),
    ))  # fmt: skip
    for _ in range(random.choice((0, 0, 1, 2))):
        tree = mutate_tree(random, tree, misspell(random))
    try:
        text = json.dumps(tree, ensure_ascii=random.random() < 0.5)
    except RecursionError:
        text = "[" * 5000
    if random.random() < 0.3:
        text = f"```json\n{text}\n```"
    if random.random() < 0.3:
        text = mutate_text(random, text, ("```", "```json\n", "\n", "NaN", "1e999", '"\\ud800"', ", "))
    if random.random() < 0.01:
        text = random.choice(
            ("```\n" + "\n" * LONG, "{" * LONG, "[" * LONG, "```" * (LONG // 3), " " * LONG, "```json\n" + " \n" * LONG)
        )
    return text


def check(example: Example) -> None:
    task = example.task
    completion = Completion(text=example.text, token_ids=tuple(range(min(8, len(example.text)))), stop_reason="stop")
    for name, term in TERMS.items():
        started = time.process_time()
        try:
            value = term(task, completion)
        except DataError as error:
            assert name == "rubric_points" and "f:1" in str(error), f"{name}: {error}"
            continue
        seconds = time.process_time() - started
        assert seconds < SECONDS, f"{name} took {seconds:.1f} s"
        if value is None:
            continue
        low, high = RANGES.get(name, (0.0, 1.0))
        # a rubric's points may be anything that a row says
        free = name == "rubric_points" and task.columns["rubrics"] is not RUBRICS
        assert isinstance(value, (int, float)) and math.isfinite(value), f"{name} gave {value!r}"
        assert free or low <= value <= high, f"{name} gave {value!r}"
        if name in STRICT and value == 1.0:
            assert is_right(example.text, task.answer, loose=name != "accuracy"), f"{name} calls a wrong answer right"
    _check_benchmarks(example, completion)
    if example.judged:
        _check_judging(example, completion)


def _check_benchmarks(example: Example, completion: Completion) -> None:
    options, started = example.options, time.process_time()
    item = Item(id="i", question="q", options=options, answer=options[0], audio=b"", groups={}, source="f:1")
    for benchmark in (example.benchmark,):
        graded = grade(benchmark, item, completion)
        assert graded.option is None or graded.option in options
        if graded.correct:
            given = _content(example.text, last=False) or example.text
            named = "A" in given.upper() or _plain(options[0]).strip(" .,:;!?\"'") in " ".join(given.casefold().split())
            assert named, f"{benchmark} reads the right option out of {given[:80]!r}"
    assert verdict_of(example.text) in (None, 1, 2) and published_verdict(example.text) in (None, 1, 2)
    shown_response(completion)
    value = value_of(example.text)
    assert value is None or math.isfinite(value)
    try:
        found = split_options(example.task.messages[0]["content"][0]["text"], "f:1")[1]
        assert len(found) >= 2 and all(found)
    except DataError as error:
        assert "f:1" in str(error)
    noun = noun_of(example.text)
    if noun is not None:
        follows(noun, example.task.messages[0]["content"][0]["text"].partition("\n")[0], words_of(example.text))
    calibration_summary([brier.record(example.task, completion)])
    seconds = time.process_time() - started
    assert seconds < SECONDS, f"benchmark scores took {seconds:.1f} s"


@dataclass(frozen=True)
class _Says:
    text: str
    identity: str = "fuzz"

    def answer(self, request: JudgeRequest) -> Reply:
        request.text.encode()
        return Reply(text=self.text)


def _client(judge: Judge) -> JudgeClient:
    return JudgeClient(judge=judge, retry=Retry(attempts=1, give_up_after=10**9), workers=1)


def _check_judging(example: Example, completion: Completion) -> None:
    task, started = example.task, time.process_time()
    static = tone_rubrics(task) or ()
    readers = (
        lambda found: read_evolution(found, static, group_size=2, max_new=2), lambda found: read_grades(found, static),
        lambda found: read_weights(found, static), read_consistency, read_better,
    )  # fmt: skip
    try:
        found = parse_object(example.reply)
    except ValueError:
        found = {}
    json.dumps(found, ensure_ascii=False).encode()  # what is logged of it
    for read in readers:
        try:
            result = read(found)
        except ValueError:
            continue
        if isinstance(result, tuple) and result and isinstance(result[0], float):
            assert math.isclose(math.fsum(result), 1.0) and min(result) >= 0
    with contextlib.suppress(ValueError):
        _read_reply(example.reply.encode("utf-8", "surrogatepass"))
    terms: list[Any] = [R1Reward(client=_client(ConclusionJudge())), R1Reward(client=_client(_Says(example.reply)))]
    if task.columns["rubrics"] is RUBRICS:
        terms.append(JudgedRubrics(client=_client(_Says(example.reply))))
    terms.append(RubricTerm(
        client=_client(_Says(example.reply)), static=tone_rubrics, media=lambda task: [Media(kind="audio", data=b"x", suffix=".wav")],
        correct=TEXT_TERMS["accuracy"], group_size=2, config=RubricsConfig(),
    ))  # fmt: skip
    for term in terms:
        judged = term(task, [completion, completion])
        json.dumps(judged.record, ensure_ascii=False).encode()
        for value in judged.values:
            assert value is None or (math.isfinite(value) and -2 <= value <= 2), f"{type(term).__name__} gave {value!r}"
        assert all(math.isfinite(total) for total, _ in term.totals().values())
    seconds = time.process_time() - started
    assert seconds < SECONDS, f"judging took {seconds:.1f} s"


# ---- an independent reading of answers, in other means than the terms use ----------------------------------------------


def is_right(text: str, gold: str, *, loose: bool = True) -> bool:
    """Whether the answer that stands between the tags (or, ``loose``, without tags the text, or any answer) is ``gold``.

    Not loose: there must be exactly one opening tag.
    """
    if not loose:
        inner = _content(text, last=False)
        return text.count("<answer>") == 1 and inner is not None and _equal(inner, gold)
    inner = [_content(text, last=False), _content(text, last=True), text, text.rpartition("<answer>")[2]]
    inner += [_content(text.replace("\n", " "), last=False), *(part.strip().removesuffix("</answer>") for part in inner[2:])]
    inner += [_content(line, last=False) for line in text.split("\n")]
    return any(part is not None and _equal(part, gold, loose=True) for part in inner)


def _content(text: str, *, last: bool) -> str | None:
    start = text.find("<answer>")
    end = (text.rfind if last else text.find)("</answer>", start + len("<answer>"))
    return None if start < 0 or end < 0 or end < start else text[start + len("<answer>") : end]


def _equal(given: str, gold: str, *, loose: bool = False) -> bool:
    left, right = _plain(given), _plain(gold)
    if left == right and left:
        return True
    numbers = [_number(side) for side in (left, right)]
    if None not in numbers:
        exact = all(side.lstrip("+-").replace(",", "").isdecimal() for side in (left, right))
        apart = abs(numbers[0] - numbers[1])
        return apart == 0 if exact else apart <= abs(numbers[1]) * Fraction(1, 10**6 if loose else 10**9) + Fraction(1, 10**60)
    if not loose:
        return False
    said, wanted = ("".join(c for c in side if c.isalnum()) for side in (left, right))
    letters = {c for c in left if c in "abcdef"}
    mathematics = any(c in gold for c in "\\^/=$")  # compared as arithmetic elsewhere, tested in tests/vision
    return (
        said == wanted
        or (len(wanted) == 1 and letters == {wanted})
        or mathematics
        or _number(left.strip("$\\% ")) == _number(right) is not None
    )


def _plain(text: str) -> str:
    text = " ".join(text.split()).casefold()
    while text and (text[-1] in ". " or (text[0] in "([{$\"'" and text[-1] in ")]}$\"'")):
        text = text[:-1] if text[-1] in ". " else text[1:-1].strip()
    return text


def _number(text: str) -> Fraction | None:
    terms = re.fullmatch(r"([\d.]+)([+-][\d.]+)+", text)
    if terms:  # 3.5-0 is 3.5
        found = [_number(term.lstrip("+")) for term in re.findall(r"[+-]?[\d.]+", text)]
        return None if None in found else sum(found, Fraction(0))
    try:
        value = Fraction(text.replace(",", "").strip()) if "_" not in text and "/" not in text and len(text) < 4000 else None
    except (ValueError, OverflowError):
        return None
    return value
