"""An application's models: each request goes to the service of the model that it names."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Iterator, Sequence
from functools import partial
from typing import Any

from runtime.base.types import Request
from runtime.output.fields import invalid, shortened
from runtime.output.processor import Delta
from serve_app.observability.context import RequestContext
from serve_app.observability.exposition import exposition
from serve_app.protocol.errors import ApiError
from serve_app.protocol.prepared_request import PreparedRequest, R, ServedModel
from serve_app.service.adapter_folder import AdapterFolder
from serve_app.service.checks import unknown_model
from serve_app.service.endpoint import Endpoint
from serve_app.service.model_card import ModelCard
from serve_app.service.service import Service


class Models:
    """One service for each model. The first one takes requests without a name."""

    adapter_folder: AdapterFolder | None = None  # of adapters that load at their first request

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

    @property
    def takes_images(self) -> bool:
        """True if requests for some model may have images."""
        return any(service.takes_images for service in self)

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
        """Return the model or adapter with this name; raises errors as `_wanted` does."""
        return self._wanted(name).named(name)

    def computing(self, name: str | None) -> ServedModel:
        """Return a model for prompts that engines compute; raises NeedsStart before the first engine."""
        return self._wanted(name).computing(name)

    def _wanted(self, name: str | None) -> Service:
        """Return the service of a request's model; raises NeedsStart for an adapter that the folder may have."""
        try:
            return self.of(name)
        except ApiError as e:
            if e.status == 404 and name and self.adapter_folder is not None:
                self.adapter_folder.check(self._services, name)
            raise

    def model_card(self, name: str | None) -> ModelCard:
        """Return OpenAI's model object for a name; raises ApiError as `of` does."""
        return self.of(name).model_card(name)

    def model_cards(self) -> list[ModelCard]:
        """Return the objects of all names, beginning with the first model."""
        cards = {}
        for card in (card for service in self for card in service.model_cards()):
            if card.id in cards:  # another model's adapter has this name, too
                card.id = f"{card.parent}:{card.id}"
            cards[card.id] = card
        return [*cards.values()]

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
        folder = self.adapter_folder
        await own.load_adapter(name, path, may_replace, None if folder is None else partial(folder.replaceable, own))

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
        return self._wanted(request.model).prepare(endpoint, request, request_id, owner, answer_id)

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
