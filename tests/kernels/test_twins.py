"""Each operation's cases on each backend: values, a token's bits in any step, instruction sets, and faults."""

from collections.abc import Sequence
from itertools import groupby, product
from typing import Any

import pytest
import torch

from tests.kernels.backends import BACKENDS, Backend, functions
from tests.kernels.case import Case, Outputs
from tests.kernels.cases import attention, latents, rows, stores
from tests.support.kernels.compiled import targets

CASES = [*rows.CASES, *stores.CASES, *attention.CASES, *latents.CASES]


def each(*names: str, when=lambda case, backend: True, thorough: tuple[str, ...] = ()):
    """A test of each operation on each backend that has it; the test runs with all cases that `when` accepts.

    On the backends in `thorough` the test is one of the thorough ones."""

    extra = [pytest.mark.thorough]

    def decorate(test):
        found = [
            pytest.param(
                own, backend.values[0], id=f"{title}-{at}", marks=[*backend.marks, *extra * (str(at) in thorough)]
            )
            for title, group in groupby(CASES, lambda case: case.title)
            for cases in [list(group)]
            for backend in BACKENDS
            if (at := backend.values[0]).name in names
            and (own := [case for case in cases if at.takes(case) and when(case, at)])
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


def expected(case: Case, arguments: Sequence[Any]) -> Outputs:
    """The reference's outputs."""
    return case.run(functions("reference", case, False), arguments)


def bits(x: torch.Tensor) -> torch.Tensor:
    return x.contiguous().view(-1).view(torch.uint8)


def assert_equal_bits(got: Outputs, want: Outputs) -> None:
    assert all(torch.equal(bits(a), bits(b)) for a, b in zip(got, want, strict=True))


@each("torch", "triton", "llvm")
def test_values_equal_the_reference(case: Case, backend: Backend):
    is_compiled = backend.name == "llvm"
    for seed, deterministic in [(seed, True) for seed in range(6)] if is_compiled else [(0, False), (0, True)]:
        exact = is_compiled and case.llvm_is_exact
        want = expected(case, case.arguments(backend.draw(seed, wide=not exact)))
        draw = backend.draw(seed)
        with backend.kernels(case, deterministic, parts=1 + seed) as kernels:
            got = case.run(kernels, case.arguments(draw))
        draw.check_gaps()
        assert got[0].dtype == backend.dtype
        if exact:
            assert_equal_bits(got, want)
        else:
            case.compare(got, want, backend.dtype, case.near[backend.dtype])


@each("torch", "triton", "llvm", when=lambda case, backend: backend.place in case.bits_on)
def test_a_token_has_the_same_bits_in_any_call(case: Case, backend: Backend):
    for seed in range(3 if backend.name == "llvm" else 1):
        with backend.kernels(case, parts=1 + 2 * seed) as kernels:
            whole, arguments = case.run(kernels, case.arguments(backend.draw(seed))), case.arguments(backend.draw(seed))
            for own, part in case.calls(arguments):
                assert_equal_bits(case.run(kernels, part)[:1], [whole[0][own]])
            kept = case.kept(arguments)
            assert_equal_bits(kept, whole[len(whole) - len(kept) :])


@each("llvm")
def test_instruction_sets_give_the_same_bits(case: Case, backend: Backend):
    outputs = []
    for parts, target in enumerate(targets(), 1):
        with backend.kernels(case, target=target, parts=parts) as kernels:
            outputs.append(case.run(kernels, case.arguments(backend.draw())))
    for other in outputs[1:]:
        assert_equal_bits(other, outputs[0])


@each("triton", "llvm", when=lambda case, backend: bool(case.faults), thorough=("triton-cpu-float16",))
def test_faults_stay_with_their_token(case: Case, backend: Backend):
    """What the reference does not change is unchanged. What it leaves not finite is not finite.

    The reference runs on the CPU: `torch.rsqrt` of an infinity is NaN in float64 on a GPU, and 0 elsewhere."""

    def run(fault: Any, value: float | None, wide: bool) -> Outputs:
        arguments = case.arguments((backend._replace(device="cpu") if wide else backend).draw(wide=wide))
        if value is not None:
            case.spoil(arguments, fault, value)
        return expected(case, arguments) if wide else case.run(kernels, arguments)

    with backend.kernels(case) as kernels:
        before, clean = run(None, None, True), run(None, None, False)
        for fault, value in product(case.faults, (torch.nan, torch.inf, -torch.inf)):
            outputs = zip(run(fault, value, False), clean, run(fault, value, True), before, strict=True)
            for own, other, new, old in (tuple(x.cpu() for x in found) for found in outputs):
                same = (old == new) | (old.isnan() & new.isnan())
                assert torch.equal(own[same].nan_to_num(7.0), other[same].nan_to_num(7.0)), (fault, value)
                assert torch.equal(own.isfinite(), new.isfinite()), (fault, value)
