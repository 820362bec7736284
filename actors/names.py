"""Names of actors. Ray never gives the name of a dead actor to another, so each is NAME#TIME, and only the living are
listed."""

from __future__ import annotations

import time

import ray

NAMESPACE = "callboard"


def new_name(name: str) -> str:
    """A name that no actor `name` has had."""
    return f"{name}#{time.time_ns()}"


def living_actors(name: str) -> list[str]:
    """The names of the actors `name` that live, oldest first."""
    prefix = f"{name}#"
    actors = ray.util.list_named_actors(all_namespaces=True)
    names = [a["name"] for a in actors if a["namespace"] == NAMESPACE and a["name"].startswith(prefix)]
    return sorted(names, key=lambda n: int(n.removeprefix(prefix)))
