"""Adapters as peft writes them, of random numbers, and what peft computes with them, unmerged."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from runtime.core.decoder_spec import DecoderSpec
from runtime.models.adapters import adapted_linears
from runtime.models.phi import WEIGHT_MAP

CONFIG = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "bias": "none", "modules_to_save": None, "use_dora": False}


def modules_of(spec: DecoderSpec) -> dict[str, tuple[int, ...]]:
    """The modules of a dummy model that may have matrices, with their (out, in)."""
    return {
        WEIGHT_MAP.names[part].format(layer, ""): shape
        for layer in range(spec.num_layers)
        for parts in adapted_linears(spec).values()
        for part, shape in parts.items()
    }


def save_adapter(
    folder: Path,
    modules: Mapping[str, tuple[int, ...]],
    seed: int = 0,
    ranks: Mapping[str, int] | None = None,  # of modules that have another than r
    size: float = 1.0,  # of what it adds, in terms of what the model has
    dtype: torch.dtype = torch.float32,
    **config: Any,
) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    """Returns A and B of each module in float32."""
    folder.mkdir(parents=True, exist_ok=True)
    config = CONFIG | config
    (folder / "adapter_config.json").write_text(json.dumps(config))
    generator, matrices, tensors = torch.Generator().manual_seed(seed), {}, {}
    for module, (size_out, size_in) in modules.items():
        rank = (ranks or {}).get(module, config["r"])
        a = torch.randn((rank, size_in), generator=generator) * size_in**-0.5
        b = torch.randn((size_out, rank), generator=generator) * size / rank**0.5
        pair = a.to(dtype), b.to(dtype)
        for kind, tensor in zip("AB", pair, strict=True):
            tensors[f"base_model.model.{module}.lora_{kind}.weight"] = tensor
        matrices[module] = pair[0].float(), pair[1].float()
    save_file(tensors, folder / "adapter_model.safetensors")
    return matrices
