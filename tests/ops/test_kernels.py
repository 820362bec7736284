"""Operations against plain formulas."""

import subprocess
import sys
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import example, given, settings
from hypothesis import strategies as st
from transformers.models.llama.modeling_llama import LlamaConfig, LlamaRotaryEmbedding, apply_rotary_pos_emb

from runtime.base.model.decoder_spec import RopeSpec
from runtime.kernels.attention.attention_torch import (
    AttentionShape,
    attention_exact,
    attention_torch,
    decode_bucket,
    plan_attention,
)
from runtime.kernels.attention.paged_attention import AttentionForm
from runtime.kernels.attention.rope import rope_rows_torch, rope_store_kv_torch, rope_table
from runtime.kernels.linear.linear_torch import can_pack, cpu_product
from runtime.kernels.norm.gated_activation import gated_activation_exact, gated_activation_torch
from runtime.kernels.norm.rms_norm import rms_norm_torch

ROOT = Path(__file__).parents[2]
CPU = torch.device("cpu")


def test_rms_norm_is_its_formula():
    x, weight = torch.randn(5, 48), torch.randn(48)
    want = x / (x.pow(2).mean(-1, keepdim=True) + 1e-5).sqrt() * weight
    torch.testing.assert_close(rms_norm_torch(x, weight, 1e-5), want)


@pytest.mark.long
def test_everything_imports_without_triton():
    code = "import sys; sys.modules['triton'] = None; import runtime.worker.runner, runtime.kernels; print('ok')"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=600)
    assert done.stdout.strip() == "ok", done.stderr[-2000:]


@pytest.mark.parametrize(
    ("spec", "parameters"),
    [
        (RopeSpec(10000.0), {"rope_type": "default", "rope_theta": 10000.0}),
        (RopeSpec(500.0, "linear", 4.0), {"rope_type": "linear", "rope_theta": 500.0, "factor": 4.0}),
        (
            RopeSpec(500000.0, "llama3", 8.0, 1.0, 4.0, 64),
            {
                "rope_type": "llama3",
                "rope_theta": 500000.0,
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 64,
            },
        ),
    ],
)
def test_rope_equals_transformers(spec, parameters):
    heads, kv_heads, dim, positions = 4, 2, 32, torch.tensor([0, 1, 5, 63, 64, 200])
    config = LlamaConfig(
        hidden_size=heads * dim, num_attention_heads=heads, max_position_embeddings=512, rope_parameters=parameters
    )
    cos, sin = LlamaRotaryEmbedding(config)(torch.zeros(1), positions[None])
    qkv = torch.randn(len(positions), heads + 2 * kv_heads, dim)
    qk = qkv[None, :, : heads + kv_heads].transpose(1, 2)
    want, _ = apply_rotary_pos_emb(qk, qk, cos, sin)
    kv = torch.zeros(2, kv_heads, 3, 4, dim)
    rope = rope_rows_torch(rope_table(spec, dim, 512, torch.float32), positions)
    index, values = torch.tensor([4, 5, 6, 7, 8, 11]), qkv[:, heads + kv_heads :].clone()
    q = rope_store_kv_torch(qkv, rope, kv, index)
    want = want[0].transpose(0, 1)
    torch.testing.assert_close(q, want[:, :heads])
    flat = kv.view(2, kv_heads, 12, dim)
    torch.testing.assert_close(flat[0][:, index].transpose(0, 1), want[:, heads:])
    assert torch.equal(flat[1][:, index].transpose(0, 1), values)
    assert flat[:, :, [0, 1, 2, 3, 9, 10]].abs().sum() == 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gated_activation_twins_agree(dtype):
    x = torch.randn(7, 2 * 50).to(dtype)
    x[:2] *= 9.0  # beyond the limit
    gate, up = x.double().chunk(2, -1)
    for kind, act in (("silu", F.silu), ("gelu_tanh", lambda g: F.gelu(g, approximate="tanh"))):
        want = (act(gate) * up).to(dtype)
        torch.testing.assert_close(gated_activation_torch(x, kind), want)
        torch.testing.assert_close(gated_activation_exact(x, kind), want)
    gate, up = gate.clamp(max=7.0), up.clamp(-7.0, 7.0)
    want = ((up + 1) * gate * torch.sigmoid(1.702 * gate)).to(dtype)  # gpt-oss
    torch.testing.assert_close(gated_activation_torch(x, "swiglu_clamped"), want, rtol=0.05, atol=1e-4)
    torch.testing.assert_close(gated_activation_exact(x, "swiglu_clamped"), want)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rows", [1, 2, 5, 17])
@pytest.mark.parametrize("with_bias", [False, True])
def test_linear_variants_agree(dtype, rows, with_bias):
    weight, bias = torch.randn(40, 24, dtype=dtype), torch.randn(40, dtype=dtype) if with_bias else None
    x = torch.randn(rows, 24, dtype=dtype)
    want = torch.nn.functional.linear(x, weight, bias)
    for packed in {False, can_pack(dtype, CPU)}:  # as the runner chooses it: of bfloat16, not every CPU can
        for deterministic in (False, True):
            got = cpu_product(weight, bias, packed, deterministic)(x)
            torch.testing.assert_close(got, want, atol=2e-2 if dtype == torch.bfloat16 else 1e-5, rtol=2e-2)


@st.composite
def steps(draw):
    """A step over random tables: (group, kv_heads, dim, block_size, rows as (start, count)), decode rows first."""
    rows = draw(st.lists(st.tuples(st.integers(0, 300), st.sampled_from([1, 1, 1, 2, 33])), min_size=1, max_size=7))
    rows.sort(key=lambda r: (r[1] > 1, decode_bucket(np.array(r[0])) if r[1] == 1 else 0))
    sizes = draw(st.sampled_from([(1, 1, 16), (3, 3, 64), (4, 2, 32)]))
    return *sizes, draw(st.sampled_from([1, 3, 16, 64, 400])), rows, draw(st.booleans()), draw(st.integers(0, 9999))


@settings(max_examples=60, deadline=None)
@example((1, 1, 16, 16, [(0, 1)], False, 0), 1, 1, 0.0, False, 1)
@given(
    steps(),
    st.sampled_from([1, 512, 1 << 15]),
    st.sampled_from([0, 0, 1, 20, 70, 400]),
    st.sampled_from([0.0, 1.5]),
    st.booleans(),
    st.sampled_from([0, 0, 1]),
)
def test_attention_equals_softmax_over_each_tokens_past(step, most, window, soft_cap, has_sinks, first_key):
    group, kv_heads, dim, block_size, rows, shuffled, seed = step
    torch.manual_seed(seed)
    rows = [(start + first_key, count) for start, count in rows]
    starts, counts = (np.array(x, np.int32) for x in zip(*rows, strict=True))
    needed = [-(-(s + c) // block_size) for s, c in rows]
    blocks = np.arange(1, sum(needed) + 1)
    if shuffled:
        np.random.default_rng(seed).shuffle(blocks)
    tables = np.zeros((len(rows), max(needed)), np.int32)
    for row, own in enumerate(np.split(blocks, np.cumsum(needed)[:-1])):
        tables[row, : len(own)] = own
    kv = torch.randn(2, kv_heads, len(blocks) + 1, block_size, dim)
    q = torch.randn(int(counts.sum()), kv_heads * group, dim)
    sinks = torch.randn(kv_heads * group) if has_sinks else None
    for half, garbage in zip(kv, (torch.nan, torch.inf), strict=True):
        half[:, tables[:, 0].astype(np.int64), :first_key] = garbage

    want = []
    for row, (start, count) in enumerate(rows):
        own = kv[:, :, tables[row, : needed[row]].astype(np.int64)].reshape(2, kv_heads, -1, dim).double()
        for position in range(start, start + count):
            first = max(first_key, position + 1 - window if window else 0)
            k, v = own[:, :, first : position + 1].repeat_interleave(group, 1)
            scores = k @ q[len(want)].double()[:, :, None] * 0.3
            scores = soft_cap * (scores / soft_cap).tanh() if soft_cap else scores
            if sinks is not None:
                scores = torch.cat((sinks.double()[:, None, None], scores), 1)
                v = torch.cat((torch.zeros_like(v[:, :1]), v), 1)
            want.append((scores.softmax(1) * v).sum(1).reshape(-1))
    want = torch.stack(want).float()
    for exact, attention in ((False, attention_torch), (True, attention_exact)):
        shape = AttentionShape(kv_heads * group, kv_heads, len(blocks) + 1, block_size, torch.float32, CPU, exact)
        with mock.patch("runtime.kernels.attention.attention_torch.MAX_GATHERED", most):
            plan = plan_attention(tables, starts, counts, shape)
        assert plan.num_tokens == len(q)
        for _ in range(2):  # as another layer, which reuses the masks of the first
            got = attention(q.clone(), kv, plan, AttentionForm(0.3, window, soft_cap, sinks, first_key=first_key))
            torch.testing.assert_close(got, want, atol=2e-5, rtol=1e-4)
        if window:
            full = attention(q.clone(), kv, plan, AttentionForm(0.3, 0, soft_cap, sinks, first_key=first_key))
            hides = int((starts + counts).max()) - first_key > window
            assert hides == (not torch.allclose(full, want, atol=2e-5, rtol=1e-4))
