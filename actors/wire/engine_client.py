"""EngineClient: what a front end needs of its engines, and the error with which they refuse a request."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable
from enum import StrEnum
from typing import Protocol

from actors.wire.adapter_entry import AdapterState
from actors.wire.metrics import MetricValues, Snapshot
from runtime.spec.config import ModelInfo
from runtime.spec.types import CallboardError, Request, RequestOutput


class Refusal(StrEnum):
    """Why a request was not begun, the likeliest to pass first; the label of callboard:requests_refused."""

    BUSY = "busy"  # the queue is full
    DRAINING = "draining"  # the engine takes no new requests before it ends
    LATE = "late"  # it has waited in the queue for as long as it may
    NEVER = "never"  # it cannot be served at all: it is too long, say


class EngineRefusal(CallboardError):
    """The request was not begun. If the engines are busy, come back after `retry_after_s` seconds."""

    def __init__(self, message: str, reason: Refusal, retry_after_s: float = 0.0) -> None:
        super().__init__(message)
        self.reason, self.retry_after_s = reason, retry_after_s


class ServerStopped(CallboardError):
    """The server ended before the request did."""


OnEngine = Callable[[str], None]  # is told the id of the engine that serves a request, each time that another one does


def nobody(engine: str) -> None:
    """An OnEngine for those who need not know."""


class AdapterClient(Protocol):
    """The adapters of the engines."""

    def served(self) -> dict[str, AdapterState]:
        """Those that requests may ask for, by name."""
        ...

    async def load(self, name: str, path: str) -> None:
        """Let all engines serve the adapter in a folder by this name, in the place of what has the name now. Raises
        CallboardError if one cannot: then none does."""
        ...

    async def unload(self, name: str) -> None:
        """Returns when no request uses it any more; new ones do not get it from now on."""
        ...


class EngineClient(Protocol):
    """The engines as a front end uses them, however far away they are."""

    info: ModelInfo  # of the engine with the longest context

    @property
    def adapters(self) -> AdapterClient:
        """Those of the engines."""
        ...

    def generate(self, request: Request, on_engine: OnEngine = nobody) -> AsyncGenerator[RequestOutput, None]:
        """Yields what is new until an output has a finish reason; closing the generator aborts the request.

        Outputs that piled up while the consumer was busy arrive merged into one.
        Raises EngineRefusal if it is not begun, and CallboardError if it fails otherwise.
        """
        ...

    def abort(self, request_id: str) -> None:
        """End a request by its id or its client's id for it, whoever submitted it; an unknown one is no error."""
        ...

    async def reset_prefix_cache(self) -> None:
        """Let every engine forget what it has cached for no live request, before it takes what is asked from now on;
        returns when all have. Raises CallboardError if one does not say so in time."""
        ...

    async def sleep(self, level: int) -> None:
        """Returns when every engine that there is now sleeps at this level, or is awake (0). Raises CallboardError if
        one does not."""
        ...

    @property
    def is_asleep(self) -> bool:
        """True if an engine sleeps."""
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
