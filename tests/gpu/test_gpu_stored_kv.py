"""The compiled kernels of an 8-bit KV cache: every value as attention reads it. (Others: tests/kernels.)"""

import pytest
import torch

from runtime.kernels.attention.decode_attention import decode_attention
from runtime.kernels.attention.paged_attention import AttentionForm
from runtime.kernels.attention.prefill_attention import prefill_attention
from tests.support.kernels.attention_cases import every_fp8, paged_case

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no CUDA device")


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
