"""NaN and infinities in kernels, under the interpreter: in float16, as it truncates to bfloat16. What the card's
instructions do with them is in tests/compile (`drops_nan`) and tests/gpu."""

import pytest
import torch

from tests.support.not_finite_cases import CASES, VALUES, check


@pytest.mark.parametrize("value", VALUES)
@pytest.mark.parametrize("case", CASES)
def test_a_row_that_is_not_finite_stays_so(case, value):
    check(case, value, "cpu", torch.float16)
