"""The facts of one API request that metrics, the request log and spans read."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Self

from starlette.types import Scope

from runtime.base.reports import Verified, all_of
from runtime.base.types import MAX_DRAFT_TOKENS, Request, RequestOutput
from serve_app.http.auth import path_within


@dataclass(slots=True)
class RequestContext:
    """The circumstances of an API request; most are known before its body is read."""

    arrived_at: float = field(default_factory=time.time)
    traceparent: str | None = None  # W3C Trace Context
    model: str = ""  # model or adapter name; empty until the body is parsed
    method: str = ""
    path: str = ""  # path within the application; empty for a call by a Serve handle
    ignored_fields: list[str] = field(default_factory=list)  # ignored fields in its body
    error: str = ""  # why it was refused or failed
    has_line: bool = False  # the request log has its line

    @classmethod
    def of(cls, scope: Scope) -> Self:
        """Return the circumstances of the request with this scope; the first call sets the arrival time."""
        known: Self | None = scope.get("context")
        if known is None:
            traceparent = next((value for name, value in scope["headers"] if name == b"traceparent"), None)
            known = scope["context"] = cls(
                traceparent=None if traceparent is None else traceparent.decode("latin-1"),
                method=scope["method"],
                path=path_within(scope),
            )
        return known


@dataclass(slots=True)
class ChoiceStats:
    """The figures of one engine request, as this front measures them."""

    request: Request
    adapter: str = ""  # its adapter's name; empty for the model itself
    engine: str = ""  # id of the engine that serves it; empty until one is chosen
    num_output: int = 0
    num_cached: int = 0
    num_expected: int | None = None  # cached tokens that the router expected; None if it had no choice
    queued_s: float = 0.0
    prefill_s: float = 0.0
    first_at: float = 0.0  # when the engine sampled the first token; 0 without one
    last_at: float = 0.0
    reason: str = "abort"  # why it ended; "abort" unless another reason is set
    refusal: str = ""  # why the engines refused it
    num_drafts: int = 0  # steps that verified draft tokens
    accepted: list[int] = field(default_factory=lambda: [0] * MAX_DRAFT_TOKENS)  # accepted draft tokens by position

    def moved_to(self, engine: str) -> None:
        self.engine = engine

    def note(self, output: RequestOutput) -> None:
        """Add an output of the engine."""
        if not output.sampled_at:  # an end without a token
            return
        if not self.first_at:
            self.first_at, self.num_cached = output.first_sampled_at or output.sampled_at, output.num_cached
            self.queued_s, self.prefill_s = output.queued_s, output.prefill_s
            self.num_expected = output.num_expected
        for verified in all_of(output.reports, Verified):
            self.num_drafts += 1
            for position in range(verified.num_accepted):
                self.accepted[position] += 1
        self.num_output += len(output.token_ids)
        self.last_at = output.sampled_at


# Called once for each API request that the engines accepted or refused, at its end: with its id, circumstances, choices
# and status.
RequestSink = Callable[[str, RequestContext, list[ChoiceStats], int], None]
