"""The machines of a Ray cluster when an application is planned, and whether others may join."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import ray

_NODE_GROUP = "ray.io/node-group"  # the label that KubeRay and Ray's autoscaler give to their machines
_WAIT_CPUS = 0.1  # makes an autoscaler start a machine


@dataclass(frozen=True, slots=True)
class Machines:
    """The machines that may have engines and fronts. A head without CPUs and GPUs is not one."""

    nodes: Mapping[str, Mapping[str, float]] = field(default_factory=dict)  # resources by Ray's node id
    can_grow: bool = False  # others may join

    def most(self, resource: str, accelerator_type: str | None = None) -> float:
        """Return the largest amount of a resource on one machine, among machines with this accelerator type."""
        key = accelerator_resource(accelerator_type)
        return max((node.get(resource, 0.0) for node in self.nodes.values() if not key or key in node), default=0.0)

    @property
    def num_cpus(self) -> float:
        """The CPUs of all machines."""
        return sum(node.get("CPU", 0.0) for node in self.nodes.values())

    @property
    def largest(self) -> str:
        """The id of the machine with the most memory."""
        return max(self.nodes, key=lambda name: self.nodes[name].get("memory", 0.0))


def accelerator_resource(accelerator_type: str | None) -> str:
    """Return the resource that Ray gives each machine with this type of accelerator; empty for any type."""
    return f"accelerator_type:{accelerator_type}" if accelerator_type else ""


def machines_of(nodes: list[dict[str, Any]]) -> Machines:
    """Return the living machines of `ray.nodes()`.

    Others may join if there are several, if the only one computes nothing, or if a cluster manager has started it."""
    alive = [node for node in nodes if node["Alive"]]
    found = {n["NodeID"]: n["Resources"] for n in alive if n["Resources"].get("CPU") or n["Resources"].get("GPU")}
    managed = any((node.get("Labels") or {}).get(_NODE_GROUP) for node in alive)
    return Machines(found, can_grow=len(alive) > 1 or not found or managed)


def machines_now() -> Machines:
    """Return the living machines of the cluster."""
    return machines_of(ray.nodes())  # type: ignore[no-untyped-call]


def wait_for_machine() -> Machines:
    """Wait for a machine with CPUs, and return all. The wait is a task, so that an autoscaler starts a machine."""
    wait: Any = ray.remote(num_cpus=_WAIT_CPUS, max_retries=-1)(_nothing)
    ray.get(wait.options(name="wait for a machine with CPUs").remote())
    return machines_now()


def _nothing() -> None:
    pass
