"""GGUF's quantized types as formats: the values equal those from the `gguf` package, and models are made of them."""

import json

import gguf
import numpy as np
import pytest
import torch
from gguf import quants
from safetensors.torch import save_file
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM, MixtralConfig, MixtralForCausalLM

from runtime.base.model.sharding import Part
from runtime.base.types import CallboardError
from runtime.loading.checkpoint import open_checkpoint
from runtime.models import load_spec
from runtime.models.weights import locate_parameters
from runtime.quant.gguf_blocks import TYPES
from runtime.quant.model_formats import LAYOUTS, weight_formats
from runtime.quant.parsers import parse_gguf
from runtime.quant.quantized_formats import DequantizedFormat
from runtime.quant.weight_format import Location
from tests.support.models.gguf_export import export
from tests.support.models.plain_format import PlainFormat
from tests.support.models.quantized_models import logits
from tests.support.models.quantized_tensors import equal, numerics
from tests.support.models.runner_driver import open_runner

FORMS = {
    "Q8_0": "int8 g32", "Q4_0": "int4 g32", "Q4_1": "int4 g32 with zero points", "Q4_K": "int4 g32 with zero points",
    "Q5_0": "int8 g32", "Q5_1": "int8 g32 with zero points", "Q5_K": "int8 g32 with zero points", "Q6_K": "int8 g16",
    "MXFP4": "fp4 g32",
}  # fmt: skip


class Blocks:
    """A checkpoint of one tensor of blocks."""

    def __init__(self, raw: np.ndarray) -> None:
        self.raw = raw

    def blocks(self, name, num_bytes, device, part=None):
        blocks = torch.from_numpy(self.raw.copy()).view(len(self.raw), -1, num_bytes)
        return blocks if part is None else blocks.narrow(part.dim, part.start, part.stop - part.start)


def random_blocks(name: str, rows: int, blocks: int, seed: int) -> np.ndarray:
    """Any bytes, but halves that are finite: [rows, bytes]."""
    _, size = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[name]]
    generator = np.random.default_rng(seed)
    raw = generator.integers(0, 256, (rows, blocks, size), np.uint8)
    halves = {"Q8_0": [0], "Q4_0": [0], "Q5_0": [0], "Q6_K": [208], "MXFP4": []}.get(name, [0, 2])
    if name == "MXFP4":
        raw[..., 0] = generator.integers(0, 250, (rows, blocks))  # 255 is NaN, which the package reads as a number
    for start in halves:
        values = generator.normal(0, 0.1, (rows, blocks)).astype(np.float16)
        values[0, 0] = 0.0  # a block of zeros, or of minimums
        raw[..., start : start + 2] = values[..., None].view(np.uint8)
    return raw.reshape(rows, -1)


@pytest.mark.parametrize("name", FORMS)
def test_values_equal_those_of_the_gguf_package(name):
    kind, block = gguf.GGMLQuantizationType[name], TYPES[name]
    assert (block.columns, block.num_bytes) == gguf.GGML_QUANT_SIZES[kind]
    raw = random_blocks(name, 64, 3, 1)
    want = torch.from_numpy(quants.dequantize(raw, kind))
    layout = LAYOUTS[f"gguf {name}"](parse_gguf({"types": {"a.weight": name}})("", "a"))
    shape = tuple(want.shape)
    form = layout.encoding(shape)
    assert form.name == FORMS[name]

    def read(*parts: Part) -> torch.Tensor:
        location = Location("a.weight", shape, False, parts)
        return DequantizedFormat(layout, form).read(Blocks(raw), location, numerics(torch.float32))[0]

    assert equal(read(), want)
    assert equal(read(Part(0, 16, 64)), want[16:])
    assert equal(read(Part(0, 0, 8), Part(0, 48, 56)), torch.cat((want[:8], want[48:56])))
    assert equal(read(Part(1, block.columns, 3 * block.columns)), want[:, block.columns :])
    with pytest.raises(CallboardError, match=f"begin or end within {block.columns} that are stored together"):
        read(Part(1, 0, 16))
    kept = PlainFormat(layout, form, numerics(torch.float32))
    weight = kept.read(Blocks(raw), Location("a.weight", shape), numerics(torch.float32))
    assert sum(tensor.nbytes for tensor in weight) == kept.device_bytes(shape, numerics(torch.float32))
    assert equal(kept.operand([weight], len(want)), want)


HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 128}
SIZES = HEADS | {"vocab_size": 101, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2}
MODELS = {
    "llama": lambda: LlamaForCausalLM(LlamaConfig(**SIZES)),
    "mixtral": lambda: MixtralForCausalLM(MixtralConfig(**SIZES, num_local_experts=4)),
    "gpt2": lambda: GPT2LMHeadModel(GPT2Config(vocab_size=101, n_embd=64, n_layer=2, n_head=4, n_inner=256)),
}
METADATA = {"mixtral": {"llama.expert_count": 4, "llama.expert_used_count": 2}}


@pytest.mark.parametrize("kind", ["Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1"])
@pytest.mark.parametrize("name", MODELS)
def test_logits_equal_those_of_weights_from_the_gguf_package(tmp_path, name, kind):
    torch.manual_seed(0)
    arch = "gpt2" if name == "gpt2" else "llama"
    path = export(MODELS[name](), arch, tmp_path / "model.gguf", block_type=kind, **METADATA.get(name, {}))
    checkpoint = open_checkpoint(path)
    dense = tmp_path / "dense"
    dense.mkdir()
    save_file({n: checkpoint.tensor(n, torch.float32) for n in checkpoint.names()}, dense / "model.safetensors")
    config = {key: value for key, value in checkpoint.config.items() if key != "quantization_config"}
    (dense / "config.json").write_text(json.dumps(config))
    want = logits(open_runner(dense, kernel_backend="torch"))
    assert torch.equal(logits(open_runner(path, kernel_backend="torch")), want)
    kept = open_runner(path)
    torch.testing.assert_close(logits(kept), want, rtol=1e-3, atol=1e-3)
    assert kept.memory.weights < 0.6 * sum(checkpoint.tensor(n, torch.float32).nbytes for n in checkpoint.names())
    spec, weight_map = load_spec(checkpoint.config)
    names = {
        weight_formats(spec, None)(parameter).name for parameter in locate_parameters(spec, weight_map, checkpoint)
    }
    assert names == {"dense", FORMS[kind]}
