"""Launch configurations measured on an H200 by benchmarks/tune_linear.py; other shapes fall back to a rule."""

from __future__ import annotations

from typing import NamedTuple


class FewRows(NamedTuple):
    """How `few_rows_linear` cuts a weight [N, K]; a program has block_n of its rows and the whole of K."""

    block_n: int
    block_k: int  # columns a step
    num_warps: int
    stages: int = 1  # of the software pipeline; the kernel for one row has none


FEW_ROWS: dict[tuple[int, int, int], FewRows] = {}  # (N, K, most rows)
