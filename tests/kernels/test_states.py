"""Layers with a state on each backend: values, a token's bits in any row of any step, instruction sets, and faults."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from itertools import chain
from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from runtime.kernels.cpu_support import obstacle
from runtime.kernels.llvm.compiler import Target
from tests.kernels.backends import BACKENDS, Backend
from tests.support.examples import examples
from tests.support.kernels.compiled import targets
from tests.support.kernels.state_histories import LAYERS, Kernels, Layer, Place, Request, Twins, played, requests

NEAR = {torch.float32: 2e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}
LARGE = {
    "delta_rule 6 heads": Layer("delta_rule", key_heads=2, value_heads=6, key_dim=128, value_dim=128),
    "delta_rule 32 heads": Layer("delta_rule", key_heads=16, value_heads=32, key_dim=128, value_dim=128),
}
LONG = [Request(1002, [(64, 64), (640, 640), (297, 297), (9, 4), (1, 1)], 704), Request(300, [(299, 299), (2, 1)])]
REQUESTS = st.lists(requests(), min_size=1, max_size=3)


@contextmanager
def operations(backend: Backend, target: Target | None = None, parts: int = 1) -> Iterator[Any]:
    if backend.name != "llvm":
        yield Kernels if backend.name == "triton" else Twins
        return
    from tests.support.kernels.compiled_states import compiled  # imports llvmlite

    with compiled(target, parts) as found:
        yield found


def each(*names: str):
    """The layers on these backends. A backend follows another, so that `one_in` takes layers of each."""
    found = [
        pytest.param(layer, *own.values, id=f"{name}-{own.values[0]}", marks=own.marks)
        for own in BACKENDS
        if own.values[0].place in names and not (own.values[0].place == "llvm" and obstacle())
        for name, layer in (LAYERS | (LARGE if own.values[0].place == "cuda" else {})).items()
        if own.values[0].dtype == torch.float32 or own.values[0].name == "triton"
    ]
    return pytest.mark.parametrize(("layer", "backend"), found)


@pytest.mark.one_in(3)
@each("triton", "llvm", "cuda")
def test_values_equal_the_reference(layer: Layer, backend: Backend):
    place = Place(backend.dtype, backend.device, padded=backend.name == "triton")

    @given(given_requests=REQUESTS)
    @settings(max_examples=examples(12) if backend.place == "triton" else 12)
    def check(given_requests: list[Request]) -> None:
        with operations(backend) as own:
            got = played(layer, given_requests, own, place=place)
        want = played(layer, given_requests, Twins, place=place)
        for a, b in zip(chain(*got), chain(*want), strict=True):
            if layer.kind == "short_conv" and backend.name == "llvm":
                assert torch.equal(a, b)
            else:
                near = NEAR[backend.dtype]
                torch.testing.assert_close(a, b, rtol=near, atol=near * float(b.abs().max()))

    check()


@pytest.mark.one_in(3)
@each("torch", "llvm", "cuda")
def test_bits_do_not_depend_on_rows(layer: Layer, backend: Backend):
    """Rows with rejected tokens, steps that are planned again, prompts in chunks, and snapshots."""
    place = Place(backend.dtype, backend.device)

    @example(given_requests=LONG, parts=2)
    @given(given_requests=REQUESTS, parts=st.integers(1, 5))
    @settings(max_examples=12)
    def check(given_requests: list[Request], parts: int) -> None:
        with operations(backend, parts=parts) as own:
            got = played(layer, given_requests, own, place=place._replace(padded=backend.name == "triton"))
        with operations(backend) as own:
            want = played(layer, [each.alone() for each in given_requests], own, rows_per_step=1, place=place)
        assert all(torch.equal(a, b) for a, b in zip(chain(*got), chain(*want), strict=True))

    check()


@each("llvm")
def test_instruction_sets_give_the_same_bits(layer: Layer, backend: Backend):
    given_requests = [Request(100, [(64, 64), (36, 36), (9, 4), (1, 1)], 64), Request(1, [(1, 1)] * 5)]
    results = []
    for target in targets():
        with operations(backend, target) as own:
            results.append(list(chain(*played(layer, given_requests, own))))
    assert all(torch.equal(a, b) for other in results[1:] for a, b in zip(results[0], other, strict=True))


@each("triton", "llvm", "cuda")
@pytest.mark.parametrize("column", [0, -1])
def test_faults_stay_with_their_request(layer: Layer, backend: Backend, column: int):
    """The cache holds NaN before the first row. A GPU computes the tokens of a prompt's row together."""
    if backend.place == "triton" and backend.dtype == torch.float16:
        pytest.skip("float32 has the same kernels")
    place = Place(backend.dtype, backend.device)
    given_requests = [Request(70, [(64, 64), (6, 6), (3, 2)]), Request(5, [(4, 4), (1, 1), (2, 2)])]
    spoilt = [replace(given_requests[0], fault=(65, column)), given_requests[1]]
    with operations(backend) as own:
        whole, _ = played(layer, given_requests, own, place=place)
        (bad, good), _ = played(layer, spoilt, own, place=place)
    assert torch.equal(good, whole[1])
    first = 64 if backend.name == "triton" else 65
    assert torch.equal(bad[:first], whole[0][:first])
    assert not bad[65].isfinite().all()
