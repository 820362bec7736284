"""Updates of models with quantized weights: quantized as they are read, or in their files."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig, LlamaForCausalLM

from runtime.base.types import CallboardError
from runtime.base.weight_parts import ArraysPart
from runtime.quant.model_formats import encodings_on_device
from tests.support.models import quantized_models
from tests.support.models.gguf_export import export
from tests.support.models.quantized import FORMATS
from tests.support.models.runner_driver import open_runner
from tests.support.models.weight_updates import changed, logits, random_parts, tensors_in, update, write_changed

SIZES = {
    "vocab_size": 101, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 128,
}  # fmt: skip
LIMITS = {"deterministic": True, "max_model_len": 64}


@pytest.mark.parametrize("quantization", ["int8", "int4"])
@pytest.mark.parametrize("config", [quantized_models.LLAMA, quantized_models.MIXTRAL, quantized_models.QWEN_NEXT])
def test_quantization_at_load_follows_an_update(quantization, config, tmp_path):
    _, first = quantized_models.write(tmp_path, FORMATS["awq"], config | {"tie_word_embeddings": True})
    second = changed(tensors_in(first))
    folder = write_changed(first, second, tmp_path / "second")
    settings = LIMITS | {"quantization": quantization}
    runner, want = open_runner(first, weight_updates=True, **settings), logits(open_runner(folder, **settings))
    assert not torch.equal(logits(runner), want)
    update(runner, random_parts(second, tmp_path / "parts"))
    assert torch.equal(logits(runner), want)


@pytest.mark.parametrize("form", FORMATS)
def test_an_update_brings_quantized_weights_as_stored(form, tmp_path):
    for seed in ("first", "second"):
        (tmp_path / seed).mkdir()
    first, _ = quantized_models.write(tmp_path / "first", FORMATS[form])
    second = rewritten(form, tmp_path / "second")
    stored = tensors_in(second)
    runner, want = open_runner(first, weight_updates=True, **LIMITS), logits(open_runner(second, **LIMITS))
    update(runner, random_parts(stored, tmp_path / "parts"))
    assert torch.equal(logits(runner), want)


@pytest.mark.parametrize("form", FORMATS)
def test_floats_replace_weights_that_are_dequantized(form, tmp_path):
    first, dense = quantized_models.write(tmp_path, FORMATS[form])
    second = changed(tensors_in(dense))
    folder = write_changed(dense, second, tmp_path / "second")
    with_floats = open_runner(first, weight_updates=True, quantization="none", **LIMITS)
    update(with_floats, random_parts(second, tmp_path / "parts"))
    assert torch.equal(logits(with_floats), logits(open_runner(folder, **LIMITS)))
    runner = open_runner(first, weight_updates=True, **LIMITS)
    if not encodings_on_device(runner.spec, runner.numerics):
        return
    before = logits(runner)
    name = "model.layers.0.self_attn.q_proj.weight"
    with pytest.raises(CallboardError, match="quantization=none"):
        runner.updates.receive(ArraysPart({name: second[name]}))
    assert torch.equal(logits(runner), before)


def test_a_quantized_gguf_file_takes_floats_if_it_is_dequantized(tmp_path):
    torch.manual_seed(4)
    model = LlamaForCausalLM(LlamaConfig(**SIZES, tie_word_embeddings=True))
    model.save_pretrained(tmp_path / "dense")
    path = export(model, "llama", tmp_path / "model.gguf", block_type="Q8_0")
    second = changed(tensors_in(tmp_path / "dense"))
    folder = write_changed(tmp_path / "dense", second, tmp_path / "second")
    runner = open_runner(path, weight_updates=True, quantization="none", **LIMITS)
    update(runner, random_parts(second, tmp_path / "parts"))
    assert torch.equal(logits(runner), logits(open_runner(folder, **LIMITS)))
    quantized = open_runner(path, weight_updates=True, **LIMITS)
    with pytest.raises(CallboardError, match="quantization=none"):
        quantized.updates.receive(ArraysPart(second))


def rewritten(form: str, folder):
    """The model in this format with other numbers."""
    path, _ = quantized_models.write(folder, FORMATS[form])
    tensors = load_file(path / "model.safetensors")
    generator = torch.Generator().manual_seed(9)
    for name, tensor in tensors.items():
        if name.endswith(("weight", "weight_packed", "qweight", "weight_scale", "scales")) and tensor.ndim > 1:
            rows = torch.randperm(len(tensor), generator=generator)
            tensors[name] = tensor[rows] if tensor.dtype.is_floating_point or tensor.dtype == torch.int32 else tensor
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, path / "model.safetensors")
    assert json.loads((path / "config.json").read_text())
    return path
