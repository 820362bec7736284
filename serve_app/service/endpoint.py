"""Endpoint: translates one kind of request to prompts, and outputs to its answer or stream."""

from __future__ import annotations

import secrets
from abc import ABC, abstractmethod
from typing import Any, ClassVar, Generic

from runtime.base.reports import prompt_entries
from runtime.output.processor import Delta
from serve_app.protocol.answers import ChoiceUsage, encode_json, prompt_logprobs
from serve_app.protocol.errors import ContextExceeded, PromptSize
from serve_app.protocol.operation import Operation
from serve_app.protocol.parsing import parse
from serve_app.protocol.prepared_request import PreparedRequest, Prompts, R, ServedModel
from serve_app.protocol.sse import EventStream, header


class AnsweredAtOnce(Exception):
    """Raised for a request without model output; `content` is its answer as JSON.

    The model remains loaded for `keep_s` without requests: 0 for no longer, None for its usual time."""

    def __init__(self, content: bytes, model: str, keep_s: float | None) -> None:
        super().__init__(content)
        self.content, self.model, self.keep_s = content, model, keep_s


class Endpoint(ABC, Generic[R]):
    """One kind of request, listed in ENDPOINTS."""

    path: ClassVar[str]
    request_type: type[R]
    operation: ClassVar[Operation]
    id_prefix: ClassVar[str]  # begins answer ids
    default_max_tokens: ClassVar[int | None]  # used by requests without a number; None for the rest of the context

    renders_chats: ClassVar[bool] = False  # true if prompts need the model's chat template
    keeps_aborted: ClassVar[bool] = False  # true if an aborted choice is answered with its tokens so far
    max_tokens_field: ClassVar[str] = "max_tokens"  # field that a client may lower for a longer prompt

    def new_id(self, request_id: str) -> str:
        """Return an answer's id, from its request's id or random without one."""
        return self.id_prefix + (request_id or secrets.token_hex(12))

    def read(self, body: bytes) -> R:
        """Return the request in a body of JSON; raises FieldError or ApiError."""
        return parse(self.request_type, body)

    @abstractmethod
    def prompts(self, request: R, model: ServedModel) -> Prompts:
        """Return the request's prompts as token ids; raises FieldError or ApiError."""

    def parts(self, request: R, model: ServedModel) -> dict[str, int]:
        """Return the tokens in some parts of a prompt, for an error; the rest is in messages."""
        return {}

    def limited_prompts(self, request: R, model: ServedModel) -> tuple[Prompts, list[int]]:
        """Return the prompts and each prompt's most output tokens; raises FieldError or ApiError."""
        try:
            prompts = self.prompts(request, model)
            return prompts, [self._max_tokens(request, len(ids), model, prompts.where) for ids in prompts.token_ids]
        except ContextExceeded as e:
            raise e.with_parts(self.parts(request, model)) from e

    def _max_tokens(self, request: R, prompt_len: int, model: ServedModel, where: str) -> int:
        """Return the tokens of output within the context, from the request or the endpoint's default."""
        asked, default, limit = request.max_output(), self.default_max_tokens, model.info.max_model_len
        room = limit - prompt_len
        if (1 if asked is None else asked) > room:
            raise ContextExceeded(PromptSize(where, limit, prompt_len, asked or None, self.max_tokens_field))
        return min(room if default is None else default, room) if asked is None else asked

    def choices(self, prepared: PreparedRequest[R]) -> list[Delta]:
        """Return an empty sum of deltas for each choice."""
        return [Delta(i) for i in range(len(prepared.requests))]

    @abstractmethod
    def answer(self, prepared: PreparedRequest[R], choices: list[Delta]) -> bytes:
        """Return the answer to a request without a stream; `choices` are the sums of all deltas."""

    @abstractmethod
    def stream(self, prepared: PreparedRequest[R], include_usage: bool) -> EventStream:
        """Return the answer's stream of events."""

    def truncated(self, request: R, prompt: list[int], model: ServedModel) -> list[int]:
        """Return the end of a prompt, as `truncate_prompt_tokens` sets it."""
        if (last := request.truncate_prompt_tokens) is None:
            return prompt
        asked = request.max_output()
        room = max(1, model.info.max_model_len - (self.default_max_tokens or 1 if asked is None else asked))
        return prompt[-(room if last == -1 else last) :]


def of_prompt(prepared: PreparedRequest[Any], choice: Delta) -> dict[str, Any]:
    """Return the fields about the prompt of a choice that the request wants."""
    request, found = prepared.request, dict[str, Any]()
    if (num_top := request.prompt_logprobs) is not None:
        entries = prompt_entries(choice.reports, prepared.requests[choice.index].token_ids)
        found["prompt_logprobs"] = prompt_logprobs(entries, prepared.tokenizer, num_top)
    if request.shows_prompt_ids:
        found["prompt_token_ids"] = prepared.requests[choice.index].token_ids
    return found


def answer_with(
    prepared: PreparedRequest[Any], kind: str, choices: list[Delta], rendered: list[dict[str, Any]], **more: Any
) -> bytes:
    """Return an answer of OpenAI's shape with these rendered choices."""
    usages = [ChoiceUsage() for _ in choices]
    for choice, its_usage in zip(choices, usages, strict=True):
        its_usage.add(choice)
    return encode_json({**header(prepared, kind), "choices": rendered, "usage": prepared.usage(usages), **more})
