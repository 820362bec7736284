"""From the engine's tokens to the parts of an answer: text, stop strings, reasoning, tool calls, log-probabilities."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

from runtime.base.reports import Report, TokenLogprobs
from runtime.base.types import FinishReason, Request, RequestOutput
from runtime.output.message_parser import MessageFormat, MessageParser
from runtime.text.stream import NO_TEXT, NoText, StopStrings, TextStream
from runtime.text.tokenizer import Tokenizer
from runtime.text.tool_calls import CallDelta

_TAIL = 8  # prompt tokens that affect how the output's text begins

Finish = Literal["stop", "length", "tool_calls", "abort"]
_FINISHES: dict[FinishReason, Finish] = {FinishReason.STOP: "stop", FinishReason.ABORT: "abort"}  # all others: length


@dataclass(frozen=True, slots=True)
class WeightSpan:
    """Output tokens [start, end) come from the weights with this version."""

    version: str
    start: int
    end: int


@dataclass(slots=True)
class Delta:
    """An addition to one choice: the unit of streaming. `add` sums them up to a whole choice."""

    index: int
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    ends: list[int] = field(default_factory=list)  # complete output characters after each token
    logprobs: list[TokenLogprobs] = field(default_factory=list)  # one per token, if requested
    finish_reason: Finish | None = None
    num_cached: int = 0  # prompt tokens served from the prefix cache
    stop_reason: str | int | None = None  # the stop string or the stop id that ended the choice
    reports: Sequence[Report] = ()  # in order
    reasoning: str = ""
    num_reasoning: int = 0  # tokens, of this delta and earlier ones, that are now known to be reasoning
    calls: Sequence[CallDelta] = ()  # pieces of tool calls; in a sum, the calls
    weight_versions: Sequence[WeightSpan] = ()  # the whole choice's, at its end; empty without weight_updates

    def add(self, new: Delta) -> None:
        if new.reports:
            num_tokens = len(self.token_ids)
            self.reports = [*self.reports, *(report.shifted(num_tokens) for report in new.reports)]
        self.text += new.text
        self.token_ids += new.token_ids
        self.ends += new.ends
        self.logprobs += new.logprobs
        self.finish_reason, self.stop_reason = new.finish_reason, new.stop_reason
        self.num_cached = max(self.num_cached, new.num_cached)
        self.reasoning += new.reasoning
        self.num_reasoning += new.num_reasoning
        self.weight_versions = new.weight_versions
        for call in new.calls:
            if call.name:
                self.calls = [*self.calls, replace(call)]
            else:
                self.calls[-1].arguments += call.arguments

    def drop_output(self) -> None:
        """End the choice as an empty one, for a prompt that is only cached."""
        self.text = self.reasoning = ""
        self.token_ids, self.ends, self.logprobs, self.calls, self.num_reasoning = [], [], [], (), 0
        self.finish_reason, self.stop_reason = "length", None


class OutputProcessor:
    """Turns the engine's outputs of one request into deltas."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        request: Request,
        index: int = 0,
        form: MessageFormat | None = None,
        stops: StopStrings | None = None,
    ) -> None:
        """Args:
        form: the text's format; None if all is content.
        stops: the request's stop strings, if several choices share them."""
        params = request.params
        self._index = index
        self._text: TextStream | NoText = NO_TEXT
        if params.detokenize:
            self._text = TextStream(
                tokenizer,
                stops or params.stop,
                params.include_stop_str_in_output,
                params.skip_special_tokens,
                request.token_ids[-_TAIL:],
                frozenset() if form is None else form.kept_special_ids,
                "" if form is None else form.before_special,
            )
        self._shows_stop = params.include_stop_str_in_output
        self._parser = None if form is None or not params.detokenize else MessageParser(form)
        self._num_tokens = 0  # output tokens so far

    def process(self, output: RequestOutput) -> Delta:
        """Return the delta of an output. A stop string or the last allowed call may end a choice before its engine
        does."""
        stream, token_ids, logprobs, reports = self._text, output.token_ids, output.logprobs, output.reports
        # The token that ended it (EOS or a stop id) counts as output but is not part of the text.
        hides_last = output.finish_reason is FinishReason.STOP and not self._shows_stop
        text, ends = stream.push(token_ids[:-1] if hides_last else token_ids)
        finish: Finish | None = None
        stop_reason: str | int | None = None
        if stream.stopped is not None:
            finish, stop_reason, num_used = "stop", stream.stopped, len(ends)  # later tokens are dropped
            token_ids, logprobs = token_ids[:num_used], logprobs[:num_used]
            reports = [report.within(num_used) for report in reports]
        elif output.finish_reason:
            ends += [stream.num_chars] * (len(token_ids) - len(ends))
            text += stream.finish()
            finish = _FINISHES.get(output.finish_reason, "length")
            stop_reason = output.stop_token_id
            if stream.stopped is not None:  # the held text has completed a stop string
                finish, stop_reason = "stop", stream.stopped
        delta = Delta(self._index, text, token_ids, ends, logprobs, finish, output.num_cached, stop_reason, reports)
        if (parser := self._parser) is not None:
            delta.text, delta.reasoning, delta.calls = parser.push(text, finish is not None)
            delta.num_reasoning = parser.num_reasoning_tokens(ends, finish is not None)
            if parser.is_done or (parser.has_called and finish == "stop"):
                delta.finish_reason, delta.stop_reason = "tool_calls", None
        self._num_tokens += len(token_ids)
        if delta.finish_reason is not None and output.weight_versions:
            delta.weight_versions = _spans(output.weight_versions, self._num_tokens)
        return delta


def _spans(starts: Sequence[tuple[int, str]], num_tokens: int) -> list[WeightSpan]:
    """Return the spans of a choice. A version that begins after its last token has none."""
    ends = [start for start, _ in starts[1:]] + [num_tokens]
    spans = (WeightSpan(name, start, min(end, num_tokens)) for (start, name), end in zip(starts, ends, strict=True))
    return [span for span in spans if span.start < span.end]
