"""The orderly end of a server: no new requests, time for running ones, then an error for the others."""

from __future__ import annotations

import time
from contextlib import suppress
from typing import Any

from actors.ray import haproxy
from serve_app.processes.process_tree import Parent
from serve_app.server.server_settings import APP_NAME, ServerSettings

_POLL_S = 0.1
_CALL_S = 1.0  # limit for the fronts' answers to a call


def drain(settings: ServerSettings, folder: str, parent: Parent) -> None:
    """Refuse new requests, and wait for running ones. The timeout or another order ends them with an error."""
    from ray import serve
    from ray.exceptions import RayError

    end = time.monotonic() + settings.http.drain_timeout_s
    with suppress(RayError):
        fronts = serve.get_app_handle(APP_NAME)
        while _num_live(fronts):
            if parent.wait_for_order(_POLL_S) or time.monotonic() > end:
                _end_requests(fronts)
                return
        # The fronts still write to slow readers, and HAProxy lives until they end.
        haproxy.leave_fronts(folder)
        serve.delete(APP_NAME, _blocking=False)
        while APP_NAME in serve.status().applications:
            if parent.wait_for_order(_POLL_S) or time.monotonic() > end:
                return


def _end_requests(fronts: Any) -> None:
    """End all requests with an error, which HAProxy forwards before it ends."""
    from ray.serve.exceptions import DeploymentUnavailableError

    from actors.engine.supervisor import STOPPED

    with suppress(DeploymentUnavailableError, TimeoutError):
        fronts.broadcast("end", STOPPED).results(timeout_s=_CALL_S, return_exceptions=True)


def _num_live(fronts: Any) -> int:
    """Make the fronts refuse new requests, and return the number of their live ones, also those without an engine.

    A front that does not answer counts as one."""
    from ray.exceptions import RayActorError
    from ray.serve.exceptions import DeploymentUnavailableError

    from actors.engine.supervisor import DRAINING

    try:
        answers = fronts.broadcast("drain", DRAINING).results(timeout_s=_CALL_S, return_exceptions=True)
    except DeploymentUnavailableError:  # there may be no front
        return 0
    except TimeoutError:
        return 1
    dead = RayActorError, DeploymentUnavailableError
    return sum(a if isinstance(a, int) else not isinstance(a, dead) for a in answers)
