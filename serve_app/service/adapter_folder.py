"""Adapters of a folder or a bucket that load at their first request, as ray.serve.llm's dynamic adapters do."""

from __future__ import annotations

import asyncio
import copy
import time
from collections.abc import Collection, Sequence
from functools import partial

from runtime.background import in_background
from runtime.base.config import MAX_NAME_CHARS
from runtime.base.types import CallboardError
from runtime.loading.resolve import has_adapter
from runtime.output.fields import FieldError
from serve_app.http.lanes import NeedsStart
from serve_app.protocol.errors import ApiError, redacted, unavailable
from serve_app.service.allowed_folder import path_within
from serve_app.service.service import Service

_REMEMBERED_S = 10.0  # a name that failed is not looked up again before
_MAX_REMEMBERED = 1024  # names that failed
_LOOKUPS = 8  # lookups that run together; each may wait for a bucket

_Key = tuple[str, str]  # names of the model and its adapter


class AdapterFolder:
    """Loads FOLDER/ADAPTER for requests with the name ADAPTER or BASE:ADAPTER."""

    def __init__(self, folder: str) -> None:
        self._folder = folder
        self._loads: dict[_Key, asyncio.Task[ApiError | None]] = {}
        self._failed: dict[
            _Key, tuple[float, ApiError | None]
        ] = {}  # end of its validity; None if the folder lacks the adapter
        self._lookups = asyncio.Semaphore(_LOOKUPS)

    def check(self, services: Sequence[Service], name: str) -> None:
        """Raise NeedsStart for a name that may be an adapter of the folder. Thread-safe.

        Returns if the folder lacks the adapter; raises ApiError if its load failed just now. Without BASE, the first
        model's adapter is meant."""
        found = ((service, service.adapter_name(name)) for service in services)
        service, adapter = next(((service, own) for service, own in found if own), (services[0], name))
        adapter = adapter.removesuffix(":latest")  # Ollama's clients add it
        if not adapter or len(adapter) > MAX_NAME_CHARS or not adapter.isprintable() or adapter.startswith("."):
            return
        if "/" in adapter or "\\" in adapter:
            return
        until, error = self._failed.get((service.model, adapter), (0.0, None))
        if time.monotonic() >= until:
            raise NeedsStart(partial(self._start, service, adapter))
        if error is not None:
            raise copy.copy(error)

    async def _start(self, service: Service, adapter: str) -> None:
        """Load an adapter once for all requests that wait for it. Raises ApiError."""
        key = service.model, adapter
        if (load := self._loads.get(key)) is None:
            load = self._loads[key] = asyncio.create_task(self._load(service, adapter))
            in_background(load, "the load of an adapter").add_done_callback(lambda _: self._loads.pop(key))
        if (error := await asyncio.shield(load)) is not None:
            raise copy.copy(error)

    async def _load(self, service: Service, adapter: str) -> ApiError | None:
        """Load an adapter, or note that there is none. Returns the error."""
        try:
            async with self._lookups:
                path = await asyncio.to_thread(self._path, adapter)
            if path is None or not await asyncio.to_thread(has_adapter, path):
                return self._failure(service, adapter, None)
            if service.sleep.is_allowed:
                await service.sleep.start_engine()
            await service.load_adapter(adapter, path, True, partial(self.replaceable, service))
        except ApiError as e:
            if e.code != "adapter_not_loaded":
                return e
            return self._failure(service, adapter, ApiError(e.status, str(e), param="model", code=e.code))
        except CallboardError as e:  # the bucket is out of reach
            return self._failure(service, adapter, unavailable(redacted(str(e)), _REMEMBERED_S))
        return None

    def _failure(self, service: Service, adapter: str, error: ApiError | None) -> ApiError | None:
        key = service.model, adapter
        self._failed.pop(key, None)
        self._failed[key] = time.monotonic() + _REMEMBERED_S, error
        if len(self._failed) > _MAX_REMEMBERED:
            del self._failed[next(iter(self._failed))]
        return error

    def _path(self, adapter: str) -> str | None:
        """Return an adapter's path; None if it leads out of the folder."""
        try:
            return path_within(self._folder, adapter, "model", "adapters")
        except FieldError:
            return None

    async def replaceable(self, service: Service) -> Collection[str]:
        """Return the adapters that their next request would load again, by name."""
        paths = service.adapter_paths()
        return await asyncio.to_thread(lambda: {name for name, path in paths.items() if self._path(name) == path})
