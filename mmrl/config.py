"""One YAML file is one run: reading, merging, overriding, validating, writing.

Section names are module names (``trainer:`` is read by `mmrl.trainer`), so a key can be grepped. A modality extends
`RunConfig` with its own sections. Nothing here imports torch.
"""

from __future__ import annotations

import difflib
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, get_args, get_origin

import yaml
from pydantic import BaseModel, Field, ValidationError, field_validator, model_validator

from mmrl.algorithm_config import NEEDS_NO_GROUP, AlgorithmConfig
from mmrl.auxiliary_config import AuxiliaryConfig
from mmrl.errors import ConfigError
from mmrl.parity_config import ParityConfig
from mmrl.prompting_config import PromptingConfig
from mmrl.sampling_config import SamplingConfig
from mmrl.section import Section
from mmrl.strict_yaml import read_yaml


class OptimizerConfig(Section):
    """AdamW and its schedule."""

    learning_rate: float = Field(1e-6, gt=0)
    """Peak learning rate."""
    betas: tuple[Annotated[float, Field(ge=0, lt=1)], Annotated[float, Field(ge=0, lt=1)]] = (0.9, 0.999)
    """Decay rates of AdamW's moments."""
    eps: float = Field(1e-8, gt=0)
    """AdamW's denominator offset."""
    weight_decay: float = Field(0.0, ge=0)
    """Decoupled weight decay on matrices; vectors (norms, biases) have none."""
    max_grad_norm: float | None = Field(1.0, gt=0)
    """Gradients are scaled down to this global norm; absent is off."""
    schedule: Literal["constant", "cosine", "linear"] = "constant"
    """Shape of the learning rate after warm-up."""
    warmup_steps: int = Field(0, ge=0)
    """Optimizer steps of linear warm-up."""
    final_fraction: float = Field(0.0, ge=0, le=1)
    """Learning rate at the end of a cosine or linear schedule, as a share of the peak."""


class TrainerConfig(Section):
    """Length of the run and how a batch of rollouts becomes optimizer steps."""

    num_steps: int = Field(..., gt=0)
    """Train steps; each samples rollouts once."""
    epochs_per_batch: int = Field(1, gt=0)
    """Passes over each batch of rollouts."""
    minibatches: int = Field(1, gt=0)
    """Optimizer steps per pass; groups are never split between them."""
    micro_batch_tokens: int = Field(16384, gt=0)
    """Upper bound on prompt and decision positions held in one forward and backward pass; results do not depend on it."""
    precision: Literal["float32", "bfloat16"] = "float32"
    """``bfloat16`` runs the forward pass under autocast; losses stay float32."""
    num_threads: int | None = Field(None, gt=0)
    """torch threads of each process; absent leaves torch's choice."""
    max_constant_steps: int = Field(50, gt=0)
    """Stop after this many steps in a row in which no group carried any signal."""
    parity: ParityConfig = ParityConfig()
    """Whether recorded log-probabilities are those of the trainer's own forward pass."""


class EvaluationConfig(Section):
    """Held-out measurement with greedy decisions."""

    split: str = "eval"
    """Split of the adapter's task source."""
    num_tasks: int = Field(200, gt=0)
    """Held-out tasks of each evaluation (the first ones of the split, always the same)."""
    every: int = Field(0, ge=0)
    """Evaluate after every so many train steps; 0 is only before and after the run."""
    at_start: bool = True
    """Also evaluate before the first update, for comparison."""
    metric: str = "accuracy"
    """Reward term that is reported; must be among the run's rewards."""
    batch_size: int = Field(64, gt=0)
    """Tasks attempted at once; the result does not depend on it."""
    num_illustrated: int = Field(0, ge=0)
    """Held-out tasks of each evaluation that join the samples with pictures of what the policy attends to."""
    control: Literal["none", "blank", "shuffle"] = "none"
    """Also measure with blanked media, or with those of other tasks, and report the gap: does the policy use its media?"""


class CheckpointConfig(Section):
    """Resumable snapshots."""

    every: int = Field(100, ge=0)
    """Write one after every so many train steps and at the end; 0 is only at the end."""
    keep_last: int = Field(2, gt=0)
    """Older ones are deleted, except the best by evaluation metric."""


class MetricsConfig(Section):
    """Where numbers go. ``metrics.jsonl`` is always written."""

    trackers: tuple[Literal["tensorboard", "wandb", "trackio"], ...] = ()
    """Further trackers, through accelerate."""
    samples_every: int = Field(10, ge=0)
    """Write readable rollouts every so many train steps; 0 never."""
    samples_per_step: int = Field(8, gt=0)
    """Rollouts written each time, whole groups first."""
    replay: bool = False
    """Write each decision of these rollouts too: log-probabilities, ratio, clip, mask, advantage (``mmrl replay``)."""
    reward_window: int = Field(20, ge=0)
    """Steps over which reward terms are watched: constant ones, one that dominates, nothing but the form; 0 is off."""


class RewardConfig(Section):
    """One weighted reward term."""

    weight: float = 1.0
    """Factor of the term in the total reward."""
    function: str | None = None
    """``package.module:function`` of your own code; absent means the adapter's term of this name."""
    timeout_s: float | None = Field(None, gt=0)
    """Call the term in a process of its own, and stop the run when an answer takes longer; absent calls it directly."""
    max_failure_share: float | None = Field(None, gt=0, le=1)
    """Share of the rollouts scored at once on which the term may fail (they count as not applicable); absent stops at the
    first failure."""


class RunConfig(Section):
    """Everything that defines a run. Modalities subclass it with ``policy``, ``tasks`` and ``rollout`` sections."""

    modality: str
    """Which adapter package: vision, audio or robotics."""
    name: str = Field(pattern=r"^[^./\\\s\x00][^/\\\x00\r\n]*$", max_length=200)
    """Folder of the run under ``output_dir``; a file's stem when absent from it."""
    output_dir: Path = Path("runs")
    """Parent of run directories."""
    seed: int = Field(0, ge=0, lt=2**31)
    """Source of all randomness of the run."""
    rewards: dict[str, RewardConfig] = Field(min_length=1)
    """Weighted reward terms: ``accuracy: 1.0``, or ``mine: {weight: 0.5, function: my_module:my_term}``."""
    algorithm: AlgorithmConfig = Field("grpo", validate_default=True)
    """Preset name, or a mapping with a name and overrides."""
    auxiliary: AuxiliaryConfig = AuxiliaryConfig()
    """Terms that join the policy loss."""
    sampling: SamplingConfig = SamplingConfig()
    """Which tasks next."""
    prompting: PromptingConfig = PromptingConfig()
    """What training changes about prompts (language policies)."""
    optimizer: OptimizerConfig = OptimizerConfig()
    """AdamW and its schedule."""
    trainer: TrainerConfig
    """Length of the run, micro-batches, precision."""
    evaluation: EvaluationConfig = EvaluationConfig()
    """Held-out measurement."""
    checkpoint: CheckpointConfig = CheckpointConfig()
    """Resumable snapshots."""
    metrics: MetricsConfig = MetricsConfig()
    """Trackers and samples."""

    @field_validator("rewards", mode="before")
    @classmethod
    def _weights_are_short_for_terms(cls, value: Any) -> Any:
        if isinstance(value, Mapping):
            full = (Mapping, RewardConfig)  # anything else is a weight, also "1e-3", which YAML reads as a string
            return {name: spec if isinstance(spec, full) else {"weight": spec} for name, spec in value.items()}
        return value

    @field_validator("algorithm", mode="before")
    @classmethod
    def _a_name_is_short_for_a_preset(cls, value: Any) -> Any:
        from mmrl.algorithms import PRESETS

        if isinstance(value, AlgorithmConfig):
            return value
        given = {"name": value} if isinstance(value, str) else {} if value is None else value
        if not isinstance(given, Mapping):
            raise ValueError("expected the name of a preset, or a mapping with a name and overrides.")
        name = given.get("name", "grpo")
        if str(name) not in PRESETS:
            raise ValueError(f"unknown algorithm {name!r}; {_suggest(str(name), PRESETS)}")
        return {**PRESETS[name].slots, **given, "name": name}

    @model_validator(mode="after")
    def _parts_fit_together(self) -> RunConfig:
        algorithm, group_size = self.algorithm, self.sampling.group_size
        if algorithm.advantage not in NEEDS_NO_GROUP and group_size < 2:
            raise ValueError(
                f"sampling.group_size is {group_size}, but algorithm.advantage {algorithm.advantage!r} compares the rollouts "
                "of a group; use 2 or more."
            )
        metric = algorithm.selection_metric
        if metric is not None and metric not in self.rewards:
            raise ValueError(f"algorithm.selection_metric {metric!r} is not among rewards; {_suggest(metric, self.rewards)}")
        self._auxiliary_terms_can_act()
        if self.sampling.tasks_per_step % self.trainer.minibatches:
            raise ValueError(
                f"sampling.tasks_per_step ({self.sampling.tasks_per_step}) must be divisible by trainer.minibatches "
                f"({self.trainer.minibatches}), since groups are not split."
            )
        return self

    def _auxiliary_terms_can_act(self) -> None:
        if self.auxiliary.ral is None:
            return
        if self.algorithm.source == "demonstrations":
            raise ValueError("auxiliary.ral compares attention with that of the policy that sampled; demonstrations have none.")
        if self.trainer.epochs_per_batch * self.trainer.minibatches == 1:
            raise ValueError(
                "auxiliary.ral has exactly zero gradient while the policy is the one that sampled, and with "
                "trainer.epochs_per_batch 1 and trainer.minibatches 1 it always is; take 2 to 4 optimizer steps per batch, for "
                "example trainer.minibatches=4."
            )

    @property
    def run_dir(self) -> Path:
        """Folder that this run writes to."""
        return self.output_dir / self.name


def read_config(path: Path) -> dict[str, Any]:
    """Read a YAML file over the files its ``base:`` names (relative to it); ``name`` defaults to the file's stem."""
    tree = _read_merged(path, ())
    tree.setdefault("name", path.stem)
    return tree


def apply_overrides(tree: dict[str, Any], overrides: Sequence[str]) -> dict[str, Any]:
    """Apply ``section.key=value`` strings; values are YAML. Returns a new tree."""
    for override in overrides:
        dotted, sign, text = override.partition("=")
        if not sign or not dotted:
            raise ConfigError(f"override {override!r}: expected section.key=value, for example trainer.num_steps=10.")
        value = read_yaml(text, f"override {override!r}")
        for key in reversed(dotted.split(".")):
            value = {key: value}
        tree = _merge(tree, value)
    return tree


def validate[S: Section](tree: Mapping[str, Any], model: type[S], source: str) -> S:
    """Build the typed config; every problem is reported in one `ConfigError`, unknown keys with the closest known one."""
    try:
        config = model.model_validate(tree)
    except ValidationError as error:
        raise ConfigError("; ".join(_explain(item, model, source) for item in error.errors())) from None
    problems = [f"{source}: {key} is {problem}" for key, problem in _unfit_numbers(tree, config)]
    if problems:
        raise ConfigError("; ".join(problems))
    return config


def to_yaml(config: RunConfig) -> str:
    """The resolved config as YAML that reads back to an equal config."""
    return yaml.safe_dump(json.loads(config.model_dump_json()), sort_keys=False, width=120)


def differences(old: RunConfig, new: RunConfig) -> dict[str, tuple[Any, Any]]:
    """Dotted keys whose values differ, with both values."""
    left, right = (_flatten(json.loads(config.model_dump_json())) for config in (old, new))
    return {key: (left.get(key), right.get(key)) for key in {**left, **right} if left.get(key) != right.get(key)}


def _read_merged(path: Path, seen: tuple[Path, ...]) -> dict[str, Any]:
    try:
        if path.resolve() in seen:
            raise ConfigError(f"{path}: base files include each other in a circle; remove one of the base: entries.")
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise ConfigError(f"{path}: no such file; expected a YAML config such as configs/vision/read_digits.yaml.") from None
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: not YAML, since it is not text in UTF-8 ({error}).") from error
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read ({error.strerror}).") from error
    except ConfigError:
        raise
    except ValueError as error:  # a NUL in the name
        raise ConfigError(f"{str(path)!r}: cannot be read ({error}).") from error
    tree = read_yaml(text, str(path))
    if not isinstance(tree, dict):
        raise ConfigError(f"{path}: holds {type(tree).__name__}; expected sections such as trainer: and rewards:.")
    named = tree.pop("base", [])
    bases = [named] if isinstance(named, str) else named
    if not isinstance(bases, list) or not all(isinstance(base, str) for base in bases):
        raise ConfigError(f"{path}: base is {named!r}; expected the name of a YAML file, or a list of them.")
    merged: dict[str, Any] = {}
    for base in bases:
        merged = _merge(merged, _read_merged(path.parent / base, (*seen, path.resolve())))
    return _merge(merged, tree)


def _merge(base: Mapping[str, Any], top: Mapping[str, Any], section: str = "") -> dict[str, Any]:
    merged = dict(base)
    for key, value in top.items():
        below = merged.get(key)
        if isinstance(value, Mapping) and isinstance(below, Mapping):
            merged[key] = _merge(below, value, key)
        elif isinstance(value, Mapping) and key == "algorithm" and isinstance(below, str):
            merged[key] = {"name": below, **value}  # the short form plus an override
        elif isinstance(value, Mapping) and section == "rewards" and isinstance(below, (int, float, str)):
            merged[key] = {"weight": below, **value}  # here as well
        else:
            merged[key] = value
    return merged


def _unfit_numbers(given: Any, found: Any, key: str = "") -> Iterator[tuple[str, str]]:
    """Keys that were given true or false and hold 1 or 0, or that hold a number which nothing can be done with."""
    number = found.weight if isinstance(found, RewardConfig) else found
    if isinstance(given, bool) and isinstance(number, (int, float)) and not isinstance(number, bool):
        yield key, f"{given}, as YAML also reads yes, no, on and off: expected a number."
    elif isinstance(number, int) and abs(number) >= 2**63:
        yield key, f"{given!s:.40}: expected a whole number of at most 64 bits."
    elif isinstance(number, float) and not math.isfinite(number):  # where any value may stand
        yield key, f"{number}: expected a finite number."
    elif isinstance(given, Mapping) and isinstance(found, (Mapping, BaseModel)):
        values = found if isinstance(found, Mapping) else vars(found)
        for name, value in given.items():
            yield from _unfit_numbers(value, values.get(name), f"{key}.{name}".lstrip("."))
    elif isinstance(given, (list, tuple)) and isinstance(found, (list, tuple)):
        for index, pair in enumerate(zip(given, found)):
            yield from _unfit_numbers(*pair, f"{key}.{index}")


def _explain(item: Mapping[str, Any], model: type[BaseModel], source: str) -> str:
    location = [str(part) for part in item["loc"]]
    key = ".".join(location) or "config"
    if item["type"] == "extra_forbidden":
        known = _fields_at(model, location[:-1])
        elsewhere = _sections_with(model, location[-1])
        if elsewhere and not difflib.get_close_matches(location[-1], known, n=1, cutoff=0.5):
            return f"{source}: {key} is not a known key; did you mean {elsewhere[0]!r}?"
        return f"{source}: {key} is not a known key; {_suggest(location[-1], known)}"
    if item["type"] == "missing":
        return f"{source}: {key} is missing"
    message = item["msg"].removeprefix("Value error, ")
    if item["loc"] == ():
        return f"{source}: {message}"
    return f"{source}: {key} is {item['input']!r:.80}: {message}"


def _fields_at(model: type[BaseModel], path: Sequence[str]) -> list[str]:
    """Names of the fields of the section that ``path`` leads to."""
    models = [model]
    for part in path:
        fields = [m.model_fields[part] for m in models if part in m.model_fields]
        inner = [found for field in fields for found in _models_in(field.annotation)]
        models = inner or models  # the tag of a discriminated union and a key of a mapping lead to no new model
    return sorted({name for m in models for name in m.model_fields})


def _sections_with(model: type[BaseModel], name: str) -> list[str]:
    """Dotted keys of other sections that are spelled much like ``name``."""
    keys = {f"{section}.{field}": field for section in model.model_fields for field in _fields_at(model, [section])}
    close = difflib.get_close_matches(name, list(keys.values()), n=1, cutoff=0.75)
    return [dotted for dotted, field in keys.items() if field in close and dotted.partition(".")[0] != field]


def _models_in(annotation: Any) -> list[type[BaseModel]]:
    if get_origin(annotation) is Annotated:
        annotation = get_args(annotation)[0]
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    return [model for part in get_args(annotation) for model in _models_in(part)]


def _suggest(name: str, known: Any) -> str:
    names = sorted(str(entry) for entry in known)
    close = difflib.get_close_matches(name, names, n=1, cutoff=0.5)
    return f"did you mean {close[0]!r}?" if close else f"expected one of: {', '.join(names)}"


def _flatten(tree: Any, prefix: str = "") -> dict[str, Any]:
    if not isinstance(tree, dict) or not tree:
        return {prefix: tree}
    return {key: value for name, sub in tree.items() for key, value in _flatten(sub, f"{prefix}.{name}".lstrip(".")).items()}
