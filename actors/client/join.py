"""Joins the Ray that runs: started by `callboard serve` or `serve run`, or a cluster."""

from __future__ import annotations

import os
import socket

import ray

from actors.ray.environment import SINGLE_MACHINE
from actors.ray.private import address_to_join, join_on_loopback
from runtime.base.types import CallboardError

_LOOPBACK = ("127.0.0.1", "localhost")
_CONNECT_S = 1.0


def join_ray() -> None:
    """Connect this process to the Ray that RAY_ADDRESS names, or to the one of this machine, if it has not joined one.

    Raises CallboardError without a Ray."""
    if ray.is_initialized():
        return
    host, _, port = address_to_join().rpartition(":")
    node: str = ray.util.get_node_ip_address()  # type: ignore[no-untyped-call]
    if host in _LOOPBACK and not _answers(node, port):
        # The Ray that `callboard serve` started. A process that has imported Ray takes it for a cluster's end, and
        # would look for it at the machine's other address.
        for name, value in SINGLE_MACHINE.items():
            os.environ.setdefault(name, value)
        join_on_loopback()
    try:
        ray.init(address="auto")
    except ConnectionError as e:
        text = "No Ray can be joined; start the server, give this process its RAY_AUTH_TOKEN, or set RAY_ADDRESS"
        raise CallboardError(f"{text} ({' '.join(str(e).split())[:200]}).") from e


def _answers(host: str, port: str) -> bool:
    try:
        with socket.create_connection((host, int(port)), _CONNECT_S):
            return True
    except (OSError, ValueError):
        return False
