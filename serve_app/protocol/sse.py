"""Answers as server-sent events."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

from runtime.base.reports import Experts, one_of
from runtime.output.processor import Delta
from serve_app.protocol.answers import ChoiceUsage, encode_json, num_scores, routed_experts, usage
from serve_app.protocol.errors import ApiError
from serve_app.protocol.prepared_request import PreparedRequest

MANY_SCORES = 100  # positions with log-probabilities, which are slow to render
DONE = b"data: [DONE]\n\n"


def header(prepared: PreparedRequest[Any], kind: str) -> dict[str, Any]:
    """Return the first fields of an answer or an event."""
    return {
        "id": prepared.id,
        "object": kind,
        "created": int(time.time()),
        "model": prepared.model.name,
        "system_fingerprint": prepared.model.fingerprint,
    }


class ChoiceRenderer(ABC):
    """Renders one choice: its deltas in order, or their sum."""

    def __init__(self, prepared: PreparedRequest[Any], index: int) -> None:
        self._prepared, self._index = prepared, index

    @abstractmethod
    def logprobs(self, delta: Delta) -> dict[str, Any] | None:
        """Return the `logprobs` object; None without tokens."""

    def rest(self, delta: Delta) -> dict[str, Any]:
        """Return a delta's fields besides its text."""
        rest: dict[str, Any] = {
            "logprobs": self.logprobs(delta),
            "finish_reason": delta.finish_reason,
            "stop_reason": delta.stop_reason,
        }
        if delta.finish_reason is not None:
            rest["seed"] = self._prepared.requests[self._index].seed
            if delta.weight_versions:
                rest["weight_versions"] = delta.weight_versions
            experts, shape = one_of(delta.reports, Experts), self._prepared.model.info.routed_experts
            if experts is not None and shape is not None:
                rest["routed_experts"] = routed_experts(experts.ids, shape)
        return rest | {"token_ids": delta.token_ids} if self._prepared.request.return_token_ids else rest


class EventStream(ABC):
    """Renders one request's deltas as server-sent events, or in another `media_type`.

    The calls are `first()`, any number of `events()`, and `last()` or `failed()`."""

    media_type = b"text/event-stream; charset=utf-8"
    keep_alive = b": the request waits\n\n"  # a comment, which clients skip

    def first(self) -> bytes:
        """Return the events before any text."""
        return b""

    @abstractmethod
    def events(self, deltas: list[Delta]) -> bytes:
        """Return the events of one write; empty without new text."""

    def is_long(self, deltas: list[Delta]) -> bool:
        """Return whether the events of these deltas are slow to render."""
        return num_scores(deltas) > MANY_SCORES

    @abstractmethod
    def last(self) -> bytes:
        """Return the events after all deltas."""

    @abstractmethod
    def failed(self, error: ApiError) -> bytes:
        """Return the events that report an error after the stream's start."""


class ChunkStream(EventStream):
    """Chunks for OpenAI's completions and chats.

    All parts of an event except its text are rendered once, so a token costs one escape and one concatenation."""

    opening, closing = b',"text":', b""  # surround a text

    def __init__(
        self, prepared: PreparedRequest[Any], kind: str, choices: Sequence[ChoiceRenderer], include_usage: bool
    ) -> None:
        self._prepared, self._choices, self._include_usage = prepared, choices, include_usage
        self._usages = [ChoiceUsage() for _ in choices]
        options = prepared.request.stream_options
        self._continuous_usage = include_usage and options is not None and options.continuous_usage_stats
        self._has_more_than_text = prepared.request.shows_more_than_text() or self._continuous_usage
        self._head = b"data: " + encode_json(header(prepared, kind))[:-1] + b',"choices":['
        self._prefixes = [self._head + b'{"index":%d' % i + self.opening for i in range(len(choices))]
        self._close = (b',"usage":null}' if include_usage else b"}") + b"\n\n"
        self._unfinished = b',"logprobs":null,"finish_reason":null,"stop_reason":null}]'
        self._suffix = self.closing + self._unfinished + self._close

    def events(self, deltas: list[Delta]) -> bytes:
        parts = []
        for delta in deltas:
            self._usages[delta.index].add(delta)
            if (
                delta.finish_reason is not None
                or delta.logprobs
                or self._has_more_than_text
                or delta.calls
                or delta.reasoning
            ):
                parts.append(self._event(delta))
            elif delta.text:
                parts.append(self._prefixes[delta.index] + encode_json(delta.text) + self._suffix)
        return b"".join(parts)

    def last(self) -> bytes:
        """Return the usage, if the request wants it, and the end mark."""
        if not self._include_usage:
            return DONE
        counts = self._prepared.usage(self._usages)
        return self._head + b'],"usage":' + encode_json(counts) + b"}\n\n" + DONE

    def failed(self, error: ApiError) -> bytes:
        return b"data: " + encode_json(error.body()) + b"\n\n" + DONE

    def _event(self, delta: Delta) -> bytes:
        """Return an event with more than text."""
        text = encode_json(delta.text) + self.closing
        rest = encode_json(self._choices[delta.index].rest(delta))[1:]
        return self._prefixes[delta.index] + text + b"," + rest + b"]" + self._end(delta.index)

    def _end(self, index: int) -> bytes:
        """Return the end of an event, with the choice's usage so far if the request wants it."""
        if not self._continuous_usage:
            return self._close
        num_prompt, so_far = self._prepared.requests[index].prompt_len, self._usages[index]
        prepared = self._prepared
        details = prepared.prompt_details({index: so_far.num_cached})
        counts = usage(num_prompt, so_far.num_cached, details, [so_far], prepared.model.speculates)
        return b',"usage":' + encode_json(counts) + b"}\n\n"
