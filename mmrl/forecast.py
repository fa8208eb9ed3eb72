"""How much memory a run of a language policy needs on each process, from sizes alone.

Counted: weights; gradients and AdamW's two moments, in the precision of the weights; in rollouts the cache of all rows that are
decoded at once; in the update what one micro-batch keeps for its backward pass. Prompts count with their media tokens, as they
do in ``trainer.micro_batch_tokens``. It is the worst case that the config allows (prompts at ``max_prompt_tokens``, completions
at ``max_new_tokens``), and an estimate: allocators and attention kernels add to it.
"""

from __future__ import annotations

from dataclasses import dataclass

from mmrl.generation import MAX_LOGITS_ELEMENTS

HIDDEN_PER_LAYER = 17
"""Hidden vectors that one layer keeps per position for its backward pass without checkpointing: 34 bytes at 2 bytes each
(arXiv 2205.05198, without the attention matrix, which fused attention does not keep)."""
LOGITS_COPIES = 3
"""Logits, their exponentials and their gradient, in float32."""


@dataclass(frozen=True, kw_only=True)
class Tower:
    """A media tower that trains, and so keeps activations too."""

    layers: int
    hidden: int
    positions_per_token: int
    """Positions inside the tower for each media token of a prompt."""


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """What the forecast is made from."""

    weights: int
    trained: int
    """Weights that have gradients and moments."""
    width: int
    """Bytes of a weight and of an activation."""
    layers: int
    hidden: int
    kv_width: int
    """Numbers that one position keeps per layer in the cache, keys and values together."""
    vocabulary: int
    prompt: int
    """Positions of the longest prompt, media tokens included."""
    media_tokens: int
    """Media tokens of the longest prompt."""
    completion: int
    tasks: int
    """Tasks of an optimizer step."""
    group_size: int
    rows_at_once: int
    """Rollouts decoded at once."""
    micro_batch_tokens: int
    tower: Tower | None = None


@dataclass(frozen=True, kw_only=True)
class MicroBatch:
    """The largest forward and backward pass that the token budget lets through."""

    prompts: int
    rollouts: int
    positions: int
    """Prompt and completion positions together; each prompt once per group."""
    decisions: int
    """Completion tokens; only these have logits."""


@dataclass(frozen=True, kw_only=True)
class Memory:
    """Bytes."""

    weights: int
    optimizer: int
    """Gradients and AdamW's moments."""
    cache: int
    """Keys and values of a full rollout."""
    activations: int
    """Of one micro-batch."""
    logits: int
    """Of one micro-batch, in chunks of at most `mmrl.generation.MAX_LOGITS_ELEMENTS`."""
    plain_logits: int
    """What logits at every position would take, each rollout with a prompt of its own: not made, for comparison."""

    @property
    def rollout(self) -> int:
        """While sampling; moments are there, gradients are not."""
        return self.weights + self.optimizer * 2 // 3 + self.cache

    @property
    def update(self) -> int:
        """While updating."""
        return self.weights + self.optimizer + self.activations + self.logits

    @property
    def peak(self) -> int:
        """The larger of the two."""
        return max(self.rollout, self.update)


def micro_batch(sizes: Sizes) -> MicroBatch:
    """Whole groups as long as they fit into the budget, else as many rollouts of one group as do, and at least one."""
    group = sizes.prompt + sizes.group_size * sizes.completion
    groups = min(sizes.tasks, sizes.micro_batch_tokens // group)
    rollouts = groups * sizes.group_size
    if groups == 0:
        groups = 1
        rollouts = max(1, min(sizes.group_size, (sizes.micro_batch_tokens - sizes.prompt) // sizes.completion))
    decisions = rollouts * sizes.completion
    return MicroBatch(prompts=groups, rollouts=rollouts, positions=groups * sizes.prompt + decisions, decisions=decisions)


def memory(sizes: Sizes) -> Memory:
    """Bytes of each part; see the module."""
    batch = micro_batch(sizes)
    activations = HIDDEN_PER_LAYER * sizes.hidden * sizes.layers * batch.positions * sizes.width
    if sizes.tower is not None:
        inside = batch.prompts * sizes.media_tokens * sizes.tower.positions_per_token
        activations += HIDDEN_PER_LAYER * sizes.tower.hidden * sizes.tower.layers * inside * sizes.width
    # The cache of the prompt is expanded to its rollouts in the update too, and keeps its gradient.
    expanded = sizes.kv_width * sizes.layers * batch.rollouts * (sizes.prompt + sizes.completion) * sizes.width
    plain = 4 * sizes.vocabulary * sizes.group_size * (sizes.prompt + sizes.completion)
    return Memory(
        weights=sizes.weights * sizes.width,
        optimizer=sizes.trained * (sizes.width + 2 * sizes.width),
        cache=sizes.kv_width * sizes.layers * sizes.rows_at_once * (sizes.prompt + sizes.completion) * sizes.width,
        activations=activations + 2 * expanded,
        logits=LOGITS_COPIES * 4 * min(MAX_LOGITS_ELEMENTS, batch.decisions * sizes.vocabulary),
        plain_logits=plain,
    )


def rows(sizes: Sizes) -> list[tuple[str, str]]:
    """Names and values as ``mmrl check`` prints them."""
    batch, found = micro_batch(sizes), memory(sizes)
    return [
        ("one micro-batch",
         f"{batch.positions:,} positions: {batch.prompts} prompts ({batch.prompts * sizes.media_tokens:,} media tokens), "
         f"{batch.rollouts} rollouts; budget {sizes.micro_batch_tokens:,}"),
        ("memory: weights", gib(found.weights)),
        ("memory: gradients, AdamW", gib(found.optimizer)),
        ("memory: rollout cache", gib(found.cache)),
        ("memory: one micro-batch", f"{gib(found.activations + found.logits)} (logits {gib(found.logits)})"),
        ("memory: logits, if plain",
         f"{gib(found.plain_logits)} a group: ({sizes.media_tokens:,} media + {sizes.prompt - sizes.media_tokens:,} text + "
         f"{sizes.completion:,} new) x {sizes.group_size} x {sizes.vocabulary:,}; not made"),
        ("memory: in all, about", gib(found.peak)),
    ]  # fmt: skip


def gib(count: int) -> str:
    """Bytes as people read them."""
    return f"{count / 2**30:.2f} GiB" if count >= 2**27 else f"{count / 2**20:.2f} MiB"
