"""LeRobot's processors of pi0 and pi0.5 around a tokenizer of this machine."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

from lerobot.configs import PreTrainedConfig
from lerobot.policies.pi0 import processor_pi0
from lerobot.policies.pi05 import processor_pi05
from lerobot.processor import PolicyProcessorPipeline, TokenizerProcessorStep
from torch import Tensor

from robotics.policies.lerobot_configuration_small import SmallPI0Config, SmallPI05Config
from robotics.policies.lerobot_modeling_small import replaced

Pipeline = PolicyProcessorPipeline[Any, Any]
Stats = dict[str, dict[str, Tensor]]


def make_mmrl_small_pi0_pre_post_processors(
    config: SmallPI0Config, dataset_stats: Stats | None = None
) -> tuple[Pipeline, Pipeline]:
    """Those of pi0."""
    return pi_processors(config, dataset_stats, Path(config.tokenizer))


def make_mmrl_small_pi05_pre_post_processors(
    config: SmallPI05Config, dataset_stats: Stats | None = None
) -> tuple[Pipeline, Pipeline]:
    """Those of pi0.5."""
    return pi_processors(config, dataset_stats, Path(config.tokenizer))


def pi_processors(config: PreTrainedConfig, dataset_stats: Stats | None, tokenizer: Path) -> tuple[Pipeline, Pipeline]:
    """LeRobot's processors of a pi0 or pi0.5 config, which name their tokenizer themselves, with ``tokenizer`` instead."""
    if isinstance(config, processor_pi0.PI0Config):
        module, make = processor_pi0, processor_pi0.make_pi0_pre_post_processors
    else:
        module, make = processor_pi05, processor_pi05.make_pi05_pre_post_processors
    with replaced(module, TokenizerProcessorStep=partial(_tokenizer_step, tokenizer)):
        return make(config, dataset_stats)


def _tokenizer_step(folder: Path, *, tokenizer_name: str, **settings: Any) -> TokenizerProcessorStep:
    return TokenizerProcessorStep(tokenizer_name=str(folder), **settings)
