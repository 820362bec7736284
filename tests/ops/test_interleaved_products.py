"""The torch twin of the integer products on a CPU: its rounding, its independent rows, and the numbers of a weight."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from runtime.kernels.cpu.linear.int_product_torch import int_product_torch, lookup_torch, quantize_rows_torch
from runtime.kernels.cpu.linear.interleaved_weight import (
    dequantize_interleaved,
    interleave,
    interleaved_bytes,
    row_major,
)
from runtime.kernels.cpu.linear.weight_form import WeightForm
from runtime.kernels.numerics import Numerics
from runtime.kernels.table import select
from tests.support.models.runner_driver import TINY

HALF, BRAIN, SINGLE = torch.float16, torch.bfloat16, torch.float32
FORMS = [
    WeightForm(4, 32, HALF, 8), WeightForm(4, 32, HALF, 0, True), WeightForm(4, 128, BRAIN, 8),
    WeightForm(4, 128, SINGLE, 0, True), WeightForm(4, 0, HALF, 8), WeightForm(4, 16, HALF, 0, True),
    WeightForm(5, 32, HALF, 16), WeightForm(5, 32, HALF, 0, True), WeightForm(8, 0, BRAIN, 128),
    WeightForm(8, 32, HALF, 128), WeightForm(8, 64, SINGLE, 0, True), WeightForm(4, 32, torch.uint8, 0, True, 256),
    WeightForm(5, 32, torch.uint8, 0, True, 256), WeightForm(6, 16, torch.int8, 32, False, 256),
]  # fmt: skip


def random_weight(form: WeightForm, rows: int, columns: int, seed: int = 0) -> list[torch.Tensor]:
    """Any values, and scales of any sign."""
    generator = torch.Generator().manual_seed(seed)
    values = torch.randint(0, 1 << form.bits, (rows, columns), generator=generator).to(torch.uint8)
    groups = rows, columns // (form.group_size or columns)

    def scales() -> torch.Tensor:
        if form.super_size:
            low = 0 if form.scale_dtype == torch.uint8 else -128
            return torch.randint(low, 64, groups, generator=generator).to(form.scale_dtype)
        return torch.randn(groups, generator=generator).mul_(0.1).to(form.scale_dtype)

    def factors() -> torch.Tensor:
        return torch.randn(rows, columns // form.super_size, generator=generator).mul_(0.01).half()

    count = 1 + form.has_minimum
    return [values, *(scales() for _ in range(count)), *(factors() for _ in range(count if form.super_size else 0))]


def numbers(form: WeightForm, weight: list[torch.Tensor]) -> torch.Tensor:
    """The numbers of a weight in row-major order."""
    values, *shared = weight
    scales, factors = shared[: 1 + form.has_minimum], shared[1 + form.has_minimum :]
    for i, own in enumerate(factors):
        scales[i] = scales[i].float() * own.float().repeat_interleave(scales[i].shape[1] // own.shape[1], 1)
    spread = [own.float().repeat_interleave(values.shape[1] // own.shape[1], 1) for own in scales]
    dense = (values.float() - form.offset) * spread[0]
    return dense - spread[1] if form.has_minimum else dense


def random_rows(count: int, columns: int) -> torch.Tensor:
    x = torch.randn(count, columns, generator=torch.Generator().manual_seed(1))
    return x * torch.logspace(-4, 4, count)[:, None]


@pytest.mark.parametrize("form", FORMS)
@settings(max_examples=20, deadline=None)
@given(rows=st.integers(1, 70), supers=st.integers(1, 3), seed=st.integers(0, 99))
def test_interleaved_weights_store_their_numbers(form, rows, supers, seed):
    weight = random_weight(form, rows, 256 * supers, seed)
    interleaved, want = interleave(form, [weight], rows), numbers(form, weight)
    assert torch.equal(dequantize_interleaved(interleaved), want)
    assert interleaved.form == form
    assert all(torch.equal(a, b) for a, b in zip(row_major(interleaved), weight, strict=True))
    assert interleaved.nbytes == interleaved_bytes(form, interleaved.shape)
    ids = torch.randint(0, rows, (5,), generator=torch.Generator().manual_seed(seed))
    assert torch.equal(lookup_torch(interleaved, ids), want[ids])


@pytest.mark.parametrize("form", FORMS)
def test_pieces_make_the_same_weight(form):
    weight, cuts = random_weight(form, 61, 512), ((0, 16), (16, 48), (48, 61))
    pieces = ([tensor[start:stop] for tensor in weight] for start, stop in cuts)
    whole, joined = interleave(form, [weight], 61), interleave(form, pieces, 61)
    assert (whole.form, whole.shape) == (joined.form, joined.shape)
    pairs = zip(whole.tensors, joined.tensors, strict=True)
    assert all(a is b or torch.equal(a, b) for a, b in pairs)


def test_pieces_with_other_scales_keep_their_numbers():
    dtypes = HALF, SINGLE, BRAIN, HALF
    forms = [WeightForm(4, 32, dtype, 8) for dtype in dtypes]
    pieces = [random_weight(form, 16, 64) for form in forms]
    joined = interleave(forms[0], pieces, 64)
    assert joined.form.scale_dtype == SINGLE
    want = torch.cat([numbers(forms[0], piece) for piece in pieces])
    assert torch.equal(dequantize_interleaved(joined), want)


@pytest.mark.parametrize(("bits", "largest"), [(16, 32512), (8, 127)])
def test_rows_are_rounded_to_the_nearest_integer(bits, largest):
    x = random_rows(9, 96)
    x[3] = 0
    rows, chunks = quantize_rows_torch(x, bits), x.unflatten(1, (-1, 32))
    assert int(rows.numbers.abs().max()) == largest
    errors = (rows.numbers * rows.scales.t()[..., None] - chunks).abs().amax(2)
    assert bool((errors <= chunks.abs().amax(2) / largest * 0.501 + 1e-38).all())
    weights = torch.tensor([256, 1] if bits == 16 else [1])[:, None]
    sums = (rows.sums * weights).sum(2).transpose(0, 1)  # half chunks
    assert torch.equal(sums, rows.numbers.unflatten(2, (2, 16)).sum(3))


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(("bits", "error"), [(16, 1e-4), (8, 0.02)])
def test_products_are_near_those_of_dense_weights(form, bits, error):
    tensors, x = random_weight(form, 37, 512), random_rows(9, 512)
    weight, want = interleave(form, [tensors], 37), x.double() @ numbers(form, tensors).double().T
    got = int_product_torch(x, weight, bits)
    assert ((got - want).norm(dim=1) / want.norm(dim=1)).max() < error
    for row in range(len(x)):
        assert torch.equal(int_product_torch(x[row : row + 1], weight, bits)[0], got[row])


def test_numbers_that_are_not_finite_reach_their_row_only():
    weight, x = interleave(FORMS[0], [random_weight(FORMS[0], 33, 64)], 33), random_rows(4, 64)
    want = int_product_torch(x, weight)
    x[1, 3], x[2, 40] = torch.nan, torch.inf
    got = int_product_torch(x, weight)
    assert not got[1:3].isfinite().any()
    assert torch.equal(got[[0, 3]], want[[0, 3]])


@pytest.mark.parametrize("dtype", [SINGLE, BRAIN, HALF])
def test_layers_join_parts_of_several_forms(dtype):
    forms, sizes = FORMS[:3] + FORMS[-1:], (16, 7, 32, 5)
    drawn = [(form, random_weight(form, rows, 256)) for form, rows in zip(forms, sizes, strict=True)]
    bias, x = torch.randn(60), torch.randn(3, 256).to(dtype)
    kernels = select(Numerics(dtype, torch.device("cpu"), "llvm", packed=False, deterministic=False), TINY)
    layer = kernels.linear([interleave(form, [weight], len(weight[0])) for form, weight in drawn], bias.to(dtype))
    want = x.float() @ torch.cat([numbers(*each) for each in drawn]).T + bias.to(dtype).float()
    got = layer.product(x)
    assert got.dtype == dtype
    torch.testing.assert_close(got, want.to(dtype), rtol=0.01, atol=0.01)
