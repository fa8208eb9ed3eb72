"""What a robot run will need, worked out on torch's meta device: no weights are made or loaded and nothing is downloaded."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from lerobot.configs import PreTrainedConfig
from lerobot.policies.factory import get_policy_class
from lerobot.policies.pretrained import PreTrainedPolicy
from lerobot.utils.constants import OBS_LANGUAGE_ATTENTION_MASK, OBS_LANGUAGE_TOKENS, OBS_STATE
from torch import Tensor
from torch.fx.experimental import _config as shape_rules
from transformers.models.smolvlm import modeling_smolvlm

from robotics.config import LeRobotPolicySection, RoboticsRunConfig
from robotics.envs.families import build_family
from robotics.policies.building import policy_config
from robotics.policies.lerobot_flow import freeze_unused
from robotics.policies.lerobot_local import SMOLVLM2_500M, backbone_folder
from robotics.policies.lerobot_modeling_small import replaced
from robotics.policies.lerobot_prefix import FLOW_POLICIES
from robotics.policies.lerobot_views import FlowChunkView


def plan(config: RoboticsRunConfig, *, num_joints: int) -> list[tuple[str, str]]:
    """Rows of ``mmrl check --no-weights``: weights, tokens, decisions and a memory forecast per process.

    One decision and its score go through a flow policy of LeRobot, so shapes that do not fit are found. The forecast counts
    weights, gradients, AdamW's two moments (float32) and what is kept of a step's episodes; activations come on top.
    """
    section, rollout, sampling = _described_here(config.policy), config.rollout, config.sampling
    described = policy_config(section, num_joints=num_joints, execution_horizon=rollout.execution_horizon)
    described.device = "meta"
    with torch.device("meta"):
        policy = get_policy_class(described.type)(described).eval()
    rows = []
    if isinstance(policy, FLOW_POLICIES):
        freeze_unused(policy)
        rows = _flow_rows(policy)
    total = sum(parameter.numel() for parameter in policy.parameters())
    size = sum(parameter.numel() * parameter.element_size() for parameter in policy.parameters())
    trained = sum(parameter.numel() for parameter in policy.parameters() if parameter.requires_grad)
    longest = max(rollout.max_env_steps or build_family(name).max_env_steps for name in config.tasks.families)
    decisions = -(-longest // rollout.execution_horizon)
    episodes = sampling.tasks_per_step * sampling.group_size
    pixels = sum(3 * feature.shape[1] * feature.shape[2] for feature in described.image_features.values())
    return [
        ("policy", f"{described.type} ({type(policy).__name__})"),
        ("weights", f"{total:,}"),
        ("trained weights", f"{trained:,}"),
        *rows,
        ("decisions per episode", f"{decisions} of {rollout.execution_horizon} control steps each"),
        ("episodes per step", f"{episodes:,} ({sampling.tasks_per_step} tasks x {sampling.group_size})"),
        ("memory: weights", _gib(size)),
        ("memory: gradients, AdamW", _gib(12 * trained)),
        ("memory: images kept (host)", _gib(episodes * decisions * pixels)),
    ]


def _described_here(section: object) -> object:
    """The section without what has to be on this machine for a run and is not."""
    if not isinstance(section, LeRobotPolicySection):
        return section
    update = {}
    if section.init_from is not None and not section.init_from.is_dir():
        update["init_from"] = None
    if section.tokenizer is None or not section.tokenizer.is_dir():
        update["tokenizer"] = None
        if section.type == "smolvla" and section.settings.get("size") is None:
            update["tokenizer"] = backbone_folder(SMOLVLM2_500M)
    return section.model_copy(update=update)


def _flow_rows(policy: PreTrainedPolicy) -> list[tuple[str, str]]:
    view = FlowChunkView(policy)
    observation = _observation(policy.config, rows=2)
    # Two places of SmolVLM look at values, to leave out patches of images that are not there; here all are.
    all_patches = shape_rules.patch(meta_nonzero_assume_all_nonzero=True)
    no_mask = replaced(modeling_smolvlm, create_bidirectional_mask=lambda **_: None)
    with torch.device("meta"), all_patches, no_mask:
        decision = view.decide(observation, torch.zeros(2, *view.noise_shape()))
        view.score(observation, decision.record)
    return [
        (
            "cameras",
            ", ".join(f"{name.rpartition('.')[2]} {tuple(f.shape)}" for name, f in policy.config.image_features.items()),
        ),
        ("prompt", f"{policy.config.tokenizer_max_length} tokens"),
        ("chunk", f"{tuple(decision.chunk.shape[1:])}, padded to {view.width} action dimensions"),
        ("denoising", f"{view.num_steps} steps, noise level {view.noise_level}"),
    ]


def _observation(config: PreTrainedConfig, *, rows: int) -> Mapping[str, Tensor]:
    prompt = (rows, config.tokenizer_max_length)
    return {
        OBS_STATE: torch.zeros(rows, *config.robot_state_feature.shape, device="meta"),
        **{name: torch.zeros(rows, *feature.shape, device="meta") for name, feature in config.image_features.items()},
        OBS_LANGUAGE_TOKENS: torch.zeros(prompt, dtype=torch.int64, device="meta"),
        OBS_LANGUAGE_ATTENTION_MASK: torch.ones(prompt, dtype=torch.bool, device="meta"),
    }


def _gib(count: float) -> str:
    return f"{count / 2**30:.2f} GiB"
