"""Config sections that vision and audio share. Nothing here imports torch."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from mmrl.config import Section


class LoraConfig(Section):
    """Low-rank adapters through peft; the reference policy is then the same model with adapters off."""

    rank: int = Field(16, gt=0)
    """Rank of the update of each matrix."""
    alpha: int = Field(32, gt=0)
    """The update is scaled by ``alpha / rank``."""
    target_modules: tuple[str, ...] | Literal["all-linear"] = (
        "q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj",
    )  # fmt: skip
    """Names of the adapted linear layers."""


class LanguagePolicyConfig(Section):
    """Which model, in which precision, and which of its weights train."""

    path: str
    """A built-in policy (``mmrl list policies``), a local directory, or a hub name."""
    revision: str | None = None
    """Branch, tag or commit of a hub name."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Precision of the weights."""
    attention: Literal["sdpa", "eager", "flash_attention_2"] = "sdpa"
    """Attention implementation."""
    freeze_tower: bool = False
    """Keep the media tower fixed; it then holds no graph."""
    lora: LoraConfig | None = None
    """Train low-rank adapters instead of the weights."""
    trust_remote_code: bool = False
    """Run code that comes with the checkpoint. Off unless you have read that code."""


class LanguageRolloutConfig(Section):
    """How completions are sampled and how prompts are shared."""

    max_new_tokens: int = Field(512, gt=0)
    """Longest completion, end token included."""
    temperature: float = Field(1.0, gt=0)
    """Divides the logits in sampling and in log-probabilities."""
    top_k: int = Field(0, ge=0)
    """Sample among the k most likely tokens; 0 is off. Not reproduced in log-probabilities."""
    top_p: float = Field(1.0, gt=0, le=1)
    """Sample among the most likely tokens of this total probability; 1 is off. Not reproduced in log-probabilities."""
    ban_media_tokens: bool = True
    """Give media placeholder tokens probability 0, in sampling and in log-probabilities."""
    banned_tokens: tuple[str | int, ...] = ()
    """Further tokens of probability 0: tokens as they are written, texts of one token, or ids."""
    stop_strings: tuple[str, ...] = ()
    """A completion ends with the token that completes one of these texts, however it is cut into tokens."""
    media_facts: bool = False
    """Give rewards ``completion.media``: sizes, scale, frame times, seconds (images and videos are opened once more)."""
    max_prompt_tokens: int = Field(8192, gt=0)
    """Longer prompts are refused, naming the row; a prompt is never cut."""
    max_rows: int = Field(512, gt=0)
    """Completions decoded at once; bounds the memory of the cache. Results do not depend on it."""
    share_prefix: bool = True
    """Encode a prompt once per group in the update; off runs every rollout's own prompt (same values, slower)."""
