"""The compiled kernels of an 8-bit KV cache: the stored values, every value as attention reads it, and bits."""

import pytest
import torch

from runtime.kernels.attention.decode_attention import decode_attention
from runtime.kernels.attention.paged_attention import AttentionForm, paged_attention_torch
from runtime.kernels.attention.prefill_attention import prefill_attention
from tests.support.kernels.attention_cases import check, encoded, every_fp8, paged_case, rows_of, sinks_of

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no CUDA device")

KINDS = pytest.mark.parametrize("kind", ["fp8", "int8"])


@KINDS
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("heads", [(9, 3, 64), (6, 2, 80), (32, 8, 128), (4, 1, 256)])
def test_attention(heads, dtype, kind):
    lengths = [0, 62, 63, 64, 133, 700, 2047, 5000]
    for options in ({}, {"window": 100, "soft_cap": 2.0}):
        check(decode_attention, paged_case([(n, 1) for n in lengths], heads, 16, dtype, "cuda"), kind, **options)
        q, kv, rows = paged_case([(70, 4), (1021, 3), (0, 4)], heads, 16, dtype, "cuda")
        rows.prefix_ready = True
        check(decode_attention, (q, kv, rows), kind, **options)
        spans = [(0, 71), (65, 333), (129, 1), (1500, 260)]
        check(prefill_attention, paged_case(spans, heads, 16, dtype, "cuda"), kind, **options)
    check(prefill_attention, paged_case([(0, 1500)], heads, 64, dtype, "cuda"), kind)


@KINDS
def test_sinks(kind):
    heads, options = (64, 8, 64), {"window": 128, "sinks": sinks_of(64, "cuda")}
    for spans in ([(3000, 1)], [(70, 4), (1021, 3)], [(700, 1)] * 200):
        q, kv, rows = paged_case(spans, heads, 16, torch.bfloat16, "cuda")
        rows.prefix_ready = True
        check(decode_attention, (q, kv, rows), kind, **options)
    check(prefill_attention, paged_case([(0, 71), (1500, 260)], heads, 16, torch.bfloat16, "cuda"), kind, **options)


@pytest.mark.parametrize("code", [torch.float8_e4m3fn, torch.int8])
@pytest.mark.parametrize("attend", [decode_attention, prefill_attention])
def test_every_stored_value(code, attend):
    """A row of one position gives its value: each code in each dimension. Keys are read alike: of two positions, the
    one with value c in one dimension of its key weighs 2 ** c as much."""
    numbers = every_fp8() if code == torch.float8_e4m3fn else torch.arange(-128, 128).to(torch.int8)
    finite = torch.where(numbers.float().isfinite(), numbers.float(), 0.0).to(code)
    kv = torch.zeros(2, 1, 258, 16, 64, dtype=code, device="cuda")
    for dim in range(64):
        kv[1, 0, 1:257, 0, dim] = finite.roll(dim).cuda()
    scales = torch.ones(2, 1) if code == torch.float8_e4m3fn else torch.ones(1, 258, 16, 2, dtype=torch.float16)
    _, _, rows = paged_case([(0, 1)] * 256, (1, 1, 64), 16, torch.bfloat16, "cuda")
    rows.slots = torch.arange(256, dtype=torch.int32, device="cuda")
    rows.tables = 1 + torch.arange(256, dtype=torch.int32, device="cuda")[:, None].repeat(1, 4)
    q = torch.zeros(256, 1, 64, dtype=torch.bfloat16, device="cuda")
    got = attend(q, kv, rows, AttentionForm(1.0), scales.cuda())
    assert torch.equal(got.float(), kv[1, 0, 1:257, 0].float().bfloat16().float())

    kv.zero_()
    kv[0, 0, 1:257, 0, 5] = finite.cuda()
    kv[1, 0, 1:257, 0] = 1
    rows.starts, rows.max_len = rows.starts + 1, 2
    q[:, :, 5] = 1 / 64
    got = attend(q, kv, rows, AttentionForm(1.0), scales.cuda())[:, 0].double()
    want = (finite.double() / 64).sigmoid().cuda()
    torch.testing.assert_close(got, want, rtol=5e-3, atol=1e-4)


@KINDS
@pytest.mark.parametrize("heads", [(9, 3, 64), (32, 8, 128)])
def test_deterministic_bits_depend_only_on_the_token(heads, kind):
    total = 1700
    q, kv, rows = paged_case([(0, total)], heads, 16, torch.bfloat16, "cuda")
    kv, scales = encoded(kind, kv.nan_to_num(3.0))

    def attend(kernel, spans: list[tuple[int, int]], settled: bool = False) -> torch.Tensor:
        tokens, part = rows_of(rows, spans)
        part.prefix_ready = settled
        return kernel(q[tokens], kv, part, AttentionForm(heads[2] ** -0.5), scales, deterministic=True)

    want = attend(prefill_attention, [(0, total)])
    exact = paged_attention_torch(q.double(), kv, rows, AttentionForm(heads[2] ** -0.5), scales)
    assert (want.double() - exact).norm() / exact.norm() < 8e-3
    for chunk in (7, 513):
        spans = [(a, min(chunk, total - a)) for a in range(0, total, chunk)]
        assert torch.equal(attend(prefill_attention, spans), want), chunk
    for batch in (1, 32, 256):
        for count in (1, 4):
            spans = [(total - 8 - 6 * i, count) for i in range(batch)]
            tokens, _ = rows_of(rows, spans)
            for settled in (False, True):
                assert torch.equal(attend(decode_attention, spans, settled), want[tokens]), (batch, count, settled)
