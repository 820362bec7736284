"""OpenAI's response objects, made of what the engine and the detokenizer give."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, TypeVar

import msgspec

from runtime.core.types import FinishReason, Request, RequestOutput, TokenLogprobs, Verified
from runtime.text.stream import StopStrings, TextStream
from runtime.text.tokenizer import Tokenizer
from runtime.text.tool_calls import CallDelta
from serve_app.errors import ApiError


@dataclass(slots=True)
class ParsedMessage:
    """What a chat choice says beside its content."""

    reasoning: str = ""
    calls: list[CallDelta] = field(default_factory=list)

    def add(self, new: ParsedMessage) -> None:
        self.reasoning += new.reasoning
        for call in new.calls:
            if call.name:
                self.calls.append(replace(call))
            else:
                self.calls[-1].arguments += call.arguments

    def fields(self) -> dict[str, Any]:
        """The fields of an OpenAI message; `reasoning_content` is vLLM's."""
        calls = [{"id": c.id, "type": "function", "function": _function(c)} for c in self.calls]
        reasoning = {"reasoning_content": self.reasoning} if self.reasoning else {}
        return reasoning | ({"tool_calls": calls} if calls else {})

    def delta_fields(self) -> dict[str, Any]:
        """The fields of an OpenAI delta; there may be several pieces of one call."""
        pieces = [
            {"index": c.index, "id": c.id, "type": "function", "function": _function(c)}
            if c.name
            else {"index": c.index, "function": {"arguments": c.arguments}}
            for c in self.calls
        ]
        reasoning = {"reasoning_content": self.reasoning} if self.reasoning else {}
        return reasoning | ({"tool_calls": pieces} if pieces else {})


def _function(call: CallDelta) -> dict[str, str]:
    return {"name": call.name, "arguments": call.arguments}


encode_json = msgspec.json.Encoder().encode
_PIECE = 256  # positions that are encoded at once: encoding holds Python's lock

_T = TypeVar("_T")


def _listed(values: Sequence[_T], entry: Callable[[_T], Any]) -> list[Any] | msgspec.Raw:
    """The entry of each value as a list; a long one as JSON, encoded in pieces, which also takes less memory."""
    if len(values) <= _PIECE:
        return [entry(value) for value in values]
    pieces = [encode_json([entry(v) for v in values[at : at + _PIECE]]) for at in range(0, len(values), _PIECE)]
    return msgspec.Raw(b"[" + b",".join(piece[1:-1] for piece in pieces) + b"]")


_TAIL = 8  # prompt tokens that tell how the output's text begins


@dataclass(slots=True)
class Delta:
    """What is new of one choice: the unit of streaming, and the sum of a plain response's choice."""

    index: int
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)  # one per token, if asked for
    finish_reason: Literal["stop", "length", "tool_calls"] | None = None
    num_cached: int = 0  # prompt tokens served from the prefix cache
    stop_reason: str | int | None = None  # the stop string or the stop id that ended it
    prompt_logprobs: Sequence[TokenLogprobs] = ()  # of the prompt's tokens but the first, if asked for
    message: ParsedMessage | None = None  # if the text was read for reasoning or tool calls and has some
    verified: list[Verified] | None = None  # if a draft has guessed; right guesses are tokens of this delta

    def add(self, new: Delta) -> None:
        if new.verified is not None:
            at = len(self.token_ids)
            self.verified = self.verified or []
            self.verified += [guesses._replace(at=at + guesses.at) for guesses in new.verified]
        self.text += new.text
        self.token_ids += new.token_ids
        self.logprobs += new.logprobs
        self.finish_reason, self.stop_reason = new.finish_reason, new.stop_reason
        self.num_cached = max(self.num_cached, new.num_cached)
        self.prompt_logprobs = self.prompt_logprobs or new.prompt_logprobs
        if new.message is not None:
            self.message = self.message or ParsedMessage()
            self.message.add(new.message)


def num_scores(deltas: Iterable[Delta]) -> int:
    """Positions with log-probabilities."""
    return sum(len(delta.logprobs) + len(delta.prompt_logprobs) for delta in deltas)


@dataclass(slots=True)
class Guesses:
    """What a draft has guessed of some choices, and how much of it became their output."""

    num_guessed: int = 0
    num_accepted: int = 0

    def add(self, verified: Iterable[Verified]) -> None:
        for guesses in verified:
            self.num_guessed += guesses.num_guessed
            self.num_accepted += guesses.num_accepted


def usage(num_prompt: int, num_output: int, num_cached: int, guesses: Guesses | None) -> dict[str, Any]:
    """OpenAI's usage object. Without a draft (None) it has no details of the completion: zeros would look like one that
    guesses badly. Accepted predictions are a part of completion_tokens, rejected ones are not."""
    counts: dict[str, Any] = {
        "prompt_tokens": num_prompt,
        "completion_tokens": num_output,
        "total_tokens": num_prompt + num_output,
        "prompt_tokens_details": {"cached_tokens": num_cached},
    }
    if guesses is not None:
        counts["completion_tokens_details"] = {
            "accepted_prediction_tokens": guesses.num_accepted,
            "rejected_prediction_tokens": guesses.num_guessed - guesses.num_accepted,
        }
    return counts


def text_stream(
    tokenizer: Tokenizer,
    request: Request,
    stop: StopStrings | None = None,
    include_stop_str: bool = False,
    kept_special_ids: frozenset[int] = frozenset(),
) -> TextStream:
    """The text of a request's output, as the continuation of its prompt."""
    tail = request.token_ids[-_TAIL:]
    skip = request.params.skip_special_tokens
    return TextStream(tokenizer, stop or (), include_stop_str, skip, tail, kept_special_ids)


def delta_of(index: int, text: TextStream, output: RequestOutput, include_stop: bool) -> Delta:
    """An engine output as text; a stop string that it completes finishes the choice."""
    if output.finish_reason is FinishReason.ERROR:
        raise ApiError(500, output.error, type="server_error", code="engine_error")
    if output.finish_reason is FinishReason.ABORT:
        raise ApiError(499, "This request was aborted by its id.", type="request_aborted", code="request_aborted")
    token_ids, logprobs, verified = output.token_ids, output.logprobs, output.verified
    # The token that ended it (EOS or a stop id) counts as output but is not part of the text.
    hide_last = output.finish_reason is FinishReason.STOP and not include_stop
    num_used_before = text.num_tokens_used
    new = text.push(token_ids[:-1] if hide_last else token_ids)
    finish: Literal["stop", "length"] | None = None
    stop_reason: str | int | None = None
    if text.stopped is not None:
        num_used = text.num_tokens_used - num_used_before  # the tokens after them were never asked for
        token_ids, logprobs = token_ids[:num_used], logprobs[:num_used]
        if verified is not None:
            verified = [_within(v, num_used) for v in verified]
    elif output.finish_reason:
        new += text.finish()
        finish = "stop" if output.finish_reason is FinishReason.STOP else "length"
        stop_reason = output.stop_token_id
    if text.stopped is not None:
        finish, stop_reason = "stop", text.stopped
    return Delta(
        index, new, token_ids, logprobs, finish, output.num_cached, stop_reason, output.prompt_logprobs, None, verified
    )


def _within(verified: Verified, num_used: int) -> Verified:
    """Of the guesses that were right, only those among the first tokens count: the others are not in the answer."""
    at = min(verified.at, num_used)
    return Verified(at, verified.num_guessed, min(verified.num_accepted, num_used - at))


def prompt_logprobs(logprobs: Sequence[TokenLogprobs], tokenizer: Tokenizer, num_top: int) -> list[Any] | msgspec.Raw:
    """vLLM's `prompt_logprobs`: for each prompt token, the first excepted, its own and the `num_top` best entries."""

    def entry(token_id: int, logprob: float, rank: int) -> dict[str, Any]:
        decoded = tokenizer.token_bytes(token_id).decode("utf-8", "replace")
        return {"logprob": _finite(logprob), "rank": rank, "decoded_token": decoded}

    def position(lp: TokenLogprobs | None) -> dict[str, Any] | None:
        if lp is None:  # of the first
            return None
        top = {str(i): entry(i, value, rank) for rank, (i, value) in enumerate(lp.top[:num_top], start=1)}
        return top | {str(lp.token_id): entry(lp.token_id, lp.logprob, lp.rank)}

    return _listed([None, *logprobs], position)


def chat_logprobs(logprobs: list[TokenLogprobs], tokenizer: Tokenizer) -> dict[str, Any]:
    """The `logprobs` object of a chat choice."""

    def entry(token_id: int, logprob: float) -> dict[str, Any]:
        piece = tokenizer.token_bytes(token_id)
        return {"token": piece.decode("utf-8", "replace"), "logprob": _finite(logprob), "bytes": list(piece)}

    def position(lp: TokenLogprobs) -> dict[str, Any]:
        return {**entry(lp.token_id, lp.logprob), "top_logprobs": [entry(i, value) for i, value in lp.top]}

    return {"content": _listed(logprobs, position), "refusal": None}


@dataclass(frozen=True, slots=True)
class Echo:
    """A prompt at the head of its completion."""

    text: str
    offsets: list[int]  # where the text of each of its tokens begins; empty unless log-probabilities are asked for


class CompletionLogprobs:
    """The `logprobs` objects of one completion choice: `render` its deltas in their order, or their sum."""

    def __init__(self, tokenizer: Tokenizer, request: Request, echo: Echo | None) -> None:
        self._tokenizer, self._request, self._echo = tokenizer, request, echo
        self._offset = 0 if echo is None else len(echo.text)
        self._text = text_stream(tokenizer, request)

    def render(self, delta: Delta) -> dict[str, Any] | None:
        """None if there are no tokens. `text_offset` counts the whole characters before a token, whether or not they
        are then cut off with a stop string."""
        if self._echo is None and not delta.logprobs:
            return None
        logprobs, offsets = delta.logprobs, []
        if self._echo is not None:
            request, num_top = self._request, self._request.params.logprobs
            scored = (lp._replace(top=lp.top[:num_top]) for lp in delta.prompt_logprobs)
            logprobs = [TokenLogprobs(request.token_ids[0], math.nan, 0, ()), *scored, *logprobs]
            offsets += self._echo.offsets
            self._echo = None
        for lp in delta.logprobs:
            offsets.append(self._offset)
            self._offset += len(self._text.push((lp.token_id,)))
        return {
            "tokens": [_token_text(lp.token_id, self._tokenizer) for lp in logprobs],
            "token_logprobs": [_finite(lp.logprob) if lp.rank else None for lp in logprobs],  # 0: nothing predicts it
            "top_logprobs": _listed(logprobs, lambda lp: self._top(lp) if lp.rank else None),
            "text_offset": offsets,
        }

    def _top(self, lp: TokenLogprobs) -> dict[str, float]:
        entries: dict[str, float] = {}
        # The token itself is always among them, as with OpenAI's. Of ids with the same text the likeliest counts.
        for token_id, value in (*lp.top, (lp.token_id, lp.logprob)):
            entries.setdefault(_token_text(token_id, self._tokenizer), _finite(value))
        return entries


class DraftSpans:
    """What of one completion choice's text a draft had guessed: `render` its deltas in their order, or their sum.

    A character is its last token's; a text that waits (runtime.text.stream) keeps its spans with it."""

    def __init__(self, tokenizer: Tokenizer, request: Request, echo: Echo | None) -> None:
        self._text = text_stream(tokenizer, request)
        self._decoded, self._shown = 0 if echo is None else len(echo.text), 0
        self._waiting: list[tuple[int, int]] = []

    def render(self, delta: Delta) -> list[tuple[int, int]]:
        """[start, end) in characters from the choice's beginning, as `text_offset` counts; all of it in this delta."""
        ends = [self._decoded]
        for token_id in delta.token_ids:
            ends.append(ends[-1] + len(self._text.push((token_id,))))
        self._decoded, self._shown = ends[-1], self._shown + len(delta.text)
        spans = self._waiting + [(ends[v.at], ends[v.at + v.num_accepted]) for v in delta.verified or ()]
        self._waiting = [(max(start, self._shown), end) for start, end in spans if end > self._shown]
        return [(start, min(end, self._shown)) for start, end in spans if start < min(end, self._shown)]


def _token_text(token_id: int, tokenizer: Tokenizer) -> str:
    """A token as a text of its own; one that is only a part of a character shows its bytes, as OpenAI's do."""
    piece = tokenizer.token_bytes(token_id)
    try:
        return piece.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in piece)


def _finite(logprob: float) -> float:
    return max(logprob, -9999.0)  # JSON has no infinity
