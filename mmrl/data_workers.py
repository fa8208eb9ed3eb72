"""Rows of a dataset checked by several processes, in order and with bounded memory.

One process, the conductor, loads the policy's processor and opens the dataset; then it forks the workers, which share both with
it, and passes their results on as they come. The caller's own process stays small and needs no torch. Everything ends with the
check: nothing is left behind for the length of a training.
"""

from __future__ import annotations

import itertools
import multiprocessing
import sys
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from mmrl.data import DatasetConfig, DatasetTasks, read_tasks
from mmrl.data_check import Checker, CheckerSpec, Chunk, check_rows, split_rows
from mmrl.errors import DataError

START_METHOD = "spawn"
"""Of the conductor: the caller may hold threads and a GPU, which do not survive a fork."""
CHUNKS_AHEAD = 3
"""Chunks that wait for each worker; with their results they bound the memory of a check."""

_work: tuple[DatasetTasks, Checker] | None = None
"""What a worker finds after the fork."""


def check_in_processes(
    config: DatasetConfig, base_dir: Path, spec: CheckerSpec, num_rows: int, workers: int
) -> Iterator[Chunk]:
    """`mmrl.data_check.check_rows` of all rows, by ``workers`` processes; what one of them raises is raised here."""
    context = multiprocessing.get_context(START_METHOD)
    ours, theirs = context.Pipe(duplex=False)
    conductor = context.Process(target=_conduct, args=(theirs, config, base_dir, spec, num_rows, workers))
    conductor.start()
    theirs.close()
    try:
        done = 0
        while done < num_rows:
            try:
                result = ours.recv()
            except EOFError:
                conductor.join()
                raise DataError(
                    f"{config.path}: the checking process ended with exit code {conductor.exitcode} after row {done}; out of "
                    "memory? Try fewer --workers."
                ) from None
            if isinstance(result, BaseException):
                raise result
            done += result.num_rows
            yield result
    finally:
        ours.close()  # a conductor that has more to say hears of it, and ends its workers
        conductor.join()


def _conduct(
    results: Connection, config: DatasetConfig, base_dir: Path, spec: CheckerSpec, num_rows: int, workers: int
) -> None:
    global _work
    try:
        tasks = read_tasks(config, base_dir=base_dir)
        _work = (tasks, spec.build())
        tasks.columns  # noqa: B018, found out once, before the fork
        with ProcessPoolExecutor(workers, mp_context=multiprocessing.get_context("fork"), initializer=_one_thread) as pool:
            _pass_on(results, config, pool, num_rows, workers)
    except BrokenPipeError:
        pass  # nobody listens any more
    except BaseException as error:
        results.send(_sendable(error))


def _pass_on(results: Connection, config: DatasetConfig, pool: ProcessPoolExecutor, num_rows: int, workers: int) -> None:
    chunks = split_rows(num_rows)
    pending: deque[tuple[range, Future[Chunk]]] = deque()

    def submit(count: int) -> None:
        pending.extend((rows, pool.submit(_check, rows)) for rows in itertools.islice(chunks, count))

    try:
        submit(workers * CHUNKS_AHEAD)
        while pending:
            rows, future = pending.popleft()
            results.send(future.result())
            submit(1)
    except BrokenProcessPool as error:
        suspects = pending[-1][0].stop if pending else rows.stop
        raise DataError(
            f"{config.path}: a worker ended by itself while tasks {rows.start + 1} to {suspects} were checked: a decoder "
            "crashed, or memory ran out. --workers 1 shows which one, in the same process."
        ) from error
    except BaseException:
        pool.shutdown(wait=False, cancel_futures=True)
        raise


def _one_thread() -> None:
    torch = sys.modules.get("torch")
    if torch is not None:
        torch.set_num_threads(1)  # the workers are the parallelism; pools of threads do not survive a fork


def _check(rows: range) -> Chunk:
    tasks, checker = _work
    return check_rows(tasks, checker, rows)


def _sendable(error: BaseException) -> Any:
    """``error`` if it survives the way to the other process, else its words."""
    from multiprocessing.reduction import ForkingPickler

    try:
        ForkingPickler.loads(ForkingPickler.dumps(error))
    except Exception:
        return RuntimeError(f"{type(error).__name__}: {error}")
    return error
