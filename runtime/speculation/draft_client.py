"""The engine's side of a draft model: it requests draft tokens and waits a bounded time for them.

In a round, the engine commits the last step's tokens and sends them to the draft. The next step waits until the draft
tokens arrive or are late, and verifies the ones that arrived. The wait is at most a few times the draft's usual time.

A stream decodes without draft tokens if its reply is late or the draft has many tokens to catch up with. The engine
requests again after the reply, or after the stream's own deadline.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import Protocol, TypeVar

from runtime.base.types import Request
from runtime.core.request_state import RequestState
from runtime.speculation.choose_k import Drafter, StepTimes
from runtime.speculation.draft import CATCH_UP, CommitTokens, DraftRequests, DraftTokens, OpenStream

_PATIENCE, _PATIENCE_US = 6.0, 1000.0  # a reply is late after _PATIENCE expected rounds plus _PATIENCE_US
_BEHIND_S, _MAX_BEHIND_S = 0.5, 5.0  # first and longest delay before a late stream's next request; it doubles
_MOST_OPENED = 1 << 16  # tokens in the requests that a frame opens: a step waits until it is encoded and sent
_HUNG_S = 10.0  # silence after which a draft counts as stuck
_OVERHEAD_WEIGHT = 0.1  # weight of the newest reply in the overhead estimate
_FIRST_OVERHEAD_US = 300.0
FIRST_ROUND_US, FIRST_ROW_US = 1000.0, 60.0  # first overhead beyond the models' steps: per round, per row

T = TypeVar("T")


class DraftWire(Protocol):
    """A connection to a draft. Both methods raise OSError when the draft is gone."""

    def send(self, requests: DraftRequests) -> None:
        """Send a frame. Blocks only until the draft reads it."""
        ...

    def receive(self, timeout_s: float) -> list[DraftTokens] | None:
        """Return the chains that arrive within `timeout_s`.

        An empty list acknowledges OpenStreams; None means that nothing arrived."""
        ...


class _State(Enum):
    """The state of a stream's last request."""

    OPENED = auto()  # opened at the draft, without a reply yet
    DUE = auto()  # draft tokens are requested, and the next step waits for them until the stream's deadline
    BEHIND = auto()  # draft tokens are requested, but no step waits; the next request follows after the deadline
    ANSWERED = auto()
    CAUGHT_UP = auto()  # the reply came after steps had stopped waiting


@dataclass(slots=True, eq=False)
class _Stream:
    """A request that the draft mirrors, its last message's state, and its last chain."""

    request_id: str
    number: int
    deadline: float  # when its reply is due; may be in the past
    state: _State = _State.OPENED
    num_misses: int = 0  # times that it fell behind since its last reply
    acked: int = 0  # final tokens that the draft has acknowledged
    asked: int = 0  # known tokens at the last request for draft tokens
    chain: list[int] = field(default_factory=list)  # draft tokens after the first `acked` tokens

    def guesses(self, state: RequestState) -> list[int]:
        """Return the draft tokens after the confirmed prefix, or none if the prefix was rejected."""
        since = state.tokens[self.acked :].tolist()
        return self.chain[len(since) :] if self.chain[: len(since)] == since else []

    def fall_behind(self, now: float) -> None:
        """Stop waiting for its reply, and set the time of the next request."""
        self.state = _State.BEHIND
        self.deadline = now + min(_MAX_BEHIND_S, _BEHIND_S * 2**self.num_misses)
        self.num_misses += 1


class DraftClient(Drafter):
    """A Drafter (choose_k.py) with a model that runs elsewhere, or is absent. One thread calls all methods."""

    def __init__(self, vocab_size: int, clock: Callable[[], float]) -> None:
        """`vocab_size` is the target's; `clock` counts seconds."""
        self.vocab_size, self._clock = vocab_size, clock
        self.num_late = 0  # rounds with a late reply
        self._wire: DraftWire | None = None
        self._detach()

    def attach(self, wire: DraftWire, step_us: Sequence[tuple[int, float]]) -> None:
        """Use this draft, without streams so far. step_us: (rows, time of its step), rising."""
        self._detach()
        self._wire, self._times = wire, StepTimes(step_us)

    def _detach(self) -> None:
        self._wire = None
        self._times = StepTimes(())
        self._by_request: dict[str, _Stream] = {}
        self._streams: dict[int, _Stream] = {}  # streams by number
        self._unanswered: set[_Stream] = set()  # OPENED, DUE or BEHIND
        self._num_streams = 0
        self._requests = DraftRequests()  # not sent yet
        self._num_opened_tokens = 0  # tokens in the requests that `_requests` opens
        self._asked_at = self._steps_us = 0.0  # start of the last round, and expected time for its draft steps
        self._overhead_us = _FIRST_OVERHEAD_US  # estimate: from request to reply, without the draft's steps
        self._silent_since: float | None = None  # time of the first message without a reply; None if all have one
        self.is_hung = False  # the draft was silent for _HUNG_S and should be replaced

    # ---- Drafter --------------------------------------------------------------------------------------------------

    @property
    def is_ready(self) -> bool:
        return self._wire is not None

    def is_busy(self) -> bool:
        """True while a reply is outstanding. The draft never replies to some streams, so each counts until its
        deadline."""
        now = self._clock()
        return any(now < stream.deadline for stream in self._unanswered)

    def stats(self) -> dict[str, float]:
        return {"draft_late_rounds": self.num_late, "draft_answer_overhead_us": self._overhead_us}

    def step_us(self, num_rows: int) -> float:
        return self._times.us(num_rows)

    def follows(self, state: RequestState, wanted: int) -> bool:
        """Return True if draft tokens can be requested now; open the stream if the draft does not mirror it yet."""
        stream = self._by_request.get(state.request.request_id)
        if stream is None:
            self._open(state, wanted)
            return False
        if stream.state is _State.BEHIND:
            return self._clock() >= stream.deadline
        return stream.state is not _State.OPENED

    def _open(self, state: RequestState, wanted: int) -> None:
        """Open a stream for a request, unless the next frame is full; a later step then opens it."""
        if self._num_opened_tokens and self._num_opened_tokens + len(state.tokens) > _MOST_OPENED:
            return
        self._num_opened_tokens += len(state.tokens)
        self._num_streams += 1
        origin, tokens = state.request, state.tokens.tolist()
        stream = _Stream(origin.request_id, self._num_streams, self._clock() + _BEHIND_S)
        self._by_request[origin.request_id] = self._streams[stream.number] = stream
        self._unanswered.add(stream)
        # Without images: the draft reads their tokens as text, and its guesses about them are worse.
        request = Request("", tokens, state.prompt_len, state.params, origin.seed, 0, origin.cache_salt)
        self._requests.opened.append(OpenStream(stream.number, request, wanted))

    def ask(self, state: RequestState, wanted: int) -> None:
        """Request `wanted` draft tokens for a followed request without tokens in flight."""
        stream, known = self._by_request[state.request.request_id], len(state.tokens)
        if stream.asked == known:
            return
        stream.asked = known
        new = state.tokens[stream.acked :].tolist()
        self._requests.committed.append(CommitTokens(stream.number, stream.acked, new, wanted))
        self._unanswered.add(stream)
        # Steps do not wait while the draft catches up. They wait for the tokens after that, or a slow draft would
        # never catch up.
        if len(new) > CATCH_UP[-1] and stream.state is not _State.CAUGHT_UP:
            stream.fall_behind(self._clock())
        elif len(stream.guesses(state)) < wanted:
            stream.state = _State.DUE  # the round sets its deadline
        else:
            stream.state, stream.deadline = _State.BEHIND, 0.0  # the chain in hand is long enough

    def poll(self) -> bool:
        """Send queued messages and read replies. Return True while the next step should wait for a reply."""
        requests, now = self._requests, self._clock()
        if requests.opened or requests.committed or requests.closed:
            self._requests, self._num_opened_tokens = DraftRequests(), 0
            if requests.committed:
                self._begin_round(requests, now)
            if self._silent_since is None and (requests.opened or requests.committed):
                self._silent_since = now
            self._try(lambda wire: wire.send(requests))
        self._receive(0.0)
        if self._silent_since is not None and now - self._silent_since > _HUNG_S:
            self.is_hung = True
        due = self._due()
        late = [stream for stream in due if now >= stream.deadline]
        if late:
            self._give_up(late)
        return len(due) > len(late)

    def wait(self) -> None:
        """Wait until the replies that are due arrive or are late."""
        due = self._due()
        if not due:
            return
        while due and (left := max(stream.deadline for stream in due) - self._clock()) > 0:
            self._receive(left)
            due = self._due()
        if due:
            self._give_up(due)
        else:
            surprise_us = (self._clock() - self._asked_at) * 1e6 - self._steps_us - self._overhead_us
            self._overhead_us += _OVERHEAD_WEIGHT * max(-self._expected_us(), min(surprise_us, self._expected_us()))

    def guess(self, state: RequestState, most: int) -> list[int] | None:
        """Return up to `most` draft tokens after the request's known tokens; None if no chain reaches them."""
        stream = self._by_request.get(state.request.request_id)
        if stream is None or stream.asked != len(state.tokens):
            return None
        guesses = stream.guesses(state)[:most]
        return None if not guesses and stream.acked < stream.asked else guesses

    def forget(self, state: RequestState) -> None:
        """Close the stream of a request that has ended."""
        stream = self._by_request.get(state.request.request_id)
        if stream is not None:
            self._close(stream)

    # ---- rounds ---------------------------------------------------------------------------------------------------

    def _due(self) -> list[_Stream]:
        return [stream for stream in self._unanswered if stream.state is _State.DUE]

    def _begin_round(self, requests: DraftRequests, now: float) -> None:
        self._asked_at = now
        behind = [len(commit.token_ids) for commit in requests.committed]
        self._steps_us = max(commit.wanted for commit in requests.committed) * self.step_us(len(behind))
        if max(behind) > CATCH_UP[-1]:
            self._steps_us += self.step_us(sum(behind))
        deadline = now + (_PATIENCE * self._expected_us() + _PATIENCE_US) / 1e6
        for stream in self._due():
            stream.deadline = deadline

    def _expected_us(self) -> float:
        """Return the last round's expected time: also the largest surprise, because a pause of the process may be
        longer. The overhead may be negative: a machine that was busy at the draft's start made its step times long."""
        return max(_FIRST_OVERHEAD_US, self._overhead_us + self._steps_us)

    def _give_up(self, late: list[_Stream]) -> None:
        for stream in late:
            stream.fall_behind(self._clock())
        self.num_late += 1

    def _receive(self, timeout_s: float) -> None:
        chains = self._try(lambda wire: wire.receive(timeout_s))
        if chains is None:
            return
        self._silent_since, self.is_hung = None, False
        for chain in chains:
            stream = self._streams.get(chain.stream)
            if stream is None:
                continue  # its request has ended
            if chain.length == 0:  # the draft does not have the stream: `follows` opens it again
                self._close(stream)
                continue
            if chain.length < stream.acked:
                continue  # it is older than one received before
            ends = (i for i, token in enumerate(chain.token_ids) if token >= self.vocab_size)
            stream.acked, stream.chain = chain.length, chain.token_ids[: next(ends, None)]
            if chain.length >= stream.asked:
                stream.state = _State.CAUGHT_UP if stream.num_misses else _State.ANSWERED
                stream.num_misses = 0
                self._unanswered.discard(stream)

    def _close(self, stream: _Stream) -> None:
        del self._streams[stream.number], self._by_request[stream.request_id]
        self._unanswered.discard(stream)
        self._requests.closed.append(stream.number)

    def _try(self, use: Callable[[DraftWire], T]) -> T | None:
        """Call `use` with the wire if there is one; detach a broken wire, and drop its draft tokens."""
        if self._wire is None:
            return None
        try:
            return use(self._wire)
        except OSError as e:
            self._detach()
            self.is_hung = isinstance(e, TimeoutError)  # the draft is alive but no longer reads
            return None
