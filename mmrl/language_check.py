"""What a language policy says of a dataset row: its own processor, limits and rewards, without any weights."""

from __future__ import annotations

import importlib
import inspect
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mmrl.data_check import CheckerSpec, open_all, with_reason
from mmrl.data_files import RowError
from mmrl.errors import DataError

if TYPE_CHECKING:
    from mmrl.chat import ChatTask
    from mmrl.config import RunConfig
    from mmrl.language import LanguageAdapter

_SAMPLING = {"max_new_tokens", "temperature", "top_k", "top_p", "ban_media_tokens", "banned_tokens", "max_rows", "share_prefix"}
"""Keys of ``rollout`` that say nothing about prompts."""
_PROCESSOR_FILES = (".json", ".jinja", ".txt", ".model")


def run_spec(builder: str, config: RunConfig) -> CheckerSpec:
    """The check of a run's rows; ``builder`` is ``package.module:name`` of the function that makes its adapter."""
    rollout = {key: value for key, value in config.rollout.model_dump(mode="json").items() if key not in _SAMPLING}
    policy = Path(config.policy.path)
    files = sorted(path for path in policy.iterdir() if path.suffix in _PROCESSOR_FILES) if policy.is_dir() else []
    settings = {
        "builder": builder,
        "rollout": rollout,
        "policy": [config.policy.path, config.policy.revision, config.seed],
        "processor": [(path.name, path.stat().st_size, path.stat().st_mtime_ns) for path in files],
        "rewards": {name: term.function for name, term in config.rewards.items()},
    }
    return CheckerSpec(
        function="mmrl.language_check:build_checker", arguments=(builder, config), settings=json.dumps(settings, sort_keys=True)
    )


def build_checker(builder: str, config: RunConfig) -> LanguageChecker:
    """Load the processor of a run and import its reward functions."""
    module, _, name = builder.partition(":")
    build: Callable[[Any], LanguageAdapter] = getattr(importlib.import_module(module), name)
    return LanguageChecker(config, build(config))


class LanguageChecker:
    """``checker(tasks)`` encodes tasks as a rollout does and looks for what rewards ask of them."""

    def __init__(self, config: RunConfig, adapter: LanguageAdapter) -> None:
        self.adapter = adapter
        self.needed = needed_columns(config, adapter)
        """Reward terms by the column that they ask for."""
        self.expects_answer = "answer" in self.needed

    def __call__(self, tasks: Sequence[ChatTask]) -> list[list[RowError]]:
        try:
            self.adapter.encode(tasks)
        except DataError:
            return [[*self._encoding_errors(task), *self._missing_columns(task)] for task in tasks]
        return [self._missing_columns(task) for task in tasks]

    def _missing_columns(self, task: ChatTask) -> list[RowError]:
        errors = []
        for column, terms in self.needed.items():
            if column != "answer" and column not in task.columns and getattr(task, column, None) is None:
                found = ", ".join(task.columns) or "none"
                detail = f"reward {terms[0]!r} asks for it; this row has {found} besides its prompt and answer."
                errors.append(RowError(column, "missing reward column", detail))
        return errors

    def _encoding_errors(self, task: ChatTask) -> list[RowError]:
        frontend = self.adapter.frontend
        try:
            self.adapter.encode([task])
        except DataError as error:
            # one medium may hide what is wrong with the next, so each is opened by itself
            media = list(open_all(task, lambda kind, ref: frontend.open(task, kind, ref)))
            return media or [with_reason(error, getattr(error, "field", "row"), "refused by the policy")]
        return []


def needed_columns(config: RunConfig, adapter: LanguageAdapter) -> dict[str, list[str]]:
    """What reward terms need of every row, with the terms: ``answer``, or other columns."""
    from mmrl.reward_binding import _further_parameters
    from mmrl.rewards import _import_function

    needed: dict[str, list[str]] = {}
    for name, spec in config.rewards.items():
        if spec.function is None:
            term = adapter.reward_terms.get(name)
            columns = ("answer",) if getattr(term, "reads_answer", False) else ()
        else:
            signature = inspect.signature(_import_function(spec.function, f"rewards.{name}.function"))
            columns = tuple(column for column, required in _further_parameters(signature).items() if required)
        for column in columns:
            needed.setdefault(column, []).append(name)
    needed.pop("media", None)
    return needed
