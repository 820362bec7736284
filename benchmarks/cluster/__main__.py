"""A Callboard of several machines: what clients notice when Ray's control plane, or a machine, is lost.

    python -m benchmarks.cluster                                      # every case, a minute each
    python -m benchmarks.cluster --cases gcs-stopped --seconds 10

The machines are network namespaces of this one (network.py), each with its own raylet. One has the front and an engine,
one a second engine, and one only Ray's GCS and Serve's controller. If no case disturbs the head, the last is the first
one. Only a kernel with user namespaces is needed. `head-killed` also needs a redis-server, which keeps the GCS's state.
All processes of the head are killed, and Ray is started there anew at the end. Afterwards the front is killed, to see
that Serve still replaces it (`front_back_s`, until a request is answered). `pod-ended` runs the hook of
docs/deploy/kubernetes on the second engine's machine (`hook_s`), and then kills the machine. The others have a
cluster of their own. `late-nodes` and `node-returns` begin with a head alone (late_nodes.py); planned.py has changes by
an operator.

Clients read streams one after another, and also send short requests, over connections of their own. Each answer is
compared with an undisturbed cluster's. A JSON line a case.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

from benchmarks.cluster import planned
from benchmarks.cluster.clients import Clients
from benchmarks.cluster.late_nodes import run_late_nodes
from benchmarks.cluster.machines import Cluster
from benchmarks.cluster.network import alone, make_bridge, refusal

_CASES = "gcs-stopped", "head-cut", "head-killed", "gcs-killed", "engine-cut", "pod-ended"
_LATE = {"late-nodes": partial(run_late_nodes, returns=False), "node-returns": partial(run_late_nodes, returns=True)}
_APART = {**_LATE, **planned.CASES}  # each runs alone, in another cluster
_OF_HEAD = "head-cut", "head-killed"
_DEADLINE_S = 40  # of a pod's hook; without room elsewhere, Serve ends replicas drain_timeout_s and 2 s before
_BEFORE_S = 1.0  # under load before a disturbance


async def _run(args: argparse.Namespace, folder: str) -> None:
    settings = dict(setting.split("=", 1) for setting in args.set)
    is_apart = any(case in _OF_HEAD for case in args.cases)
    if run := _APART.get(args.cases[0]):
        has_head_apart = args.cases[0] in _LATE
        cluster = Cluster(folder, settings, has_head_apart=has_head_apart, has_redis=False)
        await run(cluster, args.model, args.seconds)
        return
    cluster = Cluster(folder, settings, has_head_apart=is_apart, has_redis="head-killed" in args.cases)
    started = time.monotonic()
    cluster.start(args.model)
    clients = Clients(cluster.url)
    await clients.wait_until_ready(2)
    start = {"case": "start", "seconds": round(time.monotonic() - started, 1), "cpu_s": round(cluster.cpu_s(), 1)}
    print(json.dumps(start), flush=True)
    await clients.learn()
    disturbances: dict[str, tuple[Callable[[], None], Callable[[], None]]] = {
        "gcs-stopped": (lambda: cluster.signal_gcs(signal.SIGSTOP), lambda: cluster.signal_gcs(signal.SIGCONT)),
        "head-cut": (cluster.head.pull, cluster.head.plug),
        "head-killed": (cluster.head.kill, cluster.restart_head),
        "gcs-killed": (lambda: cluster.signal_gcs(signal.SIGKILL), lambda: None),  # for good
        "engine-cut": (cluster.other.pull, lambda: None),
        "pod-ended": (lambda: cluster.end_pod(_DEADLINE_S), lambda: None),
    }
    for name in args.cases:
        begin, end = disturbances[name]
        async with clients.load() as seen:
            await asyncio.sleep(_BEFORE_S)
            seen.reset()
            begin()
            await asyncio.sleep(args.seconds)
            end()
            await asyncio.sleep(args.after)
        line = {"case": name, "seconds": args.seconds, **seen.report()}
        if name == "head-killed":
            cluster.kill_front()
            line["front_back_s"] = await clients.seconds_until_answered()
        if name == "pod-ended":
            line["hook_s"] = cluster.hook_s
        print(json.dumps(line), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="a model's file or folder; default: a tiny one of random weights")
    parser.add_argument("--seconds", type=float, default=60.0, help="for which each disturbance lasts")
    parser.add_argument("--after", type=float, default=10.0, help="seconds for which clients come after its end")
    parser.add_argument("--cases", nargs="*", choices=(*_CASES, *_APART), default=_CASES, help="in their order")
    parser.add_argument("--set", nargs="*", default=[], metavar="NAME=VALUE", help="environment of Ray on all machines")
    parser.add_argument("--inside", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if len(args.cases) > 1 and (apart := _APART.keys() & {*args.cases}):
        sys.exit(f"{min(apart)} needs another cluster than the other cases; name it alone.")
    if args.inside:
        make_bridge()
        asyncio.run(_run(args, args.inside))
        os._exit(0)  # all that was started ends with this process
    if why := refusal():
        sys.exit(why)
    if "head-killed" in args.cases and shutil.which("redis-server") is None:
        sys.exit("There is no redis-server for head-killed; install it or name the other --cases.")
    with tempfile.TemporaryDirectory(prefix="cb-", dir="/tmp") as folder:  # short: Ray puts Unix sockets below it
        command = alone("-m", "benchmarks.cluster", *sys.argv[1:], "--inside", folder)
        sys.exit(subprocess.run(command, cwd=Path(__file__).parents[2]).returncode)


if __name__ == "__main__":
    main()
