"""The compiled attention kernels: against float64, in graphs, and the bits of deterministic mode."""

import pytest
import torch

from runtime.kernels.attention.decode_attention import decode_attention
from runtime.kernels.attention.paged_attention import AttentionForm, paged_attention_torch
from runtime.kernels.attention.prefill_attention import prefill_attention
from tests.support.kernels.attention_cases import check, paged_case, rows_of, sinks_of

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no CUDA device")

HEADS = [
    (8, 8, 64),
    (9, 3, 64),
    (32, 8, 64),
    (6, 2, 80),
    (8, 2, 96),
    (24, 8, 128),
    (8, 1, 128),
    (4, 1, 256),
    (8, 1, 512),
]
DTYPES = [torch.float32, torch.float16, torch.bfloat16]
OPTIONS = [{}, {"window": 19}, {"window": 512}, {"window": 100, "soft_cap": 2.0}, {"soft_cap": 5.0}]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("heads", HEADS)
def test_decode(heads, dtype):
    lengths = [0, 62, 63, 64, 133, 700, 2047, 5000]
    check(decode_attention, paged_case([(n, 1) for n in lengths], heads, 16, dtype, "cuda", padding_rows=3))
    check(decode_attention, paged_case([(n, 1) for n in lengths[:5] * 40], heads, 32, dtype, "cuda"))
    check(decode_attention, paged_case([(3000, 1)], heads, 16, dtype, "cuda"))


@pytest.mark.parametrize("count", range(2, 9))
@pytest.mark.parametrize("heads", [(9, 3, 64), (32, 8, 128), (4, 1, 256), (8, 1, 512)])
def test_verify_rows(heads, count):
    spans = [(70, count), (0, count), (63, 1), (1021, count - 1), (2048, count)]
    check(decode_attention, paged_case(spans, heads, 16, torch.bfloat16, "cuda"))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("heads", HEADS)
def test_prefill(heads, dtype):
    spans = [(0, 1), (0, 71), (65, 333), (129, 1), (1500, 260), (0, 513), (2048, 128)]
    check(prefill_attention, paged_case(spans, heads, 16, dtype, "cuda"))
    check(prefill_attention, paged_case([(0, 1500)], heads, 64, dtype, "cuda"))


@pytest.mark.parametrize("block_size", [3, 16, 32, 64, 1024])
@pytest.mark.parametrize("options", OPTIONS)
def test_blocks_window_and_soft_cap(block_size, options):
    for heads in ((4, 2, 64), (4, 1, 256), (8, 1, 512)):
        case = paged_case([(1700, 2), (0, 1), (20, 1), (900, 2)], heads, block_size, torch.bfloat16, "cuda")
        check(decode_attention, case, scale=0.3 * heads[2] ** -0.5, **options)
        case = paged_case([(130, 450), (0, 3), (20, 1), (0, 600)], heads, block_size, torch.bfloat16, "cuda")
        check(prefill_attention, case, scale=0.3 * heads[2] ** -0.5, **options)


@pytest.mark.parametrize("options", [{}, {"window": 128}, {"window": 100, "soft_cap": 2.0}])
def test_sinks(options):
    """In the shape of gpt-oss: one row, splits of few rows, draft tokens, and rows without splits."""
    heads, options = (64, 8, 64), options | {"sinks": sinks_of(64, "cuda")}
    for spans in ([(3000, 1)], [(700, 1), (0, 1), (5000, 1)], [(70, 4), (0, 4), (2048, 3)], [(130, 1)] * 200):
        q, kv, rows = paged_case(spans, heads, 16, torch.bfloat16, "cuda")
        for rows.prefix_ready in (False, True):
            check(decode_attention, (q, kv, rows), **options)
    for spans in ([(0, 71), (65, 333), (1500, 260)], [(9000, 100)], [(0, 3000)]):
        check(prefill_attention, paged_case(spans, heads, 16, torch.bfloat16, "cuda"), **options)


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


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("heads", [(9, 3, 64), (32, 8, 64), (24, 8, 128), (4, 1, 256)])
@pytest.mark.parametrize("window", [0, 700])
def test_deterministic_bits_depend_only_on_the_token(heads, dtype, window):
    check_bits(heads, dtype, {"window": window})


@pytest.mark.parametrize("window", [0, 128])
def test_deterministic_bits_of_a_model_with_sinks(window):
    check_bits((64, 8, 64), torch.bfloat16, {"window": window, "sinks": sinks_of(64, "cuda")})


def check_bits(heads: tuple[int, int, int], dtype: torch.dtype, of_layer: dict) -> None:
    """A token has the same bits in any chunk, beside any rows and in any blocks."""
    total = 1700
    q, kv, rows = paged_case([(0, total)], heads, 16, dtype, "cuda")
    form = AttentionForm(heads[2] ** -0.5, **of_layer)

    def attend(kernel, spans: list[tuple[int, int]], settled: bool = False) -> torch.Tensor:
        tokens, part = rows_of(rows, spans)
        part.prefix_ready = settled
        return kernel(q[tokens], kv, part, form, deterministic=True)

    want = attend(prefill_attention, [(0, total)])
    for chunk in (1, 7, 64, 513):
        edges = range(0, total, chunk)
        spans = [(a, min(chunk, total - a)) for a in edges]
        assert torch.equal(attend(prefill_attention, spans), want), chunk
        for span in spans[-2:]:
            assert torch.equal(attend(prefill_attention, [span]), want[span[0] : sum(span)])
    for batch in (1, 7, 32, 256):
        for count in (1, 4, 8):
            spans = [(total - 8 - 6 * i, count) for i in range(batch)]
            tokens, _ = rows_of(rows, spans)
            for settled in (False, True):
                assert torch.equal(attend(decode_attention, spans, settled), want[tokens]), (batch, count, settled)
    moved = torch.randperm(kv.shape[2], device="cuda")  # other block ids
    rows.tables = torch.argsort(moved).to(torch.int32)[rows.tables[rows.slots.long()].clamp(0, kv.shape[2] - 1)]
    rows.slots = torch.zeros_like(rows.slots)
    kv = kv[:, :, moved].contiguous()
    assert torch.equal(attend(decode_attention, [(total - 8, 8)]), want[-8:])
