"""Kernels of rows (norms, gated activations, rotary positions) against their torch twins."""

import pytest
import torch

from runtime.base.model.decoder_spec import RopeSpec
from runtime.kernels.attention.output_gate import gate_output_torch, gate_output_triton
from runtime.kernels.attention.rope import (
    HeadForm,
    rope_rows_torch,
    rope_rows_triton,
    rope_store_kv_torch,
    rope_store_kv_triton,
    rope_table,
)
from runtime.kernels.attention.stored_kv import dequantize_kv
from runtime.kernels.norm.gated_activation import gated_activation_torch, gated_activation_triton
from runtime.kernels.norm.rms_norm import rms_norm_in_place_triton, rms_norm_torch, rms_norm_triton

dtypes = pytest.mark.parametrize("dtype", [torch.float32, torch.float16])


@pytest.fixture(autouse=True)
def seeded():
    torch.manual_seed(0)


@dtypes
def test_rms_norm(dtype):
    for rows, hidden in ((1, 1), (3, 7), (2, 64), (5, 100), (4, 576), (2, 1025), (0, 16)):
        wide = torch.randn(rows, hidden + 3, dtype=dtype)
        x, weight = wide[:, :hidden], torch.randn(hidden, dtype=dtype)
        got, want = rms_norm_triton(x, weight, 1e-5), rms_norm_torch(x, weight, 1e-5)
        assert got.dtype == dtype
        torch.testing.assert_close(got, want)
        beside = wide[:, hidden:].clone()
        rms_norm_in_place_triton(x, weight, 1e-5)
        assert torch.equal(wide, torch.cat((got, beside), 1))


@dtypes
def test_gated_activation(dtype):
    for rows, ffn in ((1, 1), (3, 50), (2, 1024), (2, 1500), (0, 8)):
        x = torch.randn(rows, 2 * ffn, dtype=dtype)
        for kind in ("silu", "gelu_tanh"):
            got, want = gated_activation_triton(x, kind), gated_activation_torch(x.clone(), kind)
            torch.testing.assert_close(got, want)


@dtypes
def test_output_gate(dtype):
    for rows, width in ((1, 1), (3, 50), (2, 1024), (2, 1500), (0, 8)):
        out, gate = torch.randn(rows, width, dtype=dtype), torch.randn(rows, width + 3, dtype=dtype)[:, :width]
        want = gate_output_torch(out.clone(), gate)
        torch.testing.assert_close(want, out * torch.sigmoid(gate), atol=2e-3, rtol=2e-3)
        torch.testing.assert_close(gate_output_triton(out, gate), want)


@dtypes
def test_rope_and_the_store_of_keys_and_values(dtype):
    shapes = ((1, 1, 1, 64), (5, 4, 2, 64), (3, 6, 2, 80), (2, 9, 3, 16), (2, 8, 1, 96), (0, 2, 1, 16), (2, 40, 8, 128))
    for i, (tokens, heads, kv_heads, dim) in enumerate(shapes):
        qkv = torch.randn(tokens, heads + 2 * kv_heads + i % 3, dim, dtype=dtype)[:, : heads + 2 * kv_heads]
        table, positions = rope_table(RopeSpec(), dim, 64, dtype), torch.randint(0, 64, (tokens,), dtype=torch.int32)
        form = HeadForm("qkv", *torch.rand(2, dim, dtype=dtype), 1e-6) if i % 2 else HeadForm()
        kv = torch.full((2, kv_heads, 3, 4, dim), 7.0, dtype=dtype)  # poisoned: only the tokens' places may change
        twin, index = kv.clone(), torch.randperm(12)[:tokens].int()
        got = rope_store_kv_triton(qkv, rope_rows_triton(table, positions), kv, index, form)
        want = rope_store_kv_torch(qkv.clone(), rope_rows_torch(table, positions), twin, index, form)
        # The twin rounds both products before it adds them, the kernel only the sum.
        near = {"atol": 1e-6, "rtol": 1e-5} if dtype == torch.float32 else {"atol": 6e-3, "rtol": 4e-3}
        torch.testing.assert_close(got, want, **near)
        torch.testing.assert_close(kv, twin, **near)


@dtypes
@pytest.mark.parametrize("kinds", ["qkv", "qk", "q"])
def test_keys_as_values_and_shared_keys(dtype, kinds):
    heads, kv_heads, dim, index = 5, 2, 48, torch.tensor([7, 0, 3], dtype=torch.int32)
    qkv = torch.randn(3, heads + (len(kinds) - 1) * kv_heads, dim, dtype=dtype)
    table, positions = rope_table(RopeSpec(type="proportional", partial=0.25), dim, 64, dtype), index
    form = HeadForm(kinds, torch.rand(dim, dtype=dtype), torch.rand(dim, dtype=dtype), 1e-6, v_norm=True)
    kv = torch.full((2, kv_heads, 3, 4, dim), 7.0, dtype=dtype)
    twin = kv.clone()
    got = rope_store_kv_triton(qkv, rope_rows_triton(table, positions), kv, index, form)
    want = rope_store_kv_torch(qkv.clone(), rope_rows_torch(table, positions), twin, index, form)
    near = {"atol": 1e-6, "rtol": 1e-5} if dtype == torch.float32 else {"atol": 6e-3, "rtol": 4e-3}
    torch.testing.assert_close(got, want, **near)
    torch.testing.assert_close(kv, twin, **near)
    assert twin.eq(7.0).all() == (kinds == "q")
    if kinds == "qk":
        raw = qkv[:, heads:].float()
        values = raw / (raw.square().mean(-1, keepdim=True) + 1e-6).sqrt()
        torch.testing.assert_close(
            twin[1].flatten(1, 2)[:, index].transpose(0, 1).float(), values, atol=5e-3, rtol=5e-3
        )


@pytest.mark.parametrize("kind", ["fp8", "int8"])
def test_quantized_keys_and_values(kind):
    """A stored value may differ by one if the kernel's unrounded value is on the other side."""
    heads, kv_heads, dim = 3, 2, 80
    qkv = torch.randn(5, heads + 2 * kv_heads, dim) * torch.tensor([1e-6, 0.01, 1.0, 20.0, 900.0])[:, None, None]
    qkv[2, heads + 1 :] = 0
    table, positions = rope_table(RopeSpec(), dim, 64, torch.float32), torch.arange(5, dtype=torch.int32)
    dtype = torch.float8_e4m3fn if kind == "fp8" else torch.int8
    index, caches = torch.tensor([7, 0, 3, 11, 5], dtype=torch.int32), []
    for store, rows in ((rope_store_kv_triton, rope_rows_triton), (rope_store_kv_torch, rope_rows_torch)):
        kv = torch.ones(2, kv_heads, 3, 4, dim).to(dtype)
        scales = torch.full((kv_heads, 3, 4, 2), 0.5, dtype=torch.float16)
        if kind == "fp8":
            scales = torch.tensor([[0.5, 1.0], [0.25, 3.0]])
        store(qkv.clone(), rows(table, positions), kv, index, scales=scales)
        caches.append((kv.flatten(2, 3), scales if kind == "fp8" else scales.flatten(1, 2)))
    got, want = (dequantize_kv(*cache) for cache in caches)
    step = 2.0**-3 if kind == "fp8" else 1 / 120  # of a value, or of the largest one
    allowed = want.abs() * step + 0.01 if kind == "fp8" else want.abs().amax(-1, keepdim=True) * step + 1e-5
    assert ((got - want).abs() <= allowed).all()
    assert (got != want).float().mean() < 0.01
    if kind == "int8":
        assert torch.equal(caches[0][1], caches[1][1])
