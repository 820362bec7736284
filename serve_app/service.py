"""From an API request to engine requests, and from the engine's tokens to text: all of the front end but HTTP.

A plain class over an EngineClient, so that it runs in a test without Ray: an API request -> `PreparedRequest` -> lists
of `Delta`.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import AsyncGenerator, Iterable
from contextlib import aclosing
from dataclasses import replace
from itertools import accumulate
from typing import Any
from urllib.parse import quote

from actors.engine_client import EngineBusy, EngineClient, EngineDraining, QueueTimeout, RequestRefused
from runtime.core.types import CallboardError, FinishReason, Request
from runtime.structured.compiler import CompilerBusy, GrammarCompiler
from runtime.structured.pattern import GrammarError
from runtime.text import reasoning
from runtime.text.chat import ChatTemplate
from runtime.text.sampling_defaults import SamplingDefaults
from runtime.text.stream import StopStrings, TextStream
from runtime.text.tokenizer import Tokenizer
from runtime.text.tool_calls import HERMES, LLAMA3
from serve_app.errors import ApiError, invalid, shortened
from serve_app.limits import check_template_values
from serve_app.message_parser import MessageFormat, MessageParser
from serve_app.metrics import RequestContext, RequestRecord, ServiceMetrics
from serve_app.prepared_request import PreparedRequest
from serve_app.prompt_ids import prompt_ids
from serve_app.requests import MAX_CHOICES, ChatRequest, CompletionRequest, choice_seed
from serve_app.response_format import RequestedGrammar
from serve_app.responses import Delta, Echo, delta_of, text_stream

_RECOVERY_RETRY_S = 1.0
_LOADING_RETRY_S = 5.0
_MAX_PROMPT_TOKENS = 4_000_000  # of one request, which sends a prompt to the engine once for each choice
_BURST, _CHOICE_COST = 1 << 18, 1 << 10  # tokens submitted at once, some milliseconds' work; a choice is work itself
_MAX_IGNORED = 32  # keywords of a schema that are not enforced, in a header
_MAX_SCORES = 1 << 18  # log-probabilities of prompts that one request may ask for: 80 bytes of JSON each


class Service:
    """Answers API requests with one model, whatever brings the requests here."""

    def __init__(self, client: EngineClient, tokenizer: Tokenizer | None, model: str, draft: str | None = None) -> None:
        """`model` is the name that clients use, `draft` that of what guesses for it, None if nothing does. Without a
        tokenizer the service is loading until `start`."""
        self.model, self.draft = model, draft
        self._client = client
        self.metrics = ServiceMetrics(client, model)
        self._created = int(time.time())
        self.grammars = GrammarCompiler()
        self._tokenizer: Tokenizer | None = None
        if tokenizer is not None:
            self.start(tokenizer)

    def start(self, tokenizer: Tokenizer, defaults: SamplingDefaults | None = None) -> None:
        """The client is connected, and these are the model's tokenizer and how requests are sampled that do not say:
        they can be served."""
        self._defaults = defaults or SamplingDefaults()
        self._template = ChatTemplate.of(tokenizer) if tokenizer.chat_template is not None else None
        marks = (reasoning.OPEN, reasoning.CLOSE, HERMES.mark, HERMES.end_mark, LLAMA3.mark)
        self._mark_ids = tokenizer.special_ids.intersection(map(tokenizer.token_to_id, marks))
        self._tokenizer = tokenizer

    @property
    def loading(self) -> bool:
        """Whether no request could be served yet."""
        return self._tokenizer is None

    @property
    def tokenizer(self) -> Tokenizer:
        """Raises the 503 while the service is loading."""
        if self._tokenizer is None:
            raise _unavailable(self._client.health(), _LOADING_RETRY_S)
        return self._tokenizer

    @property
    def max_model_len(self) -> int:
        """The longest prompt + output, in tokens."""
        return self._client.info.max_model_len

    def health(self) -> str:
        """Empty if requests can be served now; else one sentence that says why not."""
        return self._client.health() or ("The server is loading the tokenizer." if self.loading else "")

    def abort(self, request_id: str, owner: str = "") -> None:
        """End a request by the id of its answer or its client's own id, if it is `owner`'s; an unknown one is no
        error."""
        self._client.abort(_owned(request_id, owner))

    def check_model(self, name: str | None) -> None:
        """Raises the 404 for any name but this model's; a request without one means it."""
        if name is not None and name != self.model:
            raise ApiError(
                404,
                f"There is no model {shortened(name)!r} here; this server has {self.model!r}.",
                param="model",
                code="model_not_found",
            )

    def model_card(self) -> dict[str, Any]:
        """OpenAI's model object; raises the 503 while the service is loading."""
        _ = self.tokenizer
        return {
            "id": self.model,
            "object": "model",
            "created": self._created,
            "owned_by": "callboard",
            "max_model_len": self.max_model_len,
            "draft": self.draft,
        }

    def prepare(
        self, request: CompletionRequest | ChatRequest, request_id: str = "", owner: str = ""
    ) -> PreparedRequest:
        """Template, tokenise and check one API request; raises ApiError naming the field at fault.

        `request_id` becomes a part of the answer's id; without one it is random. Of those who ask, only `owner` can
        abort it.
        Pure CPU work and thread-safe, so that a long prompt can be prepared beside the event loop."""
        self.check_model(request.model)
        chat = isinstance(request, ChatRequest)
        default = None if chat else 16
        message_format = None
        if isinstance(request, ChatRequest):
            prompt, message_format = self.chat_prompt(request)
            prompts, where = [prompt], "messages"
        else:
            prompts, where = self._prompts(request), "prompt"
        asked = request.max_output()
        if (last := request.truncate_prompt_tokens) is not None:
            room = max(1, self.max_model_len - (default or 1 if asked is None else asked))
            prompts = [prompt[-(room if last == -1 else last) :] for prompt in prompts]
        answer_id = ("chatcmpl-" if chat else "cmpl-") + (request_id or secrets.token_hex(12))
        max_tokens = [self._max_tokens(asked, default, len(prompt), where) for prompt in prompts]
        _check_work(request, sum(map(len, prompts)), where)
        for at, prompt in enumerate(prompts):
            self._check_token_ids(where if len(prompts) == 1 else f"{where}.{at}", prompt)
        requests = self._requests(request, _owned(answer_id, owner), prompts, max_tokens)
        options = request.stream_options
        return PreparedRequest(
            id=answer_id,
            chat=chat,
            logprobs=request.num_logprobs() is not None,
            requests=requests,
            stops=StopStrings(requests[0].params.stop) if requests[0].params.stop else None,
            num_choices=request.n or 1,
            fingerprint="fp_" + self._client.info.fingerprint[:16],
            echoes=[] if chat or not request.echo else self._echoes(request, prompts),
            prompt_logprobs=request.prompt_logprobs,
            return_token_ids=bool(request.return_token_ids),
            return_draft_spans=isinstance(request, CompletionRequest) and bool(request.return_draft_spans),
            continuous_usage=options is not None and options.continuous_usage_stats,
            speculates=self.draft is not None,
            ignored_fields=request.ignored_fields(),
            message_format=message_format,
            structure=self._requested_grammar(request, message_format),
        )

    def _requests(
        self, request: CompletionRequest | ChatRequest, name: str, prompts: list[list[int]], max_tokens: list[int]
    ) -> list[Request]:
        """A request of the engine for each choice of each prompt."""
        seed = secrets.randbits(63) if request.seed is None else None
        requests: list[Request] = []
        for prompt, most in zip(prompts, max_tokens, strict=True):
            params = request.sampling_params(most, self._defaults)
            if not requests:
                self._check_token_ids("logit_bias", (i for i, _ in params.logit_bias))
                self._check_token_ids("stop_token_ids", params.stop_token_ids)
            for i in range(request.n or 1):
                requests.append(
                    Request(
                        request_id=f"{name}-{len(requests)}",
                        token_ids=prompt,
                        prompt_len=len(prompt),
                        params=params,
                        seed=choice_seed(params.seed if seed is None else seed, i),
                        priority=request.priority,
                        cache_salt=request.cache_salt or "",
                    )
                )
        return requests

    async def run(
        self, prepared: PreparedRequest, context: RequestContext | None = None
    ) -> AsyncGenerator[list[Delta], None]:
        """What is new of each choice, whenever something is, until all have finished. Close it to abort the rest.

        Raises ApiError: 400 if no engine can serve it or a grammar is too complex, 429 if the engines or the compiler
        are full, 503 if the engines are away, 504 if they are late, 500 if one fails."""
        with self.metrics.request(prepared.id, context or RequestContext(), prepared.num_choices) as record:
            if reason := self._client.health():
                raise _unavailable(reason, _RECOVERY_RETRY_S)
            if prepared.structure is not None:
                await self._give_grammar(prepared, prepared.structure)
            try:
                if len(prepared.requests) == 1:
                    async with aclosing(self._choice(prepared, 0, record)) as choice:
                        async for delta in choice:
                            yield [delta]
                else:
                    async with aclosing(self._merged(prepared, record)) as choices:
                        async for deltas in choices:
                            yield deltas
            except EngineBusy as e:
                raise _too_many(e, e.retry_after_s, "engine_busy") from e
            except EngineDraining as e:
                raise _unavailable(str(e), _RECOVERY_RETRY_S) from e
            except QueueTimeout as e:
                raise ApiError(504, str(e), type="server_error", code="queue_timeout") from e
            except RequestRefused as e:
                raise ApiError(400, str(e)) from e
            except ApiError:
                raise
            except CallboardError as e:
                raise ApiError(500, str(e), type="server_error", code="engine_error") from e

    async def _merged(self, prepared: PreparedRequest, record: RequestRecord) -> AsyncGenerator[list[Delta], None]:
        """All choices side by side."""
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
                burst += request.prompt_len + _CHOICE_COST
                if burst > _BURST:  # others have their turn; below it, all choices come to the engine's same step
                    await asyncio.sleep(0)
                    burst = 0
                pumps.append(asyncio.create_task(pump(i)))

        starting = asyncio.create_task(start())
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
            starting.cancel()
            for task in pumps:
                task.cancel()  # each closes its generator, which aborts its request; nothing here waits for it

    async def _choice(
        self, prepared: PreparedRequest, index: int, record: RequestRecord
    ) -> AsyncGenerator[Delta, None]:
        """One choice. Closing it, a stop string or the last call allowed closes the engine's generator, which aborts
        the request."""
        request, echo, message_format = prepared.requests[index], prepared.echo(index), prepared.message_format
        params = request.params
        kept = frozenset() if message_format is None else message_format.kept_special_ids
        text = text_stream(self.tokenizer, request, prepared.stops, params.include_stop_str_in_output, kept)
        parser = None if message_format is None else MessageParser(message_format)
        with record.choice(request) as seen:
            async with aclosing(self._client.generate(request)) as outputs:
                async for output in outputs:
                    seen.note(output)
                    if output.finish_reason is FinishReason.GRAMMAR:
                        field = None if prepared.structure is None else prepared.structure.field
                        raise ApiError(400, output.error, param=field, code="grammar_failed")
                    delta = delta_of(index, text, output, params.include_stop_str_in_output)
                    if echo is not None:
                        delta.text, echo = echo.text + delta.text, None
                    if parser is not None:
                        parser.read(delta)
                    if delta.finish_reason is not None:
                        seen.reason = delta.finish_reason
                    yield delta
                    if delta.finish_reason is not None:
                        self.metrics.delivered(seen)
                        return

    async def _give_grammar(self, prepared: PreparedRequest, structure: RequestedGrammar) -> None:
        asked_at = time.monotonic()
        self.metrics.waits_for_grammar(prepared.requests[0])
        try:
            grammar = await self.grammars.compile(structure.spec)
        except GrammarError as e:
            raise invalid(structure.field, str(e)) from e
        except CompilerBusy as e:
            raise _too_many(e, e.retry_after_s, "grammars_busy") from e
        finally:
            self.metrics.waited_for_grammar(prepared.requests[0], time.monotonic() - asked_at)
        paths = grammar.ignored[:_MAX_IGNORED]
        prepared.ignored_fields.extend(quote(f"{structure.field}{path}", safe="/#$.")[:128] for path in paths)
        grammar = replace(grammar, ignored=())
        for request in prepared.requests:
            request.params = replace(request.params, grammar=grammar)

    # ---- preparing --------------------------------------------------------------------------------------------------

    def chat_prompt(self, request: ChatRequest) -> tuple[list[int], MessageFormat | None]:
        """A chat as token ids, and how what comes after them is read; raises ApiError if the model's template refuses
        it."""
        tokenizer, template = self.tokenizer, self._template
        if template is None:
            raise ApiError(400, f"{self.model!r} has no chat template; use /v1/completions with a plain prompt.")
        tools = request.offered_tools()
        form = template.tool_format if tools else None
        if tools and form is None:
            raise invalid("tools", f"cannot be used: {self.model!r} has no template with a known format of calls")
        offered = [tool.as_template_sees_it() for tool in tools] or None
        check_template_values("tools", offered)
        check_template_values("chat_template_kwargs", request.chat_template_kwargs)
        try:
            text = template.render(
                request.template_messages(),
                request.add_generation_prompt is not False,
                offered,
                request.continue_final_message,
                **request.chat_template_kwargs or {},
            )
        except CallboardError as e:
            raise ApiError(400, str(e), param="messages") from e
        message_format = None
        if form is not None or template.thinks:
            begun = request.begun_call()
            in_reasoning = template.thinks and _in_reasoning(request, text)
            if form is not None and begun is not None:
                if in_reasoning:
                    text = f"{text.rstrip()}\n\n{reasoning.CLOSE}\n\n"
                text += form.opening(begun)
            message_format = MessageFormat(
                thinks=template.thinks and begun is None,
                in_reasoning=in_reasoning,
                shows_reasoning=request.include_reasoning,
                tools=form,
                function_names=request.function_names if begun is None else None,
                most_calls=request.most_calls(),
                begun=begun,
                kept_special_ids=self._mark_ids,
            )
        truncated = request.truncate_prompt_tokens is not None
        special = bool(request.add_special_tokens)
        return prompt_ids(tokenizer, text, special, self.max_model_len, "messages", truncated), message_format

    def _requested_grammar(
        self, request: CompletionRequest | ChatRequest, message_format: MessageFormat | None
    ) -> RequestedGrammar | None:
        """What the output must match, counted from where the prompt ends."""
        structure = request.structure()
        if structure is not None and message_format is not None and message_format.in_reasoning:
            if self.tokenizer.token_to_id(reasoning.CLOSE) in self.tokenizer.special_ids:
                raise invalid(structure.field, "cannot follow reasoning of this model; turn its reasoning off")
            structure = replace(structure, spec=replace(structure.spec, after=reasoning.CLOSE))
        if isinstance(request, ChatRequest):
            marks_are_text = message_format is None or not message_format.kept_special_ids
            structure = request.bound_grammar(structure, message_format and message_format.tools, marks_are_text)
        if structure is not None and not self._client.info.eos_token_ids:
            raise invalid(structure.field, "needs a model with an end-of-sequence token, and this one has none")
        return structure

    def _prompts(self, request: CompletionRequest) -> list[list[int]]:
        given, n = request.prompts(), request.n or 1
        special, truncated = request.add_special_tokens is not False, request.truncate_prompt_tokens is not None
        if len(given) * n > MAX_CHOICES:
            raise invalid("prompt", f"has {len(given)} prompts for {n} choices each; at most {MAX_CHOICES} are allowed")
        prompts = []
        for at, prompt in enumerate(given):
            where = "prompt" if len(given) == 1 else f"prompt.{at}"
            if isinstance(prompt, str):
                prompts.append(prompt_ids(self.tokenizer, prompt, special, self.max_model_len, where, truncated))
            else:
                prompts.append(prompt)
            if not prompts[-1]:
                raise invalid(where, "is empty; send at least one token")
        return prompts

    def _check_token_ids(self, where: str, ids: Iterable[int]) -> None:
        largest, size = max(ids, default=0), min(self.tokenizer.vocab_size, self._client.info.vocab_size)
        if largest >= size:
            raise invalid(where, f"holds the token id {largest}, but the ids of this model end at {size - 1}")

    def _max_tokens(self, asked: int | None, default: int | None, prompt_len: int, where: str) -> int:
        """Tokens of output, `default` (None: all that fit) if the request does not say; never beyond the context."""
        limit = self.max_model_len
        room = limit - prompt_len
        if (1 if asked is None else asked) > room:
            wanted = f"{asked} tokens of output" if asked else "at least one token of output"
            raise ApiError(
                400,
                f"This model's maximum context length is {limit} tokens, but {where} has {prompt_len} tokens "
                f"and {wanted} must fit too; shorten {where}{' or lower max_tokens' if asked else ''}.",
                param=where,
                code="context_length_exceeded",
            )
        return min(room if default is None else default, room) if asked is None else asked

    def _echoes(self, request: CompletionRequest, prompts: list[list[int]]) -> list[Echo]:
        wants_offsets = request.logprobs is not None
        echoes = []
        for given, ids in zip(request.prompts(), prompts, strict=True):
            if isinstance(given, str) and request.truncate_prompt_tokens is None:
                special = request.add_special_tokens is not False
                echoes.append(Echo(given, self.tokenizer.offsets(given, special) if wants_offsets else []))
                continue
            stream = TextStream(self.tokenizer, skip_special_tokens=request.skip_special_tokens)
            pieces = [stream.push((i,)) for i in ids]  # a character that the prompt leaves unfinished is the output's
            echoes.append(Echo("".join(pieces), list(accumulate(map(len, pieces[:-1]), initial=0))))
        return echoes


def _owned(request_id: str, owner: str) -> str:
    """A name that the engine knows a request by."""
    return f"{owner}/{request_id}" if owner else request_id


def _check_work(request: CompletionRequest | ChatRequest, num_tokens: int, where: str) -> None:
    """Raises the 400 for choices or scores of prompts of so many tokens that are too much for one request."""
    n, top = request.n or 1, request.num_prompt_logprobs()
    if num_tokens * n > _MAX_PROMPT_TOKENS:
        what = f"{num_tokens} tokens of prompt" + (f" for {n} choices each" if n > 1 else "")
        raise invalid("n" if n > 1 else where, f"asks for {what}; at most {_MAX_PROMPT_TOKENS} in all are allowed")
    if top is not None and num_tokens * n * (top + 1) > _MAX_SCORES:
        raise invalid(
            "logprobs" if request.prompt_logprobs is None else "prompt_logprobs",
            f"asks for {top + 1} log-probabilities at each of {num_tokens * n} tokens of prompt; at most "
            f"{_MAX_SCORES} in all are allowed",
        )


def _in_reasoning(request: ChatRequest, prompt: str) -> bool:
    """Whether a prompt ends within reasoning."""
    if request.continue_final_message:
        before = request.messages[-1].text()
        return before.rfind(reasoning.OPEN) > before.rfind(reasoning.CLOSE)
    return prompt.rstrip().endswith(reasoning.OPEN)


def _too_many(error: CallboardError, retry_after_s: float, code: str) -> ApiError:
    return ApiError(429, str(error), type="rate_limit_error", code=code, retry_after_s=retry_after_s)


def _unavailable(reason: str, retry_after_s: float) -> ApiError:
    return ApiError(503, reason, type="server_error", code="engine_unavailable", retry_after_s=retry_after_s)
