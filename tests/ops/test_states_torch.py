"""The torch twins of layers with a state: a token's bits in any row of any step, and the values of transformers."""

from itertools import pairwise

import pytest
import torch
import transformers.models.qwen3_5.modeling_qwen3_5 as qwen
from hypothesis import given, settings
from hypothesis import strategies as st

from runtime.base.kv_cache_spec import CHUNK
from runtime.kernels.states.delta_rule_torch import delta_chunks, delta_steps
from tests.support.kernels.state_histories import LAYERS, Layer, Request, Twins, state_rows

EACH_LAYER = pytest.mark.parametrize("layer", LAYERS.values(), ids=LAYERS.keys())


@EACH_LAYER
@given(
    chunks=st.integers(CHUNK, 3 * CHUNK), cuts=st.sets(st.sampled_from([CHUNK, 2 * CHUNK])), new=st.integers(1, 4),
    at=st.integers(1, 3),
)  # fmt: skip
@settings(max_examples=12)
def test_a_request_continues_from_the_snapshot_of_another(layer, chunks, cuts, new, at):
    """Whatever its slot and its row of the cache held before."""
    start = min(at * CHUNK, chunks // CHUNK * CHUNK)
    cache, apply = layer.cache(5, 2), layer.operation(Twins)
    tokens = Request(chunks + 1, []).inputs(layer.size_in, 0, chunks + new, chunks + new)
    places = torch.tensor([[1, chunks, start, 2], [3, chunks, 0, 0], [0, 0, 0, 0]], dtype=torch.int32)

    def run(slot: int, begin: int, end: int) -> torch.Tensor:
        rows = state_rows([(slot, begin, end - begin)], places)
        return apply(tokens[begin:end], rows, cache.layers[0])

    edges = [0, *sorted(cut for cut in cuts if cut < chunks), chunks + new]
    want = torch.cat([run(0, *edge) for edge in pairwise(edges)])
    run(1, 0, chunks)  # another request's values
    cache.copy(2, 3)
    ends = [start, *([chunks] if start < chunks else []), chunks + new]
    got = torch.cat([run(1, *edge) for edge in pairwise(ends)])
    assert torch.equal(got, want[start:])


@pytest.mark.parametrize("count", [1, 63, 64, 200])
def test_both_forms_equal_transformers(count):
    cache = Layer("delta_rule", key_heads=3, value_heads=3, key_dim=20, value_dim=12).cache(2, 1)
    q, k, v, rates = (torch.randn(count, 3, *size) for size in ((20,), (20,), (12,), ()))
    k, rates, logs = torch.nn.functional.normalize(k, dim=-1), rates.sigmoid(), -torch.rand(count, 3)
    state, first = cache.layers[0], torch.randn(3, 20, 12)
    theirs = [x[None] for x in (q * 20**0.5, k, v, logs, rates)]  # they scale q
    for form in (qwen.torch_chunk_gated_delta_rule, qwen.torch_recurrent_gated_delta_rule):
        want, last = form(*theirs, initial_state=first[None], output_final_state=True)
        state.state[1], state.positions[1] = first, 0
        if form is qwen.torch_chunk_gated_delta_rule:
            got = delta_chunks([q, k, v, rates, logs], 0, state, 1, 0, None)
            torch.testing.assert_close(state.state[1], last[0], rtol=1e-4, atol=1e-4)
        else:
            got = delta_steps([q, k, v, rates, logs], 0, state, 1, 0)
        torch.testing.assert_close(got, want[0], rtol=1e-4, atol=1e-4)
