"""Every GGUF architecture: a model that is read from its GGUF file equals the model it was made of, for `transformers`
too."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
from safetensors.torch import save_file
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from runtime.assembly.runner import build_runner
from runtime.loading.checkpoint import open_checkpoint
from runtime.models import load_spec
from runtime.models.weights import locate_parameters
from runtime.spec.config import EngineConfig
from runtime.spec.mixer_spec import DeltaRuleSpec
from runtime.spec.sharding import Part
from runtime.spec.types import CallboardError
from runtime.worker.sources import CheckpointSource
from tests.support.models.gguf_export import export, with_stacked_experts
from tests.support.models.runner_driver import Driver

SMALL = {
    "vocab_size": 61,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "tie_word_embeddings": False,
    "pad_token_id": None,
}
EXPERTS = {"num_experts_per_tok": 2, "router_jitter_noise": 0.0}
LLAMA3 = {
    "rope_type": "llama3", "rope_theta": 500000.0, "factor": 32.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}  # fmt: skip
GEMMA = SMALL | {"head_dim": 16, "sliding_window": 8, "query_pre_attn_scalar": 16, "tie_word_embeddings": True}
GEMMA4 = SMALL | {
    "num_hidden_layers": 4, "layer_types": ["sliding_attention", "full_attention"] * 2, "sliding_window": 8,
    "head_dim": 16, "global_head_dim": 32, "vocab_size_per_layer_input": 61, "tie_word_embeddings": True,
}  # fmt: skip
GEMMA4_METADATA = {
    "gemma4.attention.sliding_window_pattern": [True, False] * 2, "gemma4.attention.sliding_window": 8,
    "gemma4.attention.key_length": 32, "gemma4.attention.key_length_swa": 16, "gemma4.rope.dimension_count": 32,
    "gemma4.rope.freq_base": 1e6, "gemma4.rope.freq_base_swa": 1e4,
}  # fmt: skip
YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 16}
LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "short_factor": [1.0, 1.05, 1.1],
    "long_factor": [1.5, 4.0, 9.0],
    "original_max_position_embeddings": 16,
}
CONVS = SMALL | {"layer_types": ["conv", "full_attention", "conv"], "tie_word_embeddings": True}
DELTA = SMALL | {
    "head_dim": 16, "linear_num_key_heads": 2, "linear_num_value_heads": 6, "linear_key_head_dim": 8,
    "linear_value_head_dim": 16, "layer_types": ["linear_attention", "full_attention", "linear_attention"],
    "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64, "shared_expert_intermediate_size": 64,
    "hidden_size": 64, "intermediate_size": 96,
}  # fmt: skip
# The architecture, the config of a model of it, and metadata that only it has.
MODELS: dict[str, tuple[str, str, dict[str, Any], dict[str, Any]]] = {
    "llama": ("llama", "llama", SMALL | {"attention_bias": True}, {"llama.rope.freq_base": 10000.0}),
    "llama-yarn": (
        "llama",
        "llama",
        SMALL | {"rope_parameters": YARN},
        {"llama.rope.freq_base": 10000.0, "llama.rope.scaling.type": "yarn", "llama.rope.scaling.factor": 4.0,
         "llama.rope.scaling.original_context_length": 16},
    ),
    "mixtral": (
        "llama",
        "mixtral",
        SMALL | EXPERTS | {"num_local_experts": 4, "rope_parameters": {"rope_type": "default", "rope_theta": 1e6}},
        {"llama.rope.freq_base": 1e6, "llama.expert_count": 4, "llama.expert_used_count": 2},
    ),
    "qwen2": ("qwen2", "qwen2", SMALL, {"qwen2.rope.freq_base": 10000.0}),
    "qwen3": ("qwen3", "qwen3", SMALL | {"head_dim": 16, "tie_word_embeddings": True}, {}),
    "qwen3moe": (
        "qwen3moe",
        "qwen3_moe",
        SMALL | EXPERTS | {"head_dim": 16, "num_experts": 4, "moe_intermediate_size": 40, "norm_topk_prob": True},
        {"qwen3moe.expert_count": 4, "qwen3moe.expert_used_count": 2, "qwen3moe.expert_feed_forward_length": 40},
    ),
    "gemma2": (
        "gemma2",
        "gemma2",
        GEMMA | {"attn_logit_softcapping": 20.0, "final_logit_softcapping": 10.0},
        {"gemma2.attention.sliding_window": 8, "gemma2.attn_logit_softcapping": 20.0,
         "gemma2.final_logit_softcapping": 10.0},
    ),
    "gemma3": (
        "gemma3",
        "gemma3_text",
        GEMMA | {"num_hidden_layers": 7},  # the sixth attends to all
        {"gemma3.attention.sliding_window": 8, "gemma3.rope.freq_base": 1e6},
    ),
    "gemma3-4b": (
        "gemma3",
        "gemma3_text",
        GEMMA | {"num_hidden_layers": 7, "rope_parameters": {
            "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
            "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0}}},
        {"gemma3.attention.sliding_window": 8, "gemma3.rope.freq_base": 1e6, "gemma3.rope.scaling.type": "linear",
         "gemma3.rope.scaling.factor": 8.0},
    ),
    "gemma4": (
        "gemma4",
        "gemma4_text",
        GEMMA4 | {"num_kv_shared_layers": 2, "hidden_size_per_layer_input": 32, "use_double_wide_mlp": True,
           "final_logit_softcapping": 10.0},
        GEMMA4_METADATA
        | {"gemma4.attention.shared_kv_layers": 2, "gemma4.embedding_length_per_layer_input": 32,
           "gemma4.feed_forward_length": [80, 80, 160, 160], "gemma4.final_logit_softcapping": 10.0},
    ),
    "gemma4moe": (
        "gemma4",
        "gemma4_text",
        GEMMA4
        | {"hidden_size_per_layer_input": 0, "attention_k_eq_v": True, "num_global_key_value_heads": 1,
           "enable_moe_block": True, "num_experts": 4, "top_k_experts": 2, "moe_intermediate_size": 40},
        GEMMA4_METADATA
        | {"gemma4.attention.head_count_kv": [2, 1, 2, 1], "gemma4.expert_count": 4, "gemma4.expert_used_count": 2,
           "gemma4.expert_feed_forward_length": 40, "gemma4.embedding_length_per_layer_input": 0},
    ),
    "phi3": (
        "phi3",
        "phi3",
        SMALL | {"rope_parameters": LONGROPE | {"partial_rotary_factor": 0.5}, "partial_rotary_factor": 0.5,
                 "original_max_position_embeddings": 16},
        {"phi3.rope.dimension_count": 6, "phi3.rope.scaling.original_context_length": 16,
         "phi3.rope.freq_base": 10000.0},
    ),
    "qwen2moe": (
        "qwen2moe",
        "qwen2_moe",
        SMALL | EXPERTS | {"num_experts": 4, "moe_intermediate_size": 40, "shared_expert_intermediate_size": 120},
        {"qwen2moe.expert_count": 4, "qwen2moe.expert_used_count": 2, "qwen2moe.expert_feed_forward_length": 40},
    ),
    "olmoe": (
        "olmoe", "olmoe", SMALL | EXPERTS | {"num_experts": 4},
        {"olmoe.expert_count": 4, "olmoe.expert_used_count": 2},
    ),
    "glm4moe": (
        "glm4moe",
        "glm4_moe",
        SMALL | {"head_dim": 12, "n_routed_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 40,
                 "n_shared_experts": 2, "n_group": 3, "topk_group": 2, "routed_scaling_factor": 1.5,
                 "use_qk_norm": True, "attention_bias": True},
        {"glm4moe.rope.dimension_count": 6, "glm4moe.expert_count": 6, "glm4moe.expert_used_count": 2,
         "glm4moe.expert_feed_forward_length": 40, "glm4moe.expert_shared_count": 2,
         "glm4moe.expert_group_count": 3, "glm4moe.expert_group_used_count": 2, "glm4moe.expert_weights_scale": 1.5,
         "glm4moe.expert_weights_norm": True, "glm4moe.leading_dense_block_count": 1, "glm4moe.block_count": 4,
         "glm4moe.nextn_predict_layers": 1},
    ),
    "glm4": ("glm4", "glm4", SMALL | {"head_dim": 12}, {"glm4.rope.dimension_count": 6}),
    "granite": (
        "granite",
        "granite",
        SMALL | {"attention_multiplier": 0.2, "embedding_multiplier": 12.0, "residual_multiplier": 0.22,
                 "logits_scaling": 8.0},
        {"granite.attention.scale": 0.2, "granite.embedding_scale": 12.0, "granite.residual_scale": 0.22,
         "granite.logit_scale": 8.0},
    ),
    "mistral3": (
        "mistral3",
        "ministral3",
        SMALL | {"head_dim": 16, "rope_parameters": YARN | {
            "llama_4_scaling_beta": 0.1, "mscale": 1.0, "mscale_all_dim": 1.0}},
        {"mistral3.rope.freq_base": 10000.0, "mistral3.rope.scaling.type": "yarn",
         "mistral3.rope.scaling.factor": 4.0, "mistral3.rope.scaling.original_context_length": 16,
         "mistral3.rope.scaling.yarn_log_multiplier": 1.0, "mistral3.attention.temperature_scale": 0.1},
    ),
    "olmo2": ("olmo2", "olmo2", SMALL, {}),
    "olmo3": (
        "olmo2",
        "olmo3",
        SMALL | {"sliding_window": 8, "num_hidden_layers": 4, "rope_parameters": {
            "full_attention": YARN | {"rope_theta": 500000.0, "attention_factor": 1.2},
            "sliding_attention": {"rope_type": "default", "rope_theta": 500000.0}}},
        {"olmo2.attention.sliding_window": 8, "olmo2.attention.sliding_window_pattern": [True, True, True, False],
         "olmo2.rope.freq_base": 500000.0, "olmo2.rope.scaling.type": "yarn", "olmo2.rope.scaling.factor": 4.0,
         "olmo2.rope.scaling.original_context_length": 16, "olmo2.rope.scaling.attn_factor": 1.2},
    ),
    "seed_oss": ("seed_oss", "seed_oss", SMALL | {"head_dim": 16, "attention_bias": True}, {}),
    "smollm3": ("smollm3", "smollm3", SMALL | {"num_hidden_layers": 5}, {"smollm3.rope.freq_base": 2e6}),
    "lfm2": (
        "lfm2",
        "lfm2",
        CONVS | {"block_auto_adjust_ff_dim": False},
        {"lfm2.attention.head_count_kv": [0, 2, 0], "lfm2.shortconv.l_cache": 3, "lfm2.rope.freq_base": 1e6},
    ),
    "lfm2moe": (
        "lfm2moe",
        "lfm2_moe",
        CONVS | {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 40, "num_dense_layers": 1},
        {"lfm2moe.attention.head_count_kv": [0, 2, 0], "lfm2moe.shortconv.l_cache": 3, "lfm2moe.rope.freq_base": 1e6,
         "lfm2moe.expert_count": 4, "lfm2moe.expert_used_count": 2, "lfm2moe.expert_feed_forward_length": 40,
         "lfm2moe.leading_dense_block_count": 1},
    ),
    "gpt2": (
        "gpt2",
        "gpt2",
        {"vocab_size": 61, "n_embd": 48, "n_inner": 80, "n_layer": 2, "n_head": 4, "n_positions": 64},
        {},
    ),
}  # fmt: skip


def _model(kind: str, config: dict[str, Any]) -> PreTrainedModel:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **config), dtype=torch.float32)
    for parameter in model.parameters():  # norms and biases are initialised as ones and zeros, which hide mistakes
        torch.nn.init.normal_(parameter, std=0.1)
    for name, buffer in model.named_buffers():
        if name.endswith("bias"):  # of the choice of experts
            torch.nn.init.normal_(buffer, std=0.1)
    return model.eval()


def _export(name: str, folder: Path, **options: Any) -> tuple[PreTrainedModel, Path]:
    arch, kind, config, metadata = MODELS[name]
    model = _model(kind, config)
    tables = {}
    if name == "glm4moe":  # a layer that drafts tokens
        tables = {"blk.3.nextn.enorm.weight": [1.0] * 48, "blk.3.attn_norm.weight": [1.0] * 48}
    if name == "phi3":
        tables = {f"rope_factors_{n}.weight": LONGROPE[f"{n}_factor"] for n in ("long", "short")}
    if arch == "gemma4":  # a quarter of each half of a head is turned
        tables = {"rope_freqs.weight": [1.0] * 4 + [1e30] * 12}
    return model, export(model, arch, folder / "model.gguf", tables=tables, **options, **metadata)


@pytest.mark.parametrize("name", MODELS)
def test_a_model_survives_the_export(tmp_path: Path, name: str):
    model, path = _export(name, tmp_path)
    checkpoint = open_checkpoint(path)
    spec, weight_map = load_spec(checkpoint.config)
    theirs, _ = load_spec(
        json.loads(model.config.to_json_string(use_diff=False)) | {"architectures": [type(model).__name__]}
    )
    assert spec == theirs
    locate_parameters(spec, weight_map, checkpoint)

    folder = tmp_path / "back"
    folder.mkdir()
    tensors = {n: checkpoint.tensor(n, torch.float32) for n in checkpoint.names()}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    no_pad = {"pad_token_id": None}  # some families have a default one, beyond these vocabularies
    (folder / "config.json").write_text(json.dumps(checkpoint.config | no_pad))
    for tensor_name, tensor in tensors.items():
        assert checkpoint.shape(tensor_name) == tuple(tensor.shape)
        for dim, size in enumerate(tensor.shape):
            part = Part(dim, size // 3, size - size // 4)
            for source in (checkpoint, open_checkpoint(folder)):
                found = source.tensor(tensor_name, torch.float32, part=part)
                assert torch.equal(found, tensor.narrow(dim, part.start, part.stop - part.start)), (tensor_name, dim)
    if name == "gemma4moe":  # transformers reads experts of this family as one tensor
        save_file(with_stacked_experts(tensors), folder / "model.safetensors", metadata={"format": "pt"})
    back, report = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, output_loading_info=True)
    assert not report["missing_keys"]
    assert not report["unexpected_keys"]
    assert type(back) is type(model)
    state = back.state_dict()
    for tensor_name, tensor in model.state_dict().items():
        torch.testing.assert_close(state[tensor_name], tensor, rtol=0, atol=2e-7)  # norms: (1 + w) - 1
    for length in (12, 40):  # within and beyond a window and the lengths that RoPE was made for
        ids = torch.arange(length).view(1, -1) * 7 % 61
        with torch.no_grad():
            ours, theirs = back(ids).logits, model(ids).logits
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("arch", "kind"), [("qwen35", "qwen3_5_text"), ("qwen35moe", "qwen3_5_moe_text"), ("qwen3next", "qwen3_next")]
)
def test_layers_with_the_delta_rule_survive_the_export(tmp_path, arch, kind):
    """Its heads stay in the file's order, so the logits are compared."""
    model = _model(kind, DELTA)
    sizes = {"conv_kernel": 4, "state_size": 8, "group_count": 2, "time_step_rank": 6, "inner_size": 96}
    counts = {"expert_count": 4, "expert_used_count": 2, "expert_feed_forward_length": 64}
    values = {f"ssm.{name}": size for name, size in sizes.items()} | (counts if "experts" in repr(model) else {})
    values |= {"rope.dimension_count": 4, "rope.freq_base": 10000.0}
    metadata = {f"{arch}.{name}": value for name, value in values.items()}
    path = export(model, arch, tmp_path / "model.gguf", **metadata)
    checkpoint = open_checkpoint(path)
    ours, _ = load_spec(checkpoint.config)
    theirs, _ = load_spec(
        json.loads(model.config.to_json_string(use_diff=False)) | {"architectures": [type(model).__name__]}
    )
    assert isinstance(ours.mixer, DeltaRuleSpec)
    assert ours.mixer.tiled == arch.startswith("qwen35")
    assert replace(ours, mixer=theirs.mixer) == theirs
    tokens = [i * 7 % 61 for i in range(40)]
    with torch.no_grad():
        want = model(torch.tensor([tokens])).logits[0, -1]
    torch.testing.assert_close(_logits(path, tokens), want, rtol=1e-4, atol=1e-4)
    quantized = export(model, arch, tmp_path / "quantized.gguf", block_type="Q8_0", **metadata)
    want = _logits(quantized, tokens, quantization="none")
    assert (_logits(quantized, tokens) - want).norm() <= 1e-3 * want.norm()


def test_experts_of_granite_survive_the_export(tmp_path):
    """The file's names of experts are not transformers', so the logits are compared."""
    multipliers = {"attention_multiplier": 0.2, "embedding_multiplier": 12.0, "residual_multiplier": 0.22}
    config = SMALL | multipliers | {"logits_scaling": 8.0, "num_local_experts": 4, "num_experts_per_tok": 2}
    model = _model("granitemoe", config)
    values = {"attention.scale": 0.2, "embedding_scale": 12.0, "residual_scale": 0.22, "logit_scale": 8.0}
    values |= {"expert_count": 4, "expert_used_count": 2}
    metadata = {f"granitemoe.{name}": value for name, value in values.items()}
    path = export(model, "granitemoe", tmp_path / "model.gguf", **metadata)
    tokens = [i * 7 % 61 for i in range(40)]
    with torch.no_grad():
        want = model(torch.tensor([tokens])).logits[0, -1]
    torch.testing.assert_close(_logits(path, tokens), want, rtol=1e-4, atol=1e-4)


LATENT = SMALL | {
    "kv_lora_rank": 32, "q_lora_rank": 24, "qk_rope_head_dim": 8, "qk_nope_head_dim": 32, "v_head_dim": 10,
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
        "attention.value_length_mla": 10, "attention.head_count_kv": 1,
    } if split_up else {"attention.key_length": 40, "attention.value_length": 10}) | values  # fmt: skip
    metadata = {f"deepseek2.{name}": value for name, value in values.items() if value is not None}
    path = export(model, "deepseek2", tmp_path / "model.gguf", split_up=split_up, **metadata)
    checkpoint = open_checkpoint(path)
    ours, theirs = load_spec(checkpoint.config)[0], load_spec(
        json.loads(model.config.to_json_string(use_diff=False)) | {"architectures": [type(model).__name__]}
    )[0]  # fmt: skip
    assert replace(ours, latent=replace(ours.latent, split_up=False)) == theirs
    tokens = [i * 7 % 61 for i in range(40)]
    with torch.no_grad():
        want = model(torch.tensor([tokens])).logits[0, -1]
    torch.testing.assert_close(_logits(path, tokens), want, rtol=1e-4, atol=1e-4)
    quantized = export(
        model, "deepseek2", tmp_path / "quantized.gguf", block_type="Q8_0", split_up=split_up, **metadata
    )
    want = _logits(quantized, tokens, quantization="none")
    assert (_logits(quantized, tokens) - want).norm() <= 1e-3 * want.norm()


@pytest.mark.parametrize("block_type", ["Q8_0", "Q4_0", "MXFP4"])
def test_shared_experts_are_parts_of_their_tensor(tmp_path, block_type):
    """One case has parts that are whole blocks, and the other has parts that begin within a block."""
    for size in (32, 48):
        arch, kind, config, metadata = MODELS["qwen2moe"]
        sizes = {"hidden_size": 64, "moe_intermediate_size": size, "shared_expert_intermediate_size": 2 * size}
        metadata = metadata | {"qwen2moe.expert_feed_forward_length": size}
        path = export(_model(kind, config | sizes), arch, tmp_path / "m.gguf", block_type=block_type, **metadata)
        tokens = [i * 7 % 61 for i in range(40)]
        want = _logits(path, tokens, quantization="none", kernel_backend="torch")
        assert (_logits(path, tokens) - want).norm() <= 1e-3 * want.norm()


def _logits(path: Path, tokens: list[int], **settings: Any) -> torch.Tensor:
    config = EngineConfig(device="cpu", num_threads=1, max_model_len=64, kv_cache_memory=0.05, **settings)
    driver = Driver(build_runner(config, CheckpointSource(path)))
    driver.open(0, tokens, room=0)
    return driver.prefill(0, tokens)


class TestSplitFiles:
    @pytest.fixture
    def parts(self, tmp_path: Path) -> list[Path]:
        _export("qwen2", tmp_path, parts=3)
        return [tmp_path / f"model-0000{i}-of-00003.gguf" for i in (1, 2, 3)]

    def test_parts_form_one_model(self, parts, tmp_path):
        whole = open_checkpoint(_export("qwen2", tmp_path)[1])
        split = open_checkpoint(parts[0])
        assert split.config == whole.config
        assert split.names() == whole.names()
        for name in whole.names():
            assert torch.equal(split.tensor(name, torch.float32), whole.tensor(name, torch.float32))

    def test_only_the_name_of_the_first_part_is_accepted(self, parts):
        with pytest.raises(CallboardError, match=r"is part 2 of 3; name the first one, model-00001-of-00003\.gguf"):
            open_checkpoint(parts[1])
        renamed = parts[0].rename(parts[0].with_name("renamed.gguf"))
        with pytest.raises(CallboardError, match=r"is part 1 of 3; it must be called \*-00001-of-00003\.gguf"):
            open_checkpoint(renamed)

    def test_parts_that_do_not_belong_together(self, parts):
        parts[2].write_bytes(parts[1].read_bytes())
        with pytest.raises(CallboardError, match=r"00003-of-00003\.gguf: tensor '.*' occurs twice"):
            open_checkpoint(parts[0])
        parts[2].unlink()
        with pytest.raises(CallboardError, match=r"00003-of-00003\.gguf cannot be read: No such file"):
            open_checkpoint(parts[0])
        parts[1].write_bytes(parts[0].read_bytes())
        with pytest.raises(CallboardError, match=r"'.*' occurs twice"):
            open_checkpoint(parts[0])


@pytest.mark.parametrize("block_type", ["Q8_0", "MXFP4"])
def test_quantized_experts_are_sliced_from_their_tensor(tmp_path, block_type):
    wide = {"hidden_size": 64, "moe_intermediate_size": 96}
    arch, kind, config, metadata = MODELS["qwen3moe"]
    metadata = metadata | {"qwen3moe.expert_feed_forward_length": 96}
    path = export(_model(kind, config | wide), arch, tmp_path / "model.gguf", block_type=block_type, **metadata)
    checkpoint = open_checkpoint(path)
    stored = {t.name: gguf.quants.dequantize(t.data, t.tensor_type) for t in gguf.GGUFReader(path).tensors}
    for part in ("gate", "up", "down"):
        for i, expert in enumerate(stored[f"blk.1.ffn_{part}_exps.weight"]):
            name = f"model.layers.1.mlp.experts.{i}.{part}_proj.weight"
            assert checkpoint.type_name(name) == block_type
            assert checkpoint.shape(name) == expert.shape
            assert torch.equal(checkpoint.tensor(name, torch.float32), torch.from_numpy(expert))


def test_rotation_of_a_part_of_each_head_is_refused(tmp_path):
    arch, kind, config, metadata = MODELS["qwen2"]
    path = export(_model(kind, config), arch, tmp_path / "model.gguf", **metadata | {"qwen2.rope.dimension_count": 6})
    with pytest.raises(CallboardError, match=r"rope\.dimension_count is 6, a part of a head's 12"):
        open_checkpoint(path)
