"""Products of a model's decode step: the kernels that multiply them, and their candidates."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F

from benchmarks.kernels.random_weights import FORMS, random_weight
from benchmarks.kernels.tuning import Cell, Choices, Operation
from runtime.kernels.linear import skinny_gemm_configs
from runtime.kernels.linear.skinny_gemm import MAX_ROWS, skinny_gemm_triton
from runtime.kernels.linear.skinny_gemm_configs import SKINNY_GEMM_CONFIGS, SkinnyGemmConfig
from runtime.kernels.linear.sum_order import sum_order
from runtime.kernels.linear.tiles import Tiling
from runtime.kernels.quantized.activations import quantize_fp8_triton, quantize_int16_triton
from runtime.kernels.quantized.fp8_w8a8_gemm import fp8_w8a8_gemm_triton
from runtime.kernels.quantized.int_wna16_gemm import int_wna16_gemm_triton
from runtime.kernels.quantized.launch_configs import GemvConfig, Wna16SkinnyConfig, wna16_sum_order
from runtime.kernels.quantized.quantized_weight import dequantize_torch
from runtime.kernels.quantized.w4a16_gemm import w4a16_gemm_triton
from runtime.kernels.quantized.wna16_gemm import wna16_gemm_triton
from runtime.kernels.quantized.wna16_gemv import GEMV_ENCODINGS
from runtime.kernels.quantized.wna16_skinny_gemm import wna16_skinny_gemm_triton
from runtime.kernels.triton_language import INTERPRETED

_LAYERS = 1 if INTERPRETED else 8
_RULES = dict(SKINNY_GEMM_CONFIGS)


class Product(NamedTuple):
    name: str  # qkv | q_up | out | gate_up | down | router | head
    size_out: int
    size_in: int


def _model(
    hidden: int, into: int, query: int, vocab: int, ffn: int = 0, experts: int = 0, rank: int = 0
) -> list[Product]:
    """A layer and the head. `into` is the size of q, k and v; with `rank`, q comes from a latent."""
    up = [Product("q_up", query, rank)] if rank else []
    more = [Product("router", experts, hidden)]
    if ffn:
        more = [Product("gate_up", 2 * ffn, hidden), Product("down", hidden, ffn)]
    return [Product("qkv", into, hidden), *up, Product("out", hidden, query), *more, Product("head", vocab, hidden)]


MODELS = {
    "llama-3.2-1b": _model(2048, 3072, 2048, 128256, ffn=8192),
    "llama-3.2-3b": _model(3072, 5120, 3072, 128256, ffn=8192),
    "llama-3.1-8b": _model(4096, 6144, 4096, 128256, ffn=14336),
    "qwen3-4b": _model(2560, 6144, 4096, 151936, ffn=9728),
    "qwen3-30b-a3b": _model(2048, 5120, 4096, 151936, experts=128),
    "gpt-oss-20b": _model(2880, 5120, 4096, 201088, experts=32),
    "glm-4.7-flash": _model(2048, 1344, 5120, 154880, experts=64, rank=768),
    "tiny": _model(128, 256, 128, 320, ffn=128),
}


class Way(NamedTuple):
    """A kernel for products."""

    forms: tuple[str, ...]
    multiply: Callable[..., torch.Tensor]  # (rows, weight, config, **epilogue)
    candidates: Callable[[str, Product, int], list[Any]]
    cpu_dtype: torch.dtype = torch.float32  # x's dtype under the interpreter
    rows_of: Callable[[torch.Tensor, Any], Any] = lambda x, weight: x  # x as the kernel reads it
    least_rows: int = 1
    most_rows: int = 1 << 20


class ProductLayers:
    """The products of some layers, and the head, which few rows multiply in the same step."""

    num_layers = _LAYERS

    def __init__(self, way: Way, cell: Cell, device: str) -> None:
        self._way, self._rows = way, cell.rows
        *layer, head = MODELS[cell.shape]
        chain = [*layer * _LAYERS, *([head] if cell.rows <= MAX_ROWS else [])]
        self._dtype = way.cpu_dtype if INTERPRETED else torch.bfloat16
        self._chain = [(product, self._weight(cell.form, product, device)) for product in chain]
        self._x = {p.size_in: torch.randn(cell.rows, p.size_in, device=device).to(self._dtype) for p in chain}
        self._residuals = {
            p.size_out: torch.zeros(cell.rows, p.size_out, device=device, dtype=self._dtype) for p in chain
        }
        self._inputs = [way.rows_of(self._x[product.size_in], weight) for product, weight in self._chain]
        self.num_bytes = sum(weight.nbytes for _, weight in self._chain) / _LAYERS
        self.parts = {p.name: way.candidates(cell.form, p, cell.rows) for p in dict.fromkeys(chain)}

    def _weight(self, form: str, product: Product, device: str) -> Any:
        if form == "bf16":
            return (torch.randn(product.size_out, product.size_in, device=device) * 0.02).to(self._dtype)
        return random_weight(form, product.size_out, product.size_in, device)

    def _epilogue(self, product: Product) -> dict[str, Any]:
        """As the decoder uses it: norm before, activation or residual after; of more rows, the residual alone."""
        if product.name in ("out", "down"):
            return {"residual": self._residuals[product.size_out]}
        if self._rows > MAX_ROWS:
            return {}
        options: dict[str, Any] = {"norm_weight": self._x[product.size_in][0], "eps": 1e-5}
        if product.name == "gate_up":
            options["activation"] = "silu"
        elif product.name == "head":
            options["out_dtype"] = torch.float32
        return options

    def run(self, choices: Choices) -> None:
        for (product, weight), rows in zip(self._chain, self._inputs, strict=True):
            self._way.multiply(rows, weight, choices.get(product.name), **self._epilogue(product))

    def _firsts(self) -> list[tuple[Product, Any, Any]]:
        """The first product of each name."""
        found = {
            p.name: (p, weight, rows) for (p, weight), rows in zip(self._chain[::-1], self._inputs[::-1], strict=True)
        }
        return list(found.values())

    def results(self, choices: Choices) -> list[torch.Tensor]:
        return [self._way.multiply(rows, weight, choices.get(p.name)) for p, weight, rows in self._firsts()]

    def exact(self) -> list[torch.Tensor]:
        return [self._x[p.size_in].double() @ dense_of(weight).double().T for p, weight, _ in self._firsts()]

    def others(self) -> dict[str, Callable[[], object]]:
        """cuBLAS with dense weights, and the same kernel with one order of sums where it has one."""
        dense = [(self._x[p.size_in], dense_of(weight).to(self._dtype)) for p, weight in self._chain]
        found: dict[str, Callable[[], object]] = {"cublas": lambda: [F.linear(x, weight) for x, weight in dense]}
        if self._way.multiply is _dense:
            fixed = partial(skinny_gemm_triton, fixed_order=True)
            found["fixed"] = lambda: [fixed(self._x[p.size_in], w, **self._epilogue(p)) for p, w in self._chain]
        if self._way.multiply is _fp8:
            found["rowwise"] = lambda: [
                _scaled_mm(rows, weight) for (_, weight), rows in zip(self._chain, self._inputs, strict=True)
            ]
        return found


def dense_of(weight: Any) -> torch.Tensor:
    return weight if isinstance(weight, torch.Tensor) else dequantize_torch(weight)


def _dense(x: torch.Tensor, weight: torch.Tensor, config: SkinnyGemmConfig | None, **epilogue: Any) -> torch.Tensor:
    key = (*weight.shape, _bucket(len(x)))
    SKINNY_GEMM_CONFIGS.pop(key, None)
    if chosen := config or _RULES.get(key):
        SKINNY_GEMM_CONFIGS[key] = chosen
    return skinny_gemm_triton(x, weight, **epilogue)


def _bucket(rows: int) -> int:
    return next(n for n in (1, 8, 16) if rows <= n)


def _quantized(x: torch.Tensor, weight: Any, config: Any, **epilogue: Any) -> torch.Tensor:
    if len(x) > MAX_ROWS:
        return wna16_gemm_triton(x, weight, tiling=config, **epilogue)
    return wna16_skinny_gemm_triton(x, weight, config=config, **epilogue)


def _tiled(kernel: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    return lambda x, weight, config, **epilogue: kernel(x, weight, tiling=config, **epilogue)


_fp8 = _tiled(fp8_w8a8_gemm_triton)


def _scaled_mm(x: Any, weight: Any) -> torch.Tensor:
    scales = x.scales[:, None], weight.scales[:, : weight.shape[0]]
    return torch._scaled_mm(x.values, weight.values.t(), *scales, out_dtype=torch.bfloat16, use_fast_accum=True)


def _dense_candidates(form: str, product: Product, rows: int) -> list[SkinnyGemmConfig]:
    if rows == 1:
        shapes = [(2, 1024, 1), (4, 512, 1), (4, 1024, 1), (2, 1024, 2), (4, 512, 2), (4, 1024, 2), (8, 512, 2),
                  (2, 2048, 2), (4, 1024, 4), (8, 512, 4), (8, 1024, 4), (2, 2048, 4), (4, 2048, 4),
                  (4, 2048, 8)]  # fmt: skip
        if product.size_in > 2048:
            shapes += [(8, 1024, 8), (8, 2048, 8), (2, 4096, 8), (4, 4096, 8)]
        ahead = [(4, 512, 1), (4, 512, 2), (2, 1024, 2), (4, 1024, 2), (4, 512, 4), (4, 1024, 4), (8, 512, 4)]
        return [SkinnyGemmConfig(*shape, 1) for shape in shapes] + [SkinnyGemmConfig(*shape, 2) for shape in ahead]
    num_chunks, chunk = sum_order(product.size_out, product.size_in)
    tiles = {
        1: [(32, 128, 2, 4, 1), (32, 128, 2, 4, 2), (32, 256, 2, 3, 1), (32, 256, 2, 3, 2), (32, 256, 2, 4, 2),
            (16, 256, 1, 4, 1), (16, 512, 1, 3, 1), (16, 256, 1, 3, 2), (64, 128, 4, 3, 2), (64, 128, 4, 4, 2),
            (64, 128, 4, 4, 1), (64, 64, 4, 6, 2), (32, 64, 2, 6, 2), (32, 128, 2, 6, 2), (128, 64, 4, 4, 2)],
        2: [(16, 256, 2, 4, 1), (16, 128, 2, 6, 2), (16, 256, 2, 3, 1), (16, 128, 2, 4, 2), (32, 128, 2, 4, 1),
            (32, 128, 2, 4, 2), (32, 64, 2, 6, 2), (32, 128, 2, 3, 2), (16, 256, 2, 3, 2)],
        4: [(16, 128, 4, 4, 1), (16, 128, 4, 3, 1), (16, 128, 4, 4, 2), (16, 64, 4, 6, 2), (16, 128, 4, 3, 2),
            (32, 64, 4, 4, 2), (32, 128, 4, 3, 1), (16, 64, 2, 4, 2), (16, 128, 2, 3, 1)],
    }  # fmt: skip
    return [SkinnyGemmConfig(*tile) for tile in tiles[num_chunks] if chunk % tile[1] == 0]


def _quantized_candidates(form: str, product: Product, rows: int) -> list[Any]:
    num_chunks = wna16_sum_order(product.size_out, product.size_in).num_chunks
    if rows > MAX_ROWS:
        wide = [(64, 128, 128, 8, 3), (64, 64, 128, 4, 5), (64, 64, 128, 4, 4), (32, 32, 128, 2, 5)]
        return [Tiling(*tile, num_chunks if rows <= 64 else 1) for tile in wide]
    found: list[Any] = [
        Wna16SkinnyConfig(block_n, 128, max(warps, 1), stages, ahead, unroll)
        for block_n, warps in ((16, num_chunks // 2), (16, num_chunks), (32, num_chunks))
        for stages, ahead, unroll in ((3, 1, 1), (5, 2, 1), (3, 2, 2))
    ]
    if rows == 1 and FORMS[form].code in GEMV_ENCODINGS:
        found += [GemvConfig(*c) for c in ((4, 4, 2), (4, 4, 4), (8, 4, 1), (8, 4, 4), (8, 2, 2), (4, 8, 2), (8, 8, 2))]
    return found


def _tile_candidates(form: str, product: Product, rows: int) -> list[Tiling]:
    """Tiles of kernels that dequantize in registers or multiply digits."""
    block_m, splits = 32 if rows <= 32 else 64, (1, 2, 4)
    if INTERPRETED:
        return [Tiling(block_m, 64, 64, 4, 2)]
    if rows <= 64:
        shapes = [
            (64, 128, 4, 3),
            (64, 128, 4, 4),
            (64, 128, 4, 6),
            (64, 256, 4, 3),
            (128, 128, 8, 4),
            (128, 128, 4, 4),
        ]
        return [Tiling(block_m, *shape, split) for shape in shapes for split in splits]
    tiles = [(128, 128, 128, 8, stages) for stages in (2, 3, 4)]
    tiles += [(64, 64, 128, 4, 4), (64, 128, 128, 8, 4), (128, 64, 128, 4, 3), (256, 128, 128, 8, 3)]
    return [Tiling(*tile, split) for tile in tiles for split in splits]


def _fp8_candidates(form: str, product: Product, rows: int) -> list[Tiling]:
    if INTERPRETED:
        return [Tiling(32, 64, 64, 4, 2, 2), Tiling(32, 64, 64, 4, 2, swap=True)]
    if rows <= 64:
        block_m = 16 if rows <= 16 else 32 if rows <= 32 else 64
        tiles = [Tiling(block_m, 64, 256, 4, 4, split, swap=True) for split in (1, 2, 4)]
        tiles += [Tiling(block_m, 64, 128, 4, stages, split, swap=True) for stages, split in ((5, 1), (5, 2), (8, 2))]
        return [*tiles, Tiling(block_m, 128, 128, 8, 4, swap=True)]
    if rows <= 256:
        tiles = [Tiling(128, 64, 128, 4, *pair, swap=True) for pair in ((4, 1), (4, 2), (6, 2), (6, 4))]
        return [*tiles, Tiling(128, 64, 256, 4, 3, swap=True), Tiling(128, 128, 128, 8, 4, 4)]
    return [Tiling(128, 128, 128, 8, 4), Tiling(128, 128, 128, 8, 3)]


def _limb_candidates(form: str, product: Product, rows: int) -> list[Tiling]:
    """Tiles of int16 activations."""
    if form != "int4" or INTERPRETED:
        return _tile_candidates(form, product, rows)
    block_m, splits = 32 if rows <= 32 else 64, (1, 2, 4) if rows <= 64 else (1, 2)
    shapes = [(64, 4, 4), (128, 8, 4), (128, 4, 4), (64, 4, 6)]
    return [Tiling(block_m, n, 128, *rest, split) for n, *rest in shapes for split in splits]


_WAYS = {
    "linear": Way(("bf16",), _dense, _dense_candidates, most_rows=MAX_ROWS),
    "quantized": Way(tuple(FORMS), _quantized, _quantized_candidates),
    "digits": Way(
        ("int8", "int4"), _tiled(int_wna16_gemm_triton), _limb_candidates, torch.float16,
        lambda x, weight: quantize_int16_triton(x, group_size=0 if weight.zero_points is None else weight.group_size),
        MAX_ROWS + 1,
    ),
    "decoded": Way(("int4", "mxfp4", "nvfp4"), _tiled(w4a16_gemm_triton), _tile_candidates, torch.float16,
                   least_rows=MAX_ROWS + 1),
    "fp8": Way(("fp8",), _fp8, _fp8_candidates, torch.bfloat16, lambda x, _: quantize_fp8_triton(x), MAX_ROWS + 1),
}  # fmt: skip
PRODUCTS = {
    name: Operation(
        partial(ProductLayers, way), MODELS, ["llama-3.2-1b", "llama-3.1-8b"], way.forms, [1, 8, 16, 64, 256, 2048],
        way.least_rows, way.most_rows,
    )
    for name, way in _WAYS.items()
}  # fmt: skip


def write_table(found: dict[Cell, dict[str, SkinnyGemmConfig]]) -> None:
    """Write the rules and the best configurations into runtime/kernels/linear/skinny_gemm_configs.py."""
    table, path = dict(_RULES), Path(skinny_gemm_configs.__file__)
    for cell, configs in found.items():
        for product in MODELS[cell.shape]:
            if config := configs.get(product.name):
                table[product.size_out, product.size_in, _bucket(cell.rows)] = config
    head = path.read_text().split("SKINNY_GEMM_CONFIGS: ")[0]
    lines = [f"    {key}: SkinnyGemmConfig{tuple(config)},\n" for key, config in sorted(table.items())]
    first = "SKINNY_GEMM_CONFIGS: dict[tuple[int, int, int], SkinnyGemmConfig] = {  # (N, K, most rows)\n"
    path.write_text(head + "".join([first, *lines, "}\n"]))
