"""gpt-oss: its files against transformers, tensor by tensor."""

import json
import math
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from runtime.base.config import EngineConfig
from runtime.base.model.decoder_spec import RopeSpec
from runtime.base.model.sharding import Part
from runtime.base.shard import Shard
from runtime.base.types import CallboardError
from runtime.kernels.cpu_support import obstacle
from runtime.loading.checkpoint import open_checkpoint
from runtime.loading.gguf import GgufFile
from runtime.loading.gguf_configs import gguf_eos_token_ids
from runtime.loading.stacked_experts import single_weights
from runtime.models import load_spec
from runtime.models.published import PUBLISHED
from runtime.models.weights import draw, locate_parameters, read_from
from runtime.quant.model_formats import weight_bytes
from runtime.worker.memory import plan_memory
from tests.support.models.family_cases import CONTEXT, save_model, spec_of
from tests.support.models.gguf_export import export
from tests.support.models.quantized_tensors import numerics
from tests.support.models.runner_driver import Driver, open_runner
from tests.support.models.specs import field_of
from tests.support.models.tiny_gguf import TINY_TOKENS, write_tiny_gguf

COMPILED = pytest.mark.skipif(bool(obstacle()), reason=f"needs compiled kernels: {obstacle()}")
TOKENS = list(range(3, 90))
EXPERT = "model.layers.1.mlp.experts.4."


@pytest.mark.parametrize("case", ["gpt-oss", "gpt-oss, mxfp4"])
def test_experts_are_those_of_transformers(case, tmp_path):
    """Rows of gate and up alternate, and dense experts are [in, out]."""
    experts = save_model(tmp_path, case).model.layers[1].mlp.experts
    checkpoint = open_checkpoint(tmp_path)
    spec, weight_map = load_spec(checkpoint.config, checkpoint.names())
    assert bool(spec.quantization) == ("mxfp4" in case)
    assert set(spec.quantization or {}) <= {name for name in spec.shapes() if "experts" in name}
    read = read_from(checkpoint, spec, weight_map, numerics(torch.float32))
    gate_up, bias = experts.gate_up_proj[4].T, experts.gate_up_proj_bias[4]
    for part, weight, own in (
        ("gate", gate_up[::2], bias[::2]),
        ("up", gate_up[1::2], bias[1::2]),
        ("down", experts.down_proj[4].T, experts.down_proj_bias[4]),
    ):
        assert torch.equal(read(f"layers.1.experts.4.{part}.weight").dense, weight)
        assert torch.equal(read(f"layers.1.experts.4.{part}.bias").dense, own)


@COMPILED
def test_a_cpu_multiplies_experts_from_their_four_bits(tmp_path):
    """The error is that of activations in 16 bits."""
    save_model(tmp_path, "gpt-oss, mxfp4")
    logits = []
    for backend in ("torch", "llvm"):
        driver = Driver(open_runner(tmp_path, kernel_backend=backend))
        driver.open(0, TOKENS)
        logits.append(driver.prefill(0, TOKENS))
    weights = driver.runner.decoder.layers[0].feed_forward.gate_up.layers[0].parts
    assert [(part.form.bits, part.form.is_e2m1) for part in weights] == [(4, True)]
    assert 0 < (logits[0] - logits[1]).norm() < 2e-4 * logits[0].norm()


@pytest.mark.parametrize("case", ["gpt-oss", "gpt-oss, mxfp4"])
def test_a_rank_reads_its_rows_and_columns(case, tmp_path):
    save_model(tmp_path, case)
    checkpoint = open_checkpoint(tmp_path)
    spec, weight_map = load_spec(checkpoint.config, checkpoint.names())
    whole = read_from(checkpoint, spec, weight_map, numerics(torch.float32))
    for part in (Part(0, 1, 33), Part(1, 0, 32)):
        for name in ("gate", "up", "down"):
            parameter = f"layers.0.experts.5.{name}.weight"
            got = whole(parameter, part).dense
            assert torch.equal(got, whole(parameter).dense.narrow(part.dim, part.start, part.stop - part.start))
    rank = spec.of_rank(Shard(1, 2))
    read = read_from(checkpoint, rank, weight_map, numerics(torch.float32))
    for name in ("sinks", "router.bias", "experts.1.gate.bias", "experts.1.down.bias", "experts.1.up.weight"):
        parameter = f"layers.2.{name}"
        assert torch.equal(read(parameter).dense, whole(parameter).dense[-rank.shapes()[parameter][0] :])


@pytest.mark.parametrize("case", ["gpt-oss", "gpt-oss, mxfp4"])
def test_a_gpu_gets_the_rows_of_each_expert(case, tmp_path, monkeypatch):
    """A GPU that is the CPU: tensors are uploaded as bytes, whole experts or parts. Gate and up share an upload."""
    sizes: list[int] = []

    class Uploader:
        def upload(self, data: memoryview, out: torch.Tensor) -> None:
            sizes.append(len(data))
            out.copy_(torch.frombuffer(bytearray(data), dtype=torch.uint8))

    save_model(tmp_path, case)
    checkpoint = open_checkpoint(tmp_path)
    wanted = {name: checkpoint.tensor(name, checkpoint.dtype(name)) for name in checkpoint.names()}
    checkpoint.__dict__["_uploader"] = Uploader()
    empty, gpu = torch.empty, SimpleNamespace(type="cuda")
    monkeypatch.setattr(torch, "empty", lambda *sizes, device=None, **more: empty(*sizes, **more))
    monkeypatch.setattr(torch, "device", lambda name: gpu if name == "gpu" else torch.get_default_device())
    for name, want in wanted.items():
        got = checkpoint.tensor(name, want.dtype, "gpu")
        assert torch.equal(got, want)
        assert got.is_contiguous()
        part = Part(0, 1, want.shape[0] - 1)
        assert torch.equal(checkpoint.tensor(name, want.dtype, "gpu", part), want[1:-1])
    sizes.clear()
    with checkpoint.reading_ahead("no name"):
        for name, want in wanted.items():
            assert torch.equal(checkpoint.tensor(name, want.dtype, "gpu"), want)
    assert len(sizes) == len(wanted) - sum(".up_proj" in name for name in wanted)
    assert not checkpoint._experts, "a GPU keeps none of them"


@pytest.mark.parametrize("block_type", ["F32", "MXFP4"])
def test_gpt_oss_survives_the_export(tmp_path, block_type):
    model = save_model(tmp_path, "gpt-oss, mxfp4")
    values = {
        "attention.sliding_window": 100, "expert_count": 6, "expert_used_count": 3, "expert_feed_forward_length": 128,
        "rope.freq_base": 1e3, "rope.scaling.type": "yarn", "rope.scaling.factor": 4.0,
        "rope.scaling.original_context_length": CONTEXT,
    }  # fmt: skip
    metadata = {f"gpt-oss.{name}": value for name, value in values.items()}
    path = export(model, "gpt-oss", tmp_path / "model.gguf", block_type=block_type, **metadata)
    checkpoint = open_checkpoint(path)
    ours, weight_map = load_spec(checkpoint.config)
    assert replace(ours, quantization=None) == replace(spec_of("gpt-oss, mxfp4"), quantization=None)
    locate_parameters(ours, weight_map, checkpoint)
    experts, prefix = model.model.layers[1].mlp.experts, "model.layers.1.mlp.experts.3."
    up_bias = checkpoint.tensor(f"{prefix}up_proj.bias", torch.float32)
    assert torch.equal(up_bias, experts.gate_up_proj_bias[3, 1::2])
    if block_type == "F32":
        with torch.no_grad():
            want = model(torch.tensor([TOKENS])).logits[0, -1]
        torch.testing.assert_close(_logits(path), want, rtol=1e-4, atol=1e-4)
    else:
        assert {scheme.encoding for scheme in (ours.quantization or {}).values()} == {"fp4"}
        want = _logits(path, quantization="none")
        assert (_logits(path) - want).norm() <= 1e-3 * want.norm()


def test_a_message_end_is_no_end_of_a_harmony_text(tmp_path):
    """<|end|> ends a message; a text of several messages goes on."""
    others = ["<|return|>", "<|call|>", "<|endoftext|>"]
    for tokens, ends in ((["<|end|>", *others], (2, 1, 3)), (["<|end|>", "<|endoftext|>"], (0, 1))):
        path = write_tiny_gguf(
            tmp_path / "model.gguf",
            tokenizer__ggml__tokens=[*tokens, *TINY_TOKENS[len(tokens) :]],
            tokenizer__ggml__token_type=[3] * len(tokens) + [1] * (len(TINY_TOKENS) - len(tokens)),
            tokenizer__ggml__eos_token_id=ends[0],
        )
        assert gguf_eos_token_ids(GgufFile(path)) == tuple(sorted(ends, key=lambda i: (i != ends[0], i)))


def _logits(path: Path, **settings: Any) -> torch.Tensor:
    driver = Driver(open_runner(path, **settings))
    driver.open(0, TOKENS)
    return driver.prefill(0, TOKENS)


def test_ranks_that_would_cut_blocks_are_refused(tmp_path):
    save_model(tmp_path, "gpt-oss, mxfp4")
    checkpoint = open_checkpoint(tmp_path)
    spec, weight_map = load_spec(checkpoint.config, checkpoint.names())
    read = read_from(checkpoint, spec, weight_map, numerics(torch.float32))
    with pytest.raises(CallboardError, match="16 to 64 begin or end within 32 that are stored together"):
        read("layers.0.experts.0.down.weight", Part(1, 16, 64))


def test_experts_in_other_shards_are_found(tmp_path):
    """The biases need not be in the file of their weights."""
    save_model(tmp_path, "gpt-oss")
    tensors = load_file(tmp_path / "model.safetensors")
    halves = {n: t for n, t in tensors.items() if "bias" in n}, {n: t for n, t in tensors.items() if "bias" not in n}
    (tmp_path / "model.safetensors").unlink()
    weight_map = {}
    for i, half in enumerate(halves):
        save_file(half, tmp_path / f"{i}.safetensors")
        weight_map |= dict.fromkeys(half, f"{i}.safetensors")
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    checkpoint = open_checkpoint(tmp_path)
    locate_parameters(*load_spec(checkpoint.config), checkpoint)
    want = tensors["model.layers.1.mlp.experts.gate_up_proj"][4].T[1::2]
    assert torch.equal(checkpoint.tensor(f"{EXPERT}up_proj.weight", torch.float32), want)


def test_stacks_of_other_families_stay_halves():
    halves = single_weights("m.experts.gate_up_proj", (2, 8, 5))
    assert halves["m.experts.1.up_proj.weight"].shape((2, 8, 5)) == (4, 5)
    assert not single_weights("m.experts.gate_up_proj_bias", (2, 8))
    columns = single_weights("m.experts.gate_up_proj", (2, 5, 8), hidden=5)
    assert columns["m.experts.1.up_proj.weight"] == (1, 4, 8, 1, True)
    assert not single_weights("m.experts.down_proj", (2, 5, 8), hidden=5)["m.experts.1.down_proj.weight"].transposed
    assert single_weights("m.experts.down_proj", (2, 8, 5), hidden=5)["m.experts.1.down_proj.weight"].transposed
    assert single_weights("m.experts.gate_up_proj_bias", (2, 8), in_turn=True)["m.experts.1.up_proj.bias"].step == 2
    assert not single_weights("m.experts.gate_up_proj_blocks", (2, 8, 3), in_turn=True)


def test_the_published_config_is_read():
    spec, _ = load_spec(PUBLISHED["gpt-oss-120b"])
    assert field_of(spec, "rope") == RopeSpec(
        150_000.0, "yarn", 32.0, original_positions=4096, attention_factor=1.3465735902799727, truncate=False
    )
    assert (field_of(spec, "window")[:3], spec.max_positions) == ((128, 0, 128), 131072)
    assert all(field_of(spec, name) for name in ("sinks", "ffn_bias", "qkv_bias", "out_bias"))
    assert not spec.tied_head
    assert len(spec.quantization or {}) == 36 * 128 * 3
    with pytest.raises(CallboardError, match=r"swiglu_alpha is 1\.5; supported is 1\.702"):
        load_spec(PUBLISHED["gpt-oss-20b"] | {"swiglu_alpha": 1.5})
    with pytest.raises(CallboardError, match=r"clamped to 9\.0; only 7\.0 is supported"):
        load_spec(PUBLISHED["gpt-oss-20b"] | {"swiglu_limit": 9})


def test_a_model_that_does_not_fit_is_refused_with_the_numbers():
    """Before a weight is read: the sizes follow from the config."""
    spec, _ = load_spec(PUBLISHED["gpt-oss-120b"])
    on_gpu = replace(numerics(torch.bfloat16), device=torch.device("cuda"), backend="triton")
    config = EngineConfig(max_model_len=8192).sized_for("cuda")
    with pytest.raises(CallboardError, match=r"weights \d+\.\d\d GiB .* of 48\.00 GiB available.*GiB are missing"):
        plan_memory(config, spec, on_gpu, 48 << 30)
    experts = 36 * 128 * 3 * 2880 * 2880
    dense = 2 * sum(math.prod(shape) for name, shape in spec.shapes().items() if name not in (spec.quantization or {}))
    for form, bits in ((on_gpu, 5.0), (replace(on_gpu, device=torch.device("cpu"), backend="llvm"), 4.5)):
        assert weight_bytes(spec, form) <= experts * bits / 8 + 2 * dense < 90 << 30
    assert plan_memory(config, spec, on_gpu, 130 << 30).weights == weight_bytes(spec, on_gpu)


def test_random_experts_are_the_same_in_every_form():
    """Values and scales are drawn, so a device without their product has the same numbers."""
    spec = spec_of("gpt-oss, mxfp4", num_hidden_layers=1)
    found = []
    for backend in ("torch", "llvm"):
        form = replace(numerics(torch.float32), backend=backend)
        weight = draw(spec, form, 3)("layers.0.experts.2.down.weight")
        found.append(weight.weight_format.dense(weight.operand))
    assert torch.equal(*found)
    assert 0.7 < found[0].std() * 128**0.5 < 1.4
