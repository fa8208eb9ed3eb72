"""From a config section to a policy and the processors around it."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch
from lerobot.configs import FeatureType, PolicyFeature
from lerobot.processor import PolicyProcessorPipeline
from lerobot.utils.constants import ACTION, OBS_ENV_STATE, OBS_STATE
from numpy.typing import NDArray
from torch import Tensor

from robotics.config import GaussianChunkPolicySection
from robotics.envs.families import TaskFamily
from robotics.envs.instructions import vocabulary
from robotics.policies.configuration_gaussian_chunk import GaussianChunkConfig
from robotics.policies.processor_gaussian_chunk import make_mmrl_gaussian_chunk_pre_post_processors


def policy_config(
    section: GaussianChunkPolicySection, family: TaskFamily, *, num_joints: int, execution_horizon: int
) -> GaussianChunkConfig:
    """LeRobot's config of the policy that ``section`` describes, for the observations of ``family``."""
    joints = (num_joints,)
    return GaussianChunkConfig(
        device="cpu",
        input_features={
            OBS_STATE: PolicyFeature(type=FeatureType.STATE, shape=joints),
            OBS_ENV_STATE: PolicyFeature(type=FeatureType.ENV, shape=(len(family.environment_bounds),)),
        },
        output_features={ACTION: PolicyFeature(type=FeatureType.ACTION, shape=joints)},
        chunk_size=section.chunk_size,
        n_action_steps=execution_horizon,
        max_delta=section.max_delta,
        hidden_sizes=list(section.hidden_sizes),
        word_dim=section.word_dim,
        vocabulary=list(vocabulary()),
        initial_log_std=math.log(section.initial_std),
        min_log_std=math.log(section.min_std),
        max_log_std=math.log(section.max_std),
    )


def build_processors(
    config: GaussianChunkConfig, family: TaskFamily, joint_limits: NDArray[np.float64]
) -> tuple[PolicyProcessorPipeline[dict[str, Any], dict[str, Any]], PolicyProcessorPipeline[Tensor, Tensor]]:
    """Pre- and postprocessor: joint limits (``[A, 2]``, robot units) and the family's bounds become [-1, 1], and back.

    The statistics are declared, not measured, so no entry has a range of zero.
    """

    def limits(bounds: NDArray[np.float64]) -> dict[str, Tensor]:
        low, high = torch.tensor(bounds, dtype=torch.float32).unbind(dim=1)
        return {"min": low, "max": high}

    stats = {OBS_STATE: limits(joint_limits), ACTION: limits(joint_limits), OBS_ENV_STATE: limits(family.environment_bounds)}
    return make_mmrl_gaussian_chunk_pre_post_processors(config, stats)
