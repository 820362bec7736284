"""The placement of one engine's actors: one placement group, owned by its supervisor's Serve replica.

    bundle 0        the supervising replica and the engine actor      CPU
    bundle 1 + r    the model runner of rank r                        CPU, and one GPU where the model runs on GPUs
                    a draft model, next to rank 0                     a share of its CPU and, if it uses one, its GPU
    last bundle     a draft model with draft_device=own               CPU and GPU

Serve creates and removes the group with the replica, so no death leaves an actor behind. The whole group is on one
machine: ranks access each other's memory.

Serve of Ray 2.60 pins its replica to bundle 0. Serve of Ray 2.56 does not, so Ray may take the replica's CPUs from a
runner's bundle. So the actors of each bundle leave room for it.

Ray shows each runner only its own GPU, by CUDA_VISIBLE_DEVICES, which no other code changes. So every rank's GPU is its
device 0, and a rank never creates a context on another GPU. The driver opens a peer's memory although that GPU is not
visible."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from ray.util.placement_group import PlacementGroup
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from actors.ray.machines import Machines, accelerator_resource
from runtime.base.config import EngineConfig
from runtime.base.types import CallboardError

# Logical CPUs, chosen so that a server fits a machine with two; they limit placement, not threads.
SUPERVISOR_CPUS = 0.1
ENGINE_CPUS = 0.4
RUNNER_CPUS = 1.0  # in its bundle; the actors there leave SUPERVISOR_CPUS free
FRONT_CPUS = 0.5
DRAFT_CPUS = 0.4  # taken from its runner's, without its own bundle
_DRAFT_GPUS = 0.1  # the same
_KIND_SHARE = 0.001  # taken from each machine's resource for its accelerator type, which is 1


class Device(NamedTuple):
    """The device of a model's runners."""

    gpu: bool
    why: str  # half a sentence


def device_of(config: EngineConfig, machines: Machines, accelerator_type: str | None = None) -> Device:
    """Return the device of a model's runners, which depends on `machines` only for device=auto.

    Raises CallboardError if no machine has enough GPUs for all ranks and none may join."""
    if config.device == "cpu":
        return Device(False, "device is cpu")
    most, size, what = int(machines.most("GPU", accelerator_type)), config.tensor_parallel_size, ""
    needed = size
    if has_own_gpu(config):
        needed, what = size + 1, " and draft_device=own"
    if most >= needed:
        return Device(True, f"a machine has {most} of {needed} GPUs")
    if config.device == "auto" and not 0 < most < size:
        return Device(False, f"no machine has {needed} GPUs now; device=cuda or accelerator_type waits for them")
    kind = f"{accelerator_type} GPUs" if accelerator_type else "GPUs"
    text = f"tensor_parallel_size={size}{what} needs {needed} {kind} on one machine, but the Ray cluster's machines"
    advice = "a smaller tensor_parallel_size, quantization or a larger machine" if needed > 1 else "device=cpu"
    if machines.can_grow:
        return Device(True, f"{text} have {most} at most now, so engines wait; else use {advice}")
    raise CallboardError(f"{text} have {most} at most; use {advice}, or add GPUs.")


def has_own_gpu(config: EngineConfig) -> bool:
    """True if there is a draft model with a GPU of its own."""
    return config.has_draft_model and config.draft_device == "own"


def default_fronts(machines: Machines, engines: Sequence[int], gpus: Sequence[bool]) -> int:
    """Return the number of front replicas from each model's number of engines, and whether they use GPUs.

    One Python process writes about ten thousand events a second. One machine has one front on a laptop, four on a GPU
    host: HAProxy, engines and runners need cores too. Where machines may join, only the engines count."""
    wanted = sum(number * (1 + gpu) for number, gpu in zip(engines, gpus, strict=True))
    return min(4, max(1, wanted if machines.can_grow else int(machines.num_cpus) // 4))


def bundles(
    config: EngineConfig, gpu: bool, num_bytes: int = 0, accelerator_type: str | None = None
) -> list[dict[str, float]]:
    """Return one engine's placement group, with `num_bytes` of memory reserved for its processes."""
    memory = {"memory": float(num_bytes)} if num_bytes else {}
    runner = {"CPU": RUNNER_CPUS, "GPU": 1.0} if gpu else {"CPU": RUNNER_CPUS}
    if gpu and accelerator_type:
        runner[accelerator_resource(accelerator_type)] = _KIND_SHARE
    num_runners = config.tensor_parallel_size + (gpu and has_own_gpu(config))
    return [{"CPU": SUPERVISOR_CPUS + ENGINE_CPUS, **memory}, *({**runner} for _ in range(num_runners))]


def total(wanted: Iterable[Mapping[str, float]]) -> dict[str, float]:
    """Return the resources of all bundles together."""
    found: dict[str, float] = {}
    for bundle in wanted:
        for name, amount in bundle.items():
            found[name] = found.get(name, 0.0) + amount
    return found


def described(wanted: Iterable[Mapping[str, float]]) -> str:
    """Return the resources of all bundles in words."""
    needed = total(wanted).items()  # an accelerator type's amount is a tiny share
    return ", ".join(f"{amount:g} {name} free" if amount >= SUPERVISOR_CPUS else name for name, amount in needed)


def has_room(wanted: list[dict[str, float]], nodes: Iterable[Mapping[str, float]]) -> bool:
    """True if one of `nodes`, given by free resources, has room for another replica's bundles."""
    needed = total(wanted)
    return any(all(free.get(name, 0.0) >= amount for name, amount in needed.items()) for free in nodes)


def engine_options(group: PlacementGroup) -> dict[str, Any]:
    """Return Ray's options for the engine actor."""
    return {"num_cpus": ENGINE_CPUS, "scheduling_strategy": PlacementGroupSchedulingStrategy(group, 0)}


def runner_options(config: EngineConfig, group: PlacementGroup, rank: int, gpu: bool) -> dict[str, Any]:
    """Return Ray's options for the runner of `rank`. Ray pins the process to its GPU."""
    shares = config.has_draft_model and rank == 0 and not (gpu and has_own_gpu(config))
    shares_gpu = shares and config.draft_device != "cpu"
    return {
        "num_cpus": RUNNER_CPUS - SUPERVISOR_CPUS - DRAFT_CPUS * shares,
        "num_gpus": (1.0 - _DRAFT_GPUS * shares_gpu) if gpu else 0,
        "scheduling_strategy": PlacementGroupSchedulingStrategy(group, 1 + rank),
    }


def draft_options(config: EngineConfig, group: PlacementGroup, gpu: bool) -> dict[str, Any]:
    """Return Ray's options for the draft model's actor."""
    own = gpu and has_own_gpu(config)
    shared_gpus = 0.0 if config.draft_device == "cpu" else _DRAFT_GPUS
    return {
        "num_cpus": RUNNER_CPUS - SUPERVISOR_CPUS if own else DRAFT_CPUS,
        "num_gpus": (1.0 if own else shared_gpus) if gpu else 0,
        "scheduling_strategy": PlacementGroupSchedulingStrategy(group, 1 + config.tensor_parallel_size if own else 1),
    }
