"""The server's port before HAProxy takes it. The command opens it first, and answers with the phase of the start.

For a while two sockets listen on the port, this one and HAProxy's. A kernel filter gives all connections to this one
until a front exists, then to HAProxy's, so clients see no refusal and no reset. This socket closes before the server
may stop, since the kernel would give it all connections after HAProxy's end."""

from __future__ import annotations

import ctypes
import html
import math
import select
import socket
import struct
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

from actors.ray.haproxy import answer
from runtime.base.types import CallboardError
from serve_app.processes.application_processes import SERVER_NAME
from serve_app.processes.process_tree import News

_MAX_HEADERS_BYTES = 1 << 16
_MAX_CLIENTS = 64  # clients answered at once; the others wait
_CLIENT_S = 10.0  # limit for all bytes from one client
_POLL_S = 0.1
_LAST_S = 1.0  # time for connections to this socket after HAProxy takes the port
# A page for early browsers. It shows the phase and reloads until the server's page exists.
_PAGE = """<!doctype html><meta charset="utf-8"><meta http-equiv="refresh" content="1"><title>Callboard starts</title>
<style>:root {{ color-scheme: light dark; font: 1rem system-ui }}
body {{ margin: 20vh auto; text-align: center }}</style>
<h1>Callboard</h1><p>The server is starting ({phase}).</p>"""
_SO_ATTACH_REUSEPORT_CBPF = 51  # Linux's number
_BPF_RET_CONSTANT = 0x06


class Port:
    """A socket that answers every request with 503, in a thread, from the news of the first phase on."""

    def __init__(self, family: int, address: tuple[Any, ...]) -> None:
        """Raises OSError if this process cannot listen on the address."""
        self._phase = ""
        self._end = math.inf  # time.monotonic() at which the socket closes
        self._thread = threading.Thread(target=self._serve, name="port", daemon=True)
        self._clients = threading.BoundedSemaphore(_MAX_CLIENTS)
        self._socket = socket.socket(family, socket.SOCK_STREAM)
        try:
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            self._socket.bind(address)  # alone: another server's port would be shared otherwise
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
            self._socket.listen(128)
            self._give_all_to(0)
        except OSError:
            self._socket.close()
            raise

    def on_news(self, news: News) -> None:
        """Handle news of the server's process.

        `phase` is the last complete phase. `port` means that HAProxy listens. `ready` means that HAProxy may end, so
        this waits until the socket is closed."""
        if "phase" in news:
            if not self._phase:
                self._thread.start()
            self._phase = str(news["phase"]).partition(":")[0]
        if "port" in news and self._end == math.inf:
            self._give_all_to(1)
            self._end = time.monotonic() + _LAST_S
        if "ready" in news:
            self._end = min(self._end, time.monotonic() + _POLL_S)
            self._thread.join(_LAST_S)

    def close(self) -> None:
        self._socket.close()

    def _give_all_to(self, index: int) -> None:
        """Attach a filter that chooses one of the address's sockets by its binding index."""
        instruction = ctypes.create_string_buffer(struct.pack("HBBI", _BPF_RET_CONSTANT, 0, 0, index))
        program = struct.pack("@HP", 1, ctypes.addressof(instruction))
        with suppress(OSError):  # the sockets share connections if the kernel lacks filters
            self._socket.setsockopt(socket.SOL_SOCKET, _SO_ATTACH_REUSEPORT_CBPF, program)

    def _serve(self) -> None:
        with suppress(OSError, ValueError), self._socket:  # the command's end closes it
            while time.monotonic() < self._end:
                if select.select([self._socket], [], [], _POLL_S)[0]:
                    client = self._socket.accept()[0]
                    self._clients.acquire()
                    threading.Thread(target=self._answer, args=(client,), daemon=True).start()

    def _answer(self, client: socket.socket) -> None:
        try:
            with suppress(OSError), client:
                self._refuse(client)
        finally:
            self._clients.release()

    def _refuse(self, client: socket.socket) -> None:
        """Read a whole request and refuse it. Unread bytes would reset the connection before the client's read."""
        end, request = time.monotonic() + _CLIENT_S, b""
        client.settimeout(_CLIENT_S)
        while b"\r\n\r\n" not in request and len(request) < _MAX_HEADERS_BYTES and time.monotonic() < end:
            if not (more := client.recv(_MAX_HEADERS_BYTES)):
                return
            request += more
        client.sendall(self._refusal(request).encode())
        client.shutdown(socket.SHUT_WR)
        while time.monotonic() < end and client.recv(_MAX_HEADERS_BYTES):
            pass

    def _refusal(self, request: bytes) -> str:
        headers = request.partition(b"\r\n\r\n")[0].lower()
        if not (headers.startswith(b"get / ") and b"text/html" in headers):
            return answer(503, self._phase)
        page = _PAGE.format(phase=html.escape(self._phase))
        lines = "HTTP/1.1 503 Service Unavailable", "content-type: text/html", f"content-length: {len(page)}"
        return "\r\n".join([*lines, "cache-control: no-cache", "connection: close", "retry-after: 1", "", page])


@contextmanager
def reserved_port(host: str, port: int) -> Iterator[Port]:
    """Yield the port, as a start's first step. Raises CallboardError if it is not available.

    A Unix socket's name marks the port as taken for other servers on this machine. The kernel frees it with the
    process."""
    with socket.socket(socket.AF_UNIX) as name:
        try:
            name.bind("\0" + SERVER_NAME.format(host=host, port=port))
        except OSError as e:
            raise _port_error(host, port, "another callboard serve starts or runs there") from e
        try:
            family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
            held = Port(family, address)
        except socket.gaierror as e:
            text = f"{host!r} is not an address of this machine ({e.strerror}); pass another --host."
            raise CallboardError(text) from e
        except OSError as e:
            raise _port_error(host, port, e.strerror) from e
        try:
            yield held
        finally:
            held.close()


def _port_error(host: str, port: int, reason: str | None) -> CallboardError:
    return CallboardError(f"Port {port} on {host} cannot be used ({reason}); stop its user or pass another --port.")
