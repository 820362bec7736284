"""Rows as fp8 codes, their products and mixtures of experts against their torch twins; in float16, as the interpreter
truncates to bfloat16."""

import pytest
import torch
import torch.nn.functional as F

from runtime.base.model.decoder_spec import ExpertsSpec
from runtime.kernels.experts.moe_fp8_w8a8 import Fp8Experts
from runtime.kernels.experts.moe_torch import ExpertBiases, Experts, Router
from runtime.kernels.linear.linear_torch import Linear
from runtime.kernels.linear.tiles import Tiling
from runtime.kernels.norm.gated_activation import gated_activation_torch
from runtime.kernels.norm.rms_norm import rms_norm_torch, rms_norm_triton
from runtime.kernels.quantized.activations import quantize_fp8_torch, quantize_fp8_triton
from runtime.kernels.quantized.fp8_w8a8_gemm import fp8_w8a8_gemm_torch, fp8_w8a8_gemm_triton
from runtime.kernels.quantized.quantized_linear import Fp8Linear
from runtime.kernels.quantized.quantized_weight import QuantizedWeight, dequantize_torch, quantized_weight
from runtime.kernels.quantized.weight_conversions import quantize_fp8_weight_triton
from runtime.quant.encodings import ENCODINGS, LARGEST_E4M3, SMALLEST_SCALE

ROWS, SIZE = 21, 272
OPERATIONS = {
    "plain": (SIZE, {}),
    "norm": (SIZE, {"norm_weight": True, "eps": 1e-5}),
    "gated": (2 * SIZE, {"activation": "silu"}),
    "ungated": (SIZE, {"activation": "gelu_tanh", "gated": False}),
    "in two blocks": (1300, {}),
    "gated, in two blocks": (2 * 1300, {"activation": "silu"}),
}


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)


def some_weight(size_out: int, size_in: int, block: int = 0) -> QuantizedWeight:
    codes = (torch.randn(size_out, size_in) * 64).to(torch.float8_e4m3fn)
    if not block:
        return quantized_weight("fp8", codes, torch.rand(size_out, 1) * 2e-3)
    scales = torch.rand(-(-size_out // block), -(-size_in // block)) * 2e-3
    return quantized_weight("fp8", codes, scales, group_size=block, scale_rows=block)


@pytest.mark.parametrize("operation", OPERATIONS)
def test_rows_equal_those_of_the_twin(operation):
    width, options = OPERATIONS[operation]
    x = torch.randn(ROWS, width + 8).half()[:, :width]
    x[3] = 0
    if "norm_weight" in options:
        options = options | {"norm_weight": torch.randn(SIZE).half()}
    got, want = quantize_fp8_triton(x, **options), quantize_fp8_torch(x, **options)
    assert torch.allclose(got.scales, want.scales, rtol=1e-5)
    assert (got.values.float() != want.values.float()).float().mean() < 0.005  # the numbers between two codes
    assert (got.values[3].float() == 0).all()
    assert torch.allclose(got.dequantize(torch.float32), want.dequantize(torch.float32), rtol=0.13, atol=1e-3)


def test_weight_rows_are_quantized_as_by_their_format():
    dense = torch.randn(24, 300) * torch.randn(24, 1).exp()
    dense[2], dense[3, 7], dense[4, 9] = 0, torch.inf, torch.nan
    dense[5, 0] = 400.0
    form = ENCODINGS["fp8"]
    codes, scales = quantize_fp8_weight_triton(dense, LARGEST_E4M3, SMALLEST_SCALE)
    want_codes, want_scales = form.encode(dense)
    assert torch.equal(scales.nan_to_num(), want_scales.nan_to_num())
    finite = torch.ones(24, dtype=torch.bool)
    finite[[3, 4]] = False
    assert not scales[~finite].isfinite().any()
    assert torch.equal(codes[finite].float(), want_codes[finite].float())


def test_values_become_the_nearest_quantized_ones():
    codes = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    codes = codes[codes.isfinite()].sort().values
    between = (codes[1:] + codes[:-1]) / 2
    x = torch.cat((codes, between, between * 1.001, between * 0.999))[None]  # 448 is among them: the scale is 1
    assert torch.equal(quantize_fp8_triton(x).values.float(), x.to(torch.float8_e4m3fn).float())


@pytest.mark.parametrize("block", [0, 128])
@pytest.mark.parametrize(
    "tiling",
    [
        Tiling(16, 64, 256, 4, 2, swap=True),
        Tiling(32, 64, 128, 4, 2, split=2, swap=True),
        Tiling(16, 32, 64, 4, 2),
    ],
    ids=str,
)
def test_products_equal_those_of_the_twin(tiling, block):
    size_out, rows = 136, quantize_fp8_triton(torch.randn(ROWS, SIZE).half())
    weight, bias = some_weight(size_out, SIZE, block), torch.randn(size_out).half()
    want = fp8_w8a8_gemm_torch(rows, weight, bias, dtype=torch.float32)
    got = fp8_w8a8_gemm_triton(rows, weight, bias, dtype=torch.float32, tiling=tiling)
    assert (got - want).norm() < 1e-5 * want.norm()
    residual = torch.randn(ROWS, size_out).half()
    want = fp8_w8a8_gemm_torch(rows, weight, residual=residual.clone())
    got = fp8_w8a8_gemm_triton(rows, weight, residual=residual.clone(), tiling=tiling)
    assert (got.float() - want.float()).norm() < 3e-3 * want.float().norm()


def test_a_layer_is_near_dense_values_and_batch_invariant():
    hidden, ffn = 128, 160
    gate_up, down = (some_weight(*shape) for shape in ((2 * ffn, hidden), (hidden, ffn)))
    layers = [Fp8Linear(weight, None, "silu") for weight in (gate_up, down)]
    h, norm = torch.randn(ROWS, hidden).half(), torch.rand(hidden).half()
    got = h.clone()
    layers[0].gated_into(layers[1], got, norm, 1e-5)
    wide = F.rms_norm(h.float(), (hidden,), norm.float(), 1e-5)
    gate, up = F.linear(wide, dequantize_torch(gate_up)).chunk(2, -1)
    want = h.float() + F.linear(F.silu(gate) * up, dequantize_torch(down))
    assert (got.float() - want).norm() < 0.05 * (want - h.float()).norm()
    separate = h.clone()  # each verb on its own: the activation is rounded to bfloat16 between
    layers[1].add_to(separate, layers[0].gated(h, norm, 1e-5))
    assert (got.float() - separate.float()).norm() < 0.02 * (want - h.float()).norm()
    assert torch.equal(layers[0].normed(h, None, 1e-5), layers[0].product(h))
    others = torch.cat((torch.randn(ROWS - 1, hidden).half() * 100, h[-1:]))
    layers[0].gated_into(layers[1], others, norm, 1e-5)
    assert torch.equal(others[-1], got[-1])


def test_few_rows_of_wide_experts_have_a_counter_each(monkeypatch):
    """Programs share the results of as many tiles as there are counters."""
    counters = torch.zeros(1024, dtype=torch.int32)
    asked: list[int] = []
    monkeypatch.setattr("runtime.kernels.experts.moe_fp8_w8a8.split_counters", lambda device: counters)
    monkeypatch.setattr(
        Fp8Experts, "_fp8_product", lambda self, *args, tiles, **options: asked.append(tiles.choices is None)
    )
    monkeypatch.setattr(Fp8Experts, "_combine", lambda *args: None)
    hidden = 4096
    pair = tuple(
        quantized_weight("fp8", torch.zeros(n, k, dtype=torch.float8_e4m3fn), torch.ones(n, 1))
        for n, k in ((256, hidden), (hidden, 128))
    )
    route = Router(Linear(lambda x: x[:, :2].contiguous(), rms_norm_triton, torch.abs))
    mixture = Fp8Experts(ExpertsSpec(2, 1, True), route, [pair, pair], "silu", False)
    for num_rows in (16, 17):
        mixture.add_to(torch.randn(num_rows, hidden).half(), torch.ones(hidden).half(), 1e-5)
    assert asked == [True, True, False, False]


@pytest.mark.parametrize(("block", "activation"), [(0, "silu"), (128, "silu"), (0, "swiglu_clamped")])
def test_experts_are_near_their_dense_values(block, activation):
    spec, hidden, ffn = ExpertsSpec(4, 2, True, shared=1, shared_gate=True), 256, 128
    pairs = [(some_weight(2 * ffn, hidden, block), some_weight(hidden, ffn, block)) for _ in range(5)]
    router, norm = torch.randn(5, hidden).half(), torch.rand(hidden).half()
    by_row = Linear(lambda x: torch.cat([F.linear(row, router) for row in x.split(1)]), rms_norm_triton, torch.abs)
    route, biases = Router(by_row), ExpertBiases()
    if activation == "swiglu_clamped":
        biases = ExpertBiases(torch.randn(5, 2 * ffn), torch.randn(5, hidden))
    twin = Experts(
        spec, Router(Linear(lambda x: F.linear(x, router.float()), rms_norm_torch, torch.abs)),
        [tuple(dequantize_torch(w) for w in pair) for pair in pairs],
        lambda w: lambda x: F.linear(x, w), lambda y: gated_activation_torch(y, activation),
    )  # fmt: skip
    twin.biases = biases
    x = torch.randn(20, hidden).half()
    for deterministic in (False, True):
        mixture = Fp8Experts(spec, route, pairs, activation, deterministic)
        mixture.biases = biases
        firsts = []
        for num_rows in (1, 20):  # of one row a program, if not deterministic, and of sorted rows
            got, want = x[:num_rows].clone(), x[:num_rows].float()
            mixture.add_to(got, norm, 1e-5)
            twin.add_to(want, norm.float(), 1e-5)
            assert (got.float() - want).norm() < 0.06 * (want - x[:num_rows].float()).norm()
            firsts.append(got[0])
        assert not deterministic or torch.equal(*firsts)
