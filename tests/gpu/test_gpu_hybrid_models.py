"""Models with recurrent states on a GPU, in deterministic mode: no history changes a bit of an answer."""

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


@pytest.mark.parametrize("graphs", [True, False], ids=["graphs", "launched"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("model", ["delta", "conv", "wide"])
def test_no_history_changes_a_bit(model, dtype, graphs):
    """With graphs, answers are those of launched kernels; chunks are of 64, 130 and 512 tokens."""
    seen, kind = Counter(), (("device", "cuda"), ("dtype", dtype), ("cuda_graphs", graphs))

    @settings(max_examples=8, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True)
    @given(histories, st.sampled_from([64, 130, 512]), st.sampled_from([30, 400]), st.sampled_from([None, 0.3, 1.0]))
    def run(history, chunk, num_kv_blocks, share_right):
        limits = {"max_num_batched_tokens": chunk + SEQS, "num_kv_blocks": num_kv_blocks, "snapshot_memory": 0.1}
        check(model, kind, history, share_right, seen, **limits)

    run()
    assert seen["hits"] > 0
