"""The audio adapter: which policy, which tasks, which rewards."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path

from audio.config import BUILTIN_POLICIES, AudioRolloutConfig, AudioRunConfig, DatasetTasksConfig
from audio.families import find_family, load_processor, read_model_config
from audio.frontend import AudioFrontend, open_media
from audio.judges import rubric_terms
from audio.planning import plan
from audio.rewards import AUDIO_TERMS
from audio.tasks import ToneTasks, tokenizer_corpus
from audio.tiny import BUILDERS, build_tiny
from audio.towers import embed_clips
from mmrl.adapter import RewardTerm
from mmrl.chat import ChatTask
from mmrl.data_vetting import vetted_tasks
from mmrl.language import LanguageAdapter
from mmrl.language_check import run_spec
from mmrl.rewards import TEXT_TERMS

ASSETS = Path(__file__).parent / "assets"


def build_adapter(config: AudioRunConfig) -> LanguageAdapter:
    """The adapter of an audio run. Loads the processor; weights are loaded by ``build_policy``."""
    directory, options = resolve_policy(config.policy.path, seed=config.seed), {"revision": config.policy.revision}
    model_config = read_model_config(directory, **options)
    family = find_family(model_config.model_type, directory)
    processor = load_processor(family, directory, **options)
    frontend = AudioFrontend(processor=processor, config=config.rollout, family=family, model_config=model_config)
    constant = config.policy.freeze_tower and not config.policy.train_projection
    return LanguageAdapter(
        policy_config=config.policy,
        rollout_config=config.rollout,
        frontend=frontend,
        policy_dir=directory,
        sources=task_sources(config),
        reward_terms=reward_terms(config, frontend),
        seed=config.seed,
        trained_in_tower=family.projection if config.policy.train_projection else (),
        embed_media=partial(embed_clips, family=family) if constant else None,
    )


def reward_terms(config: AudioRunConfig, frontend: AudioFrontend) -> Mapping[str, RewardTerm]:
    """Rules by name, and the terms that a judge or the clip itself decides."""
    rules = {**TEXT_TERMS, **AUDIO_TERMS}
    judged = rubric_terms(
        config, frontend, judge=config.judge, rubrics=config.rubrics, known=rules, build_adapter=build_adapter
    )
    return {**rules, **judged}


def resolve_policy(path: str, *, seed: int) -> str:
    """A directory or hub name: built-in names are made or found on this machine."""
    if path in BUILDERS:
        directory = tempfile.mkdtemp(prefix="mmrl-tiny-")
        build_tiny(path, Path(directory), tokenizer_corpus(), seed=seed)
        return directory
    if path in BUILTIN_POLICIES:
        return str(ASSETS / path.replace("-", "_"))
    return path


def check_without_weights(config: AudioRunConfig) -> list[tuple[str, str]]:
    """Shapes and a memory forecast, as ``(name, value)`` rows."""
    return plan(config, resolve_policy(config.policy.path, seed=config.seed))


def media_opener(limits: AudioRolloutConfig) -> Callable[[str, object], object]:
    """What ``mmrl data check`` opens media with, under the limits of a run."""
    return partial(open_media, config=limits)


def task_sources(config: AudioRunConfig) -> Mapping[str, Callable[[], Sequence[ChatTask]]]:
    """A source per split, made when asked for."""
    tasks = config.tasks
    if isinstance(tasks, DatasetTasksConfig):
        here = Path.cwd()
        spec = run_spec(f"{__name__}:build_adapter", config)
        return {split: partial(vetted_tasks, getattr(tasks, split), base_dir=here, spec=spec) for split in ("train", "eval")}
    speaker = {"speaker": tasks.speaker}
    return {
        "train": partial(ToneTasks, tasks.kinds, split="train", num_tasks=tasks.num_tasks, seed=config.seed, **speaker),
        "eval": partial(ToneTasks, tasks.eval_kinds, split="eval", num_tasks=100_000, **speaker),
    }
