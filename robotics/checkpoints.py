"""LeRobot policy directories: written whole, and refused when anything in them is missing or differs."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from lerobot.configs import PreTrainedConfig
from lerobot.policies.factory import make_pre_post_processors
from lerobot.policies.pretrained import PreTrainedPolicy
from lerobot.processor import PolicyProcessorPipeline
from safetensors import SafetensorError
from safetensors.torch import load_file

from mmrl.errors import CheckpointError

Pipeline = PolicyProcessorPipeline[Any, Any]
_FILES = ("config.json", "model.safetensors", "policy_preprocessor.json", "policy_postprocessor.json")
_FREE = {"device", "initial_log_std", "min_log_std", "max_log_std", "pretrained_path", "repo_id", "push_to_hub"}
"""Config fields that may differ between the saved policy and the one that its weights are loaded into."""


def save_policy(policy: PreTrainedPolicy, preprocessor: Pipeline, postprocessor: Pipeline, directory: Path) -> None:
    """Write a directory that ``lerobot-eval`` and ``lerobot-rollout`` take as ``--policy.path``."""
    policy.save_pretrained(directory)
    preprocessor.save_pretrained(directory)
    postprocessor.save_pretrained(directory)


def load_policy(policy: PreTrainedPolicy, preprocessor: Pipeline, postprocessor: Pipeline, directory: Path) -> None:
    """Load the weights of ``directory`` into ``policy``.

    Refused: a missing file, a missing, extra or differently shaped tensor, and a configuration or processors (vocabulary,
    units, statistics) other than those given; LeRobot's own loader passes over all of these in silence.
    """
    for name in _FILES:
        if not (directory / name).is_file():
            raise CheckpointError(f"{directory / name}: missing; expected a LeRobot policy directory with {', '.join(_FILES)}.")
    _compare_configs(policy.config, PreTrainedConfig.from_pretrained(directory), directory / "config.json")
    try:
        saved = load_file(directory / "model.safetensors")
        loaded = make_pre_post_processors(policy.config, pretrained_path=str(directory))
    except (SafetensorError, FileNotFoundError, KeyError, ValueError) as error:
        raise CheckpointError(f"{directory}: cannot be read ({error}); write the checkpoint again.") from error
    for kind, own, other in zip(("preprocessor", "postprocessor"), (preprocessor, postprocessor), loaded):
        _compare_pipelines(own, other, directory / f"policy_{kind}.json")
    own_tensors = policy.state_dict()
    for problem, names in {
        "lacks": own_tensors.keys() - saved.keys(),
        "has an unexpected": saved.keys() - own_tensors.keys(),
        "has another shape of": {n for n in own_tensors.keys() & saved.keys() if own_tensors[n].shape != saved[n].shape},
    }.items():
        if names:
            raise CheckpointError(
                f"{directory / 'model.safetensors'}: {problem} tensor {', '.join(sorted(names))}; it belongs to another policy."
            )
    policy.load_state_dict(saved, strict=True)


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
