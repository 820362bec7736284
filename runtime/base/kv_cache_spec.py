"""KVCacheSpec: the layout of a model's KV cache as plain data; memory plan, allocation and block tables derive from it.

Layers with the same shape and lifetime of keys and values are a group. Every group has its own block tables. All
groups draw from one pool. A block holds `block_size` tokens for one group's layers, and has the bytes that the largest
group needs.

Layers without attention have a fixed-size state for each request in place of keys and values.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import lcm

# EngineConfig.kv_cache_dtype, but for auto and none -> a group's (dtype, scale_dtype).
QUANTIZED_DTYPES = {"fp8": ("float8_e4m3fn", None), "int8": ("int8", "float16")}
CHUNK = 64  # prompt tokens that a layer with a state computes at once, from a multiple of CHUNK on
MOST_GROUPS = 8  # each has a table for every request
_MOST_OF_SHAPES = 16  # most groups if layers have several shapes; Gemma 4 31B needs 11
_MOST_PADDING = 1.1  # layer places in the pool, as a ratio to the layers
_LEAST_GAIN = 0.9  # the longest request's memory with windows freed, as a ratio to the memory without
RING = 16  # last tokens with inputs in a layer with a state, by position modulo RING; a power of two
DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "float8_e4m3fn": 1, "int8": 1}


@dataclass(frozen=True, slots=True)
class KVGroupSpec:
    """Layers that store their keys and values alike and keep them equally long."""

    layers: tuple[int, ...]  # their numbers in the model, rising
    num_kv_heads: int
    head_dim: int
    dtype: str  # the stored values' type, a key in DTYPE_BYTES
    scale_dtype: str | None = None  # type of the scales per token and head, for K and V; None without scales
    # Positions that a token attends to, itself included; None for all. Older positions are not kept.
    window: int | None = None
    vectors: int = 2  # stored for a token and head: k and v; 1 for a latent, which is both

    @property
    def row_bytes(self) -> int:
        """A key or a value of one head."""
        return self.head_dim * DTYPE_BYTES[self.dtype]

    @property
    def bytes_per_token(self) -> int:
        """Keys, values and their scales, in all layers of the group."""
        scale = 0 if self.scale_dtype is None else DTYPE_BYTES[self.scale_dtype]
        return self.vectors * len(self.layers) * self.num_kv_heads * (self.head_dim * DTYPE_BYTES[self.dtype] + scale)

    def bytes_per_block(self, block_size: int) -> int:
        """Bytes of `block_size` tokens."""
        return block_size * self.bytes_per_token

    def most_blocks(self, num_tokens: int, block_size: int, max_chunk: int) -> int:
        """Return the most blocks that a request of `num_tokens` holds, if its rows have up to `max_chunk` tokens.

        Its largest row reads and writes them. The first and the last may be used in part, and the blocks stay that
        rows after the last full block would read."""
        needed = -(-num_tokens // block_size)
        if self.window is None:
            return needed
        return min(needed, -(-(self.window - 1 + max_chunk) // block_size) + 2)

    def num_dead_blocks(self, num_computed: int, block_size: int) -> int:
        """Return the number of leading blocks that rows from position `num_computed` on never read."""
        return 0 if self.window is None else max(0, num_computed - self.window + 1) // block_size


@dataclass(frozen=True, slots=True)
class StateGroupSpec:
    """Layers that summarize a request in a state of fixed size (kernels/step/state_rows.py)."""

    layers: tuple[int, ...]  # their numbers in the model, rising
    channels: int  # convolution channels; their last inputs are kept
    dtype: str  # type of these inputs, a key in DTYPE_BYTES
    heads: int = 0  # heads in the gated delta rule; 0 for layers that are only a convolution
    key_dim: int = 0  # rows in a head's state
    value_dim: int = 0  # columns in a head's state
    chunk: int = CHUNK  # prompt tokens that are computed at once; snapshots are at its multiples

    @property
    def bytes_per_state(self) -> int:
        """A request's states in all layers, or a snapshot of them. Inputs and positions included."""
        inputs = RING * self.channels * DTYPE_BYTES[self.dtype]
        return len(self.layers) * (inputs + self.heads * (self.key_dim * self.value_dim + 1) * 4)

    @property
    def bytes_per_slot(self) -> int:
        """The updates of a request's last tokens in all layers, which its state does not have yet."""
        return len(self.layers) * self.heads * RING * (self.key_dim + self.value_dim + 1) * 4


@dataclass(frozen=True, slots=True)
class KVCacheSpec:
    """The groups in a model's KV cache, in the block tables' order."""

    groups: tuple[KVGroupSpec, ...]
    states: StateGroupSpec | None = None  # the layers without attention
    # The layer that stores each layer's keys and values; () if each stores its own.
    sources: tuple[int, ...] = ()

    @property
    def num_layers(self) -> int:
        """All layers: in groups, with states, and with another layer's keys and values."""
        if self.sources:
            return len(self.sources)
        num_states = 0 if self.states is None else len(self.states.layers)
        return num_states + sum(len(group.layers) for group in self.groups)

    @property
    def bytes_per_token(self) -> int:
        """Bytes of one token in the cache, with a place in every group."""
        return len(self.groups) * self.bytes_per_block(1)

    @property
    def is_mixed(self) -> bool:
        """True if groups differ in the shape of their keys and values."""
        return len({(group.num_kv_heads, group.head_dim) for group in self.groups}) > 1

    @property
    def rows_per_token(self) -> tuple[int, ...]:
        """For each group, one head's keys and values that a token's share of a block holds; mixed groups only.

        The share has whole rows for every group."""
        unit = lcm(*(group.row_bytes for group in self.groups))
        largest = max(2 * len(group.layers) * group.num_kv_heads * group.row_bytes for group in self.groups)
        size = -(-largest // unit) * unit
        return tuple(size // group.row_bytes for group in self.groups)

    @property
    def has_windows(self) -> bool:
        """True if a group frees blocks of a live request."""
        return any(group.window is not None for group in self.groups)

    def most_blocks(self, num_tokens: int, block_size: int, max_chunk: int) -> int:
        """Return the most blocks that a request with `num_tokens` holds in all groups (KVGroupSpec.most_blocks)."""
        return sum(group.most_blocks(num_tokens, block_size, max_chunk) for group in self.groups)

    def most_tokens(self, num_blocks: int, block_size: int, max_chunk: int) -> int:
        """Return the tokens in the longest request that `num_blocks` blocks hold, a multiple of `block_size`.

        No request is longer than one that all blocks hold in one group."""
        sizes = range(1, max(0, num_blocks) + 1)
        return block_size * bisect_right(
            sizes, num_blocks, key=lambda size: self.most_blocks(size * block_size, block_size, max_chunk)
        )

    def bytes_per_block(self, block_size: int) -> int:
        """Bytes of one block in the pool, which any group may hold."""
        if not self.is_mixed:
            return max(group.bytes_per_block(block_size) for group in self.groups)
        first, rows = self.groups[0], self.rows_per_token
        # Each row count has its own scales: two for a key, and a value's places are not used.
        scales = 0 if first.scale_dtype is None else 2 * DTYPE_BYTES[first.scale_dtype] * sum(set(rows))
        return block_size * (rows[0] * first.row_bytes + scales)

    def total_bytes(self, num_blocks: int, block_size: int) -> int:
        """Bytes of a pool with `num_blocks` blocks."""
        return num_blocks * self.bytes_per_block(block_size)

    def place_of(self, layer: int) -> tuple[int, int]:
        """Return the number of the group that stores a layer's keys and values, and the layer's index in it."""
        layer = self.sources[layer] if self.sources else layer
        return next((g, group.layers.index(layer)) for g, group in enumerate(self.groups) if layer in group.layers)


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
