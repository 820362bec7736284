"""Paged attention kernels against their torch twin, under Triton's interpreter: a process of its own, since Triton
decides at import whether it interprets. (bf16 is not supported there; tests/test_gpu_attention.py has it.)"""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from runtime.kernels._triton import INTERPRETED
from runtime.kernels.decode_attention import decode_attention
from runtime.kernels.paged_attention import PagedRows, paged_attention_torch
from runtime.kernels.prefill_attention import prefill_attention

ROOT = Path(__file__).parent.parent
interpreted = pytest.mark.skipif(not INTERPRETED, reason="runs in the subprocess of test_under_the_interpreter")


@pytest.mark.slow
@pytest.mark.skipif(INTERPRETED, reason="this is the subprocess")
@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed")
def test_under_the_interpreter():
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", __file__],
        env=os.environ | {"TRITON_INTERPRET": "1"}, cwd=ROOT, capture_output=True, text=True, timeout=290,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]


def paged_case(
    spans: list[tuple[int, int]],  # (start, count) of each row
    heads: tuple[int, int, int] = (4, 2, 64),  # query heads, kv heads, head_dim
    block_size: int = 16,
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
    padding_rows: int = 0,  # behind the others, as in a graph: one token, position 0, the null block
) -> tuple[torch.Tensor, torch.Tensor, PagedRows]:
    """(q, kv, rows): blocks in random order, NaN at every position that no row has, q and tables strided."""
    rng, generator = np.random.default_rng(seed), torch.Generator().manual_seed(seed)
    num_heads, num_kv_heads, head_dim = heads
    needed = [-(-(start + count) // block_size) for start, count in spans]
    num_blocks = 1 + sum(needed)
    kv = torch.full((2, num_kv_heads, num_blocks, block_size, head_dim), torch.nan, dtype=dtype)
    kv[:, :, 0, 0] = 1
    state = np.full((len(spans) + 3, max(needed) + 7), 1 << 30, np.int32)  # an entry nobody owns would fault
    state[-1] = 0
    slots = rng.permutation(len(spans) + 2)[: len(spans)]
    free = rng.permutation(np.arange(1, num_blocks))
    for slot, (start, count), blocks in zip(slots, spans, np.split(free, np.cumsum(needed)[:-1]), strict=True):
        state[slot, 5 : 5 + len(blocks)] = blocks
        shape = (2, num_kv_heads, len(blocks) * block_size, head_dim)
        values = torch.randn(shape, generator=generator).to(dtype)
        values[:, :, start + count :] = torch.nan
        kv[:, :, blocks] = values.view(2, num_kv_heads, len(blocks), block_size, head_dim)
    spans = spans + [(0, 1)] * padding_rows
    slots = np.append(slots, [len(state) - 1] * padding_rows)
    starts, counts = np.array(spans, np.int32).T
    num_tokens = int(counts.sum())
    q = torch.randn(num_tokens, num_heads + 2, head_dim, generator=generator).to(dtype)[:, :num_heads]
    rows = PagedRows(
        *(torch.from_numpy(x.astype(np.int32)) for x in (slots, starts, np.append(0, np.cumsum(counts)))),
        torch.from_numpy(state)[:, 5:], len(spans), num_tokens, int(counts.max()), int((starts + counts).max()),
    )  # fmt: skip
    return q, kv, rows


def check(kernel, case, **options):
    q, kv, rows = case
    options = {"scale": q.shape[-1] ** -0.5} | options
    want = paged_attention_torch(q.double(), kv.double(), rows, **options)
    near = 2e-6 if q.dtype == torch.float32 else 2e-3
    for deterministic in (False, True):
        out = torch.full(want.shape, torch.nan, dtype=q.dtype)
        got = kernel(q, kv, rows, **options, deterministic=deterministic, out=out)
        assert got is out
        error = (got.double() - want).norm() / want.norm()
        assert error < near, f"deterministic={deterministic}: {error}"


def test_the_twin_is_softmax_over_each_tokens_past():
    q, kv, rows = paged_case([(37, 1), (0, 5), (20, 3)], dtype=torch.float64)
    got = paged_attention_torch(q, kv, rows, scale=0.1)
    tables, starts, edges = rows.tables.numpy(), rows.starts.tolist(), rows.q_starts.tolist()
    for row, slot in enumerate(rows.slots.tolist()):
        for token in range(edges[row], edges[row + 1]):
            seen = range(starts[row] + token - edges[row] + 1)
            k, v = (torch.stack([x[:, tables[slot, p // 16], p % 16] for p in seen], 1) for x in kv)
            for head in range(4):
                weights = (k[head // 2] @ q[token, head] * 0.1).softmax(0)
                torch.testing.assert_close(got[token, head * 64 : head * 64 + 64], weights @ v[head // 2])


@interpreted
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("heads", [(2, 2, 64), (3, 1, 80), (4, 1, 96), (8, 1, 128), (2, 1, 256), (6, 2, 64)])
def test_decode(heads, dtype):
    check(decode_attention, paged_case([(0, 1), (62, 1), (133, 1)], heads, dtype=dtype, padding_rows=1))


@interpreted
@pytest.mark.parametrize("count", range(1, 9))
def test_verify_rows(count):
    check(decode_attention, paged_case([(70, count), (0, count), (63, 1), (126, max(1, count - 1))], (3, 1, 64)))


@interpreted
@pytest.mark.parametrize("block_size", [3, 16, 32, 64, 256])
@pytest.mark.parametrize("options", [{}, {"window": 19}, {"window": 64, "soft_cap": 2.0}, {"soft_cap": 5.0}])
def test_blocks_window_and_soft_cap(block_size, options):
    case = paged_case([(170, 2), (0, 1), (20, 1)], (4, 2, 64), block_size)
    check(decode_attention, case, scale=0.3, **options)
    case = paged_case([(130, 50), (0, 3), (20, 1)], (4, 2, 64), block_size)
    check(prefill_attention, case, scale=0.3, **options)


@interpreted
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("heads", [(2, 2, 64), (3, 1, 80), (4, 1, 96), (8, 1, 128), (2, 1, 256)])
def test_prefill(heads, dtype):
    check(prefill_attention, paged_case([(0, 71), (65, 33), (129, 1)], heads, dtype=dtype))


@interpreted
def test_bound_of_the_length_may_be_far_above_it_and_launches_repeat():
    q, kv, rows = paged_case([(40, 1), (150, 1)], (4, 1, 64), padding_rows=1)
    rows.max_len = 1 << 17
    for _ in range(3):  # the counters of arrivals are zero again after each
        check(decode_attention, (q, kv, rows))


@interpreted
@pytest.mark.parametrize("window", [0, 100])
def test_deterministic_bits_depend_on_nothing_but_the_token(window):
    total, heads = 560, (3, 1, 64)  # more than one segment of 512
    q, kv, rows = paged_case([(0, total)], heads)
    # The interpreter's products come from a BLAS, where the place of a row in its tile may show. Here they are exact:
    # whole scores, and in each tile at most one position has a value in a given dimension.
    q, kv = q.round(), kv.nan_to_num(7.0)
    kv[0].round_()
    places = torch.arange(total)
    index = rows.tables[rows.slots[0], places // 16].long(), places % 16
    kv[1][:, *index] *= torch.eye(64)[places % 64]
    options = {"scale": 0.125, "window": window, "deterministic": True}

    def attend(kernel, spans: list[tuple[int, int]]) -> torch.Tensor:
        """The given spans of the one sequence, each a row of its own."""
        starts, counts = np.array(spans, np.int32).T
        part = PagedRows(
            rows.slots.expand(len(spans)).contiguous(), torch.from_numpy(starts.copy()),
            torch.from_numpy(np.append(0, np.cumsum(counts)).astype(np.int32)), rows.tables, len(spans),
            int(counts.sum()), int(counts.max()), int((starts + counts).max()),
        )  # fmt: skip
        tokens = [t for start, count in spans for t in range(start, start + count)]
        return kernel(q[tokens], kv, part, **options)

    want = attend(decode_attention, [(550, 8)])
    assert torch.equal(attend(prefill_attention, [(508, 52)])[42:50], want)
    assert torch.equal(attend(decode_attention, [(i, 1) for i in range(550, 558)]), want)
    assert torch.equal(attend(decode_attention, [(3, 1), (554, 4), (40, 7)])[1:5], want[4:])
    for i in (0, 5):
        assert torch.equal(attend(decode_attention, [(550 + i, 1)]), want[i : i + 1])
    short = attend(prefill_attention, [(0, 30)])
    assert torch.equal(attend(prefill_attention, [(0, 7), (7, 23)]), short)
    assert torch.equal(attend(decode_attention, [(i, 1) for i in range(30)]), short)
