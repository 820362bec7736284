"""Engine errors, as API errors."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from actors.wire.engine_client import EngineRefusal, Refusal, ServerStopped
from runtime.base.types import CallboardError, FinishReason, RequestOutput
from runtime.output.response_format import RequestedGrammar
from serve_app.protocol.errors import ApiError, unavailable

_REFUSALS: dict[Refusal, tuple[int, str | None, float | None]] = {  # status, code, retry-after
    Refusal.BUSY: (429, "engine_busy", None),
    Refusal.DRAINING: (503, "engine_unavailable", 1.0),
    Refusal.LATE: (504, "queue_timeout", None),
    Refusal.NEVER: (400, None, None),
}


@contextmanager
def as_answers() -> Iterator[None]:
    """Turn errors of engines into ApiError."""
    try:
        yield
    except EngineRefusal as e:
        raise refused(e) from e
    except ApiError:
        raise
    except ServerStopped as e:
        raise unavailable(str(e)) from e
    except CallboardError as e:
        raise ApiError(500, str(e), code="engine_error") from e


def failure(output: RequestOutput, grammar: RequestedGrammar | None) -> ApiError:
    """Return the error of a choice that ended early."""
    if output.finish_reason is FinishReason.ABORT:
        return ApiError(499, output.error or "This request was aborted by its id.", code="request_aborted")
    if output.finish_reason is FinishReason.GRAMMAR:
        return ApiError(400, output.error, param=None if grammar is None else grammar.field, code="grammar_failed")
    return ApiError(500, output.error, code="engine_error")


def refused(refusal: EngineRefusal) -> ApiError:
    status, code, retry_after_s = _REFUSALS[refusal.reason]
    return ApiError(status, str(refusal), code=code, retry_after_s=refusal.retry_after_s or retry_after_s)
