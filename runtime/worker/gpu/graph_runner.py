"""GraphRunner: CUDA graphs of steps, captured by the shape of their rows, replayed from and to host memory."""

from __future__ import annotations

import gc
from bisect import bisect_left, insort
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from copy import copy
from dataclasses import dataclass
from functools import partial
from itertools import islice
from typing import Any, NamedTuple, Protocol, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray

from runtime.base.arrays import Int32s
from runtime.base.types import MAX_MATCHED_TOKENS
from runtime.core.plan import MAX_STEPS, StepPlan
from runtime.worker.gpu.device_slots import NO_WRITES
from runtime.worker.gpu.graph_io import MAX_PIECES, GraphIO
from runtime.worker.gpu.step_rows import MixedShape, cut

_LARGEST_GRAPH = 512  # rows in a decode step
MAX_VERIFIED = 128  # tokens in a step with draft tokens that has a graph; larger batches do not gain by drafts

# A long row's least tokens, on average, in a graph for few prompts and in one for many. Each row has a sample.
_FEW_LONG_ROWS, _MANY_LONG_ROWS = 32, 8
# (decoding rows with prompts, most tokens in a graph for this number of rows). Another serves any number of rows.
# Unused rows cost one kernel's empty programs, and samples.
_SHORT_SIZES = (0, 256), (16, 1024), (64, 2048)
_MOST_PADDING = 128  # tokens, in a graph with more than _FEW_TOKENS
_FEW_TOKENS = 1024
_LEAST_REST = 512  # step tokens that are left for the next piece
_NEW_TOKENS = 8192  # tokens in requests that enter by a graph's input
_NO_ROWS = StepPlan(0)

T = TypeVar("T")


@contextmanager
def no_garbage_collection() -> Iterator[None]:
    """Do not collect cycles: one may hold a graph, and freeing a graph during a capture invalidates the capture."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


class DecodeShape(NamedTuple):
    """The shape of a decode step's graph: `num_rows` rows with `row_len` tokens, a sample after each token."""

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
        """Length of the rows in a graph's input."""
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
        """The numbers of the graph's samples that the plan wants, in the plan's order."""
        return np.flatnonzero(self._is_wanted(plan))

    def _is_wanted(self, plan: StepPlan) -> NDArray[np.bool_]:
        """[num_rows, row_len] true for the tokens after which the plan samples."""
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
    token_ids: torch.Tensor  # [num_samples] int32, the last replay's samples


class GraphRunner:
    """Captures a step for each of several shapes, and finds the graphs for a plan.

    It does not keep a reference to the step: the step's owner keeps this object."""

    def __init__(self, state: torch.Tensor, num_slots: int, max_model_len: int, block_size: int) -> None:
        """`state` is the flat state of DeviceSlots. Inputs change it; its null slot is `num_slots`."""
        self.state, self.num_slots, self.max_model_len = state, num_slots, max_model_len
        self.reach = max_model_len  # positions in rows of decode graphs are below; a head needs one more
        self.max_rows = max(num_slots, MAX_VERIFIED)
        input_size = self.max_rows * _max_ints_of_a_row(block_size) + _NEW_TOKENS
        self.graph_io = GraphIO(input_size, self.max_rows * MAX_STEPS, state.device)
        # The rows in a graph's input, as kernels/step/graph_io.py has them.
        self.rows = torch.zeros(10 * self.max_rows, dtype=torch.int32, device=state.device)
        self.graphs: dict[int, list[CapturedGraph]] = {}  # tokens in a row -> graphs by rising number of rows
        self.prefill_graphs: list[CapturedGraph] = []  # sorted by tokens, then short rows
        self.pool: Any = None  # memory that all graphs share; None until the first capture makes it

    def sibling(self) -> GraphRunner:
        """A runner for the graphs of another step, with the same input and output."""
        other = copy(self)
        other.graphs, other.prefill_graphs = {}, []
        return other

    def __len__(self) -> int:
        return sum(map(len, self.graphs.values())) + len(self.prefill_graphs)

    def decode_shapes(self, row_lens: Sequence[int]) -> list[DecodeShape]:
        """One shape a batch size, for rows with one token and with each of `row_lens` tokens."""
        largest = min(self.num_slots, _LARGEST_GRAPH)
        shapes = [DecodeShape(1, size) for size in graph_sizes(largest)]
        for row_len in row_lens:
            shapes += [DecodeShape(row_len, size) for size in graph_sizes(min(largest, MAX_VERIFIED // row_len))]
        return shapes

    def prefill_shapes(self, most_tokens: int) -> list[MixedShape]:
        """Shapes for steps with prompts, up to `most_tokens` tokens. Padding lies within one slot's context.

        The shape with the most decoding rows is also the shape for many prompts."""
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
        """Capture `step`, which maps the rows of an input to sampled token ids, for each shape. The largest shapes come
        first, so that the others find their memory in the pool."""
        for shape in sorted(shapes, key=lambda shape: -shape.num_tokens):
            self.graph_io.write_input(1, shape.pack(_NO_ROWS, self.num_slots), [NO_WRITES])
            self.add(CapturedGraph(shape, *self.captured(partial(self.run, shape, step))))

    def captured(self, run: Callable[[], T]) -> tuple[Replayable, T]:
        """A graph of `run`, and what its replays leave."""
        self.pool = self.pool or torch.cuda.graph_pool_handle()
        run()  # outside the capture, to compile kernels and make workspaces
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with no_garbage_collection(), torch.cuda.graph(graph, pool=self.pool):
            left = run()
        return graph, left

    def add(self, graph: CapturedGraph) -> None:
        """Replay this graph from now on for the plans that it suits."""
        graphs = self.prefill_graphs
        if isinstance(graph.shape, DecodeShape):
            graphs = self.graphs.setdefault(graph.shape.row_len, [])
        insort(graphs, graph, key=lambda g: g.shape)

    def run(
        self, shape: DecodeShape | MixedShape, step: Callable[[DecodeShape | MixedShape, torch.Tensor], torch.Tensor]
    ) -> torch.Tensor:
        """Read the input, run `step`, write the output: the work that a graph captures."""
        rows = self.rows[: shape.num_ints]
        self.graph_io.read_input(rows, self.state)
        token_ids = step(shape, rows)
        self.graph_io.write_output(token_ids, rows)
        return token_ids

    def find(self, plan: StepPlan) -> CapturedGraph | None:
        """The smallest graph of a decode step that has room for the plan's rows."""
        if not self.graphs:
            return None
        most = int(plan.num_tokens.max())
        row_len = min((n for n in self.graphs if n >= most), default=None)
        if row_len is None or len(plan.slots) > self.graphs[row_len][-1].shape.num_rows:
            return None
        if int(plan.num_computed.max()) + row_len > self.reach:
            return None  # a row's padding tokens have positions, too
        graphs = self.graphs[row_len]
        return graphs[bisect_left(graphs, len(plan.slots), key=lambda g: g.shape.num_rows)]

    def find_prefill(self, plan: StepPlan) -> list[tuple[CapturedGraph, StepPlan]]:
        """The graphs with prompts that have room for the plan, or for its parts one after another. Empty if a part does
        not fit any graph."""
        sizes = piece_sizes(int(plan.num_tokens.sum()), sorted({g.shape.num_tokens for g in self.prefill_graphs}))
        parts = [plan] if len(sizes) == 1 else cut(plan, sizes)
        found = [(graph, part) for part in parts if (graph := self._smallest(MixedShape.of(part))) is not None]
        return found if len(found) == len(parts) <= MAX_PIECES else []

    def _smallest(self, own: MixedShape) -> CapturedGraph | None:
        """The smallest graph with prompts that has room; None if its padding takes longer than launches."""
        first = bisect_left(self.prefill_graphs, own.num_tokens, key=lambda g: g.shape.num_tokens)
        for graph in islice(self.prefill_graphs, first, None):
            if isinstance(graph.shape, MixedShape) and graph.shape.has_room(own):
                size = graph.shape.num_tokens
                return graph if size <= max(own.num_tokens + _MOST_PADDING, _FEW_TOKENS) else None
        return None

    def replay(self, graph: CapturedGraph, plan: StepPlan, writes: list[Int32s]) -> Int32s:
        """Start the plan's steps. Returns the memory that will hold all rows' samples, padding included."""
        output = self.graph_io.write_input(plan.num_steps, graph.shape.pack(plan, self.num_slots), writes)
        for _ in range(plan.num_steps):
            graph.graph.replay()
        return output


def graph_sizes(largest: int) -> list[int]:
    """Batch sizes of decode graphs: 1, 2, 4, eights up to 64, then sixteens, and the largest."""
    return _up_to(largest, [1, 2, 4, *range(8, 64, 8), *range(64, largest + 1, 16)])


def prefill_sizes(largest: int) -> list[int]:
    """Token counts for graphs with prompts: by 64 up to 512, by 128 up to 2,048, and the largest. Larger steps are cut
    into pieces with these sizes.

    Below 128 tokens a step's time is that of reading the weights. Above, it grows with tokens and padding."""
    return _up_to(largest, [*range(64, 512, 64), *range(512, 2049, 128)]) if largest else []


def piece_sizes(num_tokens: int, sizes: Sequence[int]) -> list[int]:
    """Cut a step into few pieces with these sizes. The last piece may be up to _MOST_PADDING tokens smaller.

    A small last piece is avoided, because it still reads all weights."""
    pieces: list[int] = []
    while (fits := [size for size in sizes if size <= num_tokens]) and not any(
        0 <= size - num_tokens <= _MOST_PADDING for size in sizes
    ):
        pieces.append(max((size for size in fits if size <= num_tokens - _LEAST_REST), default=fits[-1]))
        num_tokens -= pieces[-1]
    return [*pieces, num_tokens]


def _up_to(largest: int, sizes: Sequence[int]) -> list[int]:
    """The smaller ones of `sizes`, then `largest`."""
    return [*(size for size in sizes if size < largest), largest]


def _max_ints_of_a_row(block_size: int) -> int:
    """The most ints that a row has in a graph's input: all draft tokens, and blocks for a plan's steps."""
    row_len, num_blocks = MAX_MATCHED_TOKENS + 1, 2 + MAX_STEPS // block_size
    return 2 * (2 + row_len) + 3 * num_blocks + 2 + row_len
