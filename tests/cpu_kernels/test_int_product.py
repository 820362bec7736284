"""Compiled products, lookups and quantized rows have the bits of their torch twins, on each instruction set."""

import llvmlite.binding as llvm
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from runtime.kernels.cpu.linear.activations import quantize_rows
from runtime.kernels.cpu.linear.int_product import int_product
from runtime.kernels.cpu.linear.int_product_torch import int_product_torch, lookup_torch, quantize_rows_torch
from runtime.kernels.cpu.linear.interleaved_weight import InterleavedWeight, interleave, pack_torch
from runtime.kernels.cpu.linear.lookup import lookup
from runtime.kernels.cpu.linear.pack import pack
from runtime.kernels.cpu.linear.weight_form import WeightForm, row_span
from runtime.kernels.llvm.compiler import assembly, target_of
from tests.support.kernels.compiled import call, targets

TARGETS = pytest.mark.parametrize("target", targets(), ids=lambda target: target.name)
HALF, BFLOAT, FLOAT = torch.float16, torch.bfloat16, torch.float32
FORMS = {
    "Q4_0": WeightForm(4, 32, HALF, 8),
    "Q4_1": WeightForm(4, 32, HALF, 0, True),
    "Q5_0": WeightForm(5, 32, HALF, 16),
    "Q5_1": WeightForm(5, 32, HALF, 0, True),
    "Q8_0": WeightForm(8, 32, HALF, 128),
    "Q4_K": WeightForm(4, 32, torch.uint8, 0, True, 256),
    "Q5_K": WeightForm(5, 32, torch.uint8, 0, True, 256),
    "Q6_K": WeightForm(6, 16, torch.int8, 32, False, 256),
    "AWQ": WeightForm(4, 128, HALF, 0, True),
    "int4 g64": WeightForm(4, 64, BFLOAT, 8),
    "mxfp4": WeightForm(4, 32, BFLOAT, 12, is_e2m1=True),
    "nvfp4": WeightForm(4, 16, FLOAT, 12, is_e2m1=True),
    "int8 rows": WeightForm(8, 0, FLOAT, 128),
    "int8 g128 with zero points": WeightForm(8, 128, FLOAT, 0, True),
}
ONE_LIMB = ("Q4_K", "Q6_K", "mxfp4", "int8 rows")  # on simpler targets: each way to add chunks
COLUMNS = {name: form.super_size or max(form.group_size, 32) for name, form in FORMS.items()}


def draw_weight(form: WeightForm, num_rows: int, num_columns: int, seed: int) -> InterleavedWeight:
    generator = torch.Generator().manual_seed(seed)

    def shared() -> torch.Tensor:
        shape = num_rows, num_columns // (form.group_size or num_columns)
        if form.super_size:
            low = -60 if form.scale_dtype == torch.int8 else 0
            return torch.randint(low, 64, shape, generator=generator).to(form.scale_dtype)
        return (torch.randn(shape, generator=generator) * 0.1).to(form.scale_dtype)

    def of_super() -> torch.Tensor | None:
        if not form.super_size:
            return None
        return (torch.randn(num_rows, num_columns // form.super_size, generator=generator) * 0.01).half()

    values = torch.randint(0, 1 << form.bits, (num_rows, num_columns), dtype=torch.uint8, generator=generator)
    minimums, factors = (shared(), of_super()) if form.has_minimum else (None, None)
    tensors = (values, shared(), minimums, of_super(), factors)
    return interleave(form, [[tensor for tensor in tensors if tensor is not None]], num_rows)


def draw_rows(num_rows: int, num_columns: int, seed: int) -> torch.Tensor:
    """Rows with chunks of very different magnitudes, and a chunk of zeros."""
    generator = torch.Generator().manual_seed(seed)
    magnitudes = torch.randint(-12, 12, (num_rows, num_columns // 32, 1), generator=generator).float().exp2()
    x = torch.randn(num_rows, num_columns // 32, 32, generator=generator) * magnitudes
    x[:, 0] = 0
    return x.flatten(1)


def multiply(x, weight, target, limbs, parts, bias=None, out=None, is_one_row=False):
    """The product by the kernel, [rows, padded N]."""
    span, blocks = row_span(8 * limbs, weight.form), len(weight.values)
    rows = quantize_rows_torch(x, 8 * limbs, span)
    result = torch.zeros(len(x), blocks * 16) if out is None else out
    shared = weight.scales, weight.minimums, weight.super_scales, weight.super_minimums
    sizes = len(x), blocks, x.shape[1] // 32, blocks * 16
    call(
        int_product, (weight.values, *shared, *rows, bias, result, *sizes), target, parts,
        form=weight.form, limbs=limbs, is_one_row=is_one_row, adds=out is not None, has_bias=bias is not None,
    )  # fmt: skip
    return result


@pytest.mark.parametrize(
    ("target", "name", "limbs"),
    [
        pytest.param(target, name, limbs, id=f"{name}-{limbs}-{target.name}")
        for target in targets()
        for name in FORMS
        for limbs in (2, 1)
        if limbs == 2 or target is targets()[0] or name in ONE_LIMB
    ],
)
@given(
    num_rows=st.sampled_from([1, 2, 3, 7, 69]), outputs=st.integers(1, 70), steps=st.integers(1, 3),
    parts=st.integers(1, 4), seed=st.integers(0, 99),
)  # fmt: skip
@settings(max_examples=6, deadline=None)
def test_a_product_has_the_bits_of_its_twin(target, name, limbs, num_rows, outputs, steps, parts, seed):
    columns = COLUMNS[name] * steps
    weight, x = draw_weight(FORMS[name], outputs, columns, seed), draw_rows(num_rows, columns, seed)
    got = multiply(x, weight, target, limbs, parts, is_one_row=num_rows == 1)
    want = int_product_torch(x, weight, 16 if limbs == 2 else 8)
    torch.testing.assert_close(got[:, :outputs], want, rtol=0, atol=0)


@pytest.mark.parametrize("name", FORMS)
def test_a_row_has_the_same_bits_in_any_batch(name):
    weight, x = draw_weight(FORMS[name], 48, COLUMNS[name] * 2, 1), draw_rows(7, COLUMNS[name] * 2, 2)
    together = multiply(x, weight, targets()[0], 2, 3)
    alone = torch.cat([multiply(row, weight, targets()[0], 2, 1, is_one_row=True) for row in x.split(1)])
    torch.testing.assert_close(together, alone, rtol=0, atol=0)


def test_bias_and_residual_are_added_in_this_order():
    weight, x = draw_weight(FORMS["Q4_1"], 32, 64, 3), draw_rows(2, 64, 4)
    bias, residual = torch.randn(32), torch.randn(2, 32)
    got = multiply(x, weight, targets()[0], 2, 2, bias, residual.clone())
    want = residual + (int_product_torch(x, weight) + bias)
    torch.testing.assert_close(got, want, rtol=0, atol=0)


@pytest.mark.parametrize("wrong", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("name", ["Q4_0", "Q4_K", "Q6_K"])
def test_only_the_row_with_a_wrong_number_is_not_finite(name, wrong):
    span = row_span(16, FORMS[name])
    weight, x = draw_weight(FORMS[name], 32, 2 * span, 5), draw_rows(3, 2 * span, 6)
    clean = multiply(x, weight, targets()[0], 2, 1)
    x[1, span + 8] = wrong
    rows = [torch.zeros_like(tensor) for tensor in quantize_rows_torch(x, 16, span)]
    options = {"num_limbs": 2, "span": span, "has_norm": False, "activation": "", "gated": False}
    call(quantize_rows, (x, None, *rows, 3, 2 * span, 2 * span, 0.0), None, **options)
    assert rows[1][:: span // 32].isfinite().t().tolist() == [[True, True], [True, False], [True, True]]
    got = multiply(x, weight, targets()[0], 2, 1)
    assert not got[1].isfinite().any()
    assert torch.equal(got[::2], clean[::2])


@TARGETS
@pytest.mark.parametrize("bits", [16, 8])
@pytest.mark.parametrize("span", [32, 256])
@given(num_rows=st.integers(1, 5), spans=st.integers(1, 5), parts=st.integers(1, 3), seed=st.integers(0, 99))
@settings(max_examples=10, deadline=None)
def test_quantized_rows_have_the_bits_of_their_twin(target, bits, span, num_rows, spans, parts, seed):
    columns, limbs = spans * span, bits // 8
    x = draw_rows(num_rows, columns, seed)
    want = quantize_rows_torch(x, bits, span)
    got = [torch.zeros_like(tensor) for tensor in want]
    options = {"num_limbs": limbs, "span": span, "has_norm": False, "activation": "", "gated": False}
    call(quantize_rows, (x, None, *got, num_rows, columns, columns, 0.0), target, parts, **options)
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))


@TARGETS
@pytest.mark.parametrize("name", FORMS)
def test_rows_of_a_table_have_the_bits_of_their_twin(target, name):
    weight = draw_weight(FORMS[name], 100, COLUMNS[name] * 2, 7)
    ids, out = torch.tensor([0, 17, 99, 5, 17]), torch.zeros(5, COLUMNS[name] * 2)
    shared = weight.scales, weight.minimums, weight.super_scales, weight.super_minimums
    arguments = (weight.values, *shared, ids, out, 5, out.shape[1], 1.0)
    call(lookup, arguments, target, 2, form=weight.form)
    assert torch.equal(out, lookup_torch(weight, ids))


@TARGETS
@pytest.mark.parametrize("bits", [4, 5, 6, 8])
def test_packed_values_have_the_bytes_of_their_twin(target, bits):
    values = torch.randint(0, 1 << bits, (48, 96), dtype=torch.uint8)
    want = pack_torch(values, bits)
    got = torch.zeros_like(want)
    call(pack, (values, got, 3, 96), target, 2, bits=bits)
    assert torch.equal(got, want)


@pytest.mark.parametrize(
    ("triple", "cpu", "features", "instruction"),
    [
        ("aarch64-unknown-linux-gnu", "neoverse-n1", "+dotprod", "sdot"),
        ("x86_64-unknown-linux-gnu", "x86-64-v3", "", "vpmaddubsw"),
        ("x86_64-unknown-linux-gnu", "x86-64-v3", "+avxvnni", "vpdpbusd"),
        ("x86_64-unknown-linux-gnu", "x86-64-v4", "+avx512vnni", "vpdpbusd"),
    ],
)
@pytest.mark.parametrize("name", ["Q4_1", "Q6_K", "Q8_0"])
def test_products_compile_to_the_instructions_of_each_cpu(name, triple, cpu, features, instruction):
    """Each quad of a chunk is one instruction a limb and vector; no product falls back to single multiplications."""
    llvm.initialize_all_targets()
    llvm.initialize_all_asmprinters()
    target = target_of(triple, cpu, features)
    constants = {"form": FORMS[name], "limbs": 2, "is_one_row": True, "adds": False, "has_bias": False}
    text = assembly(int_product, target, **constants)
    vectors = 64 // target.vector_bytes
    factor = 2 if instruction == "vpmaddubsw" and name == "Q8_0" else 1  # nibbles
    assert text.count(instruction) >= 8 * 2 * vectors * factor
