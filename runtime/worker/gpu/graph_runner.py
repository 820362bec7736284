"""CUDA graphs of steps: captured by the shape of their rows, and replayed from and to memory of the host."""

from __future__ import annotations

import gc
from bisect import bisect_left, insort
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from copy import copy
from dataclasses import dataclass
from itertools import islice
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from runtime.core.plan import MAX_DRAFT_TOKENS, MAX_STEPS, Int32s, StepPlan
from runtime.worker.gpu.device_slots import NO_WRITES
from runtime.worker.gpu.graph_io import MAX_PIECES, GraphIO
from runtime.worker.gpu.step_rows import MixedShape, cut

_LARGEST_GRAPH = 512  # rows of a decode step
MAX_VERIFIED = 128  # tokens of a step of drafts that has a graph; larger batches do not gain by drafts
# Tokens that a long row has on average, at least, in a graph for few and in one for many: each has a place to sample.
_FEW_LONG_ROWS, _MANY_LONG_ROWS = 32, 8
# Decoding rows beside prompts, and the tokens of a step up to which there is a graph for so many, besides one for all:
# too many cost some empty programs of one kernel, and places to sample.
_SHORT_SIZES = (0, 256), (16, 1024), (64, 2048)
_MOST_PADDING = 128  # tokens, in a graph of more than _FEW_TOKENS
_FEW_TOKENS = 1024
_LEAST_REST = 512  # tokens of a step that are left for its next piece
_NEW_TOKENS = 8192  # of requests that enter by a graph's input
_NO_ROWS = StepPlan(0)


@contextmanager
def no_garbage_collection() -> Iterator[None]:
    """Keeps cycles from being collected: one may hold a graph, and to free a graph within a capture invalidates it."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


class DecodeShape(NamedTuple):
    """The shape of a decode step's graph: `num_rows` rows of `row_len` tokens, a sample after each of them."""

    row_len: int
    num_rows: int

    @property
    def num_tokens(self) -> int:
        return self.row_len * self.num_rows

    @property
    def num_samples(self) -> int:
        return self.num_tokens

    @property
    def num_ints(self) -> int:
        """Of the rows of a graph's input."""
        return 2 * (2 * self.num_rows + self.num_tokens)

    def split(self, rows: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Split rows in the layout of kernels/step/graph_io.py."""
        return tuple(rows.split_with_sizes([self.num_rows, self.num_rows, self.num_tokens] * 2))

    def pack(self, plan: StepPlan, null_slot: int) -> Int32s:
        """The rows of a graph's input for a plan, padded to this shape. Samples that the plan does not want go to the
        null slot."""
        n, (row_len, size) = len(plan.slots), self
        rows = np.empty((2, size * (2 + row_len)), np.int32)
        slots, starts = rows[:, :size]
        samples = rows[:, 2 * size :].reshape(2, size, row_len)
        slots[:n], slots[n:], starts[:n], starts[n:] = plan.slots, null_slot, plan.num_computed, 0
        rows[0, size : size + n], rows[0, size + n : 2 * size], rows[1, size : 2 * size] = plan.num_tokens, 1, 0
        samples[0], samples[1] = slots[:, None], starts[:, None] + np.arange(1, row_len + 1, dtype=np.int32)
        if plan.num_samples.sum() < n * row_len:
            unwanted = ~self._is_wanted(plan)
            samples[0, :n][unwanted], samples[1, :n][unwanted] = null_slot, 0
        return rows.reshape(-1)

    def sample_places(self, plan: StepPlan) -> NDArray[np.intp]:
        """Which of the samples are the plan's, in its order."""
        return np.flatnonzero(self._is_wanted(plan))

    def _is_wanted(self, plan: StepPlan) -> NDArray[np.bool_]:
        """[num_rows, row_len] after which tokens of its rows the plan samples."""
        at, ends = np.arange(self.row_len, dtype=np.int32), plan.num_tokens[:, None]
        return (at < ends) & (at >= ends - plan.num_samples[:, None])


class Replayable(Protocol):
    """A captured torch.cuda.CUDAGraph."""

    def replay(self) -> None: ...


@dataclass(slots=True)
class CapturedGraph:
    """The captured step of a shape."""

    shape: DecodeShape | MixedShape
    graph: Replayable
    token_ids: torch.Tensor  # [num_samples] int32, what the replay samples


class GraphRunner:
    """Captures a step for each of several shapes, and finds the graphs for a plan. It keeps no reference to the step,
    whose owner keeps this object."""

    def __init__(self, state: torch.Tensor, num_slots: int, max_model_len: int, block_size: int) -> None:
        """`state` is the requests' state as one line, which a step's input changes; slot `num_slots` is padding's."""
        self.state, self.num_slots, self.max_model_len = state, num_slots, max_model_len
        self.max_rows = max(num_slots, MAX_VERIFIED)
        input_size = self.max_rows * _max_ints_of_a_row(block_size) + _NEW_TOKENS
        self.graph_io = GraphIO(input_size, self.max_rows * MAX_STEPS, state.device)
        # The rows of a graph's input, as kernels/step/graph_io.py has them.
        self.rows = torch.zeros(10 * self.max_rows, dtype=torch.int32, device=state.device)
        self.graphs: dict[int, list[CapturedGraph]] = {}  # tokens of a row -> by rising number of rows
        self.prefill_graphs: list[CapturedGraph] = []  # by rising numbers of tokens and of short rows
        self.pool: Any = None  # of the memory that all graphs share, as one replays at a time; None: a new one

    def beside(self) -> GraphRunner:
        """One without graphs, for those of another step, with the same input and output."""
        other = copy(self)
        other.graphs, other.prefill_graphs = {}, []
        return other

    def __len__(self) -> int:
        return sum(map(len, self.graphs.values())) + len(self.prefill_graphs)

    def decode_shapes(self, row_lens: Sequence[int]) -> list[DecodeShape]:
        """One a batch size; and as many for rows of each of `row_lens` tokens, of batches for which they may pay."""
        largest = min(self.num_slots, _LARGEST_GRAPH)
        shapes = [DecodeShape(1, size) for size in graph_sizes(largest)]
        for row_len in row_lens:
            shapes += [DecodeShape(row_len, size) for size in graph_sizes(min(largest, MAX_VERIFIED // row_len))]
        return shapes

    def prefill_shapes(self, most_tokens: int) -> list[MixedShape]:
        """Of steps with prompts of up to `most_tokens` tokens. Their padding lies within the context of one slot. Those
        for the most decoding rows are for many prompts, too."""
        shapes = []
        for num_tokens in prefill_sizes(min(most_tokens, self.max_model_len)):
            most_short = min(self.num_slots, num_tokens)
            for num_short in _up_to(most_short, [n for n, most in _SHORT_SIZES if num_tokens <= most]):
                tokens_of_a_row = _MANY_LONG_ROWS if num_short == most_short else _FEW_LONG_ROWS
                num_long = min(max(num_tokens // tokens_of_a_row, 8), self.num_slots)
                num_samples = min(num_short + num_long, self.max_rows)
                sizes = num_tokens, num_short, num_long + 1, num_samples
                shapes.append(MixedShape(*sizes, max_count=num_tokens, max_len=self.max_model_len))
        return shapes

    def capture(
        self,
        shapes: Sequence[DecodeShape | MixedShape],
        step: Callable[[DecodeShape | MixedShape, torch.Tensor], torch.Tensor],
    ) -> None:
        """Capture `step` for each of the shapes: from the rows of its input to the token ids that it samples. The
        largest come first, so that the others find their memory in the pool."""
        self.pool = self.pool or torch.cuda.graph_pool_handle()
        for shape in sorted(shapes, key=lambda shape: -shape.num_tokens):
            self.graph_io.write_input(1, shape.pack(_NO_ROWS, self.num_slots), [NO_WRITES])
            self.run(shape, step)  # kernels are compiled and workspaces made outside of a capture
            torch.cuda.synchronize()
            graph = torch.cuda.CUDAGraph()
            with no_garbage_collection(), torch.cuda.graph(graph, pool=self.pool):
                token_ids = self.run(shape, step)
            self.add(CapturedGraph(shape, graph, token_ids))

    def add(self, graph: CapturedGraph) -> None:
        """Replay this graph from now on, where it suits."""
        graphs = self.prefill_graphs
        if isinstance(graph.shape, DecodeShape):
            graphs = self.graphs.setdefault(graph.shape.row_len, [])
        insort(graphs, graph, key=lambda g: g.shape)

    def run(
        self, shape: DecodeShape | MixedShape, step: Callable[[DecodeShape | MixedShape, torch.Tensor], torch.Tensor]
    ) -> torch.Tensor:
        """Read the input, run `step`, write the output: all that a graph captures."""
        rows = self.rows[: shape.num_ints]
        self.graph_io.read_input(rows, self.state)
        token_ids = step(shape, rows)
        self.graph_io.write_output(token_ids, rows)
        return token_ids

    def find(self, plan: StepPlan) -> CapturedGraph | None:
        """The smallest graph of a decode step whose rows have room for the plan's."""
        if not self.graphs:
            return None
        most = int(plan.num_tokens.max())
        row_len = min((n for n in self.graphs if n >= most), default=None)
        if row_len is None or len(plan.slots) > self.graphs[row_len][-1].shape.num_rows:
            return None
        if row_len > 1 and int(plan.num_computed.max()) + row_len > self.max_model_len:
            return None  # the tokens that fill up a row have positions, too
        graphs = self.graphs[row_len]
        return graphs[bisect_left(graphs, len(plan.slots), key=lambda g: g.shape.num_rows)]

    def find_prefill(self, plan: StepPlan) -> list[tuple[CapturedGraph, StepPlan]]:
        """The graphs of steps with prompts that have room for the plan, or one after another for the parts of it; none
        if there are not all."""
        sizes = piece_sizes(int(plan.num_tokens.sum()), sorted({g.shape.num_tokens for g in self.prefill_graphs}))
        parts = [plan] if len(sizes) == 1 else cut(plan, sizes)
        found = [(graph, part) for part in parts if (graph := self._smallest(MixedShape.of(part))) is not None]
        return found if len(found) == len(parts) <= MAX_PIECES else []

    def _smallest(self, own: MixedShape) -> CapturedGraph | None:
        """The smallest graph of a step with prompts that has room, unless its padding takes longer than launches."""
        first = bisect_left(self.prefill_graphs, own.num_tokens, key=lambda g: g.shape.num_tokens)
        for graph in islice(self.prefill_graphs, first, None):
            if isinstance(graph.shape, MixedShape) and graph.shape.has_room(own):
                size = graph.shape.num_tokens
                return graph if size <= max(own.num_tokens + _MOST_PADDING, _FEW_TOKENS) else None
        return None

    def replay(self, graph: CapturedGraph, plan: StepPlan, writes: list[Int32s]) -> Int32s:
        """Start the plan's steps. Returns where their samples, and those of the padding, will be (GraphIO)."""
        output = self.graph_io.write_input(plan.num_steps, graph.shape.pack(plan, self.num_slots), writes)
        for _ in range(plan.num_steps):
            graph.graph.replay()
        return output


def graph_sizes(largest: int) -> list[int]:
    """1, 2, 4, then eights up to 64, then sixteens; the largest batch always has its own."""
    return _up_to(largest, [1, 2, 4, *range(8, 64, 8), *range(64, largest + 1, 16)])


def prefill_sizes(largest: int) -> list[int]:
    """By 64 up to 512, by 128 up to 2,048, and the largest: other steps above are pieces of these sizes. Below 128
    tokens a step is as long as reading the weights, and above its time grows with its tokens, padding's included."""
    return _up_to(largest, [*range(64, 512, 64), *range(512, 2049, 128)]) if largest else []


def piece_sizes(num_tokens: int, sizes: Sequence[int]) -> list[int]:
    """Cuts so many tokens into a few of these sizes, and a rest that is one of them but for some padding. A small rest
    would take as long as reading all weights, and is avoided."""
    pieces: list[int] = []
    while (fits := [size for size in sizes if size <= num_tokens]) and not any(
        0 <= size - num_tokens <= _MOST_PADDING for size in sizes
    ):
        pieces.append(max((size for size in fits if size <= num_tokens - _LEAST_REST), default=fits[-1]))
        num_tokens -= pieces[-1]
    return [*pieces, num_tokens]


def _up_to(largest: int, sizes: Sequence[int]) -> list[int]:
    """`largest`, and which of `sizes` are smaller."""
    return [*(size for size in sizes if size < largest), largest]


def _max_ints_of_a_row(block_size: int) -> int:
    """The most ints of a graph's input for each row: with most drafts, and blocks for most steps."""
    row_len, num_blocks = MAX_DRAFT_TOKENS + 1, 2 + MAX_STEPS // block_size
    return 2 * (2 + row_len) + 3 * num_blocks + 2 + row_len
