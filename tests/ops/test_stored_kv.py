"""Quantized keys and values: the torch twins' stored values, which attention reads."""

import numpy as np
import pytest
import torch

from runtime.kernels.attention.attention_torch import AttentionShape, attention_exact, attention_torch, plan_attention
from runtime.kernels.attention.paged_attention import AttentionForm
from runtime.kernels.attention.stored_kv import dequantize_kv, store_kv_torch
from tests.support.kernels.attention_cases import encoded, every_fp8


def test_e4m3_values_round_trip_and_saturate():
    numbers = every_fp8().float().view(1, 1, 256)
    finite = numbers[numbers.isfinite()].view(2, 1, -1)
    kv, scales = torch.zeros(2, 1, 1, 1, 254, dtype=torch.float8_e4m3fn), torch.tensor([[0.3], [2.0]])
    both = torch.cat((finite.reshape(1, 1, 254) * 0.3, finite.reshape(1, 1, 254) * 2.0), 1)
    store_kv_torch(both, kv, scales, torch.tensor([0]))
    assert torch.equal(kv.float().view(2, 254), finite.reshape(1, 254).expand(2, -1))
    assert torch.equal(dequantize_kv(kv, scales).flatten(), both.flatten())
    big = torch.tensor([1e9, -1e9, 500.0, torch.nan]).repeat(64)[:254].view(1, 1, 254)
    store_kv_torch(torch.cat((big, big), 1), kv, scales, torch.tensor([0]))
    assert kv.float().view(2, 254)[0, :3].tolist() == [448.0, -448.0, 448.0]
    assert kv.float().view(2, 254)[0, 3].isnan()


def test_int8_scales_are_per_token_and_head():
    numbers = torch.randn(4, 6, 32) * torch.tensor([1e-5, 0.1, 1.0, 300.0])[:, None, None]
    numbers[1, 2] = 0
    kv, scales = torch.zeros(2, 3, 2, 4, 32, dtype=torch.int8), torch.zeros(3, 2, 4, 2, dtype=torch.float16)
    places = torch.tensor([5, 0, 7, 2])
    store_kv_torch(numbers, kv, scales, places)

    def read() -> torch.Tensor:
        return dequantize_kv(kv.flatten(2, 3), scales.flatten(1, 2)).view(6, 8, 32)

    got = read()[:, places].transpose(0, 1)
    largest = numbers.abs().amax(-1, keepdim=True)
    assert ((got - numbers).abs() <= largest * 0.0041 + 4e-6).all()
    assert got[1, 2].eq(0).all()
    assert read()[:, [1, 3, 4, 6]].eq(0).all()
    store_kv_torch(torch.full((1, 6, 32), torch.nan), kv, scales, torch.tensor([1]))
    assert read()[:, 1].isnan().all(), "a fault is seen"


@pytest.mark.parametrize("kind", ["fp8", "int8"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_attention_reads_dequantized_values(kind, dtype):
    """The bits equal a plain cache with the same values, for one run of blocks, for gathered blocks, and for several
    rows."""
    generator = torch.Generator().manual_seed(0)
    kv, scales = encoded(kind, torch.randn(2, 2, 12, 8, 24, generator=generator))
    flat = dequantize_kv(kv.flatten(2, 3), scales if kind == "fp8" else scales.flatten(1, 2))
    plain = flat.view(kv.shape).to(dtype)
    tables = np.array([[3, 4, 5, 6], [9, 1, 8, 0], [2, 7, 11, 10]], np.int32)
    starts, counts = np.array([20, 11, 3], np.int32), np.array([1, 1, 25], np.int32)
    q = torch.randn(27, 4, 24, generator=generator).to(dtype)
    for exact, attention in ((False, attention_torch), (True, attention_exact)):
        plan = plan_attention(tables, starts, counts, AttentionShape(4, 2, 12, 8, dtype, q.device, exact))
        sinks = {"sinks": torch.tensor([1.0, -2.0, 0.5, 3.0])}
        for options in ({}, {"window": 9, "soft_cap": 2.0}, sinks, {"first_key": 1}):
            got = attention(q.clone(), kv, plan, AttentionForm(0.2, **options), scales)
            want = attention(q.clone(), plain, plan, AttentionForm(0.2, **options))
            if exact and dtype != torch.float32:  # they are not rounded to the compute dtype there
                torch.testing.assert_close(got, want, atol=2e-2, rtol=2e-2)
            else:
                assert torch.equal(got, want)
