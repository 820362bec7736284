"""Mixtures of experts on a GPU: the time of a layer for each form of weights, and its share of the bytes' floor.

    python -m benchmarks.kernels.experts --shapes qwen3-30b-a3b --forms bf16 int4 mxfp4 --rows 1 64 256
    python -m benchmarks.kernels.experts --forms mxfp4 --rows 64 --tiles 8,64,2,4 16,64,2,4
    python -m benchmarks.kernels.experts --shapes glm-4.7-flash --forms bf16 --rows 1 --tiles 4,1024,4,2+4,512,2,2
    TRITON_INTERPRET=1 python -m benchmarks.kernels.experts --shapes tiny  # on a CPU, without times

A layer is norm, router, routing and both products. A CUDA graph has several layers with routers of their own, so that
the cache holds no weights. The floor is the time to read the chosen experts once at the measured memory speed.
`--check` compares results with dense weights. Kernels are compiled in processes side by side. One JSON line a
measurement.
"""

from __future__ import annotations

import argparse
import copy
import json
import os
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from functools import partial
from multiprocessing import get_context
from typing import Any, NamedTuple

import torch

from benchmarks.kernels.compile_ahead import compile_only
from benchmarks.kernels.tune_linear import graph_us
from benchmarks.kernels.tune_quantized import FORMS, NF4
from runtime.base.model.decoder_spec import ExpertsSpec
from runtime.kernels.experts import moe_few_w16a16, moe_wna16
from runtime.kernels.experts.moe_fp8_w8a8 import Fp8Experts, has_fp8_moe
from runtime.kernels.experts.moe_routing import Tile
from runtime.kernels.experts.moe_torch import Router
from runtime.kernels.experts.moe_w16a16 import GroupedExperts
from runtime.kernels.experts.moe_wna16_words import STEP
from runtime.kernels.linear.fused_linear import FusedLinear
from runtime.kernels.linear.skinny_gemm_configs import SkinnyGemmConfig
from runtime.kernels.quantized.quantized_weight import QuantizedWeight, dequantize_torch, quantized_weight
from runtime.kernels.quantized.upcast import E2M1
from runtime.kernels.triton_language import INTERPRETED

READ_TBPS = 4.45  # the measured read speed of an H200
LAYERS = 1 if INTERPRETED else 4
DEVICE = "cpu" if INTERPRETED else "cuda"
DTYPE = torch.float32 if INTERPRETED else torch.bfloat16
BITS = {"bf16": 16, "int8": 8, "fp8": 8, "int4": 4.125, "int4-g32": 4.5, "nf4": 4.25, "mxfp4": 4.25, "nvfp4": 4.5}


class Shape(NamedTuple):
    hidden: int
    ffn: int
    experts: int
    chosen: int
    shared: int = 0


SHAPES = {
    "qwen3-30b-a3b": Shape(2048, 768, 128, 8),
    "gpt-oss-20b": Shape(2880, 2880, 32, 4),
    "gpt-oss-120b": Shape(2880, 2880, 128, 4),
    "glm-4.5-air": Shape(4096, 1408, 128, 8),
    "glm-4.7-flash": Shape(2048, 1536, 64, 4, 1),
    "tiny": Shape(128, 128, 4, 2),
}


def weight_of(form: str, size_out: int, size_in: int, device: str) -> QuantizedWeight:
    """A random weight. Products have about the size of their inputs."""
    code, group, scale_rows, _ = FORMS[form]
    is_packed = code not in ("fp8", "int8")
    shape = size_out, size_in // 2 if is_packed else size_in
    if code == "fp8":
        values = torch.randn(shape, device=device).mul_(64).to(torch.float8_e4m3fn)
    else:
        values = torch.randint(0, 256, shape, dtype=torch.uint8, device=device)
        values = values if is_packed else values.view(torch.int8)
    size = {"fp8": 64, "int8": 74, "int4": 4.6, "e2m1": 2.9, "table": 0.6}[code]
    scales = torch.rand((-(-size_out // scale_rows), -(-size_in // group) if group else 1), device=device) + 0.5
    if form == "mxfp4":
        scales = torch.exp2(torch.round(scales))
        size *= 1.5
    return quantized_weight(
        code, values, scales.div_(size * size_in**0.5).bfloat16().float() if form != "mxfp4" else scales * 2.0**-8,
        group_size=group, scale_rows=scale_rows, table={"table": NF4, "e2m1": E2M1}.get(code, ()),
    )  # fmt: skip


def mixtures(shape: Shape, form: str, dense: bool, device: str, deterministic: bool = False) -> list[list[Any]]:
    """Layers with the same weights and routers of their own; then the same with dense copies of the weights.

    Dense layers have shared experts of their own, as the cache would hold those."""
    more = LAYERS - 1 if form == "bf16" and shape.shared else 0  # experts
    spec = ExpertsSpec(shape.experts, shape.chosen, True, shape.shared)
    stored = replace(spec, num_experts=shape.experts + more)
    sizes = (2 * shape.ffn, shape.hidden), (shape.hidden, shape.ffn)
    copies: list[tuple[torch.Tensor, ...]] = []

    def pairs() -> Iterator[tuple[Any, ...]]:
        for _ in range(stored.all_experts):
            if form == "bf16":
                yield tuple(torch.randn(s, device=device, dtype=DTYPE) / s[1] ** 0.5 for s in sizes)
                continue
            pair = tuple(weight_of(form, *s, device) for s in sizes)
            if dense:
                copies.append(tuple(dequantize_torch(w, DTYPE) for w in pair))
            yield pair
            if device == "meta":
                yield from [pair] * (spec.all_experts - 1)
                return

    def of(kind: Any, weights: Iterator[tuple[Any, ...]]) -> list[Any]:
        logits = [torch.randn(shape.experts, shape.hidden, device=device).to(DTYPE) for _ in range(LAYERS)]
        routers = [Router(FusedLinear(weight, None, "silu", deterministic)) for weight in logits]
        made = [kind(stored, router, weights, "silu", deterministic) for router in routers[:1]]
        for router in routers[1:]:
            made.append(copy.copy(made[0]))
            made[-1].router = router
        for first, layer in enumerate(made if more else ()):
            layer.spec, end = spec, first + spec.all_experts
            layer.gate_up, layer.down = layer.gate_up[first:end], layer.down[first:end]
        return made

    is_fp8 = form == "fp8" and has_fp8_moe(tuple(weight_of(form, *s, device) for s in sizes))
    kind = GroupedExperts if form == "bf16" else Fp8Experts if is_fp8 else moe_wna16.QuantizedExperts
    made = [of(kind, pairs())]
    if copies:
        made.append(of(GroupedExperts, iter(copies)))
        for layer, twin in zip(*made, strict=True):
            twin.router = layer.router
    return made


RULES = moe_wna16.moe_wna16_tile, moe_wna16.SINGLE_TILE, moe_few_w16a16.TILES


def choose(tile: str) -> None:
    """Use a tile as in `--tiles`, also for programs of one choice, or the rules ("")."""
    moe_wna16.moe_wna16_tile, moe_wna16.SINGLE_TILE, moe_few_w16a16.TILES = RULES
    if "+" in tile:
        both = (SkinnyGemmConfig(*map(int, part.split(","))) for part in tile.split("+"))
        moe_few_w16a16.TILES = moe_few_w16a16.FewTiles(*both)
    elif tile:
        block_m, block_n, warps, stages = map(int, tile.split(","))
        moe_wna16.SINGLE_TILE = Tile(block_m, block_n, STEP, warps, stages)
        moe_wna16.moe_wna16_tile = lambda *_: moe_wna16.SINGLE_TILE


def compile_one(job: tuple[str, str, str, list[int], bool]) -> str:
    """Fill the compile cache, without the GPU: tensors are without data."""
    shape, form, tile, rows, deterministic = job
    try:
        with compile_only():
            choose(tile)
            layer = mixtures(SHAPES[shape], form, False, "meta", deterministic)[0][0]
            for count in rows:
                x = torch.empty(count, SHAPES[shape].hidden, dtype=DTYPE, device="meta")
                layer.add_to(x, x[0], 1e-5)
    except Exception as error:
        return f"{job}: {error}"
    return ""


def step(layers: list[Any], x: torch.Tensor, out: torch.Tensor, norm: torch.Tensor) -> None:
    for layer in layers:
        layer.add_to(x, norm, 1e-5, out)


def tiles_of(tiles: list[str], rows: int) -> list[str]:
    """The tiles for a number of rows; a prefix such as "64/256:" limits a tile to these."""
    split = [tile.rpartition(":") for tile in tiles]
    return [tile for only, _, tile in split if not only or str(rows) in only.split("/")]


def tiles_of_form(tiles: list[str], form: str) -> list[str]:
    """The tiles for the kernels of a form; fp8 has only its rule."""
    return [tile for tile in tiles if not tile or (form != "fp8" and ("+" in tile) == (form == "bf16"))] or [""]


def result_of(layer: Any, x: torch.Tensor, norm: torch.Tensor) -> torch.Tensor:
    out = torch.zeros_like(x)
    layer.add_to(x, norm, 1e-5, out)
    return out


def measure(
    shape_name: str, form: str, rows: list[int], tiles: list[str], checked: bool, deterministic: bool
) -> Iterator[dict[str, Any]]:
    shape = SHAPES[shape_name]
    torch.manual_seed(0)
    layers, *twins = mixtures(shape, form, checked and form != "bf16", DEVICE, deterministic)
    norm = torch.ones(shape.hidden, device=DEVICE, dtype=DTYPE)
    alone = torch.randn(shape.hidden, device=DEVICE).to(DTYPE)
    alone_result = result_of(layers[0], alone[None], norm)[0]
    for count, tile in ((n, tile) for n in rows for tile in tiles_of(tiles, n)):
        choose(tile)
        x = torch.randn(count, shape.hidden, device=DEVICE).to(DTYPE)
        x[-1] = alone
        line: dict[str, Any] = {"op": "experts", "shape": shape_name, "form": form, "rows": count, "tile": tile}
        if deterministic:
            line["equal"] = torch.equal(alone_result, result_of(layers[0], x, norm)[-1])
        if twins:
            got, want = result_of(layers[0], x, norm).float(), result_of(twins[0][0], x, norm).float()
            far = (got - want).norm(dim=1) / want.norm(dim=1)
            line["error"] = [round(far.median().item(), 4), round(far.max().item(), 4)]
        if not INTERPRETED:
            us = graph_us(partial(step, layers, x, torch.empty_like(x), norm), 0.03) / LAYERS
            ids = [layer._route(layer.router.normed_logits(x, norm, 1e-5))[0] for layer in layers]
            active = sum(len(i.unique()) for i in ids) / LAYERS
            floor = active * 3 * shape.hidden * shape.ffn * BITS[form] / 8 / READ_TBPS / 1e6
            line |= {"us": round(us, 1), "floor_us": round(floor, 1), "share": round(floor / us, 3)}
        yield line


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", nargs="+", default=["qwen3-30b-a3b"], choices=SHAPES)
    parser.add_argument("--forms", nargs="+", default=["bf16", "int4", "mxfp4"], choices=BITS)
    parser.add_argument("--rows", nargs="+", type=int, default=[1, 8, 64, 256, 2048])
    parser.add_argument(
        "--tiles", nargs="+", default=[""],
        help="[ROWS/ROWS:]BLOCK_M,BLOCK_N,WARPS,STAGES; for few rows with dense weights GATE_UP+DOWN, each "
        "BLOCK_N,BLOCK_K,WARPS,STAGES; '' for the rule",
    )  # fmt: skip
    parser.add_argument("--check", action="store_true", help="compare with dense copies of the weights")
    parser.add_argument("--deterministic", action="store_true", help="and compare a row's bits with those alone")
    parser.add_argument("--out", help="append the lines to this file, too")
    args = parser.parse_args()
    start = time.perf_counter()
    plans = [(s, f, tiles_of_form(args.tiles, f)) for s in args.shapes for f in args.forms]
    if not INTERPRETED:
        if args.check:
            plans.extend((s, "bf16", [""]) for s in args.shapes if "bf16" not in args.forms)
        jobs = [
            (s, f, tile, [r for r in args.rows if tile in tiles_of(tiles, r)] + [1] * (not tile), args.deterministic)
            for s, f, tiles in plans for tile in {t.rpartition(":")[2] for t in tiles}
        ]  # fmt: skip
        with ProcessPoolExecutor(os.cpu_count(), get_context("fork")) as pool:
            for failed in filter(None, pool.map(compile_one, jobs)):
                print(failed, flush=True)
    print(json.dumps({"op": "compiled", "seconds": round(time.perf_counter() - start, 1)}), flush=True)
    for shape, form, tiles in plans:
        if form == "bf16" and form not in args.forms:
            continue  # compiled for the comparison
        for line in measure(shape, form, args.rows, tiles, args.check, args.deterministic):
            print(json.dumps(line), flush=True)
            if args.out:
                with open(args.out, "a") as file:
                    file.write(json.dumps(line) + "\n")


if __name__ == "__main__":
    main()
