"""The reward terms of judging that a run's config asks for, with their judges."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from mmrl.adapter import RewardTerm
from mmrl.config import RewardConfig
from mmrl.errors import ConfigError
from mmrl.judge import Judge, JudgeClient, Retry
from mmrl.judge_cache import JudgeCache
from mmrl.judge_config import EndpointJudgeConfig, ModelJudgeConfig, RulesJudgeConfig
from mmrl.judge_endpoint import EndpointJudge
from mmrl.language import Frontend
from vision.preferences_config import PairwiseConfig, R1RewardConfig
from vision.r1_reward import R1_TERMS, ConclusionJudge, R1Reward

if TYPE_CHECKING:
    from vision.config import VisionRunConfig

JudgeSection = RulesJudgeConfig | ModelJudgeConfig | EndpointJudgeConfig


def judging_terms(config: VisionRunConfig, frontend: Frontend, build_adapter: Callable[[Any], Any]) -> dict[str, RewardTerm]:
    """``r1_result``, ``r1_format``, and of ``r1_reward`` and ``pairwise`` those that the run weighs.

    No judge is loaded for the others; ``build_adapter`` makes the adapter of a judge that is a model.
    """
    terms: dict[str, RewardTerm] = dict(R1_TERMS)
    if "r1_reward" in config.rewards:
        terms["r1_reward"] = r1_reward_term(config.r1_reward, lambda section: _model_judge(section, config, build_adapter))
    if "pairwise" in config.rewards:
        if config.pairwise is None:
            raise ConfigError("rewards.pairwise: needs the section pairwise, which names the judge.")
        terms["pairwise"] = pairwise_term(config.pairwise, config, frontend, build_adapter)
    return terms


def r1_reward_term(section: R1RewardConfig, model_judge: Callable[[ModelJudgeConfig], Judge]) -> R1Reward:
    """The term ``r1_reward`` with the judge of its section."""
    judge = section.judge
    if isinstance(judge, RulesJudgeConfig):
        answers: Judge = ConclusionJudge()
    else:
        answers = endpoint_judge(judge) if isinstance(judge, EndpointJudgeConfig) else model_judge(judge)
    disagreement = -1.0 if section.disagreement == "minus_one" else 0.0
    return R1Reward(client=build_client(judge, answers), disagreement=disagreement, timeout_s=section.timeout_s)


def pairwise_term(
    section: PairwiseConfig, config: VisionRunConfig, frontend: Frontend, build_adapter: Callable[[Any], Any]
) -> RewardTerm:
    """The term ``pairwise`` with the judge of its section."""
    from vision.r1_reward_pairwise import PairJudge, Pairwise

    if isinstance(section.judge, EndpointJudgeConfig):
        judge: Judge = endpoint_judge(section.judge)
    else:
        loaded = _model_judge(section.judge, config, build_adapter)
        judge = PairJudge(adapter=loaded.adapter, policy=loaded.policy, prompt=section.prompt)
    return Pairwise(
        client=build_client(section.judge, judge),
        media=frontend.media,
        opponents=section.opponents,
        timeout_s=section.timeout_s,
    )


def build_client(section: JudgeSection, judge: Judge) -> JudgeClient:
    """A client of ``judge`` within the bounds of its config section."""
    cache = JudgeCache(section.cache_dir) if section.cache_dir is not None else None
    return JudgeClient(judge=judge, cache=cache, retry=Retry(attempts=section.attempts), workers=section.workers)


def endpoint_judge(section: EndpointJudgeConfig) -> EndpointJudge:
    """The judge behind an address."""
    return EndpointJudge(**section.model_dump(exclude={"name", "workers", "attempts", "cache_dir"}))


def _model_judge(section: ModelJudgeConfig, config: VisionRunConfig, build_adapter: Callable[[Any], Any]) -> Any:
    """A judge in this process. It sees media under the run's limits; its own run has no judge."""
    from mmrl.judge_model import ModelJudge, default_device

    policy = type(config.policy)(path=section.path, revision=section.revision, dtype=section.dtype)
    limits = {"max_new_tokens": section.max_new_tokens, "max_prompt_tokens": section.max_prompt_tokens}
    rollout = config.rollout.model_copy(update=limits)
    alone: Mapping[str, Any] = {"policy": policy, "rollout": rollout, "rewards": {"accuracy": RewardConfig()}}
    adapter = build_adapter(config.model_copy(update=alone))
    return ModelJudge(adapter=adapter, policy=adapter.build_policy().to(default_device()))
