"""Linear layers with quantized weights on a GPU: all products of a model's decode step in a row, for each form.

    python -m benchmarks.kernels.tune_quantized --forms int4 fp8 --rows 1 8 64 --models llama-3.1-8b
    TRITON_INTERPRET=1 python -m benchmarks.kernels.tune_quantized --models tiny  # on a CPU, without times

Compiles every candidate in processes side by side. Checks each format's products against the torch reference and
against themselves (the same bits for every number of rows). Then it times chains as one CUDA graph over different
weights: each candidate for all products, and after that product by product with the best. One JSON line a measurement;
`floor` is the share of the memory speed that the bf16 chain reaches.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import os
import random
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from typing import Any, NamedTuple

import torch

from benchmarks.kernels.tune_linear import MODELS, Product, graph_us, products
from runtime.kernels.linear.skinny_gemm import MAX_ROWS
from runtime.kernels.quantized.launch_configs import (
    GemvConfig,
    Tiling,
    Wna16SkinnyConfig,
    wna16_sum_order,
)
from runtime.kernels.quantized.quantized_weight import QuantizedWeight, dequantize_torch
from runtime.kernels.quantized.upcast import E2M1
from runtime.kernels.quantized.wna16_gemm import wna16_gemm_triton
from runtime.kernels.quantized.wna16_gemv import GEMV_ENCODINGS
from runtime.kernels.quantized.wna16_skinny_gemm import wna16_skinny_gemm_triton
from runtime.kernels.triton_language import INTERPRETED

MEMORY_TBPS = 4.44
LAYERS = 8  # that candidates are compared over
DEVICE = "cpu" if INTERPRETED else "cuda"
NF4 = (-1.0, -0.6961928, -0.52507305, -0.39491749, -0.28444138, -0.18477343, -0.09105004, 0.0, 0.0795803, 0.1609302,
       0.2461123, 0.33791524, 0.44070983, 0.562617, 0.72295684, 1.0)  # fmt: skip
MODELS["tiny"] = (1, 128, 128, 64, 256, 320)


class Form(NamedTuple):
    code: str
    group: int
    scale_rows: int = 1
    minimums: bool = False


FORMS = {
    "fp8": Form("fp8", 0),
    "fp8-block": Form("fp8", 128, 128),
    "int8": Form("int8", 0),
    "int8-g128": Form("int8", 128),
    "int4": Form("int4", 128),
    "int4-g32": Form("int4", 32),
    "int4-minimums": Form("uint4", 128, 1, True),
    "nf4": Form("table", 64),
    "mxfp4": Form("e2m1", 32),
    "nvfp4": Form("e2m1", 16),
}
Config = Wna16SkinnyConfig | Tiling | GemvConfig | None  # None for the rule's


def candidates(form: Form, rows: int, num_chunks: int) -> list[Config]:
    """The configurations to try for a weight with columns that are summed in `num_chunks` chunks."""
    if rows > MAX_ROWS:
        t, split = Tiling, num_chunks if rows <= 64 else 1
        wide: list[Config] = [t(64, 128, 128, 8, 3, split), t(64, 64, 128, 4, 5, split), t(64, 64, 128, 4, 4, split)]
        if rows > 64:
            wide = [t(64, 128, 128, 8, 3), t(64, 64, 128, 4, 4)]
        return [None, *wide, t(32, 32, 128, 2, 5, split)]
    c, found = Wna16SkinnyConfig, list[Config]()
    for block_n, warps in ((16, num_chunks // 2), (16, num_chunks), (32, num_chunks)):
        found += [c(block_n, 128, max(warps, 1), stages, ahead, unroll=unroll)
                  for stages, ahead, unroll in ((3, 1, 1), (5, 2, 1), (3, 2, 2))]  # fmt: skip
    if rows == 1 and form.code in GEMV_ENCODINGS:
        found += [GemvConfig(4, 4, 2), GemvConfig(4, 4, 4), GemvConfig(8, 4, 1), GemvConfig(8, 4, 4),
                  GemvConfig(8, 2, 2), GemvConfig(4, 8, 2), GemvConfig(8, 8, 2)]  # fmt: skip
    return [None, *found]


def weight_of(form: Form, size_out: int, size_in: int, codes: torch.Tensor, scales: torch.Tensor) -> QuantizedWeight:
    """A weight with tensors that are views of the start of two pools, bytes and float32."""
    row_bytes = size_in if form.code in ("fp8", "int8") else size_in // 2
    dtype = {"fp8": torch.float8_e4m3fn, "int8": torch.int8}.get(form.code, torch.uint8)
    groups = -(-size_in // form.group) if form.group else 1
    stride = -(-size_out // form.scale_rows // 4) * 4
    stride += 32 if stride % 128 == 0 else 0
    shared = scales[: groups * stride].view(groups, stride)
    table = {"table": NF4, "e2m1": E2M1}.get(form.code, ())
    return QuantizedWeight(
        (size_out, size_in), form.code, codes[: size_out * row_bytes].view(size_out, row_bytes).view(dtype), shared,
        shared if form.minimums else None, form.group, form.scale_rows, table,
    )  # fmt: skip


def weights_of(form: Form, shapes: list[Product], codes: torch.Tensor, scales: torch.Tensor) -> list[QuantizedWeight]:
    """Consecutive views of the pools, from their starts again when they are used up."""
    made, at, scale_at = [], 0, 0
    for _, size_out, size_in in shapes:
        # A weight's bytes and scales at most; all start at multiples of 256 bytes.
        size, scale_size = size_out * (size_in + 128), (size_out + 64) * (size_in // (form.group or size_in) + 1)
        at, scale_at = (
            (0 if at + size > codes.numel() else at),
            (0 if scale_at + scale_size > scales.numel() else scale_at),
        )
        made.append(weight_of(form, size_out, size_in, codes[at:], scales[scale_at:]))
        at, scale_at = at + -(-made[-1].values.nbytes // 256) * 256, scale_at + -(-made[-1].scales.numel() // 64) * 64
    return made


def run(p: Product, x: torch.Tensor, weight: QuantizedWeight, residual: torch.Tensor, config: Config) -> torch.Tensor:
    """As a decoder uses it: norm before, activation or residual after; of more rows the bare product."""
    if len(x) > MAX_ROWS:
        tiling = config if isinstance(config, Tiling) else None
        return wna16_gemm_triton(x, weight, tiling=tiling, residual=residual if p.form in ("out", "down") else None)
    few = None if isinstance(config, Tiling) else config
    options: dict[str, Any] = {"norm_weight": x[0], "eps": 1e-5}
    match p.form:
        case "out" | "down":
            options = {"residual": residual}
        case "gate_up":
            options["activation"] = "silu"
        case "head":
            options["out_dtype"] = torch.float32
    return wna16_skinny_gemm_triton(x, weight, config=few, **options)


def dtype() -> torch.dtype:
    return torch.float32 if INTERPRETED else torch.bfloat16


def compile_one(job: tuple[Form, Product, int, Config]) -> str:
    """Fill the compile cache from a process of its own."""
    form, p, rows, config = job
    row_bytes = p.size_in + 128
    codes = torch.empty(p.size_out * row_bytes, dtype=torch.uint8, device=DEVICE)
    scales = torch.empty((p.size_out + 64) * (p.size_in // (form.group or p.size_in) + 1), device=DEVICE)
    x, residual = (torch.zeros(rows, n, device=DEVICE, dtype=dtype()) for n in (p.size_in, p.size_out))
    try:
        run(p, x, weight_of(form, p.size_out, p.size_in, codes, scales), residual, config)
    except Exception as error:  # a candidate that does not fit does not stop the others
        return f"{form} {p} {rows} {config}: {error!r:.200}"
    return ""


def compile_all(jobs: list[tuple[Form, Product, int, Config]]) -> None:
    """Must run before this process uses the GPU: forked children cannot share it."""
    start = time.perf_counter()
    random.shuffle(jobs)  # the kernels of one product may take seconds: spread them over the processes
    with ProcessPoolExecutor(min(os.cpu_count() or 1, 15), mp_context=get_context("fork")) as executor:
        errors = [error for error in executor.map(compile_one, jobs, chunksize=1) if error]
    for error in errors:
        report(op="failed", error=error)
    report(op="compiled", jobs=len(jobs), failed=len(errors), seconds=round(time.perf_counter() - start, 1))


def check(name: str, form: Form, shapes: list[Product], rows: list[int], codes: Any, scales: Any) -> None:
    """Every distinct product against float32 of the same numbers, and the bits of a row against those among others."""
    for p in dict.fromkeys(shapes):
        weight = weight_of(form, p.size_out, p.size_in, codes, scales)
        x = torch.randn(max(*rows, 17), p.size_in, device=DEVICE, dtype=dtype())
        want, errors, same = x.float() @ dequantize_torch(weight).t(), {}, {}
        reference = wna16_skinny_gemm_triton(x[:16], weight, out_dtype=torch.float32, fixed_order=True)
        for n in sorted({*rows, 16, 17}):
            if n <= MAX_ROWS:
                got = wna16_skinny_gemm_triton(x[:n], weight, out_dtype=torch.float32)
                fixed = wna16_skinny_gemm_triton(x[:n], weight, out_dtype=torch.float32, fixed_order=True)
            else:
                got = wna16_gemm_triton(x[:n], weight, out_dtype=torch.float32)
                fixed = wna16_gemm_triton(x[:n], weight, out_dtype=torch.float32, fixed_order=True)
            errors[n] = round(((got - want[:n]).norm() / want[:n].norm()).item(), 7)
            same[n] = torch.equal(fixed[:16], reference[:n])
        # fp8 sums the shortest pieces of one row in float16; everything else is in float32.
        right = all(error < (1e-3 if form.code == "fp8" and n == 1 else 2e-5) for n, error in errors.items())
        report(op="check", form=name, product=p, right=right, errors=errors, same_bits=same)


def time_chain(
    shapes: list[Product],
    weights: list[QuantizedWeight],
    rows: int,
    choice: Callable[[Product], Config],
    warm_up: float,
) -> float:
    """Microseconds of the products in a row; infinite if one cannot run."""
    inputs = {p.size_in: torch.randn(rows, p.size_in, device=DEVICE, dtype=dtype()) for p in shapes}
    residuals = {p.size_out: torch.zeros(rows, p.size_out, device=DEVICE, dtype=dtype()) for p in shapes}
    pairs = list(zip(shapes, weights, strict=True))

    def step() -> None:
        for p, weight in pairs:
            run(p, inputs[p.size_in], weight, residuals[p.size_out], choice(p))

    if INTERPRETED:
        start = time.perf_counter()
        step()
        return (time.perf_counter() - start) * 1e6
    try:
        return round(graph_us(step, warm_up), 1)
    except Exception as error:  # a candidate that does not fit does not stop the others
        report(op="failed", rows=rows, choices=[str(choice(p)) for p in dict.fromkeys(shapes)], error=f"{error!r:.300}")
        return math.inf


def measure(
    model: str, name: str, form: Form, rows: int, codes: torch.Tensor, scales: torch.Tensor, tune: bool
) -> None:
    """Chains of one format and number of rows: candidates over a few layers, the best of them over all."""
    shapes = products(model)
    weights = weights_of(form, shapes, codes, scales)
    few = [*range(min(len(shapes) - 1, 4 * LAYERS)), len(shapes) - 1]
    few_shapes, few_weights = [shapes[i] for i in few], [weights[i] for i in few]
    size = sum(weight.nbytes for weight in weights)
    fields = {"model": model, "form": name, "rows": rows}

    def result(us: float) -> dict[str, Any]:
        tbps = size / us / 1e6
        return (
            {"us": round(us, 1), "tbps": round(tbps, 3), "floor": round(tbps / MEMORY_TBPS, 3)} if us < math.inf else {}
        )

    of_chunks = {n: candidates(form, rows, n) if tune else [None] for n in (1, 2, 4, 8)}
    chosen: dict[Product, Config] = {}
    best = math.inf
    for i in range(max(map(len, of_chunks.values()))):
        choices = {p: of_chunks[chunks_of(p)][min(i, len(of_chunks[chunks_of(p)]) - 1)] for p in shapes}
        us = time_chain(few_shapes, few_weights, rows, choices.__getitem__, 0.05)
        report(
            op="candidate",
            **fields,
            configs=sorted({str(tuple(c or ())) for c in choices.values()}),
            us=us if us < math.inf else None,
        )
        if us < best:
            best, chosen = us, choices
    for p in dict.fromkeys(shapes):
        for config in of_chunks[chunks_of(p)]:
            if chosen and config != chosen[p]:
                us = time_chain(few_shapes, few_weights, rows, lambda q: config if q == p else chosen[q], 0.01)  # noqa: B023
                if us < best * 0.997:
                    best, chosen = us, chosen | {p: config}
    if chosen:
        best = time_chain(shapes, weights, rows, chosen.__getitem__, 0.4)
    configs = {f"{p.form} {p.size_out}x{p.size_in}": tuple(config or ()) for p, config in chosen.items()}
    report(op="chain", **fields, gigabytes=round(size / 1e9, 3), **result(best), configs=configs)


def chunks_of(p: Product) -> int:
    return wna16_sum_order(p.size_out, p.size_in).num_chunks


def report(**fields: Any) -> None:
    print(json.dumps(fields), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--forms", nargs="+", choices=FORMS, default=["int4", "fp8", "int8"])
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8, 16, 64, 256])
    parser.add_argument("--models", nargs="+", choices=MODELS, default=["llama-3.1-8b", "llama-3.2-1b"])
    parser.add_argument("--rules", dest="tune", action="store_false", help="only the configurations of serving")
    args = parser.parse_args()
    shapes = [p for model in args.models for p in products(model)]
    jobs = [
        (FORMS[name], p, rows, config)
        for name, rows, p in itertools.product(args.forms, args.rows, dict.fromkeys(shapes))
        for config in (candidates(FORMS[name], rows, chunks_of(p)) if args.tune else [None])
    ]
    if not INTERPRETED:
        compile_all(jobs)
    # As many bytes as the largest model's fp8: weights of 4 bits use half of them.
    most = max(sum(p.size_out * p.size_in for p in products(model)) for model in args.models) + (1 << 24)
    codes = torch.randint(256, (most,), dtype=torch.uint8, device=DEVICE)
    codes.masked_fill_((codes & 127).eq(127), 1)  # fp8's NaN
    scales = torch.rand(max(most // 16, 1 << 20), device=DEVICE) * 0.01
    for name in args.forms:
        check(name, FORMS[name], shapes, args.rows, codes, scales)
        for model, rows in itertools.product(args.models, args.rows):
            measure(model, name, FORMS[name], rows, codes, scales, args.tune)


if __name__ == "__main__":
    main()
