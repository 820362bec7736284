"""The placement of one engine's actors: one placement group, owned by the Serve replica of its supervisor.

    bundle 0        the supervising replica and the engine actor      CPU
    bundle 1 + r    the model runner of rank r                        CPU, and one GPU where the model runs on GPUs
                    a draft model, beside rank 0                      a share of its CPU and, if it uses one, its GPU
    last bundle     a draft model with draft_device=own               CPU and GPU

Serve creates and removes the group with the replica, so no death leaves an actor behind. The whole group is on one
machine: ranks access each other's memory.

Ray shows each runner only its own GPU, by CUDA_VISIBLE_DEVICES, which no other code changes. So every rank's GPU is its
device 0, and a rank never creates a context on another GPU. The driver opens a peer's memory although that GPU is not
visible.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from ray.util.placement_group import PlacementGroup
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from runtime.spec.config import EngineConfig
from runtime.spec.types import CallboardError

# Logical CPUs, chosen so that a server fits a machine with two of them; they limit placement, not threads.
SUPERVISOR_CPUS = 0.1
ENGINE_CPUS = 0.4
RUNNER_CPUS = 1.0
FRONT_CPUS = 0.5
DRAFT_CPUS = 0.4  # taken from its runner's, without a bundle of its own
_DRAFT_GPUS = 0.1  # the same


def uses_gpu(config: EngineConfig, nodes: Iterable[Mapping[str, float]]) -> bool:
    """True if the runners use GPUs: the settings require them, or a machine has enough of them.

    `nodes` are the resources of each machine. A head that computes nothing has none: its machines are still to come,
    as on Kubernetes, and the settings alone decide. Raises CallboardError if no machine has enough GPUs for all ranks.
    """
    nodes = list(nodes)
    if config.device == "cpu":
        return False
    if config.device == "cuda" and nodes and not any(computes(resources) for resources in nodes):
        return True
    most = max((int(resources.get("GPU", 0)) for resources in nodes), default=0)
    size, what = config.tensor_parallel_size, ""
    needed = size
    if has_own_gpu(config):
        needed, what = size + 1, " and draft_device=own"
    if most < needed and (config.device == "cuda" or 0 < most < size):
        raise CallboardError(
            f"tensor_parallel_size={size}{what} needs {needed} GPUs on one machine, but the Ray cluster's machines "
            f"have {most} at most; use device=cpu or add GPUs."
        )
    return most >= needed


def computes(resources: Mapping[str, float]) -> bool:
    """True if a machine with these resources may have engines and fronts."""
    return bool(resources.get("CPU") or resources.get("GPU"))


def has_own_gpu(config: EngineConfig) -> bool:
    """True if there is a draft model with a GPU of its own."""
    return config.has_draft_model and config.draft_device == "own"


def default_fronts(cluster_resources: dict[str, float]) -> int:
    """Return the number of front replicas for a cluster: one on a laptop, four on a GPU host.

    One Python process writes about ten thousand events a second. HAProxy, engines and runners need cores too."""
    return min(4, max(1, int(cluster_resources.get("CPU", 0)) // 4))


def bundles(config: EngineConfig, gpu: bool, num_bytes: int = 0) -> list[dict[str, float]]:
    """Return the placement group of one engine. `num_bytes` of memory are reserved for its processes."""
    memory = {"memory": float(num_bytes)} if num_bytes else {}
    runner = {"CPU": RUNNER_CPUS, "GPU": 1.0} if gpu else {"CPU": RUNNER_CPUS}
    num_runners = config.tensor_parallel_size + (gpu and has_own_gpu(config))
    return [{"CPU": SUPERVISOR_CPUS + ENGINE_CPUS, **memory}, *({**runner} for _ in range(num_runners))]


def has_room(wanted: list[dict[str, float]], nodes: Iterable[Mapping[str, float]]) -> bool:
    """True if one of `nodes`, given by free resources, has room for all bundles of another replica."""
    names = {name for bundle in wanted for name in bundle}
    needed = {name: sum(bundle.get(name, 0.0) for bundle in wanted) for name in names}
    return any(all(free.get(name, 0.0) >= amount for name, amount in needed.items()) for free in nodes)


def engine_options(group: PlacementGroup) -> dict[str, Any]:
    """Return Ray's options for the engine actor."""
    return {"num_cpus": ENGINE_CPUS, "scheduling_strategy": PlacementGroupSchedulingStrategy(group, 0)}


def runner_options(config: EngineConfig, group: PlacementGroup, rank: int, gpu: bool) -> dict[str, Any]:
    """Return Ray's options for the runner of `rank`. Ray pins the process to its GPU."""
    shares = config.has_draft_model and rank == 0 and not (gpu and has_own_gpu(config))
    shares_gpu = shares and config.draft_device != "cpu"
    return {
        "num_cpus": RUNNER_CPUS - DRAFT_CPUS * shares,
        "num_gpus": (1.0 - _DRAFT_GPUS * shares_gpu) if gpu else 0,
        "scheduling_strategy": PlacementGroupSchedulingStrategy(group, 1 + rank),
    }


def draft_options(config: EngineConfig, group: PlacementGroup, gpu: bool) -> dict[str, Any]:
    """Return Ray's options for the draft model's actor."""
    own = gpu and has_own_gpu(config)
    shared_gpus = 0.0 if config.draft_device == "cpu" else _DRAFT_GPUS
    return {
        "num_cpus": RUNNER_CPUS if own else DRAFT_CPUS,
        "num_gpus": (1.0 if own else shared_gpus) if gpu else 0,
        "scheduling_strategy": PlacementGroupSchedulingStrategy(group, 1 + config.tensor_parallel_size if own else 1),
    }
