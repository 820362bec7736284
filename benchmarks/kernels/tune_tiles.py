"""Products of several rows with int8 and 4-bit weights on a GPU: tiles of each way to compute them, and chains.

    python -m benchmarks.kernels.tune_tiles --forms int4 int8 --rows 16 64 128 256
    TRITON_INTERPRET=1 python -m benchmarks.kernels.tune_tiles --model tiny --rows 20  # on a CPU, without meaning

Prints a JSON line for each product with its time by each tiling, in microseconds, and the error against float64. The
ways are: rows as limbs (`int_wna16_gemm`), weights dequantized in registers (`w4a16_gemm`), a dense copy made anew,
and bfloat16. Then it prints one for a whole layer except attention, as one CUDA graph over different weights, with the
tree's choices.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import os
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from typing import Any

import torch
import torch.nn.functional as F

from benchmarks.kernels.tune_fp8 import DEVICE, timed
from benchmarks.kernels.tune_linear import MODELS, Product, products
from benchmarks.kernels.tune_quantized import FORMS, NF4
from runtime.kernels.linear.fused_linear import FusedLinear
from runtime.kernels.linear.linear_torch import Linear
from runtime.kernels.linear.tiles import Tiling as T
from runtime.kernels.quantized.activations import quantize_int16_triton
from runtime.kernels.quantized.int_wna16_gemm import has_int_wna16_gemm, int_wna16_gemm_triton
from runtime.kernels.quantized.quantized_linear import Int16Linear, QuantizedLinear
from runtime.kernels.quantized.quantized_weight import QuantizedWeight, dequantize_torch, quantized_weight
from runtime.kernels.quantized.upcast import E2M1
from runtime.kernels.quantized.w4a16_gemm import has_w4a16_gemm, w4a16_gemm_triton
from runtime.kernels.quantized.weight_conversions import dequantize_triton
from runtime.kernels.triton_language import INTERPRETED

LAYERS = 4  # of a chain


def draw(name: str, product: Product) -> QuantizedWeight:
    form, (size_out, size_in) = FORMS[name], (product.size_out, product.size_in)
    if form.code == "int8":
        codes = torch.randint(-127, 128, (size_out, size_in), dtype=torch.int8, device=DEVICE)
    else:
        codes = torch.randint(0, 256, (size_out, size_in // 2), dtype=torch.uint8, device=DEVICE)
    scales = torch.rand(size_out, size_in // form.group if form.group else 1, device=DEVICE) * 1e-3 + 1e-3
    minimums, table = scales * 8 if form.minimums else None, {"table": NF4, "e2m1": E2M1}.get(form.code, ())
    return quantized_weight(form.code, codes, scales, minimums, group_size=form.group, table=table)


def candidates(way: str, rows: int) -> list[T]:
    """Tiles worth trying."""
    block_m = 16 if rows <= 16 else 32 if rows <= 32 else 64
    if INTERPRETED:
        return [T(block_m, 64, 64, 4, 2)]
    splits = (1, 2, 4)
    if rows <= 64:
        shapes = [
            (64, 128, 4, 3),
            (64, 128, 4, 4),
            (64, 128, 4, 6),
            (64, 256, 4, 3),
            (128, 128, 8, 4),
            (128, 128, 4, 4),
        ]
        return [T(block_m, *shape, split) for shape in shapes for split in splits]
    tiles = [T(128, 128, 128, 8, stages, split) for stages in (2, 3, 4) for split in splits]
    tiles += [T(64, 64, 128, 4, 4, split) for split in splits] + [T(64, 128, 128, 8, 4, split) for split in splits]
    tiles += [T(128, 64, 128, 4, 3, split) for split in splits]
    if way == "decoded" and rows > 128:
        tiles += [T(256, 128, 128, 8, 3, split) for split in splits]
    return tiles


def ways_of(weight: QuantizedWeight, x: torch.Tensor) -> dict[str, Callable[..., torch.Tensor]]:
    """The kernels that multiply x with a weight of this form."""
    ways: dict[str, Callable[..., torch.Tensor]] = {}
    if has_int_wna16_gemm(weight):
        digits = quantize_int16_triton(x, group_size=0 if weight.zero_points is None else weight.group_size)
        ways["digits"] = lambda w, **options: int_wna16_gemm_triton(digits, w, **options)
    if has_w4a16_gemm(weight):
        ways["decoded"] = lambda w, **options: w4a16_gemm_triton(x, w, **options)
    return ways


def compile_one(job: tuple[str, str, T, bool]) -> None:
    """Fill the compile cache from a process of its own."""
    name, way, tiling, has_residual = job
    weight = draw(name, Product("", 1024, 1024))
    x = torch.randn(tiling.block_m, 1024, device=DEVICE).bfloat16()
    residual = torch.zeros_like(x) if has_residual else None
    try:
        if run := ways_of(weight, x).get(way):
            run(weight, residual=residual, tiling=tiling)
    except Exception as error:
        report(op="failed", form=name, way=way, tiling=tuple(tiling), error=f"{error!r:.200}")


def product_times(name: str, product: Product, weights: list[QuantizedWeight], rows: int) -> None:
    x = torch.randn(rows, product.size_in, device=DEVICE).to(torch.float16 if INTERPRETED else torch.bfloat16)
    residual = torch.zeros(rows, product.size_out, device=DEVICE, dtype=x.dtype)
    added = residual if product.form in ("out", "down") else None
    want = x.double() @ dequantize_torch(weights[0]).double().T
    dense = [dequantize_torch(weight).to(x.dtype) for weight in weights[:2]]
    us = {"bf16": timed(lambda: [F.linear(x, weight) for weight in dense])}
    us["dense copy"] = timed(lambda: [F.linear(x, dequantize_triton(weight, x.dtype)) for weight in weights])
    counts, errors = {"bf16": len(dense)}, set()
    for way, run in ways_of(weights[0], x).items():
        for tiling in candidates(way, rows):
            key = f"{way} {tuple(tiling)[:6]}"
            try:
                y = run(weights[0], residual=None if added is None else added.zero_(), tiling=tiling)
            except Exception as error:  # a candidate that does not fit does not stop the others
                us[key] = f"{error!r:.100}"
                continue
            errors.add(round(((y.double() - want).norm() / want.norm()).item(), 4))
            us[key] = timed(lambda t=tiling, r=run: [r(weight, residual=added, tiling=t) for weight in weights])
    times = {key: round(t / counts.get(key, len(weights)), 2) for key, t in us.items() if isinstance(t, float)}
    fastest = dict(sorted(times.items(), key=lambda item: item[1]))
    report(
        op="product", form=name, product=product.form, rows=rows, us=fastest, error=sorted(errors),
        failed={key: t for key, t in us.items() if isinstance(t, str)},
    )  # fmt: skip


def chain_times(name: str, weights: list[list[QuantizedWeight]], rows: int) -> None:
    hidden, attended = weights[0][0].shape[1], weights[0][1].shape[1]
    norm, x = torch.ones(hidden, device=DEVICE).bfloat16(), torch.randn(rows, hidden, device=DEVICE).bfloat16()
    attention = torch.randn(rows, attended, device=DEVICE).bfloat16()
    kind = Int16Linear if has_int_wna16_gemm(weights[0][0]) else lambda *args: QuantizedLinear(*args, False)
    makers: dict[str, Callable[[QuantizedWeight], Linear]] = {
        "codes": lambda w: kind(w, None, "silu"),
        "bf16": lambda w: FusedLinear(torch.randn(w.shape, device=DEVICE).bfloat16(), None, "silu", False),
    }
    us = {}
    for way, make in makers.items():
        layers = [[make(weight) for weight in layer] for layer in weights]

        def step(layers: list[list[Linear]] = layers) -> None:
            for qkv, out, gate_up, down in layers:
                qkv.normed(x, norm, 1e-5)
                out.add_to(x, attention)
                gate_up.gated_into(down, x, norm, 1e-5)

        time = timed(step, 0.05)
        us[way] = round(time / LAYERS, 1) if isinstance(time, float) else time
    report(op="chain", form=name, rows=rows, us=us)


def report(**fields: Any) -> None:
    print(json.dumps(fields), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=MODELS, default="llama-3.1-8b")
    parser.add_argument("--forms", nargs="+", choices=FORMS, default=["int4"])
    parser.add_argument("--rows", type=int, nargs="+", default=[16, 64, 128, 256])
    parser.add_argument("--chains", action="store_true", help="chains alone")
    args = parser.parse_args()
    if not (INTERPRETED or args.chains):
        tilings = dict.fromkeys(
            (way, t) for way in ("digits", "decoded") for n in args.rows for t in candidates(way, n)
        )
        jobs = [(name, *tiling, added) for name, tiling, added in itertools.product(args.forms, tilings, (False, True))]
        with ProcessPoolExecutor(min(os.cpu_count() or 1, 15), mp_context=get_context("fork")) as executor:
            list(executor.map(compile_one, jobs))
    shapes = products(args.model)[:4]
    for name in args.forms:
        for product in [] if args.chains else shapes:
            copies = 1 if INTERPRETED else max(2, math.ceil(2.5e8 / product.size_out / product.size_in))
            weights = [draw(name, product) for _ in range(copies)]
            for rows in args.rows:
                product_times(name, product, weights, rows)
        if not INTERPRETED:
            layers = [[draw(name, product) for product in shapes] for _ in range(LAYERS)]
            for rows in args.rows:
                chain_times(name, layers, rows)


if __name__ == "__main__":
    main()
