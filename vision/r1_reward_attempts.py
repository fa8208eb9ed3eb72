"""The command ``mmrl attempts``: how many attempts a judge needs at each pair, and what it wrote when it was right.

This is the cold start of R1-Reward (arXiv 2505.02835): a policy is asked for a verdict up to three times. Where one agrees with
people, its reasoning is a demonstration for supervised warm-up; pairs that took two attempts or more, or were never solved, are
those that reinforcement learning is spent on (`AttemptsConfig`, ``keep: solved`` and ``keep: hard``).
"""

from __future__ import annotations

import argparse
import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mmrl.errors import ConfigError, DataError

if TYPE_CHECKING:
    from mmrl.chat import ChatTask
    from vision.preferences import PairTasks
    from vision.preferences_config import AttemptsConfig

SUMMARY = "count a judge's attempts at each training pair and keep its right verdicts (vision)"


@dataclass(frozen=True, kw_only=True)
class Attempt:
    """What became of the attempts at one pair."""

    index: int
    """The pair's place in its source."""
    id: str
    label: int
    """Where the better response was shown, 1 or 2."""
    attempts: int
    """How many there were; the last one is right if ``solved``."""
    solved: bool
    demonstration: str = ""
    """The completion that was right."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    parser.add_argument("config", type=Path, metavar="CONFIG", help="a run's YAML file whose tasks are pairs to judge")
    parser.add_argument(
        "overrides", nargs="*", metavar="KEY=VALUE", help="values to change, for example rollout.temperature=0.7"
    )
    parser.add_argument("--output", type=Path, required=True, metavar="FILE", help="jsonl file to write")
    parser.add_argument("--attempts", type=int, default=3, metavar="N", help="most attempts at a pair (default 3)")
    parser.add_argument("--num-pairs", type=int, metavar="N", help="look at the first N training pairs (default: all)")
    parser.add_argument("--checkpoint", type=Path, help="a checkpoint of the run; absent asks the config's own policy")


def run(arguments: argparse.Namespace) -> int:
    """Run the command; the exit code."""
    import torch

    from mmrl.checkpoint import checkpoint_directory, replace_text, verify_checkpoint
    from mmrl.config import apply_overrides, read_config, validate
    from vision.adapter import build_adapter
    from vision.config import VisionRunConfig
    from vision.preferences import PairTasks

    if arguments.attempts < 1:
        raise ConfigError(f"--attempts is {arguments.attempts}; expected 1 or more.")
    tree = apply_overrides(read_config(arguments.config), arguments.overrides)
    config = validate(tree, VisionRunConfig, str(arguments.config))
    if config.trainer.num_threads:
        torch.set_num_threads(config.trainer.num_threads)
    adapter = build_adapter(config)
    tasks = adapter.task_source("train")
    if not isinstance(tasks, PairTasks) or tasks.attempts is not None:
        raise ConfigError(f"{arguments.config}: tasks.name is {config.tasks.name!r}; expected pairs to judge without attempts.")
    policy = adapter.build_policy()
    if arguments.checkpoint is not None:
        checkpoint = checkpoint_directory(arguments.checkpoint)
        verify_checkpoint(checkpoint)
        adapter.load_policy(policy, checkpoint / "policy")
    total = min(len(tasks), arguments.num_pairs or len(tasks))
    found = list(
        attempt_pairs(
            adapter, policy, tasks, total=total, attempts=arguments.attempts, batch_size=config.evaluation.batch_size,
            seed=config.seed,
        )
    )  # fmt: skip
    arguments.output.parent.mkdir(parents=True, exist_ok=True)
    replace_text(arguments.output, "".join(json.dumps(asdict(entry), ensure_ascii=False) + "\n" for entry in found))
    print("\n".join([*summary(found), f"attempts  {arguments.output}"]))
    return 0


def attempt_pairs(
    adapter: Any, policy: Any, tasks: PairTasks, *, total: int, attempts: int, batch_size: int, seed: int
) -> Iterator[Attempt]:
    """Sample verdicts on the first ``total`` pairs until one is right, ``attempts`` times at most; in order."""
    from mmrl.sampling import rollout_seeds
    from vision.r1_reward import r1_result

    for start in range(0, total, batch_size):
        indices = range(start, min(start + batch_size, total))
        shown = {index: tasks[index] for index in indices}
        right: dict[int, tuple[int, str]] = {}
        for attempt in range(1, attempts + 1):
            open_pairs = [index for index in indices if index not in right]
            if not open_pairs:
                break
            # The seed of an attempt depends on its pair, not on which others are still open.
            seeds = rollout_seeds(seed, start, attempt, len(indices))[[index - start for index in open_pairs]]
            batch = adapter.rollout(policy, [shown[index] for index in open_pairs], group_size=1, seeds=seeds)
            for index, completion in zip(open_pairs, batch.outcomes):
                if r1_result(shown[index], completion):
                    right[index] = (attempt, completion.text)
        for index in indices:
            yield _record(index, tasks.pairs[index].id, shown[index], right.get(index), attempts)


def read_attempts(config: AttemptsConfig, base_dir: Path) -> list[Attempt]:
    """The pairs that ``config`` keeps, without their demonstrations for ``keep: hard``. Raises `DataError`."""
    path = base_dir / config.file
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except OSError as error:
        raise DataError(
            f"tasks.attempts.file {config.file}: cannot be read ({error.strerror}); write it with mmrl attempts."
        ) from error
    entries = []
    for number, line in enumerate(lines, start=1):
        try:
            entries.append(Attempt(**json.loads(line)))
        except (ValueError, TypeError) as error:
            raise DataError(f"{config.file}:{number}: not a line of mmrl attempts ({error}).") from error
    kept = keep_attempts(entries, keep=config.keep, min_attempts=config.min_attempts)
    if not kept:
        raise DataError(
            f"{config.file}: none of {len(entries)} pairs is {config.keep}; lower min_attempts or attempt more pairs."
        )
    return kept


def keep_attempts(entries: Sequence[Attempt], *, keep: str, min_attempts: int = 2) -> list[Attempt]:
    """``solved`` pairs with what to imitate, or ``hard`` ones (at least ``min_attempts``, or never solved) without."""
    if keep == "solved":
        return [entry for entry in entries if entry.solved]
    hard = [entry for entry in entries if not entry.solved or entry.attempts >= min_attempts]
    return [Attempt(**(asdict(entry) | {"demonstration": ""})) for entry in hard]


def summary(entries: Sequence[Attempt]) -> list[str]:
    """How many pairs took how many attempts, and how many of the hard ones had the better response first."""
    solved = Counter(entry.attempts for entry in entries if entry.solved)
    rows: Mapping[str, int] = {
        **{f"right at attempt {count}": solved[count] for count in sorted(solved)},
        "never right": sum(not entry.solved for entry in entries),
    }
    hard = keep_attempts(entries, keep="hard")
    lines = [f"{name:<28} {count:>7}  {count / len(entries):.3f}" for name, count in rows.items()]
    first = sum(entry.label == 1 for entry in hard)
    return [*lines, f"{'hard, better one first':<28} {first:>7} of {len(hard)}"]


def _record(index: int, name: str, task: ChatTask, right: tuple[int, str] | None, attempts: int) -> Attempt:
    label = int(task.answer)
    if right is None:
        return Attempt(index=index, id=name, label=label, attempts=attempts, solved=False)
    return Attempt(index=index, id=name, label=label, attempts=right[0], solved=True, demonstration=right[1])
