"""Steps of the Triton kernels: all state of the requests is on the device, and the host waits for nothing.

A step is the plan's rows (and what the plan changes, applied first), the forward pass, and sampling, all on one stream,
so that plan order is stream order (C2). A step of rows of one token, or of a few, is one CUDA graph from rows to
tokens, whose input and output pass through graph_io.py; others are launched one function after another.

The state of a slot is one row of int32, and the last row belongs to the padding of a graph's batch: its table and its
parameters stay zero, so that padded rows compute into the null block.

    state[slot] = [ token ids: max_model_len | block table: max_blocks | sampling parameters: NUM_PARAMS ]
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch

from runtime.core.plan import Int32s, StepPlan, StepResult, joined, last_tokens
from runtime.kernels.paged_attention import PagedBatch, PagedRows
from runtime.kernels.sample import NUM_PARAMS
from runtime.kernels.scatter_writes import scatter_writes
from runtime.kernels.step_inputs import build_inputs
from runtime.models.decoder import Decoder
from runtime.models.forward_batch import ForwardBatch
from runtime.worker.device_automata import DeviceAutomata
from runtime.worker.device_sampler import DeviceSampler
from runtime.worker.grammar_state import GrammarState
from runtime.worker.graph_runner import NO_WRITES, Bucket, CapturedGraph, GraphRunner, wanted_samples
from runtime.worker.kv_cache import KVCache
from runtime.worker.prompt_scorer import PromptScorer
from runtime.worker.sampler import Logprobs
from runtime.worker.steps import make_result
from runtime.worker.transfers import Transfers


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
    ) -> None:
        self.decoder, self.cache = decoder, cache
        self.num_slots, self.max_model_len, self.eos_token_ids = num_slots, max_model_len, eos_token_ids
        self.grammar_state = grammar_state
        self.device, self.block_size = cache.device, cache.block_size
        self.max_blocks = -(-max_model_len // self.block_size)
        self.table_at, self.params_at = max_model_len, max_model_len + self.max_blocks
        self.stride = -(-(self.params_at + NUM_PARAMS) // 4) * 4
        self.state = torch.zeros((num_slots + 1, self.stride), dtype=torch.int32, device=self.device)
        self.tokens = self.state[:, :max_model_len]
        self.tables = self.state[:, self.table_at : self.params_at]
        self.params = self.state[:, self.params_at : self.params_at + NUM_PARAMS]
        self.transfers = Transfers(self.device)
        self.graph_runner = GraphRunner(self.state.view(-1), num_slots, max_model_len, self.block_size)
        self.graph_logits = torch.empty(0, device=self.device)  # [num_tokens, vocab], of the last replay
        self.row_numbers = torch.arange(self.graph_runner.max_rows + 1, dtype=torch.int32, device=self.device)
        self.reset()

    def reset(self) -> None:
        """Forget all requests."""
        self.state.zero_()
        vocab_size = self.decoder.spec.vocab_size
        self.sampler = DeviceSampler(self.num_slots, vocab_size, self.eos_token_ids, self.transfers)
        self.scorer = PromptScorer(self.decoder, self.num_slots)
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
            self.grammar_state.remove(slot)
        for new in plan.new:
            self.grammar_state.add(new)
        writes = self._state_writes(plan)
        sampling, sampled_after = last_tokens(plan, plan.num_samples)
        slots, positions = plan.slots[sampling], sampled_after + 1
        prompts = None
        plain = self.sampler.is_plain(slots, positions)
        if graph := self._graph_for(plan):
            output, count = self.graph_runner.replay(graph, plan, writes), graph.bucket.row_len
            if plain:
                return self._answered(plan, lambda: output[np.flatnonzero(wanted_samples(plan, count))])
            wanted = np.flatnonzero(wanted_samples(plan, count)).astype(np.int32)
            token_ids, logits = graph.token_ids[: len(wanted)], self.graph_logits[: len(wanted)]
            if len(wanted) < len(plan.slots) * count:
                index = self.transfers.upload(wanted)
                token_ids, logits = graph.token_ids.index_select(0, index), self.graph_logits.index_select(0, index)
        else:
            self._apply_writes(writes)
            token_ids, logits, prompts = self._run(plan, sampling, slots, positions)
        logprobs = masks = None
        if not plain:
            guessed = len(plan.draft_token_ids) > 0 and bool(self.sampler.penalised[slots].any())
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
        wait = self.transfers.end(lambda: make_result(plan.step_id, host, host_logprobs, masks))
        if graph is not None:
            self.graph_runner.graph_io.release_after(wait)
        if masks is not None:
            self.grammar_state.sampled(masks, lambda: wait().token_ids)
        return wait

    def _launch_repeated(self, plan: StepPlan) -> Callable[[], StepResult]:
        """With a graph and nothing to add to its samples, replays that the host only starts; else step by step."""
        graph = self._graph_for(plan)
        within = np.arange(1, plan.num_steps + 1, dtype=np.int32)
        slots, positions = np.repeat(plan.slots, plan.num_steps), (plan.num_computed[:, None] + within).reshape(-1)
        if graph is None or len(plan.freed) or not self.sampler.is_plain(slots, positions):
            waits = [self.launch(one) for one in plan.expanded()]
            return lambda: joined([wait() for wait in waits])
        self.transfers.begin()
        output = self.graph_runner.replay(graph, plan, self._state_writes(plan))
        output = output[: plan.num_steps * graph.bucket.num_rows]
        return self._answered(plan, lambda: output.reshape(plan.num_steps, -1)[:, : len(plan.slots)].T.flatten())

    def _answered(self, plan: StepPlan, read: Callable[[], Int32s]) -> Callable[[], StepResult]:
        """The wait for a replayed graph, which copies from its output."""
        wait = self.transfers.end(lambda: StepResult(plan.step_id, read()))
        self.graph_runner.graph_io.release_after(wait)
        return wait

    # ---- what plans change ----------------------------------------------------------------------------------------

    def _state_writes(self, plan: StepPlan) -> list[Int32s]:
        """The plan's changes of the state: block tables, tokens and parameters of new requests, drafts; end to end as
        kernels/scatter_writes.py has them."""
        if not (plan.new or plan.block_table_writes.shape[1] or len(plan.draft_token_ids)):
            return [NO_WRITES]
        slots, index, blocks = plan.block_table_writes
        # A block may be replaced in the plan that wrote it: the last one counts, and kernels know no order.
        tables = dict(zip((slots * self.stride + self.table_at + index).tolist(), blocks.tolist(), strict=True))
        places, lengths = list(tables), [1] * len(tables)
        values = [np.fromiter(tables.values(), np.int32, len(tables))]
        for new in plan.new:
            row = new.slot * self.stride
            places += (row, row + self.params_at)
            lengths += (len(new.token_ids), NUM_PARAMS)
            values += (new.token_ids, self.sampler.add(new))
            self.scorer.add(new)
        given = np.flatnonzero(plan.draft_lens)
        if len(given):
            places += (plan.slots * self.stride + plan.ends - plan.draft_lens)[given].tolist()
            lengths += plan.draft_lens[given].tolist()
        return [np.array([len(places), *places, *lengths], np.int32), *values, plan.draft_token_ids]

    def _apply_writes(self, writes: list[Int32s]) -> None:
        if num_writes := int(writes[0][0]):
            scatter_writes(self.state.view(-1), self.transfers.upload(*writes), num_writes)

    # ---- one by one -----------------------------------------------------------------------------------------------

    def _run(
        self, plan: StepPlan, sampling: np.ndarray, slots: Int32s, positions: Int32s
    ) -> tuple[torch.Tensor, torch.Tensor, Logprobs | None]:
        """A step of any rows, those of one token first on the device. Token ids and logits of the samples in the
        plan's order; log-probabilities of prompts."""
        order = np.argsort(plan.num_tokens > 1, kind="stable")
        rows, starts, counts = plan.slots[order], plan.num_computed[order], plan.num_tokens[order]
        ends = np.cumsum(counts, dtype=np.int32)
        size, num_short, num_tokens, most = len(rows), int((counts == 1).sum()), int(ends[-1]), int(counts.max())
        firsts = np.concatenate((np.zeros(1, np.int32), ends))
        first = np.empty(size, np.int32)  # where each row's token at position 0 would be
        first[order] = ends - (starts + counts)
        sampled = first[sampling] + positions - 1
        arrays = [rows, starts, firsts, firsts[num_short:] - firsts[num_short], sampled, slots, positions]
        parts = self.transfers.upload(*arrays).split_with_sizes([len(a) for a in arrays])
        d_rows, d_starts, d_firsts, d_firsts_long, d_sampled, d_slots, d_positions = parts
        inputs = build_inputs(d_rows, d_starts, d_firsts, self.tokens, self.tables, self.block_size, num_tokens, most)
        attending = []
        for part, q_starts in ((slice(num_short), d_firsts), (slice(num_short, size), d_firsts_long)):
            if len(counts[part]):
                attending.append(PagedRows(
                    slots=d_rows[part], starts=d_starts[part], q_starts=q_starts, tables=self.tables,
                    num_rows=len(counts[part]), num_tokens=int(counts[part].sum()), max_count=int(counts[part].max()),
                    max_len=int((starts + counts)[part].max()),
                ))  # fmt: skip
        hidden = self.decoder.forward(ForwardBatch(*inputs, PagedBatch(num_tokens, attending)), self.cache.layers)
        scored, prompts = self.scorer.find(plan, first + plan.ends - 1, self.stride), None
        if scored.size:
            prompts = self.scorer.score(hidden, self.state.view(-1), self.transfers.upload(scored))
        if not len(sampling):
            return d_sampled, hidden[:0], prompts
        logits = self.decoder.logits(hidden.index_select(0, d_sampled))
        filters = bool(self.sampler.filtered[slots].any())
        sampled = self.sampler.sample(logits, d_slots, d_positions, self.tokens, self.params, filters)
        return sampled, logits, prompts

    # ---- as graphs ------------------------------------------------------------------------------------------------

    @torch.inference_mode()
    def capture_graphs(self, row_lens: Sequence[int]) -> None:
        """Graphs for rows of one token and of each of `row_lens` tokens."""
        buckets = self.graph_runner.buckets(row_lens)
        shape = buckets[0].num_tokens, self.decoder.spec.vocab_size
        self.graph_logits = torch.empty(shape, dtype=torch.float32, device=self.device)
        self.graph_runner.capture(buckets, self.decode)

    def decode(self, bucket: Bucket, graph_rows: torch.Tensor) -> torch.Tensor:
        """The step of a graph: a token after each token of the rows of its input."""
        (count, size), num_tokens = bucket, bucket.num_tokens
        slots, own_counts, sample_slots, starts, _, positions = bucket.split(graph_rows)
        firsts = self.row_numbers[: size + 1]
        firsts = firsts if count == 1 else firsts * count
        inputs = build_inputs(
            slots, starts, firsts, self.tokens, self.tables, self.block_size, num_tokens, count,
            None if count == 1 else own_counts,
        )  # fmt: skip
        rows = PagedRows(
            slots, starts, firsts, self.tables, size, num_tokens, count, self.max_model_len, prefix_ready=True
        )
        hidden = self.decoder.forward(ForwardBatch(*inputs, PagedBatch(num_tokens, [rows])), self.cache.layers)
        logits = self.decoder.logits(hidden, out=self.graph_logits[:num_tokens])
        return self.sampler.sample(logits, sample_slots, positions, self.tokens, self.params)

    def _graph_for(self, plan: StepPlan) -> CapturedGraph | None:
        """The graph that suits the plan, if it may have one.

        A graph's attention reads what it may before the step's own keys are there, and only a new request can share a
        prefix that this very step computes. Its rows score no token of a prompt."""
        return None if plan.new or self.scorer.is_wanted(plan) else self.graph_runner.find(plan)


def _to_host(x: torch.Tensor) -> torch.Tensor:
    if x.device.type == "cpu":
        return x.clone()
    return torch.empty(x.shape, dtype=x.dtype, pin_memory=True).copy_(x, non_blocking=True)
