"""Numbers that can be cited, from the records of `robotics.evaluation`: counts, intervals, paired comparisons, the protocol.

``eval_info.json`` has LeRobot's layout (``per_task``, ``per_group``, ``overall``; of the first instruction variant and the
nominal physics) and beside it ``intervals``, ``variants``, ``counts``, ``comparison`` and ``protocol``.
"""

from __future__ import annotations

import importlib.metadata
import itertools
import platform
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from rich.table import Table

from mmrl import __version__
from mmrl.errors import DataError
from mmrl.statistics import mcnemar_exact, mean_interval, paired_difference_interval, suite_means, wilson_interval
from robotics.assets import sim_asset
from robotics.envs.families import build_family
from robotics.envs.physics import ArmPhysics
from robotics.envs.settled import world_hash
from robotics.evaluation import Plan, Record
from robotics.evaluation_actors import Actor
from robotics.evaluation_checks import gripper_self_test
from robotics.world import CONTROL_HZ

_PACKAGES = ("lerobot", "mujoco", "numpy", "torch")


def describe_protocol(plan: Plan, actor: Actor) -> dict[str, Any]:
    """All that is needed to repeat the evaluation; the gripper of every scene is tried on the way."""
    families = {name: build_family(name) for name in plan.families}
    scenes = {}
    for name in sorted({family.scene for family in families.values()}):
        physics = ArmPhysics(sim_asset(name), control_hz=CONTROL_HZ)
        scenes[name] = {
            "world_hash": world_hash(sim_asset(name)),
            "substeps": physics.num_substeps,
            "timestep_s": physics.model.opt.timestep,
            "gripper_self_test": gripper_self_test(physics),
        }
    return {
        "policy": actor.describe(),
        "tasks": {
            name: {
                "scene": family.scene,
                "max_env_steps": plan.max_env_steps or family.max_env_steps,
                "hold_steps": family.hold_steps,
            }
            for name, family in families.items()
        },
        "episodes_per_task": plan.num_episodes,
        "seeds": [plan.first_seed, plan.first_seed + plan.num_episodes - 1],
        "episode": "layout of seed = first seed + episode; goal drawn by the seed as in reset(seed=...)",
        "success": "the goal holds at the end; an episode ends once it has held for hold_steps",
        "instructions": list(plan.variants),
        "sweep": {name: list(values) for name, values in plan.sweep.items()},
        "control_hz": CONTROL_HZ,
        "scenes": scenes,
        "versions": {
            "mmrl": __version__,
            "python": platform.python_version(),
            **{name: importlib.metadata.version(name) for name in _PACKAGES},
        },
    }


def eval_info(
    records: Sequence[Record], plan: Plan, protocol: Mapping[str, Any], *, seconds: float,
    videos: Mapping[str, Sequence[str]] | None = None, comparison: Mapping[str, Any] | None = None, notices: Sequence[str] = (),
) -> dict[str, Any]:  # fmt: skip
    """The content of ``eval_info.json``; ``videos`` are paths by family, ``seconds`` the wall time of this session."""
    nominal = [record for record in records if not record["perturbation"]]
    variants = {name: summarize([r for r in nominal if r["variant"] == name], plan.families) for name in plan.variants}
    first = [record for record in nominal if record["variant"] == plan.variants[0]]
    by_task = {name: [record for record in first if record["task"] == name] for name in plan.families}
    videos = videos or {}
    groups = {name: _group(part, videos.get(name, ())) for name, part in by_task.items()}
    for name in plan.variants[1:]:
        other = [record for record in nominal if record["variant"] == name]
        variants[name][f"against_{plan.variants[0]}"] = compare(first, other, plan.families, name=name)
    info = {
        "per_task": [
            {
                "task_group": name,
                "task_id": 0,
                "metrics": {
                    "sum_rewards": [record["sum_reward"] for record in part],
                    "max_rewards": [record["max_reward"] for record in part],
                    "successes": [record["success"] for record in part],
                    "video_paths": list(videos.get(name, ())),
                    "predicted_video_paths": [],
                    "success_once": [record["success_once"] for record in part],
                    "seeds": [record["seed"] for record in part],
                },
            }
            for name, part in by_task.items()
        ],
        "per_group": groups,
        "overall": {
            **_group(first, [path for name in plan.families for path in videos.get(name, ())]),
            "eval_s": seconds,
            "eval_ep_s": seconds / max(1, len(records)),
        },
        "intervals": {"confidence": 0.95, **variants[plan.variants[0]]},
        "variants": variants,
        "counts": {
            "stop_reasons": dict(sorted(Counter(record["stop_reason"] for record in records).items())),
            "out_of_range_decisions": sum(record["out_of_range"] for record in records),
            "episodes_with_out_of_range_decisions": sum(record["out_of_range"] > 0 for record in records),
            "clipped_commands": sum(record["clipped"] for record in records),
            "env_steps": sum(record["num_steps"] for record in records),
        },
        "protocol": dict(protocol),
        "notices": list(notices),
    }
    return info | ({"comparison": dict(comparison)} if comparison else {})


def summarize(records: Sequence[Record], families: Sequence[str]) -> dict[str, Any]:
    """``per_task`` shares with Wilson's interval, and the suite's ``macro`` and ``micro`` means with bootstrap intervals.

    Where all episodes ended alike a bootstrap would claim certainty; Wilson's interval of all episodes stands in its place.
    """
    by_task = {name: [record for record in records if record["task"] == name] for name in families}
    suite = suite_means(
        [[float(record["success"]) for record in part] for part in by_task.values()], generator=np.random.default_rng(0)
    )
    if len({record["success"] for record in records}) == 1:
        bounds = wilson_interval(sum(record["success"] for record in records), len(records))
        suite = {name: (values[0], *bounds) for name, values in suite.items()}
    return {
        "per_task": {
            name: {
                "success": _share([record["success"] for record in part]),
                "success_once": _share([record["success_once"] for record in part]),
                "progress": _mean([record["progress"] for record in part]),
            }
            for name, part in by_task.items()
        },
        **{name: dict(zip(("mean", "low", "high"), values)) for name, values in suite.items()},
    }


def compare(first: Sequence[Record], second: Sequence[Record], families: Sequence[str], *, name: str) -> dict[str, Any]:
    """McNemar's exact test of two sets of records on the same initial states, overall and ``per_task``.

    ``b`` episodes only the first solved, ``c`` only the second; ``difference`` is the first's share minus the second's. Raises
    `DataError` where an episode did not start from the same state for both.
    """
    others = {(record["task"], record["episode"]): record for record in second}
    pairs = [(record, others.get((record["task"], record["episode"]))) for record in first]
    for one, other in pairs:
        if other is None or one["initial_state"] != other["initial_state"]:
            raise DataError(
                f"{one['key']}: {'not measured' if other is None else 'another initial state'} with {name}; a paired "
                "comparison needs the same episodes from the same scene and MuJoCo. Measure both again."
            )

    def counted(part: Sequence[tuple[Record, Record]]) -> dict[str, Any]:
        table = Counter((one["success"], other["success"]) for one, other in part)
        both, b, c, neither = (table[key] for key in ((True, True), (True, False), (False, True), (False, False)))
        mean, low, high = paired_difference_interval(both, b, c, neither)
        difference = {"mean": mean, "low": low, "high": high}
        return {
            "n": len(part),
            "k": both + b,
            "k_other": both + c,
            "b": b,
            "c": c,
            "p": mcnemar_exact(b, c),
            "difference": difference,
        }

    per_task = {family: counted([pair for pair in pairs if pair[0]["task"] == family]) for family in families}
    return {"name": name, **counted(pairs), "per_task": per_task}


def sweep_of(records: Sequence[Record], plan: Plan) -> dict[str, Any]:
    """The content of ``sweep.json``, for `mmrl.heat_map`: successes over all tasks at every combination, and by task."""
    cells = []
    for values in itertools.product(*plan.sweep.values()):
        place = dict(zip(plan.sweep, values))
        part = [record for record in records if record["perturbation"] == place]
        by_task = {name: [record["success"] for record in part if record["task"] == name] for name in plan.families}
        share = _share([record["success"] for record in part])
        cells.append(place | share | {"tasks": {name: _share(found) for name, found in by_task.items()}})
    return {"axes": {name: list(values) for name, values in plan.sweep.items()}, "cells": cells}


def result_table(info: Mapping[str, Any], title: str) -> Table:
    """Success by task, one column per variant of the instruction, and what else there is to know of the first."""
    table = Table(title=f"{title}: success at the end, 95% intervals", title_justify="left")
    variants = info["variants"]
    table.add_column("task")
    for name in ("n", *variants, "once", "progress", "reward"):
        table.add_column(name, justify="right")
    first = info["intervals"]["per_task"]
    for name, entry in first.items():
        counted = len(variants) <= 2  # more do not fit beside each other
        cells = [_percent(variant["per_task"][name]["success"], counted=counted) for variant in variants.values()]
        once = f"{100 * entry['success_once']['mean']:.0f}%"
        progress = "-" if entry["progress"]["mean"] is None else f"{entry['progress']['mean']:.2f}"
        reward = f"{info['per_group'][name]['avg_sum_reward']:.2f}"
        table.add_row(name, f"{entry['success']['n']}", *cells, once, progress, reward)
    if len(first) > 1:
        table.add_section()
        for name, label in (("macro", "mean of tasks"), ("micro", "all episodes")):
            cells = [_percent(variant[name]) for variant in variants.values()]
            table.add_row(label, str(info["overall"]["n_episodes"]), *cells, "", "", "", style="bold")
    return table


def comparison_table(comparison: Mapping[str, Any], label: str) -> Table:
    """The paired test by task."""
    table = Table(title=f"{label} and {comparison['name']} on the same initial states", title_justify="left")
    table.add_column("task")
    for name in ("n", label, comparison["name"], "only first (b)", "only second (c)", "difference", "p (McNemar)"):
        table.add_column(name, justify="right", overflow="fold")
    rows = [*comparison["per_task"].items()]
    rows += [("all episodes", comparison)] if len(rows) > 1 else []
    for name, entry in rows:
        shares = [f"{100 * entry[key] / entry['n']:.1f}%" for key in ("k", "k_other")]
        gap = entry["difference"]
        difference = f"{100 * gap['mean']:+.1f} [{100 * gap['low']:+.1f}, {100 * gap['high']:+.1f}]"
        table.add_row(name, str(entry["n"]), *shares, str(entry["b"]), str(entry["c"]), difference, f"{entry['p']:.4g}")
    return table


def sweep_table(sweep: Mapping[str, Any]) -> Table:
    """Success at every combination."""
    table = Table(title="physics multiplied", title_justify="left")
    for name in (*sweep["axes"], "n", "success"):
        table.add_column(name, justify="right")
    for cell in sweep["cells"]:
        table.add_row(*(f"{cell[name]:g}" for name in sweep["axes"]), str(cell["n"]), _percent(cell))
    return table


def _group(records: Sequence[Record], videos: Sequence[str]) -> dict[str, Any]:
    largest = [record["max_reward"] for record in records if record["max_reward"] is not None]
    return {
        "avg_sum_reward": float(np.mean([record["sum_reward"] for record in records])),
        "avg_max_reward": float(np.mean(largest)) if largest else None,
        "pc_success": 100.0 * float(np.mean([record["success"] for record in records])),
        "n_episodes": len(records),
        "video_paths": list(videos),
        "predicted_video_paths": [],
    }


def _share(values: Sequence[bool]) -> dict[str, Any]:
    k, n = sum(values), len(values)
    low, high = wilson_interval(k, n)
    return {"k": k, "n": n, "mean": k / n if n else None, "low": low, "high": high}


def _mean(values: Sequence[float | None]) -> dict[str, Any]:
    known = [value for value in values if value is not None]
    bounds = mean_interval(known, generator=np.random.default_rng(0), num_resamples=2000) if len(known) > 1 else (None, None)
    return {"n": len(known), "mean": float(np.mean(known)) if known else None, "low": bounds[0], "high": bounds[1]}


def _percent(entry: Mapping[str, Any], *, counted: bool = True) -> str:
    count = f"{entry['k']}/{entry['n']}  " if counted and "k" in entry else ""
    return f"{count}{100 * entry['mean']:.1f}% [{100 * entry['low']:.1f}, {100 * entry['high']:.1f}]"
