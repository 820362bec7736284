"""Settings for the front door and the number of engines: frozen, and checked once."""

from __future__ import annotations

import importlib.util
import ipaddress
import math
import re
import socket
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal, Self

from runtime.base.config import EngineConfig, check_settings, names_of, setting
from runtime.base.model_info import ModelInfo
from runtime.base.types import CallboardError
from runtime.media.source import ImageLimits
from serve_app.durations import Duration


@dataclass(frozen=True, slots=True)
class ScalingSettings:
    """The number of a model's engines, fixed or by load."""

    num_replicas: int = setting(1, "model replicas, each an engine with its runners", 1)
    min_replicas: int | None = setting(None, "fewest replicas, at low load; default: num_replicas", 1)
    max_replicas: int | None = setting(None, "most replicas, at high load; default: num_replicas", 1)
    scale_in_delay_s: float = setting(120.0, "time for which a replica was not needed before it ends", 0)
    idle_sleep: Duration | None = setting(  # noqa: RUF009  # a frozen float
        None,
        "time without requests, such as 10m, before a model's replicas end; the next request starts one; default: "
        "never, but several models make room for each other",
        above=0,
    )

    def __post_init__(self) -> None:
        check_settings(self)
        if self.least > self.most:
            raise CallboardError(f"min_replicas is {self.least}; it must be at most max_replicas, {self.most}.")
        if self.sleeps and self.min_replicas is not None:
            raise CallboardError(
                f"idle_sleep ends all replicas of a model, but min_replicas is {self.min_replicas}; leave one out."
            )

    @property
    def sleeps(self) -> bool:
        """True if all replicas of an idle model may end."""
        return self.idle_sleep is not None

    def beside_others(self) -> ScalingSettings:
        """Return the settings of one model among several: it sleeps if another one needs its memory."""
        always = self.sleeps or self.min_replicas is not None
        return self if always else replace(self, idle_sleep=Duration(math.inf))

    @property
    def least(self) -> int:
        """The fewest replicas at any time."""
        if self.sleeps:
            return 0
        return self.num_replicas if self.min_replicas is None else self.min_replicas

    @property
    def most(self) -> int:
        """The most replicas at any time."""
        return self.num_replicas if self.max_replicas is None else self.max_replicas


ENGINES = "Engine"  # the deployment of the first model's engines; the other names begin with it


@dataclass(frozen=True, slots=True)
class ModelSettings:
    """One model of an application: its engines' settings, its names for clients, the first for answers."""

    config: EngineConfig
    names: tuple[str, ...]
    scaling: ScalingSettings
    deployment: str = ENGINES  # its engines' deployment
    bundles: tuple[dict[str, float], ...] = ()  # an engine's placement group
    expected: ModelInfo | None = None  # facts before its first engine; None if it never sleeps
    accelerator_type: str | None = None  # its engines' GPUs, as Ray names them; None for any

    @classmethod
    def of_all(cls, models: Sequence[tuple[EngineConfig, tuple[str, ...], ScalingSettings]]) -> tuple[Self, ...]:
        """Return an application's models from their settings and given names; the first is the default one.

        Raises CallboardError if two models share a name."""
        found: list[Self] = []
        owners: dict[str, EngineConfig] = {}
        for config, given, scaling in models:
            first, *others = names_of(config.model)
            names = given or (first, *(name for name in others if name not in owners))
            for name in (*dict.fromkeys(names), *config.adapters):
                if owners.get(name) is config:
                    raise CallboardError(
                        f"An adapter of lora is called {name!r}, as the model is; give it another name."
                    )
                if name in owners:
                    raise CallboardError(f"Two models are called {name!r}; give one another served_model_name.")
                owners[name] = config
            deployment = ENGINES if not found else f"{ENGINES}-{re.sub(r'[^A-Za-z0-9._-]+', '-', names[0])}"
            found.append(cls(config, names, scaling if len(models) == 1 else scaling.beside_others(), deployment))
        return tuple(found)


@dataclass(frozen=True, slots=True)
class HttpSettings:
    """The front replicas' settings. The engine's own limits (its queue, its context) are in EngineConfig."""

    api_key: tuple[str, ...] = setting(
        (),
        "a key for clients, sent as a Bearer token; may be given several times; default of `callboard serve`: "
        "$CALLBOARD_API_KEY",
    )
    api_key_file: str | None = setting(None, "file with more keys, one a line, at this path on every node")
    cors_origin: tuple[str, ...] = setting(
        (), "origin of web pages that may call this server, * for any; may be given several times"
    )
    allowed_host: tuple[str, ...] = setting(
        (),
        "public name of this server for clients, * for any; may be given several times; requests for another host are "
        "refused, without keys even if this is not given",
    )
    max_body_bytes: int | None = setting(
        None, "longest request body; default: 8 MiB, or 32 MiB if a model takes images", 1
    )
    max_unread_bytes: int = setting(1 << 30, "most bytes of bodies that each front receives at once", 1)
    max_unread_bytes_per_key: int = setting(
        256 << 20, "most bytes of bodies that each front receives at once from one key", 1
    )
    body_timeout_s: float = setting(60.0, "longest time for a request body to arrive", above=0)
    max_header_bytes: int = setting(12 << 10, "longest request headers in all; HAProxy's own limit is 15 KiB", 1)
    max_n: int = setting(128, "most choices (n) of one request", 1)
    max_stop: int = setting(64, "most stop strings of one request", 1)
    max_prompts: int = setting(1024, "most prompts of one request", 1)
    image_urls: tuple[str, ...] = setting(
        (),
        "host from which fronts fetch images with https, or any; may be given several times; default: none, clients "
        "send the images themselves",
    )
    max_images: int = setting(20, "most images of one request", 0)
    max_image_bytes: int = setting(20 << 20, "longest image file", 1)
    client_priority: bool = setting(
        False, "clients may send a priority below 0, to be served before others; one above 0 is always allowed"
    )
    routing_policy: Literal["prefix", "least-load", "round-robin"] = setting(
        "prefix",
        "which of several engines gets a request: the one with most of its prompt cached and the least load, the one "
        "with the fewest requests, or the next one",
    )
    request_timeout_s: float | None = setting(None, "longest time for a whole answer; default: any", above=0)
    keep_alive_s: float = setting(15.0, "a stream that waits for its first token sends a comment this often", above=0)
    lora_folder: str | None = setting(
        None,
        "folder from which clients may load adapters while the server runs (/v1/load_lora_adapter), at this path on "
        "every node; default: not allowed",
    )
    lora_on_demand: bool = setting(
        False,
        "also load the adapter FOLDER/NAME of lora_folder at the first request with the model NAME or BASE:NAME; the "
        "least recently used idle one makes room",
    )
    weight_folder: str | None = setting(
        None,
        "folder from which clients may load weights while the server runs (/update_weights), at this path on every "
        "node; default: not allowed",
    )
    response_store_bytes: int = setting(
        128 << 20, "memory of each front for stored responses (/v1/responses); 0 stores none", 0
    )
    response_life_s: float = setting(86_400.0, "longest life of a stored response", above=0)
    recorded_request_bytes: int = setting(
        16 << 20, "memory of each front for its latest requests, which `callboard replay` sends again; 0 for none", 0
    )
    batch_folder: str | None = setting(
        None, "folder for /v1/files and /v1/batches, on a disk that all fronts share; default: no such routes"
    )
    batch_file_bytes: int = setting(200 << 20, "longest file that clients may upload", 1)
    batch_max_requests: int = setting(50_000, "most requests of one batch", 1)
    batch_concurrency: int = setting(16, "requests of batches that each front runs at once; API keys share them", 1)
    batch_max_open: int = setting(256, "most open batches of all keys", 1)
    batch_max_open_per_key: int = setting(32, "most open batches of one key", 1)
    batch_max_ended_per_key: int = setting(1000, "most stored ended batches of one key; older ones are removed", 1)
    batch_max_files: int = setting(20_000, "most files of all keys, results of batches included", 1)
    batch_max_files_per_key: int = setting(2000, "most files of one key, results of batches included", 1)
    batch_max_bytes: int = setting(64 << 30, "most bytes of all keys' files, results of batches included", 1)
    batch_max_bytes_per_key: int = setting(16 << 30, "most bytes of one key's files, results of batches included", 1)
    batch_max_uploads: int = setting(16, "most files that each front receives at once", 1)
    batch_max_uploads_per_key: int = setting(4, "most files that each front receives at once from one key", 1)
    request_log: bool = setting(
        True, "a line for each request: on the terminal and in a file, or in Serve's log under `serve run`"
    )
    allow_chaos: bool = setting(
        False,
        "clients may kill a random engine or runner (POST /chaos, and a button of the page); needs keys unless the "
        "server listens on a loopback address",
    )
    otlp_traces_endpoint: str | None = setting(
        None, "OTLP/HTTP endpoint for a span of each request (extra otel), such as http://127.0.0.1:4318/v1/traces"
    )
    drain_timeout_s: float = setting(30.0, "time for running requests when the server stops", 0)

    def __post_init__(self) -> None:
        check_settings(self)
        if self.lora_on_demand and self.lora_folder is None:
            raise CallboardError("lora_on_demand loads adapters of lora_folder, which is not given; give it, too.")

    def longest_body(self, takes_images: bool) -> int:
        """Return the longest request body."""
        return self.max_body_bytes or (32 << 20 if takes_images else 8 << 20)

    def image_limits(self, max_image_tokens: int) -> ImageLimits:
        """Return the limits for images, with the model's limit for one image's tokens."""
        return ImageLimits(
            max_images=self.max_images,
            max_image_bytes=self.max_image_bytes,
            max_image_tokens=max_image_tokens,
            image_urls=self.image_urls,
        )

    def check_extras(self) -> None:
        """Raise CallboardError if a setting needs a missing package."""
        if self.otlp_traces_endpoint is not None and not _has_module("opentelemetry.exporter.otlp.proto.http"):
            raise CallboardError(
                "otlp_traces_endpoint needs OpenTelemetry's exporter, which is not installed; "
                "run: pip install 'callboard[otel]'"
            )

    def listening_on(self, host: str) -> HttpSettings:
        """Return the settings of a server that listens on `host`. Without keys it answers only to known names.

        Browsers do not send keys by themselves. Raises CallboardError as `api_keys` and `check_chaos` do."""
        self.check_chaos(host)
        if self.api_keys() and not self.allowed_host:
            return self
        return replace(self, allowed_host=(*self.allowed_host, host, socket.gethostname()))

    def check_chaos(self, host: str) -> None:
        """Raise CallboardError if clients of other machines could kill processes without a key."""
        if self.allow_chaos and not self.has_keys and not _is_loopback(host):
            raise CallboardError(
                f"allow_chaos lets any client of {host} kill this server's processes; "
                "give api_key, or listen on 127.0.0.1."
            )

    def check_weight_updates(self, host: str) -> None:
        """Raise CallboardError if clients of other machines could change the weights without a key."""
        if not self.has_keys and not _is_loopback(host):
            raise CallboardError(
                f"weight_updates lets any client of {host} change this server's weights; "
                "give api_key, or listen on 127.0.0.1."
            )

    @property
    def has_keys(self) -> bool:
        """True if clients need a key. The file of keys is read only at the start."""
        return bool(self.api_key) or self.api_key_file is not None

    def api_keys(self) -> tuple[str, ...]:
        """Return all keys, or none for an open server; raises CallboardError for an unreadable or empty file."""
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
    except ModuleNotFoundError:  # a parent package is missing
        return False


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return host.lower() == "localhost"
