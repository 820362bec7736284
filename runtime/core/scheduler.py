"""The scheduler: decides which requests the next step computes, and how many of their tokens.

Prefill and decode are not separate phases. A request has `num_total` tokens; `num_computed` of them have been planned.
A step plans the rest, or as much as the token budget allows: a prefill chunk, or one token (decode). A row that reaches
the request's last token samples the next one. That sample counts at once, although its id is not known yet:

    tokens       [ prompt ............ | output ....... ]         ids known: len(tokens)
    num_total                                            + p      p sampled in steps still in flight
    num_computed  ..................................^             K/V planned; the next row starts here

So step k+1 is planned before step k's tokens are known (queue depth 2), and depth 1 is the same code. An end of
sequence is seen one step late and costs one row; its token is dropped. A request's `epoch` changes when it leaves
its slot, and a result from an older epoch is stale (C3). Blocks and slots are reused at once, because runners execute
plans in order (C2).

This file is hot. It decides with counters and block tables, and does no I/O (C1). What an engine can do without is an
extra (extra.py).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from itertools import chain
from typing import Any

import numpy as np

from runtime.base.model_info import ModelInfo
from runtime.base.reports import Verified
from runtime.base.types import CallboardError, FinishReason, Request, StepOutput
from runtime.core.extra import Culprit, Extra, Extras
from runtime.core.kv_cache_manager import KVCacheManager
from runtime.core.plan import NewSlot, StepResult
from runtime.core.queues import SlotPool, WaitingQueue, shortest_prompt
from runtime.core.request_state import RequestState, RequestStatus, checked_tokens
from runtime.core.settings import Settings
from runtime.core.states.state_cache_manager import StateCacheManager
from runtime.core.stats import EngineStats
from runtime.core.step import Step


class Scheduler:
    """Plans steps and commits their results. Not thread-safe: only the step loop calls it."""

    def __init__(self, config: Settings, info: ModelInfo, extras: Sequence[Extra] = ()) -> None:
        self.info, self.extras, self._chunked = info, Extras(extras), config.chunked_prefill
        self.block_size = info.block_size
        has_states = info.kv_cache is not None and info.kv_cache.states is not None
        most = config.max_num_seqs or info.max_num_seqs
        self.max_num_seqs = min(most, info.max_num_seqs) if has_states else most  # states' memory may allow fewer
        self.budget = config.max_num_batched_tokens or info.max_num_batched_tokens
        max_chunk = self.budget if self._chunked else max(self.budget, info.max_model_len)
        sizes, order = (info, config.prefix_cache, max_chunk), self.extras.eviction_order()
        self.kv_cache = (
            StateCacheManager(*sizes, self.max_num_seqs, order) if has_states else KVCacheManager(*sizes, order)
        )
        self.pool = self.kv_cache.pool
        self.max_len = min(info.max_model_len, self.kv_cache.max_tokens())
        if not self._chunked:
            self.budget = max(self.budget, self.max_len)
        self.requests: dict[str, RequestState] = {}
        self.running: list[RequestState] = []  # ordered by admission
        self.waiting = WaitingQueue()  # the requests without a slot
        self.slots = SlotPool(self.max_num_seqs)
        self.stats = EngineStats()
        self._num_arrivals = 0
        self._step_id = 0  # the last planned step's id
        self._in_flight: deque[Step] = deque()
        for attach in self.extras.attach:
            attach(self.kv_cache, self.stats)

    @property
    def num_in_flight(self) -> int:
        """Plans without a committed result."""
        return len(self._in_flight)

    def all_states(self) -> Iterator[RequestState]:
        """Iterate over the live requests, and over the rows in flight of ended ones."""
        return chain(self.requests.values(), *(step.rows for step in self._in_flight))

    # ---- requests -------------------------------------------------------------------------------------------------

    def add(self, request: Request, owner: Any = None, block_hashes: Sequence[bytes] = ()) -> RequestState:
        """Queue a request, with the hashes of its leading full blocks if they are known.

        Raises CallboardError if it can never be served."""
        if request.request_id in self.requests:
            raise CallboardError(f"Request id {request.request_id!r} is in use; choose another.")
        self.extras.check_served(request)
        params, tokens = request.params, checked_tokens(request, self.info)
        max_len = max(request.prompt_len + params.max_tokens, len(tokens))  # an output that is only scored is longer
        max_len = min(max_len, self.max_len)
        stop_ids = frozenset(params.stop_token_ids).union(() if params.ignore_eos else self.info.eos_token_ids)
        self._num_arrivals += 1
        state = RequestState(request, tokens, max_len, stop_ids, (request.priority, 0, self._num_arrivals))
        state.owner = owner
        state.block_hashes += block_hashes
        for on_add in self.extras.on_add:
            on_add(state)
        state.check_length(self.max_len)
        self.requests[request.request_id] = state
        self._queue(state)
        return state

    def abort(self, request_id: str, stopped: bool = False) -> None:
        """End a request; an unknown id is not an error (C9).

        `stopped` is True if its output was complete. A request with stop strings counts as complete, because only its
        owner sees them."""
        if (state := self.requests.get(request_id)) is not None:
            self._end(state, FinishReason.STOP if stopped or state.params.stop else FinishReason.ABORT)

    def rewrite(self, state: RequestState, length: int, token_ids: Sequence[int]) -> None:
        """Replace all after the first `length` tokens of a request with `token_ids`, which its next row brings.

        No hashed token may change."""
        if state.slot is None:
            self.waiting.num_tokens += length + len(token_ids) - len(state.tokens)
        state.rewrite(length, token_ids, self.block_size)

    def requeue_all(self) -> Culprit | None:
        """Queue every live request again after the loss of the runners, to be computed from its known tokens (C8).

        Returns the request that is at fault, which has ended (C9)."""
        in_flight = {state for step in self._in_flight for state in step.rows}
        in_flight = {state for state in in_flight if state.status is not RequestStatus.ENDED}
        self._in_flight.clear()
        self.slots.reset()
        self.kv_cache.reset()
        for state in self.running:
            state.detach()
            self._queue(state)
        self.running.clear()
        found = [on_lost(in_flight) for on_lost in self.extras.on_lost]
        if (culprit := next((each for each in found if each is not None), None)) is not None:
            self._end(culprit.state, FinishReason.ERROR)
        return culprit

    def use_weights(self, info: ModelInfo, keeps_kv: bool) -> None:
        """The next step runs with other weights, which `info` describes. No step is in flight.

        The prefix cache is emptied (C5). Running requests are computed again. With `keeps_kv`, requests that decode
        keep the keys and values of the old weights instead."""
        assert not self._in_flight, "a step would have two versions"
        for state in list(self.running):
            decodes = state.prompt_len < len(state.tokens) == state.num_computed + 1
            if not (keeps_kv and decodes):
                self._preempt(state)
        self.info = info
        self.kv_cache.use_weights(info.fingerprint, self.running)
        for state in self.requests.values():
            state.block_hashes.clear()
        for on_weights in self.extras.on_weights:
            on_weights()

    def _queue(self, state: RequestState) -> None:
        self.waiting.push(state)
        for on_queue in self.extras.on_queue:
            on_queue(state)

    def _dequeue(self, state: RequestState) -> None:
        self.waiting.remove(state)
        for on_dequeue in self.extras.on_dequeue:
            on_dequeue(state)

    def _leave_slot(self, state: RequestState, spoilt: bool = False) -> None:
        assert state.slot is not None
        self.kv_cache.close(state, spoilt)
        self.running.remove(state)
        self.slots.release(state.slot)
        state.detach()

    def _preempt(self, state: RequestState) -> None:
        self._leave_slot(state)
        self._queue(state)

    def _end(self, state: RequestState, reason: FinishReason) -> None:
        del self.requests[state.request.request_id]
        has_waited = state.slot is None
        if has_waited:
            self._dequeue(state)
        else:
            self._leave_slot(state, spoilt=reason is FinishReason.ERROR)
        state.status = RequestStatus.ENDED
        for on_end in self.extras.on_end:
            on_end(state, reason)
        state.shrink(has_waited)

    # ---- planning -------------------------------------------------------------------------------------------------

    def schedule(self, max_steps: int = 1) -> Step | None:
        """Plan the next step; return None if there is nothing to compute before a result or draft tokens arrive.

        A plan with rows of one decoded token each may be run up to `max_steps` times."""
        if (alone := self.extras.run_alone()) is not None:
            for state in [s for s in self.running if s is not alone]:
                self._preempt(state)
        if self.extras.begin_step(self.running):
            return None
        step = Step(self._step_id + 1, self.kv_cache, self.budget)
        self._schedule_running(step, alone)
        self._admit_waiting(step, alone)
        if not step.rows and not self.extras.needs_plan():
            return None
        if max_steps > 1 and step.may_repeat:
            self._repeat(step, max_steps)
        step.finish(self.slots.take_released(), self.kv_cache.take_writes())
        self._step_id = step.step_id
        for on_plan in self.extras.on_plan:
            on_plan(step)
        self._in_flight.append(step)
        return step

    def _schedule_running(self, step: Step, alone: RequestState | None) -> None:
        """Plan rows for the requests in slots, in order of admission."""
        running = RequestStatus.RUNNING
        drafter = self.extras.drafter
        if drafter is not None and not drafter.is_drafting:
            drafter = None
        step.next_drafts = 0 if drafter is None else drafter.next_drafts
        for state in list(self.running):
            if step.budget <= 0:
                break
            if state.status is not running or state.num_total >= state.plan_limit:
                continue  # it was preempted for an earlier row, or its last token is in flight
            # prefill
            if state.num_total - state.num_computed > 1 or state is step.overtaking:
                if not step.num_prompts:
                    self._limit_prompts(step)
                    if alone is None and step.overtaking is None:
                        step.overtaking = self._overtake(state, step)
                if state is not step.overtaking:
                    self._add_prompt_row(state, step)
                continue
            # decode
            drafting = drafter
            if drafting is not None and state.num_total > len(state.tokens):
                if drafting.defers(state):
                    continue  # drafts continue known tokens
                drafting = None
            end = state.num_computed + 1
            if end > state.capacity and not self._grow(state, end, step.rows):
                continue
            step.add_row(state, 1, () if drafting is None else self._draft(drafting, state, step.budget))

    def _add_prompt_row(self, state: RequestState, step: Step) -> None:
        count = self._row_tokens(state, step) if state.slot is not None else 0  # one without a slot loads first
        is_whole = count == state.num_total - state.num_computed or self._chunked
        if count > 0 and is_whole and self._grow(state, state.num_computed + count, step.rows):
            step.add_row(state, count)

    def _overtake(self, first: RequestState, step: Step) -> RequestState | None:
        """Give half of a step that `first` would fill to the shortest prompt behind it, if that is much shorter."""
        most, missing = step.max_prompt_tokens, first.num_total - first.num_computed
        if most is None or missing <= most:
            return None
        others = chain(self.running, self.waiting.oldest())
        short = shortest_prompt(others, first.sort_key[0], missing // 2, {*self.extras.held(), *step.rows})
        if short is not None:
            step.max_prompt_tokens = max(most // 2, self.kv_cache.least_row)
            if short.slot is not None or (self.extras.may_open_slots(step, self.running) and self._admit(short, step)):
                self._add_prompt_row(short, step)
            step.max_prompt_tokens = most
        return short

    def _admit_waiting(self, step: Step, alone: RequestState | None) -> None:
        """Give slots and rows to waiting requests, in the order of service, while budget and memory last."""
        if not len(self.waiting) or (alone is not None and (self.running or self._in_flight)):
            return  # a further loss must be caused by `alone` itself
        self._limit_prompts(step)
        while self.extras.may_open_slots(step, self.running):
            state = self.waiting.first(self.extras.held()) if alone is None else alone
            if state is None or state.status is not RequestStatus.WAITING or not self._admit(state, step):
                break
            self._add_prompt_row(state, step)

    def _admit(self, state: RequestState, step: Step) -> bool:
        """Give a waiting request a slot with its cached prefix, or load more first. Return False if it does not fit."""
        if not len(self.slots) or not step.has_room_for(state):
            return False
        hits = self.kv_cache.match_prefix(state)
        num_missing = len(state.tokens) - len(hits[0]) * self.block_size
        if num_missing > step.prompt_budget and not self._chunked:
            return False
        room, num_blocks = self.kv_cache.room_with(hits), self.kv_cache.most_blocks_for(len(state.tokens))
        if not self.extras.may_admit(state, room, self.running) or num_blocks > room:
            return False
        if (status := self.extras.next_status(state, hits, len(self.slots))) is not RequestStatus.RUNNING:
            state.status = status
            return status is RequestStatus.LOADING
        self._dequeue(state)
        state.slot, state.status = self.slots.acquire(), RequestStatus.RUNNING
        self.running.append(state)
        self.kv_cache.open(state, hits)
        if state.num_cached is None:
            state.num_cached = min(state.num_computed, state.prompt_len)
            self.stats.prompt_tokens_cached += state.num_cached
            self.stats.prompt_tokens += state.prompt_len
        tokens = np.frombuffer(state.tokens.tobytes(), np.int32)
        rows = self.kv_cache.state_rows(state)
        new = NewSlot(state.slot, tokens, state.prompt_len, state.request.seed, state.params, state.adapter, *rows)
        step.add_new(state, new)
        return True

    def _row_tokens(self, state: RequestState, step: Step) -> int:
        """Return the tokens of a prompt's next row."""
        count = min(step.prompt_budget, state.num_total - state.num_computed)
        count = self.extras.row_tokens(state, count, step, self.running)
        return self.kv_cache.row_tokens(state, count) if self._chunked else count

    def _limit_prompts(self, step: Step) -> None:
        """Bound the step's prompt tokens, so that rows that decode keep their pace.

        Called before the plan has a row of a prompt: one that ends in this step would look as if it decoded."""
        if not step.num_prompts and self._chunked:
            most = self.extras.max_prompt_tokens(self.running, self.waiting)
            step.max_prompt_tokens = None if most is None else max(most, self.kv_cache.least_row)

    def _grow(self, state: RequestState, num_tokens: int, rows: list[RequestState]) -> bool:
        """Give a running request blocks for its first `num_tokens` tokens. Return False if it must go without a row.

        Preempts requests without a row in this step, the last in the order of service first."""
        if num_tokens <= state.capacity:
            return True
        self.kv_cache.free_below_windows(state)
        while self.kv_cache.num_missing(state, num_tokens) > self.pool.num_available:
            victim = max((s for s in self.running if s not in rows), key=lambda s: s.sort_key)
            if victim is state:
                return False  # it keeps its blocks until the others end or take them
            self.stats.preemptions += 1
            self._preempt(victim)
        self.kv_cache.extend(state, num_tokens)
        return True

    def _draft(self, drafter: Extra, state: RequestState, budget: int) -> list[int]:
        """Return draft tokens for a request, with blocks that are free for them."""
        free = state.capacity - state.num_total + self.kv_cache.num_free_tokens
        most = min(budget - 1, state.max_len - state.num_total - 1, free)
        drafts = drafter.drafts(state, most) if most > 0 else []
        if drafts:
            self.stats.drafts += 1
            self.stats.draft_tokens += len(drafts)
            state.status = RequestStatus.VERIFYING
            self.kv_cache.free_below_windows(state)
            self.kv_cache.extend(state, state.num_total + len(drafts))
        return drafts

    def _repeat(self, step: Step, max_steps: int) -> None:
        """Run the plan as often as the rows' limits and the free blocks allow."""
        missing = self.kv_cache.num_missing
        more = min(max_steps - 1, *(state.plan_limit - state.num_total for state in step.rows))
        while more > 0 and self.pool.num_available < sum(missing(s, s.num_computed + more) for s in step.rows):
            more -= 1
        for state in step.rows if more > 0 else ():
            self.kv_cache.extend(state, state.num_computed + more)
            state.num_computed += more
            state.num_total += more
        step.num_steps = 1 + max(0, more)

    def planning_delay_s(self) -> float:
        """Return the seconds for which the next step need not be planned; 0 or less to plan it now.

        A request that arrives meanwhile is then in that step. Transfers take long to plan, so they do not wait."""
        if len(self._in_flight) != 1 or not len(self.slots) or self.extras.needs_plan():
            return 0.0
        return self.extras.planning_delay_s(self._in_flight[0])

    # ---- results --------------------------------------------------------------------------------------------------

    def commit(self, result: StepResult) -> StepOutput:
        """Append the tokens of the oldest step in flight; return what each request gained and which requests ended."""
        step = self._in_flight.popleft()
        if step.step_id != result.step_id or step.num_sampled != len(result.token_ids):
            raise CallboardError(
                f"The runners answered step {result.step_id} with {len(result.token_ids)} tokens where step "
                f"{step.step_id} with {step.num_sampled} was due; they must be restarted."
            )
        self.stats.steps += 1
        output = StepOutput([], [], [], {}, [])
        for state, reason in self.extras.take(step, result, output):
            self._finish(state, reason, output)
        states, token_ids, sampled, end = output.states, output.token_ids, result.token_ids.tolist(), 0
        logprobs_at = {at: row for row, at in enumerate(result.logprob_rows.tolist())}
        for state, epoch, drafts in step.sampled_rows:
            begin, end = end, end + step.num_steps + len(drafts)
            if state.epoch != epoch:
                continue  # it ended or was preempted meanwhile (C3)
            tokens, ended = state.tokens, FinishReason.NONE
            for at in range(begin, end):
                token = sampled[at]
                if token < 0:
                    ended = self._without_sample(state, result, at)
                    break
                if at in logprobs_at:
                    output.logprobs[len(states)] = result.sampled_logprobs(logprobs_at[at], state.params)
                tokens.append(token)
                states.append(state)
                token_ids.append(token)
                if token in state.stop_ids:
                    ended = FinishReason.STOP
                    break
                if len(tokens) >= state.max_len:
                    ended = FinishReason.LENGTH
                    break
                if drafts and (at == end - 1 or token != drafts[at - begin]):
                    break  # the sample after the accepted draft tokens
            if drafts:
                self._verify(state, drafts, at - begin + (token >= 0), output)
            if ended:
                self._finish(state, ended, output)
            elif len(tokens) >= state.next_block_end:
                self.kv_cache.cache_full_blocks(state)
        return output

    def _without_sample(self, state: RequestState, result: StepResult, at: int) -> FinishReason:
        """Handle a row without a sample: return why its request ends, or plan the row again."""
        ended = self.extras.without_sample(state, result, at)
        if not ended:
            state.epoch += 1  # what later steps sampled is stale
            state.rewind()
        return ended

    def _verify(self, state: RequestState, drafts: Sequence[int], num_new: int, output: StepOutput) -> None:
        """Count the accepted draft tokens of a row that has gained `num_new` tokens. What they computed stays."""
        gained = state.tokens[len(state.tokens) - num_new :]
        num_accepted = next((i for i, pair in enumerate(zip(gained, drafts, strict=False)) if pair[0] != pair[1]), None)
        rejected = num_accepted is not None
        if num_accepted is None:
            num_accepted = min(num_new, len(drafts))
        for position in range(num_accepted):
            self.stats.accepted_by_position[position] += 1
        output.reports.append((state, Verified(0, len(drafts), num_accepted)))
        state.status = RequestStatus.RUNNING
        state.rewind()
        for on_verified in self.extras.on_verified:
            on_verified(state, num_accepted, rejected)

    def _finish(self, state: RequestState, reason: FinishReason, output: StepOutput) -> None:
        output.finished.append((state, reason))
        for on_finish in self.extras.on_finish:
            on_finish(state, output)
        self._end(state, reason)

    def find_faults(self) -> list[str]:
        """Return one sentence for each block or slot in a wrong place; empty if there is none.

        Looks at every block, and changes nothing."""
        faults = self.slots.find_faults([state.slot for state in self.running])
        return faults + self.kv_cache.find_faults(self.running) + self.waiting.find_faults(self.requests, self.running)
