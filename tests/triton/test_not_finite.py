"""NaN and infinities in kernels, under the interpreter: in float16, because it truncates to bfloat16. The effect of the
card's instructions is tested in tests/compile (`drops_nan`) and tests/gpu, which has all values in all cases."""

import pytest
import torch

from tests.support.kernels.not_finite_cases import CASES, check

CHEAP = ("fp8 rows", "fp8 weights", "integer product", "routing")


@pytest.mark.parametrize(
    ("case", "value"), [*((case, torch.nan) for case in CASES), *((case, torch.inf) for case in CHEAP)]
)
def test_a_row_that_is_not_finite_stays_so(case, value):
    check(case, value, "cpu", torch.float16)
