"""Configs of quantized weights: the scheme of each module, and refusals of one sentence each."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from runtime.base.types import CallboardError
from runtime.loading.folder import model_config
from runtime.models import load_spec
from runtime.quant import METHODS
from runtime.quant.quantized_formats import DequantizedFormat
from runtime.quant.scheme import QuantizationScheme
from runtime.quant.weight_format import Location
from tests.support.models.quantized import FORMATS
from tests.support.models.quantized_models import LLAMA, write
from tests.support.models.quantized_tensors import layout_of, numerics, source_of
from tests.support.models.runner_driver import open_runner

FP8 = {"num_bits": 8, "type": "float", "strategy": "channel"}
INT4 = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 32}


def groups(*weights, **config):
    """compressed-tensors' groups of all linear maps, or of given targets."""
    described = {
        f"group_{i}": {"targets": ["Linear"], "weights": w} if "weights" not in w else w for i, w in enumerate(weights)
    }
    return {"quant_method": "compressed-tensors", "config_groups": described, "format": "float-quantized"} | config


def rule(config):
    return METHODS[config["quant_method"]](config)


def quantized_modules(config, *modules):
    of_module = rule(config)
    return [module for module in modules if of_module("layers.0.q.weight", module)]


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"quant_method": "hqq"}, r"quantized by hqq \(quant_method\); supported are compressed-tensors, fp8, awq"),
        ({"bits": 4}, r"quantized by None \(quant_method\)"),
        (groups(FP8, sparsity_config={"format": "sparse-24-bitmask"}), r"sparsity_config\.format 'sparse-24-bitmask'"),
        (groups(FP8, transform_config={"config_groups": {"R1": {}}}), r"transform_config .*R1"),
        (groups({**FP8, "strategy": "attn_head"}), r"strategy 'attn_head'; tensor, channel"),
        (groups({**INT4, "num_bits": 2}, format="pack-quantized"), r"format 'pack-quantized of int with num_bits 2'"),
        (groups({**INT4, "num_bits": 3}, format="pack-quantized"), "num_bits 3"),
        (groups({**INT4, "group_size": 0}, format="pack-quantized"), r"group_size '0'; it must be a positive"),
        (groups({**FP8, "strategy": "block"}), r"block_structure 'None'; it must be two positive whole numbers"),
        (groups(FP8, ignore=["re:("]), r"the pattern '\('; it is not a regular expression"),
        (groups(FP8, ignore="lm_head"), r"ignore 'lm_head'; it must be a list of names"),
        ({"quant_method": "compressed-tensors", "config_groups": {"W4A16": ["Linear"]}}, r"config_groups\.W4A16"),
        ({"quant_method": "compressed-tensors", "config_groups": 5}, "is not one of compressed-tensors"),
        ({"quant_method": "fp8", "fmt": "e5m2"}, "fmt 'e5m2'; e4m3 is supported"),
        ({"quant_method": "fp8", "weight_block_size": [128]}, "weight_block_size"),
        ({"quant_method": "awq", "bits": 3}, "bits '3'; AWQ weights of 4 bits"),
        ({"quant_method": "awq", "version": "gemv"}, "version 'gemv'; AWQ weights of version gemm"),
        ({"quant_method": "gptq", "bits": 2}, "bits '2'; GPTQ weights of 4 or 8 bits"),
        ({"quant_method": "gptq", "bits": 3}, "bits '3'"),
        ({"quant_method": "gptq", "bits": 4, "checkpoint_format": "marlin"}, "checkpoint_format 'marlin'"),
        ({"quant_method": "bitsandbytes"}, "load_in_4bit 'None'; it or load_in_8bit must be true"),
        ({"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "int4"}, "bnb_4bit_quant_type"),
        ({"quant_method": "modelopt", "quant_algo": "W4A8_AWQ"}, "quant_algo 'W4A8_AWQ'"),
    ],
    ids=str,
)
def test_unsupported_configs_are_refused_by_key(config, message):
    with pytest.raises(CallboardError, match=message) as error:
        load_spec(LLAMA | {"quantization_config": config})
    assert "\n" not in str(error.value)
    assert len(str(error.value)) < 250


def test_modules_are_named_as_their_exporters_name_them():
    names = "model.layers.1.self_attn.q_proj", "model.layers.11.mlp.gate_proj", "model.layers.1.mlp.gate"
    q, gate_proj, gate = names
    ct = groups(FP8, ignore=[q, r"re:.*\.gate$"])
    assert quantized_modules(ct, *names) == [gate_proj]
    only = groups({"targets": [r"re:.*self_attn\.[qkv]_proj"], "weights": FP8})
    assert quantized_modules(only, *names) == [q]
    for method, key in (("fp8", "modules_to_not_convert"), ("bitsandbytes", "llm_int8_skip_modules")):
        config = {"quant_method": method, "load_in_8bit": True}
        assert quantized_modules(config, *names) == list(names)
        assert quantized_modules(config | {key: ["model.layers.1"]}, *names) == [gate_proj]
        assert quantized_modules(config | {key: ["mlp.gate"]}, *names) == [q, gate_proj]
    assert quantized_modules({"quant_method": "awq", "modules_to_not_convert": ["gate"]}, *names) == [q]
    modelopt = {"quant_method": "modelopt", "quant_algo": "FP8", "exclude_modules": ["model.layers.1.*", "lm_head"]}
    assert quantized_modules(modelopt, *names) == [gate_proj]
    dynamic = {"quant_method": "gptq", "bits": 4, "dynamic": {r"-:.*q_proj": {}, r"+:.*gate_proj": {"bits": 8}}}
    assert quantized_modules(dynamic, *names) == [gate_proj, gate]
    assert [rule(dynamic)("", name).encoding for name in (gate_proj, gate)] == ["int8", "int4"]


def test_names_precede_patterns_and_patterns_classes():
    q = "model.layers.0.self_attn.q_proj"
    named = groups(
        FP8,
        {"targets": ["re:.*q_proj"], "weights": INT4, "format": "pack-quantized"},
        {"targets": [q], "weights": {"num_bits": 8, "type": "int", "strategy": "channel"}, "format": "int-quantized"},
        format="mixed-precision",
    )
    assert [rule(named)("", name).encoding for name in (q, "a.q_proj", "a.k_proj")] == ["int8", "int4", "fp8"]


def test_the_head_stays_plain_unless_the_config_names_it():
    spec = {"quant_method": "gptq", "bits": 4, "group_size": 32, "sym": True}
    assert rule(spec)("head", "lm_head") is None
    assert rule(spec | {"lm_head": True})("head", "lm_head") == QuantizationScheme("gptq", "int4", group_size=32)
    assert rule(groups(FP8))("head", "lm_head").encoding == "fp8"
    assert rule({"quant_method": "fp8", "weight_block_size": [128, 128]})("head", "lm_head") is None


def test_a_config_is_found_wherever_its_exporter_put_it(tmp_path):
    gptq = {"bits": 4, "group_size": 32}
    for found in (
        {"quantization_config": gptq | {"quant_method": "gptq"}},
        {"compression_config": gptq | {"quant_method": "gptq"}},
        {"quantization_config": {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}},
    ):
        spec, _ = load_spec(LLAMA | found)
        assert spec.quantization["layers.0.q.weight"].encoding in ("int4", "nf4")
    inner = {name: LLAMA[name] for name in LLAMA if name != "architectures"} | {
        "quantization_config": {"quant_method": "fp8"},
        "layer_types": ["full_attention"] * 2,
        "sliding_window": 16,
    }
    spec, _ = load_spec({"architectures": ["Gemma3ForConditionalGeneration"], "text_config": inner})
    assert spec.quantization["layers.0.q.weight"].encoding == "fp8"
    for name, content, values in (
        ("quantize_config.json", gptq, "int4"),
        ("quant_config.json", {"w_bit": 4, "q_group_size": 32, "zero_point": True, "version": "GEMM"}, "int4"),
        ("hf_quant_config.json", {"quantization": {"quant_algo": "NVFP4", "group_size": 16}}, "fp4"),
    ):
        folder = tmp_path / name
        folder.mkdir()
        (folder / "config.json").write_text(json.dumps(LLAMA))
        (folder / name).write_text(json.dumps(content))
        spec, _ = load_spec(model_config(folder))
        assert spec.quantization["layers.0.q.weight"].encoding == values


@pytest.fixture
def fp8_model(tmp_path) -> Path:
    return write(tmp_path, FORMATS["fp8-block"])[0]


def change(folder: Path, **changed: torch.Tensor | None) -> None:
    path = folder / "model.safetensors"
    tensors = load_file(path) | changed
    save_file({name: tensor for name, tensor in tensors.items() if tensor is not None}, path)


def test_tensors_that_disagree_with_the_config_are_named(fp8_model):
    name = "model.layers.1.self_attn.k_proj.weight"
    scale = load_file(fp8_model / "model.safetensors")[f"{name}_scale_inv"]
    change(fp8_model, **{f"{name}_scale_inv": torch.ones(3, 3)})
    with pytest.raises(CallboardError, match=rf"{name}_scale_inv has shape \[3, 3\].* asks for \[1, 1\]"):
        open_runner(fp8_model)
    change(fp8_model, **{f"{name}_scale_inv": None})
    with pytest.raises(CallboardError, match=rf"{name}: it has no weight_scale_inv or weight_scale beside it"):
        open_runner(fp8_model)
    change(fp8_model, **{f"{name}_scale_inv": scale, name: torch.zeros(32, 64)})
    with pytest.raises(CallboardError, match=rf"{name} is stored as F32, which fp8 128x128 weights are not"):
        open_runner(fp8_model)


def test_scales_of_activations_and_kv_are_ignored(fp8_model, caplog):
    layer = "model.layers.0.self_attn"
    one = torch.tensor(1.0)
    names = "k_proj.input_scale", "k_scale", "v_scale", "q_scale", "attn.k_scale", "k_proj.k_scale", "kv_scale"
    names += "v_proj.output_scale", "k_zero_point", "prob_scale"
    change(fp8_model, **{f"{layer}.{name}": one.clone() for name in names})
    open_runner(fp8_model)
    assert "no place" not in caplog.text
    change(fp8_model, **{f"{layer}.stray_scale": one})
    open_runner(fp8_model)
    assert "no place" in caplog.text
    assert f"{layer}.stray_scale" in caplog.text


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("gptq-asymmetric", {"sym": True}, "its qzeros are not symmetric, although the config sets sym"),
        ("gptq", {"checkpoint_format": "gptq_v2"}, "its qzeros are not symmetric"),
        ("gptq-desc-act", {"desc_act": False}, r"columns are reordered \(g_idx\), which desc_act or actorder"),
        ("gptq-desc-act", {"group_size": 16}, r"has shape \[2, 8\]; the checkpoint's config asks for \[4, 8\]"),
        ("bnb-nf4", {"bnb_4bit_quant_type": "fp4"}, r"lacks tensor .*quant_state\.bitsandbytes__fp4"),
        ("bnb-nf4", {"bnb_4bit_use_double_quant": True}, r"absmax is stored as F32, which nf4 g64 weights are not"),
        ("awq", {"quant_method": "gptq"}, r"qweight has shape \[64, 8\]; the checkpoint's config asks for \[8, 64\]"),
        ("ct-w4a16", {"format": "int-quantized"}, r"as int-quantized of int with num_bits 4|num_bits 4"),
        ("mxfp4", {"quant_method": "fp8"}, r"lacks tensor model\.layers\.0\.self_attn\.q_proj\.weight;"),
    ],
)
def test_a_config_that_disagrees_with_the_tensors_is_refused(tmp_path, name, change, message):
    folder, _ = write(tmp_path, FORMATS[name])
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] |= change
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(CallboardError, match=message) as error:
        open_runner(folder)
    assert "\n" not in str(error.value)


def test_an_unused_bias_of_zeros_is_ignored(tmp_path, caplog):
    folder, _ = write(tmp_path, FORMATS["gptq"])
    name = "model.layers.0.self_attn.q_proj.bias"
    change(folder, **{name: torch.zeros(64)})
    open_runner(folder)
    assert not caplog.text
    change(folder, **{name: torch.ones(64)})
    open_runner(folder)
    assert f"are not used: {name}" in caplog.text


def test_zero_points_of_the_first_gptq_format_wrap(tmp_path):
    """A stored 15 is 0 minus one."""
    form = FORMATS["gptq-asymmetric"]
    tensors = form.pack(torch.randn(8, 32), torch.Generator().manual_seed(1))
    tensors["qzeros"] = torch.full_like(tensors["qzeros"], -1)
    layout = layout_of(form)
    (got,) = DequantizedFormat(layout, layout.encoding((8, 32))).read(
        source_of(tensors), Location("q_proj.weight", (8, 32)), numerics(torch.float32)
    )
    assert torch.equal(got, form.dequantize(tensors, (8, 32)))
    assert (got >= 0).all()


def test_int8_of_bitsandbytes_differs_in_the_last_bit_only():
    import bitsandbytes.functional

    form = FORMATS["bnb-int8"]
    tensors = form.pack(torch.randn(64, 96), torch.Generator())
    got = form.dequantize(tensors, (64, 96))
    want = bitsandbytes.functional.int8_vectorwise_dequant(tensors["weight"], tensors["SCB"])
    torch.testing.assert_close(got, want, atol=0, rtol=2**-22)
