"""Actor names. Ray never reuses a dead actor's name, so each name is NAME#TIME, and only living ones count.

Processes find engines by a list of names, so no other component keeps their number or owner."""

from __future__ import annotations

import time
from hashlib import blake2b
from pathlib import Path
from typing import Any

import ray

from actors.ray.private import session_folder
from runtime.base.config import EngineConfig

NAMESPACE = "callboard"
SERVE_NAMESPACE = "serve"  # Serve's own


def new_name(name: str) -> str:
    """Return a name that no earlier actor `name` has had."""
    return f"{name}#{time.time_ns()}"


def living_actors(prefix: str) -> list[str]:
    """Return the names of living actors that begin with `prefix`, oldest first.

    An engine counts only while its Serve replica lives. If a replica created it just after its node's death, Ray
    lists the engine for ever, but never starts it."""
    actors = ray.util.list_named_actors(all_namespaces=True)
    replicas = {a["name"].rpartition("#")[2] for a in actors if a["namespace"] == SERVE_NAMESPACE}
    names = [a["name"] for a in actors if a["namespace"] == NAMESPACE and a["name"].startswith(prefix)]
    living = [name for name in names if "/engine/" not in name or engine_id(name) in replicas]
    return sorted(living, key=lambda name: int(name.rpartition("#")[2]))


def serve_actors(prefix: str = "") -> frozenset[str]:
    """Return the names of Serve's living actors that begin with `prefix`."""
    actors = ray.util.list_named_actors(all_namespaces=True)
    names = (actor["name"] for actor in actors if actor["namespace"] == SERVE_NAMESPACE)
    return frozenset(name for name in names if name.startswith(prefix))


def engines_of(application: str, config: EngineConfig | None = None, deployment: str = "Engine") -> str:
    """Return the name prefix of an application's engines or, with `config`, one deployment's engines.

    During a redeployment with another model, engines of both live. A front uses the engines of one model only."""
    if config is None:
        return f"{application}/engine/"
    model = blake2b(f"{config.model}\0{config.revision}".encode(), digest_size=4).hexdigest()
    return f"{application}/engine/{deployment}/{model}/"


def model_of(engine: str) -> str:
    """Return the part of an engine's name that its model's engines share."""
    return engine.rpartition("/")[0] or engine.partition("#")[0]


def drafts_of(model: str) -> str:
    """Return the name of the draft that a model's engines share."""
    return f"{model.replace('/engine/', '/draft/')}/draft"


def default_weight_store(model: str) -> str:
    """Return the folder for the weights of a model (`model_of`), which ends with this Ray."""
    return str(Path(session_folder(), "callboard-weights", model))


def titled(actor: Any, role: str, engine: str | None = None, rank: int | None = None) -> Any:
    """Return `actor` as a class for Ray, which shows its name in process titles, the dashboard and logs.

    The name is Callboard:APPLICATION:ROLE:ENGINE, and a rank follows if there is one. `engine` is an engine's name, or
    None for the engine of this process."""
    engine = engine or ray.get_runtime_context().get_actor_name() or ""
    parts = ["Callboard", engine.partition("/")[0].partition("#")[0], role, engine_id(engine)]
    name = ":".join(parts if rank is None else [*parts, str(rank)])
    return ray.remote(**actor.REMOTE)(type(name, (actor,), {}))


def engine_id(name: str) -> str:
    """Return an engine's id, the last part of its actor's name. A restarted engine keeps it."""
    return name.rpartition("/")[2].partition("#")[0]
