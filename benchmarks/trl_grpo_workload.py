"""What both sides of trl_grpo.py share: sizes, the first steps to compare, the reward, and the meter of a train step.

Imported in either environment, so nothing of mmrl or TRL is imported here, nor torch.
"""

from __future__ import annotations

import argparse
import json
import resource
import time
import zlib
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

TASKS_PER_STEP = 4
WARMUP_STEPS = 2
ADVANTAGE_EPS = 1e-4
"""What TRL adds to a group's standard deviation; it cannot be set there."""


@dataclass(frozen=True, kw_only=True)
class Size:
    """A model and a workload."""

    tiny: Mapping[str, int]
    """Keys of `vision.tiny.TinySize`."""
    num_images: int
    image_pixels: int
    """Pixels per side."""
    group_size: int
    max_new_tokens: int
    end_token_scale: float
    """Factor of the end token's embedding: likely in some places, so that lengths differ where it is not forbidden."""


SIZES = {
    "A": Size(
        tiny=dict(
            vocab_size=512, hidden_size=64, intermediate_size=160, num_layers=2, num_heads=2, num_key_value_heads=1,
            vision_hidden_size=48, vision_intermediate_size=96, vision_depth=2, vision_num_heads=2,
        ),
        num_images=1, image_pixels=112, group_size=4, max_new_tokens=32, end_token_scale=4.0,
    ),
    "B": Size(
        tiny=dict(vocab_size=8192, intermediate_size=384, num_layers=5),
        num_images=2, image_pixels=168, group_size=8, max_new_tokens=48, end_token_scale=10.0,
    ),
}  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Variant:
    """One first step to compare."""

    loss_type: str
    """TRL's name of the aggregation."""
    aggregation: str
    """mmrl's name of it."""
    fixed_length: bool
    """Every completion reaches the limit; otherwise end tokens make lengths differ."""
    beta: float = 0.0
    """Weight of the KL term to a reference policy that differs from the policy."""
    off_policy: bool = False
    """The reference policy did the sampling, so ratios differ from 1 and some are clipped."""


def variants() -> dict[str, Variant]:
    """All first steps by name."""
    result = {}
    for loss_type, aggregation in (("grpo", "sequence_mean"), ("dapo", "token_mean")):
        same = {"loss_type": loss_type, "aggregation": aggregation}
        for lengths, fixed_length in (("fixed length", True), ("end tokens", False)):
            for suffix, beta in (("", 0.0), (", beta 0.04", 0.04)):
                result[f"{loss_type}, {lengths}{suffix}"] = Variant(**same, fixed_length=fixed_length, beta=beta)
        result[f"{loss_type}, end tokens, off-policy"] = Variant(**same, fixed_length=False, off_policy=True)
    return result


def variant_folder(folder: Path, name: str) -> Path:
    """Where the tensors of a variant are passed on."""
    path = folder / name.replace(", ", "_").replace(" ", "-")
    path.mkdir(exist_ok=True)
    return path


def checksum_reward(token_ids: Sequence[int]) -> float:
    """A number in [0, 1) that looks random and is the same on both sides; next to no group is constant under it."""
    return zlib.crc32(b",".join(b"%d" % token for token in token_ids)) / 2**32


class Meter:
    """What train steps cost: CPU seconds of the process, memory, and work on images."""

    def __init__(self, image_processor: Any, tower: Any) -> None:
        """Count calls of ``image_processor`` and forward passes of the vision ``tower`` from now on."""
        self.counts: Counter[str] = Counter()
        self.measured: Mapping[str, int] = {}
        self.cpu_s: list[float] = []
        self.num_steps = 0
        self.peak_mib = 0.0
        process = type(image_processor).__call__

        def counted(processor: Any, images: Any, *args: Any, **kwargs: Any) -> Any:
            self.counts["processor_calls"] += 1
            self.counts["processor_images"] += sum(len(entry) if isinstance(entry, list) else 1 for entry in images)
            return process(processor, images, *args, **kwargs)

        def count(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            self.counts["tower_forwards"] += 1
            self.counts["tower_images"] += len(kwargs["grid_thw"] if "grid_thw" in kwargs else args[1])

        type(image_processor).__call__ = counted
        tower.register_forward_pre_hook(count, with_kwargs=True)
        self.loaded_mib = int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize() / 2**20
        self._started = time.process_time()

    def step_done(self) -> None:
        """Close a train step; those of the warm-up are forgotten."""
        self.num_steps += 1
        self.cpu_s.append(time.process_time() - self._started)
        self.peak_mib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
        self.measured = dict(self.counts)  # what comes after the last step, such as an evaluation, is not counted
        if self.num_steps == WARMUP_STEPS:
            self.cpu_s.clear()
            self.counts.clear()
        self._started = time.process_time()

    def result(self) -> dict[str, Any]:
        """CPU seconds of each measured step; the rest per step."""
        per_step = {name: count / len(self.cpu_s) for name, count in self.measured.items()}
        return {"cpu_s": self.cpu_s, "peak_mib": self.peak_mib, "growth_mib": self.peak_mib - self.loaded_mib, **per_step}


def run_job(jobs: Mapping[str, Callable[..., Any]]) -> None:
    """Command line of a side: do one job and write its result to ``result.json`` in the folder."""
    import torch

    parser = argparse.ArgumentParser()
    parser.add_argument("job", choices=jobs)
    parser.add_argument("folder", type=Path)
    parser.add_argument("size", choices=SIZES)
    parser.add_argument("number", type=int, help="tasks to prepare, or train steps to measure")
    options = parser.parse_args()
    torch.set_num_threads(1)
    result = jobs[options.job](options.folder, SIZES[options.size], options.number)
    (options.folder / "result.json").write_text(json.dumps(result))
