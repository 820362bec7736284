"""HAProxy with the configuration that Serve writes, as actors/ray/haproxy.py adapts it; no Ray."""

import socket
import subprocess
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from http.client import HTTPConnection
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import httpx
import pytest
from openai import APIStatusError, OpenAI
from starlette.routing import Route

from actors.ray.environment import quiet_port, single_machine
from actors.ray.haproxy import ANSWERS, REPEATABLE, answer, leave_fronts, stop, write_command
from serve_app.apis.pooled.endpoint import POOLED_ENDPOINTS
from serve_app.apis.table import ENDPOINTS
from serve_app.application import build_http_app
from serve_app.server.serve import _LAST_ANSWERS_S
from serve_app.service.service import Service
from serve_app.settings import HttpSettings
from tests.support.http.fake_engine import MODEL, FakeEngine, byte_tokenizer
from tests.support.processes.haproxy import Healthy, Running, first_check, serve_config
from tests.support.processes.inspection import listening_ports


@pytest.fixture
def haproxy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator:
    monkeypatch.delenv("RAY_SERVE_HAPROXY_BINARY_PATH")  # the one of this session's own Ray, which is adapted already
    started = []

    def start(
        servers: list[int],
        fallback: int | None = None,
        private: bool = True,
        host: str = "127.0.0.1",
        instead_of: tuple[Running, int] | None = None,
    ):
        port = quiet_port() if instead_of is None else instead_of[1]
        config = serve_config(tmp_path, port, servers, fallback)
        command = write_command(str(tmp_path), private=private, bind=f"{host}:{port}" if private else "")
        arguments = (
            () if instead_of is None else ("-sf", str(instead_of[0].process.pid), "-x", f"{tmp_path}/admin.sock")
        )
        started.append(Running(command, config, *arguments))
        started[-1].wait_until_it_answers(port)
        return started[-1], port

    yield start
    for each in started:
        each.process.kill()
        each.process.wait()
        each.process.stderr.close()


ESTABLISHED = "01"


class Leaving(Healthy):
    """A front that answers once on a connection, and ends at the next request there."""

    protocol_version = "HTTP/1.1"
    num_left = 0

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["content-length"]))
        self.do_GET()

    def handle(self) -> None:
        self.handle_one_request()
        if self.rfile.readline():  # before `+=` reads the number, which other threads change meanwhile
            Leaving.num_left += 1


class Staying(Leaving):
    def handle(self) -> None:
        BaseHTTPRequestHandler.handle(self)


class Last(Leaving):
    """The only front: it answers one POST, and its port is closed when it has ended."""

    def handle(self) -> None:
        self.handle_one_request()
        while self.command == "GET" and not self.close_connection:
            self.handle_one_request()
        if self.command == "POST":
            self.server.socket.shutdown(socket.SHUT_RDWR)
            self.rfile.readline()


class Draining(Healthy):
    draining = True


class Streaming(Healthy):
    """A front with answers that begin at once and end when the test allows, with its connections."""

    protocol_version = "HTTP/1.1"
    may_end = threading.Event()

    def do_POST(self) -> None:
        self.send_response(200)
        self.send_header("content-length", "2")
        self.send_header("connection", "close")
        self.end_headers()
        self.wfile.write(b"a")
        self.may_end.wait(60)
        self.wfile.write(b"b")


def _sleep(seconds: float) -> bool:
    time.sleep(seconds)
    return False


def test_a_private_haproxy_has_one_port(haproxy):
    running, port = haproxy([])
    assert running.ports() == {("127.0.0.1", port)}


def test_a_shared_haproxy_keeps_the_pages_of_serve(haproxy):
    running, port = haproxy([], private=False)
    assert ("0.0.0.0", port) in running.ports()
    assert len(running.ports()) == 3


@pytest.mark.parametrize("private", [True, False])
def test_only_a_private_server_leaves_disconnects_to_fronts(haproxy, private):
    """Serve's replicas, by this header; Callboard's fronts do, but other applications may rely on Serve."""
    with ThreadingHTTPServer(("127.0.0.1", 0), Healthy) as front:
        threading.Thread(target=front.serve_forever, daemon=True).start()
        _, port = haproxy([front.server_port], private=private)
        end = time.monotonic() + 60
        while (response := httpx.get(f"http://127.0.0.1:{port}/v1/models")).status_code != 200:
            assert time.monotonic() < end
        assert response.headers["asked-with"] == ("?1" if private else "None")
        front.shutdown()


@pytest.mark.parametrize("private", [True, False])
@pytest.mark.parametrize(
    "path", ["/v1/completions", "/api/chat", "/v2/rerank", "/pause", "/v1/load_lora_adapter", "/v1/batches", "/other"]
)
def test_a_front_that_ends_before_answering_is_retried(haproxy, private, path):
    """On a reused connection, HAProxy also closes the client's if it may not retry."""
    Leaving.num_left = 0
    with (
        ThreadingHTTPServer(("127.0.0.1", 0), Leaving) as leaving,
        ThreadingHTTPServer(("127.0.0.1", 0), Staying) as staying,
    ):
        for front in (leaving, staying):
            threading.Thread(target=front.serve_forever, daemon=True).start()
        running, port = haproxy([leaving.server_port, staying.server_port], private=private)
        end = time.monotonic() + 60
        while httpx.get(f"http://127.0.0.1:{port}/ready").status_code != 200:
            assert time.monotonic() < end
        with (
            httpx.Client(base_url=f"http://127.0.0.1:{port}") as client,
            nullcontext() if path.endswith(REPEATABLE) else pytest.raises(httpx.RemoteProtocolError),
        ):
            for _ in range(8):
                assert client.post(path, json={"prompt": "a"}).status_code == 200
                assert client.get("/v1/models").status_code == 200
        running.process.kill()  # and with it the connections that the fronts wait on
        for front in (leaving, staying):
            front.shutdown()
    assert Leaving.num_left


def test_only_what_generates_or_computes_is_repeatable(tmp_path: Path):
    app = build_http_app(Service(FakeEngine(), byte_tokenizer(), MODEL), HttpSettings(batch_folder=str(tmp_path)))
    posts = {route.path for route in app.routes if isinstance(route, Route) and "POST" in (route.methods or ())}
    generate = {endpoint.path for endpoint in ENDPOINTS} | {path for each in POOLED_ENDPOINTS for path in each.paths}
    compute = {"/v1/messages/count_tokens", "/v1/responses", "/v1/responses/input_tokens", "/api/show"}
    compute |= {"/tokenize", "/detokenize", "/apply-template", "/check_grammar"}
    compute |= {"/embedding", "/embeddings", "/api/embed", "/api/embeddings"}
    assert {path for path in posts if path.endswith(REPEATABLE)} == generate | compute


def test_requests_to_a_gone_front_go_to_the_other(haproxy):
    """HAProxy holds the request that makes it give a front up, as it does with a single front."""
    fronts = [ThreadingHTTPServer(("127.0.0.1", 0), Healthy) for _ in range(2)]
    for front in fronts:
        threading.Thread(target=front.serve_forever, daemon=True).start()
    _, port = haproxy([front.server_port for front in fronts])

    def ask() -> float:
        connection, began = HTTPConnection("127.0.0.1", port, timeout=60), time.monotonic()
        connection.request("GET", "/v1/models")
        assert connection.getresponse().status == 200
        connection.close()
        return time.monotonic() - began

    fronts[0].shutdown()
    fronts[0].server_close()
    times, usual = ([ask() for _ in range(20)] for _ in range(2))
    fronts[1].shutdown()
    fronts[1].server_close()
    assert max(times) < 0.9 + max(usual)  # it would be a second and more


@pytest.mark.parametrize("private", [True, False])
def test_a_connection_survives_a_reload_during_a_stream(haproxy, private):
    """It is with the last process of HAProxy, which knows none of the present fronts."""
    Streaming.may_end.clear()
    last, new = (ThreadingHTTPServer(("127.0.0.1", 0), handler) for handler in (Streaming, Healthy))
    for front in (last, new):
        threading.Thread(target=front.serve_forever, daemon=True).start()
    before = haproxy([last.server_port], private=private)
    connection = HTTPConnection("127.0.0.1", before[1], timeout=60)
    connection.request("POST", "/v1/completions")
    answer = connection.getresponse()
    assert answer.read(1) == b"a"
    haproxy([new.server_port], private=private, instead_of=before)
    end = time.monotonic() + 60
    while any(port == before[1] for _, port in before[0].ports()):
        assert time.monotonic() < end
        time.sleep(0.01)
    last.shutdown()
    last.socket.close()
    Streaming.may_end.set()
    assert answer.read() == b"b"
    connection.request("GET", "/v1/models")
    assert connection.getresponse().status == 200
    connection.close()
    new.shutdown()


@pytest.mark.parametrize("path", ["/ready", "/health", "/v1/models", "/nonsense"])
def test_without_an_application_every_route_is_a_503(haproxy, path):
    _, port = haproxy([])
    response = httpx.get(f"http://127.0.0.1:{port}{path}")
    assert response.status_code == 503
    assert response.headers["retry-after"] == "1"
    body = response.json()
    assert set(body["error"]) == {"message", "type", "param", "code"}
    assert body["error"]["code"] == "engine_unavailable"
    assert body["status"] == "unavailable"


@pytest.mark.parametrize("private", [True, False])
def test_the_openai_client_reads_that_no_replica_exists(haproxy, private):
    """It is neither a hang in Serve's own proxy, which would wait for a replica, nor a page of text."""
    with socket.create_server(("127.0.0.1", 0)) as silent:
        _, port = haproxy([quiet_port()], silent.getsockname()[1] if private else None, private)
        client = OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="none", max_retries=0, timeout=60)
        with pytest.raises(APIStatusError, match="starting, restarting or stopping") as error:
            client.models.list()
    assert error.value.status_code == 503
    assert error.value.code == "engine_unavailable"


def test_the_last_front_ends_before_it_answers(haproxy):
    """HAProxy lacks an answer of its own for a request that it first sent on a reused connection."""
    with ThreadingHTTPServer(("127.0.0.1", 0), Last) as front:
        threading.Thread(target=front.serve_forever, daemon=True).start()
        running, port = haproxy([front.server_port])
        with httpx.Client(base_url=f"http://127.0.0.1:{port}") as client:
            responses = [client.post("/v1/completions", json={"prompt": "a"}) for _ in range(3)]
        running.process.kill()
        front.shutdown()
    assert [response.status_code for response in responses] == [200, 503, 503]
    assert {response.json()["error"]["code"] for response in responses[1:]} == {"engine_unavailable"}


def test_fronts_serve_while_serve_rebuilds_an_application(haproxy):
    """Serve's configuration lacks fronts then; when the application is gone, the fronts are gone."""
    with ThreadingHTTPServer(("127.0.0.1", 0), Healthy) as front:
        threading.Thread(target=front.serve_forever, daemon=True).start()
        for servers, fallback, status in ([front.server_port], None, 200), ([], quiet_port(), 200), ([], None, 404):
            _, port = haproxy(servers, fallback, private=False)
            end = time.monotonic() + 60
            while (response := httpx.get(f"http://127.0.0.1:{port}/v1/models")).status_code != status:
                assert time.monotonic() < end, response.text
        front.shutdown()


@pytest.mark.parametrize("private", [True, False])
def test_a_draining_front_serves_until_it_is_replaced(haproxy, tmp_path: Path, private):
    """Serve drains a replaced front before HAProxy has loaded the configuration with the new one."""
    with ThreadingHTTPServer(("127.0.0.1", 0), Draining) as front:
        threading.Thread(target=front.serve_forever, daemon=True).start()
        _, port = haproxy([front.server_port], private=private)
        assert first_check(tmp_path) == "L7OK"
        assert httpx.get(f"http://127.0.0.1:{port}/v1/models").status_code == 200
        front.shutdown()


@pytest.mark.parametrize("private", [True, False])
def test_the_configuration_can_be_adapted_twice(haproxy, tmp_path: Path, private):
    """The command runs the binary that the environment names, and this may be such a command."""
    running, port = haproxy([quiet_port()], private=private)
    running.process.kill()
    again = Running(str(tmp_path / "haproxy"), str(tmp_path / "haproxy.cfg"))
    try:
        again.wait_until_it_answers(port)
    finally:
        again.process.kill()
        again.process.wait()
        again.process.stderr.close()


def test_incomplete_headers_time_out(haproxy, tmp_path: Path):
    haproxy([])
    assert "    timeout http-request 30s\n" in (tmp_path / "haproxy.cfg").read_text()


@pytest.mark.parametrize("status", ANSWERS)
def test_lengths_of_the_answers(status: int):
    head, _, body = answer(status).partition("\r\n\r\n")
    assert f"content-length: {len(body.encode())}" in head.split("\r\n")


@pytest.mark.parametrize(("host", "address"), [("*", "0.0.0.0"), ("localhost", "127.0.0.1")])
def test_it_listens_where_the_user_wants(haproxy, host, address):
    running, port = haproxy([], host=host)
    assert running.ports() == {(address, port)}


def test_all_interfaces_of_ipv6(haproxy):
    if not socket.has_ipv6 or not Path("/proc/net/if_inet6").read_text():
        pytest.skip("this machine has no IPv6")
    _, port = haproxy([], host="::")
    for address in ("::1", "127.0.0.1"):
        socket.create_connection((address, port), timeout=60).close()


def test_haproxy_drains_fronts_before_they_end(haproxy, tmp_path: Path):
    Streaming.may_end.clear()
    front = ThreadingHTTPServer(("127.0.0.1", 0), Streaming)
    threading.Thread(target=front.serve_forever, daemon=True).start()
    _, port = haproxy([front.server_port])
    connection = HTTPConnection("127.0.0.1", port, timeout=60)
    connection.request("POST", "/v1/completions")
    answer = connection.getresponse()
    assert answer.read(1) == b"a"
    assert httpx.get(f"http://127.0.0.1:{port}/v1/models").status_code == 200
    leave_fronts(str(tmp_path))
    response = httpx.get(f"http://127.0.0.1:{port}/v1/models")
    assert response.status_code == 503
    assert response.json()["error"]["code"] == "engine_unavailable"
    Streaming.may_end.set()
    assert answer.read() == b"b"
    connection.close()
    front.shutdown()


def test_a_stop_answers_only_requests_already_read(haproxy, tmp_path: Path):
    running, _ = haproxy([])
    other = subprocess.Popen(["sh", "-c", "read x", str(tmp_path / "other" / "haproxy.cfg")], stdin=subprocess.PIPE)
    stop(str(tmp_path / "mine"), _sleep, timeout_s=0.1)
    assert running.process.poll() is None
    stop(str(tmp_path) + "/haproxy.cfg", _sleep, timeout_s=5)
    assert running.process.wait(timeout=60) == 0
    assert other.poll() is None
    other.kill()
    other.wait()


def test_a_stop_answers_requests_to_a_front_just_gone(haproxy, tmp_path: Path):
    front = ThreadingHTTPServer(("127.0.0.1", 0), Healthy)
    threading.Thread(target=front.serve_forever, daemon=True).start()
    running, port = haproxy([front.server_port])
    url = f"http://127.0.0.1:{port}/ready"
    end = time.monotonic() + 60
    while httpx.get(url).status_code != 200:
        assert time.monotonic() < end
    front.shutdown()
    front.server_close()
    with ThreadPoolExecutor() as pool:
        response = pool.submit(httpx.get, url, timeout=60)
        while not response.done() and ("127.0.0.1", port) not in listening_ports(running.process.pid, ESTABLISHED):
            assert time.monotonic() < end
        stop(str(tmp_path) + "/haproxy.cfg", _sleep, _LAST_ANSWERS_S)
        running.process.kill()
        assert response.result().status_code == 503


def test_an_order_ends_the_wait_for_last_answers(haproxy, tmp_path: Path):
    running, port = haproxy([quiet_port()])
    with socket.create_connection(("127.0.0.1", port)):
        while ("127.0.0.1", port) not in listening_ports(running.process.pid, ESTABLISHED):
            assert running.process.poll() is None
        stop(str(tmp_path) + "/haproxy.cfg", lambda _: True, timeout_s=1000)
        assert running.process.poll() is None


def test_side_ports_avoid_ports_of_connections(tmp_path: Path):
    first, last = map(int, Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split())
    ports = {int(single_machine(str(tmp_path))["RAY_SERVE_FALLBACK_PROXY_HTTP_PORT"]) for _ in range(20)}
    assert len(ports) > 10
    assert not any(first <= port <= last or 30_000 <= port < 31_000 for port in ports)
