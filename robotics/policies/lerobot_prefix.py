"""What LeRobot's flow policies do once per observation, and the velocity that they predict from it, with gradients.

SmolVLA, pi0 and pi0.5 read images, instruction and state once and keep keys and values; each denoising step attends to them.
LeRobot's own sampler runs without gradient and gives only its end point, so these functions call the parts that it is made of.
Axes: ``B`` batch, ``L`` tokens of the observation, ``H`` chunk, ``M`` action dimensions with padding.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from lerobot.policies.common.vla_utils import make_att_2d_masks, prepare_attention_masks_4d
from lerobot.policies.pi0.modeling_pi0 import PI0Policy
from lerobot.policies.pi05.modeling_pi05 import PI05Policy
from lerobot.policies.pretrained import PreTrainedPolicy
from lerobot.policies.smolvla.modeling_smolvla import SmolVLAPolicy
from lerobot.utils.constants import OBS_LANGUAGE_ATTENTION_MASK, OBS_LANGUAGE_TOKENS, OBS_STATE
from torch import Tensor, nn

from robotics.policies.seam import Observation

FLOW_POLICIES = (SmolVLAPolicy, PI0Policy, PI05Policy)


Velocity = Callable[[Tensor, Tensor], Tensor]
"""Of ``x`` ``[B, H, M]`` at ``time`` ``[B]``: ``[B, H, M]`` float32."""


def num_denoising_steps(policy: PreTrainedPolicy) -> int:
    """Steps from noise to a chunk."""
    return policy.config.num_steps if isinstance(policy, SmolVLAPolicy) else policy.config.num_inference_steps


def observation_keys(policy: PreTrainedPolicy) -> tuple[str, ...]:
    """Entries of a preprocessed batch that the policy reads; cameras that it only makes room for are not among them."""
    cameras = [name for name in policy.config.image_features if ".empty_camera_" not in name]
    state = [] if isinstance(policy, PI05Policy) else [OBS_STATE]  # pi0.5 reads the state as text
    return (*state, *cameras, OBS_LANGUAGE_TOKENS, OBS_LANGUAGE_ATTENTION_MASK)


def read(policy: PreTrainedPolicy, observation: Observation) -> Velocity:
    """Read the observation, once; what comes back can be asked for velocities. No gradient reaches a frozen reader."""
    batch = dict(observation)
    with torch.set_grad_enabled(torch.is_grad_enabled() and any(p.requires_grad for p in _readers(policy))):
        cached = _read_smolvla(policy, batch) if isinstance(policy, SmolVLAPolicy) else _read_pi(policy, batch)
    if isinstance(policy, PI0Policy):
        cached["state"] = policy.prepare_state(batch)

    def velocity(x: Tensor, time: Tensor) -> Tensor:
        return policy.model.denoise_step(**cached, x_t=x, timestep=time).float()

    return velocity


def _readers(policy: PreTrainedPolicy) -> list[nn.Parameter]:
    if isinstance(policy, SmolVLAPolicy):
        return [*policy.model.vlm_with_expert.vlm.parameters(), *policy.model.state_proj.parameters()]
    return list(policy.model.paligemma_with_expert.paligemma.parameters())


def _read_smolvla(policy: SmolVLAPolicy, batch: dict[str, Tensor]) -> dict[str, Any]:
    model = policy.model
    images, image_masks = policy.prepare_images(batch)
    tokens, token_masks = batch[OBS_LANGUAGE_TOKENS], batch[OBS_LANGUAGE_ATTENTION_MASK]
    embedded, padding, blocks = model.embed_prefix(images, image_masks, tokens, token_masks, state=policy.prepare_state(batch))
    _, cache = model.vlm_with_expert.forward(
        attention_mask=make_att_2d_masks(padding, blocks),
        position_ids=padding.cumsum(dim=1) - 1,
        past_key_values=None,
        inputs_embeds=[embedded, None],
        use_cache=True,
    )
    return {"prefix_pad_masks": padding, "past_key_values": cache}


def _read_pi(policy: PI0Policy | PI05Policy, batch: dict[str, Tensor]) -> dict[str, Any]:
    model = policy.model
    images, image_masks = policy._preprocess_images(batch)
    tokens, token_masks = batch[OBS_LANGUAGE_TOKENS], batch[OBS_LANGUAGE_ATTENTION_MASK]
    embedded, padding, blocks = model.embed_prefix(images, image_masks, tokens, token_masks)
    # As LeRobot's sampler does: the attention that takes a mask of any shape.
    model.paligemma_with_expert.paligemma.model.language_model.config._attn_implementation = "eager"
    _, cache = model.paligemma_with_expert.forward(
        attention_mask=prepare_attention_masks_4d(make_att_2d_masks(padding, blocks)),
        position_ids=padding.cumsum(dim=1) - 1,
        past_key_values=None,
        inputs_embeds=[embedded, None],
        use_cache=True,
    )
    return {"prefix_pad_masks": padding, "past_key_values": cache}
