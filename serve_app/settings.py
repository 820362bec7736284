"""Settings of the front door and of the number of engines: frozen, and checked once."""

from __future__ import annotations

import importlib.util
import ipaddress
import socket
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from runtime.spec.config import check_settings, setting
from runtime.spec.types import CallboardError


@dataclass(frozen=True, slots=True)
class ScalingSettings:
    """How many engines there are: always as many, or as there is work for."""

    num_replicas: int = setting(1, "model replicas, each an engine with its runners", 1)
    min_replicas: int | None = setting(
        None, "fewest of them, when there is little to do; 0 is allowed; default: num_replicas", 0
    )
    max_replicas: int | None = setting(None, "most of them, when there is much to do; default: num_replicas", 1)
    scale_in_delay_s: float = setting(120.0, "a replica goes when it was not needed for so long", 0)
    scale_to_zero_s: float = setting(
        300.0, "with min_replicas 0, the last replica goes when nothing was asked of it for so long", above=0
    )

    def __post_init__(self) -> None:
        check_settings(self)
        if self.least > self.most:
            raise CallboardError(f"min_replicas is {self.least}; it must be at most max_replicas, {self.most}.")

    @property
    def least(self) -> int:
        """Replicas that there are at any time."""
        return self.num_replicas if self.min_replicas is None else self.min_replicas

    @property
    def most(self) -> int:
        """Replicas that there may be."""
        return self.num_replicas if self.max_replicas is None else self.max_replicas


@dataclass(frozen=True, slots=True)
class HttpSettings:
    """The front replicas' settings. The engine's own limits (its queue, its context) are in EngineConfig."""

    api_key: tuple[str, ...] = setting(
        (),
        "a key that lets clients in, sent as a Bearer token; may be given several times; without it `callboard serve` "
        "takes those of $CALLBOARD_API_KEY",
    )
    api_key_file: str | None = setting(None, "file with more of them, one a line, at this path on every node")
    cors_origin: tuple[str, ...] = setting(
        (), "origin whose web pages may call this server, * for any; may be given several times"
    )
    allowed_host: tuple[str, ...] = setting(
        (),
        "public name by which clients reach this server, * for any; may be given several times; requests that name "
        "another host are refused, without keys even if this is not given",
    )
    max_body_bytes: int = setting(8 << 20, "longest request body", 1)
    max_unread_bytes: int = setting(1 << 30, "most bytes of bodies that each front receives at once", 1)
    max_unread_bytes_per_key: int = setting(
        256 << 20, "most bytes of bodies that each front receives at once from one key", 1
    )
    body_timeout_s: float = setting(60.0, "longest time for a request body to come", above=0)
    max_header_bytes: int = setting(12 << 10, "longest request headers in all; HAProxy's own limit is 15 KiB", 1)
    max_n: int = setting(128, "most choices (n) of one request", 1)
    max_stop: int = setting(16, "most stop strings of one request", 1)
    max_prompts: int = setting(1024, "most prompts of one request", 1)
    client_priority: bool = setting(
        False, "clients may send a priority below 0, to be served before others; above 0, to be served later, they may"
    )
    routing_policy: Literal["prefix", "least-load", "round-robin"] = setting(
        "prefix",
        "which engine gets a request, of several: the one that holds most of its prompt and has least to do, the one "
        "with the fewest requests, or the next one",
    )
    request_timeout_s: float | None = setting(None, "longest time for a whole answer; default: any", above=0)
    keep_alive_s: float = setting(15.0, "a stream that waits for its first token sends a comment this often", above=0)
    lora_folder: str | None = setting(
        None,
        "folder from which clients may load adapters while the server runs (/v1/load_lora_adapter), at this path on "
        "every node; without it they may not",
    )
    response_store_bytes: int = setting(
        128 << 20, "memory of each front for stored responses (/v1/responses); 0: none are stored", 0
    )
    response_life_s: float = setting(86_400.0, "how long a stored response is kept, if there is room", above=0)
    recorded_request_bytes: int = setting(
        16 << 20, "memory of each front for its latest requests, which `callboard replay` sends again; 0: none", 0
    )
    batch_folder: str | None = setting(
        None, "folder for /v1/files and /v1/batches, on a disk that all fronts share; default: there are none"
    )
    batch_file_bytes: int = setting(200 << 20, "longest file that clients may upload", 1)
    batch_max_requests: int = setting(50_000, "most requests of one batch", 1)
    batch_concurrency: int = setting(16, "requests of batches that each front has under way at once", 1)
    batch_max_open: int = setting(256, "most batches of all keys that have not ended", 1)
    batch_max_open_per_key: int = setting(32, "most batches of one key that have not ended", 1)
    batch_max_ended_per_key: int = setting(1000, "ended batches of one key that are kept; older ones are forgotten", 1)
    batch_max_files: int = setting(20_000, "most files of all keys, results of batches included", 1)
    batch_max_files_per_key: int = setting(2000, "most files of one key, results of batches included", 1)
    batch_max_bytes: int = setting(64 << 30, "most bytes of all keys' files, results of batches included", 1)
    batch_max_bytes_per_key: int = setting(16 << 30, "most bytes of one key's files, results of batches included", 1)
    batch_max_uploads: int = setting(16, "most files that each front receives at once", 1)
    batch_max_uploads_per_key: int = setting(4, "most files that each front receives at once from one key", 1)
    request_log: bool = setting(
        True, "a line for each request: on the terminal and in a file, or in Serve's log if Serve runs the application"
    )
    allow_chaos: bool = setting(
        False,
        "clients may kill a random engine or runner (POST /chaos, and a button of the page); needs keys unless the "
        "server listens on a loopback address",
    )
    otlp_traces_endpoint: str | None = setting(
        None, "OTLP/HTTP endpoint for a span of each request (extra otel), such as http://127.0.0.1:4318/v1/traces"
    )
    drain_timeout_s: float = setting(30.0, "how long running requests may take to end when the server stops", 0)

    def __post_init__(self) -> None:
        check_settings(self)

    def check_extras(self) -> None:
        """Raises CallboardError if a package that a setting needs is not installed."""
        if self.otlp_traces_endpoint is not None and not _has_module("opentelemetry.exporter.otlp.proto.http"):
            raise CallboardError(
                "otlp_traces_endpoint needs OpenTelemetry's exporter, which is not installed; "
                "run: pip install 'callboard[otel]'"
            )

    def listening_on(self, host: str) -> HttpSettings:
        """The settings of a server that listens on `host`: without keys, which browsers do not send by themselves, it
        answers only to its own names and those given. Raises CallboardError as `api_keys` and `check_chaos` do."""
        self.check_chaos(host)
        if self.api_keys() and not self.allowed_host:
            return self
        return replace(self, allowed_host=(*self.allowed_host, host, socket.gethostname()))

    def check_chaos(self, host: str) -> None:
        """Raises CallboardError if clients of other machines could kill processes without a key."""
        if self.allow_chaos and not self.has_keys and not _is_loopback(host):
            raise CallboardError(
                f"allow_chaos lets anyone who reaches {host} kill this server's processes; "
                "give api_key, or listen on 127.0.0.1."
            )

    @property
    def has_keys(self) -> bool:
        """True if clients need a key. The file of keys is not read again once the server has started."""
        return bool(self.api_key) or self.api_key_file is not None

    def api_keys(self) -> tuple[str, ...]:
        """All keys, none if everybody may come in; raises CallboardError if the file cannot be read or has none."""
        keys = [key.strip() for key in self.api_key]
        if self.api_key_file is not None:
            try:
                lines = [line.strip() for line in Path(self.api_key_file).read_text("utf-8").splitlines()]
            except (OSError, UnicodeDecodeError) as e:
                raise CallboardError(f"api_key_file {self.api_key_file!r} cannot be read: {e}.") from e
            keys += [line for line in lines if line and not line.startswith("#")]
        if "" in keys or (self.api_key_file is not None and not keys):
            raise CallboardError("An API key is empty; give each at least one character.")
        return tuple(keys)


def _has_module(name: str) -> bool:
    try:
        return importlib.util.find_spec(name) is not None
    except ModuleNotFoundError:  # of a package that it is in
        return False


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return host.lower() == "localhost"
