"""`callboard serve` as its user sees it, from start to end: its output, the answers of its port, and the files and
processes it leaves. Real processes with a tiny model."""

import contextlib
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest

from tests.support.processes.gate import GATE, HOOK
from tests.support.processes.inspection import listening_ports
from tests.support.processes.serve_command import START_S, STOP_S, Server

ROOT = Path(__file__).parents[2]
PHASES = ["model checked", "Ray started", "front door open", "libraries imported", "weights", "memory plan", "ready"]


class Watch(threading.Thread):
    """Asks the server for three paths all the time, and keeps every kind of answer with the output at that time."""

    def __init__(self, server: Server) -> None:
        super().__init__(daemon=True)
        self._server, self.seen, self.faults, self.resets = server, [], [], []
        self.start()

    def run(self) -> None:
        while self._server.process.poll() is None:
            for path in ("/ready", "/health", "/v1/models"):
                self.seen.append((path, self._ask(path), len(self._server.output())))
            time.sleep(0.05)  # a request takes this process 10 ms of a core

    def _ask(self, path: str) -> httpx.Response | None:
        """The answer, or None if the port is closed."""
        try:
            # Certificates are not read, which would take a core's time from the server at this pace.
            return httpx.get(f"http://127.0.0.1:{self._server.port}{path}", timeout=60, verify=False)
        except httpx.ConnectError:
            return None
        except httpx.ReadError as e:  # a connection that was not accepted when the port was closed
            self.resets.append((path, repr(e), self._server.output()[-1:]))
            return None
        except httpx.TransportError as e:
            self.faults.append((path, repr(e), self._server.output()[-1:]))
            return None


def test_a_server_from_start_to_stop(start):
    server = start()
    watch = Watch(server)
    server.wait_for("curl -N")
    ports = {port for pid in server.pids() for port in listening_ports(pid)}
    assert {address for address, _ in ports if not address.startswith("127.")} == set()
    engine = server.pid_of("ray::Callboard:callboard:engine")
    assert os.getpriority(os.PRIO_PROCESS, engine) == os.getpriority(os.PRIO_PROCESS, server.process.pid)
    os.kill(server.pid_of("actors.ray.fork_server\0serve"), signal.SIGKILL)  # all of its forks exist already
    os.kill(engine, signal.SIGKILL)  # Ray writes a paragraph on that
    deadline = time.monotonic() + START_S
    while not (watch.seen[-1][1] is not None and watch.seen[-1][1].status_code == 503):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    server.process.send_signal(signal.SIGTERM)
    assert server.wait(STOP_S) == 0
    watch.join()
    assert watch.faults == []
    assert len(watch.resets) <= 1, watch.resets

    output = [line for line in server.output() if " request id=" not in line]
    assert any(" path=/v1/models status=200 " in line for line in server.output())
    times = [re.match(r" +([\d.]+) s  (.*)", line) for line in output]
    phases = [found[2] for found in times if found]
    assert [next(p for p in phases if p.startswith(name)) for name in PHASES] == [
        p for p in phases if p.startswith(tuple(PHASES))
    ]
    seconds = [float(found[1]) for found in times if found]
    assert seconds == sorted(seconds)
    others = [line for line, found in zip(output, times, strict=True) if not found and not line.startswith("  ")]
    assert [line.split()[0] for line in others] == ["Callboard", "Chat:", "curl", "Each", "Tools:", "Stopping;"], others

    # Each phase is reported when it ends, on the console and by the port, which answers from the first phase on.
    answers = [(path, answer, lines) for path, answer, lines in watch.seen if answer is not None]
    assert answers[0][2] <= 1
    told = {found[1] for _, answer, _ in answers if (found := re.search(r"is starting \((.*?)\)", answer.text))}
    assert told >= {"model checked", "Ray started"}
    for path, answer, _ in answers:
        assert answer.status_code in (200, 503), (path, answer.text)
        if answer.status_code == 503:
            assert set(answer.json()["error"]) == {"message", "type", "param", "code"}, (path, answer.text)
            assert answer.headers["retry-after"].isdecimal()
    is_open = [answer is not None for _, answer, _ in watch.seen]
    assert is_open == sorted(is_open[: is_open.index(True) + sum(is_open)]) + [False] * is_open[::-1].index(True)
    assert {a.status_code for p, a, _ in answers if p == "/v1/models"} == {200, 503}


@pytest.mark.one_in(3)
@pytest.mark.parametrize("phase", ["model checked", "Ray started", "front door open"])
def test_sigterm_during_the_start(start, phase):
    server = start()
    server.wait_for(phase)
    server.process.send_signal(signal.SIGTERM)
    assert server.wait(STOP_S) == 1
    *phases, end = server.output()
    assert all(re.match(r" +[\d.]+ s  ", line) for line in phases)
    assert end == "callboard: interrupted"


@pytest.mark.thorough
def test_a_stop_does_not_wait_for_an_unneeded_engine(start, tmp_path: Path):
    """An application that was scaled to zero loads its model again. A request that waits for it gets the error that the
    server stops."""
    gate = tmp_path / "gate"
    gate.touch()
    scaling = "--idle-sleep", "500ms", "--drain-timeout-s", "100"
    server = start(*scaling, **{GATE: str(gate), "__RAY_WORKER_PROCESS_SETUP_HOOK_ENV_VAR": HOOK})
    server.wait_for("curl -N")
    with httpx.Client(base_url=f"http://127.0.0.1:{server.port}", timeout=100) as client, ThreadPoolExecutor() as pool:
        deadline = time.monotonic() + START_S
        while "scaled to zero" not in client.get("/ready").text:
            assert time.monotonic() < deadline
            time.sleep(0.05)
        gate.unlink()
        body = {"model": "tiny", "prompt": "a", "stream": True}
        answer = pool.submit(client.post, "/v1/completions", json=body)
        while not any(
            "ray::Callboard:callboard:runner" in Path(f"/proc/{pid}/cmdline").read_text() for pid in server.pids()
        ):
            assert time.monotonic() < deadline
            time.sleep(0.01)
        server.process.send_signal(signal.SIGTERM)
        assert server.wait(STOP_S) == 0
        assert answer.result().status_code == 503
        assert "shutting down" in answer.result().json()["error"]["message"]


@pytest.mark.thorough
def test_too_little_memory(start):
    server = start("--num-kv-blocks", "1000000000")
    assert server.wait(START_S) == 1
    assert server.output()[-1].startswith("callboard: Too little memory; lower --num-kv-blocks")
    assert sum("callboard: " in line for line in server.output()) == 1


@pytest.mark.thorough
def test_ray_dies_at_the_start(start):
    server = start()
    server.wait_for("Ray started")
    os.kill(server.pid_of("raylet/raylet"), signal.SIGKILL)
    assert server.wait(START_S) == 1
    *phases, end = server.output()
    assert all(re.match(r" +[\d.]+ s  ", line) for line in phases)
    assert end.startswith("callboard: The server's process ended by itself (its raylet ended); see /")


# Sends the requests of Ray and Serve to every port, as a user without rights, with a pickle that leaves a file.
STRANGER = """
import os, pickle, sys
from concurrent.futures import ThreadPoolExecutor
import grpc
from ray.serve.generated.serve_pb2 import ASGIRequest

ports, path, token = sys.argv[1].split(","), sys.argv[2], sys.argv[3]
os.setgid(65534)
os.setuid(65534)
metadata = [("authorization", f"Bearer {token}")] if token else []

class Evil:
    def __reduce__(self):
        return os.system, (f"id -u > {path}",)

CALLS = {
    "/ray.serve.ASGIService/HandleRequestWithRejection":
        ASGIRequest(pickled_request_metadata=pickle.dumps(Evil())).SerializeToString(),
    "/ray.rpc.JobInfoGcsService/GetAllJobInfo": b"",
    "/ray.rpc.NodeManagerService/GetNodeStats": b"",
    "/ray.rpc.CoreWorkerService/GetCoreWorkerStats": b"",
}

def ask(call):
    port, method = call
    with grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
        try:
            channel.unary_unary(method)(CALLS[method], timeout=20, metadata=metadata)
            return f"{method} OK"
        except grpc.RpcError as e:
            return f"{method} {e.code().name}"

# Ports of other protocols do not answer. All calls wait for them at the same time.
calls = [(port, method) for port in ports for method in CALLS]
with ThreadPoolExecutor(len(calls)) as pool:
    print(*pool.map(ask, calls), sep="\\n")
"""


@pytest.mark.thorough
def test_a_raylet_that_ends_at_the_start_is_replaced(start):
    """As one does that finds its port taken."""
    server, killed = start(), 0
    while not killed:
        for pid in server.pids():
            with contextlib.suppress(OSError):
                if Path(f"/proc/{pid}/comm").read_text().strip() == "raylet":
                    os.kill(pid, signal.SIGKILL)
                    killed = pid
    server.wait_for("curl -N")
    assert server.pid_of("/raylet ") != killed


@pytest.mark.skipif(os.getuid() != 0, reason="only root can become another user")
@pytest.mark.thorough
def test_other_users_of_the_machine_run_nothing(start, tmp_path: Path):
    # by chance the port of Serve's own proxy, which finds another
    with socket.create_server(("127.0.0.1", 0)) as taken:
        server = start(RAY_SERVE_FALLBACK_PROXY_HTTP_PORT=str(taken.getsockname()[1]))
        server.wait_for("curl -N")
    ports = sorted({str(port) for pid in server.pids() for _, port in listening_ports(pid)})
    environment = Path(f"/proc/{server.pid_of('ray::ServeReplica:callboard:Front')}/environ").read_bytes()
    (token,) = re.findall(rb"\0RAY_AUTH_TOKEN=(\w+)\0", environment)
    with tempfile.TemporaryDirectory() as folder:
        proof = Path(folder, "proof")

        def ask(token: str) -> str:
            command = [sys.executable, "-c", STRANGER, ",".join(ports), str(proof), token]
            done = subprocess.run(command, capture_output=True, text=True, timeout=600, cwd=ROOT)
            assert done.returncode == 0, done.stderr
            return done.stdout

        refused = ask("")
        assert not proof.exists()
        assert " OK" not in refused
        assert {line.split()[0] for line in refused.splitlines() if "UNAUTHENTICATED" in line} == {
            "/ray.serve.ASGIService/HandleRequestWithRejection",
            "/ray.rpc.JobInfoGcsService/GetAllJobInfo",
            "/ray.rpc.NodeManagerService/GetNodeStats",
            "/ray.rpc.CoreWorkerService/GetCoreWorkerStats",
        }
        assert "/ray.rpc.JobInfoGcsService/GetAllJobInfo OK" in ask(token.decode())
        assert proof.read_text() == "0\n", "with the token the same call runs code: it is the token that holds it off"
    assert not (tmp_path / ".ray").exists(), "a token of its own is in no file"
