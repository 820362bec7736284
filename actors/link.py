"""The replica's side of an engine: submit requests, receive every new token, resume after an engine's death."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from typing import Protocol

from runtime.core.config import ModelInfo
from runtime.core.types import CallboardError, Request, RequestOutput


class EngineBusy(CallboardError):
    """The engine's queue is full; come back after `retry_after_s` seconds."""

    def __init__(self, message: str, retry_after_s: float) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class EngineClient(Protocol):
    """What a front end needs of an engine, however far away it is."""

    info: ModelInfo

    def generate(self, request: Request) -> AsyncGenerator[RequestOutput, None]:
        """Yields what is new until an output has a finish reason; closing the generator aborts the request.

        Outputs that piled up while the consumer was busy arrive merged into one.
        Raises EngineBusy if the queue is full, CallboardError if the request cannot be served.
        """
        ...

    def health(self) -> str:
        """Empty if requests can be served now; else one sentence that says why not."""
        ...
