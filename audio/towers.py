"""What a frozen audio tower makes of clips, computed once and kept with the prompt.

With ``policy.freeze_tower`` the embeddings of a clip cannot change while a batch is used, so rollouts, the reference policy and
every pass of the update read the same ones. They end behind the projection: with ``train_projection`` nothing is kept.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from transformers.masking_utils import create_bidirectional_mask

from audio.families import Family
from mmrl.generation import EncodedPrompt, collate_prompts


@torch.no_grad()
def embed_clips(model: nn.Module, prompts: Sequence[EncodedPrompt], *, family: Family) -> list[EncodedPrompt]:
    """The same prompts with ``audio_embeds`` ``[A, D]`` in the place of ``input_features``."""
    with_clips = [prompt for prompt in prompts if "input_features" in prompt]
    if not with_clips:
        return list(prompts)
    names = ("input_ids", "input_features", "feature_attention_mask")
    parts = [{name: prompt[name] for name in names if name in prompt} for prompt in with_clips]
    inputs = collate_prompts(parts, 0, model.device)
    embeds = _embed(model, inputs, family).cpu()
    counts = [int((prompt["input_ids"] == model.config.audio_token_id).sum()) for prompt in with_clips]
    pieces = iter(embeds.split(counts))
    return [_replace_features(prompt, next(pieces)) if "input_features" in prompt else prompt for prompt in prompts]


def _replace_features(prompt: EncodedPrompt, embeds: Tensor) -> EncodedPrompt:
    return {**{name: value for name, value in prompt.items() if name != "input_features"}, "audio_embeds": embeds}


def _embed(model: nn.Module, inputs: dict[str, Tensor], family: Family) -> Tensor:
    """``[A, D]`` for all clips, in order."""
    features, mask = inputs["input_features"], inputs.get("feature_attention_mask")
    if family.features == "exact":
        return model.get_audio_features(features, feature_attention_mask=mask, return_dict=True).last_hidden_state
    if family.features == "windows":
        return model.get_audio_features(features, return_dict=True).pooler_output
    tower = model.audio_tower
    lengths, counts = tower._get_feat_extract_output_lengths(mask.sum(dim=1))
    width = features.shape[-1] // 2
    valid = (torch.arange(width, device=features.device) < lengths[:, None]).long()
    attention = create_bidirectional_mask(
        config=tower.config, inputs_embeds=features.new_zeros(len(features), width, 1), attention_mask=valid
    )
    states = model.multi_modal_projector(tower(features, attention_mask=attention).last_hidden_state)
    return states[torch.arange(states.shape[1], device=states.device) < counts[:, None]]
