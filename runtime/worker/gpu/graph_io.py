"""GraphIO: the host's end of kernels/step/graph_io.py, an input ring for graphs and an output ring."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from numpy.typing import NDArray

from runtime.base.arrays import Int32s
from runtime.kernels.step.graph_io import HEAD, read_input, write_output

MAX_PIECES = 8  # graphs in a step
_NUM_ENTRIES = 2 * MAX_PIECES  # graphs that may be in flight


class GraphIO:
    """Two rings of pinned memory. An entry is used again after its step is over."""

    def __init__(self, input_size: int, output_size: int, device: torch.device) -> None:
        """Sizes in ints: the longest input without its head, and the longest output."""
        pinned = device.type == "cuda"
        self.input_ring = torch.zeros((_NUM_ENTRIES, HEAD + input_size), dtype=torch.int32, pin_memory=pinned)
        self.output_ring = torch.zeros((_NUM_ENTRIES, output_size), dtype=torch.int32, pin_memory=pinned)
        self.control = torch.zeros(3, dtype=torch.int32, device=device)
        self._inputs: NDArray[np.int32] = self.input_ring.numpy()
        self._outputs: NDArray[np.int32] = self.output_ring.numpy()
        self._over: list[Callable[[], object]] = [lambda: None] * _NUM_ENTRIES
        self._entry = -1

    def write_input(self, repeats: int, rows: Int32s, writes: list[Int32s]) -> Int32s:
        """Write the input for a graph's next `repeats` replays.

        `writes` have the layout in kernels/step/scatter_writes.py. Returns the memory that will hold the output after
        the replays. The caller copies from it, because the entry is used again."""
        self._entry = (self._entry + 1) % _NUM_ENTRIES
        self._over[self._entry]()
        entry = self._inputs[self._entry]
        entry[0], entry[1] = repeats, writes[0][0]
        entry[HEAD : HEAD + len(rows)] = rows
        np.concatenate((writes[0][1:], *writes[1:]), out=entry[HEAD + len(rows) :][: sum(map(len, writes)) - 1])
        output: Int32s = self._outputs[self._entry]
        return output

    def has_room(self, num_ints: int, writes: list[Int32s]) -> bool:
        """True if an input with rows of `num_ints` and these writes is not too long."""
        return HEAD + num_ints + sum(map(len, writes)) <= len(self._inputs[0])

    def release_after(self, wait: Callable[[], object], num_inputs: int = 1) -> None:
        """The step of the last `num_inputs` inputs is over when `wait()` returns."""
        for i in range(num_inputs):
            self._over[self._entry - i] = wait

    def read_input(self, rows: torch.Tensor, state: torch.Tensor) -> None:
        """At the head of a graph: read its rows, and apply the input's writes to the state."""
        read_input(self.input_ring, self.control, rows, state)

    def write_output(self, token_ids: torch.Tensor, rows: torch.Tensor) -> None:
        """At the end of a graph: write its output, and advance the rows by one token for the next replay."""
        write_output(token_ids, self.control, rows, self.output_ring)
