"""Config sections of judges. Nothing here imports torch."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal
from urllib.parse import urlsplit

from pydantic import Field, field_validator

from mmrl.config import Section


class _Bounds(Section):
    """What every judge has."""

    workers: int = Field(8, gt=0)
    """Groups judged at once, and requests at once."""
    attempts: int = Field(4, gt=0)
    """Tries of one request before it counts as failed."""
    cache_dir: Path | None = None
    """Folder that keeps answers by content; absent asks each time."""


class RulesJudgeConfig(_Bounds):
    """Rules that measure the medium itself; for the built-in tasks."""

    name: Literal["rules"]


class ModelJudgeConfig(_Bounds):
    """A model in this process, decoded greedily."""

    name: Literal["model"]
    path: str
    """A built-in policy, a local directory, or a hub name."""
    revision: str | None = None
    """Branch, tag or commit of a hub name."""
    dtype: Literal["float32", "bfloat16"] = "bfloat16"
    """Precision of the weights."""
    max_new_tokens: int = Field(1024, gt=0)
    """Longest answer; a cut answer is malformed."""
    max_prompt_tokens: int = Field(32768, gt=0)
    """Longer requests count as failed."""


class EndpointJudgeConfig(_Bounds):
    """An OpenAI-compatible server that takes audio or images."""

    name: Literal["endpoint"]
    url: str
    """Base of the API, for example ``https://host/v1``."""
    model: str
    """Name of the model there."""
    key_variable: str | None = Field(None, pattern=r"^[A-Za-z_][A-Za-z0-9_]*$")
    """NAME of the environment variable that holds the key (never the key); absent sends none."""
    temperature: float = Field(0.0, ge=0)
    """Randomness of answers."""
    max_tokens: int = Field(2048, gt=0)
    """Longest answer."""
    json_mode: bool = True
    """Ask the server for a JSON object."""
    reasoning_effort: Literal["minimal", "low", "medium", "high"] | None = None
    """Passed on when present."""

    @field_validator("url")
    @classmethod
    def _is_an_address_without_credentials(cls, value: str) -> str:
        parts = urlsplit(value)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ValueError("expected the base of an API, for example https://host/v1.")
        if parts.username is not None or parts.query:
            raise ValueError("expected an address without credentials; name the key's variable in key_variable.")
        return value


JudgeConfig = Annotated[RulesJudgeConfig | ModelJudgeConfig | EndpointJudgeConfig, Field(discriminator="name")]
