"""The vision adapter: which policy, which tasks, which rewards."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path

from transformers import AutoProcessor

from mmrl.chat import ChatTask
from mmrl.data_vetting import vetted_tasks
from mmrl.errors import ConfigError
from mmrl.language import LanguageAdapter
from mmrl.language_check import run_spec
from mmrl.rewards import TEXT_TERMS
from vision.attention_maps import illustrate
from vision.config import DatasetTasksConfig, PlacedDigitTasksConfig, VisionRunConfig
from vision.digits import CONFIDENCE_TAGS, OBSERVE_TAGS, DigitTasks, tokenizer_corpus
from vision.frontend import VisionFrontend
from vision.observe_r1 import OBSERVE_TERMS
from vision.placed_digits import PlacedDigitTasks
from vision.planning import plan
from vision.preferences_config import PreferenceTasks
from vision.preferences_sources import preference_sources
from vision.r1_reward_terms import judging_terms
from vision.ral import RAL_TERMS
from vision.tiny import add_tags, build_tiny_qwen25_vl

ASSETS = Path(__file__).parent / "assets"


def build_adapter(config: VisionRunConfig) -> LanguageAdapter:
    """The adapter of a vision run. Loads the processor; weights are loaded by ``build_policy``."""
    directory = resolve_policy(config.policy.path, seed=config.seed)
    processor = AutoProcessor.from_pretrained(
        directory, revision=config.policy.revision, trust_remote_code=config.policy.trust_remote_code
    )
    frontend = VisionFrontend(processor=processor, config=config.rollout)
    adapter = LanguageAdapter(
        policy_config=config.policy,
        rollout_config=config.rollout,
        frontend=frontend,
        policy_dir=directory,
        sources=task_sources(config),
        reward_terms={**TEXT_TERMS, **RAL_TERMS, **OBSERVE_TERMS, **judging_terms(config, frontend, build_adapter)},
        seed=config.seed,
        resolve_policy=partial(resolve_policy, seed=config.seed),
    )
    adapter.illustrate = partial(illustrate, adapter)
    return adapter


def resolve_policy(path: str, *, seed: int) -> str:
    """A directory or hub name: built-in names are made or found on this machine."""
    if path == "tiny-qwen2.5-vl":
        directory = tempfile.mkdtemp(prefix="mmrl-tiny-")
        build_tiny_qwen25_vl(Path(directory), tokenizer_corpus(), seed=seed)
        return directory
    if path == "digit-reader":
        return str(ASSETS / "digit_reader")
    if path == "digit-judge":
        if not (ASSETS / "digit_judge").is_dir():
            raise ConfigError(
                "policy.path digit-judge: not made yet; run mmrl train configs/vision/r1_reward_digits_warmup.yaml, then "
                "mmrl export of the same config --dtype bfloat16 --to vision/assets/digit_judge."
            )
        return str(ASSETS / "digit_judge")
    further_tags = {"digit-reader-observe": OBSERVE_TAGS, "digit-reader-confidence": CONFIDENCE_TAGS}
    if path in further_tags:
        directory = tempfile.mkdtemp(prefix="mmrl-tiny-")
        add_tags(ASSETS / "digit_reader", Path(directory), further_tags[path])
        return directory
    if path == "digit-observer":
        if not (ASSETS / "digit_observer").is_dir():
            raise ConfigError(
                "policy.path digit-observer: not made yet; run mmrl train configs/vision/observe_r1_digits_warmup.yaml, then "
                "mmrl export of the same config --dtype bfloat16 --to vision/assets/digit_observer."
            )
        return str(ASSETS / "digit_observer")
    return path


def check_without_weights(config: VisionRunConfig) -> list[tuple[str, str]]:
    """Shapes and a memory forecast, as ``(name, value)`` rows."""
    return plan(config, resolve_policy(config.policy.path, seed=config.seed))


def task_sources(config: VisionRunConfig) -> Mapping[str, Callable[[], Sequence[ChatTask]]]:
    """A source per split, made when asked for."""
    tasks = config.tasks
    if isinstance(tasks, PreferenceTasks):
        return preference_sources(tasks, seed=config.seed, base_dir=Path.cwd())
    if isinstance(tasks, DatasetTasksConfig):
        here = Path.cwd()
        spec = run_spec(f"{__name__}:build_adapter", config)
        return {split: partial(vetted_tasks, getattr(tasks, split), base_dir=here, spec=spec) for split in ("train", "eval")}
    if isinstance(tasks, PlacedDigitTasksConfig):
        return {
            "train": partial(PlacedDigitTasks, tasks.kinds, split="train", num_tasks=tasks.num_tasks, seed=config.seed),
            "eval": partial(PlacedDigitTasks, tasks.eval_kinds, split="eval", num_tasks=100_000),
        }
    form = tasks.demonstrations
    return {
        "train": partial(DigitTasks, tasks.kinds, split="train", num_tasks=tasks.num_tasks, seed=config.seed, form=form),
        "eval": partial(DigitTasks, tasks.eval_kinds, split="eval", num_tasks=100_000),
    }
