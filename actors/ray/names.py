"""Names of actors. Ray never gives the name of a dead actor to another, so each is NAME#TIME, and only the living are
listed. Engines are found by listing, too: nobody else needs to know how many there are, or whose."""

from __future__ import annotations

import time
from hashlib import blake2b

import ray

from runtime.spec.config import EngineConfig

NAMESPACE = "callboard"
_SERVE_NAMESPACE = "serve"  # Serve's own


def new_name(name: str) -> str:
    """A name that no actor `name` has had."""
    return f"{name}#{time.time_ns()}"


def living_actors(prefix: str) -> list[str]:
    """The names of the living actors whose name begins so, oldest first.

    An engine lives only while its Serve replica does. Ray lists one for ever, which it never starts, where a replica
    asked for it just after the death of its node."""
    actors = ray.util.list_named_actors(all_namespaces=True)
    replicas = {a["name"].rpartition("#")[2] for a in actors if a["namespace"] == _SERVE_NAMESPACE}
    names = [a["name"] for a in actors if a["namespace"] == NAMESPACE and a["name"].startswith(prefix)]
    living = [name for name in names if "/engine/" not in name or engine_id(name) in replicas]
    return sorted(living, key=lambda name: int(name.rpartition("#")[2]))


def engines_of(application: str, config: EngineConfig | None = None) -> str:
    """The beginning of the names of an application's engines; with `config`, of those that serve its model.

    While an application is redeployed with another model, engines of both live: a front knows the ids of one only."""
    model = "" if config is None else blake2b(f"{config.model}\0{config.revision}".encode(), digest_size=4).hexdigest()
    return f"{application}/engine/{model and model + '/'}"


def engine_id(name: str) -> str:
    """The id of an engine, which it keeps when it is started anew: the last part of its actor's name."""
    return name.rpartition("/")[2].partition("#")[0]
