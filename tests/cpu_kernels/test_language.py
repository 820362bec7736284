"""The language of CPU kernels: operators, conversions, loops and lanes against numpy, on each instruction set."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from runtime.kernels.llvm.language import (
    F16s,
    F32s,
    I32s,
    Int,
    Pointer,
    absolute,
    bf16,
    f16,
    f32,
    i32,
    joined,
    loop,
    maximum,
    minimum,
    rounded,
    share,
    square_root,
    u32,
    variable,
    when,
    where,
    zeros,
)
from runtime.kernels.llvm.mathematics import exp, log
from tests.support.kernels.compiled import call, targets

TARGETS = pytest.mark.parametrize("target", targets(), ids=lambda target: target.name)
FLOATS = st.floats(-1e6, 1e6, width=32, allow_subnormal=False)


def integers(x: I32s, y: I32s, out: I32s) -> None:
    a, b = x.load(0, 16), y.load(0, 16)
    unsigned = a.bitcast(u32(16))
    results = [a + b, a - b, a * b, a & b, a | b, a ^ b, a << 3, a >> 2, (unsigned >> 2).bitcast(i32(16))]
    results += [where(a < b, a, b), maximum(a, b), 7 - a]
    for i, result in enumerate(results):
        out.store(i * 16, result)


@TARGETS
@given(st.lists(st.integers(-(2**31), 2**31 - 1), min_size=32, max_size=32))
@settings(max_examples=20, deadline=None)
def test_integer_operators_are_those_of_numpy(target, numbers):
    x, y = torch.tensor(numbers, dtype=torch.int32).view(2, 16)
    out = torch.zeros(12, 16, dtype=torch.int32)
    call(integers, (x, y, out), target)
    a, b = x.numpy(), y.numpy()
    with np.errstate(over="ignore"):
        want = [a + b, a - b, a * b, a & b, a | b, a ^ b, a << 3, a >> 2, (a.view(np.uint32) >> 2).view(np.int32)]
        want += [np.minimum(a, b), np.maximum(a, b), 7 - a]
    np.testing.assert_array_equal(out.numpy(), np.stack(want))


def floats(x: F32s, y: F32s, out: F32s) -> None:
    a, b = x.load(0, 16), y.load(0, 16)
    results = [a + b, a - b, a * b, a / b, absolute(a), rounded(a), square_root(absolute(a)), minimum(a, b)]
    results += [a.to(i32).to(f32), a.to(f16).to(f32), a.to(bf16).to(f32), a * b + a]
    for i, result in enumerate(results):
        out.store(i * 16, result)


@TARGETS
@given(st.lists(FLOATS, min_size=32, max_size=32))
@settings(max_examples=20, deadline=None)
def test_float_operators_round_once(target, numbers):
    x, y = torch.tensor(numbers).view(2, 16)
    y = y.where(y != 0, torch.ones(()))
    out = torch.zeros(12, 16)
    call(floats, (x, y, out), target)
    want = [
        x + y,
        x - y,
        x * y,
        x / y,
        x.abs(),
        x.round(),
        torch.from_numpy(np.sqrt(x.abs().numpy())),
        torch.minimum(x, y),
    ]
    want += [x.int().float(), x.half().float(), x.bfloat16().float(), x * y + x]
    torch.testing.assert_close(out, torch.stack(want), rtol=0, atol=0)


def sums_of_ranges(x: F32s, out: F32s, size: Int, part: Int, parts: Int) -> None:
    begin, end = share(size, part, parts)
    total, count = variable(zeros(f32)), variable(zeros(i32))
    for i in loop(begin, end):
        value = x.load(i)
        total += value
        with when(value > 0.0):
            count += 1
    out.store(part * 2, total.now)
    out.store(part * 2 + 1, count.now.to(f32))


@TARGETS
@given(size=st.integers(0, 40), parts=st.integers(1, 7))
@settings(max_examples=30, deadline=None)
def test_parts_cover_a_range_once(target, size, parts):
    x, out = torch.arange(40.0) - 5, torch.zeros(parts, 2)
    call(sums_of_ranges, (x, out, size), target, parts)
    assert out[:, 0].sum() == x[:size].sum()
    assert out[:, 1].sum() == (x[:size] > 0).sum()


def lanes(x: F32s, halves: F16s, out: F32s) -> None:
    a = x.load(0, 16)
    low, high = a.split(2)
    out.store(0, joined(high, low))
    out.store(16, a.lanes([15 - i for i in range(16)]))
    out.store(32, a.reduce(lambda p, q: p + q).repeat(16))
    out.store(48, halves.load(0, 16).to(f32))
    out.store(64, a.with_lane(3, a[7]))
    assert isinstance(out, Pointer)


@TARGETS
def test_lanes_move_as_named(target):
    x, halves, out = torch.arange(16.0), torch.randn(16).half(), torch.zeros(5, 16)
    call(lanes, (x, halves, out), target)
    changed = x.clone()
    changed[3] = 7
    want = [torch.cat((x[8:], x[:8])), x.flip(0), torch.full((16,), x.sum().item()), halves.float(), changed]
    torch.testing.assert_close(out, torch.stack(want), rtol=0, atol=0)


def functions(x: F32s, out: F32s, size: Int) -> None:
    for i in loop(0, size, 16):
        value = x.load(i, 16)
        out.store(i, exp(value))
        out.store(size + i, log(absolute(value) + 1e-20))


@TARGETS
def test_functions_are_right_within_two_units(target):
    x = torch.linspace(-86, 87, 4096)
    out = torch.zeros(2, 4096)
    call(functions, (x, out, 4096), target)
    torch.testing.assert_close(out[0].double(), x.double().exp(), rtol=2.4e-7, atol=0)
    torch.testing.assert_close(out[1].double(), (x.abs() + 1e-20).double().log(), rtol=2.4e-7, atol=1.2e-7)


def test_functions_have_equal_bits_everywhere():
    x = torch.randn(4096) * 30
    found = []
    for target in targets():
        out = torch.zeros(2, 4096)
        call(functions, (x, out, 4096), target)
        found.append(out)
    assert all(torch.equal(out, found[0]) for out in found)
