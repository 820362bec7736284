"""Loading takes little memory beside the model. A shard and 1 GB are allowed; it takes a tensor and some MB."""

import json
import math
import os
import struct
import subprocess
import sys
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from transformers import LlamaConfig, LlamaForCausalLM

from benchmarks.library.make_random_model import write_folder
from runtime.kernels.cpu_support import obstacle
from runtime.kernels.numerics import Numerics
from runtime.models import load_spec
from runtime.models.published import PUBLISHED
from runtime.models.weights import random_parameter
from runtime.quant.model_formats import weight_bytes

ROWS, COLUMNS, NUM_TENSORS, NUM_SHARDS = 4096, 4096, 8, 4  # 32 MiB a tensor in bfloat16, 256 MiB in all
MIB = 1 << 20
SHARD = 32 * MIB


def _write_safetensors(folder: Path) -> Path:
    """Files with holes: zeros that take no space on the disk."""
    weight_map = {}
    size = ROWS * COLUMNS * 2
    per_shard = NUM_TENSORS // NUM_SHARDS
    for shard in range(NUM_SHARDS):
        names = [f"w{shard * per_shard + i}" for i in range(per_shard)]
        entries = {
            n: {"dtype": "BF16", "shape": [ROWS, COLUMNS], "data_offsets": [i * size, (i + 1) * size]}
            for i, n in enumerate(names)
        }
        header = json.dumps(entries).encode()
        path = folder / f"model-{shard}.safetensors"
        with path.open("wb") as file:
            file.write(struct.pack("<Q", len(header)) + header)
            file.truncate(file.tell() + per_shard * size)
        weight_map |= dict.fromkeys(names, path.name)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    (folder / "config.json").write_text("{}")
    return folder


def _write_gguf(folder: Path) -> Path:
    path = folder / "model.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    for key in ("block_count", "embedding_length", "feed_forward_length", "context_length", "attention.head_count"):
        writer.add_uint32(f"llama.{key}", 16)
    writer.add_float32("llama.attention.layer_norm_rms_epsilon", 1e-5)
    kind = gguf.GGMLQuantizationType.BF16
    names = ["token_embd.weight", *(f"blk.{i}.ffn_up.weight" for i in range(NUM_TENSORS - 1))]
    for name in names:
        writer.add_tensor_info(name, (ROWS, COLUMNS * 2), np.dtype(np.uint8), ROWS * COLUMNS * 2, kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    writer.close()
    with path.open("r+b") as file:
        file.truncate(-(-path.stat().st_size // 32) * 32 + NUM_TENSORS * ROWS * COLUMNS * 2)
    return path


_READ = """
import re, sys, torch
from pathlib import Path
from runtime.loading.checkpoint import open_checkpoint
# Not ru_maxrss, which begins with the peak of the process that started this one.
peak = lambda: int(re.search(r"VmHWM:\\s+(\\d+)", Path("/proc/self/status").read_text())[1]) << 10
torch.ones(8, 8) @ torch.ones(8, 8)
before, size = peak(), 0
checkpoint = open_checkpoint(Path(sys.argv[1]))
for name in checkpoint.names():
    size += checkpoint.tensor(name, torch.bfloat16).nbytes  # as if it were on a device now
print(peak() - before, size)
"""


@pytest.mark.long
@pytest.mark.parametrize("write", [_write_safetensors, _write_gguf])
def test_read_tensors_are_released(tmp_path, write):
    command = [sys.executable, "-c", _READ, str(write(tmp_path))]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    peak, size = map(int, done.stdout.split())
    assert size == 256 * MIB
    # A tensor, its source, and the needs of torch's allocator and of page tables.
    assert peak < 2 * 32 * MIB + 48 * MIB


LOAD = """
import sys
from pathlib import Path
import torch
from runtime.loading.checkpoint import open_checkpoint
from benchmarks.library.make_random_model import write_folder
from runtime.kernels.cpu_support import obstacle
from runtime.kernels.numerics import Numerics
from runtime.models import load_spec
from runtime.models.published import PUBLISHED
from runtime.models.weights import random_parameter
from runtime.quant.model_formats import weight_bytes
from runtime.kernels.numerics import Numerics
from runtime.models.decoder_build import load_decoder
from runtime.base.shard import Shard

def status(key):
    return int(Path("/proc/self/status").read_text().split(key + ":")[1].split()[0]) << 10

torch.set_num_threads(1)
checkpoint = open_checkpoint(Path(sys.argv[1]))
spec, weight_map = load_spec(checkpoint.config)
spec = spec.of_rank(Shard(int(sys.argv[2]) - 1, int(sys.argv[2])))
Path("/proc/self/clear_refs").write_text("5")  # the peak counts from here
before = status("VmRSS")
numerics = Numerics(torch.float32, torch.device("cpu"), sys.argv[3], packed=False, deterministic=False)
decoder = load_decoder(checkpoint, spec, weight_map, numerics, 64)
print(status("VmHWM") - before)
"""


def _peak_of_loading(folder: Path, num_ranks: int = 1, backend: str = "torch") -> int:
    """Bytes that loading a model, or the last rank's part of it, takes at most.

    Freed memory is returned at once. Otherwise holes that glibc keeps count too: up to 90 MiB, and never the same."""
    command = [sys.executable, "-c", LOAD, str(folder), str(num_ranks), backend]
    environment = os.environ | {"MALLOC_MMAP_THRESHOLD_": str(MIB)}
    return int(subprocess.run(command, capture_output=True, text=True, check=True, env=environment).stdout)


@pytest.mark.long
def test_a_load_needs_one_tensor_beside_the_model(tmp_path):
    config = LlamaConfig(
        vocab_size=9000, hidden_size=512, intermediate_size=2048, num_hidden_layers=10, num_attention_heads=8,
        max_position_embeddings=64,
    )  # fmt: skip
    model = LlamaForCausalLM(config)
    model.save_pretrained(tmp_path, max_shard_size=SHARD)
    assert len(list(tmp_path.glob("*.safetensors"))) > 5
    assert _peak_of_loading(tmp_path) < 4 * model.num_parameters() + SHARD + 64 * MIB
    assert _peak_of_loading(tmp_path, num_ranks=8) < 4 * model.num_parameters() // 8 + SHARD + 64 * MIB


@pytest.mark.long
def test_dequantizing_needs_no_more_memory(tmp_path):
    """Quantized and float32 values exist for a piece, not for a tensor: beside the model there is a fused map in two
    parts."""
    hidden, ffn, layers = 512, 8192, 6
    config = {
        "architectures": ["LlamaForCausalLM"], "vocab_size": 1000, "hidden_size": hidden, "intermediate_size": ffn,
        "num_hidden_layers": layers, "num_attention_heads": 8, "max_position_embeddings": 64,
        "quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]},
    }  # fmt: skip
    spec, weight_map = load_spec(config)
    tensors, size = {}, 0
    for parameter, name in weight_map.names_of(spec).items():
        shape = spec.shapes()[parameter]
        size += 4 * math.prod(shape)
        tensors[name] = torch.zeros(shape, dtype=torch.float8_e4m3fn if parameter in spec.quantization else None)
        if parameter in spec.quantization:
            tensors[f"{name}_scale_inv"] = torch.ones([-(-n // 128) for n in shape])
    save_file(tensors, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps(config))
    fused = 4 * 2 * ffn * hidden
    assert _peak_of_loading(tmp_path) < size + fused + 64 * MIB


@pytest.mark.long
@pytest.mark.skipif(bool(obstacle()), reason=f"needs compiled kernels: {obstacle()}")
def test_experts_of_four_bits_have_no_dense_copy(tmp_path):
    """Beside the model there is one expert with a value a byte, and a slab of memory for weights.

    A dense copy of a layer would have 400 MiB. Buffers of reads and holes of small tensors have up to 110."""
    sizes = {"hidden_size": 1024, "intermediate_size": 1024, "num_hidden_layers": 4, "vocab_size": 1000}
    heads = {"num_attention_heads": 8, "num_key_value_heads": 2, "max_position_embeddings": 4096}
    ends = {"bos_token_id": 0, "eos_token_id": 1, "torch_dtype": "bfloat16"}
    config = PUBLISHED["gpt-oss-20b"] | sizes | heads | ends
    spec = load_spec(config)[0]
    shapes, generator = spec.shapes(), torch.Generator().manual_seed(0)
    write_folder(tmp_path, config, lambda name: random_parameter(name, shapes[name], generator), generator)
    numerics = Numerics(torch.float32, torch.device("cpu"), "llvm", packed=False, deterministic=False)
    size = weight_bytes(spec, numerics)
    dense = 4 * sum(math.prod(shape) for shape in shapes.values())
    peak = _peak_of_loading(tmp_path, backend="llvm")
    assert peak < size + 64 * MIB + 160 * MIB < dense / 3
