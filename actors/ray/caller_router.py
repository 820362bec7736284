"""The request router of fronts, which runs in each process that calls a handle of the application.

Serve sends this module's code to the caller, so the caller needs no Callboard, and the module imports only Ray."""

from __future__ import annotations

from typing import Any

import ray
from ray.serve._private.request_router.pow_2_router import PowerOfTwoChoicesRequestRouter
from ray.serve.request_router import PendingRequest


class CallerRouter(PowerOfTwoChoicesRequestRouter):
    """Serve's own router. It names the caller in each request, so that a front can watch the caller's process."""

    async def _choose_replica_for_request(self, pending_request: PendingRequest, **options: Any) -> Any:
        context = ray.get_runtime_context()
        pending_request.metadata.caller = context.get_node_id(), context.get_worker_id()  # type: ignore[attr-defined]
        return await super()._choose_replica_for_request(pending_request, **options)
