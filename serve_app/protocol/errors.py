"""Errors as a client sees them: an HTTP status and the error object of the API that it asks."""

from __future__ import annotations

import math
import re
from functools import partial
from typing import Any

import msgspec
from starlette.responses import Response

from runtime.output.fields import FieldError, shortened
from runtime.spec.types import CallboardError

_MAX_MESSAGE_CHARS = 1000
_TYPES = {429: "rate_limit_error", 499: "request_aborted"}  # the others go by the hundreds
_ANTHROPIC_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}
# Fields of a chat at the head of a message, and what they are called in Anthropic's requests.
_ANTHROPIC_NAMES = [
    (re.compile(r"^(tools\.\d+)\.function\.parameters\b"), r"\1.input_schema"),
    (re.compile(r"^(tools\.\d+)\.function\."), r"\1."),
    (re.compile(r"^tool_choice\.function\."), "tool_choice."),
    (re.compile(r"^response_format(\.json_schema\.schema)?\b"), "output_config.format.schema"),
    (re.compile(r"^stop\b"), "stop_sequences"),
]
# What internals may say and a client must not see: absolute paths, and IPv4 or bracketed IPv6 addresses with ports.
_PATH = re.compile(r"(?<![\w.:/])~?(?:/[\w.+@#%~=-]+){2,}/?")
_ADDRESS = re.compile(r"\b\d{1,3}(?:\.\d{1,3}){3}(?::\d+)?\b|\[[0-9a-fA-F:]*:[0-9a-fA-F:.]*\](?::\d+)?")


class ApiError(CallboardError):
    """A fault with its HTTP status, and what OpenAI's error object has beside the type, which follows from that."""

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

    def __reduce__(self) -> tuple[Any, ...]:  # to a caller in another process, by a Serve handle
        names = ("param", "code", "retry_after_s")
        return partial(ApiError, **{name: getattr(self, name) for name in names}), (self.status, str(self))

    def message(self) -> str:
        """The sentence that a client may read."""
        return str(self) if self.status < 500 else redacted(str(self))

    def body(self) -> dict[str, Any]:
        """OpenAI's object."""
        kind = _TYPES.get(self.status, "server_error" if self.status >= 500 else "invalid_request_error")
        return {"error": {"message": self.message(), "type": kind, "param": self.param, "code": self.code}}


INTERNAL_ERROR = ApiError(500, "The server met an internal error; its log has the details.", code="internal_error")


def api_error(error: FieldError) -> ApiError:
    """The 400 for one field."""
    return ApiError(400, str(error), param=error.field)


def redacted(text: str) -> str:
    """A sentence of the server's internals without its file paths and network addresses."""
    return _ADDRESS.sub("<address>", _PATH.sub("<path>", text))


def anthropic_body(error: ApiError) -> dict[str, Any]:
    """Anthropic's object. It has no place for the field at fault, which the message therefore names as the client does:
    the faults are found in the chat that its request was translated to."""
    kind = _ANTHROPIC_TYPES.get(error.status, "api_error" if error.status >= 500 else "invalid_request_error")
    message = error.message()
    if error.param is not None:
        for pattern, name in _ANTHROPIC_NAMES:
            message = pattern.sub(name, message)
    return {"type": "error", "error": {"type": kind, "message": message}}


def error_body(error: ApiError, path: str) -> dict[str, Any]:
    """The error object of the API that a route belongs to."""
    if path.startswith("/api/"):  # Ollama's
        return {"error": error.message()}
    is_anthropic = path == "/v1/messages" or path.startswith("/v1/messages/")
    return anthropic_body(error) if is_anthropic else error.body()


def error_response(error: ApiError, path: str = "", **more: str) -> Response:
    """The answer with the error's status, body and headers, and with fields beside it."""
    headers = {}
    if error.retry_after_s is not None:
        headers["retry-after"] = str(math.ceil(error.retry_after_s))
    if error.status == 408:
        headers["connection"] = "close"  # the rest of the body would be waited for
    if error.status == 401:
        headers["www-authenticate"] = "Bearer"
    return Response(msgspec.json.encode(error_body(error, path) | more), error.status, headers, "application/json")
