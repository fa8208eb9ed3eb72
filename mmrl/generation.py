"""Token-exact rollouts and log-probabilities for any transformers causal model with media in its prompt.

The work on a prompt (media tower and prefill) is done once per group, in rollouts and in the update: `prefill` runs ``P``
prompts, the cache is expanded to their rollouts, and completions are appended with explicit positions. The hidden state that
predicts the first completion token is the prompt's last one, so logits exist for completion positions only.

Shapes: ``P`` prompts, ``S`` prompt positions (left-padded), ``n`` rollouts, ``T`` completion tokens, ``D`` hidden size, ``V``
vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from mmrl.errors import AdapterError

EncodedPrompt = Mapping[str, Tensor]
"""One prompt as its processor encodes it: ``input_ids [1, S]`` and the model's media tensors, unpadded.

A tensor without axes is a setting of the whole batch (``use_audio_in_video``), on which its prompts agree. ``audio_embeds``
``[A, D]`` stands for what a frozen audio tower made of the prompt's clips (see `place_audio`).
"""

MAX_LOGITS_ELEMENTS = 1 << 25
"""Logits are reduced in chunks of at most this many elements (128 MiB in float32); larger ones are recomputed in backward."""

_TOKEN_ALIGNED = ("input_ids", "attention_mask", "mm_token_type_ids", "token_type_ids")


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """How tokens are drawn. Top-k and top-p truncate sampling but not the recorded log-probabilities."""

    max_new_tokens: int
    temperature: float = 1.0
    top_k: int = 0
    """Keep the k most likely tokens; 0 keeps all."""
    top_p: float = 1.0
    """Keep the smallest set of tokens with at least this probability."""
    end_ids: tuple[int, ...] = ()
    banned_ids: tuple[int, ...] = ()
    """Tokens of probability 0, in sampling and in log-probabilities (media placeholders, the user's own)."""
    greedy: bool = False
    is_over: Callable[[Sequence[int]], bool] | None = None
    """Whether a completion ends with its last token, from all of its tokens so far; None asks ``end_ids`` only."""


@dataclass(frozen=True, kw_only=True)
class SampledTokens:
    """Completions as they were sampled."""

    tokens: Tensor
    """``[n, T]`` int64, zeros after the end."""
    mask: Tensor
    """``[n, T]`` bool, true up to and including the end token."""
    log_probs: Tensor
    """``[n, T]`` float32 at the sampling temperature, zeros after the end."""
    truncated: Tensor
    """``[n]`` bool: the limit came before an end token."""


@dataclass(kw_only=True)
class Prefix:
    """The prompts' state from which completions continue."""

    cache: Any
    last_hidden: Tensor
    """``[P, D]``, predicts the first completion token."""
    attention_mask: Tensor
    """``[P, S]``."""
    next_position: Tensor
    """``[P]``: rotary position of the first completion token (whole, but for models that time videos in fractions)."""

    def select(self, rows: Tensor) -> None:
        """Keep or repeat rows of everything, differentiably."""
        self.cache.batch_select_indices(rows)
        self.last_hidden = self.last_hidden[rows]
        self.attention_mask = self.attention_mask[rows]
        self.next_position = self.next_position[rows]


@dataclass(frozen=True, kw_only=True)
class CompletionInputs:
    """What `completion_log_probs` needs again in the update: the `Inputs` of text modalities."""

    prompts: tuple[EncodedPrompt, ...]
    """Distinct prompts, one per group."""
    prompt_index: Tensor
    """``[N]`` int64: which prompt each row continues."""
    tokens: Tensor
    """``[N, T]`` int64 completion tokens, exactly as sampled."""

    @property
    def prompt_lengths(self) -> Tensor:
        lengths = torch.tensor([prompt["input_ids"].shape[1] for prompt in self.prompts])
        return lengths[self.prompt_index]

    def select(self, rows: Tensor) -> CompletionInputs:
        used, index = self.prompt_index[rows].unique(return_inverse=True)
        prompts = tuple(self.prompts[i] for i in used.tolist())
        return CompletionInputs(prompts=prompts, prompt_index=index, tokens=self.tokens[rows])

    def concat(self, others: Sequence[CompletionInputs]) -> CompletionInputs:
        parts = [self, *others]
        width = max(part.tokens.shape[1] for part in parts)
        offsets = torch.tensor([0] + [len(part.prompts) for part in parts[:-1]]).cumsum(0)
        return CompletionInputs(
            prompts=tuple(prompt for part in parts for prompt in part.prompts),
            prompt_index=torch.cat([part.prompt_index + offset for part, offset in zip(parts, offsets)]),
            tokens=torch.cat([nn.functional.pad(part.tokens, (0, width - part.tokens.shape[1])) for part in parts]),
        )


def append_tokens(prompt: EncodedPrompt, ids: Sequence[int]) -> EncodedPrompt:
    """``prompt`` followed by text tokens ``ids``."""
    if not ids:
        return prompt
    fills = {"input_ids": torch.tensor([list(ids)]), "attention_mask": torch.ones(1, len(ids), dtype=torch.long)}
    zeros = torch.zeros(1, len(ids), dtype=torch.long)  # the type of text
    return {
        key: torch.cat([value, fills.get(key, zeros).to(value.dtype)], dim=1) if key in _TOKEN_ALIGNED else value
        for key, value in prompt.items()
    }


def collate_prompts(prompts: Sequence[EncodedPrompt], pad_id: int, device: torch.device) -> dict[str, Tensor]:
    """Join prompts into one left-padded batch.

    Token-aligned tensors are padded on the left; media tensors are padded with zeros to a common shape behind their first
    axis (which matters only for models that keep images per row) and concatenated along the first.
    """
    width = max(prompt["input_ids"].shape[1] for prompt in prompts)
    batch: dict[str, Tensor] = {}
    keys = list(dict.fromkeys(key for prompt in prompts for key in prompt))
    for key in keys:
        parts = [prompt[key] for prompt in prompts if key in prompt]
        if parts[0].ndim == 0:
            if any(not torch.equal(part, parts[0]) for part in parts):
                raise AdapterError(f"prompts of one batch disagree on {key}: {[part.item() for part in parts]}.")
            batch[key] = parts[0].to(device)
        elif key in _TOKEN_ALIGNED:
            fill = pad_id if key == "input_ids" else 0
            batch[key] = torch.cat([nn.functional.pad(p, (width - p.shape[1], 0), value=fill) for p in parts]).to(device)
        else:
            batch[key] = _concat_padded(parts).to(device)
    return batch


def prefill(model: nn.Module, prompts: Sequence[EncodedPrompt], pad_id: int) -> Prefix:
    """Run the media tower and the decoder over ``P`` prompts once, keeping the graph if gradients are on."""
    body = _body(model)
    inputs = collate_prompts(prompts, pad_id, model.device)
    mask = inputs["attention_mask"]
    inputs |= _prompt_positions(body, inputs)
    hidden, output = _run(model, **place_audio(model, inputs), use_cache=True)
    next_position = mask.sum(dim=1)
    deltas = getattr(output, "rope_deltas", None)
    if deltas is not None:
        next_position = next_position + deltas.view(-1).to(mask.device)
        if body is model:  # Omni thinkers have taken the padding off
            next_position = next_position + (mask == 0).sum(dim=1)
    return Prefix(cache=output.past_key_values, last_hidden=hidden[:, -1], attention_mask=mask, next_position=next_position)


def extend(model: nn.Module, prefix: Prefix, tokens: Tensor, mask: Tensor, start: Tensor) -> Tensor:
    """Append ``tokens`` ``[n, t]`` to ``prefix`` (one row each); hidden states ``[n, t, D]``.

    ``mask`` ``[n, s + t]`` covers the completion so far and the new tokens; ``start`` ``[n]`` is the position of the first new
    token. The prefix's cache grows in place.
    """
    positions = start[:, None] + torch.arange(tokens.shape[1], device=tokens.device)
    hidden, _ = _run(
        model,
        input_ids=tokens,
        attention_mask=torch.cat([prefix.attention_mask, mask.to(prefix.attention_mask.dtype)], dim=1),
        past_key_values=prefix.cache,
        use_cache=True,
        **_text_positions(_body(model), positions),
    )
    return hidden


def place_audio(model: nn.Module, inputs: dict[str, Tensor]) -> dict[str, Tensor]:
    """Put ``audio_embeds`` where the placeholders of clips are, in row order; other inputs pass unchanged.

    A trained projection (``multi_modal_projector``, or what the model calls so) has to be part of the embeddings already.
    """
    if "audio_embeds" not in inputs:
        return inputs
    inputs = dict(inputs)
    audio, ids = inputs.pop("audio_embeds"), inputs["input_ids"]
    places = ids == model.config.audio_token_id
    if int(places.sum()) != len(audio):
        raise AdapterError(f"{int(places.sum())} audio placeholders in a batch, {len(audio)} audio embeddings for them.")
    embeds = model.get_input_embeddings()(ids)
    return inputs | {"inputs_embeds": embeds.masked_scatter(places[..., None], audio.to(embeds.dtype))}


@torch.no_grad()
def sample(
    model: nn.Module, prompts: Sequence[EncodedPrompt], params: SamplingParams, *, pad_id: int, group_size: int, seeds: Tensor
) -> SampledTokens:
    """Continue each prompt ``group_size`` times; group-major ``n = P * group_size`` rows.

    The uniform numbers of row ``i`` come from a generator seeded with ``seeds[i]``, so a row does not depend on its
    neighbours. Rows that have ended leave the batch.
    """
    device = model.device
    prefix = prefill(model, prompts, pad_id)
    prefix.select(torch.arange(len(prompts), device=device).repeat_interleave(group_size))
    num = len(prompts) * group_size
    uniforms = torch.stack([_uniforms(int(seed), params.max_new_tokens) for seed in seeds]).to(device)
    tokens = torch.zeros(num, params.max_new_tokens, dtype=torch.long, device=device)
    mask = torch.zeros(num, params.max_new_tokens, dtype=torch.bool, device=device)
    log_probs = torch.zeros(num, params.max_new_tokens, device=device)
    ends = torch.tensor(params.end_ids, dtype=torch.long, device=device)
    rows = torch.arange(num, device=device)  # of the full batch, for those still in the decoding batch
    alive = torch.ones(num, dtype=torch.bool, device=device)  # over the decoding batch
    hidden, start = prefix.last_hidden, prefix.next_position
    for t in range(params.max_new_tokens):
        logits = token_logits(model, hidden, params.temperature, params.banned_ids)
        row_log_probs = logits.log_softmax(dim=-1)
        drawn = logits.argmax(dim=-1) if params.greedy else _draw(row_log_probs, uniforms[rows, t], params)
        tokens[rows[alive], t] = drawn[alive]
        mask[rows[alive], t] = True
        log_probs[rows[alive], t] = row_log_probs.gather(1, drawn[:, None])[alive, 0]
        alive = alive & ~torch.isin(drawn, ends)
        if params.is_over is not None:
            written = tokens[rows, : t + 1].tolist()
            alive = alive & ~torch.tensor([params.is_over(row) for row in written], dtype=torch.bool, device=device)
        if t + 1 == params.max_new_tokens or not alive.any():
            break
        if alive.sum() <= 0.75 * len(rows):  # copying the cache for every single row would cost more than it saves
            keep = alive.nonzero()[:, 0]
            prefix.select(keep)
            rows, drawn, start, alive = rows[keep], drawn[keep], start[keep], alive[keep]
        hidden = extend(model, prefix, drawn[:, None], mask[rows, : t + 1], start + t)[:, -1]
    truncated = torch.zeros(num, dtype=torch.bool, device=device)
    truncated[rows] = alive
    width = int(mask.any(dim=0).sum())
    return SampledTokens(
        tokens=tokens[:, :width].cpu(),
        mask=mask[:, :width].cpu(),
        log_probs=log_probs[:, :width].cpu(),
        truncated=truncated.cpu(),
    )


def completion_log_probs(
    model: nn.Module,
    prompts: Sequence[EncodedPrompt],
    prompt_index: Tensor,
    tokens: Tensor,
    mask: Tensor,
    *,
    pad_id: int,
    temperature: float = 1.0,
    banned_ids: Sequence[int] = (),
    with_entropy: bool = False,
    share_prefix: bool = True,
) -> tuple[Tensor, Tensor | None]:
    """Log-probabilities ``[n, T]`` of completions (and entropies, if asked for), with gradient.

    ``prompt_index`` ``[n]`` names each row's prompt. With ``share_prefix`` a prompt is encoded once for all of its rows and
    receives the sum of their gradients; without, every row runs its own prompt (the plain path, equal in value and gradient).
    Masked positions are 0.
    """
    hidden = completion_hidden(model, prompts, prompt_index, tokens, mask, pad_id=pad_id, share_prefix=share_prefix)
    return log_probs_of_hidden(
        model, hidden, tokens, mask, temperature=temperature, banned_ids=banned_ids, with_entropy=with_entropy
    )


def completion_hidden(
    model: nn.Module,
    prompts: Sequence[EncodedPrompt],
    prompt_index: Tensor,
    tokens: Tensor,
    mask: Tensor,
    *,
    pad_id: int,
    share_prefix: bool = True,
    through_last: bool = False,
) -> Tensor:
    """Hidden states ``[n, T, D]`` that predict each completion token, with gradient; see `completion_log_probs`.

    The last token predicts nothing, so it is not run, unless ``through_last`` asks for it (its attention is wanted).
    """
    device = model.device
    prompt_index, tokens, mask = prompt_index.to(device), tokens.to(device), mask.to(device)
    if not share_prefix:
        return _plain_hidden(model, [prompts[i] for i in prompt_index.tolist()], tokens, mask, pad_id)
    prefix = prefill(model, prompts, pad_id)
    prefix.select(prompt_index)
    hidden, width = prefix.last_hidden[:, None], tokens.shape[1]
    run = width if through_last else width - 1
    if run < 1:
        return hidden
    later = extend(model, prefix, tokens[:, :run], mask[:, :run], prefix.next_position)
    return torch.cat([hidden, later[:, : width - 1]], dim=1)


def log_probs_of_hidden(
    model: nn.Module,
    hidden: Tensor,
    tokens: Tensor,
    mask: Tensor,
    *,
    temperature: float = 1.0,
    banned_ids: Sequence[int] = (),
    with_entropy: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """Log-probabilities ``[n, T]`` of ``tokens`` given `completion_hidden`, and entropies if asked for; 0 where masked."""
    tokens, mask = tokens.to(hidden.device), mask.to(hidden.device)
    picked, entropies = selected_log_probs(
        model, hidden[mask], tokens[mask], temperature=temperature, banned_ids=banned_ids, with_entropy=with_entropy
    )
    log_probs = picked.new_zeros(mask.shape).masked_scatter(mask, picked)
    if entropies is None:
        return log_probs, None
    return log_probs, entropies.new_zeros(mask.shape).masked_scatter(mask, entropies)


def selected_log_probs(
    model: nn.Module,
    hidden: Tensor,
    targets: Tensor,
    *,
    temperature: float = 1.0,
    banned_ids: Sequence[int] = (),
    with_entropy: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """``log softmax(head(hidden) / temperature)[targets]`` for ``hidden`` ``[M, D]``, ``targets`` ``[M]``; float32 ``[M]``.

    When ``M * V`` exceeds `MAX_LOGITS_ELEMENTS` the logits are made chunk by chunk and recomputed in the backward pass, so
    memory does not grow with the batch. Entropy is in nats.
    """

    def reduce(hidden: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        logits = token_logits(model, hidden, temperature, banned_ids)
        normalizer = logits.logsumexp(dim=-1)
        log_probs = logits.gather(1, targets[:, None])[:, 0] - normalizer
        if not with_entropy:
            return log_probs, log_probs.new_zeros(0)
        probs = (logits - normalizer[:, None]).exp()
        return log_probs, normalizer - (probs * logits.masked_fill(probs == 0, 0.0)).sum(dim=-1)

    rows = max(1, MAX_LOGITS_ELEMENTS // model.get_output_embeddings().weight.shape[0])
    if len(hidden) <= rows:
        log_probs, entropies = reduce(hidden, targets)
    else:
        chunks = zip(hidden.split(rows), targets.split(rows))
        parts = [checkpoint(reduce, h, y, use_reentrant=False) for h, y in chunks]
        log_probs, entropies = (torch.cat(column) for column in zip(*parts))
    return log_probs, entropies if with_entropy else None


def _body(model: nn.Module) -> nn.Module:
    """The model without its language head; the model itself where no part of it is that."""
    return model.base_model


def _run(model: nn.Module, **inputs: Any) -> tuple[Tensor, Any]:
    """Last hidden states ``[n, s, D]`` and the output that came with them, without making logits."""
    body = _body(model)
    if body is not model:
        output = body(**inputs, return_dict=True)
        return output.last_hidden_state, output
    with _head_passes_through(model):
        output = model(**inputs, return_dict=True)
    return output.logits, output


@contextmanager
def _head_passes_through(model: nn.Module) -> Iterator[None]:
    """Within, a model's "logits" are its last hidden states."""
    head = model.get_output_embeddings()
    own = vars(head).get("forward")
    head.forward = lambda hidden: hidden
    try:
        yield
    finally:
        if own is None:
            del head.forward
        else:
            head.forward = own


def _prompt_positions(body: nn.Module, inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """``position_ids`` of a padded prompt, unless the model works them out from its media."""
    if hasattr(body, "rope_deltas"):
        body.rope_deltas = None  # the model would otherwise reuse those of an earlier batch
        if any(key not in _TOKEN_ALIGNED for key in inputs):
            return {}
    return _text_positions(body, inputs["attention_mask"].cumsum(dim=1) - 1)


def _text_positions(body: nn.Module, positions: Tensor) -> dict[str, Tensor]:
    """``position_ids`` of text tokens at ``[n, t]`` positions; multimodal rotary models want them three times."""
    positions = positions.clamp(min=0)
    return {"position_ids": positions.expand(3, -1, -1) if hasattr(body, "rope_deltas") else positions}


def _plain_hidden(model: nn.Module, prompts: Sequence[EncodedPrompt], tokens: Tensor, mask: Tensor, pad_id: int) -> Tensor:
    """Hidden states ``[n, T, D]`` that predict each completion token, from one full forward pass over every row."""
    body = _body(model)
    inputs = collate_prompts(prompts, pad_id, tokens.device)
    width = inputs["input_ids"].shape[1]
    inputs["input_ids"] = torch.cat([inputs["input_ids"], tokens], dim=1)
    inputs["attention_mask"] = torch.cat([inputs["attention_mask"], mask.to(inputs["attention_mask"].dtype)], dim=1)
    if "mm_token_type_ids" in inputs:
        inputs["mm_token_type_ids"] = nn.functional.pad(inputs["mm_token_type_ids"], (0, tokens.shape[1]))
    inputs |= _prompt_positions(body, inputs)
    hidden, _ = _run(model, **place_audio(model, inputs), use_cache=False)
    return hidden[:, width - 1 : -1]


def token_logits(model: nn.Module, hidden: Tensor, temperature: float, banned_ids: Sequence[int]) -> Tensor:
    """Float32 ``[n, V]`` logits over temperature, ``-inf`` at banned ids."""
    logits = model.get_output_embeddings()(hidden).float()
    if temperature != 1.0:
        logits = logits / temperature
    if banned_ids:
        logits = logits.index_fill(-1, torch.tensor(list(banned_ids), device=logits.device), -torch.inf)
    return logits


def _draw(log_probs: Tensor, uniforms: Tensor, params: SamplingParams) -> Tensor:
    """Inverse-transform sampling of ``[n, V]`` with one uniform number per row, after top-k and top-p; int64 ``[n]``."""
    probs = log_probs.exp().double()
    if params.top_k and params.top_k < probs.shape[1]:
        smallest = probs.topk(params.top_k, dim=-1).values[:, -1:]
        probs = probs.masked_fill(probs < smallest, 0.0)
    if params.top_p < 1.0:
        ordered, order = probs.sort(dim=-1, descending=True)
        before = ordered.cumsum(dim=-1) - ordered  # the most likely token is always kept
        ordered = ordered.masked_fill(before >= params.top_p * ordered.sum(dim=-1, keepdim=True), 0.0)
        probs = torch.zeros_like(probs).scatter(1, order, ordered)
    cumulative = probs.cumsum(dim=-1)
    total = cumulative[:, -1:]
    threshold = (uniforms[:, None] * total).minimum(total.nextafter(torch.zeros_like(total)))  # rounding up would pass the end
    return torch.searchsorted(cumulative, threshold, right=True)[:, 0]


def _uniforms(seed: int, count: int) -> Tensor:
    return torch.rand(count, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def _concat_padded(parts: Sequence[Tensor]) -> Tensor:
    shape = [max(sizes) for sizes in zip(*(part.shape[1:] for part in parts))]
    if any(list(part.shape[1:]) != shape for part in parts):
        missing = [[want - have for want, have in zip(shape, part.shape[1:])] for part in parts]
        pads = [[side for gap in reversed(gaps) for side in (0, gap)] for gaps in missing]
        parts = [nn.functional.pad(part, pad) for part, pad in zip(parts, pads)]
    return torch.cat(list(parts))
