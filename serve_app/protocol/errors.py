"""Errors for clients: an HTTP status and the error object of the client's API."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import msgspec
from starlette.responses import Response

from runtime.base.types import CallboardError
from runtime.output.fields import FieldError, shortened
from serve_app.protocol.dialects import LLAMA_CPP_ROUTES, Dialect

_MAX_MESSAGE_CHARS = 1000
NO_THREADS = "thread_unsupported_request"  # Anthropic's SDK reads it
UNKNOWN_CODING = "unsupported_content_encoding"
_TYPES = {429: "rate_limit_error", 499: "request_aborted"}  # others follow from the first digit
_COMMON_TYPES = {401: "authentication_error", 403: "permission_error", 404: "not_found_error"}
_ANTHROPIC_TYPES = _COMMON_TYPES | {
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}
_LLAMA_CPP_TYPES = _COMMON_TYPES | {503: "unavailable_error"}
# Internal error details that clients must not see: absolute paths, and IPv4 or bracketed IPv6 addresses.
_PATH = re.compile(r"(?<![\w.:/])~?(?:/[\w.+@#%~=-]+){2,}/?")
_ADDRESS = re.compile(r"\b\d{1,3}(?:\.\d{1,3}){3}(?::\d+)?\b|\[[0-9a-fA-F:]*:[0-9a-fA-F:.]*\](?::\d+)?")


class ApiError(CallboardError):
    """An error with its HTTP status and the fields of OpenAI's error object."""

    is_sent = False  # see FieldError
    details: dict[str, Any] | None = None  # Anthropic's; None without any

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        retry_after_s: float | None = None,
    ) -> None:
        super().__init__(shortened(message, _MAX_MESSAGE_CHARS))
        self.status, self.code = status, code
        self.param = None if param is None else shortened(param)
        self.retry_after_s = retry_after_s

    def __reduce__(self) -> tuple[Any, ...]:  # used by a Serve handle's callers in other processes
        names = ("param", "code", "retry_after_s")
        return partial(ApiError, **{name: getattr(self, name) for name in names}), (self.status, str(self))

    def message(self) -> str:
        """Return the sentence for clients."""
        return str(self) if self.status < 500 else redacted(str(self))

    def in_words_of(self, api: Dialect) -> ApiError:
        """Return the error with the API's names for a chat's fields."""
        if self.param is None:
            return self
        names = api.names.in_remedy if self.is_sent else api.names.of
        text, param = names(str(self)), names(self.param)
        return ApiError(self.status, text, param=param, code=self.code, retry_after_s=self.retry_after_s)

    def body(self) -> dict[str, Any]:
        """Return OpenAI's error object."""
        kind = _TYPES.get(self.status, "server_error" if self.status >= 500 else "invalid_request_error")
        return {"error": {"message": self.message(), "type": kind, "param": self.param, "code": self.code}}


@dataclass(frozen=True, slots=True)
class PromptSize:
    """The tokens of a prompt that leaves no room for its output."""

    where: str  # field with the prompt
    limit: int  # the model's context
    num_tokens: int
    num_output: int | None = None  # wanted output tokens; None without a number
    max_tokens_field: str = ""  # field with that number
    is_cut: bool = False  # true if the rest of the prompt was not counted
    parts: Mapping[str, int] = field(default_factory=dict)  # tokens of some parts; the rest is in messages


class ContextExceeded(ApiError):
    """The 400 for a prompt that leaves no room for its output, in each API's words."""

    def __init__(self, size: PromptSize, api: Dialect | None = None) -> None:
        self._size = size
        fits = size.num_output is not None and size.num_tokens < size.limit
        parts = {name: num for name, num in size.parts.items() if num}
        parts |= {"messages": max(size.num_tokens - sum(parts.values()), 0)} if parts else {}
        text = (
            (api or Dialect())
            .context_exceeded[fits]
            .format(
                where=size.where,
                limit=size.limit,
                prompt=f"{'at least ' if size.is_cut else ''}{size.num_tokens}",
                output=size.num_output,
                field=size.max_tokens_field,
                parts=f" ({', '.join(f'{num} in {name}' for name, num in parts.items())})" if parts else "",
            )
        )
        super().__init__(400, text, param=size.where, code="context_length_exceeded")

    def with_parts(self, parts: Mapping[str, int]) -> ContextExceeded:
        return ContextExceeded(replace(self._size, parts=parts))

    def in_words_of(self, api: Dialect) -> ApiError:
        return ContextExceeded(self._size, api)


class ImagesTooLarge(ApiError):
    """The 400 for pictures with too many pixels, in the shape that Anthropic's SDK reads."""

    def __init__(self, message: str, paths: list[str], max_side: int) -> None:
        """`max_side` is a width and height that is never too large."""
        super().__init__(400, message, param=paths[0], code="image_dimensions_too_large")
        self.details = {"error_code": self.code, "max_side_length_pixels": max_side, "paths": paths}

    def in_words_of(self, api: Dialect) -> ApiError:
        own = super().in_words_of(api)
        own.details = self.details
        return own


def unavailable(reason: str, retry_after_s: float = 1.0) -> ApiError:
    return ApiError(503, reason, code="engine_unavailable", retry_after_s=retry_after_s)


INTERNAL_ERROR = ApiError(500, "The server met an internal error; its log has the details.", code="internal_error")


def api_error(error: FieldError) -> ApiError:
    """Return the 400 for one field."""
    refusal = ApiError(400, str(error), param=error.field)
    refusal.is_sent = error.is_sent
    return refusal


def redacted(text: str) -> str:
    """Return an internal error's sentence without file paths and network addresses."""
    return _ADDRESS.sub("<address>", _PATH.sub("<path>", text))


def anthropic_body(error: ApiError) -> dict[str, Any]:
    """Return Anthropic's error object."""
    kind = _ANTHROPIC_TYPES.get(error.status, "api_error" if error.status >= 500 else "invalid_request_error")
    details = {"error_code": error.code, "unsupported": [error.param]} if error.code == NO_THREADS else error.details
    more = {} if details is None else {"details": details}
    return {"type": "error", "error": {"type": kind, "message": error.message()} | more}


def llama_cpp_body(error: ApiError) -> dict[str, Any]:
    """Return llama.cpp's error object."""
    kind = _LLAMA_CPP_TYPES.get(error.status, "server_error" if error.status >= 500 else "invalid_request_error")
    return {"error": {"code": error.status, "message": error.message(), "type": kind}}


def error_body(error: ApiError, path: str) -> dict[str, Any]:
    """Return the error object of a route's API."""
    if path.startswith("/api/"):  # Ollama's
        return {"error": error.message()}
    if path in LLAMA_CPP_ROUTES:
        return llama_cpp_body(error)
    is_anthropic = path == "/v1/messages" or path.startswith("/v1/messages/")
    return anthropic_body(error) if is_anthropic else error.body()


def error_response(error: ApiError, path: str = "", **more: str) -> Response:
    """Return the response for an error. `more` are fields next to the error object."""
    headers = {}
    if error.retry_after_s is not None:
        headers["retry-after"] = str(math.ceil(error.retry_after_s))
    if error.status == 408:
        headers["connection"] = "close"  # does not wait for the rest of the body
    if error.code == UNKNOWN_CODING:
        headers["accept-encoding"] = "gzip, deflate"
    if error.status == 401:
        headers["www-authenticate"] = "Bearer"
    return Response(msgspec.json.encode(error_body(error, path) | more), error.status, headers, "application/json")
