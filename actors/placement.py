"""Where the actors of one engine go: one placement group, owned by the Serve replica that supervises the engine.

    bundle 0        the supervising replica and the engine actor      CPU
    bundle 1 + r    the model runner of rank r                        CPU, and one GPU where the model runs on GPUs

Serve makes the group with the replica and removes it with the replica, so whatever dies, nothing is left behind.
"""

from __future__ import annotations

from typing import Any

from ray.util.placement_group import PlacementGroup
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from runtime.core.config import EngineConfig
from runtime.core.types import CallboardError

# Logical CPUs, chosen so that a server fits a machine with two of them; they limit placement, not threads.
SUPERVISOR_CPUS = 0.1
ENGINE_CPUS = 0.4
RUNNER_CPUS = 1.0
FRONT_CPUS = 0.5


def uses_gpu(config: EngineConfig, cluster_resources: dict[str, float]) -> bool:
    """Whether the runners get GPUs: asked for, or there are any. Raises CallboardError if there are too few."""
    num_gpus = int(cluster_resources.get("GPU", 0))
    if config.device == "cuda" and num_gpus < config.tensor_parallel_size:
        raise CallboardError(
            f"device=cuda with tensor_parallel_size={config.tensor_parallel_size} needs that many GPUs, but the Ray "
            f"cluster has {num_gpus}; use device=cpu or add GPUs."
        )
    return config.device == "cuda" or (config.device == "auto" and num_gpus >= config.tensor_parallel_size)


def default_fronts(cluster_resources: dict[str, float]) -> int:
    """Front replicas for one cluster: one on a laptop, four on a GPU host.

    One Python process writes some ten thousand events a second; HAProxy, engines and runners need cores too."""
    return min(4, max(1, int(cluster_resources.get("CPU", 0)) // 4))


def bundles(config: EngineConfig, gpu: bool) -> list[dict[str, float]]:
    """The placement group of one engine."""
    runner = {"CPU": RUNNER_CPUS, "GPU": 1.0} if gpu else {"CPU": RUNNER_CPUS}
    return [{"CPU": SUPERVISOR_CPUS + ENGINE_CPUS}, *({**runner} for _ in range(config.tensor_parallel_size))]


def engine_options(group: PlacementGroup) -> dict[str, Any]:
    """Ray options of the engine actor."""
    return {"num_cpus": ENGINE_CPUS, "scheduling_strategy": PlacementGroupSchedulingStrategy(group, 0)}


def runner_options(group: PlacementGroup, rank: int, gpu: bool) -> dict[str, Any]:
    """Ray options of the runner of `rank`; Ray pins the process to its GPU."""
    return {
        "num_cpus": RUNNER_CPUS,
        "num_gpus": 1 if gpu else 0,
        "scheduling_strategy": PlacementGroupSchedulingStrategy(group, 1 + rank),
    }
