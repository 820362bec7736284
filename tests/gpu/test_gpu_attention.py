"""The compiled attention kernels in graphs. (Their values and bits: tests/kernels.)"""

import pytest
import torch

from runtime.kernels.attention.decode_attention import decode_attention
from runtime.kernels.attention.paged_attention import AttentionForm, paged_attention_torch
from runtime.kernels.attention.prefill_attention import prefill_attention
from tests.support.kernels.attention_cases import paged_case

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no CUDA device")


@pytest.mark.parametrize("num_rows", [1, 3, 40])
@pytest.mark.parametrize("deterministic", [False, True])
def test_a_captured_launch_follows_the_lengths(num_rows, deterministic):
    """One graph of two layers; between replays only the state on the device changes."""
    q, kv, rows = paged_case([(2000, 1)] * num_rows, (8, 2, 128), 16, torch.bfloat16, "cuda")
    rows.max_len = 1 << 15
    starts, stream = rows.starts, torch.cuda.Stream()

    def layers() -> list[torch.Tensor]:
        return [decode_attention(x, kv, rows, AttentionForm(0.09), deterministic=deterministic) for x in (q, 2 * q)]

    with torch.cuda.stream(stream):
        layers()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            outs = layers()
    for first in (0, 50, 1900, 64, 700):
        starts.copy_(torch.arange(first, first + num_rows))
        torch.cuda.synchronize()
        for out in outs:
            out.fill_(torch.nan)
        torch.cuda.synchronize()
        graph.replay()
        torch.cuda.synchronize()
        for x, out in zip((q, 2 * q), outs, strict=True):
            want = paged_attention_torch(x.double(), kv.double(), rows, AttentionForm(0.09))
            assert (out.double() - want).norm() / want.norm() < 8e-3


@pytest.mark.parametrize("heads", [(32, 8, 64), (24, 8, 128), (6, 2, 80), (4, 1, 256), (8, 1, 512)])
@pytest.mark.parametrize("window", [0, 3000])
def test_a_captured_launch_splits_work_by_current_rows(heads, window):
    """Few new tokens behind many. The device chooses the segments that their positions are cut into."""
    q, kv, rows = paged_case([(0, 0), (9000, 100), (4000, 60)], heads, 16, torch.bfloat16, "cuda")
    starts, q_starts, stream = rows.starts, rows.q_starts, torch.cuda.Stream()
    form = AttentionForm(heads[2] ** -0.5, window)
    with torch.cuda.stream(stream):
        prefill_attention(q, kv, rows, form)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            outs = [prefill_attention(x, kv, rows, form) for x in (q, 2 * q)]
    lengths = [(0, 9000, 4000), (0, 0, 0), (0, 7, 3000), (0, 4500, 64), (0, 130, 1)]
    edges = [(0, 0, 100, 160), (0, 0, 1, 160), (0, 0, 60, 100), (0, 0, 0, 59), (0, 0, 99, 99)]
    for rows_starts, rows_edges in zip(lengths, edges, strict=True):
        starts.copy_(torch.tensor(rows_starts))
        q_starts.copy_(torch.tensor(rows_edges))
        torch.cuda.synchronize()
        for out in outs:
            out.fill_(torch.nan)
        torch.cuda.synchronize()
        graph.replay()
        torch.cuda.synchronize()
        end = rows_edges[-1]
        for x, out in zip((q, 2 * q), outs, strict=True):
            want = paged_attention_torch(x[:end].double(), kv.double(), rows, form)
            assert (out[:end].double() - want).norm() / want.norm() < 8e-3
