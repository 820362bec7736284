"""EngineClient: the interface between a front and its engines, and the errors of a refused request."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Awaitable, Callable, Collection
from enum import StrEnum
from typing import Literal, NamedTuple, Protocol

from actors.wire.adapter_entry import AdapterState
from actors.wire.metrics import MetricValues, Snapshot
from actors.wire.weight_calls import A, WeightCall
from runtime.base.model_info import ModelInfo
from runtime.base.types import CallboardError, Request, RequestOutput


class Refusal(StrEnum):
    """Why a request was refused, best hope for a retry first; the label of callboard:requests_refused."""

    BUSY = "busy"  # the queue is full
    DRAINING = "draining"  # the engine takes no new requests before it ends
    LATE = "late"  # it waited in the queue longer than queue_timeout_s
    NEVER = "never"  # it can never be served: it is too long, for example


class Idleness(NamedTuple):
    """How long an engine has been idle, and how long it may be."""

    idle_s: float  # since it last had a request
    keep_s: float  # the idle time after which it may end; negative for the application's own


class EngineRefusal(CallboardError):
    """The engines refused a request. If they are busy, the client should retry after `retry_after_s` seconds."""

    def __init__(self, message: str, reason: Refusal, retry_after_s: float = 0.0) -> None:
        super().__init__(message)
        self.reason, self.retry_after_s = reason, retry_after_s


class ServerStopped(CallboardError):
    """The server ended before the request did."""


RefusalCode = Literal["busy", "not_open", "bad_request", "unavailable"]


class WeightsRefused(CallboardError):
    """The engines refused a call about their weights."""

    def __init__(self, message: str, code: RefusalCode) -> None:
        """`code` is the reason: another update is open; no update is open; the call is at fault; engines are lost."""
        super().__init__(message, code)  # pickle needs both
        self.code = code

    def __str__(self) -> str:
        return str(self.args[0])


OnEngine = Callable[[str], None]  # called with the engine's id whenever an engine begins to serve the request


def ignore_engine(engine: str) -> None:
    """An OnEngine that does nothing."""


Replaceable = Callable[[], Awaitable[Collection[str]]]


class AdapterClient(Protocol):
    """The adapters of the engines."""

    def served(self) -> dict[str, AdapterState]:
        """The adapters that requests may use, by name."""
        ...

    async def load(self, name: str, path: str, replaceable: Replaceable | None = None) -> None:
        """Serve the adapter in a folder by this name on all engines. It replaces the name's current adapter.

        Args:
        replaceable: returns names to unload until there is a free place, the least recently used one first.

        Raises CallboardError if an engine cannot load it: then no engine serves it. Raises EngineRefusal if requests
        use all places."""
        ...

    def expect(self, digest: str) -> None:
        """Keep an adapter for a request that is about to be submitted."""
        ...

    async def unload(self, name: str) -> None:
        """Refuse new requests for the name. Returns when no running request uses its adapter."""
        ...


class EngineClient(Protocol):
    """The engines as a front uses them, on this node or another."""

    info: ModelInfo  # the model of the engine with the longest context

    @property
    def adapters(self) -> AdapterClient:
        """The adapters of the engines."""
        ...

    def generate(self, request: Request, on_engine: OnEngine = ignore_engine) -> AsyncGenerator[RequestOutput, None]:
        """Yield new output until one has a finish reason. Closing the generator aborts the request.

        Outputs that queue while the consumer is busy arrive merged into one.
        Raises EngineRefusal if the request is refused, and CallboardError if it fails otherwise."""
        ...

    def abort(self, request_id: str) -> None:
        """End a request of any front by its id or its client's id. An unknown id is ignored."""
        ...

    async def started(self) -> None:
        """Wait for a healthy engine, and start one if there is none. Raises EngineRefusal and CallboardError."""
        ...

    async def keep(self, seconds: float | None) -> list[Idleness]:
        """Let the engines end after this time without requests, unless it is None. Returns their idle times."""
        ...

    async def reset_prefix_cache(self) -> None:
        """Evict the blocks that no live request holds, on every engine, before it takes later requests.

        Raises CallboardError if an engine does not confirm in time."""
        ...

    async def sleep(self, level: int) -> None:
        """Put every current engine to sleep at this level, or wake it (0). Raises CallboardError if one fails."""
        ...

    @property
    def is_asleep(self) -> bool:
        """True if any engine sleeps."""
        ...

    @property
    def is_paused(self) -> bool:
        """True if any engine is paused."""
        ...

    async def weights(self, call: WeightCall[A]) -> dict[str, A]:
        """Call every current engine about its weights, and return their answers by the ids of the engines.

        All engines pause, or none: a cancelled or refused pause is undone. An update is applied on all engines, or on
        none. Raises WeightsRefused if an engine refuses the call, also without an engine, and CallboardError if one
        fails."""
        ...

    def engines(self) -> list[str]:
        """The ids of the current engines."""
        ...

    async def report(self, figures: dict[str, MetricValues]) -> dict[str, Snapshot]:
        """Send each engine its request counts since the last report.

        Returns the figures of all engines that answered. Counts for the others are lost."""
        ...

    def health(self) -> str | None:
        """Return None if requests can be served now, else one sentence with the reason."""
        ...
