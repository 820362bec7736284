"""Weights in the formats of quantized checkpoints, written by the formats' own libraries or after their sources."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

Tensors = dict[str, torch.Tensor]  # by the names that they have in their module


@dataclass(frozen=True)
class Format:
    """One format with a config, a weight's tensors, and the dense weight that the format's library makes of them."""

    config: dict[str, Any]
    pack: Callable[[torch.Tensor, torch.Generator], Tensors]  # of a weight [out, in]
    dequantize: Callable[[Tensors, tuple[int, ...]], torch.Tensor]  # to [out, in]
    form: str  # as `callboard inspect` has it
    files: dict[str, Any] = field(default_factory=dict)  # JSON files, in place of a quantization_config


# ---- compressed-tensors: its own compressors ------------------------------------------------------------------------


def compressed_tensors(form: str, file_format: str, dtype=torch.bfloat16, activations=None, **weights) -> Format:
    """A format with the library's arguments of its weights."""

    def scheme():
        from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme

        return QuantizationScheme(targets=["Linear"], weights=QuantizationArgs(**weights))

    def library():
        from compressed_tensors.compressors import BaseCompressor

        return BaseCompressor.get_value_from_registry(file_format)

    def pack(dense: torch.Tensor, generator: torch.Generator) -> Tensors:
        rows, columns = dense.shape
        match weights["strategy"]:
            case "tensor":
                shape: tuple[int, ...] = (1,)
            case "channel":
                shape = (rows, 1)
            case "group" | "tensor_group":
                shape = (rows, columns // weights["group_size"])
            case "block":
                shape = tuple(-(-n // per) for n, per in zip(dense.shape, weights["block_structure"], strict=True))
        is_float, bits = weights["type"] == "float", weights["num_bits"]
        largest = {(True, 8): 448.0, (True, 4): 6.0}.get((is_float, bits), 2.0 ** (bits - 1))
        scale = (0.5 + torch.rand(shape, generator=generator)) * float(dense.abs().max()) / largest
        state = {"weight": dense.to(dtype), "weight_scale": scale.to(dtype)}
        if not weights.get("symmetric", True):
            half = 2 ** (bits - 1)
            state["weight_zero_point"] = torch.randint(-half, half, shape, generator=generator).to(torch.int8)
        if file_format.startswith("nvfp4"):
            state["weight_global_scale"] = torch.tensor([37.5])
            state["weight_scale"] = (scale * 37.5).to(torch.float8_e4m3fn).float()
        if file_format.startswith("mxfp4"):
            state["weight_scale"] = scale.log2().floor().exp2()
        if activations == "static":
            state["input_scale"] = torch.tensor([0.25])
        return dict(library().compress(state, scheme()))

    def dequantize(tensors: Tensors, shape: tuple[int, ...]) -> torch.Tensor:
        return library().decompress(tensors, scheme())["weight"]

    config = {
        "quant_method": "compressed-tensors",
        "format": file_format,
        "quantization_status": "compressed",
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights | {"dynamic": False}}},
        "ignore": ["lm_head"],
        "kv_cache_scheme": None,
    }
    if activations:
        config["config_groups"]["group_0"]["input_activations"] = {"num_bits": 8, "dynamic": activations == "dynamic"}
    return Format(config, pack, dequantize, form)


# ---- fp8: transformers' dequantizer ---------------------------------------------------------------------------------


def _pack_fp8(dense: torch.Tensor, generator: torch.Generator, block: int, dtype: torch.dtype, name: str) -> Tensors:
    shape = tuple(-(-n // block) for n in dense.shape) if block else ()
    scale = ((0.5 + torch.rand(shape, generator=generator)) * float(dense.abs().max()) / 448).to(dtype)
    spread = scale.float()
    if block:
        spread = spread.repeat_interleave(block, 0)[: dense.shape[0]].repeat_interleave(block, 1)[:, : dense.shape[1]]
    return {"weight": (dense / spread).clamp(-448, 448).to(torch.float8_e4m3fn), name: scale}


def _dequantize_fp8(tensors: Tensors, block: int, name: str) -> torch.Tensor:
    from transformers.integrations.finegrained_fp8 import _dequantize_fp8_weight

    return _dequantize_fp8_weight(tensors["weight"], tensors[name], [block, block] if block else None, torch.float32)


def fp8(
    form: str, block: int = 0, dtype: torch.dtype = torch.float32, name: str = "weight_scale_inv", **config
) -> Format:
    return Format(
        {"quant_method": "fp8", "activation_scheme": "dynamic", "fmt": "e4m3", **config}
        | ({"weight_block_size": [block, block]} if block else {}),
        lambda dense, generator: _pack_fp8(dense, generator, block, dtype, name),
        lambda tensors, shape: _dequantize_fp8(tensors, block, name),
        form,
    )


W8 = {"num_bits": 8, "type": "float", "symmetric": True}
FORMATS: dict[str, Format] = {
    "ct-fp8-tensor-static": compressed_tensors(
        "fp8 rows", "float-quantized", activations="static", strategy="tensor", **W8
    ),
    "ct-fp8-channel": compressed_tensors(
        "fp8 rows", "float-quantized", activations="dynamic", strategy="channel", **W8
    ),
    "ct-fp8-group": compressed_tensors("fp8 g32", "float-quantized", strategy="group", group_size=32, **W8),
    "ct-fp8-block": compressed_tensors(
        "fp8 32x16", "naive-quantized", torch.float32, strategy="block", block_structure=[32, 16], **W8
    ),
    "fp8-block": fp8("fp8 128x128", 128),
    "fp8-block-bf16-scales": fp8("fp8 128x128", 128, torch.bfloat16, modules_to_not_convert=["lm_head"]),
    "fp8-tensor": fp8("fp8 rows", name="weight_scale", ignored_layers=["re:.*lm_head"]),
    "fp8-tensor-inv": fp8("fp8 rows"),
}
