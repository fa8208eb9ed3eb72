"""LeRobot's pi0 and pi0.5, built at the size that their configuration names.

The networks, the sampler and the training loss are LeRobot's. Only while a policy is being constructed, three names of
LeRobot's module stand for versions that take the sizes from the configuration instead of from a table of two.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

from lerobot.policies.pi0 import modeling_pi0
from lerobot.policies.pi0.modeling_pi0 import PI0Policy
from lerobot.policies.pi05 import modeling_pi05
from lerobot.policies.pi05.modeling_pi05 import PI05Policy
from torch import nn
from transformers import PreTrainedConfig

from robotics.policies.lerobot_configuration_small import SmallPI0Config, SmallPI05Config

_NUM_HEADS = 8


class SmallPI0Policy(PI0Policy):
    """pi0."""

    config_class = SmallPI0Config
    name = "mmrl_small_pi0"

    def __init__(self, config: SmallPI0Config, **kwargs: Any) -> None:
        with _sized(modeling_pi0, config):
            super().__init__(config, **kwargs)


class SmallPI05Policy(PI05Policy):
    """pi0.5."""

    config_class = SmallPI05Config
    name = "mmrl_small_pi05"

    def __init__(self, config: SmallPI05Config, **kwargs: Any) -> None:
        with _sized(modeling_pi05, config):
            super().__init__(config, **kwargs)


@contextmanager
def replaced(module: ModuleType, **names: Any) -> Iterator[None]:
    """Let ``names`` of ``module`` stand for other objects inside the ``with`` block."""
    before = {name: getattr(module, name) for name in names}
    try:
        for name, value in names.items():
            setattr(module, name, value)
        yield
    finally:
        for name, value in before.items():
            setattr(module, name, value)


def _sized(module: ModuleType, config: SmallPI0Config | SmallPI05Config):
    """Constructors of ``module`` that obey ``config``."""
    paligemma, expert = module.PaliGemmaForConditionalGenerationWithPiGemma, module.PiGemmaForCausalLM

    def gemma_config(variant: str) -> Any:
        return module.GemmaConfig(config.width, config.depth, config.mlp_dim, _NUM_HEADS, 1, config.head_dim)

    def small_paligemma(*, config: PreTrainedConfig) -> nn.Module:
        return paligemma(config=_shrink_paligemma(config, sizes))

    def small_expert(*, config: PreTrainedConfig) -> nn.Module:
        config.vocab_size = sizes.vocab_size
        return expert(config=config)

    sizes = config
    return replaced(
        module,
        get_gemma_config=gemma_config,
        PaliGemmaForConditionalGenerationWithPiGemma=small_paligemma,
        PiGemmaForCausalLM=small_expert,
    )


def _shrink_paligemma(config: PreTrainedConfig, sizes: SmallPI0Config | SmallPI05Config) -> PreTrainedConfig:
    config.text_config.vocab_size = sizes.vocab_size
    vision = config.vision_config
    vision.hidden_size, vision.intermediate_size = sizes.vision_width, sizes.vision_mlp_dim
    vision.num_hidden_layers, vision.num_attention_heads = sizes.vision_depth, sizes.vision_heads
    vision.patch_size, vision.projection_dim = sizes.patch_size, sizes.width
    return config
