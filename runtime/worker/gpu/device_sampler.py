"""DeviceSampler: the tokens of `Sampler`, drawn by Triton kernels from parameters on the device, without host waits."""

from __future__ import annotations

import numpy as np
import torch

from runtime.base.arrays import Int32s
from runtime.kernels.sampling.automata import AT, FIRST
from runtime.kernels.sampling.bitmask import apply_bitmask_triton
from runtime.kernels.sampling.penalties import NUM_TABLES, penalise_triton
from runtime.kernels.sampling.sample import OwnLogits, Resample, sample_tokens_triton, write_tokens_triton
from runtime.kernels.sampling.wanted_logits import wanted_logits_triton
from runtime.worker.extras import TokenMasks
from runtime.worker.gpu.transfers import Transfers
from runtime.worker.logprobs import Logprobs
from runtime.worker.ranks.split_logits import SplitLogits
from runtime.worker.slot_sampling import SlotSampling


class DeviceSampler(SlotSampling):
    """Samples in two passes. `sample` serves every row by penalties, temperature, filters, seed and position, and a
    graph can capture it. `resample`, the second pass, then corrects the rows that need more.

    `DeviceSlots` copies `rows`, the parameters of the slots, to the device."""

    def __init__(
        self,
        num_slots: int,
        vocab_size: int,
        eos_token_ids: tuple[int, ...],
        transfers: Transfers,
        split: SplitLogits | None = None,
    ) -> None:
        super().__init__(num_slots, vocab_size, eos_token_ids, transfers, split)
        # Captured graphs read it at its address.
        self._tables = torch.zeros((NUM_TABLES, vocab_size), dtype=torch.int32, device=transfers.device)

    def sample(
        self,
        logits: torch.Tensor,  # [n, vocab] float32, or a rank's part. Penalties change them in place
        slots: torch.Tensor,  # [n] int32
        positions: torch.Tensor,  # [n] int32, positions to be sampled
        tokens: torch.Tensor,  # [num_slots + 1, max_model_len] int32 in DeviceSlots; receives the sampled tokens
        params: torch.Tensor,  # [num_slots + 1, NUM_PARAMS] int32 in DeviceSlots
        filters: bool = True,  # False if no row has a filter
        penalties: bool = True,  # False if no row has a penalty
    ) -> torch.Tensor:
        """Token ids [n] int32, -1 where the logits are not finite (C9)."""
        own = None
        if self.split.is_split:
            own = OwnLogits(logits, self.split.own_ids.start, wanted_logits_triton(slots, positions, params))
            if filters or penalties:
                logits = self.split.whole(logits, own.wanted)
        if penalties:
            penalise_triton(logits, slots, positions, tokens, params, False, self._tables)
        answers = sample_tokens_triton(logits, slots, positions, tokens, params, filters=filters, own=own)
        return answers if own is None else write_tokens_triton(self.split.best(answers), slots, positions, tokens)

    def resample(
        self,
        logits: torch.Tensor,  # what `sample` got; changed in place for rows that are only masked
        token_ids: torch.Tensor,  # [n] int32 from `sample`; changed in place, like `tokens`
        host_slots: Int32s,  # [n]
        host_positions: Int32s,  # [n]
        tokens: torch.Tensor,
        params: torch.Tensor,
        masks: TokenMasks | None = None,
    ) -> Logprobs | None:
        """Correct the rows that need more than `sample`. Returns the log-probabilities that rows report."""
        wanting = self.wants_second_pass(host_slots, host_positions)
        if self.split.is_split:
            wanted = wanting | (self.num_logprobs[host_slots] >= 0)
            logits = self.split.whole(logits, self.upload(wanted.astype(np.int32)))
        if masks is not None:
            only_masked = self.only_masked[host_slots] & (host_positions >= self.held_until[host_slots])
            if only_masked[self.bound[host_slots]].all():
                rows = np.flatnonzero(only_masked)
                self._resample_masked(logits, token_ids, rows, host_slots, host_positions, tokens, params, masks)
                wanting, masks = wanting & ~only_masked, None
        rows, chosen = np.flatnonzero(wanting), None
        if len(rows):
            of_rows = host_slots[rows], host_positions[rows]
            index, slots, positions = self.upload(rows.astype(np.int32), *of_rows).view(3, -1)
            chosen = logits.index_select(0, index).float()  # a copy, even where no type changes
            self.edit_logits(chosen, *of_rows)
            tracked = None if masks is None else self._mask(chosen, token_ids, rows, masks)
            if self.penalised[of_rows[0]].any():
                penalise_triton(chosen, slots, positions, tokens, params, True, self._tables)
            sample_tokens_triton(chosen, slots, positions, tokens, params, Resample(token_ids, index, gathered=True))
            if masks is not None and masks.automata is not None and tracked is not None:
                masks.automata.advance(token_ids, tracked)
        drawn = self.drawn_logprobs(logits, token_ids, host_slots, rows, chosen, is_filtered=False)
        del chosen  # before log-probabilities want as much
        if self.split.is_split and self.bound[host_slots].any():
            self._take_first_ranks(token_ids, host_slots, host_positions, tokens)
        return self.logprobs(logits, token_ids, host_slots, drawn)

    def _take_first_ranks(
        self, token_ids: torch.Tensor, host_slots: Int32s, host_positions: Int32s, tokens: torch.Tensor
    ) -> None:
        """Replace the step's token ids by rank 0's, since only rank 0 follows grammars."""
        token_ids.copy_(self.split.of_first_rank(token_ids))
        slots, positions = self.upload(host_slots, host_positions).view(2, -1).long()
        tokens[slots, positions] = token_ids.clamp(min=0)

    def _resample_masked(
        self,
        logits: torch.Tensor,
        token_ids: torch.Tensor,
        rows: np.ndarray,  # [m] all rows with a grammar that the second pass only masks
        host_slots: Int32s,
        host_positions: Int32s,
        tokens: torch.Tensor,
        params: torch.Tensor,
        masks: TokenMasks,
    ) -> None:
        """Resample rows that are only masked, in place: the logits are not copied."""
        of_rows = rows.astype(np.int32), host_slots[rows], host_positions[rows]
        parts = [*of_rows, masks.numbers, masks.failed, masks.tracked.reshape(-1), masks.words.reshape(-1)]
        sent = self.upload(*parts).split([len(part) for part in parts])
        index, slots, positions, numbers, failed, tracked, words = sent
        if len(numbers):
            apply_bitmask_triton(logits, numbers, words.view(masks.words.shape))
        if len(failed):
            token_ids.index_fill_(0, failed.long(), -1)
        automata = masks.automata if len(masks.tracked) else None
        tracked = tracked.view(masks.tracked.shape)
        if automata is not None:
            automata.mask(logits, tracked)
        sample_tokens_triton(logits, slots, positions, tokens, params, Resample(token_ids, index, gathered=False))
        if automata is not None:
            automata.advance(token_ids, tracked)

    def _mask(
        self,
        logits: torch.Tensor,  # [m, vocab] float32, changed in place
        token_ids: torch.Tensor,  # the step's tokens; -1 where a grammar fails
        rows: np.ndarray,  # [m] numbers of the samples that these logits belong to
        masks: TokenMasks,
    ) -> torch.Tensor | None:
        """Rule out tokens that grammars do not allow. Returns the rows that automata on the device follow."""
        if len(masks.numbers):
            at = np.searchsorted(rows, masks.numbers).astype(np.int32)
            apply_bitmask_triton(logits, self.upload(at), self.upload(masks.words))
            token_ids.index_fill_(0, self.upload(masks.failed.astype(np.int64)), -1)
        if not len(masks.tracked) or masks.automata is None:
            return None
        masks.tracked[:, AT] = np.searchsorted(rows, masks.tracked[:, FIRST])
        tracked = self.upload(masks.tracked)
        masks.automata.mask(logits, tracked)
        return tracked
