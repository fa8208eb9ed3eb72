"""`LanguageAdapter`: rollouts and log-probabilities of a Hugging Face model whose prompts hold media.

It is everything that vision and audio have in common. What differs is passed in: a `Frontend`, which turns conversations into
model inputs and shows media to people, and the source of tasks.
"""

from __future__ import annotations

import bisect
import copy
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from transformers.utils import logging as transformers_logging

from mmrl.adapter import RewardTerm
from mmrl.auxiliary_config import TeacherConfig
from mmrl.chat import ChatTask, Completion, MediaFacts, around_question, media_parts, plain_text
from mmrl.data_files import RowError
from mmrl.errors import AdapterError, CheckpointError, ConfigError, DataError
from mmrl.generation import (
    CompletionInputs,
    EncodedPrompt,
    SamplingParams,
    append_tokens,
    log_probs_of_hidden,
    sample,
    token_logits,
)
from mmrl.language_config import LanguagePolicyConfig, LanguageRolloutConfig
from mmrl.language_extras import EXTRAS, hidden_and_extras, placeholder_ids, require_same_inputs
from mmrl.prefix_rft import go_on_from_demonstrations
from mmrl.types import Forward, Media, RolloutBatch, Sample

transformers_logging.disable_progress_bar()  # a bar per save and load would tear the run's own lines


class Frontend(Protocol):
    """How one modality turns a conversation into model inputs."""

    model_class: Any
    """A transformers auto class with ``from_pretrained``."""
    tower_names: tuple[str, ...]
    """Attribute names of media towers inside a model's body."""
    processor: Any

    def encode(self, tasks: Sequence[ChatTask]) -> list[EncodedPrompt]:
        """One encoded prompt per task, media included. Raises `DataError` naming the task."""
        ...

    def media(self, task: ChatTask) -> tuple[Media, ...]:
        """The task's media as a person sees or hears them."""
        ...

    def open(self, task: ChatTask, kind: str, ref: Any) -> Any:
        """One medium of the task as the model will get it. Raises `DataError` naming the task."""
        ...

    def blank(self, task: ChatTask, kind: str, ref: Any) -> Any:
        """A reference to a medium of the same size and length as this one, without content."""
        ...

    def facts(self, task: ChatTask) -> tuple[MediaFacts, ...]:
        """Geometry and time of the task's media, in order."""
        ...

    def advise(self, task: ChatTask, prompt: EncodedPrompt, excess: int) -> str:
        """What would make the prompt ``excess`` tokens shorter, as the beginning of a sentence; empty where nothing does."""
        ...


@dataclass(kw_only=True)
class LanguageAdapter:
    """Implements `mmrl.adapter.Adapter` for models that write text."""

    policy_config: LanguagePolicyConfig
    rollout_config: LanguageRolloutConfig
    frontend: Frontend
    policy_dir: str
    """Directory or hub name that the weights come from."""
    sources: Mapping[str, Callable[[], Sequence[ChatTask]]]
    reward_terms: Mapping[str, RewardTerm]
    seed: int = 0
    """Seed of newly initialised weights (low-rank adapters)."""
    trained_in_tower: Sequence[str] = ()
    """Names of modules inside frozen towers that train all the same."""
    resolve_policy: Callable[[str], str] = str
    """Directory or hub name of a policy that a config names; built-in ones have names of their own."""
    embed_media: Callable[[nn.Module, Sequence[EncodedPrompt]], list[EncodedPrompt]] | None = None
    """Replaces media of prompts by their embeddings, where a frozen tower makes these constant; None runs the tower again."""

    illustrate: Callable[[nn.Module, Sequence[ChatTask]], tuple[RolloutBatch, list[Sample]]] | None = None
    """Greedy rollouts with pictures of what the policy attends to (`mmrl.illustrations`), where a modality can draw them."""

    extras = EXTRAS
    """What `forward` gives beside log-probabilities and entropy."""

    def __post_init__(self) -> None:
        tokenizer, config = self.frontend.processor.tokenizer, self.rollout_config
        self.pad_id: int = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else tokenizer.eos_token_id
        banned = set(_media_token_ids(self.frontend.processor)) if config.ban_media_tokens else set()
        banned |= {_banned_id(tokenizer, token, self.policy_dir) for token in config.banned_tokens}
        self._longest_stop = max((len(text.encode()) for text in config.stop_strings), default=0)
        self.banned_ids = tuple(sorted(banned))
        self.media_ids = placeholder_ids(self.frontend.processor)
        self.end_ids = _end_token_ids(tokenizer)
        if banned & set(self.end_ids):
            raise ConfigError("rollout.banned_tokens holds the end token; completions could never stop.")

    def decision_labels(self, batch: RolloutBatch, row: int) -> list[str]:
        """The text of each token of a rollout."""
        decode = self.frontend.processor.tokenizer.decode
        return [decode([index]) for index in batch.inputs.tokens[row][: batch.loss_mask.shape[1]].tolist()]

    def blank_media(self, task: ChatTask) -> list[Any]:
        """References to media of the same sizes and lengths as the task's, without content."""
        return [self.frontend.blank(task, kind, ref) for kind, ref in media_parts(task)]

    @property
    def max_decisions(self) -> int:
        return self.rollout_config.max_new_tokens

    def build_policy(self) -> nn.Module:
        config = self.policy_config
        model, info = self.frontend.model_class.from_pretrained(
            self.policy_dir,
            revision=config.revision,
            dtype=getattr(torch, config.dtype),
            attn_implementation=config.attention,
            trust_remote_code=config.trust_remote_code,
            output_loading_info=True,
        )
        _require_all_tensors(info, self.policy_dir)
        if config.freeze_tower:
            for tower in self._towers(model):
                tower.requires_grad_(False)
            for name in self.trained_in_tower:
                model.base_model.get_submodule(name).requires_grad_(True)
        if config.lora is not None:
            model = self._add_lora(model)
        return model.eval()

    def freeze_reference(self, policy: nn.Module) -> Callable[[], AbstractContextManager[nn.Module]]:
        if self.policy_config.lora is not None:
            return lambda: _AdaptersOff(policy)
        frozen = copy.deepcopy(policy).requires_grad_(False).eval()
        return lambda: nullcontext(frozen)

    def task_source(self, split: str) -> Sequence[ChatTask]:
        if split not in self.sources:
            raise ConfigError(f"evaluation.split is {split!r}; this run's tasks have: {', '.join(self.sources)}.")
        return self.sources[split]()

    def rollout(
        self, policy: nn.Module, tasks: Sequence[ChatTask], *, group_size: int, seeds: Tensor, greedy: bool = False
    ) -> RolloutBatch:
        at_once = max(1, self.rollout_config.max_rows // group_size)
        parts = []
        for first in range(0, len(tasks), at_once):
            share = seeds[first * group_size : (first + at_once) * group_size]
            part = self._rollout_together(policy, tasks[first : first + at_once], group_size, share, greedy)
            parts.append(replace(part, group_ids=part.group_ids + first))
        return RolloutBatch.concat(parts)

    def _rollout_together(
        self, policy: nn.Module, tasks: Sequence[ChatTask], group_size: int, seeds: Tensor, greedy: bool
    ) -> RolloutBatch:
        if any(task.demonstrated for task in tasks):
            return go_on_from_demonstrations(self, policy, tasks, group_size, seeds, greedy)
        config = self.rollout_config
        prompts = self._encode(policy, tasks)
        params = SamplingParams(
            max_new_tokens=config.max_new_tokens,
            temperature=config.temperature,
            top_k=config.top_k,
            top_p=config.top_p,
            end_ids=self.end_ids,
            banned_ids=self.banned_ids,
            greedy=greedy,
            is_over=self._ends_with_stop_string if config.stop_strings else None,
        )
        sampled = sample(_model(policy), prompts, params, pad_id=self.pad_id, group_size=group_size, seeds=seeds)
        ids = [tuple(row[keep].tolist()) for row, keep in zip(sampled.tokens, sampled.mask)]
        repeated = [task for task in tasks for _ in range(group_size)]
        stop_reasons = tuple("length" if cut else "stop" for cut in sampled.truncated.tolist())
        shown = [self.frontend.facts(task) if config.media_facts else () for task in tasks]
        media = [facts for facts in shown for _ in range(group_size)]
        index = torch.arange(len(tasks)).repeat_interleave(group_size)
        batch = RolloutBatch(
            tasks=tuple(repeated),
            group_ids=index,
            seeds=seeds,
            outcomes=tuple(self._completion(*row) for row in zip(repeated, ids, stop_reasons, media)),
            old_log_probs=sampled.log_probs,
            loss_mask=sampled.mask,
            stop_reasons=stop_reasons,
            inputs=CompletionInputs(prompts=tuple(prompts), prompt_index=index, tokens=sampled.tokens),
        )
        return self._without_hints(policy, batch) if any(task.hint for task in tasks) else batch

    @torch.no_grad()
    def _without_hints(self, policy: nn.Module, batch: RolloutBatch) -> RolloutBatch:
        """The same completions as answers to prompts without hints, with the log-probabilities that they have there."""
        bare = [replace(task, hint="") for task in batch.tasks]
        inputs = self.completion_inputs(policy, bare, batch.inputs.tokens)
        batch = replace(batch, tasks=tuple(bare), inputs=inputs)
        return replace(batch, old_log_probs=self.forward(policy, batch).log_probs.float().cpu())

    def completion_inputs(self, policy: nn.Module, tasks: Sequence[ChatTask], tokens: Tensor) -> CompletionInputs:
        """``tokens`` ``[N, T]`` as completions of ``N`` tasks; equal prompts are encoded once."""
        asked = [(task.id, plain_text(task), task.prefill) for task in tasks]  # templates ask the same task in different ways
        distinct = dict(zip(asked, tasks))
        places = {key: place for place, key in enumerate(distinct)}
        return CompletionInputs(
            prompts=tuple(self._encode(policy, list(distinct.values()))),
            prompt_index=torch.tensor([places[key] for key in asked]),
            tokens=tokens,
        )

    def demonstration_ids(self, task: ChatTask) -> tuple[int, ...]:
        """The ``demonstrated`` share of the demonstration's tokens, rounded down; at least one token is left to sample."""
        ids = self.frontend.processor.tokenizer(task.demonstration, add_special_tokens=False)["input_ids"]
        return tuple(ids[: min(int(task.demonstrated * len(ids)), self.max_decisions - 1)])

    def opened(self, task: ChatTask) -> ChatTask:
        """``task`` with what is demonstrated of it in its prefill."""
        return replace(task, demonstrated=0.0, prefill=(*self._prefill_ids(task), *self.demonstration_ids(task)))

    def reasoning_ids(self, completion: Completion, until: str) -> tuple[int, ...]:
        """Token ids of ``completion`` in front of the text ``until``; all but the end token where that does not occur."""
        ids, tokenizer = completion.token_ids, self.frontend.processor.tokenizer
        end = tokenizer.decode(ids).find(until)
        if end < 0:
            return ids[:-1] if ids and ids[-1] in self.end_ids else ids
        return ids[: bisect.bisect_right(range(len(ids) + 1), end, key=lambda count: len(tokenizer.decode(ids[:count]))) - 1]

    def demonstrate(self, policy: nn.Module, tasks: Sequence[ChatTask], *, seeds: Tensor) -> RolloutBatch:
        missing = [task.id for task in tasks if not task.demonstration]
        if missing:
            raise DataError(f"task {missing[0]!r} has no demonstration; supervised warm-up needs one for every task.")
        tokenizer = self.frontend.processor.tokenizer
        texts = tokenizer([task.demonstration for task in tasks], add_special_tokens=False)["input_ids"]
        rows = [torch.tensor([*ids, self.end_ids[0]])[: self.rollout_config.max_new_tokens] for ids in texts]
        tokens = nn.utils.rnn.pad_sequence(rows, batch_first=True)
        mask = nn.utils.rnn.pad_sequence([torch.ones_like(row, dtype=torch.bool) for row in rows], batch_first=True)
        index = torch.arange(len(tasks))
        return RolloutBatch(
            tasks=tuple(tasks),
            group_ids=index,
            seeds=seeds,
            outcomes=tuple(self._completion(task, tuple(row.tolist()), "stop") for task, row in zip(tasks, rows)),
            old_log_probs=torch.zeros(tokens.shape),
            loss_mask=mask,
            stop_reasons=("stop",) * len(tasks),
            inputs=CompletionInputs(prompts=tuple(self._encode(policy, tasks)), prompt_index=index, tokens=tokens),
        )

    def forward(self, policy: nn.Module, batch: RolloutBatch, needs: frozenset[str] = frozenset()) -> Forward:
        known = self.extras | {"entropy"}
        if needs - known:
            raise AdapterError(f"LanguageAdapter.forward cannot give {sorted(needs - known)}; it gives: {sorted(known)}.")
        inputs: CompletionInputs = batch.inputs
        hidden, extras = hidden_and_extras(
            _model(policy),
            inputs,
            batch.loss_mask,
            needs,
            pad_id=self.pad_id,
            share_prefix=self.rollout_config.share_prefix,
            media_ids=self.media_ids,
        )
        log_probs, entropy = log_probs_of_hidden(
            _model(policy),
            hidden,
            inputs.tokens[:, : batch.loss_mask.shape[1]],
            batch.loss_mask,
            temperature=self.rollout_config.temperature,
            banned_ids=self.banned_ids,
            with_entropy="entropy" in needs,
        )
        return Forward(log_probs=log_probs, entropy=entropy, extras=extras)

    def token_logits(self, policy: nn.Module, hidden: Tensor) -> Tensor:
        """Float32 ``[M, V]`` logits of hidden states ``[M, D]`` at the sampling temperature, banned tokens ruled out."""
        model = _model(policy)
        return token_logits(model, hidden.to(model.dtype), self.rollout_config.temperature, self.banned_ids)

    def build_teacher(self, config: TeacherConfig) -> nn.Module:
        """A frozen policy that `forward` accepts; raises `ConfigError` if it would not see the same tokens and media."""
        directory = self.resolve_policy(config.path)
        processor = type(self.frontend.processor).from_pretrained(directory, revision=config.revision)
        require_same_inputs(self.frontend.processor, processor, config.path)
        model, info = self.frontend.model_class.from_pretrained(
            directory,
            revision=config.revision,
            dtype=getattr(torch, config.dtype),
            attn_implementation=self.policy_config.attention,
            output_loading_info=True,
        )
        _require_all_tensors(info, directory)
        return model.requires_grad_(False).eval()

    def describe(self, batch: RolloutBatch, row: int) -> Sample:
        task: ChatTask = batch.tasks[row]
        return Sample(
            prompt=plain_text(task),
            completion=batch.outcomes[row].text,
            reference=task.answer,
            media=self.frontend.media(task),
        )

    def save_policy(self, policy: nn.Module, directory: Path) -> None:
        policy.save_pretrained(directory)
        self.frontend.processor.save_pretrained(directory)

    def load_policy(self, policy: nn.Module, directory: Path) -> None:
        if self.policy_config.lora is not None:
            _load_lora(policy, directory)
            return
        # Names in the file may differ from module names, so the library's own loader reads them; then every tensor is copied.
        saved, info = type(policy).from_pretrained(
            directory, dtype=policy.dtype, attn_implementation=self.policy_config.attention, output_loading_info=True
        )
        _require_all_tensors(info, str(directory))
        policy.load_state_dict(saved.state_dict(), strict=True)

    def encode(self, tasks: Sequence[ChatTask]) -> list[EncodedPrompt]:
        """One prompt per task, hint and prefill included; needs no weights. Raises `DataError` for one that cannot be used."""
        shown = [replace(task, messages=around_question(task.messages, "", task.hint)) if task.hint else task for task in tasks]
        prompts = self.frontend.encode(shown)
        prompts = [append_tokens(prompt, self._prefill_ids(task)) for prompt, task in zip(prompts, tasks)]
        limit = self.rollout_config.max_prompt_tokens
        for task, prompt in zip(shown, prompts):
            length = prompt["input_ids"].shape[1]
            if length > limit:
                advice = self.frontend.advise(task, prompt, length - limit)
                detail = (
                    f"the prompt has {length} tokens, rollout.max_prompt_tokens is {limit}; {advice}raise the limit or drop "
                    "the row. A prompt is never cut."
                )
                raise RowError("prompt", "prompt too long", detail, place=task.source or task.id)
        return prompts

    def _encode(self, policy: nn.Module, tasks: Sequence[ChatTask]) -> list[EncodedPrompt]:
        prompts = self.encode(tasks)
        return prompts if self.embed_media is None else self.embed_media(_model(policy), prompts)

    def _prefill_ids(self, task: ChatTask) -> tuple[int, ...]:
        if not isinstance(task.prefill, str):
            return task.prefill
        return tuple(
            self.frontend.processor.tokenizer(task.prefill, add_special_tokens=False)["input_ids"] if task.prefill else ()
        )

    def _completion(
        self, task: ChatTask, token_ids: tuple[int, ...], stop_reason: str, media: tuple[MediaFacts, ...] = ()
    ) -> Completion:
        ids = (*self._prefill_ids(task), *token_ids)
        text = self.frontend.processor.tokenizer.decode(ids, skip_special_tokens=True)
        return Completion(text=text, token_ids=token_ids, stop_reason=stop_reason, media=media)

    def _ends_with_stop_string(self, ids: Sequence[int]) -> bool:
        tail = self.frontend.processor.tokenizer.decode(ids[-self._longest_stop - 1 :])  # a token holds a byte or more
        return any(text in tail for text in self.rollout_config.stop_strings)

    def _towers(self, model: nn.Module) -> list[nn.Module]:
        names = self.frontend.tower_names
        towers = [getattr(model.base_model, name) for name in names if hasattr(model.base_model, name)]
        if not towers:
            raise ConfigError(f"policy.freeze_tower: {type(model).__name__} has none of the towers {', '.join(names)}.")
        return towers

    def _add_lora(self, model: nn.Module) -> nn.Module:
        from peft import LoraConfig, get_peft_model

        spec = self.policy_config.lora
        targets = spec.target_modules if isinstance(spec.target_modules, str) else list(spec.target_modules)
        towers = "|".join(name for name in self.frontend.tower_names)
        config = LoraConfig(
            r=spec.rank,
            lora_alpha=spec.alpha,
            target_modules=targets,
            # layers of a media tower have the same names as those of the language model
            exclude_modules=rf"(.*\.)?({towers})\..*" if self.policy_config.freeze_tower else None,
            lora_dropout=0.0,
        )
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(self.seed)
            return get_peft_model(model, config)


class _AdaptersOff:
    """Context in which a peft model is its own base model."""

    def __init__(self, policy: nn.Module) -> None:
        self.policy = policy

    def __enter__(self) -> nn.Module:
        self.context = self.policy.disable_adapter()
        self.context.__enter__()
        return self.policy

    def __exit__(self, *error: Any) -> None:
        self.context.__exit__(*error)


def _model(policy: nn.Module) -> nn.Module:
    """The transformers model inside a peft wrapper; its linear layers already carry the adapters."""
    return policy.get_base_model() if hasattr(policy, "get_base_model") else policy


def _load_lora(policy: nn.Module, directory: Path) -> None:
    from peft import get_peft_model_state_dict, set_peft_model_state_dict
    from safetensors.torch import load_file

    saved = load_file(directory / "adapter_model.safetensors")
    expected = get_peft_model_state_dict(policy)
    if saved.keys() != expected.keys():
        names = sorted(saved.keys() ^ expected.keys())
        raise CheckpointError(f"{directory}: adapter tensors differ from the policy's, first {names[0]!r}; same policy.lora?")
    set_peft_model_state_dict(policy, saved)


def _require_all_tensors(info: Mapping[str, Any], directory: str) -> None:
    for what in ("missing_keys", "unexpected_keys", "mismatched_keys"):
        names = sorted(str(name) for name in info[what])
        if names:
            raise CheckpointError(f"{directory}: {len(names)} {what.replace('_', ' ')}, first {names[0]!r}; is it this model?")


def _banned_id(tokenizer: Any, token: str | int, name: str) -> int:
    """The id of a token that is given as it is written, as a text that is one token, or by its id."""
    if isinstance(token, int):
        if not 0 <= token < len(tokenizer):
            raise ConfigError(f"rollout.banned_tokens: {token} is not an id of {name}; expected 0 to {len(tokenizer) - 1}.")
        return token
    index = tokenizer.convert_tokens_to_ids(token)
    if index is not None and index != tokenizer.unk_token_id:
        return index
    ids = tokenizer(token, add_special_tokens=False)["input_ids"]
    if len(ids) != 1 or ids[0] == tokenizer.unk_token_id:
        raise ConfigError(
            f"rollout.banned_tokens: {token!r} is not a token of {name} (it takes {len(ids)}); name single tokens or ids."
        )
    return ids[0]


def _media_token_ids(processor: Any) -> list[int]:
    """Ids of placeholder and media boundary tokens that the processor knows."""
    names = ("image_token_id", "video_token_id", "audio_token_id")
    ids = [value for value in (getattr(processor, name, None) for name in names) if value is not None]
    names = ("image_token", "video_token", "audio_token", "audio_bos_token", "audio_eos_token", "vision_bos_token",
             "vision_eos_token")  # fmt: skip
    tokens = [value for value in (getattr(processor, name, None) for name in names) if value is not None]
    return [*ids, *processor.tokenizer.convert_tokens_to_ids(tokens)]


def _end_token_ids(tokenizer: Any) -> tuple[int, ...]:
    """The end of a turn first (what demonstrations end with), then the tokenizer's end of text."""
    turn_ends = [tokenizer.convert_tokens_to_ids(token) for token in ("<|im_end|>", "<end_of_utterance>", "<|eot_id|>")]
    ids = [index for index in turn_ends if index is not None and index != tokenizer.unk_token_id]
    return tuple(dict.fromkeys([*ids, tokenizer.eos_token_id]))
