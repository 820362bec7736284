"""Answers as bytes: one JSON object for a plain response, server-sent events for a streamed one.

All of an event but its text is rendered once per request, so that a token costs one escape and one concatenation.
"""

from __future__ import annotations

import time
from typing import Any

from runtime.text.tokenizer import Tokenizer
from serve_app.errors import ApiError
from serve_app.prepared_request import PreparedRequest
from serve_app.responses import (
    CompletionLogprobs,
    Delta,
    DraftSpans,
    Guesses,
    chat_logprobs,
    encode_json,
    prompt_logprobs,
    usage,
)

DONE = b"data: [DONE]\n\n"


def error_event(error: ApiError) -> bytes:
    """What a stream that has begun sends in place of an error status; DONE still follows."""
    return b"data: " + encode_json(error.body()) + b"\n\n"


def plain_answer(prepared: PreparedRequest, choices: list[Delta], model: str, tokenizer: Tokenizer) -> bytes:
    """The whole response of a request that is not streamed; `choices` hold all of each choice's deltas."""
    of_prompt: dict[str, Any] = {}
    rendered, guesses = [], Guesses()
    for choice, request in zip(choices, prepared.requests, strict=True):
        if not prepared.logprobs:
            logprobs = None
        elif prepared.chat:
            logprobs = chat_logprobs(choice.logprobs, tokenizer)
        else:
            logprobs = CompletionLogprobs(tokenizer, request, prepared.echo(choice.index)).render(choice)
        if prepared.prompt_logprobs is not None:
            of_prompt["prompt_logprobs"] = prompt_logprobs(choice.prompt_logprobs, tokenizer, prepared.prompt_logprobs)
        if prepared.return_token_ids:
            of_prompt["prompt_token_ids"] = request.token_ids
        guesses.add(choice.verified or ())
        if prepared.return_draft_spans:
            spans = DraftSpans(tokenizer, request, prepared.echo(choice.index)).render(choice)
        rendered.append(
            {
                "index": choice.index,
                **({"message": _message(choice)} if prepared.chat else {"text": choice.text}),
                "logprobs": logprobs,
                "finish_reason": choice.finish_reason,
                "stop_reason": choice.stop_reason,
                **({"token_ids": choice.token_ids} if prepared.return_token_ids else {}),
                **({"draft_spans": spans} if prepared.return_draft_spans else {}),
                **({} if prepared.chat else of_prompt),
            }
        )
    num_output, num_cached = [len(choice.token_ids) for choice in choices], [choice.num_cached for choice in choices]
    counts = prepared.usage(num_output, num_cached, guesses)
    return encode_json(
        {
            **_header(prepared, model, "chat.completion" if prepared.chat else "text_completion"),
            "choices": rendered,
            "usage": counts,
            **(of_prompt if prepared.chat else {}),  # a chat has one prompt
        }
    )


def _message(choice: Delta) -> dict[str, Any]:
    if choice.message is None:
        return {"role": "assistant", "content": choice.text, "refusal": None}
    return {"role": "assistant", "content": choice.text or None, "refusal": None, **choice.message.fields()}


def _header(prepared: PreparedRequest, model: str, kind: str) -> dict[str, Any]:
    created = int(time.time())
    return {
        "id": prepared.id,
        "object": kind,
        "created": created,
        "model": model,
        "system_fingerprint": prepared.fingerprint,
    }


class EventStream:
    """Renders one request's deltas as they come: `first()`, `events()` any number of times, `last()`."""

    def __init__(self, prepared: PreparedRequest, model: str, tokenizer: Tokenizer, *, include_usage: bool) -> None:
        self._prepared, self._tokenizer, self._include_usage = prepared, tokenizer, include_usage
        num_choices = len(prepared.requests)
        self._num_output, self._num_cached = [0] * num_choices, [0] * num_choices
        self._guesses = [Guesses() for _ in prepared.requests]
        self._completion_logprobs = (
            [CompletionLogprobs(tokenizer, request, prepared.echo(i)) for i, request in enumerate(prepared.requests)]
            if prepared.logprobs and not prepared.chat
            else []
        )
        self._draft_spans = (
            [DraftSpans(tokenizer, request, prepared.echo(i)) for i, request in enumerate(prepared.requests)]
            if prepared.return_draft_spans
            else []
        )
        self._continuous_usage = include_usage and prepared.continuous_usage
        self._all_rare = prepared.return_token_ids or prepared.return_draft_spans or self._continuous_usage
        self._prompts = (  # still to be shown
            {i: request.token_ids for i, request in enumerate(prepared.requests)} if prepared.return_token_ids else {}
        )
        chunk = _header(prepared, model, "chat.completion.chunk" if prepared.chat else "text_completion")
        opening = b',"delta":{"content":' if prepared.chat else b',"text":'
        self._head = b"data: " + encode_json(chunk)[:-1] + b',"choices":['
        self._prefixes = [self._head + b'{"index":%d' % i + opening for i in range(num_choices)]
        self._close_text = b"}" if prepared.chat else b""
        self._close = (b',"usage":null}' if include_usage else b"}") + b"\n\n"
        self._unfinished = b',"logprobs":null,"finish_reason":null,"stop_reason":null}]'
        self._suffix = self._close_text + self._unfinished + self._close

    def first(self) -> bytes:
        """What comes before any text: the roles of a chat's choices."""
        if not self._prepared.chat:
            return b""
        content = b'""' if self._prepared.message_format is None else b"null"  # there may be none, only calls
        role = b',"delta":{"role":"assistant","content":' + content + b"}" + self._unfinished
        if self._prompts:
            role += b',"prompt_token_ids":' + encode_json(self._prompts[0])
            self._prompts.clear()
        return b"".join(self._head + b'{"index":%d' % i + role + self._end(i) for i in range(len(self._prefixes)))

    def events(self, deltas: list[Delta]) -> bytes:
        """The events of one write; empty if there is no text to show yet."""
        parts = []
        for delta in deltas:
            self._num_output[delta.index] += len(delta.token_ids)
            if delta.num_cached:
                self._num_cached[delta.index] = delta.num_cached
            if delta.verified is not None:
                self._guesses[delta.index].add(delta.verified)
            if delta.finish_reason is not None or delta.logprobs or delta.message is not None or self._all_rare:
                parts.append(self._rare(delta) if self._prepared.message_format is None else self._read(delta))
            elif delta.text:
                parts.append(self._prefixes[delta.index] + encode_json(delta.text) + self._suffix)
        return b"".join(parts)

    def last(self) -> bytes:
        """What comes after all text: the usage, if it was asked for, and the end mark."""
        if not self._include_usage:
            return DONE
        total = Guesses(sum(g.num_guessed for g in self._guesses), sum(g.num_accepted for g in self._guesses))
        counts = self._prepared.usage(self._num_output, self._num_cached, total)
        return self._head + b'],"usage":' + encode_json(counts) + b"}\n\n" + DONE

    def _rare(self, delta: Delta) -> bytes:
        """An event with more than text."""
        text = encode_json(delta.text) + self._close_text
        rest = encode_json(self._rest(delta))[1:]
        return self._prefixes[delta.index] + text + b"," + rest + b"]" + self._end(delta.index)

    def _rest(self, delta: Delta) -> dict[str, Any]:
        """What a choice has in an event beside its text."""
        rest: dict[str, Any] = {
            "logprobs": self._logprobs(delta),
            "finish_reason": delta.finish_reason,
            "stop_reason": delta.stop_reason,
        }
        if self._prepared.return_token_ids:
            rest["token_ids"] = delta.token_ids
            if (prompt := self._prompts.pop(delta.index, None)) is not None:
                rest["prompt_token_ids"] = prompt
        if self._draft_spans:
            rest["draft_spans"] = self._draft_spans[delta.index].render(delta)
        return rest

    def _end(self, index: int) -> bytes:
        """The end of an event, with the usage of this choice so far if that was asked for."""
        if not self._continuous_usage:
            return self._close
        num_prompt, num_output = self._prepared.requests[index].prompt_len, self._num_output[index]
        guesses = self._guesses[index] if self._prepared.speculates else None
        counts = usage(num_prompt, num_output, self._num_cached[index], guesses)
        return b',"usage":' + encode_json(counts) + b"}\n\n"

    def _read(self, delta: Delta) -> bytes:
        """The same of a choice whose text was read: each piece of a call is an event, as clients expect."""
        fields = {} if delta.message is None else delta.message.delta_fields()
        calls = fields.pop("tool_calls", ())
        if delta.text:
            fields["content"] = delta.text
        deltas = [fields] if fields or not calls else []
        deltas += [{"tool_calls": [call]} for call in calls]
        choices: list[dict[str, Any]] = [
            {"index": delta.index, "delta": d, "logprobs": None, "finish_reason": None} for d in deltas
        ]
        choices[-1] |= self._rest(delta)
        return b"".join(self._head + encode_json(choice) + b"]" + self._end(delta.index) for choice in choices)

    def _logprobs(self, delta: Delta) -> dict[str, Any] | None:
        if self._completion_logprobs:
            return self._completion_logprobs[delta.index].render(delta)
        return chat_logprobs(delta.logprobs, self._tokenizer) if delta.logprobs else None
