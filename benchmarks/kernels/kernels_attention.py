"""The paged attention kernels' speed against the card's ceilings and torch's SDPA on contiguous keys and values.

    python -m benchmarks.kernels.kernels_attention --decode 1x128 256x512 --prefill 8192 2048+8192 --heads 32x8x64

    python -m benchmarks.kernels.kernels_attention --decode 64x512+1x72000 --latents 20x512x64 --heads --prefill

A decode cell is ROWSxLENGTH, or several of them as in 16x1200+1x72000. A prefill cell is TOKENS or TOKENS+CACHED.
Decode over latents includes the merge of segments, but no products with kv_b.
Each is one CUDA graph with several launches, as in a step. Decode launches read different blocks, so that none is in
the L2 cache. Times are medians over the replays.
"""

from __future__ import annotations

import argparse
import itertools
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.bias import causal_lower_right
from tqdm import tqdm

from benchmarks.kernels.timing import BF16_FLOP_S, HBM_BYTES_S, ROTATION_BYTES, graph_seconds
from benchmarks.library.measure import Results
from runtime.base.kv_cache_spec import QUANTIZED_DTYPES, KVCacheSpec, KVGroupSpec
from runtime.kernels.attention.decode_attention import decode_attention
from runtime.kernels.attention.latent_attention import attend_rows
from runtime.kernels.attention.paged_attention import AttentionForm, PagedRows
from runtime.kernels.attention.prefill_attention import prefill_attention
from runtime.kernels.attention.stored_kv import KVLayer
from runtime.worker.kv_cache import KVCache

_SDPA_BACKENDS = (SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION)


def paged_rows(starts: list[int], count: int, max_len: int, tables: torch.Tensor) -> PagedRows:
    """Rows of `count` tokens each; row i has slot i."""
    slots, starts_, q_starts = (
        torch.tensor(x, dtype=torch.int32, device="cuda")
        for x in (range(len(starts)), starts, range(0, (len(starts) + 1) * count, count))
    )
    return PagedRows(slots, starts_, q_starts, tables, len(starts), len(starts) * count, count, max_len)


def decode_seconds(
    lengths: list[int],
    heads: tuple[int, int, int],
    block_size: int = 16,
    deterministic: bool = False,
    count: int = 1,
    kv_cache_dtype: str = "auto",
) -> float:
    """Rows with complete prefixes and `count` new tokens each; a row's last token attends to its length."""
    num_heads, _, head_dim = heads
    spec = kv_spec(heads, kv_cache_dtype)
    num_blocks, launches = rotation(lengths, spec.bytes_per_token, block_size)
    kv, scales = random_layer(spec, 1 + launches * num_blocks, block_size)
    q = torch.randn(len(lengths) * count, num_heads, head_dim, device="cuda", dtype=torch.bfloat16)
    sets = [replace(rows, prefix_ready=True) for rows in decode_rows(lengths, launches, block_size, count)]

    def launch(i: int) -> None:
        decode_attention(q, kv, sets[i], AttentionForm(head_dim**-0.5), scales, deterministic=deterministic)

    return graph_seconds(launch, launches)


def latent_seconds(
    lengths: list[int], sizes: tuple[int, int, int], block_size: int = 16, deterministic: bool = False
) -> float:
    """Absorbed attention over latents, as `decode_seconds`."""
    num_heads, rank, rope_dim = sizes
    num_blocks, launches = rotation(lengths, 2 * (rank + rope_dim), block_size)
    randn = partial(torch.randn, device="cuda", dtype=torch.bfloat16)
    kv = randn(1, 1, 1 + launches * num_blocks, block_size, rank + rope_dim)
    q, rope = randn(len(lengths), num_heads, rank), randn(len(lengths), num_heads, rope_dim)
    sets = decode_rows(lengths, launches, block_size)
    return graph_seconds(
        lambda i: attend_rows(q, rope, kv, sets[i], scale=rank**-0.5, deterministic=deterministic), launches
    )


def rotation(lengths: list[int], bytes_per_token: int, block_size: int) -> tuple[int, int]:
    """(blocks that a launch reads, launches that read different ones)."""
    num_blocks = sum(-(-length // block_size) for length in lengths)
    return num_blocks, max(2, min(48, -(-ROTATION_BYTES // (bytes_per_token * num_blocks * block_size))))


def decode_rows(lengths: list[int], launches: int, block_size: int, count: int = 1) -> list[PagedRows]:
    """Rows for each launch, with blocks in random order."""
    blocks_of = [-(-length // block_size) for length in lengths]
    blocks = 1 + torch.randperm(launches * sum(blocks_of), device="cuda", dtype=torch.int32)
    starts, max_len, sets = [length - count for length in lengths], max(*lengths, 1 << 14), list[PagedRows]()
    for own in blocks.split(sum(blocks_of)):
        table = torch.nn.utils.rnn.pad_sequence(list(own.split(blocks_of)), batch_first=True)
        sets.append(paged_rows(starts, count, max_len, table))
        sets[-1].segments = sets[0].segments  # found once, as for a step's layers
    return sets


def prefill_seconds(
    num_tokens: int,
    cached: int,
    heads: tuple[int, int, int],
    block_size: int = 16,
    deterministic: bool = False,
    kv_cache_dtype: str = "auto",
) -> float:
    """One row of `num_tokens` new tokens behind `cached` ones."""
    num_heads, _, head_dim = heads
    num_blocks = -(-(num_tokens + cached) // block_size)
    kv, scales = random_layer(kv_spec(heads, kv_cache_dtype), 1 + num_blocks, block_size)
    table = 1 + torch.randperm(num_blocks, device="cuda", dtype=torch.int32)[None]
    q = torch.randn(num_tokens, num_heads, head_dim, device="cuda", dtype=torch.bfloat16)
    rows = paged_rows([cached], num_tokens, num_tokens + cached, table)
    attend = partial(prefill_attention, q, kv, rows, AttentionForm(head_dim**-0.5), scales, deterministic=deterministic)
    return graph_seconds(lambda _: attend(), 6)


def sdpa_seconds(num_rows: int, num_tokens: int, length: int, heads: tuple[int, int, int]) -> float | None:
    """torch's scaled_dot_product_attention on contiguous k and v, by the fastest backend that takes them."""
    num_heads, num_kv_heads, head_dim = heads
    q = torch.randn(num_rows, num_heads, num_tokens, head_dim, device="cuda", dtype=torch.bfloat16)
    k, v = torch.randn(2, num_rows, num_kv_heads, length, head_dim, device="cuda", dtype=torch.bfloat16)
    mask = {"is_causal": True} if num_tokens == length else {}
    if 1 < num_tokens < length:
        mask = {"attn_mask": causal_lower_right(num_tokens, length)}
    times = []
    for backend in _SDPA_BACKENDS:
        try:
            with sdpa_kernel(backend):
                times.append(
                    graph_seconds(lambda _: F.scaled_dot_product_attention(q, k, v, enable_gqa=True, **mask), 4)
                )
        except RuntimeError:  # this backend lacks a kernel for these shapes
            torch.cuda.synchronize()
    return min(times, default=None)


def kv_spec(heads: tuple[int, int, int], kv_cache_dtype: str) -> KVCacheSpec:
    """The specification of one layer."""
    dtype, scale_dtype = QUANTIZED_DTYPES.get(kv_cache_dtype, ("bfloat16", None))
    return KVCacheSpec((KVGroupSpec((0,), heads[1], heads[2], dtype, scale_dtype),))


def decode_bytes(lengths: list[int], heads: tuple[int, int, int], kv_cache_dtype: str = "auto") -> int:
    return sum(lengths) * kv_spec(heads, kv_cache_dtype).bytes_per_token


def row_lengths(cell: str) -> list[int]:
    """Each row's length in a decode cell such as 16x1200+1x72000."""
    parts = ([int(n) for n in part.split("x")] for part in cell.split("+"))
    return [length for num_rows, length in parts for _ in range(num_rows)]


def random_layer(spec: KVCacheSpec, num_blocks: int, block_size: int) -> KVLayer:
    """A layer's cache with normal values, or with quantized values and scales of about the same size."""
    layer = KVCache(spec, num_blocks, block_size, torch.device("cuda")).layers[0]
    for head in layer.values.flatten(0, 1):  # one by one, because float32 copies are larger
        numbers = torch.randn(head.shape, device="cuda")
        head.copy_(numbers.mul_(32).clamp_(-127, 127) if head.dtype == torch.int8 else numbers)
    if head.dtype == torch.int8:
        layer.scales.fill_(1 / 32)
    return layer


def prefill_flop(num_tokens: int, cached: int, heads: tuple[int, int, int]) -> int:
    """The operations in q k^T and in the weights times v, over the pairs within a causal mask."""
    return 4 * heads[0] * heads[2] * (num_tokens * cached + num_tokens * (num_tokens + 1) // 2)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    cells = [f"{rows}x{length}" for rows in (1, 8, 64, 256) for length in (128, 512, 2048, 8192)]
    parser.add_argument("--decode", nargs="*", default=cells, metavar="ROWSxLENGTH[+...]")
    parser.add_argument("--prefill", nargs="*", default=["512", "2048", "8192", "2048+8192"], metavar="TOKENS[+CACHED]")
    parser.add_argument("--heads", nargs="*", default=["32x8x64", "24x8x128", "32x8x128"], metavar="QxKVxDIM")
    parser.add_argument("--latents", nargs="*", default=[], metavar="HEADSxRANKxROPE", help="decode over latents too")
    parser.add_argument("--kv-cache-dtype", nargs="+", default=["auto"], metavar="auto|fp8|int8")
    parser.add_argument("--block-size", type=int, default=16)
    parser.add_argument("--deterministic", action="store_true")
    parser.add_argument("--sdpa", action="store_true", help="time torch's too")
    parser.add_argument("--out", type=Path, help="append the JSON lines to this file too")
    args = parser.parse_args()
    results = Results("kernels_attention", args.out)
    kinds = list(itertools.product(args.heads, args.kv_cache_dtype))
    latent_cells = list(itertools.product(args.latents, args.decode))
    with tqdm(total=len(kinds) * (len(args.decode) + len(args.prefill)) + len(latent_cells), unit="cell") as bar:
        for shape, kind in kinds:
            heads = tuple(int(n) for n in shape.split("x"))
            common = {"heads": shape, "kv_cache_dtype": kind, "block_size": args.block_size,
                      "deterministic": args.deterministic}  # fmt: skip
            options = args.block_size, args.deterministic
            for cell in args.decode:
                lengths = row_lengths(cell)
                seconds = decode_seconds(lengths, heads, *options, kv_cache_dtype=kind)
                sdpa = (
                    sdpa_seconds(len(lengths), 1, lengths[0], heads) if args.sdpa and len(set(lengths)) == 1 else None
                )
                rate = decode_bytes(lengths, heads, kind) / seconds
                results.add(
                    kernel="decode_attention", cell=cell, **common, us=seconds * 1e6, tb_s=rate / 1e12,
                    of_ceiling=rate / HBM_BYTES_S, sdpa_us=sdpa and sdpa * 1e6,
                )  # fmt: skip
                bar.update()
            for cell in args.prefill:
                num_tokens, cached = (int(n) for n in (cell + "+0").split("+")[:2])
                seconds = prefill_seconds(num_tokens, cached, heads, *options, kind)
                sdpa = sdpa_seconds(1, num_tokens, num_tokens + cached, heads) if args.sdpa else None
                rate = prefill_flop(num_tokens, cached, heads) / seconds
                results.add(
                    kernel="prefill_attention", cell=cell, **common, us=seconds * 1e6, tflop_s=rate / 1e12,
                    of_ceiling=rate / BF16_FLOP_S, sdpa_us=sdpa and sdpa * 1e6,
                )  # fmt: skip
                bar.update()
        for shape, cell in latent_cells:
            num_heads, rank, rope_dim = (int(n) for n in shape.split("x"))
            lengths = row_lengths(cell)
            seconds = latent_seconds(lengths, (num_heads, rank, rope_dim), args.block_size, args.deterministic)
            rate = sum(lengths) * 2 * (rank + rope_dim) / seconds
            results.add(
                kernel="latent_attention", cell=cell, heads=shape, block_size=args.block_size,
                deterministic=args.deterministic, us=seconds * 1e6, tb_s=rate / 1e12, of_ceiling=rate / HBM_BYTES_S,
            )  # fmt: skip
            bar.update()


if __name__ == "__main__":
    main()
