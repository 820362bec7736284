"""Steps of models with recurrent states or windows on the Triton path: the tokens of the torch path."""

import pytest

from runtime.base.model.mixer_spec import DeltaRuleSpec, ShortConvSpec
from tests.support.kernels.triton_engine import SPEC, run
from tests.support.models.specs import changed

pytestmark = pytest.mark.usefixtures("wide_products")

SMALL = changed(SPEC, hidden_size=64, num_heads=2, ffn_size=64)
DELTA_RULE = DeltaRuleSpec(key_heads=1, value_heads=2, key_dim=16, value_dim=16, width=4)
DELTA = changed(SMALL, output_gate=True, mixer=(DELTA_RULE, None))
CONV = changed(SMALL, mixer=(ShortConvSpec(channels=64, width=3), None))
WINDOWS = changed(SMALL, window=(40, 0))


@pytest.mark.thorough
@pytest.mark.parametrize("graphs", [False, True])
@pytest.mark.parametrize("spec", [DELTA, CONV, WINDOWS], ids=["delta", "conv", "windows"])
def test_tokens_equal_those_of_torch(spec, graphs):
    """With draft tokens, chunks of prompts, hits of a shared prefix, and padding of graphs."""
    limits = {"max_model_len": 176, "num_kv_blocks": 60, "max_num_batched_tokens": 100, "max_num_seqs": 4}
    config = {"spec": spec, "num_shared": 90, **limits}
    *want, want_values = run("torch", **config)
    *got, values = run(
        "triton", answers=want[0], guesses=2, graphs=graphs, share_right=1.0 if graphs else 0.7, **config
    )
    assert got == want, (want, got)
    assert max(abs(a - b) for a, b in zip(values, want_values, strict=True)) < 1e-4
