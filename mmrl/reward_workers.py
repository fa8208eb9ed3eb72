"""Reward terms that run in a process of their own: one that never returns costs its time limit and no more.

The process calls the term in its main thread, where libraries that use alarms (math-verify) work. It is started when the term
is first called, outlives many calls, and is replaced after a timeout.
"""

from __future__ import annotations

import multiprocessing
import signal
import traceback
from multiprocessing.connection import Connection
from multiprocessing.reduction import ForkingPickler
from typing import Any

from mmrl.adapter import RewardTerm
from mmrl.errors import ConfigError

START_S = 300.0
"""Seconds that a process may take to start and to import what it needs; not counted against a term."""


class NoAnswer(Exception):
    """The term gave no answer: it took too long, or its process ended. The message reads on after the term's name."""


class WorkerFailure(Exception):
    """The term raised in its process; ``kind`` is the type of what it raised, ``details`` its traceback."""

    def __init__(self, kind: str, message: str, details: str) -> None:
        super().__init__(message)
        self.kind, self.details = kind, details
        self.add_note(details)


class TimedTerm:
    """Calls ``function`` in a process of its own and gives up on an answer after ``timeout_s`` seconds."""

    def __init__(self, function: RewardTerm, *, timeout_s: float, key: str) -> None:
        try:
            ForkingPickler.dumps(function)
        except Exception as error:  # whatever an object raises that cannot be sent
            raise ConfigError(
                f"{key}: this term cannot run in a process of its own ({error}); a time limit needs a function of a module."
            ) from error
        self.function, self.timeout_s = function, timeout_s
        self.scores_group = getattr(function, "scores_group", False)
        for name in ("record", "summarize"):
            if hasattr(function, name):
                setattr(self, name, getattr(function, name))
        self._process: Any = None
        self._connection: Connection | None = None

    def __call__(self, task: Any, outcome: Any) -> Any:
        connection = self._start()
        try:
            connection.send((task, outcome))
            if not connection.poll(self.timeout_s):
                raise NoAnswer(f"gave no answer within {self.timeout_s:g} s")
            kind, value, details = connection.recv()
        except NoAnswer:
            self.stop()
            raise
        except (EOFError, OSError) as error:
            self.stop()
            raise NoAnswer("ended its process") from error
        if kind:
            raise WorkerFailure(kind, value, details)
        return value

    def stop(self) -> None:
        """End the process; the next call starts another."""
        if self._process is not None:
            self._process.kill()
            self._process.join()
            self._connection.close()
            self._process = self._connection = None

    def _start(self) -> Connection:
        if self._process is None or not self._process.is_alive():
            self.stop()
            context = multiprocessing.get_context("forkserver")  # a fork of this process would inherit its threads and device
            context.set_forkserver_preload(["mmrl.chat"])
            ours, theirs = context.Pipe()
            self._process = context.Process(target=_serve, args=(theirs, self.function), daemon=True)
            self._process.start()
            theirs.close()
            self._connection = ours
            try:
                ready = ours.poll(START_S) and ours.recv()
            except EOFError:
                ready = False
            if not ready:
                self.stop()
                raise NoAnswer("could not start its process (is its module importable there?)")
        return self._connection


def _serve(connection: Connection, function: RewardTerm) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the run decides what Ctrl-C means
    connection.send(True)
    while True:
        try:
            task, outcome = connection.recv()
        except EOFError:
            return
        try:
            value = function(task, outcome)
            group = getattr(function, "scores_group", False)
            answer = ("", [_plain(entry) for entry in value] if group else _plain(value), "")
        except Exception as error:
            answer = (type(error).__name__, str(error), "".join(traceback.format_exception(error)))
        try:
            connection.send(answer)
        except Exception as error:  # a value that cannot be sent is no number either
            connection.send((type(error).__name__, f"{error} (the value cannot be sent)", ""))


def _plain(value: Any) -> Any:
    """Tensors and arrays of one number as that number; the rest as it is."""
    if not hasattr(value, "tolist"):
        return value
    plain = value.tolist()
    while isinstance(plain, list) and len(plain) == 1:
        plain = plain[0]
    return plain
