"""An application for faults: two engines on two nodes of one Ray, and two fronts behind one HAProxy.

    python -m benchmarks.faults.application FOLDER MODEL FIELD=VALUE...

The process starts its own Ray, with its files in FOLDER, and deploys the application on it. Then it answers one
JSON line on stdin, [METHOD, ARGUMENTS...], with one on stdout. The methods are the methods of `Application`. The
process that causes the faults is outside that Ray, and so does not end with it.
"""

from __future__ import annotations

import json
import os
import socket
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from actors.ray.environment import quiet_port, single_machine
from serve_app.processes.process_tree import Parent, run

NAME, NUM_ENGINES, NUM_FRONTS = "callboard", 2, 2
HEAD_NODE = "node:__internal_head__"  # a resource that Ray gives to it
_CALL_S, _SOON_S = 15.0, 1.0


def engines() -> dict[str, Any]:
    """The living engine actors by id."""
    import ray

    from actors.ray.names import NAMESPACE, engine_id, engines_of, living_actors

    found = {}
    for name in living_actors(engines_of(NAME)):
        with suppress(ValueError):
            found[engine_id(name)] = ray.get_actor(name, NAMESPACE)
    return found


class Application:
    """Questions to the application, and things done to it, through Ray. All answers are JSON."""

    def __init__(self, folder: str, url: str, session: str, node_cpus: int = 2) -> None:
        self.folder, self.url, self.session, self._node_cpus = folder, url, session, node_cpus
        self._nodes: list[Any] = []

    def processes(self) -> list[tuple[str, str, int]]:
        """Role, engine and process id of all that can be killed."""
        from ray.serve.context import _get_global_client

        from actors.ray.haproxy import _pids
        from serve_app.processes.application_processes import processes_of

        found = [(p.role, p.engine, p.pid) for p in processes_of(self.session, NAME)]
        client: Any = _get_global_client()
        controller = client.get_serve_details()["controller_info"]["actor_id"]
        found.append(("controller", "", _pid_of(controller)))
        found += [("haproxy", "", pid) for pid in _pids(self.folder)]
        return found + [("raylet", "", node.all_processes["raylet"][0].process.pid) for node in self._nodes[-1:]]

    def strength(self) -> str:
        """The missing parts: engines, their links to all fronts, and replicas; empty if all are there."""
        import ray
        from ray import serve

        found = engines()
        asked = [call for engine in found.values() for call in (engine.stats.remote(), engine.health.remote())]
        answers, _ = ray.wait(asked, num_returns=len(asked), timeout=_SOON_S) if asked else ([], [])
        num_linked = 0
        for stats, health in zip(asked[::2], asked[1::2], strict=True):
            with suppress(ray.exceptions.RayError):
                if stats in answers and health in answers and ray.get(health) is None:
                    num_linked += ray.get(stats)["connections"] >= NUM_FRONTS
        states = {
            name: deployment.replica_states
            for name, deployment in serve.status().applications[NAME].deployments.items()
        }
        wanted = {"Engine": {"RUNNING": NUM_ENGINES}, "Front": {"RUNNING": NUM_FRONTS}}
        is_whole = num_linked == len(found) == NUM_ENGINES and states == wanted
        return "" if is_whole else f"{num_linked} of {len(found)} engines are linked and healthy; {states}"

    def victim(self) -> str:
        """The id of the engine on the node without fronts, if there is one."""
        import ray

        own, found = ray.get_runtime_context().get_node_id(), engines()
        nodes = {e: ray.get(actor.__ray_call__.remote(_node), timeout=_CALL_S) for e, actor in found.items()}
        return max(nodes, key=lambda engine: nodes[engine] != own)

    def requests_of(self, engine: str) -> list[str]:
        """The ids of the requests that an engine has."""
        import ray

        live = engines()[engine].__ray_call__.remote(
            lambda actor: [s.owner.request_id for s in list(actor._loop.core.scheduler.requests.values())]
        )
        return list(ray.get(live, timeout=_CALL_S))

    def drain(self, engine: str) -> None:
        """As its supervisor does before its end."""
        import ray

        from actors.engine.supervisor import DRAINING

        ray.get(engines()[engine].drain.remote(DRAINING), timeout=_CALL_S)

    def shift_clock(self, engine: str, seconds: float) -> None:
        """Shift `time.time` of an engine's process; the system's clock is shared."""
        import ray

        ray.get(engines()[engine].__ray_call__.remote(_shift_clock, seconds), timeout=_CALL_S)

    def link_through(self, engine: str, port: int) -> int:
        """Make an engine's new links pass through a port of this machine. Returns the port that the engine itself
        listens on."""
        import ray

        return int(ray.get(engines()[engine].__ray_call__.remote(_link_through, port), timeout=_CALL_S))

    def add_node(self) -> None:
        """Add a node with room for one engine."""
        import ray
        from ray._private.node import Node
        from ray._private.parameter import RayParams

        params = RayParams(
            gcs_address=ray.get_runtime_context().gcs_address,
            node_ip_address="127.0.0.1",
            num_cpus=self._node_cpus,
            num_gpus=0,
            object_store_memory=100 << 20,
            min_worker_port=0,
            max_worker_port=0,
            node_manager_port=0,
            include_log_monitor=False,
        )
        self._nodes.append(Node(params, head=False, shutdown_at_exit=False, spawn_reaper=False))

    def gcs(self) -> int:
        """The process of Ray's global control service."""
        from ray._private.worker import _global_node

        node: Any = _global_node
        return int(node.all_processes["gcs_server"][0].process.pid)


def _pid_of(actor_id: str) -> int:
    import ray
    from ray.serve._private.constants import SERVE_CONTROLLER_NAME, SERVE_NAMESPACE

    handle: Any = ray.get_actor(SERVE_CONTROLLER_NAME, SERVE_NAMESPACE)
    assert handle._actor_id.hex() == actor_id
    return int(ray.get(handle.get_pid.remote(), timeout=_CALL_S))


def _node(_: Any) -> str:
    import ray

    return str(ray.get_runtime_context().get_node_id())


def _shift_clock(_: Any, seconds: float) -> None:
    import time

    true = time.time
    time.time = lambda: true() + seconds


def _link_through(actor: Any, port: int) -> int:
    from dataclasses import replace

    links = actor._loop.links
    endpoint = links._listener.invite("127.0.0.1").endpoint
    links.open = lambda *_: replace(links._listener.invite("127.0.0.1"), endpoint=("127.0.0.1", port))
    for connection in list(actor._loop._connections):
        connection.close()
    return int(endpoint[1])


# ---- its life --------------------------------------------------------------------------------------------------------


def deploy(model: str, **args: Any) -> None:
    """Deploy the application, as `serve deploy` does; fronts are on the head node, which survives."""
    from ray.serve.context import _get_global_client
    from ray.serve.schema import ServeDeploySchema

    from actors.ray.placement import FRONT_CPUS

    application = {
        "name": NAME,
        "import_path": "serve_app.app:build_app",
        "args": {"model": model, "served_model_name": "tiny", "num_fronts": NUM_FRONTS, **args},
        "deployments": [
            {"name": "Engine", "num_replicas": NUM_ENGINES},
            {"name": "Front", "ray_actor_options": {"num_cpus": FRONT_CPUS, "resources": {HEAD_NODE: 0.001}}},
        ],
    }
    client: Any = _get_global_client()
    client.deploy_apps(ServeDeploySchema(applications=[application]))


def start(folder: str, model: str, **args: Any) -> Application:
    """Start Ray, Serve and the application; returns when all are ready."""
    from actors.ray import fork_server
    from benchmarks.faults.pace import HOOK
    from serve_app.server.ray_start import WORKERS_MODULES

    hook = "__RAY_WORKER_PROCESS_SETUP_HOOK_ENV_VAR"
    os.environ.update(single_machine(folder) | {hook: HOOK, "RAY_TMPDIR": folder, "TMPDIR": folder})
    sys.executable, own = fork_server.start(folder, WORKERS_MODULES), sys.executable
    import ray
    from ray import serve

    cpus = 1 + args.get("tensor_parallel_size", 1)  # room for one engine; the head node also has the fronts
    context: Any = ray.init(
        "local", num_cpus=cpus + 1, include_dashboard=False, log_to_driver=False, object_store_memory=100 << 20
    )
    sys.executable = own
    port = quiet_port()
    http = {"host": "127.0.0.1", "port": port, "location": "HeadOnly"}
    serve.start(http_options=http, logging_config={"enable_access_log": False})
    found = Application(folder, f"http://127.0.0.1:{port}", context.address_info["session_dir"], cpus)
    found.add_node()
    deploy(model, **args)
    end = time.monotonic() + 120
    while missing := found.strength():
        if time.monotonic() > end:
            raise TimeoutError(missing)
        time.sleep(0.1)
    return found


def main() -> None:
    with suppress(KeyboardInterrupt):
        run(_live)  # that Ray's processes end, however this one ends


def _live(_: Parent) -> None:
    _, folder, model, *fields = sys.argv
    answers = os.fdopen(os.dup(1), "w")
    log = os.open(Path(folder, "application.log"), os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(log, 1)
    os.dup2(log, 2)
    socket.setdefaulttimeout(60)
    args = {name: json.loads(value) for name, _, value in (field.partition("=") for field in fields)}
    application = start(folder, model, **args)
    print(json.dumps({"url": application.url, "session": application.session}), file=answers, flush=True)
    for line in sys.stdin:
        threading.Thread(target=_answer, args=(application, line, answers), daemon=True).start()


def _answer(application: Application, line: str, answers: Any) -> None:
    number, method, *arguments = json.loads(line)
    try:
        answer = {"number": number, "result": getattr(application, method)(*arguments)}
    except Exception as e:
        answer = {"number": number, "error": f"{type(e).__name__}: {e}"[:500]}
    print(json.dumps(answer), file=answers, flush=True)


if __name__ == "__main__":
    main()
