"""From a config section to a policy and the processors around it."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch
from lerobot.configs import FeatureType, PolicyFeature, PreTrainedConfig
from lerobot.policies.factory import get_policy_class, make_pre_post_processors
from lerobot.policies.pretrained import PreTrainedPolicy
from lerobot.processor import PolicyProcessorPipeline
from lerobot.utils.constants import ACTION, OBS_ENV_STATE, OBS_IMAGES, OBS_STATE
from numpy.typing import NDArray
from torch import Tensor

from robotics.config import (
    AnyPolicySection,
    FlowVLASection,
    GaussianChunkSection,
    LeRobotPolicySection,
    SeesSection,
    TokenVLASection,
)
from robotics.envs.instructions import vocabulary
from robotics.envs.observation import environment_bounds
from robotics.policies.seam import ChunkPolicy

Pipeline = PolicyProcessorPipeline[Any, Any]
_SIZES = ("max_delta", "width", "depth", "num_heads", "patch_size", "image_tokens")


def policy_config(section: AnyPolicySection, *, num_joints: int, execution_horizon: int) -> PreTrainedConfig:
    """LeRobot's config of the policy that ``section`` describes, for the observations of the arm's scenes."""
    common = {
        "device": "cpu",
        "input_features": input_features(section, num_joints),
        "output_features": {ACTION: PolicyFeature(type=FeatureType.ACTION, shape=(num_joints,))},
        "chunk_size": section.chunk_size,
        "n_action_steps": execution_horizon,
    }
    if isinstance(section, GaussianChunkSection):
        from robotics.policies.configuration_gaussian_chunk import GaussianChunkConfig

        return GaussianChunkConfig(
            **common,
            max_delta=section.max_delta,
            width=section.width,
            num_blocks=section.num_blocks,
            word_dim=section.word_dim,
            num_readers=section.num_readers,
            vocabulary=list(vocabulary()),
            sharpness=section.sharpness,
            turning_frame=section.turning_frame,
            initial_log_std=math.log(section.initial_std),
            min_log_std=math.log(section.min_std),
            max_log_std=math.log(section.max_std),
        )
    if isinstance(section, FlowVLASection):
        from robotics.policies.configuration_flow_vla import FlowVlaConfig

        own = _fields(section, "num_denoising_steps", "sde_noise", "stochastic_step", *_SIZES)
        return FlowVlaConfig(**common, **own, vocabulary=list(vocabulary()))
    if isinstance(section, TokenVLASection):
        from robotics.policies.configuration_token_vla import TokenVlaConfig

        own = _fields(section, "temperature", *_SIZES)
        return TokenVlaConfig(**common, **own, vocabulary=list(vocabulary()))
    from robotics.policies.lerobot_flow import lerobot_config

    return lerobot_config(section, **common)


def input_features(section: AnyPolicySection, num_joints: int) -> dict[str, PolicyFeature]:
    """What a policy of this section reads besides the instruction."""
    features = {OBS_STATE: PolicyFeature(type=FeatureType.STATE, shape=(num_joints,))}
    sees = isinstance(section, SeesSection)
    if not sees or section.environment_state:
        features[OBS_ENV_STATE] = PolicyFeature(type=FeatureType.ENV, shape=(len(environment_bounds),))
    for camera in section.cameras if sees else ():
        shape = (3, section.image_size, section.image_size)
        features[f"{OBS_IMAGES}.{camera}"] = PolicyFeature(type=FeatureType.VISUAL, shape=shape)
    return features


def new_policy(config: PreTrainedConfig, *, seed: int) -> PreTrainedPolicy:
    """A policy with random weights that depend on ``seed`` only, in eval mode."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return get_policy_class(config.type)(config).eval()


def as_chunk_policy(policy: PreTrainedPolicy) -> ChunkPolicy:
    """``policy`` itself when it can act and be scored, otherwise a view of it that can."""
    if isinstance(policy, ChunkPolicy):
        return policy
    from robotics.policies.lerobot_flow import chunk_view

    return chunk_view(policy)


def build_processors(
    config: PreTrainedConfig, joint_limits: NDArray[np.float64], section: AnyPolicySection | None = None
) -> tuple[Pipeline, Pipeline]:
    """Pre- and postprocessor: joint limits (``[A, 2]``, robot units) and the scene's bounds become [-1, 1], and back.

    The statistics are declared, not measured, so no entry has a range of zero. The ``section`` of a LeRobot policy may name a
    tokenizer, or a checkpoint whose own processors are used.
    """
    stats = {OBS_STATE: _declared(joint_limits), ACTION: _declared(joint_limits)}
    if config.env_state_feature is not None:
        stats[OBS_ENV_STATE] = _declared(environment_bounds)
    if isinstance(section, LeRobotPolicySection):
        from robotics.policies.lerobot_flow import lerobot_processors

        return lerobot_processors(config, section, stats)
    return make_pre_post_processors(config, dataset_stats=stats)


def cameras_of(config: PreTrainedConfig) -> dict[str, tuple[int, int]]:
    """Cameras that a policy looks at, by name, with height and width."""
    return {name.removeprefix(f"{OBS_IMAGES}."): feature.shape[1:] for name, feature in config.image_features.items()}


def _fields(section: AnyPolicySection, *names: str) -> dict[str, Any]:
    return {name: getattr(section, name) for name in names}


def _declared(bounds: NDArray[np.float64]) -> dict[str, Tensor]:
    """Statistics of numbers that fill their bounds ``[E, 2]`` evenly, whichever normalisation asks."""
    low, high = torch.tensor(bounds, dtype=torch.float32).unbind(dim=1)
    spread = {"mean": (low + high) / 2, "std": (high - low) / 2}  # so that mean-std normalisation gives [-1, 1] too
    return {"min": low, "max": high, "q01": low, "q99": high, **spread}
