"""Packs a weight with one value a byte into the layout of `interleaved_weight.py`. `pack_torch` is the twin."""

from __future__ import annotations

import torch

from runtime.kernels.llvm.language import Int, U8s, Value, loop, share, u32
from runtime.kernels.llvm.launcher import Launcher, kernel

_ROWS, _COLUMNS, _QUADS = 16, 32, 8


def pack(
    values: U8s,  # [blocks * 16, columns]
    out: U8s,  # [blocks, chunks, 16 * 32 * bits / 8]
    num_blocks: Int,
    columns: Int,
    part: Int,
    parts: Int,
    bits: int,
) -> None:
    """Part i of n: a share of the blocks."""
    begin, end = share(num_blocks, part, parts)
    chunk_words = _ROWS * _COLUMNS * bits // 32
    for block in loop(begin, end):
        for row in loop(0, _ROWS):
            source = values.of(u32) + (block * _ROWS + row) * (columns // 4)
            for chunk in loop(0, columns // _COLUMNS):
                quads = source.load(chunk * _QUADS, _QUADS)
                target = out.of(u32) + ((block * (columns // _COLUMNS) + chunk) * chunk_words + row)
                for index, word in enumerate(_words(quads, bits)):
                    target.store(index * _ROWS, word)


def _words(quads: Value, bits: int) -> list[Value]:
    """The words of a row in the vectors of a chunk. `quads` are eight words of four values: u32 [8]."""
    if bits == 8:
        return [quads[i] for i in range(_QUADS)]
    low = quads & 0x0F0F0F0F
    pairs = low.lanes(range(0, _QUADS, 2)) | (low.lanes(range(1, _QUADS, 2)) << 4)
    words = [pairs[i] for i in range(_QUADS // 2)]
    if bits == 4:
        return words
    each, high = bits - 4, (quads >> 4) & 0x03030303
    for plane in range(each):
        own = [high[plane * (8 // each) + i] << (i * each) for i in range(8 // each)]
        word = own[0]
        for other in own[1:]:
            word = word | other
        words.append(word)
    return words


def pack_values(values: torch.Tensor, out: torch.Tensor, bits: int) -> None:
    """Pack values, uint8 [blocks * 16, K], into `out`, uint8 [blocks, K / 32, bytes of a chunk]."""
    launcher, num_blocks = Launcher(), len(out)
    parts = launcher.parts(num_blocks, values.numel())
    launcher.launch(kernel(pack, bits=bits), (values, out, num_blocks, values.shape[1]), parts)
