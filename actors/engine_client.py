"""EngineClient: what a front end needs of its engines, and the errors with which they refuse a request."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable
from typing import ClassVar, Protocol

from actors.metrics import MetricValues, Snapshot
from runtime.core.config import ModelInfo
from runtime.core.types import CallboardError, Request, RequestOutput


class EngineRefusal(CallboardError):
    """The request was not begun."""

    reason: ClassVar[str]  # the label of callboard:requests_refused


class RequestRefused(EngineRefusal):
    """No engine can ever serve the request: it is too long, say."""

    reason = "never"


class EngineBusy(EngineRefusal):
    """The engines' queues are full; come back after `retry_after_s` seconds."""

    reason = "busy"

    def __init__(self, message: str, retry_after_s: float) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class EngineDraining(EngineRefusal):
    """The engines take no new requests, because they are about to end."""

    reason = "draining"


class QueueTimeout(EngineRefusal):
    """The request waited in the queue for as long as it may."""

    reason = "late"


OnEngine = Callable[[str], None]  # is told the id of the engine that serves a request, each time that another one does


def nobody(engine: str) -> None:
    """An OnEngine for those who need not know."""


class EngineClient(Protocol):
    """The engines as a front end uses them, however far away they are."""

    info: ModelInfo  # of the engine with the longest context

    def generate(self, request: Request, on_engine: OnEngine = nobody) -> AsyncGenerator[RequestOutput, None]:
        """Yields what is new until an output has a finish reason; closing the generator aborts the request.

        Outputs that piled up while the consumer was busy arrive merged into one.
        Raises EngineBusy if all queues are full, EngineDraining, QueueTimeout, RequestRefused if the request cannot be
        served, and CallboardError if it fails otherwise.
        """
        ...

    def abort(self, request_id: str) -> None:
        """End a request by its id or its client's id for it, whoever submitted it; an unknown one is no error."""
        ...

    def engines(self) -> list[str]:
        """The ids of the engines that there are now."""
        ...

    async def report(self, figures: dict[str, MetricValues]) -> dict[str, Snapshot]:
        """Give each engine what was counted for its requests since the last report; the figures of all engines that
        answered. One that did not has not got its part."""
        ...

    def health(self) -> str | None:
        """None if requests can be served now; else one sentence that says why not."""
        ...
