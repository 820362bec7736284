"""Every family against transformers, in fp32 on the CPU: names, logits, greedy tokens."""

import json
import math
import re
from dataclasses import replace
from functools import lru_cache
from typing import Any
from unittest import mock

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import DynamicCache, PreTrainedModel

from runtime.assembly.runner import build_runner
from runtime.base.config import EngineConfig
from runtime.base.kv_cache_spec import CHUNK
from runtime.base.model.decoder_spec import DecoderSpec, ExpertsSpec, RopeSpec
from runtime.base.model.layer_spec import POST_NORMS, PRE_NORMS
from runtime.base.model.mixer_spec import DeltaRuleSpec, ShortConvSpec
from runtime.base.types import CallboardError
from runtime.loading.checkpoint import Checkpoint, open_checkpoint
from runtime.models import load_spec
from runtime.models.families.llama import WEIGHT_MAP as LLAMA
from runtime.models.weight_map import WeightMap
from runtime.text.tokenizer import Tokenizer
from runtime.worker.runner import ModelRunner
from runtime.worker.sources import CheckpointSource
from tests.support.models.family_cases import CASES, CONTEXT, LIKE_OTHERS, save_model, spec_of
from tests.support.models.runner_driver import Driver, open_runner
from tests.support.models.specs import changed, field_of

NEW = 64  # tokens


def generate(
    driver: Driver, prompts: list[list[int]], cuts: tuple[int, ...], new: int = NEW
) -> tuple[list[list[int]], torch.Tensor]:
    """Greedy generation in one batch: the sequences, and the logits of each new token. The last prompt is computed in
    chunks that end at `cuts`, beside the others' first tokens."""
    sequences, logits = [list(p) for p in prompts], []
    for slot, prompt in enumerate(prompts):
        driver.open(slot, prompt, room=new)
    last, start = len(prompts) - 1, 0
    for cut in cuts:
        driver.step((last, start, cut - start, 0))
        start = cut
    starts = [0] * last + [start]
    for _ in range(new):
        rows = [(i, a, len(s) - a, 1) for i, (a, s) in enumerate(zip(starts, sequences, strict=True))]
        starts = [len(s) for s in sequences]
        for sequence, token in zip(sequences, driver.step(*rows).token_ids.tolist(), strict=True):
            sequence.append(token)
        logits.append(driver.logits)
    return sequences, torch.stack(logits, 1)


@torch.no_grad()
def expected(model: PreTrainedModel, sequence: list[int], prompt_len: int, step_by_step: bool) -> torch.Tensor:
    """[NEW, vocab]: the logits of transformers for each new token."""
    if not step_by_step:
        return model(torch.tensor([sequence])).logits[0, prompt_len - 1 : -1]
    cache, logits, at = DynamicCache(config=model.config), [], 0
    for end in range(prompt_len, len(sequence)):
        logits.append(model(torch.tensor([sequence[at:end]]), past_key_values=cache).logits[0, -1])
        at = end
    return torch.stack(logits)


@pytest.mark.parametrize("case", CASES)
def test_logits_and_greedy_tokens_equal_transformers(case, tmp_path, record_property):
    theirs = save_model(tmp_path, case)
    limits = {"max_model_len": 180} if case == "phi3, short context" else {}
    generator = torch.Generator().manual_seed(3)
    # transformers forgets the earlier sequence's stretch only at the first step of one shorter than the context.
    lengths = (3, 21, CONTEXT - 1) if case == "dynamic" else (3, 21, 110)
    prompts = [torch.randint(3, 101, (n,), generator=generator).tolist() for n in lengths]
    wanted: dict[tuple[int, ...], torch.Tensor] = {}  # by sequence: both modes find the same tokens
    worst = 0.0
    modes: list[dict[str, Any]] = [{}] if case in LIKE_OTHERS else [{}, {"deterministic": True}]
    if spec_of(case).states is not None:  # most of its operations are compiled
        modes.append({"kernel_backend": "torch", "deterministic": True})
    if spec_of(case).quantization:  # compiled products quantize activations (test_gpt_oss.py)
        modes = [mode | {"kernel_backend": "torch"} for mode in modes]
    for mode in modes:
        driver = Driver(open_runner(tmp_path, **mode, **limits))
        cuts = (CHUNK,) if driver.runner.info.num_states else (17, 29)
        sequences, got = generate(driver, prompts, cuts)
        for prompt, sequence, logits in zip(prompts, sequences, got, strict=True):
            if (want := wanted.get(tuple(sequence))) is None:
                want = expected(theirs, sequence, len(prompt), step_by_step=case == "dynamic")
                wanted[tuple(sequence)] = want
            worst = max(worst, float((logits - want).abs().max() / want.abs().max()))
            assert want.argmax(-1).tolist() == sequence[len(prompt) :]
    record_property("error", worst)
    spec = spec_of(case)
    # States add rounding errors of all tokens. One prompt of "gemma4" is sensitive: of float64, 5.4e-5 here with AVX2.
    assert worst <= (1e-4 if "gemma4" in case else 5e-5 if spec.states is not None else 2e-5)
    if mode:
        again = Driver(driver.runner, seed=1)
        again.open(0, sequences[1][:-1], prompt_len=len(prompts[1]))
        assert torch.equal(again.prefill(0, sequences[1][:-1], cuts=(40,)), got[1, -1])


@torch.no_grad()
@pytest.mark.parametrize(
    "case",
    [
        "mistral, window", "mixtral", "gemma2", "gemma3",
        "gemma4",
        "gemma4 moe", "phi4-mini", "granite", "olmo3", "gpt2", "qwen3.5",
        "qwen3-next", "lfm2", "granite moe", "gpt-oss", "deepseek v3",
    ],
)  # fmt: skip
def test_bfloat16_is_as_close_to_fp32_as_transformers_is(case, tmp_path):
    theirs, tokens = (
        save_model(tmp_path, case),
        torch.randint(3, 101, (60,), generator=torch.Generator().manual_seed(1)),
    )
    want = theirs(tokens[None]).logits[0, -1]
    their_error = (theirs.bfloat16()(tokens[None]).logits[0, -1].float() - want).norm()
    driver = Driver(open_runner(tmp_path, dtype="bfloat16"))
    driver.open(0, tokens.tolist())
    assert (driver.prefill(0, tokens.tolist()).float() - want).norm() < 1.5 * their_error
    # Values that are rounded to bf16 before a multiplication: the scale of Gemma's embeddings, sqrt(60) = 7.7460, and
    # of Granite's, 12 / 0.22 = 54.545.
    scale = 7.75 if "gemma" in case else 54.5 if "granite" in case else 1.0
    assert driver.runner.decoder.embed_scale == scale


def test_gpt2_without_a_prefix_and_with_masks_is_the_same_model(tmp_path):
    """As the checkpoints of openai-community have it."""
    save_model(tmp_path, "gpt2")
    tokens, logits = list(range(3, 50)), []
    for _ in range(2):
        driver = Driver(open_runner(tmp_path))
        driver.open(0, tokens)
        logits.append(driver.prefill(0, tokens))
        tensors = load_file(tmp_path / "model.safetensors")
        renamed = {name.removeprefix("transformer."): tensor for name, tensor in tensors.items()}
        save_file(renamed | {"h.1.attn.bias": torch.ones(1, 1, 192, 192)}, tmp_path / "model.safetensors")
    assert "wte.weight" in open_checkpoint(tmp_path).names()
    assert torch.equal(*logits)


def test_text_parts_are_read_from_any_checkpoint(tmp_path):
    """With layers that draft tokens, or with the names of a model without images."""
    save_model(tmp_path, "qwen3.5")
    tokens, logits = list(range(3, 50)), []
    for rename in (lambda name: name, lambda name: name.replace("language_model.", "")):
        tensors = {rename(name): tensor for name, tensor in load_file(tmp_path / "model.safetensors").items()}
        save_file(tensors | {"mtp.fc.weight": torch.ones(60, 120)}, tmp_path / "model.safetensors")
        driver = Driver(open_runner(tmp_path))
        driver.open(0, tokens)
        logits.append(driver.prefill(0, tokens))
    assert "model.layers.0.linear_attn.A_log" in open_checkpoint(tmp_path).names()
    assert torch.equal(*logits)


def test_tensors_of_other_shapes_are_named(tmp_path):
    save_model(tmp_path, "mixtral")
    path, expert = tmp_path / "model.safetensors", "model.layers.1.block_sparse_moe.experts.{}.w2.weight"
    tensors = load_file(path)
    save_file({n: t for n, t in tensors.items() if n != expert.format(4)}, path)
    with pytest.raises(CallboardError, match=rf"lacks tensor {re.escape(expert.format(4))}; .* \[60, 76\]"):
        open_runner(tmp_path)
    save_model(tmp_path, "gpt2")
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"n_inner": 99}))
    with pytest.raises(CallboardError, match=r"transformer.h.0.mlp.c_fc.weight has shape \[60, 240\].*\[60, 99\]"):
        open_runner(tmp_path)


def test_variants_that_are_not_supported_are_refused():
    base = {"num_hidden_layers": 2, "hidden_size": 8, "num_attention_heads": 2, "intermediate_size": 8, "vocab_size": 9}
    gpt2 = {"n_embd": 8, "n_head": 2, "n_layer": 1, "n_positions": 9, "vocab_size": 9}
    for architecture, config, message in (
        ("GPT2LMHeadModel", gpt2 | {"activation_function": "relu"}, "activation_function is 'relu'; supported is gelu"),
        ("GPT2LMHeadModel", gpt2 | {"scale_attn_by_inverse_layer_idx": True}, "scales attention scores by layer"),
        ("Gemma2ForCausalLM", base | {"hidden_activation": "gelu"}, "hidden_activation is 'gelu'"),
        ("Gemma3ForCausalLM", base | {"use_bidirectional_attention": True}, "only causal attention"),
        ("Qwen3MoeForCausalLM", base | {"decoder_sparse_step": 2}, "dense layers between those of experts"),
        (
            "GraniteMoeHybridForCausalLM",
            base | {"layer_types": ["attention", "mamba"], "num_local_experts": 0},
            r"0 experts and layers of kind \['mamba'\]",
        ),
        (
            "Mistral3ForConditionalGeneration",
            base | {"model_type": "mistral4"},
            "text_config is of type 'mistral4'; supported are mistral and ministral3",
        ),
        ("MixtralForCausalLM", base | {"num_local_experts": 0, "num_experts_per_tok": 2}, "0 experts, of which a tok"),
        ("Qwen3NextForCausalLM", base | {"mlp_only_layers": [1]}, "dense layers between those of experts"),
        (
            "Qwen3_5MoeForCausalLM",
            base | {"moe_intermediate_size": 8, "shared_expert_intermediate_size": 12},
            "shared_expert_intermediate_size is 12 and its moe_intermediate_size 8",
        ),
        (
            "Qwen2MoeForCausalLM",
            base | {"moe_intermediate_size": 8, "shared_expert_intermediate_size": 12},
            "shared_expert_intermediate_size is 12, which must be a multiple of its moe_intermediate_size, 8",
        ),
        ("Qwen2MoeForCausalLM", base | {"use_sliding_window": True}, "only full attention"),
        ("OlmoeForCausalLM", base | {"clip_qkv": 8.0}, "clip_qkv is 8.0; only models without it"),
        (
            "Glm4MoeForCausalLM",
            base | {"n_routed_experts": 9, "num_experts_per_tok": 2, "n_group": 2, "moe_intermediate_size": 8},
            "2 groups of its 9 experts",
        ),
        ("Qwen3_5ForCausalLM", base | {"attn_output_gate": False}, "only attention with a gate is supported"),
        ("Qwen3_5ForCausalLM", base | {"linear_num_value_heads": 20}, "20, which is not a multiple of .* 16"),
        ("MistralForCausalLM", base | {"hidden_act": "relu"}, "hidden_act is 'relu'; supported is silu"),
    ):
        with pytest.raises(CallboardError, match=message):
            load_spec(config | {"architectures": [architecture]})


@pytest.mark.parametrize(
    ("config", "billions", "expected"),
    [
        (
            {"architectures": ["MistralForCausalLM"], "hidden_size": 4096, "intermediate_size": 14336,
             "max_position_embeddings": 32768, "num_attention_heads": 32, "num_hidden_layers": 32,
             "num_key_value_heads": 8, "rms_norm_eps": 1e-05, "rope_theta": 10000.0, "sliding_window": 4096,
             "tie_word_embeddings": False, "vocab_size": 32000},
            7.2417, {"window": 4096, "max_positions": 32768},
        ),
        (
            {"architectures": ["Phi3ForCausalLM"], "hidden_size": 3072, "intermediate_size": 8192,
             "max_position_embeddings": 131072, "num_attention_heads": 24, "num_hidden_layers": 32,
             "num_key_value_heads": 8, "original_max_position_embeddings": 4096, "partial_rotary_factor": 0.75,
             "rms_norm_eps": 1e-05, "rope_scaling": {"long_factor": [2.0] * 48, "short_factor": [1.0] * 48,
                                                     "type": "longrope"},
             "rope_theta": 10000.0, "sliding_window": 262144, "tie_word_embeddings": True, "vocab_size": 200064},
            3.836,
            {"rope": RopeSpec(1e4, "longrope", original_positions=4096, partial=0.75, short_factor=(1.0,) * 48,
                              long_factor=(2.0,) * 48, attention_factor=1.1902380714238083)},
        ),
        (
            {"architectures": ["Gemma3ForConditionalGeneration"], "model_type": "gemma3", "text_config": {
                "hidden_size": 2560, "intermediate_size": 10240, "model_type": "gemma3_text", "num_hidden_layers": 34,
                "rope_scaling": {"factor": 8.0, "rope_type": "linear"}, "sliding_window": 1024}},
            3.880,
            {"rope": tuple(RopeSpec(1e4) if (i + 1) % 6 else RopeSpec(1e6, "linear", 8.0) for i in range(34)),
             "window": tuple(1024 if (i + 1) % 6 else 0 for i in range(34)), "head_dim": 256,
             "max_positions": 131072},
        ),
        (
            {"architectures": ["Qwen2ForCausalLM"], "hidden_size": 3584, "intermediate_size": 18944,
             "max_position_embeddings": 32768, "max_window_layers": 28, "num_attention_heads": 28,
             "num_hidden_layers": 28, "num_key_value_heads": 4, "rms_norm_eps": 1e-06, "rope_theta": 1000000.0,
             "rope_scaling": {"factor": 4.0, "original_max_position_embeddings": 32768, "type": "yarn"},
             "sliding_window": 131072, "tie_word_embeddings": False, "use_sliding_window": False, "vocab_size": 152064},
            7.616,
            {"rope": RopeSpec(1e6, "yarn", 4.0, original_positions=32768, attention_factor=1.138629436111989),
             "max_positions": 131072, "window": 0},
        ),
        (
            {"architectures": ["SmolLM3ForCausalLM"], "hidden_size": 2048, "intermediate_size": 11008,
             "max_position_embeddings": 65536, "num_attention_heads": 16, "num_hidden_layers": 36,
             "num_key_value_heads": 4, "no_rope_layers": [1, 1, 1, 0] * 9, "no_rope_layer_interval": 4,
             "rms_norm_eps": 1e-06, "rope_scaling": None, "rope_theta": 5000000.0, "sliding_window": None,
             "use_sliding_window": False, "vocab_size": 128256},
            3.075,
            {"rope": (*[RopeSpec(5e6)] * 3, RopeSpec(partial=0.0)) * 9, "window": 0, "tied_head": True,
             "max_positions": 65536},
        ),
        (
            {"architectures": ["Glm4ForCausalLM"], "attention_bias": False, "head_dim": 128, "hidden_size": 4096,
             "intermediate_size": 13696, "max_position_embeddings": 32768, "num_attention_heads": 32,
             "num_hidden_layers": 40, "num_key_value_heads": 2, "partial_rotary_factor": 0.5, "rms_norm_eps": 1e-05,
             "rope_theta": 10000.0, "tie_word_embeddings": False, "vocab_size": 151552},
            9.400,
            {"rope": RopeSpec(1e4, partial=0.5, interleaved=True), "qkv_bias": False, "norms": PRE_NORMS + POST_NORMS},
        ),
        (
            {"architectures": ["Mistral3ForConditionalGeneration"], "model_type": "mistral3", "text_config": {
                "head_dim": 128, "hidden_act": "silu", "hidden_size": 4096, "intermediate_size": 14336,
                "max_position_embeddings": 262144, "model_type": "ministral3", "num_attention_heads": 32,
                "num_hidden_layers": 34, "num_key_value_heads": 8, "rms_norm_eps": 1e-05, "rope_parameters": {
                    "beta_fast": 32.0, "beta_slow": 1.0, "factor": 16.0, "llama_4_scaling_beta": 0.1, "mscale": 1.0,
                    "mscale_all_dim": 1.0, "original_max_position_embeddings": 16384, "rope_theta": 1000000.0,
                    "rope_type": "yarn", "type": "yarn"},
                "sliding_window": None, "vocab_size": 131072}},
            7.953,  # without a head: the file has one, which is then used
            {"rope": RopeSpec(1e6, "yarn", 16.0, original_positions=16384, query_beta=0.1), "tied_head": True,
             "max_positions": 262144, "window": 0},
        ),
        (
            {"architectures": ["Mistral3ForConditionalGeneration"], "model_type": "mistral3", "text_config": {
                "head_dim": 128, "hidden_size": 5120, "intermediate_size": 32768, "model_type": "mistral",
                "num_hidden_layers": 40, "rope_theta": 1000000000.0, "vocab_size": 131072}},
            22.90,
            {"rope": RopeSpec(1e9), "num_heads": 32, "num_kv_heads": 8, "tied_head": True, "max_positions": 131072},
        ),
        (
            {"architectures": ["Olmo3ForCausalLM"], "hidden_size": 4096, "intermediate_size": 11008,
             "max_position_embeddings": 65536, "num_attention_heads": 32, "num_hidden_layers": 32,
             "num_key_value_heads": 32, "rms_norm_eps": 1e-06, "rope_theta": 500000, "sliding_window": 4096,
             "rope_scaling": {"attention_factor": 1.2079441541679836, "beta_fast": 32.0, "beta_slow": 1.0,
                              "factor": 8.0, "original_max_position_embeddings": 8192, "rope_type": "yarn"},
             "tie_word_embeddings": False, "vocab_size": 100278},
            7.298,
            {"rope": (*[RopeSpec(5e5)] * 3, RopeSpec(
                5e5, "yarn", 8.0, original_positions=8192, attention_factor=1.2079441541679836,
             )) * 8, "window": (4096, 4096, 4096, 0) * 8, "max_positions": 65536},
        ),
        (
            {"architectures": ["Qwen3NextForCausalLM"], "attention_bias": False, "decoder_sparse_step": 1,
             "full_attention_interval": 4, "head_dim": 256, "hidden_act": "silu", "hidden_size": 2048,
             "intermediate_size": 5120, "linear_conv_kernel_dim": 4, "linear_key_head_dim": 128,
             "linear_num_key_heads": 16, "linear_num_value_heads": 32, "linear_value_head_dim": 128,
             "max_position_embeddings": 262144, "mlp_only_layers": [], "moe_intermediate_size": 512,
             "norm_topk_prob": True, "num_attention_heads": 16, "num_experts": 512, "num_experts_per_tok": 10,
             "num_hidden_layers": 48, "num_key_value_heads": 2, "partial_rotary_factor": 0.25, "rms_norm_eps": 1e-06,
             "rope_scaling": None, "rope_theta": 10000000, "shared_expert_intermediate_size": 512,
             "tie_word_embeddings": False, "vocab_size": 151936},
            79.67,
            {"rope": RopeSpec(1e7, partial=0.25), "num_kv_heads": (0, 0, 0, 2) * 12, "output_gate": True,
             "states": DeltaRuleSpec(16, 32, 128, 128, 4, by_key_head=True), "ffn_size": 512,
             "experts": ExpertsSpec(512, 10, True, shared=1, shared_gate=True), "max_positions": 262144},
        ),
        (
            {"architectures": ["Qwen3_5MoeForConditionalGeneration"], "model_type": "qwen3_5_moe",
             "tie_word_embeddings": False, "text_config": {
                "attn_output_gate": True, "full_attention_interval": 4, "head_dim": 256, "hidden_size": 2048,
                "linear_num_key_heads": 16, "linear_num_value_heads": 32, "max_position_embeddings": 262144,
                "model_type": "qwen3_5_moe_text", "moe_intermediate_size": 512, "mtp_num_hidden_layers": 1,
                "num_attention_heads": 16, "num_experts": 256, "num_experts_per_tok": 8, "num_hidden_layers": 40,
                "num_key_value_heads": 2, "shared_expert_intermediate_size": 512, "vocab_size": 248320,
                "rope_parameters": {"mrope_interleaved": True, "mrope_section": [11, 11, 10],
                                    "partial_rotary_factor": 0.25, "rope_theta": 10000000, "rope_type": "default"}}},
            34.66,
            {"rope": RopeSpec(1e7, partial=0.25, sections=(11, 11, 10), mixed_sections=True),
             "num_kv_heads": (0, 0, 0, 2) * 10, "qk_norm": "head",
             "states": DeltaRuleSpec(16, 32, 128, 128, 4), "tied_head": False,
             "experts": ExpertsSpec(256, 8, True, shared=1, shared_gate=True)},
        ),
        (
            {"architectures": ["Glm4MoeForCausalLM"], "attention_bias": True, "first_k_dense_replace": 3,
             "head_dim": 128, "hidden_act": "silu", "hidden_size": 5120, "intermediate_size": 12288,
             "max_position_embeddings": 202752, "moe_intermediate_size": 1536, "n_group": 1, "n_routed_experts": 160,
             "n_shared_experts": 1, "norm_topk_prob": True, "num_attention_heads": 96, "num_experts_per_tok": 8,
             "num_hidden_layers": 92, "num_key_value_heads": 8, "num_nextn_predict_layers": 1,
             "partial_rotary_factor": 0.5, "rms_norm_eps": 1e-05, "rope_scaling": None, "rope_theta": 1000000,
             "routed_scaling_factor": 2.5, "tie_word_embeddings": False, "topk_group": 1, "use_qk_norm": True,
             "vocab_size": 151552},
            352.8,
            {"ffn_size": (*[12288] * 3, *[1536] * 89), "qk_norm": "head", "qkv_bias": True,
             "out_bias": False, "rope": RopeSpec(1e6, partial=0.5),
             "experts": ExpertsSpec(160, 8, True, shared=1, scores="sigmoid", choice_bias=True, sum_eps=1e-20,
                                    scale=2.5, group_score="top2", float32_logits=True)},
        ),
        (
            {"architectures": ["Qwen2MoeForCausalLM"], "decoder_sparse_step": 1, "hidden_act": "silu",
             "hidden_size": 2048, "intermediate_size": 5632, "max_position_embeddings": 8192,
             "max_window_layers": 21, "moe_intermediate_size": 1408, "norm_topk_prob": False,
             "num_attention_heads": 16, "num_experts": 60, "num_experts_per_tok": 4, "num_hidden_layers": 24,
             "num_key_value_heads": 16, "rms_norm_eps": 1e-06, "rope_theta": 1000000.0,
             "shared_expert_intermediate_size": 5632, "sliding_window": 32768, "tie_word_embeddings": False,
             "use_sliding_window": False, "vocab_size": 151936},
            14.316,
            {"experts": ExpertsSpec(60, 4, False, shared=4, shared_gate=True), "ffn_size": 1408, "window": 0},
        ),
        (
            {"architectures": ["GraniteMoeForCausalLM"], "attention_bias": False, "attention_multiplier": 0.015625,
             "embedding_multiplier": 12.0, "hidden_act": "silu", "hidden_size": 1024, "intermediate_size": 512,
             "logits_scaling": 6.0, "max_position_embeddings": 131072, "num_attention_heads": 16,
             "num_experts_per_tok": 8, "num_hidden_layers": 24, "num_key_value_heads": 8, "num_local_experts": 32,
             "residual_multiplier": 0.22, "rms_norm_eps": 1e-06, "rope_scaling": None, "rope_theta": 1500000,
             "tie_word_embeddings": True, "vocab_size": 49155},
            1.3349,
            {"experts": ExpertsSpec(32, 8, False, scores="softmax_of_chosen"), "tied_head": True},
        ),
        (
            {"architectures": ["Lfm2ForCausalLM"], "block_auto_adjust_ff_dim": True, "block_dim": 2048,
             "block_ff_dim": 12288, "block_ffn_dim_multiplier": 1.0, "block_multiple_of": 256, "conv_L_cache": 3,
             "conv_bias": False, "full_attn_idxs": [2, 5, 8, 10, 12, 14], "hidden_size": 2048,
             "max_position_embeddings": 128000, "norm_eps": 1e-05, "num_attention_heads": 32,
             "num_hidden_layers": 16, "num_key_value_heads": 8, "rope_theta": 1000000.0, "tie_embedding": True,
             "vocab_size": 65536},
            1.1703,
            {"states": ShortConvSpec(2048, 3), "ffn_size": 8192, "tied_head": True, "norm_eps": 1e-5,
             "num_kv_heads": tuple(8 * (i in (2, 5, 8, 10, 12, 14)) for i in range(16)), "rope": RopeSpec(1e6)},
        ),
    ],
)  # fmt: skip
def test_published_configs_are_read(config, billions, expected):
    """Written by transformers 4, with fewer fields and other names."""
    spec, _ = load_spec(config)
    assert sum(math.prod(shape) for shape in spec.shapes().values()) / 1e9 == pytest.approx(billions, rel=1e-3)
    assert {name: field_of(spec, name) for name in expected} == expected


class Copies:
    """A checkpoint with Mixtral's names, in which all experts equal the feed-forward layer of a dense one."""

    def __init__(self, dense: Checkpoint, spec: DecoderSpec, weight_map: WeightMap) -> None:
        parameters = {name: parameter for parameter, name in weight_map.names_of(spec).items()}
        sources = LLAMA.names_of(changed(spec, experts=None))
        self.router = {name for name, p in parameters.items() if "router" in p}
        self.sources = {n: sources.get(re.sub(r"experts\.\d+\.", "", p)) for n, p in parameters.items()}
        self.shapes = {name: spec.shapes()[parameter] for name, parameter in parameters.items()}
        self.read = lru_cache(3)(dense.tensor)  # one expert's, for the next
        self.fingerprint, self.config = "copies", dense.config

    def __contains__(self, name: str) -> bool:
        return name in self.shapes

    def names(self) -> list[str]:
        return list(self.shapes)

    def shape(self, name: str) -> tuple[int, ...]:
        return self.shapes[name]

    def dtype(self, name: str) -> torch.dtype:
        return torch.float32

    def type_name(self, name: str) -> str:
        return "F32"

    def is_dense(self, name: str) -> bool:
        return True

    def tensor(self, name: str, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        if name in self.router:
            return torch.randn(self.shapes[name], generator=torch.Generator().manual_seed(len(name)))
        return self.read(self.sources[name], dtype, device)


def test_a_mixture_of_copies_answers_like_the_dense_model(smollm2_path):
    tokenizer, source = Tokenizer.load(smollm2_path), CheckpointSource(smollm2_path)
    mixtral = {"architectures": ["MixtralForCausalLM"], "num_local_experts": 3, "num_experts_per_tok": 2}
    spec, source.weight_map = load_spec(source.checkpoint.config | mixtral)
    source.spec = replace(spec, quantization=None)  # the copies are of plain numbers
    config = EngineConfig(device="cpu", num_threads=2, max_model_len=128, max_num_seqs=2, dtype="float32")
    copies = Copies(source.checkpoint, source.spec, source.weight_map)
    with mock.patch.object(ModelRunner, "_warm_up"):
        runner = build_runner(config, source.with_tensors(copies))
    tokens = tokenizer.encode("Once upon a time, in a small village by the sea,")
    (answer,), _ = generate(Driver(runner), [tokens], cuts=(5,), new=14)
    # The dense model's text in fp32. In bf16 it already meets a wise old woman.
    assert tokenizer.decode(answer[len(tokens) :]).startswith(" there was a wise old wizard named Thorold. He lived")
