"""The fronts' request router, which runs in each process with a handle to the application.

Serve sends this code to the caller, where Callboard may be absent. So the module imports Ray alone."""

from __future__ import annotations

from typing import Any

import ray
from ray.serve._private.request_router.common import PendingRequest
from ray.serve._private.request_router.pow_2_router import PowerOfTwoChoicesRequestRouter
from ray.serve.config import RequestRouterConfig


class CallerRouter(PowerOfTwoChoicesRequestRouter):
    """Serve's own router. It names the caller in each request, so that a front can watch the caller's process."""

    async def _choose_replica_for_request(self, pending_request: PendingRequest, **options: Any) -> Any:
        context, metadata = ray.get_runtime_context(), vars(pending_request.metadata)
        metadata["caller"] = context.get_node_id(), context.get_worker_id()
        return await super()._choose_replica_for_request(pending_request, **options)


def router_config() -> RequestRouterConfig:
    """Return Serve's options with this router.

    They keep the name of Serve's own: with HAProxy, Serve refuses other names, since HTTP would bypass the router."""
    path = f"{CallerRouter.__module__}.{CallerRouter.__name__}"
    named: Any = RequestRouterConfig(request_router_class=path)  # type: ignore[arg-type]
    config = RequestRouterConfig()
    config.set_serialized_request_router_cls(named.get_serialized_request_router_cls())
    return config
