"""The order in which a product adds over K. The weight's shape alone decides it, so a row has the same bits in any
batch.

K is cut into chunks. 16-column matrix instructions sum a chunk in ascending order, and chunk sums are added
in ascending order. On one card, all these instructions round alike (mma.sync or wgmma, with the weight rows on
either side). A product's tiles therefore do not change the bits; tests/gpu/test_gpu_linear.py checks that.
"""

from __future__ import annotations

from typing import NamedTuple

_NUM_SMS = 132  # an H100's or H200's; on other cards the same order works, only slower
_MAX_CHUNKS = 4
_MIN_CHUNK = 512


class SumOrder(NamedTuple):
    """1, 2, 4 or 8 chunks with `chunk` columns, a multiple of 128; the last one may be shorter."""

    num_chunks: int
    chunk: int


def sum_order(size_out: int, size_in: int) -> SumOrder:
    """As many chunks as give most multiprocessors a program of 64 weight rows and one chunk."""
    num_chunks = 1
    while (
        -(-size_out // 64) * num_chunks < _NUM_SMS * 2 // 3
        and num_chunks < _MAX_CHUNKS
        and size_in >= 2 * num_chunks * _MIN_CHUNK
    ):
        num_chunks *= 2
    return SumOrder(num_chunks, -(-size_in // (num_chunks * 128)) * 128)
