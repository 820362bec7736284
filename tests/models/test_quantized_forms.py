"""Formats without any layout: packing and unpacking, zero groups, odd sizes, quantizing, and products with quantized
weights."""

import json
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from runtime.models import load_spec
from runtime.quant.checkpoint_layouts import exponents, unpack_nibbles, unpack_words
from runtime.quant.encodings import ENCODINGS, Float8, Integer4, Integer8, Table
from runtime.quant.model_formats import weight_bytes, weight_formats
from tests.support.models.plain_format import PlainFormat, pack_nibbles
from tests.support.models.quantized import FORMATS
from tests.support.models.quantized_models import LLAMA, MIXTRAL, logits, write
from tests.support.models.quantized_tensors import equal, layout_of, numerics
from tests.support.models.runner_driver import open_runner

ALL = {
    f"{name}{suffix}": replace(form, scale_rows=rows, group_size=columns, has_zero_points=has_zero_points)
    for name, form in ENCODINGS.items()
    for suffix, rows, columns, has_zero_points in (
        ("-rows", 1, 0, False),
        ("-g16", 1, 16, False),
        ("-blocks", 32, 16, False),
        ("-minimums", 1, 16, True),
    )
    if name.startswith("int") or not has_zero_points
}


@given(st.integers(1, 9), st.integers(1, 40), st.sampled_from([4, 8]), st.randoms())
@settings(max_examples=60, deadline=None)
def test_packed_words_unpack_to_the_same_values(rows, count, bits, random):
    codes = torch.tensor([[random.randrange(1 << bits) for _ in range(count)] for _ in range(rows)])
    per_word = 32 // bits
    padded = torch.nn.functional.pad(codes, (0, -count % per_word)).view(rows, -1, per_word)
    words = (padded << torch.arange(0, 32, bits)).sum(-1)
    words = torch.where(words >= 1 << 31, words - (1 << 32), words).int()
    assert torch.equal(unpack_words(words, bits, count), codes.byte())
    assert torch.equal(unpack_words(words.t().contiguous().t(), bits, count), codes.byte())


def test_all_pairs_of_nibbles_pack_and_unpack():
    data = torch.arange(256, dtype=torch.uint8).view(16, 16)
    codes = unpack_nibbles(data)
    assert codes.view(256, 2).tolist() == [[byte % 16, byte // 16] for byte in range(256)]
    assert torch.equal(pack_nibbles(codes), data)
    assert unpack_nibbles(data, high_first=True).view(256, 2).tolist() == [[b // 16, b % 16] for b in range(256)]


def test_exponents_are_powers_of_two():
    got = exponents(torch.arange(256, dtype=torch.uint8)).double()
    assert got[:255].tolist() == [2.0 ** (code - 127) for code in range(255)]
    assert got[255].isnan()


@pytest.mark.parametrize("shape", [(64, 48), (3, 16), (33, 17), (1, 2)], ids=str)
@pytest.mark.parametrize("name", ALL)
def test_quantized_values_are_near_and_survive_packing(name, shape):
    form = ALL[name]
    dense = torch.randn(shape, generator=torch.Generator().manual_seed(1))
    dense[: shape[0] // 2, : shape[1] // 2] = 0.0  # whole groups, for some forms
    weight = form.encode(dense)
    got = form.dequantize(weight, torch.float32)
    assert got.isfinite().all()
    assert (got[: shape[0] // 2, : shape[1] // 2] == 0).all() or form.has_zero_points
    step = {Float8: 2**-4, Integer8: 2**-7, Integer4: 1 / 14, Table: 0.17}[type(form)]
    assert float((got - dense).abs().max()) <= step * float(dense.max() - dense.min()) + 1e-6
    if form.fits(shape):
        kept = PlainFormat(layout_of(FORMATS["awq"]), form, numerics(torch.float32))
        packed = kept.packed(weight)
        assert sum(tensor.nbytes for tensor in packed) == form.device_bytes(shape)
        assert equal(form.dequantize(kept.unpacked(packed), torch.float32), got)
        again = form.dequantize(form.encode(got), torch.float32)
        torch.testing.assert_close(again, got, atol=1e-5, rtol=1e-5)
    zeros = form.dequantize(form.encode(torch.zeros(shape)), torch.float32)
    assert torch.equal(zeros, torch.zeros(shape))


@pytest.mark.parametrize("form", [ENCODINGS["fp8"], replace(ENCODINGS["fp8"], group_size=16)], ids=["rows", "groups"])
def test_fp8_scales_have_the_least_squared_error(form):
    """A scale that maps the greatest value to an e4m3 value never has a smaller error."""
    dense = torch.randn(24, 64, generator=torch.Generator().manual_seed(4), dtype=torch.float64)
    codes, scale = form.encode(dense.float())
    blocks = dense.view(24, -1, form.group_size or 64)
    assert torch.allclose(blocks.abs().amax(2) / scale, codes.float().view(blocks.shape).abs().amax(2).double())

    def errors(scale: torch.Tensor) -> torch.Tensor:
        numbers = (blocks / scale.unsqueeze(2)).float().to(torch.float8_e4m3fn).double() * scale.unsqueeze(2)
        return (numbers - blocks).square().sum(2)

    greatest = blocks.abs().amax(2)
    tried = torch.stack([errors(greatest / code) for code in (*range(448, 255, -32), 240)])
    assert torch.allclose(errors(scale.double()), tried.amin(0), rtol=1e-5)
    assert (tried.argmin(0) > 0).float().mean() > 0.5  # the greatest code is seldom the best


def test_dequantizing_in_pieces_changes_nothing(monkeypatch):
    form = replace(ENCODINGS["fp8"], scale_rows=32, group_size=16)
    weight = form.encode(torch.randn(100, 48, generator=torch.Generator().manual_seed(2)))
    whole = form.dequantize(weight, torch.bfloat16)
    monkeypatch.setattr("runtime.quant.encodings._AT_ONCE", 40 * 48)
    assert equal(form.dequantize(weight, torch.bfloat16), whole)


@pytest.fixture
def kernels_for_all(monkeypatch):
    monkeypatch.setattr("runtime.quant.model_formats.backend_format", lambda numerics: PlainFormat)


KEPT = ["fp8-tensor", "ct-int8-channel", "ct-w4a16", "awq", "gptq-asymmetric", "bnb-nf4", "modelopt-nvfp4"]


@pytest.mark.parametrize("config", [LLAMA, MIXTRAL], ids=lambda config: config["architectures"][0])
@pytest.mark.parametrize("name", KEPT)
def test_weights_with_a_kernel_stay_quantized(tmp_path, kernels_for_all, name, config):
    quantized, dense = write(tmp_path, FORMATS[name], config | {"intermediate_size": 192})
    runner = open_runner(quantized, dtype="bfloat16")
    torch.testing.assert_close(logits(runner), logits(open_runner(dense, dtype="bfloat16")), atol=0.05, rtol=0.02)
    spec, _ = load_spec(json.loads((quantized / "config.json").read_text()))
    assert runner.memory.weights == weight_bytes(spec, runner.numerics)
    assert runner.memory.weights < 0.8 * weight_bytes(replace(spec, quantization=None), runner.numerics)


def test_parts_that_do_not_join_are_dequantized(tmp_path, kernels_for_all):
    """q, k and v in two forms, rows that a block would cross, columns that were reordered."""

    def bytes_of(name: str, **change) -> dict[str, int]:
        spec, _ = load_spec(LLAMA | {"quantization_config": FORMATS[name].config | change})
        half = numerics(torch.bfloat16)
        format_of = weight_formats(spec, half)
        return {
            part: format_of(f"layers.0.{part}.weight").device_bytes(spec.shapes()[f"layers.0.{part}.weight"], half)
            for part in ("q", "v", "out", "gate")
        }

    kept, widened = {"q": 2 * 64 * 64, "v": 2 * 32 * 64}, {"q": 64 * 64, "v": 32 * 64}
    scales = {"q": 4 * 64, "v": 4 * 32}
    assert bytes_of("fp8-tensor").items() >= {part: widened[part] + scales[part] for part in widened}.items()
    mixed = bytes_of("ct-fp8-channel", ignore=["re:.*v_proj"])
    assert mixed.items() >= kept.items()
    assert mixed["out"] == 64 * 64 + 4 * 64
    assert bytes_of("fp8-block").items() >= kept.items()
    assert bytes_of("gptq-desc-act").items() >= kept.items()


def test_a_fused_map_may_have_plain_parts(tmp_path):
    form = FORMATS["ct-fp8-channel"]
    quantized, dense = write(tmp_path, form)
    config = json.loads((quantized / "config.json").read_text())
    config["quantization_config"]["ignore"].append("re:.*v_proj")
    (quantized / "config.json").write_text(json.dumps(config))
    tensors, plain = (load_file(folder / "model.safetensors") for folder in (quantized, dense))
    tensors = {name: tensor for name, tensor in tensors.items() if "v_proj" not in name}
    save_file(tensors | {n: t for n, t in plain.items() if "v_proj" in n}, quantized / "model.safetensors")
    got, want = (logits(open_runner(folder, dtype="bfloat16")) for folder in (quantized, dense))
    assert torch.equal(got, want)
