"""The settings of `callboard serve`, and what its steps share."""

from __future__ import annotations

from dataclasses import dataclass

from serve_app.settings import HttpSettings, ModelSettings

APP_NAME = "callboard"
LOG_NAME = "callboard-serve.log"  # next to Ray's logs: this process's stdout and stderr


@dataclass(frozen=True, slots=True)
class ServerSettings:
    """All settings of `callboard serve`."""

    models: tuple[ModelSettings, ...]  # the first one takes requests without a name
    http: HttpSettings
    host: str
    port: int
    num_fronts: int | None


def reachable_host(host: str) -> str:
    """Return an address of this machine for a server that listens on `host`."""
    return {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)


def last_line(text: str) -> str:
    """Return the last line of a traceback."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1] if lines else "Ray gives no reason"
