"""Models with recurrent states or windows on a GPU, in deterministic mode: no history changes a bit of an answer."""

from collections import Counter

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.support.models.hybrid_engine import SEQS, check, histories

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no CUDA device"),
]


CASES = [
    ("wide", "bfloat16", True),
    ("wide", "bfloat16", False),
    ("wide", "float32", True),
    ("conv", "bfloat16", True),
    ("windows", "bfloat16", True),
]


@pytest.mark.parametrize(("model", "dtype", "graphs"), CASES)
def test_no_history_changes_a_bit(model, dtype, graphs):
    """Answers equal the ones of launched kernels; chunks have 64, 130 or 512 tokens."""
    seen, kind = Counter(), (("device", "cuda"), ("dtype", dtype))

    @settings(max_examples=5, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True)
    @given(histories, st.sampled_from([64, 130, 512]), st.sampled_from([30, 400]), st.sampled_from([None, 0.3, 1.0]))
    def run(history, chunk, num_kv_blocks, share_right):
        num_blocks = num_kv_blocks * (4 if model == "windows" else 1)
        limits = {"max_num_batched_tokens": chunk + SEQS, "num_kv_blocks": num_blocks, "snapshot_memory": 0.1}
        check(model, kind, history, share_right, seen, cuda_graphs=graphs, **limits)

    run()
    assert seen["hits"] > 0
