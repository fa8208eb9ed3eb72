"""One call of ``mmrl rollout``: an output folder, a progress bar, and the files and tables at the end."""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from mmrl.checkpoint import replace_text
from mmrl.errors import CheckpointError, ConfigError, DataError
from mmrl.statistics import sample_size
from robotics.checkpoints import policy_directory
from robotics.evaluation import DIVERGED, EPISODES, Plan, Record, evaluate, perturb, read_records, run_attempts
from robotics.evaluation_actors import EXPERT, Actor, ActorSpec, open_actor
from robotics.evaluation_summary import (
    compare,
    comparison_table,
    describe_protocol,
    eval_info,
    result_table,
    sweep_of,
    sweep_table,
)
from robotics.world import ArmWorld

PROTOCOL, INFO, SWEEP, VERSUS, VIDEOS = "protocol.json", "eval_info.json", "sweep.json", "versus", "videos"
_FILMED = (2, 4)  # successes and failures of each family
_PATIENCE_S = 10.0  # between lines of progress where there is no terminal


class Session:
    """Measures one policy, optionally against another, and leaves ``eval_info.json`` and what belongs to it."""

    def __init__(
        self,
        spec: ActorSpec,
        plan: Plan,
        *,
        directory: Path | None,
        resources: Mapping[str, int],
        console: Console | None = None,
    ) -> None:
        """``directory`` defaults to a folder in the policy's run; ``resources`` are those of `robotics.evaluation.evaluate`."""
        console = console or Console()
        self.console = console if console.is_terminal else Console(file=console.file, width=128)
        self.spec, self.plan, self.resources = spec, plan, dict(resources)
        self.notices: list[str] = []
        self.actor = open_actor(spec, on_notice=self._notice)
        self.directory = directory or default_directory(spec, plan)

    def run(self, *, versus: ActorSpec | None, videos: bool, resume: bool, overwrite: bool) -> dict[str, Any]:
        """The content of ``eval_info.json``."""
        begin = time.monotonic()
        protocol = describe_protocol(self.plan, self.actor)
        other = None if versus is None or _is_output(versus) else open_actor(versus, on_notice=self._notice)
        prepare_directory(self.directory, protocol, resume=resume, overwrite=overwrite)
        records = self._evaluate(self.spec, self.actor, self.plan, self.directory)
        comparison = None
        if versus is not None:
            label, others = self._others(versus, other, protocol, resume=resume)
            variant = self.plan.variants[0]
            comparison = compare(_counted(records, variant), _counted(others, variant), self.plan.families, name=label)
        films = self._film(records) if videos else {}
        seconds = time.monotonic() - begin
        info = eval_info(
            records, self.plan, protocol, seconds=seconds, videos=films, comparison=comparison, notices=self.notices
        )
        _write(self.directory / INFO, info)
        self._show(records, info)
        return info

    def _evaluate(self, spec: ActorSpec, actor: Actor, plan: Plan, directory: Path) -> list[Record]:
        with _Shown(self.console, actor.label) as shown:
            return evaluate(spec, plan, directory, actor=actor, on_records=shown, **self.resources)

    def _others(
        self, versus: ActorSpec, other: Actor | None, protocol: Mapping[str, Any], *, resume: bool
    ) -> tuple[str, list[Record]]:
        """Records of the other policy: measured now, or read from the folder of an earlier evaluation."""
        if other is None:
            folder = Path(versus.source)
            saved = _read(folder / PROTOCOL)
            changed = _differences(saved, protocol, besides=("policy", "instructions", "sweep"))
            if changed:
                raise ConfigError(f"{folder}: measured under another protocol ({changed}); measure that policy again.")
            return saved["policy"]["name"], read_records(folder / EPISODES)
        folder, plan = self.directory / VERSUS, replace(self.plan, variants=self.plan.variants[:1], sweep={})
        prepare_directory(folder, describe_protocol(plan, other), resume=resume, overwrite=False)
        label = other.label if other.label != self.actor.label else f"{other.label} (2)"
        return label, self._evaluate(versus, other, plan, folder)

    def _film(self, records: Sequence[Record]) -> dict[str, list[str]]:
        """Run the first successes and failures of each family once more and draw them; an episode repeats bit for bit."""
        from robotics.media import episode_video

        attempts = {attempt.key: attempt for attempt in self.plan.attempts()}
        films: dict[str, list[str]] = {}
        for family in self.plan.families:
            part = [record for record in _counted(records, self.plan.variants[0]) if record["task"] == family]
            chosen = [
                record
                for outcome, count in zip((True, False), _FILMED)
                for record in [record for record in part if record["success"] == outcome][:count]
            ]
            chosen.sort(key=lambda record: record["episode"])
            again = [attempts[record["key"]] for record in chosen]
            episodes, repeated = run_attempts(self.actor, again, max_env_steps=self.plan.max_env_steps)
            films[family] = []
            for attempt, episode, record, new in zip(again, episodes, chosen, repeated):
                if new != {name: value for name, value in record.items() if name != "saved"}:
                    raise DataError(f"{record['key']}: went otherwise when run again to be filmed; {new} instead of {record}.")
                path = Path(VIDEOS) / family / f"episode_{attempt.index}.mp4"
                with closing(ArmWorld([attempt.task])) as world:
                    perturb(world, [attempt])
                    episode_video(attempt.task, episode, world=world, path=self.directory / path)
                films[family].append(path.as_posix())
            self._print(f"videos  {self.directory / VIDEOS / family}  ({len(chosen)})")
        return films

    def _show(self, records: Sequence[Record], info: Mapping[str, Any]) -> None:
        self.console.print(result_table(info, self.actor.label))
        if "comparison" in info:
            self._show_comparison(info["comparison"])
        if self.plan.sweep:
            sweep = sweep_of(records, self.plan)
            _write(self.directory / SWEEP, sweep)
            self.console.print(sweep_table(sweep))
            if len(self.plan.sweep) <= 2:
                from robotics.media import write_heat_map

                self._print(f"sweep   {write_heat_map(sweep, self.directory / 'sweep.svg')}")
        counts = info["counts"]
        if diverged := counts["stop_reasons"].get("diverged"):
            self._print(f"diverged: {diverged} of {len(records)} episodes count as failures; see {self.directory / DIVERGED}")
        if counts["out_of_range_decisions"]:
            self._print(
                f"out of range: {counts['out_of_range_decisions']} decisions in "
                f"{counts['episodes_with_out_of_range_decisions']} episodes saw a state far outside the training range"
            )
        self._print(f"result  {self.directory / INFO}")

    def _show_comparison(self, comparison: Mapping[str, Any]) -> None:
        self.console.print(comparison_table(comparison, self.actor.label))
        shares = comparison["k"] / comparison["n"], comparison["k_other"] / comparison["n"]
        if comparison["p"] > 0.05 and shares[0] != shares[1]:
            self._print(
                f"not told apart: a difference of this size takes about {sample_size(*shares)} independent episodes of each "
                "(two-sided 5%, power 80%)"
            )

    def _notice(self, text: str) -> None:
        if text not in self.notices:
            self.notices.append(text)
            self._print(f"note: {text}")

    def _print(self, text: str) -> None:
        self.console.print(text, markup=False, highlight=False, soft_wrap=True)


def default_directory(spec: ActorSpec, plan: Plan) -> Path:
    """``rollouts/`` in the run that the policy belongs to, where its report looks; in ``runs/rollouts/`` otherwise."""
    name = "-".join(plan.families)
    if spec.source == EXPERT:
        return Path("runs") / "rollouts" / f"{EXPERT}-{name}"
    directory = policy_directory(Path(spec.source))
    step = directory.parent if directory.name in ("policy", "pretrained_model") else directory
    if step.parent.name == "checkpoints":
        return step.parent.parent / "rollouts" / f"{step.name}-{name}"
    return Path("runs") / "rollouts" / f"{step.name}-{name}"


def prepare_directory(directory: Path, protocol: Mapping[str, Any], *, resume: bool, overwrite: bool) -> None:
    """Make ``directory`` ready; refuse one that holds an evaluation, unless it is to be replaced or goes on as it began."""
    if overwrite:
        for name in (EPISODES, PROTOCOL, INFO, SWEEP, "sweep.svg"):
            (directory / name).unlink(missing_ok=True)
        for name in (DIVERGED, VERSUS, VIDEOS):
            shutil.rmtree(directory / name, ignore_errors=True)
    path = directory / PROTOCOL
    if path.is_file() or (directory / EPISODES).is_file():
        if not resume:
            raise ConfigError(f"{directory} holds an evaluation; --resume goes on with it, --overwrite replaces it.")
        changed = _differences(_read(path), protocol)
        if changed:
            raise ConfigError(
                f"{directory}: was begun under another protocol ({changed}); use --overwrite or another --output."
            )
    directory.mkdir(parents=True, exist_ok=True)
    _write(path, protocol)


class _Shown:
    """A bar with the success rate so far, or a line now and then where there is no terminal."""

    def __init__(self, console: Console, label: str) -> None:
        self.console, self.label = console, label
        self.k = self.n = 0
        self.progress = Progress(
            TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TimeRemainingColumn(),
            console=console, transient=True, disable=not console.is_terminal,
        )  # fmt: skip
        self._bar = self.progress.add_task(label, total=None)
        self._last = time.monotonic()

    def __enter__(self) -> _Shown:
        self.progress.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self.progress.__exit__(*error)

    def __call__(self, records: Sequence[Record], done: int, total: int) -> None:
        self.k, self.n = self.k + sum(record["success"] for record in records), self.n + len(records)
        text = f"{self.label}  success {self.k}/{self.n}" + (f" ({100 * self.k / self.n:.1f}%)" if self.n else "")
        self.progress.update(self._bar, completed=done, total=total, description=text)
        if not self.console.is_terminal and (done == total or time.monotonic() - self._last > _PATIENCE_S):
            self._last = time.monotonic()
            self.console.print(f"{text}  {done} of {total} episodes", markup=False, highlight=False, soft_wrap=True)


def _counted(records: Sequence[Record], variant: str) -> list[Record]:
    """Those that make the result: nominal physics, this variant of the instruction."""
    return [record for record in records if record["variant"] == variant and not record["perturbation"]]


def _is_output(spec: ActorSpec) -> bool:
    return spec.source != EXPERT and (Path(spec.source) / EPISODES).is_file()


def _differences(old: Mapping[str, Any], new: Mapping[str, Any], *, besides: Sequence[str] = ()) -> str:
    names = [name for name in (*new, *(old.keys() - new.keys())) if name not in besides and old.get(name) != new.get(name)]
    return "; ".join(f"{name}: {old.get(name)!r:.100} -> {new.get(name)!r:.100}" for name in names)


def _read(path: Path) -> dict[str, Any]:
    try:
        return dict(json.loads(path.read_text(encoding="utf-8")))
    except (OSError, TypeError, ValueError) as error:
        raise CheckpointError(f"{path}: cannot be read ({error}); restore it, or --overwrite.") from error


def _write(path: Path, tree: Mapping[str, Any]) -> None:
    replace_text(path, json.dumps(tree, indent=1, allow_nan=False) + "\n")
