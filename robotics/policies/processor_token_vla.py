"""Processors of the token policy, under the name by which LeRobot finds them."""

from __future__ import annotations

from torch import Tensor

from robotics.policies.configuration_token_vla import TokenVlaConfig
from robotics.policies.vla_processors import Pipelines, make_vla_pre_post_processors


def make_mmrl_token_vla_pre_post_processors(
    config: TokenVlaConfig, dataset_stats: dict[str, dict[str, Tensor]] | None = None
) -> Pipelines:
    """See `robotics.policies.vla_processors.make_vla_pre_post_processors`."""
    return make_vla_pre_post_processors(config, dataset_stats)
