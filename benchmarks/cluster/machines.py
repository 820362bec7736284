"""Ray, Serve and Callboard on three machines of one's own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from actors.environment import CLUSTER, haproxy_files, ray_token
from actors.haproxy import COMMAND, write_command
from benchmarks.cluster.network import Machine
from tests.support.tiny_gguf import write_tiny_gguf

PORT = 8000
_HEAD = ["--port=6379", "--num-cpus=0", "--include-dashboard=false", "--no-monitor"]
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


class Cluster:
    """The machines, and the processes on them."""

    def __init__(self, folder: str, settings: dict[str, str]) -> None:
        self._folder, own = Path(folder), Path(folder, "own")
        inherited = {name: value for name, value in os.environ.items() if "RAY_" not in name}
        places = {"RAY_TMPDIR": str(own), "HOME": str(own), **haproxy_files(str(own))}
        command = {COMMAND: write_command(folder)}
        self._environment = {**inherited, **CLUSTER, **places, **command, **ray_token(), **settings}
        self.head, self.front, self.other = (Machine(number, own) for number in (1, 2, 3))
        self.url = f"http://{self.front.address}:{PORT}"

    def start(self, model: str | None) -> None:
        """Returns when Serve has been told what to start."""
        gcs = f"{self.head.address}:6379"
        self._ray_start(self.head, "--head", *_HEAD).check()
        workers = [
            self._ray_start(self.front, f"--address={gcs}", "--num-cpus=2", '--resources={"front": 1}'),
            self._ray_start(self.other, f"--address={gcs}", "--num-cpus=2"),
        ]
        for worker in workers:
            worker.check()
        path = model or str(write_tiny_gguf(self._folder / "tiny.gguf", llama__context_length=16384))
        config = {
            "proxy_location": "EveryNode",
            "http_options": {"host": "0.0.0.0", "port": PORT},
            "logging_config": {"enable_access_log": False},
            "applications": [
                {
                    "name": "callboard",
                    "import_path": "serve_app.app:build_app",
                    "args": {
                        "model": path, "served_model_name": "model", "num_replicas": 2, "num_fronts": 1,
                        "deterministic": True, "num_threads": 1, "kv_cache_memory": 0.1, "device": "cpu",
                    },
                    "deployments": [
                        {"name": "Front", "ray_actor_options": {"num_cpus": 0.5, "resources": {"front": 0.5}}}
                    ],
                }
            ],
        }  # fmt: skip
        _Started(self.front.command(sys.executable, "-c", _DEPLOY, gcs, json.dumps(config)), self._environment).check()

    def _ray_start(self, machine: Machine, *options: str) -> _Started:
        fixed = [f"--node-ip-address={machine.address}", "--object-store-memory=104857600"]
        fixed += ["--disable-usage-stats", "--include-log-monitor=false"]
        command = [sys.executable, "-m", "ray.scripts.scripts", "start", *fixed, *options]
        return _Started(machine.command(*command), self._environment)

    def signal_gcs(self, number: int) -> None:
        """Send a signal to Ray's GCS."""
        for folder in Path("/proc").glob("[0-9]*"):
            if (folder / "comm").read_text().startswith("gcs_server"):
                os.kill(int(folder.name), number)


class _Started:
    """A command that runs; what it says is shown only if it fails."""

    def __init__(self, command: list[str], environment: dict[str, str]) -> None:
        self._process = subprocess.Popen(
            command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )

    def check(self) -> None:
        said, _ = self._process.communicate()
        if self._process.returncode:
            sys.exit(f"{said}\nA machine of the cluster did not start.")
