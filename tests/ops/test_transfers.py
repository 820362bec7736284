"""Copies of steps, on a CPU, where they finish at once."""

from concurrent.futures import ThreadPoolExecutor

import numpy as np
import torch

from runtime.kernels.step.graph_io import read_input_torch, write_output_torch
from runtime.worker.gpu.graph_io import GraphIO
from runtime.worker.gpu.transfers import Transfers

CPU = torch.device("cpu")


def test_uploads_keep_type_and_shape():
    transfers = Transfers(CPU)
    for dtype in (np.int32, np.int64, np.float32):
        parts = [np.arange(n).astype(dtype) for n in (3, 0, 5)]
        assert torch.equal(transfers.upload(*parts), torch.from_numpy(np.concatenate(parts)))
    table = np.arange(12, dtype=np.int32).reshape(3, 4)
    assert torch.equal(transfers.upload(table), torch.from_numpy(table))
    assert transfers.upload(np.zeros((0, 4), np.int32)).shape == (0, 4)


def test_a_step_that_needs_more_memory_keeps_its_data():
    transfers = Transfers(CPU)
    transfers.begin()
    kept = [transfers.upload(np.full(n, i, np.int32)) for i, n in enumerate((1, 7000, 20_000, 3, 100_000))]
    assert all((values == i).all() for i, values in enumerate(kept))


def test_results_survive_reuse_of_their_buffer():
    """Steps in flight have memory of their own. The memory of a step is used again once its result was read."""
    transfers, pending = Transfers(CPU), []
    for round_ in range(20):
        for i in range(3):
            transfers.begin()
            host = transfers.download(torch.full((4,), 10 * round_ + i, dtype=torch.int32))
            pending.append(transfers.end(lambda host=host: host.tolist()))
        with ThreadPoolExecutor(4) as threads:
            got = list(threads.map(lambda result: result(), [*pending, *pending]))
        assert got == 2 * [[10 * round_ + i] * 4 for i in range(3)]
        assert [result() for result in pending] == got[:3]
        pending = []
    assert len(transfers._free) <= 3


def test_a_buffer_is_reused_only_after_its_step():
    graph_io, waited = GraphIO(input_size=20, output_size=4, device=CPU), []
    rows, no_writes = np.arange(6, dtype=np.int32), [np.zeros(1, np.int32)]
    for step in range(40):
        graph_io.write_input(1, rows + step, no_writes)
        assert waited == list(range(step - 15)), "the step sixteen before this one had the entry"
        graph_io.release_after(lambda step=step: waited.append(step))
    outputs, taken, state = [], torch.zeros(6, dtype=torch.int32), torch.zeros(9, dtype=torch.int32)
    graph_io = GraphIO(input_size=20, output_size=6, device=CPU)
    for step in range(40):  # with the device's end, which counts too
        writes = [np.array([1, step % 9, 1], np.int32), np.array([step], np.int32)] if step % 3 else no_writes
        output = graph_io.write_input(2, rows + 100 * step, writes)
        for repeat in range(2):
            read_input_torch(graph_io.input_ring, graph_io.control, taken, state)
            assert taken.tolist() == [100 * step + i + (repeat if i > 2 else 0) for i in range(6)]
            write_output_torch(torch.tensor([step, repeat, 7]).int(), graph_io.control, taken, graph_io.output_ring)
        outputs.append(output.tolist())
        assert not step % 3 or state[step % 9] == step
    assert outputs == [[step, 0, 7, step, 1, 7] for step in range(40)]
