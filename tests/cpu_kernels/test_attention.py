"""Tiles of attention on a CPU."""

import numpy as np

from runtime.kernels.attention.tiled_rows import TILE, attention_tiles
from runtime.kernels.cpu.attention.stored_numbers import LANES


def test_tiles_cover_each_token_once():
    starts, counts, rows = (np.array(x, np.int32) for x in ([5, 0, 9, 100], [1, 40, 17, 16], [3, 0, 2, 1]))
    tiles = attention_tiles(starts, counts, rows)
    assert TILE == LANES
    covered = {}
    for first, count, row, position in tiles.tolist():
        assert 1 <= count <= TILE
        covered |= {first + i: (row, position + i) for i in range(count)}
    each = zip(starts, counts, rows, strict=True)
    want = [(row, start + i) for start, count, row in each for i in range(count)]
    assert [covered[token] for token in range(len(covered))] == want
