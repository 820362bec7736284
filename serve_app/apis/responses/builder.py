"""ResponseBuilder: a growing response, and an event for each of its additions."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal

import msgspec

from runtime.base.types import TokenLogprobs
from runtime.output.options import TTL_SECONDS
from runtime.output.processor import Delta
from runtime.text.tool_calls import CallDelta
from serve_app.apis.responses.request import ResponsesRequest
from serve_app.protocol.answers import ChoiceUsage, encode_json, logprob_entry
from serve_app.protocol.dialects import RESPONSES
from serve_app.protocol.errors import ApiError
from serve_app.protocol.prepared_request import PreparedRequest
from serve_app.protocol.sse import MANY_SCORES, EventStream

_TEXTS_OF_CALLS = {"function_call": "arguments", "custom_tool_call": "input"}
_EVENTS = {  # events for an item's text
    "message": "output_text",
    "reasoning": "reasoning_text",
    "function_call": "function_call_arguments",
    "custom_tool_call": "custom_tool_call_input",
}
Status = Literal["queued", "in_progress", "completed", "incomplete", "failed", "cancelled"]


@dataclass(slots=True)
class _OpenItem:
    """The output item that grows now: reasoning, a message or a function call."""

    fields: dict[str, Any]  # its object's fields, without the text
    pieces: list[str] = field(default_factory=list)  # pieces of its text or arguments
    logprobs: list[bytes] = field(default_factory=list)  # log-probabilities of a message's text, as JSON
    before_delta: bytes = b""  # start of the event for one more piece, up to its number
    after_number: bytes = b""

    @property
    def kind(self) -> str:
        return str(self.fields["type"])

    def part(self) -> dict[str, Any]:
        """The part of its content."""
        if self.kind == "reasoning":
            return {"type": "reasoning_text", "text": "".join(self.pieces)}
        return {
            "type": "output_text",
            "text": "".join(self.pieces),
            "annotations": [],
            "logprobs": _listed(self.logprobs),
        }

    def item(self, status: str) -> dict[str, Any]:
        if (name := _TEXTS_OF_CALLS.get(self.kind)) is not None:
            return self.fields | {name: "".join(self.pieces), "status": status}
        return self.fields | {"content": [self.part()], "status": status}


class ResponseBuilder:
    """One request's response.

    Reasoning, a message and calls are output items. Each item ends before the next one begins."""

    def __init__(self, prepared: PreparedRequest[ResponsesRequest], is_stored: bool, has_events: bool) -> None:
        self._prepared, self._has_events = prepared, has_events
        self.status: Status = "queued" if prepared.request.background else "in_progress"
        self.error: ApiError | None = None
        self.output: list[dict[str, Any]] = []  # the items that are complete
        self._open: _OpenItem | None = None
        self._scores: list[TokenLogprobs] = []  # scores of tokens without an item
        self._num_skipped = 0  # reasoning tokens that were removed from them
        self._usage, self._num_reasoning = ChoiceUsage(), 0
        self._fixed = _fixed_fields(prepared, is_stored)
        self._completed_at: int | None = None
        self._num_events = 0
        ids = prepared.event_ids
        self._token_hex = secrets.token_hex if ids is None else ids.token_hex("items")
        self._events: list[bytes] = []  # until they are taken

    def object(self) -> dict[str, Any]:
        """Return the present response."""
        output = self.output if self._open is None else [*self.output, self._open.item("in_progress")]
        error = None if self.error is None else {"code": _error_code(self.error), "message": self.error.message()}
        return self._fixed | {
            "status": self.status,
            "completed_at": self._completed_at,
            "error": error,
            "incomplete_details": {"reason": "max_output_tokens"} if self.status == "incomplete" else None,
            "output": output,
            "usage": self._usage_object() if self.has_ended else None,
        }

    @property
    def has_ended(self) -> bool:
        return self.status not in ("queued", "in_progress")

    @property
    def num_scores(self) -> int:
        """Return the number of log-probabilities in the open item's last event."""
        return 0 if self._open is None else len(self._open.logprobs)

    def take_events(self) -> list[bytes]:
        """Return the events since the last call."""
        events, self._events = self._events, []
        return events

    # ---- its life ----------------------------------------------------------------------------------------------------

    def create(self) -> None:
        """Emit the events of an accepted request."""
        self._lifecycle("created")
        self._lifecycle(self.status)

    def add(self, delta: Delta) -> None:
        """Add new output of the model."""
        if self.status == "queued":
            self.status = "in_progress"
            self._lifecycle(self.status)
        self._usage.add(delta)
        self._num_reasoning += delta.num_reasoning
        self._scores += delta.logprobs
        if delta.reasoning:
            self._add_piece(self._opened("reasoning"), delta.reasoning)
        is_last = delta.finish_reason is not None
        prewarms = self._prepared.request.prewarms
        if is_last and not (prewarms or delta.reasoning or delta.calls or self.output or self._open):
            self._opened("message")  # an empty answer
        if delta.text or (is_last and self._scores and self._is_open("message")):
            self._add_piece(self._opened("message"), delta.text)
        for call in delta.calls:
            self._add_call(call)
        if is_last:
            self._end("incomplete" if delta.finish_reason == "length" and not prewarms else "completed")

    def fail(self, error: ApiError) -> None:
        """End the response with an error; its output so far stays."""
        self.error = error
        self._end("failed")

    def cancel(self) -> None:
        """End the response at its client's request."""
        self._end("cancelled")

    def _end(self, status: Status) -> None:
        if self.has_ended:
            return
        self._close("completed" if status == "completed" else "incomplete")
        self.status = status
        self._completed_at = int(time.time()) if status == "completed" else None
        # OpenAI defines no event for a cancelled response, so its stream ends with "incomplete".
        self._lifecycle("incomplete" if status == "cancelled" else status)

    def _new_id(self, kind: str) -> str:
        return f"{kind}_{self._token_hex(16)}"

    # ---- its items ---------------------------------------------------------------------------------------------------

    def _is_open(self, kind: str) -> bool:
        return self._open is not None and self._open.kind == kind

    def _opened(self, kind: Literal["reasoning", "message"]) -> _OpenItem:
        """Return the open item of this kind; opens one if needed."""
        if self._open is not None and self._open.kind == kind:
            return self._open
        self._close("completed")
        if kind == "reasoning":
            item = _OpenItem({"type": kind, "id": self._new_id("rs"), "summary": []})
        else:
            item = _OpenItem({"type": kind, "id": self._new_id("msg"), "role": "assistant"})
        self._begin(item, {"content": []})
        self._emit("response.content_part.added", **self._at(item), content_index=0, part=item.part())
        return item

    def _add_call(self, call: CallDelta) -> None:
        if call.name:
            self._close("completed")
            kind, prefix = ("custom_tool_call", "ctc") if call.is_custom else ("function_call", "fc")
            namespace, name = self._prepared.request.offered.namespaces.get(call.name, (None, call.name))
            fields = {"type": kind, "id": self._new_id(prefix), "call_id": call.id, "name": name}
            item = _OpenItem(fields | ({} if namespace is None else {"namespace": namespace}))
            self._begin(item, {_TEXTS_OF_CALLS[kind]: ""})
        if call.arguments and self._open is not None:
            self._add_piece(self._open, call.arguments)

    def _begin(self, item: _OpenItem, empty: dict[str, Any]) -> None:
        self._open = item
        index = len(self.output)
        added = item.fields | empty | {"status": "in_progress"}
        self._emit("response.output_item.added", output_index=index, item=added)
        kind = f"response.{_EVENTS[item.kind]}.delta"
        content = {} if item.kind in _TEXTS_OF_CALLS else {"content_index": 0}
        fixed = encode_json({"type": kind, **self._at(item), **content})
        item.before_delta = b'event: %b\ndata: %b,"sequence_number":' % (kind.encode(), fixed[:-1])

    def _add_piece(self, item: _OpenItem, text: str) -> None:
        item.pieces.append(text)
        logprobs = b""
        if item.kind == "message":
            entries = self._take_scores()
            item.logprobs += entries
            logprobs = b',"logprobs":' + bytes(_listed(entries))
        if self._has_events:
            number = b"%d" % self._num_events
            self._num_events += 1
            self._events.append(item.before_delta + number + b',"delta":' + encode_json(text) + logprobs + b"}\n\n")

    def _take_scores(self) -> list[bytes]:
        """Return the encoded log-probabilities of a text's new tokens, without reasoning tokens.

        Each is encoded once, since several final events and the response repeat them all."""
        num_reasoning = min(self._num_reasoning - self._num_skipped, len(self._scores))
        scores, self._scores = self._scores[num_reasoning:], []
        self._num_skipped += num_reasoning
        tokenizer, as_ids = self._prepared.model.tokenizer, self._prepared.request.return_tokens_as_token_ids
        return [encode_json(logprob_entry(tokenizer, as_ids, score)) for score in scores]

    def _close(self, status: str) -> None:
        """Close the open item, complete or not."""
        if (item := self._open) is None:
            return
        done, at = item.item(status), self._at(item)
        if (name := _TEXTS_OF_CALLS.get(item.kind)) is not None:
            named = {} if item.kind == "custom_tool_call" else {"name": item.fields["name"]}
            self._emit(f"response.{_EVENTS[item.kind]}.done", **at, **named, **{name: done[name]})
            self._scores.clear()  # calls do not report log-probabilities
            self._num_skipped = self._num_reasoning
        else:
            part = done["content"][0]
            fields = {name: part[name] for name in ("text", "logprobs") if name in part}
            self._emit(f"response.{part['type']}.done", **at, content_index=0, **fields)
            self._emit("response.content_part.done", **at, content_index=0, part=part)
        self._emit("response.output_item.done", output_index=len(self.output), item=done)
        self.output.append(done)
        self._open = None

    def _at(self, item: _OpenItem) -> dict[str, Any]:
        return {"item_id": item.fields["id"], "output_index": len(self.output)}

    # ---- its events --------------------------------------------------------------------------------------------------

    def _lifecycle(self, status: str) -> None:
        if self._has_events:
            self._emit(f"response.{status}", response=self.object())

    def _emit(self, kind: str, **fields: Any) -> None:
        if self._has_events:
            event = {"type": kind, "sequence_number": self._num_events, **fields}
            self._num_events += 1
            self._events.append(b"event: %b\ndata: %b\n\n" % (kind.encode(), encode_json(event)))

    def _usage_object(self) -> dict[str, Any]:
        counts = self._prepared.usage([self._usage])
        details = {"reasoning_tokens": self._num_reasoning} | counts.get("completion_tokens_details", {})
        input_details = {"cache_write_tokens": 0} | counts["prompt_tokens_details"]
        if num_written := input_details["cache_write_tokens"]:
            is_long = self._prepared.requests[0].cache_ttl_s > TTL_SECONDS["30m"]
            input_details["cache_write_tokens_details"] = {
                "ttl_30m_tokens": 0 if is_long else num_written,
                "ttl_12h_tokens": num_written if is_long else 0,
            }
        return {
            "input_tokens": counts["prompt_tokens"],
            "input_tokens_details": input_details,
            "output_tokens": counts["completion_tokens"],
            "output_tokens_details": details,
            "total_tokens": counts["total_tokens"],
        }


class ResponseStream(EventStream):
    """The events of a response for its waiting client."""

    def __init__(self, builder: ResponseBuilder, on_end: Callable[[], object]) -> None:
        """`on_end` is called once, after the response has ended and before its client receives the end."""
        self._builder, self._on_end = builder, on_end

    def first(self) -> bytes:
        self._builder.create()
        return b"".join(self._builder.take_events())

    def events(self, deltas: list[Delta]) -> bytes:
        for delta in deltas:
            self._builder.add(delta)
        # The final events are sent after the response is stored.
        return b"" if self._builder.has_ended else b"".join(self._builder.take_events())

    def is_long(self, deltas: list[Delta]) -> bool:
        ends = any(delta.finish_reason is not None for delta in deltas)
        return super().is_long(deltas) or (ends and self._builder.num_scores > MANY_SCORES)

    def last(self) -> bytes:
        self._on_end()
        return b"".join(self._builder.take_events())

    def failed(self, error: ApiError) -> bytes:
        if not self._builder.has_ended:
            self._builder.fail(error.in_words_of(RESPONSES))
            self._on_end()
        return b"".join(self._builder.take_events())


def error_event(error: ApiError, number: int) -> bytes:
    """Return the event for a stream that cannot continue, although its response may."""
    fields = {"code": error.code, "message": error.message(), "param": error.param}
    return b"event: error\ndata: %b\n\n" % encode_json({"type": "error", "sequence_number": number, **fields})


def _listed(entries: list[bytes]) -> msgspec.Raw:
    return msgspec.Raw(b"[%b]" % b",".join(entries))


def _error_code(error: ApiError) -> str:
    """Return one of OpenAI's codes."""
    return {429: "rate_limit_exceeded", 400: "invalid_prompt"}.get(error.status, "server_error")


def _fixed_fields(prepared: PreparedRequest[ResponsesRequest], is_stored: bool) -> dict[str, Any]:
    """Return the constant fields of a response: the request's values or their defaults."""
    asked, model, params = prepared.request, prepared.model, prepared.requests[0].params
    text = asked.model_dump(include={"text"}, by_alias=True, exclude_none=True).get("text") or {}
    tools = [tool.model_dump() for tool in asked.tools or ()]
    choice = asked.model_dump(include={"tool_choice"})["tool_choice"]
    return {
        "id": prepared.id,
        "object": "response",
        "created_at": int(time.time()),
        "model": model.name,
        "system_fingerprint": model.fingerprint,
        "seed": prepared.seed,
        "background": bool(asked.background),
        "instructions": asked.instructions,
        "max_output_tokens": asked.max_output_tokens,
        "max_tool_calls": None,
        "metadata": asked.metadata or {},
        "parallel_tool_calls": asked.parallel_tool_calls is not False,
        "previous_response_id": asked.previous_response_id,
        "reasoning": {"effort": None if asked.reasoning is None else asked.reasoning.effort, "summary": None},
        "store": is_stored,
        "temperature": params.temperature,
        "text": {"format": {"type": "text"}, "verbosity": "medium"} | text,
        "tool_choice": "auto" if choice is None else choice,
        "tools": tools,
        "top_logprobs": asked.top_logprobs or 0,
        "top_p": params.top_p,
        "truncation": asked.truncation or "disabled",
        "user": asked.user,
    }
