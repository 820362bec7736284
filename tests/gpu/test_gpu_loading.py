"""Checkpoints read straight to a GPU."""

import pytest
import torch
from safetensors.torch import save_file

from runtime.loading.checkpoint import open_checkpoint

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no CUDA device")


def test_tensors_reach_a_gpu_whole(tmp_path):
    """Small tensors, and some that fill the upload's two buffers several times."""
    shapes = {"a": (3, 5), "b": (1,), "c": (64 << 20,), "d": (200_000_001,)}
    tensors = {name: torch.randint(-128, 128, shape, dtype=torch.int8) for name, shape in shapes.items()}
    (tmp_path / "config.json").write_text("{}")
    save_file(tensors, tmp_path / "model.safetensors")
    checkpoint = open_checkpoint(tmp_path)
    for name, expected in tensors.items():
        actual = checkpoint.tensor(name, torch.float32, "cuda")
        assert actual.is_cuda
        assert torch.equal(actual.cpu(), expected.float()), name
