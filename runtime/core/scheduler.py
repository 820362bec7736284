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
from collections.abc import Sequence, Set
from dataclasses import replace
from itertools import chain
from typing import Any

import numpy as np

from runtime.core.kv_cache_manager import KVCacheManager
from runtime.core.plan import NewSlot, StepResult
from runtime.core.plan_builder import PlanBuilder, ScheduledStep, StepInFlight
from runtime.core.request_state import RequestState, checked_tokens
from runtime.core.scheduler_stats import SchedulerStats
from runtime.core.slot_pool import SlotPool
from runtime.core.waiting_queue import WaitingQueue
from runtime.features.adapter_table import AdapterTable
from runtime.features.prompt_logprobs import collect_prompt_logprobs, collect_vectors, ended_with_prompts
from runtime.policy.admission import Admission
from runtime.policy.isolation import Isolation
from runtime.policy.step_pacing import StepPacing
from runtime.spec.config import EngineConfig, ModelInfo
from runtime.spec.types import CallboardError, FinishReason, Request, StepOutput, TokenLogprobs
from runtime.speculation.choose_k import Speculation


class Scheduler:
    """Plans steps and commits their results. Not thread-safe: its caller is the step loop alone."""

    def __init__(
        self,
        config: EngineConfig,
        info: ModelInfo,
        speculation: Speculation | None = None,
        pacing: StepPacing | None = None,
    ) -> None:
        """Without `pacing` a step takes as many prompt tokens as its budget holds."""
        self.config, self.info, self.speculation, self.pacing = config, info, speculation, pacing
        self.block_size = info.block_size
        self.max_num_seqs = config.max_num_seqs or info.max_num_seqs
        self.budget = config.max_num_batched_tokens or info.max_num_batched_tokens
        max_chunk = self.budget if config.chunked_prefill else max(self.budget, info.max_model_len)
        self.kv_cache = KVCacheManager(info, config.prefix_cache, max_chunk)
        self.pool = self.kv_cache.pool
        self.max_len = min(info.max_model_len, self.kv_cache.max_tokens())
        if not config.chunked_prefill:
            self.budget = max(self.budget, self.max_len)
        self.requests: dict[str, RequestState] = {}
        self.running: list[RequestState] = []  # in order of admission
        self.waiting = WaitingQueue()  # the requests that hold no slot
        self.slots = SlotPool(self.max_num_seqs)
        self.adapters = AdapterTable(config.max_loras)
        self.stats = SchedulerStats()
        self.admission = Admission(self.kv_cache)
        self.isolation = Isolation()
        self._num_arrivals = 0
        self._step_id = 0
        self._in_flight: deque[StepInFlight] = deque()
        self._batch_closed = False  # static batching: a row has sampled

    # ---- requests -------------------------------------------------------------------------------------------------

    @property
    def num_waiting(self) -> int:
        """Requests that hold no slot."""
        return len(self.waiting)

    @property
    def num_in_flight(self) -> int:
        """Plans whose results have not been committed."""
        return len(self._in_flight)

    def add(self, request: Request, owner: Any = None, block_hashes: Sequence[bytes] = ()) -> RequestState:
        """Queue a request; `block_hashes` are those of its leading full blocks, as far as they are known already.
        Raises CallboardError if it can never be served."""
        if request.request_id in self.requests:
            raise CallboardError(f"Request id {request.request_id!r} is in use; choose another.")
        params, tokens = request.params, checked_tokens(request, self.info)
        stop_ids = frozenset(params.stop_token_ids).union(() if params.ignore_eos else self.info.eos_token_ids)
        self._num_arrivals += 1
        max_len = min(request.prompt_len + params.max_tokens, self.max_len)
        job_len = max_len if self.config.policy == "sjf" else 0
        key, adapter = (request.priority, job_len, self._num_arrivals), self.adapters.index_of(request.adapter)
        state = RequestState(request, tokens, max_len, stop_ids, key, adapter)
        state.check_length(self.max_len)
        state.owner = owner
        state.block_hashes += block_hashes
        if self.kv_cache.cache.changes is not None:  # who follows it wants to know how much there is to compute
            state.num_hits = len(self.kv_cache.match_prefix(state)) * self.block_size
        self.requests[request.request_id] = state
        self.waiting.push(state)
        return state

    def abort(self, request_id: str, stopped: bool = False) -> None:
        """End a request, wherever it is; an unknown id is no error (C9). `stopped`: its output had come to its end, as
        that of one whose stop strings only its owner sees probably had."""
        state = self.requests.get(request_id)
        if state is not None:
            self._end(state, FinishReason.STOP if stopped or state.params.stop else FinishReason.ABORT)

    def uses_adapter(self, index: int) -> bool:
        """True as long as a request has the adapter, or a step in flight has a row of one that had it."""
        states = chain(self.requests.values(), *(step.rows for step in self._in_flight))
        return any(state.adapter == index for state in states)

    def rewrite(self, state: RequestState, length: int, token_ids: Sequence[int]) -> None:
        """`token_ids` follow the first `length` tokens of a request, whatever it has or has in flight there; none of
        that is hashed. Its next row brings them."""
        if state.slot is None:
            self.waiting.num_tokens += length + len(token_ids) - len(state.tokens)
        state.rewrite(length, token_ids, self.block_size)

    def requeue_all(self) -> RequestState | None:
        """The runners are gone with all they held: every live request is recomputed from its known tokens (C8), but the
        one that is returned, which is at fault and has ended (C9)."""
        in_flight = {state for step in self._in_flight for state in step.rows if not state.has_ended}
        self._in_flight.clear()
        self.slots.reset()
        self.kv_cache.reset()
        for state in self.running:
            state.detach()
            self.waiting.push(state)
        self.running.clear()
        culprit = self.isolation.lost(in_flight)
        if culprit is not None:
            self._end(culprit, FinishReason.ERROR)
        return culprit

    def _leave_slot(self, state: RequestState, spoilt: bool = False) -> None:
        assert state.slot is not None
        self.kv_cache.close(state, spoilt)
        self.running.remove(state)
        self.slots.release(state.slot)
        state.detach()

    def _preempt(self, state: RequestState) -> None:
        self._leave_slot(state)
        self.waiting.push(state)

    def _end(self, state: RequestState, reason: FinishReason) -> None:
        del self.requests[state.request.request_id]
        self.admission.note_end(state, reason is FinishReason.STOP)
        self.isolation.forget(state)
        if state.slot is not None:
            self._leave_slot(state, spoilt=reason is FinishReason.ERROR)
        else:
            self.waiting.remove(state)
            # Whoever still has its record holds no prompt.
            state.tokens, state.request = array("i"), replace(state.request, token_ids=[], prediction=())
        state.has_ended = True
        if self.speculation is not None:
            self.speculation.drafter.forget(state)

    # ---- planning -------------------------------------------------------------------------------------------------

    def schedule(self, max_steps: int = 1) -> ScheduledStep | None:
        """The next step, or None if there is nothing to compute before a result, or draft tokens, come in.

        While draft tokens are being verified nothing is planned, so that all rows stay in one step. A plan of rows of
        one token may be run up to `max_steps` times."""
        alone = self.isolation.on_trial()
        if alone is not None:
            for state in [s for s in self.running if s is not alone]:
                self._preempt(state)
        if self.speculation is not None and self.speculation.request_drafts(self.running):
            return None
        builder = PlanBuilder(self.kv_cache, self.budget)
        self._schedule_running(builder)
        admitted = self._admit_waiting(builder, alone)
        if not builder.rows:
            return None
        self._batch_closed |= builder.reaches_end
        num_steps = self._extend_to_multi_step(builder.rows, max_steps) if max_steps > 1 and builder.may_repeat else 1
        self._step_id += 1
        planned_at = 0.0 if self.pacing is None else self.pacing.now()
        plan, step = builder.finish(
            self._step_id, self.slots.take_released(), self.kv_cache.take_writes(), num_steps, planned_at
        )
        self._in_flight.append(step)
        return ScheduledStep(plan, admitted)

    def _schedule_running(self, builder: PlanBuilder) -> None:
        """Rows for the requests that have slots, in order of admission."""
        drafting = self.speculation if self.speculation is not None and self.speculation.round_count else None
        for state in list(self.running):
            if builder.budget <= 0:
                break
            missing = state.num_total - state.num_computed
            if state.num_total >= state.plan_limit or state.slot is None or state.drafts_in_flight:
                continue  # its last token is on the way, or it was preempted a moment ago, or waits for verification
            if missing > 1:
                self._limit_prompts(builder)
            count = min(missing, builder.budget if missing == 1 else builder.prompt_budget)
            if count < missing and (count <= 0 or not self.config.chunked_prefill):
                continue
            speculation = drafting if missing == 1 else None
            if speculation is not None and state.num_total > len(state.tokens):  # drafts continue known tokens
                if speculation.defer(state):
                    continue
                speculation = None
            end = state.num_computed + count
            if end > state.capacity and not self._grow(state, end, builder.rows):
                continue
            builder.add_row(
                state, count, () if speculation is None else self._draft(speculation, state, builder.budget)
            )

    def _admit_waiting(self, builder: PlanBuilder, alone: RequestState | None) -> list[RequestState]:
        """Give slots, and rows, to waiting requests in the order of service, as far as the budget and memory go."""
        admitted: list[RequestState] = []
        is_static = self.config.batching == "static"
        if not self.running:
            self._batch_closed = False
        if is_static and (self._batch_closed or builder.reaches_end):
            return admitted
        if len(self.waiting):
            self._limit_prompts(builder)
        held = self.isolation.held()
        while builder.prompt_budget > 0 or is_static:
            state = self._next_admitted(builder, alone, held)
            if state is None:
                break
            admitted.append(state)
            builder.add_new(state, self._open_slot(state))
            count = min(builder.prompt_budget, state.num_total - state.num_computed)
            if count > 0:  # a static batch may open more slots than this step's budget computes
                self.kv_cache.extend(state, state.num_computed + count)
                builder.add_row(state, count)
        return admitted

    def _limit_prompts(self, builder: PlanBuilder) -> None:
        """Leave the rows that decode their pace. It is decided before the plan has a row of a prompt: one that ends in
        this step would look as if it decoded."""
        if self.pacing is None or builder.num_prompts or not self.config.chunked_prefill:
            return
        num_decoding = sum(state.num_total - state.num_computed == 1 for state in self.running)
        num_known = sum(state.num_total - state.num_computed for state in self.running) - num_decoding
        builder.max_prompt_tokens = self.pacing.max_prompt_tokens(num_decoding, self.waiting.num_tokens + num_known)

    def planning_delay_s(self) -> float:
        """Seconds for which the next step need not be planned yet: one is in flight, which takes longer, and a request
        that arrives meanwhile would have to wait for the next one as well. 0 or less: plan it now."""
        if self.pacing is None or self.speculation is not None or len(self._in_flight) != 1 or not len(self.slots):
            return 0.0
        step = self._in_flight[0]
        return self.pacing.planning_delay_s(step.num_decoding, step.num_prompt_tokens, step.planned_at)

    def _extend_to_multi_step(self, rows: list[RequestState], max_steps: int) -> int:
        """The number of steps that these rows may run in the same plan; they get blocks for all of them."""
        missing = self.kv_cache.num_missing
        more = min(max_steps - 1, *(state.plan_limit - state.num_total for state in rows))
        while more > 0 and self.pool.num_available < sum(missing(s, s.num_computed + more) for s in rows):
            more -= 1
        for state in rows if more > 0 else ():
            self.kv_cache.extend(state, state.num_computed + more)
            state.num_computed += more
            state.num_total += more
        return 1 + max(0, more)

    def _draft(self, speculation: Speculation, state: RequestState, budget: int) -> list[int]:
        """Draft tokens after a request's known ones, with blocks for them: no more than fit without taking others'."""
        free = state.capacity - state.num_total + self.kv_cache.num_free_tokens
        most = min(budget - 1, state.max_len - state.num_total - 1, free)
        drafts = speculation.guess(state, most) if most > 0 else []
        if drafts:
            self.stats.drafts += 1
            self.stats.draft_tokens += len(drafts)
            state.num_draft_tokens += len(drafts)
            state.num_right = 0
            self.kv_cache.free_below_windows(state)
            self.kv_cache.extend(state, state.num_total + len(drafts))
        return drafts

    def _next_admitted(
        self, builder: PlanBuilder, alone: RequestState | None, held: Set[RequestState]
    ) -> RequestState | None:
        """The waiting request to admit now, none of `held`, taken off the queue, its cached blocks acquired; or None.

        The whole prompt must fit, and with it what the running requests and this one are expected to grow to."""
        if alone is not None and (self.running or self._in_flight):
            return None  # if the runners are lost again, no other's rows shall be in flight
        state = self.waiting.first(held) if alone is None else alone
        if state is None or not len(self.slots) or not builder.has_room_for(state):
            return None
        hits = self.kv_cache.match_prefix(state)
        start = len(hits) * self.block_size
        if not self.config.chunked_prefill and len(state.tokens) - start > builder.prompt_budget:
            return None
        if not self.admission.allows(state, hits, self.running):
            return None
        self.waiting.remove(state)
        self.kv_cache.take_prefix(state, hits)
        return state

    def _open_slot(self, state: RequestState) -> NewSlot:
        """Give an admitted request a slot, with its cached prefix in the slot's table."""
        state.slot = slot = self.slots.acquire()
        self.running.append(state)
        self.kv_cache.open(state)
        if state.num_cached is None:
            state.num_cached = min(state.num_computed, state.prompt_len)
            self.stats.prompt_tokens_cached += state.num_cached
            self.stats.prompt_tokens += state.prompt_len
        tokens = np.frombuffer(state.tokens.tobytes(), np.int32)
        return NewSlot(slot, tokens, state.prompt_len, state.request.seed, state.params, state.adapter)

    def _grow(self, state: RequestState, num_tokens: int, rows: list[RequestState]) -> bool:
        """Blocks for a running request's first `num_tokens` tokens, if need be by preempting requests without a row in
        this step, last in the order of service first. False: it goes without a row this time."""
        self.kv_cache.free_below_windows(state)
        while self.kv_cache.num_missing(state, num_tokens) > self.pool.num_available:
            victim = max((s for s in self.running if s not in rows), key=lambda s: s.sort_key)
            if victim is state:
                return False  # all others go before it: it keeps what it has until they end or take it
            self.stats.preemptions += 1
            self._preempt(victim)
        self.kv_cache.extend(state, num_tokens)
        return True

    # ---- results --------------------------------------------------------------------------------------------------

    def commit(self, result: StepResult) -> StepOutput:
        """Take in the tokens of the oldest step in flight; returns what each request gained and which ended."""
        step = self._in_flight.popleft()
        if step.step_id != result.step_id or step.num_sampled != len(result.token_ids):
            raise CallboardError(
                f"The runners answered step {result.step_id} with {len(result.token_ids)} tokens where step "
                f"{step.step_id} with {step.num_sampled} was due; they must be restarted."
            )
        if self.speculation is not None:
            self.speculation.observe_step(step.shape)
        if self.pacing is not None:
            self.pacing.observe_step(step.num_decoding, step.num_prompt_tokens, step.planned_at)
        self.stats.structured_lazy += result.begun[0]
        self.stats.structured_eager += result.begun[1]
        if step.num_steps > 1:
            return self._commit_steps(step, result)
        states: list[RequestState] = []
        token_ids: list[int] = []
        logprobs: dict[int, TokenLogprobs] = {}
        logprobs_at = {row: at for at, row in enumerate(result.logprob_rows.tolist())}
        prompt_logprobs, pooled = collect_prompt_logprobs(result, step.scored), collect_vectors(result, step.samples)
        finished, deferred = ended_with_prompts(prompt_logprobs, pooled), result.deferred.tolist()
        for ended in finished:
            self._end(*ended)
        for row, ((state, epoch, draft), token) in enumerate(zip(step.samples, result.token_ids.tolist(), strict=True)):
            if state.epoch != epoch:
                continue  # ended or preempted meanwhile (C3)
            if token < 0:
                if row in deferred:
                    state.sample_again()
                    continue
                state.failure = result.failures.get(row, "")
                finished.append((state, FinishReason.GRAMMAR if state.failure else FinishReason.ERROR))
                self._end(*finished[-1])
                continue
            if row in logprobs_at:
                num_wanted = state.params.logprobs or 0, len(state.params.logprob_token_ids)
                logprobs[len(states)] = result.sampled_logprobs(logprobs_at[row], *num_wanted)
            tokens = state.tokens
            tokens.append(token)
            states.append(state)
            token_ids.append(token)
            if state.drafts_in_flight:
                self._verify(state, token, draft)
            if token in state.stop_ids:
                finished.append((state, FinishReason.STOP))
            elif len(tokens) >= state.max_len:
                finished.append((state, FinishReason.LENGTH))
            else:
                if len(tokens) >= state.next_block_end:
                    self.kv_cache.cache_full_blocks(state)
                continue
            self._end(*finished[-1])
        return StepOutput(states, token_ids, finished, logprobs, prompt_logprobs, pooled)

    def _commit_steps(self, step: StepInFlight, result: StepResult) -> StepOutput:
        """`commit` of a plan that was run several times: a row's tokens up to its end are taken in at once."""
        output, count, deferred = StepOutput([], [], [], {}, []), step.num_steps, result.deferred.tolist()
        for row, (state, epoch, _) in enumerate(step.samples):
            if state.epoch != epoch:
                continue  # ended or preempted meanwhile (C3)
            token_ids = result.token_ids[row * count : (row + 1) * count].tolist()
            if -1 in token_ids:
                del token_ids[token_ids.index(-1) :]
            ends = [token_ids.index(token) + 1 for token in state.stop_ids.intersection(token_ids)]
            del token_ids[min(ends, default=count) :]
            state.tokens.extend(token_ids)
            output.states.extend([state] * len(token_ids))
            output.token_ids.extend(token_ids)
            if ends:
                reason = FinishReason.STOP
            elif len(state.tokens) >= state.max_len:
                reason = FinishReason.LENGTH
            elif row * count + len(token_ids) in deferred:
                state.sample_again()
                continue
            elif len(token_ids) < count:
                state.failure = result.failures.get(row * count + len(token_ids), "")
                reason = FinishReason.GRAMMAR if state.failure else FinishReason.ERROR
            else:
                if len(state.tokens) >= state.next_block_end:
                    self.kv_cache.cache_full_blocks(state)
                continue
            output.finished.append((state, reason))
            self._end(state, reason)
        return output

    def _verify(self, state: RequestState, token: int, draft: int | None) -> None:
        """A row of draft tokens goes on for as long as they are right; what it computed up to there stays."""
        assert self.speculation is not None
        state.num_total = len(state.tokens)
        state.num_computed = state.num_total - 1
        if token == draft:
            self.stats.accepted_by_position[state.num_right] += 1
            state.num_right += 1
            state.num_accepted += 1
            self.speculation.record(state, True)
            return
        state.drafts_in_flight = 0
        if draft is not None:
            state.epoch += 1  # what the row sampled further on is stale
            self.speculation.record(state, False)

    def find_faults(self) -> list[str]:
        """One sentence for each block or slot that is not where its bookkeeping says; empty if all is well. It looks
        at every block, and changes nothing."""
        faults = self.slots.find_faults([state.slot for state in self.running])
        return faults + self.kv_cache.find_faults(self.running) + self.waiting.find_faults(self.requests, self.running)
