"""Changes to a cluster under streams: `python -m benchmarks.cluster --cases upgraded`. Each case has its own cluster.

`machine-killed` cuts the power of the second engine's machine. `drained` drains that machine for two reasons (`ray
drain-node`), and cuts its power at the deadline, after `--seconds`. `upgraded` deploys other arguments of the engines.
For the last two, another machine has room.

`autoscaled` begins without a node for engines; Ray's autoscaler starts nodes, and ends idle ones. `environment` has a
`runtime_env` with a folder, a wheel and a variable."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import time
import zipfile
from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.cluster.clients import Clients
from benchmarks.cluster.late_nodes import look, print_state, until
from benchmarks.cluster.machines import FRONT, Cluster

_BEFORE_S = 1.0  # under load before a change
_ROOM = "--num-cpus=4"  # two engines
_IDLE_S = 20.0  # until the autoscaler ends an idle node
_SETUP = "from setuptools import setup; setup(name='own-word', version='1.0', py_modules=['own_word'])"
_BUILDER = """
import own_word
from serve_app import app
from serve_app.app_args import AppArgs

def build_app(args: AppArgs):
    print(own_word.WORD)
    return app.build_app(args)
"""


async def machine_killed(cluster: Cluster, model: str | None, seconds: float) -> None:
    clients = await _two_engines(cluster, model)

    async def change() -> dict[str, Any]:
        await asyncio.to_thread(cluster.other.power_off)
        await asyncio.sleep(seconds)
        return {}

    await _under_streams("machine-killed", clients, change)


async def drained(cluster: Cluster, model: str | None, seconds: float) -> None:
    clients = await _two_engines(cluster, model)
    await asyncio.to_thread(cluster.join, cluster.spare, _ROOM)

    async def change() -> dict[str, Any]:
        answers = {"idle": await asyncio.to_thread(cluster.drain, cluster.other, "IDLE_TERMINATION", int(seconds))}
        began = time.monotonic()
        answers["preemption"] = await asyncio.to_thread(cluster.drain, cluster.other, "PREEMPTION", int(seconds))
        moved_s = None
        while time.monotonic() < began + seconds:
            if moved_s is None and not cluster.engines(cluster.other):
                moved_s = round(time.monotonic() - began, 1)
            await asyncio.sleep(0.5)
        left = cluster.engines(cluster.other)
        await asyncio.to_thread(cluster.other.power_off)
        await asyncio.sleep(10)
        return {"answers": answers, "moved_s": moved_s, "engines_at_deadline": len(left)}

    await _under_streams("drained", clients, change)
    print(json.dumps({"log": cluster.logged("from draining node")}), flush=True)


async def upgraded(cluster: Cluster, model: str | None, seconds: float) -> None:
    clients = await _two_engines(cluster, model, drain_timeout_s=120)
    await asyncio.to_thread(cluster.join, cluster.spare, _ROOM)
    before = cluster.engines(cluster.front) + cluster.engines(cluster.other)

    async def change() -> dict[str, Any]:
        began = time.monotonic()
        await asyncio.to_thread(partial(cluster.deploy_two, model, max_num_seqs=33, drain_timeout_s=120))
        await until(cluster, lambda found: found["applications"]["callboard"]["status"] == "RUNNING")
        upgrade_s = round(time.monotonic() - began, 1)
        after = [e for machine in (cluster.front, cluster.other, cluster.spare) for e in cluster.engines(machine)]
        await asyncio.sleep(seconds)
        return {"upgrade_s": upgrade_s, "engines": len(after), "old_engines": len({*before} & {*after})}

    await _under_streams("upgraded", clients, change)


async def autoscaled(cluster: Cluster, model: str | None, seconds: float) -> None:
    cluster.start_autoscaler({"CPU": 1, "front": 1}, {"CPU": 2, "memory": 4e9}, _IDLE_S)
    sleep = {"idle_sleep": f"{seconds:g}s", "max_replicas": 3, "scale_in_delay_s": seconds}
    args = cluster.args(model, num_fronts=1, device="cpu", max_num_seqs=4, **sleep)
    began = time.monotonic()
    application = {"name": "callboard", "args": args, "deployments": [FRONT]}
    await asyncio.to_thread(cluster.deploy, "HeadOnly", application)
    clients = Clients(cluster.url)
    for phase in ("first", "again"):
        await clients.seconds_until_answered(600)
        answered_s = round(time.monotonic() - began, 1)
        print_state(f"autoscaled: {phase} request", look(cluster), answered_s=answered_s)
        await clients.learn()
        async with clients.load() as seen:
            await until(cluster, lambda found: found["nodes"] >= 3)
        out_s = round(time.monotonic() - began - answered_s, 1)
        print_state(f"autoscaled: {phase} load", look(cluster), out_s=out_s, **seen.report())
        began = time.monotonic()
        await until(cluster, lambda found: found["nodes"] == 1)
        print_state(f"autoscaled: {phase} idle", look(cluster), in_s=round(time.monotonic() - began, 1))
        began = time.monotonic()


async def environment(cluster: Cluster, model: str | None, seconds: float) -> None:
    cluster.start_head("--num-cpus=4", '--resources={"front": 1}')
    folder = Path(str(cluster.args(model)["model"])).parent
    archive, wheel = folder / "own.zip", _make_wheel(folder / "wheel")
    with zipfile.ZipFile(archive, "w") as file:
        file.writestr("own_app.py", _BUILDER)
    own = {
        "working_dir": f"file://{archive}",
        "pip": {"packages": [str(wheel)], "pip_install_options": ["--no-index", "--no-deps"]},
        "env_vars": {"OWN_WORD": "reached"},
    }
    args = cluster.args(model, num_fronts=1, device="cpu")
    began = time.monotonic()
    application = {"name": "callboard", "import_path": "own_app:build_app", "runtime_env": own, "args": args}
    await asyncio.to_thread(cluster.deploy, "HeadOnly", application)
    clients = Clients(cluster.url)
    await clients.wait_until_ready(1)
    served_s = round(time.monotonic() - began, 1)
    await clients.learn()
    print_state(
        "environment", look(cluster), served_s=served_s, actors=cluster.environments(("OWN_WORD", "VIRTUAL_ENV"))
    )


CASES = {
    "machine-killed": machine_killed,
    "drained": drained,
    "upgraded": upgraded,
    "autoscaled": autoscaled,
    "environment": environment,
}


async def _two_engines(cluster: Cluster, model: str | None, **settings: object) -> Clients:
    cluster.start(model, **settings)
    clients = Clients(cluster.url)
    await clients.wait_until_ready(2)
    await clients.learn()
    return clients


async def _under_streams(case: str, clients: Clients, change: Callable[[], Awaitable[dict[str, Any]]]) -> None:
    """Print what clients saw during a change."""
    async with clients.load() as seen:
        await asyncio.sleep(_BEFORE_S)
        seen.reset()
        more = await change()
    print(json.dumps({"case": case, **more, **seen.report()}), flush=True)


def _make_wheel(folder: Path) -> Path:
    folder.mkdir()
    (folder / "own_word.py").write_text('WORD = "reached"\n')
    (folder / "setup.py").write_text(_SETUP)
    subprocess.run([sys.executable, "setup.py", "-q", "bdist_wheel"], cwd=folder, check=True)
    return next((folder / "dist").glob("*.whl"))
