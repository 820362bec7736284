"""Step: the rows of one step, from planning until its result is committed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from runtime.base.arrays import Int32s
from runtime.base.types import TOKEN_BYTES
from runtime.core.kv_cache_manager import KVCacheManager
from runtime.core.plan import EMPTY, MAX_NEW_BYTES, NewSlot, StepPlan
from runtime.core.request_state import RequestState

# A row with samples in flight: its request, the request's epoch when it was planned, and its draft tokens. Sample i
# counts if it follows i accepted draft tokens.
SampledRow = tuple[RequestState, int, Sequence[int]]


class ReportedRow(NamedTuple):
    """A row of a request that may have reports."""

    state: RequestState
    epoch: int  # the request's, when the row was planned
    start: int
    num_tokens: int  # draft tokens included
    num_drafts: int


class Step:
    """Collects rows within a token budget. Adding a row advances its request."""

    __slots__ = (
        "_counts", "_draft_lens", "_draft_token_ids", "_grammars", "_kv_cache", "_new_bytes", "_num_samples", "_slots",
        "_starts", "admitted", "budget", "max_prompt_tokens", "new", "next_drafts", "num_prompt_tokens", "num_prompts",
        "num_sampled", "num_steps", "num_tokens", "overtaking", "plan", "prompt_positions", "reaches_end",
        "reported_rows", "rows", "sampled_rows", "step_id",
    )  # fmt: skip

    def __init__(self, step_id: int, kv_cache: KVCacheManager, budget: int) -> None:
        self.step_id = step_id
        self._kv_cache = kv_cache
        self.budget = budget  # tokens that are left
        self.max_prompt_tokens: int | None = None  # None if only the budget limits them
        self.num_prompts = self.num_prompt_tokens = 0  # rows with several tokens, and their tokens
        self.prompt_positions = 0  # sum over these tokens: the position of their row's first token
        self.overtaking: RequestState | None = None  # the short prompt that precedes a longer one
        self.rows: list[RequestState] = []
        self.sampled_rows: list[SampledRow] = []
        self.reported_rows: dict[int, ReportedRow] = {}  # by their numbers
        self.reaches_end = False  # True if a row computes its request's last token
        self.num_steps = 1  # times that the plan is run
        self.next_drafts = 0  # draft tokens that the runner's head makes after each row
        self.admitted: list[RequestState] = []  # requests that get a slot with it
        self.new: list[NewSlot] = []
        self._new_bytes = 0  # their bytes
        self._grammars: set[str] = set()  # keys of their grammars
        self._slots: list[int | None] = []
        self._starts: list[int] = []
        self._counts: list[int] = []
        self._num_samples: list[int] = []
        self._draft_lens: list[int] = []  # lengths for rows up to the last one with draft tokens
        self._draft_token_ids: list[int] = []
        # Set by `finish`:
        self.plan: StepPlan
        self.num_tokens: int  # tokens in all rows
        self.num_sampled: int  # tokens in the result

    @property
    def prompt_budget(self) -> int:
        """Tokens that are left for prompts."""
        if self.max_prompt_tokens is None:
            return self.budget
        return min(self.budget, self.max_prompt_tokens - self.num_prompt_tokens)

    @property
    def num_decoding(self) -> int:
        """Rows that compute no prompt."""
        return len(self.rows) - self.num_prompts

    @property
    def prompt_context(self) -> int:
        """The mean number of tokens before the prompts' rows."""
        return self.prompt_positions // max(1, self.num_prompt_tokens)

    @property
    def may_repeat(self) -> bool:
        """True if every row has one token and samples after it."""
        return len(self.sampled_rows) == sum(self._counts) == len(self.rows)

    def has_room_for(self, state: RequestState) -> bool:
        """Return True if the plan may open a slot for this request. The first one always fits."""
        return not self.new or self._new_bytes + self._bytes_of(state) <= MAX_NEW_BYTES

    def add_new(self, state: RequestState, new: NewSlot) -> None:
        """Open a slot for an admitted request."""
        self._new_bytes += self._bytes_of(state)
        if state.params.grammar is not None:
            self._grammars.add(state.params.grammar.key)
        self.new.append(new)
        self.admitted.append(state)

    def _bytes_of(self, state: RequestState) -> int:
        """Estimate the bytes that a new slot adds to the plan. The runners may have its grammar already."""
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
            self.prompt_positions += count * start
        if state.has_reports:
            row = ReportedRow(state, state.epoch, start, count + len(drafts), len(drafts))
            self.reported_rows[len(self.rows) - 1] = row
        num_samples, is_last = 0, end == state.num_total
        if is_last:
            state.num_total += 1
            self.reaches_end = True
            if not state.only_scores:
                num_samples = 1 + len(drafts)
                self.sampled_rows.append((state, state.epoch, drafts))
            if self.next_drafts:
                self._kv_cache.extend_if_free(state, end + len(drafts) + self.next_drafts)
        if drafts:
            self._add_draft_tokens(drafts)
        elif state.first_unsent is not None and end > state.first_unsent:
            self._add_draft_tokens(state.tokens[max(start, state.first_unsent) : end])
            state.first_unsent = None if is_last else end
        self._num_samples.append(num_samples)
        if end >= state.next_block_end:
            self._kv_cache.cache_full_blocks(state)

    def _add_draft_tokens(self, token_ids: Sequence[int]) -> None:
        """The last tokens of the last row come with the plan, because no step has sampled them."""
        self._draft_lens += [0] * (len(self.rows) - 1 - len(self._draft_lens))
        self._draft_lens.append(len(token_ids))
        self._draft_token_ids.extend(token_ids)

    def finish(self, freed: list[int], writes: Int32s) -> None:
        """Make the plan, with the slots that were freed and the block tables that changed since the last one."""
        self.num_tokens, self.num_sampled = sum(self._counts), self.num_steps * sum(self._num_samples)
        self.plan = StepPlan(
            self.step_id,
            np.array(freed, np.int32) if freed else EMPTY,
            self.new,
            writes,
            np.array(self._slots, np.int32),
            np.array(self._starts, np.int32),
            np.array(self._counts, np.int32),
            np.array(self._num_samples, np.int32),
            num_steps=self.num_steps,
            next_drafts=self.next_drafts,
            snapshots=self._kv_cache.take_snapshots(),
        )
        if self._draft_lens:
            padding = [0] * (len(self.rows) - len(self._draft_lens))
            self.plan.draft_lens = np.array(self._draft_lens + padding, np.int32)
            self.plan.draft_token_ids = np.array(self._draft_token_ids, np.int32)
