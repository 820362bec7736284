"""CpuSteps: steps with torch kernels. The host plans inputs and gathers, and a step runs when its result is read.

This is a CPU's path, and the twin that every other path is tested against (C7).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import msgspec
import numpy as np
import torch

from runtime.core.plan import EMPTY, StepPlan, StepResult, joined
from runtime.kernels.attention.attention_torch import AttentionShape
from runtime.models.decoder import Decoder
from runtime.worker.cpu.decode_tapes import DecodeTapes
from runtime.worker.cpu.host_copies import HostCopies
from runtime.worker.cpu.inputs import build_decode_input, build_input
from runtime.worker.cpu.pinned import pin_plan
from runtime.worker.cpu.sampler import Sampler
from runtime.worker.cpu.slots import Slots
from runtime.worker.extras import ImageEncoder, MaskSource, Needs, StepExtra, StepWork, TokenMasks
from runtime.worker.kv_cache import KVCache
from runtime.worker.ranks.split_logits import SplitLogits
from runtime.worker.steps import Steps, make_result


class CpuSteps(Steps):
    """The requests' slots and parameters, and the order of a step's parts."""

    asynchronous = False

    def __init__(
        self,
        decoder: Decoder,
        cache: KVCache,
        num_slots: int,
        max_model_len: int,
        eos_token_ids: tuple[int, ...],
        extras: Sequence[StepExtra] = (),
        masks: MaskSource | None = None,
        encoder: ImageEncoder | None = None,
    ) -> None:
        super().__init__(decoder, cache, num_slots, max_model_len, extras, masks, encoder)
        self.attention_shapes = [
            AttentionShape(
                num_heads=decoder.spec.num_heads,
                num_kv_heads=group.num_kv_heads,
                blocks_apart=1 if cache.spec.is_mixed else cache.num_blocks,
                block_size=cache.block_size,
                dtype=decoder.numerics.dtype,
                device=cache.device,
                exact=decoder.numerics.deterministic,
            )
            for group in cache.spec.groups
        ]
        split = SplitLogits(decoder.spec.whole.vocab_size, decoder.communicator)
        self.copies, kernels = HostCopies(cache.device), decoder.kernels
        self.is_tiled = kernels.launcher is not None
        self.sampler: Sampler = Sampler(
            num_slots, split.vocab_size, eos_token_ids, cache.device, split, kernels.drawn_keys, kernels.filter_bounds
        )
        self.reset()

    def reset(self) -> None:
        super().reset()
        max_blocks = -(-self.max_model_len // self.cache.block_size)
        has_states = self.cache.states is not None
        factors = self.cache.table_factors
        self.slots = Slots(self.num_slots, self.max_model_len, max_blocks, self.cache.device, has_states, factors)
        launcher = self.decoder.kernels.launcher
        self.tapes = None if launcher is None else DecodeTapes(self.decoder, self.cache, launcher)
        self.poisoned = False  # some step had a non-finite value, so free blocks may hold one

    def drop_tapes(self) -> None:
        """Forget the tapes, which hold the decoder's weights."""
        if self.tapes is not None:
            self.tapes = DecodeTapes(self.decoder, self.cache, self.tapes.launcher)

    def _launch(self, plan: StepPlan) -> Callable[[], StepResult]:
        if plan.num_steps > 1:
            return lambda: joined([self._execute(one) for one in plan.expanded()])
        return partial(self._execute, plan)

    @torch.inference_mode()
    def _execute(self, plan: StepPlan) -> StepResult:
        self._free_and_open(plan)
        for new in plan.new:
            self.slots.add(new)
        if plan.snapshots.size:
            self.slots.write_snapshots(plan.snapshots)
        self.slots.write_tables(plan.block_table_writes)
        given = drafts = plan.draft_token_ids
        if self.head is not None and (drafts < 0).any():
            drafts = self.head.drafts_of(plan)
            plan = msgspec.structs.replace(plan, draft_token_ids=np.maximum(drafts, 0))  # 0 in place of missing ones
        if len(plan.draft_token_ids):
            self.slots.write_draft_tokens(plan)
        self._start_transfers(plan)
        if not len(plan.slots):
            return StepResult(plan.step_id, EMPTY)
        if self.poisoned:
            self._clear_fresh_blocks(plan)
        work = self._forward(plan)
        for extra in self.extras:
            extra.run(work)
        masks = None if self.masks is None else self.masks.masks(plan)
        if len(work.slots):
            self._sample(work, masks)
        if masks is not None:
            work.reports.append(masks.report)
        result = make_result(plan.step_id, work.token_ids.cpu(), work.reports)
        if self.head is not None:
            result.draft_token_ids = EMPTY if drafts is given else drafts
            if not self.head.run(work, self.slots, drafts):
                self.poisoned = True
                self.cache.clear(0)  # rows may have written there, and other groups' layers read block 0
        return result

    def _forward(self, plan: StepPlan) -> StepWork:
        if self.tapes is not None and self._is_decode(plan) and self.tapes.takes(len(plan.slots)):
            return self._replayed(plan, self.tapes)
        self._begin_forward(plan)
        step = build_input(plan, self.slots, self.attention_shapes, self.is_tiled, self.cache.spec.groups, self.images)
        step.batch.embeds = self._embeds(plan, step.last - plan.num_tokens + 1, self.copies)
        if self.head is not None:
            step.batch.taps = self.head.taps(len(step.batch.token_ids))
        hidden = self.decoder.forward(step.batch, self.layers)
        if not hidden.sum(dtype=torch.float32).isfinite():
            self.poisoned = True
        return StepWork(
            plan, step.sampled_slots, step.sampled_positions, self.slots.flat_tokens, self.max_model_len, self.copies,
            hidden=hidden, last=step.last, sampled_states=hidden.index_select(0, self.copies.upload(step.sampled)),
            taps=step.batch.taps,
        )  # fmt: skip

    def _replayed(self, plan: StepPlan, tapes: DecodeTapes) -> StepWork:
        """Run decode rows by a tape. The processor's caches are cold after it: each torch operation takes
        about 50 microseconds."""
        step = build_decode_input(plan, self.slots, self.cache.block_size, self.images)
        hidden, logits = tapes.run(step.batch)
        return StepWork(
            plan, step.sampled_slots, step.sampled_positions, self.slots.flat_tokens, self.max_model_len, self.copies,
            hidden=hidden, last=step.last, sampled_states=hidden, logits=logits,
        )  # fmt: skip

    def _is_decode(self, plan: StepPlan) -> bool:
        """True if a tape may compute the step: each row has one token and samples one, without an adapter, and no extra
        reads states. An extra may compute logits, and they would replace the tape's. Tapes read no embeddings, and
        keep no layer's inputs for a head."""
        if plan.has_images or any(extra.needs(plan) is not Needs.NOTHING for extra in self.extras):
            return False
        if self.head is not None and self.head.head.spec.taps:
            return False
        samples = bool((plan.num_tokens == 1).all() and (plan.num_samples == 1).all())
        return samples and not self.images.reach(plan) and not self.slots.adapters[plan.slots].any()

    def _sample(self, work: StepWork, masks: TokenMasks | None) -> None:
        if not len(work.logits):
            work.logits = self.decoder.logits(work.sampled_states)
        token_ids, logprobs = self.sampler.sample(work.logits, work.slots, work.positions, self.slots, masks)
        if self.sampler.pinned_acceptance is not None:
            pin_plan(work.plan, token_ids, work.slots, work.positions, self.num_slots, self.sampler.pinned_acceptance)
        work.token_ids = token_ids
        if (token_ids.cpu().numpy() < 0).any():  # its states are not finite, and neither are its keys and values
            self.poisoned = True
        if logprobs is not None:
            work.reports.append(logprobs.downloaded(self.copies.download).report)
        if self.masks is not None and masks is not None:
            self.masks.sampled(masks, token_ids.cpu().numpy)
        at = work.slots.astype(np.int64) * self.max_model_len + work.positions
        self.slots.write_sampled(self.copies.upload(at), token_ids)

    def _clear_fresh_blocks(self, plan: StepPlan) -> None:
        """Zero the blocks that rows of this step begin to fill. Masked positions must be finite, and a block's last
        request may have left other values (C9: a fault stays with its request)."""
        starts = np.full(self.num_slots, np.iinfo(np.int32).max, np.int32)
        starts[plan.slots] = plan.num_computed
        slots, index, blocks = plan.block_table_writes
        index = index % self.slots.tables.shape[2]
        fresh = blocks[index >= -(-starts[slots] // self.cache.block_size)]
        self.cache.clear(self.copies.upload(fresh.astype(np.int64)))
