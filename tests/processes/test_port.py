"""The port of `callboard serve` while it starts: the command answers it, and then HAProxy does."""

import signal
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import ThreadingHTTPServer
from pathlib import Path

import httpx
import pytest
from openai import APIStatusError, OpenAI

from actors.ray.environment import quiet_port
from actors.ray.haproxy import write_command
from serve_app.server.port import reserved_port
from tests.support.processes.haproxy import Healthy, Running, serve_config


class Clients:
    """Clients that connect all the time, and their answers."""

    def __init__(self, port: int, num_clients: int) -> None:
        self._url, self._is_over = f"http://127.0.0.1:{port}/ready", threading.Event()
        self.answers: list[tuple[int, str]] = []
        self.faults: list[str] = []
        self._threads = [threading.Thread(target=self._ask, daemon=True) for _ in range(num_clients)]
        for thread in self._threads:
            thread.start()

    def _ask(self) -> None:
        while not self._is_over.is_set():
            try:
                response = httpx.get(self._url, timeout=60)
                self.answers.append((response.status_code, response.text))
            except httpx.TransportError as e:
                self.faults.append(repr(e))

    def wait_for(self, status: int, text: str) -> None:
        end = time.monotonic() + 60
        while not any(answer[0] == status and text in answer[1] for answer in self.answers[-20:]):
            assert time.monotonic() < end, self.answers[-20:]
            time.sleep(0.01)

    def end(self) -> None:
        self._is_over.set()
        for thread in self._threads:
            thread.join()


@pytest.fixture
def front() -> Iterator[ThreadingHTTPServer]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Healthy)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield server
    server.shutdown()
    server.server_close()


@contextmanager
def haproxy_at(number: int, front: ThreadingHTTPServer, folder: Path) -> Iterator[Running]:
    config = serve_config(folder, number, [front.server_port], None)
    running = Running(write_command(str(folder), private=True, bind=f"127.0.0.1:{number}"), config)
    try:
        while ("127.0.0.1", number) not in running.ports():
            assert running.process.poll() is None, running.process.stderr.read()
        yield running
    finally:
        running.process.kill()
        running.process.wait()
        running.process.stderr.close()


def test_the_port_passes_to_haproxy_unnoticed(front, tmp_path: Path, monkeypatch):
    monkeypatch.delenv("RAY_SERVE_HAPROXY_BINARY_PATH")
    number = quiet_port()
    with reserved_port("127.0.0.1", number) as port:
        port.on_news({"phase": "model checked"})
        clients = Clients(number, 4)
        try:
            clients.wait_for(503, "The server is starting (model checked); try again in a moment.")
            port.on_news({"phase": "weights: 3 GiB in 2 s"})
            clients.wait_for(503, "(weights)")
            with haproxy_at(number, front, tmp_path):
                time.sleep(0.5)
                assert all("(model checked)" in text or "(weights)" in text for _, text in clients.answers)
                port.on_news({"port": True})
                clients.wait_for(200, "")
                time.sleep(1.5)  # the command's socket is closed meanwhile
                num_before = len(clients.answers)
                clients.wait_for(200, "")
                clients.end()
        finally:
            clients.end()
    assert clients.faults == []
    assert {status for status, _ in clients.answers[num_before:]} == {200}


def test_a_stop_at_ready_leaves_no_client_unanswered(front, tmp_path: Path, monkeypatch):
    """Without HAProxy's socket the kernel would give all connections to the command's socket, which closes at any
    moment."""
    monkeypatch.delenv("RAY_SERVE_HAPROXY_BINARY_PATH")
    number = quiet_port()
    with reserved_port("127.0.0.1", number) as port:
        port.on_news({"phase": "weights"})
        with haproxy_at(number, front, tmp_path) as haproxy:
            port.on_news({"port": True})
            port.on_news({"ready": True})
            assert httpx.get(f"http://127.0.0.1:{number}/ready").status_code == 200
            haproxy.process.send_signal(signal.SIGUSR1)
            haproxy.process.wait(60)
            with pytest.raises(httpx.ConnectError):
                httpx.get(f"http://127.0.0.1:{number}/ready")


def test_clients_read_the_phase_while_the_server_starts():
    number = quiet_port()
    with reserved_port("127.0.0.1", number) as port:
        with pytest.raises(OSError, match="in use"):
            socket.create_server(("127.0.0.1", number))
        port.on_news({"phase": "Ray started"})
        for _ in range(100):  # connections without a byte
            socket.create_connection(("127.0.0.1", number)).close()
        client = OpenAI(base_url=f"http://127.0.0.1:{number}/v1", api_key="none", max_retries=0, timeout=60)
        prompt = "a" * (4 << 20)  # longer than any buffer: unread input must not hide the answer
        with pytest.raises(APIStatusError, match=r"The server is starting \(Ray started\)") as error:
            client.completions.create(model="any", prompt=prompt)
        assert error.value.status_code == 503
        assert error.value.code == "engine_unavailable"
        assert error.value.response.headers["retry-after"] == "1"


def test_browser_sees_the_phase_while_the_server_starts():
    number = quiet_port()
    browser = {"accept": "text/html,application/xhtml+xml"}
    with reserved_port("127.0.0.1", number) as port:
        port.on_news({"phase": "<Ray> started"})
        page = httpx.get(f"http://127.0.0.1:{number}/", headers=browser)
        others = [httpx.get(f"http://127.0.0.1:{number}{path}", headers=browser) for path in ("/ready", "/v1/models")]
        others.append(httpx.get(f"http://127.0.0.1:{number}/"))
    assert page.status_code == 503
    assert page.headers["content-type"] == "text/html"
    assert "The server is starting (&lt;Ray&gt; started)." in page.text
    assert 'http-equiv="refresh"' in page.text
    assert {other.json()["status"] for other in others} == {"loading"}
