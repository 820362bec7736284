"""CUDA graphs of decode steps: captured by the shape of their rows, and replayed from and to memory of the host."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from runtime.core.plan import MAX_STEPS, Int32s, StepPlan
from runtime.core.speculation import MAX_DRAFT_TOKENS
from runtime.worker.graph_io import GraphIO

_LARGEST_GRAPH = 512  # rows
_LARGEST_VERIFIED = 128  # tokens of a step of drafts that has a graph; larger batches do not gain by drafts
_NO_ROWS = StepPlan(0)
NO_WRITES: Int32s = np.zeros(1, np.int32)  # as kernels/scatter_writes.py has them


class Bucket(NamedTuple):
    """The shape of a graph's step: `num_rows` rows of `row_len` tokens, each of which is followed by a sample."""

    row_len: int
    num_rows: int

    @property
    def num_tokens(self) -> int:
        return self.row_len * self.num_rows

    def split(self, rows: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Rows as kernels/graph_io.py has them: slots, tokens and sampled slots; starts, nothing, sampled positions."""
        return tuple(rows.split_with_sizes([self.num_rows, self.num_rows, self.num_tokens] * 2))


class Replayable(Protocol):
    """A captured torch.cuda.CUDAGraph."""

    def replay(self) -> None: ...


@dataclass(slots=True)
class CapturedGraph:
    """The captured step of a bucket."""

    bucket: Bucket
    graph: Replayable
    token_ids: torch.Tensor  # [num_tokens] int32, what the replay samples


class GraphRunner:
    """Captures a step that it is handed, in buckets, and replays the bucket that suits a plan. It keeps no reference to
    the step itself, whose owner keeps this one."""

    def __init__(self, state: torch.Tensor, num_slots: int, max_model_len: int, block_size: int) -> None:
        """`state` is the requests' state as one line, which a step's input changes; slot `num_slots` is padding's."""
        self.state, self.num_slots, self.max_model_len = state, num_slots, max_model_len
        self.max_rows = max(num_slots, _LARGEST_VERIFIED)
        input_size = self.max_rows * _max_ints_of_a_row(block_size)
        self.graph_io = GraphIO(input_size, self.max_rows * MAX_STEPS, state.device)
        # The rows of a graph's input, as kernels/graph_io.py has them.
        self.rows = torch.zeros(6 * self.max_rows, dtype=torch.int32, device=state.device)
        self.graphs: dict[int, list[CapturedGraph]] = {}  # tokens of a row -> by rising number of rows

    def __len__(self) -> int:
        return sum(map(len, self.graphs.values()))

    def buckets(self, row_lens: Sequence[int]) -> list[Bucket]:
        """One a batch size, largest first; and as many for rows of each of `row_lens` tokens, of batches for which they
        may pay."""
        largest = min(self.num_slots, _LARGEST_GRAPH)
        buckets = [Bucket(1, size) for size in graph_sizes(largest)]
        for row_len in row_lens:
            buckets += [Bucket(row_len, size) for size in graph_sizes(min(largest, _LARGEST_VERIFIED // row_len))]
        return sorted(buckets, key=lambda bucket: -bucket.num_tokens)

    def capture(self, buckets: Sequence[Bucket], step: Callable[[Bucket, torch.Tensor], torch.Tensor]) -> None:
        """Capture `step` for each of the buckets: from the rows of its input to the token ids that it samples. The
        first ones are the largest, so that the others find their memory in the pool."""
        pool = torch.cuda.graph_pool_handle()
        for bucket in buckets:
            self.graph_io.write_input(1, self._rows_of(bucket), [NO_WRITES])
            self.run(bucket, step)  # kernels are compiled and workspaces made outside of a capture
            torch.cuda.synchronize()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, pool=pool):
                token_ids = self.run(bucket, step)
            self.graphs.setdefault(bucket.row_len, []).insert(0, CapturedGraph(bucket, graph, token_ids))

    def run(self, bucket: Bucket, step: Callable[[Bucket, torch.Tensor], torch.Tensor]) -> torch.Tensor:
        """Read the input, run `step`, write the output: all that a graph captures."""
        rows = self.rows[: 2 * (2 * bucket.num_rows + bucket.num_tokens)]
        self.graph_io.read_input(rows, self.state)
        token_ids = step(bucket, rows)
        self.graph_io.write_output(token_ids, rows)
        return token_ids

    def find(self, plan: StepPlan) -> CapturedGraph | None:
        """The smallest graph whose rows have room for the plan's."""
        if not self.graphs:
            return None
        most = int(plan.num_tokens.max())
        row_len = min((n for n in self.graphs if n >= most), default=None)
        if row_len is None or len(plan.slots) > self.graphs[row_len][-1].bucket.num_rows:
            return None
        if row_len > 1 and int(plan.num_computed.max()) + row_len > self.max_model_len:
            return None  # the tokens that fill up a row have positions, too
        graphs = self.graphs[row_len]
        return graphs[bisect_left(graphs, len(plan.slots), key=lambda g: g.bucket.num_rows)]

    def replay(self, graph: CapturedGraph, plan: StepPlan, writes: list[Int32s]) -> Int32s:
        """Start the plan's steps. Returns where their samples, and those of the padding, will be (GraphIO)."""
        output = self.graph_io.write_input(plan.num_steps, self._rows_of(graph.bucket, plan), writes)
        for _ in range(plan.num_steps):
            graph.graph.replay()
        return output

    def _rows_of(self, bucket: Bucket, plan: StepPlan = _NO_ROWS) -> Int32s:
        """The rows of a graph's input for a plan, padded to the bucket. What is sampled in places where nothing is
        wanted goes to the slot of the padding."""
        n, (row_len, size) = len(plan.slots), bucket
        rows = np.empty((2, size * (2 + row_len)), np.int32)
        slots, starts = rows[:, :size]
        samples = rows[:, 2 * size :].reshape(2, size, row_len)
        slots[:n], slots[n:], starts[:n], starts[n:] = plan.slots, self.num_slots, plan.num_computed, 0
        rows[0, size : size + n], rows[0, size + n : 2 * size], rows[1, size : 2 * size] = plan.num_tokens, 1, 0
        samples[0], samples[1] = slots[:, None], starts[:, None] + np.arange(1, row_len + 1, dtype=np.int32)
        if plan.num_samples.sum() < n * row_len:
            samples[0, :n][~wanted_samples(plan, row_len)] = self.num_slots
            np.minimum(samples[1], self.max_model_len - 1, out=samples[1])
        return rows.reshape(-1)


def wanted_samples(plan: StepPlan, row_len: int) -> NDArray[np.bool_]:
    """[num_rows, row_len] after which tokens of rows of `row_len` the plan samples."""
    at, ends = np.arange(row_len, dtype=np.int32), plan.num_tokens[:, None]
    return (at < ends) & (at >= ends - plan.num_samples[:, None])


def graph_sizes(largest: int) -> list[int]:
    """1, 2, 4, then eights up to 64, then sixteens; the largest batch always has its own."""
    sizes = [1, 2, 4, *range(8, 64, 8), *range(64, largest + 1, 16)]
    return [*(s for s in sizes if s < largest), largest]


def _max_ints_of_a_row(block_size: int) -> int:
    """The most ints of a graph's input for each row: with most drafts, and blocks for most steps."""
    row_len, num_blocks = MAX_DRAFT_TOKENS + 1, 2 + MAX_STEPS // block_size
    return 2 * (2 + row_len) + 3 * num_blocks + 2 + row_len
