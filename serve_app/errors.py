"""What a client is told when a request cannot be served: an HTTP status and OpenAI's error object."""

from __future__ import annotations

from functools import partial
from typing import Any

from runtime.core.types import CallboardError


class ApiError(CallboardError):
    """A fault with its HTTP status and the four fields of OpenAI's error object."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        type: str = "invalid_request_error",
        param: str | None = None,
        code: str | None = None,
        retry_after_s: float | None = None,
    ) -> None:
        super().__init__(message)
        self.status, self.type, self.param, self.code = status, type, param, code
        self.retry_after_s = retry_after_s

    def __reduce__(self) -> tuple[Any, ...]:  # to a caller in another process, by a Serve handle
        rest = {"type": self.type, "param": self.param, "code": self.code, "retry_after_s": self.retry_after_s}
        return partial(ApiError, **rest), (self.status, str(self))

    def body(self) -> dict[str, Any]:
        return {"error": {"message": str(self), "type": self.type, "param": self.param, "code": self.code}}


def invalid(param: str, problem: str) -> ApiError:
    """The 400 for one field."""
    return ApiError(400, f"{param} {problem}.", param=param)
