"""GpuHead: a head's passes in a step of GpuSteps, after the step's result has left. The host never waits for them.

    decode graph     a graph of the extend, on the rows and features that the step's graph has left
    other steps      launched kernels for the extend, on rows from the plan
    single passes    one graph by number of rows, replayed for each further draft token

Draft tokens are in the slots, where the next step verifies them, and in `DeviceSlots.drafts`. CpuHead has the rules.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import numpy as np
import torch

from runtime.base.arrays import Int32s
from runtime.core.plan import NewSlot, StepPlan, StepResult, last_tokens
from runtime.kernels.attention.stored_kv import KVLayer
from runtime.kernels.step.draft_rows import DRAFT_WIDTH, accept_drafts, keep_block_ends, keep_drafts
from runtime.models.heads.head import DraftHead
from runtime.worker.gpu.graph_runner import MAX_VERIFIED, DecodeShape, GraphRunner, Replayable
from runtime.worker.gpu.step_kernels import StepKernels
from runtime.worker.gpu.step_rows import MixedShape, token_offsets
from runtime.worker.gpu.transfers import PendingResult, Transfers
from runtime.worker.heads.block_features import BlockFeatures
from runtime.worker.heads.head_rows import ExtendRows, extend_rows, tokens_of
from runtime.worker.slot_sampling import MASKED_LOGIT

_MOST_ROWS = MAX_VERIFIED // 2  # rows in a step with draft tokens that has graphs


class GpuHead:
    """The head's buffers, graphs and launches."""

    def __init__(self, head: DraftHead, kernels: StepKernels, graph_runner: GraphRunner) -> None:
        """`kernels` leaves features for this head from now on."""
        kernels.head = head
        self.head, self.kernels, self.graph_runner = head, kernels, graph_runner
        self.cache, self.slots, self.dtype = kernels.cache, kernels.slots, kernels.decoder.numerics.dtype
        self.layers = self.cache.layers[kernels.decoder.spec.num_layers :]
        first, device = self.layers[0], self.cache.device
        assert isinstance(first, KVLayer), "a head has no recurrent states"
        self.has_cache = head.spec.has_cache
        self.features = BlockFeatures(self.cache.num_blocks, head.spec.block_width, self.dtype, device, first.group)
        self.tables, self.factor = self.slots.tables_of_groups[first.group], self.cache.table_factors[first.group]
        self.places = torch.zeros((4, kernels.max_rows), dtype=torch.int32, device=device)  # kernels/step/draft_rows.py
        self.index = torch.zeros(kernels.max_rows, dtype=torch.int32, device=device)
        self.last_keys = torch.zeros_like(self.index)  # position of the last key that a row sees, without a cache
        self.hidden = torch.zeros((kernels.max_rows, head.hidden_size), dtype=self.dtype, device=device)
        self.graphs: dict[tuple[DecodeShape, bool] | int, Replayable] = {}  # keys: (shape, drafts), or rows of a pass
        self.transfers = Transfers(device)
        self.is_new = np.zeros(self.slots.num_slots, bool)  # slots without a row so far
        self.made: PendingResult[Int32s] | None = None  # the draft tokens after the last step that made some
        self._ended: list[PendingResult[Int32s]] = []  # copies that are over when the next step is

    def reset(self) -> None:
        """Forget all requests and blocks."""
        self.is_new[:], self.made = False, None
        self.features.reset()

    def add(self, new: NewSlot) -> None:
        """A request enters its slot."""
        self.is_new[new.slot] = self.has_cache

    def remove(self, slot: int) -> None:
        """A request leaves its slot."""

    # ---- results ----------------------------------------------------------------------------------------------------

    def drafts_of(self, plan: StepPlan, made: PendingResult[Int32s] | None = None) -> Int32s:
        """The plan's draft tokens, with the head's in place of DEVICE_DRAFT; -1 for a missing one.

        Waits for the step that `made` them, which is the last one by default."""
        made = made or self.made
        if made is None:
            return plan.draft_token_ids
        rows, positions = last_tokens(plan, plan.draft_lens)
        own = made()[plan.slots[rows], positions % DRAFT_WIDTH]
        return np.where(plan.draft_token_ids < 0, own, plan.draft_token_ids).astype(np.int32)

    def watched(self, plan: StepPlan) -> Callable[[StepResult], StepResult]:
        """Called before the plan's step; the function that it returns completes the step's result."""
        made, ended, self._ended = self.made, self._ended, []
        has_drafts = bool((plan.draft_token_ids < 0).any())

        def complete(result: StepResult) -> StepResult:
            for copies in ended:
                copies()  # the step is over, so they are: their buffers are free again
            if has_drafts:
                result.draft_token_ids = self.drafts_of(plan, made)
            return result

        return complete

    # ---- passes -----------------------------------------------------------------------------------------------------

    def forget_loaded(self, plan: StepPlan) -> None:
        """Zero the features of blocks that the plan loads: a tier has keys and values alone."""
        if plan.loads is None:
            return
        self.transfers.begin()
        self.features.forget_loaded(plan, self.transfers.upload)
        self._end()

    def run(self, plan: StepPlan, shape: DecodeShape | MixedShape | None, features: torch.Tensor | None = None) -> None:
        """Queue the passes after a step, which ran as the graph of a shape, or left `features` [num_tokens, width]."""
        extend = extend_rows(plan, self.is_new, self.cache.block_size, self.slots.max_model_len)
        self.is_new[plan.slots] = False
        drafts = plan.next_drafts > 0 and bool(plan.num_samples.any())
        if not drafts and not self.has_cache:
            return
        is_captured = isinstance(shape, DecodeShape) and not extend.continued.any()
        if drafts or not is_captured:
            self.transfers.begin()
        if isinstance(shape, DecodeShape) and is_captured:
            self._replay((shape, drafts), partial(self._extend, shape, drafts))
            num_rows = shape.num_rows
        else:
            offsets = token_offsets(plan)
            if isinstance(shape, DecodeShape):
                offsets = (np.arange(len(plan.slots)) * shape.row_len - plan.num_computed).astype(np.int32)
            features = self.kernels.graph_features[: shape.num_tokens] if shape is not None else features
            assert features is not None
            num_rows = self._launch(plan, extend, self.head.combined(features), offsets, drafts)
        if drafts:
            for _ in range(plan.next_drafts - 1):
                self._replay(num_rows, partial(self._single, num_rows))
            made = self.transfers.download(self.slots.drafts).numpy()
            self.made = self._end(made.copy)
        elif not is_captured:
            self._end()

    def _end(self, result: Callable[[], Int32s] = lambda: np.zeros(0, np.int32)) -> PendingResult[Int32s]:
        self._ended.append(self.transfers.end(result))
        return self._ended[-1]

    def _replay(self, key: tuple[DecodeShape, bool] | int, run: Callable[[], None]) -> None:
        if (graph := self.graphs.get(key)) is None:
            run()
        else:
            graph.replay()

    def _extend(self, shape: DecodeShape, drafts: bool) -> None:
        """The extend after a decode graph, which has left its rows, one position further, and its features."""
        kernels, state, n = self.kernels, self.slots, shape.num_rows
        slots, own_counts, sample_slots, starts, *_ = shape.split(self.graph_runner.rows[: shape.num_ints])
        x = self.head.combined(kernels.graph_features[: shape.num_tokens])
        if self.has_cache:
            table = self.tables, self.factor, self.cache.block_size
            keep_block_ends(x, slots, starts, own_counts, *table, self.features.values)
            batch = kernels.decode_batch(slots, starts, shape.row_len, own_counts)
            batch.only_stores = not drafts
            x = self.head.forward(batch, x, self.layers)
        if drafts:
            firsts = kernels.firsts(n, shape.row_len)
            rows = slots, starts, own_counts, sample_slots, firsts
            accept_drafts(*rows, state.tokens, state.drafts, self.places[:, :n], self.index[:n])
            self._first_draft(x.index_select(0, self.index[:n]))

    def _first_draft(self, x: torch.Tensor) -> None:
        """Draft after the last samples, from the extend's results; without a cache from the features before them."""
        if self.has_cache:
            self._draft(x)
            return
        places, n = self.places[:, : len(x)], len(x)
        places[0] = places[2]
        torch.clamp(places[3] - 1, min=0, out=places[1])
        torch.clamp(places[3] - 2, min=0, out=self.last_keys[:n])
        self.hidden[:n] = x
        self._single(n)

    def _single(self, num_rows: int) -> None:
        """One more draft token for each row."""
        slots, positions = self.places[:2, :num_rows]
        last_keys = None if self.has_cache else self.last_keys[:num_rows]
        batch = self.kernels.decode_batch(slots, positions, 1, slots, last_keys=last_keys)
        self._draft(self.head.forward(batch, self.hidden[:num_rows], self.layers))

    def _draft(self, x: torch.Tensor) -> None:
        """Sample a draft token a row from a pass's results [n, hidden_size], and prepare the next pass."""
        head, state, n = self.head, self.slots, len(x)
        logits, places = head.logits(x), self.places[:, :n]
        if head.spec.num_ids:  # ids outside a draft vocabulary have -inf, which would count as failed
            logits.clamp_(min=MASKED_LOGIT)
        token_ids = self.kernels.sampler.sample(logits, places[2], places[3], state.tokens, state.params)
        keep_drafts(token_ids, places, state.drafts, state.max_model_len)
        self.hidden[:n].copy_(head.recycled(x))

    # ---- launched ---------------------------------------------------------------------------------------------------

    def _launch(self, plan: StepPlan, extend: ExtendRows, combined: torch.Tensor, offsets: Int32s, drafts: bool) -> int:
        """Launch the extend of a plan's rows. token_offsets describes their `offsets` in `combined`.

        Returns the number of rows in the single passes that follow."""
        if self.has_cache:
            self._keep_features(plan, combined, offsets)
        upload, own, null_slot = self.transfers.upload, extend.plan, self.slots.num_slots
        if not len(own.slots):
            return 1  # rows without a position to write do not sample
        x = combined
        if self.has_cache:
            shape = MixedShape.of(own)
            hidden = self._features_before(extend, combined, offsets[extend.rows])
            batch = self.kernels.mixed_batch(shape, upload(shape.pack(own, null_slot)))
            batch.only_stores = not drafts
            x = self.head.forward(batch, hidden, self.layers)
        if not drafts:
            return 1
        rows = np.flatnonzero(plan.num_samples)
        # Results lie one position further than features.
        first = token_offsets(own)[np.searchsorted(extend.rows, rows)] + 1 if self.has_cache else offsets[rows]
        counts = plan.num_samples[rows]
        sampled = StepPlan(
            0, slots=plan.slots[rows], num_computed=plan.ends[rows] - counts, num_tokens=counts, num_samples=counts
        )
        n = min((key for key in self.graphs if isinstance(key, int) and key >= len(rows)), default=len(rows))
        shape_of_samples = DecodeShape(int(counts.max()), n)
        firsts = np.zeros(n, np.int32)
        firsts[: len(rows)] = first + sampled.num_computed
        packed = shape_of_samples.pack(sampled, null_slot)
        sent = upload(packed, firsts)
        slots, own_counts, sample_slots, starts, *_ = shape_of_samples.split(sent[: len(packed)])
        given, state = (slots, starts + 1, own_counts, sample_slots, sent[len(packed) :]), self.slots
        accept_drafts(*given, state.tokens, state.drafts, self.places[:, :n], self.index[:n])
        self._first_draft(x.index_select(0, self.index[:n]))
        return n

    def _keep_features(self, plan: StepPlan, combined: torch.Tensor, offsets: Int32s) -> None:
        """Keep the features of tokens that end a block."""
        size = self.cache.block_size
        rows, positions = tokens_of(plan.num_computed, plan.num_tokens)
        ends = np.flatnonzero((positions + 1) % size == 0)
        if len(ends):
            rows, positions = rows[ends], positions[ends]
            index = self.transfers.upload((offsets[rows] + positions).astype(np.int64))
            blocks = self._blocks(plan.slots[rows], positions // size)
            self.features.values.index_copy_(0, blocks, combined.index_select(0, index))

    def _blocks(self, slots: Int32s, index: np.ndarray) -> torch.Tensor:
        """Ids of the blocks at these indices in slots' tables, int64."""
        at = self.transfers.upload(slots.astype(np.int64), index.astype(np.int64)).view(2, -1)
        blocks: torch.Tensor = self.tables[at[0], at[1]].long() // self.factor
        return blocks

    def _features_before(self, extend: ExtendRows, combined: torch.Tensor, offsets: Int32s) -> torch.Tensor:
        """[num_tokens, hidden_size] the features of the positions before the extend's tokens, in their order."""
        plan = extend.plan
        rows, positions = tokens_of(plan.num_computed, plan.num_tokens)
        sources, order = offsets[rows] + positions - 1, token_offsets(plan)[rows] + positions
        if extend.continued.any():
            begins = plan.num_computed[extend.continued]
            blocks = self._blocks(plan.slots[extend.continued], begins // self.cache.block_size - 1)
            at = (np.cumsum(plan.num_tokens) - plan.num_tokens)[extend.continued]
            sources[at] = len(combined) + np.arange(len(begins))
            combined = torch.cat((combined, self.features.values.index_select(0, blocks)))
        index = np.empty(len(sources), np.int64)
        index[order] = sources
        if np.array_equal(index, np.arange(len(index))):
            return combined[: len(index)]
        return combined.index_select(0, self.transfers.upload(index))

    # ---- graphs -----------------------------------------------------------------------------------------------------

    def capture(self, shapes: Sequence[DecodeShape]) -> None:
        """Capture the extend after each shape's graph, and the single passes. The largest shapes come first."""
        for shape in sorted(shapes, key=lambda shape: -shape.num_tokens):
            packed = torch.from_numpy(shape.pack(StepPlan(0), self.slots.num_slots))
            self.graph_runner.rows[: shape.num_ints].copy_(packed)
            is_small = shape.num_rows <= _MOST_ROWS
            for drafts in (False, True)[not self.has_cache : 1 + is_small]:
                self.graphs[shape, drafts], _ = self.graph_runner.captured(partial(self._extend, shape, drafts))
            if is_small and shape.num_rows not in self.graphs:
                single = partial(self._single, shape.num_rows)
                self.graphs[shape.num_rows], _ = self.graph_runner.captured(single)
