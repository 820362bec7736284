"""Products of fp8 rows with fp8 weights on a GPU, and mixtures of experts of them, against their torch twins."""

import pytest
import torch
import torch.nn.functional as F

from runtime.base.model.decoder_spec import ExpertsSpec
from runtime.kernels.experts.moe_fp8_w8a8 import Fp8Experts
from runtime.kernels.experts.moe_torch import Experts, Router
from runtime.kernels.linear.fused_linear import FusedLinear
from runtime.kernels.linear.linear_torch import Linear
from runtime.kernels.norm.gated_activation import gated_activation_torch
from runtime.kernels.norm.rms_norm import rms_norm_torch
from runtime.kernels.quantized.activations import quantize_fp8_torch, quantize_fp8_triton
from runtime.kernels.quantized.fp8_w8a8_gemm import fp8_w8a8_gemm_torch, fp8_w8a8_gemm_triton
from runtime.kernels.quantized.quantized_linear import Fp8Linear
from runtime.kernels.quantized.quantized_weight import QuantizedWeight, dequantize_torch, quantized_weight
from runtime.quant.encodings import ENCODINGS

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no CUDA device")
SHAPES = [(6144, 4096), (4096, 14336), (576, 1536), (1000, 1168)]


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)


def randn(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, device="cuda").bfloat16()


def some_weight(size_out: int, size_in: int, block: int = 0) -> QuantizedWeight:
    codes = (torch.randn(size_out, size_in, device="cuda") * 64).to(torch.float8_e4m3fn)
    if not block:
        return quantized_weight("fp8", codes, torch.rand(size_out, 1, device="cuda") * size_in**-0.5 / 32)
    scales = torch.rand(-(-size_out // block), -(-size_in // block), device="cuda") * size_in**-0.5 / 32
    return quantized_weight("fp8", codes, scales, group_size=block, scale_rows=block)


def error(got: torch.Tensor, want: torch.Tensor) -> float:
    return ((got.double() - want.double()).norm() / want.double().norm()).item()


def test_rows_equal_those_of_the_twin():
    norm = torch.rand(4096, device="cuda").bfloat16()
    plain, gated = (dict[str, object](), {"activation": "silu"})
    normed = {"norm_weight": norm, "eps": 1e-5}
    for width, options in ((4096, plain), (6144, plain), (4096, normed), (28672, gated), (2 * 17408, gated)):
        x = torch.cat((randn(40, width), torch.zeros(1, width, device="cuda").bfloat16()))
        got, want = quantize_fp8_triton(x, **options), quantize_fp8_torch(x, **options)
        assert torch.allclose(got.scales, want.scales, rtol=1e-5)
        assert (got.values.float() != want.values.float()).float().mean() < 0.005
        assert (got.values[-1].float() == 0).all()


@pytest.mark.parametrize("block", [0, 128])
@pytest.mark.parametrize(("size_out", "size_in"), SHAPES)
def test_products_equal_those_of_the_twin(size_out, size_in, block):
    weight, bias = some_weight(size_out, size_in, block), randn(size_out)
    for num_rows in (2, 17, 64, 200, 700):
        rows = quantize_fp8_triton(randn(num_rows, size_in))
        residual = randn(num_rows, size_out)
        want = fp8_w8a8_gemm_torch(rows, weight, bias, dtype=torch.float32)
        assert error(fp8_w8a8_gemm_triton(rows, weight, bias, dtype=torch.float32), want) < 5e-4, num_rows
        want = residual.float() + fp8_w8a8_gemm_torch(rows, weight, dtype=torch.float32)
        assert error(fp8_w8a8_gemm_triton(rows, weight, residual=residual), want) < 5e-3, num_rows


@pytest.mark.parametrize("block", [0, 128])
def test_a_layer_is_near_dense_values_and_batch_invariant(block):
    hidden, ffn = 2048, 8192
    gate_up, down = some_weight(2 * ffn, hidden, block), some_weight(hidden, ffn, block)
    layers = [Fp8Linear(weight, None, "silu") for weight in (gate_up, down)]
    norm = torch.rand(hidden, device="cuda").bfloat16()
    for num_rows in (1, 2, 16, 64, 128, 256, 1100):
        h = randn(num_rows, hidden)
        got = h.clone()
        layers[0].gated_into(layers[1], got, norm, 1e-5)
        wide = F.rms_norm(h.float(), (hidden,), norm.float(), 1e-5)
        gate, up = F.linear(wide, dequantize_torch(gate_up)).chunk(2, -1)
        added = F.linear(F.silu(gate) * up, dequantize_torch(down))
        assert error(got, h.float() + added) < 0.05, num_rows
        others = torch.cat((randn(num_rows - 1, hidden) * 100, h[-1:]))
        layers[0].gated_into(layers[1], others, norm, 1e-5)
        assert torch.equal(others[-1], got[-1]), num_rows


@pytest.mark.parametrize("block", [0, 128])
@pytest.mark.parametrize("deterministic", [False, True])
def test_experts_are_near_their_dense_values(deterministic, block):
    spec, hidden, ffn = ExpertsSpec(15, 4, True, shared=1, shared_gate=True), 1024, 768
    pairs = [(some_weight(2 * ffn, hidden, block), some_weight(hidden, ffn, block)) for _ in range(16)]
    router, norm = randn(16, hidden), torch.rand(hidden, device="cuda").bfloat16()
    route = Router(FusedLinear(router, None, "silu", deterministic))
    mixture = Fp8Experts(spec, route, pairs, "silu", deterministic)
    dense = [tuple(dequantize_torch(w) for w in pair) for pair in pairs]
    twin = Experts(
        spec, Router(Linear(lambda x: F.linear(x, router.float()), rms_norm_torch, torch.abs)), dense,
        lambda w: lambda x: F.linear(x, w), lambda y: gated_activation_torch(y, "silu"),
    )  # fmt: skip
    alone = None
    for num_rows in (1, 8, 9, 70, 900):
        x = torch.cat((randn(num_rows - 1, hidden), randn(1, hidden) if alone is None else alone[0]))
        got, want = x.clone(), x.float()
        mixture.add_to(got, norm, 1e-5)
        twin.add_to(want, norm.float(), 1e-5)
        # A row may go to other experts that are nearly as good.
        far = (got.float() - want).norm(dim=1) > 0.1 * (want - x.float()).norm(dim=1)
        assert far.float().mean() < 0.03, num_rows
        if alone is None:
            alone = x, got
        elif deterministic:
            assert torch.equal(got[-1:], alone[1]), num_rows


@pytest.mark.parametrize("size_in", [4096, 14336, 1000])
def test_a_weight_is_quantized_as_on_a_cpu(size_in):
    dense = (torch.randn(256, size_in, device="cpu") * torch.randn(256, 1, device="cpu").exp()).bfloat16()
    form = ENCODINGS["fp8"]
    for got, want in zip(form.encode(dense.cuda()), form.encode(dense), strict=True):
        assert torch.equal(got.cpu().float(), want.float())
