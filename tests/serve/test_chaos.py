"""`callboard chaos`: the processes it refuses to kill, and how it counts."""

import asyncio
import io
import os
import pty
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from runtime.base.types import CallboardError
from serve_app import cli
from serve_app.processes import application_processes as processes
from serve_app.processes.application_processes import (
    Process,
    listeners,
    local_port,
    processes_of,
    session_behind,
    the_application,
)
from serve_app.tools import chaos
from serve_app.tools.token_client import Reading, Server


@pytest.mark.parametrize("url", ["http://10.1.2.3:8000", "http://192.0.2.1", "http://0.0.0.0:8000", "http://[::2]:80"])
def test_other_machines_are_refused(url: str):
    with pytest.raises(CallboardError, match="not on this machine's loopback"):
        local_port(url)


def test_ports_of_this_machine():
    assert [local_port(url) for url in ("http://127.0.0.1:8000/v1", "localhost:81", "http://[::1]")] == [8000, 81, 80]
    with pytest.raises(CallboardError, match="is not a server's URL"):
        local_port("http://127.0.0.1:port")


def test_only_ports_with_a_listener_of_this_user(monkeypatch: pytest.MonkeyPatch):
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        assert listeners(port) == [os.getpid()]
        monkeypatch.setattr(os, "getuid", lambda: 12345)
        with pytest.raises(CallboardError, match=f"Port {port} belongs to another user"):
            listeners(port)
    with pytest.raises(CallboardError, match=f"Nothing listens on port {port}"):
        listeners(port)


TREE = {1: [10, 20], 10: [11], 11: [12, 13, 14], 14: [15], 20: [21, 22], 21: [23]}  # two servers, and a stranger


@pytest.mark.parametrize(
    ("listener", "raylets", "found"),
    [
        (15, {12, 22}, 12),
        (12, {12, 22}, 12),
        (23, {12, 22}, 22),
        (10, {12}, 12),
        (15, {22}, None),
        (15, {12, 13}, None),
    ],
)
def test_the_ray_behind_a_port_is_the_nearest(monkeypatch, listener: int, raylets: set[int], found: int | None):
    pids = {pid for children in TREE.values() for pid in children}
    monkeypatch.setattr(processes, "children_of_all", lambda: TREE)
    monkeypatch.setattr(processes, "listeners", lambda _: [listener])
    monkeypatch.setattr(processes, "_own_processes", lambda: iter(pids))
    monkeypatch.setattr(processes, "_program", lambda pid: "raylet" if pid in raylets else "python")
    monkeypatch.setattr(processes, "_session_of", lambda pid: pid)
    if found is not None:
        assert session_behind(8000) == found
        return
    with pytest.raises(CallboardError, match="is not Ray Serve's on this machine"):
        session_behind(8000)


class Actor:
    """A process that looks like an actor of the Ray in the folder `session`."""

    def __init__(self, title: str, session: Path, log: str) -> None:
        (session / "logs").mkdir(exist_ok=True)
        with (session / log).open("w") as out:
            self.process = subprocess.Popen([title, "60"], executable="/bin/sleep", stdout=out)
        while title.encode() not in Path(f"/proc/{self.process.pid}/cmdline").read_bytes():
            time.sleep(0.001)

    def as_process(self, session: Path, role: str = "engine") -> Process:
        engine, rank = {"engine": ("e1", None), "runner": ("e1", 0)}.get(role, ("", None))
        return Process(role, engine, self.process.pid, "app", str(session), rank)


@pytest.fixture
def actor(tmp_path: Path) -> Iterator:
    started = []

    def start(title: str = "ray::Callboard:app:engine:e1", log: str = "logs/worker.out") -> Actor:
        started.append(Actor(title, tmp_path, log))
        return started[-1]

    yield start
    for each in started:
        each.process.kill()
        each.process.wait()


@pytest.mark.parametrize(
    ("title", "role"),
    [
        ("ray::Callboard:app:engine:e1", "engine"),
        ("ray::Callboard:app:runner:e1:0.load", "runner"),
        ("ray::ServeReplica:app:Front", "front"),
        ("ray::ServeReplica:app:Engine", "supervisor"),
    ],
)
def test_an_actor_gets_the_signal(actor, tmp_path: Path, title: str, role: str):
    found = actor(title)
    found.as_process(tmp_path, role).send(signal.SIGKILL)
    assert found.process.wait(timeout=60) == -signal.SIGKILL
    with pytest.raises(ProcessLookupError):
        found.as_process(tmp_path, role).send(signal.SIGKILL)


def test_titles_name_application_engine_and_rank(actor, tmp_path: Path):
    titles = (
        "ray::Callboard:app:runner:e1:12.load",
        "ray::Callboard:a b:c:draft:shared",
        "ray::ServeReplica:a b:c:Front",
    )
    pids = [actor(title, f"logs/w{i}.out").process.pid for i, title in enumerate((*titles, "ray::IDLE"))]
    session, logs = str(tmp_path), tmp_path / "logs"
    assert processes_of(session) == [
        Process("draft", "shared", pids[1], "a b:c", session, None, f"{logs}/w1.err"),
        Process("front", "", pids[2], "a b:c", session),
        Process("runner", "e1", pids[0], "app", session, 12, f"{logs}/w0.err"),
    ]
    assert [process.pid for process in processes_of(session, "app")] == [pids[0]]
    with pytest.raises(CallboardError, match="running: none"):
        the_application(None, session)
    actor("ray::Callboard:app:engine:e1")
    assert the_application(None, session) == "app"


@pytest.mark.parametrize(
    ("title", "log", "role"),
    [
        ("sleep", "logs/worker.out", "engine"),  # no actor
        ("ray::Callboard:app:engine:e1", "worker.out", "engine"),  # of another Ray, or of none
        ("ray::EngineActor", "logs/worker.out", "engine"),
        ("ray::Callboard:app:engine:e12", "logs/worker.out", "engine"),  # another engine
        ("ray::Callboard:app:runner:e1:1", "logs/worker.out", "runner"),  # another rank
        ("ray::ServeReplica:app:Front", "logs/worker.out", "engine"),  # another role
        ("ray::ServeReplica:other:Front", "logs/worker.out", "front"),  # another application
    ],
)
def test_other_orders_are_refused(actor, tmp_path: Path, title: str, log: str, role: str):
    found = actor(title, log)
    with pytest.raises(CallboardError, match=f"is not a {role} of the application 'app'; it received no signal"):
        found.as_process(tmp_path, role).send(signal.SIGKILL)
    assert found.process.poll() is None


def test_processes_of_other_users_are_refused(actor, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    found = actor()
    monkeypatch.setattr(os, "getuid", lambda: 12345)
    with pytest.raises(CallboardError, match="belongs to another user"):
        found.as_process(tmp_path).send(signal.SIGKILL)
    assert found.process.poll() is None


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        (["http://192.0.2.1"], "no terminal for keys"),
        (["http://192.0.2.1", "--kill", "engine"], "not on this machine's loopback"),
        (["http://127.0.0.1:1", "--kill", "engine"], "Nothing listens on port 1"),
    ],
)
def test_the_command_refuses(argv: list[str], says: str, capsys, monkeypatch):
    monkeypatch.setattr(sys, "stdin", io.StringIO())
    assert cli.main(["chaos", *argv]) == 1
    assert says.lower() in capsys.readouterr().err.lower()


def test_an_unknown_role_to_kill_is_a_usage_error(capsys):
    with pytest.raises(SystemExit) as exit_:
        cli.main(["chaos", "http://127.0.0.1", "--kill", "engine,raylet"])
    assert exit_.value.code == 2
    assert "'raylet' is none of engine, runner" in capsys.readouterr().err


async def test_terminal_keys_choose_the_process_to_kill(monkeypatch, capsys):
    keyboard, terminal = pty.openpty()
    with open(terminal) as stdin, open(keyboard, "wb", buffering=0) as keys:
        monkeypatch.setattr(sys, "stdin", stdin)
        run = chaos._Chaos("http://127.0.0.1", chaos.ChaosPlan((), 1.0, 2, 10, None, None), "app", list)
        orders = aiter(run._orders())
        first = asyncio.ensure_future(anext(orders))
        await asyncio.sleep(0)
        keys.write(b"xerq")
        assert [await first, *[role async for role in orders]] == ["engine", "runner"]
    assert "e kills the engine, r kills the runner" in capsys.readouterr().out


# ---- counting --------------------------------------------------------------------------------------------------------


class CuttingServer:
    """Answers with the numbers after the prompt's last one. Connections end after `cuts` tokens, by turns."""

    def __init__(self, *cuts: int | None) -> None:
        self.cuts, self.prompts = list(cuts), []

    async def __aenter__(self) -> Server:
        self._server = await asyncio.start_server(self._answer, "127.0.0.1", 0)
        return Server("127.0.0.1", self._server.sockets[0].getsockname()[1], "m", {})

    async def __aexit__(self, *_) -> None:
        self._server.close()

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = (await reader.readuntil(b"\r\n\r\n")).decode()
        length = int(head.partition("content-length: ")[2].partition("\r\n")[0])
        body = msgspec.json.decode(await reader.readexactly(length))
        self.prompts.append(body["prompt"])
        cut, first = self.cuts.pop(0), body["prompt"][-1] + 1
        ids = range(first, first + body["max_tokens"])[:cut]
        events = [b'data: {"choices":[{"token_ids":[%d]}]}\n\n' % i for i in ids] + [b"data: [DONE]\n\n"] * (
            cut is None
        )
        text = b"".join(events)
        writer.write(b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n")
        for part in (text[:50], text[50:]):  # events need not begin where chunks do
            writer.write(b"%x\r\n%b\r\n" % (len(part), part) if part else b"")
        writer.write(b"0\r\n\r\n" * (cut is None))
        await writer.drain()
        writer.close()


async def test_an_interrupted_answer_continues():
    server = CuttingServer(3, 0, 5, None)
    async with server as address:
        reading = Reading([1, 2], 20, {})
        await reading.read(address)
    assert reading.tokens == list(range(3, 23))
    assert (reading.num_cuts, reading.num_refusals, reading.error) == (3, 0, "")
    assert server.prompts == [[1, 2], [1, 2, 3, 4, 5], [1, 2, 3, 4, 5], list(range(1, 11))]


async def test_a_role_without_a_process_is_refused():
    with socket.create_server(("127.0.0.1", 0)) as probe:
        address = Server("127.0.0.1", probe.getsockname()[1], "m", {})
    reading = Reading([1], 2, {})
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.2):
            await reading.read(address)
    assert reading.num_refusals > 0
    assert reading.num_cuts == 0


@pytest.mark.parametrize(
    ("said", "differ"),
    [([5, 6, 7, 8], 0), ([5, 7, 8], 1), ([5, 5, 6, 7], 1), ([5, 6, 9, 8], 1)],
    ids=["equal", "lost", "doubled", "changed"],
)
def test_a_twin_stream_shows_lost_tokens(said: list[int], differ: int):
    figures, twins = chaos._Figures(), chaos._Twins()
    first, second = (chaos._Conversation(i, twins, figures, 100, 10) for i in range(2))
    first.last_at = second.last_at = time.monotonic()
    first._on_tokens(Reading([], 10, {}), [5, 6])
    second._on_tokens(Reading([], 10, {}), said[:1])
    second._on_tokens(Reading([], 10, {}), said[1:])
    first._on_tokens(Reading([], 10, {}), [7, 8])
    assert figures.counts["differ"] == differ
