"""Steps of the Triton kernels: all state of the requests is on the device, and the host waits for nothing.

A step is the plan's rows (and what the plan changes, applied first), the forward pass, and sampling, all on one stream,
so that plan order is stream order (C2). A step that suits a captured graph (`graph_for`) is one CUDA graph from rows
to tokens, whose input and output pass through graph_io.py; others are launched one function after another.

The state of a slot is one row of int32, and the last row belongs to the padding of a graph's batch: its table and its
parameters stay zero, so that padded rows compute into the null block.

    state[slot] = [ token ids: max_model_len | block table: max_blocks | sampling parameters: NUM_PARAMS | adapter ]

A step none of whose rows has an adapter knows nothing of them: it has graphs, and launches, of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import numpy as np
import torch

from runtime.core.plan import Int32s, StepPlan, StepResult, joined, last_tokens
from runtime.features.device_automata import DeviceAutomata
from runtime.features.grammar_state import GrammarState
from runtime.features.pooler import Pooler
from runtime.features.prompt_scorer import PromptScorer
from runtime.kernels.attention.paged_attention import PagedBatch, PagedRows
from runtime.kernels.sampling.sample import NUM_PARAMS
from runtime.kernels.step.scatter_writes import scatter_writes
from runtime.kernels.step.step_inputs import build_inputs
from runtime.models.decoder import Decoder
from runtime.models.forward_batch import ForwardBatch
from runtime.spec.pooling import Pooling
from runtime.worker.cpu.sampler import Logprobs
from runtime.worker.gpu.device_sampler import DeviceSampler
from runtime.worker.gpu.graph_runner import NO_WRITES, Bucket, CapturedGraph, GraphRunner
from runtime.worker.gpu.step_rows import StepShape, token_offsets
from runtime.worker.gpu.transfers import Transfers
from runtime.worker.kv_cache import KVCache
from runtime.worker.ranks.split_logits import SplitLogits
from runtime.worker.steps import make_result


class GpuSteps:
    """The requests' state on the device, and the order of a step's parts."""

    asynchronous = True

    def __init__(
        self,
        decoder: Decoder,
        cache: KVCache,
        num_slots: int,
        max_model_len: int,
        eos_token_ids: tuple[int, ...],
        grammar_state: GrammarState,
        pooling: Pooling | None = None,
        classifier: torch.Tensor | None = None,
    ) -> None:
        self.decoder, self.cache = decoder, cache
        self.split = SplitLogits(decoder.spec.whole.vocab_size, decoder.communicator)
        self.num_slots, self.max_model_len, self.eos_token_ids = num_slots, max_model_len, eos_token_ids
        self.grammar_state = grammar_state
        self.pooling, self.classifier = pooling, classifier
        self.device, self.block_size = cache.device, cache.block_size
        self.max_blocks = -(-max_model_len // self.block_size)
        self.table_at, self.params_at = max_model_len, max_model_len + self.max_blocks
        self.stride = -(-(self.params_at + NUM_PARAMS + 1) // 4) * 4
        self.state = torch.zeros((num_slots + 1, self.stride), dtype=torch.int32, device=self.device)
        self.tokens = self.state[:, :max_model_len]
        self.tables = self.state[:, self.table_at : self.params_at]
        self.params = self.state[:, self.params_at : self.params_at + NUM_PARAMS]
        self.adapters = self.state[:, self.params_at + NUM_PARAMS]
        self.adapter_of = np.zeros(num_slots, np.int32)  # the same on the host
        self.transfers = Transfers(self.device)
        self.graph_runner = GraphRunner(self.state.view(-1), num_slots, max_model_len, self.block_size)
        self.adapter_graphs = self.graph_runner.beside()  # of steps whose rows have adapters
        self.graph_logits = torch.empty(0, device=self.device)  # [num_tokens, own_ids], of the last replay
        self.graph_hidden = torch.empty(0, device=self.device)  # [num_samples, hidden], of the last one with prompts
        self.row_numbers = torch.arange(self.graph_runner.max_rows + 1, dtype=torch.int32, device=self.device)
        self.sampler = DeviceSampler(num_slots, self.split.vocab_size, eos_token_ids, self.transfers, self.split)
        self.reset()

    def reset(self) -> None:
        """Forget all requests."""
        self.state.zero_()
        self.adapter_of[:] = 0
        self.sampler.clear()
        self.scorer = PromptScorer(self.decoder, self.num_slots, self.split)
        self.pooler = Pooler(self.decoder, self.num_slots, self.pooling, self.classifier)
        self.grammar_state.clear(DeviceAutomata(self.num_slots, self.device))

    @torch.inference_mode()
    def launch(self, plan: StepPlan) -> Callable[[], StepResult]:
        """Start the step; the answer waits for its result."""
        if plan.num_steps > 1:
            return self._launch_repeated(plan)
        self.transfers.begin()
        for slot in plan.freed.tolist():
            self.sampler.remove(slot)
            self.scorer.remove(slot)
            self.pooler.remove(slot)
            self.grammar_state.remove(slot)
        for new in plan.new:
            self.grammar_state.add(new)
        writes = self._state_writes(plan)
        sampling, sampled_after = last_tokens(plan, plan.num_samples)
        slots, positions = plan.slots[sampling], sampled_after + 1
        prompts = None
        pooled = self.pooler.find(plan)
        plain = self.sampler.is_plain(slots, positions)
        graphs = self.graphs_for(plan)
        if plain and graphs and not pooled.size:
            return self._replay_all(plan, graphs, writes)
        if graphs:
            token_ids, logits, *states = self._replay_and_read(graphs, writes, pooled.size > 0)
        else:
            self._apply_writes(writes)
            filters, penalties = self.sampler.filtered[slots], self.sampler.penalised[slots]
            token_ids, logits, *states, prompts = self._run(plan, bool(filters.any()), bool(penalties.any()))
        vectors = None
        if pooled.size:
            of_pooled = states[0].index_select(0, self.transfers.upload(pooled))
            found = self.pooler.pool(of_pooled, slots[pooled], positions[pooled] - 1)
            vectors = pooled, self.transfers.download(found.reshape(-1)).view(found.shape)
        logprobs = masks = None
        if not plain:
            again = self.sampler.wants_second_pass(slots, positions)
            guessed = len(plan.draft_token_ids) > 0 and bool(self.sampler.penalised[slots[again]].any())
            if guessed:
                self._apply_writes(writes)  # again: penalties want the guesses, in whose places samples stand now
            masks = self.grammar_state.masks(plan)  # the device computes while the host waits and makes them
            logprobs = self.sampler.resample(logits, token_ids, slots, positions, self.tokens, self.params, masks)
            if guessed:
                where = self.transfers.upload(slots, positions).view(2, -1).long()
                self.tokens[where[0], where[1]] = token_ids.clamp(min=0)
        if prompts is not None:
            logprobs = prompts if logprobs is None else logprobs.then(prompts)
        host, host_logprobs = self.transfers.download(token_ids), logprobs and logprobs.map(_to_host)
        wait = self.transfers.end(lambda: make_result(plan.step_id, host, host_logprobs, masks, vectors))
        if graphs:
            self.graph_runner.graph_io.release_after(wait, len(graphs))
        if masks is not None:
            self.grammar_state.sampled(masks, lambda: wait().token_ids)
        return wait

    def _launch_repeated(self, plan: StepPlan) -> Callable[[], StepResult]:
        """With a graph and nothing to add to its samples, replays that the host only starts; else step by step."""
        graphs = self.graphs_for(plan)
        within = np.arange(1, plan.num_steps + 1, dtype=np.int32)
        slots, positions = np.repeat(plan.slots, plan.num_steps), (plan.num_computed[:, None] + within).reshape(-1)
        if not graphs or len(plan.freed) or not self.sampler.is_plain(slots, positions):
            waits = [self.launch(one) for one in plan.expanded()]
            return lambda: joined([wait() for wait in waits])
        self.transfers.begin()
        graph = graphs[0][0]
        output = self._replay(graph, plan, self._state_writes(plan))
        output = output[: plan.num_steps * graph.bucket.num_rows]
        return self._answered(plan, lambda: output.reshape(plan.num_steps, -1)[:, : len(plan.slots)].T.flatten())

    def _answered(self, plan: StepPlan, read: Callable[[], Int32s], num_inputs: int = 1) -> Callable[[], StepResult]:
        """The wait for replayed graphs, which copies from their output."""
        wait = self.transfers.end(lambda: StepResult(plan.step_id, read()))
        self.graph_runner.graph_io.release_after(wait, num_inputs)
        return wait

    # ---- what plans change ----------------------------------------------------------------------------------------

    def _state_writes(self, plan: StepPlan) -> list[Int32s]:
        """The plan's changes of the state: block tables, tokens and parameters of new requests, drafts; end to end as
        kernels/step/scatter_writes.py has them."""
        if not (plan.new or plan.block_table_writes.shape[1] or len(plan.draft_token_ids)):
            return [NO_WRITES]
        slots, index, blocks = plan.block_table_writes
        # A block may be replaced in the plan that wrote it: the last one counts, and kernels know no order.
        tables = dict(zip((slots * self.stride + self.table_at + index).tolist(), blocks.tolist(), strict=True))
        at, values = np.fromiter(tables, np.int32, len(tables)), [np.fromiter(tables.values(), np.int32, len(tables))]
        first = np.flatnonzero(np.diff(at, prepend=-2) != 1)  # neighbours are one write
        places: list[int] = at[first].tolist()
        lengths: list[int] = np.diff(first, append=len(at)).tolist()
        for new in plan.new:
            row = new.slot * self.stride
            places += (row, row + self.params_at)
            lengths += (len(new.token_ids), NUM_PARAMS + 1)
            values += (new.token_ids, self.sampler.add(new), np.array([new.adapter], np.int32))
            self.adapter_of[new.slot] = new.adapter
            self.scorer.add(new)
            self.pooler.add(new)
        given = np.flatnonzero(plan.draft_lens)
        if len(given):
            places += (plan.slots * self.stride + plan.ends - plan.draft_lens)[given].tolist()
            lengths += plan.draft_lens[given].tolist()
        return [np.array([len(places), *places, *lengths], np.int32), *values, plan.draft_token_ids]

    def _has_adapters(self, plan: StepPlan) -> bool:
        return self.decoder.adapters is not None and bool(self.adapter_of[plan.slots].any())

    def _apply_writes(self, writes: list[Int32s]) -> None:
        if num_writes := int(writes[0][0]):
            scatter_writes(self.state.view(-1), self.transfers.upload(*writes), num_writes)

    # ---- one by one -----------------------------------------------------------------------------------------------

    def _run(
        self, plan: StepPlan, filters: bool, penalties: bool
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, Logprobs | None]:
        """A step of any rows. Token ids, logits and hidden states of the samples in the plan's order;
        log-probabilities of prompts."""
        shape = StepShape.of(plan)
        rows = self.transfers.upload(shape.pack(plan, self.num_slots))
        hidden = self._forward(shape, rows, self._has_adapters(plan))
        last = token_offsets(plan) + plan.ends - 1
        self.pooler.accumulate(hidden, plan, last)
        scored, prompts = self.scorer.find(plan, last, self.stride), None
        if scored.size:
            prompts = self.scorer.score(hidden, self.state.view(-1), self.transfers.upload(scored))
        if not shape.num_samples:
            return rows[:0], hidden[:0], hidden[:0], prompts
        *_, sampled, slots, positions = shape.split(rows)
        hidden = hidden.index_select(0, sampled)
        logits = self.decoder.logits(hidden)
        state = self.tokens, self.params
        return self.sampler.sample(logits, slots, positions, *state, filters, penalties), logits, hidden, prompts

    def _forward(self, shape: StepShape, rows: torch.Tensor, has_adapters: bool) -> torch.Tensor:
        """The hidden states of a step's tokens, [num_tokens, hidden]."""
        slots, starts, q_starts, *_ = shape.split(rows)
        num_tokens, num_short, num_long, _, max_count, max_len = shape
        inputs = build_inputs(
            slots, starts, q_starts, self.tokens, self.tables, self.block_size, num_tokens, max_count, None,
            self.adapters if has_adapters else None,
        )  # fmt: skip
        attending = []
        for first, size, tokens, most in ((0, num_short, num_short, 1), (num_short, num_long, num_tokens, max_count)):
            if size:
                part = slice(first, first + size)
                q_starts_of_part = q_starts[first : first + size + 1]
                attending.append(
                    PagedRows(slots[part], starts[part], q_starts_of_part, self.tables, size, tokens, most, max_len)
                )
        batch = ForwardBatch(*inputs[:3], PagedBatch(num_tokens, attending), inputs[3])
        return self.decoder.forward(batch, self.cache.layers)

    # ---- as graphs ------------------------------------------------------------------------------------------------

    @torch.inference_mode()
    def capture_graphs(self, row_lens: Sequence[int], prefill_tokens: int, pool: tuple[int, int] | None = None) -> None:
        """Graphs of decode steps, for rows of one token and of each of `row_lens` tokens, and of steps with prompts of
        up to `prefill_tokens` tokens; with a `pool` of torch's allocator, their memory is there."""
        if pool is not None:
            self.graph_runner.pool = self.adapter_graphs.pool = pool
        buckets: list[Bucket | StepShape] = [*self.graph_runner.buckets(row_lens)]
        buckets += self.graph_runner.prefill_buckets(prefill_tokens)
        shape = max(bucket.num_samples for bucket in buckets), len(self.split.own_ids)
        self.graph_logits = torch.empty(shape, dtype=torch.float32, device=self.device)
        shape, dtype = (shape[0], self.decoder.spec.hidden_size), self.decoder.numerics.dtype
        self.graph_hidden = torch.empty(shape, dtype=dtype, device=self.device)
        self.graph_runner.capture(buckets, self.step)
        if self.decoder.adapters is not None:
            self.adapter_graphs.capture(buckets, partial(self.step, has_adapters=True))

    def step(self, bucket: Bucket | StepShape, rows: torch.Tensor, has_adapters: bool = False) -> torch.Tensor:
        """The step of a graph: from the rows of its input to the token ids of its samples."""
        if isinstance(bucket, Bucket):
            return self.decode(bucket, rows, has_adapters)
        return self.prefill(bucket, rows, has_adapters)

    def prefill(self, shape: StepShape, graph_rows: torch.Tensor, has_adapters: bool = False) -> torch.Tensor:
        """Prompts and decoding rows together, as `_run` has them."""
        *_, sampled, slots, positions = shape.split(graph_rows)
        hidden = self._forward(shape, graph_rows, has_adapters)
        hidden = torch.index_select(hidden, 0, sampled, out=self.graph_hidden[: shape.num_samples])
        logits = self.decoder.logits(hidden, out=self.graph_logits[: shape.num_samples])
        return self.sampler.sample(logits, slots, positions, self.tokens, self.params)

    def decode(self, bucket: Bucket, graph_rows: torch.Tensor, has_adapters: bool = False) -> torch.Tensor:
        """A token after each token of the rows of a graph's input."""
        (count, size), num_tokens = bucket, bucket.num_tokens
        slots, own_counts, sample_slots, starts, _, positions = bucket.split(graph_rows)
        firsts = self.row_numbers[: size + 1]
        firsts = firsts if count == 1 else firsts * count
        inputs = build_inputs(
            slots, starts, firsts, self.tokens, self.tables, self.block_size, num_tokens, count,
            None if count == 1 else own_counts, self.adapters if has_adapters else None,
        )  # fmt: skip
        rows = PagedRows(
            slots, starts, firsts, self.tables, size, num_tokens, count, self.max_model_len, prefix_ready=True
        )
        batch = ForwardBatch(*inputs[:3], PagedBatch(num_tokens, [rows]), inputs[3])
        hidden = self.decoder.forward(batch, self.cache.layers)
        logits = self.decoder.logits(hidden, out=self.graph_logits[:num_tokens])
        return self.sampler.sample(logits, sample_slots, positions, self.tokens, self.params)

    @property
    def num_graphs(self) -> int:
        return len(self.graph_runner) + len(self.adapter_graphs)

    def graphs_for(self, plan: StepPlan) -> list[tuple[CapturedGraph, StepPlan]]:
        """The graphs that compute the plan one after another, each with its part of it; none: it is launched.

        Log-probabilities of prompts want logits that no graph makes, and means the states of all tokens; other vectors
        want states that graphs of steps with prompts leave behind, but not those of decode steps. A decode graph's
        attention reads what it may before the step's own keys are there, and only a new request can share a prefix
        that this very step computes; any other plan of one step may have graphs of steps with prompts, if there are
        some with room for it. They are not several where experts' weights, which a large step reads once, would be
        read again for each."""
        if self.scorer.is_wanted(plan) or self.pooler.wants_all(plan):
            return []
        graph_runner = self.adapter_graphs if self._has_adapters(plan) else self.graph_runner
        if not plan.new and not self.pooler.find(plan).size and (graph := graph_runner.find(plan)) is not None:
            return [(graph, plan)]
        graphs = graph_runner.find_prefill(plan) if plan.num_steps == 1 else []
        return graphs if len(graphs) == 1 or self.decoder.spec.experts is None else []

    def _replay_all(
        self, plan: StepPlan, graphs: list[tuple[CapturedGraph, StepPlan]], writes: list[Int32s]
    ) -> Callable[[], StepResult]:
        """A step that needs nothing but its graphs; what the plan changes comes with the first."""
        outputs = []
        for graph, part in graphs:
            outputs.append((self._replay(graph, part, writes), graph.bucket.sample_places(part)))
            writes = [NO_WRITES]
        return self._answered(plan, lambda: np.concatenate([out[places] for out, places in outputs]), len(graphs))

    def _replay_and_read(
        self, graphs: list[tuple[CapturedGraph, StepPlan]], writes: list[Int32s], with_states: bool
    ) -> list[torch.Tensor]:
        """A step whose samples are looked at again: their token ids and logits, and if wanted their hidden states, in
        the plan's order."""
        found = []
        for graph, part in graphs:
            self._replay(graph, part, writes)
            writes, wanted = [NO_WRITES], graph.bucket.sample_places(part).astype(np.int32)
            n = len(wanted)
            left = [graph.token_ids, self.graph_logits, *([self.graph_hidden] if with_states else [])]
            if n and (wanted[-1] >= n or len(graphs) > 1):  # others are between them, or the next graph writes there
                index = self.transfers.upload(wanted)
                left = [x.index_select(0, index) for x in left]
            found.append([x[:n] for x in left])
        return found[0] if len(found) == 1 else [torch.cat(parts) for parts in zip(*found, strict=True)]

    def _replay(self, graph: CapturedGraph, plan: StepPlan, writes: list[Int32s]) -> Int32s:
        """Start the plan's steps; returns where their samples will be."""
        if not self.graph_runner.graph_io.has_room(graph.bucket.num_ints, writes):  # the tokens of a long prompt
            self._apply_writes(writes)
            writes = [NO_WRITES]
        return self.graph_runner.replay(graph, plan, writes)


def _to_host(x: torch.Tensor) -> torch.Tensor:
    if x.device.type == "cpu":
        return x.clone()
    return torch.empty(x.shape, dtype=x.dtype, pin_memory=True).copy_(x, non_blocking=True)
