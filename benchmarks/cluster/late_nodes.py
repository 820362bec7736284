"""Machines that join after the build of an application: `python -m benchmarks.cluster --cases late-nodes --seconds 30`.

A head that computes nothing is alone when Serve gets two applications, one with device=auto and one with device=cuda.
After `seconds` a machine with CPUs joins, then one with a declared GPU. Between both, the case `node-returns` kills the
first one, and starts it again.
Each line has the state of Serve, and the pending placement groups, which an autoscaler would start machines for.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable
from itertools import chain
from typing import Any

from benchmarks.cluster.clients import Clients
from benchmarks.cluster.machines import Cluster

_CPUS = ["--num-cpus=4", "--num-gpus=0"]
_GPU_BUNDLE = {"CPU": 1.0, "GPU": 1.0}
_GPU = ["--num-cpus=4", "--num-gpus=1"]  # declared only: an engine there cannot load CUDA
_WAITS = "waits for the first machine"  # a build's log has this
_POLL_S = 1.0
_TIMEOUT_S = 600.0
_LOOK = """
import json, sys
import ray
from ray import serve
from ray.util import placement_group_table
ray.init(address=sys.argv[1], namespace="serve", log_to_driver=False)
groups = placement_group_table().values()
found = {"applications": {}, "nodes": sum(node["Alive"] for node in ray.nodes())}
for state in ("PENDING", "CREATED"):
    found[state.lower()] = [list(group["bundles"].values()) for group in groups if group["state"] == state]
for name, application in serve.status().applications.items():
    deployments = {key: f"{each.status.value}: {each.message}" for key, each in application.deployments.items()}
    found["applications"][name] = {"status": application.status.value, **deployments}
print("\\n" + json.dumps(found))
"""


async def run_late_nodes(cluster: Cluster, model: str | None, seconds: float, *, returns: bool) -> None:
    """Print a line for each phase. With `returns`, the first machine is lost and joins again."""
    cluster.start_head()
    auto = {"name": "auto", "route_prefix": "/", "args": cluster.args(model)}
    cuda = {"name": "cuda", "route_prefix": "/cuda", "args": cluster.args(model, device="cuda")}
    cluster.deploy("EveryNode", auto, cuda)
    await asyncio.sleep(seconds)
    found = await until(cluster, lambda found: found["pending"] and cluster.logged(_WAITS))
    print_state("head alone", found, sentences=cluster.logged(_WAITS))
    clients = Clients(cluster.url)
    await _join_and_serve("machine joins", cluster, clients)
    if returns:
        cluster.front.kill()
        print_state("machine lost", await until(cluster, lambda found: found["nodes"] == 1))
        await _join_and_serve("machine returns", cluster, clients)
    cluster.join(cluster.other, *_GPU)
    found = await until(cluster, lambda found: _GPU_BUNDLE not in chain(*found["pending"]))
    print_state("declared GPU joins", found)


async def _join_and_serve(case: str, cluster: Cluster, clients: Clients) -> None:
    began = time.monotonic()
    cluster.join(cluster.front, *_CPUS)
    joined = time.monotonic()
    await clients.wait_until_ready(1, _TIMEOUT_S)
    times = {"joined_s": round(joined - began, 1), "served_s": round(time.monotonic() - joined, 1)}
    ready = await clients.phase("/cuda", "waits for a machine", _TIMEOUT_S)
    found = await until(cluster, lambda found: found["applications"]["auto"]["status"] == "RUNNING")
    print_state(case, found, **times, sentences=cluster.logged(" runs on "), ready=ready)


async def until(cluster: Cluster, holds: Callable[[dict[str, Any]], object]) -> dict[str, Any]:
    """Return the first state of Serve and Ray that `holds`."""
    end = time.monotonic() + _TIMEOUT_S
    while not holds(found := look(cluster)):
        if time.monotonic() > end:
            raise TimeoutError(json.dumps(found))
        await asyncio.sleep(_POLL_S)
    return found


def look(cluster: Cluster) -> dict[str, Any]:
    lines = cluster.python(_LOOK).splitlines()  # Ray's own lines among them
    found: dict[str, Any] = json.loads(next(line for line in lines if line.startswith('{"applications"')))
    return found


def print_state(case: str, found: dict[str, Any], **more: object) -> None:
    print(json.dumps({"case": case, **found, **more}), flush=True)
