"""GGUF files of latent attention, with kv_b as one tensor and as two, against transformers."""

import json

import pytest
import torch

from runtime.kernels.cpu.linear.interleaved_weight import InterleavedWeight
from runtime.kernels.cpu_support import obstacle
from runtime.loading.checkpoint import open_checkpoint
from runtime.models import load_spec
from tests.models.test_gguf_architectures import _logits, _model, driver_of
from tests.support.models.gguf_export import export
from tests.support.models.gguf_models import SMALL, YARN
from tests.support.models.specs import changed

LATENT = SMALL | {
    "kv_lora_rank": 32, "q_lora_rank": 24, "qk_rope_head_dim": 8, "qk_nope_head_dim": 32, "v_head_dim": 16,
    "n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 40, "n_shared_experts": 2, "head_dim": 8,
    "first_k_dense_replace": 1, "num_key_value_heads": 4, "routed_scaling_factor": 1.5,
}  # fmt: skip
SIGMOID = {"expert_gating_func": 2, "expert_weights_norm": True, "expert_group_count": 2, "expert_group_used_count": 1}


@pytest.mark.parametrize("split_up", [False, True], ids=["old", "new"])
@pytest.mark.parametrize(
    ("kind", "changes", "values"),
    [
        ("deepseek_v2", {"q_lora_rank": None}, {"attention.q_lora_rank": None, "expert_weights_norm": False}),
        ("deepseek_v2", {"topk_method": "group_limited_greedy", "n_group": 2, "topk_group": 1},
         {"expert_group_count": 2, "expert_group_used_count": 1}),
        ("deepseek_v3", {"n_group": 2, "topk_group": 1, "rope_parameters": YARN | {
            "mscale": 1.0, "mscale_all_dim": 1.0}},
         SIGMOID | {"rope.scaling.type": "yarn", "rope.scaling.factor": 4.0, "rope.scaling.yarn_log_multiplier": 0.1,
                    "rope.scaling.original_context_length": 16}),
        ("glm4_moe_lite", {"n_group": 2, "topk_group": 1}, SIGMOID),
    ],
)  # fmt: skip
def test_latent_attention_survives_the_export(tmp_path, kind, changes, values, split_up):
    """transformers lacks the names of two tensors in place of kv_b, so the logits are compared."""
    model = _model(kind, LATENT | changes)
    values = {
        "attention.kv_lora_rank": 32, "attention.q_lora_rank": 24, "rope.dimension_count": 8, "expert_count": 4,
        "expert_used_count": 2, "expert_feed_forward_length": 40, "expert_shared_count": 2,
        "expert_weights_scale": 1.5, "leading_dense_block_count": 1, "rope.freq_base": 10000.0,
    } | ({
        "attention.key_length": 40, "attention.value_length": 32, "attention.key_length_mla": 40,
        "attention.value_length_mla": 16, "attention.head_count_kv": 1,
    } if split_up else {"attention.key_length": 40, "attention.value_length": 16}) | values  # fmt: skip
    metadata = {f"deepseek2.{name}": value for name, value in values.items() if value is not None}
    path = export(model, "deepseek2", tmp_path / "model.gguf", split_up=split_up, **metadata)
    checkpoint = open_checkpoint(path)
    ours, theirs = load_spec(checkpoint.config)[0], load_spec(
        json.loads(model.config.to_json_string(use_diff=False)) | {"architectures": [type(model).__name__]}
    )[0]  # fmt: skip
    assert changed(ours, split_up=False) == theirs
    tokens = [i * 7 % 61 for i in range(40)]
    with torch.no_grad():
        want = model(torch.tensor([tokens])).logits[0, -1]
    torch.testing.assert_close(_logits(path, tokens), want, rtol=1e-4, atol=1e-4)
    quantized = export(
        model, "deepseek2", tmp_path / "quantized.gguf", block_type="Q8_0", split_up=split_up, **metadata
    )
    want = _logits(quantized, tokens, quantization="none")
    driver = driver_of(quantized)
    driver.open(0, tokens, room=0)
    assert 0 < (driver.prefill(0, tokens) - want).norm() <= 1e-3 * want.norm()
    up = driver.runner.decoder.layers[0].mixer.up
    if split_up and not obstacle():
        assert isinstance(up.absorb.weight, InterleavedWeight)
        assert isinstance(up.values.weight, InterleavedWeight)
