"""Products of many rows with fp8 weights on a GPU: every way to compute them, and the chain of a layer's products.

    python -m benchmarks.kernels.tune_fp8 --models llama-3.1-8b --rows 64 256 2048
    TRITON_INTERPRET=1 python -m benchmarks.kernels.tune_fp8 --models tiny --rows 40  # on a CPU, without times

Prints a JSON line for each product, its error against float64 and its time by each candidate. Then it prints one for
each chain: norm, qkv, out, norm, gate_up, activation, down of some layers, as one CUDA graph over different weights.
Chains run with the best tiles, with torch's row-wise product, with the best of each, and in bfloat16.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import os
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from typing import Any

import torch
import torch.nn.functional as F

from benchmarks.kernels.tune_linear import MODELS, Product, graph_us, products
from runtime.base.model.decoder_spec import ExpertsSpec
from runtime.kernels.experts import moe_fp8_w8a8 as fp8_experts
from runtime.kernels.experts.moe_routing import Tile
from runtime.kernels.experts.moe_torch import Router
from runtime.kernels.experts.moe_w16a16 import GroupedExperts
from runtime.kernels.linear.fused_linear import FusedLinear
from runtime.kernels.linear.tiles import Tiling
from runtime.kernels.norm.gated_activation import gated_activation_triton
from runtime.kernels.norm.rms_norm import rms_norm_triton
from runtime.kernels.quantized.activations import Fp8Activations, quantize_fp8_torch, quantize_fp8_triton
from runtime.kernels.quantized.fp8_w8a8_gemm import fp8_w8a8_gemm_torch, fp8_w8a8_gemm_triton
from runtime.kernels.quantized.quantized_weight import QuantizedWeight, dequantize_torch, quantized_weight
from runtime.kernels.quantized.weight_conversions import dequantize_triton
from runtime.kernels.triton_language import INTERPRETED

DEVICE = "cpu" if INTERPRETED else "cuda"
MODELS["tiny"] = (1, 128, 128, 64, 192, 320)
MAX_LAYERS = 6  # of a chain; 8B layers of fp8 are 218 MB each
T = Tiling


def candidates(rows: int) -> list[Tiling]:
    """Tiles worth trying."""
    if INTERPRETED:
        return [T(32, 64, 64, 4, 2, 2), T(32, 64, 64, 4, 2, swap=True)]
    if rows <= 64:
        block_m = 16 if rows <= 16 else 32 if rows <= 32 else 64
        tiles = [T(block_m, 64, 256, 4, 4, split, swap=True) for split in (1, 2, 4)]
        tiles += [T(block_m, 64, 128, 4, stages, split, swap=True) for stages, split in ((5, 1), (5, 2), (8, 2))]
        return [*tiles, T(block_m, 128, 128, 8, 4, swap=True)]
    if rows <= 256:
        tiles = [T(128, 64, 128, 4, stages, split, swap=True) for stages, split in ((4, 1), (4, 2), (6, 2), (6, 4))]
        return [*tiles, T(128, 64, 256, 4, 3, swap=True), T(128, 128, 128, 8, 4, 4)]
    return [T(128, 128, 128, 8, 4), T(128, 128, 128, 8, 3)]


def draw(product: Product) -> QuantizedWeight:
    codes = (torch.randn(product.size_out, product.size_in, device=DEVICE) * 64).clamp(-448, 448)
    scales = torch.rand(product.size_out, 1, device=DEVICE) * 1e-3 + 1e-3
    return quantized_weight("fp8", codes.to(torch.float8_e4m3fn), scales)


def scaled_mm(x: Fp8Activations, weight: QuantizedWeight, fast: bool, whole: bool = False) -> torch.Tensor:
    """torch's product, with row-wise scales, or with one scale if `whole`."""
    if whole:
        one = x.scales[0]
        return torch._scaled_mm(x.values, weight.values.t(), one, one, out_dtype=torch.bfloat16, use_fast_accum=fast)
    return torch._scaled_mm(
        x.values,
        weight.values.t(),
        x.scales[:, None],
        weight.scales[:, : weight.shape[0]],
        out_dtype=torch.bfloat16,
        use_fast_accum=fast,
    )


def timed(run: Callable[[], Any], warm_up: float = 0.02) -> float | str:
    if INTERPRETED:
        start = time.perf_counter()
        run()
        return (time.perf_counter() - start) * 1e6
    try:
        return round(graph_us(run, warm_up, times=5, replays=3), 1)
    except Exception as error:  # a failing candidate does not stop the others
        torch.cuda.synchronize()
        return f"{type(error).__name__}: {error!s:.160}"


def product_times(product: Product, rows: int, copies: int) -> dict[str, float]:
    """Microseconds of one product with several weights in turn, by candidate."""
    weights = [draw(product) for _ in range(copies)]
    wide = [w.values.bfloat16() for w in weights]
    x = torch.randn(rows, product.size_in, device=DEVICE).bfloat16()
    quantized = quantize_fp8_triton(x)
    has_residual = product.form in ("out", "down")
    residual = torch.zeros(rows, product.size_out, device=DEVICE).bfloat16()
    exact = quantized.dequantize(torch.float64) @ dequantize_torch(weights[0]).double().T

    def error(y: torch.Tensor) -> float:
        return round(((y.double() - exact).norm() / exact.norm()).item(), 6)

    ways: dict[str, Callable[[QuantizedWeight], Any]] = {
        f"rowwise fast={fast}": lambda w, fast=fast: scaled_mm(quantized, w, fast) for fast in (True, False)
    }
    ways |= {
        f"unscaled fast={fast}": lambda w, fast=fast: scaled_mm(quantized, w, fast, whole=True)
        for fast in (True, False)
    }
    ways["widened"] = lambda w: F.linear(x, dequantize_triton(w, x.dtype))  # a scratch tensor made each time
    ways |= {
        str(tuple(tile)): lambda w, tile=tile: fp8_w8a8_gemm_triton(
            quantized, w, residual=residual if has_residual else None, tiling=tile
        )
        for tile in candidates(rows)
    }
    times: dict[str, float | str] = {"bf16": timed(lambda: [F.linear(x, w) for w in wide])}
    errors = {}
    for name, way in ways.items() if not INTERPRETED else list(ways.items())[5:]:
        residual.zero_()
        try:
            errors[name] = error(way(weights[0])) if name[0] in "r(" else None
        except Exception as failure:
            times[name] = f"{type(failure).__name__}: {failure!s:.160}"
            continue
        times[name] = timed(lambda way=way: [way(w) for w in weights])
    us = {name: round(t / copies, 2) for name, t in times.items() if isinstance(t, float)}
    flops = 2 * rows * product.size_out * product.size_in
    order = sorted(us, key=us.__getitem__)
    report(
        op="product", form=product.form, shape=[product.size_out, product.size_in], rows=rows, us=us, error=errors,
        best=order[0], tflops=round(flops / us[order[0]] / 1e6), bf16_tflops=round(flops / us["bf16"] / 1e6),
        failed={name: t for name, t in times.items() if isinstance(t, str)},
    )  # fmt: skip
    return us


def best_tile(us: dict[str, float], rows: int) -> str:
    return min((str(tuple(tile)) for tile in candidates(rows)), key=lambda name: us.get(name, math.inf))


def chain_times(model: str, rows: int, us_of: dict[str, dict[str, float]]) -> None:
    """All that a layer does but attention, in microseconds a layer; `us_of` has the times of each product."""
    layers, hidden, query, _, ffn, _ = MODELS[model]
    layers = min(layers, MAX_LAYERS)
    shapes = products(model)[:4]
    weights = [[draw(p) for p in shapes] for _ in range(layers)]
    wide = [[w.values.bfloat16() for w in layer] for layer in weights]
    norm = torch.ones(hidden, device=DEVICE).bfloat16()
    residual = torch.randn(rows, hidden, device=DEVICE).bfloat16()
    attended = torch.randn(rows, query, device=DEVICE).bfloat16()
    other = torch.zeros_like(residual)
    addition = timed(lambda: [residual.add_(other) for _ in range(8)])

    def by_bf16() -> None:
        for qkv, out, gate_up, down in wide:
            F.linear(rms_norm_triton(residual, norm, 1e-5), qkv)
            residual.addmm_(attended, out.t())
            y = F.linear(rms_norm_triton(residual, norm, 1e-5), gate_up)
            residual.addmm_(gated_activation_triton(y, "silu"), down.t())

    def product(
        choice: str, x: Fp8Activations, weight: QuantizedWeight, into: torch.Tensor | None = None
    ) -> torch.Tensor:
        if choice.startswith("rowwise"):
            y = scaled_mm(x, weight, choice.endswith("True"))
            return y if into is None else into.add_(y)
        tile = next(tile for tile in candidates(rows) if str(tuple(tile)) == choice)
        return fp8_w8a8_gemm_triton(x, weight, residual=into, tiling=tile)

    def by(qkv: str, out: str, gate_up: str, down: str) -> Callable[[], None]:
        def run() -> None:
            for w_qkv, w_out, w_gate_up, w_down in weights:
                product(qkv, quantize_fp8_triton(residual, norm, 1e-5), w_qkv)
                product(out, quantize_fp8_triton(attended), w_out, residual)
                y = product(gate_up, quantize_fp8_triton(residual, norm, 1e-5), w_gate_up)
                product(down, quantize_fp8_triton(y, activation="silu"), w_down, residual)

        return run

    def rows_alone() -> None:
        y = torch.empty(rows, 2 * ffn, dtype=torch.bfloat16, device=DEVICE)
        for _ in weights:
            quantize_fp8_triton(residual, norm, 1e-5)
            quantize_fp8_triton(attended)
            quantize_fp8_triton(residual, norm, 1e-5)
            quantize_fp8_triton(y, activation="silu")

    tiles = [best_tile(us_of[p.form], rows) for p in shapes]
    ways = {"bf16": by_bf16, "tiles": by(*tiles), "rows_alone": rows_alone}
    choices = {"tiles": tiles}
    if not INTERPRETED:
        ways |= {f"rowwise fast={fast}": by(*[f"rowwise fast={fast}"] * 4) for fast in (True, False)}
        extra = addition / 8 if isinstance(addition, float) else 0.0
        choices["best"] = [
            min(us, key=lambda name: us[name] + (extra if name[0] == "r" and i % 2 else 0.0))
            for i, p in enumerate(shapes)
            for us in [{n: t for n, t in us_of[p.form].items() if n[0] in "r("}]
        ]
        ways["best"] = by(*choices["best"])
    us = {name: timed(way, 0.1) for name, way in ways.items()}
    report(
        op="chain", model=model, rows=rows, failed={n: t for n, t in us.items() if isinstance(t, str)},
        us={n: round(t / layers, 1) for n, t in us.items() if isinstance(t, float)},
        model_ms={n: round(t / layers * MODELS[model][0] / 1e3, 3) for n, t in us.items() if isinstance(t, float)},
        choices=choices,
    )  # fmt: skip


def expert_times(rows: int, tiles: list[Tile | None]) -> None:
    """Mixtures of Qwen3-30B-A3B's shape, or of a small one, in microseconds a layer."""
    num_experts, top_k, hidden, ffn = (4, 2, 128, 128) if INTERPRETED else (128, 8, 2048, 768)
    spec, layers = ExpertsSpec(num_experts, top_k, True), 1 if INTERPRETED else 4
    routers = [torch.randn(num_experts, hidden, device=DEVICE).bfloat16() for _ in range(layers)]
    shapes = Product("", 2 * ffn, hidden), Product("", hidden, ffn)
    weights = [tuple(draw(p) for p in shapes) for _ in range(num_experts)]
    fp8 = [(tuple((w.values, w.scales[0, : len(w.values), None]) for w in pair)) for pair in weights]
    dense = [tuple(dequantize_torch(w).bfloat16() for w in pair) for pair in weights]
    del weights
    x = torch.randn(rows, hidden, device=DEVICE).bfloat16()
    residual, norm = torch.zeros_like(x), torch.ones(hidden, device=DEVICE).bfloat16()

    def times(kind: Any, weights: Any) -> tuple[float | str, torch.Tensor]:
        mixtures = [kind(spec, Router(FusedLinear(r, None, "silu", False)), weights, "silu", False) for r in routers]
        residual.copy_(x)
        mixtures[0].add_to(residual, norm, 1e-5)
        result = residual - x
        us = timed(lambda: [mixture.add_to(residual, norm, 1e-5) for mixture in mixtures])
        return (round(us / layers, 2) if isinstance(us, float) else us), result

    us, errors = {}, {}
    us["bf16"], want = times(GroupedExperts, dense)
    for tile in tiles:
        if tile is not None:
            fp8_experts.moe_fp8_tile = lambda *_, tile=tile: tile
        us[str(tuple(tile or ()))], got = times(fp8_experts.Fp8Experts, fp8)
        errors[str(tuple(tile or ()))] = round(((got - want).float().norm() / want.float().norm()).item(), 4)
    report(op="experts", rows=rows, us=us, error=errors)


def check() -> None:
    """Rows of zeros, ties, all codes, blocks of scales, bias."""
    torch.manual_seed(0)
    x = torch.randn(70, 272, device=DEVICE).bfloat16()
    x[3] = 0
    norm, pairs = torch.rand(272, device=DEVICE).bfloat16(), torch.randn(70, 544, device=DEVICE).bfloat16()
    right = {}
    for name, (inputs, options) in {
        "plain": (x, {}), "norm": (x, {"norm_weight": norm, "eps": 1e-5}), "gated": (pairs, {"activation": "silu"}),
    }.items():  # fmt: skip
        got, want = quantize_fp8_triton(inputs, **options), quantize_fp8_torch(inputs, **options)
        differ = (got.values.float() != want.values.float()).float().mean().item()
        far = (got.dequantize(torch.float32) - want.dequantize(torch.float32)).norm() / want.values.float().norm()
        right[name] = [round(differ, 5), bool(torch.allclose(got.scales, want.scales, rtol=1e-5)), far.item()]
    rows = quantize_fp8_triton(x)
    codes = (torch.randn(200, 272, device=DEVICE) * 64).to(torch.float8_e4m3fn)
    bias = torch.randn(200, device=DEVICE).bfloat16()
    for name, scales, shared in (("rows", torch.rand(200, 1), (0, 1)), ("blocks", torch.rand(2, 3), (128, 128))):
        weight = quantized_weight("fp8", codes, scales.to(DEVICE), group_size=shared[0], scale_rows=shared[1])
        want = fp8_w8a8_gemm_torch(rows, weight, bias, dtype=torch.float32)
        for tile in (T(64, 128, 128, 8, 3, 2, swap=True), T(64, 128, 128, 8, 3, 1)):
            got = fp8_w8a8_gemm_triton(rows, weight, bias, dtype=torch.float32, tiling=tile)
            right[f"{name} {tile.swap}"] = ((got - want).norm() / want.norm()).item()
    report(op="check", **right)


def compile_one(job: tuple[bool]) -> None:
    """Fill the compile cache from a process of its own."""
    tile, has_residual = job
    product = Product("", 1024, 512)
    residual = torch.zeros(tile.block_m, product.size_out, device=DEVICE).bfloat16() if has_residual else None
    x = quantize_fp8_triton(torch.randn(tile.block_m, product.size_in, device=DEVICE).bfloat16())
    try:
        fp8_w8a8_gemm_triton(x, draw(product), residual=residual, tiling=tile)
    except Exception as error:
        report(op="failed", tile=tuple(tile), error=f"{error!r:.300}")


def report(**fields: Any) -> None:
    print(json.dumps(fields), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=MODELS, default=["llama-3.1-8b"])
    parser.add_argument("--experts", action="store_true", help="mixtures instead")
    parser.add_argument("--rows", type=int, nargs="+", default=[8, 64, 128, 256, 512, 1024, 2048, 8192])
    args = parser.parse_args()
    if args.experts:
        for rows in args.rows:
            own = fp8_experts.moe_fp8_tile
            few = [Tile(16, 64, 128, 4, 6), Tile(16, 64, 128, 4, 3), Tile(16, 64, 256, 4, 3), Tile(16, 128, 128, 4, 4)]
            many = [Tile(64, 128, 128, 8, 3), Tile(128, 128, 128, 8, 3), Tile(64, 64, 128, 4, 4)]
            expert_times(rows, [None] if INTERPRETED else [None, *(few if rows <= 256 else many)])
            fp8_experts.moe_fp8_tile = own
        return
    if not INTERPRETED:
        jobs = [*dict.fromkeys(itertools.product((t for n in args.rows for t in candidates(n)), (False, True)))]
        with ProcessPoolExecutor(min(os.cpu_count() or 1, 15), mp_context=get_context("fork")) as executor:
            list(executor.map(compile_one, jobs))
    check()
    for model in args.models:
        for rows in args.rows:
            us_of = {}
            for product in products(model)[:4]:
                copies = max(2, math.ceil(2e8 / product.size_out / product.size_in)) if not INTERPRETED else 1
                us_of[product.form] = product_times(product, rows, copies)
            chain_times(model, rows, us_of)


if __name__ == "__main__":
    main()
