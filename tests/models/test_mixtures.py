"""Mixtures with shared experts, other scores or dense layers equal the mixtures of transformers."""

import json
import re
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import nn
from transformers import DeepseekV2Config, DeepseekV3Config, GptOssConfig, Lfm2MoeConfig, Qwen3_5MoeTextConfig
from transformers.models.deepseek_v2.modeling_deepseek_v2 import DeepseekV2Moe
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3MoE
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssMLP
from transformers.models.lfm2_moe.modeling_lfm2_moe import Lfm2MoeMLP, Lfm2MoeSparseMoeBlock
from transformers.models.qwen3_5_moe.modeling_qwen3_5_moe import Qwen3_5MoeSparseMoeBlock

from runtime.base.config import EngineConfig
from runtime.base.model.decoder_spec import DecoderSpec, ExpertsSpec
from runtime.base.model.sharding import Part, parts_of
from runtime.base.shard import Shard
from runtime.base.types import CallboardError
from runtime.kernels.norm.rms_norm import rms_norm_torch
from runtime.loading.checkpoint import open_checkpoint
from runtime.models import load_spec
from runtime.models.decoder_build import load_decoder
from runtime.models.families.glm import EXPERT_NAMES
from runtime.models.families.qwen import MOE_WEIGHT_MAP
from runtime.models.weight_map import WeightMap
from runtime.models.weights import read_from
from runtime.quant.weight_format import DENSE
from runtime.worker.runner import choose_numerics
from tests.support.models.quantized import FORMATS
from tests.support.models.quantized_models import GLM, QWEN_MOE, write
from tests.support.models.specs import changed, dense_spec

SPEC = dense_spec(
    num_layers=2, hidden_size=48, num_heads=2, num_kv_heads=2, head_dim=8, ffn_size=20, vocab_size=31,
    max_positions=16, norm_eps=1e-5, qk_norm="head",
)  # fmt: skip
SIZES = {"hidden_size": 48, "moe_intermediate_size": 20, "num_experts": 6, "num_experts_per_tok": 3}
QWEN = WeightMap(
    MOE_WEIGHT_MAP.names
    | {"shared_gate": "model.layers.{}.mlp.shared_expert_gate"}
    | {f"shared.{part}": "model.layers.{}.mlp.shared_expert." + part + "_proj" for part in ("gate", "up", "down")}
)
_LFM2 = {"gate": "w1", "up": "w3", "down": "w2"}
LFM2 = WeightMap(
    MOE_WEIGHT_MAP.names
    | {"choice_bias": "model.layers.{}.mlp.expert_bias"}
    | {f"dense.{part}": "model.layers.{}.mlp." + name for part, name in _LFM2.items()}
)
DEEPSEEK = WeightMap({
    name: tensor
    for name, tensor in (MOE_WEIGHT_MAP.names | EXPERT_NAMES).items()
    if not name.startswith("dense.")
})  # fmt: skip
GROUPS = SIZES | {
    "num_experts": 12,
    "n_routed_experts": 12,
    "n_group": 4,
    "topk_group": 2,
    "n_shared_experts": 2,
    "num_attention_heads": 2,
}


def checkpoint_of(blocks: list[nn.Module], spec: DecoderSpec, weight_map: WeightMap, folder: Path) -> Path:
    """A checkpoint with the blocks as feed-forward layers, and random numbers elsewhere."""
    tensors = {}
    for layer, block in enumerate(blocks):
        state = by_expert(block) if isinstance(block, GptOssMLP) else block.state_dict()
        tensors |= {f"model.layers.{layer}.mlp.{name}": value.contiguous() for name, value in state.items()}
    for parameter, name in weight_map.names_of(spec).items():
        if ".mlp." not in name:
            tensors[name] = torch.randn(spec.shapes()[parameter])
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps({}))
    return folder


def by_expert(block: GptOssMLP) -> dict[str, torch.Tensor]:
    """The tensors with the names that a family of separate experts would have."""
    own, tensors = block.experts, {f"gate.{name}": value for name, value in block.router.state_dict().items()}
    for e in range(own.num_experts):
        for name, kind in (("weight", own.gate_up_proj.mT), ("bias", own.gate_up_proj_bias)):
            tensors[f"experts.{e}.gate_proj.{name}"] = kind[e, ::2]
            tensors[f"experts.{e}.up_proj.{name}"] = kind[e, 1::2]
        tensors[f"experts.{e}.down_proj.weight"] = own.down_proj[e].T
        tensors[f"experts.{e}.down_proj.bias"] = own.down_proj_bias[e]
    return tensors


def check_layers(
    blocks: list[nn.Module], spec: DecoderSpec, weight_map: WeightMap, folder: Path, size: float = 1.0
) -> None:
    for block in blocks:
        for name, value in block.state_dict().items():
            value.copy_(torch.randn(value.shape) * (0.3 if "bias" in name else size * value.shape[-1] ** -0.5))
    checkpoint = open_checkpoint(checkpoint_of(blocks, spec, weight_map, folder))
    numerics = choose_numerics(EngineConfig(device="cpu", kernel_backend="torch", dtype="float32"))
    decoder = load_decoder(checkpoint, spec, weight_map, numerics, 16)
    x, ones = torch.randn(70, 48), torch.ones(48)
    for layer, block in zip(decoder.layers, blocks, strict=True):
        got = x.clone()
        if isinstance(layer.feed_forward, tuple):
            gate_up, down = layer.feed_forward
            gate_up.gated_into(down, got, ones, 1e-5)
        else:
            layer.feed_forward.add_to(got, ones, 1e-5)
        with torch.no_grad():
            result = block(rms_norm_torch(x, ones, 1e-5)[None])
        want = x + (result[0] if isinstance(result, tuple) else result).view_as(x)
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4 * size)


def test_shared_experts_equal_transformers(tmp_path):
    config = Qwen3_5MoeTextConfig(**SIZES, shared_expert_intermediate_size=20)
    config._experts_implementation = "eager"
    blocks = [Qwen3_5MoeSparseMoeBlock(config) for _ in range(2)]
    spec = changed(SPEC, experts=ExpertsSpec(6, 3, True, shared=1, shared_gate=True))
    check_layers(blocks, spec, QWEN, tmp_path)


@pytest.mark.parametrize("normalized", [True, False])
def test_sigmoid_scores_and_dense_layers_equal_transformers(tmp_path, normalized):
    config = Lfm2MoeConfig(**SIZES, intermediate_size=28, norm_topk_prob=normalized, routed_scaling_factor=1.5)
    config._experts_implementation = "eager"
    blocks = [Lfm2MoeMLP(config), Lfm2MoeSparseMoeBlock(config)]
    experts = ExpertsSpec(6, 3, normalized, scores="sigmoid", choice_bias=True, sum_eps=1e-6, scale=1.5)
    check_layers(blocks, changed(SPEC, ffn_size=(28, 20), experts=(None, experts)), LFM2, tmp_path)


@pytest.mark.parametrize("groups", [True, False])
def test_groups_by_their_best_expert_equal_transformers(tmp_path, groups):
    config = DeepseekV2Config(
        **GROUPS, topk_method="group_limited_greedy" if groups else "greedy", routed_scaling_factor=1.5
    )
    config._experts_implementation = "eager"
    limited = {"groups": 4, "top_groups": 2} if groups else {}
    spec = changed(SPEC, experts=ExpertsSpec(12, 3, False, shared=2, scale=1.5, **limited))
    check_layers([DeepseekV2Moe(config) for _ in range(2)], spec, DEEPSEEK, tmp_path)


@pytest.mark.parametrize("normalized", [True, False])
def test_groups_by_their_two_best_experts_equal_transformers(tmp_path, normalized):
    config = DeepseekV3Config(**GROUPS, norm_topk_prob=normalized, routed_scaling_factor=2.5)
    config._experts_implementation = "eager"
    experts = ExpertsSpec(
        12, 3, normalized, shared=2, scores="sigmoid", choice_bias=True, sum_eps=1e-20, scale=2.5,
        groups=4, top_groups=2, group_score="top2",
    )  # fmt: skip
    check_layers([DeepseekV3MoE(config) for _ in range(2)], changed(SPEC, experts=experts), DEEPSEEK, tmp_path)


def test_biases_and_the_clamped_activation_equal_transformers(tmp_path):
    config = GptOssConfig(hidden_size=48, intermediate_size=20, num_local_experts=6, num_experts_per_tok=3)
    config._experts_implementation = "eager"
    spec = changed(
        SPEC, ffn_bias=True, activation="swiglu_clamped",
        experts=ExpertsSpec(6, 3, False, scores="softmax_of_chosen", router_bias=True),
    )  # fmt: skip
    check_layers([GptOssMLP(config) for _ in range(2)], spec, MOE_WEIGHT_MAP, tmp_path, size=6.0)


@pytest.mark.parametrize(
    ("experts", "message"),
    [
        ({"groups": 5, "top_groups": 2}, "5 groups of its 12 experts"),
        ({"groups": 4, "top_groups": 5}, "a token takes 5"),
        ({"groups": 6, "top_groups": 1}, "3 experts of 1 groups"),
        ({"groups": 12, "top_groups": 6, "group_score": "top2"}, "at least two each"),
    ],
)
def test_groups_that_cannot_be_are_refused(experts, message):
    with pytest.raises(CallboardError, match=message):
        ExpertsSpec(12, 3, True, **experts)


def test_a_tensor_of_all_experts_is_read_by_expert(tmp_path):
    both, down = torch.randn(3, 10, 4), torch.randn(3, 4, 5)
    tensors = {"m.experts.gate_up_proj": both, "m.experts.down_proj": down, "m.gate_up_proj": torch.randn(2, 4)}
    save_file(tensors, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text("{}")
    index = {"weight_map": dict.fromkeys(tensors, "model.safetensors")}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    checkpoint = open_checkpoint(tmp_path)
    assert len(checkpoint.names()) == 10
    for expert in range(3):
        prefix = f"m.experts.{expert}."
        for name, want in (("gate_proj", both[expert, :5]), ("up_proj", both[expert, 5:]), ("down_proj", down[expert])):
            name = f"{prefix}{name}.weight"
            assert checkpoint.shape(name) == tuple(want.shape)
            assert torch.equal(checkpoint.tensor(name, torch.float32), want)
            part = Part(1, 1, 3)
            assert torch.equal(checkpoint.tensor(name, torch.float32, part=part), want[:, 1:3])
    assert "m.experts.down_proj" not in checkpoint
    first = checkpoint.fingerprint
    save_file(tensors | {"m.experts.down_proj": down + 1}, tmp_path / "model.safetensors")
    assert open_checkpoint(tmp_path).fingerprint != first


@pytest.mark.parametrize("name", ["ct-fp8-channel", "awq"])
@pytest.mark.parametrize("config", [GLM, QWEN_MOE], ids=lambda config: config["architectures"][0])
def test_ranks_read_their_parts_of_shared_experts(tmp_path, config, name):
    numerics = choose_numerics(EngineConfig(device="cpu", kernel_backend="torch", dtype="float32"))
    sizes = {"moe_intermediate_size": 64, "shared_expert_intermediate_size": 192, "intermediate_size": 192}
    for folder in write(tmp_path, FORMATS[name], config | sizes):
        checkpoint = open_checkpoint(folder)
        spec, weight_map = load_spec(checkpoint.config)
        read = read_from(checkpoint, spec, weight_map, numerics)
        for rank in range(2):
            own = spec.of_rank(Shard(rank, 2))
            read_own = read_from(checkpoint, own, weight_map, numerics)
            for parameter, shape in own.shapes().items():
                found, whole = read_own(parameter).dense, read(parameter).dense
                assert found.shape == shape
                assert torch.equal(found, DENSE.encode(whole, parts_of(own, parameter))[0]), parameter
        first = f"layers.1.experts.{spec.experts.num_experts}."
        (tensor,) = {name for p, name in weight_map.names_of(spec).items() if p == f"{first}down.weight"}
        if folder.name == "dense":
            whole = checkpoint.tensor(tensor, torch.float32)
            parts = [read(first.replace("4.", f"{4 + i}.") + "down.weight").dense for i in range(spec.experts.shared)]
            assert torch.equal(torch.cat(parts, 1), whole)


@pytest.mark.parametrize("base", ["model.", ""])
def test_layers_that_draft_tokens_are_ignored(base):
    spec, weight_map = load_spec(GLM | {"num_nextn_predict_layers": 2})
    for name, is_ignored in (("1.mlp.gate", False), ("2.eh_proj", True), ("3.mlp.gate", True), ("4.mlp.gate", False)):
        assert bool(re.fullmatch(weight_map.ignored, f"{base}layers.{name}.weight")) is is_ignored
    assert spec.num_layers == 2


def test_ranks_divide_dense_layers_evenly():
    spec = changed(SPEC, ffn_size=(27, 20), experts=(None, ExpertsSpec(6, 3, True)))
    with pytest.raises(CallboardError, match="does not divide"):
        spec.check(EngineConfig(tensor_parallel_size=2))
