"""Layers' caches in groups, such that the longest request needs the least memory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from runtime.base.kv_cache_spec import KVGroupSpec

MOST_GROUPS = 8  # each has a table for every request
_MOST_OF_SHAPES = 16  # most groups if layers have several shapes; Gemma 4 31B needs 11
_MOST_PADDING = 1.1  # layer places in the pool, as a ratio to the layers
_LEAST_GAIN = 0.9  # the longest request's memory with windows freed, as a ratio to the memory without


def window_groups(parts: Sequence[KVGroupSpec], longest: int) -> tuple[KVGroupSpec, ...]:
    """Divide layers with one shape into groups of equal size, windowless groups first.

    The parts have at most one window, and the longest request has `longest` tokens. A block has the largest group's
    bytes, so smaller groups waste memory. The number of layers is the one with which the longest request needs
    the least memory. If the windows save little, all layers stay in one group without a window."""
    layers = tuple(sorted(layer for part in parts for layer in part.layers))
    window = next((part.window for part in parts if part.window is not None), 0)
    limited = tuple(layer for layer in layers if any(part.window and layer in part.layers for part in parts))
    full = tuple(layer for layer in layers if layer not in limited)

    def places(size: int) -> tuple[int, int]:
        """Layers with places in the pool, without a window and with one."""
        return -(-len(full) // size) * size, -(-len(limited) // size) * size

    def tokens(size: int) -> int:
        """Tokens of all layers that the longest request keeps."""
        return places(size)[0] * longest + places(size)[1] * min(window, longest)

    sizes = [
        size
        for size in range(1, len(layers) + 1)
        if sum(places(size)) <= min(MOST_GROUPS * size, _MOST_PADDING * len(layers))
    ]
    best = min(sizes, key=lambda size: (tokens(size), -size), default=0)
    one = replace(parts[0], layers=layers, window=None)
    if not limited or not best or tokens(best) > _LEAST_GAIN * len(layers) * longest:
        return (one,)
    full_parts, limited_parts = ([part[i : i + best] for i in range(0, len(part), best)] for part in (full, limited))
    without = [replace(one, layers=part) for part in full_parts]
    return (*without, *(replace(one, layers=part, window=window) for part in limited_parts))


def groups_of_shapes(parts: Sequence[KVGroupSpec], longest: int) -> tuple[KVGroupSpec, ...]:
    """Divide groups' layers, which differ in shape or window, into groups with similar bytes.

    As in `window_groups`, the longest request then needs the least memory."""
    sizes = [part.bytes_per_token // len(part.layers) for part in parts]
    kept = [min(part.window or longest, longest) for part in parts]

    def numbers(size: int) -> list[int]:
        """Groups of each part with at most `size` bytes a token."""
        return [-(-len(part.layers) // (size // own)) for part, own in zip(parts, sizes, strict=True)]

    def cost(size: int) -> tuple[int, int]:
        return size * sum(number * tokens for number, tokens in zip(numbers(size), kept, strict=True)), -size

    totals = {own * i for part, own in zip(parts, sizes, strict=True) for i in range(1, len(part.layers) + 1)}
    candidates = [size for size in totals if size >= max(sizes) and sum(numbers(size)) <= _MOST_OF_SHAPES]
    best = min(candidates, key=cost)
    groups = []
    for part, own in zip(parts, sizes, strict=True):
        step, layers = best // own, part.layers
        groups += [replace(part, layers=layers[i : i + step]) for i in range(0, len(layers), step)]
    return tuple(groups)
