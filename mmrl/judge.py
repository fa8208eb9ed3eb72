"""Judges: whoever answers a structured question about rollouts with a JSON object. Shared by all modalities.

A `Judge` answers once or raises a `JudgeError`. `JudgeClient` stands between a reward term and a judge: it bounds attempts,
time and the number of requests at once, keeps answers on disk, counts calls and tokens, and leaves a judge that keeps failing
alone for a while. A failed request is never an answer: the caller decides what a neutral reward is, and counts it.
"""

from __future__ import annotations

import hashlib
import json
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

from mmrl.errors import MMRLError
from mmrl.judge_cache import JudgeCache
from mmrl.types import Media

FailureKind = Literal["rate", "transient", "permanent", "malformed"]

COUNTERS = (
    "calls", "cached", "cache_errors", "retries", "failures", "malformed", "skipped", "prompt_tokens", "completion_tokens",
)  # fmt: skip
"""What a client counts: requests sent, answers from the cache, answers that could not be kept, repeated attempts, requests
given up, answers of a wrong form, requests not sent because the judge was failing, and tokens as the judge reports them."""


class JudgeError(MMRLError, RuntimeError):
    """A judge gave no usable answer. ``rate`` and ``transient`` are worth another attempt; the others are not."""

    def __init__(self, message: str, *, kind: FailureKind, retry_after: float | None = None) -> None:
        super().__init__(message)
        self.kind, self.retry_after = kind, retry_after


@dataclass(frozen=True, kw_only=True)
class JudgeRequest:
    """One question to a judge."""

    purpose: str
    """Which question it is; judges made of rules look here."""
    instructions: str
    """What to answer and in which JSON form: the system turn of a model."""
    payload: Mapping[str, Any]
    """What the question is about, as JSON values: the user turn of a model."""
    media: tuple[Media, ...] = ()
    """What the judge hears or sees."""
    timeout_s: float = 120.0
    """Seconds for one attempt."""

    @property
    def text(self) -> str:
        """The payload as a model reads it. Texts of rollouts stay JSON strings, so they cannot pass for instructions."""
        return json.dumps(self.payload, ensure_ascii=False, indent=1)

    def fingerprint(self, judge: str) -> str:
        """Content hash of the request to ``judge``: equal questions about equal media have equal ones."""
        media = [[item.kind, hashlib.sha256(item.data).hexdigest()] for item in self.media]
        parts = [judge, self.purpose, self.instructions, self.payload, media]
        return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()


@dataclass(frozen=True, kw_only=True)
class Reply:
    """What a judge said, before anybody has looked at it."""

    text: str
    prompt_tokens: int = 0
    completion_tokens: int = 0


class Judge(Protocol):
    """Whoever answers."""

    identity: str
    """Names the judge and all settings that its answers depend on; part of the cache's key. Holds no secret."""

    def answer(self, request: JudgeRequest) -> Reply:
        """One attempt. Raises `JudgeError`. Called from several threads."""
        ...


@dataclass(frozen=True, kw_only=True)
class Retry:
    """How long to keep trying: waits of 2, 4, 8 .. ``longest_s`` after rate errors, of ``pause_s`` after others."""

    attempts: int = 4
    pause_s: float = 2.0
    longest_s: float = 30.0
    give_up_after: int = 3
    """So many requests in a row that fail for good make the client stop asking ..."""
    rest_s: float = 60.0
    """... for this long; requests then fail at once."""

    def wait(self, error: JudgeError, attempt: int) -> float:
        """Seconds before the attempt after ``attempt`` (counted from 1)."""
        if error.kind != "rate":
            return self.pause_s
        return min(max(2.0**attempt, error.retry_after or 0.0), self.longest_s)


@dataclass(kw_only=True)
class JudgeClient:
    """Asks one judge, within bounds. Safe to use from several threads."""

    judge: Judge
    cache: JudgeCache | None = None
    retry: Retry = field(default_factory=Retry)
    workers: int = 8
    """Requests at once."""
    clock: Callable[[], float] = time.monotonic
    sleep: Callable[[float], None] = time.sleep

    def __post_init__(self) -> None:
        self._slots = threading.BoundedSemaphore(self.workers)
        self._lock = threading.Lock()
        self._counts: Counter[str] = Counter()
        self._failed_in_a_row = 0
        self._resting_until: float | None = None

    def ask[T](self, request: JudgeRequest, read: Callable[[Mapping[str, Any]], T], *, deadline: float | None = None) -> T:
        """``read`` of the judge's JSON object; ``read`` raises ValueError for an object of a wrong form.

        ``deadline`` is a time of `clock` after which nothing more is tried. Raises `JudgeError` when there is no answer. An
        answer of a wrong form is not asked for again, as a judge without randomness would repeat it, and is not kept.
        """
        key = request.fingerprint(self.judge.identity)
        kept = self.cache.read(key) if self.cache is not None else None
        if kept is not None:
            with suppress(ValueError):  # kept by an older version that read it differently: ask again
                result = read(kept)
                self._count(cached=1)
                return result
        if self._is_resting():
            self._count(skipped=1)
            raise JudgeError("the judge failed several times in a row and is left alone for now", kind="transient")
        try:
            reply = self._attempts(request, deadline)
        except JudgeError as error:
            self._count(failures=1)
            self._note_failure(error)
            raise
        with self._lock:
            self._failed_in_a_row = 0
        try:
            found = parse_object(reply.text)
            result = read(found)
        except ValueError as error:
            self._count(malformed=1)
            raise JudgeError(f"the judge's answer is of a wrong form: {error}", kind="malformed") from error
        if self.cache is not None:
            try:
                self.cache.write(key, found)
            except OSError:  # a full disk costs a call next time, not the run
                self._count(cache_errors=1)
        return result

    def drain(self) -> dict[str, int]:
        """Counts since the last call, one entry for each of `COUNTERS`."""
        with self._lock:
            counts, self._counts = self._counts, Counter()
        return {name: counts[name] for name in COUNTERS}

    def _attempts(self, request: JudgeRequest, deadline: float | None) -> Reply:
        for attempt in range(1, self.retry.attempts + 1):
            if deadline is not None and self.clock() >= deadline:
                raise JudgeError("the time for this group is over", kind="transient")
            try:
                with self._slots:
                    self._count(calls=1)
                    reply = self.judge.answer(request)
            except JudgeError as error:
                wait = self.retry.wait(error, attempt)
                over = deadline is not None and self.clock() + wait >= deadline
                if error.kind in ("permanent", "malformed") or attempt == self.retry.attempts or over:
                    raise
                self._count(retries=1)
                self.sleep(wait)
            else:
                self._count(prompt_tokens=reply.prompt_tokens, completion_tokens=reply.completion_tokens)
                return reply
        raise AssertionError("the last attempt returns or raises")

    def _is_resting(self) -> bool:
        with self._lock:
            if self._resting_until is not None and self.clock() >= self._resting_until:
                self._resting_until = None
            return self._resting_until is not None

    def _note_failure(self, error: JudgeError) -> None:
        if error.kind not in ("rate", "transient"):  # a refusal may be about this request alone
            return
        with self._lock:
            self._failed_in_a_row += 1
            if self._failed_in_a_row >= self.retry.give_up_after:
                self._failed_in_a_row, self._resting_until = 0, self.clock() + self.retry.rest_s

    def _count(self, **counts: int) -> None:
        with self._lock:
            self._counts.update(counts)


def parse_object(text: str) -> dict[str, Any]:
    """The JSON object that ``text`` is, with or without one code fence around it; ValueError for anything else."""
    try:
        found = json.loads(_inside_fence(text.strip()), parse_constant=_refuse_constant)
        json.dumps(found, ensure_ascii=False).encode()  # half of a surrogate pair is no text that could be logged
    except RecursionError as error:
        raise ValueError("nested too deeply") from error
    if not isinstance(found, dict):
        raise ValueError(f"expected a JSON object, found {type(found).__name__}")
    return found


def _inside_fence(text: str) -> str:
    """What a code fence around all of ``text`` holds; ``text`` where there is none."""
    if len(text) < 6 or not (text.startswith("```") and text.endswith("```")):
        return text
    language, newline, rest = text[3:-3].partition("\n")
    return rest.strip() if newline and language.strip() in ("", "json") else text


def _refuse_constant(name: str) -> float:
    raise ValueError(f"{name} is not JSON")
