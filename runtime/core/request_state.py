"""RequestState: the scheduler's record of one live request."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import Any

import numpy as np

from runtime.spec.config import ModelInfo
from runtime.spec.pooling import required_pooling
from runtime.spec.types import TOKEN_BYTES, CallboardError, PromptLogprobs, Request

NEVER = 1 << 62
SortKey = tuple[int, int, int]  # priority, job length or 0, arrival: the order of service


class RequestState:
    """One live request: the scheduler's only mutable record of it."""

    __slots__ = (
        "acceptance", "adapter", "block_hashes", "capacity", "drafts_in_flight", "epoch", "expected_blocks", "failure",
        "first_unsent", "has_ended", "list_bytes", "lost_at", "max_len", "next_block_end", "num_accepted", "num_blocks",
        "num_cached", "num_computed", "num_draft_tokens", "num_final", "num_hits", "num_losses", "num_observed",
        "num_returns_lost", "num_right", "num_total", "only_scores", "owner", "params", "plan_limit", "prompt_len",
        "prompt_logprobs", "request", "revise_at", "slot", "sort_key", "stop_ids", "tables", "tokens",
    )  # fmt: skip

    def __init__(
        self,
        request: Request,
        tokens: array[int],
        max_len: int,
        stop_ids: frozenset[int],
        sort_key: SortKey,
        adapter: int = 0,  # its index (adapters.py)
    ) -> None:
        self.request, self.params, self.prompt_len = request, request.params, request.prompt_len
        self.tokens, self.adapter = tokens, adapter  # known ids
        self.max_len = max_len  # most tokens, prompt included
        self.only_scores = not self.params.max_tokens  # it ends when its prompt is scored
        self.stop_ids = stop_ids
        self.sort_key = sort_key
        self.epoch = 0  # changes when it leaves its slot: results of an older epoch are stale (C3)
        self.has_ended = False
        self.slot: int | None = None  # None: it waits
        self.num_computed = 0
        self.num_total = len(self.tokens)
        # A draft's mirror of a request (runtime/speculation/draft.py) samples ahead of what is known to be right:
        # No row is planned once it has so many tokens, the one that its last row samples included.
        self.plan_limit = max_len + self.only_scores
        self.num_final = NEVER  # tokens that will not be taken back; only they are hashed (C5)
        # Known tokens from here on were not sampled by the runner: a row must bring them. None: there are none.
        self.first_unsent: int | None = None
        # Prompt tokens that the prefix cache gave at first admission; None: it was not admitted yet.
        self.num_cached: int | None = None
        self.num_hits = 0  # known tokens that the prefix cache had when it arrived, where somebody follows the cache
        self.tables: list[list[int]] = []  # of each KV group its blocks by position, NULL_BLOCK below a window
        self.num_blocks = 0  # that it holds, of all groups
        self.capacity = 0  # tokens that its tables have blocks for
        self.block_hashes: list[bytes] = []  # of the leading full blocks, as far as computed
        self.next_block_end = NEVER  # num_computed that completes the next block to register
        self.expected_blocks = 0  # that it holds in the end, by the estimate
        self.revise_at = 0  # num_total from which on the estimate says more
        # Output tokens that have taught the estimate already; from another engine, or before it may stop: none.
        self.num_observed = max(len(self.tokens) - self.prompt_len, self.params.min_tokens)
        self.num_losses = 0  # of the runners in a row, with rows of this request in flight
        self.lost_at = 0  # known tokens at the last of them
        self.num_returns_lost = 0  # of them just after it returned from a trial (isolation.py)
        self.drafts_in_flight = 0  # guesses in flight: no row is planned before it is known which of them were right
        self.num_right = 0  # guesses of the row in flight that were right, as far as its tokens are committed
        self.num_draft_tokens = self.num_accepted = 0
        self.acceptance: float | None = None  # speculation's estimate; None: none yet
        self.failure = ""  # why its grammar cannot go on
        self.list_bytes = self.params.list_bytes + TOKEN_BYTES * len(request.prediction)  # beside its tokens
        # Prompt log-probabilities so far, a part a step; None: not asked for, or delivered.
        self.prompt_logprobs: list[PromptLogprobs] | None = None if self.params.prompt_logprobs is None else []
        self.owner: Any = None  # whoever submitted it; the scheduler only carries it

    def check_length(self, limit: int) -> None:
        """Raises CallboardError if this model's `limit` of tokens leaves no room for output."""
        if len(self.tokens) >= self.plan_limit:
            raise CallboardError(
                f"The prompt has {self.prompt_len} tokens, but this model's maximum context length is {limit} tokens, "
                "output included; shorten the prompt."
            )

    def rewrite(self, length: int, token_ids: Sequence[int], block_size: int) -> None:
        """`token_ids` follow the first `length` tokens; what a slot has beyond these is computed again."""
        if self.slot is not None:
            self.epoch += 1
            self.num_computed = min(self.num_computed, length)
            self.first_unsent = length if self.first_unsent is None else min(self.first_unsent, length)
        del self.tokens[length:], self.block_hashes[length // block_size :]
        self.tokens.extend(token_ids)
        self.num_total = len(self.tokens)

    def sample_again(self) -> None:
        """Its last sample was not drawn: the row of its last known token is to be planned once more."""
        self.epoch += 1
        self.num_total = len(self.tokens)
        self.num_computed = self.num_total - 1
        self.drafts_in_flight = 0

    def detach(self) -> None:
        """Forget what a request has in a slot; its known tokens and their hashes stay."""
        self.epoch += 1
        self.slot = None
        self.tables = []
        self.num_blocks = self.capacity = 0
        self.num_computed = 0
        self.num_total = len(self.tokens)
        self.next_block_end = NEVER
        self.first_unsent = None
        self.drafts_in_flight = 0
        if self.prompt_logprobs:
            self.prompt_logprobs = []


def checked_tokens(request: Request, info: ModelInfo) -> array[int]:
    """The known ids of a request. Raises CallboardError if it does not fit this model, whatever its length."""
    if not 1 <= request.prompt_len <= len(request.token_ids):
        raise CallboardError("The prompt is empty; send at least one token.")
    try:
        tokens = array("i", request.token_ids)
        is_known = np.frombuffer(tokens, np.uint32).max() < info.vocab_size  # below 0 is above all ids
    except OverflowError:
        is_known = False
    if not is_known:
        bad = next(i for i in request.token_ids if not 0 <= i < info.vocab_size)
        raise CallboardError(f"Token id {bad} is not in this model's vocabulary of {info.vocab_size}.")
    if request.params.pooled:
        required_pooling(info.pooling)
    elif not info.makes_text:
        raise CallboardError("This model has no output head and makes no text; ask it for embeddings or scores.")
    if (request.params.grammar or request.params.thinking) and not info.eos_token_ids:
        raise CallboardError("This model has no end-of-sequence token; structured output needs one to end with.")
    return tokens
