"""The answers of routes that concern the server, its models and their tokenizer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from msgspec import Struct

from actors.wire.weight_calls import WeightState
from serve_app.protocol.operation import ErrorObject
from serve_app.service.model_card import ModelCard


class Aborted(Struct):
    request_id: str
    object: Literal["request.abort"] = "request.abort"


class Tokenized(Struct):
    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str | None] | None


class ContentTokens(Struct):
    """llama.cpp's answer: ids, or objects with an id and a piece."""

    tokens: list[Any]


class Detokenized(Struct):
    prompt: str  # vLLM's name
    content: str  # llama.cpp's


class TokenizerInfo(Struct):
    tokenizer_class: str
    chat_template: str | None
    model_max_length: int


class Health(Struct, omit_defaults=True, kw_only=True):
    status: Literal["ok", "ready"]
    phase: str | None = None  # set only without an engine that computes
    phases: dict[str, str] = {}  # each such model's phase by name, if there are several models


class Unhealthy(Struct):
    error: ErrorObject
    status: Literal["unavailable"]
    reason: str


class NotReady(Struct):
    error: ErrorObject
    status: Literal["loading", "unavailable"]
    phase: str


class Killed(Struct):
    object: Literal["chaos.kill"]
    role: str
    engine: str
    pid: int


class CheckedGrammar(Struct, kw_only=True):
    object: Literal["grammar.check"] = "grammar.check"
    ignored: list[str]


class Sleeping(Struct):
    is_sleeping: bool


class FrontLoad(Struct):
    server_load: int


class ServerInfo(Struct):
    version: str
    model: str
    max_model_len: int
    dtype: str
    system_fingerprint: str
    sampling: dict[str, float]  # the model makers' defaults
    allow_chaos: bool
    max_images: int  # a request
    max_image_bytes: int  # a file
    vllm_config: dict[str, Any]  # the same facts by vLLM's names


class Version(Struct):
    version: str


class Document(Struct):
    openapi: str


class ModelList(Struct, kw_only=True):
    object: Literal["list"] = "list"
    data: list[ModelCard]


class RecordedRequest(Struct):
    id: str
    object: Literal["request"]
    path: str
    seed: int | list[int]
    system_fingerprint: str
    request: dict[str, Any]
    choices: list[dict[str, Any]]


class AbortedRequests(Struct):
    aborted: int  # ids that were named
    status: Literal["aborted"] = "aborted"


class Paused(Struct):
    status: Literal["paused", "resumed"]


class PauseStatus(Struct):
    is_paused: bool


class Message(Struct):
    message: str


class FinishedUpdate(Struct, omit_defaults=True):
    message: str
    weight_version: str
    serial: int
    stored: bool
    draft_head: str = ""  # "updated", "partly" or "kept", by the head's tensors in the update; empty without


class Renamed(Struct):
    new_version: str
    success: bool = True


class WorldSize(Struct):
    world_size: int


class EngineWeights(Struct):
    engine: str
    weight_version: str
    serial: int  # updates before it
    stored: bool  # restarted runners would have these weights
    updating: bool  # an update is open
    paused: bool


class WeightInfo(Struct):
    weight_version: str  # all engines' oldest version
    serial: int
    stored: bool  # true on all engines
    updating: bool  # true on any engine
    paused: bool  # all engines are
    engines: list[EngineWeights]

    @classmethod
    def of(cls, answers: Mapping[str, WeightState]) -> WeightInfo:
        """Return the answers of one or more engines, added up, by their ids."""
        engines = [
            EngineWeights(engine, a.version, a.serial, a.stored, a.updating, a.paused)
            for engine, a in sorted(answers.items())
        ]
        oldest = min(engines, key=lambda each: each.serial)
        return cls(
            oldest.weight_version,
            oldest.serial,
            all(each.stored for each in engines),
            any(each.updating for each in engines),
            all(each.paused for each in engines),
            engines,
        )
