"""PlanBuilder: the rows of one plan while the scheduler chooses them, and what must be known when its result comes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from runtime.core.kv_cache_manager import KVCacheManager
from runtime.core.plan import EMPTY, MAX_NEW_BYTES, Int32s, NewSlot, StepPlan, num_targets
from runtime.core.request_state import RequestState
from runtime.features.prompt_logprobs import ScoredRow
from runtime.spec.types import TOKEN_BYTES

# A sample in flight: its request, the request's epoch when it was planned, and the draft token that it must equal for
# the samples after it in the row to count; None: nothing was drafted there.
Sample = tuple[RequestState, int, int | None]


class StepShape(NamedTuple):
    """The size of a step that only decodes."""

    num_rows: int
    num_tokens: int
    num_draft_tokens: int  # of the row with the most


class ScheduledStep(NamedTuple):
    """A step to be computed, and the requests that got a slot with it."""

    plan: StepPlan
    admitted: list[RequestState]


class StepInFlight(NamedTuple):
    """A planned step whose result has not been committed."""

    step_id: int
    rows: list[RequestState]
    samples: list[Sample]  # in the order of the result, each with the tokens of all steps
    num_steps: int
    scored: list[ScoredRow]  # rows whose prompts are scored
    shape: StepShape | None  # None: it computes prompts, too
    num_decoding: int  # rows that compute no prompt
    num_prompt_tokens: int
    planned_at: float  # by the clock of the scheduler's pacing

    @property
    def num_sampled(self) -> int:
        """Tokens of the result."""
        return len(self.samples) * self.num_steps


class PlanBuilder:
    """Collects rows within a token budget. Adding a row advances its request."""

    __slots__ = (
        "_counts", "_draft_lens", "_draft_token_ids", "_grammars", "_kv_cache", "_new_bytes", "_num_samples",
        "_samples", "_scored", "_slots", "_starts", "budget", "max_prompt_tokens", "new", "num_prompt_tokens",
        "num_prompts", "reaches_end", "rows",
    )  # fmt: skip

    def __init__(self, kv_cache: KVCacheManager, budget: int) -> None:
        self._kv_cache = kv_cache
        self.budget = budget  # tokens that are left
        self.max_prompt_tokens: int | None = None  # beside rows that decode; None: no limit but the budget
        self.num_prompts = self.num_prompt_tokens = 0  # in the plan
        self.rows: list[RequestState] = []
        self.new: list[NewSlot] = []
        self._new_bytes = 0  # of these
        self._grammars: set[str] = set()  # keys of the grammars that they name
        self.reaches_end = False  # some row computes its request's last token
        self._slots: list[int | None] = []
        self._starts: list[int] = []
        self._counts: list[int] = []
        self._num_samples: list[int] = []
        self._samples: list[Sample] = []
        self._draft_lens: list[int] = []  # of the rows up to the last one that has draft tokens
        self._draft_token_ids: list[int] = []
        self._scored: list[ScoredRow] = []

    @property
    def prompt_budget(self) -> int:
        """Tokens that are left for prompts."""
        if self.max_prompt_tokens is None:
            return self.budget
        return min(self.budget, self.max_prompt_tokens - self.num_prompt_tokens)

    def has_room_for(self, state: RequestState) -> bool:
        """True if the plan may open a slot for this request, too. The first one always fits."""
        return not self.new or self._new_bytes + self._bytes_of(state) <= MAX_NEW_BYTES

    def add_new(self, state: RequestState, new: NewSlot) -> None:
        """The plan opens a slot for a request."""
        self._new_bytes += self._bytes_of(state)
        if state.params.grammar is not None:
            self._grammars.add(state.params.grammar.key)
        self.new.append(new)

    def _bytes_of(self, state: RequestState) -> int:
        """Bytes that a new slot adds to the plan, about; runners may have its grammar, which only the wire knows."""
        size = TOKEN_BYTES * len(state.tokens) + state.list_bytes
        grammar = state.params.grammar
        return size if grammar is None or grammar.key in self._grammars else size + grammar.num_bytes

    def add_row(self, state: RequestState, count: int, drafts: Sequence[int] = ()) -> None:
        """Plan the next `count` tokens of a request, and after its last one `drafts` to be verified."""
        start = state.num_computed
        state.num_computed = end = start + count
        self.rows.append(state)
        self._slots.append(state.slot)
        self._starts.append(start)
        self._counts.append(count + len(drafts))
        self.budget -= count + len(drafts)
        if count > 1:
            self.num_prompts += 1
            self.num_prompt_tokens += count
        is_last = end == state.num_total
        if state.prompt_logprobs is not None:
            self._scored.append(ScoredRow(state, state.epoch, num_targets(start, count, state.prompt_len), is_last))
        num_samples = 0
        if is_last:
            state.num_total += 1
            self.reaches_end = True
            num_samples = 0 if state.only_scores else 1 + len(drafts)
        if drafts:
            state.drafts_in_flight = len(drafts)
            self._add_draft_tokens(drafts)
            self._samples.extend((state, state.epoch, draft) for draft in drafts)
        elif state.first_unsent is not None and end > state.first_unsent:
            self._add_draft_tokens(state.tokens[max(start, state.first_unsent) : end])
            state.first_unsent = None if is_last else end
        if num_samples:
            self._samples.append((state, state.epoch, None))
        self._num_samples.append(num_samples)
        if end >= state.next_block_end:
            self._kv_cache.cache_full_blocks(state)

    def _add_draft_tokens(self, token_ids: Sequence[int]) -> None:
        """The last row's last tokens come with the plan: no step has sampled them."""
        self._draft_lens += [0] * (len(self.rows) - 1 - len(self._draft_lens))
        self._draft_lens.append(len(token_ids))
        self._draft_token_ids.extend(token_ids)

    @property
    def only_decodes(self) -> bool:
        """Every token of the plan is followed by a sample, and no request is new."""
        return len(self._samples) == sum(self._counts) and not self.new

    @property
    def may_repeat(self) -> bool:
        """The plan's rows are of one token each, which is followed by a sample."""
        return len(self._samples) == sum(self._counts) == len(self.rows)

    def finish(
        self, step_id: int, freed: list[int], writes: Int32s, num_steps: int = 1, planned_at: float = 0.0
    ) -> tuple[StepPlan, StepInFlight]:
        """The plan, run `num_steps` times, and what is to be kept until its result is committed."""
        shape = None
        if self.only_decodes:
            shape = StepShape(len(self.rows), len(self._samples), max(self._draft_lens, default=0))
        plan = StepPlan(
            step_id,
            np.array(freed, np.int32) if freed else EMPTY,
            self.new,
            writes,
            np.array(self._slots, np.int32),
            np.array(self._starts, np.int32),
            np.array(self._counts, np.int32),
            np.array(self._num_samples, np.int32),
            num_steps=num_steps,
        )
        if self._draft_lens:
            padding = [0] * (len(self.rows) - len(self._draft_lens))
            plan.draft_lens = np.array(self._draft_lens + padding, np.int32)
            plan.draft_token_ids = np.array(self._draft_token_ids, np.int32)
        sizes = len(self.rows) - self.num_prompts, self.num_prompt_tokens
        return plan, StepInFlight(step_id, self.rows, self._samples, num_steps, self._scored, shape, *sizes, planned_at)
