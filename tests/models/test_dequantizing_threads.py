"""How many threads dequantize a weight on a CPU."""

import pytest
import torch

from runtime.quant.quantized_formats import threads_for


@pytest.mark.parametrize(("num_values", "num_threads"), [(576 * 1536, 1), (4096 * 4096, 2)])
def test_one_thread_dequantizes_a_small_weight(num_values: int, num_threads: int):
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        with threads_for(num_values):
            assert torch.get_num_threads() == num_threads
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)
