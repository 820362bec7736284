"""Weights as the GPU's kernels hold them: the formats that stay quantized there, and packing that keeps their
values."""

from dataclasses import replace
from unittest import mock

import pytest
import torch

from runtime.base.config import EngineConfig
from runtime.base.model.decoder_spec import ExpertsSpec
from runtime.base.types import CallboardError
from runtime.kernels.experts.moe_fp8_w8a8 import has_fp8_moe
from runtime.kernels.numerics import Numerics
from runtime.kernels.quantized.quantized_weight import QuantizedWeight, dequantize_torch, quantized_weight
from runtime.quant.at_load import PLAIN
from runtime.quant.checkpoint_layouts import Plain
from runtime.quant.encodings import ENCODINGS
from runtime.quant.held_weight import HeldWeight, joined
from runtime.quant.model_formats import backend_format, dequantized_copy_bytes
from runtime.quant.scheme import QuantizationScheme
from runtime.quant.triton_format import TritonFormat
from runtime.worker.runner import choose_numerics
from tests.support.models.runner_driver import tiny_runner
from tests.support.models.specs import changed, dense_spec

GPU = Numerics(torch.bfloat16, torch.device("cuda"), "triton", packed=False, deterministic=False)
FORMS_WITH_KERNELS = {
    f"{name} {change}": replace(ENCODINGS[name], **change)
    for name in ENCODINGS
    for change in (
        {}, {"group_size": 16}, {"group_size": 32}, {"group_size": 64}, {"group_size": 128}, {"group_size": 384},
        {"scale_rows": 64, "group_size": 128}, {"has_zero_points": True}, {"group_size": 32, "has_zero_points": True},
        {"group_size": 256, "has_zero_points": True},
    )
    if name.startswith("int") or "has_zero_points" not in change
    if ENCODINGS[name].bits == 4 or change != {"group_size": 16}
}  # fmt: skip


@pytest.mark.parametrize("name", FORMS_WITH_KERNELS)
def test_packed_weights_have_the_values_of_their_format(name):
    form, shape = FORMS_WITH_KERNELS[name], (192, 384)
    kept = TritonFormat(Plain(QuantizationScheme(PLAIN, "int8")), form, GPU)
    assert TritonFormat.takes(form)
    assert TritonFormat.fits(form, shape)
    dense = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    weights = [form.encode(dense[:64]), form.encode(dense[64:])]
    packed = [HeldWeight((part,), kept, kept.packed(weight)) for part, weight in zip("kv", weights, strict=True)]
    assert sum(t.nbytes for weight in packed for t in weight.tensors) == kept.device_bytes(shape, GPU)
    (whole,) = joined(packed)
    assert whole.names == ("k", "v")
    want = torch.cat([form.dequantize(weight, torch.float32) for weight in weights])
    # Kernels have the numbers of a table in bfloat16.
    torch.testing.assert_close(
        dequantize_torch(whole.operand), want, rtol=4e-3 if "nf4" in name or "bits" in name else 2e-6, atol=2e-6
    )


def test_weights_without_a_kernel_are_dequantized():
    products, int4, fp8 = TritonFormat, ENCODINGS["int4"], ENCODINGS["fp8"]
    assert not any(products.takes(replace(int4, group_size=columns)) for columns in (8, 48, 192))
    assert not products.takes(replace(fp8, scale_rows=128))
    assert not products.takes(replace(fp8, group_size=16))
    assert not products.fits(replace(int4, group_size=64), (64, 192))
    assert products.fits(replace(int4, group_size=32), (64, 192))
    assert not products.fits(fp8, (64, 40))


@mock.patch("runtime.quant.model_formats.INTERPRETED", False)
def test_float32_keeps_no_quantized_weights():
    gpu, cpu = GPU.device, torch.device("cpu")
    assert backend_format(GPU) is TritonFormat
    assert backend_format(Numerics(torch.float32, gpu, "triton", False, False)) is None
    assert backend_format(Numerics(torch.float32, cpu, "torch", False, False)) is None


def test_experts_use_fp8_rows_if_tiles_are_whole(monkeypatch):
    monkeypatch.setattr("runtime.kernels.linear.tiles.multiplies_fp8", lambda device: True)

    def pair(form: str, hidden: int, ffn: int, **block: int) -> tuple[QuantizedWeight, QuantizedWeight]:
        dtype = torch.float8_e4m3fn if form == "fp8" else torch.int8
        shapes = ((2 * ffn, hidden), (hidden, ffn))
        rows, columns = block.get("scale_rows", 1), block.get("group", 0)
        scales = [torch.ones(-(-n // rows), -(-k // columns) if columns else 1) for n, k in shapes]
        made = zip(shapes, scales, strict=True)
        return tuple(quantized_weight(form, torch.zeros(shape, dtype=dtype), s, **block) for shape, s in made)

    assert has_fp8_moe(pair("fp8", 256, 128))
    assert has_fp8_moe(pair("fp8", 256, 128, group_size=128, scale_rows=128))
    assert not has_fp8_moe(pair("fp8", 256, 192))
    assert not has_fp8_moe(pair("fp8", 256, 128, group_size=128))
    assert not has_fp8_moe(pair("int8", 256, 128))
    monkeypatch.setattr("runtime.kernels.linear.tiles.multiplies_fp8", lambda device: False)
    assert not has_fp8_moe(pair("fp8", 256, 128))


def test_memory_is_planned_for_the_largest_dequantized_map(monkeypatch):
    monkeypatch.setattr("runtime.kernels.linear.tiles.multiplies_fp8", lambda device: True)
    spec = dense_spec(
        num_layers=2, hidden_size=128, num_heads=4, num_kv_heads=2, head_dim=32, ffn_size=256, vocab_size=101,
        max_positions=64, norm_eps=1e-6,
    )  # fmt: skip

    def widened(form: str, parts: str, numerics: Numerics = GPU, **fields: object) -> int:
        model = changed(spec, **fields)
        names = [name for name in model.shapes() if name.rpartition(".")[0].rpartition(".")[2] in parts.split()]
        schemes = dict.fromkeys(names, QuantizationScheme(PLAIN, form))
        return dequantized_copy_bytes(replace(model, quantization=schemes), numerics)

    every = "q k v out gate up down"
    assert widened("int8", every) == 2 * 2 * 256 * 128
    assert widened("int8", "q k v out") == 2 * (128 + 2 * 64) * 128
    assert widened("int8", "gate down") == 2 * 256 * 128  # gate is plain beside a quantized up
    assert not widened("int8", every, replace(GPU, deterministic=True))
    assert not widened("fp8", every)
    assert widened("int8", "gate up down", experts=ExpertsSpec(4, 2, True)) == 0
    monkeypatch.setattr("runtime.kernels.linear.tiles.multiplies_fp8", lambda device: False)
    assert widened("fp8", every) == 2 * 2 * 256 * 128


def test_a_cpu_without_llvmlite_refuses_the_set_field(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    fix = {"int8": "install llvmlite and leave kernel_backend at auto", "int4": None, "fp8": "leave it at auto"}
    fix["int4"] = fix["int8"]
    for form, advice in fix.items():
        for is_draft, field in ((False, "quantization"), (True, "draft_quantization")):
            with pytest.raises(CallboardError) as error:
                tiny_runner(is_draft=is_draft, quantization=form)
            where = f"which has no products in float32 on cpu (torch kernels); {advice}."
            assert str(error.value) == f"{field} is {form}, {where}"
    with pytest.raises(CallboardError, match="kernel_backend is llvm, but the package llvmlite is not installed"):
        choose_numerics(EngineConfig(device="cpu", kernel_backend="llvm"))


def test_a_cpu_computes_in_float32(monkeypatch):
    asked = [{}, {"quantization": "int4"}, {"head_quantization": "int8"}, {"kernel_backend": "torch"}]
    numerics = [choose_numerics(EngineConfig(device="cpu", **settings)) for settings in asked]
    assert {(each.dtype, each.backend) for each in numerics[:3]} == {(torch.float32, "llvm")}
    assert (numerics[3].dtype, numerics[3].backend) == (torch.float32, "torch")
    assert backend_format(numerics[3]) is None
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert choose_numerics(EngineConfig(device="cpu")).backend == "torch"
