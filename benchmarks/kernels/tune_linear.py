"""Linear layers on a GPU: finds launch configurations, and times all products of a model's decode step in a row.

    python -m benchmarks.kernels.tune_linear tune 1 8 16  # writes kernels/linear/skinny_gemm_configs.py
    python -m benchmarks.kernels.tune_linear chain 1 2 4  # whole models with the table as it is, against cuBLAS

Everything is timed as one CUDA graph over different weights. So none is still in the cache, and each kernel's start
overlaps with its predecessor's end as in a step. One JSON line a measurement.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import math
import os
import statistics
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from tqdm import tqdm
from triton.runtime.errors import OutOfResources

from runtime.kernels.linear import skinny_gemm_configs
from runtime.kernels.linear.batch_invariant_linear import batch_invariant_linear_triton
from runtime.kernels.linear.skinny_gemm import MAX_ROWS, skinny_gemm_config, skinny_gemm_triton
from runtime.kernels.linear.skinny_gemm_configs import SKINNY_GEMM_CONFIGS, SkinnyGemmConfig
from runtime.kernels.linear.sum_order import sum_order


class Product(NamedTuple):
    form: str  # qkv | out | gate_up | down | router | head
    size_out: int
    size_in: int


class Model(NamedTuple):
    layers: int
    layer: list[Product]
    head: Product


def _model(
    layers: int, hidden: int, into: int, query: int, vocab: int, ffn: int = 0, experts: int = 0, rank: int = 0
) -> Model:
    """A model with `into` rows of q, k and v; with `rank`, q comes from a latent. Experts are not products here."""
    up = [Product("qkv", query, rank)] if rank else []
    more = [Product("router", experts, hidden)]
    if ffn:
        more = [Product("gate_up", 2 * ffn, hidden), Product("down", hidden, ffn)]
    layer = [Product("qkv", into, hidden), *up, Product("out", hidden, query), *more]
    return Model(layers, layer, Product("head", vocab, hidden))


MODELS = {
    "llama-3.2-1b": _model(16, 2048, 3072, 2048, 128256, ffn=8192),
    "llama-3.2-3b": _model(28, 3072, 5120, 3072, 128256, ffn=8192),
    "llama-3.1-8b": _model(32, 4096, 6144, 4096, 128256, ffn=14336),
    "qwen3-4b": _model(36, 2560, 6144, 4096, 151936, ffn=9728),
    "qwen3-30b-a3b": _model(48, 2048, 5120, 4096, 151936, experts=128),
    "gpt-oss-20b": _model(24, 2880, 5120, 4096, 201088, experts=32),
    "glm-4.7-flash": _model(47, 2048, 1344, 5120, 154880, experts=64, rank=768),
}


def products(model: str) -> list[Product]:
    """All products of one decode step, in order."""
    layers, layer, head = MODELS[model]
    return [*layer * layers, head]


def weights(shapes: list[Product], pool: torch.Tensor) -> list[torch.Tensor]:
    """Consecutive views of the pool, from its start again when it is used up."""
    views, at = [], 0
    for _, size_out, size_in in shapes:
        if at + size_out * size_in > pool.numel():
            at = 0
        views.append(pool[at : at + size_out * size_in].view(size_out, size_in))
        at += size_out * size_in
    return views


def run_few(
    product: Product, x: torch.Tensor, weight: torch.Tensor, residual: torch.Tensor, fixed_order: bool = False
) -> torch.Tensor:
    """As the decoder uses it: norm before, activation or residual after."""
    run = partial(skinny_gemm_triton, x, weight, fixed_order=fixed_order)
    match product.form:
        case "out" | "down":
            return run(residual=residual)
        case "gate_up":
            return run(norm_weight=x[0], eps=1e-5, activation="silu")
        case "head":
            return run(norm_weight=x[0], eps=1e-5, out_dtype=torch.float32)
    return run(norm_weight=x[0], eps=1e-5)


def run_fixed(product: Product, x: torch.Tensor, weight: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
    if len(x) <= MAX_ROWS:
        return run_few(product, x, weight, residual, fixed_order=True)
    return batch_invariant_linear_triton(x, weight)


def run_cublas(product: Product, x: torch.Tensor, weight: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
    if product.form == "head" and len(x) > 1:
        return torch.mm(x, weight.T, out_dtype=torch.float32)
    return F.linear(x, weight)


def graph_us(run: Callable[[], Any], warm_up: float, times: int = 7, replays: int = 5) -> float:
    """Median microseconds of a replay among several in a row, so that the host's start of a graph does not count.

    Replays for `warm_up` seconds come first, because an idle card has low clocks."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    start = time.perf_counter()
    while time.perf_counter() - start < warm_up:
        graph.replay()
        torch.cuda.synchronize()
    seen = []
    for _ in range(times):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        graph.replay()  # the start of the first is not timed
        start.record()
        for _ in range(replays):
            graph.replay()
        end.record()
        end.synchronize()
        seen.append(start.elapsed_time(end) * 1e3 / replays)
    return statistics.median(seen)


def time_products(run: Callable, shapes: list[Product], rows: int, pool: torch.Tensor, warm_up: float = 0.4) -> float:
    """Microseconds of the products in a row."""
    sizes = {p.size_in for p in shapes}
    inputs = {size: torch.randn(rows, size, device="cuda").bfloat16() for size in sizes}
    residuals = {p.size_out: torch.zeros(rows, p.size_out, device="cuda").bfloat16() for p in shapes}
    pairs = list(zip(shapes, weights(shapes, pool), strict=True))
    return graph_us(lambda: [run(p, inputs[p.size_in], w, residuals[p.size_out]) for p, w in pairs], warm_up)


def candidates(product: Product, rows: int) -> list[SkinnyGemmConfig]:
    """The candidates for one product."""
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
    configs = [SkinnyGemmConfig(*tile) for tile in tiles[num_chunks]]
    return [config for config in configs if chunk % config.block_k == 0]


def compile_one(job: tuple[Product, int, SkinnyGemmConfig]) -> None:
    """Fill the compile cache from a process of its own."""
    product, rows, config = job
    SKINNY_GEMM_CONFIGS[product.size_out, product.size_in, bucket(rows)] = config
    x, residual = (torch.zeros(rows, n, device="cuda").bfloat16() for n in (product.size_in, product.size_out))
    weight = torch.empty(product.size_out, product.size_in, device="cuda", dtype=torch.bfloat16)
    with contextlib.suppress(OutOfResources):
        run_few(product, x, weight, residual)


def compile_all(jobs: list[tuple[Product, int, SkinnyGemmConfig]]) -> None:
    """Must run before this process uses the GPU: forked children cannot share it."""
    with ProcessPoolExecutor(min(os.cpu_count() or 1, 15), mp_context=get_context("fork")) as executor:
        list(tqdm(executor.map(compile_one, jobs, chunksize=2), total=len(jobs), desc="compile"))


def tune(model: str, rows: int, pool: torch.Tensor, layers: int = 8) -> None:
    """Try one product's configurations after the other's within a row of layers, twice; the best ones stay in
    SKINNY_GEMM_CONFIGS.

    A kernel's best form depends on its neighbours, because its start and end overlap with theirs."""
    shapes = [*MODELS[model].layer * layers, MODELS[model].head]
    best = math.inf
    for product in [*dict.fromkeys(shapes)] * 2:
        key = (product.size_out, product.size_in, bucket(rows))
        chosen = skinny_gemm_config(product.size_out, product.size_in, rows)
        for config in candidates(product, rows):
            SKINNY_GEMM_CONFIGS[key] = config
            try:
                us = time_products(run_few, shapes, rows, pool, warm_up=0.01)
            except OutOfResources:
                continue
            if us < best:
                best, chosen = us, config
        SKINNY_GEMM_CONFIGS[key] = chosen
        report(op="tune", model=model, rows=rows, form=product.form, config=chosen, us=round(best, 1))


def chains(models: list[str], rows: list[int], forms: dict[str, Callable], pool: torch.Tensor) -> None:
    """Whole models."""
    for model, num_rows, (name, run) in itertools.product(models, rows, forms.items()):
        us = time_products(run, products(model), num_rows, pool)
        size = 2 * sum(p.size_out * p.size_in for p in products(model))
        report(op="chain", model=model, rows=num_rows, by=name, us=round(us, 1), tbps=round(size / us / 1e6, 3))


def report(**fields: Any) -> None:
    print(json.dumps(fields), flush=True)


def bucket(rows: int) -> int:
    return next(n for n in (1, 8, 16) if rows <= n)


def write_table() -> None:
    """SKINNY_GEMM_CONFIGS into runtime/kernels/linear/skinny_gemm_configs.py."""
    path = Path(skinny_gemm_configs.__file__)
    head = path.read_text().split("SKINNY_GEMM_CONFIGS: ")[0]
    lines = [f"    {key}: SkinnyGemmConfig{tuple(config)},\n" for key, config in sorted(SKINNY_GEMM_CONFIGS.items())]
    lines = [
        "SKINNY_GEMM_CONFIGS: dict[tuple[int, int, int], SkinnyGemmConfig] = {  # (N, K, most rows)\n",
        *lines,
        "}\n",
    ]
    path.write_text(head + "".join(lines))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("command", choices=["tune", "chain"])
    parser.add_argument("rows", type=int, nargs="+")
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    args = parser.parse_args()
    if args.command == "tune":
        shapes = {p for m in args.models for p in products(m)}
        compile_all([(p, r, c) for p in shapes for r in args.rows for c in candidates(p, r)])
    most = max(sum(p.size_out * p.size_in for p in products(m)) for m in args.models)
    pool = torch.randn(most, device="cuda", dtype=torch.bfloat16) * 0.02
    if args.command == "tune":
        for model, rows in itertools.product(args.models, args.rows):
            tune(model, rows, pool)
        write_table()
    chains(args.models, args.rows, {"few": run_few, "fixed": run_fixed, "cublas": run_cublas}, pool)


if __name__ == "__main__":
    main()
