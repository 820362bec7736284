"""Mixtures of experts with quantized weights on a GPU: near their dense values, and a row's bits in deterministic
mode."""

import pytest
import torch
import torch.nn.functional as F

from runtime.base.model.decoder_spec import ExpertsSpec
from runtime.kernels.experts.choice_tiles import Tile, tiled
from runtime.kernels.experts.moe_torch import Experts, Router
from runtime.kernels.experts.moe_wna16 import QuantizedExperts, moe_wna16_tile
from runtime.kernels.experts.moe_wna16_product import moe_wna16_products
from runtime.kernels.experts.moe_wna16_words import STEP, rounded_scales
from runtime.kernels.linear.fused_linear import FusedLinear
from runtime.kernels.linear.linear_torch import Linear
from runtime.kernels.norm.gated_activation import gated_activation_torch
from runtime.kernels.norm.rms_norm import rms_norm_torch
from runtime.kernels.quantized.quantized_weight import dequantize_torch, quantized_weight
from tests.support.kernels.quantized_weights import some_weight

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no CUDA device")

CASES = [  # sizes of eight chunks and of one, with whole and partial tiles
    (("int4", 128, 1), 2048, 768), (("int4", 32, 1), 320, 192), (("uint4 minimums", 64, 1), 1024, 640),
    (("int8", 0, 1), 2048, 768), (("int8 minimums", 128, 1), 400, 272), (("table", 64, 1), 1024, 768),
    (("e2m1", 32, 1), 2880, 2880), (("e2m1", 16, 1), 2048, 768), (("fp8", 128, 1), 1040, 528),
]  # fmt: skip


@pytest.mark.parametrize(("form", "hidden", "ffn"), CASES, ids=lambda part: str(part).replace("'", ""))
def test_experts_are_near_their_dense_values(form, hidden, ffn):
    torch.manual_seed(0)
    spec = ExpertsSpec(15, 4, True, shared=1, shared_gate=True)
    with torch.device("cuda"):
        pairs = [(some_weight(form, 2 * ffn, hidden), some_weight(form, hidden, ffn)) for _ in range(16)]
        router, norm = torch.randn(16, hidden).bfloat16(), torch.rand(hidden).bfloat16()
    for weight in (weight for pair in pairs for weight in pair):
        size = dequantize_torch(weight).std() * weight.shape[1] ** 0.5
        for shared in (weight.scales, weight.zero_points):
            if shared is not None:
                shared.div_(size)  # activations keep their size
    twin = Experts(
        spec, Router(Linear(lambda x: F.linear(x, router.float()), rms_norm_torch, torch.abs)),
        [tuple(dequantize_torch(w) for w in pair) for pair in pairs],
        lambda w: lambda x: F.linear(x, w), lambda y: gated_activation_torch(y, "silu"),
    )  # fmt: skip
    for deterministic in (False, True):
        route = Router(FusedLinear(router, None, "silu", deterministic))
        mixture = QuantizedExperts(spec, route, pairs, "silu", deterministic)
        alone = None
        for num_rows in (1, 2, 8, 60, 70, 900):  # one row a program of one token, few an expert up to 64
            x = torch.randn(num_rows, hidden, device="cuda").bfloat16()
            if alone is not None:
                x[-1:] = alone[0]
            got, want = x.clone(), x.float()
            mixture.add_to(got, norm, 1e-5)
            twin.add_to(want, norm.float(), 1e-5)
            # A row may go to other experts that are nearly as good.
            far = (got.float() - want).norm(dim=1) > 0.03 * want.norm(dim=1)
            assert far.float().mean() < 0.03, (deterministic, num_rows)
            if alone is None:
                alone = x, got
            elif deterministic:
                assert torch.equal(got[-1:], alone[1]), num_rows


@pytest.mark.parametrize("form", [("int4", 32, 1), ("e2m1", 16, 1), ("table", 64, 1), ("int8", 32, 1)], ids=str)
def test_every_expert_value_is_dequantized_exactly(form):
    """Each row of x selects one column, and a sum of one value is exact. The first product only multiplies by 32."""
    torch.manual_seed(0)
    spec, size_out, size_in = ExpertsSpec(2, 1, True), 256, 128
    with torch.device("cuda"):
        weight = rounded_scales(some_weight(form, size_out, size_in))
        scales = torch.cat((torch.full((size_in, 1), 32.0), torch.ones(size_in, 1)))  # silu(32) is 32
        selecting = quantized_weight("int8", torch.eye(size_in).to(torch.int8).repeat(2, 1), scales)
        router = Router(FusedLinear(torch.zeros(2, size_in).bfloat16(), None, "silu", deterministic=True))
        mixture = QuantizedExperts(spec, router, [(selecting, weight)] * 2, "silu", deterministic=True)
        x, out, ids = torch.eye(size_in).bfloat16(), torch.empty(size_in, size_out), torch.zeros(size_in).int()
    want = dequantize_torch(weight).bfloat16().float().t() * 32
    for tile in (Tile(8, 64, STEP, 2, 4), moe_wna16_tile(size_in, 2, True), moe_wna16_tile(size_in, 2, False)):
        tiles = tiled(ids, mixture.spec.all_experts, tile.block_m)
        moe_wna16_products(x, mixture.weights, mixture.biases, out.zero_(), tiles, out, out, 1, tile, "silu")
        assert torch.equal(out, want), tile


@pytest.mark.parametrize("num_rows", [1, 4, 10, 16, 64])
def test_captured_layers_repeat_their_bits(num_rows):
    """Launches overlap, so each replay would see another result if one did not wait for the launch before it."""
    torch.manual_seed(0)
    spec, hidden, ffn = ExpertsSpec(32, 4, True), 2880, 1472
    with torch.device("cuda"):
        pairs = [(some_weight(("e2m1", 32, 1), 2 * ffn, hidden), some_weight(("e2m1", 32, 1), hidden, ffn))] * 32
        router, norm = torch.randn(32, hidden).bfloat16(), torch.rand(hidden).bfloat16()
        start = torch.randn(num_rows, hidden).bfloat16()
    mixture = QuantizedExperts(spec, Router(FusedLinear(router, None, "silu", False)), pairs, "silu", False)
    alone = start.clone()
    for _ in range(6):
        torch.cuda.synchronize()
        mixture.add_to(alone, norm, 1e-5)
    x, graph = start.clone(), torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(6):
            mixture.add_to(x, norm, 1e-5)
    for _ in range(50):
        x.copy_(start)
        graph.replay()
        assert torch.equal(x, alone)
