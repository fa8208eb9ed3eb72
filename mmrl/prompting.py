"""Changes of prompts that training makes and evaluation does not: templates, inoculation, scaffolds, given beginnings.

Templates and inoculation are the same for all rollouts of a group, in sampling and in the update. A scaffold differs between
the rollouts of a group and is seen in sampling only. All of it is a function of the run's seed, the train step and the group.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from mmrl.chat import ChatTask, Completion, around_question
from mmrl.config import RunConfig
from mmrl.errors import ConfigError, DataError
from mmrl.prefix_rft import hybrid_rows
from mmrl.prompting_config import InoculationConfig, ScaffoldConfig, TemplateConfig
from mmrl.types import Task

_TEMPLATES, _INOCULATION, _SCAFFOLDS = 11, 12, 13  # keep the streams of numbers apart
FORMAT_COLUMN = "answer_format"
"""Column that a template's ``tags``, ``sections`` and ``prefill`` are passed to reward terms in."""


def require_conversations(config: RunConfig, source: Sequence[Task]) -> None:
    """Raise `ConfigError` when the config changes prompts and the tasks have none, or changes them in two ways at once."""
    names = ("templates", "inoculation", "scaffold", "demonstration_prefix")
    used = [f"prompting.{name}" for name in names if getattr(config.prompting, name)]
    used += ["sampling.failure_prefix"] if config.sampling.failure_prefix is not None else []
    if used and not isinstance(source[0], ChatTask):
        raise ConfigError(
            f"{', '.join(used)}: changes what a language policy is asked, but the tasks of modality {config.modality!r} are "
            f"no conversations ({type(source[0]).__name__}); remove it."
        )
    if {"prompting.templates", "sampling.failure_prefix"} <= set(used):
        raise ConfigError(
            "prompting.templates and sampling.failure_prefix: failures are those of plain prompts, and both say how an answer "
            "starts; keep one of them."
        )
    unequal = [name for name in ("prompting.scaffold", "prompting.demonstration_prefix") if name in used]
    unequal += ["algorithm.source: demonstrations"] if config.algorithm.source == "demonstrations" else []
    if config.sampling.allocation is not None and unequal:
        raise ConfigError(f"sampling.allocation and {unequal[0]} both say what a group is made of; keep one of them.")
    if "prompting.demonstration_prefix" in used:
        _require_ordinary_rollouts(config)


def _require_ordinary_rollouts(config: RunConfig) -> None:
    """Raise `ConfigError` where no sampled rollout could be compared with the hybrid ones."""
    rows, group_size = config.prompting.demonstration_prefix.rows, config.sampling.group_size
    if rows >= group_size:
        raise ConfigError(
            f"prompting.demonstration_prefix.rows is {rows}, sampling.group_size {group_size}; at least one rollout of a group "
            "must be ordinary."
        )
    if config.algorithm.source == "demonstrations":
        raise ConfigError("prompting.demonstration_prefix needs rollouts; algorithm.source is 'demonstrations'. Remove one.")
    if config.sampling.failure_prefix is not None:
        raise ConfigError("prompting.demonstration_prefix and sampling.failure_prefix both say how an answer starts; keep one.")


def changed_tasks(config: RunConfig, tasks: Sequence[Task], groups: Sequence[int], train_step: int) -> list[Task]:
    """``tasks`` as ``groups`` of a step are asked them: one template each, and the inoculation."""
    prompting = config.prompting
    changed = list(tasks)
    if prompting.templates:
        draws = [_generator(config.seed, _TEMPLATES, train_step, group).integers(len(prompting.templates)) for group in groups]
        changed = [apply_template(task, prompting.templates[draw]) for task, draw in zip(changed, draws)]
    if prompting.inoculation is not None:
        share = prompting.inoculation.share
        draws = [_generator(config.seed, _INOCULATION, train_step, group).random() for group in groups]
        changed = [inoculate(task, prompting.inoculation) if draw < share else task for task, draw in zip(changed, draws)]
    return changed


def apply_template(task: ChatTask, template: TemplateConfig) -> ChatTask:
    """The last user turn inside of the template's text, its prefill, and its rule of format as a column."""
    before, after = template.text.split("{prompt}")
    rule = {"tags": list(template.tags), "sections": list(template.sections)}
    return replace(
        task,
        messages=around_question(task.messages, before, after),
        prefill=template.prefill,
        columns={**task.columns, FORMAT_COLUMN: rule},
    )


def inoculate(task: ChatTask, config: InoculationConfig) -> ChatTask:
    """``task`` with the instruction in its place."""
    if config.place == "before":
        return replace(task, messages=around_question(task.messages, config.text + "\n", ""))
    if config.place == "after":
        return replace(task, messages=around_question(task.messages, "", "\n" + config.text))
    first, rest = task.messages[0], task.messages[1:]
    if first["role"] != "system":
        system = {"role": "system", "content": [{"type": "text", "text": config.text}]}
        return replace(task, messages=(system, first, *rest))
    return replace(
        task, messages=({**first, "content": [*first["content"], {"type": "text", "text": "\n" + config.text}]}, *rest)
    )


def template_format(task: ChatTask, completion: Completion) -> float | None:
    """Reward term: how well an answer has the form that its template asked for.

    The share of ``tags`` that occur exactly once (a quarter each for four), else the share of ``sections`` that occur, else 1;
    prefilled text counts. Does not apply to a task without a template.
    """
    rule = task.columns.get(FORMAT_COLUMN)
    if rule is None:
        return None
    if rule["tags"]:
        return sum(completion.text.count(tag) == 1 for tag in rule["tags"]) / len(rule["tags"])
    if rule["sections"]:
        return sum(section in completion.text for section in rule["sections"]) / len(rule["sections"])
    return 1.0


def rollout_rows(config: RunConfig, tasks: Sequence[ChatTask], groups: Sequence[int], train_step: int) -> list[ChatTask] | None:
    """Each task once per rollout of its group, where rollouts of a group are asked in different ways; else None."""
    if config.prompting.demonstration_prefix is not None:
        return hybrid_rows(config, tasks, groups, train_step)
    return scaffolded_rows(config, tasks, groups, train_step)


def scaffolded_rows(
    config: RunConfig, tasks: Sequence[ChatTask], groups: Sequence[int], train_step: int
) -> list[ChatTask] | None:
    """Each task once per rollout of its group, with the rubrics that it sees as its ``hint``; None when none sees any."""
    scaffold, group_size = config.prompting.scaffold, config.sampling.group_size
    if scaffold is None:
        return None
    progress = (train_step - 1) / max(1, config.trainer.num_steps - 1)
    rows = []
    for task, group in zip(tasks, groups):
        rubrics = rubric_texts(task, scaffold.column)
        for row in range(group_size):
            ratio = scaffold_share(row, group_size, progress, midpoint=scaffold.midpoint, steepness=scaffold.steepness)
            rng = _generator(config.seed, _SCAFFOLDS, train_step, group, row)
            shown = sorted(rng.permutation(len(rubrics))[: round(len(rubrics) * ratio)])
            rows.append(replace(task, hint=_hint(scaffold, [rubrics[index] for index in shown])))
    return rows if any(row.hint for row in rows) else None


def scaffold_share(row: int, group_size: int, progress: float, *, midpoint: float = 0.2, steepness: float = 125.0) -> float:
    """Share of rubrics that rollout ``row`` (from 0) of a group sees when ``progress`` in [0, 1] of the run is over.

    ``(G - 1 - row) / (G - 1)``, 1 for a group of one, times ``1 / (1 + exp(steepness (progress - midpoint)))``.
    """
    within = 1.0 if group_size == 1 else (group_size - 1 - row) / (group_size - 1)
    return within * 0.5 * (1 - math.tanh(0.5 * steepness * (progress - midpoint)))  # exp would overflow


def rubric_texts(task: ChatTask, column: str) -> list[str]:
    """The rubrics of a task. Raises `DataError` naming the task when it has none."""
    entries: Any = task.columns.get(column)
    texts = [
        entry.get("text", entry.get("criterion")) if isinstance(entry, Mapping) else entry
        for entry in (entries if isinstance(entries, Sequence) and not isinstance(entries, str) else ())
    ]
    if not texts or not all(isinstance(text, str) for text in texts):
        raise DataError(
            f"{task.source or task.id}: prompting.scaffold needs rubrics in column {column!r}; found {entries!r:.80}, expected "
            "a list of texts, or of mappings with a text or criterion."
        )
    return texts


def _hint(config: ScaffoldConfig, rubrics: Sequence[str]) -> str:
    return "\n".join(["", config.heading, *(f"- {rubric}" for rubric in rubrics)]) if rubrics else ""


def _generator(*key: int) -> np.random.Generator:
    return np.random.default_rng(key)
