"""The engine's side of a draft model: what it is told, what it answers, and how long that is waited for.

A round is: the last step's tokens are committed, the draft is told, the next step waits until the guesses are there or
late, and verifies what came. The wait is bounded by a few times what the draft takes, and there is none while it does
not answer: rows then go on plainly, and it is tried again from time to time.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol, TypeVar

from runtime.core.config import EngineConfig, ModelInfo
from runtime.core.draft import CATCH_UP, Chain, Commit, Open, Told
from runtime.core.request_state import RequestState
from runtime.core.speculation import Drafter, Ngram, Speculation, StepTimes
from runtime.core.types import Request

_PATIENCE, _MOST_PATIENCE = 2.0, 16.0  # times what a round is expected to take: doubles when an answer is late, and
_PATIENCE_DECAY = 0.9  # falls with every answer in time
_PATIENCE_US = 1000.0
_PAUSE_S, _LONGEST_PAUSE_S = 0.1, 5.0  # without guesses after a late answer, doubling
_HUNG_S = 10.0  # silence after which a draft is thought to be stuck
_WEIGHT = 0.1  # of the newest answer in the estimate of what they take beyond the draft's steps
_FIRST_OVERHEAD_US = 300.0
_FIRST_ROUND_US, _FIRST_ROW_US = 1000.0, 60.0  # a round beyond the models' times, and each of its rows
_FAR_S = 0.5  # for a draft to answer what nobody waits for, doubling: asked again before, it would begin again

T = TypeVar("T")


class DraftWire(Protocol):
    """A connection to a draft. Both methods raise OSError when the draft is gone."""

    def send(self, told: Told) -> None:
        """Never blocks for longer than the draft needs to read."""
        ...

    def receive(self, timeout_s: float) -> list[Chain] | None:
        """What has come, if only the sign that Opens were read; waits at most `timeout_s` for it. None: nothing."""
        ...


@dataclass(slots=True)
class _Followed:
    """What the draft was told of a request, and its last chain."""

    stream: int
    acked: int = -1  # final tokens that the draft has; -1: it has not answered yet
    asked: int = -1  # known tokens when guesses were last asked for
    far_until: float = 0.0  # nobody waits for what it was asked last: it is let be until it answers, or this time
    num_far: int = 0  # times so, since it answered
    has_caught_up: bool = False  # it has just answered so
    chain: list[int] = field(default_factory=list)  # what may follow the first `acked` tokens


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
        self._followed: dict[str, _Followed] = {}  # by request id
        self._streams: dict[int, _Followed] = {}
        self._num_streams = 0
        self._told = Told()  # not sent yet
        self._due: set[int] = set()  # streams whose answer the next step waits for
        self._unanswered: set[int] = set()  # those, and streams whose answer comes when it comes
        self._told_at = 0.0
        self._asked_at = self._deadline = self._paused_until = 0.0
        self._steps_us = 0.0  # that the draft's steps of the round take
        self._overhead_us, self._patience = _FIRST_OVERHEAD_US, _PATIENCE
        self._late_in_a_row = 0
        self._silent_since = 0.0  # when the draft was told something that it has not answered; 0: it has
        self.is_hung = False  # silent for so long that another draft should take its place

    # ---- Drafter --------------------------------------------------------------------------------------------------

    @property
    def is_ready(self) -> bool:
        return self._wire is not None and self._clock() >= self._paused_until

    def is_busy(self) -> bool:
        """Some requests are never answered, so this is not believed for long."""
        return bool(self._unanswered) and self._clock() - self._told_at < _FAR_S

    def stats(self) -> dict[str, float]:
        return {"draft_late_rounds": self.num_late, "draft_answer_beyond_us": self._overhead_us}

    def step_us(self, num_rows: int) -> float:
        return self._times.us(num_rows)

    def follows(self, state: RequestState, wanted: int) -> bool:
        """Whether the draft mirrors the request; if not, it is told of it."""
        followed = self._followed.get(state.request.request_id)
        if followed is None:
            self._num_streams += 1
            followed = _Followed(self._num_streams)
            self._followed[state.request.request_id] = self._streams[followed.stream] = followed
            origin, tokens = state.request, state.tokens.tolist()
            request = Request("", tokens, state.prompt_len, state.params, origin.seed, 0, origin.cache_salt)
            self._told.opened.append(Open(followed.stream, request, wanted))
            self._unanswered.add(followed.stream)
        return followed.acked >= 0 and self._clock() >= followed.far_until

    def ask(self, state: RequestState, wanted: int) -> None:
        """A request that the draft follows has no token in flight, and its next row could bring `wanted` guesses."""
        followed, known = self._followed[state.request.request_id], len(state.tokens)
        if followed.asked == known:
            return
        followed.asked = known
        new = state.tokens[followed.acked :].tolist()
        self._told.committed.append(Commit(followed.stream, followed.acked, new, wanted))
        self._unanswered.add(followed.stream)
        # What the draft catches up with is not waited for; what came meanwhile is, or slow drafts would never do it.
        catches_up, followed.has_caught_up = followed.has_caught_up, False
        if len(new) > CATCH_UP[-1] and not catches_up:
            self._let_be(followed)
        elif len(self._guesses(followed, state)) < wanted:
            self._due.add(followed.stream)

    def is_due(self) -> bool:
        """Say what there is to say, hear what there is to hear. True: some answers should be waited for."""
        told, now = self._told, self._clock()
        if told.opened or told.committed or told.closed:
            self._told = Told()
            if told.committed:
                self._begin_round(told, now)
            if told.opened or told.committed:
                self._told_at = now
                self._silent_since = self._silent_since or now
            self._try(lambda wire: wire.send(told))
        self._hear(0.0)
        if self._silent_since and now - self._silent_since > _HUNG_S:
            self.is_hung = True
        if self._due and now >= self._deadline:
            self._give_up()
        return bool(self._due)

    def wait(self) -> None:
        """Until the answers that are due have come, or are late."""
        if not self._due:
            return
        while self._due and (left := self._deadline - self._clock()) > 0:
            self._hear(left)
        if self._due:
            self._give_up()
        else:
            self._learn((self._clock() - self._asked_at) * 1e6)

    def guess(self, state: RequestState, most: int) -> list[int] | None:
        """What follows the request's known tokens in its last chain; None if it was not asked for, or is not there."""
        followed = self._followed.get(state.request.request_id)
        if followed is None or followed.asked != len(state.tokens):
            return None
        guesses = self._guesses(followed, state)[:most]
        return None if not guesses and followed.acked < followed.asked else guesses

    def forget(self, state: RequestState) -> None:
        """The request has ended."""
        followed = self._followed.pop(state.request.request_id, None)
        if followed is not None:
            self._end(followed)

    # ---- rounds ---------------------------------------------------------------------------------------------------

    def _guesses(self, followed: _Followed, state: RequestState) -> list[int]:
        """Of a chain that was made on the assumption of tokens that have come true, the rest; of any other, nothing."""
        chain, since = followed.chain, state.tokens[followed.acked :].tolist()
        return chain[len(since) :] if chain[: len(since)] == since else []

    def _begin_round(self, told: Told, now: float) -> None:
        self._asked_at = now
        behind = [len(commit.token_ids) for commit in told.committed]
        self._steps_us = max(commit.wanted for commit in told.committed) * self.step_us(len(behind))
        if max(behind) > CATCH_UP[-1]:
            self._steps_us += self.step_us(sum(behind))
        # Below what the steps took when the draft started, if they took long because the machine was busy then.
        expected_us = max(_FIRST_OVERHEAD_US, self._overhead_us + self._steps_us)
        self._deadline = now + (self._patience * expected_us + _PATIENCE_US) / 1e6

    def _learn(self, took_us: float) -> None:
        beyond = took_us - self._steps_us
        self._overhead_us += _WEIGHT * (beyond - self._overhead_us)
        self._patience = max(_PATIENCE, _PATIENCE_DECAY * self._patience)

    def _let_be(self, followed: _Followed) -> None:
        followed.far_until = self._clock() + min(_LONGEST_PAUSE_S, _FAR_S * 2**followed.num_far)
        followed.num_far += 1

    def _give_up(self) -> None:
        for stream in self._due:
            self._let_be(self._streams[stream])
        self._due.clear()
        self._patience = min(_MOST_PATIENCE, 2 * self._patience)
        self.num_late += 1
        pause = min(_LONGEST_PAUSE_S, _PAUSE_S * 2**self._late_in_a_row)
        self._late_in_a_row += 1
        self._paused_until = self._clock() + pause

    def _hear(self, timeout_s: float) -> None:
        chains = self._try(lambda wire: wire.receive(timeout_s))
        if chains is None:
            return
        self._silent_since, self.is_hung = 0.0, False
        for chain in chains:
            self._late_in_a_row, self._paused_until = 0, 0.0
            followed = self._streams.get(chain.stream)
            if followed is None:
                continue  # its request has ended
            if chain.length == 0:  # the draft does not know it: told anew
                self._end(followed)
                self._followed = {k: v for k, v in self._followed.items() if v is not followed}
                continue
            if chain.length < followed.acked:
                continue  # it comes out of turn
            ends = (i for i, token in enumerate(chain.token_ids) if token >= self.vocab_size)
            followed.acked, followed.chain = chain.length, chain.token_ids[: next(ends, None)]
            if chain.length >= followed.asked:
                followed.has_caught_up = followed.num_far > 0
                followed.far_until, followed.num_far = 0.0, 0
                self._due.discard(chain.stream)
                self._unanswered.discard(chain.stream)

    def _end(self, followed: _Followed) -> None:
        del self._streams[followed.stream]
        self._due.discard(followed.stream)
        self._unanswered.discard(followed.stream)
        self._told.closed.append(followed.stream)

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


def speculation_of(config: EngineConfig, info: ModelInfo, clock: Callable[[], float]) -> Speculation | None:
    """What the settings ask for: a draft model has yet to be attached. None: no guesses, and no cost."""
    if config.draft is None:
        return None
    drafter: Drafter = DraftClient(info.vocab_size, clock) if config.has_draft_model else Ngram()
    round_us, row_us = (_FIRST_ROUND_US, _FIRST_ROW_US) if config.has_draft_model else (0.0, 0.0)
    latency_us = info.latency_us + round_us
    return Speculation(drafter, config.num_draft_tokens, info.step_us, latency_us, clock, row_us)
