"""Compiled attention over latents equals its torch twin. A token has the same bits in any step."""

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from runtime.kernels.attention.tiled_rows import TiledRows, attention_tiles
from runtime.kernels.cpu.attention.compiled_attention import CompiledAttention
from runtime.kernels.cpu.attention.compiled_latents import CompiledLatents
from runtime.kernels.llvm.launcher import Launcher

BLOCK, NUM_BLOCKS = 16, 24
NOPE, VALUE, RANK, ROPE = 12, 16, 32, 8
LAUNCHER = Launcher()
LATENTS = CompiledLatents(LAUNCHER, CompiledAttention(LAUNCHER))


def cache(seed: int = 0) -> torch.Tensor:
    torch.manual_seed(seed)
    return torch.randn(1, 1, NUM_BLOCKS, BLOCK, RANK + ROPE)


def reference(q: torch.Tensor, kv: torch.Tensor, table: list[int], position: int, weight: torch.Tensor) -> torch.Tensor:
    """One token in float64 with the keys and values of each head, [num_heads * VALUE]."""
    stored = kv[0, 0, table].flatten(0, 1)[: position + 1].double()
    expanded = torch.einsum("lr,hdr->hld", stored[:, :RANK], weight.double())
    keys = torch.cat((expanded[..., :NOPE], stored[:, RANK:].expand(len(weight), -1, -1)), -1)
    scores = torch.einsum("hd,hld->hl", q.double(), keys) * 0.1
    return torch.einsum("hl,hld->hd", scores.softmax(-1), expanded[..., NOPE:]).flatten()


def attend(
    q: torch.Tensor, kv: torch.Tensor, rows: list[tuple[int, int, list[int]]], weight: torch.Tensor
) -> torch.Tensor:
    """Rows of (first position, number of tokens, blocks), one after the other."""
    starts, counts = (np.array([row[i] for row in rows], np.int32) for i in range(2))
    tables = torch.tensor([row[2] for row in rows], dtype=torch.int32)
    tiles = torch.from_numpy(attention_tiles(starts, counts, np.arange(len(rows), dtype=np.int32)))
    plan = TiledRows(len(q), tiles, tables)
    return LATENTS.attention(q, kv, plan, LATENTS.up(weight, NOPE), scale=0.1).clone()


@st.composite
def steps(draw) -> tuple[int, list[tuple[int, int, list[int]]], int]:
    """Heads, rows, and the numbers between the queries of two tokens."""
    heads = draw(st.sampled_from([1, 3, 20, 34]))
    rows = []
    for _ in range(draw(st.integers(1, 12))):
        first, count = draw(st.integers(0, 70)), draw(st.sampled_from([1, 1, 1, 2, 7, 8, 20]))
        blocks = draw(st.permutations(range(NUM_BLOCKS)))[: -(-91 // BLOCK)]
        rows.append((first, count, list(blocks)))
    return heads, rows, draw(st.sampled_from([0, 24, 40]))


@settings(max_examples=12)
@given(steps(), st.integers(0, 1 << 20))
def test_attention_equals_the_reference(case, seed):
    (heads, rows, gap), kv = case, cache(seed)
    num_tokens, width = sum(count for _, count, _ in rows), heads * (NOPE + ROPE)
    q = torch.randn(num_tokens, width + gap)[:, :width].unflatten(1, (heads, -1))
    weight = torch.randn(heads, NOPE + VALUE, RANK) * 0.3
    found, at = attend(q, kv, rows, weight), 0
    for first, count, blocks in rows:
        for i in range(count):
            want = reference(q[at], kv, blocks, first + i, weight)
            torch.testing.assert_close(found[at].double(), want, rtol=0, atol=2e-5 * float(want.abs().max()))
            alone = attend(q[at : at + 1], kv, [(first + i, 1, blocks)], weight)
            assert torch.equal(alone[0], found[at])
            at += 1
