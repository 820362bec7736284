"""Values in a model's files that no model has: one error sentence each, at once, and never a model that gives
garbage."""

import json
import struct

import pytest
import torch

from runtime.base.types import CallboardError, SamplingParams
from runtime.llm import LLM
from runtime.loading.checkpoint import open_checkpoint
from runtime.models import load_spec

LLAMA = {
    "architectures": ["LlamaForCausalLM"], "num_hidden_layers": 2, "hidden_size": 8, "num_attention_heads": 2,
    "intermediate_size": 8, "vocab_size": 9, "max_position_embeddings": 64,
}  # fmt: skip


@pytest.mark.parametrize(
    ("field", "value", "want"),
    [
        ("num_hidden_layers", 0, "a whole number between 1 and 1000"),
        ("num_hidden_layers", 10**9, "a whole number between 1 and 1000"),
        ("num_hidden_layers", "1", "a whole number"),
        ("num_hidden_layers", True, "a whole number"),
        ("hidden_size", 0, "a whole number between 1 and"),
        ("hidden_size", 8.5, "a whole number between 1 and"),
        ("num_attention_heads", 0, "a whole number between 1 and"),
        ("num_attention_heads", 9, "a head needs a dimension at least"),
        ("num_key_value_heads", -1, "a whole number between 1 and"),
        ("vocab_size", [9], "a whole number between 1 and"),
        ("rms_norm_eps", "x", "a number between 0 and 1"),
        ("rms_norm_eps", float("nan"), "a number between 0 and 1"),
        ("rope_theta", 0, "a number above 0"),
        ("rope_theta", -1.0, "a number above 0"),
        ("rope_theta", float("inf"), "a number above 0"),
        ("rope_scaling", 5, "an object"),
        ("tie_word_embeddings", "no", "true or false"),
        ("residual_multiplier", 0.0, "a number above 0"),
        ("no_rope_layers", [1], "a list with one entry for each of 2 layers"),
    ],
)
def test_a_field_that_no_model_can_have_is_named(field, value, want):
    with pytest.raises(CallboardError, match=f"{field} .*{want}") as error:
        load_spec(LLAMA | {field: value})
    assert "\n" not in str(error.value)
    assert len(str(error.value)) < 200


def test_nested_fields_are_checked():
    with pytest.raises(CallboardError, match="has factor 'x'; it must be a number above 0"):
        load_spec(LLAMA | {"rope_scaling": {"rope_type": "linear", "factor": "x"}})
    with pytest.raises(CallboardError, match="num_hidden_layers 0"):
        load_spec(
            {"architectures": ["Gemma3ForConditionalGeneration"], "text_config": LLAMA | {"num_hidden_layers": 0}}
        )


def test_configs_of_real_models_pass():
    load_spec(LLAMA)
    load_spec(LLAMA | {"head_dim": None, "rope_scaling": None, "sliding_window": None, "tie_word_embeddings": None})


def test_impossible_names_are_refused(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": "b\0c"}}))
    with pytest.raises(CallboardError, match="weight_map"):
        open_checkpoint(tmp_path)
    (tmp_path / "model.safetensors.index.json").unlink()
    header = json.dumps({"a": {"dtype": "F32", "shape": [0, 1 << 62], "data_offsets": [0, 0]}}).encode()
    (tmp_path / "model.safetensors").write_bytes(struct.pack("<Q", len(header)) + header)
    checkpoint = open_checkpoint(tmp_path)
    assert checkpoint.shape("a") == (0, 1 << 62)  # no parameter has it
    assert checkpoint.tensor("a", torch.float32).numel() == 0


@pytest.mark.parametrize(
    ("metadata", "message"),
    [
        ({"llama.block_count": 10**9}, r"block_count is 1000000000; it must be at least 1 and at most 1000"),
        ({"split.count": (1 << 32) - 1, "split.no": 0}, r"split\.count is 4294967295; at most 10000 parts"),
    ],
)
def test_counts_in_a_gguf_file_are_bounded(write_tiny_gguf, metadata, message):
    with pytest.raises(CallboardError, match=message):
        open_checkpoint(write_tiny_gguf(**metadata))


@pytest.mark.parametrize("temperature", [1.4e-45, 1e-38, 9e-6])
def test_a_temperature_that_overflows_logits_is_greedy(write_tiny_gguf, temperature):
    """On the host and on a device: both take their parameters from here."""
    assert SamplingParams(temperature=temperature) == SamplingParams(temperature=0.0)
    assert SamplingParams(temperature=1e-5).temperature == 1e-5
    llm = LLM(str(write_tiny_gguf()), num_kv_blocks=20)
    greedy, cold = (SamplingParams(max_tokens=8, temperature=t, seed=1, ignore_eos=True) for t in (0, temperature))
    assert llm.generate([[5, 9, 33]], cold)[0].token_ids == llm.generate([[5, 9, 33]], greedy)[0].token_ids
