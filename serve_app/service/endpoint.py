"""Endpoint: how one kind of request becomes prompts, and how its answer and its stream look."""

from __future__ import annotations

import secrets
from abc import ABC, abstractmethod
from typing import Any, ClassVar, Generic

from runtime.output.processor import Delta
from serve_app.protocol.answers import ChoiceUsage, encode_json, prompt_logprobs
from serve_app.protocol.operation import Operation
from serve_app.protocol.parsing import parse
from serve_app.protocol.prepared_request import PreparedRequest, Prompts, R, ServedModel
from serve_app.protocol.sse import EventStream, header


class AnsweredAtOnce(Exception):
    """A request that asks nothing of the model; `content` is the JSON of its answer."""

    def __init__(self, content: bytes) -> None:
        super().__init__(content)
        self.content = content


class Endpoint(ABC, Generic[R]):
    """One kind of request. A new one is a class of its own, listed in ENDPOINTS."""

    path: ClassVar[str]
    request_type: type[R]
    operation: ClassVar[Operation]
    id_prefix: ClassVar[str]  # of answers
    default_max_tokens: ClassVar[int | None]  # of a request that does not say; None: all that fit

    renders_chats: ClassVar[bool] = False  # a prompt is rendered by the model's chat template
    max_tokens_field: ClassVar[str] = "max_tokens"  # what a client may lower for a prompt to fit

    def new_id(self, request_id: str) -> str:
        """The id of an answer: that of its request, or, without one, random."""
        return self.id_prefix + (request_id or secrets.token_hex(12))

    def read(self, body: bytes) -> R:
        """The request in a body of JSON; raises FieldError or ApiError."""
        return parse(self.request_type, body)

    @abstractmethod
    def prompts(self, request: R, model: ServedModel) -> Prompts:
        """The request as token ids; raises FieldError or ApiError."""

    def choices(self, prepared: PreparedRequest[R]) -> list[Delta]:
        """What the deltas of each choice are added to."""
        return [Delta(i) for i in range(len(prepared.requests))]

    @abstractmethod
    def answer(self, prepared: PreparedRequest[R], choices: list[Delta]) -> bytes:
        """The whole answer of a request that is not streamed; `choices` have all of each choice's deltas."""

    @abstractmethod
    def stream(self, prepared: PreparedRequest[R], include_usage: bool) -> EventStream:
        """The same in events."""

    def truncated(self, request: R, prompt: list[int], model: ServedModel) -> list[int]:
        """The end of a prompt, as much as the request wants."""
        if (last := request.truncate_prompt_tokens) is None:
            return prompt
        asked = request.max_output()
        room = max(1, model.info.max_model_len - (self.default_max_tokens or 1 if asked is None else asked))
        return prompt[-(room if last == -1 else last) :]


def of_prompt(prepared: PreparedRequest[Any], choice: Delta) -> dict[str, Any]:
    """Fields about the prompt of a choice, those that were asked for."""
    request, found = prepared.request, dict[str, Any]()
    if (num_top := request.prompt_logprobs) is not None:
        found["prompt_logprobs"] = prompt_logprobs(choice.prompt_logprobs, prepared.model.tokenizer, num_top)
    if request.shows_prompt_ids:
        found["prompt_token_ids"] = prepared.requests[choice.index].token_ids
    return found


def answer_with(
    prepared: PreparedRequest[Any], kind: str, choices: list[Delta], rendered: list[dict[str, Any]], **more: Any
) -> bytes:
    """An answer of OpenAI's shape with these rendered choices."""
    usages = [ChoiceUsage() for _ in choices]
    for choice, its_usage in zip(choices, usages, strict=True):
        its_usage.add(choice)
    return encode_json({**header(prepared, kind), "choices": rendered, "usage": prepared.usage(usages), **more})
