"""Rollouts that can be cited: which episodes are run, running them, and what is written down of each.

An episode is decided by its number alone: episode ``i`` of a family has the layout of seed ``first_seed + i``, the goal that
``reset(seed=...)`` of the family's gymnasium environment draws, and its instruction. Nothing depends on how episodes are
batched or shared among processes. Records go to ``episodes.jsonl`` as they are made, so an evaluation that was interrupted goes
on where it stopped. `robotics.evaluation_summary` makes numbers of them. No LeRobot here: its import takes longer
than a hundred episodes of an expert.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import multiprocessing
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from contextlib import closing
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from mmrl.checkpoint import replace_text
from mmrl.errors import ConfigError, DataError, MMRLError
from robotics.envs.families import FAMILIES, TaskFamily, build_family
from robotics.evaluation_actors import EXPERT, Actor, ActorSpec, open_actor
from robotics.rewards import progress, success, success_once
from robotics.rollouts import Episode, limits_of, run_episodes
from robotics.tasks import RobotTask
from robotics.world import ArmWorld

VARIANTS = ("seen", "unseen", "empty", "wrong")
"""Words of the instruction: as in training, in phrasings that training never uses, none, and those of something else."""
SWEEPABLE = ("mass", "friction", "damping", "servo")
"""Physics that a sweep multiplies; see `robotics.envs.perturbations.scale_parameters`."""
EPISODES, DIVERGED = "episodes.jsonl", "diverged"
Record = dict[str, Any]
"""A line of ``episodes.jsonl``; see `record_of`."""


@dataclass(frozen=True, kw_only=True)
class Plan:
    """Which episodes are run."""

    families: tuple[str, ...]
    num_episodes: int = 50
    """Of each family."""
    first_seed: int = 1_000_000
    variants: tuple[str, ...] = ("seen",)
    """Some of `VARIANTS`; the first is the one that counts."""
    max_env_steps: int | None = None
    """Time limit in control steps; each family's own when absent."""
    sweep: Mapping[str, tuple[float, ...]] = field(default_factory=dict)
    """Multipliers of some of `SWEEPABLE`; all combinations are run besides the nominal physics, with the first variant."""

    def __post_init__(self) -> None:
        for name, values, known in (
            ("tasks", self.families, FAMILIES),
            ("instructions", self.variants, VARIANTS),
            ("sweep", self.sweep, SWEEPABLE),
        ):
            unknown = [value for value in values if value not in known]
            if unknown:
                raise ConfigError(f"{name}: {', '.join(unknown)} not known; expected some of: {', '.join(known)}.")
            if len(set(values)) != len(values) or not (values or name == "sweep"):
                raise ConfigError(f"{name} is {', '.join(values) or 'empty'}; expected at least one, each once.")
        if self.num_episodes < 1 or self.first_seed < 0:
            raise ConfigError(
                f"episodes is {self.num_episodes} and seed {self.first_seed}; expected at least 1 episode, and 0 or more."
            )

    def attempts(self) -> list[Attempt]:
        """All episodes in order: variants of the nominal physics, then the sweep."""
        nominal = [(variant, ()) for variant in self.variants]
        cells = itertools.product(*([(name, value) for value in values] for name, values in self.sweep.items()))
        swept = [(self.variants[0], cell) for cell in cells] if self.sweep else []
        families = {name: build_family(name) for name in self.families}
        return [
            Attempt(index=index, variant=variant, perturbation=cell, task=_task(family, self.first_seed + index, variant))
            for variant, cell in nominal + swept
            for family in families.values()
            for index in range(self.num_episodes)
        ]


@dataclass(frozen=True, kw_only=True)
class Attempt:
    """One episode that is to be run."""

    task: RobotTask
    index: int
    """Of its family; ``task.seed`` is the plan's first seed plus this."""
    variant: str
    perturbation: tuple[tuple[str, float], ...] = ()

    @property
    def key(self) -> str:
        """Names the episode within a plan."""
        parts = [self.task.family, str(self.index), self.variant, *(f"{name}={value:g}" for name, value in self.perturbation)]
        return "/".join(parts)


def evaluate(
    spec: ActorSpec,
    plan: Plan,
    directory: Path,
    *,
    actor: Actor | None = None,
    num_envs: int = 64,
    num_workers: int = 1,
    num_threads: int = 1,
    on_records: Callable[[Sequence[Record], int, int], None] = lambda records, done, total: None,
) -> list[Record]:
    """Run what ``directory`` has no record of yet; the records of all episodes of ``plan``, in its order.

    ``num_envs`` simulations at a time in each of ``num_workers`` processes of ``num_threads`` simulation threads; none of these
    changes a record. ``actor`` is an opened ``spec``. ``on_records(new, done, total)`` is told of progress.
    """
    attempts = plan.attempts()
    log = EpisodeLog(directory / EPISODES)
    done = {key: log.records[key] for key in (attempt.key for attempt in attempts) if key in log.records}
    on_records(list(done.values()), len(done), len(attempts))
    pending = [attempt for attempt in attempts if attempt.key not in done]
    size = max(1, min(num_envs, -(-len(pending) // num_workers)))
    batches = list(_batches(pending, size))
    with closing(log):
        for records in _run(spec, actor, batches, plan, directory, num_workers=num_workers, num_threads=num_threads):
            log.append(records)
            done |= {record["key"]: record for record in records}
            on_records(records, len(done), len(attempts))
    records = [done[attempt.key] for attempt in attempts]
    replace_text(directory / EPISODES, "".join(map(_line, records)))
    return records


def run_attempts(
    actor: Actor, attempts: Sequence[Attempt], *, max_env_steps: int | None = None, num_threads: int = 1
) -> tuple[list[Episode], list[Record]]:
    """Run ``attempts``, all in one scene, side by side."""
    tasks = [attempt.task for attempt in attempts]
    world = ArmWorld(tasks, num_threads=num_threads, cameras=actor.cameras)
    with closing(world):
        perturb(world, attempts)
        limits = limits_of(tasks, execution_horizon=actor.execution_horizon, max_env_steps=max_env_steps)
        driver = actor.driver(world, tasks, limits.num_decisions)
        episodes = run_episodes(world, driver.decide, limits)
        joint_limits = world.physics.joint_limits
    records = [
        record_of(attempt, episode, out_of_range=int(far), joint_limits=joint_limits)
        for attempt, episode, far in zip(attempts, episodes, driver.out_of_range)
    ]
    return episodes, records


def perturb(world: ArmWorld, attempts: Sequence[Attempt]) -> None:
    """Give each row of ``world`` the physics of its attempt; the initial states stay those of the nominal physics."""
    names = {name for attempt in attempts for name, _ in attempt.perturbation}
    if names:
        scales = {f"{name}_scale": np.array([dict(each.perturbation).get(name, 1.0) for each in attempts]) for name in names}
        world.physics.set_parameters(np.arange(len(attempts)), **scales)


def record_of(attempt: Attempt, episode: Episode, *, out_of_range: int, joint_limits: np.ndarray) -> Record:
    """What is kept of an episode.

    Rewards count up to and including the last control step, and the largest of all-negative rewards is negative; without a step
    it is null. ``out_of_range`` counts decisions that saw a state far outside the policy's training range, ``clipped`` commands
    beyond the joint limits.
    """
    task = attempt.task
    left = progress(task, episode)
    commands = episode.commands
    clipped = ((commands < joint_limits[:, 0] - 1e-6) | (commands > joint_limits[:, 1] + 1e-6)).any(axis=1)
    return {
        "key": attempt.key,
        "task": task.family,
        "goal": task.goal,
        "episode": attempt.index,
        "seed": task.seed,
        "variant": attempt.variant,
        "instruction": task.instruction,
        "perturbation": dict(attempt.perturbation),
        "success": bool(success(task, episode)),
        "success_once": bool(success_once(task, episode)),
        "progress": left,
        "sum_reward": float(episode.step_rewards.sum()),
        "max_reward": float(episode.step_rewards.max()) if episode.num_steps else None,
        "num_steps": episode.num_steps,
        "stop_reason": episode.stop_reason,
        "out_of_range": out_of_range,
        "clipped": int(clipped.sum()),
        "initial_state": hashlib.sha256(episode.initial_state.tobytes()).hexdigest()[:16],
    }


class EpisodeLog:
    """``episodes.jsonl``: appended and synced, so that what it holds survives a crash; a line that a crash tore is dropped."""

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self.records, whole = _whole_lines(path)
        self._file = path.open("ab")
        self._file.truncate(whole)

    def append(self, records: Sequence[Record]) -> None:
        """Write and sync."""
        self._file.write("".join(map(_line, records)).encode())
        self._file.flush()
        os.fsync(self._file.fileno())

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def read_records(path: Path) -> list[Record]:
    """The whole lines of an ``episodes.jsonl``."""
    return list(_whole_lines(path)[0].values())


def other_instruction(family: TaskFamily, goal: str, seed: int) -> str:
    """What somebody who wants something else would say: another goal of the family, or of another family in the scene."""
    rng = np.random.default_rng([seed, 3])
    others = [(family, other) for other in family.goals if other != goal]
    if not others:
        families = [build_family(name) for name in FAMILIES if name != family.name]
        others = [(each, other) for each in families if each.scene == family.scene for other in each.goals]
    chosen, other = others[int(rng.integers(len(others)))]
    return chosen.instruction(other, seed)


def _whole_lines(path: Path) -> tuple[dict[str, Record], int]:
    """Records by key, and the bytes that they take."""
    records, whole = {}, 0
    lines = path.read_bytes().splitlines(keepends=True) if path.is_file() else []
    for number, line in enumerate(lines, start=1):
        if not line.endswith(b"\n"):
            break
        try:
            record = json.loads(line)
            records[record["key"]] = record
        except (KeyError, TypeError, ValueError) as error:
            raise DataError(f"{path}: line {number} is not a record ({error!r}); restore it, or --overwrite.") from error
        whole += len(line)
    return records, whole


def _task(family: TaskFamily, seed: int, variant: str) -> RobotTask:
    goal = family.draw_goal(seed)
    words = {
        "seen": lambda: family.instruction(goal, seed),
        "unseen": lambda: family.instruction(goal, seed, held_out=True),
        "empty": lambda: "",
        "wrong": lambda: other_instruction(family, goal, seed),
    }
    task = RobotTask(
        id=f"{family.name}/{seed}/{goal}", domain=family.name, family=family.name, goal=goal, instruction="", seed=seed
    )
    return replace(task, instruction=words[variant]())


def _batches(attempts: Sequence[Attempt], size: int) -> Iterator[list[Attempt]]:
    """At most ``size`` attempts of one scene, nominal ones apart: physics of its own makes every row of a batch slower."""
    scenes = {name: build_family(name).scene for name in {attempt.task.family for attempt in attempts}}
    kinds: dict[tuple[str, bool], list[Attempt]] = {}
    for attempt in attempts:
        kinds.setdefault((scenes[attempt.task.family], bool(attempt.perturbation)), []).append(attempt)
    for group in kinds.values():
        for start in range(0, len(group), size):
            yield group[start : start + size]


def _run(
    spec: ActorSpec, actor: Actor | None, batches: Sequence[Sequence[Attempt]], plan: Plan, directory: Path,
    *, num_workers: int, num_threads: int,
) -> Iterator[list[Record]]:  # fmt: skip
    if num_workers == 1 or len(batches) <= 1:
        actor = (actor or open_actor(spec)) if batches else None
        for batch in batches:
            yield _records(actor, batch, plan.max_env_steps, num_threads, directory)
        return
    pool = ProcessPoolExecutor(
        num_workers, mp_context=_context(spec), initializer=_open_here,
        initargs=(spec, plan.max_env_steps, num_threads, directory),
    )  # fmt: skip
    try:
        for future in as_completed([pool.submit(_work_here, batch) for batch in batches]):
            yield future.result()
    except BrokenProcessPool as error:
        raise MMRLError(
            "a worker process was killed (out of memory?); finished episodes are kept: run again with --resume and fewer "
            "--workers or --num-envs."
        ) from error
    finally:
        pool.shutdown(cancel_futures=True)


def _context(spec: ActorSpec) -> multiprocessing.context.BaseContext:
    """Processes that inherit nothing of this one (its threads, its OpenGL); where possible LeRobot is loaded once for all."""
    if "forkserver" not in multiprocessing.get_all_start_methods():
        return multiprocessing.get_context("spawn")
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([__name__ if spec.source == EXPERT else "robotics.evaluation_policy"])
    return context


_HERE: dict[str, Any] = {}  # of a worker process


def _open_here(spec: ActorSpec, max_env_steps: int | None, num_threads: int, directory: Path) -> None:
    torch.set_num_threads(1)
    _HERE.update(spec=spec, settings=(max_env_steps, num_threads, directory))


def _work_here(batch: Sequence[Attempt]) -> list[Record]:
    if "actor" not in _HERE:
        _HERE["actor"] = open_actor(_HERE["spec"])
    return _records(_HERE["actor"], batch, *_HERE["settings"])


def _records(
    actor: Actor, batch: Sequence[Attempt], max_env_steps: int | None, num_threads: int, directory: Path
) -> list[Record]:
    """Run a batch; the states and commands of episodes that diverged are saved for whoever wants to know why."""
    episodes, records = run_attempts(actor, batch, max_env_steps=max_env_steps, num_threads=num_threads)
    for record, episode in zip(records, episodes):
        if not episode.sound:
            path = directory / DIVERGED / f"{record['key'].replace('/', '_')}.npz"
            path.parent.mkdir(parents=True, exist_ok=True)
            np.savez(path, initial_state=episode.initial_state, final_state=episode.final_state, commands=episode.commands)
            record["saved"] = path.relative_to(directory).as_posix()
    return records


def _line(record: Record) -> str:
    return json.dumps(record, allow_nan=False) + "\n"
