"""What stands between a robot or environment and the vision-language-action policies."""

from __future__ import annotations

from typing import Any

from lerobot.processor import PolicyProcessorPipeline
from lerobot.processor.factory import make_default_policy_processor_steps, make_policy_processor_pipelines
from torch import Tensor

from robotics.policies.processor_gaussian_chunk import WordIdsProcessorStep
from robotics.policies.vla_config import VlaConfig

Pipelines = tuple[PolicyProcessorPipeline[dict[str, Any], dict[str, Any]], PolicyProcessorPipeline[Tensor, Tensor]]


def make_vla_pre_post_processors(config: VlaConfig, dataset_stats: dict[str, dict[str, Tensor]] | None = None) -> Pipelines:
    """LeRobot's standard steps with the instruction as word ids. Images pass as they are, floats in [0, 1].

    The policies add motions to the observed joints, so ``dataset_stats`` of ``action`` and ``observation.state`` must agree.
    """
    steps = make_default_policy_processor_steps(config, dataset_stats)
    words = WordIdsProcessorStep(vocabulary=config.vocabulary, max_words=config.max_words)
    return make_policy_processor_pipelines(
        input_steps=[steps.rename_observations, steps.add_batch_dim, words, steps.to_device, steps.normalize],
        output_steps=[steps.unnormalize, steps.to_cpu],
    )
