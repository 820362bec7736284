"""SlotSampling: what the requests of a runner's slots want of sampling, derived from the table of SamplingParams.

A slot's row has the numbers that kernels read; the flags tell the host which rows the captured pass answers whole, and
which want the second one. What is rare and has no fixed size stays on the host: biases, ids that alone are allowed, and
those that min_tokens masks.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from runtime.core.plan import Int32s, NewSlot
from runtime.kernels.sampling.sample import NUM_PARAMS, PENALISED_FROM, PROMPT_LEN, SEED_HIGH, SEED_LOW
from runtime.spec.sampling_fields import SECOND_PASS, UNSET, Effect, table_of

MASKED_LOGIT = -1e9  # the logit of what min_tokens holds back, but of a token that a grammar allows nothing beside

Bools = NDArray[np.bool_]


class SlotSampling:
    """Parameters and flags of each slot; both samplers keep theirs in one of these."""

    def __init__(self, num_slots: int, vocab_size: int, eos_token_ids: tuple[int, ...]) -> None:
        self.num_slots, self.vocab_size, self.eos_token_ids = num_slots, vocab_size, eos_token_ids
        self.clear()

    def clear(self) -> None:
        """Forget all requests."""
        num_slots = self.num_slots
        self.held_until = np.zeros(num_slots, np.int32)  # position of the first token that min_tokens lets go free
        self.penalised = np.zeros(num_slots, bool)
        self.filtered = np.zeros(num_slots, bool)
        self.changed = np.zeros(num_slots, bool)  # by an effect of the second pass, all along
        self.bound = np.zeros(num_slots, bool)  # by a grammar
        self.only_masked = np.zeros(num_slots, bool)  # by a grammar, and nothing else is wanted
        self.num_logprobs = np.full(num_slots, -1, np.int32)  # alternatives to report; -1: nothing
        self.scored: dict[int, NDArray[np.int64]] = {}  # slot -> ids whose log-probabilities are reported, too
        self.bias: dict[int, tuple[NDArray[np.int64], NDArray[np.float32]]] = {}  # slot -> ids, values
        self.allowed: dict[int, NDArray[np.int64]] = {}  # slot -> the only ids that may be drawn
        self.stops: dict[int, NDArray[np.int64]] = {}  # slot -> ids held back

    def add(self, new: NewSlot) -> Int32s:
        """A request's parameters enter its slot; returns its row, [NUM_PARAMS], floats as their bits."""
        slot, params, table = new.slot, new.params, table_of(type(new.params))
        self.remove(slot)
        # Ids that the model does not have are ignored: they must not fail the step of others (C9).
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
        if params.logprobs is not None and params.logprob_token_ids:
            self.scored[slot] = np.clip(np.array(params.logprob_token_ids, np.int64), 0, self.vocab_size - 1)
        self.penalised[slot] = table.has_effect(params, {Effect.PENALTY})
        self.filtered[slot] = params.temperature > 0.0 and table.has_effect(params, {Effect.FILTER})
        self.bound[slot] = table.has_effect(params, {Effect.GRAMMAR})
        biased = slot in self.bias or slot in self.allowed
        second_pass = SECOND_PASS if biased else SECOND_PASS - {Effect.BIAS}
        # The captured pass would change logits whose log-probabilities are wanted.
        reported = self.penalised[slot] and params.logprobs is not None
        self.changed[slot] = reported or table.has_effect(params, second_pass)
        others = params.logprobs is not None or self.penalised[slot] or biased
        self.only_masked[slot] = self.bound[slot] and not others

        row = np.zeros(NUM_PARAMS, np.int32)
        for column, name, code in table.columns:
            value = getattr(params, name)
            (row.view(np.float32) if code == "f" else row)[column] = UNSET if value is None else value
        row[SEED_LOW : SEED_HIGH + 1] = np.array([new.seed], np.int64).view(np.int32)
        row[PROMPT_LEN] = new.prompt_len
        if self.penalised[slot] and not self.changed[slot]:
            row[PENALISED_FROM] = max(1, self.held_until[slot])
        return row

    def remove(self, slot: int) -> None:
        """Forget what does not get overwritten by the next `add`."""
        self.scored.pop(slot, None)
        self.bias.pop(slot, None)
        self.allowed.pop(slot, None)
        self.stops.pop(slot, None)
        self.held_until[slot] = 0

    def scored_ids(self, slots: Int32s) -> NDArray[np.int64] | None:
        """[n, most of one] the ids whose log-probabilities each row reports beside the best, then zeros; None if there
        are none."""
        found = [self.scored.get(slot, ()) for slot in slots.tolist()] if self.scored else []
        if not (most := max(map(len, found), default=0)):
            return None
        ids = np.zeros((len(found), most), np.int64)
        for row, own in zip(ids, found, strict=True):
            row[: len(own)] = own
        return ids

    def wants_second_pass(self, slots: Int32s, positions: Int32s) -> Bools:
        """[n] the rows whose logits are changed before a token is drawn from them."""
        wants: Bools = self.changed[slots] | (positions < self.held_until[slots])
        return wants

    def is_plain(self, slots: Int32s, positions: Int32s) -> bool:
        """True if the captured pass is all that these rows want."""
        return not (self.wants_second_pass(slots, positions) | (self.num_logprobs[slots] >= 0)).any()

    def needs_all_logits(self, slots: Int32s, positions: Int32s) -> bool:
        """True if some of these rows want more than the best token, with noise or without."""
        chooses = self.filtered[slots] | self.penalised[slots]
        return bool(chooses.any()) or not self.is_plain(slots, positions)
