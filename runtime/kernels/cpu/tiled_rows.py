"""Attention on a CPU: the tiles of a step, and the calls of the kernels of `attention.py` and `rope_store.py`."""

from __future__ import annotations

from typing import NamedTuple

import torch


class TiledRows(NamedTuple):
    """Tiles of tokens, each of one row: what the kernels know of a step."""

    num_tokens: int
    tiles: torch.Tensor  # int32 [tiles, 4]: first token, number of tokens, row of the tables, position of the first
    tables: torch.Tensor  # int32 [rows, max_blocks]
