"""From an API request to engine requests, and from the engine's tokens to text: all of the front end but HTTP.

A plain class over an EngineClient, so that it runs in a test without Ray. `CompletionRequest | ChatRequest` -> `Job` ->
lists of `Delta`.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import AsyncGenerator, Iterable
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any, Literal

from actors.link import EngineBusy, EngineClient, EngineDraining, QueueTimeout
from runtime.core.types import CallboardError, FinishReason, Request, RequestOutput
from runtime.text.chat import ChatTemplate
from runtime.text.stream import TextStream
from runtime.text.tokenizer import Tokenizer
from serve_app.answers import Delta
from serve_app.errors import ApiError, echoed, invalid
from serve_app.metrics import JobRecord, Origin, ServiceMetrics
from serve_app.requests import MAX_CHOICES, ChatRequest, CompletionRequest, choice_seed

_TAIL = 8  # prompt tokens that tell how the output's text begins
_RECOVERY_RETRY_S = 1.0
_LOADING_RETRY_S = 5.0


@dataclass(frozen=True, slots=True)
class Job:
    """An API request, checked and tokenised: one engine request per choice, in the order of the choices' indices."""

    id: str
    chat: bool  # which endpoint's shape the answer has
    logprobs: bool
    requests: list[Request]
    echoes: list[str]  # the text that each choice begins with; empty unless echo was asked for
    num_prompt_tokens: int  # each prompt counted once, however many choices it has


class Service:
    """Answers API requests with one model, whatever brings the requests here."""

    def __init__(self, client: EngineClient, tokenizer: Tokenizer | None, model: str) -> None:
        """`model` is the name that clients use. Without a tokenizer the service is loading until `start`."""
        self.model = model
        self._client = client
        self.metrics = ServiceMetrics(client, model)
        self._created = int(time.time())
        self._tokenizer: Tokenizer | None = None
        if tokenizer is not None:
            self.start(tokenizer)

    def start(self, tokenizer: Tokenizer) -> None:
        """The client is connected, and this is the model's tokenizer: requests can be served."""
        self._template = ChatTemplate.of(tokenizer) if tokenizer.chat_template is not None else None
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

    def abort(self, request_id: str) -> None:
        """End a request by the id of its answer or its client's own id; an unknown one is no error."""
        self._client.abort(request_id)

    def check_model(self, name: str | None) -> None:
        """Raises the 404 for any name but this model's; a request without one means it."""
        if name is not None and name != self.model:
            raise ApiError(
                404,
                f"There is no model {echoed(name)!r} here; this server has {self.model!r}.",
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
        }

    def prepare(self, request: CompletionRequest | ChatRequest, request_id: str = "") -> Job:
        """Template, tokenise and check one API request; raises ApiError naming the field at fault.

        `request_id` becomes a part of the answer's id; without one it is random.
        Pure CPU work and thread-safe, so that a long prompt can be prepared beside the event loop."""
        self.check_model(request.model)
        chat = isinstance(request, ChatRequest)
        prompts, where = ([self.chat_prompt(request)], "messages") if chat else (self._prompts(request), "prompt")
        num_choices = request.n or 1
        if len(prompts) * num_choices > MAX_CHOICES:
            raise invalid(where, f"has {len(prompts)} prompts for {num_choices} choices each, above {MAX_CHOICES}")
        job_id = ("chatcmpl-" if chat else "cmpl-") + (request_id or secrets.token_hex(12))
        seed = secrets.randbits(63) if request.seed is None else None
        requests: list[Request] = []
        for prompt in prompts:
            max_tokens = self._max_tokens(request.max_output(), None if chat else 16, len(prompt), where)
            params = request.sampling_params(max_tokens)
            self._check_token_ids("logit_bias", (i for i, _ in params.logit_bias))
            self._check_token_ids("stop_token_ids", params.stop_token_ids)
            for i in range(num_choices):
                requests.append(
                    Request(
                        request_id=f"{job_id}-{len(requests)}",
                        token_ids=prompt,
                        prompt_len=len(prompt),
                        params=params,
                        seed=choice_seed(params.seed if seed is None else seed, i),
                        priority=request.priority,
                        cache_salt=request.cache_salt,
                    )
                )
        echoes = self._echoes(request, prompts, num_choices) if not chat and request.echo else []
        return Job(job_id, chat, request.num_logprobs() is not None, requests, echoes, sum(map(len, prompts)))

    async def run(self, job: Job, origin: Origin | None = None) -> AsyncGenerator[list[Delta], None]:
        """What is new of each choice, whenever something is, until all have finished. Close it to abort the rest.

        Raises ApiError: 429 if the engine is full, 503 if it is away, 504 if it is late, 500 if it fails."""
        with self.metrics.job(job.id, origin or Origin()) as record:
            if reason := self._client.health():
                raise _unavailable(reason, _RECOVERY_RETRY_S)
            if job.echoes:
                yield [Delta(i, text) for i, text in enumerate(job.echoes)]
            try:
                if len(job.requests) == 1:
                    async with aclosing(self._choice(0, job.requests[0], record)) as choice:
                        async for delta in choice:
                            yield [delta]
                else:
                    async with aclosing(self._merged(job.requests, record)) as choices:
                        async for deltas in choices:
                            yield deltas
            except EngineBusy as e:
                raise ApiError(
                    429, str(e), type="rate_limit_error", code="engine_busy", retry_after_s=e.retry_after_s
                ) from e
            except EngineDraining as e:
                raise _unavailable(str(e), _RECOVERY_RETRY_S) from e
            except QueueTimeout as e:
                raise ApiError(504, str(e), type="server_error", code="queue_timeout") from e
            except ApiError:
                raise
            except CallboardError as e:
                raise ApiError(500, str(e), type="server_error", code="engine_error") from e

    async def _merged(self, requests: list[Request], record: JobRecord) -> AsyncGenerator[list[Delta], None]:
        """All choices side by side."""
        ready: asyncio.Queue[Delta | Exception] = asyncio.Queue(maxsize=2 * len(requests))

        async def pump(index: int, request: Request) -> None:
            try:
                async with aclosing(self._choice(index, request, record)) as choice:
                    async for delta in choice:
                        await ready.put(delta)
            except Exception as e:
                await ready.put(e)

        pumps = [asyncio.create_task(pump(i, request)) for i, request in enumerate(requests)]
        num_open = len(requests)
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
            for task in pumps:
                task.cancel()  # each closes its generator, which aborts its request; nothing here waits for it

    async def _choice(self, index: int, request: Request, record: JobRecord) -> AsyncGenerator[Delta, None]:
        """One choice. Closing it, or a stop string, closes the engine's generator, which aborts the request."""
        params = request.params
        tail = request.token_ids[-_TAIL:]
        text = TextStream(
            self.tokenizer, params.stop, params.include_stop_str_in_output, params.skip_special_tokens, tail
        )
        with record.choice(request) as seen:
            async with aclosing(self._client.generate(request)) as outputs:
                async for output in outputs:
                    seen.note(output)
                    delta = _delta(index, text, output, params.include_stop_str_in_output)
                    if delta.finish_reason is not None:
                        seen.reason = delta.finish_reason
                    yield delta
                    if delta.finish_reason is not None:
                        self.metrics.delivered(seen)
                        return

    # ---- preparing --------------------------------------------------------------------------------------------------

    def chat_prompt(self, request: ChatRequest) -> list[int]:
        """A chat as token ids; raises ApiError if the model's template refuses it."""
        tokenizer = self.tokenizer
        if self._template is None:
            raise ApiError(400, f"{self.model!r} has no chat template; use /v1/completions with a plain prompt.")
        try:
            text = self._template.render([message.as_template_sees_it() for message in request.messages])
        except CallboardError as e:
            raise ApiError(400, str(e), param="messages") from e
        return tokenizer.encode(text, add_special_tokens=False)

    def _prompts(self, request: CompletionRequest) -> list[list[int]]:
        prompts = []
        for at, prompt in enumerate(request.prompts()):
            where = "prompt" if isinstance(request.prompt, str) else f"prompt.{at}"
            ids = self.tokenizer.encode(prompt) if isinstance(prompt, str) else prompt
            if not ids:
                raise invalid(where, "is empty; send at least one token")
            if ids is prompt:
                self._check_token_ids("prompt", ids)
            prompts.append(ids)
        return prompts

    def _check_token_ids(self, where: str, ids: Iterable[int]) -> None:
        largest, size = max(ids, default=0), self.tokenizer.vocab_size
        if largest >= size:
            raise invalid(where, f"holds the token id {largest}, but the ids of this model end at {size - 1}")

    def _max_tokens(self, asked: int | None, default: int | None, prompt_len: int, where: str) -> int:
        """Tokens of output, `default` (None: all that fit) if the request does not say; never beyond the context."""
        limit = self.max_model_len
        room = limit - prompt_len
        if room < 1 or (asked or 1) > room:
            wanted = f"{asked} tokens of output" if asked else "at least one token of output"
            raise ApiError(
                400,
                f"This model's maximum context length is {limit} tokens, but {where} has {prompt_len} tokens "
                f"and {wanted} must fit too; shorten {where}{' or lower max_tokens' if asked else ''}.",
                param=where,
                code="context_length_exceeded",
            )
        return asked or min(default or room, room)

    def _echoes(self, request: CompletionRequest, prompts: list[list[int]], num_choices: int) -> list[str]:
        given = request.prompts()
        texts = [
            prompt if isinstance(prompt, str) else self.tokenizer.decode(ids, request.skip_special_tokens)
            for prompt, ids in zip(given, prompts, strict=True)
        ]
        return [text for text in texts for _ in range(num_choices)]


def _delta(index: int, text: TextStream, output: RequestOutput, include_stop: bool) -> Delta:
    """An engine output as text; a stop string that it completes finishes the choice."""
    if output.finish_reason is FinishReason.ERROR:
        raise ApiError(500, output.error, type="server_error", code="engine_error")
    if output.finish_reason is FinishReason.ABORT:
        raise ApiError(499, "This request was aborted by its id.", type="request_aborted", code="request_aborted")
    token_ids, logprobs = output.token_ids, output.logprobs
    # The token that ended it (EOS or a stop id) counts as output but is not part of the text.
    hide_last = output.finish_reason is FinishReason.STOP and not include_stop
    num_used_before = text.num_tokens_used
    new = text.push(token_ids[:-1] if hide_last else token_ids)
    finish: Literal["stop", "length"] | None = None
    if text.stopped is not None:
        num_used = text.num_tokens_used - num_used_before  # the tokens after them were never asked for
        token_ids, logprobs, finish = token_ids[:num_used], logprobs[:num_used], "stop"
    elif output.finish_reason:
        new += text.finish()
        finish = "stop" if output.finish_reason is FinishReason.STOP else "length"
    return Delta(index, new, token_ids, logprobs, finish, output.num_cached)


def _unavailable(reason: str, retry_after_s: float) -> ApiError:
    return ApiError(503, reason, type="server_error", code="engine_unavailable", retry_after_s=retry_after_s)
