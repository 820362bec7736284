"""`callboard inspect`: its output, and that it reads no weight."""

import json
from pathlib import Path

import numpy as np
import pytest

from runtime.base.config import EngineConfig
from runtime.inspection import model_report
from runtime.loading import checkpoint
from runtime.text.tokenizer import Tokenizer
from serve_app import cli
from tests.models.test_gguf_architectures import MODELS
from tests.support.models.tiny_hybrid import write_tiny_hybrid


@pytest.fixture(autouse=True)
def no_reading(monkeypatch):
    def refuse(*args):
        raise AssertionError("a weight was read")

    for kind in (checkpoint.GgufCheckpoint, checkpoint.SafetensorsCheckpoint):
        monkeypatch.setattr(kind, "tensor", refuse)


def lines(report: str) -> dict[str, str]:
    """Label -> text."""
    labelled = (line.partition("  ") for line in report.splitlines())
    return {label.strip(): text.strip() for label, _, text in labelled}


def test_inspect_describes_a_gguf_file(write_tiny_gguf, capsys):
    path = write_tiny_gguf()
    assert cli.main(["inspect", str(path), "--device", "cpu", "--num-kv-blocks", "99"]) == 0
    report = capsys.readouterr().out
    told = lines(report)
    assert told["files"] == str(path)
    assert told["architecture"].startswith("LlamaForCausalLM: 1 layers; width 32; 2 heads of 16, 1 of keys and values;")
    assert told["parameters"] == f"{262 * 32 + 32 * (32 + 16 + 16 + 32) + 3 * 32 * 64 + 3 * 32:,}"
    assert told["stored as"] == "4 F32, 1 Q8_0, 1 BF16, 1 Q5_1, 1 Q5_0, 1 Q4_0, 1 Q4_1, 1 F16 tensors"
    assert told["context"] == "128 tokens; RoPE default, base 10000"
    assert told["dtype"] == "float32 on cpu, llvm kernels"
    assert told["weights"] == "1 maps in int8 g32: 0.00 GiB"  # the embedding
    widened = "of float32 as this device has no products for it"  # k beside a plain v
    assert f"1 maps in int4 g32 with zero points: 0.00 GiB, dequantized to 0.00 GiB {widened}" in report
    assert "(99 blocks of 16 tokens" in told["memory plan"]
    assert told["KV cache"] == "float32, 128 bytes a token"
    assert told["tokenizer"] == "262 tokens; begin of text 1; ends 0 <|end|>"
    assert told["chat template"] == (
        "with tool calls (generic); it describes none in a known format, so the system message does:"
    )
    assert report.endswith("{% for m in messages %}<|start|>{{ m.content }}<|end|>{% endfor %}\n")


def test_unused_tensors_are_named(write_tiny_gguf, capsys):
    path = write_tiny_gguf({f"blk.{i}.odd.weight": np.ones(32, np.float32) for i in range(6)})
    assert cli.main(["inspect", str(path), "--device", "cpu", "--num-kv-blocks", "99"]) == 0
    told = lines(capsys.readouterr().out)["not used"]
    assert told == "6 tensors: " + ", ".join(f"blk.{i}.odd.weight" for i in range(4)) + " and 2 more"


def test_a_folder_needs_no_weights(tmp_path: Path, write_tiny_gguf):
    from runtime.text.tokenizer import Tokenizer

    folder = tmp_path / "folder"  # the GGUF file is beside it
    folder.mkdir()
    Tokenizer.load(write_tiny_gguf())._backend.save(str(folder / "tokenizer.json"))
    _, _, config, _ = MODELS["mixtral"]
    config = config | {"architectures": ["MixtralForCausalLM"], "sliding_window": 7, "torch_dtype": "bfloat16"}
    (folder / "config.json").write_text(json.dumps(config))
    told = lines(model_report(EngineConfig(model=str(folder), device="cpu")))
    for kind, text in (("fp8", "fp8 with scale 1, 144"), ("int8", "int8 with a scale a token and head, 168")):
        report = model_report(EngineConfig(model=str(folder), device="cpu", kv_cache_dtype=kind))
        assert lines(report)["KV cache"] == f"{text} bytes a token; beyond the last 7 tokens 0 bytes"
    asks = {"quant_method": "compressed-tensors", "kv_cache_scheme": {"type": "float", "num_bits": 8}}
    (folder / "config.json").write_text(json.dumps(config | {"quantization_config": asks}))
    report = model_report(EngineConfig(model=str(folder), device="cpu"))
    assert lines(report)["KV cache"] == "fp8 with scale 1, 144 bytes a token; beyond the last 7 tokens 0 bytes"
    expert, other = 3 * 48 * 80, 2 * 61 * 48 + 48 + 3 * (2 * 48 * 48 + 2 * 24 * 48 + 2 * 48 + 4 * 48)
    assert told["parameters"] == f"{other + 12 * expert:,}, of which a token meets {other + 6 * expert:,}"
    assert "4 experts, 2 a token" in told["architecture"]
    assert told["stored as"] == "bfloat16 by its config.json"
    assert "3 of 3 layers see 7 tokens" in told["context"]
    assert told["chat template"] == "none: this model completes texts"


def test_inspect_reports_errors(write_tiny_gguf, capsys):
    assert cli.main(["inspect", str(write_tiny_gguf()), "--max-model-len", "4000"]) == 0
    assert "it does not fit. max_model_len is 4000; the model's context is 128" in capsys.readouterr().out
    assert cli.main(["inspect", str(write_tiny_gguf(general__architecture="mamba"))]) == 1
    assert "is a 'mamba' model; of GGUF files these architectures are supported: llama" in capsys.readouterr().err


def test_transformers_reads_the_saved_tokenizer(write_tiny_gguf, tmp_path: Path):
    path, folder = write_tiny_gguf(), tmp_path / "new" / "tokenizer"
    assert cli.main(["inspect", str(path), "--device", "cpu", "--save-tokenizer", str(folder)]) == 0
    from transformers import AutoTokenizer

    saved, own = AutoTokenizer.from_pretrained(str(folder)), Tokenizer.load(path)
    text = "Ärger, 日本\n of the day"
    assert saved.encode(text, add_special_tokens=False) == own.encode(text, add_special_tokens=False)
    assert (saved.chat_template, saved.model_max_length) == (own.chat_template, 128)
    assert saved.eos_token == own.special_tokens["eos_token"]


def test_states_have_a_size(tmp_path: Path, capsys):
    path = write_tiny_hybrid(tmp_path / "hybrid.gguf")
    assert (
        cli.main(["inspect", str(path), "--device", "cpu", "--num-kv-blocks", "99", "--snapshot-memory", "0.0001"]) == 0
    )
    told = lines(capsys.readouterr().out)
    size = 16 * 128 * 4 + 4 * (16 * 16 + 1) * 4  # inputs of the convolution, and heads with their positions
    assert told["KV cache"].endswith(f"; states of 1 layers, {size:,} bytes a request or snapshot")
    assert "(max_num_seqs; 8 snapshots, snapshot_memory)" in told["memory plan"]


def test_inspect_describes_an_image_encoder(tmp_path: Path, write_tiny_gguf):
    folder = tmp_path / "folder"
    folder.mkdir()
    Tokenizer.load(write_tiny_gguf())._backend.save(str(folder / "tokenizer.json"))
    _, _, text, _ = MODELS["llama"]
    config = {
        "architectures": ["Idefics3ForConditionalGeneration"], "model_type": "idefics3", "image_token_id": 60,
        "scale_factor": 4, "text_config": text, "vision_config": {"hidden_size": 48, "intermediate_size": 68,
        "num_hidden_layers": 3, "num_attention_heads": 2, "image_size": 512, "patch_size": 16},
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config))
    report = lines(model_report(EngineConfig(model=str(folder), device="cpu")))
    assert report["images"].startswith("3 layers; width 48; 2 heads of 24; feed-forward 68; patches of 16 pixels; ")
    assert "image encoder" in report["memory plan"]
    report = lines(model_report(EngineConfig(model=str(folder), device="cpu", images="off")))
    assert report["images"] == "off (images)"
    assert "image encoder" not in report["memory plan"]
