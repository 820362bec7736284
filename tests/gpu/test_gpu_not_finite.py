"""NaN and infinities in the kernels of a GPU: a row that is not finite stays so, and alone (C9)."""

import pytest
import torch

from tests.support.kernels.not_finite_cases import CASES, VALUES, check

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no CUDA device")


@pytest.mark.parametrize("value", VALUES)
@pytest.mark.parametrize("case", CASES)
def test_a_row_that_is_not_finite_stays_so(case, value):
    check(case, value, "cuda", torch.bfloat16)
