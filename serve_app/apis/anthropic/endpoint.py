"""POST /v1/messages: a chat in the form of Anthropic's client."""

from __future__ import annotations

from typing import Any

from pydantic_core import from_json

from runtime.output.options import TTL_SECONDS
from runtime.output.processor import Delta
from serve_app.apis.anthropic.answers import AnsweredMessage, MessagesOperation
from serve_app.apis.anthropic.request import MessagesRequest
from serve_app.apis.chat.endpoint import ChatEndpoint
from serve_app.apis.chat.request import ChatRequest
from serve_app.protocol.answers import ChoiceUsage, encode_json
from serve_app.protocol.dialects import MESSAGES
from serve_app.protocol.errors import ApiError, anthropic_body
from serve_app.protocol.operation import WHOLE_ANSWERS
from serve_app.protocol.parsing import parse
from serve_app.protocol.prepared_request import PreparedRequest
from serve_app.protocol.sse import EventStream


class MessagesEndpoint(ChatEndpoint):
    """Content blocks in, content blocks out: a chat with one choice."""

    path, id_prefix, keeps_aborted = "/v1/messages", "msg_", False  # its API lacks the reason
    operation = MessagesOperation(
        "Answer a chat, in Anthropic's form", AnsweredMessage, (MessagesRequest,), WHOLE_ANSWERS, streams=True
    )

    def read(self, body: bytes) -> ChatRequest:
        return parse(MessagesRequest, body).as_chat()

    def answer(self, prepared: PreparedRequest[ChatRequest], choices: list[Delta]) -> bytes:
        (choice,) = choices
        usage = ChoiceUsage()
        usage.add(choice)
        content: list[dict[str, Any]] = []
        if choice.reasoning:
            content.append(_thinking(choice.reasoning))
        if choice.text:
            content.append(_text(choice.text))
        content += [_tool_use(call.id, call.name, parsed_arguments(call.arguments)) for call in choice.calls]
        message = _message(prepared, content, _usage(prepared, usage))
        return encode_json(message | _end(choice))

    def stream(self, prepared: PreparedRequest[ChatRequest], include_usage: bool) -> EventStream:
        return MessageStream(prepared)


class MessageStream(EventStream):
    """One answer's events. Each content block ends before the next one begins."""

    keep_alive = b'event: ping\ndata: {"type":"ping"}\n\n'

    def __init__(self, prepared: PreparedRequest[ChatRequest]) -> None:
        self._prepared = prepared
        self._usage = ChoiceUsage()
        self._has_begun = False
        self._block = -1  # index of the last block
        self._kind = ""  # the open block's kind
        self._prefix = self._suffix = b""  # around its next piece, as JSON
        self._end: dict[str, Any] = {}

    def events(self, deltas: list[Delta]) -> bytes:
        parts = []
        for delta in deltas:
            self._usage.add(delta)
            if not self._has_begun:  # the number of cached tokens is known only now
                self._has_begun = True
                usage = _usage(self._prepared, self._usage) | {"output_tokens": 0}
                message = _message(self._prepared, [], usage) | {"stop_reason": None, "stop_sequence": None}
                parts += [_event({"type": "message_start", "message": message}), self.keep_alive]
            if delta.reasoning:
                parts += [*self._open("thinking", _thinking("")), self._piece(delta.reasoning)]
            if delta.text:
                parts += [*self._open("text", _text("")), self._piece(delta.text)]
            for call in delta.calls:
                if call.name:
                    parts += self._open(call.id, _tool_use(call.id, call.name, {}))
                if call.arguments:
                    parts.append(self._piece(call.arguments))
            if delta.finish_reason is not None:
                parts.append(self._close())
                self._end = _end(delta)
        return b"".join(parts)

    def last(self) -> bytes:
        end = {"type": "message_delta", "delta": self._end, "usage": _usage(self._prepared, self._usage)}
        return _event(end) + _event({"type": "message_stop"})

    def failed(self, error: ApiError) -> bytes:
        return b"event: error\ndata: " + encode_json(anthropic_body(error.in_words_of(MESSAGES))) + b"\n\n"

    def _open(self, kind: str, block: dict[str, Any]) -> list[bytes]:
        """Begin a block unless one of its kind is open."""
        if self._kind == kind:
            return []
        before = self._close()
        self._kind, self._block = kind, self._block + 1
        delta, field = _PIECES.get(kind, ("input_json_delta", "partial_json"))
        start = b'event: content_block_delta\ndata: {"type":"content_block_delta","index":%d,"delta":{"type":"%b","%b":'
        self._prefix, self._suffix = start % (self._block, delta.encode(), field.encode()), b"}}\n\n"
        return [before, _event({"type": "content_block_start", "index": self._block, "content_block": block})]

    def _piece(self, text: str) -> bytes:
        return self._prefix + encode_json(text) + self._suffix

    def _close(self) -> bytes:
        if not self._kind:
            return b""
        self._kind = ""
        return _event({"type": "content_block_stop", "index": self._block})


_PIECES = {"text": ("text_delta", "text"), "thinking": ("thinking_delta", "thinking")}


def _event(data: dict[str, Any]) -> bytes:
    return b"event: %b" % str(data["type"]).encode() + b"\ndata: " + encode_json(data) + b"\n\n"


def _message(
    prepared: PreparedRequest[ChatRequest], content: list[dict[str, Any]], usage: dict[str, Any]
) -> dict[str, Any]:
    message = {"id": prepared.id, "type": "message", "role": "assistant", "model": prepared.model.name}
    return {**message, "content": content, "usage": usage}


def _end(delta: Delta) -> dict[str, Any]:
    """Return the reason of an answer's end."""
    reasons = {"length": "max_tokens", "tool_calls": "tool_use"}
    if delta.finish_reason == "stop" and isinstance(delta.stop_reason, str):
        return {"stop_reason": "stop_sequence", "stop_sequence": delta.stop_reason}
    return {"stop_reason": reasons.get(delta.finish_reason or "", "end_turn"), "stop_sequence": None}


def _usage(prepared: PreparedRequest[ChatRequest], choice: ChoiceUsage) -> dict[str, Any]:
    """Return Anthropic's usage object. Its input tokens exclude tokens from the cache, and new ones in it."""
    request, num_written = prepared.requests[0], prepared.num_written(0, choice.num_cached)
    is_long = request.cache_ttl_s > TTL_SECONDS["5m"]
    return {
        "input_tokens": request.prompt_len - choice.num_cached - num_written,
        "cache_creation_input_tokens": num_written,
        "cache_creation": {
            "ephemeral_5m_input_tokens": 0 if is_long else num_written,
            "ephemeral_1h_input_tokens": num_written if is_long else 0,
        },
        "cache_read_input_tokens": choice.num_cached,
        "output_tokens": choice.num_output,
    }


def _text(text: str) -> dict[str, Any]:
    return {"type": "text", "text": text}


def _thinking(text: str) -> dict[str, Any]:
    return {"type": "thinking", "thinking": text, "signature": ""}  # unsigned, so any server may continue it


def _tool_use(call_id: str, name: str, arguments: dict[str, Any]) -> dict[str, Any]:
    return {"type": "tool_use", "id": call_id, "name": name, "input": arguments}


def parsed_arguments(arguments: str) -> dict[str, Any]:
    """Return a call's arguments as an object.

    Arguments of a call that was cut off are completed. Text that is not JSON stands under INVALID_JSON, as Anthropic's
    clients expect."""
    try:
        value = from_json(arguments, allow_partial=True) if arguments.strip() else {}
    except ValueError:
        value = None
    return value if isinstance(value, dict) else {"INVALID_JSON": arguments}
