"""SlotSampling: the slots' sampling parameters, and the logits edits that both samplers make alike.

A slot's row has the numbers that kernels read. Flags on the host mark the rows that need the second pass.
Id lists, which are rare and may be long, remain on the host.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray

from runtime.base.arrays import Int32s
from runtime.base.sampling_fields import SECOND_PASS, UNSET, Effect, table_of
from runtime.core.plan import NewSlot
from runtime.kernels.sampling.drawn_logprobs import drawn_logprobs
from runtime.kernels.sampling.logprobs import token_logprobs
from runtime.kernels.sampling.sample import (
    NUM_PARAMS,
    PENALISED_FROM,
    PROMPT_LEN,
    SEED_HIGH,
    SEED_LOW,
    TEMPERATURE,
    TOP_K,
    filters_of,
)
from runtime.kernels.sampling.top_k_top_p import Filters
from runtime.worker.extras import Copies
from runtime.worker.logprobs import Logprobs
from runtime.worker.ranks.split_logits import SplitLogits

_DRAWN_AT_ONCE = 32  # logits rows that are copied for `sampling_logprobs` at a time
MASKED_LOGIT = (
    -1e9
)  # min_tokens gives held ids this logit: above a grammar's -inf, so that a lone allowed token is drawn

Bools = NDArray[np.bool_]


class SlotSampling:
    """Parameters and flags of each slot. `Sampler` and `DeviceSampler` extend it."""

    pinned_acceptance: float | None = None  # EngineConfig.pinned_acceptance of a runner with a head

    def __init__(
        self,
        num_slots: int,
        vocab_size: int,
        eos_token_ids: tuple[int, ...],
        copies: Copies,
        split: SplitLogits | None = None,  # None on one rank
    ) -> None:
        self.num_slots, self.vocab_size, self.eos_token_ids = num_slots, vocab_size, eos_token_ids
        self.upload, self.split = copies.upload, split or SplitLogits(vocab_size)
        self.reset()

    def reset(self) -> None:
        """Forget all requests."""
        num_slots = self.num_slots
        self.rows = np.zeros((num_slots, NUM_PARAMS), np.int32)  # parameters as kernels read them
        self.held_until = np.zeros(num_slots, np.int32)  # first position that min_tokens does not affect
        self.penalised = np.zeros(num_slots, bool)
        self.filtered = np.zeros(num_slots, bool)
        self.changed = np.zeros(num_slots, bool)  # the second pass changes every token's logits
        self.bound = np.zeros(num_slots, bool)  # a grammar binds them
        self.only_masked = np.zeros(num_slots, bool)  # a grammar's mask is the second pass's only change
        self.num_logprobs = np.full(num_slots, -1, np.int32)  # alternatives to report; -1 if none is reported
        self.reports_drawn = np.zeros(num_slots, bool)  # sampling_logprobs
        self.scored: dict[int, NDArray[np.int64]] = {}  # slot -> ids of logprob_token_ids
        self.bias: dict[int, tuple[NDArray[np.int64], NDArray[np.float32]]] = {}  # slot -> ids, values
        self.allowed: dict[int, NDArray[np.int64]] = {}  # slot -> the only ids that may be drawn
        self.stops: dict[int, NDArray[np.int64]] = {}  # slot -> ids that min_tokens holds back

    def add(self, new: NewSlot) -> Int32s:
        """A request's parameters enter its slot. Returns its row, [NUM_PARAMS], floats as their bits."""
        slot, params, table = new.slot, new.params, table_of(type(new.params))
        self.remove(slot)
        # Ids that the model does not have are ignored: they must not fail others' step (C9).
        vocab = range(self.vocab_size)
        if bias := [(i, value) for i, value in params.logit_bias if i in vocab]:
            ids, values = zip(*bias, strict=True)
            self.bias[slot] = np.array(ids, np.int64), np.array(values, np.float32)
        if allowed := sorted(i for i in set(params.allowed_token_ids) if i in vocab):
            self.allowed[slot] = np.array(allowed, np.int64)
        stops = params.stop_token_ids + (() if params.ignore_eos else self.eos_token_ids)
        if params.min_tokens and (stops := tuple(i for i in stops if i in vocab)):
            self.stops[slot] = np.array(stops, np.int64)
            self.held_until[slot] = new.prompt_len + params.min_tokens
        self.num_logprobs[slot] = -1 if params.logprobs is None else params.logprobs
        self.reports_drawn[slot] = params.sampling_logprobs
        if params.logprobs is not None and params.logprob_token_ids:
            self.scored[slot] = np.clip(np.array(params.logprob_token_ids, np.int64), 0, self.vocab_size - 1)
        self.penalised[slot] = table.has_effect(params, {Effect.PENALTY})
        self.filtered[slot] = params.temperature > 0.0 and table.has_effect(params, {Effect.FILTER})
        self.bound[slot] = table.has_effect(params, {Effect.GRAMMAR})
        biased = slot in self.bias or slot in self.allowed
        second_pass = SECOND_PASS if biased else SECOND_PASS - {Effect.BIAS}
        # The captured pass would change the logits that log-probabilities are reported for.
        reported = self.penalised[slot] and params.logprobs is not None
        self.changed[slot] = reported or table.has_effect(params, second_pass)
        others = params.logprobs is not None or self.penalised[slot] or biased
        self.only_masked[slot] = self.bound[slot] and not others

        row: Int32s = self.rows[slot]
        row[:] = 0
        for column, name, code in table.columns:
            value = getattr(params, name)
            (row.view(np.float32) if code == "f" else row)[column] = UNSET if value is None else value
        row[SEED_LOW : SEED_HIGH + 1] = np.array([new.seed], np.int64).view(np.int32)
        row[PROMPT_LEN] = new.prompt_len
        if self.penalised[slot] and not self.changed[slot]:
            row[PENALISED_FROM] = max(1, self.held_until[slot])
        return row

    def remove(self, slot: int) -> None:
        """Forget the entries that the next `add` does not overwrite."""
        self.scored.pop(slot, None)
        self.bias.pop(slot, None)
        self.allowed.pop(slot, None)
        self.stops.pop(slot, None)
        self.held_until[slot] = 0

    def wants_second_pass(self, slots: Int32s, positions: Int32s) -> Bools:
        """[n] true for rows with changes of logits before a token is drawn."""
        wants: Bools = self.changed[slots] | (positions < self.held_until[slots])
        return wants

    def is_plain(self, slots: Int32s, positions: Int32s) -> bool:
        """True if the captured pass gives all that these rows report."""
        return not (self.wants_second_pass(slots, positions) | (self.num_logprobs[slots] >= 0)).any()

    def needs_all_logits(self, slots: Int32s, positions: Int32s) -> bool:
        """True if some of these rows need more logits than the best token's, with noise or without."""
        chooses = self.filtered[slots] | self.penalised[slots]
        return bool(chooses.any()) or not self.is_plain(slots, positions)

    def edit_logits(self, logits: torch.Tensor, slots: Int32s, positions: Int32s) -> None:
        """Apply logit bias, min_tokens and allowed_token_ids, in this order, to logits [n, vocab] float32 in place."""
        held = positions < self.held_until[slots]
        restricted, allowed, biased, stopped = [], [], [], []
        if self.allowed or self.bias or held.any():
            for row, slot in enumerate(slots.tolist()):
                first = row * self.vocab_size
                if slot in self.allowed:
                    restricted.append(row)
                    allowed.append(first + self.allowed[slot])
                if slot in self.bias:
                    ids, values = self.bias[slot]
                    biased.append((first + ids, values))
                if held[row]:
                    stopped.append(first + self.stops[slot])
        if biased:
            at, added = (self.upload(np.concatenate(parts)) for parts in zip(*biased, strict=True))
            logits.view(-1).index_add_(0, at, added)
        if stopped:
            logits.view(-1).index_fill_(0, self.upload(np.concatenate(stopped)), MASKED_LOGIT)
        if restricted:
            at = self.upload(np.concatenate(allowed))
            kept = logits.view(-1).index_select(0, at)
            logits.index_fill_(0, self.upload(np.array(restricted, np.int64)), -torch.inf)
            logits.view(-1).index_copy_(0, at, kept)

    def logprobs(
        self, logits: torch.Tensor, token_ids: torch.Tensor, slots: Int32s, drawn: torch.Tensor | None = None
    ) -> Logprobs | None:
        """The log-probabilities that rows [n] report, of their sampled tokens; None if no row reports any.

        `drawn` [n] comes from `drawn_logprobs`."""
        wanted = self.num_logprobs[slots]
        rows = np.flatnonzero(wanted >= 0)
        if not len(rows):
            return None
        index = self.upload(rows)
        ids = token_ids.index_select(0, index).long().clamp(min=0)  # the engine delivers nothing from a failed row
        scored = self._scored_ids(slots[rows])
        others = None if scored is None else self.upload(scored)
        chosen = logits.index_select(0, index).float()
        own, ranks, top_ids, top = token_logprobs(chosen, ids, int(wanted.max()), others)
        num_best = top.shape[1] - (0 if others is None else others.shape[1])
        drawn_values = None if drawn is None else drawn.index_select(0, index)
        return Logprobs(rows.astype(np.int32), num_best, ranks, own, top_ids, top, drawn_values)

    def drawn_logprobs(
        self,
        logits: torch.Tensor,  # [n, vocab] the model's
        token_ids: torch.Tensor,  # [n] drawn from them
        slots: Int32s,  # [n]
        rows: NDArray[np.int64],  # [m] rising: rows that were drawn from other logits
        edited: torch.Tensor | None,  # [m, vocab] these logits, float32; None without rows
        is_filtered: bool,  # top-k, top-p and min-p have removed tokens from `edited`
    ) -> torch.Tensor | None:
        """[n] float32 log-probabilities, each under the distribution that the token was drawn from. Rows that do not
        report it have 0. None if no row reports it."""
        wanted = np.flatnonzero(self.reports_drawn[slots])
        if not len(wanted):
            return None
        found = torch.zeros(len(slots), dtype=torch.float32, device=logits.device)
        is_edited = np.isin(wanted, rows)
        for source, part in ((logits, wanted[~is_edited]), (edited, wanted[is_edited])):
            for start in range(0, len(part), _DRAWN_AT_ONCE):
                some = part[start : start + _DRAWN_AT_ONCE]
                at = some if source is logits else np.searchsorted(rows, some)
                index, where = self.upload(some.astype(np.int64), at.astype(np.int64)).view(2, -1)
                assert source is not None
                chosen, own = source.index_select(0, where).float(), slots[some]
                ids = token_ids.index_select(0, index).long().clamp(min=0)
                filters = not is_filtered and bool(self.filtered[own].any())
                values = drawn_logprobs(chosen, ids, *self._draw_params(own, filters))
                found.index_copy_(0, index, values)
        return found

    def _draw_params(self, slots: Int32s, filters: bool) -> tuple[torch.Tensor, Filters | None, int]:
        """The last arguments of `drawn_logprobs` for rows in these slots."""
        params = self.upload(self.rows[slots])
        temperatures = params.view(torch.float32)[:, TEMPERATURE]
        if not filters:
            return temperatures, None, 0
        top_k = self.rows[slots, TOP_K]
        is_bounded = (top_k > 0) | ~self.filtered[slots]  # a row with top-p alone needs all logits in order
        most = int(top_k.max()) if is_bounded.all() else 0
        return temperatures, filters_of(params), most

    def _scored_ids(self, slots: Int32s) -> NDArray[np.int64] | None:
        """The ids in logprob_token_ids [n, one row's most], filled up with zeros; None if no row has any."""
        found = [self.scored.get(slot, ()) for slot in slots.tolist()] if self.scored else []
        if not (most := max(map(len, found), default=0)):
            return None
        ids = np.zeros((len(found), most), np.int64)
        for row, own in zip(ids, found, strict=True):
            row[: len(own)] = own
        return ids
