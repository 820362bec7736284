"""CpuHead: a head's passes in a step of CpuSteps. The twin that the GPU's are tested against (C7).

    target's row           positions  a .. b        samples at positions up to b + 1
    extend                            a+1 .. b+1    token of each position, with the target's feature of the one before
    first row after a hit             a .. b+1      position a has the feature that its prefix's last block left
    draft 1                           q+1           from the extend's row at q, the last accepted sample
    single passes                     q+1, q+2 ..   each draft token, with the last pass's result in place of a feature

Entries after q are overwritten: the next extend covers the positions after q again.

A head without a cache (HeadSpec.has_cache) has only single passes. Draft 1 comes from the sample's token at q, with the
target's feature of q - 1. All passes of a round see the target's keys up to q - 1.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np
import torch

from runtime.base.arrays import Int32s
from runtime.base.types import MAX_DRAFT_TOKENS
from runtime.core.plan import EMPTY, EMPTY_TABLE, NewSlot, StepPlan
from runtime.kernels.attention.attention_torch import AttentionShape
from runtime.kernels.attention.stored_kv import KVLayer
from runtime.models.decoder import Decoder
from runtime.models.forward_batch import Taps
from runtime.models.heads.head import DraftHead
from runtime.worker.cpu.inputs import StepInput, build_input
from runtime.worker.cpu.sampler import Sampler
from runtime.worker.cpu.slots import Slots
from runtime.worker.extras import StepWork
from runtime.worker.heads.block_features import BlockFeatures
from runtime.worker.heads.head_rows import ExtendRows, IntArray, accepted_samples, extend_rows, tokens_of
from runtime.worker.image_positions import ImagePositions
from runtime.worker.kv_cache import KVCache
from runtime.worker.slot_sampling import MASKED_LOGIT


class HeadInputs(NamedTuple):
    """What a head reads from its runner's steps."""

    sampler: Sampler
    images: ImagePositions
    shapes: Sequence[AttentionShape]  # each KV group's
    is_tiled: bool  # attention has compiled kernels


class CpuHead:
    """The drafts of each slot, and the passes that make them."""

    def __init__(
        self, head: DraftHead, decoder: Decoder, cache: KVCache, num_slots: int, max_model_len: int, inputs: HeadInputs
    ) -> None:
        self.head, self.decoder, self.cache, self.inputs = head, decoder, cache, inputs
        self.max_model_len, self.layers = max_model_len, cache.layers[decoder.spec.num_layers :]
        first, num_heads = self.layers[0], head.spec.decoder.num_heads
        assert isinstance(first, KVLayer), "a head has no recurrent states"
        self.shapes = [replace(shape, num_heads=num_heads) for shape in inputs.shapes]
        sizes, self.has_cache = (cache.num_blocks, head.spec.block_width), head.spec.has_cache
        self.features = BlockFeatures(*sizes, decoder.numerics.dtype, cache.device, first.group)
        self.drafts = np.full((num_slots, MAX_DRAFT_TOKENS), -1, np.int32)  # -1 for a draft that is missing
        self.is_new = np.zeros(num_slots, bool)  # slots without a row so far

    def reset(self) -> None:
        """Forget all requests and blocks."""
        self.drafts[:], self.is_new[:] = -1, False
        self.features.reset()

    def add(self, new: NewSlot) -> None:
        """A request enters its slot."""
        self.drafts[new.slot], self.is_new[new.slot] = -1, True

    def remove(self, slot: int) -> None:
        """A request leaves its slot."""

    def drafts_of(self, plan: StepPlan) -> Int32s:
        """The plan's draft tokens, with the head's in place of DEVICE_DRAFT; -1 for a missing one."""
        rows, numbers = tokens_of(np.zeros_like(plan.draft_lens), plan.draft_lens)
        own = self.drafts[plan.slots[rows], numbers]
        return np.where(plan.draft_token_ids < 0, own, plan.draft_token_ids).astype(np.int32)

    def taps(self, num_tokens: int) -> Taps | None:
        """Where the target's layers leave the features of this many tokens; None if they are its hidden states."""
        spec, numerics = self.head.spec, self.decoder.numerics
        if not spec.taps:
            return None
        return Taps(
            spec.taps, torch.empty((num_tokens, spec.feature_width), dtype=numerics.dtype, device=numerics.device)
        )

    def run(self, work: StepWork, slots: Slots, draft_token_ids: Int32s) -> bool:
        """Extend the head's keys and values by the step's rows, and draft `plan.next_drafts` tokens after each row that
        samples. `draft_token_ids` are the plan's by `drafts_of`. Returns False if a value is not finite (C9)."""
        plan, head = work.plan, self.head
        assert work.last is not None, "no graphs run on a CPU"
        self.features.forget_loaded(plan, lambda blocks: _upload(blocks, self.features.values))
        self.drafts[plan.slots[plan.num_samples > 0]] = -1
        found = None
        if plan.next_drafts and len(work.slots):
            found = accepted_samples(plan, draft_token_ids, work.token_ids.cpu().numpy())
        elif not self.has_cache:
            return True
        combined = head.combined(self.decoder.normed(work.hidden) if work.taps is None else work.taps.out)
        first = work.last - plan.ends + 1  # index that each row's position 0 would have
        if found is not None and not self.has_cache:
            x = combined[_upload(first[found.rows] + found.positions - 1, combined)]
            self._draft(plan.next_drafts, x, plan.slots[found.rows], found.positions, slots)
            return True  # nothing that is not finite was stored
        self._keep_features(plan, slots, combined, first)
        extend = extend_rows(plan, self.is_new, self.cache.block_size, self.max_model_len)
        self.is_new[plan.slots] = False
        if not len(extend.rows):
            return True
        step = self._input(extend.plan, slots)
        hidden = self._features_before(extend, slots, combined, first, step.last)
        step.batch.only_stores = found is None
        x = head.forward(step.batch, hidden, self.layers)
        finite = _is_finite(x)
        if found is not None:
            own = np.searchsorted(extend.rows, found.rows)  # a sample has a position, so its row is here
            index = step.last[own] - (extend.plan.ends[own] - 1 - found.positions)
            finite &= self._draft(
                plan.next_drafts, x[_upload(index, x)], plan.slots[found.rows], found.positions, slots
            )
        return finite

    def _keep_features(self, plan: StepPlan, slots: Slots, combined: torch.Tensor, first: IntArray) -> None:
        """Keep the features of tokens that end a block."""
        size = self.cache.block_size
        rows, positions = tokens_of(plan.num_computed, plan.num_tokens)
        ends = np.flatnonzero((positions + 1) % size == 0)
        rows, positions = rows[ends], positions[ends]
        blocks = self._blocks(slots, plan.slots[rows], positions // size)
        self.features.values[_upload(blocks, combined)] = combined[_upload(first[rows] + positions, combined)]

    def _blocks(self, slots: Slots, rows: Int32s, index: IntArray) -> IntArray:
        """Ids of the blocks at these indices in slots' tables."""
        group = self.features.group
        blocks: IntArray = slots.tables[group, rows, index].astype(np.int64) // slots.factors[group]
        return blocks

    def _features_before(
        self, extend: ExtendRows, slots: Slots, combined: torch.Tensor, first: IntArray, last: IntArray
    ) -> torch.Tensor:
        """[num_tokens, hidden_size] the features of the positions before the extend's tokens, in their order."""
        plan, size = extend.plan, self.cache.block_size
        rows, positions = tokens_of(plan.num_computed, plan.num_tokens)
        sources, order = first[extend.rows][rows] + positions - 1, (last - plan.ends + 1)[rows] + positions
        if extend.continued.any():
            begins = plan.num_computed[extend.continued]
            blocks = self._blocks(slots, plan.slots[extend.continued], begins // size - 1)
            at = (np.cumsum(plan.num_tokens) - plan.num_tokens)[extend.continued]
            sources[at] = len(combined) + np.arange(len(blocks))
            combined = torch.cat((combined, self.features.values[_upload(blocks, combined)]))
        index = np.empty_like(sources)
        index[order] = sources
        return combined.index_select(0, _upload(index, combined))

    def _draft(self, count: int, x: torch.Tensor, rows: Int32s, positions: Int32s, slots: Slots) -> bool:
        """Draft tokens after the samples at `positions` [n] in slots `rows` [n].

        `x` [n, ...] are the extend's results, or without a cache the features before the samples. Returns False if a
        value is not finite."""
        finite, samples = True, positions
        for number in range(count):
            positions = positions + 1
            inside = np.flatnonzero(positions < self.max_model_len)
            if len(inside) < len(rows):
                x, rows, positions, samples = x[_upload(inside, x)], rows[inside], positions[inside], samples[inside]
            if not len(rows):
                break
            if number or not self.has_cache:
                hidden = self.head.recycled(x) if number else x
                x = self._single(hidden, rows, positions - 1, samples - 1, slots)
                finite &= _is_finite(x)
            token_ids = self.inputs.sampler.draft(self._logits(x), rows, positions, slots)
            slots.write_sampled(_upload(rows.astype(np.int64) * self.max_model_len + positions, x), token_ids)
            self.drafts[rows, number] = token_ids.cpu().numpy()
        return finite

    def _logits(self, x: torch.Tensor) -> torch.Tensor:
        logits = self.head.logits(x)
        # Ids outside a draft vocabulary have -inf, and a row with an infinity would count as failed.
        return logits.clamp(min=MASKED_LOGIT) if self.head.spec.num_ids else logits

    def _single(
        self, hidden: torch.Tensor, rows: Int32s, positions: Int32s, last_keys: Int32s, slots: Slots
    ) -> torch.Tensor:
        """One more pass for the tokens at `positions` [n], with `hidden` [n, hidden_size] of the positions before them.

        Without a cache, rows see keys up to `last_keys` [n]."""
        ones = np.ones_like(rows)
        starts = positions if self.has_cache else last_keys
        step = self._input(StepPlan(0, EMPTY, [], EMPTY_TABLE, rows, starts, ones, ones), slots)
        last = _upload(step.last, hidden)
        if not self.has_cache:
            tokens = slots.flat_tokens[_upload(rows.astype(np.int64) * self.max_model_len + positions, hidden)]
            step.batch.token_ids.index_copy_(0, last, tokens.long())
        hidden = torch.empty_like(hidden).index_copy_(0, last, hidden)
        return self.head.forward(step.batch, hidden, self.layers).index_select(0, last)

    def _input(self, plan: StepPlan, slots: Slots) -> StepInput:
        inputs = self.inputs
        step = build_input(plan, slots, self.shapes, inputs.is_tiled, self.cache.spec.groups, inputs.images)
        step.batch.adapters = None  # the head has base weights
        return step


def _is_finite(x: torch.Tensor) -> bool:
    return bool(x.sum(dtype=torch.float32).isfinite())


def _upload(index: IntArray, like: torch.Tensor) -> torch.Tensor:
    """An index on another tensor's device."""
    return torch.from_numpy(index.astype(np.int64)).to(like.device)
