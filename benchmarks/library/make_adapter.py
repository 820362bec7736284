"""Writes an adapter (LoRA) of random values for a published shape, in the files that peft would write.

python -m benchmarks.library.make_adapter llama-3.2-1b /tmp/adapter --rank 16
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from benchmarks.library.models import CONFIGS
from runtime.base.model.decoder_spec import DecoderSpec
from runtime.models import load_spec
from runtime.models.families.phi import WEIGHT_MAP
from runtime.models.weight_map import WeightMap

_CONFIG = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "bias": "none", "modules_to_save": None, "use_dora": False}


def modules_of(spec: DecoderSpec, weight_map: WeightMap = WEIGHT_MAP) -> dict[str, tuple[int, ...]]:
    """A model's modules that may have matrices, with their (out, in). A random-weight model uses the names from
    Llama and Phi."""
    return {
        weight_map.name_of(spec, f"layers.{layer}.{part}"): shape
        for layer in range(spec.num_layers)
        for parts in spec.adapted_linears(layer).values()
        for part, shape in parts.items()
    }


def save_adapter(
    folder: Path,
    modules: Mapping[str, tuple[int, ...]],
    seed: int = 0,
    ranks: Mapping[str, int] | None = None,  # modules with another rank than r
    size: float = 1.0,  # the adapter's output, relative to the model's own
    dtype: torch.dtype = torch.float32,
    **config: Any,
) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    """Returns A and B of each module in float32."""
    folder.mkdir(parents=True, exist_ok=True)
    config = _CONFIG | config
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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", choices=sorted(CONFIGS))
    parser.add_argument("folder", type=Path)
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    modules = modules_of(*load_spec(CONFIGS[args.model]))
    save_adapter(args.folder, modules, args.seed, size=0.1, dtype=torch.bfloat16, r=args.rank, lora_alpha=args.rank)


if __name__ == "__main__":
    main()
