"""Do awkward files, configs and completions ever end in a traceback, a hang, or in silence?

    python benchmarks/fuzz.py --examples 200000 --seed 0

hypothesis draws the number of each example, and the example follows from it (`fuzzing`); the shares are those of `SHARES`. A
finding is an exception that is none of ours, a broken promise (see the modules' docstrings), or an example that takes more than
`LIMIT_S` seconds of CPU; equal ones are counted together and shown with the number that gives them back (``--only TARGET
--number N``). Exits with 1 if there are any.
"""

from __future__ import annotations

import argparse
import gc
import importlib
import json
import logging
import os
import signal
import sys
import time
import traceback
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from random import Random
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "benchmarks")]
SHARES = {"dataset_files": 0.1, "configs": 0.4, "completions": 0.5}
"""Of all examples, by module of `fuzzing`."""
LIMIT_S = 5.0
BATCH = 5000
"""Examples that hypothesis draws at a time; it remembers those of a batch."""


class Hang(BaseException):
    """An example took too long."""


@dataclass
class Finding:
    """Examples that failed in one place."""

    what: str
    where: str
    number: int
    """Of the first of them."""
    example: str
    count: int = 0


@dataclass
class Outcome:
    """What became of one target."""

    examples: int = 0
    cpu_seconds: float = 0.0
    slowest_seconds: float = 0.0
    counts: dict[str, int] = field(default_factory=dict)
    findings: list[Finding] = field(default_factory=list)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--examples", type=int, default=200_000, help="of all targets together")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", choices=list(SHARES), help="one target; it then has all examples")
    parser.add_argument("--number", type=int, help="check this example alone, with its traceback (needs --only)")
    parser.add_argument("--output", type=Path, help="also write the outcome as JSON")
    arguments = parser.parse_args()
    _be_quiet()
    if arguments.number is not None:
        target = _target(arguments.only)
        example = target.draw(Random(arguments.number))
        print(example)
        target.check(example)
        return 0
    shares = {arguments.only: 1.0} if arguments.only else SHARES
    outcomes = {}
    for name, share in shares.items():
        outcome = outcomes[name] = run(name, round(share * arguments.examples), arguments.seed)
        rate = outcome.examples / max(outcome.cpu_seconds, 1e-9)
        print(
            f"{name}: {outcome.examples} examples in {outcome.cpu_seconds:.0f} s of CPU ({rate:.0f} a second, the slowest "
            f"{outcome.slowest_seconds:.2f} s), {len(outcome.findings)} findings {outcome.counts or ''}",
            flush=True,
        )
        for finding in outcome.findings:
            print(
                f"  {finding.count} times, first number {finding.number}: {finding.what}\n"
                f"    {finding.where}\n    {finding.example}"
            )
    if arguments.output:
        arguments.output.write_text(json.dumps({name: asdict(outcome) for name, outcome in outcomes.items()}, indent=1))
    return int(any(outcome.findings for outcome in outcomes.values()))


def run(name: str, examples: int, seed: int) -> Outcome:
    """Check so many examples of a target."""
    import hypothesis
    from hypothesis import strategies as st

    target, outcome, found = _target(name), Outcome(), {}

    def attempt(number: int) -> None:
        started = time.process_time()
        failure = check_one(target, number)
        seconds = time.process_time() - started
        outcome.examples += 1
        outcome.cpu_seconds += seconds
        outcome.slowest_seconds = max(outcome.slowest_seconds, seconds)
        if failure is not None:
            found.setdefault((failure.where, failure.what[:60]), failure).count += 1

    while outcome.examples < examples:
        batch = min(BATCH, examples - outcome.examples)
        settings = hypothesis.settings(
            max_examples=batch, database=None, deadline=None, phases=[hypothesis.Phase.generate], derandomize=False
        )
        drawn = hypothesis.given(st.integers(0, 2**63))(attempt)
        hypothesis.seed(seed * 1_000_003 + outcome.examples)(settings(drawn))()
    outcome.findings = sorted(found.values(), key=lambda finding: -finding.count)
    outcome.counts = dict(getattr(target, "COUNTS", {}))
    return outcome


def check_one(target: Any, number: int) -> Finding | None:
    """What is wrong with the example of this number."""
    example = target.draw(Random(number))
    try:
        with cpu_limit(LIMIT_S):
            target.check(example)
    except (Exception, Hang) as error:
        frames = [frame for frame in traceback.extract_tb(error.__traceback__) if Path(frame.filename).is_relative_to(ROOT)]
        where = " < ".join(f"{Path(frame.filename).name}:{frame.lineno}" for frame in reversed(frames[-4:]))
        return Finding(what=f"{type(error).__name__}: {error}"[:500], where=where, number=number, example=repr(example)[:2000])
    return None


@contextmanager
def cpu_limit(seconds: float) -> Iterator[None]:
    """Raise `Hang` after so many seconds of CPU, which a busy machine does not use up."""

    def ring(signum: int, frame: Any) -> None:
        raise Hang(f"more than {seconds:g} s")

    before = signal.signal(signal.SIGPROF, ring)
    signal.setitimer(signal.ITIMER_PROF, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, before)


def _target(name: str) -> Any:
    target = importlib.import_module(f"fuzzing.{name}")
    getattr(target, "prepare", lambda: None)()
    gc.freeze()  # so that collecting what was imported does not count as an example's time
    return target


def _be_quiet() -> None:
    os.environ["HF_HUB_OFFLINE"] = "1"
    logging.disable(logging.WARNING)
    warnings.simplefilter("ignore")  # of decoders about damaged media, of Python about texts that it is asked to parse


if __name__ == "__main__":
    sys.exit(main())
