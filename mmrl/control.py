"""Control measurements: the same tasks with media that say nothing, or with those of other tasks.

What a policy still gets right there it did not get from its media. Shuffling keeps the kinds and the number of media and gives
each task those of another one; blanking keeps their sizes and lengths.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from mmrl.adapter import Adapter
from mmrl.chat import MEDIA_KINDS, ChatTask, media_parts
from mmrl.errors import ConfigError
from mmrl.statistics import mean_interval, paired_difference_interval


def control_tasks(adapter: Adapter, tasks: Sequence[Any], kind: str) -> list[Any | None]:
    """``tasks`` with other media; None for a task to which the control does not apply (no media, or none to swap with).

    Raises `ConfigError` for tasks that are not conversations.
    """
    strange = next((task for task in tasks if not isinstance(task, ChatTask)), None)
    if strange is not None:
        raise ConfigError(f"evaluation.control is {kind!r}, but task {strange.id!r} is no conversation with media; use none.")
    if kind == "shuffle":
        return shuffled_media(tasks)
    return [with_media(task, adapter.blank_media(task)) if any(media_parts(task)) else None for task in tasks]


def shuffled_media(tasks: Sequence[ChatTask]) -> list[ChatTask | None]:
    """Each task with the media of the next one that has as many of the same kinds, and that is not the same task.

    Prefers one with another answer, since media with the same answer would be no control.
    """
    alike: dict[tuple[str, ...], list[int]] = {}
    for index, task in enumerate(tasks):
        alike.setdefault(tuple(kind for kind, _ in media_parts(task)), []).append(index)
    result: list[ChatTask | None] = [None] * len(tasks)
    for kinds, members in alike.items():
        if not kinds:
            continue
        for place, index in enumerate(members):
            following = [*members[place + 1 :], *members[:place]]
            others = [other for other in following if tasks[other].id != tasks[index].id]
            other = next((i for i in others if tasks[i].answer != tasks[index].answer), others[0] if others else None)
            if other is not None:
                result[index] = with_media(tasks[index], [ref for _, ref in media_parts(tasks[other])])
    return result


def with_media(task: ChatTask, refs: Sequence[Any]) -> ChatTask:
    """``task`` with its media replaced in order by ``refs``, of the same kinds."""
    supply = iter(refs)

    def changed(part: Mapping[str, Any]) -> Mapping[str, Any]:
        return {**part, part["type"]: next(supply)} if part["type"] in MEDIA_KINDS else part

    messages = tuple({**message, "content": [changed(part) for part in message["content"]]} for message in task.messages)
    return replace(task, messages=messages)


def paired_gap(pairs: Sequence[tuple[float, float]]) -> dict[str, float | int | None]:
    """Mean of ``with - without`` over the same tasks and its 95% interval.

    Newcombe's for paired proportions when every value is 0 or 1, else Student's of the differences.
    """
    count = len(pairs)
    if count == 0:
        return {"n": 0, "mean": None, "low": None, "high": None}
    if all(value in (0.0, 1.0) for pair in pairs for value in pair):
        cells = [sum(pair == cell for pair in pairs) for cell in ((1.0, 1.0), (1.0, 0.0), (0.0, 1.0), (0.0, 0.0))]
        mean, low, high = paired_difference_interval(*cells)
        return {"n": count, "mean": mean, "low": low, "high": high}
    differences = [first - second for first, second in pairs]
    low, high = (None if bound != bound else bound for bound in mean_interval(differences))
    return {"n": count, "mean": sum(differences) / count, "low": low, "high": high}
