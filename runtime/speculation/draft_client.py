"""The engine's side of a draft model: its questions, the answers, and how long these are waited for.

A round is: the last step's tokens are committed, the draft is told, the next step waits until the guesses are there or
late, and verifies what came. The wait is bounded by a few times what the draft takes. A stream whose answer is late, or
has much to catch up with, goes on plainly; it is asked again when it has answered, or after a deadline of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import Protocol, TypeVar

from runtime.core.request_state import RequestState
from runtime.spec.types import Request
from runtime.speculation.choose_k import Drafter, StepTimes
from runtime.speculation.draft import CATCH_UP, CommitTokens, DraftRequests, DraftTokens, OpenStream

_PATIENCE, _PATIENCE_US = 6.0, 1000.0  # an answer is late after so many times what a round should take, and so much
_BEHIND_S, _MAX_BEHIND_S = 0.5, 5.0  # before a stream that is behind is asked again, doubling: each time it begins anew
_MOST_OPENED = 1 << 16  # tokens of the requests that a frame opens: a step waits until it is encoded and sent
_HUNG_S = 10.0  # silence after which a draft is thought to be stuck
_OVERHEAD_WEIGHT = 0.1  # of the newest answer in the estimate of what they take beyond the draft's steps
_FIRST_OVERHEAD_US = 300.0
FIRST_ROUND_US, FIRST_ROW_US = 1000.0, 60.0  # a round beyond the models' times, and each of its rows

T = TypeVar("T")


class DraftWire(Protocol):
    """A connection to a draft. Both methods raise OSError when the draft is gone."""

    def send(self, told: DraftRequests) -> None:
        """Never blocks for longer than the draft needs to read."""
        ...

    def receive(self, timeout_s: float) -> list[DraftTokens] | None:
        """The chains that have come, waiting at most `timeout_s` for some; empty if only Opens were read, None if
        nothing has come."""
        ...


class _State(Enum):
    """How a stream stands with the draft."""

    OPENED = auto()  # the draft was told of it and has never answered
    DUE = auto()  # it was asked for guesses, and the next step waits for them until the stream's deadline
    BEHIND = auto()  # it was asked and nobody waits; it is asked again after the deadline
    ANSWERED = auto()
    CAUGHT_UP = auto()  # it has answered what nobody waited for


@dataclass(slots=True, eq=False)
class _Stream:
    """A request that the draft mirrors: what it was told of it, and its last chain."""

    request_id: str
    number: int
    deadline: float  # of its answer; it may have passed
    state: _State = _State.OPENED
    num_misses: int = 0  # times that it fell behind since its last answer
    acked: int = 0  # final tokens that the draft has
    asked: int = 0  # known tokens when guesses were last asked for
    chain: list[int] = field(default_factory=list)  # what may follow the first `acked` tokens

    def guesses(self, state: RequestState) -> list[int]:
        """Of a chain that was made on the assumption of tokens that have come true, the rest; of any other, nothing."""
        since = state.tokens[self.acked :].tolist()
        return self.chain[len(since) :] if self.chain[: len(since)] == since else []

    def fall_behind(self, now: float) -> None:
        """Nobody waits for its answer."""
        self.state = _State.BEHIND
        self.deadline = now + min(_MAX_BEHIND_S, _BEHIND_S * 2**self.num_misses)
        self.num_misses += 1


class DraftClient(Drafter):
    """A Drafter (speculation.py) that is a model somewhere else, or away. One thread calls everything."""

    def __init__(self, vocab_size: int, clock: Callable[[], float]) -> None:
        """`vocab_size` is the target's; `clock` counts seconds."""
        self.vocab_size, self._clock = vocab_size, clock
        self.num_late = 0  # rounds in which some answer came too late
        self._wire: DraftWire | None = None
        self._detach()

    def attach(self, wire: DraftWire, step_us: Sequence[tuple[int, float]]) -> None:
        """Go on with this draft, which knows nothing yet. step_us: (rows, time of its step), rising."""
        self._detach()
        self._wire, self._times = wire, StepTimes(step_us)

    def _detach(self) -> None:
        self._wire = None
        self._times = StepTimes(())
        self._by_request: dict[str, _Stream] = {}
        self._streams: dict[int, _Stream] = {}  # by number
        self._unanswered: set[_Stream] = set()  # those that are OPENED, DUE or BEHIND
        self._num_streams = 0
        self._requests = DraftRequests()  # not sent yet
        self._num_opened_tokens = 0  # tokens of the requests that it opens
        self._asked_at = self._steps_us = 0.0  # when the last round began, and what the draft's steps for it take
        self._overhead_us = _FIRST_OVERHEAD_US
        self._silent_since: float | None = None  # since when the draft has not answered what it was told
        self.is_hung = False  # it was silent for so long that another draft should take its place

    # ---- Drafter --------------------------------------------------------------------------------------------------

    @property
    def is_ready(self) -> bool:
        return self._wire is not None

    def is_busy(self) -> bool:
        """Some requests are never answered, so this is not believed beyond their deadlines."""
        now = self._clock()
        return any(now < stream.deadline for stream in self._unanswered)

    def stats(self) -> dict[str, float]:
        return {"draft_late_rounds": self.num_late, "draft_answer_beyond_us": self._overhead_us}

    def step_us(self, num_rows: int) -> float:
        return self._times.us(num_rows)

    def follows(self, state: RequestState, wanted: int) -> bool:
        """The draft can be asked about the request now. One that it does not mirror yet it is told of."""
        stream = self._by_request.get(state.request.request_id)
        if stream is None:
            self._open(state, wanted)
            return False
        if stream.state is _State.BEHIND:
            return self._clock() >= stream.deadline
        return stream.state is not _State.OPENED

    def _open(self, state: RequestState, wanted: int) -> None:
        """Let the draft mirror a request, unless the next frame is full; then a later step does."""
        if self._num_opened_tokens and self._num_opened_tokens + len(state.tokens) > _MOST_OPENED:
            return
        self._num_opened_tokens += len(state.tokens)
        self._num_streams += 1
        origin, tokens = state.request, state.tokens.tolist()
        stream = _Stream(origin.request_id, self._num_streams, self._clock() + _BEHIND_S)
        self._by_request[origin.request_id] = self._streams[stream.number] = stream
        self._unanswered.add(stream)
        request = Request("", tokens, state.prompt_len, state.params, origin.seed, 0, origin.cache_salt)
        self._requests.opened.append(OpenStream(stream.number, request, wanted))

    def ask(self, state: RequestState, wanted: int) -> None:
        """A request that the draft follows has no token in flight, and its next row could bring `wanted` guesses."""
        stream, known = self._by_request[state.request.request_id], len(state.tokens)
        if stream.asked == known:
            return
        stream.asked = known
        new = state.tokens[stream.acked :].tolist()
        self._requests.committed.append(CommitTokens(stream.number, stream.acked, new, wanted))
        self._unanswered.add(stream)
        # What the draft catches up with is not waited for; what came meanwhile is, or slow drafts would never do it.
        if len(new) > CATCH_UP[-1] and stream.state is not _State.CAUGHT_UP:
            stream.fall_behind(self._clock())
        elif len(stream.guesses(state)) < wanted:
            stream.state = _State.DUE  # its deadline is that of the round
        else:
            stream.state, stream.deadline = _State.BEHIND, 0.0  # what was guessed ahead is enough

    def poll(self) -> bool:
        """Say what there is to say, hear what there is to hear. True: some answers should be waited for."""
        told, now = self._requests, self._clock()
        if told.opened or told.committed or told.closed:
            self._requests, self._num_opened_tokens = DraftRequests(), 0
            if told.committed:
                self._begin_round(told, now)
            if self._silent_since is None and (told.opened or told.committed):
                self._silent_since = now
            self._try(lambda wire: wire.send(told))
        self._receive(0.0)
        if self._silent_since is not None and now - self._silent_since > _HUNG_S:
            self.is_hung = True
        due = self._due()
        late = [stream for stream in due if now >= stream.deadline]
        if late:
            self._give_up(late)
        return len(due) > len(late)

    def wait(self) -> None:
        """Until the answers that are due have come, or are late."""
        due = self._due()
        if not due:
            return
        while due and (left := max(stream.deadline for stream in due) - self._clock()) > 0:
            self._receive(left)
            due = self._due()
        if due:
            self._give_up(due)
        else:
            beyond_us = (self._clock() - self._asked_at) * 1e6 - self._steps_us
            self._overhead_us += _OVERHEAD_WEIGHT * (beyond_us - self._overhead_us)

    def guess(self, state: RequestState, most: int) -> list[int] | None:
        """The tokens after the request's known ones in its last chain; None if there is no such chain."""
        stream = self._by_request.get(state.request.request_id)
        if stream is None or stream.asked != len(state.tokens):
            return None
        guesses = stream.guesses(state)[:most]
        return None if not guesses and stream.acked < stream.asked else guesses

    def forget(self, state: RequestState) -> None:
        """The request has ended."""
        stream = self._by_request.get(state.request.request_id)
        if stream is not None:
            self._close(stream)

    # ---- rounds ---------------------------------------------------------------------------------------------------

    def _due(self) -> list[_Stream]:
        return [stream for stream in self._unanswered if stream.state is _State.DUE]

    def _begin_round(self, told: DraftRequests, now: float) -> None:
        self._asked_at = now
        behind = [len(commit.token_ids) for commit in told.committed]
        self._steps_us = max(commit.wanted for commit in told.committed) * self.step_us(len(behind))
        if max(behind) > CATCH_UP[-1]:
            self._steps_us += self.step_us(sum(behind))
        # Below what the steps took when the draft started, if they took long because the machine was busy then.
        expected_us = max(_FIRST_OVERHEAD_US, self._overhead_us + self._steps_us)
        deadline = now + (_PATIENCE * expected_us + _PATIENCE_US) / 1e6
        for stream in self._due():
            stream.deadline = deadline

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
            if chain.length == 0:  # the draft does not know it: told anew
                self._close(stream)
                continue
            if chain.length < stream.acked:
                continue  # it comes out of turn
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
        """With the wire, if there is one; a broken one is let go of, and all guesses with it."""
        if self._wire is None:
            return None
        try:
            return use(self._wire)
        except OSError as e:
            self._detach()
            self.is_hung = isinstance(e, TimeoutError)  # it lives, and reads no more
            return None
