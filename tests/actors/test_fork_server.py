"""The command that Ray uses as its Python: workers are forks of one process, and behave like started ones."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from actors.ray import fork_server
from serve_app.server.ray_start import WORKERS_MODULES

pytestmark = pytest.mark.long

WORKER = """
import json, os, sys, time
from ray._raylet import UniqueID
is_fork = os.getppid() == int(os.environ["SERVER"])
print(json.dumps([sys.argv[1:], os.getcwd(), os.environ.get("MARK"), __name__, is_fork,
    "preloaded" in sys.modules, UniqueID.from_random().hex(), sys.stdin.readline()]), flush=True)
time.sleep(float(sys.argv[1]))
sys.exit(7)
"""
IS_FORK, IS_PRELOADED = 4, 5


class Python:
    """The command, and a script that Ray could run with it."""

    def __init__(self, folder: Path, modules: list[str]) -> None:
        self.worker = folder / "ray/_private/workers/default_worker.py"
        self.worker.parent.mkdir(parents=True)
        self.worker.write_text(WORKER)
        self._folder = folder
        before = children()
        self.command = fork_server.start(str(folder), modules)
        (self.server,) = children() - before

    def start(self, seconds: float, script: Path | None = None, **environment: str) -> subprocess.Popen:
        program = [self.command, "-u", str(script or self.worker), str(seconds), str(self.worker)]
        environment = os.environ | {"MARK": "mine", "SERVER": str(self.server), "RAY_JOB_ID": "01000000"} | environment
        return subprocess.Popen(program, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
                                env=environment, cwd=self._folder)  # fmt: skip

    def run(self, script: Path | None = None, **environment: str) -> list:
        process = self.start(0, script, **environment)
        out, _ = process.communicate("hello\n", timeout=600)
        assert process.returncode == 7
        return json.loads(out)


def children() -> set[int]:
    return {int(pid) for pid in Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()}


@pytest.fixture
def python(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Python]:
    (tmp_path / "preloaded.py").write_text("")
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{Path(__file__).parents[2]}")
    started = Python(tmp_path, ["preloaded"])
    yield started
    with suppress(ProcessLookupError, ChildProcessError):  # the test has ended it
        os.kill(started.server, signal.SIGKILL)
        os.waitpid(started.server, 0)


def test_a_forked_worker_equals_a_started_one(python: Python, tmp_path: Path):
    arguments, directory, mark, name, is_fork, _, first_id, read = python.run()
    assert (arguments, directory, mark, name, read) == (
        ["0", str(python.worker)],
        str(tmp_path),
        "mine",
        "__main__",
        "hello\n",
    )
    assert is_fork
    assert python.run(MARK="other")[2] == "other"
    assert python.run()[6] != first_id, "Ray's ids are drawn by each fork itself"
    end = time.monotonic() + 60
    while not python.run()[IS_PRELOADED]:  # the first may arrive before all modules are imported
        assert time.monotonic() < end


@pytest.mark.rotated
def test_other_commands_start_their_own_python(python: Python, tmp_path: Path):
    other = tmp_path / "agent.py"
    other.write_text(WORKER)
    assert not python.run(other)[IS_FORK], "a daemon, or what sets up a worker's environment and gets its path too"
    assert not python.run(RAY_JOB_ID="02000000")[IS_FORK]
    assert not python.run(RAY_SERVE_FALLBACK_PROXY_HTTP_PORT="1")[IS_FORK]
    assert python.run(RAY_JOB_ID="ffffffff")[IS_FORK], "a worker that is started before it is needed"


def test_an_agent_is_known_before_it_starts(python: Python, tmp_path: Path):
    """A raylet aborts 15 s after it began to wait for these files, and an agent imports for seconds."""
    gate = tmp_path / "gate"
    os.mkfifo(gate)
    for agent, files in fork_server._AGENTS.items():
        script = tmp_path / agent[1:]
        script.parent.mkdir(parents=True, exist_ok=True)
        script.write_text(f"import sys\nopen({str(gate)!r}).read()\nprint(*sys.argv[1:])")
        options = [f"--session-dir={tmp_path}", "--node-id=0a", *(f"--{option}=0" for option in files)]
        agent = subprocess.Popen([python.command, "-u", str(script), *options], stdout=subprocess.PIPE, text=True)
        paths = [tmp_path / f"{file}_0a" for file in files.values()]
        end = time.monotonic() + 60
        while not all(path.exists() for path in paths):
            assert time.monotonic() < end
            time.sleep(0.01)
        gate.write_text("")  # the agent waits until here
        words = agent.communicate(timeout=600)[0].split()
        assert words[-len(files) :] == [
            f"--{option}={path.read_text()}" for option, path in zip(files, paths, strict=True)
        ]


def test_workers_start_without_the_fork_server(python: Python):
    os.kill(python.server, signal.SIGSTOP)
    waiting = python.start(0)
    time.sleep(0.5)
    os.kill(python.server, signal.SIGKILL)
    out, _ = waiting.communicate("hello\n", timeout=600)
    assert not json.loads(out)[IS_FORK]
    assert not python.run()[IS_FORK]


def test_a_command_that_ends_unanswered_leaves_the_server(python: Python, tmp_path: Path):
    """Ray gives up a worker that starts late. The fork that was on its way ends, too."""
    os.kill(python.server, signal.SIGSTOP)
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as command:
        command.connect(str(tmp_path / "fork-server"))
        environment = os.environ | {"SERVER": str(python.server), "RAY_JOB_ID": "01000000"}
        socket.send_fds(command, [json.dumps([[str(python.worker), "60"], "/", environment]).encode()], [0, 1, 2])
    os.kill(python.server, signal.SIGCONT)
    assert python.run()[IS_FORK]
    end = time.monotonic() + 60
    while Path(f"/proc/{python.server}/task/{python.server}/children").read_text():
        assert time.monotonic() < end
        time.sleep(0.01)


def test_command_and_fork_end_together(python: Python):
    command = python.start(60)
    command.stdin.write("\n")
    command.stdin.flush()
    assert json.loads(command.stdout.readline())[IS_FORK]
    (fork,) = map(int, Path(f"/proc/{python.server}/task/{python.server}/children").read_text().split())
    command.kill()
    end = time.monotonic() + 60
    while Path(f"/proc/{fork}").exists():
        assert time.monotonic() < end
        time.sleep(0.01)
    second = python.start(60)
    second.stdin.write("\n")
    second.stdin.flush()
    second.stdout.readline()
    (fork,) = map(int, Path(f"/proc/{python.server}/task/{python.server}/children").read_text().split())
    os.kill(fork, signal.SIGTERM)
    assert second.wait(60) == 241  # -15


def test_worker_modules_are_safe_to_fork():
    """Forks inherit no state that must not be used twice, such as Ray's random generator or a CUDA context, and no
    threads. OpenBLAS and jemalloc restart their threads in a fork."""
    code = f"""
import importlib, os, socket
from actors.ray import fork_server
fork_server._ForkServer.serve = lambda self, modules: [importlib.import_module(module) for module in modules]
fork_server._serve(socket.socketpair()[0], {WORKERS_MODULES!r})
from ray._raylet import UniqueID
import torch
threads = [open(f"/proc/self/task/{{task}}/comm").read() for task in os.listdir("/proc/self/task")]
print(torch.cuda.is_initialized(), len([name for name in threads if "jemalloc" not in name]), flush=True)
for _ in range(2):
    if os.fork() == 0:
        print(UniqueID.from_random().hex(), flush=True)
        os._exit(0)
    os.wait()
os._exit(0)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=600,
                          cwd=Path(__file__).parents[2], env=os.environ | {"OPENBLAS_NUM_THREADS": "1"})  # fmt: skip
    initialized, num_threads, first, second = done.stdout.split()
    assert initialized == "False"
    assert num_threads == "1"
    assert first != second
