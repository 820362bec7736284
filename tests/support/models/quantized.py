"""Weights in the formats of quantized checkpoints, written by the formats' own libraries or after their sources."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

Tensors = dict[str, torch.Tensor]  # by the names that they have in their module


@dataclass(frozen=True)
class Format:
    """One format with a config, a weight's tensors, and the dense weight that the format's library derives from
    them."""

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


# ---- AWQ and GPTQ: after their sources, as their libraries need a GPU -----------------------------------------------


def _group_scales(dense: torch.Tensor, group: int, generator: torch.Generator) -> torch.Tensor:
    """[groups, out] in float16."""
    shape = -(-dense.shape[1] // group), dense.shape[0]
    return ((0.5 + torch.rand(shape, generator=generator)) * float(dense.abs().max()) / 8).half()


def _words(codes: torch.Tensor, bits: int) -> torch.Tensor:
    """int32 [n, m / codes a word], the first code in the lowest bits."""
    codes = codes.long().view(len(codes), -1, 32 // bits)
    words = (codes << torch.arange(0, 32, bits)).sum(-1)
    return torch.where(words >= 1 << 31, words - (1 << 32), words).int()


def _codes(words: torch.Tensor, bits: int) -> torch.Tensor:
    return ((words.long()[..., None] >> torch.arange(0, 32, bits)) & ((1 << bits) - 1)).flatten(-2)


def awq(group: int) -> Format:
    """AutoAWQ, awq/utils/packing_utils.py and awq/modules/linear/gemm.py."""

    def pack(dense: torch.Tensor, generator: torch.Generator) -> Tensors:
        scales = _group_scales(dense, group, generator)
        zeros = torch.randint(0, 16, scales.shape, generator=generator)
        spread = [t.repeat_interleave(group, 0)[: dense.shape[1]] for t in (scales.float(), zeros)]
        codes = (dense.t() / spread[0] + spread[1]).round().clamp(0, 15)
        order = [0, 2, 4, 6, 1, 3, 5, 7]
        words = [_words(t.view(len(t), -1, 8)[..., order].flatten(1), 4) for t in (codes, zeros)]
        return {"qweight": words[0], "qzeros": words[1], "scales": scales}

    def dequantize(tensors: Tensors, shape: tuple[int, ...]) -> torch.Tensor:
        reverse = torch.arange(shape[0]).view(-1, 8)[:, [0, 4, 1, 5, 2, 6, 3, 7]].flatten()  # reverse_awq_order
        codes, zeros = (_codes(tensors[name], 4)[:, reverse] for name in ("qweight", "qzeros"))
        scales, zeros = (t.repeat_interleave(group, 0)[: shape[1]] for t in (tensors["scales"].float(), zeros))
        return ((codes - zeros) * scales).t()

    config = {"quant_method": "awq", "bits": 4, "group_size": group, "zero_point": True, "version": "gemm"}
    return Format(config | {"modules_to_not_convert": None}, pack, dequantize, f"int4 g{group} with zero points")


def gptq(group: int, bits: int = 4, sym: bool = True, version: str = "gptq", desc_act: bool = False) -> Format:
    """GPTQModel, gptqmodel/nn_modules/qlinear/torch.py (dequantize_weight), with zero points of v1 minus one."""
    largest, less = (1 << bits) - 1, int(version == "gptq")

    def pack(dense: torch.Tensor, generator: torch.Generator) -> Tensors:
        columns = dense.shape[1]
        size = columns if group == -1 else group
        scales = _group_scales(dense, size, generator) * 8 / 2 ** (bits - 1)
        zeros = torch.randint(0, largest + 1, scales.shape, generator=generator)
        if sym:
            zeros = torch.full(scales.shape, 1 << bits - 1)
        groups = torch.arange(columns) // size
        if desc_act:
            groups = groups[torch.randperm(columns, generator=generator)]
        codes = (dense.t() / scales.float()[groups] + zeros[groups]).round().clamp(0, largest)
        return {
            "qweight": _words(codes.t(), bits).t(),
            "qzeros": _words((zeros - less) & largest, bits),
            "scales": scales,
            "g_idx": groups.int(),
        }

    def dequantize(tensors: Tensors, shape: tuple[int, ...]) -> torch.Tensor:
        codes, zeros = _codes(tensors["qweight"].t(), bits).t(), (_codes(tensors["qzeros"], bits) + less) & largest
        groups = tensors["g_idx"].long()
        return (tensors["scales"].float()[groups] * (codes - zeros[groups])).t()

    config = {"quant_method": "gptq", "bits": bits, "group_size": group, "sym": sym, "desc_act": desc_act}
    form = f"int{bits}" + (" rows" if group == -1 else f" g{group}") + ("" if sym else " with zero points")
    return Format(config | {"checkpoint_format": version, "lm_head": False}, pack, dequantize, form)


def reordered(form: Format, group: int) -> Format:
    """compressed-tensors' actorder: the columns of a group are not adjacent. The library read it until version 0.18:
    the group of each column in weight_g_idx, as in GPTQ."""

    def order(tensors: Tensors) -> torch.Tensor:
        return tensors["weight_g_idx"].argsort(stable=True)

    def pack(dense: torch.Tensor, generator: torch.Generator) -> Tensors:
        tensors = form.pack(dense, generator)
        groups = (torch.arange(dense.shape[1]) // group)[torch.randperm(dense.shape[1], generator=generator)]
        return tensors | {"weight_g_idx": groups.int()}

    def dequantize(tensors: Tensors, shape: tuple[int, ...]) -> torch.Tensor:
        from compressed_tensors.compressors.pack_quantized.helpers import pack_to_int32, unpack_from_int32

        codes = unpack_from_int32(tensors["weight_packed"], 4, torch.Size(shape))
        sorted_codes = pack_to_int32(codes[:, order(tensors)].contiguous(), 4)
        dense = form.dequantize(tensors | {"weight_packed": sorted_codes}, shape)
        return dense[:, order(tensors).argsort()]

    (name, described), *_ = form.config["config_groups"].items()
    weights = described["weights"] | {"actorder": "group"}
    config = form.config | {"config_groups": {name: described | {"weights": weights}}}
    return Format(config, pack, dequantize, form.form)


# ---- tables of 16 numbers -------------------------------------------------------------------------------------------


def bitsandbytes4(kind: str, nested: bool) -> Format:
    def library():
        import bitsandbytes.functional

        return bitsandbytes.functional

    def pack(dense: torch.Tensor, generator: torch.Generator) -> Tensors:
        codes, state = library().quantize_4bit(dense, quant_type=kind, compress_statistics=nested, blocksize=64)
        return {"weight": codes} | {f"weight.{name}": tensor for name, tensor in state.as_dict(packed=True).items()}

    def dequantize(tensors: Tensors, shape: tuple[int, ...]) -> torch.Tensor:
        # Its formula for all devices. Its formula for CPUs differs if rows are not multiples of 64.
        from bitsandbytes.backends.default.ops import _dequantize_4bit_compute

        state = {name.removeprefix("weight."): tensor for name, tensor in tensors.items() if name != "weight"}
        state = library().QuantState.from_dict(state, torch.device("cpu"))
        scale = state.absmax
        if nested:
            scale = library().dequantize_blockwise(scale, state.state2) + state.offset
        return _dequantize_4bit_compute(tensors["weight"].flatten(), scale, state.code, 64, shape, torch.float32)

    config = {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": kind}
    config |= {"bnb_4bit_use_double_quant": nested, "bnb_4bit_quant_storage": "uint8", "llm_int8_skip_modules": None}
    return Format(config, pack, dequantize, "nf4 g64" if kind == "nf4" else "bitsandbytes fp4 g64")


def _pack_int8(dense: torch.Tensor, generator: torch.Generator) -> Tensors:
    import bitsandbytes.functional

    codes, scale, _ = bitsandbytes.functional.int8_vectorwise_quant(dense.half())
    return {"weight": codes, "SCB": scale, "weight_format": torch.tensor(0, dtype=torch.uint8)}


def _dequantize_int8(tensors: Tensors, shape: tuple[int, ...]) -> torch.Tensor:
    """bitsandbytes' int8_vectorwise_dequant with its two factors multiplied first, which may change the last bit."""
    return tensors["weight"].float() * (tensors["SCB"][:, None] * 7.874015718698502e-3)


_FP4 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
FP4 = torch.tensor([*_FP4, *(-n for n in _FP4)])


def _pack_modelopt_nvfp4(dense: torch.Tensor, generator: torch.Generator) -> Tensors:
    shape = dense.shape[0], dense.shape[1] // 16
    return {
        "weight": torch.randint(0, 256, (dense.shape[0], dense.shape[1] // 2), generator=generator).byte(),
        "weight_scale": (torch.rand(shape, generator=generator) * 100).to(torch.float8_e4m3fn),
        "weight_scale_2": torch.tensor(0.00371),
        "input_scale": torch.tensor(0.01),
    }


def _dequantize_modelopt_nvfp4(tensors: Tensors, shape: tuple[int, ...]) -> torch.Tensor:
    """TensorRT-Model-Optimizer, modelopt/torch/quantization/qtensor/nvfp4_tensor.py (dequantize)."""
    codes = torch.stack((tensors["weight"] & 15, tensors["weight"] >> 4), -1).flatten(1).long()
    scale = tensors["weight_scale"].float() * tensors["weight_scale_2"]
    return (FP4[codes].view(shape[0], -1, 16) * scale[..., None]).view(shape)


def _pack_mxfp4(dense: torch.Tensor, generator: torch.Generator) -> Tensors:
    shape = dense.shape[0], dense.shape[1] // 32
    return {
        "weight_blocks": torch.randint(0, 256, (*shape, 16), generator=generator).byte(),
        "weight_scales": torch.randint(118, 122, shape, generator=generator).byte(),
    }


def _dequantize_mxfp4(tensors: Tensors, shape: tuple[int, ...]) -> torch.Tensor:
    from transformers.integrations.mxfp4 import _convert_moe_packed_tensors

    blocks, scales = tensors["weight_blocks"][None], tensors["weight_scales"][None]
    return _convert_moe_packed_tensors(blocks, scales, dtype=torch.float32)[0].t()


def modelopt_fp8(rows: bool) -> Format:
    def pack(dense: torch.Tensor, generator: torch.Generator) -> Tensors:
        scale = dense.abs().amax(1) / 448 if rows else dense.abs().max() / 448
        codes = (dense / (scale[:, None] if rows else scale)).clamp(-448, 448).to(torch.float8_e4m3fn)
        return {"weight": codes, "weight_scale": scale, "input_scale": torch.tensor(0.5)}

    def dequantize(tensors: Tensors, shape: tuple[int, ...]) -> torch.Tensor:
        return tensors["weight"].float() * tensors["weight_scale"].view(-1, 1)

    algorithm = "FP8_PER_CHANNEL_PER_TOKEN" if rows else "FP8"
    described = {"quant_algo": algorithm, "kv_cache_quant_algo": "FP8", "exclude_modules": ["lm_head"]}
    files = {"hf_quant_config.json": {"producer": {"name": "modelopt"}, "quantization": described}}
    return Format({}, pack, dequantize, "fp8 rows", files)


W8 = {"num_bits": 8, "type": "float", "symmetric": True}
I8, I4, F4 = ({"num_bits": bits, "type": kind} for bits, kind in ((8, "int"), (4, "int"), (4, "float")))
GROUPS = {"strategy": "group", "group_size": 32}
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
    "ct-int8-channel": compressed_tensors(
        "int8 rows", "int-quantized", activations="dynamic", strategy="channel", **I8
    ),
    "ct-int8-tensor": compressed_tensors("int8 rows", "int-quantized", strategy="tensor", **I8),
    "ct-int8-group-asymmetric": compressed_tensors(
        "int8 g32 with zero points", "naive-quantized", **I8 | GROUPS | {"symmetric": False}
    ),
    "ct-w4a16": compressed_tensors("int4 g32", "pack-quantized", **I4 | GROUPS),
    "ct-w4a16-channel": compressed_tensors("int4 rows", "pack-quantized", strategy="channel", **I4),
    "ct-w4a16-asymmetric": compressed_tensors(
        "int4 g32 with zero points", "pack-quantized", **I4 | GROUPS | {"symmetric": False}
    ),
    "ct-w8a16": compressed_tensors("int8 g32", "pack-quantized", **I8 | GROUPS),
    "ct-w8a16-asymmetric": compressed_tensors(
        "int8 rows with zero points", "pack-quantized", strategy="channel", **I8 | {"symmetric": False}
    ),
    "ct-w4a16-reordered": reordered(compressed_tensors("int4 g32", "pack-quantized", **I4 | GROUPS), 32),
    "awq": awq(32),
    "gptq": gptq(32),
    "gptq-rows": gptq(-1),
    "gptq-v2": gptq(32, version="gptq_v2"),
    "gptq-asymmetric": gptq(32, sym=False),
    "gptq-desc-act": gptq(32, desc_act=True),
    "gptq-desc-act-asymmetric-v2": gptq(16, sym=False, version="gptq_v2", desc_act=True),
    "gptq-8": gptq(32, bits=8),
    "gptq-8-asymmetric": gptq(32, bits=8, sym=False),
    "bnb-nf4": bitsandbytes4("nf4", nested=False),
    "bnb-nf4-nested": bitsandbytes4("nf4", nested=True),
    "bnb-fp4": bitsandbytes4("fp4", nested=False),
    "bnb-int8": Format(
        {"quant_method": "bitsandbytes", "load_in_8bit": True}, _pack_int8, _dequantize_int8, "int8 rows"
    ),
    "ct-nvfp4": compressed_tensors(
        "fp4 g16", "nvfp4-pack-quantized", strategy="tensor_group", group_size=16, **F4
    ),
    "ct-mxfp4": compressed_tensors("fp4 g32", "mxfp4-pack-quantized", strategy="group", group_size=32, **F4),
    "modelopt-fp8": modelopt_fp8(rows=False),
    "modelopt-fp8-rows": modelopt_fp8(rows=True),
    "modelopt-nvfp4": Format(
        {"quant_method": "modelopt", "quant_algo": "NVFP4", "group_size": 16, "ignore": ["lm_head"]},
        _pack_modelopt_nvfp4, _dequantize_modelopt_nvfp4, "fp4 g16",
    ),
    "mxfp4": Format({"quant_method": "mxfp4"}, _pack_mxfp4, _dequantize_mxfp4, "fp4 g32"),
}  # fmt: skip
