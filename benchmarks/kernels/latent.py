"""Attention over latents in decode on a GPU: the time of a layer and of each part, and the bytes' floor.

    python -m benchmarks.kernels.latent --shapes glm-4.7-flash deepseek-v3 --cells 1x256 1x8192 8x1024 64x1024
    python -m benchmarks.kernels.latent --cells 1x256 1x640 --variants "" splits=32 tile=32/32/8/5
    python -m benchmarks.kernels.latent --cells 4x1024x4 --deterministic --check
    TRITON_INTERPRET=1 python -m benchmarks.kernels.latent --shapes tiny --cells 2x40 --check  # on a CPU, without times

A cell is ROWSxPOSITIONS, or ROWSxPOSITIONSxTOKENS for rows of several new tokens. A layer is the store of latents, the
products of heads and attention. A CUDA graph has several layers, so that the cache holds neither weights nor latents.
The floor is the time to read W_UK, W_UV and the latents once at the measured memory speed. One JSON line a measurement.

A variant changes constants of the kernels, as NAME=VALUE,NAME=VALUE: `splits`, the most segments of a row, and
`tile=ROWS/POSITIONS/WARPS/STAGES`, the tile of attention.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from typing import Any, NamedTuple

import torch

from benchmarks.kernels.compile_ahead import compile_only
from benchmarks.kernels.tune_linear import graph_us
from runtime.base.model.decoder_spec import RopeSpec
from runtime.kernels.attention import latent_attention
from runtime.kernels.attention.latent_heads import head_product_triton
from runtime.kernels.attention.latent_store import latent_store_triton
from runtime.kernels.attention.latent_torch import LatentUp
from runtime.kernels.attention.paged_attention import PagedBatch, PagedRows, paged_attention_torch
from runtime.kernels.attention.rope import rope_table
from runtime.kernels.triton_language import INTERPRETED

READ_TBPS = 4.45  # the measured read speed of an H200
ROTATION_BYTES = 0 if INTERPRETED else 256 << 20  # several times the L2 cache
BLOCK_SIZE = 16
DEVICE = "cpu" if INTERPRETED else "cuda"
DTYPE = torch.float16 if INTERPRETED else torch.bfloat16
SCALE = 0.05


class Shape(NamedTuple):
    num_heads: int
    rank: int
    rope_dim: int
    nope_dim: int
    value_dim: int


class Cell(NamedTuple):
    rows: int
    positions: int
    tokens: int  # of a row

    @classmethod
    def of(cls, text: str) -> Cell:
        return cls(*map(int, text.split("x")), *(1,) * (2 - text.count("x")))


SHAPES = {
    "glm-4.7-flash": Shape(20, 512, 64, 192, 256),
    "deepseek-v3": Shape(128, 512, 64, 128, 128),
    "deepseek-v2-lite": Shape(16, 512, 64, 128, 128),
    "tiny": Shape(5, 32, 8, 12, 20),
}


class Layer(NamedTuple):
    """A layer's weights and cache, and a step's inputs, which layers share but for the cache."""

    q: torch.Tensor
    latents: torch.Tensor
    rope: tuple[torch.Tensor, torch.Tensor]
    norm: torch.Tensor
    kv: torch.Tensor
    kv_index: torch.Tensor
    rows: PagedRows
    up: LatentUp

    def store(self) -> None:
        latent_store_triton(self.q, self.latents, self.rope, self.norm, 1e-6, self.kv, self.kv_index, True)

    def attend(self, queries: torch.Tensor, out: torch.Tensor, deterministic: bool) -> None:
        rope = self.q[..., self.up.nope_dim :]
        latent_attention.attend_rows(
            queries, rope, self.kv, self.rows, scale=SCALE, deterministic=deterministic, out=out
        )

    def run(self, deterministic: bool) -> torch.Tensor:
        self.store()
        return latent_attention.latent_attention_triton(
            self.q, self.kv, PagedBatch(len(self.q), [self.rows]), self.up, scale=SCALE, deterministic=deterministic
        )


def layers_of(shape: Shape, cell: Cell, max_len: int, device: str = DEVICE) -> list[Layer]:
    """Enough layers for ROTATION_BYTES of weights and latents."""
    rows, positions, tokens = cell
    blocks, num_tokens, stored = -(-positions // BLOCK_SIZE), rows * tokens, shape.rank + shape.rope_dim
    of_head = shape.nope_dim + shape.value_dim
    moved = 2 * (shape.num_heads * of_head * shape.rank + rows * positions * stored)
    generator = None if device == "meta" else torch.Generator(device).manual_seed(0)
    ints: dict[str, Any] = {"dtype": torch.int32, "device": device}

    def randn(*size: int) -> torch.Tensor:
        return torch.randn(size, device=device, generator=generator).to(DTYPE)

    order = torch.arange(1, 1 + rows * blocks) if device == "meta" else 1 + torch.randperm(rows * blocks)
    tables = torch.zeros((rows + 1, -(-max_len // BLOCK_SIZE)), dtype=torch.int32)
    tables[:rows, :blocks] = order.view(rows, blocks)
    new = (positions - tokens + torch.arange(tokens)).repeat(rows)
    places = tables[torch.arange(rows).repeat_interleave(tokens), new // BLOCK_SIZE] * BLOCK_SIZE + new % BLOCK_SIZE
    own = PagedRows(
        torch.arange(rows, **ints), torch.full((rows,), positions - tokens, **ints),
        torch.arange(0, num_tokens + 1, tokens, **ints), tables.to(device), rows, num_tokens, tokens, max_len,
        prefix_ready=True,
    )  # fmt: skip
    table = rope_table(RopeSpec(), shape.rope_dim, max_len, DTYPE).to(device)
    step = (
        randn(num_tokens, shape.num_heads, shape.nope_dim + shape.rope_dim), randn(num_tokens, stored),
        (table, new.to(**ints)), randn(shape.rank),
    )  # fmt: skip
    return [
        Layer(
            *step, randn(1, 1, 1 + rows * blocks, BLOCK_SIZE, stored), places.to(**ints), own,
            LatentUp(randn(shape.num_heads, of_head, shape.rank).mul_(shape.rank**-0.5), shape.nope_dim),
        )
        for _ in range(1 if device == "meta" else max(1, -(-ROTATION_BYTES // moved)))
    ]  # fmt: skip


RULES: dict[str, Any] = {name: getattr(latent_attention, name) for name in ("_MAX_SPLITS", "_tile_rows", "_tile")}


def choose(variant: str) -> None:
    """Use the constants of a variant, and the rules for all others."""
    changed = dict(RULES)
    for name, _, text in (part.partition("=") for part in variant.split(",") if part):
        numbers = tuple(map(int, text.split("/")))
        match name:
            case "splits":
                (changed["_MAX_SPLITS"],) = numbers
            case "tile":
                changed["_tile_rows"] = lambda *_, rows=numbers[0]: rows
                changed["_tile"] = lambda *_, rest=numbers[1:]: rest
            case _:
                raise SystemExit(f"variant {variant!r} names {name!r}, which is no constant of these kernels.")
    for name, value in changed.items():
        setattr(latent_attention, name, value)


def compile_one(job: tuple[str, str, str, int, bool]) -> str:
    """Fill the compile cache, without the GPU."""
    shape, cell, variant, max_len, deterministic = job
    try:
        with compile_only():
            choose(variant)
            layers_of(SHAPES[shape], Cell.of(cell), max_len, "meta")[0].run(deterministic)
    except Exception as error:
        return f"{job}: {error}"
    return ""


def launches(layers: list[Layer], deterministic: bool) -> dict[str, Callable[[], object]]:
    """All layers' launches of one kind in a row, and whole layers."""
    first = layers[0]
    queries = first.q.new_empty((*first.q.shape[:2], first.up.weight.shape[2])).normal_()
    mixed = torch.zeros_like(queries)

    def products(layer: Layer) -> None:
        head_product_triton(layer.q[..., : layer.up.nope_dim], layer.up.keys_weight, deterministic)
        head_product_triton(mixed, layer.up.values_weight.transpose(1, 2), deterministic)

    return {
        "us": lambda: [layer.run(deterministic) for layer in layers],
        "store_us": lambda: [layer.store() for layer in layers],
        "attention_us": lambda: [layer.attend(queries, mixed, deterministic) for layer in layers],
        "products_us": lambda: [products(layer) for layer in layers],
    }


def error_of(layer: Layer, deterministic: bool) -> float:
    """Relative error of a layer's result against float64."""
    got = layer.run(deterministic).double()
    absorbed = torch.einsum("nhk,hkr->nhr", layer.q[..., : layer.up.nope_dim].double(), layer.up.keys_weight.double())
    wide = torch.cat((absorbed, layer.q[..., layer.up.nope_dim :].double()), -1)
    kv = layer.kv.double().expand(2, *layer.kv.shape[1:])
    mixed = paged_attention_torch(wide, kv, layer.rows, scale=SCALE).view(wide.shape)[..., : layer.up.weight.shape[2]]
    want = torch.einsum("nhr,hdr->nhd", mixed, layer.up.values_weight.double()).flatten(1)
    return round(float((got - want).norm() / want.norm()), 5)


def measure(
    shape_name: str, cell_name: str, variants: list[str], max_len: int, deterministic: bool, checked: bool
) -> Iterator[dict[str, Any]]:
    shape, cell = SHAPES[shape_name], Cell.of(cell_name)
    layers = layers_of(shape, cell, max_len)
    stored = cell.rows * cell.positions * (shape.rank + shape.rope_dim)
    matrices = shape.num_heads * (shape.nope_dim + shape.value_dim) * shape.rank
    floors = {"us": matrices + stored, "store_us": 0, "attention_us": stored, "products_us": matrices}
    for variant in variants:
        choose(variant)
        line: dict[str, Any] = {"op": "latent", "shape": shape_name, "cell": cell_name, "variant": variant}
        line |= {"deterministic": deterministic}
        if checked:
            line["error"] = error_of(layers[0], deterministic)
        runs = launches(layers, deterministic)
        if not INTERPRETED:
            for name, run in runs.items():
                line[name] = round(graph_us(run, 0.03) / len(layers), 2)
                line["floor_" + name] = round(floors[name] * 2 / READ_TBPS / 1e6, 2)
        yield line


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", nargs="+", default=["glm-4.7-flash", "deepseek-v3"], choices=SHAPES)
    parser.add_argument("--cells", nargs="+", default=["1x256", "1x8192", "8x1024", "64x1024"])
    parser.add_argument("--variants", nargs="+", default=[""], help="NAME=VALUE,..., as above; '' for the rules")
    parser.add_argument(
        "--max-len", type=int, default=128 if INTERPRETED else 16384, help="max_model_len of the graphs"
    )
    parser.add_argument("--deterministic", action="store_true")
    parser.add_argument("--check", action="store_true", help="compare with float64")
    parser.add_argument("--out", help="append the lines to this file, too")
    args = parser.parse_args()
    start = time.perf_counter()
    if not INTERPRETED:
        jobs = [
            (s, c, v, args.max_len, args.deterministic) for s in args.shapes for c in args.cells for v in args.variants
        ]
        with ProcessPoolExecutor(os.cpu_count(), get_context("fork")) as pool:
            for failed in filter(None, pool.map(compile_one, jobs)):
                print(failed, flush=True)
    print(json.dumps({"op": "compiled", "seconds": round(time.perf_counter() - start, 1)}), flush=True)
    for shape, cell in ((s, c) for s in args.shapes for c in args.cells):
        for line in measure(shape, cell, args.variants, args.max_len, args.deterministic, args.check):
            print(json.dumps(line), flush=True)
            if args.out:
                with open(args.out, "a") as file:
                    file.write(json.dumps(line) + "\n")


if __name__ == "__main__":
    main()
