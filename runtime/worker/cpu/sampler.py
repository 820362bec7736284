"""The sampler: owns the slots' sampling parameters, turns logits into tokens."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray

from runtime.core.plan import Int32s, NewSlot
from runtime.features.grammar_state import Masks
from runtime.kernels.sampling import sample
from runtime.kernels.sampling.bitmask import apply_bitmask_torch
from runtime.kernels.sampling.gumbel import gumbel_noise, noise_keys
from runtime.kernels.sampling.logprobs import token_logprobs
from runtime.kernels.sampling.penalties import penalise_torch
from runtime.kernels.sampling.token_keys import FAILED, best_keys_torch, tokens_of_keys_torch
from runtime.kernels.sampling.top_k_top_p import top_k_top_p_bounds_torch
from runtime.worker.ranks.split_logits import SplitLogits
from runtime.worker.slot_sampling import MASKED_LOGIT, SlotSampling
from runtime.worker.slots import Slots


@dataclass(slots=True)
class Logprobs:
    """Log-probabilities of the rows that asked for them, and of prompt tokens; see StepResult."""

    rows: Int32s
    num_best: int  # of each row's alternatives; those asked for by id come after them
    ranks: torch.Tensor
    logprobs: torch.Tensor
    top_ids: torch.Tensor
    top_logprobs: torch.Tensor

    def map(self, move: Callable[[torch.Tensor], torch.Tensor]) -> Logprobs:
        """With `move` applied to each tensor."""
        moved = map(move, (self.ranks, self.logprobs, self.top_ids, self.top_logprobs))
        return Logprobs(self.rows, self.num_best, *moved)

    def then(self, prompts: Logprobs) -> Logprobs:
        """With those of prompt tokens after these. Nobody reads what fills up the side with fewer alternatives."""
        missing = prompts.top_ids.shape[1] - self.top_ids.shape[1]
        filled = [
            (F.pad(a, (0, max(0, missing))), F.pad(b, (0, max(0, -missing))))
            for a, b in ((self.top_ids, prompts.top_ids), (self.top_logprobs, prompts.top_logprobs))
        ]
        pairs = ((self.ranks, prompts.ranks), (self.logprobs, prompts.logprobs), *filled)
        return Logprobs(self.rows, self.num_best, *(torch.cat(pair) for pair in pairs))


class Sampler(SlotSampling):
    """Gumbel-max sampling with noise by position (C4). Rows that only want the best token skip everything else.

    In order, on a copy of the raw logits: logit bias, min_tokens, ids that alone are allowed, grammar, penalties,
    temperature, top-k/top-p/min-p, noise."""

    def __init__(
        self,
        num_slots: int,
        vocab_size: int,
        eos_token_ids: tuple[int, ...],
        device: torch.device,
        split: SplitLogits | None = None,
    ) -> None:
        super().__init__(num_slots, vocab_size, eos_token_ids)
        self.device, self.split = device, split or SplitLogits(vocab_size)
        self.rows = np.zeros((num_slots, sample.NUM_PARAMS), np.int32)
        self.vocab_ids = torch.arange(vocab_size, dtype=torch.int32, device=device)

    def add(self, new: NewSlot) -> Int32s:
        """A request's parameters enter its slot."""
        self.rows[new.slot] = row = super().add(new)
        return row

    def sample(
        self,
        logits: torch.Tensor,  # [n, vocab] the model's own; of ranks, each one's part
        slots: Int32s,  # [n]
        positions: Int32s,  # [n] of the tokens to be sampled
        state: Slots,
        masks: Masks | None = None,
    ) -> tuple[torch.Tensor, Logprobs | None]:
        """Token ids [n] int64, -1 where the logits are not finite (C9), and the log-probabilities asked for."""
        logits = logits.float()  # at once: a CPU's reductions over bfloat16 are several times slower
        if self.split.is_split and not self.needs_all_logits(slots, positions):
            return self._best_of_parts(logits, slots, positions), None
        logits = self.split.whole(logits)
        finite = logits.sum(-1).isfinite()
        token_ids = logits.argmax(-1)
        drawn = self._float(sample.TEMPERATURE, slots) > 0
        rows = np.flatnonzero(drawn | self.penalised[slots] | self.wants_second_pass(slots, positions))
        if len(rows):
            index = self._tensor(rows)
            chosen = logits.index_select(0, index)
            self._apply_bias_and_stops(chosen, slots[rows], positions[rows])
            if masks is not None:
                at = np.searchsorted(rows, masks.numbers)
                apply_bitmask_torch(chosen, self._tensor(at), self._tensor(masks.words))
                finite[self._tensor(masks.failed).long()] = False
            token_ids[index] = self._choose(chosen, slots[rows], positions[rows], state)
        logprobs = self._logprobs(logits, token_ids, slots)
        token_ids.masked_fill_(~finite, -1)
        if self.split.is_split and self.bound[slots].any():
            token_ids = self.split.of_first_rank(token_ids)
        return token_ids, logprobs

    def _best_of_parts(self, logits: torch.Tensor, slots: Int32s, positions: Int32s) -> torch.Tensor:
        """Token ids [n], as `sample` has them, of rows that only want the best of all ranks' tokens."""
        failed, ids = ~logits.sum(-1).isfinite(), self.split.own_ids
        if len(rows := np.flatnonzero(self._float(sample.TEMPERATURE, slots) > 0)):
            index, chosen = self._tensor(rows), (slots[rows], positions[rows])
            scores = self._scores(logits.index_select(0, index), *chosen, self.vocab_ids[ids.start : ids.stop])
            logits = logits.index_copy(0, index, scores)
        keys = best_keys_torch(logits, ids.start).masked_fill_(failed, FAILED)
        return tokens_of_keys_torch(self.split.best(keys))

    def _choose(self, logits: torch.Tensor, slots: Int32s, positions: Int32s, state: Slots) -> torch.Tensor:
        """Of the rows that want more than the best token; `logits` is theirs to change."""
        if self.penalised[slots].any():
            where, params = (self._tensor(slots), self._tensor(positions)), self._tensor(self.rows)
            penalise_torch(logits, *where, state.tokens, params, all_rows=True)
        rows = np.flatnonzero(self._float(sample.TEMPERATURE, slots) > 0)
        if len(rows) == len(slots):
            return self._draw(logits, slots, positions)
        token_ids = logits.argmax(-1)
        if len(rows):
            index = self._tensor(rows)
            token_ids[index] = self._draw(logits.index_select(0, index), slots[rows], positions[rows])
        return token_ids

    def _apply_bias_and_stops(self, logits: torch.Tensor, slots: Int32s, positions: Int32s) -> None:
        if self.bias:
            for row, slot in enumerate(slots.tolist()):
                if slot in self.bias:
                    ids, values = self.bias[slot]
                    logits[row].index_add_(0, self._tensor(ids), self._tensor(values))
        if self.stops:
            for row in np.flatnonzero(positions < self.held_until[slots]).tolist():
                logits[row].index_fill_(0, self._tensor(self.stops[int(slots[row])]), MASKED_LOGIT)
        for row, slot in enumerate(slots.tolist() if self.allowed else ()):
            if slot in self.allowed:
                allowed = self._tensor(self.allowed[slot])
                kept = logits[row, allowed]
                logits[row].fill_(-torch.inf).index_copy_(0, allowed, kept)

    def _draw(self, logits: torch.Tensor, slots: Int32s, positions: Int32s) -> torch.Tensor:
        return self._scores(logits, slots, positions, self.vocab_ids).argmax(-1)

    def _scores(
        self,
        logits: torch.Tensor,  # [n, m], changed in place
        slots: Int32s,
        positions: Int32s,
        ids: torch.Tensor,  # [m] int32 of these tokens; all, if a row has a filter
    ) -> torch.Tensor:
        """[n, m] of rows with a temperature: the best scored token is drawn."""
        logits.div_(self._tensor(self._float(sample.TEMPERATURE, slots))[:, None])
        rows = np.flatnonzero(self.filtered[slots])
        if len(rows):
            index, subset = self._tensor(rows), slots[rows]
            chosen = logits.index_select(0, index)
            top_k = self._tensor(self.rows[subset, sample.TOP_K].astype(np.int64))
            top_p, min_p = (self._tensor(self._float(column, subset)) for column in (sample.TOP_P, sample.MIN_P))
            bounds = top_k_top_p_bounds_torch(chosen, top_k, top_p, min_p)
            logits.index_copy_(0, index, chosen.masked_fill_(chosen < bounds[:, None], -torch.inf))
        seeds = self.rows[slots, sample.SEED_LOW : sample.SEED_HIGH + 1].view(np.int64)[:, 0]
        keys = noise_keys(self._tensor(seeds), self._tensor(positions))
        return logits.add_(gumbel_noise(keys[:, :, None], ids))

    def _logprobs(self, logits: torch.Tensor, token_ids: torch.Tensor, slots: Int32s) -> Logprobs | None:
        wanted = self.num_logprobs[slots]
        rows = np.flatnonzero(wanted >= 0)
        if not len(rows):
            return None
        index = self._tensor(rows)
        scored = self.scored_ids(slots[rows])
        others = None if scored is None else self._tensor(scored)
        chosen = logits.index_select(0, index)
        own, ranks, top_ids, top = token_logprobs(chosen, token_ids[index], int(wanted.max()), others)
        num_best = top.shape[1] - (0 if others is None else others.shape[1])
        return Logprobs(rows.astype(np.int32), num_best, ranks, own, top_ids, top)

    def _float(self, column: int, slots: Int32s) -> NDArray[np.float32]:
        values: NDArray[np.float32] = self.rows[slots, column].view(np.float32)
        return values

    def _tensor(self, values: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(values).to(self.device)
