"""Answers as bytes: one JSON object for a plain response, server-sent events for a streamed one.

All of an event but its text is rendered once per request, so that a token costs one escape and one concatenation.
"""

from __future__ import annotations

import time
from typing import Any

import msgspec

from runtime.text.tokenizer import Tokenizer
from serve_app.answers import Delta, chat_logprobs, completion_logprobs, usage
from serve_app.errors import ApiError
from serve_app.service import Job

DONE = b"data: [DONE]\n\n"

encode_json = msgspec.json.Encoder().encode


def error_event(error: ApiError) -> bytes:
    """What a stream that has begun sends in place of an error status; DONE still follows."""
    return b"data: " + encode_json(error.body()) + b"\n\n"


def plain_answer(job: Job, choices: list[Delta], model: str, tokenizer: Tokenizer) -> bytes:
    """The whole response of a request that is not streamed; `choices` hold all of each choice's deltas."""
    rendered = []
    for choice in choices:
        if not job.logprobs:
            logprobs = None
        elif job.chat:
            logprobs = chat_logprobs(choice.logprobs, tokenizer)
        else:
            logprobs = completion_logprobs(choice.logprobs, tokenizer, 0)
        text = {"message": _message(choice)} if job.chat else {"text": choice.text}
        rendered.append({"index": choice.index, **text, "logprobs": logprobs, "finish_reason": choice.finish_reason})
    num_output = sum(len(choice.token_ids) for choice in choices)
    num_cached = sum(choice.num_cached for choice in choices)
    return encode_json(
        {
            **_header(job, model, "chat.completion" if job.chat else "text_completion"),
            "choices": rendered,
            "usage": usage(job.num_prompt_tokens, num_output, num_cached),
        }
    )


def _message(choice: Delta) -> dict[str, Any]:
    if choice.reply is None:
        return {"role": "assistant", "content": choice.text, "refusal": None}
    return {"role": "assistant", "content": choice.text or None, "refusal": None, **choice.reply.fields()}


def _header(job: Job, model: str, kind: str) -> dict[str, Any]:
    return {"id": job.id, "object": kind, "created": int(time.time()), "model": model}


class EventStream:
    """Renders one job's deltas as they come: `first()`, `events()` any number of times, `last()`."""

    def __init__(self, job: Job, model: str, tokenizer: Tokenizer, *, include_usage: bool) -> None:
        self._job, self._tokenizer, self._include_usage = job, tokenizer, include_usage
        self._num_output = self._num_cached = 0
        self._offsets = [0] * len(job.requests)  # characters of each choice's tokens so far, for logprobs
        chunk = _header(job, model, "chat.completion.chunk" if job.chat else "text_completion")
        opening = b',"delta":{"content":' if job.chat else b',"text":'
        self._head = b"data: " + encode_json(chunk)[:-1] + b',"choices":['
        self._prefixes = [self._head + b'{"index":%d' % i + opening for i in range(len(job.requests))]
        self._close_text = b"}" if job.chat else b""
        self._close = (b'}],"usage":null}' if include_usage else b"}]}") + b"\n\n"
        self._suffix = self._close_text + b',"logprobs":null,"finish_reason":null' + self._close

    def first(self) -> bytes:
        """What comes before any text: the roles of a chat's choices."""
        if not self._job.chat:
            return b""
        content = b'""' if self._job.reply is None else b"null"  # there may be none, only calls
        delta = b',"delta":{"role":"assistant","content":' + content + b"}"
        role = delta + b',"logprobs":null,"finish_reason":null' + self._close
        return b"".join(self._head + b'{"index":%d' % i + role for i in range(len(self._prefixes)))

    def events(self, deltas: list[Delta]) -> bytes:
        """The events of one write; empty if there is no text to show yet."""
        parts = []
        for delta in deltas:
            self._num_output += len(delta.token_ids)
            self._num_cached += delta.num_cached
            if delta.finish_reason is not None or delta.logprobs or delta.reply is not None:
                parts.append(self._rare(delta) if self._job.reply is None else self._read(delta))
            elif delta.text:
                parts.append(self._prefixes[delta.index] + encode_json(delta.text) + self._suffix)
        return b"".join(parts)

    def last(self) -> bytes:
        """What comes after all text: the usage, if it was asked for, and the end mark."""
        if not self._include_usage:
            return DONE
        counts = usage(self._job.num_prompt_tokens, self._num_output, self._num_cached)
        return self._head + b'],"usage":' + encode_json(counts) + b"}\n\n" + DONE

    def _rare(self, delta: Delta) -> bytes:
        """An event with a finish reason or log-probabilities."""
        return b"".join(
            (
                self._prefixes[delta.index],
                encode_json(delta.text),
                self._close_text,
                b',"logprobs":',
                encode_json(self._logprobs(delta)),
                b',"finish_reason":',
                encode_json(delta.finish_reason),
                self._close,
            )
        )

    def _read(self, delta: Delta) -> bytes:
        """The same of a choice whose text was read: each piece of a call is an event, as clients expect."""
        fields = {} if delta.reply is None else delta.reply.delta_fields()
        calls = fields.pop("tool_calls", ())
        if delta.text:
            fields["content"] = delta.text
        deltas = [fields] if fields or not calls else []
        deltas += [{"tool_calls": [call]} for call in calls]
        choices: list[dict[str, Any]] = [
            {"index": delta.index, "delta": d, "logprobs": None, "finish_reason": None} for d in deltas
        ]
        choices[-1] |= {"logprobs": self._logprobs(delta), "finish_reason": delta.finish_reason}
        return b"".join(self._head + encode_json(choice)[:-1] + self._close for choice in choices)

    def _logprobs(self, delta: Delta) -> dict[str, Any] | None:
        if not delta.logprobs:
            return None
        if self._job.chat:
            return chat_logprobs(delta.logprobs, self._tokenizer)
        rendered = completion_logprobs(delta.logprobs, self._tokenizer, self._offsets[delta.index])
        self._offsets[delta.index] += sum(map(len, rendered["tokens"]))
        return rendered
