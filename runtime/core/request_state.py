"""What the scheduler knows of one live request."""

from __future__ import annotations

from array import array
from typing import Any

from runtime.core.types import PromptLogprobs, Request

NEVER = 1 << 62


class RequestState:
    """One live request: the scheduler's only mutable record of it."""

    __slots__ = (
        "acceptance", "block_hashes", "blocks", "epoch", "expected_blocks", "failure", "final_len", "given_from", "key",
        "limit", "lost_at", "next_full", "num_accepted", "num_cached", "num_computed", "num_guessed", "num_losses",
        "num_observed", "num_right", "num_total", "owner", "params", "prompt_len", "request", "revise_at", "scores",
        "slot", "stop_ids", "tokens", "upto", "verifying",
    )  # fmt: skip

    def __init__(self, request: Request, limit: int, stop_ids: frozenset[int], key: tuple[int, int, int]) -> None:
        self.request, self.params, self.prompt_len = request, request.params, request.prompt_len
        self.tokens = array("i", request.token_ids)  # known ids
        self.limit = limit  # most tokens, prompt included, and one that is never sampled if max_tokens is 0
        self.stop_ids = stop_ids
        self.key = key  # (priority, job length or 0, arrival): the order of service
        self.epoch = 0  # below 0: ended
        self.slot = -1  # -1: waiting
        self.num_computed = 0
        self.num_total = len(self.tokens)
        # A draft's mirror of a request (runtime/core/draft.py) samples ahead of what is known to be right:
        self.upto = limit  # no row is planned that would sample beyond so many tokens
        self.final_len = NEVER  # tokens that will not be taken back; only they are hashed (C5)
        self.given_from = NEVER  # known tokens from here on were not sampled by the runner: a row must bring them
        self.num_cached = -1  # prompt tokens that the prefix cache gave at first admission; -1: not admitted yet
        self.blocks: list[int] = []
        self.block_hashes: list[bytes] = []  # of the leading full blocks, as far as computed
        self.next_full = NEVER  # num_computed that completes the next block to register
        self.expected_blocks = 0  # that it holds in the end, by the estimate
        self.revise_at = 0  # num_total from which on the estimate says more
        # Output tokens that have taught the estimate already; from another engine, or before it may stop: none.
        self.num_observed = max(len(self.tokens) - self.prompt_len, self.params.min_tokens)
        self.num_losses = 0  # of the runners in a row, with rows of this request in flight
        self.lost_at = 0  # known tokens at the last of them
        self.verifying = 0  # guesses in flight: no row is planned before it is known which of them were right
        self.num_right = 0  # guesses of the row in flight that were right, as far as its tokens are committed
        self.num_guessed = self.num_accepted = 0
        self.acceptance = -1.0  # speculation's estimate; below 0: none yet
        self.failure = ""  # why its grammar cannot go on
        # Prompt log-probabilities so far, a part a step; None: not asked for, or delivered.
        self.scores: list[PromptLogprobs] | None = None if self.params.prompt_logprobs is None else []
        self.owner: Any = None  # whoever submitted it; the scheduler only carries it
