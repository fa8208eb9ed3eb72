"""What a language policy's forward pass gives beside log-probabilities, and the teacher that scores its rollouts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from mmrl.attention import record_attention
from mmrl.errors import ConfigError
from mmrl.generation import CompletionInputs, completion_hidden

EXTRAS = frozenset({"attention", "media_columns", "hidden"})
"""``attention`` ``[n, T, S]``: rows of the last decoder layer (`mmrl.attention`); ``media_columns`` ``[n, S]``: 1 where such a
column stands for media; ``hidden`` ``[n, T, D]``: what the language head reads."""


def hidden_and_extras(
    model: nn.Module,
    inputs: CompletionInputs,
    mask: Tensor,
    needs: frozenset[str],
    *,
    pad_id: int,
    share_prefix: bool,
    media_ids: Sequence[int],
) -> tuple[Tensor, dict[str, Tensor]]:
    """Hidden states ``[n, T, D]`` of completions and those of `EXTRAS` that ``needs`` names."""
    width = mask.shape[1]
    passed = (model, inputs.prompts, inputs.prompt_index, inputs.tokens[:, :width], mask)
    if not needs & {"attention", "media_columns"}:
        hidden = completion_hidden(*passed, pad_id=pad_id, share_prefix=share_prefix)
        return hidden, {"hidden": hidden} if "hidden" in needs else {}
    with record_attention(model) as recording:
        hidden = completion_hidden(*passed, pad_id=pad_id, share_prefix=share_prefix, through_last=True)
    rows = recording.rows(inputs.prompt_lengths, mask)
    extras = {"attention": rows, "media_columns": media_columns(inputs, media_ids, rows.shape[2]), "hidden": hidden}
    return hidden, {name: extras[name] for name in needs & EXTRAS}


def media_columns(inputs: CompletionInputs, media_ids: Sequence[int], width: int) -> Tensor:
    """1 where a row's token stands for media, else 0; float32 ``[n, width]``."""
    ids = torch.tensor(list(media_ids), dtype=torch.long)
    found = [torch.isin(prompt["input_ids"][0].cpu(), ids).float() for prompt in inputs.prompts]
    return torch.stack([nn.functional.pad(row, (0, width - len(row))) for row in found])[inputs.prompt_index]


def placeholder_ids(processor: Any) -> tuple[int, ...]:
    """Ids of the tokens in whose places a model puts its media."""
    ids = [getattr(processor, f"{kind}_token_id", None) for kind in ("image", "video", "audio")]
    tokens = [getattr(processor, f"{kind}_token", None) for kind in ("image", "video", "audio")]
    ids += [processor.tokenizer.convert_tokens_to_ids(token) for token in tokens if token is not None]
    return tuple(sorted({index for index in ids if index is not None}))


def require_same_inputs(student: Any, teacher: Any, path: str) -> None:
    """Raise `ConfigError` unless two processors turn a conversation into the same tokens and pixels."""
    ours, theirs = student.tokenizer.get_vocab(), teacher.tokenizer.get_vocab()
    if ours != theirs:
        different = sorted(token for token in ours.keys() | theirs.keys() if ours.get(token) != theirs.get(token))
        raise ConfigError(
            f"auxiliary.teacher.path {path!r} has another tokenizer than the policy: {len(different)} tokens differ, first "
            f"{different[0]!r} (number {ours.get(different[0])} here, {theirs.get(different[0])} there). Distillation compares "
            "the two on identical tokens; choose a teacher of the same family."
        )
    for kind in ("image_processor", "feature_extractor"):
        settings = [_media_settings(getattr(processor, kind, None)) for processor in (student, teacher)]
        different = sorted(
            name for name in settings[0].keys() | settings[1].keys() if len({str(s.get(name)) for s in settings}) > 1
        )
        if different:
            name = different[0]
            raise ConfigError(
                f"auxiliary.teacher.path {path!r}: its {kind} has {name} {settings[1].get(name)!r}, the policy's "
                f"{settings[0].get(name)!r}, so the two would not see the same media; choose a teacher of the same family."
            )


def _media_settings(processor: Any) -> dict[str, Any]:
    names = ("patch_size", "merge_size", "temporal_patch_size", "image_mean", "image_std", "sampling_rate", "feature_size")
    return {name: getattr(processor, name) for name in names if getattr(processor, name, None) is not None}
