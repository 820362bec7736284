"""GpuSteps: steps with Triton kernels. All request state is on the device, and the host never waits for it.

`GpuSteps.program_for` chooses how a plan runs. The program queues its work on one stream, so plan order is stream order
(C2):

    GraphStep       CUDA graphs, one after another                              -> the tokens that the graphs sampled
    RepeatedGraph   one graph, `num_steps` times                                -> the tokens of all replays
    StagedStep      a list of stages: graphs or kernels, extras, second pass    -> tokens and reports
    RowlessStep     changes of slots, and transfers                             -> no tokens
    UnrolledSteps   a program for each of `num_steps` steps                     -> the joined results
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from functools import partial

import msgspec
import numpy as np
import torch

from runtime.base.arrays import Int32s
from runtime.base.types import MAX_DRAFT_TOKENS
from runtime.core.plan import EMPTY, StepPlan, StepResult, joined, last_tokens
from runtime.models.decoder import Decoder
from runtime.worker.extras import ImageEncoder, MaskSource, Needs, StepExtra, StepWork
from runtime.worker.gpu.device_sampler import DeviceSampler
from runtime.worker.gpu.device_slots import NO_WRITES, DeviceSlots
from runtime.worker.gpu.graph_runner import CapturedGraph, DecodeShape, GraphRunner
from runtime.worker.gpu.step_kernels import StepKernels
from runtime.worker.gpu.step_rows import MixedShape, short_first, token_offsets
from runtime.worker.gpu.transfers import Transfers
from runtime.worker.kv_cache import KVCache
from runtime.worker.ranks.split_logits import SplitLogits
from runtime.worker.steps import Steps, make_result

Graphs = list[tuple[CapturedGraph, StepPlan]]  # graphs that run one after another, each with its part of the plan


class GpuSteps(Steps):
    """The requests' state on the device, and the choice of a program for each plan."""

    asynchronous = True

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
        split = SplitLogits(decoder.spec.whole.vocab_size, decoder.communicator)
        sizes, has_head = (num_slots, max_model_len, cache.block_size), bool(decoder.spec.draft_layers)
        self.slots = DeviceSlots(*sizes, cache.device, cache.table_factors, has_head)
        self.transfers = Transfers(cache.device)
        self.sampler: DeviceSampler = DeviceSampler(num_slots, split.vocab_size, eos_token_ids, self.transfers, split)
        self.graph_runner = GraphRunner(self.slots.flat_state, *sizes)
        self.graph_runner.reach -= has_head
        self.adapter_graphs = self.graph_runner.sibling()  # graphs for steps with adapters
        self.graph_io = self.graph_runner.graph_io
        self.kernels = StepKernels(decoder, cache, self.slots, self.sampler, self.graph_runner.max_rows)
        self.reset()

    def reset(self) -> None:
        super().reset()
        self.slots.reset()

    @torch.inference_mode()
    def _launch(self, plan: StepPlan) -> Callable[[], StepResult]:
        program = self.program_for(plan)
        complete = None if self.head is None else self.head.watched(plan)
        program.run()
        return program.read if complete is None else lambda: complete(program.read())

    def run_head(self, plan: StepPlan, graphs: Graphs, work: StepWork | None = None) -> None:
        """Queue a head's passes. The plan's step has left its result; `work` is a launched step's."""
        if self.head is None:
            return
        if graphs or work is None:
            self.head.run(plan, graphs[0][0].shape)
        else:
            features = self.decoder.normed(work.hidden) if work.taps is None else work.taps.out
            self.head.run(plan, None, features)

    def program_for(self, plan: StepPlan) -> StepProgram:
        """The program of a plan. Its requests leave and enter their slots first."""
        if plan.num_steps > 1:
            return self._repeated_graph(plan) or UnrolledSteps(self, plan)
        self._free_and_open(plan)
        writes = self.slots.writes(plan, self.sampler.rows, self.images.deltas)
        self._start_transfers(plan)
        if self.head is not None:
            self.head.forget_loaded(plan)
        if not len(plan.slots):
            return RowlessStep(self, plan, writes)
        sampling, sampled_after = last_tokens(plan, plan.num_samples)
        slots, positions = plan.slots[sampling], sampled_after + 1
        is_plain = self.sampler.is_plain(slots, positions)
        needs = self.needs(plan)
        graphs = self.graphs_for(plan, needs)
        if graphs and is_plain and not needs:
            return GraphStep(self, plan, graphs, writes)
        work = StepWork(plan, slots, positions, self.slots.flat_state, self.slots.stride, self.transfers)
        return StagedStep(self, work, graphs, writes, needs, is_plain)

    def needs(self, plan: StepPlan) -> Needs:
        """The hidden states that extras need from this step."""
        needs = Needs.NOTHING
        for extra in self.extras:
            needs = max(needs, extra.needs(plan))
        return needs

    def graphs_for(self, plan: StepPlan, needs: Needs) -> Graphs:
        """The graphs that compute the plan one after another, each with its part; empty if the plan is launched.

        - Graphs do not keep all tokens' states, and decode graphs keep none at all.
        - A decode graph's attention reads prefixes before the step's own keys are written. A new request may
          share a prefix that this very step computes, so it is never in a decode graph.
        - Several graphs would read the experts' weights several times, which one large step reads once.
        - With states, a decode graph computes single steps, and prompt pieces would begin within a chunk.
        - Several graphs would overwrite the features that a head reads after them.
        - No graph reads an image's embeddings. Behind images, graphs shift rotary positions."""
        if needs is Needs.ALL_STATES or plan.has_images or self.images.reach(plan):
            return []
        graph_runner = self.adapter_graphs if self._has_adapters(plan) else self.graph_runner
        has_states = self.cache.states is not None
        only_steps = not (plan.new or needs or (has_states and self.slots.has_prompts(plan)))
        if only_steps and (graph := graph_runner.find(plan)) is not None:
            return [(graph, plan)]
        graphs = graph_runner.find_prefill(plan) if plan.num_steps == 1 else []
        one_only = has_states or self.decoder.spec.experts or self.head is not None
        return graphs if len(graphs) == 1 or not one_only else []

    def _repeated_graph(self, plan: StepPlan) -> StepProgram | None:
        """None if the plan lacks a graph, or its samples need more than the graph."""
        if len(plan.freed) or plan.stores or plan.loads or self.head is not None:
            return None
        if not (graphs := self.graphs_for(plan, self.needs(plan))):
            return None
        within = np.arange(1, plan.num_steps + 1, dtype=np.int32)
        slots, positions = np.repeat(plan.slots, plan.num_steps), (plan.num_computed[:, None] + within).reshape(-1)
        if not self.sampler.is_plain(slots, positions):
            return None
        return RepeatedGraph(self, plan, graphs[0][0], self.slots.writes(plan, self.sampler.rows, self.images.deltas))

    def _has_adapters(self, plan: StepPlan) -> bool:
        return self.decoder.adapters is not None and self.slots.has_adapters(plan)

    # ---- graphs ---------------------------------------------------------------------------------------------------

    @torch.inference_mode()
    def capture_graphs(self, row_lens: Sequence[int], prefill_tokens: int, pool: tuple[int, int] | None = None) -> None:
        """Capture graphs for decode steps and for steps with prompts.

        Decode rows have one token, or one of `row_lens`. Steps with prompts have up to `prefill_tokens`
        tokens. Graph memory comes from `pool`, a pool of torch's allocator, if given."""
        if pool is not None:
            self.graph_runner.pool = self.adapter_graphs.pool = pool
        if self.cache.states is not None:
            row_lens = [length for length in row_lens if length <= MAX_DRAFT_TOKENS + 1]
        shapes: list[DecodeShape | MixedShape] = [*self.graph_runner.decode_shapes(row_lens)]
        shapes += self.graph_runner.prefill_shapes(prefill_tokens)
        self.kernels.allocate_outputs(max(s.num_samples for s in shapes), max(s.num_tokens for s in shapes))
        self.graph_runner.capture(shapes, self.kernels.step)
        if self.head is not None:
            self.head.capture([shape for shape in shapes if isinstance(shape, DecodeShape)])
        if self.decoder.adapters is not None:
            self.adapter_graphs.capture(shapes, partial(self.kernels.step, has_adapters=True))

    @property
    def num_graphs(self) -> int:
        return len(self.graph_runner) + len(self.adapter_graphs)

    def replay(self, graph: CapturedGraph, plan: StepPlan, writes: list[Int32s]) -> Int32s:
        """Start a graph on the plan's rows. Returns the memory that will hold its samples."""
        if not self.graph_io.has_room(graph.shape.num_ints, writes):  # a long prompt's tokens
            self.slots.apply(writes, self.transfers.upload)
            writes = [NO_WRITES]
        return self.graph_runner.replay(graph, plan, writes)


class StepProgram(ABC):
    """One step of a GPU."""

    read: Callable[[], StepResult]  # waits for the step; set by `run`

    @abstractmethod
    def run(self) -> None:
        """Queue the step's kernels and copies."""


class GraphStep(StepProgram):
    """A step that needs nothing but its graphs."""

    def __init__(self, steps: GpuSteps, plan: StepPlan, graphs: Graphs, writes: list[Int32s]) -> None:
        self.steps, self.plan, self.graphs, self.writes = steps, plan, graphs, writes

    def run(self) -> None:
        steps, writes, samples = self.steps, self.writes, []
        steps.transfers.begin()
        for graph, part in self.graphs:
            samples.append((steps.replay(graph, part, writes), graph.shape.sample_places(part)))
            writes = [NO_WRITES]  # the first graph applies them
        step_id = self.plan.step_id
        self.read = steps.transfers.end(lambda: StepResult(step_id, _collected(samples)))
        steps.graph_io.release_after(self.read, len(samples))
        steps.run_head(self.plan, self.graphs)


def _collected(samples: list[tuple[Int32s, np.ndarray]]) -> Int32s:
    """The samples in graph outputs, each with its sample numbers."""
    found = [output[numbers] for output, numbers in samples]
    return found[0] if len(found) == 1 else np.concatenate(found)


class RepeatedGraph(StepProgram):
    """A decode step of several tokens a row. The host only starts the replays."""

    def __init__(self, steps: GpuSteps, plan: StepPlan, graph: CapturedGraph, writes: list[Int32s]) -> None:
        self.steps, self.plan, self.graph, self.writes = steps, plan, graph, writes

    def run(self) -> None:
        steps, plan = self.steps, self.plan
        steps.transfers.begin()
        output = steps.replay(self.graph, plan, self.writes)[: plan.num_steps * self.graph.shape.num_samples]
        self.read = steps.transfers.end(
            lambda: StepResult(plan.step_id, output.reshape(plan.num_steps, -1)[:, : len(plan.slots)].T.flatten())
        )
        steps.graph_io.release_after(self.read)


class UnrolledSteps(StepProgram):
    """A plan with several steps, each with its own program."""

    def __init__(self, steps: GpuSteps, plan: StepPlan) -> None:
        self.steps, self.plan = steps, plan

    def run(self) -> None:
        reads = [self.steps._launch(one) for one in self.plan.expanded()]
        self.read = lambda: joined([read() for read in reads])


class RowlessStep(StepProgram):
    """A plan of transfers alone, which have begun. Slots may change, too."""

    def __init__(self, steps: GpuSteps, plan: StepPlan, writes: list[Int32s]) -> None:
        self.steps, self.plan, self.writes = steps, plan, writes

    def run(self) -> None:
        steps, step_id = self.steps, self.plan.step_id
        steps.transfers.begin()
        steps.slots.apply(self.writes, steps.transfers.upload)
        self.read = steps.transfers.end(lambda: StepResult(step_id, EMPTY))


class StagedStep(StepProgram):
    """A step with more than its graphs: launched kernels, extras, or a second pass of sampling."""

    def __init__(
        self, steps: GpuSteps, work: StepWork, graphs: Graphs, writes: list[Int32s], needs: Needs, is_plain: bool
    ) -> None:
        self.steps, self.work, self.graphs, self.writes, self.needs = steps, work, graphs, writes, needs
        self.is_plain = is_plain

    def run(self) -> None:
        steps, work = self.steps, self.work
        compute, sample = ([self._replay], []) if self.graphs else ([self._launch_kernels], [self._sample])
        extras = [extra.run for extra in steps.extras] if self.needs else []
        steps.transfers.begin()
        for stage in [*compute, *extras, *sample, *([] if self.is_plain else [self._second_pass])]:
            stage(work)
        # The closure must not keep device tensors alive: the next step needs their memory.
        step_id, token_ids, reports = work.plan.step_id, steps.transfers.download(work.token_ids), work.reports
        self.read = read = steps.transfers.end(lambda: make_result(step_id, token_ids, reports))
        if self.graphs:
            steps.graph_io.release_after(read, len(self.graphs))
        if steps.masks is not None and work.masks is not None:
            steps.masks.sampled(work.masks, lambda: read().token_ids)
        steps.run_head(work.plan, self.graphs, work)

    def _replay(self, work: StepWork) -> None:
        """Replay the graphs and collect their token ids, logits and, if needed, states in the plan's order."""
        steps, writes, found = self.steps, self.writes, []
        kernels = steps.kernels
        for graph, part in self.graphs:
            steps.replay(graph, part, writes)
            writes, wanted = [NO_WRITES], graph.shape.sample_places(part).astype(np.int32)
            n = len(wanted)
            left = [graph.token_ids, kernels.graph_logits, *([kernels.graph_hidden] if self.needs else [])]
            if n and (wanted[-1] >= n or len(self.graphs) > 1):  # padding is between them, or the next graph overwrites
                index = steps.transfers.upload(wanted)
                left = [x.index_select(0, index) for x in left]
            found.append([x[:n] for x in left])
        left = found[0] if len(found) == 1 else [torch.cat(parts) for parts in zip(*found, strict=True)]
        work.token_ids, work.logits = left[:2]
        if self.needs:
            work.sampled_states = left[2]

    def _launch_kernels(self, work: StepWork) -> None:
        """Launch the forward pass, kernel after kernel."""
        steps, plan = self.steps, work.plan
        steps.slots.apply(self.writes, steps.transfers.upload)
        steps._begin_forward(plan)
        self.shape = MixedShape.of(plan)
        self.rows = steps.transfers.upload(self.shape.pack(plan, steps.num_slots))
        offsets, order = token_offsets(plan), short_first(plan)
        embeds = steps._embeds(plan, offsets + plan.num_computed, steps.transfers)
        seen = steps.images.for_rows(plan.slots[order], plan.num_computed[order], plan.num_tokens[order])
        rope_positions, last_visible = (None if array is None else steps.transfers.upload(array) for array in seen)
        work.taps = steps.kernels.taps(self.shape.num_tokens)
        work.hidden = steps.kernels.forward(
            self.shape, self.rows, steps._has_adapters(plan), embeds, rope_positions, last_visible, work.taps
        )
        work.last = offsets + plan.ends - 1
        if self.shape.num_samples:
            work.sampled_states = work.hidden.index_select(0, self.shape.split(self.rows)[3])

    def _sample(self, work: StepWork) -> None:
        """Launch the first pass of sampling."""
        if not self.shape.num_samples:
            work.token_ids, work.logits = self.rows[:0], work.hidden[:0]
            return
        steps = self.steps
        *_, slots, positions = self.shape.split(self.rows)
        filters, penalties = (flags[work.slots].any() for flags in (steps.sampler.filtered, steps.sampler.penalised))
        work.logits = steps.decoder.logits(work.sampled_states)
        work.token_ids = steps.kernels.sample(work.logits, slots, positions, bool(filters), bool(penalties))

    def _second_pass(self, work: StepWork) -> None:
        """Edit logits, apply masks and report log-probabilities. Graphs cannot: each row needs its own lists."""
        steps, slots, positions = self.steps, work.slots, work.positions
        sampler, state, upload = steps.sampler, steps.slots, steps.transfers.upload
        again = sampler.wants_second_pass(slots, positions)
        plan = work.plan
        guessed = len(plan.draft_token_ids) > 0 and bool(sampler.penalised[slots[again]].any())
        if guessed:  # penalties count the draft tokens, which the first pass has overwritten with its samples
            state.apply(self.writes, upload)
            state.restore_drafts(plan, upload)
        if steps.masks is not None:
            if steps.head is not None and (plan.draft_token_ids < 0).any():
                plan = msgspec.structs.replace(plan, draft_token_ids=np.maximum(steps.head.drafts_of(plan), 0))
            work.masks = steps.masks.masks(plan)  # the device computes while the host makes them
        samples = work.logits, work.token_ids, slots, positions
        found = sampler.resample(*samples, state.tokens, state.params, work.masks)
        if guessed:
            where = upload(slots, positions).view(2, -1).long()
            state.tokens[where[0], where[1]] = work.token_ids.clamp(min=0)
        if found is not None:
            work.reports.append(found.downloaded(steps.transfers.download).report)
        if work.masks is not None:
            work.reports.append(work.masks.report)
