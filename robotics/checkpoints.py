"""LeRobot policy directories: written whole, and refused when anything in them is missing or differs."""

from __future__ import annotations

import importlib
import importlib.util
import json
import logging
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from draccus.utils import DraccusException
from lerobot.configs import FeatureType, NormalizationMode, PreTrainedConfig
from lerobot.policies.factory import get_policy_class, make_pre_post_processors
from lerobot.policies.pretrained import PreTrainedPolicy
from lerobot.processor import NormalizerProcessorStep, PolicyProcessorPipeline, UnnormalizerProcessorStep
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

import robotics.policies  # noqa: F401  registers our policy types
from mmrl.checkpoint import LATEST, MANIFEST, POLICY, checkpoint_directory, verify_checkpoint
from mmrl.errors import CheckpointError, MMRLError
from robotics.envs.physics import JOINTS

Pipeline = PolicyProcessorPipeline[Any, Any]
METADATA = "mmrl_metadata.json"
"""Beside LeRobot's files: what the numbers mean, which LeRobot does not write down."""
ARM_METADATA: Mapping[str, Any] = {
    "control_hz": 20.0,
    "state_names": list(JOINTS),
    "action_names": list(JOINTS),
    "units": {"joints": "degrees", "gripper": "0 closed to 100 open"},
}
_FILES = ("config.json", "model.safetensors", "policy_preprocessor.json", "policy_postprocessor.json")
_FREE = {
    "device", "initial_log_std", "min_log_std", "max_log_std", "sde_noise", "stochastic_step", "temperature",
    "pretrained_path", "repo_id", "push_to_hub",
}  # fmt: skip
"""Config fields that may differ between the saved policy and the one that its weights are loaded into."""
_NEEDED = {
    NormalizationMode.MIN_MAX: ("min", "max"),
    NormalizationMode.MEAN_STD: ("mean", "std"),
    NormalizationMode.QUANTILES: ("q01", "q99"),
    NormalizationMode.QUANTILE10: ("q10", "q90"),
}
_CONSTANT, _FLOOR = 1e-4, 1e-2  # of the widest entry of the same feature
_log = logging.getLogger(__name__)


def save_policy(policy: PreTrainedPolicy, preprocessor: Pipeline, postprocessor: Pipeline, directory: Path) -> None:
    """Write a directory that ``lerobot-eval`` and ``lerobot-rollout`` take as ``--policy.path``."""
    policy.save_pretrained(directory)
    preprocessor.save_pretrained(directory)
    postprocessor.save_pretrained(directory)
    action = policy.config.action_feature
    if action is not None and tuple(action.shape) == (len(JOINTS),):
        (directory / METADATA).write_text(json.dumps(ARM_METADATA, indent=1), encoding="utf-8")


def policy_directory(path: Path) -> Path:
    """The policy directory that ``path`` means: itself, or the newest one of a run or a checkpoint (ours or LeRobot's).

    The files of one of our checkpoints are verified against its manifest.
    """
    candidates = [path, path / POLICY, path / "pretrained_model", path / "checkpoints" / "last" / "pretrained_model"]
    for pointer in (path, path / LATEST, path / "checkpoints" / LATEST):
        if pointer.name == LATEST and pointer.is_file():
            candidates.append(checkpoint_directory(pointer) / POLICY)
    for candidate in candidates:
        if (candidate / "config.json").is_file():
            if (candidate.parent / MANIFEST).is_file():
                verify_checkpoint(candidate.parent)
            return candidate
    raise CheckpointError(
        f"{path}: no policy found; expected a LeRobot policy directory with {', '.join(_FILES)}, a checkpoint, or a run "
        "directory that has a checkpoint."
    )


def open_policy(
    directory: Path, *, device: str = "cpu", floor: bool = True, on_notice: Callable[[str], None] = _log.warning
) -> tuple[PreTrainedPolicy, Pipeline, Pipeline]:
    """The policy of ``directory`` in eval mode, with its preprocessor and postprocessor; any type that LeRobot knows.

    Refused: a missing file (of statistics too), a missing, extra or differently shaped tensor, and a normalised feature without
    statistics. LeRobot's own loader passes over these in silence. With ``floor`` an entry that never changed in the data gets a
    floor under its range (`floor_statistics`), of which ``on_notice`` is told.
    """
    _check_files(directory)
    config = _read_config(directory)
    config.device = device
    try:
        policy = get_policy_class(config.type)(config)
    except MMRLError:
        raise
    except (KeyError, TypeError, ValueError, ImportError, OSError) as error:
        raise CheckpointError(f"{directory / 'config.json'}: no policy can be built from it ({error}).") from error
    _load_tensors(policy, directory / "model.safetensors")
    preprocessor, postprocessor = _load_processors(config, directory, device)
    _check_statistics(config, preprocessor, directory / "policy_preprocessor.json", NormalizerProcessorStep)
    _check_statistics(config, postprocessor, directory / "policy_postprocessor.json", UnnormalizerProcessorStep)
    for notice in floor_statistics(preprocessor) if floor else ():
        on_notice(notice)
    return policy.to(device).eval(), preprocessor, postprocessor


def read_metadata(directory: Path) -> dict[str, Any]:
    """What the policy's makers declared of rate, names and units; empty when they declared nothing."""
    path = directory / METADATA
    if not path.is_file():
        return {}
    try:
        return dict(json.loads(path.read_text(encoding="utf-8")))
    except (TypeError, ValueError) as error:
        raise CheckpointError(f"{path}: cannot be read ({error}); restore it or delete it.") from error


def floor_statistics(preprocessor: Pipeline) -> list[str]:
    """Widen ranges of observations that are practically zero to 1% of the feature's widest entry; one notice per feature.

    LeRobot divides by such a range, so that a live value a little off the constant would become a million. The lower end stays
    where it is: the constant itself still becomes what the policy was trained on.
    """
    notices = []
    for step in (step for step in preprocessor.steps if isinstance(step, NormalizerProcessorStep)):
        for key, stats in step._tensor_stats.items():
            feature = step.features.get(key)
            mode = NormalizationMode.IDENTITY if feature is None else step.norm_map.get(feature.type)
            if feature is None or feature.type not in (FeatureType.STATE, FeatureType.ENV) or mode not in _NEEDED:
                continue
            low, high = _NEEDED[mode]
            width = stats[high] if mode == NormalizationMode.MEAN_STD else stats[high] - stats[low]
            widest = float(width.max()) or 1.0
            floor, narrow = _FLOOR * widest, width < _CONSTANT * widest
            if narrow.any():
                wide = torch.where(narrow, torch.full_like(width, floor), width)
                stats[high] = wide if mode == NormalizationMode.MEAN_STD else stats[low] + wide
                step.stats[key][high] = stats[high].cpu().numpy()
                entries = ", ".join(str(i) for i in narrow.flatten().nonzero().flatten().tolist())
                notices.append(
                    f"{key}: entries {entries} do not vary in the policy's statistics; their range is taken as {floor:.3g}."
                )
    return notices


def load_policy(policy: PreTrainedPolicy, preprocessor: Pipeline, postprocessor: Pipeline, directory: Path) -> None:
    """Load the weights of ``directory`` into ``policy``.

    Refused: a missing file, a missing, extra or differently shaped tensor, and a configuration or processors (vocabulary,
    units, statistics) other than those given.
    """
    _check_files(directory)
    _compare_configs(policy.config, _read_config(directory), directory / "config.json")
    loaded = _load_processors(policy.config, directory, policy.config.device)
    for kind, own, other in zip(("preprocessor", "postprocessor"), (preprocessor, postprocessor), loaded):
        _compare_pipelines(own, other, directory / f"policy_{kind}.json")
    _load_tensors(policy, directory / "model.safetensors")


def _check_files(directory: Path) -> None:
    for name in _FILES:
        if not (directory / name).is_file():
            raise CheckpointError(f"{directory / name}: missing; expected a LeRobot policy directory with {', '.join(_FILES)}.")
    for name in _FILES[2:]:
        try:
            steps = json.loads((directory / name).read_text(encoding="utf-8"))["steps"]
            files = [step["state_file"] for step in steps if step.get("state_file")]
        except (KeyError, TypeError, AttributeError, ValueError) as error:
            raise CheckpointError(f"{directory / name}: not a list of processor steps ({error!r}); export again.") from error
        for file in files:
            if not (directory / file).is_file():
                raise CheckpointError(
                    f"{directory / file}: missing; {name} keeps its statistics there. Export the policy again."
                )


def _read_config(directory: Path) -> PreTrainedConfig:
    try:
        return PreTrainedConfig.from_pretrained(directory)
    except MMRLError:
        raise
    except (DraccusException, KeyError, TypeError, ValueError, OSError) as error:
        raise CheckpointError(
            f"{directory / 'config.json'}: cannot be read ({error}); it comes from another version, or from a policy that is "
            "not installed here."
        ) from error


def _load_processors(config: PreTrainedConfig, directory: Path, device: str | None) -> tuple[Pipeline, Pipeline]:
    registers = type(config).__module__.replace(
        "configuration_", "processor_"
    )  # the policy's own steps, by LeRobot's convention
    if importlib.util.find_spec(registers) is not None:
        importlib.import_module(registers)
    overrides = {}
    for kind in ("preprocessor", "postprocessor"):
        steps = json.loads((directory / f"policy_{kind}.json").read_text(encoding="utf-8"))["steps"]
        named = any(step.get("registry_name") == "device_processor" for step in steps)
        target = device if kind == "preprocessor" else "cpu"
        overrides[f"{kind}_overrides"] = {"device_processor": {"device": target}} if named and target else {}
    try:
        return make_pre_post_processors(config, pretrained_path=str(directory), **overrides)
    except MMRLError:
        raise
    except (SafetensorError, OSError, KeyError, ValueError, ImportError) as error:
        raise CheckpointError(f"{directory}: its processors cannot be read ({error}); export the policy again.") from error


def _load_tensors(policy: PreTrainedPolicy, path: Path) -> None:
    """Load ``path`` into ``policy``; every tensor once, none left over. Of tensors that share memory one name is enough."""
    try:
        saved = load_file(path)
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"{path}: cannot be read ({error}); write the checkpoint again.") from error
    own = policy.state_dict()
    present = {_memory(own[name]) for name in own.keys() & saved.keys()}
    for problem, names in {
        "lacks": {name for name in own.keys() - saved.keys() if _memory(own[name]) not in present},
        "has an unexpected": saved.keys() - own.keys(),
        "has another shape of": {name for name in own.keys() & saved.keys() if own[name].shape != saved[name].shape},
    }.items():
        if names:
            raise CheckpointError(f"{path}: {problem} tensor {_some(names)}; it belongs to another policy.")
    policy.load_state_dict(saved, strict=False)


def _check_statistics(config: PreTrainedConfig, pipeline: Pipeline, path: Path, kind: type) -> None:
    """Refuse a feature that should be normalised and silently would not be."""
    observed = kind is NormalizerProcessorStep
    for step in (step for step in pipeline.steps if isinstance(step, kind)):
        for key in (config.input_features if observed else config.output_features) or {}:
            feature = step.features.get(key)
            needed = _NEEDED.get(step.norm_map.get(feature.type), ()) if feature is not None else ()
            missing = [name for name in needed if name not in step._tensor_stats.get(key, {})]
            if missing:
                raise CheckpointError(
                    f"{path}: the statistics lack {', '.join(f'{key}.{name}' for name in missing)}; the policy would see raw "
                    "numbers. Export it again with the statistics of its training data."
                )


def _memory(tensor: Tensor) -> tuple[int, torch.Size, tuple[int, ...]]:
    return tensor.data_ptr(), tensor.shape, tensor.stride()


def _some(names: set[str]) -> str:
    listed = sorted(names)
    return ", ".join(listed[:5]) + (f" and {len(listed) - 5} more" if len(listed) > 5 else "")


def _compare_configs(own: PreTrainedConfig, other: PreTrainedConfig, path: Path) -> None:
    if type(own) is not type(other):
        raise CheckpointError(f"{path}: holds a policy of type {other.type!r}; expected {own.type!r}.")
    for name, value in vars(own).items():
        if name not in _FREE and value != getattr(other, name):
            raise CheckpointError(
                f"{path}: {name} is {getattr(other, name)!r:.80}, but this run's policy has {value!r:.80}; change the policy "
                "section of the run's config to match."
            )


def _compare_pipelines(own: Pipeline, other: Pipeline, path: Path) -> None:
    if [type(step) for step in own.steps] != [type(step) for step in other.steps]:
        raise CheckpointError(f"{path}: its steps differ from those of this run; it belongs to another policy.")
    for step, saved in zip(own.steps, other.steps):
        name = type(step).__name__
        if _without_device(step.get_config()) != _without_device(saved.get_config()):
            raise CheckpointError(f"{path}: the settings of {name} differ from those of this run (vocabulary or features).")
        tensors, saved_tensors = step.state_dict(), saved.state_dict()
        if tensors.keys() != saved_tensors.keys() or any(not torch.equal(tensors[n], saved_tensors[n]) for n in tensors):
            raise CheckpointError(f"{path}: the statistics of {name} differ from those of this run (joint limits or units).")


def _without_device(config: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in config.items() if name != "device"}
