"""Each operation's cases on each backend: values, a token's bits in any step, instruction sets, and faults."""

from itertools import groupby

import pytest
import torch

from tests.kernels.backends import BACKENDS, Backend, functions
from tests.kernels.case import Case, Draw, Outputs
from tests.kernels.cases import rows, stores
from tests.support.kernels.compiled import targets

CASES = [*rows.CASES, *stores.CASES]


def each(*names: str, when=lambda case: True):
    """A test of each operation on each backend that has it; the test runs with all cases."""

    def decorate(test):
        found = [
            pytest.param(own, backend.values[0], id=f"{title}-{backend.values[0]}", marks=backend.marks)
            for title, group in groupby(filter(when, CASES), lambda case: case.title)
            for cases in [list(group)]
            for backend in BACKENDS
            if backend.values[0].name in names and (own := [case for case in cases if backend.values[0].takes(case)])
        ]

        def run(cases: list[Case], backend: Backend) -> None:
            for case in cases:
                try:
                    test(case, backend)
                except BaseException as error:
                    error.add_note(f"in case {case.name}")
                    raise

        return pytest.mark.parametrize(("cases", "backend"), found)(run)

    return decorate


def expected(case: Case, draw: Draw, fault: float | None = None) -> Outputs:
    """The reference's outputs."""
    return case.run(functions("torch", case, False), case.spoilt(draw, fault))


def bits(x: torch.Tensor) -> torch.Tensor:
    return x.contiguous().view(-1).view(torch.uint8)


def assert_equal_bits(got: Outputs, want: Outputs) -> None:
    assert all(torch.equal(bits(a), bits(b)) for a, b in zip(got, want, strict=True))


@each("torch", "triton", "llvm")
def test_values_equal_the_reference(case: Case, backend: Backend):
    for seed in range(3 if backend.name == "llvm" else 1):
        exact = backend.name == "llvm" and case.llvm_is_exact
        want = expected(case, backend.draw(seed, wide=not exact))
        for deterministic in (False, True):
            draw = backend.draw(seed)
            with backend.kernels(case, deterministic, parts=1 + 2 * seed) as kernels:
                got = case.run(kernels, case.arguments(draw))
            draw.check_gaps()
            assert got[0].dtype == backend.dtype
            if exact:
                assert_equal_bits(got, want)
            else:
                case.compare(got, want, backend.dtype, case.near[backend.dtype])


@each("torch", "triton", "llvm")
def test_a_token_has_the_same_bits_alone(case: Case, backend: Backend):
    with backend.kernels(case) as kernels:
        whole = case.run(kernels, case.arguments(backend.draw()))
        if len(whole[0]):
            assert_equal_bits(case.alone(kernels, case.arguments(backend.draw())), whole)


@each("llvm")
def test_instruction_sets_give_the_same_bits(case: Case, backend: Backend):
    outputs = []
    for parts, target in enumerate(targets(), 1):
        with backend.kernels(case, target=target, parts=parts) as kernels:
            outputs.append(case.run(kernels, case.arguments(backend.draw())))
    for other in outputs[1:]:
        assert_equal_bits(other, outputs[0])


@each("triton", "llvm", when=lambda case: case.spoils is not None)
def test_faults_stay_with_their_token(case: Case, backend: Backend):
    """What the reference does not change is unchanged. What it leaves not finite is not finite."""
    for value in (torch.nan, torch.inf, -torch.inf):
        before, after = expected(case, backend.draw(wide=True)), expected(case, backend.draw(wide=True), value)
        with backend.kernels(case) as kernels:
            clean, spoilt = (case.run(kernels, case.spoilt(backend.draw(), own)) for own in (None, value))
        for own, other, old, new in zip(spoilt, clean, before, after, strict=True):
            same = (old == new) | (old.isnan() & new.isnan())
            assert torch.equal(own[same].nan_to_num(7.0), other[same].nan_to_num(7.0)), value
            assert torch.equal(own.isfinite(), new.isfinite()), value
