"""Products with quantized weights on a CPU: their values, a row's bits in any batch, and the formats that they
accept."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from benchmarks.library.models import spec_of
from runtime.kernels.quantized import wna16_cpu
from runtime.kernels.quantized.wna16_cpu import has_vector_code, int4_rows
from runtime.quant.at_load import quantized_at_load
from runtime.quant.encodings import ENCODINGS, Encoding
from runtime.quant.model_formats import weight_bytes
from runtime.quant.products import CpuProducts, products_of
from runtime.spec.config import EngineConfig
from runtime.worker.runner import choose_numerics
from tests.support.models.quantized import FORMATS
from tests.support.models.quantized_models import LLAMA, logits, write
from tests.support.models.runner_driver import open_runner

pytestmark = pytest.mark.skipif(not has_vector_code(), reason="this CPU has neither AVX2 nor AVX-512")

INT8, INT4 = ENCODINGS["int8"], ENCODINGS["int4"]
CASES = [  # a form, the shape of a weight
    (INT8, (37, 48)),
    (INT8, (1000, 16)),
    (replace(INT4, group_size=32), (64, 32)),
    (replace(INT4, group_size=32, has_zero_points=True), (192, 160)),
    (replace(INT4, group_size=128), (64, 640)),
    (replace(INT4, group_size=256, has_zero_points=True), (128, 512)),
    (replace(INT4, group_size=512), (64, 1024)),  # each scale becomes the scale of two groups
    (INT4, (320, 96)),  # and here the scale of three
    (replace(INT4, group_size=64), (3 * int4_rows(), 128)),  # blocks of the packed layout, an odd number
]
KERNELS = SimpleNamespace(norm=None, activate=None)  # the operations around a product in a decoder


def every_code(form: Encoding, shape: tuple[int, int]) -> tuple[torch.Tensor, ...]:
    """A weight with all codes of the form, a block of zeros, and scales and minimums of any size."""
    generator = torch.Generator().manual_seed(7)
    low = 0 if form.has_zero_points else -(1 << form.bits - 1)
    codes = (torch.arange(shape[0] * shape[1]).view(shape) * 7 % (1 << form.bits) + low).to(torch.int8)
    scale = torch.rand(form.scale_shape(shape), generator=generator).add_(0.01)
    scale[0, 0] = 0
    more = (torch.rand(scale.shape, generator=generator).mul_(8),) if form.has_zero_points else ()
    return codes.view(torch.uint8) if form.has_zero_points else codes, scale, *more


def test_integer_products_are_as_exact_as_their_output(monkeypatch):
    if not wna16_cpu._has_integer_products():
        pytest.skip("this CPU has no VNNI")
    monkeypatch.setattr(wna16_cpu, "_MANY_VALUES", 0)
    codes, scale = every_code(INT8, (61, 304))
    x = torch.randn(300, 304).bfloat16() * torch.logspace(-12, 12, 300).bfloat16()[:, None]
    x[3], x[:, 7] = 0, 100 * x[:, 7]  # a row of zeros, and a column of outliers
    x[4, 5], x[5, 5] = torch.nan, torch.inf
    got = wna16_cpu.int8_product(codes, scale.view(-1).bfloat16(), None, deterministic=False)(x)
    assert not got[4:6].isfinite().any()
    want = x.double() @ (codes * scale.bfloat16().double()).T
    errors = (got.double() - want).norm(dim=1) / want.norm(dim=1)
    errors[3] = got[3].abs().max()
    assert errors[:4].max() < 0.003
    assert errors[6:].max() < 0.003


@pytest.mark.parametrize(
    ("form", "shape", "many_codes"),
    [*((form, shape, wna16_cpu._MANY_VALUES) for form, shape in CASES), (*CASES[0], 0), (*CASES[1], 0)],
    ids=lambda case: case.name if isinstance(case, Encoding) else str(case),
)
def test_products_equal_those_of_dequantized_weights(form, shape, many_codes, monkeypatch):
    monkeypatch.setattr(wna16_cpu, "_PIECE", 64 * shape[1])  # several pieces
    monkeypatch.setattr(wna16_cpu, "_MANY_VALUES", many_codes)
    bias = torch.randn(shape[0]).bfloat16()
    weight = every_code(form, shape)
    dense = form.dequantize(weight, torch.float32)
    x = torch.randn(150, shape[1]).bfloat16()
    x[3] = 0
    for deterministic in (False, True):
        products = CpuProducts(deterministic)
        assert products.takes(form)
        assert products.fits(form, shape)
        packed = products.packed(form, weight)
        assert sum(tensor.nbytes for tensor in packed) == products.device_bytes(form, shape)
        joined = tuple(torch.cat((tensor, tensor)) for tensor in packed)  # like the tensors of a fused map
        product = products.linear(form, joined, torch.cat((bias, bias)), KERNELS).product
        want = (x.float() @ dense.T + bias).repeat(1, 2)
        results = [product(rows) for rows in (x[:1], x[:4], x[5:22], x)]
        for got, rows in zip(results, (want[:1], want[:4], want[5:22], want), strict=True):
            assert got.dtype == torch.bfloat16
            torch.testing.assert_close(got.float(), rows, rtol=0.02, atol=0.006 * float(want.abs().max()))
        if deterministic:
            for count in range(1, 10):
                assert torch.equal(product(x[20 : 20 + count].clone()), results[-1][20 : 20 + count])


@pytest.mark.parametrize(
    ("form", "shape"),
    [
        (INT8, (64, 24)),
        (replace(INT8, group_size=32), (64, 64)),
        (replace(INT8, has_zero_points=True), (64, 64)),
        (replace(INT4, group_size=32), (48, 64)),
        (replace(INT4, group_size=16), (64, 64)),
        (replace(INT4, group_size=128), (64, 192)),
        (ENCODINGS["fp8"], (64, 64)),
        (ENCODINGS["nf4"], (64, 64)),
    ],
)
def test_other_formats_are_dequantized(form, shape):
    products = CpuProducts(deterministic=False)
    assert not (products.takes(form) and products.fits(form, shape))


def test_quantized_products_need_bfloat16():
    assert products_of(choose_numerics(EngineConfig(device="cpu"))) is None
    for settings in ({"quantization": "int4"}, {"head_quantization": "int8"}, {"dtype": "bfloat16"}):
        assert isinstance(products_of(choose_numerics(EngineConfig(device="cpu", **settings))), CpuProducts)
    forced = EngineConfig(device="cpu", dtype="float32", quantization="int4")
    assert products_of(choose_numerics(forced)) is None


@pytest.mark.parametrize("name", ["gptq", "awq", "ct-int8-channel"])
def test_quantized_values_of_a_checkpoint_stay(tmp_path, name):
    config = LLAMA | {"num_attention_heads": 8, "num_key_value_heads": 8, "intermediate_size": 256}
    quantized, dense = write(tmp_path, FORMATS[name], config)
    runner = open_runner(quantized, dtype="bfloat16")
    assert "dense" not in runner.info.weight_formats.split(", ")[0]
    exact = logits(open_runner(quantized, dtype="float32"))
    errors = [(logits(one) - exact).std() for one in (runner, open_runner(dense, dtype="bfloat16"))]
    assert errors[0] < 2.5 * errors[1]  # scales and zeros are in bfloat16 here, weights there


@pytest.mark.parametrize(("quantization", "share"), [("int8", 0.55), ("int4", 0.35)])
def test_weights_take_the_memory_of_their_quantized_values(quantization, share):
    numerics = choose_numerics(EngineConfig(device="cpu", dtype="bfloat16", packed_weights=False))
    spec = replace(spec_of("smollm2-135m"), vocab_size=1)  # the embedding stays plain
    coded = quantized_at_load(spec, EngineConfig(quantization=quantization))
    assert weight_bytes(coded, numerics) < share * weight_bytes(spec, numerics)
