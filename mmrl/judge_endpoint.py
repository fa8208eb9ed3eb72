"""A judge behind an OpenAI-compatible ``/chat/completions`` endpoint that takes audio or images.

The key comes from an environment variable at the moment of the request. It is sent in a header to the configured host only
(redirects are refused) and is cut out of everything that an error quotes.
"""

from __future__ import annotations

import base64
import http.client
import json
import os
import time
import urllib.error
import urllib.request
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from mmrl.judge import JudgeError, JudgeRequest, Reply
from mmrl.types import Media

MAX_REPLY_BYTES = 4 * 2**20
"""Longer replies are refused."""
_PERMANENT = frozenset({400, 401, 403, 404, 405, 413, 415, 422})
_IMAGE_TYPES = {".jpg": "jpeg", ".jpeg": "jpeg", ".webp": "webp", ".gif": "gif"}


@dataclass(frozen=True, kw_only=True)
class EndpointJudge:
    """Implements `mmrl.judge.Judge` over HTTP."""

    url: str
    """Base of the API, for example ``https://host/v1``."""
    model: str
    key_variable: str | None = None
    """Environment variable that holds the key; None sends none."""
    temperature: float = 0.0
    max_tokens: int = 2048
    json_mode: bool = True
    """Ask for ``response_format: json_object``."""
    reasoning_effort: str | None = None

    @property
    def identity(self) -> str:
        settings = (self.url, self.model, self.temperature, self.max_tokens, self.json_mode, self.reasoning_effort)
        return f"endpoint {settings}"

    def answer(self, request: JudgeRequest) -> Reply:
        key = self._key()
        headers = {"Content-Type": "application/json", "Accept": "application/json"}
        if key:
            headers["Authorization"] = f"Bearer {key}"
        post = urllib.request.Request(f"{self.url.rstrip('/')}/chat/completions", self._body(request), headers, method="POST")
        try:
            return _read_reply(_send(post, request.timeout_s))
        except urllib.error.HTTPError as error:
            with error:
                detail = _hide(error.read(2000).decode(errors="replace"), key)
            raise _status_error(error, detail) from None  # the cause would show the request's headers to a debugger
        except TimeoutError:
            raise JudgeError(f"{self.model}: no answer within {request.timeout_s:g} s", kind="transient") from None
        except (OSError, http.client.HTTPException, ValueError) as error:  # URLError is an OSError
            slow = isinstance(getattr(error, "reason", None), TimeoutError)
            reason = f"no answer within {request.timeout_s:g} s" if slow else _hide(f"{type(error).__name__}: {error}", key)
            raise JudgeError(f"{self.model}: {reason}", kind="transient") from None

    def _key(self) -> str:
        if self.key_variable is None:
            return ""
        key = os.environ.get(self.key_variable, "").strip()
        if not key or not key.isascii() or not key.isprintable():
            raise JudgeError(f"environment variable {self.key_variable} holds no usable key; set it", kind="permanent")
        return key

    def _body(self, request: JudgeRequest) -> bytes:
        body: dict[str, Any] = {
            "model": self.model,
            "temperature": self.temperature,
            "max_tokens": self.max_tokens,
            "messages": [
                {"role": "system", "content": request.instructions},
                {
                    "role": "user",
                    "content": [*(_media_part(item) for item in request.media), {"type": "text", "text": request.text}],
                },
            ],
        }
        if self.json_mode:
            body["response_format"] = {"type": "json_object"}
        if self.reasoning_effort is not None:
            body["reasoning_effort"] = self.reasoning_effort
        return json.dumps(body).encode()


class _NoRedirects(urllib.request.HTTPRedirectHandler):
    """A redirect would carry the key to another host."""

    def redirect_request(self, *arguments: Any, **named: Any) -> None:
        return None


def _send(post: urllib.request.Request, timeout_s: float) -> bytes:
    """The reply's bytes; TimeoutError once ``timeout_s`` is over, also if the server sends a byte now and then."""
    end = time.monotonic() + timeout_s
    with urllib.request.build_opener(_NoRedirects).open(post, timeout=timeout_s) as response:
        parts, size = [], 0
        while part := response.read1(65536):
            parts.append(part)
            size += len(part)
            if size > MAX_REPLY_BYTES:
                raise ValueError(f"the reply is longer than {MAX_REPLY_BYTES} bytes")
            if time.monotonic() > end:
                raise TimeoutError
    return b"".join(parts)


def _read_reply(data: bytes) -> Reply:
    try:
        tree = json.loads(data)
    except RecursionError as error:
        raise ValueError("the reply is nested too deeply") from error
    try:
        content = tree["choices"][0]["message"]["content"]
    except (KeyError, IndexError, TypeError):
        raise ValueError("the reply has no choices[0].message.content") from None
    if isinstance(content, list):
        content = "".join(str(part.get("text", "")) for part in content if isinstance(part, Mapping))
    if not isinstance(content, str):
        raise ValueError(f"message.content is {type(content).__name__}; expected text")
    usage = tree.get("usage") if isinstance(tree.get("usage"), Mapping) else {}
    tokens = [usage.get(name) for name in ("prompt_tokens", "completion_tokens")]
    prompt, completion = (value if isinstance(value, int) else 0 for value in tokens)
    return Reply(text=content, prompt_tokens=prompt, completion_tokens=completion)


def _status_error(error: urllib.error.HTTPError, detail: str) -> JudgeError:
    kind = "rate" if error.code == 429 else "permanent" if error.code in _PERMANENT or 300 <= error.code < 400 else "transient"
    after = error.headers.get("Retry-After", "") if error.headers is not None else ""
    seconds = float(after) if after.isdecimal() else None
    return JudgeError(f"HTTP {error.code}: {' '.join(detail.split())[:300]}", kind=kind, retry_after=seconds)


def _media_part(item: Media) -> dict[str, Any]:
    data = base64.b64encode(item.data).decode()
    if item.kind == "audio":
        return {"type": "input_audio", "input_audio": {"data": data, "format": item.suffix.lstrip(".")}}
    if item.kind == "image":
        return {"type": "image_url", "image_url": {"url": f"data:image/{_IMAGE_TYPES.get(item.suffix, 'png')};base64,{data}"}}
    raise JudgeError(f"an endpoint takes audio and images, not {item.kind}", kind="permanent")


def _hide(text: str, key: str) -> str:
    return text.replace(key, "***") if key else text
