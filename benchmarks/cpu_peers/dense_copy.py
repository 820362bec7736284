"""A folder with a model's weights in bfloat16, for a peer that does not read its file."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import save_file

from runtime.loading.checkpoint import open_checkpoint


def write_dense_copy(model: Path, folder: Path) -> None:
    """Write config.json and model.safetensors of a GGUF file or a folder. The folder gets no tokenizer."""
    checkpoint = open_checkpoint(model)
    tensors = {name: checkpoint.tensor(name, torch.bfloat16).clone() for name in checkpoint.names()}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    config = {name: value for name, value in checkpoint.config.items() if name != "quantization_config"}
    (folder / "config.json").write_text(json.dumps(config | {"dtype": "bfloat16"}))
