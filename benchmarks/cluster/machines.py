"""Ray, Serve and Callboard on two or three private machines."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

import yaml
from ray.autoscaler._private.fake_multi_node.node_provider import FAKE_HEAD_NODE_ID

from actors.ray.environment import CLUSTER, haproxy_files, ray_token
from actors.ray.haproxy import COMMAND, write_command
from benchmarks.cluster.network import HOST, Machine
from tests.support.models.tiny_gguf import write_tiny_gguf

_ROOT = Path(__file__).parents[2]
PORT = 8000
_REDIS_PORT = 6390
_HEAD = ["--head", "--port=6379", "--include-dashboard=false", "--no-monitor"]
_RAY = [sys.executable, "-m", "ray.scripts.scripts", "start"]
_NO_CPUS, _ENGINE = ["--num-cpus=0"], ["--num-cpus=2"]
_FRONT = ["--num-cpus=3", '--resources={"front": 1}']  # room for another front in an update, not for another engine
FRONT = {"name": "Front", "ray_actor_options": {"num_cpus": 0.5, "resources": {"front": 0.5}}}
_ENGINE_TITLE = "ray::Callboard:callboard:engine:"
_COMMANDS = (  # of a cluster file; the fake provider runs none
    "initialization_commands", "setup_commands", "head_setup_commands", "worker_setup_commands",
    "head_start_ray_commands", "worker_start_ray_commands", "cluster_synced_files", "rsync_exclude", "rsync_filter",
)  # fmt: skip
_HEAD_TYPE = "ray.head.default"
# A raylet ends if its agents take 15 s to write their ports, as on busy cores. It looks for one of the fixed ones, too.
_AGENTS = ["--metrics-export-port=20001", "--runtime-env-agent-port=20002", "--dashboard-agent-grpc-port=20003"]
_AGENT_PORT = 52365
_QUICK = {  # as `callboard serve` has it: workers when they are needed, no lower than all else that the machine does
    "RAY_enable_worker_prestart": "0",
    "RAY_prestart_worker_first_driver": "0",
    "RAY_worker_niceness": "0",
    "RAY_raylet_start_wait_time_s": "240",  # where all machines share a few busy cores
}
_DEPLOY = """
import json, sys
import ray
from ray import serve
from ray.serve.context import _get_global_client
from ray.serve.schema import ServeDeploySchema
ray.init(address=sys.argv[1], namespace="serve", log_to_driver=False)
config = json.loads(sys.argv[2])
serve.start(**{name: config[name] for name in ("proxy_location", "http_options", "logging_config")})
_get_global_client().deploy_apps(ServeDeploySchema(**config))
"""
_NODE = """
import sys
import ray
ray.init(address=sys.argv[1], log_to_driver=False)
nodes = {node["NodeManagerAddress"]: node["NodeID"] for node in ray.nodes() if node["Alive"]}
print("\\n" + nodes[sys.argv[2]])
"""


class Cluster:
    """The machines, and the processes on them: a front with an engine, another engine, and the head, alone or with the
    front."""

    def __init__(self, folder: str, settings: dict[str, str], *, has_head_apart: bool, has_redis: bool) -> None:
        self._folder, own = Path(folder), Path(folder, "own")
        inherited = {
            name: value for name, value in os.environ.items() if "RAY_" not in name and name != "CUDA_VISIBLE_DEVICES"
        }
        places = {"RAY_TMPDIR": str(own), "HOME": str(own), **haproxy_files(str(own))}
        command = {COMMAND: write_command(folder)}
        self._environment = {**inherited, **CLUSTER, **_QUICK, **places, **command, **ray_token(), **settings}
        if has_redis:  # in which the GCS stores its state
            self._environment["RAY_REDIS_ADDRESS"] = f"{HOST}:{_REDIS_PORT}"
            redis = ["redis-server", "--bind", HOST, "--port", str(_REDIS_PORT), "--protected-mode", "no", "--save", ""]
            subprocess.Popen(redis, stdout=subprocess.DEVNULL)
        self.front, self.other, self.spare = Machine(2, own), Machine(3, own), Machine(4, own)
        self.head = Machine(1, own) if has_head_apart else self.front
        threading.Thread(target=self._write_agent_ports, daemon=True).start()
        self.hook_s: float | None = None  # duration of a pod's hook; None before its end
        self.url = f"http://{self.front.address}:{PORT}"

    def _write_agent_ports(self) -> None:
        while True:
            for machine in (self.head, self.front, self.other, self.spare):
                for log in machine.folder.glob("ray/session_2*/logs/raylet.out"):
                    for node in re.findall(r"Initializing NodeManager node_id=(\w+)", _read(log)):
                        path = log.parents[1] / f"dashboard_agent_listen_port_{node}"
                        if not path.exists():
                            path.write_text(str(_AGENT_PORT))
            time.sleep(0.5)

    def start(self, model: str | None, **settings: object) -> None:
        """Returns when Serve has accepted the application."""
        is_apart = self.head is not self.front
        self.start_head(*(_NO_CPUS if is_apart else _FRONT))
        nodes = [(self.other, _ENGINE), *([(self.front, _FRONT)] if is_apart else [])]
        for started in [self._ray_start(machine, *self._joined, *options) for machine, options in nodes]:
            started.check()
        self.deploy_two(model, **settings)

    def deploy_two(self, model: str | None, **settings: object) -> None:
        """Returns when Serve has accepted two engines and a front, with other arguments than before."""
        args = self.args(model, num_replicas=2, num_fronts=1, device="cpu", **settings)
        application = {"name": "callboard", "args": args, "deployments": [FRONT]}
        self.deploy("HeadOnly" if self.head is self.front else "EveryNode", application)

    def start_head(self, *options: str) -> None:
        """Start Ray on the head, by default one that computes nothing."""
        self._ray_start(self.head, *_HEAD, *(options or _NO_CPUS)).check()

    def start_autoscaler(self, head: dict[str, float], worker: dict[str, float], idle_s: float) -> None:
        """Start Ray on the head with its autoscaler, which starts raylets of Ray's fake provider there."""
        # Ray finds its own address by a route to the outside.
        subprocess.run([*self.head.command("ip"), "route", "add", "default", "via", HOST], check=True)
        types = {_HEAD_TYPE: (head, 0), "worker": (worker, 3)}
        config = {
            "cluster_name": "fake", "max_workers": 3, "idle_timeout_minutes": idle_s / 60, "head_node_type": _HEAD_TYPE,
            "provider": {
                "type": "external", "module": "benchmarks.cluster.fake_nodes.FakeNodes", "gcs_address": self._gcs,
                "launch_multiple": True, "use_node_id_as_ip": True, "disable_node_updaters": True,
                "disable_launch_config_check": True, "head_node_id": FAKE_HEAD_NODE_ID,
            },
            "available_node_types": {
                name: {"resources": resources, "node_config": {}, "min_workers": 0, "max_workers": most}
                for name, (resources, most) in types.items()
            },
            "auth": {}, "docker": {}, "file_mounts": {}, **{name: [] for name in _COMMANDS},
        }  # fmt: skip
        path = self._folder / "autoscaler.json"
        path.write_text(json.dumps(config))
        own = {
            "RAY_FAKE_CLUSTER": "1",
            "RAY_enable_autoscaler_v2": "1",
            "AUTOSCALER_UPDATE_INTERVAL_S": "1",
            "PYTHONPATH": str(_ROOT),
        }
        ids = dict.fromkeys(("RAY_CLOUD_INSTANCE_ID", "RAY_OVERRIDE_NODE_ID_FOR_TESTING"), FAKE_HEAD_NODE_ID)
        num_cpus, others = head.get("CPU", 0), {name: amount for name, amount in head.items() if name != "CPU"}
        options = *_HEAD[:-1], f"--autoscaling-config={path}", f"--num-cpus={num_cpus:g}"
        command = self._ray_command(self.head, *options, f"--resources={json.dumps(others)}")
        _Started(command, self._environment | own | ids).check()

    def join(self, machine: Machine, *options: str) -> None:
        """Start Ray on another machine."""
        self._ray_start(machine, *self._joined, *options).check()

    def args(self, model: str | None, **settings: object) -> dict[str, object]:
        """Return the arguments of an application."""
        path = model or str(write_tiny_gguf(self._folder / "tiny.gguf", llama__context_length=16384))
        own = {"model": path, "served_model_name": "model", "deterministic": True, "num_threads": 1}
        return {**own, "kv_cache_memory": 0.1, **settings}

    def deploy(self, proxy_location: str, *applications: Mapping[str, object]) -> None:
        """Returns when Serve has accepted the applications."""
        config = {
            "proxy_location": proxy_location,
            "http_options": {"host": "0.0.0.0", "port": PORT},
            "logging_config": {"enable_access_log": False},
            "applications": [{"import_path": "serve_app.app:build_app", **each} for each in applications],
        }
        self.python(_DEPLOY, json.dumps(config))

    def drain(self, machine: Machine, reason: str, deadline_s: int) -> str:
        """Drain a machine's node. Returns the last line of Ray's answer, which is empty if the node drains."""
        found = self.python(_NODE, machine.address).split()[-1]
        command = [*_RAY[:-1], "drain-node", "--address", self._gcs, "--node-id", found, "--reason-message", "test"]
        options = ["--reason", f"DRAIN_NODE_REASON_{reason}", "--deadline-remaining-seconds", str(deadline_s)]
        done = subprocess.run(self.head.command(*command, *options), env=self._environment, capture_output=True)
        return done.stderr.decode().strip().rpartition("\n")[2] if done.returncode else ""

    def python(self, program: str, *arguments: str) -> str:
        """Run a program of Python on the head, with the GCS's address as its first argument. Returns its output."""
        command = self.head.command(sys.executable, "-c", program, self._gcs, *arguments)
        return _Started(command, self._environment).check()

    def logged(self, pattern: str) -> list[str]:
        """Return the lines with this text in the logs of Serve on the head."""
        logs = self.head.folder.glob("ray/session_2*/logs/serve/*.log")
        return [line for path in logs for line in path.read_text().splitlines() if pattern in line]

    @property
    def _gcs(self) -> str:
        return f"{self.head.address}:6379"

    @property
    def _joined(self) -> list[str]:
        return [f"--address={self._gcs}"]

    def restart_head(self) -> None:
        """Start Ray anew on a head of its own after its processes were killed; returns at once. It must not see the
        processes of the other machines, as `ray start` would take theirs for its own."""
        blind = ["unshare", "--pid", "--fork", "--mount-proc"]
        command = self.head.command(*blind, *_RAY, *self._options(self.head), *_HEAD, *_NO_CPUS, "--block")
        subprocess.Popen(command, env=self._environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)

    def end_pod(self, deadline_s: int) -> None:
        """End the other machine as Kubernetes ends a worker's pod: run its hook, then kill the machine."""
        service = yaml.safe_load((_ROOT / "docs/deploy/kubernetes/gpu/rayservice.yaml").read_text())
        pod = service["spec"]["rayClusterConfig"]["workerGroupSpecs"][0]["template"]["spec"]
        *shell, hook = pod["containers"][0]["lifecycle"]["preStop"]["exec"]["command"]
        hook = re.sub(r"(?<=--deadline-remaining-seconds )\d+", str(deadline_s), hook)
        path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
        environment = self._environment | {"RAY_ADDRESS": f"{self.head.address}:6379", "PATH": path}

        def run() -> None:
            began = time.monotonic()
            subprocess.run(self.other.command(*shell, hook), env=environment, capture_output=True, check=True)
            self.hook_s = round(time.monotonic() - began, 1)
            self.other.kill()

        threading.Thread(target=run, daemon=True).start()

    def engines(self, machine: Machine) -> list[str]:
        """The process numbers of the engines on a machine."""
        return [folder.name for folder in machine.processes() if _ENGINE_TITLE in _read(folder / "cmdline")]

    def environments(self, names: tuple[str, ...]) -> dict[str, dict[str, str]]:
        """Return these variables of each process of the application on the front's machine, by title."""
        found = {}
        for folder in self.front.processes():
            title = _read(folder / "cmdline").strip("\0")
            if title.startswith("ray::") and "callboard" in title:
                pairs = [pair.partition("=") for pair in _read(folder / "environ").split("\0")]
                found[title] = {name: value for name, _, value in pairs if name in names}
        return found

    def kill_front(self) -> None:
        """Kill the front's process."""
        self._signal("ray::ServeReplica:callboard:Front", signal.SIGKILL)

    def _ray_start(self, machine: Machine, *options: str) -> _Started:
        return _Started(self._ray_command(machine, *options), self._environment)

    def _ray_command(self, machine: Machine, *options: str) -> list[str]:
        return machine.command(*_RAY, *self._options(machine), *options)

    def _options(self, machine: Machine) -> list[str]:
        fixed = [f"--node-ip-address={machine.address}", "--object-store-memory=104857600"]
        return [*fixed, *_AGENTS, "--disable-usage-stats", "--include-log-monitor=false"]

    def cpu_s(self) -> float:
        """The time of a core that all processes have taken, ended ones included."""
        stats = [path.read_text().rpartition(")")[2].split() for path in Path("/proc").glob("[0-9]*/stat")]
        return sum(int(ticks) for stat in stats for ticks in stat[11:15]) / os.sysconf("SC_CLK_TCK")

    def signal_gcs(self, number: int) -> None:
        """Send a signal to Ray's GCS."""
        self._signal("gcs_server", number)

    def _signal(self, name: str, number: int) -> None:
        """Send a signal to the processes with a program file that begins with this name."""
        for folder in Path("/proc").glob("[0-9]*"):
            with suppress(OSError):  # it has just ended
                program = (folder / "cmdline").read_bytes().split(b"\0")[0].decode(errors="replace")
                if program.rpartition("/")[2].startswith(name):
                    os.kill(int(folder.name), number)


def _read(path: Path) -> str:
    with suppress(OSError):  # the process has just ended
        return path.read_text(errors="replace")
    return ""


class _Started:
    """A running command. Its output is shown only if it fails."""

    def __init__(self, command: list[str], environment: dict[str, str]) -> None:
        self._process = subprocess.Popen(
            command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )

    def check(self) -> str:
        said, _ = self._process.communicate()
        if self._process.returncode:
            sys.exit(f"{said}\nA machine of the cluster did not start.")
        return said
