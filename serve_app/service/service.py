"""The front without HTTP: API requests to engine requests, and the engine's tokens to text.

Service is a plain class over an EngineClient, so tests run it without Ray. An API request becomes a `PreparedRequest`,
and its run yields lists of `Delta`."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Iterable, Iterator
from contextlib import aclosing, contextmanager
from dataclasses import asdict, replace
from importlib.metadata import version
from itertools import count
from typing import Any

from actors.wire.engine_client import EngineClient, EngineRefusal, Replaceable
from runtime.background import in_background
from runtime.base.config import EngineConfig
from runtime.base.reports import Vector, one_of
from runtime.base.types import CallboardError, FinishReason, Request
from runtime.core.requests import requests_of
from runtime.media.processor import ImageProcessor
from runtime.output.chat_prompt import ChatPrompter
from runtime.output.fields import invalid, shortened
from runtime.output.processor import Delta, OutputProcessor
from runtime.output.response_format import RequestedGrammar
from runtime.structured.compiler import GrammarCompiler
from runtime.text.sampling_defaults import SamplingDefaults
from runtime.text.stream import StopStrings
from runtime.text.tokenizer import Tokenizer
from serve_app.http.lanes import NeedsStart
from serve_app.observability.context import RequestContext
from serve_app.observability.metrics import RequestRecord, ServiceMetrics
from serve_app.protocol.errors import ApiError, redacted, unavailable
from serve_app.protocol.event_ids import by_token
from serve_app.protocol.prepared_request import PreparedRequest, R, ServedModel
from serve_app.service.checks import check_token_ids, check_work, unknown_model
from serve_app.service.endpoint import Endpoint
from serve_app.service.engine_errors import as_answers, failure, refused
from serve_app.service.grammars import compiled, ignored_paths
from serve_app.service.model_card import ModelCard, model_card
from serve_app.service.sleep import ModelSleep
from serve_app.service.vllm_config import vllm_config

_LOADING_RETRY_S = 5.0
_BURST, _CHOICE_COST = 1 << 18, 1 << 10  # tokens submitted at once (a few milliseconds of work); a choice's overhead
_MOST_POOLED = 256  # one pooling request's prompts in the engines' queues, which other requests share
_LATEST = ":latest"


class Service:
    """Answers API requests with one model."""

    def __init__(
        self,
        client: EngineClient,
        tokenizer: Tokenizer | None,
        model: str,
        draft: str | None = None,
        aliases: Iterable[str] = (),
        config: EngineConfig | None = None,
        grammars: GrammarCompiler | None = None,
        sleep: ModelSleep | None = None,
    ) -> None:
        """`model` is the name for clients, `draft` the draft's name or None, and `aliases` are more names of the model.

        `config` has the engines' settings, for clients; None for the defaults. `grammars` is a compiler that services
        share. Without `sleep` the model always has an engine.

        Answers have the first name. Without a tokenizer the service is loading until `start`."""
        self.model, self.draft, self._config = model, draft, config or EngineConfig()
        self._aliases = tuple(name for name in dict.fromkeys(aliases) if name != model)
        self._client = client
        self.metrics = ServiceMetrics(client, model)
        self._created = int(time.time())
        self.grammars = grammars or GrammarCompiler()
        self.sleep = sleep or ModelSleep(client)
        self.num_live = 0  # running requests
        self._tokenizer: Tokenizer | None = None
        if tokenizer is not None:
            self.start(tokenizer)

    def start(
        self, tokenizer: Tokenizer, defaults: SamplingDefaults | None = None, images: ImageProcessor | None = None
    ) -> None:
        """Serve requests from now on, since the client is connected.

        `defaults` are sampling parameters for requests without values. `images` is None for a model without them."""
        self._images = images
        self._defaults = defaults or SamplingDefaults()
        self._chats = ChatPrompter(tokenizer) if tokenizer.chat_template is not None else None
        self._tokenizer = tokenizer

    @property
    def loading(self) -> bool:
        """True while no request can be served yet."""
        return self._tokenizer is None

    def named(self, name: str | None) -> ServedModel:
        """Return the model, or the adapter with this name; None names the model.

        Raises the 404 for an unknown name, and the 503 while the service is loading."""
        name = self._as_served(name)
        name = self.model if name in self._aliases else name
        adapter = None if name == self.model else self._client.adapters.served().get(name)
        if self._tokenizer is None:
            raise unavailable(self.health() or "", _LOADING_RETRY_S)
        if adapter is None and name != self.model:
            raise unknown_model(name, self.names())
        digest, sleeps = "" if adapter is None else adapter.digest, self.sleep.is_allowed
        info, draft = self._client.info, self.draft
        return ServedModel(name, self._tokenizer, self._chats, info, draft, digest, self.model, sleeps, self._images)

    @property
    def takes_images(self) -> bool:
        """True if requests may have images."""
        return self._tokenizer is not None and self._images is not None

    def _as_served(self, name: str | None) -> str:
        """Return a name in the form of this server: Ollama's clients may add or leave out the tag `latest`.

        BASE:ADAPTER is an adapter of the model BASE, in the form of ray.serve.llm."""
        if not name:
            return self.model
        forms, names = [name, name.removesuffix(_LATEST), name + _LATEST], self.names()
        if adapter := self.adapter_name(name):
            forms += [
                form for form in (adapter, adapter.removesuffix(_LATEST)) if form in self._client.adapters.served()
            ]
        return next((form for form in forms if form in names), name)

    def adapter_name(self, name: str) -> str:
        """Return the ADAPTER of BASE:ADAPTER if BASE is a name of this model; empty for another form."""
        bases = [base for base in (self.model, *self._aliases) if name.startswith(f"{base}:")]
        return name[len(max(bases, key=len)) + 1 :] if bases else ""

    def serves(self, name: str) -> bool:
        """True if requests may have this name."""
        return self._as_served(name) in self.names()

    def computing(self, name: str | None) -> ServedModel:
        """Return a model as `named` does, for prompts that engines compute.

        Raises NeedsStart if no engine has reported the model's facts so far."""
        model = self.named(name)
        if not model.info.fingerprint:
            raise NeedsStart(self.sleep.start_engine)
        self._client.adapters.expect(model.adapter)
        return model

    def names(self) -> list[str]:
        """Return the names that requests may have: of the model and its adapters."""
        return [self.model, *self._aliases, *self._client.adapters.served()]

    def engines(self) -> list[str]:
        """Return the ids of the engines. A healthy server scaled to zero has none."""
        return self._client.engines()

    def health(self) -> str | None:
        """Return a sentence with the reason if requests cannot be served now, else None."""
        if (reason := self._client.health()) and (waits := self.sleep.waits()):
            return f"{self.model} {waits}."
        return reason or ("The server is loading the tokenizer." if self.loading else None)

    def abort(self, request_id: str, owner: str = "") -> None:
        """End a request of `owner` by its answer's id or the client's own id; unknown ids are ignored."""
        self._client.abort(owned(request_id, owner))

    def engine_client(self) -> EngineClient:
        """Return the client of the engines; raises the 503 while they refuse requests."""
        if reason := self.health():
            raise unavailable(reason)
        return self._client

    def description(self) -> dict[str, Any]:
        """Return facts about the model and its numerics; raises the 503 while the service is loading."""
        model = self.named(None)
        facts = asdict(model.info) | {"model": self.model, "draft": self.draft, "version": version("callboard")}
        facts |= {"system_fingerprint": model.fingerprint, "sampling": self._defaults.values}
        num_engines = len(self.engines())
        return facts | {"vllm_config": vllm_config(model.info, self._config, self.model, self.draft, num_engines)}

    def model_card(self, name: str | None = None) -> ModelCard:
        """Return OpenAI's model object for a name of the model or an adapter; raises errors as `named` does."""
        model = self.named(name)
        adapter = self._client.adapters.served().get(model.name) if model.adapter else None
        card_id = name if (name := self._as_served(name)) in self._aliases else model.name
        return model_card(card_id, self.model, model, None if adapter is None else adapter.entry, self._created)

    def model_cards(self) -> list[ModelCard]:
        """Return the objects of all names, the model's first."""
        return [self.model_card(name) for name in self.names()]

    def adapter_paths(self) -> dict[str, str]:
        """Return the folder of each adapter that is loaded, by name."""
        return {name: state.entry.path for name, state in self._client.adapters.served().items()}

    async def load_adapter(
        self, name: str, path: str, may_replace: bool, replaceable: Replaceable | None = None
    ) -> None:
        """Load the adapter in a folder under this name; returns when all engines have it, or raises ApiError.

        `replaceable` is that of `AdapterClient.load`."""
        if name in (self.model, *self._aliases):
            raise invalid("lora_name", f"is {shortened(name)!r}, which is already a name of the model itself")
        if name in self._client.adapters.served() and not may_replace:
            text = "which is a model here already; unload it first, or send load_inplace"
            raise invalid("lora_name", f"is {shortened(name)!r}, {text}")
        try:
            await self._client.adapters.load(name, path, replaceable)
        except EngineRefusal as e:
            raise refused(e) from e
        except CallboardError as e:
            raise ApiError(400, redacted(str(e)), param="lora_path", code="adapter_not_loaded") from e

    async def unload_adapter(self, name: str) -> None:
        """Refuse new requests with the adapter; returns when running ones have ended."""
        if (name := self._as_served(name)) not in self._client.adapters.served():
            raise unknown_model(name, self.names(), "lora_name")
        await self._client.adapters.unload(name)

    def prepare(
        self, endpoint: Endpoint[R], request: R, request_id: str = "", owner: str = "", answer_id: str = ""
    ) -> PreparedRequest[R]:
        """Template, tokenise and check one API request; raises FieldError or ApiError.

        `request_id` becomes a part of the answer's id, which is random without one. A stream that is taken up has its
        `answer_id` already. Only `owner` can abort the request.
        This is pure CPU work and thread-safe, so threads can prepare long prompts."""
        model = self.computing(request.model) if request.computes else self.named(request.model)
        if not model.info.makes_text:
            raise ApiError(400, "This model makes vectors, not text; use it for embeddings or scores.", param="model")
        prompts, limits = endpoint.limited_prompts(request, model)
        if request.prewarms:
            prompts, limits = replace(prompts, cut=Delta.drop_output), [1] * len(limits)
        lengths = [len(prompt) for prompt in prompts.token_ids]
        check_work(request, sum(lengths), len(lengths) * len(prompts.prediction), prompts.where)
        for at, prompt in enumerate(prompts.token_ids):
            check_token_ids(prompts.path(at), prompt, model)
        budget = None if prompts.message_format is None else prompts.message_format.budget
        if (prompts.grammar or budget) and not model.info.eos_token_ids:
            field = "thinking_token_budget" if prompts.grammar is None else prompts.grammar.field
            raise invalid(field, "needs a model with an end-of-sequence token, which this one lacks")
        if request.routed_experts and model.info.routed_experts is None:
            raise invalid("routed_experts", "needs a mixture of experts and a server started with --routed-experts")
        if (version := request.min_weight_version) is not None and model.info.weights is None:
            text = "is only allowed where weights may change; leave it out, or start the server with"
            raise invalid("min_weight_version", f"{text} --weight-updates")
        answer_id = answer_id or endpoint.new_id(request_id)
        names = (f"{owned(answer_id, owner)}-{i}" for i in count())
        requests: list[Request] = []
        for index, (prompt, most) in enumerate(zip(prompts.token_ids, limits, strict=True)):
            params = request.sampling_params(most, self._defaults, index)
            if budget is not None:
                params = replace(params, thinking=budget)
            if prompts.stop_token_ids:
                params = replace(params, stop_token_ids=(*params.stop_token_ids, *prompts.stop_token_ids))
            if not requests:
                check_token_ids("logit_bias", (i for i, _ in params.logit_bias), model)
                for name in ("allowed_token_ids", "logprob_token_ids", "stop_token_ids"):
                    check_token_ids(name, getattr(params, name), model)
            one = Request(
                "",
                prompt,
                prompts.lengths[index] if prompts.lengths else len(prompt),
                params,
                priority=request.priority,
                cache_salt=request.cache_salt or "",
                adapter=model.adapter,
                prediction=prompts.prediction,
                min_weight_version="" if version is None else str(version),
                images=prompts.images,
                cache_ttl_s=request.cache_ttl_s() if self._config.prefix_cache else 0.0,
            )
            requests += requests_of(one, names, request.n or 1)
        stops = StopStrings(params.stop) if params.stop else None
        ignored = [*request.ignored_fields(), *map(request.dialect.names.of, prompts.ignored_fields)]
        if (keep_s := request.keep_s() if self.sleep.is_allowed else None) is not None:
            ignored.remove("keep_alive")
        return PreparedRequest(
            answer_id, owner, request, model, prompts, requests, stops, ignored, keep_s, endpoint.keeps_aborted
        )

    async def run(
        self, prepared: PreparedRequest[Any], context: RequestContext | None = None
    ) -> AsyncGenerator[list[Delta], None]:
        """Yield the deltas of the choices as they come, until all have finished. Close it to abort the others.

        Raises ApiError: 400 if no engine can serve the request or the grammar is too complex, 429 for full queues, 503
        without engines, 504 for late engines, 500 for a failure."""
        context = context or RequestContext()
        context.model, context.ignored_fields = prepared.model.name, prepared.ignored_fields
        with (
            self._counted(),
            self.sleep.kept(prepared.keep_s),
            self.metrics.request(prepared.id, context, prepared.num_choices) as record,
        ):
            if reason := self._client.health():
                raise unavailable(reason)
            if (grammar := prepared.prompts.grammar) is not None:
                prepared = replace(prepared, requests=await self._bound_requests(prepared, grammar))
            with as_answers():
                if len(prepared.requests) == 1:
                    async with aclosing(self._choice(prepared, 0, record)) as choice:
                        async for delta in choice:
                            yield [delta]
                else:
                    async with aclosing(self._merged(prepared, record)) as choices:
                        async for deltas in choices:
                            yield deltas

    async def pool(self, answer_id: str, requests: list[Request], context: RequestContext) -> list[bytes]:
        """Return the pooled result of each request. Raises ApiError as `run` does; its cancellation aborts them."""
        with self._counted(), self.metrics.request(answer_id, context, 1) as record:
            if reason := self._client.health():
                raise unavailable(reason)
            with as_answers():
                if len(requests) == 1:
                    return [await self._pooled(requests[0], record)]
                room = asyncio.Semaphore(_MOST_POOLED)

                async def pooled(request: Request) -> bytes:
                    async with room:
                        return await self._pooled(request, record)

                tasks = [asyncio.create_task(pooled(request)) for request in requests]
                try:
                    return await asyncio.gather(*tasks)
                finally:
                    for task in tasks:
                        task.cancel()

    async def _pooled(self, request: Request, record: RequestRecord) -> bytes:
        with record.choice(request) as seen:
            async with aclosing(self._client.generate(request, seen.moved_to)) as outputs:
                async for output in outputs:
                    seen.note(output)
                    if output.finish_reason > FinishReason.LENGTH:
                        raise failure(output, None)
                    if (vector := one_of(output.reports, Vector)) is not None:
                        seen.reason = "stop"
                        self.metrics.delivered(seen)
                        return vector.numbers
        raise ApiError(500, "The engine ended a prompt without its vector.", code="engine_error")

    @contextmanager
    def _counted(self) -> Iterator[None]:
        self.num_live += 1
        try:
            yield
        finally:
            self.num_live -= 1

    async def _merged(self, prepared: PreparedRequest[Any], record: RequestRecord) -> AsyncGenerator[list[Delta], None]:
        """Yield the deltas of all choices, which run at the same time."""
        num_open = len(prepared.requests)
        ready: asyncio.Queue[Delta | Exception] = asyncio.Queue(maxsize=2 * num_open)

        async def pump(index: int) -> None:
            try:
                async with aclosing(self._choice(prepared, index, record)) as choice:
                    async for delta in choice:
                        await ready.put(delta)
            except Exception as e:
                await ready.put(e)

        pumps: list[asyncio.Task[None]] = []

        async def start() -> None:
            burst = 0
            for i, request in enumerate(prepared.requests):
                burst += request.prompt_len + len(request.prediction) + _CHOICE_COST
                if burst > _BURST:  # give others a turn; smaller bursts join the same engine step
                    await asyncio.sleep(0)
                    burst = 0
                pumps.append(in_background(asyncio.create_task(pump(i)), "the pump of a choice"))

        starting = in_background(asyncio.create_task(start()), "the start of a request's choices")
        try:
            while num_open:
                items = [await ready.get()]
                while not ready.empty():
                    items.append(ready.get_nowait())
                deltas = [item for item in items if isinstance(item, Delta)]
                if deltas:
                    yield deltas
                for item in items:
                    if isinstance(item, Exception):
                        raise item
                num_open -= sum(delta.finish_reason is not None for delta in deltas)
        finally:
            for task in (starting, *pumps):
                task.cancel()  # each closes its generator, which aborts its request, without a wait here

    async def _choice(
        self, prepared: PreparedRequest[Any], index: int, record: RequestRecord
    ) -> AsyncGenerator[Delta, None]:
        """Yield the deltas of one choice.

        Its end by `aclose`, a stop string or the last allowed call closes the engine's generator and so aborts the
        request."""
        request, echo = prepared.requests[index], prepared.echo(index)
        form, ids = prepared.prompts.message_format, prepared.event_ids
        form = form if ids is None else ids.message_format(form, index)
        processor = OutputProcessor(prepared.model.tokenizer, request, index, form, prepared.stops)
        with record.choice(request) as seen:
            generated = self._client.generate(request, seen.moved_to)
            async with aclosing(generated if ids is None else by_token(generated)) as outputs:
                async for output in outputs:
                    seen.note(output)
                    keeps = prepared.keeps_aborted and output.finish_reason is FinishReason.ABORT
                    if output.finish_reason > FinishReason.LENGTH and not keeps:
                        raise failure(output, prepared.prompts.grammar)
                    delta = processor.process(output)
                    if prepared.prompts.cut is not None:
                        prepared.prompts.cut(delta)
                    if echo is not None:
                        delta.text, echo = echo.text + delta.text, None
                    if delta.finish_reason is not None:
                        seen.reason = delta.finish_reason
                    if prepared.on_delta is not None:
                        prepared.on_delta(delta)
                    yield delta
                    if delta.finish_reason is not None:
                        self.metrics.delivered(seen)
                        return

    async def _bound_requests(self, prepared: PreparedRequest[Any], asked: RequestedGrammar) -> list[Request]:
        """Return the engine requests with their grammar, and add its unenforced keywords to the ignored fields."""
        asked_at = time.monotonic()
        self.metrics.waits_for_grammar()
        try:
            grammar = await compiled(self.grammars, asked, prepared.owner)
        finally:
            self.metrics.waited_for_grammar(time.monotonic() - asked_at)
        prepared.ignored_fields.extend(map(prepared.request.dialect.names.of, ignored_paths(grammar, asked)))
        grammar = replace(grammar, ignored=())
        return [replace(request, params=replace(request.params, grammar=grammar)) for request in prepared.requests]


def owned(request_id: str, owner: str) -> str:
    """Return the engine's id of a request, which contains its owner."""
    return f"{owner}/{request_id}" if owner else request_id
