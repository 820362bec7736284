"""An engine for tests of the front end: it answers with a script, and records requests and aborts."""

import asyncio
import json
import math
import time
from collections.abc import AsyncGenerator, Sequence
from dataclasses import replace

import httpx
import numpy as np
import tokenizers
from tokenizers import AddedToken, decoders, models, pre_tokenizers

from actors.wire.adapter_entry import AdapterEntry, AdapterState
from actors.wire.engine_client import EngineRefusal, Refusal, WeightsRefused
from actors.wire.metrics import MetricValues, Snapshot, all_at_zero
from actors.wire.weight_calls import (
    Discard,
    Finish,
    Pause,
    Receive,
    Rename,
    Resume,
    Start,
    WeightCall,
    WeightState,
)
from runtime.base.model.pooling import Pooling
from runtime.base.model_info import ModelInfo
from runtime.base.reports import Experts, TokenLogprobs, Vector, Verified
from runtime.base.types import CallboardError, FinishReason, Request, RequestOutput
from runtime.base.weight_version import WeightVersion
from runtime.text.tokenizer import Tokenizer
from serve_app.application import build_http_app
from serve_app.service.service import Service
from tests.support.engine.fake_runner import prompt_scores

MODEL = "fake"
EOS = 256
TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


# Qwen-Coder's marks for texts between others, and for repositories.
GAP_MARKS = ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>", "<|repo_name|>", "<|file_sep|>", "<|fim_pad|>")


def byte_tokenizer(chat_template: str | None = TEMPLATE, marks: Sequence[str] = ()) -> Tokenizer:
    """One token per byte, with the byte as its id, <eos> = 256, and then the marks."""
    alphabet = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [b for b in range(256) if b not in alphabet]
    vocab = {chr(b): b for b in alphabet} | {chr(256 + i): b for i, b in enumerate(others)}
    backend = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(mark, special=True, normalized=False) for mark in ("<eos>", *marks)])
    return Tokenizer(backend, bos_token_id=None, eos_token_ids=(EOS,), special_tokens={}, chat_template=chat_template)


def vector_of(token_ids: list[int], pooling: Pooling) -> np.ndarray:
    """The vector of a prompt: the number of each byte from a to d; or its length, as logits."""
    if pooling.num_labels:
        return np.full(pooling.num_labels, len(token_ids) / 100, np.float32)
    return np.array([token_ids.count(byte) for byte in b"abcd"], np.float32)


class FakeAdapters:
    """Adapters that are loaded at once; a folder called "bad" cannot be loaded."""

    def __init__(self) -> None:
        self.states: dict[str, AdapterState] = {}

    def served(self) -> dict[str, AdapterState]:
        return self.states

    def expect(self, digest: str) -> None:
        """Nothing is unloaded here."""

    async def load(self, name: str, path: str, replaceable=None) -> None:
        if path.endswith("/bad"):
            raise CallboardError(f"{path} has no adapter_config.json.")
        self.states[name] = AdapterState(AdapterEntry(name, path, 5 * 10**9), f"digest of {name}")

    async def unload(self, name: str) -> None:
        del self.states[name]


class FakeWeights:
    """The weights of one engine with two ranks. Each part of an update is remembered; one with "bad" is at fault."""

    def __init__(self) -> None:
        self.version, self.is_paused, self.update_id = WeightVersion(), False, ""
        self.calls: list[WeightCall] = []

    async def call(self, call: WeightCall) -> WeightState:
        self.calls.append(call)
        match call:
            case Pause() | Resume():
                self.is_paused = isinstance(call, Pause)
            case Start() if self.update_id:
                raise WeightsRefused("Another update of the weights is open.", "busy")
            case Start():
                self.update_id = call.update_id
            case Receive() | Finish() if not self.update_id:
                raise WeightsRefused("No update of the weights is open; begin with start_weight_update.", "not_open")
            case Receive() if "bad" in call.update_info:
                raise WeightsRefused("update_info.bad is not a field.", "bad_request")
            case Finish():
                self.version, self.update_id = self.version.after(self.update_id, call.weight_version, False), ""
            case Discard():
                self.update_id = ""
            case Rename():
                self.version = replace(self.version, name=call.new_version)
        return WeightState(self.is_paused, self.version.name, self.version.serial, True, bool(self.update_id), 2)


class FakeEngine:
    """Answers every request with the bytes of `text`, `group` tokens an output, `delay_s` apart, and then EOS.

    The token at each position has logprob -0.5, and `params.logprobs` alternatives of -1.5, -2.5 ... A token t of the
    prompt has -t / 128, and `params.prompt_logprobs` alternatives. Each token was drawn with a logprob of -0.25. Its
    experts are its position. With `num_wrong` a draft guesses all tokens of an
    output but the last, and `num_wrong` more in vain."""

    def __init__(
        self,
        text: str = "Hello, wörld!",
        *,
        group: int = 1,
        delay_s: float = 0.0,
        busy: bool = False,
        fails_after: int | None = None,
        failure: tuple[FinishReason, str] = (FinishReason.ERROR, "The model gave no finite logits."),
        reason: str | None = None,
        max_model_len: int = 128,
        num_wrong: int | None = None,
        pooling: Pooling | None = None,
        makes_text: bool = True,
        can_sleep: bool = True,
        weights: WeightVersion | None = None,
        weight_versions: Sequence[tuple[int, str]] = (),
        routed_experts: tuple[int, int] | None = None,
    ) -> None:
        places = {"pooling": pooling, "makes_text": makes_text, "can_sleep": can_sleep, "weights": weights}
        places["routed_experts"] = routed_experts
        self.info = ModelInfo("f", 320, max_model_len, (EOS,), 9, 16, "float32", "cpu", **places)
        self.script = [*text.encode(), EOS]
        self.group, self.delay_s, self.busy, self.fails_after, self.reason = group, delay_s, busy, fails_after, reason
        self.num_wrong, self.failure = num_wrong, failure
        self.adapters, self.fake_weights, self.weight_versions = FakeAdapters(), FakeWeights(), weight_versions
        self.requests: list[Request] = []
        self.num_running = self.sleep_level = 0
        self.reported = all_at_zero()
        self.aborted: list[str] = []
        self.aborts: list[str] = []  # ids that were named

    def health(self) -> str | None:
        return self.reason

    def engines(self) -> list[str]:
        return ["0"]

    async def report(self, figures: dict[str, MetricValues]) -> dict[str, Snapshot]:
        """The report of one engine without counts of its own."""
        for new in figures.values():
            self.reported.add(new)
        return {"0": Snapshot(self.reported, {"block_size": "9"})}

    async def sleep(self, level: int) -> None:
        """It has little memory to give back, and answers all the same."""
        self.sleep_level = level

    @property
    def is_asleep(self) -> bool:
        return self.sleep_level > 0

    @property
    def is_paused(self) -> bool:
        return self.fake_weights.is_paused

    async def weights(self, call: WeightCall) -> dict[str, WeightState]:
        return {"0": await self.fake_weights.call(call)}

    async def reset_prefix_cache(self) -> None:
        """Nothing is cached here."""

    def abort(self, request_id: str) -> None:
        self.aborts.append(request_id)

    async def generate(self, request: Request, on_engine=None) -> AsyncGenerator[RequestOutput, None]:
        self.requests.append(request)
        await asyncio.sleep(0)
        if self.busy:
            raise EngineRefusal("The engine's queue is full; come back in 2 seconds.", Refusal.BUSY, 1.5)
        self.num_running += 1
        done = False
        try:
            for output in self._outputs(request):
                await asyncio.sleep(self.delay_s)
                done = bool(output.finish_reason)
                yield output
        finally:
            self.num_running -= 1
            if not done:
                self.aborted.append(request.request_id)

    def _outputs(self, request: Request):
        params = request.params
        if params.pooled:
            if self.fails_after is not None:
                reason, error = self.failure
                yield RequestOutput(request.request_id, [], reason, error=error)
                return
            output = RequestOutput(request.request_id, [], FinishReason.LENGTH, num_cached=3, sampled_at=time.time())
            output.reports = [Vector(vector_of(request.token_ids, self.info.pooling).tobytes())]
            yield output
            return
        ids = [i for i in self.script if not (params.ignore_eos and i == EOS)]
        ids = ids[: max(0, request.prompt_len + params.max_tokens - len(request.token_ids))]
        ends = [at for at, i in enumerate(ids, start=1) if i in params.stop_token_ids]
        ids = ids[: min(ends, default=len(ids))]
        scores = []
        if params.prompt_logprobs is not None:
            top = [(65 + k, -1.5 - k) for k in range(params.prompt_logprobs)]
            scores = [prompt_scores([(-i / 128, 3, top) for i in request.token_ids[1:]], len(top))]
        if not ids:
            yield RequestOutput(request.request_id, [], FinishReason.LENGTH, reports=scores)
        for at in range(0, len(ids), self.group):
            if self.fails_after is not None and at >= self.fails_after:
                reason, error = self.failure
                versions = self.weight_versions
                yield RequestOutput(request.request_id, [], reason, error=error, weight_versions=versions)
                return
            output = RequestOutput(request.request_id, ids[at : at + self.group], num_cached=3 if at == 0 else 0)
            if at == 0:
                output.reports = scores
            output.sampled_at, output.weight_versions = time.time(), self.weight_versions
            if self.num_wrong is not None and (right := len(output.token_ids) - 1):
                output.reports = [*output.reports, Verified(0, right + self.num_wrong, right)]
            if params.logprobs is not None:
                top = [(65 + k, -1.5 - k) for k in range(params.logprobs)]
                top += [(i, -9.5) for i in params.logprob_token_ids]
                drawn = -0.25 if params.sampling_logprobs else None
                output.logprobs = [TokenLogprobs(i, -0.5, 1, tuple(top), drawn) for i in output.token_ids]
            if at + self.group >= len(ids):
                reason = FinishReason.STOP if ids[-1] == EOS or ends else FinishReason.LENGTH
                output = replace(output, finish_reason=reason, stop_token_id=ids[-1] if ends else None)
                if params.routed_experts:
                    positions = np.arange(len(request.token_ids) + len(ids) - 1, dtype=np.int16)
                    experts = Experts(positions.repeat(math.prod(self.info.routed_experts)).tobytes())
                    output.reports = [*output.reports, experts]
            yield output


# ---- the HTTP front over it, and what comes out ----------------------------------------------------------------------


def client_of(engine: FakeEngine, tokenizer=None, draft: str | None = None) -> httpx.AsyncClient:
    app = build_http_app(Service(engine, tokenizer or byte_tokenizer(), MODEL, draft))
    transport = httpx.ASGITransport(app, raise_app_exceptions=False)
    json_type = {"Content-Type": "application/json"}  # also of bodies that are given as bytes
    return httpx.AsyncClient(transport=transport, base_url="http://test", headers=json_type)


def events_of(response: httpx.Response) -> list[dict]:
    """The JSON events of a stream; it must end with exactly one [DONE]."""
    assert response.headers["content-type"].startswith("text/event-stream")
    chunks = response.text.split("\n\n")
    assert chunks.pop() == ""
    assert chunks.pop() == "data: [DONE]"
    assert all(chunk.startswith("data: {") for chunk in chunks)
    return [json.loads(chunk.removeprefix("data: ")) for chunk in chunks]


async def post(engine: FakeEngine, body: dict, path: str = "/v1/completions") -> httpx.Response:
    async with client_of(engine) as client:
        return await client.post(path, json=body)


def chat(**fields) -> dict:
    return {"model": MODEL, "messages": [{"role": "user", "content": "hi"}], **fields}


def assert_error(response: httpx.Response, status: int, param: str | None, says: str, code: str | None = None) -> None:
    assert response.status_code == status, response.text
    assert response.headers["content-type"] == "application/json"
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["param"] == param
    assert error["code"] == code
    assert says in error["message"]
    assert "Traceback" not in error["message"]
