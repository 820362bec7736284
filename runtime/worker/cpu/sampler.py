"""Sampler: turns logits into tokens with torch. The twin that DeviceSampler is tested against (C7)."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray

from runtime.base.arrays import Int32s
from runtime.kernels.sampling import sample
from runtime.kernels.sampling.bitmask import apply_bitmask_torch
from runtime.kernels.sampling.penalties import penalise_torch
from runtime.kernels.sampling.token_keys import DrawnKeys, drawn_keys_torch, tokens_of_keys_torch
from runtime.kernels.sampling.top_k_top_p import FilterBounds, top_k_top_p_bounds_torch
from runtime.worker.cpu.host_copies import HostCopies
from runtime.worker.cpu.slots import Slots
from runtime.worker.extras import TokenMasks
from runtime.worker.logprobs import Logprobs
from runtime.worker.ranks.split_logits import SplitLogits
from runtime.worker.slot_sampling import SlotSampling


class Sampler(SlotSampling):
    """Gumbel-max sampling with noise by position (C4). Rows that need only the best token skip everything else.

    The order, on a copy of the model's logits: logit bias, min_tokens, allowed_token_ids, grammar, penalties,
    temperature, top-k, top-p and min-p, noise."""

    def __init__(
        self,
        num_slots: int,
        vocab_size: int,
        eos_token_ids: tuple[int, ...],
        device: torch.device,
        split: SplitLogits | None = None,
        drawn_keys: DrawnKeys = drawn_keys_torch,
        filter_bounds: FilterBounds = top_k_top_p_bounds_torch,
    ) -> None:
        super().__init__(num_slots, vocab_size, eos_token_ids, HostCopies(device), split)
        self.drawn_keys, self.filter_bounds = drawn_keys, filter_bounds

    def sample(
        self,
        logits: torch.Tensor,  # [n, vocab] the model's; a rank's part
        slots: Int32s,  # [n]
        positions: Int32s,  # [n] positions to be sampled
        state: Slots,
        masks: TokenMasks | None = None,
    ) -> tuple[torch.Tensor, Logprobs | None]:
        """Token ids [n] int64, -1 where the logits are not finite (C9), and the log-probabilities that rows report."""
        logits = logits.float()  # first: a CPU's reductions over bfloat16 are several times slower
        if self.split.is_split and not self.needs_all_logits(slots, positions):
            keys = self._keys(logits, slots, positions, self.split.own_ids.start)
            return tokens_of_keys_torch(self.split.best(keys)), None
        logits = self.split.whole(logits)
        token_ids, rows, chosen = self._drawn(logits, slots, positions, state, masks)
        drawn_values = self.drawn_logprobs(logits, token_ids, slots, rows, chosen, is_filtered=True)
        logprobs = self.logprobs(logits, token_ids, slots, drawn_values)
        if self.split.is_split and self.bound[slots].any():
            token_ids = self.split.of_first_rank(token_ids)
        return token_ids, logprobs

    def draft(self, logits: torch.Tensor, slots: Int32s, positions: Int32s, state: Slots) -> torch.Tensor:
        """Draft tokens [n] as `sample` would draw them from these logits, without a grammar's masks."""
        return self._drawn(self.split.whole(logits.float()), slots, positions, state, None)[0]

    def _drawn(
        self, logits: torch.Tensor, slots: Int32s, positions: Int32s, state: Slots, masks: TokenMasks | None
    ) -> tuple[torch.Tensor, NDArray[np.int64], torch.Tensor | None]:
        """Token ids [n] from all ranks' logits; the rows that were drawn from edited logits, and these logits."""
        token_ids = tokens_of_keys_torch(self._keys(logits, slots, positions))
        drawn = self._float(sample.TEMPERATURE, slots) > 0
        others = self.penalised[slots] | (self.filtered[slots] & drawn) | self.wants_second_pass(slots, positions)
        rows, chosen = np.flatnonzero(others), None
        if len(rows):
            index = self.upload(rows)
            chosen = logits.index_select(0, index)
            failed = token_ids[index] < 0
            self.edit_logits(chosen, slots[rows], positions[rows])
            if masks is not None:
                at = np.searchsorted(rows, masks.numbers)
                apply_bitmask_torch(chosen, self.upload(at), self.upload(masks.words))
                failed[self.upload(np.searchsorted(rows, masks.failed))] = True
            token_ids[index] = self._choose(chosen, slots[rows], positions[rows], state).masked_fill_(failed, -1)
        return token_ids, rows, chosen

    def _choose(self, logits: torch.Tensor, slots: Int32s, positions: Int32s, state: Slots) -> torch.Tensor:
        """Token ids [n] for rows that need more than the best token by the model's logits. Changes `logits`."""
        if self.penalised[slots].any():
            where, params = (self.upload(slots), self.upload(positions)), self.upload(self.rows)
            penalise_torch(logits, *where, state.tokens, params, all_rows=True)
        rows = np.flatnonzero(self.filtered[slots] & (self._float(sample.TEMPERATURE, slots) > 0))
        if len(rows):
            index, params = self.upload(rows), self.upload(self.rows[slots[rows]])
            kept = logits.index_select(0, index)
            scaled = kept / params.view(torch.float32)[:, sample.TEMPERATURE, None]
            bounds = self.filter_bounds(scaled, sample.filters_of(params))
            logits.index_copy_(0, index, kept.masked_fill_(scaled < bounds[:, None], -torch.inf))
        return tokens_of_keys_torch(self._keys(logits, slots, positions, checked=False))

    def _keys(
        self, logits: torch.Tensor, slots: Int32s, positions: Int32s, first: int = 0, checked: bool = True
    ) -> torch.Tensor:
        """The best keys [n] of these rows, with noise where there is a temperature."""
        seeds = self.rows[slots, sample.SEED_LOW : sample.SEED_HIGH + 1].view(np.int64)[:, 0]
        temperatures = self._float(sample.TEMPERATURE, slots)
        uploaded = self.upload(temperatures), self.upload(seeds), self.upload(positions)
        return self.drawn_keys(logits, *uploaded, first, checked)

    def _float(self, column: int, slots: Int32s) -> NDArray[np.float32]:
        values: NDArray[np.float32] = self.rows[slots, column].view(np.float32)
        return values
