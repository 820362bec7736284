"""POST /v1/responses: a conversation and its answer in items. The prompt is that of a chat."""

from __future__ import annotations

import secrets
from bisect import bisect_left
from collections.abc import Callable

from runtime.output.processor import Delta
from serve_app.apis.chat.endpoint import CHAT
from serve_app.apis.chat.messages import INSTRUCTING, ChatMessage
from serve_app.apis.responses.answers import ResponseObject
from serve_app.apis.responses.builder import ResponseBuilder, ResponseStream
from serve_app.apis.responses.request import ResponsesRequest
from serve_app.apis.responses.store import ResponseStore
from serve_app.protocol.answers import encode_json
from serve_app.protocol.errors import ApiError
from serve_app.protocol.operation import WHOLE_ANSWERS, Operation
from serve_app.protocol.prepared_request import PreparedRequest, Prompts, ServedModel
from serve_app.service.endpoint import Endpoint


class ResponsesEndpoint(Endpoint[ResponsesRequest]):
    """Items in, items out."""

    path, request_type, id_prefix, default_max_tokens = "/v1/responses", ResponsesRequest, "resp_", None
    max_tokens_field, renders_chats = "max_output_tokens", True
    operation = Operation("Answer a chat of items", ResponseObject, (ResponsesRequest,), WHOLE_ANSWERS, streams=True)

    def __init__(self, store: ResponseStore) -> None:
        self._store = store

    def new_id(self, request_id: str) -> str:
        """Return a unique id even for a repeated request id, since the response may be stored."""
        return f"{self.id_prefix}{self._store.front}_{secrets.token_hex(8)}-{request_id or secrets.token_hex(12)}"

    def prompts(self, request: ResponsesRequest, model: ServedModel) -> Prompts:
        def prompts_of(messages: list[ChatMessage]) -> Prompts:
            return CHAT.prompts(request.chat(messages), model, "input")

        messages = request.messages()
        if request.truncation == "auto":
            room = model.info.max_model_len - (request.max_output() or 1)
            return _longest_that_fits(messages, room, prompts_of)
        return prompts_of(messages)

    def parts(self, request: ResponsesRequest, model: ServedModel) -> dict[str, int]:
        return CHAT.parts(request.chat(request.messages()), model)

    def choices(self, prepared: PreparedRequest[ResponsesRequest]) -> list[Delta]:
        return [BuiltChoice(ResponseBuilder(prepared, self._store.stores(prepared.request), has_events=False))]

    def answer(self, prepared: PreparedRequest[ResponsesRequest], choices: list[Delta]) -> bytes:
        (choice,) = choices
        assert isinstance(choice, BuiltChoice), "`choices` makes it"
        return self._store.keep(prepared, choice.builder) or encode_json(choice.builder.object())

    def stream(self, prepared: PreparedRequest[ResponsesRequest], include_usage: bool) -> ResponseStream:
        builder = ResponseBuilder(prepared, self._store.stores(prepared.request), has_events=True)
        return ResponseStream(builder, lambda: self._store.keep(prepared, builder))


class BuiltChoice(Delta):
    """The sum of an answer's deltas as a response, which keeps their order."""

    def __init__(self, builder: ResponseBuilder) -> None:
        super().__init__(0)
        self.builder = builder

    def add(self, new: Delta) -> None:
        self.builder.add(new)


def _longest_that_fits(
    messages: list[ChatMessage], room: int, prompts_of: Callable[[list[ChatMessage]], Prompts]
) -> Prompts:
    """Return a conversation's prompts, without its oldest turns if it is too long.

    Instructions remain. The rest starts with a user message."""

    def without(start: int) -> list[ChatMessage]:
        return [message for message in messages[:start] if message.role in INSTRUCTING] + messages[start:]

    def fits(start: int) -> bool:
        try:
            return len(prompts_of(without(start)).token_ids[0]) <= room
        except ApiError as e:
            if e.code != "context_length_exceeded":
                raise
            return False

    starts = [0, *(i for i, message in enumerate(messages) if message.role == "user" and i)]
    at = bisect_left(starts, True, hi=len(starts) - 1, key=fits)  # the last turn always stays
    return prompts_of(without(starts[at]))
