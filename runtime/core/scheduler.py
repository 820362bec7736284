"""The scheduler: which tokens of which requests the next step computes.

There are no phases. A request has `num_total` tokens, of which `num_computed` have been planned; a step gives it the
rest, or as much of it as the token budget holds: a prefill chunk, or one token (decode). A row that reaches the
request's last token samples the next one, which counts at once although its id is not known yet:

    tokens       [ prompt ............ | output ....... ]         ids known: len(tokens)
    num_total                                            + p      p sampled in steps still in flight
    num_computed  ..................................^             K/V planned; the next row starts here

So step k+1 is planned before the tokens of step k are known (queue depth 2), and the same code at depth 1 is its plain
twin. What is seen late, an end of sequence, costs one row whose token is dropped: a request's `epoch` changes when it
leaves its slot, and a result that carries another epoch is stale (C3). Blocks and slots may be reused at once, because
runners execute plans in order (C2).

This file is hot: it sequences the block tables and speculation, and does no I/O (C1).
"""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Sequence
from typing import Any

import numpy as np

from runtime.core.admission import Admission
from runtime.core.config import EngineConfig, ModelInfo
from runtime.core.isolation import Isolation
from runtime.core.kv_cache_manager import KVCacheManager
from runtime.core.plan import EMPTY, NewSlot, StepPlan, StepResult, num_targets
from runtime.core.prompt_logprobs import ScoredRow, collect_prompt_logprobs, is_finite
from runtime.core.request_state import NEVER, RequestState
from runtime.core.speculation import MAX_DRAFT_TOKENS, Speculation
from runtime.core.types import CallboardError, FinishReason, Request, StepOutput, TokenLogprobs
from runtime.core.waiting_queue import WaitingQueue


class Scheduler:
    """Plans steps and commits their results. Not thread-safe: its caller is the step loop alone."""

    def __init__(self, config: EngineConfig, info: ModelInfo, speculation: Speculation | None = None) -> None:
        self.config, self.info, self.speculation = config, info, speculation
        self.block_size = info.block_size
        self.max_len = min(info.max_model_len, (info.num_kv_blocks - 1) * info.block_size)
        self.max_num_seqs = config.max_num_seqs or info.max_num_seqs
        self.budget = config.max_num_batched_tokens or info.max_num_batched_tokens
        if not config.chunked_prefill:
            self.budget = max(self.budget, self.max_len)
        self.kv_cache = KVCacheManager(info, config.prefix_cache)
        self.pool = self.kv_cache.pool
        self.requests: dict[str, RequestState] = {}
        self.running: list[RequestState] = []  # in order of admission
        self.admitted: list[RequestState] = []  # by the last plan
        self.most_repeats = 1  # of a plan (StepPlan.num_steps)
        self.num_preemptions = 0
        self.num_structured = 0, 0  # outputs bound to a grammar, by what serves it: lazy, eager
        self.num_drafts = self.num_draft_tokens = 0
        self.accepted_at = [0] * MAX_DRAFT_TOKENS  # accepted guesses by their place in a row
        self.prompt_tokens_cached = self.prompt_tokens_total = 0
        self.waiting = WaitingQueue()  # the requests that hold no slot
        self._arrivals = 0
        self._step_id = 0
        self.admission = Admission(self.kv_cache)
        self.isolation = Isolation()
        self._batch_closed = False  # static batching: a row has sampled
        self._forget_runners()

    def _forget_runners(self) -> None:
        self._free_slots = list(range(self.max_num_seqs - 1, -1, -1))
        # Steps: id, rows, samples with their requests' epochs and guesses, rows whose prompts are scored.
        self._in_flight: deque[tuple[int, list[RequestState], list[tuple[RequestState, int, int]], list[ScoredRow]]] = (
            deque()
        )
        self._shapes: deque[tuple[int, int, int]] = deque()
        self._freed: list[int] = []
        self.kv_cache.reset()

    # ---- requests -------------------------------------------------------------------------------------------------

    @property
    def num_waiting(self) -> int:
        """Requests that hold no slot."""
        return len(self.waiting)

    @property
    def num_in_flight(self) -> int:
        """Plans whose results have not been committed."""
        return len(self._in_flight)

    def add(self, request: Request, owner: Any = None) -> RequestState:
        """Queue a request. Raises CallboardError if it can never be served."""
        params, num_known = request.params, len(request.token_ids)
        if request.request_id in self.requests:
            raise CallboardError(f"Request id {request.request_id!r} is in use; choose another.")
        if not 1 <= request.prompt_len <= num_known:
            raise CallboardError("The prompt is empty; send at least one token.")
        extremes = min(request.token_ids), max(request.token_ids)
        if (bad := next((i for i in extremes if not 0 <= i < self.info.vocab_size), None)) is not None:
            raise CallboardError(f"Token id {bad} is not in this model's vocabulary of {self.info.vocab_size}.")
        if params.grammar is not None and not self.info.eos_token_ids:
            raise CallboardError("This model has no end-of-sequence token; structured output needs one to end with.")
        limit = min(request.prompt_len + params.max_tokens, self.max_len) + (params.max_tokens == 0)
        if num_known >= limit:
            raise CallboardError(
                f"The prompt has {request.prompt_len} tokens, but this model's maximum context length is "
                f"{self.max_len} tokens, output included; shorten the prompt."
            )
        stop_ids = frozenset(params.stop_token_ids)
        if not params.ignore_eos:
            stop_ids |= frozenset(self.info.eos_token_ids)
        self._arrivals += 1
        job = limit if self.config.policy == "sjf" else 0
        state = RequestState(request, limit, stop_ids, (request.priority, job, self._arrivals))
        state.owner = owner
        self.requests[request.request_id] = state
        self.waiting.push(state)
        return state

    def abort(self, request_id: str, stopped: bool = False) -> None:
        """End a request, wherever it is; an unknown id is no error (C9). `stopped`: its output had come to its end, as
        that of one whose stop strings only its owner sees probably had."""
        state = self.requests.get(request_id)
        if state is not None:
            self._end(state, FinishReason.STOP if stopped or state.params.stop else FinishReason.ABORT)

    def rewrite(self, state: RequestState, length: int, token_ids: Sequence[int]) -> None:
        """`token_ids` follow the first `length` tokens of a request, whatever it has or has in flight there; none of
        that is hashed. Its next row brings them."""
        if state.slot < 0:
            self.waiting.num_tokens += length + len(token_ids) - len(state.tokens)
        else:
            state.epoch += 1
            state.num_computed = min(state.num_computed, length)
            state.first_unsent = min(state.first_unsent, length)
        del state.tokens[length:], state.block_hashes[length // self.block_size :]
        state.tokens.extend(token_ids)
        state.num_total = len(state.tokens)

    def requeue_all(self) -> RequestState | None:
        """The runners are gone with all they held: every live request is recomputed from its known tokens (C8), but the
        one that is returned, which is at fault and has ended (C9)."""
        in_flight = {state for _, rows, _, _ in self._in_flight for state in rows if state.epoch >= 0}
        self._forget_runners()
        for state in self.running:
            self._detach(state)
            self.waiting.push(state)
        self.running.clear()
        culprit = self.isolation.lost(in_flight)
        if culprit is not None:
            self._end(culprit, FinishReason.ERROR)
        return culprit

    def _detach(self, state: RequestState) -> None:
        """What a preempted request keeps: its known tokens and their identities."""
        state.epoch += 1
        state.slot = -1
        state.blocks = []
        state.num_computed = 0
        state.num_total = len(state.tokens)
        state.next_block_end = state.first_unsent = NEVER
        state.drafts_in_flight = 0
        if state.prompt_logprobs:
            state.prompt_logprobs = []

    def _leave_slot(self, state: RequestState, spoilt: bool = False) -> None:
        slot = state.slot
        self.kv_cache.close(state, spoilt)
        self.running.remove(state)
        self._free_slots.append(slot)
        self._freed.append(slot)
        self._detach(state)

    def _preempt(self, state: RequestState) -> None:
        self._leave_slot(state)
        self.waiting.push(state)

    def _end(self, state: RequestState, reason: FinishReason) -> None:
        del self.requests[state.request.request_id]
        self.admission.note_end(state, reason is FinishReason.STOP)
        self.isolation.forget(state)
        if state.slot >= 0:
            self._leave_slot(state, spoilt=reason is FinishReason.ERROR)
        else:
            self.waiting.remove(state)
            state.tokens, state.request.token_ids = array("i"), []  # whoever still has its record holds no prompt
        state.epoch = -1
        if self.speculation is not None:
            self.speculation.drafter.forget(state)

    # ---- planning -------------------------------------------------------------------------------------------------

    def schedule(self) -> StepPlan | None:
        """The next step, or None if there is nothing to compute before a result, or guesses, come in.

        While guesses are being verified nothing is planned, so that all rows stay in one step."""
        rows: list[RequestState] = []
        slots: list[int] = []
        starts: list[int] = []
        counts: list[int] = []
        samples: list[int] = []
        sampled: list[tuple[RequestState, int, int]] = []  # with its epoch, and the guess it must equal to go on
        given: list[int] = []
        given_ids: list[int] = []
        scored: list[ScoredRow] = []
        new: list[NewSlot] = []
        budget = self.budget
        self.admitted = []
        if (alone := self.isolation.on_trial()) is not None:
            for state in [s for s in self.running if s is not alone]:
                self._preempt(state)
        guessing = None  # what guesses for rows of this step, if any does
        if self.speculation is not None:
            if self.speculation.request_drafts(self.running):
                return None
            guessing = self.speculation if self.speculation.round_count else None

        def give(state: RequestState, count: int, guesses: Sequence[int] = ()) -> None:
            rows.append(state)
            slots.append(state.slot)
            starts.append(state.num_computed)
            counts.append(count + len(guesses))
            state.num_computed += count
            is_last = state.num_computed == state.num_total
            if state.prompt_logprobs is not None:
                scored.append(ScoredRow(state, state.epoch, num_targets(starts[-1], count, state.prompt_len), is_last))
            if is_last:
                state.num_total += 1
                self._batch_closed = True
            if guesses:
                state.drafts_in_flight = len(guesses)
                sampled.extend((state, state.epoch, guess) for guess in guesses)
            elif state.num_computed > state.first_unsent:
                guesses = state.tokens[max(starts[-1], state.first_unsent) : state.num_computed]
                state.first_unsent = NEVER if is_last else state.num_computed
            if guesses:
                given.extend([0] * (len(rows) - 1 - len(given)) + [len(guesses)])
                given_ids.extend(guesses)
            if is_last and state.params.max_tokens:
                samples.append(1 + state.drafts_in_flight)
                sampled.append((state, state.epoch, -1))
            else:
                samples.append(0)
            if state.num_computed >= state.next_block_end:
                self.kv_cache.cache_full_blocks(state)

        for state in list(self.running):
            if budget <= 0:
                break
            count = state.num_total - state.num_computed
            if state.num_total >= state.plan_limit or state.slot < 0 or state.drafts_in_flight:
                continue  # its last token is on the way, or it was preempted a moment ago, or waits for its guesses
            if count > budget:
                if not self.config.chunked_prefill:
                    continue
                count = budget
            speculation = guessing if count == 1 else None
            if speculation is not None and state.num_total > len(state.tokens):  # guesses continue known tokens
                if speculation.defer(state):
                    continue
                speculation = None
            if state.num_computed + count > len(state.blocks) * self.block_size and not self._grow(state, count, rows):
                continue
            guesses = self._guesses(speculation, state, budget) if speculation is not None else ()
            give(state, count, guesses)
            budget -= count + len(guesses)

        if not self.running:
            self._batch_closed = False
        static = self.config.batching == "static"
        may_admit = not (static and self._batch_closed)
        while may_admit and (budget > 0 or static) and (admitted := self._next_admitted(budget, alone)) is not None:
            state = admitted
            self.admitted.append(state)
            new.append(self._open_slot(state))
            count = min(budget, state.num_total - state.num_computed)
            if count > 0:  # a static batch may open more slots than this step's budget computes
                self.kv_cache.extend(state, state.num_computed + count)
                give(state, count)
                budget -= count

        if not rows:
            return None
        repeats = 1
        if self.most_repeats > 1 and len(sampled) == sum(counts) == len(rows):
            repeats += self._go_on(rows)
            sampled = [entry for entry in sampled for _ in range(repeats)]
        self._step_id += 1
        self._in_flight.append((self._step_id, rows, sampled, scored))
        if self.speculation is not None:  # how many rows, tokens and guesses, if it is a step of nothing else
            decodes = len(sampled) == sum(counts) and not new
            self._shapes.append((len(rows), len(sampled), max(given, default=0)) if decodes else (0, 0, 0))
        plan = StepPlan(
            self._step_id,
            np.array(self._freed, np.int32) if self._freed else EMPTY,
            new,
            self.kv_cache.take_writes(),
            np.array(slots, np.int32),
            np.array(starts, np.int32),
            np.array(counts, np.int32),
            np.array(samples, np.int32),
            num_steps=repeats,
        )
        if given:
            plan.draft_lens = np.array(given + [0] * (len(rows) - len(given)), np.int32)
            plan.draft_token_ids = np.array(given_ids, np.int32)
        self._freed = []
        return plan

    def _go_on(self, rows: list[RequestState]) -> int:
        """How many more tokens all of these rows may sample in the same plan, one by one; with blocks for them."""
        missing = self.kv_cache.num_missing
        more = min(self.most_repeats - 1, *(state.plan_limit - state.num_total for state in rows))
        while more > 0 and self.pool.num_available < sum(missing(s, s.num_computed + more) for s in rows):
            more -= 1
        for state in rows if more > 0 else ():
            self.kv_cache.extend(state, state.num_computed + more)
            state.num_computed += more
            state.num_total += more
        return max(0, more)

    def _guesses(self, speculation: Speculation, state: RequestState, budget: int) -> list[int]:
        """What may follow a request's known tokens, with blocks for it: no more than fits without taking others'."""
        free = len(state.blocks) * self.block_size - state.num_total + self.pool.num_available * self.block_size
        most = min(budget - 1, state.max_len - state.num_total - 1, free)
        guesses = speculation.guess(state, most) if most > 0 else []
        if guesses:
            self.num_drafts += 1
            self.num_draft_tokens += len(guesses)
            state.num_guessed += len(guesses)
            state.num_right = 0
            self.kv_cache.extend(state, state.num_total + len(guesses))
        return guesses

    def _next_admitted(self, budget: int, alone: RequestState | None) -> RequestState | None:
        """The waiting request to admit now, taken off the queue, its cached blocks acquired; or None.

        The whole prompt must fit, and with it what the running requests and this one are expected to grow to."""
        if alone is not None and (self.running or self._in_flight):
            return None  # if the runners are lost again, no other's rows shall be in flight
        state = self.waiting.first() if alone is None else alone
        if state is None or not self._free_slots:
            return None
        known = len(state.tokens)
        hits = self.kv_cache.match_prefix(state)
        start = len(hits) * self.block_size
        if not self.config.chunked_prefill and known - start > budget:
            return None
        if not self.admission.allows(state, hits, self.running):
            return None
        self.waiting.remove(state)
        self.pool.acquire(hits)
        state.blocks = hits
        state.num_computed = start
        return state

    def _open_slot(self, state: RequestState) -> NewSlot:
        """Give an admitted request a slot, with its cached prefix in the slot's table."""
        request = state.request
        state.slot = self._free_slots.pop()
        self.running.append(state)
        self.kv_cache.open(state)
        if state.num_cached < 0:
            state.num_cached = min(state.num_computed, state.prompt_len)
            self.prompt_tokens_cached += state.num_cached
            self.prompt_tokens_total += state.prompt_len
        tokens = np.frombuffer(state.tokens.tobytes(), np.int32)
        return NewSlot(state.slot, tokens, state.prompt_len, request.seed, state.params)

    def _grow(self, state: RequestState, count: int, rows: list[RequestState]) -> bool:
        """Blocks for `count` more tokens of a running request, if need be by preempting requests without a row in
        this step, last in the order of service first. False: it goes without a row this time."""
        while self.kv_cache.num_missing(state, state.num_computed + count) > self.pool.num_available:
            victim = max((s for s in self.running if s not in rows), key=lambda s: s.sort_key)
            if victim is state:
                return False  # all others go before it: it keeps what it has until they end or take it
            self.num_preemptions += 1
            self._preempt(victim)
        self.kv_cache.extend(state, state.num_computed + count)
        return True

    # ---- results --------------------------------------------------------------------------------------------------

    def commit(self, result: StepResult) -> StepOutput:
        """Take in the tokens of the oldest step in flight; returns what each request gained and which ended."""
        step_id, _, sampled, scored = self._in_flight.popleft()
        if step_id != result.step_id or len(sampled) != len(result.token_ids):
            raise CallboardError(
                f"The runners answered step {result.step_id} with {len(result.token_ids)} tokens where step {step_id} "
                f"with {len(sampled)} was due; they must be restarted."
            )
        if self.speculation is not None:
            self.speculation.observe_step(*self._shapes.popleft())
        if any(result.begun):
            lazy, eager = self.num_structured
            self.num_structured = lazy + result.begun[0], eager + result.begun[1]
        states: list[RequestState] = []
        token_ids: list[int] = []
        finished: list[tuple[RequestState, FinishReason]] = []
        logprobs: dict[int, TokenLogprobs] = {}
        logprobs_at = {row: at for at, row in enumerate(result.logprob_rows.tolist())}
        prompt_logprobs = collect_prompt_logprobs(result, scored)
        for state, scores in prompt_logprobs:
            if not state.params.max_tokens:
                finished.append((state, FinishReason.LENGTH if is_finite(scores) else FinishReason.ERROR))
                self._end(*finished[-1])
        for row, ((state, epoch, guess), token) in enumerate(zip(sampled, result.token_ids.tolist(), strict=True)):
            if state.epoch != epoch:
                continue  # ended or preempted meanwhile (C3)
            if token < 0:
                state.failure = result.failures.get(row, "")
                finished.append((state, FinishReason.GRAMMAR if state.failure else FinishReason.ERROR))
                self._end(*finished[-1])
                continue
            if row in logprobs_at:
                logprobs[len(states)] = result.sampled_logprobs(logprobs_at[row], state.params.logprobs or 0)
            tokens = state.tokens
            tokens.append(token)
            states.append(state)
            token_ids.append(token)
            if state.drafts_in_flight:
                self._verified(state, token, guess)
            if token in state.stop_ids:
                finished.append((state, FinishReason.STOP))
            elif len(tokens) >= state.max_len:
                finished.append((state, FinishReason.LENGTH))
            else:
                if len(tokens) >= state.next_block_end:
                    self.kv_cache.cache_full_blocks(state)
                continue
            self._end(*finished[-1])
        return StepOutput(states, token_ids, finished, logprobs, prompt_logprobs)

    def _verified(self, state: RequestState, token: int, guess: int) -> None:
        """A row of guesses goes on for as long as they are right; what it computed up to there stays."""
        assert self.speculation is not None
        state.num_total = len(state.tokens)
        state.num_computed = state.num_total - 1
        if token == guess:
            self.accepted_at[state.num_right] += 1
            state.num_right += 1
            state.num_accepted += 1
            self.speculation.record(state, True)
            return
        state.drafts_in_flight = 0
        if guess >= 0:
            state.epoch += 1  # what the row sampled further on is stale
            self.speculation.record(state, False)
