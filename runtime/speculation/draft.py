"""A draft model's side of speculation: it mirrors the engine's requests and samples ahead of them.

    engine                                     draft
    OpenStream(7, tokens t0..t9)      ---------->    mirror 7: t0..t9, then guesses g10 g11 g12 ...
                                <----------    DraftTokens(7, length 10, [g10, g11, g12])
    verifies; g10, g11 were right, then t12
    CommitTokens(7, base 10, [g10, g11, t12])  -->   g12 != t12: rewind to 12, go on with t12, g13, g14 ...
                                <----------    DraftTokens(7, length 13, [g13, g14, g15])

Only token ids travel. Both models sample with the same noise by position (C4), so a guess is right if it equals the
target's own sample. Answers are correct without any of this (C8). A chain names the length that it continues, and a
commit starts where the last chain did. Frames may therefore be lost, repeated or late: later frames repair the mirror.

A mirror is an ordinary request of an ordinary scheduler, with blocks, prefix cache and preemption. It never ends by
itself: it pauses `wanted` tokens, and some ahead, after its final tokens, and may be rewritten from there on.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from runtime.base.config import NGRAM, EngineConfig
from runtime.base.model_info import ModelInfo
from runtime.base.sampling_fields import Effect
from runtime.base.types import MAX_MATCHED_TOKENS, CallboardError, Request
from runtime.core.executor import Executor, InProcess
from runtime.core.extra import Extra
from runtime.core.plan import MAX_STEPS
from runtime.core.request_state import RequestState
from runtime.core.scheduler import Scheduler
from runtime.speculation.choose_k import MAX_CHOSEN_TOKENS

CATCH_UP = (2, 8)  # row lengths that a draft's runner has graphs for, besides 1
_DEPTH = 2  # plans in flight
_AHEAD_STEPS = 2  # steps of a plan that only guesses ahead
_MORE_AHEAD, _LESS_AHEAD = 0.1, 0.5  # change of the lookahead if a commit finds the draft idle, or has to wait


@dataclass(frozen=True, slots=True)
class OpenStream:
    """Mirror `request`, which has only final tokens, and guess `wanted` tokens.

    `stream` is the engine's number for it, never used for another request. A second OpenStream replaces the mirror."""

    stream: int
    request: Request
    wanted: int


@dataclass(frozen=True, slots=True)
class CommitTokens:
    """The request's tokens from position `base_len` on are final, and `wanted` guesses may follow.

    `base_len` is at most the length that the draft has acknowledged. The draft skips tokens that it already has."""

    stream: int
    base_len: int
    token_ids: list[int]
    wanted: int


@dataclass(frozen=True, slots=True)
class DraftRequests:
    """Engine to draft, one frame per step, with at most one entry per stream."""

    opened: list[OpenStream] = field(default_factory=list)
    committed: list[CommitTokens] = field(default_factory=list)
    closed: list[int] = field(default_factory=list)

    def with_keyed(self, change: Callable[[Any], Any]) -> DraftRequests:
        """Return a copy in which `change` replaces each grammar."""
        if not self.opened:
            return self
        return replace(self, opened=[replace(o, request=o.request.with_keyed(change)) for o in self.opened])


@dataclass(frozen=True, slots=True)
class DraftTokens:
    """Draft to engine, in lists: `token_ids` may follow the stream's first `length` tokens, which are final.

    An empty list means that the draft cannot guess now; length 0, that it does not have the stream."""

    stream: int
    length: int
    token_ids: list[int]


@dataclass(slots=True)
class _Mirror:
    """The draft's record of a stream, without its tokens."""

    owner: Hashable
    stream: int
    wanted: int
    reply_due: bool = True  # no chain was sent since the last commit


def row_lens(config: EngineConfig, is_draft: bool) -> tuple[int, ...]:
    """The frequent tokens per row under speculation, besides one. A model verifies a token with its draft
    tokens; a draft catches up with the model's tokens."""
    if is_draft:
        return CATCH_UP
    if config.draft is None:
        return ()
    most = MAX_CHOSEN_TOKENS if config.num_draft_tokens is None else config.num_draft_tokens
    is_matched = config.draft == NGRAM and config.num_draft_tokens is None
    return *range(2, most + 2), *([MAX_MATCHED_TOKENS + 1] if is_matched else [])


class DraftCore:
    """Mirrors requests from one or several engines. Not thread-safe: one thread calls all methods."""

    def __init__(
        self,
        config: EngineConfig,
        info: ModelInfo,
        executor: Executor,
        ahead: int,
        keeps_grammars: bool = False,
        extras: Sequence[Extra] = (),
    ) -> None:
        """Guess up to `ahead` tokens after the wanted ones, fewer if the next commit usually arrives before that.

        With `keeps_grammars` the draft samples only tokens that the grammars allow."""
        self.scheduler = Scheduler(config, info, extras)
        self.executor, self.ahead = executor, ahead
        self.keeps_grammars = keeps_grammars and bool(info.eos_token_ids)
        self.outbox: dict[Hashable, list[DraftTokens]] = {}  # replies by owner; the caller sends them and empties it
        self._streams: dict[tuple[Hashable, int], RequestState] = {}
        self._num_opened = 0
        self._room = float(ahead)  # guesses ahead that fit before the next commit
        self._was_ahead = self._is_idle = False  # the last step only guessed ahead; nothing was left to compute

    def take(self, owner: Hashable, requests: DraftRequests) -> None:
        """Apply a frame of the engine `owner`."""
        for stream in requests.closed:
            self._close(owner, stream)
        if requests.opened:
            self.outbox.setdefault(owner, [])  # an empty reply acknowledges them at once: chains take longer
        for opened in requests.opened:
            self._close(owner, opened.stream)
            self._open(owner, opened)
        if requests.committed:
            self._adapt_lookahead()
        for commit in requests.committed:
            self._commit(owner, commit)

    def forget(self, owner: Hashable) -> None:
        """Close all streams of an engine that has disconnected."""
        for _, stream in [key for key in self._streams if key[0] == owner]:
            self._close(owner, stream)
        self.outbox.pop(owner, None)

    def recover(self) -> None:
        """Forget all streams and the steps in flight, after a step in this process that raised."""
        assert isinstance(self.executor, InProcess)
        for owner, stream in list(self._streams):
            self._close(owner, stream)
        self.outbox.clear()
        self.scheduler.requeue_all()
        self.executor.reset()

    def step(self) -> bool:
        """Launch the steps that mirrors need, and wait for the oldest. Return False if there is nothing to compute.

        Guesses ahead are launched in small pieces: most of them are wrong, and then delay the next commit."""
        scheduler = self.scheduler
        reply_due = any(mirror.owner.reply_due for mirror in self._streams.values())
        max_steps, depth = (MAX_STEPS, _DEPTH) if reply_due else (_AHEAD_STEPS, 1)
        while scheduler.num_in_flight < depth and (step := scheduler.schedule(max_steps)) is not None:
            self.executor.submit(step.plan)
        self._is_idle = not scheduler.num_in_flight
        if self._is_idle:
            return False
        self._was_ahead = not reply_due
        output = scheduler.commit(self.executor.collect())
        for state, _ in output.finished:  # its logits were not finite
            del self._streams[state.owner.owner, state.owner.stream]
        for state in dict.fromkeys(output.states):
            self._send_if_ready(state)
        return True

    def _open(self, owner: Hashable, opened: OpenStream) -> None:
        self._num_opened += 1
        effects = {Effect.REPORT} if self.keeps_grammars else {Effect.REPORT, Effect.GRAMMAR}
        params = opened.request.params.without(effects)
        request = replace(opened.request, request_id=str(self._num_opened), params=params)
        try:
            state = self.scheduler.add(request, _Mirror(owner, opened.stream, opened.wanted))
        except CallboardError:
            return  # longer than the draft's context, or with padding tokens of the target: it gets no chain
        state.stop_ids = frozenset()  # the target decides what ends it
        state.num_final = len(state.tokens)
        self._streams[owner, opened.stream] = state
        self._set_target(state)

    def _close(self, owner: Hashable, stream: int) -> None:
        state = self._streams.pop((owner, stream), None)
        if state is not None:
            self.scheduler.abort(state.request.request_id, stopped=True)

    def _commit(self, owner: Hashable, commit: CommitTokens) -> None:
        state = self._streams.get((owner, commit.stream))
        if state is None:
            self._send(owner, DraftTokens(commit.stream, 0, []))
            return
        mirror: _Mirror = state.owner
        new = commit.token_ids[state.num_final - commit.base_len :] if commit.base_len <= state.num_final else []
        # Padding of the target's vocabulary, or beyond the draft's context: no slot has room for such a mirror.
        if new and (max(new) >= self.scheduler.info.vocab_size or state.num_final + len(new) >= state.max_len):
            self._close(owner, commit.stream)
            self._send(owner, DraftTokens(commit.stream, 0, []))
            return
        at = state.num_final
        for token in new:
            if at == len(state.tokens) or state.tokens[at] != token:
                self.scheduler.rewrite(state, at, new[at - state.num_final :])
                break
            at += 1
        state.num_final += len(new)
        mirror.wanted, mirror.reply_due = commit.wanted, True
        self._set_target(state)
        if state.slot is None or state.plan_limit <= state.num_final or commit.base_len > state.num_final:
            # It waits for a slot, has reached its limit, or misses the tokens before the commit.
            mirror.reply_due = False
            self._send(owner, DraftTokens(commit.stream, state.num_final, []))
        else:
            self._send_if_ready(state)

    def _set_target(self, state: RequestState) -> None:
        """Set where the mirror pauses: after the wanted tokens, and further ahead once these are sent.

        A request's last token is never guessed, because no row verifies it."""
        mirror: _Mirror = state.owner
        ahead = 0 if mirror.reply_due else int(self._room)
        state.plan_limit = min(state.num_final + mirror.wanted + ahead, state.max_len - 1)

    def _adapt_lookahead(self) -> None:
        """Guess further ahead if this commit finds the draft idle, and less far if it has to wait.

        Most commits correct a guess, and then the tokens after it are computed in vain."""
        if self._is_idle:
            self._room = min(self.ahead, self._room + _MORE_AHEAD)
        elif self._was_ahead:
            self._room = max(0.0, self._room - _LESS_AHEAD)

    def _send_if_ready(self, state: RequestState) -> None:
        """Send the chain when it has the wanted length, and again at its limit."""
        mirror: _Mirror = state.owner
        num, most = len(state.tokens) - state.num_final, state.plan_limit - state.num_final
        if (mirror.reply_due and num >= most) or (num == most > mirror.wanted + 1):
            mirror.reply_due = False
            self._set_target(state)
            self._send(
                mirror.owner, DraftTokens(mirror.stream, state.num_final, state.tokens[state.num_final :].tolist())
            )

    def _send(self, owner: Hashable, chain: DraftTokens) -> None:
        self.outbox.setdefault(owner, []).append(chain)


class LocalWire:
    """A draft in the engine's own process (draft_client.DraftWire). It computes within `receive` and is never late."""

    def __init__(self, core: DraftCore) -> None:
        self._core = core

    def send(self, requests: DraftRequests) -> None:
        self._core.take(None, requests)

    def receive(self, timeout_s: float) -> list[DraftTokens] | None:
        """Compute all chains and return them. `timeout_s` is ignored."""
        while self._core.step():
            pass
        return self._core.outbox.pop(None, None)
