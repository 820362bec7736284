"""Attention on a CPU: a step's tiles, and the calls to the kernels in `attention.py` and `rope_store.py`."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from runtime.base.arrays import Int32s

TILE = 16  # tokens: a vector's lanes (`stored_numbers.LANES`)


@dataclass(slots=True)
class TiledRows:
    """Token tiles, each in one row: what the kernels know about a step."""

    num_tokens: int
    tiles: torch.Tensor  # int32 [tiles, 4]: first token, number of tokens, table row, the first token's position
    tables: torch.Tensor  # int32 [rows, max_blocks]
    last_visible: torch.Tensor | None = None  # int32 [num_tokens], in layers with whole images (paged_attention.py)


def attention_tiles(starts: Int32s, counts: Int32s, rows: Int32s, tile: int = TILE) -> Int32s:
    """Return a step's tiles [num_tiles, 4]: rows with `counts` tokens follow one another, from positions `starts`.

    Cheap and expensive tiles alternate, so that equal shares of the tiles take about equal time."""
    num_tiles = -(-counts // tile)
    row = np.repeat(np.arange(len(counts)), num_tiles)
    done = (np.arange(len(row)) - np.repeat(np.cumsum(num_tiles) - num_tiles, num_tiles)) * tile
    size, position = np.minimum(tile, counts[row] - done), starts[row] + done
    tiles = np.stack(((np.cumsum(counts) - counts)[row] + done, size, rows[row], position), 1).astype(np.int32)
    rising = np.argsort((2 * position + size) * size, kind="stable")
    cheap = -(-len(row) // 2)
    order = np.empty_like(rising)
    order[0::2], order[1::2] = rising[:cheap], rising[cheap:][::-1]
    return np.ascontiguousarray(tiles[order])
