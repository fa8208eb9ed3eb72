"""LeRobot's own flow policies, SmolVLA, pi0 and pi0.5: from a config section to a policy, its processors and its weights.

A checkpoint (``policy.init_from``) whose inputs and actions are those of this run is a policy for this robot: its processors,
with the statistics that it was trained on, are kept. Any other is a base model, of which only the weights are taken; actions
and state are then normalised by the joint limits, and the first thing to do is supervised training.
"""

from __future__ import annotations

import dataclasses
import difflib
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any, get_type_hints

import draccus
from draccus.utils import DecodingError, ParsingError
from lerobot.configs import PreTrainedConfig
from lerobot.policies.factory import make_pre_post_processors
from lerobot.policies.pi0.configuration_pi0 import PI0Config
from lerobot.policies.pi05.configuration_pi05 import PI05Config
from lerobot.policies.pretrained import PreTrainedPolicy
from lerobot.policies.smolvla.configuration_smolvla import SmolVLAConfig
from lerobot.processor import PolicyProcessorPipeline
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from mmrl.errors import CheckpointError, ConfigError
from robotics.config import LeRobotPolicySection
from robotics.policies.lerobot_configuration_small import SmallPI0Config, SmallPI05Config
from robotics.policies.lerobot_local import TINY, backbone_folder
from robotics.policies.lerobot_processor_small import pi_processors
from robotics.policies.lerobot_views import chunk_view

__all__ = ["chunk_view", "freeze_unused", "lerobot_config", "lerobot_processors", "prepare_policy"]

Pipeline = PolicyProcessorPipeline[Any, Any]
_log = logging.getLogger(__name__)

_CLASSES = {"smolvla": SmolVLAConfig, "pi0": PI0Config, "pi05": PI05Config}
_TINY_CLASSES = {"smolvla": SmolVLAConfig, "pi0": SmallPI0Config, "pi05": SmallPI05Config}
_STEPS = {"smolvla": "num_steps", "pi0": "num_inference_steps", "pi05": "num_inference_steps"}
_TINY_ACTION_DIM = 8
_TINY_PROMPT = {"smolvla": 32, "pi0": 32, "pi05": 96}  # tokens; pi0.5 also reads the state as text
_SET_ELSEWHERE = {
    "chunk_size": "policy.chunk_size",
    "n_action_steps": "rollout.execution_horizon",
    "num_steps": "policy.num_denoising_steps",
    "num_inference_steps": "policy.num_denoising_steps",
    "input_features": "policy.cameras and policy.image_size",
    "output_features": "the robot",
    "device": "the trainer",
    "pretrained_path": "policy.init_from",
    "vlm_model_name": "policy.tokenizer, a folder with the backbone's configuration and processor",
    "tokenizer": "policy.tokenizer",
}


def lerobot_config(section: LeRobotPolicySection, **common: Any) -> PreTrainedConfig:
    """LeRobot's config of the policy; ``common`` are its features, ``chunk_size``, ``n_action_steps`` and ``device``.

    Only the action expert is trained unless ``settings`` says ``train_expert_only: false``. ``settings: {size: tiny}`` is the
    same architecture with some hundred thousand weights and a tokenizer made on this machine. Raises `ConfigError` for settings
    that LeRobot's config does not have, and `CheckpointError` for an ``init_from`` of another type.
    """
    _check_inputs(section)
    settings = dict(section.settings)
    size = settings.pop("size", None)
    if size not in (None, "tiny"):
        raise ConfigError(f"policy.settings.size is {size!r}; expected tiny, or nothing for the size of the released model.")
    kind = (_TINY_CLASSES if size == "tiny" else _CLASSES)[section.type]
    fields = {**common, _STEPS[section.type]: section.num_denoising_steps, "train_expert_only": True, "push_to_hub": False}
    if section.type == "smolvla":
        fields["pad_language_to"] = "max_length"  # prompts of one length: a row does not depend on the others of its batch
        fields["load_vlm_weights"] = False
    if size == "tiny":
        fields |= _tiny_fields(section)
    if section.type == "smolvla" and section.tokenizer is not None:
        fields["vlm_model_name"] = str(section.tokenizer)
    fields |= _decode(kind, settings)
    try:
        if section.init_from is None:
            return kind(**fields)
        saved = _saved_config(section.init_from, kind)
        if not _same_robot(saved, common):
            fields["empty_cameras"] = settings.get("empty_cameras", 0)
        return dataclasses.replace(saved, **fields)
    except (ValueError, NotImplementedError) as error:
        raise ConfigError(f"policy: LeRobot refuses this {section.type} ({error}).") from error


def lerobot_processors(
    config: PreTrainedConfig, section: LeRobotPolicySection, stats: Mapping[str, Mapping[str, Tensor]]
) -> tuple[Pipeline, Pipeline]:
    """LeRobot's pre- and postprocessor: those of the checkpoint if it is a policy for this robot, else new ones with ``stats``.

    ``section.tokenizer`` replaces the tokenizer that they would fetch.
    """
    if section.init_from is not None:
        saved = _saved_config(section.init_from, type(config))
        if _same_robot(saved, vars(config)):
            step, tokenizer = {"padding": "max_length"}, _tokenizer(section)
            if tokenizer is not None:
                step["tokenizer_name"] = str(tokenizer)
            try:
                return make_pre_post_processors(
                    config,
                    pretrained_path=str(section.init_from),
                    preprocessor_overrides={"tokenizer_processor": step, "device_processor": {"device": config.device}},
                )
            except (OSError, KeyError, ValueError) as error:
                raise CheckpointError(f"{section.init_from}: its processors cannot be read ({error}).") from error
        _log.warning(
            "%s has other inputs than this run (%s); taking its weights only, and normalising by the joint limits.",
            section.init_from, ", ".join(sorted(saved.input_features or {})) or "none named",
        )  # fmt: skip
    tokenizer = _tokenizer(section)
    if section.type != "smolvla" and tokenizer is not None:
        return pi_processors(config, stats, tokenizer)
    try:
        return make_pre_post_processors(config, dataset_stats=stats)
    except OSError as error:
        raise ConfigError(
            f"policy: the tokenizer of {section.type} cannot be fetched ({str(error).splitlines()[0]}); download it and name "
            "its folder in policy.tokenizer."
        ) from error


def prepare_policy(policy: PreTrainedPolicy, section: LeRobotPolicySection) -> None:
    """Give a new policy the run's noise level and, with ``init_from``, its weights: all of them or `CheckpointError`."""
    policy.sde_noise = section.sde_noise
    freeze_unused(policy)
    if section.init_from is None:
        return
    path = section.init_from / "model.safetensors"
    try:
        saved = load_file(path)
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"{path}: cannot be read ({error}); expected the weights of a LeRobot policy.") from error
    if section.type != "smolvla":  # released checkpoints carry names of older versions, which LeRobot translates
        saved = policy._fix_pytorch_state_dict_keys(saved, policy.config)
        saved = {name if name.startswith("model.") else f"model.{name}": value for name, value in saved.items()}
    own = policy.state_dict()
    missing = {name for name in own.keys() - saved.keys() if not name.endswith("lm_head.weight")}  # acting uses no lm_head
    shapes = {name for name in own.keys() & saved.keys() if own[name].shape != saved[name].shape}
    unexpected = saved.keys() - own.keys()
    for problem, names in {"lacks": missing, "has an unexpected": unexpected, "has another shape of": shapes}.items():
        if names:
            some = ", ".join(sorted(names)[:3])
            raise CheckpointError(
                f"{path}: {problem} tensor {some} ({len(names)} in all); it belongs to a policy of another size. Set "
                "policy.settings as it was trained."
            )
    policy.load_state_dict(saved, strict=False)


def freeze_unused(policy: PreTrainedPolicy) -> None:
    """No gradient for the heads that predict words, which acting never asks."""
    for name, parameter in policy.named_parameters():
        if name.endswith("lm_head.weight"):
            parameter.requires_grad_(False)


def _check_inputs(section: LeRobotPolicySection) -> None:
    if not section.cameras:
        raise ConfigError(f"policy.cameras is empty; {section.type} needs at least one image.")
    if section.environment_state:
        raise ConfigError(
            f"policy.environment_state is true; {section.type} reads images and joint positions only. Set it to false."
        )


def _tokenizer(section: LeRobotPolicySection) -> Path | None:
    """The folder of the tokenizer; none for the one that LeRobot names."""
    return section.tokenizer or (backbone_folder(TINY) if section.settings.get("size") == "tiny" else None)


def _tiny_fields(section: LeRobotPolicySection) -> dict[str, Any]:
    folder = str(_tokenizer(section))
    common = {
        "max_state_dim": _TINY_ACTION_DIM,
        "max_action_dim": _TINY_ACTION_DIM,
        "tokenizer_max_length": _TINY_PROMPT[section.type],
    }
    if section.type == "smolvla":
        edge = TINY.image_size
        return {**common, "vlm_model_name": folder, "num_vlm_layers": -1, "resize_imgs_with_padding": (edge, edge)}
    return {**common, "tokenizer": folder, "image_resolution": (TINY.image_size, TINY.image_size)}


def _decode(kind: type[PreTrainedConfig], settings: Mapping[str, Any]) -> dict[str, Any]:
    """``settings`` with the types of LeRobot's fields."""
    hints = get_type_hints(kind)
    known = {field.name for field in dataclasses.fields(kind)} - _SET_ELSEWHERE.keys()
    values = {}
    for name, value in settings.items():
        if name in _SET_ELSEWHERE:
            raise ConfigError(f"policy.settings.{name} is not set here; it follows from {_SET_ELSEWHERE[name]}.")
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1)
            hint = f"did you mean {near[0]}?" if near else f"expected some of: {', '.join(sorted(known))}."
            raise ConfigError(f"policy.settings.{name} is not a field of LeRobot's {kind.__name__}; {hint}")
        try:
            values[name] = draccus.decode(hints[name], value)
        except (DecodingError, ParsingError, TypeError, ValueError) as error:
            raise ConfigError(f"policy.settings.{name} is {value!r}; expected {hints[name]} ({error}).") from error
    return values


def _saved_config(directory: Path, kind: type[PreTrainedConfig]) -> PreTrainedConfig:
    try:
        saved = PreTrainedConfig.from_pretrained(directory)
    except (OSError, ValueError, DecodingError, ParsingError) as error:
        raise CheckpointError(f"{directory}: its config.json cannot be read ({error}); expected a LeRobot policy.") from error
    if type(saved) is not kind:
        wanted = PreTrainedConfig.get_choice_name(kind)
        raise CheckpointError(
            f"{directory / 'config.json'}: holds a policy of type {saved.type!r}; expected {wanted!r}. Set policy.type, and "
            "policy.settings.size if it is a tiny one."
        )
    return saved


def _same_robot(saved: PreTrainedConfig, own: Mapping[str, Any]) -> bool:
    """Whether inputs and actions have the names and sizes of this run; images may differ in size, policies resize them."""

    def signature(features: Mapping[str, Any] | None) -> dict[str, Any]:
        return {name: feature.shape if feature.type.name != "VISUAL" else None for name, feature in (features or {}).items()
                if ".empty_camera_" not in name}  # fmt: skip

    return all(signature(getattr(saved, part)) == signature(own[part]) for part in ("input_features", "output_features"))
