"""The order in which a product sums over K: it belongs to the weight's shape alone, so that a row has the same bits in
any batch.

K is cut into chunks. Each is summed in ascending order by matrix instructions of 16 columns, the chunks' sums are added
in ascending order. All of these instructions round alike on a card (mma.sync or wgmma, with the weight's rows on either
side), so the tiles that cover a product do not show; tests/gpu/test_gpu_linear.py checks that on the device.
"""

from __future__ import annotations

from typing import NamedTuple

_NUM_SMS = 132  # of an H100 or H200; on other cards the same order works, only slower
_MAX_CHUNKS = 4
_MIN_CHUNK = 512


class SumOrder(NamedTuple):
    """1, 2 or 4 chunks of so many columns each, a multiple of 128; the last one may be shorter."""

    num_chunks: int
    chunk: int


def sum_order(size_out: int, size_in: int) -> SumOrder:
    """Chunks enough that most multiprocessors have a program of 64 rows of the weight and one chunk."""
    num_chunks = 1
    while (
        -(-size_out // 64) * num_chunks < _NUM_SMS * 2 // 3
        and num_chunks < _MAX_CHUNKS
        and size_in >= 2 * num_chunks * _MIN_CHUNK
    ):
        num_chunks *= 2
    return SumOrder(num_chunks, -(-size_in // (num_chunks * 128)) * 128)
