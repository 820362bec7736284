"""Experts' quantized weights as `moe_wna16_product` reads them: the values' order, and scales in words.

A product step has 64 bytes of a row with 4-bit values, or 128 bytes with 8-bit values. The steps for 16 rows lie one
after another, [row tiles, steps, 16, bytes]: a program reads long memory runs, not many rows' short pieces.
Rows and steps are padded with zeros.

A word is two bfloat16: the low and the high plane's scales, or an 8-bit scale twice. A step's word i
is for bytes from i * bytes / words on.
"""

from __future__ import annotations

from dataclasses import replace

import torch
import torch.nn.functional as F

from runtime.kernels.quantized.quantized_weight import MAX_GROUP, QuantizedWeight
from runtime.kernels.quantized.word_order import has_word_order, in_word_order
from runtime.kernels.triton_language import INTERPRETED

STEP = 128  # columns
TILE_ROWS = 16
_PLANES = {16: ([0, 1, 4, 5], [2, 3, 6, 7]), 32: ([0, 2], [1, 3]), 64: ([0], [1]), 128: ([0], [0])}  # word groups
_SHIFT = 16  # moves scaled values' exponent, so that scales up to 2 ** 17 fit bfloat16


def in_tile_order(weight: QuantizedWeight) -> QuantizedWeight:
    """One expert's weight in value tiles, with bits ordered for the fastest upcast, and with groups if
    packed."""
    if weight.plane and not weight.group_size:
        groups = -(-weight.shape[1] // MAX_GROUP)
        weight = replace(weight, scales=weight.scales.expand(groups, -1), group_size=MAX_GROUP)
    if not INTERPRETED and has_word_order(weight.encoding):
        weight = replace(weight, values=in_word_order(weight.values, weight.encoding), word_order=True)
    return replace(weight, values=_in_tiles(weight.values, STEP // 2 if weight.plane else STEP))


def _in_tiles(values: torch.Tensor, width: int) -> torch.Tensor:
    """[rows, bytes] -> [row tiles, steps, TILE_ROWS, width]."""
    (rows, size), raw = values.shape, values.view(torch.uint8)
    padded = F.pad(raw, (0, -size % width, 0, -rows % TILE_ROWS))
    tiles: torch.Tensor = padded.unflatten(1, (-1, width)).unflatten(0, (-1, TILE_ROWS)).transpose(1, 2).contiguous()
    return tiles.view(values.dtype)


def with_word_scales(weight: QuantizedWeight) -> QuantizedWeight:
    """Stacked weights (a leading dimension of experts), with scales and zero points as words, int32.

    Zero points are negative. Weights with a scale for a whole row stay as they are."""
    if not weight.group_size:
        return weight
    factor = 2.0 ** (126 - _SHIFT) if has_word_order(weight.encoding) else 1.0
    zero_points = None
    if weight.zero_points is not None:
        zero_points = _words(-weight.zero_points / sum_factor(weight.encoding), weight)
    return replace(weight, scales=_words(weight.scales * factor, weight), zero_points=zero_points, scale_rows=1)


def value_bytes(bits: int, shape: tuple[int, ...]) -> int:
    """The bytes of a weight's value tiles [rows, columns]."""
    return -(-shape[0] // TILE_ROWS) * TILE_ROWS * -(-shape[1] // STEP) * STEP * bits // 8


def scale_bytes(group_size: int, shape: tuple[int, ...]) -> int:
    """The bytes of a 4-bit weight's words [rows, columns] with this group size."""
    words = len(_PLANES[min(group_size, MAX_GROUP)][0])
    return -(-shape[1] // STEP) * words * shape[0] * 4


def sum_factor(encoding: str) -> float:
    """The factor of sums: raw numbers are smaller by 2 ** 126 or 2 ** 133, and their scales are larger by 2 ** 110."""
    match encoding:
        case "e2m1":
            return 2.0**_SHIFT
        case "int4" | "uint4":
            return 2.0 ** (_SHIFT + 7)
        case _:
            return 1.0


def _words(scales: torch.Tensor, weight: QuantizedWeight) -> torch.Tensor:
    """float32 [num_experts, groups, rows of scales] -> int32 [num_experts, words, rows]."""
    num_steps, per_step = -(-weight.shape[1] // STEP), STEP // weight.group_size
    if weight.scale_rows > 1:
        rows = -(-weight.shape[0] // 4) * 4
        scales = scales.repeat_interleave(weight.scale_rows, 2)[:, :, :rows]
    padded = F.pad(scales, (0, 0, 0, num_steps * per_step - scales.shape[1])).bfloat16().view(torch.int16)
    steps = padded.unflatten(1, (num_steps, per_step))
    every = list(range(per_step))
    low, high = _PLANES[weight.group_size] if weight.plane else (every, every)
    pairs = torch.stack((steps[:, :, low], steps[:, :, high]), -1)
    return pairs.view(torch.int32).squeeze(-1).flatten(1, 2).contiguous()


def rounded_scales(weight: QuantizedWeight) -> QuantizedWeight:
    """The weight with the scales that the kernel applies, for its torch twin."""
    if not weight.group_size and not weight.plane:
        return weight
    zero_points = None if weight.zero_points is None else weight.zero_points.bfloat16().float()
    return replace(weight, scales=weight.scales.bfloat16().float(), zero_points=zero_points)
