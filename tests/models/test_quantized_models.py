"""Models in the formats of quantized checkpoints: the logits and the texts of the dense model of the same numbers."""

import pytest
import torch

from runtime.base.config import EngineConfig
from runtime.base.types import SamplingParams
from runtime.inspection import model_report
from runtime.llm import LLM
from runtime.loading.checkpoint import open_checkpoint
from runtime.models import load_spec
from runtime.quant.model_formats import weight_bytes, weight_formats
from runtime.quant.quantized_formats import DequantizedFormat
from runtime.text.tokenizer import Tokenizer
from tests.support.models.plain_format import PlainFormat
from tests.support.models.quantized import FORMATS
from tests.support.models.quantized_models import (
    DEEPSEEK,
    GLM,
    LFM,
    LLAMA,
    MIXTRAL,
    OLMOE,
    PHI,
    QWEN,
    QWEN_MOE,
    QWEN_NEXT,
    logits,
    write,
)
from tests.support.models.runner_driver import open_runner

pytestmark = pytest.mark.usefixtures("cold_runners")


@pytest.mark.parametrize("name", FORMATS)
def test_logits_equal_the_dense_models(tmp_path, name):
    quantized, dense = write(tmp_path, FORMATS[name])
    runner = open_runner(quantized, dtype="bfloat16", quantization="none")
    assert torch.equal(logits(runner), logits(open_runner(dense, dtype="bfloat16")))
    named = weight_formats(runner.decoder.spec, runner.numerics)("layers.0.q.weight").name
    assert named == FORMATS[name].form
    assert weight_formats(runner.decoder.spec, runner.numerics)("head").name == "dense"


@pytest.mark.parametrize("config", [MIXTRAL, PHI], ids=lambda config: config["architectures"][0])
@pytest.mark.parametrize("name", ["ct-fp8-channel", "fp8-block"])
def test_experts_and_fused_maps_are_read(tmp_path, name, config):
    quantized, dense = write(tmp_path, FORMATS[name], config)
    got, want = (logits(open_runner(folder, dtype="bfloat16")) for folder in (quantized, dense))
    assert torch.equal(got, want)


@pytest.mark.parametrize("name", ["ct-fp8-channel", "fp8-block", "gptq"])
@pytest.mark.parametrize("backend", ["llvm", "torch"])
def test_maps_of_latents_are_read(tmp_path, name, backend):
    """kv_b is dequantized. The first maps are one, unless kv_a ends within a block of scales."""
    folders = write(tmp_path, FORMATS[name], DEEPSEEK)
    got, want = (
        logits(open_runner(folder, dtype="bfloat16", quantization="none", kernel_backend=backend)) for folder in folders
    )
    assert torch.equal(got, want)
    runner = open_runner(folders[0], kernel_backend=backend)
    dense = open_runner(folders[0], kernel_backend=backend, quantization="none")
    assert (logits(runner) - logits(dense)).norm() <= 1e-3 * logits(dense).norm()
    assert ("latent_kv" in runner.decoder.spec.linears(0)) == (name == "fp8-block")
    format_of = weight_formats(runner.decoder.spec, runner.numerics)
    assert isinstance(format_of("layers.0.kv_b.weight"), DequantizedFormat)


@pytest.mark.parametrize("config", [GLM, QWEN_MOE, OLMOE], ids=lambda config: config["architectures"][0])
@pytest.mark.parametrize("name", ["ct-w4a16", "ct-fp8-channel", "fp8-block", "awq", "gptq-desc-act", "ct-nvfp4"])
def test_shared_experts_are_read_in_parts(tmp_path, name, config, monkeypatch):
    """A tensor of several shared experts is read by the ranges of each, quantized or dequantized."""
    folders = write(tmp_path, FORMATS[name], config)
    got, want = (logits(open_runner(folder, dtype="bfloat16", quantization="none")) for folder in folders)
    assert torch.equal(got, want)
    got, want = (logits(open_runner(folders[0], quantization=form)) for form in ("auto", "none"))
    assert (got - want).norm() <= 1e-3 * want.norm()
    monkeypatch.setattr("runtime.quant.model_formats.backend_format", lambda numerics: PlainFormat)
    assert (logits(open_runner(folders[0], kernel_backend="torch")) - want).norm() <= 1e-5 * want.norm()


@pytest.mark.parametrize("config", [QWEN, QWEN_NEXT, LFM], ids=lambda config: config["architectures"][0])
@pytest.mark.parametrize("name", ["ct-fp8-channel", "fp8-block", "awq", "gptq"])
@pytest.mark.parametrize("dense", ["", r".*linear_attn\.in_proj_(b|a|ba)"], ids=["all", "without gates"])
def test_layers_with_states_are_read(tmp_path, name, config, dense):
    """Rows that the checkpoint groups by head are in order, as quantized weights and as dequantized ones."""
    folders = write(tmp_path, FORMATS[name], config, dense)
    got, want = (logits(open_runner(folder, dtype="bfloat16", quantization="none")) for folder in folders)
    assert torch.equal(got, want)
    got, want = (logits(open_runner(folders[0], quantization=form)) for form in ("auto", "none"))
    assert (got - want).norm() <= 1e-3 * want.norm()


@pytest.mark.parametrize("config", [QWEN, QWEN_NEXT, PHI], ids=lambda config: config["architectures"][0])
def test_rows_of_blocks_move_with_their_scales(tmp_path, config, monkeypatch):
    quantized, _ = write(tmp_path, FORMATS["fp8-block"], config)
    want = logits(open_runner(quantized, kernel_backend="torch", quantization="none"))
    monkeypatch.setattr("runtime.quant.model_formats.backend_format", lambda numerics: PlainFormat)
    runner = open_runner(quantized, kernel_backend="torch")
    moved = [part for parts, _ in runner.decoder.spec.linears(1).values() for part in parts if "q" in part]
    format_of = weight_formats(runner.decoder.spec, runner.numerics)
    assert {format_of(f"layers.1.{part}.weight").name for part in moved} == {"fp8 g128"}
    assert format_of("layers.1.out.weight").name == "fp8 128x128"
    assert (logits(runner) - want).norm() <= 1e-5 * want.norm()


def test_texts_equal_the_dense_models(tmp_path, write_tiny_gguf):
    folders = write(tmp_path, FORMATS["fp8-block"], LLAMA | {"vocab_size": 1000})
    params = SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True)
    answers = []
    for folder in folders:
        Tokenizer.load(write_tiny_gguf())._backend.save(str(folder / "tokenizer.json"))
        llm = LLM(str(folder), dtype="bfloat16", num_kv_blocks=20)
        answers.append([answer.token_ids for answer in llm.generate([[5, 9, 33], [7, 8]], params)])
    assert answers[0] == answers[1]


def test_inspect_and_the_runner_report_weight_formats(tmp_path, write_tiny_gguf):
    folder, _ = write(tmp_path, FORMATS["gptq"], LLAMA | {"num_hidden_layers": 3, "intermediate_size": 1 << 14})
    Tokenizer.load(write_tiny_gguf())._backend.save(str(folder / "tokenizer.json"))
    report = model_report(EngineConfig(model=str(folder), device="cpu", kernel_backend="torch"))
    spec, _ = load_spec(open_checkpoint(folder).config)
    shapes = {name: shape for name, shape in spec.shapes().items() if name in spec.quantization}
    dense = sum(4 * rows * columns for rows, columns in shapes.values())
    codes = dense / 8 + sum(4 * rows * columns // 32 for rows, columns in shapes.values())
    widened = f"dequantized to {dense / (1 << 30):.2f} GiB of float32 as this device has no products for it"
    assert f"\nweights        21 maps in int4 g32: {codes / (1 << 30):.2f} GiB, {widened}\n" in report
    assert "\n               embed, head, norms and biases are plain numbers in the checkpoint\n" in report
    runner = open_runner(folder, kernel_backend="torch")
    assert runner.info.weight_formats == "int4 g32, dense"
    assert f"weights {weight_bytes(spec, runner.numerics) / (1 << 30):.2f} GiB" in report
    kept = model_report(EngineConfig(model=str(folder), device="cpu"))
    assert f"\nweights        21 maps in int4 g32: {codes / (1 << 30):.2f} GiB\n" in kept
    assert "\ndtype          float32 on cpu, llvm kernels" in kept
