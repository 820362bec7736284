"""Ids of a stream's events, by which a client takes up a stream that broke, on any front.

The header `X-Callboard-Event-Ids: true` requests them. An id names the answer and its seeds, so the same request with
`Last-Event-ID` gives the same tokens (C4). The stream then has one token in each delta. So its events depend on the
tokens alone, not on their arrival, and an id needs only the event counts before it."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncGenerator, Callable, Iterable, Iterator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace
from random import Random

from runtime.base.reports import Report
from runtime.base.types import FinishReason, RequestOutput
from runtime.output.fields import invalid, shown
from runtime.output.message_parser import MessageFormat
from serve_app.protocol.errors import ApiError

_TURN = 64  # tokens of one output after which other tasks run
_ID = re.compile(r"([A-Za-z0-9._:-]{1,300})\.([0-9a-f]{16})\.(\d{1,19}(?:-\d{1,19})*)\.(\d{1,10}(?:-\d{1,10})*)")


@dataclass(frozen=True, slots=True)
class EventId:
    """A place in a stream."""

    answer_id: str
    digest: str  # identifies all inputs that determine the tokens
    seeds: tuple[int, ...]  # one, or one for each prompt
    counts: tuple[int, ...]  # events up to this one; with several choices: before them, of each, after them

    @classmethod
    def of(cls, text: str) -> EventId:
        """Return the id in a text; raises FieldError."""
        if (match := _ID.fullmatch(text)) is None:
            raise invalid("Last-Event-ID", f"is {shown(text)}, which is no id of this server; send an event's id")
        seeds, counts = (tuple(map(int, part.split("-"))) for part in match.groups()[2:])
        return cls(match[1], match[2], seeds, counts)


class EventIds:
    """Gives the events of one stream their ids, and leaves out the events that its client has."""

    def __init__(
        self, answer_id: str, digest: str, seeds: Sequence[int], num_choices: int, last: EventId | None
    ) -> None:
        """Raises ApiError if `last` belongs to another stream.

        Args:
            digest: a hash over the inputs that determine the tokens.
            seeds: one for each prompt, or one in all.
            last: the client's last event."""
        self._seen = (0,) * (1 if num_choices == 1 else num_choices + 2)
        if last is not None:
            if (last.digest, len(last.counts)) != (digest, len(self._seen)):
                raise mismatch()
            self._seen = last.counts
        self._head = f"id: {answer_id}.{digest}.{'-'.join(map(str, seeds))}."
        self.resumes = last is not None

    def message_format(self, form: MessageFormat | None, index: int) -> MessageFormat | None:
        """Return the format of choice `index`, with call ids that are the same when it is taken up."""
        if form is None or form.tools is None:
            return form
        return replace(form, tools=replace(form.tools, token_hex=self.token_hex(f"choice {index}")))

    def token_hex(self, part: str) -> Callable[[int], str]:
        """Return a source of random ids for a part of the answer, the same whenever the stream is taken up."""
        random = Random(f"{self._head} {part}")
        return lambda num_bytes: random.randbytes(num_bytes).hex()

    def counts(self) -> list[int]:
        """Return the counts of no events, for `numbered`."""
        return [0] * len(self._seen)

    def numbered(self, events: Iterable[bytes], counts: list[int], at: int) -> Iterator[bytes]:
        """Yield events with their ids, without the events before the place. `at` is the index of their count."""
        for event in events:
            counts[at] += 1
            if counts[at] > self._seen[at]:
                seen = "-".join(str(max(pair)) for pair in zip(counts, self._seen, strict=True))
                yield b"%b%b\n%b" % (self._head.encode(), seen.encode(), event)


def mismatch() -> ApiError:
    """Return the error for an id of another stream."""
    text = "Last-Event-ID belongs to another request, model or server version; send the request without it."
    return ApiError(400, text, param="Last-Event-ID", code="event_id_mismatch")


async def by_token(outputs: AsyncGenerator[RequestOutput, None]) -> AsyncGenerator[RequestOutput, None]:
    """Yield the outputs of one request with one token each."""
    async with aclosing(outputs):
        async for output in outputs:
            for i, part in enumerate(_parts(output)):
                if i % _TURN == _TURN - 1:
                    await asyncio.sleep(0)
                yield part


def _parts(output: RequestOutput) -> Iterator[RequestOutput]:
    num_tokens, reports = len(output.token_ids), dict[int, list[Report]]()
    for report in output.reports:
        for at, own in report.by_token(num_tokens):
            reports.setdefault(at, []).append(own)
    if not num_tokens:
        yield output
    elif -1 in reports:
        yield replace(output, token_ids=[], logprobs=[], finish_reason=FinishReason.NONE, reports=reports[-1])
        output = replace(output, num_cached=0)
    for i in range(num_tokens):
        part = replace(
            output,
            token_ids=output.token_ids[i : i + 1],
            logprobs=output.logprobs[i : i + 1],
            reports=reports.get(i, ()),
            num_cached=output.num_cached if i == 0 else 0,
        )
        if i < num_tokens - 1:
            part.finish_reason, part.stop_token_id, part.error = FinishReason.NONE, None, ""
        yield part
