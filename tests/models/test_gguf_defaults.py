"""A GGUF file without an optional key is the same model as one that states the key's default, in every architecture."""

from typing import Any

import pytest

from runtime.base.model.decoder_spec import DecoderSpec, RopeSpec
from runtime.base.types import CallboardError
from runtime.loading.gguf import GgufFile
from runtime.loading.gguf_architectures import read_gguf_model
from runtime.models import load_spec
from tests.models.test_gguf_architectures import export_model
from tests.support.models.gguf_models import MODELS
from tests.support.models.specs import field_of


def _spec(file: GgufFile, **changes: Any) -> DecoderSpec:
    stated = file.metadata
    file.metadata = {key: value for key, value in (stated | changes).items() if value is not None}
    try:
        return load_spec(read_gguf_model(file).config)[0]
    finally:
        file.metadata = stated


def _spec_or_refusal(file: GgufFile, **changes: Any) -> DecoderSpec | str:
    """The spec, or the refusal of sizes that no model has."""
    try:
        return _spec(file, **changes)
    except CallboardError as e:
        return str(e)


def _defaults(arch: str, metadata: dict[str, Any]) -> dict[str, Any]:
    """llama.cpp's value of each optional key that this architecture has."""
    heads, width = metadata[f"{arch}.attention.head_count"], metadata[f"{arch}.embedding_length"]
    head_dim = metadata.get(f"{arch}.attention.key_length", width // heads)
    optional = {
        "attention.head_count_kv": heads,
        "attention.key_length": width // heads,
        "rope.dimension_count": head_dim,
        "rope.freq_base": 1e6 if arch in ("gemma3", "gemma4") else 10000.0,
        "rope.scaling.factor": 1.0,
        "rope.scaling.type": "linear",
        "rope.scaling.original_context_length": metadata[f"{arch}.context_length"],
        "nextn_predict_layers": 0,
    }
    if arch in ("llama", "gemma4", "deepseek2"):
        optional |= {"expert_count": 0}
    if arch == "gemma2":
        optional |= {"attention.sliding_window": 4096, "attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0}
    if arch == "gemma3":
        optional |= {"attention.sliding_window_pattern": 6, "rope.freq_base_swa": 10000.0}
    if arch == "phi3":
        optional |= {"attention.sliding_window": 0}
    if arch in ("granite", "granitemoe"):
        optional |= {"attention.scale": head_dim**-0.5, "embedding_scale": 1.0, "residual_scale": 1.0}
        optional |= {"logit_scale": 1.0}
    if arch in ("qwen2moe", "qwen3moe"):
        feed_forward, used = (metadata[f"{arch}.{key}"] for key in ("feed_forward_length", "expert_used_count"))
        optional |= {"expert_feed_forward_length": feed_forward // used}
    if arch in ("glm4moe", "deepseek2"):
        optional |= {
            "expert_shared_count": 0, "expert_weights_norm": False, "expert_weights_scale": 1.0,
            "expert_group_count": 1, "expert_group_used_count": 1, "leading_dense_block_count": 0,
        }  # fmt: skip
    return {f"{arch}.{key}": value for key, value in optional.items()}


@pytest.mark.parametrize("name", MODELS)
def test_an_absent_optional_key_is_its_default(name, tmp_path):
    arch = MODELS[name][0]
    file = GgufFile(export_model(name, tmp_path)[1])
    without = {"deepseek2": ("attention.head_count_kv",), "gemma4": ("attention.key_length", "attention.head_count_kv")}
    for key, value in _defaults(arch, file.metadata).items():
        if arch == "gpt2" or key.removeprefix(f"{arch}.") in without.get(arch, ()):
            continue
        assert _spec_or_refusal(file, **{key: None}) == _spec_or_refusal(file, **{key: value}), key


def _rope(file: GgufFile, key: str) -> RopeSpec:
    return field_of(_spec(file, **{key: 4.0}), "rope")


def test_a_factor_without_a_type_is_linear(tmp_path):
    file = GgufFile(export_model("llama", tmp_path)[1])
    for key in ("llama.rope.scaling.factor", "llama.rope.scale_linear"):  # the name now, and at first
        assert (_rope(file, key).type, _rope(file, key).factor) == ("linear", 4.0)


def test_biases_of_q_k_and_v_need_none_of_the_output(tmp_path):
    file = GgufFile(export_model("llama", tmp_path)[1])
    for i in range(3):
        del file.tensors[f"blk.{i}.attn_output.bias"]
    spec = _spec(file)
    assert (field_of(spec, "qkv_bias"), field_of(spec, "out_bias")) == (True, False)


def test_rows_of_keys_need_no_head_count_kv(tmp_path):
    """The order of rows in a file follows from the same number as the config."""
    _, path = export_model("llama", tmp_path)
    file = GgufFile(path)
    file.metadata = {k: v for k, v in file.metadata.items() if k != "llama.attention.head_count_kv"}
    source = read_gguf_model(file).sources["model.layers.0.self_attn.k_proj.weight"]
    assert source.interleaved_heads == 4
