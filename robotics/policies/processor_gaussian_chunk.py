"""What stands between a robot or environment and the Gaussian chunk policy: words to ids, and units to [-1, 1] and back."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from lerobot.configs import FeatureType, PipelineFeatureType, PolicyFeature
from lerobot.lerobot_types import TransitionKey
from lerobot.processor import (
    ObservationProcessorStep,
    PolicyProcessorPipeline,
    ProcessorStepRegistry,
)
from lerobot.processor.factory import make_default_policy_processor_steps, make_policy_processor_pipelines
from lerobot.utils.constants import OBS_LANGUAGE_ATTENTION_MASK, OBS_LANGUAGE_TOKENS
from torch import Tensor

from mmrl.errors import DataError
from robotics.envs.instructions import split_words
from robotics.policies.configuration_gaussian_chunk import GaussianChunkConfig


@ProcessorStepRegistry.register(name="mmrl_word_ids")
@dataclass
class WordIdsProcessorStep(ObservationProcessorStep):
    """The instruction (``task`` of the batch, one string per row) as word ids ``[B, max_words]`` and their mask.

    Ids count from 1 in the order of ``vocabulary``; words outside it are left out, and 0 fills the rest.
    """

    vocabulary: list[str] = field(default_factory=list)
    max_words: int = 16

    def __post_init__(self) -> None:
        self._ids = {word: i for i, word in enumerate(self.vocabulary, start=1)}

    def observation(self, observation: dict[str, Any]) -> dict[str, Any]:
        texts = (self.transition.get(TransitionKey.COMPLEMENTARY_DATA) or {}).get("task")
        texts = [texts] if isinstance(texts, str) else texts
        if not texts or not all(isinstance(text, str) for text in texts):
            raise DataError(f"mmrl_word_ids: 'task' is {texts!r:.80}; expected the instruction, one string per row.")
        tokens = torch.zeros(len(texts), self.max_words, dtype=torch.long)
        for row, text in enumerate(texts):
            known = [self._ids[word] for word in split_words(text) if word in self._ids][: self.max_words]
            tokens[row, : len(known)] = torch.tensor(known, dtype=torch.long)
        device = next((value.device for value in observation.values() if isinstance(value, Tensor)), None)
        tokens = tokens.to(device)
        return {**observation, OBS_LANGUAGE_TOKENS: tokens, OBS_LANGUAGE_ATTENTION_MASK: tokens > 0}

    def get_config(self) -> dict[str, Any]:
        return {"vocabulary": list(self.vocabulary), "max_words": self.max_words}

    def transform_features(
        self, features: dict[PipelineFeatureType, dict[str, PolicyFeature]]
    ) -> dict[PipelineFeatureType, dict[str, PolicyFeature]]:
        added = PolicyFeature(type=FeatureType.LANGUAGE, shape=(self.max_words,))
        observation = features[PipelineFeatureType.OBSERVATION]
        for name in (OBS_LANGUAGE_TOKENS, OBS_LANGUAGE_ATTENTION_MASK):
            observation.setdefault(name, added)
        return features


def make_mmrl_gaussian_chunk_pre_post_processors(
    config: GaussianChunkConfig, dataset_stats: dict[str, dict[str, Tensor]] | None = None
) -> tuple[PolicyProcessorPipeline[dict[str, Any], dict[str, Any]], PolicyProcessorPipeline[Tensor, Tensor]]:
    """LeRobot's standard steps with the instruction as word ids.

    The policy adds motions to the observed joints, so ``dataset_stats`` of ``action`` and ``observation.state`` must agree; the
    adapter gives both the joint limits.
    """
    steps = make_default_policy_processor_steps(config, dataset_stats)
    words = WordIdsProcessorStep(vocabulary=config.vocabulary, max_words=config.max_words)
    return make_policy_processor_pipelines(
        input_steps=[steps.rename_observations, steps.add_batch_dim, words, steps.to_device, steps.normalize],
        output_steps=[steps.unnormalize, steps.to_cpu],
    )
