"""How much memory of the host a load takes at its peak."""

import subprocess
import sys
from pathlib import Path

import pytest
from transformers import LlamaConfig, LlamaForCausalLM

ROOT = Path(__file__).parent.parent
SHARD = 32 << 20

LOAD = """
import gc, resource, sys
from pathlib import Path
import torch
from runtime.loading.checkpoint import open_checkpoint
from runtime.models import describe
from runtime.models.decoder import Decoder, Numerics

def status(key):
    return int(Path("/proc/self/status").read_text().split(key + ":")[1].split()[0]) << 10

torch.set_num_threads(1)
checkpoint = open_checkpoint(Path(sys.argv[1]))
spec, layout = describe(checkpoint.config)
Path("/proc/self/clear_refs").write_text("5")  # the peak counts from here
before = status("VmRSS")
for name in checkpoint.names():  # as a GPU's load: what was read is dropped
    checkpoint.tensor(name, torch.bfloat16)
dropped = status("VmHWM") - before
numerics = Numerics(torch.float32, torch.device("cpu"), "torch", packed=False, deterministic=False)
decoder = Decoder.load(checkpoint, spec, layout, numerics, 64)
print(dropped, status("VmHWM") - before)
"""


@pytest.mark.slow
def test_a_load_needs_one_tensor_beside_the_model(tmp_path):
    config = LlamaConfig(
        vocab_size=9000, hidden_size=512, intermediate_size=2048, num_hidden_layers=10, num_attention_heads=8,
        max_position_embeddings=64,
    )  # fmt: skip
    model = LlamaForCausalLM(config)
    model.save_pretrained(tmp_path, max_shard_size=SHARD)
    assert len(list(tmp_path.glob("*.safetensors"))) > 5
    command = [sys.executable, "-c", LOAD, str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    dropped, loaded = map(int, done.stdout.split())
    assert dropped < SHARD + (16 << 20)
    # The heap, and pages of libraries that load first now; files that stayed mapped would be another 195 MiB.
    assert loaded < 4 * model.num_parameters() + SHARD + (64 << 20)
