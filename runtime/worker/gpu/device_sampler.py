"""The sampler whose parameters are on the device: runtime.worker.cpu.sampler's tokens, without a wait of the host."""

from __future__ import annotations

import numpy as np
import torch

from runtime.core.plan import Int32s
from runtime.features.grammar_state import Masks
from runtime.kernels.sampling.automata import AT, FIRST
from runtime.kernels.sampling.bitmask import apply_bitmask_triton
from runtime.kernels.sampling.logprobs import token_logprobs
from runtime.kernels.sampling.penalties import NUM_TABLES, penalise_triton
from runtime.kernels.sampling.sample import OwnLogits, Resample, sample_tokens_triton, write_tokens_triton
from runtime.kernels.sampling.wanted_logits import wanted_logits_triton
from runtime.worker.cpu.sampler import Logprobs
from runtime.worker.gpu.transfers import Transfers
from runtime.worker.ranks.split_logits import SplitLogits
from runtime.worker.slot_sampling import MASKED_LOGIT, SlotSampling


class DeviceSampler(SlotSampling):
    """Two parts: `sample` answers every row by penalties, temperature, filters, seed and position and can be captured
    in a graph; `resample` then corrects the rows that want more. The caller writes what `add` returns into the slot's
    columns of the state."""

    def __init__(
        self,
        num_slots: int,
        vocab_size: int,
        eos_token_ids: tuple[int, ...],
        transfers: Transfers,
        split: SplitLogits | None = None,
    ) -> None:
        super().__init__(num_slots, vocab_size, eos_token_ids)
        self._upload, self.split = transfers.upload, split or SplitLogits(vocab_size)
        # Captured graphs have its address.
        self._tables = torch.zeros((NUM_TABLES, vocab_size), dtype=torch.int32, device=transfers.device)

    def sample(
        self,
        logits: torch.Tensor,  # [n, vocab] float32, the model's own; penalties change them in place. Of ranks, a part
        slots: torch.Tensor,  # [n] int32
        positions: torch.Tensor,  # [n] int32, of the tokens to be sampled
        tokens: torch.Tensor,  # [num_slots + 1, max_model_len] int32, the state's; sampled tokens are written into it
        params: torch.Tensor,  # [num_slots + 1, NUM_PARAMS] int32, the state's
        filters: bool = True,  # False: no row has one
        penalties: bool = True,  # False: no row has one
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
        logits: torch.Tensor,  # as `sample` had them; of rows that are only masked they are changed in place
        token_ids: torch.Tensor,  # [n] int32, what `sample` returned; changed in place, as are the state's tokens
        host_slots: Int32s,  # [n]
        host_positions: Int32s,  # [n]
        tokens: torch.Tensor,
        params: torch.Tensor,
        masks: Masks | None = None,
    ) -> Logprobs | None:
        """Correct the rows that want more than `sample`; the log-probabilities asked for, on the device."""
        wanting = self.wants_second_pass(host_slots, host_positions)
        if self.split.is_split:
            wanted = wanting | (self.num_logprobs[host_slots] >= 0)
            logits = self.split.whole(logits, self._upload(wanted.astype(np.int32)))
        if masks is not None:
            only_masked = self.only_masked[host_slots] & (host_positions >= self.held_until[host_slots])
            if only_masked[self.bound[host_slots]].all():
                rows = np.flatnonzero(only_masked)
                self._resample_masked(logits, token_ids, rows, host_slots, host_positions, tokens, params, masks)
                wanting, masks = wanting & ~only_masked, None
        rows = np.flatnonzero(wanting)
        if len(rows):
            of_rows = host_slots[rows], host_positions[rows]
            index, slots, positions = self._upload(rows.astype(np.int32), *of_rows).view(3, -1)
            chosen = logits.index_select(0, index).float()  # a copy, even where no type changes
            self._hold_and_bias(chosen, *of_rows)
            tracked = None if masks is None else self._mask(chosen, token_ids, rows, masks)
            if self.penalised[of_rows[0]].any():
                penalise_triton(chosen, slots, positions, tokens, params, True, self._tables)
            sample_tokens_triton(chosen, slots, positions, tokens, params, Resample(token_ids, index, gathered=True))
            if masks is not None and masks.automata is not None and tracked is not None:
                masks.automata.advance(token_ids, tracked)
            del chosen  # before log-probabilities want as much
        if self.split.is_split and self.bound[host_slots].any():
            self._take_first_ranks(token_ids, host_slots, host_positions, tokens)
        return self._logprobs(logits, token_ids, host_slots)

    def _take_first_ranks(
        self, token_ids: torch.Tensor, host_slots: Int32s, host_positions: Int32s, tokens: torch.Tensor
    ) -> None:
        """The step's token ids of rank 0, which alone follows grammars, in the place of this rank's."""
        token_ids.copy_(self.split.of_first_rank(token_ids))
        slots, positions = self._upload(host_slots, host_positions).view(2, -1).long()
        tokens[slots, positions] = token_ids.clamp(min=0)

    def _resample_masked(
        self,
        logits: torch.Tensor,
        token_ids: torch.Tensor,
        rows: np.ndarray,  # [m] all that have a grammar; they want nothing else
        host_slots: Int32s,
        host_positions: Int32s,
        tokens: torch.Tensor,
        params: torch.Tensor,
        masks: Masks,
    ) -> None:
        """Resample rows that want nothing but their mask: in place, without a copy of the logits."""
        of_rows = rows.astype(np.int32), host_slots[rows], host_positions[rows]
        parts = [*of_rows, masks.numbers, masks.failed, masks.tracked.reshape(-1), masks.words.reshape(-1)]
        sent = self._upload(*parts).split([len(part) for part in parts])
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
        token_ids: torch.Tensor,  # of the step; -1 where a grammar fails
        rows: np.ndarray,  # [m] which samples of the step these logits are of
        masks: Masks,
    ) -> torch.Tensor | None:
        """Rule out what grammars do not allow; the rows whose automaton goes on by what is sampled."""
        if len(masks.numbers):
            at = np.searchsorted(rows, masks.numbers).astype(np.int32)
            apply_bitmask_triton(logits, self._upload(at), self._upload(masks.words))
            token_ids.index_fill_(0, self._upload(masks.failed.astype(np.int64)), -1)
        if not len(masks.tracked) or masks.automata is None:
            return None
        masks.tracked[:, AT] = np.searchsorted(rows, masks.tracked[:, FIRST])
        tracked = self._upload(masks.tracked)
        masks.automata.mask(logits, tracked)
        return tracked

    def _hold_and_bias(
        self,
        logits: torch.Tensor,  # [m, vocab] float32, changed in place
        host_slots: Int32s,  # [m]
        host_positions: Int32s,  # [m]
    ) -> None:
        """Logit bias, min_tokens, and the only ids that are allowed, in this order."""
        held = host_positions < self.held_until[host_slots]
        restricted, allowed, biased, stopped = [], [], [], []
        for row, slot in enumerate(host_slots.tolist()):
            if slot in self.allowed:
                restricted.append(row)
                allowed.append(row * self.vocab_size + self.allowed[slot])
            if slot in self.bias:
                ids, values = self.bias[slot]
                biased.append((row * self.vocab_size + ids, values))
            if held[row]:
                stopped.append(row * self.vocab_size + self.stops[slot])
        if biased:
            at, added = (self._upload(np.concatenate(parts)) for parts in zip(*biased, strict=True))
            logits.view(-1).index_add_(0, at, added)
        if stopped:
            logits.view(-1).index_fill_(0, self._upload(np.concatenate(stopped)), MASKED_LOGIT)
        if restricted:
            at = self._upload(np.concatenate(allowed))
            kept = logits.view(-1).index_select(0, at)
            logits.index_fill_(0, self._upload(np.array(restricted, np.int64)), -torch.inf)
            logits.view(-1).index_copy_(0, at, kept)

    def _logprobs(self, logits: torch.Tensor, token_ids: torch.Tensor, host_slots: Int32s) -> Logprobs | None:
        wanted = self.num_logprobs[host_slots]
        rows = np.flatnonzero(wanted >= 0)
        if not len(rows):
            return None
        index = self._upload(rows)
        ids = token_ids.index_select(0, index).long().clamp(min=0)  # a failed row's are not delivered
        scored = self.scored_ids(host_slots[rows])
        others = None if scored is None else self._upload(scored.reshape(-1)).view(scored.shape)
        chosen = logits.index_select(0, index).float()
        own, ranks, top_ids, top = token_logprobs(chosen, ids, int(wanted.max()), others)
        num_best = top.shape[1] - (0 if others is None else others.shape[1])
        return Logprobs(rows.astype(np.int32), num_best, ranks, own, top_ids, top)
