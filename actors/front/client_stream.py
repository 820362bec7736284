"""ClientStream: a live request as its front sees it. It outlives links and engines."""

from __future__ import annotations

import asyncio
from array import array
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from actors.front.router import Prompt
from actors.wire.engine_client import EngineRefusal, OnEngine
from runtime.base.model_info import ModelInfo
from runtime.base.reports import Report
from runtime.base.types import CallboardError, FinishReason, Request, RequestOutput, SamplingParams

_MAX_CUTS = 10  # connections in a row that end without a new token; a request ends at this number


class StreamLink(Protocol):
    """A link to an engine, as its streams use it."""

    draining: bool

    def drop(self, stream: ClientStream) -> bool:
        """Abort a stream. Returns False if it has already ended."""
        ...


@dataclass(slots=True, eq=False)
class ClientStream:
    """One live request: its tokens, the output that its reader has not taken, and its engine."""

    request: Request
    on_engine: OnEngine
    received: array[int] = field(default_factory=lambda: array("i"))
    answered: dict[str, Any] = field(default_factory=dict)  # its sampling parameters for the next engine, if others
    pending: RequestOutput | None = None  # not taken by the reader yet
    error: CallboardError | None = None
    link: StreamLink | None = None  # its engine; None before it is assigned and after it has ended
    number: int = 0  # its number on that link
    info: ModelInfo | None = None  # its last engine's model
    accepted: bool = False  # an engine accepted it: it then skips the next engine's queue limits
    in_queue: bool = False  # waits in its engine's queue, by the last message, and was never in a step
    prompt: Prompt | None = None  # its tokens for the router; None before the first choice
    num_expected: int | None = None  # cached tokens that the router expects; None without a choice
    num_losses: int = 0  # engines that died while computing it
    num_cuts: float = 0.0  # connections in a row that ended without a new token; in a queue, each counts a tenth
    len_at_cut: int = 0  # its tokens at the last one
    # (token, weight version from there on); empty without weight_updates
    weight_versions: list[tuple[int, str]] = field(default_factory=list)
    moved_at_len: int | None = None  # its tokens when it last left a reloading engine; None before
    refusals: dict[StreamLink, EngineRefusal] = field(default_factory=dict)  # refusals by engine
    _waiter: asyncio.Future[None] | None = None

    def output(self) -> RequestOutput:
        """Return the output to add to: the one that waits for the reader, or a fresh one."""
        if self.pending is None:
            self.pending = RequestOutput(self.request.request_id, [], weight_versions=self.weight_versions)
        return self.pending

    def note_weights(self, version: str) -> None:
        """The tokens that follow come from these weights."""
        versions, at = self.weight_versions, len(self.received)
        if versions and versions[-1][0] == at:
            versions.pop()
        if not versions or versions[-1][1] != version:
            versions.append((at, version))

    def take_report(self, report: Report, sampled_at: float) -> None:
        """Add a report to the output. It precedes the tokens of its step."""
        output = self.output()
        output.reports = [*output.reports, report.shifted(len(output.token_ids))]
        self.answered |= report.answers
        if report.is_output:
            output.sampled_at = sampled_at
        self.wake()

    def wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def fail(self, error: CallboardError) -> None:
        """Give the reader the pending output, then `error`."""
        self.error = error
        self.wake()

    def end(self, reason: FinishReason, error: str = "") -> None:
        """Give the reader the pending output, with this end."""
        output = self.output()
        output.finish_reason, output.error = reason, error
        self.wake()

    async def take(self) -> RequestOutput:
        """Return the pending output, after waiting for it."""
        while self.pending is None:
            if self.error is not None:
                raise self.error
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter
        output, self.pending = self.pending, None
        return output

    def may_be_sent_again(self) -> bool:
        """Count the end of its engine's connection. After too many in a row, end the stream and return False."""
        if len(self.received) > self.len_at_cut:
            self.num_cuts, self.len_at_cut = 0.0, len(self.received)
        self.num_cuts += 0.1 if self.in_queue else 1.0  # a request in a queue is hardly the cause
        if self.num_cuts < _MAX_CUTS:
            return True
        text = "The connections to engines ended too often while they served this request"
        self.end(FinishReason.ERROR, f"{text}; it is not sent again.")
        return False

    def submission(self) -> Request:
        """Return the request for its next engine, with the received tokens."""
        if not self.received and not self.answered:
            return self.request
        return replace(self.request, token_ids=[*self.request.token_ids, *self.received], params=self.params)

    @property
    def params(self) -> SamplingParams:
        """The sampling parameters for its next engine."""
        return replace(self.request.params, **self.answered) if self.answered else self.request.params

    def suits(self, info: ModelInfo) -> bool:
        """True if an engine with this model continues like the last one: with equal numbers, to the same end."""
        last = self.info
        if last is not None and self.received and last.fingerprint != info.fingerprint:
            return False
        request = self.request
        limit = max(request.prompt_len + request.params.max_tokens, len(request.token_ids))
        return (limit if last is None else min(limit, last.max_model_len)) <= info.max_model_len
