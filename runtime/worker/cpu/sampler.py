"""Sampler: turns logits into tokens with torch. The twin that DeviceSampler is tested against (C7)."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray

from runtime.core.plan import Int32s
from runtime.kernels.sampling import sample
from runtime.kernels.sampling.bitmask import apply_bitmask_torch
from runtime.kernels.sampling.gumbel import gumbel_noise, noise_keys
from runtime.kernels.sampling.penalties import penalise_torch
from runtime.kernels.sampling.token_keys import FAILED, best_keys_torch, tokens_of_keys_torch
from runtime.kernels.sampling.top_k_top_p import top_k_top_p_bounds_torch
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
    ) -> None:
        super().__init__(num_slots, vocab_size, eos_token_ids, HostCopies(device), split)
        self.vocab_ids = torch.arange(vocab_size, dtype=torch.int32, device=device)

    def sample(
        self,
        logits: torch.Tensor,  # [n, vocab] of the model; of a rank, its part
        slots: Int32s,  # [n]
        positions: Int32s,  # [n] of the tokens to be sampled
        state: Slots,
        masks: TokenMasks | None = None,
    ) -> tuple[torch.Tensor, Logprobs | None]:
        """Token ids [n] int64, -1 where the logits are not finite (C9), and the log-probabilities that rows report."""
        logits = logits.float()  # first: a CPU's reductions over bfloat16 are several times slower
        if self.split.is_split and not self.needs_all_logits(slots, positions):
            return self._best_of_parts(logits, slots, positions), None
        logits = self.split.whole(logits)
        finite = logits.sum(-1).isfinite()
        token_ids = logits.argmax(-1)
        drawn = self._float(sample.TEMPERATURE, slots) > 0
        rows = np.flatnonzero(drawn | self.penalised[slots] | self.wants_second_pass(slots, positions))
        if len(rows):
            index = self.upload(rows)
            chosen = logits.index_select(0, index)
            self.edit_logits(chosen, slots[rows], positions[rows])
            if masks is not None:
                at = np.searchsorted(rows, masks.numbers)
                apply_bitmask_torch(chosen, self.upload(at), self.upload(masks.words))
                finite[self.upload(masks.failed).long()] = False
            token_ids[index] = self._choose(chosen, slots[rows], positions[rows], state)
        logprobs = self.logprobs(logits, token_ids, slots)
        token_ids.masked_fill_(~finite, -1)
        if self.split.is_split and self.bound[slots].any():
            token_ids = self.split.of_first_rank(token_ids)
        return token_ids, logprobs

    def _best_of_parts(self, logits: torch.Tensor, slots: Int32s, positions: Int32s) -> torch.Tensor:
        """Token ids [n] like `sample`, of rows that need only the best token of all ranks."""
        failed, ids = ~logits.sum(-1).isfinite(), self.split.own_ids
        if len(rows := np.flatnonzero(self._float(sample.TEMPERATURE, slots) > 0)):
            index, chosen = self.upload(rows), (slots[rows], positions[rows])
            scores = self._scores(logits.index_select(0, index), *chosen, self.vocab_ids[ids.start : ids.stop])
            logits = logits.index_copy(0, index, scores)
        keys = best_keys_torch(logits, ids.start).masked_fill_(failed, FAILED)
        return tokens_of_keys_torch(self.split.best(keys))

    def _choose(self, logits: torch.Tensor, slots: Int32s, positions: Int32s, state: Slots) -> torch.Tensor:
        """Token ids [n] of rows that need more than the best token. Changes `logits`."""
        if self.penalised[slots].any():
            where, params = (self.upload(slots), self.upload(positions)), self.upload(self.rows)
            penalise_torch(logits, *where, state.tokens, params, all_rows=True)
        rows = np.flatnonzero(self._float(sample.TEMPERATURE, slots) > 0)
        if len(rows) == len(slots):
            return self._draw(logits, slots, positions)
        token_ids = logits.argmax(-1)
        if len(rows):
            index = self.upload(rows)
            token_ids[index] = self._draw(logits.index_select(0, index), slots[rows], positions[rows])
        return token_ids

    def _draw(self, logits: torch.Tensor, slots: Int32s, positions: Int32s) -> torch.Tensor:
        return self._scores(logits, slots, positions, self.vocab_ids).argmax(-1)

    def _scores(
        self,
        logits: torch.Tensor,  # [n, m], changed in place
        slots: Int32s,
        positions: Int32s,
        ids: torch.Tensor,  # [m] int32 of these tokens; all of them if a row has a filter
    ) -> torch.Tensor:
        """Scores [n, m] of rows with a temperature. The token with the best score is drawn."""
        logits.div_(self.upload(self._float(sample.TEMPERATURE, slots))[:, None])
        rows = np.flatnonzero(self.filtered[slots])
        if len(rows):
            index, subset = self.upload(rows), slots[rows]
            chosen = logits.index_select(0, index)
            top_k = self.upload(self.rows[subset, sample.TOP_K].astype(np.int64))
            top_p, min_p = (self.upload(self._float(column, subset)) for column in (sample.TOP_P, sample.MIN_P))
            bounds = top_k_top_p_bounds_torch(chosen, top_k, top_p, min_p)
            logits.index_copy_(0, index, chosen.masked_fill_(chosen < bounds[:, None], -torch.inf))
        seeds = self.rows[slots, sample.SEED_LOW : sample.SEED_HIGH + 1].view(np.int64)[:, 0]
        keys = noise_keys(self.upload(seeds), self.upload(positions))
        return logits.add_(gumbel_noise(keys[:, :, None], ids))

    def _float(self, column: int, slots: Int32s) -> NDArray[np.float32]:
        values: NDArray[np.float32] = self.rows[slots, column].view(np.float32)
        return values
