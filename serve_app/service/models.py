"""An application's models: each request goes to the service of the model that it names."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator, Sequence
from typing import Any, TypeVar

from runtime.base.types import Request
from runtime.output.fields import invalid, shortened
from runtime.output.processor import Delta
from serve_app.observability.context import RequestContext
from serve_app.observability.exposition import exposition
from serve_app.protocol.prepared_request import PreparedRequest, R, ServedModel
from serve_app.service.checks import unknown_model
from serve_app.service.endpoint import Endpoint, NeedsEngine
from serve_app.service.model_card import ModelCard
from serve_app.service.service import Service

_T = TypeVar("_T")


class Models:
    """One service for each model. The first one takes requests without a name."""

    def __init__(self, services: Sequence[Service]) -> None:
        self._services = tuple(services)
        for service in self._services[1:]:
            service.metrics.counts_process = False  # the first one does

    def __iter__(self) -> Iterator[Service]:
        return iter(self._services)

    @property
    def first(self) -> Service:
        return self._services[0]

    @property
    def num_live(self) -> int:
        """Running requests of this front."""
        return sum(service.num_live for service in self)

    def of(self, name: str | None) -> Service:
        """Return the service of the model or adapter with this name; None names the first model.

        Raises the 404 for an unknown name, and the 503 while a service is loading."""
        if not name:
            return self.first
        for service in self:
            if service.serves(name):
                return service
        for service in self:
            service.named(None)
        raise unknown_model(name, [name for service in self for name in service.names()])

    def named(self, name: str | None) -> ServedModel:
        """Return the model or adapter with this name; raises ApiError as `of` does."""
        return self.of(name).named(name)

    def computing(self, name: str | None) -> ServedModel:
        """Return a model for prompts that engines compute; raises NeedsEngine before the first engine."""
        return self.of(name).computing(name)

    def model_card(self, name: str | None) -> ModelCard:
        """Return OpenAI's model object for a name; raises ApiError as `of` does."""
        return self.of(name).model_card(name)

    def model_cards(self) -> list[ModelCard]:
        """Return the objects of all names, beginning with the first model."""
        return [card for service in self for card in service.model_cards()]

    def health(self) -> str | None:
        """Return a sentence with the reason if requests for the first model cannot be served now, else None."""
        return self.first.health()

    async def load_adapter(self, name: str, path: str, may_replace: bool, base: str | None = None) -> None:
        """Load an adapter of the model `base`, by default the first, as `Service.load_adapter` does.

        A sleeping model starts an engine for it. Another model may not have the adapter's name."""
        own = self.of(base)
        if any(service.serves(name) for service in self if service is not own):
            raise invalid("lora_name", f"is {shortened(name)!r}, which is another model's name")
        if own.sleep.is_allowed:
            await own.sleep.start_engine()
        await own.load_adapter(name, path, may_replace)

    async def unload_adapter(self, name: str) -> None:
        """Unload the adapter of any model as `Service.unload_adapter` does."""
        own = next((service for service in self if service.serves(name)), self.first)
        await own.unload_adapter(name)

    async def reset_prefix_cache(self) -> None:
        """Evict the blocks that no live request holds. Raises ApiError or CallboardError as the engines' clients do."""
        await asyncio.gather(*(service.engine_client().reset_prefix_cache() for service in self))

    async def exposition(self) -> bytes:
        """Return the application's Prometheus text: its engines, and all fronts' last reports."""
        snapshots = await asyncio.gather(*(service.metrics.report() for service in self))
        return exposition({service.model: found for service, found in zip(self, snapshots, strict=True)})

    def abort(self, request_id: str, owner: str) -> None:
        """End a request of `owner`, for any model, by its id; unknown ids are ignored."""
        for service in self:
            service.abort(request_id, owner)

    def prepare(
        self, endpoint: Endpoint[R], request: R, request_id: str = "", owner: str = "", answer_id: str = ""
    ) -> PreparedRequest[R]:
        """Check one API request as its model's `Service.prepare` does."""
        return self.of(request.model).prepare(endpoint, request, request_id, owner, answer_id)

    def run(
        self, prepared: PreparedRequest[Any], context: RequestContext | None = None
    ) -> AsyncGenerator[list[Delta], None]:
        """Yield the deltas of the choices as the model's `Service.run` does."""
        return self.of(prepared.model.base).run(prepared, context)

    async def pool(
        self, model: ServedModel, answer_id: str, requests: list[Request], context: RequestContext
    ) -> list[bytes]:
        """Return the pooled result of each request to this model."""
        return await self.of(model.base).pool(answer_id, requests, context)


async def when_started(prepare: Callable[[], Awaitable[_T]]) -> _T:
    """Return the result of `prepare`, which is repeated after an engine that it needs has started."""
    while True:
        try:
            return await prepare()
        except NeedsEngine as e:
            await e.start()
