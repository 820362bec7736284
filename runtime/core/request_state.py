"""RequestState: the scheduler's record of one live request."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import replace
from enum import Enum, auto
from typing import Any

import numpy as np

from runtime.base.model_info import ModelInfo
from runtime.base.types import TOKEN_BYTES, CallboardError, Request

NEVER = 1 << 62
SortKey = tuple[int, int, int]  # priority, an extra's rank or 0, arrival: the service order


class RequestStatus(Enum):
    """Where a request stands."""

    WAITING = auto()  # waits for a slot
    RUNNING = auto()  # has a slot
    LOADING = auto()  # waits, until blocks of its prefix have been copied into the cache: it holds none itself
    VERIFYING = auto()  # has a slot and draft tokens in flight: its next row depends on how many are accepted
    ENDED = auto()


class RequestState:
    """One live request. Extras keep records of their own."""

    __slots__ = (
        "adapter", "block_hashes", "capacity", "epoch", "failure", "fills_cache", "first_unsent", "has_reports",
        "list_bytes", "max_len", "may_resample", "next_block_end", "num_blocks", "num_cached", "num_computed",
        "num_final", "num_total", "only_scores", "owner", "params", "plan_limit", "prompt_len", "reads_cache",
        "request", "slot", "sort_key", "status", "stop_ids", "tables", "tokens",
    )  # fmt: skip

    def __init__(
        self, request: Request, tokens: array[int], max_len: int, stop_ids: frozenset[int], sort_key: SortKey
    ) -> None:
        self.request, self.params, self.prompt_len = request, request.params, request.prompt_len
        self.tokens = tokens  # known ids
        self.max_len = max_len  # most tokens, prompt included
        self.stop_ids = stop_ids
        self.sort_key = sort_key
        self.status = RequestStatus.WAITING
        self.slot: int | None = None  # None while it waits
        self.epoch = 0  # changes when it leaves its slot: an older epoch's results are stale (C3)
        self.num_computed = 0  # tokens that have been planned
        self.num_total = len(tokens)  # known tokens, and samples in flight
        self.only_scores = not self.params.max_tokens  # it ends with its prompt
        self.list_bytes = self.params.list_bytes + TOKEN_BYTES * len(request.prediction)  # bytes in a message
        self.owner: Any = None  # the caller's object; the scheduler only carries it
        self.failure = ""  # why it failed, in one sentence
        # KV cache
        self.tables: list[list[int]] = []  # blocks by position for each KV group, NULL_BLOCK below a window
        self.num_blocks = 0  # held blocks in all groups
        self.capacity = 0  # tokens for which the tables have blocks
        self.block_hashes: list[bytes] = []  # hashes of the leading full blocks
        self.next_block_end = NEVER  # num_computed that completes the next block to cache
        self.num_cached: int | None = None  # prompt tokens that were cached at first admission; None before it
        # Set by extras
        self.adapter = 0  # index of its adapter on the device; 0 for none
        self.reads_cache = self.fills_cache = True  # it takes cached blocks; its blocks become cached
        self.may_resample = False  # the row of its last known token may be planned again
        self.has_reports = False  # its rows may have reports
        # Set by a draft model: its requests run ahead of the final tokens (speculation/draft.py)
        self.plan_limit = max_len + self.only_scores  # no row is planned once `num_total` is this
        self.num_final = NEVER  # tokens that stay; only these are hashed (C5)
        self.first_unsent: int | None = None  # rows bring the known tokens from here on; None if the runner has all

    def check_length(self, limit: int) -> None:
        """Raises CallboardError if the model's `limit` of tokens leaves no room for output."""
        if len(self.tokens) >= self.plan_limit:
            raise CallboardError(
                f"The prompt has {self.prompt_len} tokens, but this model's maximum context length is {limit} tokens, "
                "output included; shorten the prompt."
            )

    def rewrite(self, length: int, token_ids: Sequence[int], block_size: int) -> None:
        """Replace all after the first `length` tokens with `token_ids`, which are computed again."""
        if self.slot is not None:
            self.epoch += 1
            self.num_computed = min(self.num_computed, length)
            self.first_unsent = length if self.first_unsent is None else min(self.first_unsent, length)
        del self.tokens[length:], self.block_hashes[length // block_size :]
        self.tokens.extend(token_ids)
        self.num_total = len(self.tokens)

    def rewind(self) -> None:
        """Continue at the last known token: its row is the next one."""
        self.num_total = len(self.tokens)
        self.num_computed = self.num_total - 1

    def detach(self) -> None:
        """Leave the slot. The known tokens and their hashes stay."""
        self.epoch += 1
        self.status = RequestStatus.WAITING
        self.slot = None
        self.tables = []
        self.num_blocks = self.capacity = 0
        self.num_computed = 0
        self.num_total = len(self.tokens)
        self.next_block_end = NEVER
        self.first_unsent = None

    def shrink(self, has_waited: bool) -> None:
        """Drop the images at its end, and the prompt of a request that still waits. Metrics may keep this object."""
        if has_waited:
            self.tokens, self.request = array("i"), replace(self.request, token_ids=[], prediction=(), images=())
        elif self.request.images:
            self.request = replace(self.request, images=())


def checked_tokens(request: Request, info: ModelInfo) -> array[int]:
    """Return the known ids of a request. Raises CallboardError if this model cannot serve them."""
    if not 1 <= request.prompt_len <= len(request.token_ids):
        raise CallboardError("The prompt is empty; send at least one token.")
    try:
        tokens = array("i", request.token_ids)
        is_known = np.frombuffer(tokens, np.uint32).max() < info.vocab_size  # negative ids are large here
    except OverflowError:
        is_known = False
    if not is_known:
        bad = next(i for i in request.token_ids if not 0 <= i < info.vocab_size)
        raise CallboardError(f"Token id {bad} is not in this model's vocabulary of {info.vocab_size}.")
    if not info.makes_text and not request.params.pooled:
        raise CallboardError("This model has no output head and makes no text; ask it for embeddings or scores.")
    return tokens
