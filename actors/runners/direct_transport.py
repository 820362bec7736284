"""Results of another actor's method over a transport of Ray's between two actors (Ray Direct Transport), such as Gloo.

Ray hands such results only to a method of an actor, and only within a group of both actors. So this process's own actor
joins a group with the other one, and then calls itself. If either dies during a transfer, Ray ends the other one, too.
"""

from __future__ import annotations

import threading
from typing import Any
from uuid import uuid4

import ray

TWO_SIDED = ("GLOO", "NCCL")  # of Ray's transports; ray.get reads the others
_received: dict[str, Any] = {}  # results by the id of their call
_joining = threading.Lock()


def transport_of(method: Any) -> str:
    """Return the transport that an actor's method is declared with; empty for the object store."""
    return str(getattr(method, "_tensor_transport", None) or "")


def call_directly(actor: Any, method: Any, *arguments: Any) -> Any:
    """Return the result of a method with a TWO_SIDED transport. Must run in a method of an actor with several threads.

    Both actors must be free to answer a call meanwhile."""
    own = ray.get_runtime_context().current_actor
    _join(own, actor, transport_of(method))
    call = uuid4().hex
    try:
        ray.get(own.__ray_call__.remote(_receive, call, method.remote(*arguments)))
        return _received[call]
    finally:
        _received.pop(call, None)


def _receive(own: object, call: str, result: Any) -> None:
    _received[call] = result


def _join(own: Any, actor: Any, transport: str) -> None:
    """Have both actors in one group of a transport. An actor that this process joined earlier leaves its group."""
    from ray.experimental.collective import create_collective_group, destroy_collective_group, get_collective_groups

    with _joining:
        if get_collective_groups([own, actor], transport):
            return
        for group in get_collective_groups([own], transport):
            destroy_collective_group(group)
        create_collective_group([actor, own], transport)
