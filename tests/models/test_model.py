"""Our decoder against transformers, on tiny random checkpoints; and the errors of bad checkpoints."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from runtime.base.model.decoder_spec import RopeSpec
from runtime.base.types import CallboardError
from runtime.models import load_spec
from tests.support.models.runner_driver import Driver, open_runner
from tests.support.models.specs import field_of

BASE = {
    "vocab_size": 101,
    "hidden_size": 48,
    "intermediate_size": 72,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "eos_token_id": 2,
}
VARIANTS = {
    "grouped": {},
    "tied, multi-query": {"tie_word_embeddings": True, "num_key_value_heads": 1},
    "biases, all heads": {"attention_bias": True, "mlp_bias": True, "num_key_value_heads": 6},
    "wide heads": {"head_dim": 32, "rms_norm_eps": 1e-3},
    "linear rope": {"rope_parameters": {"rope_type": "linear", "rope_theta": 100.0, "factor": 2.0}},
    "llama3 rope": {
        "rope_parameters": {
            "rope_type": "llama3",
            "rope_theta": 1000.0,
            "factor": 4.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 32,
        }
    },
    "qwen2": {"family": "qwen2"},
    "qwen3": {"family": "qwen3", "head_dim": 16, "tie_word_embeddings": True},
}


FAMILIES = {
    "llama": (LlamaForCausalLM, LlamaConfig),
    "qwen2": (Qwen2ForCausalLM, Qwen2Config),
    "qwen3": (Qwen3ForCausalLM, Qwen3Config),
}


def save_model(folder: Path, family: str = "llama", **overrides) -> PreTrainedModel:
    torch.manual_seed(0)
    model_class, config_class = FAMILIES[family]
    model = model_class(config_class(**BASE | overrides, initializer_range=0.1)).eval()
    for name, parameter in model.named_parameters():
        if "bias" in name or "norm" in name:
            parameter.data.normal_(1.0 * ("norm" in name), 0.3)
    model.save_pretrained(folder)
    return model


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("deterministic", [False, True])
def test_logits_equal_transformers(variant, deterministic, tmp_path):
    theirs = save_model(tmp_path, **VARIANTS[variant])
    runner = open_runner(tmp_path, deterministic=deterministic)
    driver = Driver(runner)
    tokens = torch.randint(0, BASE["vocab_size"], (90,)).tolist()
    driver.open(0, tokens)
    with torch.no_grad():
        want = theirs(torch.tensor([tokens])).logits[0]
    torch.testing.assert_close(driver.prefill(0, tokens, cuts=(50,)), want[-1], atol=1e-4, rtol=1e-4)
    driver.open(1, tokens[:3])
    for end in range(3, 12):  # decode, beside another row
        driver.step((0, 80, 1, 1), (1, 0, 3, 1)) if end == 3 else driver.step((0, 80, 1, 1), (1, end - 1, 1, 1))
        torch.testing.assert_close(driver.logits[0], want[80], atol=1e-4, rtol=1e-4)
        driver.runner.steps.slots.tokens[1, end] = tokens[end]  # teacher-forced
        torch.testing.assert_close(driver.logits[1], want[end - 1], atol=1e-4, rtol=1e-4)
    assert runner.info.eos_token_ids == (2,)


def test_bfloat16_is_as_close_to_fp32_as_transformers_is(tmp_path):
    theirs = save_model(tmp_path)
    tokens = torch.randint(0, BASE["vocab_size"], (60,)).tolist()
    with torch.no_grad():
        want = theirs(torch.tensor([tokens])).logits[0, -1]
        their_error = (theirs.bfloat16()(torch.tensor([tokens])).logits[0, -1].float() - want).abs().max()
    for deterministic in (False, True):
        driver = Driver(open_runner(tmp_path, dtype="bfloat16", deterministic=deterministic))
        driver.open(0, tokens)
        assert (driver.prefill(0, tokens).float() - want).abs().max() < 2 * their_error


def decoder_spec(config):
    return load_spec(config | {"architectures": ["LlamaForCausalLM"]})[0]


def rope_of(spec):
    return field_of(spec, "rope")


def test_rope_is_read_from_both_forms_of_config():
    scaling = {"type": "linear", "factor": 2.0}
    old = decoder_spec(BASE | {"rope_theta": 5e5, "rope_scaling": scaling})
    new = decoder_spec(BASE | {"rope_parameters": {"rope_type": "linear", "rope_theta": 5e5, "factor": 2.0}})
    assert rope_of(old) == rope_of(new) == RopeSpec(5e5, "linear", 2.0)
    assert rope_of(decoder_spec(BASE | {"rope_theta": 7.0, "rope_scaling": None})) == RopeSpec(7.0)


def test_unsupported_models_are_named_with_what_is_supported():
    with pytest.raises(CallboardError, match=r"MambaForCausalLM; supported are .*LlamaForCausalLM, .*Qwen"):
        load_spec({"architectures": ["MambaForCausalLM"]})
    with pytest.raises(CallboardError, match="lacks num_experts_per_tok, which DeepseekV2ForCausalLM needs"):
        load_spec({"architectures": ["DeepseekV2ForCausalLM"]})
    with pytest.raises(CallboardError, match="'mrope'; supported are default, linear, dynamic, llama3, yarn, longrope"):
        decoder_spec(BASE | {"rope_scaling": {"rope_type": "mrope", "factor": 2.0}})
    with pytest.raises(CallboardError, match="hidden_act is 'gelu'; supported is silu"):
        decoder_spec(BASE | {"hidden_act": "gelu"})
    with pytest.raises(CallboardError, match="dense layers between those of experts"):
        load_spec(BASE | {"architectures": ["Qwen3MoeForCausalLM"], "mlp_only_layers": [0]})


def damaged(source: Path, target: Path, change) -> Path:
    shutil.copytree(source, target)
    tensors = load_file(target / "model.safetensors")
    change(tensors)
    save_file(tensors, target / "model.safetensors", metadata={"format": "pt"})
    return target


def test_missing_and_misshapen_tensors_are_named(tmp_path):
    save_model(tmp_path / "good")
    norm, up = "model.layers.1.input_layernorm.weight", "model.layers.2.mlp.up_proj.weight"

    def narrow(tensors):
        tensors[up] = tensors[up][:, :40].contiguous()

    for name, change, message in (
        ("missing", lambda t: t.pop(norm), f"lacks tensor {norm}"),
        ("misshapen", narrow, rf"{up} has shape \[72, 40\]; the checkpoint's config asks for \[72, 48\]"),
    ):
        with pytest.raises(CallboardError, match=message):
            open_runner(damaged(tmp_path / "good", tmp_path / name, change))


def test_a_tied_head_may_be_stored_twice(tmp_path):
    save_model(tmp_path / "good", tie_word_embeddings=True)
    copy = lambda t: t.update({"lm_head.weight": t["model.embed_tokens.weight"].clone()})  # noqa: E731
    open_runner(damaged(tmp_path / "good", tmp_path / "copy", copy))


def test_fingerprints_differ_by_weights_and_numerics(tmp_path):
    save_model(tmp_path / "a")
    save_model(tmp_path / "b", rms_norm_eps=1e-4)
    settings = [("a", {}), ("b", {}), ("a", {"dtype": "bfloat16"}), ("a", {"deterministic": True})]
    prints = [open_runner(tmp_path / name, **config).info.fingerprint for name, config in settings]
    assert len(set(prints)) == len(prints)
    assert open_runner(tmp_path / "a").info.fingerprint == prints[0]
    assert json.loads((tmp_path / "a" / "config.json").read_text())["architectures"] == ["LlamaForCausalLM"]
